"""T5 (an encoder-decoder, or only its encoder) and Marian (the Transformer of 2017)."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface import tables
from jaxformer.interop.huggingface.tables import ACTIVATION, GATE, GATED, Family, Json, Key, Rule, get, only, rules
from jaxformer.masks import causal, full
from jaxformer.models.config import Embedding, EncoderDecoder, LanguageModel, ModelConfig, Relative, Sinusoidal
from jaxformer.ops.feedforward import GATES

T5_ACTIVATION = {"gated-gelu": GATE["gelu_tanh"]} | ACTIVATION  # T5's gated-gelu is the tanh form
T5_ACTIVATION |= {f"gated-{theirs}": gate for theirs, gate in GATED.items() if theirs != "gelu"}
T5 = {
    "vocab_size": Key("vocab_size"), "num_layers": Key("num_layers"), "d_model": Key("d_model"), "num_heads": Key("num_heads"),
    "head_width": Key("d_kv"), "d_ff": Key("d_ff"), "context_length": Key("n_positions", 512),
    "norm_eps": Key("layer_norm_epsilon", 1e-6), "dropout_rate": Key("dropout_rate", 0.1),
    "feedforward": Key("feed_forward_proj", "relu", T5_ACTIVATION),
}  # fmt: skip
RELATIVE = {"buckets": Key("relative_attention_num_buckets", 32), "max_distance": Key("relative_attention_max_distance", 128)}
MARIAN = {
    "d_model": Key("d_model"), "context_length": Key("max_position_embeddings"), "init_std": Key("init_std", 0.02),
    "feedforward": Key("activation_function", "gelu", ACTIVATION), "dropout_rate": Key("dropout", 0.1),
    "attention_dropout_rate": Key("attention_dropout", 0.0), "tie_embeddings": Key("tie_word_embeddings", True),
}  # fmt: skip
MARIAN_HEADS = {"MTModel": (LanguageModel(bias=True),), "Model": ()}


def _read_t5(c: Json, names: Collection[str]) -> EncoderDecoder | ModelConfig:
    fields, relative = tables.read_fields(c, T5), tables.read_fields(c, RELATIVE)
    feedforward, tied = c.get("feed_forward_proj", "relu"), get(c, "tie_word_embeddings", True)
    name = "gelu_new" if feedforward == "gated-gelu" else feedforward.removeprefix("gated-")
    only(c, dense_act_fn=name, is_gated_act=feedforward.startswith("gated-"), is_decoder=False)
    head = LanguageModel(scale=fields["d_model"] ** -0.5 if get(c, "scale_decoder_outputs", tied) else 1.0)
    kinds = {"ForConditionalGeneration": (head,), "Model": (), "EncoderModel": ()}
    kind = tables.class_kind(c, "T5", kinds)
    buckets, distance = relative["buckets"], relative["max_distance"]
    # half of the decoder's buckets hold one distance each, and must end before the maximum
    if not 2 <= buckets // 2 < distance:
        expected = f"more than half of relative_attention_num_buckets={buckets}, which must be at least 4"
        raise ConfigError(f"config.json: relative_attention_max_distance={distance}: expected {expected}")
    encoder = ModelConfig(
        **fields, norm="rms_norm", positions=Relative(**relative), masks=(full(),), use_bias=False, attention_scale=1.0,
        heads=(), attention_dropout_rate=fields["dropout_rate"],
    )  # fmt: skip
    if kind == "EncoderModel":
        return encoder
    decoder = replace(
        encoder, num_layers=get(c, "num_decoder_layers", None) or encoder.num_layers, masks=(causal(),), heads=kinds[kind],
        positions=Relative(**relative, bidirectional=False), tie_embeddings=tied,
    )  # fmt: skip
    return EncoderDecoder(encoder, decoder)


def _write_t5(config: EncoderDecoder | ModelConfig) -> Json:
    encoder = config if isinstance(config, ModelConfig) else config.encoder
    c = tables.write_fields(encoder, T5) | tables.write_fields(encoder.positions, RELATIVE)
    if isinstance(config, ModelConfig):
        return c | {"architectures": ["T5EncoderModel"], "is_encoder_decoder": False, "tie_word_embeddings": True}
    heads: Any = config.decoder.heads
    return c | {
        "architectures": ["T5ForConditionalGeneration" if heads else "T5Model"], "is_encoder_decoder": True,
        "num_decoder_layers": config.decoder.num_layers, "tie_word_embeddings": config.decoder.tie_embeddings,
        "scale_decoder_outputs": bool(heads) and heads[0].scale != 1.0,
    }  # fmt: skip


def _t5_rules(config: EncoderDecoder | ModelConfig) -> list[Rule]:
    if isinstance(config, ModelConfig):
        return [Rule("embedding/tokens", "shared.weight"), *_t5_stack("", "encoder", config)]
    return [
        *rules("decoder/", "", {"embedding/tokens": "shared.weight", "heads/language_model/kernel": "lm_head.weight"}),
        *_t5_stack("encoder/", "encoder", config.encoder),
        *_t5_stack("decoder/", "decoder", config.decoder),
    ]


def _t5_stack(ours: str, theirs: str, config: ModelConfig) -> list[Rule]:
    parts = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "feedforward": "DenseReluDense"}
    if theirs == "encoder":
        del parts["cross_attention"]
    up = "wi_1" if config.feedforward in GATES else "wi"
    names = {"query": "q", "key": "k", "value": "v", "out": "o", "gate": "wi_0", "up": up, "down": "wo"}
    relative = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    result = rules(ours, f"{theirs}.", {"shared/relative": relative, "final_norm": "final_layer_norm"})
    for number, (part, module) in enumerate(parts.items()):
        layer = f"{theirs}.block.{{}}.layer.{number}."
        result += [Rule(f"{ours}layers/{part}_norm", layer + "layer_norm")]
        result += rules(f"{ours}layers/{part}/", f"{layer}{module}.", names)
    return result


def _side(name: str) -> dict[str, Key]:
    sizes = {"num_layers": "layers", "num_heads": "attention_heads", "d_ff": "ffn_dim"}
    return MARIAN | {ours: Key(f"{name}_{theirs}") for ours, theirs in sizes.items()}


def _read_marian(c: Json, names: Collection[str]) -> EncoderDecoder:
    only(c, normalize_embedding=False, normalize_before=False)
    only(c, add_final_layer_norm=False, static_position_embeddings=True)
    same_vocabulary = get(c, "share_encoder_decoder_embeddings", True)
    # transformers 5 gives the decoder a table of its own if the head is not tied
    separate = not get(c, "tie_word_embeddings", True) and any(n.endswith("decoder.embed_tokens.weight") for n in names)
    source = get(c, "vocab_size")
    target = source if same_vocabulary else get(c, "decoder_vocab_size", None) or source
    heads = tables.read_heads(c, "Marian", MARIAN_HEADS)
    return EncoderDecoder(
        _marian_stack(c, "encoder", vocab_size=source, masks=(full(),), heads=()),
        _marian_stack(c, "decoder", vocab_size=target, masks=(causal(),), heads=heads),
        same_vocabulary and not separate,
    )


def _marian_stack(c: Json, name: str, **rest: Any) -> ModelConfig:
    fields = tables.read_fields(c, _side(name))
    embedding = Embedding(fields["d_model"] ** 0.5 if get(c, "scale_embedding", False) else 1.0)
    return ModelConfig(**fields, **rest, norm_placement="post", positions=Sinusoidal(layout="half"), embedding=embedding)


def _write_marian(config: Any) -> Json:
    encoder, decoder = config.encoder, config.decoder
    sides = tables.write_fields(encoder, _side("encoder")) | tables.write_fields(decoder, _side("decoder"))
    return sides | tables.write_heads(decoder.heads, "Marian", MARIAN_HEADS) | {
        "is_encoder_decoder": True, "vocab_size": encoder.vocab_size, "decoder_vocab_size": decoder.vocab_size,
        "scale_embedding": decoder.embedding.scale != 1.0, "share_encoder_decoder_embeddings": config.share_embeddings,
        "forced_eos_token_id": None,  # their default is 0
    }  # fmt: skip


def _marian_rules(config: EncoderDecoder) -> list[Rule]:
    tokens = "model.shared.weight" if config.share_embeddings else "model.decoder.embed_tokens.weight"
    result = [
        Rule("encoder/embedding/tokens", "model.encoder.embed_tokens.weight"),
        *rules("decoder/", "", {"embedding/tokens": tokens, "heads/language_model/kernel": "lm_head.weight"}),
        Rule("decoder/heads/language_model/bias", "final_logits_bias", "leaf1"),
    ]
    for stack in ("encoder", "decoder"):
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            result += [Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm")]
            result += rules(f"{ours}{name}/", f"{theirs}{module}.", tables.PROJECTIONS)
        result += rules(ours + "feedforward", theirs, {"/up": "fc1", "/down": "fc2", "_norm": "final_layer_norm"})
    return result


STACK_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# the head last: it is the table of a tied model only where the file has no other copy
T5_ALIASES = dict.fromkeys((*STACK_TABLES, "lm_head.weight"), "shared.weight")
T5_UNUSED = r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
MARIAN_ALIASES = dict.fromkeys((*(f"model.{name}" for name in STACK_TABLES), "lm_head.weight"), "model.shared.weight")
MARIAN_UNUSED = r"embed_positions\.weight$|(^|\.)shared\.weight$"
FAMILIES = {
    "t5": Family(_read_t5, _write_t5, _t5_rules, "", T5_UNUSED, aliases=T5_ALIASES),
    "marian": Family(_read_marian, _write_marian, _marian_rules, "model.", MARIAN_UNUSED, aliases=MARIAN_ALIASES),
}
