"""What papers since 2017 have changed in attention: each variant a few lines over the hooks of `models.mixers.attention`.

A variant is a function `config -> Mixer`: `mixer=variants.qk_norm`. All of them decode with the cache. To set its numbers,
or to use two at once, write a function in your experiment file:

    def tempered(config):
        return temperature(config, floor_scale=4096)

    def normed_and_gated(config):
        extra = qk_norm(config).spec | gated(config).spec
        return attention(config, extra=extra, prepare=partial(normalize, config), finish=gate)

Layers without positions (NoPE; SmolLM3, Llama 4) need no mixer: `positions=(Rope(), Rope(), Rope(), None)`.
"""

import math
from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import constant, normal, ones
from jaxtyping import Float

from jaxformer import masks, ops
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer, Tree, linear, linear_spec
from jaxformer.models.mixers.attention import Heads, attention, split_weights
from jaxformer.ops.attention.call import Call, dropout_seed
from jaxformer.ops.attention.reference import reference, softmax, visible
from jaxformer.ops.positions import Bias, bias_between
from jaxformer.params import Spec


def qk_norm(config: ModelConfig) -> Mixer:
    """RMSNorm of each head of queries and keys, before the rotation, with a scale `[H]` for all heads: Qwen3.

    Henry et al. 2020, arXiv:2010.04245, who have the L2 norm.
    """
    scale = Spec((config.head_size,), ("head",), ones)
    return _normalized(config, scale, scale)


def qk_norm_full(config: ModelConfig) -> Mixer:
    """The same over all heads at once, with scales `[N, H]` and `[K, H]`. OLMo 2 (OLMo et al. 2024, arXiv:2501.00656)."""
    scale = lambda heads, axis: Spec((heads, config.head_size), (axis, "head"), ones)
    return _normalized(config, scale(config.num_heads, "heads"), scale(config.kv_heads, "kv_heads"))


def _normalized(config: ModelConfig, query: Spec, key: Spec) -> Mixer:
    extra = {"query_norm": {"scale": query}, "key_norm": {"scale": key}}
    return attention(config, extra=extra, prepare=partial(normalize, config))


def normalize(config: ModelConfig, params: Tree, heads: Heads, context: Context) -> Heads:
    """`prepare` of `qk_norm` and `qk_norm_full`: the mean square is taken over the axes that the scale has."""

    def normed(x, scale):
        rows = x.reshape(*x.shape[: x.ndim - scale.ndim], -1)
        return ops.rms_norm(rows, scale.reshape(-1), config.norm_eps).reshape(x.shape)

    query, key = normed(heads.query, params["query_norm"]["scale"]), normed(heads.key, params["key_norm"]["scale"])
    return heads._replace(query=query, key=key)


def gated(config: ModelConfig) -> Mixer:
    """sigmoid(x W) * out for the layer's input x, W `[D, N, H]`, before the projection back: Qwen3-Next.

    Qiu et al. 2025, arXiv:2505.06708, the elementwise gate after the values are weighed (G1).
    """
    return _gated(config, (config.d_model, config.num_heads, config.head_size), ("embed", "heads", "head"))


def gated_by_head(config: ModelConfig) -> Mixer:
    """One gate a head: sigmoid(x W) for W `[D, N]`. Bondarenko et al. 2023, arXiv:2306.12929; Qiu et al. 2025."""
    return _gated(config, (config.d_model, config.num_heads), ("embed", "heads"))


def _gated(config: ModelConfig, shape, axes) -> Mixer:
    extra = {"gate": linear_spec(config, "gate", shape, axes, ("embed",), config.init_std)}
    return attention(config, extra=extra, finish=gate)


def gate(params: Tree, x: Float[Array, "B T D"], out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """`finish` of `gated` and `gated_by_head`."""
    if params["gate"]["kernel"].ndim == 2:
        return out * jax.nn.sigmoid(linear("btd,dn->btn", x, params["gate"]))[..., None]
    return out * jax.nn.sigmoid(linear("btd,dnh->btnh", x, params["gate"]))


def differential(config: ModelConfig) -> Mixer:
    """The difference of two softmaxes, (A1 - lambda A2) V. Ye et al. 2024, arXiv:2410.05258, section 2.1.

    Heads n and n + N/2 are the pair A1, A2, as in Hugging Face's DiffLlama (the paper's code has 2n and 2n + 1), value heads k
    and k + K/2 are V side by side. A pair's output is (1 - l) rms_norm(.) with l = 0.8 - 0.6 exp(-0.3 layer), and lambda =
    exp(q1 . k1) - exp(q2 . k2) + l of learned vectors; layers count from 0. Dropout falls on either softmax; the weights
    returned are those of all N, before the difference. ConfigError for an odd number of key heads.
    """
    if config.kv_heads % 2:
        raise ConfigError(f"differential attention pairs heads; {config.kv_heads} key/value heads are an odd number")
    H = config.head_size
    vectors = Spec((2, H), (None, "head"), normal(0.1))
    extra = {"lambda_query": vectors, "lambda_key": vectors, "pair_norm": {"scale": Spec((2 * H,), ("head",), ones)}}

    def attend(params, context, query, key, value, **options):
        pairs = jnp.concatenate(jnp.split(value, 2, axis=2), axis=-1)
        pairs = jnp.concatenate([pairs, pairs], axis=2)
        out, weights = split_weights(ops.attention(query, key, pairs, **options))
        wide = jnp.promote_types(out.dtype, jnp.float32)
        one, two = jnp.exp(jnp.sum(params["lambda_query"].astype(wide) * params["lambda_key"].astype(wide), axis=-1))
        start = (0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(context.layer, wide))).astype(wide)
        first, second = jnp.split(out.astype(wide), 2, axis=2)
        normed = ops.rms_norm(first - (one - two + start) * second, params["pair_norm"]["scale"], config.norm_eps)
        out = ((1 - start) * normed).astype(out.dtype).reshape(query.shape)
        return out if weights is None else (out, weights)

    return attention(config, extra=extra, attend=attend)


def talking_heads(config: ModelConfig) -> Mixer:
    """Heads mixed before and after the softmax by two matrices `[N, N]`. Shazeer et al. 2020, arXiv:2003.02436.

    Both start as the identity. The mask acts between the two; dropout and the returned weights come after the second.
    NotImplementedError for another `attention_implementation` than the reference.
    """
    _reference_only(config, "talking heads")
    identity = lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype)
    mix = Spec((config.num_heads, config.num_heads), ("heads", None), identity, ("heads",))

    def attend(params, context, query, key, value, *, mask, positions=None, **options):
        mask = mask.sized(key.shape[1])
        seen = visible(mask, mask.positions(query.shape[1], key.shape[1]) if positions is None else positions)
        weigh = partial(_talk, params, seen)
        return _weighed(weigh, query, key, value, mask=replace(masks.full(), offset=mask.offset), **options)

    return attention(config, extra={"before_softmax": mix, "after_softmax": mix}, attend=attend)


def _talk(params: Tree, visible: Array, scores: Array, sinks) -> Array:
    scores = ops.einsum("bmts,mn->bnts", scores, params["before_softmax"])
    weights = softmax(jnp.where(visible, scores, -jnp.inf))
    return ops.einsum("bmts,mn->bnts", weights, params["after_softmax"])


def sigmoid(config: ModelConfig, bias: float | None = None) -> Mixer:
    """sigmoid(scores + bias) instead of the softmax. Ramapuram et al. 2024, arXiv:2409.04431.

    `bias` is -log(context_length) by default: with the number of keys at hand, decoding and packed rows would be another
    model. NotImplementedError for another `attention_implementation` than the reference.
    """
    _reference_only(config, "sigmoid attention")
    bias = -math.log(config.context_length) if bias is None else bias

    def attend(params, context, query, key, value, **options):
        return _weighed(lambda scores, sinks: jax.nn.sigmoid(scores + bias), query, key, value, **options)

    return attention(config, attend=attend)


def _reference_only(config: ModelConfig, what: str):
    if (name := config.attention_implementation) not in (None, "reference"):
        raise NotImplementedError(f"{name}: no {what}; attention_implementation='reference' has it")


def _weighed(weigh, query, key, value, *, mask, return_weights, implementation, scale, dropout_rate, dropout_key, **options):
    call = Call(
        mask=mask.sized(key.shape[1]), scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_rate=dropout_rate, dropout_seed=dropout_seed(dropout_rate, dropout_key), **options,
    )  # fmt: skip
    out, weights = reference(query, key, value, call, weigh)
    return (out, weights) if return_weights else out


def value_residual(config: ModelConfig) -> Mixer:
    """Values mixed with those of the first layer, V <- a V_1 + b V with learned a and b a layer, 1/2 at first: ResFormer.

    Zhou et al. 2024, arXiv:2410.17897. The first layer keeps its values; its two numbers are not used.
    """

    def prepare(params, heads: Heads, context: Context) -> Heads:
        value, is_first = heads.value, context.layer == 0
        first = jnp.where(is_first, value, context.memo["value"])
        wide = jnp.promote_types(value.dtype, jnp.float32)
        a, b = params["value_mix"].astype(wide)
        mixed = (a * first.astype(wide) + b * value.astype(wide)).astype(value.dtype)
        return heads._replace(value=jnp.where(is_first, value, mixed), memo={"value": first})

    first = lambda x: {"value": jnp.zeros((*x.shape[:2], config.kv_heads, config.head_size), x.dtype)}
    mixer = attention(config, extra={"value_mix": Spec((2,), (None,), constant(0.5))}, prepare=prepare)
    return mixer._replace(memo=first)


def temperature(config: ModelConfig, floor_scale: int = 8192, attn_scale: float = 0.1) -> Mixer:
    """Queries times 1 + attn_scale log(1 + floor((position + 1) / floor_scale)): Llama 4, for contexts of any length.

    After Nakanishi 2025, arXiv:2501.19399. Llama 4 has it in its layers without rotation alone, as a mixer of yours that
    returns `temperature(config) if config.positions is None else attention(config)`.
    """

    def prepare(params, heads: Heads, context: Context) -> Heads:
        wide = jnp.promote_types(heads.query.dtype, jnp.float32)
        scale = 1 + attn_scale * jnp.log1p(((context.positions + 1) // floor_scale).astype(wide))
        return heads._replace(query=(heads.query * scale[..., None, None]).astype(heads.query.dtype))

    return attention(config, prepare=prepare)


def inverse_depth_scale(config: ModelConfig) -> Mixer:
    """Scores divided by the layer's number, counted from 1: `scale_attn_by_inverse_layer_idx` of Hugging Face's GPT-2."""

    def prepare(params, heads: Heads, context: Context) -> Heads:
        wide = jnp.promote_types(heads.query.dtype, jnp.float32)
        return heads._replace(query=(heads.query / (jnp.asarray(context.layer, wide) + 1)).astype(heads.query.dtype))

    return attention(config, prepare=prepare)


def memory_key_values(config: ModelConfig, count: int = 16) -> Mixer:
    """`count` learned keys and values a head that every query sees, whatever its mask. Sukhbaatar et al. 2019, 1907.01470.

    They have no position, stand before all others (returned weights are `[B, N, T, count + S]`) and are not cached.
    """
    shape = count, config.kv_heads, config.head_size
    leaf = Spec(shape, (None, "kv_heads", "head"), normal(config.init_std))

    def attend(params, context, query, key, value, *, mask, bias=None, positions=None, **options):
        keys = key.shape[1]
        if positions is not None:
            bias = bias_between(bias, *positions) if callable(bias) or isinstance(bias, Bias) else bias
            q, kv = positions
            before = jnp.broadcast_to(jnp.arange(count), (len(kv), count))
            options["positions"] = q + count, jnp.concatenate([before, jnp.where(kv < 0, -1, kv + count)], axis=1)
        mask = _with_memory(mask, count, query.shape[1], keys)
        memory = lambda name, x: jnp.broadcast_to(params["memory"][name].astype(x.dtype)[None], (len(x), *shape))
        key, value = (jnp.concatenate([memory(n, x), x], axis=1) for n, x in (("key", key), ("value", value)))
        return ops.attention(query, key, value, mask=mask, bias=_bias_with_memory(bias, count, keys), **options)

    return attention(config, extra={"memory": {"key": leaf, "value": leaf}}, attend=attend)


def _with_memory(mask: Mask, count: int, T: int, S: int) -> Mask:
    """The mask for `count` keys that all see and S behind them. Queries move along, so rules of distance stay as they are."""
    first = S - T if mask.offset is None else mask.offset
    parts = (replace(part, offset=None) for part in mask.sized(S).conjuncts())
    moved = (part if masks.shift_invariant(part) else Mask(_moved, (count,), parts=(part,)) for part in parts)
    return (masks.prefix(count) | reduce(Mask.__and__, moved)).at(first + count)


def _moved(mask, q, kv):
    (count,), (part,) = mask.args, mask.parts
    return part._evaluate(q - count, kv - count)


def _bias_with_memory(bias, count: int, keys: int):
    """The score bias for `count` keys that get none and those behind them, at their own positions."""
    if bias is None:
        return None
    if not (callable(bias) or isinstance(bias, Bias)):
        return jnp.pad(jnp.broadcast_to(bias, (*bias.shape[:3], keys)), [(0, 0)] * 3 + [(count, 0)])

    def score(q, kv):
        if isinstance(bias, Bias):  # both are ranges of positions
            scores = bias.block(q[0] - count, q.shape[0], kv[0] - count, kv.shape[0])
        else:
            scores = bias(q - count, kv - count)
        return jnp.where((kv < count).reshape((1,) * (scores.ndim - 1) + (-1,)), 0, scores)

    return score
