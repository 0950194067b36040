"""Multi-head attention as a mixer, the default one, and attention to an encoder's output."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Alibi, ModelConfig, Relative
from jaxformer.models.layer import Context, Mixer, MixerOutput, Tree, linear, linear_maps, linear_spec, residual_std
from jaxformer.ops.attention import cached as cached_attention
from jaxformer.ops.attention.cached import Int8Slots, Slots, as_array, first_slots, slot_positions, write_slots, write_token
from jaxformer.ops.attention.call import Call
from jaxformer.ops.bias import Bias, alibi, bias_between, t5
from jaxformer.ops.einsum import to_int8
from jaxformer.ops.positions import Rope, rope
from jaxformer.params import Spec
from jaxformer.sharding import with_logical_constraint


class Heads(NamedTuple):
    """What attention makes of its input."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, T, K, H]
    value: Array  # [B, T, K, H]
    memo: Tree = None  # value for the next layer


def attention(
    config: ModelConfig, *, extra: Tree = None, prepare: Callable | None = None, attend: Callable | None = None,
    finish: Callable | None = None,
) -> Mixer:  # fmt: skip
    """Multi-head attention with the config's heads, mask, rotary positions, softcap and dropout. The default mixer.

    A variant (`zoo.gated`) passes what it does differently, with `extra` parameters of its own:
    prepare(params, heads, context) -> the `Heads` before the rotation;
    attend(params, context, query, key, value, **options of ops.attention) -> out `[B, T, N, H]`;
    finish(params, x, out) -> out before the last projection.
    """

    def apply(params, x: Float[Array, "B T D"], context: Context) -> MixerOutput:
        heads = project(params, x)
        if prepare is not None:
            heads = prepare(params, heads, context)
        query, key, value, memo = heads
        if isinstance(config.positions, Rope):
            query = rope(query, context.positions, config.positions, context.text_lengths)
            key = rope(key, context.positions, config.positions, context.text_lengths)
        query, key, value = (context.tap(*named) for named in (("query", query), ("key", key), ("value", value)))
        options = attention_options(config, context)
        if (bias := score_bias(config, context.shared)) is not None:
            options["bias"] = bias_at_positions(bias, context)
        function, state = None if attend is None else partial(attend, params, context), None
        if context.state is None:
            result = (function or ops.attention)(query, key, value, **options)
        else:
            result, state = cached(function, query, key, value, context, options)
        standard = attend is None and context.state is None
        out = context.tap("heads", tapped_weights(context, result, value if standard else None))
        if finish is not None:
            out = finish(params, x, out)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state, memo)

    def state(batch: int, length: int, dtype):
        zeros = jnp.zeros((batch, config.kv_heads, length, config.head_size), dtype)
        empty = Int8Slots(*to_int8(zeros.astype(jnp.float32), (-1,))) if dtype == jnp.int8 else zeros
        return {"key": empty, "value": empty}

    return Mixer(attention_spec(config) | (extra or {}), apply, state, rolls=True, shared=relative_spec(config))


def project(params: Tree, x: Float[Array, "B T D"]) -> Heads:
    """Queries, keys and values, with heads split over devices."""
    heads = linear_maps("btd,dnh->btnh", x, {name: params[name] for name in ("query", "key", "value")})
    axes = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    return Heads(**{name: with_logical_constraint(y, "batch", "length", axes[name], None) for name, y in heads.items()})


def attention_options(config: ModelConfig, context: Context) -> dict[str, Any]:
    """The options of `ops.attention` for self-attention, but for the bias."""
    return dict(
        mask=context.mask, scale=config.score_scale, softcap=config.attention_softcap,
        dropout_rate=config.attention_dropout_rate, dropout_key=context.dropout_key,
        return_weights=context.tap.asks("weights"), implementation=config.attention_implementation,
    )  # fmt: skip


def split_weights(result: Any) -> tuple[Array, Array | None]:
    """(output, weights or None) of `ops.attention`."""
    return result if isinstance(result, tuple) else (result, None)


def tapped_weights(context: Context, result: Any, value: Array | None) -> Array:
    """The output of `ops.attention`, with the weights that a caller of `apply` put in place of its own.

    Raises NotImplementedError for other weights where `value` is None: the output is no plain mean of values then.
    """
    out, weights = split_weights(result)
    if (edited := context.tap("weights", weights)) is weights:
        return out
    if value is None:
        raise NotImplementedError("edits of attention/weights: not of this variant, nor with a cache; edit attention/heads")
    grouped = edited.reshape(len(edited), value.shape[2], -1, *edited.shape[2:])
    return ops.einsum("bkgts,bskh->btkgh", grouped.astype(value.dtype), value).reshape(out.shape)


def attention_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Parameters of `attention`; keys and values read a source of another width, if given."""
    D, N, H = config.d_model, config.num_heads, config.head_size
    source, tree = (source_width or D, config.kv_heads, "kv_heads"), {}
    for name, (width, heads, axis) in {"query": (D, N, "heads"), "key": source, "value": source}.items():
        tree[name] = linear_spec(config, name, (width, heads, H), ("embed", axis, "head"), ("embed",), config.std)
    axes = "heads", "head", "embed"
    return tree | {"out": linear_spec(config, "out", (N, H, D), axes, axes[:2], residual_std(config))}


def relative_spec(config: ModelConfig) -> Tree:
    """The table of `Relative` positions, which all layers share."""
    if not isinstance(config.positions, Relative):
        return None
    shape = config.positions.buckets, config.num_heads
    return {"relative": Spec(shape, (None, "heads"), normal(config.std))}


def score_bias(config: ModelConfig, shared: Tree) -> Bias | Callable | Array | None:
    """What the positions of the config add to the scores of self-attention."""
    match config.positions:
        case Alibi():
            return alibi(config.num_heads)
        case Relative(_, max_distance, bidirectional):
            return t5(shared["relative"], bidirectional, max_distance)
    return config.positions(config) if callable(config.positions) else None


def bias_at_positions(bias, context: Context) -> Bias | Callable | Array:
    """The bias at the tokens' positions, row by row, where these are not the slots (padding, packed rows, a cache).

    Without `gaps`, tokens of a segment are as far apart as their slots, and a bias of distance stays as it is. Raises
    ConfigError for what depends on slots: an array, a bias by row, and for positions given with a cache.
    """
    by_distance, in_cache = isinstance(bias, Bias) and bias.by_distance, context.state is not None
    positions = context.slot_positions
    if not context.gaps and (by_distance or (positions is None and not in_cache)):
        return bias
    if in_cache and context.gaps:
        raise ConfigError("apply(positions=...) with a cache: a bias needs the cached tokens' positions too; omit it")
    if not (callable(bias) or isinstance(bias, Bias)) or getattr(bias, "rows", ()):
        advice = "return a function of (q_positions [T], kv_positions [S])"
        raise ConfigError(f"model.positions: a bias by slots does not fit segment_ids, positions or a cache; {advice}")
    if in_cache:
        return bias
    return lambda q, kv: bias_between(bias, positions[:, q], positions[:, kv])


def cross_attention(config: ModelConfig, params: Tree, x: Float[Array, "B T D"], context: Context) -> MixerOutput:
    """Attention from a decoder's tokens to an encoder's output, without positions. Vaswani et al. 2017, section 3.2.3.

    In decoding there may be fewer sources than rows: neighbours, such as the beams of a text, read the same one.
    """
    source: Any = context.source
    heads = source_heads(params, source.hidden) if source.heads is None else source.heads
    query = linear("btd,dnh->btnh", x, params["query"])
    key, value = (heads[name].swapaxes(1, 2).astype(x.dtype) for name in ("key", "value"))
    options = attention_options(config, context) | {"mask": source.mask}
    together = query.reshape(key.shape[0], -1, *query.shape[2:])
    out = tapped_weights(context, ops.attention(together, key, value, **options), value).reshape(query.shape)
    return MixerOutput(linear("btnh,nhd->btd", context.tap("heads", out), params["out"]))


def source_heads(params: Tree, hidden: Float[Array, "B S D"]) -> Tree:
    """Keys and values of an encoder's output, `[B, K, S, H]` as in a cache."""
    heads = linear_maps("btd,dnh->btnh", hidden, {name: params[name] for name in ("key", "value")})
    return {name: y.swapaxes(1, 2) for name, y in heads.items()}


def cached(
    attend: Callable | None, query: Array, key: Array, value: Array, context: Context, options: dict
) -> tuple[Any, Tree]:
    """(attention of new tokens to themselves and to those in the cache, the state with the new ones).

    The token at position p is in slot p mod S. The first tokens of a row start at position 0: they attend to each other by
    the kernel that training has. A variant's `attend` and returned weights take the old keys and the new ones as an array.
    """
    T, S = query.shape[1], jax.tree.leaves(context.state["key"])[0].shape[2]

    def lay(x):
        return with_logical_constraint(x.transpose(0, 2, 1, 3), "batch", "kv_heads", None, None)

    new, state = {"key": lay(key), "value": lay(value)}, context.state
    count = jnp.full(len(query), T) if context.real is None else jnp.sum(context.real, axis=1)
    if context.lengths is None:
        result = (attend or ops.attention)(query, key, value, **options)
        return result, cached_attention.write(first_slots, state, new, count)
    q = context.lengths[:, None] + jnp.arange(T)[None]
    written = jnp.where(jnp.arange(T)[None] < count[:, None], q, -1)
    before = slot_positions(S, context.lengths)
    early = T == 1 and len(query) <= 32
    if early:
        state = cached_attention.write(write_token, state, new, written)
    if attend is None and not context.tap.asks("weights"):
        slots = Slots(state["key"], state["value"], before), Slots(new["key"], new["value"], written)
        scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        call = Call(options["mask"], options.get("bias"), scale=scale, softcap=options["softcap"])
        sizes = cached_attention.widths(S) if context.room == S else [S]
        width = jnp.searchsorted(jnp.array(sizes), jnp.max(context.lengths))
        result = out = cached_attention.attention(query, q, *slots, call, sizes, width)
    else:
        keys, values = (
            jnp.concatenate([as_array(state[name], x.dtype), x], axis=2).transpose(0, 2, 1, 3) for name, x in new.items()
        )
        positions = q, jnp.concatenate([before, written], axis=1)
        result = (attend or ops.attention)(query, keys, values, **options | {"positions": positions, "implementation": None})
        out = split_weights(result)[0]
    return result, state if early else cached_attention.write(write_slots, state, new, written, out)
