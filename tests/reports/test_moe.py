"""Mixtures of experts: routing, what is dropped, auxiliary losses, padding, precision, experts
without tokens."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import models
from jaxformer.models import ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.ops.mixture import balance_loss, mixture, route
from jaxformer.params import Spec
from jaxformer.training import optimizers, step as steps
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build

E, D, F = 4, 8, 6
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
UP, DOWN = normal(E, D, F), normal(E, F, D)
MODEL = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=D,
    num_heads=2,
    context_length=6,
    init_std=0.5,
    attention_implementation="reference",
    feedforward=Mixture(E, 2, d_ff=F, balance_loss=0.1, router_z_loss=0.1),
)


class Nothing:
    """Data that nobody reads."""

    def open(self, model):
        raise NotImplementedError


def experiment(**changes):
    return Experiment("moe", MODEL, Nothing(), batch_size=4, **changes)


def batch_of(rows):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 11, (rows, 6)), jnp.int32)
    return {"tokens": tokens, "labels": jnp.roll(tokens, -1, 1), "weights": jnp.ones((rows, 6))}


@pytest.mark.report(
    "huggingface/transformers#28505", "NVIDIA/Megatron-LM#2121", "pytorch/torchtitan#4594",
    right="padding counts in no auxiliary loss: a padded row has the losses of the row alone",
)  # fmt: skip
@pytest.mark.thorough
def test_padding_is_in_no_auxiliary_loss():
    weights = models.init(MODEL, jax.random.key(0))
    tokens = batch_of(1)["tokens"]
    apply = jax.jit(partial(models.apply, MODEL))
    alone = apply(weights, tokens[:, :4], segment_ids=jnp.ones((1, 4), int))
    for filler in (0, 7):
        padded = jnp.where((jnp.arange(6) < 4)[None], tokens, filler)
        output = apply(weights, padded, segment_ids=jnp.asarray([[1, 1, 1, 1, 0, 0]]))
        np.testing.assert_allclose(output.loss, alone.loss, rtol=1e-5)
        np.testing.assert_allclose(output.stats["fraction"], alone.stats["fraction"], rtol=1e-6)


@pytest.mark.report(
    "pytorch/torchtitan#1448",
    "databricks/megablocks#87",
    "sgl-project/sglang#35160",
    right=(
        "normalised weights sum to one for any top_k; the others are the softmax over all "
        "experts, as they are"
    ),
)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_weights_of_chosen_experts(top_k):
    logits = normal(50, E) * 8
    whole = np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum(1, keepdims=True)
    plain, summed = route(logits, top_k, normalise=False), route(logits, top_k)
    np.testing.assert_allclose(plain.weights, np.sort(whole, axis=1)[:, ::-1][:, :top_k], rtol=1e-5)
    np.testing.assert_allclose(summed.weights.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(plain.probabilities, whole, rtol=1e-5, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.report(
    "meta-pytorch/MSLK#158",
    "NVIDIA-NeMo/Automodel#935",
    right="an expert without a token has a gradient of zeros, not NaN",
)
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_experts_without_tokens_have_gradients_of_zeros(capacity):
    router = jnp.zeros((D, E)).at[0].set(jnp.asarray([5.0, 4.0, -5.0, -5.0]))
    x = jnp.abs(normal(2, 5, D)) + 0.5  # all choose the experts 0 and 1

    def loss(up, down):
        return jnp.sum(
            jnp.sin(mixture(x, router, None, up, down, jax.nn.gelu, top_k=2, capacity=capacity)[0])
        )

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(UP, DOWN):
        assert (
            np.isfinite(gradient).all()
            and np.abs(gradient[:2]).max() > 0 == np.abs(gradient[2:]).max()
        )


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/vllm#14027", "ViperEkura/AstrAI#57", "marin-community/marin#4234",
    right="activations of 16 bits are routed as float32 numbers: near ties are told apart",
)  # fmt: skip
def test_a_router_of_narrow_activations_works_in_float32():
    x = normal(1, 64, D).astype(jnp.bfloat16)
    # in 16 bits all columns are equal
    router = jnp.repeat(normal(D, 1), E, axis=1) * (1 + 1e-4 * jnp.arange(E)[None])
    exact = np.argsort(-(np.float64(x[0].astype(jnp.float32)) @ np.float64(router)), axis=1)[:, 0]
    _, statistics = mixture(x, router, None, UP, DOWN, jax.nn.relu, top_k=1, normalise=False)
    np.testing.assert_allclose(statistics.fraction, np.bincount(exact, minlength=E) / 64, atol=1e-6)
    assert set(exact) == {0, E - 1} and statistics.probability.dtype == jnp.float32


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#1483", "NVIDIA-NeMo/Automodel#3359", "modelscope/ms-swift#5823",
    right="micro-batches do not multiply the auxiliary loss: its gradient is the mean of theirs",
)  # fmt: skip
@pytest.mark.thorough
def test_accumulation_does_not_scale_the_auxiliary_loss():
    """Four equal rows: each micro-batch has the losses of the whole batch, so the gradients are
    equal, too."""
    batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, 4, axis=0), batch_of(1))
    found = []
    for accumulation in (1, 4):
        recipe = build(experiment(accumulation=accumulation))
        weights = models.init(MODEL, jax.random.key(0))
        sums, gradients = jax.jit(partial(steps.accumulate, recipe))(
            weights, batch, jax.random.key(0), 1.0
        )
        found.append(gradients["layers"]["feedforward"]["router"]["kernel"] / sums.weight)
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#3664",
    right="the loss that is reported and scored is the cross entropy alone",
)
@pytest.mark.thorough
def test_the_reported_loss_has_no_auxiliary_part():
    weights, batch = models.init(MODEL, jax.random.key(0)), batch_of(2)
    heavy = replace(MODEL, feedforward=replace(MODEL.feedforward, balance_loss=100.0))
    one, other = (build(replace(experiment(), model=model)) for model in (MODEL, heavy))
    losses = [
        float(f(weights, batch, jax.random.key(0)).loss)
        for r in (one, other)
        for f in (r.loss, r.eval_loss)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.report(
    "NVIDIA-NeMo/Automodel#1408",
    "NVIDIA-NeMo/Automodel#1412",
    right="the auxiliary loss reaches the router, in proportion to its weight",
)
@pytest.mark.thorough
def test_the_auxiliary_loss_reaches_the_router():
    weights, batch = models.init(MODEL, jax.random.key(0)), batch_of(2)

    def gradient(scale):
        model = replace(
            MODEL, feedforward=replace(MODEL.feedforward, balance_loss=scale, router_z_loss=0.0)
        )
        loss = lambda weights: (
            build(replace(experiment(), model=model)).loss(weights, batch, jax.random.key(0)).loss
        )
        return jax.grad(loss)(weights)["layers"]["feedforward"]["router"]["kernel"]

    none, once, thrice = map(jax.jit(gradient, static_argnums=0), (0.0, 1.0, 3.0))
    assert np.abs(once - none).max() > 1e-3
    np.testing.assert_allclose(thrice - none, 3 * (once - none), rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#31464",
    "paiml/aprender#2162",
    right=(
        "each layer is balanced by itself, by its softmax over all experts, not by the choices "
        "of all layers together"
    ),
)
def test_layers_that_are_uneven_in_opposite_ways_are_not_even():
    weights = models.init(MODEL, jax.random.key(0))
    output = jax.jit(partial(models.apply, MODEL))(weights, batch_of(4)["tokens"])
    layers = [
        balance_loss(*pair)
        for pair in zip(output.stats["fraction"], output.stats["probability"], strict=True)
    ]
    bare = replace(MODEL, feedforward=replace(MODEL.feedforward, router_z_loss=0.0))
    loss = jax.jit(partial(models.apply, bare))(weights, batch_of(4)["tokens"]).loss
    np.testing.assert_allclose(loss, 0.1 * np.mean(layers), rtol=1e-5)
    together = balance_loss(output.stats["fraction"].mean(0), output.stats["probability"].mean(0))
    assert np.mean(layers) > together + 1e-3


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#4843", "marin-community/marin#3902", "microsoft/dion#121",
    right="Muon makes the update of each expert orthogonal by itself",
)  # fmt: skip
def test_muon_takes_each_expert_by_itself():
    stacked = {
        "up": Spec((E, D, F), ("expert", "embed", "mlp"), jax.nn.initializers.zeros, ("embed",))
    }
    single = {"up": Spec((D, F), ("embed", "mlp"), jax.nn.initializers.zeros, ("embed",))}

    def update(spec, gradient):
        transform = optimizers.Muon()(spec)
        tree = {"up": gradient}
        return transform.update(tree, transform.init(tree), tree)[0]["up"]

    gradient = normal(E, D, F) * jnp.asarray([1.0, 100.0, 1e-2, 1.0])[:, None, None]
    together = update(stacked, gradient)
    for expert in range(E):
        np.testing.assert_allclose(
            together[expert], update(single, gradient[expert]), rtol=1e-3, atol=1e-4
        )
    assert isinstance(optimizers.Muon()(stacked), optax.GradientTransformation)


@pytest.mark.thorough
@pytest.mark.report(
    "axolotl-ai-cloud/axolotl#3781",
    right=(
        "a capacity that no expert reaches changes nothing, one that is reached drops late choices"
    ),
)
def test_a_capacity_that_is_not_reached_changes_nothing():
    x, router = normal(2, 6, D), normal(D, E)
    run = lambda capacity: mixture(
        x, router, None, UP, DOWN, jax.nn.gelu, top_k=2, capacity=capacity
    )
    (free, _), (wide, statistics) = run(None), run(float(E))
    np.testing.assert_allclose(wide, free, rtol=1e-5, atol=1e-5)
    assert statistics.dropped == 0 < run(0.5)[1].dropped


@pytest.mark.report(
    "laekov/fastmoe#34",
    "microsoft/Tutel#230",
    listed="second 23",
    right="experts with a capacity drop the same choices on any mesh",
    hit=(
        "each device counted room for its own tokens: outputs differed by 2.4, 11.5 % dropped in "
        "place of 3.1 %"
    ),
)
@pytest.mark.thorough
@pytest.mark.parametrize("axes", [dict(data=4), dict(data=1, context=2, expert=2)], ids=str)
def test_a_mesh_drops_what_one_device_drops(axes):
    from jaxformer.parallel import Mesh, block_if_simulated, make_mesh

    x, router = normal(8, 6, D), normal(D, E)
    run = jax.jit(lambda x: mixture(x, router, None, UP, DOWN, jax.nn.gelu, top_k=2, capacity=0.8))
    (one, alone), mesh = run(x), make_mesh(Mesh(**axes), jax.devices()[:4])
    assert alone.dropped > 0.05
    with jax.set_mesh(mesh):
        many, split = block_if_simulated(run(x))
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(split.dropped, alone.dropped, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "laekov/fastmoe#34",
    listed="second 36",
    right="equal logits choose the first experts; padding takes no room",
)
def test_ties_and_padding_under_a_capacity():
    x, up = jnp.abs(normal(1, 8, D)), jnp.abs(UP)  # positive: no output that is kept is 0
    padding_mask = jnp.asarray([[True] * 4 + [False] * 4])
    out, statistics = mixture(
        x,
        jnp.zeros((D, E)),
        None,
        up,
        DOWN,
        jax.nn.relu,
        top_k=1,
        normalise=False,
        capacity=1.0,
        padding_mask=padding_mask,
    )
    # all choose expert 0, which has room for ceil(8 / 4) = 2
    kept = (np.asarray(out[0]) != 0).any(1).tolist()
    assert kept == [True, True, *[False] * 6] and statistics.dropped == 0.5
    last, _ = mixture(
        x[:, ::-1],
        jnp.zeros((D, E)),
        None,
        up,
        DOWN,
        jax.nn.relu,
        top_k=1,
        normalise=False,
        capacity=1.0,
        padding_mask=padding_mask[:, ::-1],
    )
    assert (np.asarray(last[0]) != 0).any(1).tolist() == [*[False] * 4, True, True, False, False]
