"""Gemma, Gemma 2 and the text model of Gemma 3.

Norms multiply by 1 + w, and the embedding by sqrt(D). Gemma 2 has norms on both sides of a
sub-layer, soft caps, and a window in every second layer; Gemma 3 has norms of queries and keys, and
two rotations.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    FIELDS,
    FULL,
    NORMS,
    SLIDING,
    decoder_family,
    decoder_rules,
    read_biases,
    read_kinds,
    read_masks,
    write_biases,
    write_masks,
)
from jaxformer.families.family import Family, Rule
from jaxformer.families.rotations import read_rope, read_ropes, write_rope, write_ropes
from jaxformer.families.settings import (
    GATED,
    Json,
    Key,
    get,
    only,
    pattern_of,
    read_fields,
    repeated,
    write_fields,
)
from jaxformer.models.blocks import sandwich
from jaxformer.models.config import Embedding, ModelConfig
from jaxformer.models.norm import one_plus_rms_norm
from jaxformer.zoo.qk_norm import qk_model_norm

BIASES = {"attention_bias": ALL_BIASES}
SANDWICH = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "feedforward_norm": "pre_feedforward_layernorm",
    "feedforward_out_norm": "post_feedforward_layernorm",
}
WINDOW = 4096
THETAS = {FULL: 1e6, SLIDING: 1e4}  # of Gemma 3
LOCAL_THETA = "rope_local_base_freq"
# Gemma 1 was trained with the tanh form, which its first files call gelu
GATED_1 = GATED | {"gelu": GATED["gelu_pytorch_tanh"]}
CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}


class Gemma(NamedTuple):
    """One of the three versions: the defaults of its config.json."""

    version: int
    kv_heads: int
    period: int = 1  # the last of this many layers sees everything, the others a window
    softcaps: tuple[float | None, float | None] = (None, None)  # of scores, of logits

    @property
    def fields(self) -> dict[str, Key]:
        """{our field: their entry of config.json}."""
        activation, gates = ("hidden_activation", GATED)
        if self.version == 1:
            activation, gates = ("hidden_act", GATED_1)
        return FIELDS | {
            "head_width": Key("head_dim", 256),
            "num_kv_heads": Key("num_key_value_heads", self.kv_heads),
            "feedforward": Key(activation, "gelu_pytorch_tanh", gates),
            "tie_embeddings": Key("tie_word_embeddings", True),
        }

    def classes(self, c: Json) -> dict[str, tuple]:
        """{end of a class name: its heads}. Only one class of Gemma 3 has no "Text" in its name."""
        kinds = heads_of_decoder(c)
        if self.version < 3:
            return kinds
        return {kind if kind == "ForCausalLM" else f"Text{kind}": kinds[kind] for kind in kinds}

    @property
    def prefix(self) -> str:
        """The beginning of the class names."""
        return "Gemma" if self.version == 1 else f"Gemma{self.version}"


GEMMAS = {
    "gemma": Gemma(1, kv_heads=16),
    "gemma2": Gemma(2, kv_heads=4, period=2, softcaps=(50.0, 30.0)),
    "gemma3_text": Gemma(3, kv_heads=4, period=6),
}


def _read(gemma: Gemma, c: Json, names: Collection[str]) -> ModelConfig:
    only(c, use_bidirectional_attention=False)
    fields = read_fields(c, gemma.fields)
    positions: Any = read_rope(c, fields["head_width"]) if gemma.version < 3 else None
    if gemma.version > 1:
        kinds = read_kinds(c, _default_kinds(gemma, c))
        fields["masks"] = read_masks(kinds, get(c, "sliding_window", WINDOW))
        fields["block"] = sandwich
        fields["attention_scale"] = get(c, "query_pre_attn_scalar", 256.0) ** -0.5
        for (ours, theirs), default in zip(CAPS.items(), gemma.softcaps, strict=True):
            fields[ours] = get(c, theirs, float) if c.get(theirs) else c.get(theirs, default)
        if gemma.version == 3:
            rotations = read_ropes(c, fields["head_width"], THETAS, LOCAL_THETA)
            positions = pattern_of([rotations[kind] for kind in kinds])
            fields["mixer"] = qk_model_norm
    return ModelConfig(
        **fields,
        norm=one_plus_rms_norm,
        positions=positions,
        embedding=Embedding(scale=fields["d_model"] ** 0.5),
        use_bias=read_biases(c, BIASES),
        heads=read_heads(c, gemma.prefix, gemma.classes(c)),
    )


def _default_kinds(gemma: Gemma, c: Json) -> list[str]:
    """The kinds of the layers in a config.json without `layer_types`."""
    period = get(c, "sliding_window_pattern", gemma.period)
    layers = range(get(c, "num_hidden_layers"))
    return [SLIDING if (i + 1) % period else FULL for i in layers]


def _write(gemma: Gemma, config: ModelConfig) -> Json:
    c = write_fields(config, gemma.fields)
    c |= write_heads(config.heads, gemma.prefix, gemma.classes({}))
    c |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    c |= write_biases(config, BIASES)
    if gemma.version < 3:
        c |= write_rope(config.positions)
    if gemma.version > 1:
        c |= write_masks(config, WINDOW)
        c |= {theirs: getattr(config, ours) for ours, theirs in CAPS.items()}
        scale = config.attention_scale or config.head_size**-0.5
        c["query_pre_attn_scalar"] = round(scale**-2)
    if gemma.version == 3:
        ropes = dict(zip(c["layer_types"], repeated(config.positions, config), strict=True))
        c |= write_ropes(ropes, THETAS)
        c[LOCAL_THETA] = c["rope_parameters"][SLIDING]["rope_theta"]
    return c


def _rules(gemma: Gemma, config: ModelConfig) -> list[Rule]:
    return decoder_rules(norms=NORMS if gemma.version == 1 else SANDWICH)


FAMILIES: dict[str, Family] = {
    kind: decoder_family(partial(_read, gemma), partial(_write, gemma), partial(_rules, gemma))
    for kind, gemma in GEMMAS.items()
}
