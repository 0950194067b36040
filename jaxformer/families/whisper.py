"""Whisper: from the mel frames of a sound to text. Radford et al. 2022, arXiv:2212.04356.

Two classes are refused. ForAudioClassification may read all layers of the encoder, and ForCausalLM
is only the decoder, but its file also has the maps of the attention to a source.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.families.classes import read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.marian import OTHER_NAMES
from jaxformer.families.settings import (
    ACTIVATION,
    PROJECTIONS,
    Json,
    Key,
    get,
    read_fields,
    write_fields,
)
from jaxformer.masks import causal, full
from jaxformer.models.config import EncoderDecoder, LanguageModel, Learned, ModelConfig
from jaxformer.zoo.whisper import BIASES, MelFrames

NAME = "Whisper"
KINDS = {"ForConditionalGeneration": (LanguageModel(),), "Model": ()}
FIELDS = {
    "d_model": Key("d_model", 384),
    "init_std": Key("init_std", 0.02),
    "feedforward": Key("activation_function", "gelu", ACTIVATION),
    "dropout_rate": Key("dropout", 0.0),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
}
LENGTHS = {"encoder": ("max_source_positions", 1500), "decoder": ("max_target_positions", 448)}


def _side(name: str) -> dict[str, Key]:
    sizes = {
        "num_layers": Key(f"{name}_layers", 4),
        "num_heads": Key(f"{name}_attention_heads", 6),
        "d_ff": Key(f"{name}_ffn_dim", 1536),
        "context_length": Key(*LENGTHS[name]),
    }
    return FIELDS | sizes


def _read(c: Json, names: Collection[str]) -> EncoderDecoder:
    encoder = ModelConfig(
        **read_fields(c, _side("encoder")),
        vocab_size=0,
        embedding=MelFrames(get(c, "num_mel_bins", 80)),
        positions=None,
        masks=(full(),),
        use_bias=BIASES,
        heads=(),
        tie_embeddings=False,
    )
    decoder = ModelConfig(
        **read_fields(c, _side("decoder")),
        vocab_size=get(c, "vocab_size", 51865),
        positions=Learned(),
        masks=(causal(),),
        use_bias=BIASES,
        heads=read_heads(c, NAME, KINDS),
        tie_embeddings=get(c, "tie_word_embeddings", True),
    )
    return EncoderDecoder(encoder, decoder, share_embeddings=False)


def _write(config: Any) -> Json:
    encoder, decoder = config.encoder, config.decoder
    c = write_fields(encoder, _side("encoder")) | write_fields(decoder, _side("decoder"))
    return c | {
        **write_heads(decoder.heads, NAME, KINDS),
        "is_encoder_decoder": True,
        "vocab_size": decoder.vocab_size,
        "num_mel_bins": encoder.embedding.mel_bins,
        "tie_word_embeddings": decoder.tie_embeddings,
    }


def _rules(config: EncoderDecoder) -> list[Rule]:
    front = {"convolution_1": "conv1", "convolution_2": "conv2"}
    tables = {"tokens": "embed_tokens.weight", "positions": "embed_positions.weight"}
    result = [
        *rules("encoder/embedding/", "model.encoder.", front, "patches"),
        Rule("encoder/embedding/sinusoids", "model.encoder.embed_positions.weight"),
        *rules("decoder/embedding/", "model.decoder.", tables),
        Rule("decoder/heads/language_model/kernel", "proj_out.weight"),
    ]
    feedforward = {"/up": "fc1", "/down": "fc2", "_norm": "final_layer_norm"}
    for stack in ("encoder", "decoder"):
        result.append(Rule(f"{stack}/final_norm", f"model.{stack}.layer_norm"))
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            result.append(Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm"))
            result += rules(f"{ours}{name}/", f"{theirs}{module}.", PROJECTIONS)
        result += rules(ours + "feedforward", theirs, feedforward)
    return result


FAMILIES = {
    "whisper": Family(
        _read,
        _write,
        _rules,
        prefix="model.",
        heads=r"^proj_out\.",
        aliases={"proj_out.weight": "model.decoder.embed_tokens.weight"},
        other_names=OTHER_NAMES | {"num_key_value_heads": "encoder_attention_heads"},
        needs_start=True,
    )
}
