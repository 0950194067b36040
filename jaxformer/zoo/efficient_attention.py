"""Efficient attention: a softmax over features for queries, over the length for keys.

Shen et al. 2021, arXiv:1812.01243.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.ops.attention.call import check_shapes
from jaxformer.zoo.frame import approximation
from jaxformer.zoo.linear_attention import divide, weighted_sums, widen
from jaxformer.zoo.visible import View, hide, visibility


@jax.named_scope("efficient_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:
    """softmax(q over features) / sqrt(H) @ softmax(k over length)^T v.

    Shen et al. 2021, arXiv:1812.01243, sec. 3.2. Masks and errors are those of
    `linear_attention.attention`. Under `causal()`, a softmax over the length would see the future.
    There exp(k) replaces it, with the denominator of linear attention, at least 1e-3 (the form of
    the linear-attention-transformer package). There a key above 60 counts as 60, so that float32
    holds the sums of a million such tokens.
    """
    check_shapes("efficient_attention", query, key, value)
    view = visibility(mask, query.shape[1], key.shape[1], "efficient_attention")
    query, key, value, dtype = widen(query, key, value)
    query = jax.nn.softmax(hide(query, view.queries), axis=-1) * query.shape[-1] ** -0.5
    if view.causal:
        key = jnp.exp(jnp.minimum(hide(key, view.keys), 60))
    else:
        key = _softmax_over_keys(key, view)
    numerator, denominator = weighted_sums(query, key, value, view, chunk)
    if view.causal:
        numerator = divide(numerator, jnp.maximum(denominator, 1e-3))
    return numerator.astype(dtype)


def _softmax_over_keys(key, view: View):
    """exp(k) / sum exp(k) over the visible keys of a segment, feature by feature."""
    B, S = key.shape[:2]
    runs = jnp.broadcast_to(view.runs(jnp.arange(S)), (B, S))
    num_segments = 1 if view.ids is None else S
    shown = view.keys[..., None, None]

    def each(reduce, x):
        return jax.vmap(lambda x, run: reduce(x, run, num_segments=num_segments)[run])(x, runs)

    top = each(jax.ops.segment_max, jax.lax.stop_gradient(jnp.where(shown, key, -jnp.inf)))
    weights = jnp.where(shown, jnp.exp(jnp.where(shown, key - top, 0)), 0)
    total = each(jax.ops.segment_sum, weights)
    return weights / jnp.where(total == 0, 1, total)


@dataclass(frozen=True)
class Efficient:
    """A softmax over features for queries, over the length for keys. Masks: full() or causal().

    Shen et al. 2021, arXiv:1812.01243.
    """

    chunk: int = 128  # tokens that a causal layer takes at a time

    __post_init__ = require_numbers(chunk=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        def mix(params, context, **heads):
            return attention(**heads, mask=context.mask, chunk=self.chunk)

        return approximation(self, config, mix, has_weights=False)
