"""Attention of low rank: keys and values summed down to a fixed number of rows before the softmax."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask
from jaxformer.ops.attention import attention
from jaxformer.ops.attention.call import mask_refusal
from jaxformer.ops.attention.linear import packed, visibility
from jaxformer.ops.einsum import einsum


@jax.named_scope("linformer_attention")
def linformer_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"],
    key_projection: Float[Array, "L R"] | Float[Array, "K L R"],
    value_projection: Float[Array, "L R"] | Float[Array, "K L R"] | None = None, *, mask: Mask | None = None,
    scale: float | None = None, dropout_rate: float = 0.0, dropout_key: Array | None = None,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """softmax(q (E^T k)^T * scale) F^T v. Wang et al. 2020, arXiv:2006.04768, eq. 7.

    E is `key_projection` and F `value_projection` (None: F = E), from L >= S positions to R rows, of which a sequence takes
    the first S; for all heads or for each. `mask` may be `full()`, `lengths(...)` and `segments(ids)` with one segment a row;
    a row with several is NaN, because traced ids cannot be refused. Padding yields zeros. NotImplementedError for other
    masks: every row of E^T k mixes keys of the whole sequence.
    """
    T, S = query.shape[1], key.shape[1]
    view = visibility(mask, T, S, "linformer_attention")
    if view.causal:
        raise mask_refusal("linformer_attention", mask, "causal()", "full(), lengths(...) and segments(ids)")
    value_projection = key_projection if value_projection is None else value_projection
    key, value = _reduce(key, key_projection, view.keys), _reduce(value, value_projection, view.keys)
    shown = view.queries[:, :, None, None]
    query = jnp.where(shown, query, 0)
    out: Any = attention(query, key, value, scale=scale, dropout_rate=dropout_rate, dropout_key=dropout_key)
    out = jnp.where(shown, out, 0)
    return out if view.ids is None else jnp.where(packed(view.ids)[:, None, None, None], jnp.nan, out)


def _reduce(x, projection, shown):
    """E^T x, `[B, S, K, H]` to `[B, R, K, H]`, without the positions that are padding."""
    S, K = x.shape[1:3]
    fits = projection.ndim == 2 or (projection.ndim == 3 and projection.shape[0] == K)
    if not fits or projection.shape[-2] < S:
        problem = f"linformer_attention: a projection is [L, R] or [{K}, L, R] with L >= {S}, the keys' length"
        raise ValueError(f"{problem}; got {projection.shape} for keys or values {x.shape}")
    x = jnp.where(shown[:, :, None, None], x, 0)
    if projection.ndim == 2:
        reduced = jnp.moveaxis(einsum("bskh,sr->bkhr", x, projection[:S]), -1, 1)
    else:
        reduced = jnp.moveaxis(einsum("bskh,ksr->kbhr", x, projection[:, :S]), (0, -1), (2, 1))
    # XLA:CPU would fold the transposition into attention's 16-bit products, and then has no kernel for them
    return jax.lax.optimization_barrier(reduced)
