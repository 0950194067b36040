"""Root mean squares by layer, as metrics of a step."""

import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import models, params
from jaxformer.data.tasks import Reverse
from jaxformer.models import EncoderDecoder, Mixture, ModelConfig
from jaxformer.models.mixers.attention import attention
from jaxformer.models.stacks import scan
from jaxformer.runs import loop
from jaxformer.training import rms
from jaxformer.training.experiment import Experiment, Sample
from jaxformer.training.recipe import build
from jaxformer.training.schedules import Constant
from jaxformer.training.step import init_state, make_train_step
from jaxformer.zoo.gated import gated

MODEL = ModelConfig(16, 3, 16, 2, context_length=16)
ALL = ("activation", "gradient", "update")


def experiment(model=MODEL, **changes) -> Experiment:
    plain = dict(
        data=Reverse(length=4), schedule=Constant(), clip_norm=1e-3, steps=3, batch_size=4, rms=ALL
    )
    return Experiment("rms", model, **plain | changes)


def batch(key=0, **more):
    tokens = jax.random.randint(jax.random.key(key), (4, 8), 0, 16)
    return {"tokens": tokens, "labels": tokens[:, ::-1], "weights": jnp.ones((4, 8))} | more


@dataclass(frozen=True)
class Scaled:
    """The default stack; then x times one parameter."""

    def spec(self, config):
        return {"scale": params.Spec((config.d_model,), ("embed",), jax.nn.initializers.ones)}

    def __call__(self, config, layers, x, context):
        x, output = scan.stack(config, layers, x, context)
        return x * layers.stack_params["scale"][None, None], output


def step(chosen: Experiment, examples):
    recipe = build(chosen)
    state = init_state(recipe)
    new, metrics = jax.jit(make_train_step(recipe))(state, examples)
    return recipe, state, new, metrics


@pytest.mark.thorough
def test_every_number_by_hand():
    """Of the gradient before clipping, of the update after it, and of the residual stream."""
    recipe, state, new, metrics = step(experiment(), batch())
    mean = lambda tree: recipe.loss(tree, batch(), jax.random.key(0)).loss / 32
    trees = {
        "gradient": jax.grad(mean)(state.params),
        "update": jax.tree.map(jnp.subtract, new.params, state.params),
    }
    for kind, tree in trees.items():
        for part in ("embedding", "final_norm"):
            leaves = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree[part])])
            # p + u - p
            np.testing.assert_allclose(
                metrics[f"rms/{kind}/{part}"], np.sqrt(np.mean(leaves**2)), rtol=2e-3
            )
        layers = np.concatenate(
            [np.reshape(leaf, (3, -1)) for leaf in jax.tree.leaves(tree["layers"])], axis=1
        )
        np.testing.assert_allclose(
            metrics[f"rms/{kind}/layers"], np.sqrt(np.mean(layers**2, axis=1)), rtol=2e-3
        )
    stream = models.apply(
        MODEL, state.params, batch()["tokens"], intermediates=(rms.RESIDUAL,)
    ).intermediates[rms.RESIDUAL]
    np.testing.assert_allclose(
        metrics["rms/activation/layers"], jnp.sqrt(jnp.mean(stream**2, axis=(1, 2, 3))), rtol=1e-5
    )


@pytest.mark.thorough
def test_what_is_asked_for_changes_nothing_else():
    _, _, plain, metrics = step(experiment(rms=()), batch())
    _, _, new, more = step(experiment(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, new)
    assert not [name for name in metrics if "rms" in name]
    assert metrics.keys() < more.keys()


@pytest.mark.thorough
def test_a_skipped_step_has_no_update():
    _, _, _, metrics = step(experiment(), batch(weights=jnp.full((4, 8), jnp.nan)))
    assert metrics["skipped"] == 1
    assert not metrics["rms/update/layers"].any()
    assert metrics["rms/update/layers"].shape == (3,)


ROUTED = {"feedforward": Mixture(2, 1, balance_loss=0.1)}


# a routing loss is not the mean of those of halves of a batch
@pytest.mark.thorough
@pytest.mark.parametrize(
    "stack, accumulation",
    [({"remat": "full"}, 1), ({"remat": "full"}, 2), ({"unroll": 3}, 2), (ROUTED, 1)],
)
def test_with_every_way_of_running_layers(stack, accumulation):
    chosen = experiment(replace(MODEL, **stack), accumulation=accumulation)
    *_, metrics = step(chosen, batch())
    expected = step(experiment(replace(chosen.model, remat="none", unroll=1)), batch())[-1]
    assert metrics["rms/activation/layers"].shape == (3,)
    for name in expected:
        if "gradient" in name or ("activation" in name and accumulation == 1):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4, err_msg=name)


@pytest.mark.thorough
def test_a_stack_of_ones_own_keeps_its_parameters():
    *_, metrics = step(experiment(replace(MODEL, stack=Scaled())), batch())
    assert metrics["rms/activation/layers"].shape == (3,)
    assert metrics["rms/gradient/stack"] > 0


@pytest.mark.thorough
def test_layers_stored_by_their_place_are_a_part_for_each_place():
    *_, metrics = step(experiment(replace(MODEL, num_layers=4, mixer=(attention, gated))), batch())
    assert "rms/gradient/layers" not in metrics
    for place in range(2):
        assert metrics[f"rms/gradient/layers_place_{place}"].shape == (2,)


@pytest.mark.thorough
def test_a_pair_and_the_losses_of_both_its_stacks():
    """The routing losses of encoder and decoder are in one mean over the layers."""
    routed = replace(MODEL, feedforward=Mixture(2, 1, normalise=False, balance_loss=1.0))
    pair = EncoderDecoder(replace(routed, heads=(), num_layers=2), routed)
    source = {"source": batch(3)["tokens"]}
    _, state, _, metrics = step(experiment(pair), batch(**source))
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        for kind in ALL:
            assert metrics[f"{stack}/rms/{kind}/layers"].shape == (layers,)
    loss = lambda **halves: (
        models.encode(replace(pair, **halves), state.params, batch()["tokens"], **source).loss
    )
    silent = Mixture(2, 1, normalise=False)
    one = loss(decoder=replace(pair.decoder, feedforward=silent))
    two = loss(encoder=replace(pair.encoder, feedforward=silent))
    np.testing.assert_allclose(loss(), (2 * one + 3 * two) / 5, rtol=1e-5)


@pytest.mark.thorough
def test_a_run_records_them_by_layer(tmp_path, capsys):
    chosen = experiment(replace(MODEL, vocab_size=20), log_every=1, sample=Sample(tokens=1))
    result = loop.train(chosen, tmp_path)
    first = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])
    for kind in ALL:
        assert {f"rms/{kind}/layers/{i}" for i in range(3)} <= first.keys()
    assert "rms/" not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_model_of_your_own_has_gradients_and_updates():
    class Own:
        def spec(self):
            return {
                "table": params.Spec((16, 16), ("vocab", "embed"), jax.nn.initializers.normal(0.1))
            }

        def apply(self, tree, tokens, **_):
            return models.Output(tree["table"][tokens], None)

    *_, metrics = step(experiment(Own()), batch())
    assert {name for name in metrics if "rms" in name} == {"rms/gradient/table", "rms/update/table"}


@pytest.mark.thorough
def test_what_is_kept_of_an_intermediate():
    tree, tokens = models.init(MODEL, jax.random.key(0)), batch()["tokens"]
    names = {"layers/*/residual": rms.root_mean_square, "layers/1/attention/out": jnp.max}
    kept = models.apply(MODEL, tree, tokens, intermediates=names).intermediates
    whole = models.apply(MODEL, tree, tokens, intermediates=tuple(names)).intermediates
    np.testing.assert_allclose(
        kept["layers/*/residual"],
        [rms.root_mean_square(x) for x in whole["layers/*/residual"]],
        rtol=1e-6,
    )
    assert kept["layers/1/attention/out"] == whole["layers/1/attention/out"].max()
    assert optax.tree.norm(kept) > 0
