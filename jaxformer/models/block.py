"""One block for every stack: a mixer across positions, a feed-forward within them, norms where the config puts them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax, random
from jax.nn.initializers import normal, zeros
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask
from jaxformer.models.config import Alibi, ModelConfig, Relative
from jaxformer.models.embedding import norm, norm_spec
from jaxformer.ops.contraction import add_bias
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.positions import Bias, Rope, alibi, rope, t5
from jaxformer.parallel.sharding import constrain, gather
from jaxformer.params import Spec

Tree = Any


@struct.dataclass
class Source:
    """An encoder's output `[B, S, D]`, which of it each query sees, and, in decoding, every layer's keys and values of it."""

    hidden: Any
    mask: Mask
    heads: Any = None  # {"key", "value"}, each [L, B, S, K, H]; within a layer [B, S, K, H]


@struct.dataclass
class Context:
    """What a mixer may know beside its input: visible keys, where tokens stand, dropout, what came before.

    `state` is the mixer's own (for attention: the cached keys and values `[B, S, K, H]`), None outside decoding;
    `start` is the number of tokens that are in it already. `layer` counts from 0. `shared` are parameters that all layers
    have in common, `constants` what the mixer drew for this layer, `inputs` what the caller of `apply` passed for mixers,
    `memo` what the layer below handed on. `real` says which tokens are not padding, `source` what a decoder's layers read
    of the encoder.
    """

    mask: Mask
    positions: Any  # [B or 1, T]
    slot_positions: Any = None  # [B or 1, S]: positions of all keys' tokens; None: each is its slot
    # whether tokens of a segment may be nearer to each other than their slots, or farther
    gaps: bool = struct.field(pytree_node=False, default=False)
    dropout_key: Any = None
    state: Tree = None
    start: Any = 0
    layer: Any = 0
    shared: Tree = None
    constants: Tree = None
    inputs: Tree = None
    memo: Tree = None
    real: Any = None  # [B, T] or None, where all are
    source: "Source | None" = None
    return_weights: bool = struct.field(pytree_node=False, default=False)


class Mixed(NamedTuple):
    """What a mixer returns: its output `[B, T, D]`, its new state, its weights if asked for, a memo for the next layer."""

    out: Any
    state: Tree = None
    weights: Any = None
    memo: Tree = None


class Fed(NamedTuple):
    """What a feed-forward returns: its output, an auxiliary loss (weighted already), figures for whoever asks."""

    out: Any
    loss: Any = None
    stats: Tree = None


class FeedForward(NamedTuple):
    """A feed-forward of your own: `ModelConfig.feedforward` may be any function `config -> FeedForward`.

    spec: tree of `Spec`; apply: (params, x [B, T, D], Context) -> Fed.
    """

    spec: Tree
    apply: Callable


def _nothing(*_) -> None:
    return None


class Mixer(NamedTuple):
    """A way for positions to exchange information: its parameters, its function, and its state for decoding.

    spec: tree of `Spec`; apply: (params, x [B, T, D], Context) -> Mixed; state: (batch, length, dtype) -> tree of zeros.
    `ModelConfig.mixer` is any function `config -> Mixer`. What few mixers need: `shared`, a spec of parameters that all
    layers have in common; `constants`, T -> arrays `[L, ...]` that are drawn, not trained; `memo`, x -> what the first
    layer finds in `Context.memo`: a tree of the shapes that every layer hands on.
    """

    spec: Tree
    apply: Callable
    state: Callable
    shared: Tree = None
    constants: Callable = _nothing
    memo: Callable = _nothing


def linear_spec(config: ModelConfig, name: str, shape, axes, contracts, std: float) -> Tree:
    """A kernel and, where the config gives that name one, a bias over the axes that the kernel does not contract."""
    out = {"kernel": Spec(shape, axes, normal(std), contracts)}
    if config.has_bias(name):
        kept = [(size, axis) for size, axis in zip(shape, axes, strict=True) if axis not in contracts]
        out["bias"] = Spec(tuple(s for s, _ in kept), tuple(a for _, a in kept), zeros)
    return out


def residual_std(config: ModelConfig) -> float:
    """Depth-scaled init of what is added to the residual stream. Radford et al. 2019, section 2.3."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def attention(
    config: ModelConfig,
    *,
    extra: Tree = None,
    prepare: Callable | None = None,
    attend: Callable | None = None,
    finish: Callable | None = None,
    memo: Callable = _nothing,
) -> Mixer:
    """Multi-head attention with the config's heads, mask, rotary positions, softcap and dropout. The default mixer.

    A variant (`models.variants`) hands in what it does differently, with `extra` parameters of its own:
    prepare(params, query, key, value, context) -> the three, before they are turned;
    attend(params, context, query, key, value, **options of ops.attention) -> out `[B, T, N, H]`;
    finish(params, x, out) -> out, before the projection back.
    """
    K, H = config.kv_heads, config.head_size
    spec = attention_spec(config) | (extra or {})

    def apply(params, x: Float[Array, "B T D"], context: Context) -> Mixed:
        query, key, value = (
            constrain(linear("btd,dnh->btnh", x, params[name]), "batch", "length", heads, None)
            for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))
        )
        if memo is not _nothing:
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
        return Mixed(linear("btnh,nhd->btd", out, params["out"]), state, weights, context.memo)

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


def linear(spec: str, x: Float[Array, "..."], params: Tree) -> Float[Array, "..."]:
    """The product with a kernel of `linear_spec`, and its bias if it has one."""
    y = ops.einsum(spec, x, params["kernel"])
    return add_bias(y, params["bias"]) if "bias" in params else y


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
    return FeedForward(feedforward_spec(config), lambda params, x, context: Fed(feedforward(config, params, x)))


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


class Beside(NamedTuple):
    """What a layer returns beside x."""

    state: Tree
    weights: Any
    memo: Tree
    loss: Any
    stats: Tree


def block(config: ModelConfig, mixer: Mixer, params, x: Float[Array, "B T D"], context: Context):
    """One layer: (x, `Beside`).

    pre:      x + f(norm(x))          (GPT-2, LLaMA, T5, ViT)
    post:     norm(x + f(x))          (2017, BERT)
    sandwich: x + norm(f(norm(x)))    (Gemma 2)
    for f the mixer, then attention to a source if there is one, then the feed-forward; each with dropout on its output.
    """
    source_width = None if context.source is None else context.source.hidden.shape[-1]
    params = gather(params, lambda: spec(config, mixer, source_width), x.dtype)
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
        x = constrain(x + y, "batch", "length", None)
        return (norm(config, params[f"{name}_norm"], x) if config.norm_placement == "post" else x), rest

    def mix(y):
        out, *rest = mixer.apply(params.get("attention", {}), y, replace(context, dropout_key=keys["mix"]))
        return out, Mixed(None, *rest)

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
    return x, Beside(mixed.state, mixed.weights, mixed.memo, fed.loss, fed.stats)
