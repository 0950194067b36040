"""Queries or scores with a factor that grows with the position, or falls with the depth.

Layers without positions (NoPE; SmolLM3, Llama 4) need no mixer:
`positions=(Rope(), Rope(), Rope(), None)`. To set the numbers of a variant, write a function in
your experiment file:

    def tempered(config):
        return temperature(config, floor_scale=4096)
"""

import jax.numpy as jnp

from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer
from jaxformer.models.mixers.attention import Heads, attention


def temperature(config: ModelConfig, floor_scale: int = 8192, attn_scale: float = 0.1) -> Mixer:
    """Queries times 1 + attn_scale log(1 + floor((position + 1) / floor_scale)), as in Llama 4.

    It is for contexts of any length, after Nakanishi 2025, arXiv:2501.19399. Llama 4 has it only in
    layers without rotation. For that, a mixer of yours says

        return temperature(config) if config.positions is None else attention(config)
    """

    def prepare(params, heads: Heads, context: Context) -> Heads:
        wide = jnp.promote_types(heads.query.dtype, jnp.float32)
        scale = 1 + attn_scale * jnp.log1p(((context.positions + 1) // floor_scale).astype(wide))
        query = heads.query * scale[..., None, None]
        return heads._replace(query=query.astype(heads.query.dtype))

    return attention(config, prepare=prepare)


def inverse_depth_scale(config: ModelConfig) -> Mixer:
    """Scores divided by the number of the layer, counted from 1.

    It is `scale_attn_by_inverse_layer_idx` of Hugging Face's GPT-2.
    """

    def prepare(params, heads: Heads, context: Context) -> Heads:
        wide = jnp.promote_types(heads.query.dtype, jnp.float32)
        query = heads.query / (jnp.asarray(context.layer, wide) + 1)
        return heads._replace(query=query.astype(heads.query.dtype))

    return attention(config, prepare=prepare)
