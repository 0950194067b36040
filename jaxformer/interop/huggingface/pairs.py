"""T5 (an encoder-decoder, or only its encoder) and Marian (the Transformer of 2017)."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface import tables
from jaxformer.interop.huggingface.tables import REQUIRED, Family, Json, Rule, modules, only
from jaxformer.masks import causal, full
from jaxformer.models.config import Embedding, EncoderDecoder, LanguageModel, ModelConfig, Relative, Sinusoidal
from jaxformer.ops.feedforward import GATES

T5 = {
    "vocab_size": ("vocab_size", REQUIRED), "num_layers": ("num_layers", REQUIRED), "d_model": ("d_model", REQUIRED),
    "num_heads": ("num_heads", REQUIRED), "d_kv": ("head_width", REQUIRED), "d_ff": ("d_ff", REQUIRED),
    "n_positions": ("context_length", 512), "layer_norm_epsilon": ("norm_eps", 1e-6),
    "dropout_rate": ("dropout_rate", 0.1), "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip


def _read_t5(c: Json, names: Collection[str]) -> EncoderDecoder | ModelConfig:
    fields = tables.read_fields(c, T5)
    feedforward = c.get("feed_forward_proj", "relu")
    gated, name = feedforward.startswith("gated-"), feedforward.removeprefix("gated-")
    name = "gelu_new" if feedforward == "gated-gelu" else name  # T5's gated-gelu is the tanh form
    act = tables.activation(c, "feed_forward_proj", name)
    only(c, dense_act_fn=name, is_gated_act=gated, is_decoder=False)
    has_scale = c.get("scale_decoder_outputs", c.get("tie_word_embeddings", True))
    head = LanguageModel(scale=fields["d_model"] ** -0.5 if has_scale else 1.0)
    kinds = {"ForConditionalGeneration": (head,), "Model": (), "EncoderModel": ()}
    kind = tables.class_kind(c, "T5", kinds)
    buckets, distance = c.get("relative_attention_num_buckets", 32), c.get("relative_attention_max_distance", 128)
    if (
        not 2 <= buckets // 2 < distance
    ):  # half of the decoder's buckets hold one distance each, and must end before the maximum
        raise ConfigError(
            f"config.json: relative_attention_max_distance={distance}: expected more than {buckets // 2}, "
            f"half of relative_attention_num_buckets={buckets}, which must be at least 4"
        )
    encoder = ModelConfig(
        **fields | {"tie_embeddings": True}, feedforward=tables.GATE[act] if gated else act, norm="rms_norm",
        positions=Relative(buckets, distance), masks=(full(),), use_bias=False, attention_scale=1.0, heads=(),
        attention_dropout_rate=fields["dropout_rate"],
    )  # fmt: skip
    if kind == "EncoderModel":
        return encoder
    decoder = replace(
        encoder, num_layers=c.get("num_decoder_layers") or encoder.num_layers, masks=(causal(),), heads=kinds[kind],
        positions=Relative(buckets, distance, bidirectional=False), tie_embeddings=fields["tie_embeddings"],
    )  # fmt: skip
    return EncoderDecoder(encoder, decoder)


def _write_t5(config: EncoderDecoder | ModelConfig) -> Json:
    encoder = config if isinstance(config, ModelConfig) else config.encoder
    positions, gated = encoder.positions, encoder.feedforward in GATES
    name = tables.activation_name(encoder.feedforward)
    c = tables.write_fields(encoder, T5) | {
        "architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": False, "d_kv": encoder.head_size,
        "feed_forward_proj": "gated-" * gated + ("gelu" if gated and name == "gelu_new" else str(name)),
        "relative_attention_num_buckets": getattr(positions, "buckets", 0),
        "relative_attention_max_distance": getattr(positions, "max_distance", 0),
    }  # fmt: skip
    if isinstance(config, ModelConfig):
        return c
    heads: Any = config.decoder.heads
    return c | {
        "architectures": ["T5ForConditionalGeneration" if heads else "T5Model"], "is_encoder_decoder": True,
        "num_decoder_layers": config.decoder.num_layers, "tie_word_embeddings": config.decoder.tie_embeddings,
        "scale_decoder_outputs": bool(heads) and heads[0].scale != 1.0,
    }  # fmt: skip


def _t5_rules(config: EncoderDecoder | ModelConfig) -> list[Rule]:
    if isinstance(config, ModelConfig):
        return [Rule("embedding/tokens", "shared.weight", "leaf"), *_t5_stack("", "encoder", config)]
    return [
        Rule("decoder/embedding/tokens", "shared.weight", "leaf"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight", "leaf"),
        *_t5_stack("encoder/", "encoder", config.encoder),
        *_t5_stack("decoder/", "decoder", config.decoder),
    ]


def _t5_stack(ours: str, theirs: str, config: ModelConfig) -> list[Rule]:
    """The rules of one stack. `ours` and `theirs` are its names."""
    parts = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "feedforward": "DenseReluDense"}
    if theirs == "encoder":
        del parts["cross_attention"]
    up = "wi_1" if config.feedforward in GATES else "wi"
    names = {"query": "q", "key": "k", "value": "v", "out": "o", "gate": "wi_0", "up": up, "down": "wo"}
    relative = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rules = [
        Rule(f"{ours}shared/relative", relative, "leaf"),
        Rule(f"{ours}final_norm", f"{theirs}.final_layer_norm", "norm"),
    ]
    for number, (part, module) in enumerate(parts.items()):
        layer = f"{theirs}.block.{{}}.layer.{number}."
        rules += [Rule(f"{ours}layers/{part}_norm", layer + "layer_norm", "norm")]
        rules += modules(f"{ours}layers/{part}/", f"{layer}{module}.", names)
    return rules


MARIAN = {
    "d_model": ("d_model", REQUIRED), "max_position_embeddings": ("context_length", REQUIRED),
    "activation_function": ("feedforward", "gelu"), "dropout": ("dropout_rate", 0.1),
    "attention_dropout": ("attention_dropout_rate", 0.0), "init_std": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip
SIDE = {"layers": ("num_layers", REQUIRED), "attention_heads": ("num_heads", REQUIRED), "ffn_dim": ("d_ff", REQUIRED)}
MARIAN_HEADS = {"MTModel": (LanguageModel(bias=True),), "Model": ()}


def _side(name: str) -> dict[str, tuple[str, Any]]:
    """The field table of "encoder" or "decoder"."""
    return MARIAN | {f"{name}_{theirs}": ours for theirs, ours in SIDE.items()}


def _read_marian(c: Json, names: Collection[str]) -> EncoderDecoder:
    only(c, normalize_embedding=False, normalize_before=False)
    only(c, add_final_layer_norm=False, static_position_embeddings=True)
    same_vocabulary = c.get("share_encoder_decoder_embeddings", True)
    # transformers 5 gives the decoder a table of its own if the head is not tied
    separate = not c.get("tie_word_embeddings", True) and any(n.endswith("decoder.embed_tokens.weight") for n in names)
    source = tables.read_fields(c, {"vocab_size": ("vocab_size", REQUIRED)})["vocab_size"]
    target = source if same_vocabulary else c.get("decoder_vocab_size") or source
    heads = tables.read_heads(c, "Marian", MARIAN_HEADS)
    return EncoderDecoder(
        _marian_stack(c, "encoder", vocab_size=source, masks=(full(),), heads=()),
        _marian_stack(c, "decoder", vocab_size=target, masks=(causal(),), heads=heads),
        same_vocabulary and not separate,
    )


def _marian_stack(c: Json, name: str, **rest: Any) -> ModelConfig:
    fields = tables.read_fields(c, _side(name))
    scale = fields["d_model"] ** 0.5 if c.get("scale_embedding") else 1.0
    positions = Sinusoidal(layout="half")
    return ModelConfig(**fields, norm_placement="post", positions=positions, embedding=Embedding(scale), **rest)


def _write_marian(config: EncoderDecoder) -> Json:
    encoder, decoder = config.encoder, config.decoder
    sides = tables.write_fields(encoder, _side("encoder")) | tables.write_fields(decoder, _side("decoder"))
    return sides | tables.write_heads(decoder.heads, "Marian", MARIAN_HEADS) | {
        "model_type": "marian",
        "is_encoder_decoder": True, "vocab_size": encoder.vocab_size, "decoder_vocab_size": decoder.vocab_size,
        "scale_embedding": getattr(decoder.embedding, "scale", 1.0) != 1.0,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "forced_eos_token_id": None,  # their default is 0
    }  # fmt: skip


def _marian_rules(config: EncoderDecoder) -> list[Rule]:
    table = "model.shared.weight" if config.share_embeddings else "model.decoder.embed_tokens.weight"
    rules = [
        Rule("decoder/embedding/tokens", table, "leaf"),
        Rule("encoder/embedding/tokens", "model.encoder.embed_tokens.weight", "leaf"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight", "leaf"),
        Rule("decoder/heads/language_model/bias", "final_logits_bias", "leaf1"),
    ]
    for stack in ("encoder", "decoder"):
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            rules += [Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm", "norm")]
            rules += modules(f"{ours}{name}/", f"{theirs}{module}.", tables.PROJECTIONS)
        rules += modules(ours + "feedforward/", theirs, {"up": "fc1", "down": "fc2"})
        rules += [Rule(ours + "feedforward_norm", theirs + "final_layer_norm", "norm")]
    return rules


STACK_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
T5_ALIASES = dict.fromkeys(("lm_head.weight", *STACK_TABLES), "shared.weight")
T5_UNUSED = r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
MARIAN_ALIASES = dict.fromkeys(("lm_head.weight", *(f"model.{name}" for name in STACK_TABLES)), "model.shared.weight")
MARIAN_UNUSED = r"embed_positions\.weight$|(^|\.)shared\.weight$"
FAMILIES = {
    "t5": Family(_read_t5, _write_t5, _t5_rules, "", T5_UNUSED, T5_ALIASES),
    "marian": Family(_read_marian, _write_marian, _marian_rules, "model.", MARIAN_UNUSED, MARIAN_ALIASES),
}
