"""Queries and keys with a norm before their product: Henry et al. 2020, arXiv:2010.04245.

A variant of attention is a function `config -> Mixer`: `mixer=qk_norm`. It decodes with the cache.
To use two variants at once, write a function in your experiment file:

    def normed_and_gated(config):
        extra = qk_norm(config).spec | gated(config).spec
        return attention(config, extra=extra, prepare=partial(normalize, config), finish=gate)
"""

from functools import partial

from jax.nn.initializers import ones

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer
from jaxformer.models.mixers.attention import Heads, attention
from jaxformer.models.norm import norm, norm_spec
from jaxformer.params import Spec, Tree


def qk_norm(config: ModelConfig) -> Mixer:
    """RMSNorm of each head of queries and keys before the rotation, with one scale `[H]`.

    Henry et al. 2020, arXiv:2010.04245. Qwen3 has it.
    """
    scale = Spec((config.head_size,), ("head",), ones)
    return _normalized(config, scale, scale)


def qk_norm_full(config: ModelConfig) -> Mixer:
    """RMSNorm of queries and keys over all heads at once, with scales `[N, H]` and `[K, H]`.

    OLMo 2 has it: OLMo et al. 2024, arXiv:2501.00656.
    """

    def scale(heads, axis):
        return Spec((heads, config.head_size), (axis, "head"), ones)

    return _normalized(config, scale(config.num_heads, "heads"), scale(config.kv_heads, "kv_heads"))


def qk_model_norm(config: ModelConfig) -> Mixer:
    """The model's own norm of each head of queries and keys before the rotation.

    Gemma 3 has it: Gemma Team 2025, arXiv:2503.19786.
    """
    spec = norm_spec(config, config.head_size)

    def prepare(params: Tree, heads: Heads, context: Context) -> Heads:
        query = norm(config, params["query_norm"], heads.query)
        key = norm(config, params["key_norm"], heads.key)
        return heads._replace(query=query, key=key)

    return attention(config, extra={"query_norm": spec, "key_norm": spec}, prepare=prepare)


def _normalized(config: ModelConfig, query: Spec, key: Spec) -> Mixer:
    extra = {"query_norm": {"scale": query}, "key_norm": {"scale": key}}
    return attention(config, extra=extra, prepare=partial(normalize, config))


def normalize(config: ModelConfig, params: Tree, heads: Heads, context: Context) -> Heads:
    """The `prepare` of `qk_norm` and `qk_norm_full`.

    The mean square is taken over the axes that the scale has.
    """

    def normed(x, scale):
        flat = x.reshape(*x.shape[: x.ndim - scale.ndim], -1)
        return ops.rms_norm(flat, scale.reshape(-1), config.norm_eps).reshape(x.shape)

    query = normed(heads.query, params["query_norm"]["scale"])
    key = normed(heads.key, params["key_norm"]["scale"])
    return heads._replace(query=query, key=key)
