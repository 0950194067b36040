"""Cheaper attention and variants of attention: what users of other projects saw go wrong with
them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, ops, zoo


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def heads(T=8, N=2, H=4, B=2):
    return normal(1, B, T, N, H), normal(2, B, T, N, H), normal(3, B, T, N, H)


def projection(features=32, width=4):
    return zoo.performer.orthogonal_projection(jax.random.key(0), features, width)


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/performer-pytorch#82",
    right="under a causal mask no output depends on a later key, however large it is",
    hit="the stabiliser of all keys let a large later key change earlier outputs by 1.06",
)
def test_causal_random_features_do_not_see_later_keys():
    q, k, v = heads()
    attend = lambda k, v: zoo.performer.attention(q, k, v, projection(), mask=masks.causal())
    later = attend(k.at[:, 5:].set(5.0), v.at[:, 5:].set(9.0))
    np.testing.assert_allclose(attend(k, v)[:, :5], later[:, :5], atol=1e-6)
    # and it still approximates the softmax
    exact = ops.attention(0.3 * q, k, v, mask=masks.causal())
    many = zoo.performer.attention(0.3 * q, k, v, projection(2048), mask=masks.causal())
    assert np.abs(many - exact).mean() < 0.03


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/performer-pytorch#45",
    right="the stabiliser is there for range alone: a factor of all keys' features cancels",
)
def test_the_stabiliser_of_random_features_cancels():
    q, k, v = heads()
    attend = lambda stabiliser: zoo.performer.attention(
        q, k, v, projection(), stabiliser=stabiliser, eps=0.0
    )
    np.testing.assert_allclose(attend(None), attend(1.5), atol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "EleutherAI/gpt-neo#205",
    right="causal sums of exponentials stay finite for large keys, as do their gradients",
    hit="`efficient_attention` under causal() was NaN for keys above 88",
)
def test_causal_sums_of_exponentials_stay_finite():
    q, k, v = heads()
    attend = lambda k: zoo.efficient_attention.attention(
        q, 200 * jnp.abs(k), v, mask=masks.causal()
    )
    assert np.isfinite(attend(k)).all()
    assert np.isfinite(jax.grad(lambda k: jnp.sum(attend(k) ** 2))(k)).all()
    assert np.abs(attend(k)).max() <= np.abs(v).max() + 1e-5  # a mean of values


@pytest.mark.thorough
@pytest.mark.report(
    "fla-org/flash-linear-attention#1263",
    right=(
        "padding is in no sum and in no denominator, whatever a feature map makes of it, and has "
        "no gradient"
    ),
)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_in_no_sum_of_linear_attention(causal):
    q, k, v = heads()
    order = masks.causal() if causal else masks.full()
    ids = jnp.array([[0, 0, 1, 1, 1, 1, 0, 0]] * 2)
    attend = lambda *x: zoo.linear_attention.attention(
        *x, mask=order & masks.segments(ids), feature_map=lambda x: jnp.exp(x) + 1
    )
    alone = zoo.linear_attention.attention(
        *(x[:, 2:6] for x in (q, k, v)), mask=order, feature_map=lambda x: jnp.exp(x) + 1
    )
    np.testing.assert_allclose(attend(q, k, v)[:, 2:6], alone, atol=1e-5)
    gradient = jax.grad(lambda k: jnp.sum(attend(q, k, v)[:, 2:6] ** 2))(k)
    assert not np.asarray(gradient[:, ids[0] == 0]).any()


@pytest.mark.report(
    "idiap/fast-transformers#105",
    "facebookresearch/xformers#103",
    right="a mask that a linear form cannot keep is refused by name, never left out",
)
@pytest.mark.parametrize("name", ["linear", "efficient", "favor", "linformer"])
def test_masks_that_cannot_be_kept_are_refused(name):
    q, k, v = heads()
    function = {
        "linear": zoo.linear_attention.attention,
        "efficient": zoo.efficient_attention.attention,
        "favor": lambda q, k, v, mask: zoo.performer.attention(q, k, v, projection(), mask=mask),
        "linformer": lambda q, k, v, mask: zoo.linformer.attention(
            q, k, v, normal(4, 8, 3), mask=mask
        ),
    }[name]
    wrong = [masks.causal() & masks.window(2), ~masks.causal(), masks.global_tokens(1)]
    for mask in wrong + [masks.causal()] * (name == "linformer"):
        with pytest.raises(NotImplementedError, match="blockwise"):
            function(q, k, v, mask=mask)


@pytest.mark.thorough
@pytest.mark.report(
    "google-research/google-research#1406",
    right="causal sums by chunks are those by a triangle, for chunks that do not divide",
)
@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_causal_chunks_are_the_triangle(chunk):
    q, k, v = heads()
    phi = zoo.linear_attention.elu_plus_one
    weights = np.tril(np.einsum("btnm,bsnm->bnts", phi(q), phi(k)))
    wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(axis=-1, keepdims=True), v)
    np.testing.assert_allclose(
        zoo.linear_attention.attention(q, k, v, mask=masks.causal(), chunk=chunk), wanted, atol=1e-5
    )


@pytest.mark.report(
    "google-research/bigbird#18",
    "huggingface/transformers#16566",
    right="random blocks are drawn from the whole sequence, not from its first 1,024 positions",
)
def test_random_blocks_come_from_the_whole_sequence():
    seen = masks.random_blocks(3, 64, length=4096).blocks(4096, 4096, 64) != masks.EMPTY
    assert (seen.sum(axis=1) == 3).all()
    share = seen[:, 32:].sum() / seen.sum()
    assert 0.35 < share < 0.65
    layout = np.asarray(zoo.bigbird.random_layout(jax.random.key(0), 4096, 64, 3, 2))
    assert 0.35 < (layout >= 32).mean() < 0.65


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/reformer-pytorch#24",
    "huggingface/transformers#5560",
    right="padding is in nobody's bucket: what stands there changes no output",
)
def test_hashing_leaves_padding_out():
    x, v = normal(1, 1, 12, 2, 4), normal(2, 1, 12, 2, 4)
    rotations = zoo.reformer.random_rotations(jax.random.key(1), 2, 4, rounds=2, buckets=4)
    attend = lambda x, v, mask: zoo.reformer.attention(x, v, rotations, chunk=4, mask=mask)
    mask = masks.causal() & masks.lengths(kv=jnp.array([8]))
    padded, noise = attend(x, v, mask), attend(x.at[:, 8:].set(50.0), v.at[:, 8:].set(50.0), mask)
    assert np.isfinite(padded).all()
    np.testing.assert_array_equal(padded[:, :8], noise[:, :8])


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/reformer-pytorch#23",
    right="a hashed query sees itself only where it sees nothing else, also the first one",
)
def test_a_hashed_query_is_its_own_last_resort():
    x, v = normal(1, 1, 4, 1, 4), normal(2, 1, 4, 1, 4)
    rotations = zoo.reformer.random_rotations(jax.random.key(1), 1, 4, rounds=1, buckets=2)
    out = zoo.reformer.attention(x, v, rotations, chunk=4, chunks_before=0, mask=masks.causal())
    np.testing.assert_allclose(out[:, 0], v[:, 0], atol=1e-6)
    moved = zoo.reformer.attention(
        x, v.at[:, 3].add(7.0), rotations, chunk=4, chunks_before=0, mask=masks.causal()
    )
    np.testing.assert_allclose(moved[:, 3], out[:, 3], atol=1e-5)  # others are visible


CONFIG = models.ModelConfig(vocab_size=11, num_layers=2, d_model=16, num_heads=2, context_length=8)


@pytest.mark.report(
    "huggingface/transformers#5646",
    "huggingface/transformers#5659",
    right="rows with different numbers of global tokens are each as alone",
)
@pytest.mark.thorough
def test_rows_have_their_own_global_tokens():
    q, k, v = heads()
    marks = jnp.zeros((2, 8), bool).at[0, 0].set(True).at[1, jnp.array([2, 7])].set(True)
    mask = masks.window(1, 1) | masks.global_tokens(marks)
    attend = lambda marks, *x: zoo.longformer.attention(*x, *x, window=2, global_tokens=marks)
    both = attend(marks, q, k, v)
    np.testing.assert_allclose(
        both, ops.attention(q, k, v, mask=mask, implementation="reference"), atol=1e-5
    )
    for row in (0, 1):
        alone = attend(marks[row : row + 1], *(x[row : row + 1] for x in (q, k, v)))
        np.testing.assert_allclose(both[row : row + 1], alone, atol=1e-5)


@pytest.mark.report(
    "jax-ml/jax#7643", "explosion/thinc#637",
    right="a text without tokens has an output without tokens, as exact attention has",
    hit="linformer_attention raised JAX's own error of a maximum without an identity",
)  # fmt: skip
@pytest.mark.parametrize("length", [0, 1])
def test_a_text_may_be_empty(length):
    query, key, value = heads(T=length)
    segments = masks.segments(jnp.ones((2, length), jnp.int32))
    for mask in (None, segments):
        out = jax.eval_shape(
            lambda *qkv, mask=mask: zoo.linformer.attention(*qkv, normal(0, 8, 3), mask=mask),
            query,
            key,
            value,
        )
        assert out.shape == value.shape
