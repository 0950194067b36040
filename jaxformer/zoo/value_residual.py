"""Values mixed with those of the first layer: Zhou et al. 2024, arXiv:2410.17897."""

import jax.numpy as jnp
from jax.nn.initializers import constant

from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer
from jaxformer.models.mixers.attention import Heads, attention
from jaxformer.params import Spec


def value_residual(config: ModelConfig) -> Mixer:
    """V <- a V_1 + b V, values mixed with those of the first layer: ResFormer.

    Zhou et al. 2024, arXiv:2410.17897. Each layer learns a and b, which start at 1/2. The first
    layer keeps its values; its two numbers are not used.
    """

    def prepare(params, heads: Heads, context: Context) -> Heads:
        value = heads.value
        is_first = context.layer == 0
        first = jnp.where(is_first, value, context.carry["value"])
        wide = jnp.promote_types(value.dtype, jnp.float32)
        a, b = params["value_mix"].astype(wide)
        mixed = (a * first.astype(wide) + b * value.astype(wide)).astype(value.dtype)
        return heads._replace(value=jnp.where(is_first, value, mixed), carry={"value": first})

    def no_values(x):
        return {"value": jnp.zeros((*x.shape[:2], config.kv_heads, config.head_size), x.dtype)}

    extra = {"value_mix": Spec((2,), (None,), constant(0.5))}
    return attention(config, extra=extra, prepare=prepare)._replace(carry=no_values)
