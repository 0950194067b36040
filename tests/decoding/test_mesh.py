"""Decoding on simulated meshes: what one step exchanges, and the tokens of one device."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models, sharding
from jaxformer.errors import ConfigError
from jaxformer.models import presets
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.planning import hlo
from jaxformer.tools.planning.decode import abstract_arguments

CONFIG = replace(
    presets.llama2_70b,
    num_layers=2,
    d_model=64,
    num_heads=8,
    num_kv_heads=4,
    d_ff=128,
    vocab_size=128,
    context_length=512,
)
MESHES = {
    "data": Mesh(data=8), "tensor": Mesh(data=2, tensor=4), "fsdp": Mesh(data=1, fsdp=8),
    "all": Mesh(data=2, fsdp=2, tensor=2),
}  # fmt: skip
PROMPTS = [
    np.random.default_rng(n).integers(0, 128, n).tolist() for n in (5, 9, 3, 17, 8, 2, 11, 6, 4)
]


def exchanges(mesh):
    """{(kind, axes): (count, bytes)} of one step of 8 rows."""
    arguments = abstract_arguments(CONFIG, mesh, jnp.dtype("float32"), 8, 1, 256, True)
    step = jax.jit(
        lambda weights, cache, tokens, going: decoding.decode_step(
            CONFIG, weights, tokens, cache, lengths=going
        )
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = step.lower(*arguments).compile().as_text() or ""
    return {(one.kind, one.axes): (one.count, one.bytes) for one in hlo.collectives(text, mesh)}


@pytest.mark.thorough
def test_rows_over_data_exchange_only_how_long_the_longest_is():
    assert exchanges(make_mesh(MESHES["data"])) == {("all-reduce", ("data",)): (1, 8)}


@pytest.mark.thorough
def test_heads_over_tensor_are_summed_twice_a_layer():
    """After attention, after the feed-forward, and the embedding of a table split over `tensor`:
    rows of D numbers each."""
    found = exchanges(make_mesh(MESHES["tensor"]))
    count, size = found.pop(("all-reduce", ("tensor",)))
    assert count == 2 * CONFIG.num_layers + 1 and size == count * 4 * CONFIG.d_model * 4
    assert found == {("all-reduce", ("data",)): (1, 8)}


@pytest.mark.thorough
def test_under_fsdp_each_weight_is_gathered_once_a_step():
    """But for the embedding: its rows are exchanged."""
    found = exchanges(make_mesh(MESHES["fsdp"]))
    assert found.pop(("all-to-all", ("fsdp",)))[1] <= 2 * 8 * 8 * CONFIG.d_model * 4
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    count, size = found["all-gather", ("fsdp",)]
    weights = 4 * sum(
        leaf.size
        for leaf in jax.tree.leaves(jax.eval_shape(partial(models.init, CONFIG), jax.random.key(0)))
    )
    assert count <= 10 * CONFIG.num_layers + 3 and size <= weights + 2**16


@cache
def drawn():
    return jax.jit(partial(models.init, CONFIG))(jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("tensor", "all") else pytest.mark.slow) for n in MESHES],
)
def test_a_mesh_gives_the_tokens_of_one_device(name):
    """More prompts than rows; float32 sums in another order turn no greedy choice of these."""
    params = drawn()
    alone = decoding.generate(CONFIG, params, PROMPTS, 12, rows=8)
    mesh = make_mesh(MESHES[name])
    split = jax.device_put(params, sharding.shardings(models.spec(CONFIG), mesh))
    with jax.set_mesh(mesh):
        assert decoding.generate(CONFIG, split, PROMPTS, 12, rows=8) == alone


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("data", "fsdp") else pytest.mark.slow) for n in MESHES],
)
def test_a_mesh_gives_the_tokens_of_one_device_in_8_bits(name):
    """Weights in 8 bits are not gathered: `fsdp` sums their partial products."""
    params = drawn()
    alone = decoding.generate(CONFIG, decoding.quantize(CONFIG, params), PROMPTS[:3], 6)
    mesh = make_mesh(MESHES[name])
    split = jax.device_put(params, sharding.shardings(models.spec(CONFIG), mesh))
    with jax.set_mesh(mesh):
        assert decoding.generate(CONFIG, decoding.quantize(CONFIG, split), PROMPTS[:3], 6) == alone


def test_explicit_axes_are_refused():
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2, explicit=True))
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match="Explicit axes"):
        decoding.generate(CONFIG, {}, PROMPTS[:3], 6)
