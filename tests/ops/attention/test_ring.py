"""Attention of a sequence that is split over devices equals one device's: values, gradients, and
what is sent."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxformer import masks, ops
from jaxformer.masks import Mask
from jaxformer.ops.attention import attention, ring
from jaxformer.ops.attention.blocks import Grid
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.planning import hlo

B, T, N, K, H, HV = 2, 32, 4, 2, 6, 4
# of the largest entry; unit roundoff is 6e-8, and sums are of up to 32 terms, twice through a
# product
FLOAT32 = 1e-5
LAYOUT = P(("data", "fsdp", "expert"), "context", "tensor")
TWO, FOUR = Mesh(data=2, context=2, tensor=2), Mesh(data=2, context=4)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


ARRAYS = normal(B, T, N, H, seed=1), normal(B, T, K, H, seed=2), normal(B, T, K, HV, seed=3)
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (B, T)), axis=1))
CAUSAL = masks.causal()
MASKS = {
    "full": masks.full(),
    "causal": CAUSAL,
    "window": CAUSAL & masks.window(7),
    "longformer": masks.longformer(6, (0, 17)),
    "segments": CAUSAL & masks.segments(IDS),
    "lengths": masks.lengths(kv=jnp.array([32, 3])),
    "prefix": CAUSAL | masks.prefix(jnp.array([9, 0])),
    "by_head": masks.by_head(CAUSAL, masks.full(), masks.window(3, 3), masks.strided(5)),
    "nothing": CAUSAL & ~CAUSAL,
    "offset": CAUSAL.at(jnp.asarray(0)),
}
OPTIONS = {
    "softcap": dict(softcap=2.0),
    "dropout": dict(dropout_rate=0.4, dropout_key=jax.random.key(3)),
    "alibi": dict(bias=ops.alibi(N)),
}
LEARNED = {  # (what is learned, options from it and the query)
    "t5": (normal(8, N), lambda table, q: dict(bias=ops.t5(table, True, 16))),
    "array": (normal(1, N, T, T), lambda table, q: dict(bias=table)),
    "sinks": (normal(N), lambda sinks, q: dict(sinks=sinks, softcap=3.0)),
}


def outcome(mask, implementation, name=None, arrays=ARRAYS, mesh=None):
    """Output and the gradients of query, key, value and what is learned; and the compiled
    program."""
    learned, of = LEARNED.get(name, (None, lambda *_: OPTIONS.get(name, {})))

    def run(arrays, learned, g):
        call = lambda q, k, v, x: attention(
            q, k, v, mask=mask, implementation=implementation, **of(x, q)
        )
        out, pullback = jax.vjp(call, *arrays, learned)
        return out, pullback(g)

    g = normal(*arrays[0].shape[:3], arrays[2].shape[3], seed=4, dtype=arrays[0].dtype)
    if mesh is None:
        return jax.tree.map(np.asarray, jax.jit(run)(arrays, learned, g)), None
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, LAYOUT)
        arrays, g = jax.device_put((arrays, g), place)
        compiled = (
            jax.jit(run, out_shardings=(place, (place, place, place, None)))
            .lower(arrays, learned, g)
            .compile()
        )
        return jax.tree.map(np.asarray, compiled(arrays, learned, g)), compiled


def assert_equal(many, one, tolerance=FLOAT32):
    for ours, theirs in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=tolerance * max(1e-3, np.abs(theirs).max())
        )


def permutes(compiled, mesh):
    return sum(
        x.count for x in hlo.collectives(compiled.as_text(), mesh) if x.kind == "collective-permute"
    )


QUICK = ("full", "causal", "longformer")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MASKS],
)
def test_every_mask(name):
    assert_equal(
        outcome(MASKS[name], None, mesh=make_mesh(FOUR))[0], outcome(MASKS[name], "reference")[0]
    )


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", *map(slow, ("sinks", "array", *OPTIONS))])
def test_every_feature(name):
    mask = MASKS["segments"]
    assert_equal(
        outcome(mask, "ring", name, mesh=make_mesh(FOUR))[0], outcome(mask, "reference", name)[0]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["ring", slow("blockwise"), slow("reference")])
@pytest.mark.parametrize(
    "mesh",
    [slow(Mesh(context=2)), Mesh(data=2, context=2, tensor=2), slow(Mesh(context=8))],
    ids=str,
)
def test_every_mesh(mesh, implementation):
    mesh = make_mesh(mesh)
    # four examples, for up to four devices
    arrays = tuple(jnp.concatenate([x] * 2) for x in ARRAYS)
    many, compiled = outcome(CAUSAL, implementation, "dropout", arrays, mesh)
    assert_equal(many, outcome(CAUSAL, "reference", "dropout", arrays)[0])
    gathers = {x.axes for x in hlo.collectives(compiled.as_text(), mesh) if x.kind == "all-gather"}
    # batch and heads stay split
    assert gathers <= ({("context",)} if implementation == "reference" else set())


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("lengths", [(12, 32), (32, 12), (12, 12)])
def test_queries_and_keys_of_other_lengths(lengths, mask):
    """T and S differ, or the chunks are odd, so that they cannot be halved."""
    arrays = tuple(
        x[:, :n] for x, n in zip(ARRAYS, (lengths[0], lengths[1], lengths[1]), strict=True)
    )
    many, _ = outcome(MASKS[mask], "ring", arrays=arrays, mesh=make_mesh(FOUR))
    assert_equal(many, outcome(MASKS[mask], "reference", arrays=arrays)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("length", "mesh", "whole"), [(4, TWO, (0, 1)), (16, Mesh(context=8), (0, 1)), (4, TWO, (2,))]
)
def test_a_bias_array_in_blocks_of_one(length, mesh, whole):
    """Chunks of one position make blocks of one, which are not to be taken for an axis that is
    broadcast."""
    bias = normal(
        *(1 if axis in whole else n for axis, n in enumerate((B, N, length, length))), seed=6
    )
    case = bias, lambda table, q: dict(bias=table)
    arrays = tuple(x[:, :length] for x in ARRAYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEARNED, "short", case)
        many, _ = outcome(CAUSAL, "ring", "short", arrays, make_mesh(mesh))
        assert_equal(many, outcome(CAUSAL, "reference", "short", arrays)[0])


@pytest.mark.thorough
def test_infinite_sinks():
    """They take nothing or all, also of queries that see no key (the mask leaves row 1 none)."""
    mask, sinks = masks.lengths(kv=jnp.array([20, 0])), jnp.array([-np.inf, np.inf, 0.3, -np.inf])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEARNED, "infinite", (sinks, lambda sinks, q: dict(sinks=sinks)))
        many, one = (
            outcome(mask, "ring", "infinite", mesh=make_mesh(FOUR))[0],
            outcome(mask, "reference", "infinite")[0],
        )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(one))
    assert_equal(many, one)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_the_truth_as_one_device():
    arrays = tuple(x.astype(jnp.bfloat16) for x in ARRAYS)
    truth = outcome(CAUSAL, "reference", arrays=tuple(x.astype(jnp.float32) for x in arrays))[0]
    one, many = (
        outcome(CAUSAL, "blockwise", arrays=arrays, mesh=mesh)[0]
        for mesh in (None, make_mesh(FOUR))
    )
    ring_ = outcome(CAUSAL, "ring", arrays=arrays, mesh=make_mesh(FOUR))[0]
    error = lambda x: max(
        np.abs(np.float32(a) - b).max()
        for a, b in zip(*map(jax.tree.leaves, (x, truth)), strict=True)
    )
    # the same roundings of the same operands, in another order of sums
    assert error(ring_) <= 1.5 * error(one) and error(many) <= 1.5 * error(one)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["ring", slow("blockwise")])
def test_inside_a_scan_that_recomputes(implementation):
    """As a model has it: layers scanned, each under `jax.checkpoint`, on a mesh that splits batch,
    length and heads."""

    def loss(implementation, q, k, v, table):
        bias = ops.t5(table, False, 16)

        def layer(x, _):
            return x + attention(
                x, k, x[:, :, :K], mask=CAUSAL, bias=bias, implementation=implementation
            ), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0] ** 2)

    arrays = *ARRAYS, normal(8, N)
    one = jax.jit(jax.value_and_grad(partial(loss, "reference"), (0, 1, 3)))(*arrays)
    mesh = make_mesh(Mesh(data=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, LAYOUT)) for x in arrays[:3]]
        many = jax.jit(jax.value_and_grad(partial(loss, implementation), (0, 1, 3)))(
            *split, arrays[3]
        )
        many = jax.block_until_ready(many)
    assert_equal(many, one)


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_inside_a_shard_map_over_stages(check):
    """A pipeline's stage: manual over `stage`, where each half of the devices has other weights."""
    call = lambda q, k, v: attention(q, k, v, mask=CAUSAL, implementation="ring")

    def loss(q, k, v):
        stage = P("stage")
        run = jax.shard_map(
            lambda *a: call(*(x[0] for x in a))[None],
            in_specs=stage,
            out_specs=stage,
            axis_names={"stage"},
            check_vma=check,
        )
        return jnp.sum(run(q, k, v) ** 2)

    arrays = tuple(jnp.stack([x, 2 * x]) for x in ARRAYS)
    one = jax.jit(
        jax.grad(lambda *a: jnp.sum(jax.vmap(partial(attention, mask=CAUSAL))(*a) ** 2), (0, 1, 2))
    )(*arrays)
    with jax.set_mesh(make_mesh(Mesh(data=2, context=2, stage=2))):
        many = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays))
    assert_equal(many, one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, turns, zigzag",
    [("full", 3, 0), ("causal", 3, 6), ("window", 1, 0), ("longformer", 3, 0)],
)
def test_permutes_of_a_forward_pass(name, turns, zigzag):
    """S - 1 of keys and values together; as many as the window needs; for zigzag two halves of q,
    of k and v, of the output.

    The mesh has batch and heads split too: the count is that of every device.
    """
    mesh = make_mesh(FOUR)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, LAYOUT)) for x in ARRAYS]
        compiled = (
            jax.jit(partial(attention, mask=MASKS[name], implementation="ring"))
            .lower(*arrays)
            .compile()
        )
    assert permutes(compiled, mesh) == turns + zigzag
    assert {x.kind for x in hlo.collectives(compiled.as_text(), mesh)} == {"collective-permute"}


@pytest.mark.thorough
def test_permutes_of_a_backward_pass():
    """Keys and values make S - 1 again; their gradients S - 1 beside them, and one more to where
    they belong."""
    mesh = make_mesh(FOUR)
    assert permutes(outcome(MASKS["full"], "ring", mesh=mesh)[1], mesh) == 3 + (3 + 4)


def plan(mask: Mask, devices: int, T: int = 64):
    return ring.make_plan(mask, Grid(T, T, 4, 4, 4), devices, 2 * devices)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_zigzag_gives_every_device_the_same_work(devices):
    """Of the causal pairs: as blocks in all, and in each turn of the ring, for which the devices
    wait for one another."""
    made = plan(CAUSAL, devices)
    work = np.zeros((devices, devices), int)
    for starts, _ in made.visits.values():
        counts = np.diff(starts).reshape(-1, devices)
        work += np.stack([counts[blocks].sum(0) for blocks in made.query_blocks])
    turns = np.array([[work[d, (d - t) % devices] for t in range(devices)] for d in range(devices)])
    assert made.zigzag and (turns == turns[0]).all() and turns.sum() == 16 * 17 // 2
    assert (
        sorted(made.query_blocks.ravel()) == list(range(16))
        and not plan(masks.full(), devices).zigzag
    )


@pytest.mark.thorough
def test_pairs_of_devices_that_see_nothing_of_each_other_are_not_computed():
    """A local mask over 8 devices needs its neighbours: begins one place on, makes 2 turns more,
    and most pairs are idle."""
    made = plan(masks.window(4, 4), 8)
    assert (made.first_round, made.round_count, made.zigzag) == (
        7,
        3,
        False,
    ) and made.busy.sum() == 3 * 8 - 2
    # keys of devices 1 and 2
    poisoned = tuple(x.at[:, 4:12].set(jnp.nan) if x.shape[2] == K else x for x in ARRAYS)
    mask = CAUSAL & masks.window(2)
    with jax.set_mesh(make_mesh(Mesh(context=8))):
        f = jax.jit(partial(attention, mask=mask, implementation="ring"))
        clean, out = (
            np.asarray(jax.block_until_ready(f(*arrays))) for arrays in (ARRAYS, poisoned)
        )
        assert "conditional" in f.lower(*ARRAYS).compile().as_text()
    # nobody there has so much as multiplied by them
    np.testing.assert_array_equal(out[:, 16:], clean[:, 16:])
    np.testing.assert_array_equal(out[:, :4], clean[:, :4])


@pytest.mark.thorough
def test_the_lengths_that_it_takes():
    short = tuple(x[:, :10] for x in ARRAYS)
    with jax.set_mesh(make_mesh(FOUR)):
        with pytest.raises(
            NotImplementedError,
            match=r"ring: no 10 queries and 10 keys on 4 devices \(mesh.context",
        ):
            attention(*short, implementation="ring")
        with pytest.raises(NotImplementedError, match="bias that is a function"):
            attention(
                *ARRAYS, bias=lambda i, j: jnp.zeros((N, len(i), len(j))), implementation="ring"
            )
        with pytest.raises(NotImplementedError, match="or has rows, as `shaw`"):
            attention(*ARRAYS, bias=ops.shaw(ARRAYS[0], normal(5, H)), implementation="ring")
        # what is not split is one device's business: decoding, a length that is no multiple
        whole = jax.block_until_ready(jax.jit(attention)(*short))
    np.testing.assert_allclose(
        whole, attention(*short, implementation="reference"), rtol=1e-5, atol=1e-5
    )
    alone = attention(*short, implementation="ring", mask=CAUSAL)  # a ring of one
    np.testing.assert_array_equal(alone, attention(*short, implementation="blockwise", mask=CAUSAL))


@pytest.mark.thorough
def test_memory_does_not_hold_the_keys_of_all_devices():
    """Forward and backward of 8 devices: temporaries are a few times a device's share, by the
    compiler's own account."""
    mesh, length = make_mesh(Mesh(context=8)), 4096
    place = NamedSharding(mesh, LAYOUT)
    x = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.float32, sharding=place)
    with jax.set_mesh(mesh):
        loss = lambda *a: attention(*a, mask=CAUSAL, implementation="ring").sum()
        memory = (
            jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=place)
            .lower(x, x, x)
            .compile()
            .memory_analysis()
        )
    # all keys and values alone would be 16 such shares
    assert memory.temp_size_in_bytes < 40 * length // 8 * 128 * 4


AOT = """
import functools, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxformer.tools.planning import hlo
from jaxformer import masks
from jaxformer.ops.attention import attention
from jaxformer.parallel import Mesh, make_mesh

fast = {"optimization_level": "O1"}
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
for shape, implementation, kernels in [
    (Mesh(data=2, context=2, tensor=2), None, 0),
    (Mesh(data=2, context=2, tensor=2), "splash", 3),
    (Mesh(data=2, fsdp=2, tensor=2), None, 3),
]:
    mesh = make_mesh(shape, devices)
    place = NamedSharding(mesh, P(("data", "fsdp"), "context", "tensor"))
    x = lambda n: jax.ShapeDtypeStruct((8, 1024, n, 128), jnp.bfloat16, sharding=place)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        f = functools.partial(attention, mask=masks.causal(), implementation=implementation)
        step = jax.jit(
            jax.grad(lambda *a: f(*a).astype(jnp.float32).sum(), (0, 1, 2)), out_shardings=place
        )
        text = step.lower(x(8), x(2), x(2)).compile(compiler_options=fast).as_text()
    found = {(x.kind, x.axes) for x in hlo.collectives(text, mesh)}
    print(shape, implementation, text.count("tpu_custom_call"), found)
    assert text.count("tpu_custom_call") == kernels
    assert all(set(axes) <= {"context"} for kind, axes in found), found
"""


@pytest.mark.aot
def test_compiles_for_tpus_that_are_not_here():
    """The ring, splash with keys gathered, and by default splash on a mesh without context: of a
    v5e with 8 chips."""
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'jaxformer[tpu]'")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-c", AOT], env=environment, capture_output=True, text=True, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
