"""Multi-head attention as a mixer, the default one, and attention to an encoder's output."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Alibi, ModelConfig, Relative
from jaxformer.models.layer import Context, Mixer, MixerOutput, Tree, linear, linear_spec, residual_std
from jaxformer.ops.positions import Bias, Rope, alibi, bias_between, rope, t5
from jaxformer.params import Spec
from jaxformer.sharding import with_logical_constraint


class Heads(NamedTuple):
    """What attention makes of its input."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, T, K, H]
    value: Array  # [B, T, K, H]
    memo: Tree = None  # value for the next layer


Hook = Callable | None


def attention(
    config: ModelConfig, *, extra: Tree = None, prepare: Hook = None, attend: Hook = None, finish: Hook = None
) -> Mixer:
    """Multi-head attention with the config's heads, mask, rotary positions, softcap and dropout. The default mixer.

    A variant (`mixers.variants`) passes what it does differently, with `extra` parameters of its own:
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
            query = rope(query, context.positions, config.positions)
            key = rope(key, context.positions, config.positions)
        options = attention_options(config, context)
        if (bias := score_bias(config, context.shared)) is not None:
            options["bias"] = bias_at_positions(bias, context)
        function = partial(ops.attention if attend is None else partial(attend, params, context), **options)
        result, state = cached(function, query, key, value, context) if context.state else (function(query, key, value), None)
        out, weights = split_weights(result)
        if finish is not None:
            out = finish(params, x, out)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state, weights, memo)

    def state(batch: int, length: int, dtype):
        return {name: jnp.zeros((batch, config.kv_heads, length, config.head_size), dtype) for name in ("key", "value")}

    return Mixer(attention_spec(config) | (extra or {}), apply, state, rolls=True, shared=relative_spec(config))


def project(params: Tree, x: Float[Array, "B T D"]) -> Heads:
    """Queries, keys and values, with heads split over devices."""
    split = lambda name, heads: with_logical_constraint(
        linear("btd,dnh->btnh", x, params[name]), "batch", "length", heads, None
    )
    return Heads(split("query", "heads"), split("key", "kv_heads"), split("value", "kv_heads"))


def attention_options(config: ModelConfig, context: Context) -> dict[str, Any]:
    """The options of `ops.attention` for self-attention, but for the bias."""
    return dict(
        mask=context.mask, scale=config.attention_scale, softcap=config.attention_softcap,
        dropout_rate=config.attention_dropout_rate, dropout_key=context.dropout_key,
        return_weights=context.return_weights, implementation=config.attention_implementation,
    )  # fmt: skip


def split_weights(result: Any) -> tuple[Array, Array | None]:
    """(output, weights or None) of `ops.attention`."""
    return result if isinstance(result, tuple) else (result, None)


def attention_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Parameters of `attention`; keys and values read a source of another width, if given."""
    D, N, H = config.d_model, config.num_heads, config.head_size
    source = source_width or D, config.kv_heads, H
    tree = {}
    for name, shape, axis in (
        ("query", (D, N, H), "heads"),
        ("key", source, "kv_heads"),
        ("value", source, "kv_heads"),
    ):
        tree[name] = linear_spec(config, name, shape, ("embed", axis, "head"), ("embed",), config.init_std)
    axes = "heads", "head", "embed"
    return tree | {"out": linear_spec(config, "out", (N, H, D), axes, axes[:2], residual_std(config))}


def relative_spec(config: ModelConfig) -> Tree:
    """The table of `Relative` positions, which all layers share."""
    if not isinstance(config.positions, Relative):
        return None
    shape = config.positions.buckets, config.num_heads
    return {"relative": Spec(shape, (None, "heads"), normal(config.init_std))}


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
        raise ConfigError(
            "model.positions: a bias by slots does not fit segment_ids, positions or a cache; return a function of "
            "(q_positions [T], kv_positions [S])"
        )
    if in_cache:
        return bias
    return lambda q, kv: bias_between(bias, positions[:, q], positions[:, kv])


def cross_attention(config: ModelConfig, params: Tree, x: Float[Array, "B T D"], context: Context) -> MixerOutput:
    """Attention from a decoder's tokens to an encoder's output, without positions. Vaswani et al. 2017, section 3.2.3."""
    source: Any = context.source
    heads = source_heads(params, source.hidden) if source.heads is None else source.heads
    query = linear("btd,dnh->btnh", x, params["query"])
    key, value = (heads[name].astype(x.dtype) for name in ("key", "value"))
    options = attention_options(config, context) | {"mask": source.mask}
    out, weights = split_weights(ops.attention(query, key, value, **options))
    return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), weights=weights)


def source_heads(params: Tree, hidden: Float[Array, "B S D"]) -> Tree:
    """Keys and values `[B, S, K, H]` of an encoder's output."""
    return {name: linear("btd,dnh->btnh", hidden, params[name]) for name in ("key", "value")}


def cached(attend: Callable, query: Array, key: Array, value: Array, context: Context) -> tuple[Any, Tree]:
    """(attention of new tokens to themselves and to those in the cache, the state with the new ones).

    The token at position p is in slot p mod S. The first tokens of a row start at position 0: they attend to each other by
    the kernel that training has.
    """
    T, S = query.shape[1], context.state["key"].shape[2]
    new = {"key": key.transpose(0, 2, 1, 3), "value": value.transpose(0, 2, 1, 3)}
    count = jnp.full(len(query), T) if context.real is None else jnp.sum(context.real, axis=1)
    if context.lengths is None:
        return attend(query, key, value), {name: first_slots(context.state[name], x, count) for name, x in new.items()}
    q, end = context.lengths[:, None] + jnp.arange(T), context.lengths + count
    # a slot that is written stands for its new token alone: of a rolling cache, earlier queries need the old one too
    together = T > 1 and context.room > S
    before = _slot_positions(S, context.lengths)
    state = {name: write_slots(context.state[name], x, q, end) for name, x in new.items()}
    if together:
        kv = jnp.concatenate([before, jnp.where(q < end[:, None], q, -1)], axis=1)
        seen = {name: jnp.concatenate([context.state[name].astype(x.dtype), x], axis=2) for name, x in new.items()}
    else:
        kv, seen = _slot_positions(S, end), state
    keys, values = (seen[name].astype(key.dtype).transpose(0, 2, 1, 3) for name in ("key", "value"))
    part = lambda width, query, q: attend(
        query, keys[:, :width], values[:, :width], positions=(q, kv[:, :width]), implementation=None
    )
    if context.return_weights or context.room > S:
        return in_query_blocks(partial(part, keys.shape[1]), query, q), state
    widths = filled_widths(S)
    branch = jnp.searchsorted(jnp.array(widths), jnp.max(end))
    run = lambda query, q: lax.switch(branch, [partial(part, width) for width in widths], query, q)
    return in_query_blocks(run, query, q), state


def _slot_positions(S: int, end: Array) -> Array:
    """The position of the token in each slot `[B, S]`, of rows with `end` tokens; negative for an empty slot."""
    newest = end[:, None] - 1
    return newest - (newest - jnp.arange(S)) % S


def filled_widths(S: int) -> list[int]:
    """The widths, ends of a cache of S slots, of which decoding reads the first that holds all tokens: at most 8."""
    step = max(128, -(-S // 1024) * 128)
    return [*range(step, S, step), S]


def first_slots(state: Array, new: Array, count: Array) -> Array:
    """The slots `[B, K, S, H]` after the first `count` [B] of new tokens `[B, K, T, H]`: of more than S tokens, the last ones."""
    S, T = state.shape[2], new.shape[2]
    if T > S:
        index = jnp.maximum(_slot_positions(S, count), 0)
        new = jnp.take_along_axis(new, index[:, None, :, None], axis=2)
    return lax.dynamic_update_slice_in_dim(state, new.astype(state.dtype), 0, axis=2)


def write_slots(state: Array, new: Array, positions: Array, end: Array) -> Array:
    """The slots with new tokens `[B, K, T, H]` of these positions `[B, T]`; those from `end` [B] on are padding."""
    S = state.shape[2]
    kept = (positions < end[:, None]) & (positions >= end[:, None] - S)
    slots = jnp.where(kept, positions % S, S)
    rows = jnp.arange(len(state))[:, None]
    return state.at[rows, :, slots].set(new.astype(state.dtype).transpose(0, 2, 1, 3), mode="drop")


QUERY_BLOCK = 128


def in_query_blocks(run: Callable, query: Array, q: Array) -> Any:
    """run(query, q), for many queries block by block: their scores are an array."""
    B, T = q.shape
    if T <= QUERY_BLOCK:
        return run(query, q)
    fill = -T % QUERY_BLOCK
    blocks = lambda x: jnp.pad(x, [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2)).reshape(B, -1, QUERY_BLOCK, *x.shape[2:])
    out = lax.map(lambda block: run(*block), (blocks(query).swapaxes(0, 1), blocks(q).swapaxes(0, 1)))
    join = lambda x, axis: jnp.moveaxis(x, 0, axis).reshape(*x.shape[1 : axis + 1], -1, *x.shape[axis + 2 :])
    if isinstance(out, tuple):  # and the weights [B, N, T, S]
        return join(out[0], 1)[:, :T], join(out[1], 2)[:, :, :T]
    return join(out, 1)[:, :T]
