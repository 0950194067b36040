"""One block for every stack: a mixer across positions, a feed-forward within them, norms where the config puts them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array, lax, random
from jax.nn.initializers import normal, ones, zeros
from jaxtyping import Float

from jaxformer import ops
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.ops.contraction import add_bias
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.positions import Rope, rope
from jaxformer.params import Spec

Tree = Any


@struct.dataclass
class Context:
    """What a mixer may know beside its input: visible keys, where tokens stand, dropout, what came before.

    `state` is the mixer's own (for attention: the cached keys and values `[B, S, K, H]`), None outside decoding;
    `start` is the number of tokens that are in it already. `layer` counts from 0. `shared` are parameters that all layers
    have in common, `constants` what the mixer drew for this layer, `inputs` what the caller of `apply` passed for mixers,
    `memo` what the layer below handed on.
    """

    mask: Mask
    positions: Any  # [B or 1, T]
    dropout_key: Any = None
    state: Tree = None
    start: Any = 0
    layer: Any = 0
    shared: Tree = None
    constants: Tree = None
    inputs: Tree = None
    memo: Tree = None
    return_weights: bool = struct.field(pytree_node=False, default=False)


class Mixed(NamedTuple):
    """What a mixer returns: its output `[B, T, D]`, its new state, its weights if asked for, a memo for the next layer."""

    out: Any
    state: Tree = None
    weights: Any = None
    memo: Tree = None


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


def linear_spec(config: ModelConfig, shape, axes, contracts, std: float) -> Tree:
    """A kernel and, where the config has biases, a bias over the axes that the kernel does not contract."""
    out = {"kernel": Spec(shape, axes, normal(std), contracts)}
    if config.use_bias:
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
    D, N, K, H = config.d_model, config.num_heads, config.kv_heads, config.head_size
    spec = {
        "query": linear_spec(config, (D, N, H), ("embed", "heads", "head"), ("embed",), config.init_std),
        "key": linear_spec(config, (D, K, H), ("embed", "kv_heads", "head"), ("embed",), config.init_std),
        "value": linear_spec(config, (D, K, H), ("embed", "kv_heads", "head"), ("embed",), config.init_std),
        "out": linear_spec(config, (N, H, D), ("heads", "head", "embed"), ("heads", "head"), residual_std(config)),
        **(extra or {}),
    }

    def apply(params, x: Float[Array, "B T D"], context: Context) -> Mixed:
        query, key, value = (linear("btd,dnh->btnh", x, params[name]) for name in ("query", "key", "value"))
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
            softcap=config.attention_softcap,
            dropout_rate=config.attention_dropout_rate,
            dropout_key=context.dropout_key,
            return_weights=context.return_weights,
            implementation=config.attention_implementation,
        )
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

    return Mixer(spec, apply, state, memo=memo)


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


def norm_spec(config: ModelConfig) -> Tree:
    out = {"scale": Spec((config.d_model,), ("embed",), ones)}
    if config.norm == "layer_norm" and config.use_bias:
        out["bias"] = Spec((config.d_model,), ("embed",), zeros)
    return out


def norm(config: ModelConfig, params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    if config.norm == "layer_norm":
        return ops.layer_norm(x, params["scale"], params.get("bias"), config.norm_eps)
    return ops.rms_norm(x, params["scale"], config.norm_eps)


def feedforward_spec(config: ModelConfig) -> Tree:
    D, F = config.d_model, config.ff_width
    spec = {
        "up": linear_spec(config, (D, F), ("embed", "mlp"), ("embed",), config.init_std),
        "down": linear_spec(config, (F, D), ("mlp", "embed"), ("mlp",), residual_std(config)),
    }
    if config.feedforward in GATES:
        spec["gate"] = linear_spec(config, (D, F), ("embed", "mlp"), ("embed",), config.init_std)
    return spec


def feedforward(config: ModelConfig, params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    up, down, gate = params["up"], params["down"], params.get("gate")
    biases = dict(up_bias=up.get("bias"), down_bias=down.get("bias"))
    if gate is None:
        return ops.mlp(x, up["kernel"], down["kernel"], ACTIVATIONS[config.feedforward], **biases)
    activation = ACTIVATIONS[GATES[config.feedforward]]
    return ops.glu(x, gate["kernel"], up["kernel"], down["kernel"], activation, gate_bias=gate.get("bias"), **biases)


def spec(config: ModelConfig, mixer: Mixer) -> Tree:
    """Parameters of one layer."""
    out = {
        "attention_norm": norm_spec(config),
        "attention": mixer.spec,
        "feedforward_norm": norm_spec(config),
        "feedforward": feedforward_spec(config),
    }
    if config.norm_placement == "sandwich":
        out |= {"attention_out_norm": norm_spec(config), "feedforward_out_norm": norm_spec(config)}
    return out


def block(config: ModelConfig, mixer: Mixer, params, x: Float[Array, "B T D"], context: Context):
    """One layer: (x, what the mixer returned beside it).

    pre:      x + f(norm(x))          (GPT-2, LLaMA)
    post:     norm(x + f(x))          (2017, BERT)
    sandwich: x + norm(f(norm(x)))    (Gemma 2)
    for f the mixer, then the feed-forward, each with dropout on its output.
    """
    mix_key = drop_keys = None
    if context.dropout_key is not None:
        mix_key, *drop_keys = random.split(context.dropout_key, 3)

    def residual(x, name, f, drop_key):
        y, *rest = f(x if config.norm_placement == "post" else norm(config, params[f"{name}_norm"], x))
        y = ops.dropout(y, config.dropout_rate, drop_key)
        if config.norm_placement == "sandwich":
            y = norm(config, params[f"{name}_out_norm"], y)
        x = x + y
        return (norm(config, params[f"{name}_norm"], x) if config.norm_placement == "post" else x), *rest

    first, second = drop_keys or (None, None)
    mix = lambda y: mixer.apply(params["attention"], y, replace(context, dropout_key=mix_key))
    x, *beside = residual(x, "attention", mix, first)
    (x,) = residual(x, "feedforward", lambda y: (feedforward(config, params["feedforward"], y),), second)
    return x, Mixed(None, *beside)
