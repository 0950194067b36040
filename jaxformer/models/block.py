"""One layer: a mixer across positions, a feed-forward within them, norms where the config puts them."""

# ruff: noqa: I001 (a list of names on few lines)
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, random
from jaxtyping import Float

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.embedding import norm, norm_spec
from jaxformer.models.layer import (
    Context, FeedForward, FeedForwardOutput, LayerOutput, Mixer, MixerOutput, Tree, linear_spec, residual_std,
)  # fmt: skip
from jaxformer.models.mixers.attention import attention_spec, cross_attention
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.sharding import all_gather_weights, with_logical_constraint


def feedforward_spec(config: ModelConfig, lead=(), lead_axes=()) -> Tree:
    """Matrices of an activation or a gate; the axes of `lead` choose one of several (experts)."""
    D, F = config.d_model, config.ff_width
    into, back = ((D, F), ("embed", "mlp"), config.std), ((F, D), ("mlp", "embed"), residual_std(config))
    places = {"up": into, "down": back} | ({"gate": into} if config.feedforward in GATES else {})

    def matrix(name, shape, axes, std):
        return linear_spec(config, name, (*lead, *shape), (*lead_axes, *axes), axes[:1], std)

    return {name: matrix(name, *place) for name, place in places.items()}


def feedforward(name: str, params: Tree, x: Float[Array, "B T D"], **options) -> Float[Array, "B T D"]:
    """The activation or gate of that name between the matrices of `feedforward_spec`; options of `ops.mlp`."""
    kernels = {matrix: leaves["kernel"] for matrix, leaves in params.items()}
    biases = {f"{matrix}_bias": leaves["bias"] for matrix, leaves in params.items() if "bias" in leaves}
    return (ops.glu if name in GATES else ops.mlp)(
        x, **kernels, activation=ACTIVATIONS[GATES.get(name, name)], **biases, **options
    )


def feed(config: ModelConfig) -> FeedForward:
    """The config's feed-forward."""
    if callable(config.feedforward):
        return config.feedforward(config)

    def apply(params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        return FeedForwardOutput(feedforward(str(config.feedforward), params, x, edit=partial(context.tap, "hidden")))

    return FeedForward(feedforward_spec(config), apply)


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


class DropoutKeys(NamedTuple):
    """The keys of one layer: what a sub-layer drops inside, and what is dropped of its output."""

    attention: Any = None
    attention_out: Any = None
    cross_attention: Any = None
    cross_attention_out: Any = None
    feedforward: Any = None
    feedforward_out: Any = None

    @classmethod
    def split(cls, key: Array | None) -> "DropoutKeys":
        """No keys without one."""
        if key is None:
            return cls()
        attention, attention_out, feedforward_out = random.split(key, 3)
        cross, cross_out = random.split(random.fold_in(key, 3))
        return cls(attention, attention_out, cross, cross_out, random.fold_in(key, 4), feedforward_out)


def sublayer(config: ModelConfig, params, name: str, apply: Callable, keys: DropoutKeys, x: Float[Array, "B T D"], context):
    """(x plus the dropout of f(x), what f returned), for f the function `apply` with the parameters of that name.

    pre: x + f(norm(x)) (GPT-2); post: norm(x + f(x)) (2017, BERT); sandwich: x + norm(f(norm(x))) (Gemma 2).
    """
    post = config.norm_placement == "post"
    with jax.named_scope(name):
        tap = context.tap.inside(name)
        y = tap("input", x if post else norm(config, params[f"{name}_norm"], x))
        result = apply(params.get(name, {}), y, replace(context, dropout_key=getattr(keys, name), tap=tap))
        y = ops.dropout(tap("out", result[0]), config.dropout_rate, getattr(keys, f"{name}_out"))
        if config.norm_placement == "sandwich":
            y = norm(config, params[f"{name}_out_norm"], y)
        x = with_logical_constraint(x + y, "batch", "length", None)
        return (norm(config, params[f"{name}_norm"], x) if post else x), result


def block(config: ModelConfig, mixer: Mixer, params, x: Float[Array, "B T D"], context: Context) -> LayerOutput:
    """One layer: the mixer, attention to the source if there is one, the feed-forward."""
    source_width = None if context.source is None else context.source.hidden.shape[-1]
    params = all_gather_weights(params, lambda: spec(config, mixer, source_width), x.dtype)
    keys = DropoutKeys.split(context.dropout_key)
    x, mixed = sublayer(config, params, "attention", mixer.apply, keys, x, context)
    mixed = MixerOutput(*mixed)  # a mixer may return a plain tuple
    if context.source is not None:
        x, _ = sublayer(config, params, "cross_attention", partial(cross_attention, config), keys, x, context)
    x, fed = sublayer(config, params, "feedforward", feed(config).apply, keys, x, context)
    x = context.tap("residual", x)
    return LayerOutput(x, mixed.state, mixed.memo, fed.loss, fed.stats, context.tap.found)
