"""Qwen MoE: Qwen1.5-MoE and Qwen2 with experts (qwen2_moe), and Qwen3 with experts (qwen3_moe).

Some layers may have a plain feed-forward instead of experts. qwen2_moe has one more expert for all
tokens, times a gate.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.families.classes import SPAN, heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    FIELDS,
    FULL,
    GATED_MAPS,
    SLIDING,
    decoder_family,
    decoder_rules,
    head_width,
    read_kinds,
    read_masks,
    sliding,
    write_masks,
    write_widths,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import (
    GATED,
    Json,
    Key,
    get,
    read_fields,
    repeated,
    write_fields,
)
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.models.feedforward import feedforward, feedforward_spec
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, linear, linear_spec
from jaxformer.models.mixture import Mixture
from jaxformer.params import Tree
from jaxformer.zoo.qk_norm import qk_norm


@dataclass(frozen=True)
class GatedShared:
    """A mixture, and one expert for all tokens: mixture(x) + sigmoid(x w) expert(x).

    Qwen1.5-MoE: Qwen Team 2024.
    """

    mixture: Mixture
    d_ff: int  # width of the expert for all tokens

    def __call__(self, config: ModelConfig) -> FeedForward:
        mixture = self.mixture(config)
        activation = self.mixture.activation
        plain = replace(config, feedforward=activation, d_ff=self.d_ff, use_bias=False)
        gate = linear_spec(
            plain, "gate", (config.d_model, 1), ("embed", None), ("embed",), config.std
        )

        def apply(params: Tree, x: Float[jax.Array, "B T D"], context: Context):
            result: FeedForwardOutput = mixture.apply(params, x, context)
            weight = jax.nn.sigmoid(linear("btd,de->bte", x, params["shared_gate"]))
            return result._replace(
                out=result.out + weight * feedforward(activation, params["shared"], x)
            )

        spec = mixture.spec | {"shared": feedforward_spec(plain), "shared_gate": gate}
        return FeedForward(spec, apply, visited=self.mixture.top_k)

    def evaluation(self) -> "GatedShared":
        """The model for scores, see `Mixture.evaluation`."""
        return replace(self, mixture=self.mixture.evaluation())


class QwenMoe(NamedTuple):
    """One of the two versions: the defaults of its config.json."""

    prefix: str  # of its class names
    kv_heads: int
    experts: int
    top_k: int
    width: int  # of an expert
    bias: str  # the maps with a bias if the flag is set
    flag: tuple[str, bool]  # the name of the flag and its default
    mixer: Callable | None = None
    shared_width: int | None = None  # of the expert for all tokens; None: there is none
    span_base: str = "model."  # prefix of the base model in files of ForQuestionAnswering

    @property
    def fields(self) -> dict[str, Key]:
        """{our field: their entry of config.json}."""
        return FIELDS | {"num_kv_heads": Key("num_key_value_heads", self.kv_heads)}

    @property
    def mixture(self) -> dict[str, Key]:
        """{field of our mixture: their entry of config.json}."""
        return {
            "experts": Key("num_experts", self.experts),
            "top_k": Key("num_experts_per_tok", self.top_k),
            "activation": Key("hidden_act", "silu", GATED),
            "d_ff": Key("moe_intermediate_size", self.width),
            "normalise": Key("norm_topk_prob", False),
            "balance_loss": Key("router_aux_loss_coef", 0.001),
        }


QWENS = {
    "qwen2_moe": QwenMoe(
        "Qwen2Moe",
        kv_heads=16,
        experts=60,
        top_k=4,
        width=1408,
        bias="query|key|value",
        flag=("qkv_bias", True),
        shared_width=5632,
    ),
    "qwen3_moe": QwenMoe(
        "Qwen3Moe",
        kv_heads=4,
        experts=128,
        top_k=8,
        width=768,
        bias=ALL_BIASES,
        flag=("attention_bias", False),
        mixer=qk_norm,
        span_base="transformer.",
    ),
}
SHARED = "shared_expert_intermediate_size"
LOCAL_EXPERTS = "num_local_experts"  # transformers 5 names the experts of qwen3_moe so
WINDOW = 4096


def _read(qwen: QwenMoe, c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, qwen.fields)
    width = head_width(c)
    return ModelConfig(
        **fields | {"feedforward": _read_feedforwards(qwen, c, fields["feedforward"])},
        head_width=width,
        norm="rms_norm",
        positions=read_rope(c, width or fields["d_model"] // fields["num_heads"]),
        masks=_read_masks(qwen, c),
        use_bias=qwen.bias if get(c, *qwen.flag) else False,
        mixer=qwen.mixer,
        heads=read_heads(c, qwen.prefix, heads_of_decoder(c)),
    )


def _read_feedforwards(qwen: QwenMoe, c: Json, plain: str) -> Any:
    """The feed-forward of all layers, or a tuple: experts, or `plain` ones."""
    mixture = Mixture(**read_fields(c, qwen.mixture) | {"experts": _count_experts(qwen, c)})
    experts: Any = mixture
    if qwen.shared_width is not None:
        experts = GatedShared(mixture, get(c, SHARED, qwen.shared_width))
    step = get(c, "decoder_sparse_step", 1)
    plain_layers = c.get("mlp_only_layers") or []
    layers = range(get(c, "num_hidden_layers"))
    items = [plain if i in plain_layers or (i + 1) % step else experts for i in layers]
    pattern = _dividing_pattern(items)
    return pattern if len(pattern) > 1 else pattern[0]


def _count_experts(qwen: QwenMoe, c: Json) -> int:
    """The number of experts. A file of qwen3_moe may have either name of the entry."""
    count = get(c, "num_experts", qwen.experts)
    if qwen.mixer is None:
        return count
    local = get(c, LOCAL_EXPERTS, count)
    if c.get("num_experts") not in (None, local):
        raise ConfigError(f"config.json: num_experts={count}, but {LOCAL_EXPERTS}={local}")
    return local


def _dividing_pattern(items: list) -> tuple:
    """The shortest pattern that gives the list and whose length divides that of the list."""
    L = len(items)
    n = next(n for n in range(1, L + 1) if L % n == 0 and items == items[:n] * (L // n))
    return tuple(items[:n])


def _read_masks(qwen: QwenMoe, c: Json) -> tuple[Mask, ...]:
    """The masks of the layers: in qwen3_moe all layers have the window, or none."""
    # a file without a window may say 0
    width = get(c, "sliding_window", WINDOW) if get(c, "use_sliding_window", False) else None
    if qwen.mixer is not None:
        return (sliding(width),)
    layers = get(c, "num_hidden_layers")
    last = 0 if width is None else get(c, "max_window_layers", 28)
    kinds = read_kinds(c, [FULL if i % 2 or i >= last else SLIDING for i in range(layers)])
    if width is None and SLIDING in kinds:
        raise ConfigError(
            "config.json: layer_types has sliding_attention; "
            "set sliding_window and use_sliding_window"
        )
    return read_masks(kinds, width)


def _write(qwen: QwenMoe, config: ModelConfig) -> Json:
    layers = repeated(config.feedforward, config)
    plain = [i for i, each in enumerate(layers) if isinstance(each, str)]
    experts: Any = next((each for each in layers if not isinstance(each, str)), None)
    mixture = getattr(experts, "mixture", experts)
    activation = layers[plain[0]] if plain else mixture.activation
    c = write_fields(replace(config, feedforward=activation), qwen.fields)
    if experts is not None:
        c |= write_fields(mixture, qwen.mixture)
        if qwen.mixer is not None:
            c[LOCAL_EXPERTS] = c["num_experts"]
    masks = write_masks(config)
    c["use_sliding_window"] = masks["sliding_window"] is not None
    c["sliding_window"] = masks["sliding_window"]
    if qwen.shared_width is not None:
        c |= {"layer_types": masks["layer_types"], "max_window_layers": config.num_layers}
        c |= {SHARED: experts.d_ff} if isinstance(experts, GatedShared) else {}
    c |= write_heads(config.heads, qwen.prefix, heads_of_decoder({}))
    c |= write_widths(config) | {"mlp_only_layers": plain}
    return c | write_rope(config.positions) | {qwen.flag[0]: config.has_bias("query")}


def _rules(qwen: QwenMoe, config: ModelConfig) -> list[Rule]:
    base = qwen.span_base if SPAN in config.heads else "model."
    layers = repeated(config.feedforward, config)
    plain = tuple(i for i, each in enumerate(layers) if isinstance(each, str))
    sparse = tuple(i for i, each in enumerate(layers) if not isinstance(each, str))
    ours, theirs = "layers/feedforward/", base + "layers.{}.mlp."
    others = {"router": "gate", "shared_gate": "shared_expert_gate"}
    of_experts = rules(ours, theirs + "experts.{}.", GATED_MAPS)
    of_plain = rules(ours, theirs, GATED_MAPS)
    return [
        *decoder_rules(base=base, feedforward={}),
        *rules(ours, theirs, others),
        *rules(ours + "shared/", theirs + "shared_expert.", GATED_MAPS),
        *(rule._replace(layers=sparse) for rule in of_experts),
        *(rule._replace(layers=plain) for rule in of_plain),
    ]


FAMILIES: dict[str, Family] = {
    kind: decoder_family(partial(_read, qwen), partial(_write, qwen), partial(_rules, qwen))
    for kind, qwen in QWENS.items()
}
