"""The blockwise kernel equals the reference: every mask x feature, values and all gradients, by
random combination."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxformer import masks, ops
from jaxformer.ops.attention import _log_once, attention, blocks, blockwise
from jaxformer.ops.attention.call import Call, dropout_seed
from jaxformer.tools.planning import hlo

# float64 sums of at most a few hundred terms of order one, summed in another order.
FLOAT64 = dict(rtol=1e-10, atol=1e-10)
# The issue's own figure. Unit roundoff is 6e-8; gradients are sums of <= 100 terms of order one,
# twice through a product.
FLOAT32 = dict(rtol=2e-5, atol=2e-5)


# an example costs seconds to compile: shrinking one would take minutes
DRAW = (
    Phase.explicit,
    Phase.generate,
)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**20))
def test_spans_cover_what_is_visible(rows, columns, width, seed):
    """Without overlap, from a visible column on, and with no span that could be left out."""
    visible = np.random.default_rng(seed).random((rows, columns)) < 0.4
    found = list(zip(*blocks.cover(visible, width), strict=True))
    assert found == sorted(found)
    covered = np.zeros((rows, columns + width), int)
    for row, start in found:
        covered[row, start : start + width] += 1
        assert visible[row, start]
    assert covered.max(initial=0) <= 1
    assert (covered[:, :columns] >= visible).all()


def static_masks(T: int, S: int):
    """One of every builder and of every composition."""
    layout = np.random.default_rng(T * 41 + S).random((4, 4)) < 0.5
    return {
        "full": masks.full(),
        "causal": masks.causal(),
        "window": masks.window(3, 2),
        "dilated": masks.causal() & masks.window(2, 0, 3),
        "strided": masks.strided(3) & masks.causal(),
        "prefix": masks.causal() | masks.prefix(4),
        "chunked": masks.chunked(4, before=1),
        "columns": masks.columns(4, 1) | masks.window(1),
        "global": masks.causal() & masks.window(2) | masks.global_tokens((0, 5)),
        "random": masks.random_blocks(1, 4, seed=3) | masks.window(0),
        "block_sparse": masks.block_sparse(layout, 4),
        "by_head": masks.by_head(
            masks.causal(), masks.window(1, 1), masks.full(), masks.strided(2)
        ),
        "longformer": masks.longformer(6, 2),
        "bigbird": masks.bigbird(2, random=1),
        "sparse_strided": masks.sparse_transformer_strided(4),
        "sparse_fixed": masks.sparse_transformer_fixed(4, 1),
        "not": ~masks.causal(),
    }


def dynamic_masks(rng, B: int, T: int, S: int):
    ids = lambda length: jnp.asarray(np.sort(rng.integers(0, 3, (B, length)), axis=1))
    count = lambda length: jnp.asarray(rng.integers(0, length + 1, B))
    return {
        "segments": masks.causal() & masks.segments(ids(S)),
        "cross_segments": masks.segments(ids(T), ids(S)),
        "lengths": masks.causal() & masks.lengths(kv=count(S)),
        "both_lengths": masks.lengths(count(T), count(S)),
        "prefix_by_row": masks.causal() | masks.prefix(count(S)),
        "global_by_row": masks.window(1)
        | masks.global_tokens(jnp.asarray(rng.random((B, S)) < 0.3)),
        "offset": masks.causal().at(jnp.asarray(S - T)),
    }


def options_of(kind: str | None, arrays, learned):
    """Keyword arguments of `attention` from the arrays that a case learns."""
    learned = dict(learned)
    match kind:
        case "t5":
            bias = ops.t5(learned.pop("table"), bidirectional=True, max_distance=16)
        case "shaw":
            bias = ops.shaw(arrays[0], learned.pop("relative"))
        case "alibi":
            bias = ops.alibi(arrays[0].shape[2])
        case "function":
            rate = learned.pop("rate")
            bias = lambda q, kv: (
                rate[:, None, None]
                * jnp.cos(q[:, None] - 2.0 * kv[None, :]).astype(rate.dtype)[None]
            )
        case _:
            bias = learned.pop("bias", None)
    return dict(bias=bias, **learned)


def draw_case(draw, dtype):
    B, T, S = draw(st.integers(1, 2)), draw(st.integers(1, 13)), draw(st.integers(1, 13))
    N, K = draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1)]))
    H, Hv = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    kinds = {**static_masks(T, S), **dynamic_masks(rng, B, T, S)}
    name = draw(st.sampled_from([name for name in kinds if name != "by_head" or N == 4]))
    arrays = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, Hv)
    kind = draw(st.sampled_from([None, "array", "t5", "shaw", "alibi", "function"]))
    learned = {}
    if kind == "array":
        learned["bias"] = normal(*(size if draw(st.booleans()) else 1 for size in (B, N, T, S)))
    elif kind == "t5":
        learned["table"] = normal(8, N)
    elif kind == "shaw":
        learned["relative"] = normal(5, H)
    elif kind == "function":
        learned["rate"] = normal(N)
    if draw(st.booleans()):
        learned["sinks"] = normal(N)
    fixed = dict(mask=kinds[name])
    if draw(st.booleans()):
        fixed["softcap"] = 2.0
    if draw(st.booleans()):
        fixed |= dict(dropout_rate=0.4, dropout_key=jax.random.key(draw(st.integers(0, 99))))
    step = draw(st.integers(1, 4))
    block = draw(st.integers(1, 6)), step * draw(st.integers(1, 3)), step
    return arrays, learned, kind, fixed, block


def both(arrays, learned, kind, fixed, block):
    """(output, gradients) of the reference and, unless block is None, of the kernel, from one
    program."""

    def kernel(*arrays, mask, dropout_rate=0.0, dropout_key=None, **options):
        seed = dropout_seed(dropout_rate, dropout_key)
        options |= dict(
            scale=arrays[0].shape[-1] ** -0.5, dropout_rate=dropout_rate, dropout_seed=seed
        )
        return blockwise.attention(*arrays, Call(mask.sized(arrays[1].shape[1]), **options), block)

    @jax.jit
    def run(arrays, learned, g):
        results = []
        for f in (partial(attention, implementation="reference"), kernel)[: 2 if block else 1]:
            call = lambda arrays, learned, f=f: f(
                *arrays, **fixed, **options_of(kind, arrays, learned)
            )
            out, pullback = jax.vjp(call, arrays, learned)
            results.append((out, pullback(g)))
        return results

    B, T, N, _ = arrays[0].shape
    g = np.random.default_rng(0).normal(size=(B, T, N, arrays[2].shape[-1]))
    return jax.tree.map(np.asarray, run(arrays, learned, jnp.asarray(g, arrays[0].dtype)))


def assert_equal(reference, kernel, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, **tolerance), reference, kernel)


@pytest.mark.thorough
@settings(deadline=None, max_examples=12, derandomize=True, phases=DRAW)
@given(st.data())
def test_equals_the_reference_in_float64(data):
    with jax.enable_x64(True):
        assert_equal(*both(*draw_case(data.draw, jnp.float64)), FLOAT64)


@pytest.mark.slow
@settings(deadline=None, max_examples=400, phases=DRAW)
@given(st.data())
def test_equals_the_reference_in_float64_at_length(data):
    with jax.enable_x64(True):
        assert_equal(*both(*draw_case(data.draw, jnp.float64)), FLOAT64)


@pytest.mark.thorough
@settings(deadline=None, max_examples=4, derandomize=True, phases=DRAW)
@given(st.data())
def test_equals_the_reference_in_float32(data):
    assert_equal(*both(*draw_case(data.draw, jnp.float32)), FLOAT32)


@pytest.mark.thorough
@pytest.mark.parametrize("name", static_masks(11, 13))
def test_every_mask_at_a_size_of_many_blocks(name):
    """Many blocks of every kind, with ragged ends, under the block size that the kernel chooses and
    under small ones."""
    rng = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(rng.normal(size=(1, n, 4, 4)), jnp.float32) for n in (67, 75, 75))
    fixed = dict(mask=static_masks(67, 75)[name])
    assert_equal(*both(arrays, {}, None, fixed, (8, 16, 16)), FLOAT32)


@pytest.mark.thorough
@pytest.mark.parametrize(  # each block with one shape; the other pairs are slow
    ("block", "shape"),
    [
        pytest.param(block, shape, marks=() if i == k else pytest.mark.slow)
        for i, block in enumerate([(1, 1), (1, 3), (3, 1)])
        for k, shape in enumerate([(2, 4, 5, 4), (1, 4, 5, 1), (2, 1, 1, 4)])
    ],
)
def test_a_bias_array_in_blocks_of_one(block, shape):
    """A block of one query or key is not an axis that is broadcast."""
    normal = lambda *shape: jnp.asarray(
        np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32
    )
    arrays = normal(2, 5, 4, 3), normal(2, 4, 2, 3), normal(2, 4, 2, 2)
    assert_equal(
        *both(
            arrays, {"bias": normal(*shape)}, "array", dict(mask=masks.causal()), (*block, block[1])
        ),
        FLOAT32,
    )


@pytest.mark.thorough
@settings(deadline=None, max_examples=3, derandomize=True, phases=DRAW)
@given(st.data())
def test_bfloat16_is_within_its_rounding_of_a_float64_truth(data):
    """The kernel's error is at most twice the reference's own, plus the rounding of its output,
    2^-9 of |out| <= 3.

    Its backward pass subtracts d_out . out, with the output as rounded: 2^-9 x 3 x sqrt(6) terms of
    d_out, and again times a query or key of up to 2.
    """
    arrays, learned, kind, fixed, block = draw_case(data.draw, jnp.bfloat16)
    reference, kernel = both(arrays, learned, kind, fixed, block)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), (arrays, learned))
        (truth,) = both(*wide, kind, fixed, None)

    def check(ours, theirs, exact):
        size = max(1.0, np.abs(exact).max())
        error = lambda x: np.abs(np.float64(x) - exact).max() / size
        assert error(ours) <= 2 * error(theirs) + 2**-5, (error(ours), error(theirs))

    jax.tree.map(check, kernel, reference, truth)


def random_arrays(seed=0, B=2, T=12, S=12, N=4, K=2, H=8):
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    )


@pytest.mark.thorough
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient():
    call = Call(masks.lengths(kv=jnp.array([0, 5])))
    f = jax.jit(
        lambda *arrays: jax.vjp(lambda *a: blockwise.attention(*a, call, (4, 4, 4)), *arrays)[1](
            arrays[0]
        )
    )
    arrays = random_arrays()
    out, gradients = blockwise.attention(*arrays, call, (4, 4, 4)), f(*arrays)
    assert all(
        (x[0] == 0).all() and np.isfinite(x).all() and (x[1] != 0).any()
        for x in map(np.asarray, (out, *gradients))
    )


@pytest.mark.parametrize("mask", ["causal", "window", "global", "sparse_fixed", "random", "not"])
def test_visits_are_the_blocks_that_are_not_empty(mask):
    grid = blocks.Grid(41, 43, 4, 8, 8)
    mask = static_masks(41, 43)[mask].sized(43)
    kinds = mask.blocks(41, 43, (4, 8))
    visited = sorted(
        (i, int(j))
        for starts, columns in blocks.find_visits(mask, grid).values()
        for i in range(grid.nq)
        for j in columns[starts[i] : starts[i + 1]]
    )
    assert (
        visited == sorted(zip(*map(np.ndarray.tolist, np.nonzero(kinds)), strict=True))
        and (kinds == 0).any()
    )


@pytest.mark.thorough
def test_memory_stays_far_below_one_score_array():
    """Forward and backward at n = 16,384: the compiler's own account, which needs no run."""
    n = 16_384
    shapes = [jax.ShapeDtypeStruct((1, n, 1, 64), jnp.float32)] * 3
    loss = lambda *a: attention(*a, mask=masks.causal(), implementation="blockwise").sum()
    memory = jax.jit(jax.grad(loss, range(3))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 0.03 * 4 * n * n


MASK = masks.causal() & masks.window(5) | masks.prefix(2)


def loss(implementation, query, key, value):
    return (
        attention(query, key, value, mask=MASK, implementation=implementation, softcap=3.0) ** 2
    ).sum()


def gradients(implementation):
    return jax.grad(partial(loss, implementation), (0, 1, 2))


reference = jax.jit(gradients("reference"))  # one for all, compiled once for equal shapes


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["reference", "query_blocked", "blockwise"])
def test_under_every_transformation(implementation):
    arrays = random_arrays()
    expected = reference(*arrays)
    one = lambda *a: gradients(implementation)(*(x[None] for x in a))
    under = {
        "vmap": lambda *a: jax.tree.map(lambda x: x[:, 0], jax.vmap(one)(*a)),
        "scan": lambda *a: jax.tree.map(
            lambda x: x[:, 0], jax.lax.scan(lambda _, x: (None, one(*x)), None, a)[1]
        ),
        "checkpoint": jax.grad(jax.checkpoint(partial(loss, implementation)), (0, 1, 2)),
    }
    all_of_them = jax.jit(lambda *a: jax.tree.map(lambda f: f(*a), under))
    for name, results in all_of_them(*arrays).items():
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, **FLOAT32, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_without_jit(implementation):
    arrays = random_arrays(B=1, T=5, S=5)
    expected = reference(*arrays)
    with jax.disable_jit():
        ours = gradients(implementation)(*arrays)
    jax.tree.map(partial(np.testing.assert_allclose, **FLOAT32), ours, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["reference", "query_blocked", "blockwise"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
def test_on_meshes(kind, implementation):
    """Batch and heads sharded over 4 x 2 devices: the compiler's sharding, sharding in types, and
    shard_map."""
    arrays = random_arrays(B=4)
    expected = reference(*arrays)
    axis = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    mesh, spec = (
        jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis,) * 2),
        P("data", None, "tensor", None),
    )
    f = gradients(implementation)
    if kind == "Manual":
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh):
        ours = jax.jit(f)(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays))
        assert all(x.sharding.spec == spec for x in ours) or kind == "Auto"
    jax.tree.map(partial(np.testing.assert_allclose, **FLOAT32), ours, expected)


def test_the_choice_is_made_by_length_and_said_once(caplog):
    short, long = random_arrays(T=4, S=4), random_arrays(B=1, T=1024, S=1024, N=1, K=1, H=2)
    _log_once.cache_clear()  # other tests have been told
    with caplog.at_level(logging.INFO, "jaxformer"):
        for _ in range(2):
            jax.eval_shape(attention, *short)
            text = str(jax.make_jaxpr(attention)(*long))
    assert "1024,1024" not in text
    assert caplog.messages == [
        "attention on cpu: reference (short)",
        "attention on cpu: blockwise (long)",
    ]


def test_what_no_kernel_has_is_refused_by_name():
    arrays = random_arrays()
    with pytest.raises(NotImplementedError, match=r"blockwise: no weights.*reference"):
        attention(*arrays, implementation="blockwise", return_weights=True)
    with pytest.raises(NotImplementedError, match=r"'flash'.*blockwise"):
        attention(*arrays, implementation="flash")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.causal() & masks.window(64)], ids=["causal", "window"]
)
def test_products_of_16_bits_read_16_bits(mask):
    """XLA:CPU converts the operands of a product in a loop to float32 if one is transposed there.

    Scores are float32 in both; of all bytes that products move, 16 bits save three tenths.
    """

    def bytes_of_products(dtype):
        arrays = [jax.ShapeDtypeStruct((1, 1024, 4, 64), dtype)] * 3
        total = lambda *arrays: jnp.sum(
            attention(*arrays, mask=mask, implementation="blockwise").astype(jnp.float32)
        )
        return hlo.traffic(
            jax.jit(jax.grad(total, (0, 1, 2))).lower(*arrays).compile().as_text()
        ).products

    assert 0 < bytes_of_products(jnp.bfloat16) < 0.75 * bytes_of_products(jnp.float32)
