"""Masks against their definitions, written as loops."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import masks
from jaxformer.config.expressions import evaluate
from jaxformer.errors import ConfigError
from jaxformer.masks import blocks as mask_blocks, rules as mask_rules
from jaxformer.runs.names import MODEL

small = st.integers(0, 5)
layouts = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).random((3, 4)) < 0.5
)
written = st.one_of(
    st.just(masks.full()),
    st.just(masks.causal()),
    st.builds(masks.window, small, st.integers(0, 3), st.integers(1, 3)),
    st.builds(masks.strided, st.integers(1, 5)),
    st.builds(masks.prefix, st.integers(0, 6)),
    st.builds(masks.chunked, st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)),
    st.builds(
        lambda stride, share: masks.columns(stride, stride * share // 5), st.integers(1, 5), small
    ),
    st.builds(masks.global_tokens, st.one_of(small, st.lists(st.integers(0, 9), max_size=3))),
    st.builds(masks.random_blocks, st.integers(1, 3), st.integers(1, 3), small, st.integers(1, 12)),
    st.builds(masks.longformer, st.integers(0, 6), small),
    st.builds(masks.sparse_transformer_strided, st.integers(1, 4)),
    st.builds(masks.sparse_transformer_fixed, st.integers(2, 4), st.integers(0, 2)),
)
leaves = st.one_of(written, st.builds(masks.block_sparse, layouts, st.integers(1, 4)))


def combined(leaves, max_leaves=6):
    extend = lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    )
    return st.recursive(leaves, extend, max_leaves=max_leaves)


def trees(leaves):
    """Combinations of one head, and combinations of those head by head."""
    heads = st.lists(combined(leaves, 2), min_size=2, max_size=2).map(
        lambda heads: masks.by_head(*heads)
    )
    return st.one_of(combined(leaves), combined(st.one_of(leaves, heads), 4))


def visible(mask: masks.Mask, i: int, j: int, head: int = 0) -> bool:
    """The definition, for one query and one key."""
    args = mask.args
    match mask.name:
        case "full":
            return True
        case "causal":
            return j <= i
        case "window":
            left, right, dilation = (*args, 1)[:3]
            return j in [i - dilation * m for m in range(left + 1)] + [
                i + dilation * m for m in range(1, right + 1)
            ]
        case "strided":
            return (i - j) % args[0] == 0
        case "prefix":
            return j < args[0]
        case "chunked":
            size, before, after = args
            return -after <= i // size - j // size <= before
        case "columns":
            stride, count = args
            return j % stride in range(stride - count, stride)
        case "global_tokens":
            tokens = range(args[0]) if isinstance(args[0], int) else args[0]
            return i in tokens or j in tokens
        case "block_sparse":
            layout = mask_rules.layout_of(*args[1:])
            row, column = i // args[0], j // args[0]
            return (
                0 <= row < layout.shape[1]
                and 0 <= column < layout.shape[2]
                and layout[0, row, column]
            )
        case "random_blocks":
            chosen = mask_rules.choice_of(mask)
            return j // args[1] in chosen[i // args[1] % len(chosen)]
        case "and":
            return all(visible(part, i, j, head) for part in mask.parts)
        case "or":
            return any(visible(part, i, j, head) for part in mask.parts)
        case "not":
            return not visible(mask.parts[0], i, j, head)
        case "by_head":
            return visible(mask.parts[head], i, j)
    raise AssertionError(mask.rule)


def definition(mask, first, T, S, heads):
    return [
        [[visible(mask, i, j, n) for j in range(S)] for i in range(first, first + T)]
        for n in range(heads)
    ]


def evaluated(mask, first, T, S):
    """`mask.at(first).dense(T, S)[0]` in NumPy: the same rules, nothing to compile."""
    return mask.sized(S)._evaluate(
        np.arange(first, first + T)[None, None, :, None], np.arange(S)[None, None, None]
    )[0]


@settings(deadline=None, max_examples=100)
@given(trees(leaves), st.integers(1, 8), st.integers(-3, 5), st.integers(0, 3))
def test_algebra_equals_its_definition(mask, T, more, offset):
    S = max(T + more, 1)
    for first in (S - T, offset):
        values = evaluated(mask, first, T, S)
        np.testing.assert_array_equal(values, definition(mask, first, T, S, len(values)))


@pytest.mark.thorough
@settings(deadline=None, max_examples=25)
@given(trees(leaves), st.none() | st.integers(0, 3))
def test_jax_and_numpy_give_the_same_mask(mask, offset):
    mask = mask if offset is None else mask.at(offset)
    dense = jax.jit(lambda: mask.dense(5, 7))()
    np.testing.assert_array_equal(dense[0], evaluated(mask, 2 if offset is None else offset, 5, 7))


@pytest.mark.thorough
@settings(deadline=None, max_examples=100)
@given(trees(written))
def test_text_form_reads_back_as_the_same_value(mask):
    again = evaluate(str(mask), MODEL)  # as the command line reads it
    assert again == mask and hash(again) == hash(mask)


def test_what_has_no_text_form_is_readable_and_refused():
    layout = np.eye(3, dtype=bool)

    def causal(mask, q, kv):
        return kv < q

    for mask, text in (
        (masks.block_sparse(layout, 128), "block_sparse(<bool[1, 3, 3]>, 128)"),
        (masks.block_sparse(jnp.asarray(layout), 128), "block_sparse(128, <bool[1, 3, 3]>)"),
        (masks.global_tokens(jnp.full((2, 3), 2, jnp.int32)), "global_tokens(<int32[2, 3]>)"),
        (masks.causal().at(jnp.asarray(3)), "causal().at(<int32[]>)"),
        ((masks.causal() & masks.full()).at(-3), "(causal() & full()).at(-3)"),
        (masks.Mask(causal), "Mask(causal)"),
    ):
        assert str(mask) == text
        with pytest.raises(ConfigError):
            evaluate(text, MODEL)


@pytest.mark.parametrize(
    "text",
    [
        "windw(3)",
        "causal() + full()",
        "window(-1)",
        "__import__('os')",
        "window(1, 2, 3, 4)",
        "",
        "by_head()",
        "by_head(3)",
        "causal().to(3)",
        "global_tokens('a')",
        "global_tokens((1.5,))",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ConfigError):
        evaluate(text, MODEL)


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.window(2, -1),
        lambda: masks.window(2, 0, 0),
        lambda: masks.strided(0),
        lambda: masks.chunked(0),
        lambda: masks.columns(3, 4),
        lambda: masks.window(2**31),
        lambda: inspect.unwrap(masks.window)(1, 2.5),
        lambda: masks.chunked(1, 2**31),
        lambda: masks.strided(2**40),
        lambda: masks.prefix(2**31),
        lambda: masks.global_tokens(2**31),
        lambda: masks.global_tokens((1, 2**31)),
        lambda: masks.longformer(-4, 1),
        lambda: masks.sparse_transformer_fixed(3, 4),
        lambda: masks.random_blocks(1, 2, 0, 2**31),
        lambda: masks.random_blocks(1, 2, -1),
        lambda: masks.causal().at(2**30 + 1),
        lambda: masks.causal().at(-(2**31)),
        lambda: inspect.unwrap(masks.Mask.at)(masks.causal(), jnp.array([3, 5])),
        lambda: inspect.unwrap(masks.Mask.at)(masks.causal(), 1.5),
        lambda: masks.global_tokens(-1),
        lambda: masks.global_tokens([3, -1]),
        lambda: masks.global_tokens(jnp.arange(3)),
        lambda: masks.block_sparse([True, False], 2),
        lambda: masks.random_blocks(0, 2),
        lambda: masks.causal().blocks(4, 4, 0),
    ],
)
def test_arguments_are_checked_at_the_door(build):
    with pytest.raises(ValueError):
        build()


HUGE = 2**31 - 1
extreme = st.sampled_from([0, 1, 3, 40, 2**16, 2**30, HUGE - 1, HUGE])
positive = extreme.filter(bool)
EXTREMES = st.one_of(
    *(st.builds(masks.window, extreme, extreme, positive), st.builds(masks.strided, positive)),
    *(st.builds(masks.chunked, positive, extreme, extreme), st.builds(masks.prefix, extreme)),
    *(st.builds(masks.columns, st.just(HUGE), extreme), st.builds(masks.global_tokens, extreme)),
    *(st.builds(lambda token: masks.global_tokens((2, token)), extreme), st.just(masks.causal())),
    st.builds(lambda block: masks.block_sparse(np.eye(2, dtype=bool), block), positive),
    st.builds(lambda count, block: masks.random_blocks(count, block, 0, 40), positive, positive),
)


def by_differences(mask, i, j):
    """The definition with Python's integers, which have no end."""
    match mask.name:
        case "window":
            left, right, dilation = (*mask.args, 1)[:3]
            return (i - j) % dilation == 0 and -right * dilation <= i - j <= left * dilation
        case "columns":
            return j % mask.args[0] >= mask.args[0] - mask.args[1]
        case "global_tokens" if isinstance(mask.args[0], int):
            return 0 <= i < mask.args[0] or 0 <= j < mask.args[0]
    return visible(mask, i, j)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(EXTREMES, st.sampled_from([0, -3, 2, 30, 2**30, -(2**30)]))
def test_arguments_near_the_end_of_the_integers(mask, first):
    truth = np.array(
        [[by_differences(mask, i, j) for j in range(7)] for i in range(first, first + 5)]
    )
    rows = first + np.arange(5)
    # as the rules get them: from dense, from blocks, and while a block is looked at
    with jax.disable_jit():
        np.testing.assert_array_equal(mask.at(first).dense(5, 7)[0, 0], truth)
    for dtype in (np.int32, np.int64):
        q, kv = rows.astype(dtype)[None, None, :, None], np.arange(7, dtype=dtype)[None, None, None]
        np.testing.assert_array_equal(mask._evaluate(q, kv)[0, 0], truth)
    np.testing.assert_array_equal(mask.at(first).blocks(5, 7, (2, 3)), brute_of(truth[None], 2, 3))
    assert mask.at(first).density(5, 7) == pytest.approx(truth.mean(), abs=1e-12)


def test_small_integers_as_positions_do_not_wrap():
    for dtype in (np.int8, np.int16):
        shown = masks.window(100, 60)(np.array([3, 100], dtype), np.array([0, 120], dtype))
        np.testing.assert_array_equal(shown[0, 0], [[True, False], [True, True]])


@pytest.mark.thorough
def test_segments_separate_and_padding_is_seen_by_nobody():
    ids = jnp.array([[0, 0, 1, 1, 2], [1, 1, 1, 0, 0]])
    dense = np.asarray(masks.segments(ids).dense(5, 5))
    for b in range(2):
        for i in range(5):
            for j in range(5):
                assert dense[b, 0, i, j] == (ids[b, i] == ids[b, j] and ids[b, j] != 0)


def test_lengths_and_prefix_by_row():
    q, kv = jnp.array([2, 4]), jnp.array([3, 1])
    dense = np.asarray(masks.lengths(q, kv).dense(4, 4))
    prefix = np.asarray(masks.prefix(kv).dense(4, 4))
    for b in range(2):
        for i in range(4):
            for j in range(4):
                assert dense[b, 0, i, j] == (i < q[b] and j < kv[b])
                assert prefix[b, 0, i, j] == (j < kv[b])


def test_masks_are_static_arguments_or_pytrees():
    static = jax.jit(lambda mask: mask.dense(3, 3), static_argnums=0)
    np.testing.assert_array_equal(
        static(masks.causal() | masks.prefix(1)), (masks.causal() | masks.prefix(1)).dense(3, 3)
    )
    traced = jax.jit(lambda mask: mask.dense(3, 3))
    mask = masks.causal() & masks.segments(jnp.array([[1, 1, 2]]))
    np.testing.assert_array_equal(traced(mask), mask.dense(3, 3))


def test_a_users_rule_is_a_mask():
    even = masks.Mask(lambda mask, q, kv: (q + kv) % 2 == 0)
    np.testing.assert_array_equal(
        (even & masks.causal()).dense(3, 3)[0, 0], [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    )


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("shape", [(2, 5), (5, 2)])
def test_global_tokens_by_row_of_an_array(shape):
    rng = np.random.default_rng(0)
    indices = rng.integers(-1, 7, shape)
    flags = np.zeros((shape[0], 7), bool)
    for row, tokens in enumerate(indices):
        flags[row, tokens[tokens >= 0]] = True
    expected = flags[:, :, None] | flags[:, None, :]
    dense = jax.jit(lambda x: masks.global_tokens(x).dense(7, 7))
    np.testing.assert_array_equal(dense(jnp.asarray(indices))[:, 0], expected)
    np.testing.assert_array_equal(dense(jnp.asarray(flags))[:, 0], expected)
    static = np.stack([masks.global_tokens(row[row >= 0]).dense(7, 7)[0, 0] for row in indices])
    np.testing.assert_array_equal(static, expected)


@pytest.mark.thorough
def test_positions_by_row():
    rng = np.random.default_rng(1)
    q, kv = rng.integers(0, 12, (3, 4)), rng.integers(0, 12, (3, 5))
    layout = rng.random((2, 4, 4)) < 0.5
    for mask in (
        *(
            masks.window(3, 1, 2),
            masks.bigbird(2, random=1).sized(12),
            masks.block_sparse(jnp.asarray(layout), 3),
        ),
        *(
            masks.sparse_transformer_fixed(4, 1),
            masks.by_head(masks.causal(), masks.global_tokens((3, 5))),
        ),
        masks.segments(jnp.arange(12)[None] // 4),  # the same ids for all rows
    ):
        by_row, whole = (
            np.asarray(jax.jit(mask.__call__)(q, kv)),
            np.asarray(mask.at(0).dense(12, 12)[0]),
        )
        for b in range(3):
            np.testing.assert_array_equal(by_row[b], whole[:, q[b]][:, :, kv[b]])


@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [False, True])
def test_block_sparse_repeats_its_layout_and_sees_nothing_beyond(dynamic):
    layout = np.random.default_rng(2).random((3, 2, 4)) < 0.5
    for heads in (layout, layout[0]):
        mask = masks.block_sparse(jnp.asarray(heads) if dynamic else heads, 3)
        expected = np.zeros((3 if heads.ndim == 3 else 1, 8, 15), bool)
        expected[:, :6, :12] = heads.repeat(3, -2).repeat(3, -1)
        np.testing.assert_array_equal(mask.at(0).dense(8, 15)[0], expected)
    assert (
        masks.block_sparse(layout.tolist(), 3)
        == masks.block_sparse(layout, 3)
        != masks.block_sparse(~layout, 3)
    )


def test_random_blocks_are_distinct_fixed_by_the_seed_and_evenly_spread():
    chosen = mask_rules.choice_of(masks.random_blocks(3, 4, seed=5, length=8000))
    assert chosen.shape == (2000, 3) and chosen.min() >= 0 and chosen.max() < 2000
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    # 6,000 draws over 10 equal ranges: 600 each, standard deviation 23
    assert abs(np.histogram(chosen, 10, (0, 2000))[0] - 600).max() < 5 * 23
    unsized = masks.random_blocks(3, 4, seed=5)
    with pytest.raises(ValueError, match="sized"):
        unsized(np.arange(4), np.arange(4))
    assert (unsized | masks.causal()).sized(30) == masks.random_blocks(3, 4, 5, 30) | masks.causal()
    longer = evaluated(unsized, 0, 40, 30)[0]
    np.testing.assert_array_equal(longer[:12], evaluated(unsized, 0, 12, 30)[0])
    np.testing.assert_array_equal(longer[32:40], longer[:8])  # there are 8 key blocks, so 8 draws
    assert not (longer == evaluated(masks.random_blocks(3, 4, seed=6), 0, 40, 30)[0]).all()
    assert evaluated(masks.random_blocks(9, 4), 0, 8, 8).all()
    assert masks.random_blocks(3, 4).dense(3, 0).shape == (1, 1, 3, 0)


def test_compositions_are_those_of_the_papers():
    n = 400
    # Child et al.: at a stride of sqrt(n), strided attention sees about 2 sqrt(n) keys a row
    rows = evaluated(masks.sparse_transformer_strided(20), 0, n, n)[0].sum(1)
    assert rows.max() == 20 + 19 and rows.argmax() >= 380
    fixed = evaluated(masks.sparse_transformer_fixed(20, 3), 0, n, n)[0]
    for i in range(0, n, 7):
        own = [j for j in range(i + 1) if j // 20 == i // 20]
        summaries = [j for j in range(i + 1) if j // 20 < i // 20 and j % 20 >= 17]
        assert np.flatnonzero(fixed[i]).tolist() == sorted(own + summaries)
    longformer = evaluated(masks.longformer(8, [0, 50]), 0, 100, 100)[0]
    assert longformer[0].all() and longformer[:, 50].all()
    assert np.flatnonzero(longformer[30]).tolist() == [0, *range(26, 35), 50]
    bigbird = evaluated(masks.bigbird(10, random=2, seed=3), 0, 200, 200)[0]
    blocks = bigbird[::10, ::10]
    np.testing.assert_array_equal(bigbird, blocks.repeat(10, 0).repeat(10, 1))
    assert blocks[:2].all() and blocks[:, :2].all()
    assert all(
        blocks[i, max(i - 1, 0) : i + 2].all() and 5 <= blocks[i].sum() <= 7 for i in range(3, 19)
    )


def test_two_offsets_do_not_combine():
    with pytest.raises(ValueError, match="offset"):
        masks.causal().at(1) & masks.full().at(2)
    assert (masks.causal().at(1000) & masks.full().at(int("1000"))).offset == 1000
    assert masks.causal().at(3) & masks.prefix(2) == (masks.causal() & masks.prefix(2)).at(3)


def test_names_conjuncts_and_static():
    ids = jnp.ones((1, 4), jnp.int32)
    mask = (masks.causal() & masks.window(3) & masks.segments(ids)).at(2)
    assert [part.name for part in mask.conjuncts()] == ["causal", "window", "segments"]
    assert [part.offset for part in mask.conjuncts()] == [2, 2, 2]
    assert (~mask).conjuncts() == (~mask,) and (~mask).name == "not"
    assert not mask.static and not masks.causal().at(jnp.asarray(1)).static
    assert masks.by_head(masks.causal().at(3), masks.bigbird(4)).static
    shifting = masks.by_head(~masks.causal(), masks.window(3, 0, 2) | masks.strided(4))
    assert masks.shift_invariant(shifting) and not masks.shift_invariant(
        shifting & masks.chunked(3)
    )
    with pytest.raises(ValueError, match="one head each"):
        masks.by_head(shifting, masks.full()).dense(3, 3)


# Blocks


def brute_of(dense, rows, columns):
    """The definition: EMPTY if no pair of a block is visible in any head, FULL if all are in all of
    them."""
    edges = np.arange(0, dense.shape[1], rows), np.arange(0, dense.shape[2], columns)
    count = lambda x: np.add.reduceat(
        np.add.reduceat(x.astype(int), edges[0], axis=-2), edges[1], axis=-1
    )
    seen, pairs = count(dense), count(np.ones(dense.shape[1:], bool))
    empty, full = (seen == 0).all(0), (seen == pairs).all(0)
    return np.where(empty, masks.EMPTY, np.where(full, masks.FULL, masks.PARTIAL))


LAYOUT = np.random.default_rng(3).random((2, 7, 9)) < 0.6
CASES = [
    *(
        masks.full(),
        ~masks.full(),
        masks.causal(),
        masks.window(5),
        masks.window(3, 2),
        masks.window(4, 1, 3),
    ),
    *(
        masks.strided(1),
        masks.strided(5),
        masks.prefix(7),
        masks.chunked(4),
        masks.chunked(3, 1, 2),
    ),
    *(
        masks.columns(6, 2),
        masks.global_tokens(5),
        masks.global_tokens((0, 7, 8, 31)),
        masks.random_blocks(2, 3),
    ),
    *(
        masks.random_blocks(2, 5, 1, 20),
        masks.block_sparse(LAYOUT, 4),
        masks.block_sparse(LAYOUT[0], 5),
    ),
    *(masks.longformer(8, 2), masks.bigbird(3), masks.causal() & masks.bigbird(4, random=1)),
    *(
        masks.sparse_transformer_strided(6),
        masks.sparse_transformer_fixed(6, 2),
        masks.causal() & masks.window(6),
    ),
    masks.by_head(masks.causal(), masks.bigbird(4), ~masks.chunked(5)) & masks.window(15, 3),
    masks.causal() & masks.window(9) | masks.global_tokens(4),
    (masks.strided(3) | masks.columns(4, 1)) & ~masks.chunked(10, 1),
    masks.prefix(12) & ~masks.prefix(3) | masks.strided(7) & masks.block_sparse(LAYOUT[1], 3),
]


def sweep(mask, share):
    """All lengths up to 40, all square blocks up to 8 and as many oblong ones; or a share of
    them."""
    rng = np.random.default_rng(4)
    for T in range(1, 41):
        for S in range(1, 41):
            blocks = [
                (b, c)
                for b in range(1, 9)
                for c in (b, int(rng.integers(1, 9)))
                if rng.random() <= share
            ]
            dense = evaluated(mask, S - T, T, S) if blocks else None
            for block in blocks:
                got = mask.blocks(T, S, block)
                assert got.dtype == np.int8
                assert np.array_equal(got, brute_of(dense, *block)), (
                    f"{mask}: T={T}, S={S}, block {block}"
                )


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("mask", CASES, ids=str)
def test_blocks_equal_brute_force(mask):
    sweep(mask, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mask", CASES, ids=str)
def test_blocks_equal_brute_force_at_every_size(mask):
    sweep(mask, 1.0)


@pytest.mark.thorough
@settings(deadline=None, max_examples=300)
@given(
    trees(leaves),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 8),
    st.integers(1, 8),
    st.data(),
)
def test_blocks_of_combinations_and_offsets_equal_brute_force(mask, T, S, rows, columns, data):
    first = data.draw(st.integers(-5, 15))
    got = mask.at(first).blocks(T, S, (rows, columns))
    dense = evaluated(mask, first, T, S)
    np.testing.assert_array_equal(got, brute_of(dense, rows, columns))
    assert mask.at(first).density(T, S) == pytest.approx(dense.mean(), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(trees(leaves), st.integers(1, 30), st.integers(1, 30), st.integers(1, 8))
def test_blocks_without_looking_at_pairs_are_never_wrong(mask, T, S, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_blocks, "BUDGET", 0)
        patch.setattr(mask_blocks, "SAMPLES", 1)
        got, truth = mask.blocks(T, S, block), brute_of(evaluated(mask, S - T, T, S), block, block)
    np.testing.assert_array_equal(np.where(got == masks.PARTIAL, truth, got), truth)


@pytest.mark.parametrize(
    "mask", [masks.full(), masks.bigbird(4), masks.chunked(3) & masks.prefix(2)], ids=str
)
def test_no_queries_or_no_keys(mask):
    for T, S in ((0, 5), (5, 0), (0, 0)):
        assert mask.blocks(T, S, 4).shape == (-(-T // 4), -(-S // 4))
        assert mask.density(T, S) == 0


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("mask", CASES[2:], ids=str)
def test_a_long_sequence_is_classified_without_an_array_of_all_pairs(mask, monkeypatch):
    looked = []
    look = mask_blocks.count_visible
    monkeypatch.setattr(
        mask_blocks,
        "count_visible",
        lambda *a: looked.append(a[3].size * a[4].size * len(a[5])) or look(*a),
    )
    n, block = 131_072, 512
    classes = mask.blocks(n, n, block)
    assert classes.shape == (256, 256) and sum(looked) <= 2 * mask_blocks.BUDGET
    rng = np.random.default_rng(0)
    q, kv = (np.sort(rng.integers(0, n, 400)) for _ in range(2))
    some = mask.sized(n)._evaluate(q[None, None, :, None], kv[None, None, None, :])[0]
    where = classes[q // block][:, kv // block]
    assert not some[:, where == masks.EMPTY].any() and some[:, where == masks.FULL].all()


@pytest.mark.thorough
def test_arrays_make_blocks_partial_where_the_rest_does_not_decide():
    ids = jnp.ones((2, 12), jnp.int32)
    causal, window = masks.causal(), masks.window(3)
    expected = causal.blocks(12, 12, 4)
    flags = jnp.asarray(np.random.default_rng(5).random((2, 12)) < 0.2)
    for mask in (
        *(
            window & causal & masks.lengths(kv=jnp.array([3, 7])),
            ~causal | masks.prefix(jnp.array([2, 5])) | ~window,
        ),
        *(
            window | masks.global_tokens(flags),
            ~(causal & masks.by_head(masks.segments(ids), window, masks.full())),
        ),
    ):
        got, truth = (
            mask.blocks(12, 12, 2),
            brute_of(np.asarray(mask.dense(12, 12)).reshape(-1, 12, 12), 2, 2),
        )
        np.testing.assert_array_equal(np.where(got == masks.PARTIAL, truth, got), truth)
        assert len(np.unique(got)) == 2
        # a float32 mean
        assert mask.density(12, 12) == pytest.approx(
            np.asarray(mask.dense(12, 12)).mean(), abs=1e-6
        )
    np.testing.assert_array_equal(
        (causal & masks.segments(ids)).blocks(12, 12, 4), np.minimum(expected, 1)
    )
    np.testing.assert_array_equal(
        (causal | masks.segments(ids)).blocks(12, 12, 4), np.maximum(expected, 1)
    )
    np.testing.assert_array_equal(
        (~(causal & masks.segments(ids))).blocks(12, 12, 4), 2 - np.minimum(expected, 1)
    )
    # what is known is settled together: causal and its opposite leave nothing, whatever the
    # segments are
    assert (causal & masks.segments(ids) & ~causal).blocks(12, 12, 5).max() == masks.EMPTY
    heads = masks.by_head(masks.segments(ids), ~masks.full()) & causal
    np.testing.assert_array_equal(heads.blocks(12, 12, 4), np.minimum(expected, 1))
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda x: masks.segments(x).density(12, 12))(ids)
    assert masks.segments(jnp.array([[1, 1, 2], [0, 0, 1]])).density(3, 3) == pytest.approx(
        (5 + 1) / 18
    )


def test_an_integer_offset_stays_known_under_jit():
    """A mask that is an argument of `jit` keeps its number; only an array is traced."""
    mask, seen = masks.causal().at(0) & masks.lengths(kv=jnp.array([2])), []
    blocks = jax.jit(lambda mask: seen.append(mask.blocks(4, 8, 4).tolist()) or mask.dense(4, 8))(
        mask
    )
    np.testing.assert_array_equal(blocks, mask.dense(4, 8))
    assert seen == [[[1, 0]]] and not jax.tree.leaves(masks.causal().at(3))


def test_a_traced_offset_leaves_what_no_offset_moves():
    seen = {}

    @jax.jit
    def trace(start):
        for name, mask in dict(
            causal=masks.causal(),
            full=masks.full(),
            prefix=masks.prefix(4) & ~masks.columns(2, 2),
            both=masks.prefix(4) & masks.window(100, 100),
        ).items():
            seen[name] = mask.at(start).blocks(4, 8, 4).tolist()
        return start

    trace(jnp.asarray(3))
    assert seen == dict(causal=[[1, 1]], full=[[2, 2]], prefix=[[0, 0]], both=[[1, 0]])


@pytest.mark.thorough
def test_blocks_while_tracing():
    """Also of a rule that uses jax.numpy, and of one that waits for a traced value."""
    rule = masks.Mask(lambda mask, q, kv: jnp.where(q > 5, kv < 4, kv >= 4))
    mask, seen = rule & masks.causal(), []

    @jax.jit
    def trace(limit):
        waiting = masks.Mask(lambda mask, q, kv: (kv < limit) & (q == q))
        seen.append(mask.blocks(12, 12, 3))
        seen.append((waiting & masks.causal()).blocks(12, 12, 3))
        return mask.dense(12, 12), limit

    dense, _ = trace(3)
    np.testing.assert_array_equal(seen[0], brute_of(np.asarray(dense)[0], 3, 3))
    np.testing.assert_array_equal(
        seen[1], np.minimum(masks.causal().blocks(12, 12, 3), masks.PARTIAL)
    )
    heads = masks.Mask(lambda mask, q, kv: kv <= q + jnp.arange(3)[None, :, None, None])
    np.testing.assert_array_equal(
        heads.blocks(9, 9, 2), brute_of(np.asarray(heads.dense(9, 9))[0], 2, 2)
    )
    everything = masks.Mask(lambda mask, q, kv: True)
    assert (everything.blocks(9, 9, 2) == masks.FULL).all() and everything.density(9, 9) == 1


def test_density_of_long_sequences():
    n = 131_072
    assert masks.causal().density(n, n) == (n + 1) / (2 * n)
    assert masks.chunked(512).density(n, n) == 512 / n
    assert masks.bigbird(64, random=1, globals=0, window=1).density(512, 512) == pytest.approx(
        2 / 8, abs=1 / 8
    )
    # two triangles are missing where the window leaves the sequence; global rows and columns cover
    # some of the window
    window = 513 * n - 256 * 257
    covered = 2 * sum(257 + i for i in range(16)) - sum(1 for i in range(16) for j in range(16))
    expected = (window + 32 * n - 256 - covered) / n**2
    assert masks.longformer(512, 16).density(n, n) == pytest.approx(expected, rel=1e-12)
    # of this one all pairs are counted
    assert (masks.strided(128) & masks.columns(128, 4)).density(4096, 4096) == 4 / 128**2


@pytest.mark.thorough
def test_pictures(tmp_path):
    ids = jnp.array([[1] * 10 + [2] * 6, [1] * 16])
    for name, mask, panels in (
        ("one", masks.longformer(6, 2), 1),
        ("heads", masks.by_head(*[masks.causal()] * 5), 4),
        ("rows", masks.causal() & masks.segments(ids), 1),
    ):
        figure = mask.plot(16, 16)
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        assert len(figure.axes) == panels
    assert masks.causal().plot(3, 5) is not None
