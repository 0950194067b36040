"""Attention by blocks of queries against the reference, and what it saves, counted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.attention import attention, query_blocked
from jaxformer.ops.attention.call import Call
from jaxformer.tools.planning import flops
from tests.ops.attention.test_blockwise import dynamic_masks, static_masks

T, S, N, K = 11, 13, 4, 2
# sums of at most 13 terms of order one in another order; float32 unit roundoff is 6e-8
FLOAT32 = dict(rtol=5e-6, atol=5e-6)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 3 queries and 2 keys, and parts of one batch row, so that small calls have many.

    The key ranges are cached; nobody else has blocks of 3.
    """
    monkeypatch.setattr(query_blocked, "block_size", lambda query: 3)
    monkeypatch.setattr(query_blocked, "KEYS", 2)
    monkeypatch.setattr(query_blocked, "LARGEST_SHARE", 1.0)
    monkeypatch.setattr(query_blocked, "LEAST_BATCH", 1)
    monkeypatch.setattr(query_blocked, "LEAST_PAIRS", 1)


def both(arrays, **options):
    """(output, gradients) of the reference and by blocks of queries."""

    @partial(jax.jit, static_argnums=0)
    def run(name, *arrays):
        out, pullback = jax.vjp(partial(attention, implementation=name, **options), *arrays)
        return out, pullback(jnp.cos(out))

    return [jax.tree.map(np.asarray, run(name, *arrays)) for name in ("reference", "query_blocked")]


def draw(dtype=jnp.float32, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (rows, T, N, 6), (rows, S, K, 6), (rows, S, K, 5)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


MASKS = {**static_masks(T, S), **dynamic_masks(np.random.default_rng(0), 2, T, S)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.thorough if i % 4 else ()) for i, n in enumerate(MASKS)],
)
def test_is_the_reference_under_every_mask(name):
    sinks = jnp.linspace(-1, 1, N)
    dropout = dict(dropout_rate=0.3, dropout_key=jax.random.key(3))
    expected, found = both(draw(), mask=MASKS[name], softcap=2.0, sinks=sinks, **dropout)
    jax.tree.map(partial(np.testing.assert_allclose, **FLOAT32), found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), "segments"], ids=str)
def test_parts_of_a_batch_are_the_batch(mask):
    """Five rows in four parts, of 2, 1, 1 and 1: with segments of each row, and dropout that hashes
    the row."""
    arrays = draw(rows=5)
    assert query_blocked.batch_part_sizes(*arrays[:2]) == [2, 1, 1, 1]
    if mask == "segments":
        ids = np.random.default_rng(1).integers(0, 3, size=(5, T + S))
        mask = masks.segments(jnp.asarray(ids[:, :T]), jnp.asarray(ids[:, T:]))
    expected, found = both(arrays, mask=mask, dropout_rate=0.3, dropout_key=jax.random.key(3))
    jax.tree.map(partial(np.testing.assert_allclose, **FLOAT32), found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_mask_of_other_rows_than_the_batch_is_refused(count):
    """Also where a part has as many rows as the mask."""
    ids = jnp.zeros((count, T), int), jnp.zeros((count, S), int)
    with pytest.raises(ValueError, match=f"the mask has {count} rows, the batch 5"):
        attention(*draw(rows=5), mask=masks.segments(*ids), implementation="query_blocked")


@pytest.mark.thorough
def test_in_16_bits_it_stays_as_near_as_the_reference():
    arrays = draw(jnp.bfloat16)
    exact, _ = both([x.astype(jnp.float32) for x in arrays], mask=masks.causal())
    for found in both(arrays, mask=masks.causal()):
        for ours, right in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
            # a few roundings of 2^-8, of the largest number
            assert np.abs(ours.astype(np.float32) - right).max() <= 2.0**-6 * np.abs(right).max()


@pytest.mark.parametrize("name", static_masks(T, S))
def test_no_visible_key_is_outside_its_range(name):
    mask = MASKS[name]
    dense = np.asarray(mask.dense(T, S)).any((0, 1))
    found = query_blocked.key_ranges(mask, T, S, 3)
    assert [span[:2] for span in found] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    for start, stop, low, high in found:
        seen = np.flatnonzero(dense[start:stop].any(0))
        assert not len(seen) or (low <= seen[0] and seen[-1] < high <= S), (start, low, high)


def test_causal_products_are_little_more_than_half():
    """Of 12 keys, whose edges are at multiples of 2, four blocks of 3 queries read 4, 6, 10 and
    12."""
    arrays = [jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)] * 3
    some, every = (
        flops.count(partial(attention, mask=masks.causal(), implementation=name), *arrays).flops
        for name in ("query_blocked", "reference")
    )
    assert some == every * (4 + 6 + 10 + 12) / 48


@pytest.mark.thorough
def test_what_it_cannot_is_said_and_left_to_others():
    query, key, value = draw()
    bias = jnp.zeros((1, 1, T, S))
    with pytest.raises(
        NotImplementedError, match="query_blocked: no bias; implementation='blockwise' has it"
    ):
        attention(query, key, value, bias=bias, implementation="query_blocked")
    attention(query, key, value, bias=bias, mask=masks.causal())  # chosen for us: another


def test_the_choice_needs_pairs_that_are_left_out(monkeypatch):
    monkeypatch.undo()
    long = jnp.zeros((1, 256, N, 8))
    chosen = lambda mask: query_blocked.is_cheaper(long, long, Call(mask))
    assert (
        chosen(masks.causal())
        and chosen(masks.causal() & masks.window(2))
        and not chosen(masks.full())
    )


def test_a_large_batch_is_cut_on_one_cpu_alone(monkeypatch):
    """XLA:CPU runs each product of a part on one thread, and several at once; on a mesh there is
    one."""
    monkeypatch.undo()
    sizes = lambda B, T=128: query_blocked.batch_part_sizes(*[jnp.zeros((B, T, 16, 1))] * 2)
    assert [sizes(B) for B in (1, 3, 4, 9)] == [[1], [3], [2, 2], [3, 2, 2, 2]]
    assert sizes(100, T=4) == [100]  # too little for several
    x = jnp.zeros((8, 128, 16, 8))
    assert (
        jax.jit(attention).lower(x, x, x).as_text().count("stablehlo.dot_general")
        == 2 * query_blocked.BATCH_PARTS
    )
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        assert sizes(8) == [8]
