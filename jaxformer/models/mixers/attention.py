"""Multi-head attention as a mixer, the default one, and attention to an encoder's output."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Alibi, ModelConfig, Relative
from jaxformer.models.layer import (
    Context,
    Mixer,
    MixerOutput,
    Tree,
    linear,
    linear_maps,
    linear_spec,
    residual_std,
)
from jaxformer.models.position_table import attention_positions, attention_table
from jaxformer.ops.attention import cached as cached_attention
from jaxformer.ops.attention.cached import (
    Slots,
    as_array,
    empty_slots,
    first_slots,
    slot_positions,
    write_slots,
    write_token,
)
from jaxformer.ops.attention.call import Call
from jaxformer.ops.bias import Bias, alibi, bias_between, t5
from jaxformer.ops.positions import Rope, rope
from jaxformer.params import Spec
from jaxformer.sharding import with_logical_constraint


class Heads(NamedTuple):
    """Queries, keys and values of attention."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, T, K, H]
    value: Array  # [B, T, K, H]
    carry: Tree = None  # value for the next layer


def attention(
    config: ModelConfig,
    *,
    extra: Tree = None,
    prepare: Callable | None = None,
    attend: Callable | None = None,
    finish: Callable | None = None,
    observe: Callable | None = None,
) -> Mixer:
    """Multi-head attention with the config's heads, mask, rotary positions, softcap and dropout.

    It is the default mixer. A variant (`zoo.gated`) passes `extra` parameters of its own, and
    functions for the steps that it changes:
    prepare(params, heads, context) -> the `Heads` before the rotation;
    attend(params, context, query, key, value, **options of ops.attention) -> out `[B, T, N, H]`;
    finish(params, x, out) -> out before the last projection;
    observe(params, query, key, **options of ops.attention) -> new values of its variables, except
    in decoding.
    """

    def apply(params, x: Float[Array, "B T D"], context: Context) -> MixerOutput:
        heads = project(params, x, attention_positions(config, context))
        if prepare is not None:
            heads = prepare(params, heads, context)
        query, key, value, carry = heads
        if isinstance(config.positions, Rope):
            query = rope(query, context.positions, config.positions, context.text_lengths)
            key = rope(key, context.positions, config.positions, context.text_lengths)
        query = checkpoint_name(context.tap("query", query), "query")
        key = checkpoint_name(context.tap("key", key), "key")
        value = checkpoint_name(context.tap("value", value), "value")
        options = attention_options(config, context)
        if (bias := score_bias(config, context.shared)) is not None:
            options["bias"] = bias_at_positions(bias, context)
        function = None if attend is None else partial(attend, params, context)
        state = None
        if context.state is None:
            result = (function or ops.attention)(query, key, value, **options)
        else:
            result, state = cached(function, query, key, value, context, options)
        standard = attend is None and context.state is None
        out = context.tap("heads", tapped_weights(context, result, value if standard else None))
        if finish is not None:
            out = finish(params, x, out)
        updates = None
        if observe is not None and context.state is None:
            updates = observe(params, query, key, **options)
        return MixerOutput(linear("btnh,nhd->btd", out, params["out"]), state, carry, updates)

    def state(batch: int, length: int, dtype):
        slots = empty_slots((batch, config.kv_heads, length, config.head_size), dtype)
        return {"key": slots, "value": slots}

    spec = attention_spec(config) | (extra or {})
    return Mixer(spec, apply, state, rolls=True, shared=positions_spec(config))


def project(
    params: Tree, x: Float[Array, "B T D"], vectors: Float[Array, "#B T D"] | None = None
) -> Heads:
    """Queries, keys and values of `maps_of_heads`, with heads split over devices."""
    axes = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    heads = maps_of_heads(params, x, vectors, tuple(axes))

    def split(name):
        return with_logical_constraint(heads[name], "batch", "length", axes[name], None)

    return Heads(**{name: split(name) for name in axes})


def attention_options(config: ModelConfig, context: Context) -> dict[str, Any]:
    """The options of `ops.attention` for self-attention, without the bias.

    Only the reference returns weights. So a request for weights takes the reference, even if the
    run was trained with another kernel.
    """
    weights = context.tap.asks("weights")
    return dict(
        mask=context.mask,
        scale=config.score_scale,
        softcap=config.attention_softcap,
        dropout_rate=config.attention_dropout_rate,
        dropout_key=context.dropout_key,
        return_weights=weights,
        implementation="reference" if weights else config.attention_implementation,
    )


def maps_of_heads(
    params: Tree,
    x: Float[Array, "B T D"],
    vectors: Float[Array, "#B T D"] | None,
    names: tuple[str, ...],
) -> Tree:
    """The linear maps of these names: queries and keys of x + `vectors`, values of x.

    `vectors` are the vectors of the positions.
    """
    if vectors is None:
        return linear_maps("btd,dnh->btnh", x, {name: params[name] for name in names})
    heads = linear_maps(
        "btd,dnh->btnh",
        with_positions(x, vectors),
        {name: params[name] for name in names if name != "value"},
    )
    return heads | linear_maps("btd,dnh->btnh", x, {"value": params["value"]})


def with_positions(
    x: Float[Array, "B T D"], vectors: Float[Array, "#B T D"] | None
) -> Float[Array, "B T D"]:
    """x + `vectors`, in x's precision; x itself without vectors."""
    return x if vectors is None else (x + vectors).astype(x.dtype)


def split_weights(result: Any) -> tuple[Array, Array | None]:
    """(output, weights or None) of `ops.attention`."""
    return result if isinstance(result, tuple) else (result, None)


def tapped_weights(context: Context, result: Any, value: Array | None) -> Array:
    """The output of `ops.attention`, computed again if a caller of `apply` edits the weights.

    Raises NotImplementedError for edited weights if `value` is None: then the output is not a plain
    weighted mean of values.
    """
    out, weights = split_weights(result)
    if (edited := context.tap("weights", weights)) is weights:
        return out
    if value is None:
        limits = "not of this variant, nor with a cache; edit attention/heads"
        raise NotImplementedError(f"edits of attention/weights: {limits}")
    grouped = edited.reshape(len(edited), value.shape[2], -1, *edited.shape[2:])
    return ops.einsum("bkgts,bskh->btkgh", grouped.astype(value.dtype), value).reshape(out.shape)


def attention_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Parameters of `attention`. Keys and values read a source of `source_width`, if given."""
    D, N, H = config.d_model, config.num_heads, config.head_size
    of_source = source_width or D, config.kv_heads, "kv_heads"
    inputs = {"query": (D, N, "heads"), "key": of_source, "value": of_source}
    tree = {}
    for name, (width, heads, axis) in inputs.items():
        shape = width, heads, H
        axes = "embed", axis, "head"
        tree[name] = linear_spec(config, name, shape, axes, ("embed",), config.std)
    axes = "heads", "head", "embed"
    tree["out"] = linear_spec(config, "out", (N, H, D), axes, axes[:2], residual_std(config))
    return tree


def positions_spec(config: ModelConfig) -> Tree:
    """The table of `Relative` or `AttentionPositions` positions. All layers share it."""
    table = attention_table(config)
    if table is not None and table.spec:
        return {"positions": table.spec}
    if not isinstance(config.positions, Relative):
        return None
    shape = config.positions.buckets, config.num_heads
    return {"relative": Spec(shape, (None, "heads"), normal(config.std))}


def score_bias(config: ModelConfig, shared: Tree) -> Bias | Callable | Array | None:
    """The bias that the config's positions add to the scores of self-attention."""
    match config.positions:
        case Alibi():
            return alibi(config.num_heads)
        case Relative(_, max_distance, bidirectional):
            return t5(shared["relative"], bidirectional, max_distance)
    return config.positions(config) if callable(config.positions) else None


def bias_at_positions(bias, context: Context) -> Bias | Callable | Array:
    """The bias at the tokens' positions, for each batch row.

    Positions differ from indices in padded and packed batches, and in a cache. Without explicit
    positions, tokens of a segment are as far apart as their indices, so a bias of distance needs no
    change. Raises ConfigError for a bias that depends on indices (an array, a bias with arrays by
    query), and for positions that are passed with a cache.
    """
    by_distance = isinstance(bias, Bias) and bias.by_distance
    in_cache = context.state is not None
    positions = context.key_positions
    if not context.explicit_positions and (by_distance or (positions is None and not in_cache)):
        return bias
    if in_cache and context.explicit_positions:
        needed = "a bias needs the cached tokens' positions too; omit it"
        raise ConfigError(f"apply(positions=...) with a cache: {needed}")
    if not (callable(bias) or isinstance(bias, Bias)) or getattr(bias, "query_arrays", ()):
        advice = "return a function of (q_positions [T], kv_positions [S])"
        limits = "a bias by slots does not fit segment_ids, positions or a cache"
        raise ConfigError(f"model.positions: {limits}; {advice}")
    if in_cache:
        return bias
    return lambda q, kv: bias_between(bias, positions[:, q], positions[:, kv])


def cross_attention(
    config: ModelConfig,
    params: Tree,
    x: Float[Array, "B T D"],
    context: Context,
) -> MixerOutput:
    """Attention from a decoder's tokens to an encoder's output. Vaswani et al. 2017, section 3.2.3.

    The only positions are `AttentionPositions`. In decoding there may be fewer sources than batch
    rows: neighbouring rows, such as the beams of one text, then read the same source.
    """
    source: Any = context.source
    if source.heads is None:
        heads = source_heads(params, source.hidden, source.key_positions)
    else:
        heads = source.heads
    query = linear(
        "btd,dnh->btnh", with_positions(x, attention_positions(config, context)), params["query"]
    )
    key, value = (heads[name].swapaxes(1, 2).astype(x.dtype) for name in ("key", "value"))
    options = attention_options(config, context) | {"mask": source.mask}
    query, key, value = (
        checkpoint_name(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    # the queries of all batch rows that read the same source
    of_source = query.reshape(key.shape[0], -1, *query.shape[2:])
    result = ops.attention(of_source, key, value, **options)
    out = tapped_weights(context, result, value).reshape(query.shape)
    return MixerOutput(linear("btnh,nhd->btd", context.tap("heads", out), params["out"]))


def source_heads(
    params: Tree, hidden: Float[Array, "B S D"], vectors: Float[Array, "#B S D"] | None = None
) -> Tree:
    """Keys and values of an encoder's output by `maps_of_heads`, `[B, K, S, H]` as in a cache."""
    heads = maps_of_heads(params, hidden, vectors, ("key", "value"))
    return {name: y.swapaxes(1, 2) for name, y in heads.items()}


def cached(
    attend: Callable | None, query: Array, key: Array, value: Array, context: Context, options: dict
) -> tuple[Any, Tree]:
    """(attention of new tokens to the cache and to each other, the state with the new tokens).

    The token at position p is in slot p mod S. The first tokens of a batch row start at position 0,
    and attend to each other by the kernel of training, which may be a user's `Kernel`. A variant's
    `attend`, or a request for weights, gets the old keys and the new ones as one array.
    """
    T = query.shape[1]
    S = jax.tree.leaves(context.state["key"])[0].shape[2]
    state = context.state
    new = {"key": _in_slots(key), "value": _in_slots(value)}
    count = count_tokens(context, query)
    if context.lengths is None:
        result = (attend or ops.attention)(query, key, value, **options)
        return result, cached_attention.write(first_slots, state, new, count)
    positions = context.lengths[:, None] + jnp.arange(T)[None]
    new_positions = jnp.where(jnp.arange(T)[None] < count[:, None], positions, -1)
    old_positions = slot_positions(S, context.lengths)
    write_first = T == 1 and len(query) <= 32  # a single token is written before the slots are read
    if write_first:
        state = cached_attention.write(write_token, state, new, new_positions)
    if attend is None and not context.tap.asks("weights"):
        old_slots = Slots(state["key"], state["value"], old_positions)
        new_slots = Slots(new["key"], new["value"], new_positions)
        scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        call = Call(options["mask"], options.get("bias"), scale=scale, softcap=options["softcap"])
        widths = cached_attention.widths(S) if context.cache_length == S else [S]
        width = jnp.searchsorted(jnp.array(widths), jnp.max(context.lengths))
        result = cached_attention.attention(
            query, positions, old_slots, new_slots, call, widths, width
        )
    else:

        def old_and_new(name):
            old = as_array(state[name], new[name].dtype)
            return jnp.concatenate([old, new[name]], axis=2).transpose(0, 2, 1, 3)

        of_keys = jnp.concatenate([old_positions, new_positions], axis=1)
        # only the reference has positions by batch row
        options = options | {"positions": (positions, of_keys), "implementation": None}
        result = (attend or ops.attention)(
            query, old_and_new("key"), old_and_new("value"), **options
        )
    if not write_first:
        out, _ = split_weights(result)
        state = cached_attention.write(write_slots, state, new, new_positions, out)
    return result, state


def count_tokens(context: Context, x: Array) -> Array:
    """The number of tokens in each batch row of x `[B, T, ...]`, without padding."""
    if context.padding_mask is None:
        return jnp.full(len(x), x.shape[1])
    return jnp.sum(context.padding_mask, axis=1)


def _in_slots(x: Array) -> Array:
    """New keys or values `[B, T, K, H]` in the layout of a cache, `[B, K, T, H]`."""
    return with_logical_constraint(x.transpose(0, 2, 1, 3), "batch", "kv_heads", None, None)
