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
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import constant, normal, ones
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer, Tree, linear, linear_spec
from jaxformer.models.mixers.attention import Heads, attention, split_weights
from jaxformer.ops.attention.call import Call, dropout_seed
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.positions import bias_between
from jaxformer.params import Spec


def qk_norm(config: ModelConfig) -> Mixer:
    """RMSNorm of each head of queries and keys before the rotation, one scale `[H]`: Qwen3. Henry 2020, arXiv:2010.04245."""
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
    """sigmoid(x W) * out, x the input of the layer, W `[D, N, H]`: Qwen3-Next. Qiu et al. 2025, arXiv:2505.06708, G1."""
    shape, axes = (config.d_model, config.num_heads, config.head_size), ("embed", "heads", "head")
    extra = {"gate": linear_spec(config, "gate", shape, axes, ("embed",), config.std)}
    return attention(config, extra=extra, finish=gate)


def gate(params: Tree, x: Float[Array, "B T D"], out: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """`finish` of `gated`."""
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


def sigmoid(config: ModelConfig, bias: float | None = None) -> Mixer:
    """sigmoid(scores + bias) instead of the softmax. Ramapuram et al. 2024, arXiv:2409.04431.

    `bias` is -log(context_length) by default: with the number of keys at hand, decoding and packed rows would be another
    model. NotImplementedError for another `attention_implementation` than the reference.
    """
    if (name := config.attention_implementation) not in (None, "reference"):
        raise NotImplementedError(f"{name}: no sigmoid attention; attention_implementation='reference' has it")
    bias = -math.log(config.context_length) if bias is None else bias

    def attend(
        params, context, query, key, value, *, mask, return_weights, implementation, scale, dropout_rate, dropout_key, **options
    ):
        if {"bias", "positions"} <= options.keys():  # in a cache each row has positions of its own
            options["bias"] = bias_between(options["bias"], *options["positions"])
        call = Call(
            mask=mask.sized(key.shape[1]), scale=query.shape[-1] ** -0.5 if scale is None else scale,
            dropout_rate=dropout_rate, dropout_seed=dropout_seed(dropout_rate, dropout_key), **options,
        )  # fmt: skip
        out, weights = reference(query, key, value, call, lambda scores, sinks: jax.nn.sigmoid(scores + bias))
        return (out, weights) if return_weights else out

    return attention(config, attend=attend)


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
