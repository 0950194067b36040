"""Longformer and BigBird attention against their definitions, Hugging Face's whole models, and
their own promises of cost."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops, zoo
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.zoo.bigbird import (
    attention as bigbird_attention,
    random_layout as bigbird_layout,
    seeded_layout as bigbird_layout_seeded,
    zero_layout as bigbird_layout_zero,
)
from jaxformer.zoo.longformer import attention as longformer_attention
from tests.witnesses import load

# float64 sums of at most a hundred terms of order one
FLOAT64 = dict(rtol=1e-11, atol=1e-11)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def weighted(query, key, value, counts, scale=None):
    """softmax attention of one query `[H]` to keys `[S, H]`, key s counted counts[s] times."""
    keys = np.flatnonzero(counts)
    if not keys.size:
        return np.zeros(value.shape[-1])
    score = key[keys] @ query * (query.shape[-1] ** -0.5 if scale is None else scale)
    e = counts[keys] * np.exp(score - score.max())
    return e @ value[keys] / e.sum()


def longformer_definition(local, everywhere, window, flags, ids):
    """Local arrays (query, key, value), global arrays, flags and segment ids [B, T]: one query at a
    time."""
    (query, key, value), (global_query, global_key, global_value) = local, everywhere
    B, T, N = query.shape[:3]
    out = np.zeros((B, T, N, value.shape[-1]))
    for b in range(B):
        for i in range(T):
            same = (ids[b] == ids[b, i]) & (ids[b] != 0)
            near = (np.abs(np.arange(T) - i) <= window // 2) | flags[b]
            for n in range(N):
                k = n // (N // key.shape[2])
                if flags[b, i]:
                    out[b, i, n] = weighted(
                        global_query[b, i, n], global_key[b, :, k], global_value[b, :, k], same
                    )
                else:
                    out[b, i, n] = weighted(
                        query[b, i, n], key[b, :, k], value[b, :, k], same & near
                    )
    return out


FLAGS = np.zeros((2, 13), bool)
FLAGS[0, [0, 7]] = FLAGS[1, [2, 3, 9]] = True
TOKENS = {
    "none": (0, np.zeros((2, 13), bool)),
    "number": (3, np.broadcast_to(np.arange(13) < 3, (2, 13))),
    "positions": ((5, 1, 5), np.broadcast_to(np.isin(np.arange(13), (1, 5)), (2, 13))),
    "flags": (FLAGS, FLAGS),
}


def value_and_gradients(f, *arrays):
    """f(*arrays) and the gradients of its sum, as NumPy from one program: eager operations compile
    one by one."""

    @jax.jit
    def run(*arrays):
        out, pullback = jax.vjp(f, *arrays)
        return out, pullback(jnp.ones_like(out))

    return jax.tree.map(np.asarray, run(*arrays))


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOKENS)
def test_longformer_equals_its_definition(name):
    """All ways to name global tokens, with shared key heads, and with padding or packed
    documents."""
    number, (tokens, flags) = list(TOKENS).index(name), TOKENS[name]
    rng = np.random.default_rng(number)
    window = (4, 6, 2)[number % 3]
    ids = (
        (np.arange(13) < [[13], [8]]).astype(int)
        if number % 2
        else np.sort(rng.integers(0, 3, (2, 13)))
    )
    with jax.enable_x64(True):
        shapes = [(2, 13, 4, 6), (2, 13, 2, 6), (2, 13, 2, 5)]
        arrays = draw(number, *shapes, *shapes)
        options = dict(
            mask=masks.segments(jnp.array(ids)),
            implementation=("reference", "blockwise")[number % 2],
        )
        f = partial(longformer_attention, window=window, global_tokens=tokens, **options)
        out, gradients = value_and_gradients(f, *arrays)
    arrays = [np.asarray(x) for x in arrays]
    np.testing.assert_allclose(
        out, longformer_definition(arrays[:3], arrays[3:], window, flags, ids), **FLOAT64
    )
    assert all(np.isfinite(x).all() for x in gradients)
    d_query, d_key, _, d_global_query, d_global_key, _ = gradients
    assert not d_query[flags].any() and not d_global_query[~flags].any()
    assert not d_key[ids == 0].any() and not d_global_key[ids == 0].any()


@pytest.mark.parametrize(
    "tokens",
    [True, np.array([False, False, True]), [False, True], [0.5, 1.0], -1, [2, -1], [3]],
    ids=str,
)
def test_longformer_refuses_what_are_no_positions(tokens):
    """As `masks.global_tokens` does; booleans by row are flags, but one row of them could be
    positions 0 and 1."""
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"global[_ ]tokens"):
        # without the test suite's types
        inspect.unwrap(longformer_attention)(*[x] * 6, window=2, global_tokens=tokens)


@pytest.mark.parametrize(("B", "T"), [(0, 8), (2, 0)])
def test_no_rows_or_no_tokens_give_no_output(B, T):
    query, key, value = (jnp.ones((B, T, *heads)) for heads in ((4, 6), (2, 6), (2, 5)))
    layout, rotations = bigbird_layout_zero(T, 2, 1, 4), jnp.ones((4, 6, 2, 2))
    for f in (
        lambda *arrays: longformer_attention(*arrays, None, None, None, window=2),
        lambda *arrays: bigbird_attention(*arrays, layout, block=2),
        lambda query, *_: zoo.reformer.attention(query, query[..., :5], rotations, chunk=2),
        zoo.linear_attention.attention,
        zoo.efficient_attention.attention,
    ):
        assert jax.eval_shape(f, query, key, value).shape == (B, T, 4, 5)


@pytest.mark.thorough
def test_longformer_traced_flags():
    """Traced flags gather up to `max_globals`; room to spare changes nothing, too little is NaN in
    that row and no other."""
    arrays = [x.astype(jnp.float32) for x in draw(0, *[(2, 13, 2, 4)] * 6)]
    f = lambda flags, room: longformer_attention(
        *arrays, window=4, global_tokens=flags, max_globals=room
    )
    plain = jax.jit(lambda *x: longformer_attention(*x, window=4, global_tokens=FLAGS))(*arrays)
    traced = jax.jit(f, static_argnums=1)
    # float32: masked terms are exact zeros, but sums of other lengths may be grouped differently
    np.testing.assert_allclose(traced(FLAGS, 6), plain, rtol=1e-5, atol=1e-6)
    short = np.asarray(traced(FLAGS, 2))
    np.testing.assert_allclose(short[0], plain[0], rtol=1e-5, atol=1e-6)
    assert np.isnan(short[1]).all()
    with pytest.raises(ValueError, match="max_globals"):
        traced(FLAGS, None)


@pytest.mark.thorough
def test_longformer_without_globals_is_a_window():
    query, key, value = (x.astype(jnp.float32) for x in draw(0, *[(2, 13, 2, 4)] * 3))
    ours = jax.jit(partial(longformer_attention, window=6))(query, key, value, None, None, None)
    expected = jax.jit(partial(ops.attention, mask=masks.window(3, 3)))(query, key, value)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_longformer_shows_kernels_a_sparse_rule():
    """Flags are arrays, of which no kernel knows anything while tracing; what attention is asked
    for is sparse all the same."""
    seen, attend = [], ops.attention
    stand_in = lambda query, key, value, *, mask, **options: (
        seen.append((mask, query, key)) or attend(query, key, value, mask=mask, **options)
    )
    arrays = [x.astype(jnp.float32) for x in draw(0, *[(1, 256, 1, 4)] * 6)]
    flags = np.zeros((1, 256), bool)
    flags[0, [5, 77]] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attention", stand_in)
        jax.jit(
            lambda flags: longformer_attention(
                *arrays, window=32, global_tokens=flags, max_globals=4
            )
        )(flags)
    (mask, query, key), (_, rows, _) = seen
    assert rows.shape[1] == 4  # the global rows are gathered, not all computed and thrown away
    visited = mask.blocks(query.shape[1], key.shape[1], 16) != masks.EMPTY
    # of 16 x 17: the column of globals, and a window of four blocks at most
    assert visited.sum() <= 16 * 5


def bigbird_definition(query, key, value, layout, block, ids):
    """The multiset of key blocks of each query block, one query at a time."""
    B, T, N = query.shape[:3]
    blocks = -(-T // block)
    out = np.zeros((B, T, N, value.shape[-1]))
    for b in range(B):
        for n in range(N):
            for i in range(T):
                row = i // block
                counts = np.zeros(blocks, int)
                if row in (0, blocks - 1):
                    counts[:] = 1
                else:
                    counts[list({0, row - 1, row, row + 1, blocks - 1})] = 1
                    np.add.at(counts, layout[n, row - 1], 1)
                counts = counts.repeat(block)[:T] * ((ids[b] == ids[b, i]) & (ids[b] != 0))
                k = n // (N // key.shape[2])
                out[b, i, n] = weighted(query[b, i, n], key[b, :, k], value[b, :, k], counts)
    return out


@pytest.mark.thorough
@pytest.mark.parametrize(("T", "block"), [(3, 4), (12, 4), (31, 3)])
def test_bigbird_equals_its_definition(T, block):
    """Any length and number of blocks, a layout that repeats itself and its neighbours, shared key
    heads, padding."""
    rng = np.random.default_rng(T)
    layout = rng.integers(0, -(-T // block), (4, max(-(-T // block) - 2, 0), 3))
    ids = (np.arange(T) < [[T], [max(1, T - 5)]]).astype(int)
    with jax.enable_x64(True):
        arrays = draw(0, (2, T, 4, 6), (2, T, 2, 6), (2, T, 2, 5))
        lengths = jnp.array(ids.sum(1))
        f = partial(
            bigbird_attention,
            layout=jnp.asarray(layout),
            block=block,
            mask=masks.lengths(lengths, lengths),
        )
        out, gradients = value_and_gradients(f, *arrays)
    np.testing.assert_allclose(
        out, bigbird_definition(*map(np.asarray, arrays), layout, block, ids), **FLOAT64
    )
    for gradient in gradients:
        assert np.isfinite(gradient).all() and not gradient[ids == 0].any()


@pytest.mark.thorough
def test_bigbird_without_repetition_is_a_mask():
    """A layout of distinct other blocks: the same pairs as the block-sparse mask of one, values and
    gradients."""
    with jax.enable_x64(True):
        arrays = draw(0, *[(2, 40, 2, 4)] * 3)
        layout = np.asarray(bigbird_layout(jax.random.key(0), 40, 4, 2, 2))
        table = np.zeros((2, 10, 10), bool)
        table[:, [0, -1]] = table[:, :, [0, -1]] = True
        for n, row in np.ndindex(2, 8):
            table[n, row + 1, [row, row + 1, row + 2, *layout[n, row]]] = True
        g = draw(1, (2, 40, 2, 4))[0]

        @jax.jit
        def both(*arrays):
            mask = masks.block_sparse(table, 4)
            fs = (
                partial(bigbird_attention, layout=layout, block=4),
                partial(ops.attention, mask=mask),
            )
            return [(out, pull(g)) for out, pull in (jax.vjp(f, *arrays) for f in fs)]

        ours, expected = both(*arrays)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT64), ours, expected)


@pytest.mark.thorough
def test_cost_is_linear():
    """Flops and temporary bytes of the compiled gradients at twice the length, for what is not left
    to `attention`."""

    def cost(T):
        x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
        layout = np.zeros((2, T // 16 - 2, 2), np.int32)
        f = lambda q, k, v: jnp.sum(
            bigbird_attention(q, k, v, layout, block=16, implementation="reference")
        )
        compiled = jax.jit(jax.grad(f, (0, 1, 2))).lower(x, x, x).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    for small, large in zip(cost(1024), cost(4096), strict=True):
        assert large < 4.2 * small


@pytest.mark.parametrize("r", [1, 3])
def test_random_layout(r):
    """Distinct blocks, never a row's own five, all of the others drawn sooner or later, by heads
    independently."""
    layout = np.asarray(bigbird_layout(jax.random.key(0), 4 * 11 - 1, 4, r, 200))
    assert layout.shape == (200, 9, r)
    for row in range(9):
        drawn = layout[:, row]
        assert all(len(set(blocks)) == r for blocks in drawn.tolist())
        assert set(drawn.flatten().tolist()) == set(range(11)) - {0, row, row + 1, row + 2, 10}
    with pytest.raises(ValueError, match="need 10"):
        bigbird_layout(jax.random.key(0), 36, 4, 5, 2)
    np.testing.assert_array_equal(bigbird_layout_zero(39, 4, 3, 2), np.zeros((2, 8, 3)))


def test_hugging_face_layouts():
    """The layouts its model draws in training, the published lengths among them."""
    cases = {
        k.removeprefix("layout/"): v for k, v in load("bigbird").items() if k.startswith("layout/")
    }
    for case, expected in cases.items():
        np.testing.assert_array_equal(bigbird_layout_seeded(*map(int, case.split("-"))), expected)
    for T, words in ((50, "multiple"), (36, "> 9 blocks")):
        with pytest.raises(ValueError, match=words):
            bigbird_layout_seeded(T, 4, 2, 2, 0)


x = jnp.ones((2, 12, 2, 4))
LAYOUT = np.zeros((2, 1, 2), np.int32)
ids = jnp.arange(24).reshape(2, 12) // 5
IDS = masks.segments(ids)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f, g: f(x, x, x, x, x, x, window=3), ValueError, "even"),
        (lambda f, g: f(x, x[:, 1:], x[:, 1:], x, x, x, window=2), ValueError, "must agree"),
        (
            lambda f, g: f(x, x, x, None, x, x, window=2, global_tokens=1),
            ValueError,
            "need global_query",
        ),
        (
            lambda f, g: f(x, x, x, x, x, x, window=2, global_tokens=(3, 12)),
            ValueError,
            "among 0 to 11",
        ),
        (
            lambda f, g: f(x, x, x, x, x, x, window=2, global_tokens=FLAGS),
            ValueError,
            r"flags \[2, 12\]",
        ),
        (
            lambda f, g: f(x, x, x, x, x, x, window=2, mask=masks.causal()),
            NotImplementedError,
            r"causal\(\)",
        ),
        (
            lambda f, g: g(x, x, x, LAYOUT, block=4, mask=masks.window(3)),
            NotImplementedError,
            "window",
        ),
        (
            lambda f, g: f(x, x, x, x, x, x, window=2, mask=IDS & masks.segments(ids[:, ::-1])),
            NotImplementedError,
            "one",
        ),
        (
            lambda f, g: g(x, x, x, LAYOUT, block=4, mask=IDS & IDS),
            NotImplementedError,
            "one segments",
        ),
        (
            lambda f, g: f(x, x, x, x, x, x, window=2, mask=IDS.at(3)),
            NotImplementedError,
            "no offset",
        ),
        (
            lambda f, g: g(x, x, x, LAYOUT, block=4, mask=masks.full().at(jnp.asarray(0))),
            NotImplementedError,
            "offset",
        ),
        (lambda f, g: g(x, x, x, LAYOUT, block=3), ValueError, r"layout is \[2, 2, r\]"),
        (lambda f, g: g(x, x[:1], x[:1], LAYOUT, block=4), ValueError, "must agree"),
    ],
)
def test_errors_at_the_door(call, error, words):
    with pytest.raises(error, match=words):
        jax.eval_shape(
            partial(call, inspect.unwrap(longformer_attention), inspect.unwrap(bigbird_attention))
        )


def bert(weights, x, attend, activation, pooler):
    """Two post-norm layers and the pooler over embeddings x, as both models have them. Names are
    Hugging Face's."""
    dense = lambda x, name: (
        ops.einsum("btd,ed->bte", x, weights[f"{name}.weight"])
        + weights[f"{name}.bias"][None, None]
    )
    norm = lambda x, name: ops.layer_norm(
        x, weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-2
    )
    x = norm(x, "embeddings.LayerNorm")
    for i in range(2):
        p = f"encoder.layer.{i}"
        read = lambda name, x=x, p=p: dense(x, f"{p}.attention.self.{name}")
        out = attend(i, read).reshape(x.shape)
        x = norm(x + dense(out, f"{p}.attention.output.dense"), f"{p}.attention.output.LayerNorm")
        y = dense(ACTIVATIONS[activation](dense(x, f"{p}.intermediate.dense")), f"{p}.output.dense")
        x = norm(x + y, f"{p}.output.LayerNorm")
    return x, jnp.tanh(dense(x[:, :1], pooler))[:, 0]


def of_fixture(name):
    fixture = load(name)
    return fixture, {
        k.removeprefix("weights/"): jnp.asarray(v, float)
        for k, v in fixture.items()
        if "weights/" in k
    }


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["global", "local"])
def test_hugging_face_longformer(kind):
    """The whole model, one row padded, another number of global tokens in each row; padded rows and
    all."""
    with jax.enable_x64(True):
        fixture, weights = of_fixture("longformer")
        tokens, real = fixture["tokens"], fixture["real"]
        flags = fixture["flags"] if kind == "global" else 0

        def attend(layer, read):
            heads = lambda name: read(name).reshape(*tokens.shape, 3, -1)
            names = [
                f"{n}{suffix}" for suffix in ("", "_global") for n in ("query", "key", "value")
            ]
            mask = masks.segments(jnp.asarray(real, jnp.int32))
            return longformer_attention(
                *map(heads, names), window=(4, 8)[layer], global_tokens=flags, mask=mask
            )

        @jax.jit
        def model(weights):
            table = lambda name: weights[f"embeddings.{name}_embeddings.weight"]
            positions = np.cumsum(real, 1) * real + 1  # RoBERTa's: from the padding id + 1
            x = table("word")[tokens] + table("position")[positions] + table("token_type")[:1][None]
            return bert(weights, x, attend, "gelu", "pooler.dense")

        hidden, pooled = model(weights)
    # the oracle's own tolerance: Hugging Face's softmax is float32
    np.testing.assert_allclose(hidden, fixture[f"{kind}/hidden"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(pooled, fixture[f"{kind}/pooled"], rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["zero", "seeded"])
def test_hugging_face_bigbird(kind):
    """The whole model, one row padded: with the layout of zeros outside training, with the seeded
    one in it."""
    with jax.enable_x64(True):
        fixture, weights = of_fixture("bigbird")
        tokens, real = fixture["tokens"], fixture["real"]

        def attend(layer, read):
            heads = lambda name: read(name).reshape(*tokens.shape, 2, -1)
            layout = (
                bigbird_layout_seeded(48, 4, 2, 2, layer)
                if kind == "seeded"
                else bigbird_layout_zero(48, 4, 2, 2)
            )
            mask = masks.segments(jnp.asarray(real, jnp.int32))
            return bigbird_attention(
                *map(heads, ("query", "key", "value")), layout, block=4, mask=mask
            )

        @jax.jit
        def model(weights):
            table = lambda name: weights[f"embeddings.{name}_embeddings.weight"]
            x = table("word")[tokens] + table("token_type")[:1][None] + table("position")[None]
            return bert(weights, x, attend, "gelu_tanh", "pooler")

        hidden, pooled = model(weights)
    # the oracle's own tolerance
    np.testing.assert_allclose(hidden, fixture[f"{kind}/hidden"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(pooled, fixture[f"{kind}/pooled"], rtol=0, atol=1e-9)
