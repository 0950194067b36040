"""Sliding window and global tokens: Beltagy et al. 2020, arXiv:2004.05150."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jaxtyping import Bool, Float, Int

from jaxformer import ops
from jaxformer.masks import Mask, global_tokens as global_mask, prefix, segments, window as band
from jaxformer.models.config import ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention_spec
from jaxformer.models.presets import MASKED_LM, roberta_base, sized
from jaxformer.ops.attention.kernel import Implementation
from jaxformer.zoo.frame import approximation, options, refuse_packed, zero_padding
from jaxformer.zoo.visible import segment_ids

Tokens = int | Sequence[int] | Int[np.ndarray, "..."] | Bool[Array, "B T"] | Bool[np.ndarray, "B T"]


@jax.named_scope("longformer_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    global_query: Float[Array, "B T N H"] | None,
    global_key: Float[Array, "B T K H"] | None,
    global_value: Float[Array, "B T K Hv"] | None,
    *,
    window: int,
    global_tokens: Tokens = 0,
    max_globals: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B T N Hv"]:
    """Sliding window and global tokens. Beltagy et al. 2020, arXiv:2004.05150.

    A local token attends to the keys at most window / 2 away and to the keys of the global tokens,
    each once, in one softmax. Global tokens have projections of their own: each attends from
    `global_query` to every `global_key`. `global_tokens` is their number (the first ones), their
    positions, or flags `[B, T]`. Without any, the global arrays may be None. Traced flags need
    `max_globals`, the largest number in a row; a row with more yields NaN.

    `mask` hides padding (`segments`, `lengths`), which yields zeros. Raises NotImplementedError for
    other masks. The cost grows with T * (window + globals).
    """
    q_ids, kv_ids = segment_ids("longformer_attention", mask, query, key, value)
    _check_window(window)
    B, T = query.shape[:2]
    row = jnp.arange(B)[:, None]
    global_positions, overfull = _global_positions(global_tokens, max_globals, B, T)
    G = global_positions.shape[1]
    keys = (None, None) if dropout_key is None else random.split(dropout_key)
    shared: Any = dict(scale=scale, dropout_rate=dropout_rate, implementation=implementation)

    # The global keys are copied in front of all keys and hidden at their own positions. So the mask
    # is a rule of positions, and the kernel knows at trace time that it is sparse.
    def in_front(x):
        return jnp.concatenate([_take(x, global_positions), x], axis=1)

    kv_local = kv_ids.at[row, global_positions].set(0, mode="drop")
    kv_local = jnp.concatenate([_take(kv_ids, global_positions), kv_local], axis=1)
    near_or_global = band(window // 2, window // 2) | prefix(G)
    visible = segments(jnp.pad(q_ids, [(0, 0), (G, 0)]), kv_local) & near_or_global
    out: Any = ops.attention(
        query, in_front(key), in_front(value), mask=visible.at(G), dropout_key=keys[0], **shared
    )
    if G:
        if global_query is None or global_key is None or global_value is None:
            raise ValueError(
                "longformer_attention: global tokens need global_query, global_key and global_value"
            )
        of_globals = segments(_take(q_ids, global_positions), kv_ids)
        global_query = _take(global_query, global_positions)
        global_out: Any = ops.attention(
            global_query, global_key, global_value, mask=of_globals, dropout_key=keys[1], **shared
        )
        out = out.at[row, global_positions].set(global_out, mode="drop")
    return out if overfull is None else jnp.where(overfull[:, None, None, None], jnp.nan, out)


def _check_window(window: int) -> None:
    if window < 0 or window % 2:
        raise ValueError(
            f"longformer_attention: window is the total width, an even number >= 0; got {window}"
        )


def _global_positions(tokens, max_globals, B, T):
    """(positions of the global tokens `[B, G]`, rows with too many).

    A position is T where a row has fewer. The second is None unless `tokens` are flags.
    """
    if np.ndim(tokens) < 2:
        # it refuses anything else than a number or positions
        (static,) = global_mask(np.asarray(tokens)).args
        positions = np.arange(static) if isinstance(static, int) else np.array(static, np.int32)
        if (positions >= T).any():
            raise ValueError(
                f"longformer_attention: global tokens are among 0 to {T - 1}; got {tokens}"
            )
        return jnp.broadcast_to(jnp.asarray(positions)[None], (B, len(positions))), None
    if tokens.shape != (B, T) or tokens.dtype != bool:
        raise ValueError(
            f"longformer_attention: global tokens by row are flags [{B}, {T}]; "
            f"got {tokens.dtype} {tokens.shape}"
        )
    if max_globals is None:
        if isinstance(tokens, jax.core.Tracer):
            raise ValueError(
                "longformer_attention: traced flags of global tokens need max_globals, "
                "the most of a row"
            )
        max_globals = int(np.asarray(tokens).sum(1).max(initial=0))
    positions_of = partial(jnp.nonzero, size=max_globals, fill_value=T)
    (positions,) = jax.vmap(positions_of)(jnp.asarray(tokens))
    return positions, jnp.sum(tokens, axis=1) > max_globals


def _take(x, indices):
    """x [B, T, ...] at indices [B, G] -> [B, G, ...]; zeros at indices beyond T."""
    index = indices.reshape(*indices.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


@dataclass(frozen=True)
class Longformer:
    """Sliding window and global tokens: Beltagy et al. 2020, arXiv:2004.05150. Masks: full().

    Global tokens have projections of their own. The flags `[B, T]` of
    `apply(..., inputs={"global_tokens": flags})` replace `global_tokens`. Padding yields zeros.
    Numbered global tokens are those of the row, so with them a row of several segments yields NaN.
    """

    window: int = 512  # total width, even
    # their number (the first ones) or their positions; None: each call gives flags
    global_tokens: int | tuple[int, ...] | None = 1
    max_globals: int | None = None  # largest number of global tokens in a row, for traced flags

    __post_init__ = require_numbers(window=0, global_tokens=0, max_globals=0)

    def __call__(self, config: ModelConfig) -> Mixer:
        spec = attention_spec(config)
        spec |= {f"global_{name}": spec[name] for name in ("query", "key", "value")}

        def mix(params, context, **heads):
            flags = (context.inputs or {}).get("global_tokens")
            tokens = self.global_tokens if flags is None else flags
            if tokens is None:
                raise ValueError(
                    "Longformer(global_tokens=None): give "
                    'inputs={"global_tokens": flags [B, T]} in each call'
                )
            shared = options(config, context) | {"implementation": config.attention_implementation}
            shared |= dict(window=self.window, global_tokens=tokens, max_globals=self.max_globals)
            out = zero_padding(context, attention(**heads, **shared))
            return out if flags is not None or tokens in (0, ()) else refuse_packed(context, out)

        return approximation(self, config, mix, spec)


# Beltagy et al. 2020, arXiv:2004.05150
longformer_base = replace(roberta_base, context_length=4096, mixer=Longformer(512, global_tokens=1))
longformer_base_mlm = replace(longformer_base, heads=(MASKED_LM,))
longformer_large = sized(longformer_base, 24, 1024, 16)
