"""Attention of low rank: keys and values summed down to a fixed number of rows before the softmax."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask
from jaxformer.ops.attention import attention
from jaxformer.ops.attention.linear import visibility
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
    view = visibility(mask, query.shape[1], key.shape[1], "linformer_attention", takes_causal=False)
    value_projection = key_projection if value_projection is None else value_projection
    key, value = _reduce(key, key_projection, view.keys), _reduce(value, value_projection, view.keys)
    shown = view.queries[:, :, None, None]
    query = jnp.where(shown, query, 0)
    out: Any = attention(query, key, value, scale=scale, dropout_rate=dropout_rate, dropout_key=dropout_key)
    out = jnp.where(shown, out, 0)
    if (ids := view.ids) is None:
        return out
    least = jnp.min(ids, axis=1, where=ids != 0, initial=jnp.iinfo(ids.dtype).max)
    return jnp.where((jnp.max(ids, axis=1) > least)[:, None, None, None], jnp.nan, out)


def _reduce(x, projection, shown):
    """E^T x, `[B, S, K, H]` to `[B, R, K, H]`, without the positions that are padding."""
    S = x.shape[1]
    x = jnp.where(shown[:, :, None, None], x, 0)
    if projection.ndim == 2:
        reduced = jnp.moveaxis(einsum("bskh,sr->bkhr", x, projection[:S]), -1, 1)
    else:
        reduced = jnp.moveaxis(einsum("bskh,ksr->kbhr", x, projection[:, :S]), (0, -1), (2, 1))
    # XLA:CPU would fold the transposition into attention's 16-bit products, and then has no kernel for them
    return jax.lax.optimization_barrier(reduced)
