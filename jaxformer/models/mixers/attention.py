"""Multi-head attention as a mixer, the default one, and attention to an encoder's output."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Alibi, ModelConfig, Relative
from jaxformer.models.layer import Context, Mixer, MixerOutput, Tree, linear, linear_spec, nothing, residual_std
from jaxformer.ops.positions import Bias, Rope, alibi, rope, t5
from jaxformer.params import Spec
from jaxformer.sharding import with_logical_constraint


def attention(
    config: ModelConfig,
    *,
    extra: Tree = None,
    prepare: Callable | None = None,
    attend: Callable | None = None,
    finish: Callable | None = None,
    memo: Callable = nothing,
) -> Mixer:
    """Multi-head attention with the config's heads, mask, rotary positions, softcap and dropout. The default mixer.

    A variant (`mixers.variants`) hands in what it does differently, with `extra` parameters of its own:
    prepare(params, query, key, value, context) -> the three, before they are turned;
    attend(params, context, query, key, value, **options of ops.attention) -> out `[B, T, N, H]`;
    finish(params, x, out) -> out, before the projection back.
    """
    K, H = config.kv_heads, config.head_size
    spec = attention_spec(config) | (extra or {})

    def apply(params, x: Float[Array, "B T D"], context: Context) -> MixerOutput:
        query, key, value = (
            with_logical_constraint(linear("btd,dnh->btnh", x, params[name]), "batch", "length", heads, None)
            for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))
        )
        if memo is not nothing:
            first = {"value": jnp.where(context.layer == 0, value, context.memo["value"])}
            context = replace(context, memo=first)
        if prepare is not None:
            query, key, value = prepare(params, query, key, value, context)
        if isinstance(config.positions, Rope):
            query = rope(query, context.positions, config.positions)
            key = rope(key, context.positions, config.positions)
        key, value, state = extended(context, key, value)
        options = dict(
            mask=context.mask,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            dropout_rate=config.attention_dropout_rate,
            dropout_key=context.dropout_key,
            return_weights=context.return_weights,
            implementation=config.attention_implementation,
        )
        if (bias := score_bias(config, context.shared)) is not None:
            options["bias"] = bias_at_positions(bias, context)
        if attend is None:
            out: Any = ops.attention(query, key, value, **options)
        else:
            out = attend(params, context, query, key, value, **options)
        out, weights = out if context.return_weights else (out, None)
        if finish is not None:
            out = finish(params, x, out)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state, weights, context.memo)

    def state(batch: int, length: int, dtype):
        return {name: jnp.zeros((batch, length, K, H), dtype) for name in ("key", "value")}

    return Mixer(spec, apply, state, relative_spec(config), memo=memo)


def attention_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Parameters of `attention`; keys and values read a source of another width, if given."""
    D, N, K, H = config.d_model, config.num_heads, config.kv_heads, config.head_size
    S, std = source_width or D, config.init_std
    return {
        "query": linear_spec(config, "query", (D, N, H), ("embed", "heads", "head"), ("embed",), std),
        "key": linear_spec(config, "key", (S, K, H), ("embed", "kv_heads", "head"), ("embed",), std),
        "value": linear_spec(config, "value", (S, K, H), ("embed", "kv_heads", "head"), ("embed",), std),
        "out": linear_spec(
            config, "out", (N, H, D), ("heads", "head", "embed"), ("heads", "head"), residual_std(config)
        ),
    }


def relative_spec(config: ModelConfig) -> Tree:
    """The table of `Relative` positions, which all layers share."""
    if not isinstance(config.positions, Relative):
        return None
    shape = config.positions.buckets, config.num_heads
    return {"relative": Spec(shape, (None, "heads"), normal(config.init_std))}


def score_bias(config: ModelConfig, shared: Tree) -> Bias | Callable | Array | None:
    """What the config's positions add to the scores of self-attention."""
    match config.positions:
        case Alibi():
            return alibi(config.num_heads)
        case Relative(_, max_distance, bidirectional):
            return t5(shared["relative"], bidirectional, max_distance)
    return config.positions(config) if callable(config.positions) else None


def bias_at_positions(bias, context: Context) -> Bias | Callable | Array:
    """The bias at the tokens' own positions, row by row, where these are not the slots (padding, packed rows, a cache).

    Without `gaps`, tokens of a segment are as far apart as their slots, and a bias of distance stays as it is. Raises
    ConfigError for what depends on slots: an array, a bias by row, and for positions given with a cache.
    """
    of_distance = isinstance(bias, Bias) and bias.by_distance
    positions = context.slot_positions
    if not context.gaps and (positions is None or of_distance):
        return bias
    if positions is None:
        raise ConfigError(
            "apply(positions=...) with a cache: a score bias needs the cached tokens' positions too; omit it"
        )
    if not (callable(bias) or isinstance(bias, Bias)) or getattr(bias, "rows", ()):
        raise ConfigError(
            "model.positions: a bias by slots does not fit segment_ids, positions or a cache; return a function of "
            "(q_positions [T], kv_positions [S])"
        )

    def of_row(q, kv):
        if isinstance(bias, Bias) and bias.by_distance:
            return bias.rule(bias, (kv[None] - q[:, None]).reshape(-1)).reshape(-1, q.shape[0], kv.shape[0])
        scores = bias.rule(bias, q, kv) if isinstance(bias, Bias) else bias(q, kv)
        if scores.ndim == 4 and scores.shape[0] > 1:
            raise ConfigError(f"model.positions: a bias {scores.shape} by row; return [N, T, S], the same for all rows")
        return scores.reshape(scores.shape[-3:])

    return lambda q, kv: jax.vmap(lambda row: of_row(row[q], row[kv]))(positions)


def cross_attention(
    config: ModelConfig, params: Tree, x: Float[Array, "B T D"], context: Context
) -> Float[Array, "B T D"]:
    """Attention from a decoder's tokens to an encoder's output, without positions. Vaswani et al. 2017, section 3.2.3."""
    source: Any = context.source
    heads = source_heads(params, source.hidden) if source.heads is None else source.heads
    out = ops.attention(
        linear("btd,dnh->btnh", x, params["query"]),
        **{name: head.astype(x.dtype) for name, head in heads.items()},
        mask=source.mask,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        dropout_rate=config.attention_dropout_rate,
        dropout_key=context.dropout_key,
        implementation=config.attention_implementation,
    )
    return linear("btnh,nhd->btd", out, params["out"])  # pyrefly: ignore[bad-argument-type]  (no weights asked for)


def source_heads(params: Tree, hidden: Float[Array, "B S D"]) -> Tree:
    """Keys and values `[B, S, K, H]` of an encoder's output."""
    return {name: linear("btd,dnh->btnh", hidden, params[name]) for name in ("key", "value")}


def extended(context: Context, key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]):
    """(all keys, all values, new state): those of the cache with these written behind them, or just these without one."""
    if context.state is None:
        return key, value, None
    state = {
        name: lax.dynamic_update_slice_in_dim(
            context.state[name], new.astype(context.state[name].dtype), context.start, 1
        )
        for name, new in (("key", key), ("value", value))
    }
    return state["key"].astype(key.dtype), state["value"].astype(value.dtype), state
