"""Reversible residual layers: a stack that keeps its last activations alone. Gomez et al. 2017, arXiv:1707.04585."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models import block
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context
from jaxformer.models.stacks import scan

Tree = Any


@dataclass(frozen=True)
class Reversible:
    """`stacks.scan.stack` with reversible residuals, as in Reformer: Kitaev et al. 2020, arXiv:2001.04451, section 3.

    The mixer is f and the feed-forward g, each of its normalised stream; both streams start as x. What comes out is their
    mean or, of two `streams`, both side by side (the published models). Raises ConfigError for other norms than pre-norm,
    NotImplementedError for decoding, attention maps, a source and auxiliary losses.
    """

    streams: int = 1

    def __call__(self, config: ModelConfig, params: Tree, x, context: Context, layer_masks, state, constants=None):
        return _reversible(self.streams, config, params, x, context, layer_masks, state, constants)


def _reversible(streams, config: ModelConfig, params: Tree, x, context: Context, layer_masks, state, constants):
    if config.norm_placement != "pre":
        raise ConfigError(f"model.norm_placement={config.norm_placement!r}: reversible layers are pre-norm")
    slots, feed = scan.mixers(config), block.feed(config)
    if state is not None or context.return_weights or context.source or slots[0].memo(x) is not None:
        raise NotImplementedError("reversible layers: no cache, maps, source or memo; scan.stack has them")
    period = math.lcm(len(layer_masks), len(slots))
    slots *= period // len(slots)
    dtype, index = x.dtype, jnp.arange(config.num_layers)
    rows = scan.per_slot(config, slots, params, index, constants, x.shape[1])

    def sublayer(name, i, apply, key_index, parts, x, context, masks):
        layer, index, constants = parts
        keys, own = (None,) * 3, None
        if context.dropout_key is not None:
            key = jax.random.fold_in(context.dropout_key, index)
            keys = jax.random.split(key, 3)
            own = keys[0] if name == "attention" else jax.random.fold_in(key, 4)  # as in `block.block`
        context = replace(context, mask=masks[i % len(masks)], layer=index, constants=constants, dropout_key=own)
        y = block.norm(config, layer[f"{name}_norm"], x.astype(dtype))
        done = apply(layer.get(name, {}), y, context)
        if getattr(done, "loss", None) is not None:
            raise NotImplementedError("reversible layers: no auxiliary loss of experts; set its weights to 0")
        return ops.dropout(done.out, config.dropout_rate, keys[key_index])

    f = tuple(partial(sublayer, "attention", i, slot.apply, 1) for i, slot in enumerate(slots))
    g = (partial(sublayer, "feedforward", 0, feed.apply, 2),) * period
    stream = x.astype(jnp.promote_types(dtype, jnp.float32))
    y1, y2 = reversible_stack(f, g, tuple(rows), stream, stream, context, layer_masks)
    out = (y1 + y2) / 2 if streams == 1 else jnp.concatenate([y1, y2], axis=-1)
    return out.astype(dtype), block.LayerOutput(None, None, None, None, None)


def reversible_stack(
    f: Callable | tuple,
    g: Callable | tuple,
    params: Tree,
    x1: Float[Array, "..."],
    x2: Float[Array, "..."],
    *extra: Tree,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """y1 = x1 + f(layer, x2, *extra), y2 = x2 + g(layer, y1, *extra), layer after layer. Reformer: f attends, g feeds forward.

    `params` is a tree of arrays stacked along a leading axis of layers, `layer` one slice of it. Its floating-point
    leaves get gradients; others (dropout keys, a layer's number) are data. `extra` is the same for all layers: masks,
    positions, rotations. f and g learn everything through these arguments and answer the same when they are asked again.
    Where f and g are tuples, layers of different kinds take turns, and `params` is a tuple too, of each kind's layers.

    The backward pass recomputes x2 = y2 - g(y1) and x1 = y1 - f(x2) instead of having kept them: activations take the
    memory of one layer, at any depth, for one more forward pass of time. What comes back is rounded once a layer, so
    keep the two streams in float32; f and g may answer in 16 bits. Where f hashes (`lsh_attention`), a token that lies within
    that rounding of a bucket's edge may be recomputed into the other bucket; with rotations drawn anew each step that
    is noise in a few tokens' gradients.
    """
    if isinstance(f, tuple) and isinstance(g, tuple):
        pairs = tuple(zip(f, g, strict=True))
    else:
        pairs, params = ((f, g),), (params,)
    floats, others = _parted(jax.tree.map(jnp.asarray, (params, extra)))
    return _stack(pairs, floats, others, x1, x2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(pairs, floats, others, x1, x2):
    extra = _whole(floats[1], others[1])

    def step(streams, parts):
        x1, x2 = streams
        for (f, g), layer in zip(pairs, _whole(*parts), strict=True):
            x1 = x1 + f(layer, x2, *extra).astype(x1.dtype)
            x2 = x2 + g(layer, x1, *extra).astype(x2.dtype)
        return (x1, x2), None

    return jax.lax.scan(step, (x1, x2), (floats[0], others[0]))[0]


def _stack_forward(pairs, floats, others, x1, x2):
    streams = _stack(pairs, floats, others, x1, x2)
    return streams, (floats, others, streams)


def _stack_backward(pairs, residuals, cotangents):
    (params, extra), others, streams = residuals
    add = partial(jax.tree.map, jnp.add)

    def undo(function, parts, x, y, dx, dy):
        """From y + function(x) back to y; the gradients of parameters and extra, and dx with its share of dy."""
        layer, rest = parts
        call = lambda layer, x, extra: function(_whole(layer, rest), x, *_whole(extra, others[1]))
        out, pullback = jax.vjp(call, layer, x, extra)
        d_layer, more, d_extra = pullback(dy.astype(out.dtype))
        return y - out.astype(y.dtype), dx + more, d_layer, d_extra

    def step(carry, parts):
        (y1, y2), (d1, d2), d_extra = carry
        d_layers = []
        for (f, g), *layer in reversed(list(zip(pairs, *parts, strict=True))):
            y2, d1, from_g, extra_g = undo(g, layer, y1, y2, d1, d2)
            y1, d2, from_f, extra_f = undo(f, layer, y2, y1, d2, d1)
            d_extra = add(d_extra, add(extra_f, extra_g))
            d_layers.append(add(from_f, from_g))
        return ((y1, y2), (d1, d2), d_extra), tuple(reversed(d_layers))

    start = (streams, cotangents, jax.tree.map(jnp.zeros_like, extra))
    (_, (d1, d2), d_extra), d_params = jax.lax.scan(step, start, (params, others[0]), reverse=True)
    return (d_params, d_extra), None, d1, d2


_stack.defvjp(_stack_forward, _stack_backward)


def _parted(tree):
    """The tree twice: with its floating-point leaves, and with the others; None where the leaf is in the other one."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return (
        jax.tree.map(lambda x: x if is_float(x) else None, tree),
        jax.tree.map(lambda x: None if is_float(x) else x, tree),
    )


def _whole(floats, others):
    return jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda x: x is None)
