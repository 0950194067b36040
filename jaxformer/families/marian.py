"""Marian: the Transformer of 2017. BART and its relatives are the same with other norms."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

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
    Learned,
    ModelConfig,
    Sinusoidal,
)
from jaxformer.models.position_table import table_of

FIELDS = {
    "d_model": Key("d_model"),
    "context_length": Key("max_position_embeddings"),
    "init_std": Key("init_std", 0.02),
    "feedforward": Key("activation_function", "gelu", ACTIVATION),
    "dropout_rate": Key("dropout", 0.1),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
# of the encoder alone, as in transformers
OTHER_NAMES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
TRANSLATOR = (LanguageModel(bias=True),)


class Pair(NamedTuple):
    """Marian or a relative: its class names, and what differs from Marian."""

    name: str  # prefix of its class names
    kinds: dict[str, tuple]  # {the rest of a class name: its heads}
    positions: Learned | Sinusoidal = Sinusoidal(layout="half")
    block: Callable | None = post_norm  # None: a norm before each sub-layer, and one at the end
    embedding_norm: bool = False  # whether a norm ends the embedding
    two_vocabularies: bool = False  # whether the decoder may have a vocabulary of its own
    needs_start: bool = True  # whether config.json has the token that targets begin with


def pair_family(pair: Pair) -> Family:
    """The family of Marian or of a relative."""
    tables = (*(f"model.{name}" for name in STACK_TABLES), "lm_head.weight")
    return Family(
        partial(_read, pair),
        partial(_write, pair),
        partial(_rules, pair),
        prefix="model.",
        ignored=r"embed_positions\.weight$|(^|\.)shared\.weight$",
        aliases=dict.fromkeys(tables, "model.shared.weight"),
        other_names=OTHER_NAMES,
        needs_start=pair.needs_start,
        fixed=sines,
    )


def sines(config: EncoderDecoder) -> dict[str, np.ndarray]:
    """The sinusoids of both stacks, which files of Pegasus and old files of Marian have."""
    tables = {}
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        table = table_of(stack, stack.positions)
        if table is not None and isinstance(stack.positions, Sinusoidal):
            vectors = table.apply({}, jnp.arange(stack.context_length)[None])[0]
            tables[f"model.{name}.embed_positions.weight"] = np.asarray(vectors)
    return tables


def _side(name: str) -> dict[str, Key]:
    sizes = {"num_layers": "layers", "num_heads": "attention_heads", "d_ff": "ffn_dim"}
    return FIELDS | {ours: Key(f"{name}_{theirs}") for ours, theirs in sizes.items()}


def _read(pair: Pair, c: Json, names: Collection[str]) -> EncoderDecoder:
    # older files of all relatives say how they differ
    is_pre_norm = pair.block is None
    only(c, normalize_embedding=pair.embedding_norm, normalize_before=is_pre_norm)
    only(c, add_final_layer_norm=is_pre_norm)
    only(c, static_position_embeddings=isinstance(pair.positions, Sinusoidal))
    # transformers 5 gives the decoder a table of its own if the head is not tied
    has_table = any(name.endswith("decoder.embed_tokens.weight") for name in names)
    separate = not get(c, "tie_word_embeddings", True) and has_table
    source = target = get(c, "vocab_size")
    if pair.two_vocabularies and not get(c, "share_encoder_decoder_embeddings", True):
        separate = True
        target = get(c, "decoder_vocab_size", None) or source
    heads = read_heads(c, pair.name, pair.kinds)
    return EncoderDecoder(
        _stack(pair, c, "encoder", vocab_size=source, masks=(full(),), heads=()),
        _stack(pair, c, "decoder", vocab_size=target, masks=(causal(),), heads=heads),
        not separate,
    )


def _stack(pair: Pair, c: Json, name: str, **other_fields: Any) -> ModelConfig:
    fields = read_fields(c, _side(name))
    scale = fields["d_model"] ** 0.5 if get(c, "scale_embedding", False) else 1.0
    return ModelConfig(
        **fields,
        **other_fields,
        block=pair.block,
        positions=pair.positions,
        embedding=Embedding(scale, norm=pair.embedding_norm),
    )


def _write(pair: Pair, config: Any) -> Json:
    encoder, decoder = config.encoder, config.decoder
    c = write_fields(encoder, _side("encoder")) | write_fields(decoder, _side("decoder"))
    c |= write_heads(decoder.heads, pair.name, pair.kinds)
    c |= {
        "is_encoder_decoder": True,
        "vocab_size": encoder.vocab_size,
        "scale_embedding": decoder.embedding.scale != 1.0,
        "forced_eos_token_id": None,  # theirs have a default
    }
    if pair.two_vocabularies:
        c["decoder_vocab_size"] = decoder.vocab_size
        c["share_encoder_decoder_embeddings"] = config.share_embeddings
    return c


def _rules(pair: Pair, config: EncoderDecoder) -> list[Rule]:
    table = "shared" if config.share_embeddings else "decoder.embed_tokens"
    result = [
        Rule("encoder/embedding/tokens", "model.encoder.embed_tokens.weight"),
        Rule("decoder/embedding/tokens", f"model.{table}.weight"),
        Rule("decoder/heads/language_model/kernel", "lm_head.weight"),
        Rule("decoder/heads/language_model/bias", "final_logits_bias", "leaf1"),
        Rule("decoder/heads/span", "qa_outputs"),
    ]
    feedforward = {"/up": "fc1", "/down": "fc2", "_norm": "final_layer_norm"}
    outside = {
        "embedding/positions": "embed_positions.weight",
        "embedding/norm": "layernorm_embedding",
        "final_norm": "layer_norm",
    }
    for stack in ("encoder", "decoder"):
        result += rules(f"{stack}/", f"model.{stack}.", outside)
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            result += [Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm")]
            result += rules(f"{ours}{name}/", f"{theirs}{module}.", PROJECTIONS)
        result += rules(ours + "feedforward", theirs, feedforward)
    return result


MARIAN = Pair("Marian", {"MTModel": TRANSLATOR, "Model": ()}, two_vocabularies=True)
FAMILIES = {"marian": pair_family(MARIAN)}
