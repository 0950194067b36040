"""LLaMA and its relatives: Mistral, Qwen 2 and 3, and Mixtral, which has experts."""

from collections.abc import Collection
from functools import partial
from typing import Any, Literal, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.families.classes import (
    DECODER_TASKS,
    SPAN,
    heads_of_decoder,
    read_heads,
    write_heads,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import (
    COMMON,
    GATED,
    PROJECTIONS,
    Json,
    Key,
    get,
    layer_kinds,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
)
from jaxformer.masks import Mask, causal, window
from jaxformer.models.config import ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.zoo.qk_norm import qk_norm


def left_window(mask: Mask) -> int | None:
    """w of `causal() & window(w - 1)`, the number of keys that a query sees; else None."""
    sides = [conjunct.args[0] for conjunct in mask.conjuncts() if conjunct.args]
    return next((left + 1 for left in sides if mask == causal() & window(left)), None)


class Llama(NamedTuple):
    """LLaMA or a relative: the defaults of config.json, and what differs from LLaMA."""

    name: str  # prefix of its class names
    kv_heads: int | None = None
    window: int | None = None  # the default of sliding_window
    # the layers with sliding_window
    windows: Literal["no layer", "every layer", "layer types"] = "no layer"
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
        return COMMON | {
            "head_width": Key("head_dim", None),
            "num_kv_heads": Key("num_key_value_heads", self.kv_heads),
            "feedforward": Key("hidden_act", "silu", GATED),
            "norm_eps": Key("rms_norm_eps", self.norm_eps),
            "attention_dropout_rate": Key("attention_dropout", 0.0),
            "tie_embeddings": Key("tie_word_embeddings", False),
        }


ALL_BIASES = "query|key|value|out"
LLAMAS = {
    "llama": Llama("Llama", biases={"attention_bias": ALL_BIASES, "mlp_bias": "gate|up|down"}),
    "mistral": Llama("Mistral", kv_heads=8, window=4096, windows="every layer", span_base="model."),
    "qwen2": Llama(
        "Qwen2", kv_heads=32, window=4096, windows="layer types", bias="query|key|value"
    ),
    "qwen3": Llama(
        "Qwen3",
        kv_heads=32,
        window=4096,
        windows="layer types",
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
    fields["head_width"] = fields["head_width"] or family.head_width or (D // N if D % N else None)
    biases = [family.bias]
    biases += [layers for flag, layers in family.biases.items() if get(c, flag, False)]
    return ModelConfig(
        **fields,
        norm="rms_norm",
        positions=read_rope(c, fields["head_width"] or D // N, family.theta),
        masks=_llama_masks(family, c),
        use_bias="|".join(filter(None, biases)) or False,
        mixer=family.mixer,
        heads=read_heads(c, family.name, heads_of_decoder(c)),
    )


def _llama_masks(family: Llama, c: Json) -> tuple[Mask, ...]:
    """The masks of the layers, as their shortest pattern."""
    L = get(c, "num_hidden_layers")
    width = get(c, "sliding_window", family.window)
    if family.windows == "no layer":
        width = None
    if family.windows == "layer types" and not get(c, "use_sliding_window", False):
        width = None
    local = causal() if width is None else causal() & window(width - 1)
    if family.windows != "layer types":
        return (local,)
    first = L if width is None else get(c, "max_window_layers", 28)
    kinds = c.get("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(L)
    ]
    layer_kinds("layer_types", kinds, L, "full_attention", "sliding_attention")
    if width is None and "sliding_attention" in kinds:
        raise ConfigError(
            "config.json: layer_types has sliding_attention; "
            "set sliding_window and use_sliding_window"
        )
    return shortest_pattern([local if kind == "sliding_attention" else causal() for kind in kinds])


def _write_llama(family: Llama, config: ModelConfig) -> Json:
    windows = [left_window(mask) for mask in repeated(config.masks, config)]
    width = next(filter(None, windows), None)
    c = write_fields(config, family.fields)
    c |= write_heads(config.heads, family.name, heads_of_decoder({}))
    c["num_key_value_heads"] = config.kv_heads
    c["head_dim"] = config.head_size if family.head_width else config.head_width
    c |= write_rope(config.positions)
    if c["head_dim"] is None:
        del c["head_dim"]
    c |= {flag: config.has_bias(layers.split("|")[-1]) for flag, layers in family.biases.items()}
    if family.windows != "no layer":
        c["sliding_window"] = width
    if family.windows == "layer types":
        c |= {"use_sliding_window": width is not None, "max_window_layers": config.num_layers}
        c["layer_types"] = ["sliding_attention" if width else "full_attention" for width in windows]
    if family.name == "Mixtral":
        c |= write_fields(config.feedforward, MIXTURE)
    return c


def _llama_rules(family: Llama, config: ModelConfig) -> list[Rule]:
    base = family.span_base if SPAN in config.heads else "model."
    layer = base + "layers.{}."
    norms = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
    attention = PROJECTIONS | {"out": "o_proj", "query_norm": "q_norm", "key_norm": "k_norm"}
    if isinstance(config.feedforward, Mixture):
        module = layer + "block_sparse_moe.experts.{}."
        feedforward = {"gate": "w1", "up": "w3", "down": "w2"}
    else:
        module = layer + "mlp."
        feedforward = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    heads = {"language_model/kernel": "lm_head.weight", "token_classification": "score"}
    return [
        *rules("", base, {"embedding/tokens": "embed_tokens.weight", "final_norm": "norm"}),
        *rules("layers/", layer, norms),
        *rules("layers/attention/", layer + "self_attn.", attention),
        Rule("layers/feedforward/router", layer + "block_sparse_moe.gate"),
        *rules("layers/feedforward/", module, feedforward),
        *rules("heads/", "", DECODER_TASKS | heads),
    ]


def _llama_family(llama: Llama) -> Family:
    return Family(
        read=partial(_read_llama, llama),
        write=partial(_write_llama, llama),
        rules=partial(_llama_rules, llama),
        prefix="model.",
        aliases={"lm_head.weight": "model.embed_tokens.weight"},
    )


FAMILIES = {kind: _llama_family(llama) for kind, llama in LLAMAS.items()}
