"""The difference of two softmaxes: Ye et al. 2024, arXiv:2410.05258."""

import jax.numpy as jnp
from jax.nn.initializers import normal, ones

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention, split_weights
from jaxformer.params import Spec


def differential(config: ModelConfig) -> Mixer:
    """(A1 - lambda A2) V, the difference of two softmaxes: Ye et al. 2024, arXiv:2410.05258.

    Section 2.1. Heads n and n + N/2 are the pair A1, A2, as in Hugging Face's DiffLlama (in the
    paper's code: 2n and 2n + 1). V is the value heads k and k + K/2 side by side. The output of a
    pair is (1 - l) rms_norm(.) with l = 0.8 - 0.6 exp(-0.3 layer), where layers count from 0.
    lambda = exp(q1 . k1) - exp(q2 . k2) + l, with learned vectors. Dropout acts on both softmaxes.
    The weights returned are those of all N heads, before the difference. Raises ConfigError for an
    odd number of key heads.
    """
    if config.kv_heads % 2:
        raise ConfigError(
            "differential attention pairs heads; "
            f"{config.kv_heads} key/value heads are an odd number"
        )
    H = config.head_size
    vectors = Spec((2, H), (None, "head"), normal(0.1))
    extra = {
        "lambda_query": vectors,
        "lambda_key": vectors,
        "pair_norm": {"scale": Spec((2 * H,), ("head",), ones)},
    }

    def attend(params, context, query, key, value, **options):
        pairs = jnp.concatenate(jnp.split(value, 2, axis=2), axis=-1)
        pairs = jnp.concatenate([pairs, pairs], axis=2)
        out, weights = split_weights(ops.attention(query, key, pairs, **options))
        wide = jnp.promote_types(out.dtype, jnp.float32)
        products = params["lambda_query"].astype(wide) * params["lambda_key"].astype(wide)
        one, two = jnp.exp(jnp.sum(products, axis=-1))
        start = (0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(context.layer, wide))).astype(wide)
        first, second = jnp.split(out.astype(wide), 2, axis=2)
        difference = first - (one - two + start) * second
        normed = ops.rms_norm(difference, params["pair_norm"]["scale"], config.norm_eps)
        out = ((1 - start) * normed).astype(out.dtype).reshape(query.shape)
        return out if weights is None else (out, weights)

    return attention(config, extra=extra, attend=attend)
