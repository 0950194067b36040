"""The maximal update parameterisation: what starts where, what learns how fast, and that width then
stops to matter."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import families, models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, LanguageModel, Mixture, ModelConfig, MuP
from jaxformer.models.adaptation import Lora
from jaxformer.training import optimizers
from tests import witnesses
from tests.witnesses import mup

BASE = ModelConfig(
    vocab_size=30,
    num_layers=2,
    d_model=32,
    num_heads=2,
    head_width=16,
    context_length=16,
    tie_embeddings=False,
    use_bias=False,
    init_std=MuP(32),
)


def wide(config: ModelConfig, r: int) -> ModelConfig:
    return replace(config, d_model=32 * r, num_heads=2 * r)


@pytest.mark.thorough
def test_the_base_is_the_standard_parameterisation():
    assert (
        params.paths(models.spec(replace(BASE, init_std=0.02))).keys()
        == params.paths(models.spec(BASE)).keys()
    )
    key = jax.random.key(0)
    standard, ours = models.init(replace(BASE, init_std=0.02), key), models.init(BASE, key)
    jax.tree.map(np.testing.assert_array_equal, standard, ours)
    assert all(leaf.rate == 1 for leaf in jax.tree.leaves(models.spec(BASE)))


@pytest.mark.thorough
def test_what_starts_where_and_learns_how_fast():
    """Table 3 of Yang et al. 2022: input, hidden and output matrices; vectors are like inputs."""
    r, key = 4, jax.random.key(0)
    spec = params.paths(models.spec(wide(BASE, r)))
    standard = params.paths(models.init(replace(wide(BASE, r), init_std=0.02), key))
    ours = params.paths(models.init(wide(BASE, r), key))
    for path, leaf in spec.items():
        if path.startswith("embedding/") or path.endswith("scale"):
            start, rate = 1, 1
        elif path == "heads/language_model/kernel":
            start, rate = 1 / r, 1 / r
        else:
            start, rate = r**-0.5, 1 / r
        assert leaf.rate == rate, path
        # one rounding of float32
        np.testing.assert_allclose(ours[path], start * standard[path], rtol=1e-6)


@pytest.mark.thorough
def test_routers_classes_and_pairs():
    """What ends in experts or classes is an output; both halves of a pair follow their own
    config."""
    moe = replace(wide(BASE, 4), feedforward=Mixture(experts=4, top_k=2, activation="gelu_tanh"))
    start = lambda config, path: np.std(params.paths(models.init(config, jax.random.key(0)))[path])
    path = "layers/feedforward/router/kernel"
    assert params.paths(models.spec(moe))[path].rate == 1 / 4
    np.testing.assert_allclose(
        start(moe, path) / start(replace(moe, init_std=0.02), path), 1 / 4, rtol=1e-6
    )
    pair = EncoderDecoder(replace(wide(BASE, 2), heads=()), wide(BASE, 2), share_embeddings=True)
    rates = {path: leaf.rate for path, leaf in params.paths(models.spec(pair)).items()}
    assert (
        rates["encoder/layers/attention/query/kernel"]
        == rates["decoder/layers/cross_attention/key/kernel"]
        == 1 / 2
    )


@pytest.mark.thorough
def test_a_tied_embedding_starts_as_an_embedding_and_reads_with_a_factor():
    tied = replace(wide(BASE, 4), tie_embeddings=True)
    by_hand = replace(tied, heads=(LanguageModel(scale=1 / 4),), init_std=0.02)
    tree, tokens = models.init(tied, jax.random.key(0)), jnp.arange(8)[None]
    np.testing.assert_array_equal(
        models.apply(tied, tree, tokens).logits, models.apply(by_hand, tree, tokens).logits
    )
    assert params.paths(models.spec(tied))["embedding/tokens"].rate == 1


@pytest.mark.thorough
def test_scores_of_wider_heads():
    """q k / H where the head width grows: equal to q k / sqrt(H) at the base."""
    config = replace(
        BASE, d_model=128, num_heads=2, head_width=64, init_std=MuP(32, base_head_width=16)
    )
    tree, tokens = models.init(config, jax.random.key(0)), jnp.arange(8)[None]
    by_hand = replace(config, init_std=0.02, attention_scale=4 / 64)
    np.testing.assert_array_equal(
        models.apply(config, tree, tokens).logits, models.apply(by_hand, tree, tokens).logits
    )
    assert replace(config, head_width=16, num_heads=8).score_scale == 1 / np.sqrt(16)
    assert BASE.score_scale is None


def change_after(config: ModelConfig, steps: int = 5) -> float:
    """Root mean square of how much Adam changes the logits in some steps."""
    optimizer, tree = (
        optimizers.build(optimizers.Adam(), models.spec(config)),
        models.init(config, jax.random.key(0)),
    )
    tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, 30)
    logits = lambda tree: models.apply(config, tree, tokens[:, :-1]).logits
    loss = lambda tree: optax.softmax_cross_entropy_with_integer_labels(
        logits(tree), tokens[:, 1:]
    ).mean()

    @jax.jit
    def step(tree, state):
        updates, state = optimizer.update(jax.grad(loss)(tree), state, tree)
        return optax.apply_updates(tree, jax.tree.map(lambda u: 0.01 * u, updates)), state

    state, before = optimizer.init(tree), logits(tree)
    for _ in range(steps):
        tree, state = step(tree, state)
    return float(jnp.sqrt(jnp.mean(jnp.square(logits(tree) - before))))


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_changes_logits_as_much_at_every_width(tied):
    """The coordinate check of Yang et al. 2022, appendix D.1: some steps of one rate, at 8 times
    the width."""
    config = replace(BASE, tie_embeddings=tied)
    growth = lambda base: change_after(wide(base, 8)) / change_after(base)
    assert 0.5 < growth(config) < 2
    assert growth(replace(config, init_std=0.02)) > 3


@pytest.mark.thorough
def test_training_is_that_of_mup():
    """Their package keeps the readout r times larger and divides its output by r: the same
    function, the same steps."""
    kept, r = witnesses.load("mup"), mup.WIDTH // mup.BASE
    normal = jax.nn.initializers.normal(1.0)
    declared = {
        "table": params.Spec((mup.VOCABULARY, mup.WIDTH), ("vocab", "embed"), normal),
        "hidden": params.linear((mup.WIDTH, mup.WIDTH), ("embed", "mlp"), ("embed",), normal),
        "readout": params.Spec((mup.VOCABULARY, mup.WIDTH), ("vocab", "embed"), normal, ("embed",)),
    }
    spec = MuP(mup.BASE).spec(declared, mup.WIDTH)
    start = {
        name: jnp.asarray(value, jnp.float32)
        for name, value in kept.items()
        if name.startswith("start/")
    }
    tree = {
        "table": start["start/table.weight"],
        "hidden": {"kernel": start["start/hidden.weight"].T, "bias": start["start/hidden.bias"]},
        "readout": start["start/readout.weight"] / r,
    }
    hidden = lambda tree: jnp.tanh(
        tree["table"][kept["tokens"]] @ tree["hidden"]["kernel"] + tree["hidden"]["bias"][None]
    )
    logits = lambda tree: hidden(tree) @ tree["readout"].T
    loss = lambda tree: optax.softmax_cross_entropy_with_integer_labels(
        logits(tree), jnp.asarray(kept["labels"])
    ).mean()
    optimizer = optimizers.build(optimizers.Adam(b2=0.999, eps=1e-12), spec)
    state = optimizer.init(tree)
    for expected in kept["logits"]:
        # float32 against float64, Adam divides
        np.testing.assert_allclose(logits(tree), expected, rtol=1e-3, atol=1e-4)
        updates, state = optimizer.update(jax.grad(loss)(tree), state, tree)
        tree = optax.apply_updates(tree, jax.tree.map(lambda u: mup.RATE * u, updates))
    assert np.abs(kept["logits"][-1] - kept["logits"][0]).max() > 0.15  # far beyond the tolerance


@pytest.mark.thorough
def test_the_rate_multiplies_the_update_and_not_the_decay():
    spec = {
        "a": params.Spec((4, 4), ("embed", "mlp"), jax.nn.initializers.ones, ("embed",), rate=0.25)
    }
    spec["b"] = params.Spec((4,), ("embed",), jax.nn.initializers.ones)
    tree, gradient = (
        {"a": jnp.full((4, 4), 2.0), "b": jnp.ones(4)},
        {"a": jnp.ones((4, 4)), "b": jnp.ones(4)},
    )
    for optimizer in (optimizers.AdamW(weight_decay=0.1), optimizers.Lion(weight_decay=0.1)):
        made = optimizers.build(optimizer, spec)
        updates, _ = made.update(gradient, made.init(tree), tree)
        np.testing.assert_allclose(updates["a"], -(0.25 + 0.1 * 2), rtol=1e-6)
        frozen = optimizers.build(optimizer, spec, frozen="b")
        updates, _ = frozen.update(gradient, frozen.init(tree), tree)
        np.testing.assert_allclose(updates["a"], -(0.25 + 0.1 * 2), rtol=1e-6)
        assert not updates["b"].any()


@pytest.mark.thorough
def test_with_lora():
    adapted = Lora(rank=2)(models.spec(wide(BASE, 2)))
    made, tree = (
        optimizers.build(optimizers.AdamW(), adapted.spec, adapted.frozen),
        params.init(adapted.spec, jax.random.key(0)),
    )
    made.update(tree, made.init(tree), tree)


@pytest.mark.parametrize("optimizer", [optimizers.Muon(), optimizers.Adafactor()])
def test_optimizers_with_another_rule_are_refused(optimizer):
    with pytest.raises(ConfigError, match=r"MuP.*AdamW"):
        optimizers.build(optimizer, models.spec(wide(BASE, 2)))


def test_wrong_widths():
    for wrong in (
        {"base_width": 0},
        {"base_width": 8, "init_std": 0.0},
        {"base_width": 8, "base_head_width": -1},
    ):
        with pytest.raises(ConfigError, match=r"model.init_std.*(must be positive|of at least 1)"):
            MuP(**wrong)


@pytest.mark.thorough
def test_a_file_of_another_library_cannot_say_a_factor_of_tied_logits(tmp_path):
    config = replace(
        wide(zoo.PRESETS["gpt2_small"], 1),
        num_layers=1,
        vocab_size=64,
        context_length=16,
        num_heads=2,
    )
    config = replace(config, d_model=32, head_width=None, init_std=MuP(16))
    with pytest.raises(ConfigError, match="no family"):
        families.save(tmp_path, families.Checkpoint(config, models.init(config, jax.random.key(0))))
