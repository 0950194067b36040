"""LLaMA and its relatives: Mistral, Ministral, Qwen 2 and 3, and Mixtral, which has experts."""

from collections.abc import Collection
from functools import partial
from typing import Any, Literal, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.families.classes import SPAN, heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    EXPERT_MAPS,
    FIELDS,
    FULL,
    SLIDING,
    decoder_family,
    decoder_rules,
    head_width,
    read_biases,
    read_kinds,
    read_masks,
    sliding,
    write_biases,
    write_masks,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import GATED, Json, Key, get, read_fields, write_fields
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.zoo.qk_norm import qk_norm


class Llama(NamedTuple):
    """LLaMA or a relative: the defaults of config.json, and what differs from LLaMA."""

    name: str  # prefix of its class names
    kv_heads: int | None = None
    window: int | None = None  # the default of sliding_window
    # the layers with sliding_window
    windows: Literal["no layer", "every layer", "layer types", "flag and layer types"] = "no layer"
    bias: str = ""  # linear maps that always have a bias
    # {flag of config.json: linear maps that have a bias if it is set}
    biases: dict[str, str] = {}  # noqa: RUF012 (never written to)
    norm_eps: float = 1e-6
    theta: float = 1e4
    head_width: int | None = None
    mixer: Any = None
    span_base: str = "transformer."  # prefix of the base model in files of ForQuestionAnswering

    @property
    def fields(self) -> dict[str, Key]:
        """{our field: their entry of config.json}."""
        return FIELDS | {
            "num_kv_heads": Key("num_key_value_heads", self.kv_heads),
            "norm_eps": Key("rms_norm_eps", self.norm_eps),
        }


LLAMAS = {
    "llama": Llama("Llama", biases={"attention_bias": ALL_BIASES, "mlp_bias": "gate|up|down"}),
    "mistral": Llama("Mistral", kv_heads=8, window=4096, windows="every layer", span_base="model."),
    "ministral": Llama("Ministral", kv_heads=8, window=4096, windows="layer types"),
    "qwen2": Llama(
        "Qwen2",
        kv_heads=32,
        window=4096,
        windows="flag and layer types",
        bias="query|key|value",
    ),
    "qwen3": Llama(
        "Qwen3",
        kv_heads=32,
        window=4096,
        windows="flag and layer types",
        biases={"attention_bias": ALL_BIASES},
        head_width=128,
        mixer=qk_norm,
    ),
    "mixtral": Llama(
        "Mixtral", kv_heads=8, windows="every layer", norm_eps=1e-5, theta=1e6, span_base="model."
    ),
}
MIXTURE = {
    "experts": Key("num_local_experts", 8),
    "top_k": Key("num_experts_per_tok", 2),
    "activation": Key("hidden_act", "silu", GATED),
    "balance_loss": Key("router_aux_loss_coef", 0.001),
}


def _read_llama(family: Llama, c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, family.fields)
    D, N = fields["d_model"], fields["num_heads"]
    if D % N and family.name == "Llama":  # LlamaForCausalLM refuses it with any head_dim
        raise ConfigError(f"config.json: num_attention_heads={N} does not divide hidden_size={D}")
    if family.name == "Mixtral":
        fields["feedforward"] = Mixture(**read_fields(c, MIXTURE))
    width = head_width(c, family.head_width)
    return ModelConfig(
        **fields,
        head_width=width,
        norm="rms_norm",
        positions=read_rope(c, width or D // N, family.theta),
        masks=_llama_masks(family, c),
        use_bias=read_biases(c, family.biases, family.bias),
        mixer=family.mixer,
        heads=read_heads(c, family.name, heads_of_decoder(c)),
    )


def _llama_masks(family: Llama, c: Json) -> tuple[Mask, ...]:
    """The masks of the layers, as their shortest pattern."""
    if family.windows == "no layer":
        return (sliding(None),)
    width = get(c, "sliding_window", family.window)
    if family.windows == "every layer":
        return (sliding(width),)
    layers = get(c, "num_hidden_layers")
    if family.windows == "layer types":
        kind = FULL if width is None else SLIDING
        return read_masks(read_kinds(c, [kind] * layers), width)
    if not get(c, "use_sliding_window", False):
        width = None
    first = layers if width is None else get(c, "max_window_layers", 28)
    kinds = read_kinds(c, [FULL if i < first else SLIDING for i in range(layers)])
    if width is None and SLIDING in kinds:
        raise ConfigError(
            "config.json: layer_types has sliding_attention; "
            "set sliding_window and use_sliding_window"
        )
    return read_masks(kinds, width)


def _write_llama(family: Llama, config: ModelConfig) -> Json:
    c = write_fields(config, family.fields)
    c |= write_heads(config.heads, family.name, heads_of_decoder({}))
    c["num_key_value_heads"] = config.kv_heads
    if family.head_width or config.head_width:
        c["head_dim"] = config.head_size
    c |= write_rope(config.positions)
    c |= write_biases(config, family.biases)
    masks = write_masks(config)
    if family.windows != "no layer":
        c["sliding_window"] = masks["sliding_window"]
    if family.windows == "layer types":
        c["sliding_window"] = masks["sliding_window"] or family.window  # theirs refuses none
        c |= {"layer_types": masks["layer_types"], "head_dim": config.head_size}
    if family.windows == "flag and layer types":
        has_window = masks["sliding_window"] is not None
        c |= {"use_sliding_window": has_window, "max_window_layers": config.num_layers}
        c["layer_types"] = masks["layer_types"]
    if family.name == "Mixtral":
        c |= write_fields(config.feedforward, MIXTURE)
    return c


def _llama_rules(family: Llama, config: ModelConfig) -> list[Rule]:
    base = family.span_base if SPAN in config.heads else "model."
    if not isinstance(config.feedforward, Mixture):
        return decoder_rules(base=base)
    mixture = base + "layers.{}.block_sparse_moe."
    return [
        *decoder_rules(base=base, feedforward={}),
        Rule("layers/feedforward/router", mixture + "gate"),
        *rules("layers/feedforward/", mixture + "experts.{}.", EXPERT_MAPS),
    ]


def _llama_family(llama: Llama) -> Family:
    family = decoder_family(
        partial(_read_llama, llama), partial(_write_llama, llama), partial(_llama_rules, llama)
    )
    is_mixture = llama.name == "Mixtral"
    return family._replace(other_names={"num_experts": "num_local_experts"} if is_mixture else {})


FAMILIES = {kind: _llama_family(llama) for kind, llama in LLAMAS.items()}
