"""Cohere's Command R: parallel layers with layer norms without biases, and scaled logits.

Pairs of features that are rotated are neighbours. Command R+ has norms of queries and keys.
"""

from collections.abc import Collection

from jaxformer.families.classes import read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    FIELDS,
    decoder_family,
    decoder_rules,
    head_width,
    read_biases,
    write_biases,
    write_widths,
)
from jaxformer.families.family import Rule
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import PROJECTIONS, Json, Key, get, read_fields, write_fields
from jaxformer.models.blocks import parallel
from jaxformer.models.config import LanguageModel, ModelConfig
from jaxformer.zoo.qk_layer_norm import qk_layer_norm

ATTENTION = PROJECTIONS | {
    "out": "o_proj",
    # tensors of two axes, as ours
    "query_norm/scale": "q_norm.weight",
    "key_norm/scale": "k_norm.weight",
}
SCALE, THETA = 0.0625, 5e5  # defaults
BIASES = {"attention_bias": ALL_BIASES}
COHERE_FIELDS = FIELDS | {
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "tie_embeddings": Key("tie_word_embeddings", True),
}


def _classes(scale: float) -> dict[str, tuple]:
    """{end of a class name: its heads}."""
    return {"ForCausalLM": (LanguageModel(scale=scale),), "Model": ()}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, COHERE_FIELDS)
    width = head_width(c)
    rotated = width or fields["d_model"] // fields["num_heads"]
    return ModelConfig(
        **fields,
        head_width=width,
        norm="layer_norm",
        block=parallel,
        mixer=qk_layer_norm if get(c, "use_qk_norm", False) else None,
        positions=read_rope(c, rotated, THETA, layout="interleaved"),
        use_bias=read_biases(c, BIASES),
        heads=read_heads(c, "Cohere", _classes(get(c, "logit_scale", SCALE))),
    )


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, COHERE_FIELDS)
    c |= write_heads(config.heads, "Cohere", _classes(SCALE))
    c["logit_scale"] = getattr(config.heads[0], "scale", SCALE) if config.heads else SCALE
    c |= write_widths(config)
    c |= write_biases(config, BIASES) | write_rope(config.positions)
    return c | {"use_qk_norm": config.mixer is qk_layer_norm}


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(norms={"norm": "input_layernorm"}, attention=ATTENTION)


FAMILIES = {"cohere": decoder_family(_read, _write, _rules)}
