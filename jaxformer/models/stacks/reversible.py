"""Reversible residual layers: a stack that keeps its last activations alone. Gomez et al. 2017, arXiv:1707.04585."""

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
from jaxformer.models.embedding import norm
from jaxformer.models.layer import Context, LayerOutput, Layers
from jaxformer.models.stacks import scan
from jaxformer.models.stacks.scan import Row

Tree = Any


@dataclass(frozen=True)
class Reversible:
    """`stacks.scan.stack` with reversible residuals, as in Reformer: Kitaev et al. 2020, arXiv:2001.04451, section 3.

    The mixer is f and the feed-forward g, each of its normalised stream; both streams start as x. Raises ConfigError for
    other norms than pre-norm, NotImplementedError for decoding, attention maps, hidden states of each layer, a source, a
    memo and auxiliary losses.
    """

    streams: int = 1  # 1: the output is the mean of the streams; 2: both side by side (the published models)

    def __call__(self, config: ModelConfig, layers: Layers, x, context: Context):
        if config.norm_placement != "pre":
            raise ConfigError(f"model.norm_placement={config.norm_placement!r}: reversible layers are pre-norm")
        slots = scan.pattern(config)
        unsupported = layers.state is not None or context.return_weights or context.return_hidden
        if unsupported or context.source or slots[0].memo(x) is not None:
            raise NotImplementedError(
                "reversible layers: no cache, attention maps, hidden states, source or memo; scan.stack has them"
            )
        rows = Row(jnp.arange(config.num_layers), layers.params, constants=layers.constants)
        rows = scan.rows_by_slot(config, slots, rows, x.shape[1])
        run = partial(_sublayer, config, x.dtype)
        f = tuple(partial(run, "attention", slot.apply, i % len(layers.masks)) for i, slot in enumerate(slots))
        g = (partial(run, "feedforward", block.feed(config).apply, 0),) * len(slots)
        stream = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y1, y2 = reversible_stack(f, g, rows, stream, stream, context, layers.masks)
        out = (y1 + y2) / 2 if self.streams == 1 else jnp.concatenate([y1, y2], axis=-1)
        return out.astype(x.dtype), LayerOutput()


def _sublayer(config: ModelConfig, dtype, name: str, apply: Callable, i: int, row: Row, x, context: Context, masks):
    """The dropout of f(norm(x)), for f the mixer (under the i-th mask) or the feed-forward of a layer."""
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, row.layer)
    keys = block.DropoutKeys.split(key)
    context = replace(context, mask=masks[i], layer=row.layer, constants=row.constants, dropout_key=getattr(keys, name))
    with jax.named_scope(name):
        y = norm(config, row.params[f"{name}_norm"], x.astype(dtype))
        result = apply(row.params.get(name, {}), y, context)
        if getattr(result, "loss", None) is not None:
            raise NotImplementedError("reversible layers: no auxiliary loss of experts; set its weights to 0")
        return ops.dropout(result[0], config.dropout_rate, getattr(keys, f"{name}_out"))


def reversible_stack(
    f: Callable | tuple, g: Callable | tuple, params: Tree, x1: Float[Array, "..."], x2: Float[Array, "..."], *extra: Tree
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:  # fmt: skip
    """y1 = x1 + f(layer, x2, *extra), y2 = x2 + g(layer, y1, *extra), layer after layer. Reformer: f attends, g feeds forward.

    `params` is a tree of arrays stacked along a leading axis of layers, `layer` one slice of it. Its floating-point
    leaves get gradients; others (dropout keys, a layer's number) are data. `extra` is the same for all layers: masks,
    positions, rotations. f and g must be pure functions of these arguments. Where f and g are tuples, layers of different
    kinds take turns, and `params` is a tuple too, of the layers of each kind.

    The backward pass recomputes x2 = y2 - g(y1) and x1 = y1 - f(x2). Activations take the memory of one layer, at any
    depth, for the time of one more forward pass. Each layer rounds what it recomputes, so keep the two streams in float32; f
    and g may answer in 16 bits. Where f hashes (`lsh_attention`), a token within that rounding of the edge of a bucket may
    be recomputed into the other bucket: with rotations drawn anew each step that is noise in the gradients of a few tokens.
    """
    if isinstance(f, tuple) and isinstance(g, tuple):
        pairs = tuple(zip(f, g, strict=True))
    else:
        pairs, params = ((f, g),), (params,)
    floats, others = _split_floats(jax.tree.map(jnp.asarray, (params, extra)))
    return _stack(pairs, floats, others, x1, x2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(pairs, floats, others, x1, x2):
    extra = _join(floats[1], others[1])

    def step(streams, parts):
        x1, x2 = streams
        for (f, g), layer in zip(pairs, _join(*parts), strict=True):
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

    def step(carry, parts):
        (y1, y2), (d1, d2), d_extra = carry
        d_layers = []
        for (f, g), layer, rest in reversed(list(zip(pairs, *parts, strict=True))):
            y2, d1, from_g, extra_g = _undo(partial(_call, g, rest, others[1]), layer, extra, y1, y2, d1, d2)
            y1, d2, from_f, extra_f = _undo(partial(_call, f, rest, others[1]), layer, extra, y2, y1, d2, d1)
            d_extra = add(d_extra, add(extra_f, extra_g))
            d_layers.append(add(from_f, from_g))
        return ((y1, y2), (d1, d2), d_extra), tuple(reversed(d_layers))

    start = (streams, cotangents, jax.tree.map(jnp.zeros_like, extra))
    (_, (d1, d2), d_extra), d_params = jax.lax.scan(step, start, (params, others[0]), reverse=True)
    return (d_params, d_extra), None, d1, d2


def _call(function, rest, other_extra, layer, x, extra):
    return function(_join(layer, rest), x, *_join(extra, other_extra))


def _undo(call, layer, extra, x, y, dx, dy):
    """From y + call(layer, x, extra) back to y; dx with its share of dy, and the gradients of layer and extra."""
    out, pullback = jax.vjp(call, layer, x, extra)
    d_layer, more, d_extra = pullback(dy.astype(out.dtype))
    return y - out.astype(y.dtype), dx + more, d_layer, d_extra


_stack.defvjp(_stack_forward, _stack_backward)


def _split_floats(tree):
    """The tree twice: with its floating-point leaves, and with the others; None in place of the rest."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    pick = lambda floats: jax.tree.map(lambda x: x if is_float(x) == floats else None, tree)
    return pick(True), pick(False)


def _join(floats, others):
    return jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda x: x is None)
