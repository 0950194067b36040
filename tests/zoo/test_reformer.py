"""LSH attention against its definition in float64 loops, lucidrains' attention and Hugging Face's
whole Reformer."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops
from jaxformer.zoo.reformer import attention as lsh_attention, lsh_buckets, random_rotations
from jaxformer.zoo.reversible import reversible_stack
from tests.witnesses import load

# float64 sums of at most a hundred terms of order one; the self score of -1e5 costs five digits of
# a logarithm where it
# stands alone, and none elsewhere
FLOAT64 = dict(rtol=1e-10, atol=1e-10)


def definition(
    query_key,
    value,
    rotations,
    chunk,
    visible,
    before,
    after,
    scale,
    duplicates,
    count=None,
    multiple=None,
):
    """One query at a time. `visible` is [B, T, T]; a token that cannot see itself is padding, and
    hashes last.

    A pair that met m times, n of them in the same round for both, counts `count(m, n)`: m with
    duplicates, else 1.
    """
    count = count or (lambda m, n: m if duplicates else 1)
    B, T, N = query_key.shape[:3]
    multiple = multiple or chunk
    rounds, per_round = rotations.shape[2], -(-T // multiple) * multiple // chunk
    total = rounds * per_round
    out = np.zeros_like(value)
    for b in range(B):
        for n in range(N):
            x = query_key[b, :, n]
            where, bucket = [{} for _ in range(rounds)], np.zeros((rounds, T), int)
            # tokens of each chunk, the rounds one after another
            circle = [[] for _ in range(total)]
            for r in range(rounds):
                sides = x @ rotations[n, :, r]
                bucket[r] = np.concatenate([sides, -sides], -1).argmax(-1)
                bucket[r][~visible[b].diagonal()] = 1000
                for place, t in enumerate(sorted(range(T), key=lambda t: (bucket[r, t], t))):
                    where[r][t] = r * per_round + place // chunk
                    circle[where[r][t]].append((r, t))
            for i in range(T):
                met_at = {}
                for r in range(rounds):
                    window = [
                        (where[r][i] + d * (abs(d) <= total)) % total
                        for d in range(-before, after + 1)
                    ]
                    window = (
                        window
                        if duplicates
                        else {(where[r][i] + d) % total for d in range(-before, after + 1)}
                    )
                    for met, j in [pair for c in window for pair in circle[c]]:
                        if visible[b, i, j]:
                            met_at.setdefault(j, []).append(met == r)
                keys = [j for j in met_at if j != i or set(met_at) == {i}]
                if keys:
                    score = np.array([scale * x[i] @ x[j] / np.linalg.norm(x[j]) for j in keys])
                    counts = np.array([count(len(met_at[j]), sum(met_at[j])) for j in keys])
                    e = counts * np.exp(score - score.max())
                    out[b, i, n] = e @ value[b, keys, n] / e.sum()
    return out


def case(seed, T, N=2, H=4, rounds=2, buckets=4, B=2, dtype=float):
    rng = np.random.default_rng(seed)
    arrays = [
        rng.normal(size=shape)
        for shape in ((B, T, N, H), (B, T, N, 3), (N, H, rounds, buckets // 2))
    ]
    return [jnp.asarray(x.astype(dtype)) for x in arrays]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_equals_its_definition(seed):
    """Any length, chunks on both sides, both ways of counting, both temperatures, padding inside
    and at the end."""
    rng = np.random.default_rng(seed)
    T = int(rng.integers(5, 20))
    chunk, before, after = int(rng.integers(2, 5)), int(rng.integers(0, 3)), int(rng.integers(0, 2))
    options = dict(duplicates=bool(seed & 1), scale=float(rng.uniform(0.4, 1.5)))
    i = np.arange(T)
    length = rng.integers(1, T + 1, 2)
    ids = rng.integers(0, 3, (2, T))
    with jax.enable_x64(True):
        mask, visible = [
            (None, np.ones((2, T, T), bool)),
            (masks.causal(), np.broadcast_to(i[None] <= i[:, None], (2, T, T))),
            (
                masks.causal() & masks.lengths(jnp.array(length), jnp.array(length)),
                (i[None] <= i[:, None])
                & (i < length[:, None])[:, None]
                & (i < length[:, None])[:, :, None],
            ),
            (
                masks.segments(jnp.array(ids)),
                (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None],
            ),
        ][(seed + 1) % 4]
        query_key, value, rotations = case(seed, T, rounds=int(rng.integers(1, 4)))
        f = partial(
            lsh_attention,
            chunk=chunk,
            chunks_before=before,
            chunks_after=after,
            eps=0.0,
            mask=mask,
            **options,
        )
        ours = jax.jit(f)(query_key, value, rotations)
        sizes = (chunk, visible, before, after, options["scale"], options["duplicates"])
        expected = definition(*map(np.asarray, (query_key, value, rotations)), *sizes)
    np.testing.assert_allclose(ours, expected, **FLOAT64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("T", "before", "after", "multiple"), [(5, 1, 1, 4), (7, 3, 0, 4), (4, 2, 2, 4), (6, 1, 0, 12)]
)
def test_short_circles_and_longer_padding(T, before, after, multiple):
    """As in Hugging Face's model: a chunk met twice counts twice, beyond a full turn it is the own
    one; padding is chunks."""
    options = dict(before=before, after=after, scale=1.0, duplicates=True)
    i = np.arange(T)
    with jax.enable_x64(True):
        inputs = case(T, T, rounds=1 + T % 2)
        shape = dict(chunk=4, chunks_before=before, chunks_after=after, multiple=multiple)
        ours = lsh_attention(*inputs, **shape, mask=masks.causal(), duplicates=True, eps=0.0)
        visible = np.broadcast_to(i[None] <= i[:, None], (2, T, T))
        expected = definition(*map(np.asarray, inputs), 4, visible, **options, multiple=multiple)
    np.testing.assert_allclose(ours, expected, **FLOAT64)


@pytest.mark.thorough
def test_all_in_one_chunk_is_exact_attention():
    """With a chunk that holds everything the hashes do not matter: attention with unit keys, self
    only for the first token."""
    with jax.enable_x64(True):
        query_key, value, rotations = case(0, 12, rounds=3)
        unit = query_key / jnp.linalg.norm(query_key, axis=-1, keepdims=True)
        mask = masks.causal() & (~masks.window(0) | masks.prefix(1))
        expected = jax.jit(partial(ops.attention, mask=mask, scale=1.0))(query_key, unit, value)
        f = jax.jit(partial(lsh_attention, chunk=12, mask=masks.causal(), eps=0.0))
        np.testing.assert_allclose(f(query_key, value, rotations), expected, **FLOAT64)


@pytest.mark.thorough
def test_more_rounds_come_closer_to_exact_attention():
    """What hashing is for: the error against exact attention falls as rounds are added."""
    rng = np.random.default_rng(0)
    T, N, H = 128, 1, 8
    centres = rng.normal(size=(16, H))
    x = jnp.asarray(
        4 * (centres[rng.integers(0, 16, T)] + 0.3 * rng.normal(size=(T, H))), jnp.float32
    )[None, :, None]
    value = jnp.asarray(rng.normal(size=(1, T, N, H)), jnp.float32)
    tokens = np.asarray(x)[0, :, 0]
    scores = tokens @ (tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)).T
    np.fill_diagonal(scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = ((weights / weights.sum(-1, keepdims=True)) @ np.asarray(value)[0, :, 0])[None, :, None]
    errors = []
    for rounds in (1, 4):
        rotations = random_rotations(jax.random.key(1), N, H, rounds, 16)
        ours = jax.jit(partial(lsh_attention, chunk=8))(x, value, rotations)
        errors.append(np.sqrt(np.mean(np.square(np.asarray(ours) - exact))))
    assert errors[1] < 0.6 * errors[0], errors


@pytest.mark.thorough
def test_factors_are_digits_of_one_bucket():
    rotations = random_rotations(jax.random.key(0), 2, 4, 3, (4, 6))
    assert [R.shape for R in rotations] == [(2, 4, 3, 2), (2, 4, 3, 3)]
    x = case(0, 9, dtype=np.float32)[0]
    first, second, both, shared = jax.jit(
        # the last: one set for both heads
        lambda x, R: [lsh_buckets(x, R) for R in (R[0], R[1], R, R[0][:1])]
    )(x, rotations)
    np.testing.assert_array_equal(both, first + 4 * second)
    np.testing.assert_array_equal(shared[:, 0], first[:, 0])
    with pytest.raises(ValueError, match="even"):
        random_rotations(jax.random.key(0), 2, 4, 3, 5)


@pytest.mark.thorough
def test_gradients_equal_finite_differences():
    """Away from the hashes' edges the function is smooth: central differences along random
    directions."""
    with jax.enable_x64(True):
        query_key, value, rotations = case(3, 13, B=1)
        query_key, value = map(np.asarray, (query_key, value))
        rng = np.random.default_rng(0)
        length = jnp.array([10])
        mask = masks.causal() & masks.lengths(length, length)
        g = jnp.asarray(rng.normal(size=value.shape))
        f = jax.jit(lambda q, v: jnp.sum(lsh_attention(q, v, rotations, chunk=4, mask=mask) * g))
        gradients = jax.jit(jax.grad(f, (0, 1)))(query_key, value)
        assert all(np.isfinite(x).all() and not np.asarray(x)[:, 10:].any() for x in gradients)
        for _ in range(3):
            step = [rng.normal(size=x.shape) for x in (query_key, value)]
            # h = 1e-6: truncation h^2 and rounding 1e-16 / h both below 1e-9; no hash lies that
            # close to an edge
            ends = [f(query_key + s * step[0], value + s * step[1]) for s in (1e-6, -1e-6)]
            slope = sum(np.vdot(d, ours) for d, ours in zip(step, gradients, strict=True))
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, slope, rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
def test_16_bit_inputs():
    """bfloat16 takes the same neighbours as its values in float32 (sums are float32), and rounds
    weights and outputs."""
    arrays = [x.astype(jnp.bfloat16) for x in case(1, 24, H=8, dtype=np.float32)]
    f = partial(lsh_attention, chunk=4, mask=masks.causal(), scale=0.5)

    @jax.jit
    def both(query_key, value, rotations):
        out, pullback = jax.vjp(lambda *x: f(*x, rotations), query_key, value)
        return out, pullback(jnp.ones_like(out))

    (out, gradients), (expected, wide_gradients) = (
        both(*arrays),
        both(*[x.astype(jnp.float32) for x in arrays]),
    )
    assert out.dtype == jnp.bfloat16
    for ours, theirs in zip((out, *gradients), (expected, *wide_gradients), strict=True):
        # keys, weights and outputs are rounded to 8 bits each: a few of these roundings of the
        # largest entry
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs, rtol=0, atol=0.03 * np.abs(theirs).max()
        )


@pytest.mark.thorough
def test_causality():
    """What token k is does not reach outputs before k, except through the hashes of later tokens,
    which are masked."""
    query_key, value, rotations = case(5, 12, dtype=np.float32)
    f = jax.jit(partial(lsh_attention, chunk=3, mask=masks.causal(), chunks_after=1))
    for array in range(2):
        changed = [query_key, value]
        changed[array] = changed[array].at[:, 7:].add(1.0)
        if array:  # values alone: nothing moves
            np.testing.assert_array_equal(
                f(*changed, rotations)[:, :7], f(query_key, value, rotations)[:, :7]
            )
    whole = jax.jit(partial(lsh_attention, chunk=12, mask=masks.causal()))
    # in one chunk the hashes of later tokens push nobody apart
    changed = query_key.at[:, 7:].add(1.0)
    np.testing.assert_allclose(
        whole(changed, value, rotations)[:, :7],
        whole(query_key, value, rotations)[:, :7],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.thorough
def test_memory_is_linear():
    """Temporary bytes of the compiled gradient: eight times the tokens, eight times the bytes."""

    def temporary(T):
        shapes = [(1, T, 2, 16), (1, T, 2, 16), (2, 16, 2, 8)]
        f = lambda q, v, R: jnp.sum(
            jnp.square(lsh_attention(q, v, R, chunk=16, mask=masks.causal()))
        )
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return (
            jax.jit(jax.grad(f, (0, 1)))
            .lower(*shapes)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    small, large = temporary(512), temporary(4096)
    assert large < 9 * small
    # [N, rounds T, 2 chunk] float32 scores and their like; a table of all pairs would be 2 * 4096^2
    # * 4 = 134 MB
    assert large < 64e6, large


@pytest.mark.thorough
def test_dropout_falls_on_weights():
    """Its mean over many keys is the output without it."""
    query_key, value, rotations = case(0, 8, B=1, dtype=np.float32)
    drop = lambda key: lsh_attention(
        query_key, value, rotations, chunk=4, scale=0.3, dropout_rate=0.4, dropout_key=key
    )
    samples = np.asarray(jax.jit(jax.vmap(drop))(jax.random.split(jax.random.key(0), 1024)))
    plain = jax.jit(partial(lsh_attention, chunk=4, scale=0.3))(query_key, value, rotations)
    error = np.std(samples, axis=0) / 1024**0.5
    assert (np.abs(np.mean(samples, axis=0) - plain) < 5 * error + 1e-6).all()
    assert np.std(samples) > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(mask=masks.by_head(masks.causal(), masks.full())), NotImplementedError, "by_head"),
        (dict(mask=masks.causal().at(3)), NotImplementedError, "at\\(3\\)"),
        (dict(value=jnp.ones((2, 7, 2, 4))), ValueError, "must agree"),
    ],
)
def test_errors_at_the_door(change, error, words):
    query_key, value, rotations = case(0, 8, dtype=np.float32)
    arguments = dict(query_key=query_key, value=value, rotations=rotations, chunk=4) | change
    with pytest.raises(error, match=words):
        inspect.unwrap(lsh_attention)(**arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["011", "111", "001"])
def test_lucidrains(mode):
    """reformer-pytorch's LSHAttention: causal, allow_duplicate_attention; always with
    attend_across_buckets."""
    fixture = load("lsh_attention")
    causal, duplicates, _ = (digit == "1" for digit in mode)
    with jax.enable_x64(True):
        query_key, value = (
            jnp.asarray(fixture[name])[:, :, None] for name in ("query_key", "value")
        )
        options = dict(duplicates=duplicates, scale=query_key.shape[-1] ** -0.5, eps=0.0)
        mask = masks.causal() if causal else None
        f = jax.jit(partial(lsh_attention, chunk=4, mask=mask, **options))
        ours = np.asarray(f(query_key, value, jnp.asarray(fixture["rotations"])))[:, :, 0]
        buckets = np.asarray(lsh_buckets(query_key, jnp.asarray(fixture["rotations"])))
    error = np.abs(ours - fixture[f"out/{mode}"]).max(axis=-1)
    if mode != "001":
        assert error.max() < 1e-7  # the oracle's own tolerance: its logarithm of a count + 1e-9
        return
    # Here the package is wrong, and known to be. A pair that meets only where one round ends and
    # the next begins has a
    # count of 0 in the same round, and log(0 + 1e-9) makes it a billion times as heavy. With that
    # count our definition
    # gives the package's answer; only queries of a round's first chunk, which look back across the
    # border, are touched.
    sizes = (4, np.ones((2, 32, 32), bool), 1, 0, options["scale"], False)
    arrays = (np.asarray(query_key), np.asarray(value), fixture["rotations"])
    theirs = definition(*arrays, *sizes, count=lambda m, n: m / (n + 1e-9))[:, :, 0]
    np.testing.assert_allclose(theirs, fixture["out/001"], rtol=0, atol=1e-7)
    rank = np.argsort(np.argsort(buckets, axis=-1, stable=True), axis=-1)
    first = (rank < 4).any(axis=(1, 2))
    assert error[~first].max() < 1e-7 and 0 < first.sum() < first.size / 2


def reformer(weights, tokens, real, rotations, causal, chunk=4):
    """ReformerModelWithLMHead and ReformerForMaskedLM from our parts: axial positions, reversible
    local and LSH layers."""
    D, T = weights["reformer.embeddings.word_embeddings.weight"].shape[1], tokens.shape[1]
    layer_norm = lambda x, name, w: ops.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], 1e-2)
    linear = lambda x, w: ops.einsum("btd,ed->bte", x, w)
    heads = lambda x: x.reshape(*x.shape[:2], 2, -1)
    ids = masks.segments(real.astype(jnp.int32))
    mask = ids & masks.causal() if causal else ids
    # in Hugging Face's encoder the first chunk of a local layer looks back, around the circle, at
    # the last
    wrapped = masks.Mask(lambda mask, q, kv: (q < chunk) & (kv >= T - chunk))
    local = (masks.chunked(chunk, before=1) | wrapped) & mask

    def attend(kind):
        def f(w, x, rotations):
            x = layer_norm(x, "attention.layer_norm", w)
            read = lambda name: heads(linear(x, w[f"attention.self_attention.{name}.weight"]))
            if kind == "local":
                out = ops.attention(read("query"), read("key"), read("value"), mask=local)
            else:
                out = lsh_attention(
                    read("query_key"),
                    read("value"),
                    rotations,
                    chunk=chunk,
                    mask=mask,
                    duplicates=True,
                )
            return linear(out.reshape(*x.shape[:2], -1), w["attention.output.dense.weight"])

        return f

    def feed(w, x, rotations):
        up, down = (w[f"feed_forward.{name}.dense.weight"].T for name in ("dense", "output"))
        biases = [w[f"feed_forward.{name}.dense.bias"] for name in ("dense", "output")]
        return ops.mlp(layer_norm(x, "feed_forward.layer_norm", w), up, down, jax.nn.relu, *biases)

    rows, columns = (
        weights[f"reformer.embeddings.position_embeddings.weights.{i}"] for i in range(2)
    )
    wide = lambda x: jnp.broadcast_to(x, (rows.shape[0], columns.shape[1], x.shape[-1]))
    positions = jnp.concatenate([wide(rows), wide(columns)], axis=-1).reshape(-1, D)[:T]
    x1 = x2 = weights["reformer.embeddings.word_embeddings.weight"][tokens] + positions[None]
    for kind, numbers in (("local", [0]), ("lsh", [1, 2])):
        layers = [
            {k.split(f"layers.{i}.")[1]: v for k, v in weights.items() if f"layers.{i}." in k}
            for i in numbers
        ]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        x1, x2 = reversible_stack(attend(kind), feed, stacked, x1, x2, rotations)
    y = layer_norm(jnp.concatenate([x1, x2], axis=-1), "reformer.encoder.layer_norm", weights)
    return linear(y, weights["head.weight"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["encoder", "decoder", "factored"])
def test_hugging_face_reformer(name):
    """The whole model, one row padded. Hugging Face gives padding a bucket as soon as any row of
    the batch has some; an empty last bucket sorts no other row differently, so its values agree
    with ours, which look at no other row.
    """
    fixture = load("reformer")
    with jax.enable_x64(True):
        weights = {
            k.removeprefix("weights/"): jnp.asarray(v, float)
            for k, v in fixture.items()
            if "weights/" in k
        }
        rotations = jnp.asarray(fixture[f"{name}/rotations"])
        if name == "factored":
            rotations = (rotations[..., :2], rotations[..., 2:])
        f = jax.jit(reformer, static_argnums=4)
        logits = f(weights, fixture["tokens"], fixture["real"], rotations, name != "encoder")
    # the oracle's own tolerance
    np.testing.assert_allclose(
        logits[fixture["real"]], fixture[f"{name}/logits"][fixture["real"]], rtol=0, atol=1e-6
    )
