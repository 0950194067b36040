"""The splash kernel against the reference, run as ordinary JAX (interpret mode), and compiled for
TPUs that are not here."""

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.attention import _log_once, attention, splash, splash_blocks
from jaxformer.ops.attention.call import Call
from jaxformer.parallel import AXES, Mesh, make_mesh

# float32 unit roundoff is 6e-8; scores are sums of 8 products of order one, gradients of some
# hundred terms.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)


SMALL = splash_blocks.Limits(block=128, product=128, is_fused=False)
# two products in a block, and one backward pass
FUSED = splash_blocks.Limits(block=256, product=128, is_fused=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """The smallest blocks, so that a few hundred positions make several of them: EMPTY, PARTIAL,
    FULL and padded ones."""
    monkeypatch.setattr(splash_blocks, "OTHERS", SMALL)


@pytest.fixture
def fused_blocks(monkeypatch):
    """The blocks of a chip that makes all gradients in one pass, as small as they can be."""
    monkeypatch.setattr(splash_blocks, "OTHERS", FUSED)
    monkeypatch.setattr(splash_blocks, "FEWEST", 1)


def value_and_vjp(f, g, *args):
    run = jax.jit(lambda g, *args: (lambda out, pullback: (out, pullback(g)))(*jax.vjp(f, *args)))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), run(g, *args))


def both(mask, T, S, N=2, K=1, H=8, Hv=8, B=2, dtype=jnp.float32, sinks=False, **options):
    """Output and gradients of query, key, value (and sinks), of the kernel and of the reference."""
    rng = np.random.default_rng(0)
    shapes = (B, T, N, Hv), (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    if sinks:
        arrays.append(jnp.asarray(rng.normal(size=N), jnp.float32))

    def kernel(query, key, value, sinks=None):
        return splash.attention(
            query, key, value, Call(mask.sized(S), sinks=sinks, scale=0.4, **options)
        )

    def reference(query, key, value, sinks=None):
        given = dict(mask=mask, scale=0.4, sinks=sinks, **options)
        return attention(query, key, value, implementation="reference", **given)

    return jax.tree.leaves(value_and_vjp(kernel, *arrays)), jax.tree.leaves(
        value_and_vjp(reference, *arrays)
    )


def assert_equal(mask, T, S, **options):
    for ours, theirs in zip(*both(mask, T, S, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32)


def documents(B, length, seed=0):
    """Segment ids of packed documents, with padding (0) at the end of a row and one row of nothing
    else."""
    ids = np.sort(np.random.default_rng(seed).integers(1, 5, (B, length)), axis=1)
    ids[0, -length // 4 :] = 0
    ids[-1] = 0
    return jnp.asarray(ids)


CASES = [
    # several blocks of every kind, computed in the kernel; odd lengths; grouped queries; values of
    # their own width
    (masks.causal() & masks.window(150), 300, 333, dict(N=4, K=2, Hv=5)),
    # more queries than keys: the first 40 see nothing; a sink all the same
    (masks.causal(), 130, 90, dict(sinks=True)),
    # a table of blocks; soft-capped scores; one key head for all
    (masks.longformer(60, [3, 200]), 260, 260, dict(N=3, K=1, softcap=2.0)),
    # packed documents, rows of padding, sinks
    (masks.causal() & masks.segments(documents(3, 140)), 140, 140, dict(B=3, sinks=True)),
    # a mask of its own for each head
    (masks.by_head(masks.window(5, 5), masks.causal() & masks.strided(7)), 50, 50, dict(K=2)),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("mask", "T", "S", "options"), CASES, ids=lambda x: str(x)[:40])
def test_equals_the_reference(mask, T, S, options, small_blocks):
    assert_equal(mask, T, S, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(("mask", "T", "S", "options"), CASES, ids=lambda x: str(x)[:40])
def test_one_backward_pass_equals_the_reference(mask, T, S, options, fused_blocks):
    assert_equal(mask, T, S, **options)


@pytest.mark.thorough
def test_one_backward_pass_with_several_products_in_a_block(fused_blocks):
    mask = masks.causal() & masks.window(300)
    assert splash_blocks.blocks_of(600, 600, 8) == (256, 256, 128, True)
    assert_equal(mask, 600, 600, N=2, K=1)


MORE = [
    (masks.full(), 13, 17, dict(sinks=True, softcap=1.0)),
    (masks.full(), 256, 128, dict(N=4, K=4)),
    (masks.causal(), 128, 128, {}),
    (masks.causal().at(100), 20, 300, {}),
    (masks.causal().at(-150), 300, 140, {}),
    (masks.window(0), 200, 200, {}),
    (masks.window(40, 30), 200, 250, {}),
    (masks.window(9, 9, 3), 140, 140, {}),
    (masks.bigbird(16, 3, 1, 2), 300, 300, dict(N=4, K=2)),
    (masks.sparse_transformer_fixed(16, 2), 140, 140, {}),
    (~masks.window(30, 30), 260, 260, {}),
    (masks.causal() | masks.prefix(20), 150, 150, {}),
    (masks.Mask(lambda mask, q, kv: (q + kv) % 3 == 0), 40, 40, {}),
    (
        masks.block_sparse(np.random.default_rng(0).random((4, 5, 5)) < 0.4, 50),
        250,
        250,
        dict(N=4, K=2),
    ),
    (masks.by_head(*[masks.causal() & masks.window(20)] * 2) & masks.prefix(120), 140, 140, {}),
    (masks.segments(documents(2, 150)), 20, 150, {}),
    (masks.segments(documents(2, 30), documents(2, 40, 1)) & masks.causal(), 30, 40, {}),
    # longer than the ids: padding
    (
        masks.segments(documents(2, 30), documents(2, 40, 1)),
        33,
        45,
        {},
    ),
    (masks.lengths(kv=jnp.array([0, 130])) & masks.causal(), 150, 150, {}),
    (
        masks.lengths(jnp.array([5, 40]), jnp.array([140, 20])) & masks.window(9),
        140,
        140,
        dict(sinks=True),
    ),
    (
        masks.segments(documents(2, 60)) & masks.lengths(jnp.array([50, 60]), jnp.array([60, 9])),
        60,
        60,
        {},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "T", "S", "options"), MORE, ids=lambda x: str(x)[:40])
def test_equals_the_reference_everywhere(mask, T, S, options, small_blocks):
    assert_equal(mask, T, S, **options)


BASE = [
    masks.full(),
    masks.causal(),
    masks.window(7, 3),
    masks.prefix(5),
    masks.strided(4),
    masks.global_tokens([0, 9]),
]


@pytest.mark.slow
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    T=st.integers(1, 150),
    S=st.integers(1, 150),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    rules=st.tuples(
        st.integers(0, 5), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=2)
    ),
    ids=st.none() | st.integers(0, 9),
    lengths=st.none() | st.tuples(st.integers(0, 150), st.integers(0, 150)),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
)
def test_any_combination(T, S, heads, rules, ids, lengths, sinks, softcap):
    first, others = rules
    mask = BASE[first]
    for other, how in others:
        mask = (mask & BASE[other], mask | BASE[other], mask & ~BASE[other])[how]
    if ids is not None:
        mask = mask & masks.segments(documents(2, S, ids))
    if lengths is not None:
        mask = mask & masks.lengths(kv=jnp.array(lengths))
    assert_equal(mask, T, S, N=heads[0], K=heads[1], sinks=sinks, softcap=softcap)


@pytest.mark.parametrize(("left", "right"), [(3, 2**31 - 1), (2**31 - 1, 3), (2**31 - 1, 0)])
def test_a_band_without_end_does_not_overflow(left, right):
    """The kernel adds the ends of a band to positions in 32 bits."""
    rows, columns = (
        jnp.arange(128, dtype=jnp.int32)[:, None],
        jnp.arange(128, dtype=jnp.int32)[None],
    )
    for offset in (1, 5, -5):
        (table,) = splash._tables(masks.window(left, right).at(offset), 1, 128, 128, (128, 128))
        distance = np.arange(offset, offset + 128)[:, None] - np.arange(128)[None]
        truth = (-right <= distance) & (distance <= left)
        computed = hasattr(table, "mask_function")
        shown = (
            table.mask_function(rows, columns) if computed else table[slice(0, 128), slice(0, 128)]
        )
        np.testing.assert_array_equal(shown, truth)


@pytest.mark.thorough
def test_bfloat16_with_sinks():
    """Query, weights, products and result are each rounded, by 2^-9 of themselves; the sinks'
    gradient sums many such."""
    for ours, theirs in zip(
        *both(masks.causal(), 40, 40, sinks=True, dtype=jnp.bfloat16), strict=True
    ):
        assert np.linalg.norm(ours - theirs) <= 2.0**-6 * np.linalg.norm(theirs)


@pytest.mark.thorough
def test_infinite_sinks_take_nothing_or_all():
    query, sinks = jnp.ones((1, 4, 2, 8)), jnp.array([-jnp.inf, jnp.inf])
    f = lambda q, k, v, sinks: splash.attention(q, k, v, Call(masks.causal().at(-1), sinks=sinks))
    out, gradients = value_and_vjp(f, jnp.ones_like(query), query, query, query, sinks)
    # the average of equal values, in float32
    np.testing.assert_allclose(out[:, 1:, 0], 1.0, rtol=1e-6)
    assert not out[:, 0].any() and not out[:, :, 1].any()
    assert all(np.isfinite(x).all() for x in gradients) and not gradients[3].any()


def test_nothing_to_see_is_zero_without_a_kernel():
    query = jnp.ones((2, 5, 2, 8))
    for mask, S in (
        (masks.causal().at(-9), 5),
        (masks.full(), 0),
        (masks.window(2) & masks.window(1).at(20), 5),
    ):
        out = splash.attention(query, jnp.ones((2, S, 1, 8)), jnp.ones((2, S, 1, 3)), Call(mask))
        np.testing.assert_array_equal(out, np.zeros((2, 5, 2, 3)))


def test_blocks_fit_and_pad_little():
    for limits in (splash_blocks.OTHERS, *splash_blocks.LIMITS.values()):
        for length in range(1, 20000, 37):
            block = splash_blocks.block_size(length, limits)
            padded = -(-length // block) * block
            unit = 128 if block <= limits.product else limits.product
            assert block % unit == 0 and block <= limits.block
            assert padded - length < unit * -(-padded // block)  # less than one unit a block
            assert block <= limits.product or length // block >= splash_blocks.FEWEST


def test_wide_heads_have_smaller_blocks():
    assert splash_blocks.limits_of(256).block == 512
    assert splash_blocks.limits_of(512).block == 256


@pytest.mark.parametrize("kind, limits", splash_blocks.LIMITS.items())
def test_a_chip_has_its_blocks(monkeypatch, kind, limits):
    monkeypatch.setattr(splash_blocks, "device_kind", lambda: kind)
    blocks = splash_blocks.blocks_of(8192, 8192, 128)
    assert blocks == (limits.block, limits.block, limits.product, limits.is_fused)


def test_a_long_mask_is_read_block_by_block():
    """32,768 positions: the tables hold one block a distinct pattern, not the 10^9 pairs."""
    n, block = 32768, (512, 512)
    (table,) = splash._tables(masks.longformer(256, 64).at(0), 1, n, n, block)
    seen = {
        table[slice(512 * i, 512 * i + 512), slice(512 * j, 512 * j + 512)].tobytes()
        for i in (9, 20)
        for j in range(64)
    }
    # hidden, the global tokens, the diagonal, and the blocks on either side of it
    assert len(seen) == 5


REFUSED = [
    ({"bias": np.zeros((1, 1, 1, 1))}, "bias"),
    ({"dropout_rate": 0.1, "dropout_seed": np.zeros(2, np.uint32)}, "dropout"),
    ({"mask": masks.causal() | masks.prefix(jnp.array([1, 2]))}, "arrays"),
    ({"mask": masks.causal() & masks.global_tokens(jnp.array([[1], [2]]))}, "global_tokens"),
    (
        {"mask": masks.segments(documents(2, 6)) & masks.segments(documents(2, 6, 1))},
        "second mask of segments",
    ),
    ({"mask": masks.causal().at(jnp.array(3))}, "offset"),
    (
        {"mask": masks.Mask(lambda mask, q, kv: kv < q + jnp.arange(2)[:, None, None, None])},
        "rule reads arrays",
    ),
]


def test_refusals_name_what_is_missing():
    query = key = value = jnp.ones((2, 6, 2, 8))
    refuses = lambda *args, mask=masks.causal(), **options: splash.refuses(
        *args, Call(mask, **options)
    )
    assert refuses(query, key, value, softcap=3.0, sinks=jnp.ones(2), dropout_rate=0.5) is None
    for options, words in REFUSED:
        assert words in refuses(query, key, value, **options)
    assert "float16" in refuses(*[query.astype(jnp.float16)] * 3)
    assert "different types" in refuses(query, key, value.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="splash: no dropout; implementation='blockwise'"):
        attention(
            query,
            key,
            value,
            dropout_rate=0.1,
            dropout_key=jax.random.key(0),
            implementation="splash",
        )
    with pytest.raises(ValueError, match="3 heads and queries of 2"):
        splash.attention(query, key, value, Call(masks.by_head(*[masks.full()] * 3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [Mesh(data=2, context=2, tensor=2), Mesh(data=2, fsdp=2, tensor=2)],
    ids=["context", "fsdp"],
)
@pytest.mark.parametrize("by_head", [False, True])
def test_on_a_mesh_each_device_has_its_share(mesh, by_head):
    """Batch, heads and, with keys gathered, queries split; inside a scan that recomputes.

    Equal to one device.
    """
    rng = np.random.default_rng(0)
    shapes = (4, 256, 4, 8), (4, 256, 2, 8), (4, 256, 2, 8), (4,)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    mask = masks.causal() & masks.segments(documents(4, 256))
    if by_head:
        mask = masks.by_head(masks.causal(), masks.full(), masks.window(5), masks.causal())

    def loss(implementation, query, key, value, sinks):
        layer = lambda x, _: (
            x + attention(x, key, value, mask=mask, sinks=sinks, implementation=implementation),
            None,
        )
        return (jax.lax.scan(jax.checkpoint(layer), query, None, length=2)[0] ** 2).mean()

    one = jax.jit(jax.grad(partial(loss, "reference"), range(4)))(*arrays)
    with jax.set_mesh(make_mesh(mesh)):
        many = jax.block_until_ready(jax.jit(jax.grad(partial(loss, "splash"), range(4)))(*arrays))
        with (
            pytest.raises(NotImplementedError, match="splash: no 3 queries a device")
            if mesh.context > 1
            else nullcontext()
        ):
            attention(*(x[:, :6] for x in arrays[:3]), implementation="splash")
    for ours, theirs in zip(many, one, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("mask", [masks.full(), masks.window(600, 600)])
def test_a_mask_of_whole_blocks_is_refused_where_queries_are_split(mask):
    """JAX's kernel ends in an error there, which names neither the mask nor the mesh."""
    x = jnp.ones((2, 512, 4, 64))
    with jax.set_mesh(make_mesh(Mesh(data=2, context=4))):
        with pytest.raises(NotImplementedError, match=r"whole or empty, on mesh\.context=4"):
            attention(x, x, x, mask=mask, implementation="splash")
        assert splash.refuses_on_mesh(x, x, x, Call(masks.causal())) is None
        hidden = attention(x, x, x, mask=~masks.full(), implementation="splash")
        assert not hidden.any()
    assert splash.refuses_on_mesh(x, x, x, Call(mask)) is None


def test_the_platform_is_the_mesh_s_which_need_not_be_here(caplog):
    """What `plan` compiles: on a machine without a TPU, the program that a TPU would choose."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.sharding.AbstractMesh(
        (4, *[1] * (len(AXES) - 1)), AXES, auto, abstract_device=device
    )
    _log_once.cache_clear()  # other tests have been told
    with caplog.at_level("INFO", "jaxformer"), jax.sharding.use_abstract_mesh(mesh):
        text = str(
            jax.make_jaxpr(attention)(*[jax.ShapeDtypeStruct((6, 128, 1, 8), jnp.float32)] * 3)
        )
    assert "splash_mha" in text and "shard_map" in text
    assert caplog.messages == ["attention on tpu: splash"]


AOT = """
import time
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxformer import masks
from jaxformer.ops.attention import splash
from jaxformer.ops.attention.call import Call

ids = jnp.asarray(np.repeat(np.arange(1, 8), 100)[None])
MASKS = (
    masks.causal(),
    masks.longformer(100, 3) & masks.segments(ids),
    masks.by_head(*map(masks.window, (3, 9, 9, 3))),
)


def loss(mask, softcap, query, key, value, sinks):
    out = splash.attention(query, key, value, Call(mask, scale=0.1, softcap=softcap, sinks=sinks))
    return out.astype(jnp.float32).sum()


for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    one = jax.sharding.SingleDeviceSharding(devices[0])
    array = lambda *shape, dtype=jnp.bfloat16, sharding=one: jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding
    )
    for mask, dtype, H, Hv in zip(
        MASKS, (jnp.bfloat16, jnp.float32, jnp.bfloat16), (128, 256, 72), (128, 256, 40)
    ):
        start = time.time()
        arrays = (
            array(2, 700, 4, H, dtype=dtype),
            array(2, 700, 2, H, dtype=dtype),
            array(2, 700, 2, Hv, dtype=dtype),
        )
        step = jax.jit(jax.grad(partial(loss, mask, 3.0), argnums=(0, 1, 2, 3)))
        compiled = step.lower(*arrays, array(4, dtype=jnp.float32)).compile()
        assert compiled.as_text().count("tpu_custom_call") == 3, name  # forward, dq, dk and dv
        print(f"{name} {str(mask)[:30]} {time.time() - start:.1f} s", flush=True)

for kind in (
    AxisType.Auto,
    AxisType.Explicit,
):  # sharded: batch and heads, by shard_map, under a mesh that cannot run
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    spec = P("data", None, "tensor", None)
    kernel = lambda q, k, v: splash.attention(
        q, k, v, Call(MASKS[0] & masks.window(300), scale=0.1)
    )
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with jax.set_mesh(mesh):
        x = array(4, 700, 4, 128, sharding=NamedSharding(mesh, spec))
        compiled = (
            jax.jit(jax.grad(lambda *a: sharded(*a).astype(jnp.float32).sum(), (0, 1, 2)))
            .lower(x, x, x)
            .compile()
        )
        assert compiled.as_text().count("tpu_custom_call") == 3
"""


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jaxformer[tpu]'"
)
def test_compiles_for_tpus_that_are_not_here():
    """Forward and backward for four generations, with no `interpret`: the platform is decided when
    the program is lowered."""
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v5litepod-16",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        PYTHONPATH=str(Path(__file__).parents[3]),
    )
    done = subprocess.run(
        [sys.executable, "-c", AOT], env=environment, capture_output=True, text=True, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
