"""Marian: the Transformer of 2017."""

from collections.abc import Collection
from typing import Any

from jaxformer.families.classes import read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    ACTIVATION,
    PROJECTIONS,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.families.t5 import STACK_TABLES
from jaxformer.masks import causal, full
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import (
    Embedding,
    EncoderDecoder,
    LanguageModel,
    ModelConfig,
    Sinusoidal,
)

MARIAN = {
    "d_model": Key("d_model"),
    "context_length": Key("max_position_embeddings"),
    "init_std": Key("init_std", 0.02),
    "feedforward": Key("activation_function", "gelu", ACTIVATION),
    "dropout_rate": Key("dropout", 0.1),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
MARIAN_HEADS = {"MTModel": (LanguageModel(bias=True),), "Model": ()}


def _side(name: str) -> dict[str, Key]:
    sizes = {"num_layers": "layers", "num_heads": "attention_heads", "d_ff": "ffn_dim"}
    return MARIAN | {ours: Key(f"{name}_{theirs}") for ours, theirs in sizes.items()}


def _read_marian(c: Json, names: Collection[str]) -> EncoderDecoder:
    only(c, normalize_embedding=False, normalize_before=False)
    only(c, add_final_layer_norm=False, static_position_embeddings=True)
    same_vocabulary = get(c, "share_encoder_decoder_embeddings", True)
    # transformers 5 gives the decoder a table of its own if the head is not tied
    has_table = any(name.endswith("decoder.embed_tokens.weight") for name in names)
    separate = not get(c, "tie_word_embeddings", True) and has_table
    source = get(c, "vocab_size")
    target = source if same_vocabulary else get(c, "decoder_vocab_size", None) or source
    heads = read_heads(c, "Marian", MARIAN_HEADS)
    return EncoderDecoder(
        _marian_stack(c, "encoder", vocab_size=source, masks=(full(),), heads=()),
        _marian_stack(c, "decoder", vocab_size=target, masks=(causal(),), heads=heads),
        same_vocabulary and not separate,
    )


def _marian_stack(c: Json, name: str, **other_fields: Any) -> ModelConfig:
    fields = read_fields(c, _side(name))
    scale = fields["d_model"] ** 0.5 if get(c, "scale_embedding", False) else 1.0
    return ModelConfig(
        **fields,
        **other_fields,
        block=post_norm,
        positions=Sinusoidal(layout="half"),
        embedding=Embedding(scale),
    )


def _write_marian(config: Any) -> Json:
    encoder, decoder = config.encoder, config.decoder
    c = write_fields(encoder, _side("encoder")) | write_fields(decoder, _side("decoder"))
    c |= write_heads(decoder.heads, "Marian", MARIAN_HEADS)
    return c | {
        "is_encoder_decoder": True,
        "vocab_size": encoder.vocab_size,
        "decoder_vocab_size": decoder.vocab_size,
        "scale_embedding": decoder.embedding.scale != 1.0,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "forced_eos_token_id": None,  # their default is 0
    }


def _marian_rules(config: EncoderDecoder) -> list[Rule]:
    table = "shared" if config.share_embeddings else "decoder.embed_tokens"
    result = [
        Rule("encoder/embedding/tokens", "model.encoder.embed_tokens.weight"),
        Rule("decoder/embedding/tokens", f"model.{table}.weight"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight"),
        Rule("decoder/heads/language_model/bias", "final_logits_bias", "leaf1"),
    ]
    feedforward = {"/up": "fc1", "/down": "fc2", "_norm": "final_layer_norm"}
    for stack in ("encoder", "decoder"):
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            result += [Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm")]
            result += rules(f"{ours}{name}/", f"{theirs}{module}.", PROJECTIONS)
        result += rules(ours + "feedforward", theirs, feedforward)
    return result


MARIAN_ALIASES = dict.fromkeys(
    (*(f"model.{name}" for name in STACK_TABLES), "lm_head.weight"), "model.shared.weight"
)
MARIAN_UNUSED = r"embed_positions\.weight$|(^|\.)shared\.weight$"
FAMILY = Family(
    _read_marian,
    _write_marian,
    _marian_rules,
    "model.",
    MARIAN_UNUSED,
    aliases=MARIAN_ALIASES,
    needs_start=True,
)
FAMILIES = {"marian": FAMILY}
