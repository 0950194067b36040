"""Attention to a cache equals the reference on the concatenated keys; so do products with weights
as decoding stores them."""

import itertools
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, ops, zoo
from jaxformer.masks import Mask, causal
from jaxformer.models import presets
from jaxformer.ops.attention import cached
from jaxformer.ops.attention.cached import (
    QUERY_BLOCK,
    Slots,
    first_slots,
    slot_positions,
    widths,
    write_slots,
)
from jaxformer.ops.attention.call import Call
from jaxformer.ops.bias import Bias, alibi, t5
from jaxformer.ops.einsum import einsum
from jaxformer.ops.stored_weight import StoredWeight

B, N, K, H = 2, 4, 2, 8


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def places(q, kv):
    rates = jnp.arange(1.0, 1 + N)[:, None, None]
    return jnp.sin(rates * q[None, :, None]) * jnp.cos(0.7 * rates * kv[None, None, :])


def attend(query, keys, values, lengths, counts, S, call, writes=1.0):
    """Rows of `lengths` tokens in S slots, and T more, of which `counts` are text: (attention of
    the T, the new state).

    Slots without a token hold large numbers.
    """
    T, rows = query.shape[1], np.arange(len(lengths))[:, None]
    state = {
        name: jnp.full((len(lengths), K, S, H), 1e4 * writes, jnp.float32)
        for name in ("key", "value")
    }
    held = slot_positions(S, jnp.asarray(lengths))
    own = {}
    for name, x in (("key", keys), ("value", values)):
        x = jnp.asarray(x)
        picked = x[rows, jnp.maximum(held, 0)].transpose(0, 2, 1, 3)
        state[name] = jnp.where((held >= 0)[:, None, :, None], picked, state[name])
        new = x[rows, np.minimum(np.asarray(lengths)[:, None] + np.arange(T)[None], x.shape[1] - 1)]
        text = (np.arange(T)[None] < np.asarray(counts)[:, None])[:, :, None, None]
        own[name] = jnp.where(text, new, 1e4).transpose(0, 2, 1, 3)
    q = jnp.asarray(np.asarray(lengths)[:, None] + np.arange(T)[None])
    written = jnp.where(jnp.asarray(np.arange(T)[None] < np.asarray(counts)[:, None]), q, -1)
    slots = Slots(state["key"], state["value"], held), Slots(own["key"], own["value"], written)
    sizes = widths(S)
    width = jnp.searchsorted(jnp.array(sizes), max(lengths))
    out = cached.attention(query, q, *slots, call, sizes, width)
    return (
        out,
        {name: write_slots(state[name], own[name], written, out) for name in state},
        slots,
        (q, written),
    )


def texts(lengths, counts, T, heads=K):
    """(query of the last T tokens, keys, values of all)."""
    longest = max(a + b for a, b in zip(lengths, counts, strict=True))
    return (
        normal(len(lengths), T, N, H),
        normal(len(lengths), longest, heads, H, seed=1),
        normal(len(lengths), longest, heads, H, seed=2),
    )


def expected(query, keys, values, lengths, counts, row, **options):
    """The reference on the keys of one row alone, as they lie in its text."""
    length, count = lengths[row], counts[row]
    mask = options.pop("mask").at(length)
    q, kv = (x[row : row + 1, :n] for x, n in ((query, count), (keys, length + count)))
    value = values[row : row + 1, : length + count]
    return ops.attention(q, kv, value, mask=mask, implementation="reference", **options)[0]


def close(a, b, tolerance=2e-6):
    # float32 sums in another order: some 1e-7 of the largest number
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(np.asarray(b)).max()))


MASKS = {
    "causal": causal(),
    "window": causal() & masks.window(7),
    "dilated": causal() & masks.window(3, dilation=2),
    "strided": causal() & (masks.strided(3) | masks.window(0)),
    "chunked": causal() & masks.chunked(4, 1),
    "columns": causal() & (masks.columns(5, 1) | masks.window(0)),
    "prefix": causal() | masks.prefix(6),
    "globals": causal() & masks.longformer(4, (0, 5)),
    "random": causal() & (masks.random_blocks(2, 4, 1, 64) | masks.window(0)),
    "bigbird": (causal() & masks.bigbird(4, 3, 1, 1)).sized(64),
    "strided transformer": masks.sparse_transformer_strided(4),
    "fixed transformer": masks.sparse_transformer_fixed(4, 1),
    "layout": causal() & masks.block_sparse(np.tri(16), 4),
    "by_head": masks.by_head(
        causal(), causal() & masks.window(2), causal() & masks.chunked(4), masks.window(1)
    ),
    "yours": causal() & Mask(lambda mask, q, kv: (q + kv) % 3 != 1),
    "full": masks.full(),
}
BIASES = {
    "alibi": alibi(N), "t5": t5(normal(8, N), False, 16), "places": places,
    "rule": Bias(lambda bias, q, kv: bias.arrays[0] * places(q, kv)[None], arrays=(jnp.ones(()),)),
}  # fmt: skip
CALLS = {name: {"mask": mask} for name, mask in MASKS.items()}
CALLS |= {name: {"mask": causal(), "bias": bias} for name, bias in BIASES.items()}
CALLS |= {
    "softcap": {"mask": causal(), "softcap": 0.8, "scale": 0.9},
    "sinks": {"mask": causal(), "sinks": normal(N)},
    "all at once": {
        "mask": causal() & masks.window(9),
        "bias": alibi(N),
        "softcap": 2.0,
        "sinks": normal(N),
        "scale": 0.5,
    },
}


@pytest.mark.thorough
def test_a_gpu_reads_few_slots_without_a_branch(monkeypatch):
    """The host would wait for the number of the branch, in each layer. The result is the same."""
    lengths, counts, T, S = (130, 3), (1, 1), 1, 300
    run = lambda: attend(
        *texts(lengths, counts, T), lengths, counts, S, call_of({"mask": causal()})
    )[0]
    wanted, branches = run(), {}
    monkeypatch.setattr(cached, "platform", lambda: "gpu")
    for limit in (0, cached.WHOLE_READ_BYTES):
        monkeypatch.setattr(cached, "WHOLE_READ_BYTES", limit)
        close(run(), wanted)
        branches[limit] = jax.jit(lambda: run()).lower().as_text().count("stablehlo.case")
    assert branches[cached.WHOLE_READ_BYTES] < branches[0]


OTHER_WIDTHS = [(1, 1100), (QUERY_BLOCK + 22, 300)]


def call_of(options):
    return Call(**{"scale": H**-0.5} | options)


BY_ROW = "causal", "chunked", "prefix", "by_head", "yours", "t5", "places", "all at once"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in BY_ROW else ()) for n in CALLS]
)
def test_every_mask_and_bias_is_that_of_each_row_alone(name):
    """Rows of other lengths, with slots that are empty and new tokens that are padding.

    Then one token more of each.
    """
    options, lengths, counts, T = CALLS[name], [21, 3], [4, 5], 5
    parts = texts(lengths, counts, T)
    out, state, _, _ = attend(*parts, lengths, counts, 40, call_of(options))
    for row in range(B):
        close(out[row, : counts[row]], expected(*parts, lengths, counts, row, **options))
        text = lengths[row] + counts[row]
        for kind, x in (("key", parts[1]), ("value", parts[2])):
            np.testing.assert_array_equal(state[kind][row, :, :text], x[row, :text].swapaxes(0, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("name", BY_ROW)
def test_it_is_the_reference_at_positions_by_row(name):
    """`ops.attention(positions=...)` of the same slots, as one array."""
    options, lengths, counts, T = CALLS[name], [21, 3], [4, 5], 5
    parts = texts(lengths, counts, T)
    out, _, (old, new), (q, written) = attend(
        *parts, lengths, counts, 40, call_of(options), writes=0
    )
    keys, values = (
        jnp.concatenate(pair, axis=2).transpose(0, 2, 1, 3)
        for pair in ((old.keys, new.keys), (old.values, new.values))
    )
    positions = q, jnp.concatenate([old.positions, written], axis=1)
    close(
        out,
        ops.attention(
            parts[0], keys, values, implementation="reference", positions=positions, **options
        ),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("T", "S"),
    [
        (1, 300),
        (QUERY_BLOCK + 22, 1100),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_WIDTHS),
    ],
)
def test_the_slots_that_are_read_are_as_many_as_hold_all_tokens(S, T):
    sizes = widths(S)
    assert sizes[-1] == S and len(sizes) <= 9 and all(size % 128 == 0 for size in sizes[:-1])
    assert sizes == ([128, 256, 300] if S == 300 else [256, 512, 768, 1024, 1100])
    for longest in (0, sizes[0], sizes[0] + 1, S - T):
        lengths, counts = [longest, longest // 3], [T, max(1, T // 2)]
        parts = texts(lengths, counts, T)
        out, *_ = attend(*parts, lengths, counts, S, call_of({"mask": causal()}))
        for row in range(B):
            # sums of up to 1,100 numbers
            close(
                out[row, : counts[row]], expected(*parts, lengths, counts, row, mask=causal()), 5e-6
            )


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 3])
def test_bfloat16_and_heads_that_share_keys(heads, T):
    """Queries, keys, weights and the result have 8 bits, sums 24."""
    query, keys, values = (
        normal(B, T, N, H),
        normal(B, heads, 9, H, seed=1),
        normal(B, heads, 9, H, seed=2),
    )
    more = normal(B, heads, T, H, seed=3), normal(B, heads, T, H, seed=4)
    q = jnp.broadcast_to(9 + jnp.arange(T)[None], (B, T))
    for dtype, tolerance in ((jnp.float32, 2e-6), (jnp.bfloat16, 2 * 2**-8)):
        cast = lambda x, dtype=dtype: x.astype(dtype)
        old = Slots(cast(keys), cast(values), jnp.broadcast_to(jnp.arange(9)[None], (B, 9)))
        new = Slots(*map(cast, more), q)
        out = cached.attention(
            cast(query), q, old, new, call_of({"mask": causal()}), [9], jnp.int32(0)
        )
        assert out.dtype == dtype
        whole = (
            jnp.concatenate(pair, axis=2).transpose(0, 2, 1, 3)
            for pair in zip((keys, values), more, strict=True)
        )
        rounded = [cast(x).astype(jnp.float32) for x in (query, *whole)]
        close(
            out.astype(jnp.float32),
            ops.attention(*rounded, mask=causal(), implementation="reference"),
            tolerance,
        )


@pytest.mark.thorough
def test_a_query_that_sees_no_slot_yields_zeros():
    slots = Slots(normal(B, K, 4, H), normal(B, K, 4, H), jnp.full((B, 4), -1))
    out = cached.attention(
        normal(B, 2, N, H),
        jnp.zeros((B, 2), int),
        slots,
        slots,
        call_of({"mask": causal()}),
        [4],
        jnp.int32(0),
    )
    assert (out == 0).all()


@pytest.mark.thorough
@pytest.mark.parametrize("S", [1, 4, 7])
def test_slots_keep_the_last_tokens_wherever_a_text_begins(S):
    """The token at position p is in slot p mod S: in the first call, and in later ones, of one
    token or of many."""
    rng, rows = np.random.default_rng(S), 3
    kept = np.full((rows, S), -1)
    text = lambda starts, T: np.array([np.arange(start, start + T) for start in starts])
    as_new = lambda positions: jnp.asarray(positions, jnp.float32)[:, None, :, None]
    state, lengths = jnp.full((rows, 1, S, 1), -1.0), np.zeros(rows, int)
    for step in range(12):
        T = int(rng.choice([1, 2, S, S + 3]))
        counts = rng.integers(0, T + 1, rows)
        positions = text(lengths, T)
        if step == 0:
            state = first_slots(state, as_new(positions), jnp.asarray(counts))
        else:
            written = jnp.asarray(np.where(np.arange(T)[None] < counts[:, None], positions, -1))
            state = write_slots(state, as_new(positions), written, jnp.zeros((rows, 1, 1, 1)))
        for row in range(rows):
            for position in positions[row, : counts[row]]:
                kept[row, position % S] = position
        lengths += counts
        found = np.asarray(slot_positions(S, jnp.asarray(lengths)))
        np.testing.assert_array_equal(np.where(found < 0, -1, found), kept)
        np.testing.assert_array_equal(np.where(found < 0, -1, np.asarray(state)[:, 0, :, 0]), kept)


# Products with weights whose summed axes were stored last

SPECS = {
    "btd,dnh->btnh": ((6,), (5, 4)),
    "btd,dn->btn": ((6,), (5,)),
    "btnh,nhd->btd": ((5, 4), (6,)),
    "btd,df->btf": ((6,), (7,)),
    "btf,fd->btd": ((7,), (6,)),
    "btd,de->bte": ((6,), (3,)),
    "btd,dv->btv": ((6,), (9,)),
    "btd,vd->btv": ((6,), (9,)),
    "btd,dc->btc": ((6,), (3,)),
    "btd,dp->btp": ((6,), (2,)),
    "btp,pd->btd": ((2,), (6,)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(  # each product in one precision; the other is slow
    ("spec", "dtype"),
    [
        pytest.param(spec, dtype, marks=() if (i + k) % 2 else pytest.mark.slow)
        for i, spec in enumerate(SPECS)
        for k, dtype in enumerate([jnp.float32, jnp.bfloat16])
    ],
)
def test_products_with_stored_weights(spec, dtype):
    """Of one row and of several, in float32 and in 16 bits, with the result in another precision or
    not."""
    x_axes, w_axes, out = spec.replace("->", ",").split(",")
    summed, free = SPECS[spec]
    sizes = dict(zip([a for a in x_axes if a not in "bt"], summed, strict=True))
    sizes |= dict(zip([a for a in w_axes if a in out], free, strict=True))
    w = normal(*[sizes[axis] for axis in w_axes], seed=1)
    order = tuple(np.argsort([axis not in out for axis in w_axes], kind="stable").tolist())
    stored = StoredWeight(w.astype(dtype).transpose(order), order)
    assert stored.ndim == w.ndim
    for b, t, result in itertools.product((1, 3), (1, 2), (None, jnp.float32)):
        x = normal(b, t, *summed).astype(dtype)
        found = einsum(spec, x, stored, result)
        assert found.dtype == (result or dtype)
        exact = jnp.einsum(spec, x.astype(jnp.float32), w.astype(dtype).astype(jnp.float32))
        # float32 sums in another order; a result of 16 bits is rounded once
        close(found.astype(jnp.float32), exact, 1e-6 if found.dtype == jnp.float32 else 2**-8)
        close(
            found.astype(jnp.float32),
            einsum(spec, x, w, result).astype(jnp.float32),
            1e-6 if dtype == jnp.float32 else 2**-7,
        )


@pytest.mark.thorough
def test_every_product_of_decoding_is_one_of_these(monkeypatch):
    """The specs with which models call the door for products with weights that `prepare` stores."""
    seen, module = set(), sys.modules["jaxformer.ops.einsum"]
    original = module.stored_product
    monkeypatch.setattr(
        module, "stored_product", lambda spec, x, w: (seen.add(spec), original(spec, x, w))[1]
    )
    for name in ("llama_7b", "gpt2_small", "t5_small"):
        preset = zoo.PRESETS[name]
        pair = hasattr(preset, "decoder")
        cut = lambda config: presets.sized(
            config, 1, 8, 2, vocab_size=9, d_ff=8, head_width=4, context_length=8
        )
        config = (
            models.EncoderDecoder(cut(preset.encoder), cut(preset.decoder)) if pair else cut(preset)
        )
        source = {"source": jnp.ones((1, 2), int)} if pair else {}
        params = decoding.prepare(
            config, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), models.spec(config))
        )
        state = decoding.init_cache(config, 1, 8)
        jax.eval_shape(
            partial(decoding.prefill, config, **source), params, jnp.ones((1, 2), int), state
        )
    assert seen and seen <= set(SPECS), seen - set(SPECS)


@pytest.mark.parametrize(
    ("spec", "T"), [("bkth,bksh->bkts", 1), ("bkth,bksh->bkts", 5), ("bkts,bksh->bkth", 1)]
)
def test_sums_of_a_gpu_are_the_products(spec, T):
    rng = np.random.default_rng(0)
    n = 6 if spec.startswith("bkth") else 9
    x, slots = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 3, T, n), (2, 3, 9, 6))
    )
    found, expected = (
        function(spec, jnp.float32, x, slots) for function in (cached._sums, cached._dot)
    )
    # float32 sums of nine numbers of order one
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
