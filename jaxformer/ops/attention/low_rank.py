"""Attention of low rank: keys and values summed down to a fixed number of rows before the softmax."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask
from jaxformer.ops.attention import attention
from jaxformer.ops.attention.linear import packed, visibility
from jaxformer.ops.einsum import einsum


@jax.named_scope("linformer_attention")
def linformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    key_projection: Float[Array, "L R"] | Float[Array, "K L R"],
    value_projection: Float[Array, "L R"] | Float[Array, "K L R"] | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(q (E^T k)^T * scale) F^T v. Wang et al. 2020, arXiv:2006.04768, eq. 7.

    E is `key_projection` and F `value_projection`, from L >= S positions to R rows; a shorter sequence takes the first S.
    The paper's ways of sharing are ways of passing arrays: `[L, R]` for all heads (headwise), no F for F = E (key-value),
    the same E in every layer (layerwise), `[K, L, R]` for none.

    `mask` may be `full()`, `lengths(...)` and `segments(ids)`. Padded keys are zero before E; padded queries yield zeros.
    Every row of E^T k mixes keys of the whole sequence, so no other mask can be kept. Of segments a row may have one, with
    padding (id 0); a row with several is NaN, because traced ids cannot be refused.

    Raises NotImplementedError for other masks, ValueError for shapes that do not fit.
    """
    T, S = query.shape[1], key.shape[1]
    view = visibility(mask, T, S, "linformer_attention")
    if view.causal:
        raise NotImplementedError(
            f"linformer_attention: E mixes every key with later ones, so it cannot keep the mask {mask}; linear_attention, "
            "favor_attention and attention(implementation='blockwise') can"
        )
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
        raise ValueError(
            f"linformer_attention: a projection is [L, R] or [{K}, L, R] with L >= {S}, the keys' length; "
            f"got {projection.shape} for keys or values {x.shape}"
        )
    x = jnp.where(shown[:, :, None, None], x, 0)
    if projection.ndim == 2:
        reduced = jnp.moveaxis(einsum("bskh,sr->bkhr", x, projection[:S]), -1, 1)
    else:
        reduced = jnp.moveaxis(einsum("bskh,ksr->kbhr", x, projection[:, :S]), (0, -1), (2, 1))
    # XLA:CPU would fold the transposition into attention's 16-bit products, and then has no kernel for them
    return jax.lax.optimization_barrier(reduced)
