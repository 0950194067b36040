"""Masks: what users of other projects saw go wrong with causality, windows, packing, padding and
block maps."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, ops, zoo


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.report(
    "halide/Halide#2889", "vaexio/vaex#1353",
    right="Python's `and` of two values that combine by & is an error, not the second one",
    hit="`causal() and window(3)` was window(3), `not mask` was False",
)  # fmt: skip
def test_and_or_not_of_masks_are_refused():
    for wrong in (
        lambda: masks.causal() and masks.window(3),
        lambda: masks.causal() or masks.window(3),
        lambda: not masks.causal(),
    ):
        with pytest.raises(TypeError, match=r"& [|] ~"):
            wrong()


@pytest.mark.report(
    "idiap/fast-transformers#101",
    "hyunwoongko/transformer#32",
    right=(
        "a padding mask where lengths belong is refused, and the message names the mask that "
        "takes it"
    ),
    hit="`lengths(kv=[B, S] of booleans)` ended in `zip() argument 2 is longer than argument 1`",
)
@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.lengths(kv=jnp.ones((2, 6), bool)),
        lambda: masks.lengths(kv=jnp.array([[3], [4]])),
        lambda: masks.lengths(q=3),
        lambda: masks.prefix(jnp.ones((2, 1), int)),
        lambda: masks.segments(jnp.ones(6, int)),
    ],
)
def test_arrays_of_another_shape_are_refused_where_the_mask_is_built(build, as_users_call):
    with pytest.raises(ValueError, match="expected integers of shape"):
        build()


@pytest.mark.report(
    "pytorch/pytorch#64706", right="an additive float mask is no mask of ids; it is refused",
    hit="`segments` took floats: of an additive mask, 0 and -inf, it showed what should be hidden",
)  # fmt: skip
def test_an_additive_mask_is_no_segment_ids(as_users_call):
    additive = jnp.where(jnp.arange(6)[None] < 4, 0.0, -jnp.inf)
    with pytest.raises(ValueError, match="segments: expected integers"):
        masks.segments(additive)


@pytest.mark.thorough
@pytest.mark.report(
    "meta-pytorch/attention-gym#31",
    "vllm-project/speculators#196",
    right=(
        "a mask made for a shorter sequence is refused for a longer one, not cut or filled in "
        "silence"
    ),
    hit="tokens behind the end of the segment ids saw nothing and nobody saw them: zeros, unsaid",
)
def test_segment_ids_shorter_than_the_sequence_are_refused():
    q = normal(0, 2, 6, 2, 4)
    with pytest.raises(ValueError, match="ids for 5 queries and 5 keys of 6 and 6"):
        ops.attention(q, q, q, mask=masks.causal() & masks.segments(jnp.ones((2, 5), int)))
    longer = ops.attention(q, q, q, mask=masks.segments(jnp.ones((2, 9), int)))
    np.testing.assert_allclose(longer, ops.attention(q, q, q), atol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/cutlass#2336",
    "pytorch/executorch#22426",
    "ml-explore/mlx#2967",
    right=(
        "a causal mask of T queries and S keys aligns their ends in every kernel, for T below "
        "and above S"
    ),
)
@pytest.mark.parametrize("T, S", [(1, 5), (3, 5), (5, 3), (4, 4)])
def test_causal_masks_align_the_ends(T, S):
    expected = np.tri(T, S, S - T, dtype=bool)
    np.testing.assert_array_equal(masks.causal().dense(T, S)[0, 0], expected)
    q, k, v = normal(1, 1, T, 2, 4), normal(2, 1, S, 2, 4), normal(3, 1, S, 2, 4)
    scores = np.where(expected, np.einsum("btnh,bsnh->bnts", q, k) / 2, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e9))
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    for kernel in ("reference", "query_blocked", "blockwise"):
        out = ops.attention(q, k, v, mask=masks.causal(), implementation=kernel)
        np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", weights, v), atol=2e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "Dao-AILab/flash-attention#1778",
    right="with more causal queries than keys the first queries see nothing: zeros, not NaN",
)
def test_queries_before_all_keys_give_zeros():
    q, k = normal(4, 1, 5, 2, 4), normal(5, 1, 2, 2, 4)
    for kernel in ("reference", "blockwise"):
        out = ops.attention(q, k, k, mask=masks.causal(), implementation=kernel)
        assert not np.asarray(out[:, :3]).any()
        assert np.isfinite(out).all()
        assert np.asarray(out[:, 3:]).any(axis=(2, 3)).all()


@pytest.mark.report(
    "huggingface/transformers#39408",
    "NVIDIA-NeMo/Megatron-Bridge#2656",
    "apple/axlearn#1009",
    "zml/zml#763",
    right=(
        "window(w) shows w keys before the query and itself; a published window of n keys is "
        "window(n - 1)"
    ),
)
@pytest.mark.parametrize("left, right", [(0, 0), (3, 0), (3, 2)])
def test_a_window_counts_the_query_itself_once(left, right):
    seen = np.asarray(masks.window(left, right).dense(12, 12)[0, 0]).sum(axis=1)
    assert seen.max() == left + right + 1
    mistral = zoo.PRESETS["mistral_7b"].masks[0]  # sliding_window: 4096 in its config.json
    assert masks.reach(mistral) == 4095


@pytest.mark.report(
    "proger/hippogriff#7", right="a negative window is refused; elsewhere it means no window at all"
)
def test_a_negative_window_is_refused():
    for wrong in ((-256,), (3, -1)):
        with pytest.raises(ValueError, match="is an integer from 0"):
            masks.window(*wrong)


@pytest.mark.thorough_after(2)
@pytest.mark.report(
    "kuleshov-group/bd3lms#23", "meta-pytorch/attention-gym#71",
    right="the map of blocks is that of the dense mask, for blocks that divide neither length",
)  # fmt: skip
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & (masks.window(5) | masks.prefix(2)),
        masks.chunked(4, 1) & ~masks.strided(3),
        masks.block_sparse(np.eye(5, dtype=bool), 3) | masks.global_tokens([0, 7]),
        masks.sparse_transformer_fixed(4, 1),
        masks.window(2, 1, dilation=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("T, S, block", [(13, 13, (4, 5)), (7, 17, (3, 4))])
def test_blocks_are_those_of_the_dense_mask(mask, T, S, block):
    dense, kinds = np.asarray(mask.dense(T, S)[0, 0]), mask.blocks(T, S, block)
    for i, j in np.ndindex(kinds.shape):
        part = dense[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        assert kinds[i, j] != masks.EMPTY or not part.any()
        assert kinds[i, j] != masks.FULL or part.all()


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#141126",
    right="a block-sparse mask with empty and lone blocks gives the values of its dense form",
)
def test_block_sparse_masks_in_the_blockwise_kernel():
    layout = np.zeros((6, 6), bool)
    layout[[0, 1, 3, 5], [5, 1, 0, 2]] = True  # rows 2 and 4 see nothing
    mask, (q, k, v) = (
        masks.block_sparse(layout, 7),
        (normal(seed, 2, 42, 2, 4) for seed in (6, 7, 8)),
    )
    reference, blockwise = (
        ops.attention(q, k, v, mask=mask, implementation=kernel)
        for kernel in ("reference", "blockwise")
    )
    np.testing.assert_allclose(blockwise, reference, atol=2e-6)
    assert not np.asarray(blockwise[:, 14:21]).any()


def tiny(**fields):
    return models.ModelConfig(
        vocab_size=11, num_layers=2, d_model=16, num_heads=2, context_length=12, **fields
    )


@pytest.mark.thorough
@pytest.mark.report(
    "alex-hh/profam#495",
    "huggingface/nanoVLM#204",
    "mosaicml/llm-foundry#1464",
    "tensorflow/mesh#173",
    right=(
        "in a packed row no token of one document changes the logits of another, and each counts "
        "from position 0"
    ),
)
def test_packed_documents_are_those_alone():
    import jax

    config, rng = tiny(), np.random.default_rng(0)
    params, tokens = models.init(config, jax.random.key(0)), rng.integers(0, 11, (1, 12))
    ids = jnp.array([[1] * 5 + [2] * 6 + [0]])
    logits = models.apply(config, params, jnp.asarray(tokens), segment_ids=ids).logits
    alone = models.apply(config, params, jnp.asarray(tokens[:, 5:11])).logits
    np.testing.assert_allclose(logits[:, 5:11], alone, atol=1e-5)
    tokens[:, :5] = (tokens[:, :5] + 3) % 11
    changed = models.apply(config, params, jnp.asarray(tokens), segment_ids=ids).logits
    np.testing.assert_array_equal(changed[:, 5:11], logits[:, 5:11])


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#46773",
    right=(
        "padding before the tokens changes nothing, in a batch of one row too, for softmax and "
        "for linear attention"
    ),
)
@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_padding_in_a_batch_of_one_row(name):
    import jax

    config = tiny(mixer=None if name == "softmax" else zoo.Linear())
    params = models.init(config, jax.random.key(1))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 11, (1, 7)))
    padded, real = jnp.pad(tokens, ((0, 0), (4, 0))), jnp.array([[0] * 4 + [1] * 7])
    logits = models.apply(config, params, padded, segment_ids=real).logits[:, 4:]
    np.testing.assert_allclose(logits, models.apply(config, params, tokens).logits, atol=1e-5)


@pytest.mark.report(
    "huggingface/transformers#7015",
    "allenai/longformer#254",
    right=(
        "0 and 1 for each token are no positions of global tokens: they are refused, and "
        "booleans asked for"
    ),
    hit=(
        "a mask of integers, as Hugging Face has it, made tokens 0 and 1 global, whatever it marked"
    ),
)
@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_flags_of_global_tokens_are_booleans(array):
    flags = array([[0, 0, 0, 1], [1, 0, 0, 0]])
    with pytest.raises(ValueError, match="for flags give booleans"):
        masks.global_tokens(flags)
    seen = np.asarray(masks.global_tokens(flags.astype(bool)).dense(4, 4))[:, 0]
    assert seen.all(2).tolist() == [[False, False, False, True], [True, False, False, False]]
    for positions in ([[0, 1]], [[1, 0, 3]], [[0, 1, -1, -1]]):  # these can be nothing else
        masks.global_tokens(array(positions))
