"""One training step, however it is spread out: the state after it is that of one device."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import params, sharding
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh, pmap
from jaxformer.training import Adafactor, Experiment, Muon
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, make_train_step, state_shardings

TINY = Experiment(
    name="tiny",
    model=ModelConfig(vocab_size=24, num_layers=2, d_model=16, num_heads=2, context_length=16),
    data=Reverse(),
    batch_size=16,
)
TOKENS = jax.random.randint(jax.random.key(1), (16, 16), 0, 24)
# uneven over examples, so that means of means would show
WEIGHTS = (TOKENS % 5 > 0).astype(jnp.float32)
BATCH = {"tokens": TOKENS, "labels": jnp.roll(TOKENS, -1, 1), "weights": WEIGHTS}


@lru_cache
def on_one_device():
    state = jax.jit(partial(init_state, build(TINY)))()
    return jax.device_get(state), jax.device_get(
        jax.jit(make_train_step(build(TINY)))(state, BATCH)
    )


@lru_cache
def on_a_mesh(experiment):
    mesh = make_mesh(experiment.mesh)
    recipe = build(experiment)
    places = state_shardings(recipe, mesh)
    with jax.set_mesh(mesh):
        state = block_if_simulated(jax.jit(partial(init_state, recipe), out_shardings=places)())
        step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(places, None))
        return block_if_simulated(
            step(state, jax.device_put(BATCH, sharding.batch_sharding(mesh, BATCH)))
        )


def assert_same(found):
    state, metrics = on_one_device()[1]
    # float32 sums in another order; Adam divides the gradient by its own size, which for the
    # smallest ones is mostly noise
    np.testing.assert_allclose(found[1]["loss"], metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(found[1]["accuracy"], metrics["accuracy"], rtol=1e-6)
    np.testing.assert_allclose(found[1]["grad_norm"], metrics["grad_norm"], rtol=1e-5)
    for path, leaf in params.paths(state.params).items():
        np.testing.assert_allclose(
            params.paths(found[0].params)[path], leaf, atol=1e-5, err_msg=path
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh, accumulation",
    [
        pytest.param(Mesh(fsdp=2, zero1=True), 2, id="zero1, accumulated"),
        pytest.param(Mesh(fsdp=2, tensor=2, explicit=True), 2, id="explicit, accumulated"),
        pytest.param(Mesh(stage=2, fsdp=2), 2, id="stages, accumulated", marks=pytest.mark.slow),
        pytest.param(
            Mesh(context=2, tensor=2), 4, id="context, accumulated", marks=pytest.mark.slow
        ),
        pytest.param(
            Mesh(stage=2, repeats=1, microbatches=4),
            1,
            id="four micro-batches",
            marks=pytest.mark.slow,
        ),
        pytest.param(Mesh(fsdp=4, offload=True), 1, id="offload"),
        pytest.param(
            Mesh(zero1=True, offload=True, explicit=True),
            1,
            id="everything",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mesh_steps_as_one_device_does(mesh, accumulation):
    assert_same(on_a_mesh(replace(TINY, mesh=mesh, accumulation=accumulation)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [Mesh(fsdp=4), Mesh(tensor=2, explicit=True), Mesh(stage=2), Mesh(fsdp=2, zero1=True)],
    ids=str,
)
def test_products_in_eight_bits_step_alike_on_any_mesh(mesh):
    """A scale is that of the whole tensor, so a mesh changes only how a value near a half rounds.

    Stages are the exception: each scales its own microbatches.
    """
    experiment = replace(TINY, precision="float8")
    plain = jax.jit(make_train_step(build(experiment)))(on_one_device()[0], BATCH)
    found = on_a_mesh(replace(experiment, mesh=mesh))
    expected = jax.device_get(plain[1])
    np.testing.assert_allclose(found[1]["loss"], expected["loss"], rtol=2e-3)
    np.testing.assert_allclose(found[1]["grad_norm"], expected["grad_norm"], rtol=0.05)


@pytest.mark.thorough
def test_pmap_steps_as_one_device_does():
    devices = jax.devices()
    step = pmap.step(
        make_train_step(build(replace(TINY, mesh=Mesh(backend="pmap"))), pmap.AXIS), devices
    )
    state, metrics = block_if_simulated(
        step(pmap.replicate(on_one_device()[0], devices), pmap.shard(BATCH, devices))
    )
    assert_same((pmap.unreplicate(state), metrics))
    for leaf in jax.tree.leaves(state.params):  # the copies stay equal
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))


def test_zero1_splits_what_the_optimizer_keeps_and_nothing_else():
    mesh = make_mesh(Mesh(fsdp=2, zero1=True))
    places = state_shardings(build(replace(TINY, mesh=Mesh(fsdp=2, zero1=True))), mesh)
    assert places.params["layers"]["attention"]["query"]["kernel"].spec == P(
        None, "fsdp", None, None
    )
    (adam, *_) = places.opt_state
    assert adam.mu["layers"]["attention"]["query"]["kernel"].spec == P(
        None, ("fsdp", "data"), None, None
    )
    assert adam.count.spec == P()


@pytest.mark.thorough
def test_offload_leaves_what_the_optimizer_keeps_in_host_memory():
    state, _ = on_a_mesh(replace(TINY, mesh=Mesh(fsdp=4, offload=True)))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state[0].mu)}
    assert kinds == {"pinned_host"}
    assert "pinned_host" not in {
        leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Adafactor, Muon])
def test_offload_moves_only_what_is_split(kind):
    """Adafactor counts once a layer, and its sums are smaller than parameters; Muon keeps three
    coefficients: all stay."""
    state, metrics = on_a_mesh(replace(TINY, optimizer=kind(), mesh=Mesh(fsdp=4, offload=True)))
    np.testing.assert_allclose(metrics["loss"], on_one_device()[1][1]["loss"], rtol=1e-6)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}
    assert kinds == {"pinned_host", "device"}


@pytest.mark.parametrize(
    "other", [dict(fsdp=2), dict(zero1=True), dict(explicit=True), dict(stage=2)]
)
def test_pmap_copies_and_can_no_more(other):
    with pytest.raises(ConfigError, match=f"backend=pmap copies .* no mesh.{next(iter(other))}"):
        Mesh(backend="pmap", **other)


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_summed_in_16_bits_are_those_of_rounded_sums(accumulation):
    """The forward pass is the same to the bit; the gradient is off by the rounding of eight parts
    and of their sum."""
    made = replace(
        TINY,
        mesh=Mesh(data=1, fsdp=8),
        precision="bfloat16",
        accumulation=accumulation,
        clip_norm=None,
    )
    (_, wide), (state, narrow) = (
        on_a_mesh(replace(made, gradient_sums=dtype)) for dtype in ("float32", "bfloat16")
    )
    assert wide["loss"] == narrow["loss"] and wide["accuracy"] == narrow["accuracy"]
    assert wide["grad_norm"] != narrow["grad_norm"]
    np.testing.assert_allclose(narrow["grad_norm"], wide["grad_norm"], rtol=2**-8)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_gradients_are_summed_in_16_bits_with_16_bit_activations_alone():
    with pytest.raises(ConfigError, match="gradient_sums=bfloat16: needs --precision=bfloat16"):
        replace(TINY, gradient_sums="bfloat16")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(data=1, tensor=2, expert=2, stage=2, repeats=2, microbatches=4),
        pytest.param(Mesh(data=1, expert=2, fsdp=2, stage=2), marks=pytest.mark.slow),
        pytest.param(Mesh(data=1, expert=2, context=2, stage=2), marks=pytest.mark.slow),
        pytest.param(Mesh(data=1, tensor=2, expert=2, fsdp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_on_many_axes_in_16_bits(mesh):
    """XLA:CPU aborts on sums of 16 bits over some axes of a mesh, so these are summed in 32.

    Losses differ by rounding.
    """
    model = replace(TINY.model, num_layers=4, feedforward=Mixture(4))
    made = replace(TINY, precision="bfloat16", model=model)
    alone = jax.jit(make_train_step(build(made)))(
        jax.jit(partial(init_state, build(made)))(), BATCH
    )[1]
    found = on_a_mesh(replace(made, mesh=mesh))[1]
    np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-4)
    np.testing.assert_allclose(found["grad_norm"], alone["grad_norm"], rtol=2**-8)
