"""One block for every stack: a mixer across positions, a feed-forward within them, norms where the config puts them."""

from dataclasses import replace
from typing import Any, NamedTuple

from jax import Array, random
from jaxtyping import Float

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.embedding import norm, norm_spec
from jaxformer.models.layer import (
    Context,
    FeedForward,
    FeedForwardOutput,
    Mixer,
    MixerOutput,
    Tree,
    linear_spec,
    residual_std,
)
from jaxformer.models.mixers.attention import attention_spec, cross_attention
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.sharding import all_gather_weights, with_logical_constraint


def feedforward_spec(config: ModelConfig) -> Tree:
    D, F = config.d_model, config.ff_width
    spec = {
        "up": linear_spec(config, "up", (D, F), ("embed", "mlp"), ("embed",), config.init_std),
        "down": linear_spec(config, "down", (F, D), ("mlp", "embed"), ("mlp",), residual_std(config)),
    }
    if config.feedforward in GATES:
        spec["gate"] = linear_spec(config, "gate", (D, F), ("embed", "mlp"), ("embed",), config.init_std)
    return spec


def feedforward(config: ModelConfig, params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    up, down, gate = params["up"], params["down"], params.get("gate")
    biases, name = dict(up_bias=up.get("bias"), down_bias=down.get("bias")), str(config.feedforward)
    if gate is None:
        return ops.mlp(x, up["kernel"], down["kernel"], ACTIVATIONS[name], **biases)
    activation = ACTIVATIONS[GATES[name]]
    return ops.glu(x, gate["kernel"], up["kernel"], down["kernel"], activation, gate_bias=gate.get("bias"), **biases)


def feed(config: ModelConfig) -> FeedForward:
    """The config's feed-forward."""
    if callable(config.feedforward):
        return config.feedforward(config)
    return FeedForward(
        feedforward_spec(config), lambda params, x, context: FeedForwardOutput(feedforward(config, params, x))
    )


def spec(config: ModelConfig, mixer: Mixer, source_width: int | None = None) -> Tree:
    """Parameters of one layer; with `source_width`, the width of an encoder, of a layer that attends to it."""
    tree = {"attention": mixer.spec, "feedforward": feed(config).spec}
    if source_width is not None:
        tree["cross_attention"] = attention_spec(config, source_width)
    for name in list(tree):
        tree[f"{name}_norm"] = norm_spec(config)
        if config.norm_placement == "sandwich":
            tree[f"{name}_out_norm"] = norm_spec(config)
    return tree


class LayerOutput(NamedTuple):
    """What a layer returns beside x."""

    state: Tree
    weights: Any
    memo: Tree
    loss: Any
    stats: Tree


def block(config: ModelConfig, mixer: Mixer, params, x: Float[Array, "B T D"], context: Context):
    """One layer: (x, `LayerOutput`).

    pre:      x + f(norm(x))          (GPT-2, LLaMA, T5, ViT)
    post:     norm(x + f(x))          (2017, BERT)
    sandwich: x + norm(f(norm(x)))    (Gemma 2)
    for f the mixer, then attention to a source if there is one, then the feed-forward; each with dropout on its output.
    """
    source_width = None if context.source is None else context.source.hidden.shape[-1]
    params = all_gather_weights(params, lambda: spec(config, mixer, source_width), x.dtype)
    keys = dict.fromkeys(("mix", "attention", "feedforward", "cross", "cross_attention"))
    if context.dropout_key is not None:
        keys = dict(zip(keys, random.split(context.dropout_key, 3), strict=False))
        keys |= dict(
            zip(("cross", "cross_attention"), random.split(random.fold_in(context.dropout_key, 3)), strict=True)
        )

    def residual(x, name, f):
        y, rest = f(x if config.norm_placement == "post" else norm(config, params[f"{name}_norm"], x))
        y = ops.dropout(y, config.dropout_rate, keys[name])
        if config.norm_placement == "sandwich":
            y = norm(config, params[f"{name}_out_norm"], y)
        x = with_logical_constraint(x + y, "batch", "length", None)
        return (norm(config, params[f"{name}_norm"], x) if config.norm_placement == "post" else x), rest

    def mix(y):
        out, *rest = mixer.apply(params.get("attention", {}), y, replace(context, dropout_key=keys["mix"]))
        return out, MixerOutput(None, *rest)

    def read(y):
        return cross_attention(config, params["cross_attention"], y, replace(context, dropout_key=keys["cross"])), None

    def widen(y):
        key = None if context.dropout_key is None else random.fold_in(context.dropout_key, 4)
        fed = feed(config).apply(params.get("feedforward", {}), y, replace(context, dropout_key=key))
        return fed.out, fed

    x, mixed = residual(x, "attention", mix)
    if context.source is not None:
        x, _ = residual(x, "cross_attention", read)
    x, fed = residual(x, "feedforward", widen)
    return x, LayerOutput(mixed.state, mixed.weights, mixed.memo, fed.loss, fed.stats)
