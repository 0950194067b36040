"""The golden models as data: class, config, inputs.

Sizes are odd and epsilons large, so that mistakes show.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

T = 11


@dataclass(frozen=True)
class Case:
    """A class of transformers, its config, and what it is called with."""

    model: str
    config: dict[str, Any]
    inputs: dict[str, np.ndarray]
    prompt: dict[str, np.ndarray] | None = (
        None  # input_ids and attention_mask, for those that generate
    )
    untied: bool = False  # the head gets its own matrix although the config ties it
    seed: int = 0  # some generate one token forever


def tokens(
    V: int, lengths: list[int], T: int = T, *, pad: int = 0, low: int = 3, **inputs
) -> dict[str, np.ndarray]:
    """Random rows of `lengths` real tokens, a negative one padded on the left, the others on the
    right."""
    length, t = np.array(lengths)[:, None], np.arange(T)
    real = np.where(length < 0, t >= T + length, t < length)
    drawn = np.random.default_rng(0).integers(low, V, real.shape)
    return {"input_ids": np.where(real, drawn, pad), "attention_mask": real.astype(int)} | inputs


def counted(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With positions that count real tokens: under padding on the left, models with a table must be
    told."""
    return inputs | {"position_ids": np.maximum(np.cumsum(inputs["attention_mask"], axis=1) - 1, 0)}


def pair(
    V: int, source: list[int], target: list[int], *, pad: int, start: int
) -> dict[str, np.ndarray]:
    """Sources, and targets that begin with the start token."""
    decoder = {f"decoder_{name}": array for name, array in tokens(V, target, 8, pad=pad).items()}
    decoder["decoder_input_ids"][:, 0] = start
    return tokens(V, source, 13, pad=pad) | decoder


def feature_mask(pixel_mask: np.ndarray, count: int) -> np.ndarray:
    """[B, count]: where the features of padded images are no padding. A feature is the first of its
    pixels, which are a power of two in both directions."""
    _, height, width = pixel_mask.shape
    sizes = [(-(-height // 2**k), -(-width // 2**k)) for k in range(8)]
    lines, columns = next(size for size in sizes if size[0] * size[1] == count)
    down, across = np.arange(lines) * height // lines, np.arange(columns) * width // columns
    return pixel_mask[:, down][:, :, across].reshape(len(pixel_mask), count)


def _bert(model: str, **config) -> Case:
    kinds = (np.arange(T) >= np.array([[5], [3], [7]])).astype(int)
    sizes = dict(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=25,
        max_position_embeddings=16,
        layer_norm_eps=1e-2,
    )
    return Case(model, sizes | config, tokens(37, [T, 8, 9], token_type_ids=kinds))


def _roberta() -> Case:
    sizes = _bert("").config | dict(
        type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2
    )
    # positions count tokens that are not pad
    return Case("RobertaForMaskedLM", sizes, tokens(37, [T, -8, 9], pad=1))


def _gpt2(**config) -> Case:
    sizes = dict(
        vocab_size=37, n_positions=96, n_embd=15, n_layer=2, n_head=3, layer_norm_epsilon=1e-2
    )
    sizes |= dict(bos_token_id=1, eos_token_id=2)
    prompt = None if config else tokens(37, [7, -4], 7)
    return Case("GPT2LMHeadModel", sizes | config, counted(tokens(37, [T, -8, 9])), prompt, seed=2)


def _llama(
    model: str = "LlamaForCausalLM", generates: bool = True, seed: int = 0, **config
) -> Case:
    sizes = dict(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        intermediate_size=23,
        max_position_embeddings=128,
        rms_norm_eps=1e-2,
        rope_parameters=dict(rope_type="default", rope_theta=100.0),
        bos_token_id=1,
        eos_token_id=2,
    )
    prompt = tokens(37, [7, -4], 7) if generates else None
    return Case(model, sizes | config, tokens(37, [T, -8, 9]), prompt, seed=seed)


# of three frequencies the first is kept, the second in between, the third divided by the factor
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0
)
LLAMA3 |= dict(original_max_position_embeddings=64)
# of four frequencies two are kept and two in between
YARN = dict(rope_type="yarn", rope_theta=20.0, factor=4.0, beta_fast=4.0, beta_slow=1.0)
YARN |= dict(original_max_position_embeddings=64)


def _t5(untied: bool = False, **config) -> Case:
    sizes = dict(
        vocab_size=35,
        d_model=12,
        d_kv=5,  # three heads of five are not d_model
        d_ff=17,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        layer_norm_epsilon=1e-2,
        decoder_start_token_id=0,
    )
    inputs = pair(35, [13, -9, 10], [8, 6, 8], pad=0, start=0)
    return Case(
        "T5ForConditionalGeneration", sizes | config, inputs, tokens(35, [7, -4], 7), untied, seed=9
    )


def _marian() -> Case:
    config = dict(
        vocab_size=33,
        d_model=12,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=3,
        encoder_ffn_dim=17,
        decoder_ffn_dim=14,
        max_position_embeddings=96,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=32,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=32,
    )
    inputs = pair(32, [13, 9, 10], [8, 6, 8], pad=32, start=32)
    return Case("MarianMTModel", config, inputs, tokens(32, [7, 4], 7, pad=32), seed=11)


def _vit(model: str, channels: int, **config) -> Case:
    sizes = dict(
        image_size=(8, 12),
        patch_size=4,
        num_channels=channels,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=25,
        layer_norm_eps=1e-2,
    )
    pixels = np.random.default_rng(0).normal(size=(2, channels, 8, 12)).astype(np.float32)
    return Case(model, sizes | config, {"pixel_values": pixels})


def _longformer() -> Case:
    config = _bert("").config | dict(
        type_vocab_size=1, attention_window=[4, 4], pad_token_id=1, max_position_embeddings=20
    )
    flags = np.zeros((2, 16), int)
    flags[0, [0, 7]] = flags[1, [0, 3, 9]] = 1  # another number in each row
    return Case(
        "LongformerForMaskedLM",
        config,
        tokens(37, [16, 11], 16, pad=1, global_attention_mask=flags),
    )


def _bigbird() -> Case:
    config = _bert("").config | dict(
        attention_type="block_sparse", block_size=3, num_random_blocks=2, sep_token_id=None
    )
    # ten blocks: more than 5 + 2 * 2, with which it would see everything
    config |= dict(max_position_embeddings=32)
    return Case("BigBirdForMaskedLM", config, tokens(37, [30, 25], 30))


def _reformer() -> Case:
    config = dict(
        vocab_size=31,
        hidden_size=16,
        attention_head_size=7,  # two heads of seven are not hidden_size
        num_attention_heads=2,
        attn_layers=["local", "lsh", "lsh"],
        feed_forward_size=19,
        axial_pos_shape=[4, 8],
        axial_pos_embds_dim=[6, 10],
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_buckets=6,
        num_hashes=2,
        hash_seed=7,
        is_decoder=True,
        layer_norm_eps=1e-2,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
    )
    return Case("ReformerModelWithLMHead", config, tokens(31, [24, 19], 24))


CASES = {
    "bert_pretraining": _bert("BertForPreTraining"),
    "bert_mlm": _bert("BertForMaskedLM"),
    "bert_sequence": _bert("BertForSequenceClassification", num_labels=3),
    "bert_tokens": _bert("BertForTokenClassification", num_labels=5),
    "bert_qa": _bert("BertForQuestionAnswering"),
    "roberta_mlm": _roberta(),
    "gpt2": _gpt2(),
    "gpt2_untied": _gpt2(tie_word_embeddings=False, n_inner=20, activation_function="relu"),
    "llama_mha": _llama(generates=False),
    "llama_gqa": _llama(
        hidden_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,  # not 20 / 4
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
    ),
    "llama_yarn": _llama(
        generates=False,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters=YARN,
    ),
    "mistral": _llama("MistralForCausalLM", num_key_value_heads=1, sliding_window=4),
    "qwen2": _llama("Qwen2ForCausalLM", num_key_value_heads=1),
    "mixtral": _llama(
        "MixtralForCausalLM",
        hidden_size=12,
        num_key_value_heads=1,
        intermediate_size=11,
        num_local_experts=5,
    ),
    "t5": _t5(),
    "t5_v11": _t5(
        untied=True,
        tie_word_embeddings=False,  # to transformers 5 this only says that logits are not scaled
        feed_forward_proj="gated-gelu",
        num_layers=3,
        num_decoder_layers=2,
        d_ff=13,
    ),
    "marian": _marian(),
    "vit": _vit("ViTForImageClassification", 3, num_labels=5),
    "vit_pooled": _vit("ViTModel", 1, qkv_bias=False),
    "longformer_mlm": _longformer(),
    "bigbird_mlm": _bigbird(),
    "reformer": _reformer(),
}
