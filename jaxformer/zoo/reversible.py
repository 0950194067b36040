"""Reversible residual layers: a stack that keeps only its last activations.

Gomez et al. 2017, arXiv:1707.04585.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, LayerOutput, Layers
from jaxformer.models.norm import norm
from jaxformer.models.stacks import layout, scan
from jaxformer.models.stacks.scan import LayerInputs
from jaxformer.models.stacks.trees import combine, partition
from jaxformer.models.sublayers import DropoutKeys
from jaxformer.ops.einsum import in_float32
from jaxformer.params import Tree


@dataclass(frozen=True)
class Reversible:
    """Reversible residuals, as in Reformer: Kitaev et al. 2020, arXiv:2001.04451, section 3.

    It replaces `stacks.scan.stack`. f is the mixer and g the feed-forward, each of its normalised
    stream; both streams start as x. Raises NotImplementedError for decoding, intermediates, a
    source, a carry and auxiliary losses.
    """

    # 1: the output is the mean of the streams; 2: both side by side (the published models)
    streams: int = 1

    def __post_init__(self):
        if self.streams not in (1, 2):
            raise ConfigError(
                f"Reversible.streams={self.streams}: "
                "expected 1, their mean, or 2, both side by side"
            )

    def __call__(self, config: ModelConfig, layers: Layers, x, context: Context):
        if config.block is not None:  # it is pre_norm
            raise ConfigError(
                f"model.block={getattr(config.block, '__name__', config.block)}: "
                "reversible layers are pre-norm"
            )
        kinds = layout.kinds(config)
        unsupported = layers.state is not None or context.tap
        if unsupported or context.source or kinds[0].mixer.carry(x) is not None:
            raise NotImplementedError("reversible layers: no cache, intermediates, source or carry")
        layer_inputs = scan.inputs_of_pattern(config, layers, x.shape[1])
        run = partial(_sublayer, config, x.dtype)
        calls = [
            (kinds[i % len(kinds)].sublayers, i % len(layers.masks))
            for i in range(len(layer_inputs))
        ]
        f = tuple(
            partial(run, "attention", sublayers["attention"].apply, mask)
            for sublayers, mask in calls
        )
        g = tuple(
            partial(run, "feedforward", sublayers["feedforward"].apply, mask)
            for sublayers, mask in calls
        )
        stream = in_float32(x)
        y1, y2 = reversible_stack(f, g, layer_inputs, stream, stream, context, layers.masks)
        out = (y1 + y2) / 2 if self.streams == 1 else jnp.concatenate([y1, y2], axis=-1)
        return out.astype(x.dtype), LayerOutput()


def _sublayer(
    config: ModelConfig,
    dtype,
    name: str,
    apply: Callable,
    i: int,
    layer_inputs: LayerInputs,
    x,
    context: Context,
    masks,
):
    """dropout(f(norm(x))), where f is a layer's mixer (under the i-th mask) or feed-forward."""
    key = context.dropout_key
    if key is not None:
        key = jax.random.fold_in(key, layer_inputs.layer)
    keys = DropoutKeys.split(key)
    context = replace(
        context,
        mask=masks[i],
        layer=layer_inputs.layer,
        constants=layer_inputs.constants,
        dropout_key=getattr(keys, name),
    )
    with jax.named_scope(name):
        y = norm(config, layer_inputs.params[f"{name}_norm"], x.astype(dtype))
        result = apply(layer_inputs.params.get(name, {}), y, context)
        if getattr(result, "loss", None) is not None:
            raise NotImplementedError(
                "reversible layers: no auxiliary loss of experts; set its weights to 0"
            )
        return ops.dropout(result[0], config.dropout_rate, getattr(keys, f"{name}_out"))


def reversible_stack(
    f: Callable | tuple,
    g: Callable | tuple,
    params: Tree,
    x1: Float[Array, "..."],
    x2: Float[Array, "..."],
    *extra: Tree,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """y1 = x1 + f(layer, x2, *extra), y2 = x2 + g(layer, y1, *extra), layer after layer.

    f and g are pure functions. `params` are leaves `[L, ...]`, and `layer` is one slice of them.
    Floating-point leaves get gradients; others are data. If f and g are tuples, layers of different
    kinds alternate, and `params` is a tuple of the layers of each kind.

    The backward pass recomputes x2 = y2 - g(y1) and x1 = y1 - f(x2): it needs the memory of one
    layer and the time of one more forward pass. Each layer rounds what it recomputes, so keep the
    two streams in float32; f and g may answer in 16 bits. If f hashes (`lsh_attention`), rounding
    may move a token near the edge of a bucket into the other bucket. With rotations that are drawn
    anew in each step, that is noise in the gradients of a few tokens.
    """
    if isinstance(f, tuple) and isinstance(g, tuple):
        pairs = tuple(zip(f, g, strict=True))
    else:
        pairs, params = ((f, g),), (params,)

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.inexact)

    floats, others = partition(jax.tree.map(jnp.asarray, (params, extra)), is_float)
    return _stack(pairs, floats, others, x1, x2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(pairs, floats, others, x1, x2):
    """The two streams after all layers. `pairs` has (f, g) of each kind of layer."""
    extra = combine(floats[1], others[1])

    def step(streams, floats_and_others):
        x1, x2 = streams
        for pair, layer in zip(pairs, combine(*floats_and_others), strict=True):
            for function in pair:
                x1, x2 = x2, x1 + function(layer, x2, *extra).astype(x1.dtype)
        return (x1, x2), None

    return jax.lax.scan(step, (x1, x2), (floats[0], others[0]))[0]


def _stack_forward(pairs, floats, others, x1, x2):
    """The streams, and what the backward pass needs."""
    streams = _stack(pairs, floats, others, x1, x2)
    return streams, (floats, others, streams)


def _stack_backward(pairs, residuals, cotangents):
    """The cotangents of the arguments, from the last layer to the first."""
    (params, extra), others, streams = residuals
    add = partial(jax.tree.map, jnp.add)

    def step(carry, floats_and_others):
        # x, y of the function before: y = its other stream + function(x)
        (x, y), (dx, dy), d_extra = carry
        d_layers = []
        for pair, layer, rest in reversed(list(zip(pairs, *floats_and_others, strict=True))):
            by_function = []  # f and g: cotangents of the layer's parameters and of `extra`
            for function in reversed(pair):
                out, pullback = jax.vjp(partial(_call, function, rest, others[1]), layer, x, extra)
                d_layer, d_x, d_more = pullback(dy.astype(out.dtype))
                x, y = y - out.astype(y.dtype), x
                dx, dy = dy, dx + d_x
                by_function.insert(0, (d_layer, d_more))
            d_layer, d_more = add(*by_function)
            d_extra = add(d_extra, d_more)
            d_layers.insert(0, d_layer)
        return ((x, y), (dx, dy), d_extra), tuple(d_layers)

    start = (streams, cotangents, jax.tree.map(jnp.zeros_like, extra))
    (_, (d1, d2), d_extra), d_params = jax.lax.scan(step, start, (params, others[0]), reverse=True)
    return (d_params, d_extra), None, d1, d2


def _call(function, rest, other_extra, layer, x, extra):
    """function(layer, x, *extra) of layers and extra that are split into floats and others."""
    return function(combine(layer, rest), x, *combine(extra, other_extra))


_stack.defvjp(_stack_forward, _stack_backward)
