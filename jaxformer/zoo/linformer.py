"""Trained matrices sum keys and values to a few rows: Wang et al. 2020, arXiv:2006.04768."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention_spec
from jaxformer.models.presets import roberta_base
from jaxformer.ops import cpu
from jaxformer.ops.attention.kernel import Implementation
from jaxformer.ops.einsum import einsum
from jaxformer.params import Spec
from jaxformer.zoo.frame import approximation, options
from jaxformer.zoo.visible import visibility


@jax.named_scope("linformer_attention")
def attention(
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
    implementation: Implementation = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(q (E^T k)^T * scale) F^T v. Wang et al. 2020, arXiv:2006.04768, eq. 7.

    E is `key_projection` and F is `value_projection` (None: F = E). They reduce L >= S positions to
    R rows, for all heads or for each; a sequence takes their first S positions. `mask` may be
    `full()`, `lengths(...)` and `segments(ids)` with one segment a row. A row with several segments
    is NaN, because traced ids cannot be refused. Padding yields zeros. Raises NotImplementedError
    for other masks.
    """
    view = visibility(mask, query.shape[1], key.shape[1], "linformer_attention", takes_causal=False)
    value_projection = key_projection if value_projection is None else value_projection
    key = _reduce(key, key_projection, view.keys)
    value = _reduce(value, value_projection, view.keys)
    shown = view.queries[:, :, None, None]
    query = jnp.where(shown, query, 0)
    dropout = dict(dropout_rate=dropout_rate, dropout_key=dropout_key)
    out: Any = ops.attention(
        query, key, value, scale=scale, implementation=implementation, **dropout
    )
    return view.refuse_several(jnp.where(shown, out, 0))


def _reduce(x, projection, shown):
    """E^T x, `[B, S, K, H]` to `[B, R, K, H]`, without the positions that are padding."""
    S = x.shape[1]
    x = jnp.where(shown[:, :, None, None], x, 0)
    if projection.ndim == 2:
        reduced = jnp.moveaxis(einsum("bskh,sr->bkhr", x, projection[:S]), -1, 1)
    else:
        reduced = jnp.moveaxis(einsum("bskh,ksr->kbhr", x, projection[:, :S]), (0, -1), (2, 1))
    # Otherwise XLA:CPU folds the transposition into attention's 16-bit products, and then has no
    # kernel for them.
    return cpu.barrier(reduced)


@dataclass(frozen=True)
class Linformer:
    """Trained E and F sum keys and values to `rank` rows: arXiv:2006.04768. Masks: full().

    Wang et al. 2020.
    """

    rank: int = 256  # rows of keys and values that remain
    # headwise: each layer has an E and an F for all its heads; key_value: F = E;
    # layerwise: all layers have the same E = F
    sharing: Literal["headwise", "key_value", "layerwise"] = "headwise"

    __post_init__ = require_numbers(rank=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        matrix = Spec(
            (config.context_length, self.rank),
            ("length", None),
            normal(self.rank**-0.5),
            ("length",),
        )
        projections = {"key_projection": matrix}
        if self.sharing == "headwise":
            projections["value_projection"] = matrix
        in_layer = self.sharing != "layerwise"

        def mix(params, context, **heads):
            source = params if in_layer else context.shared
            matrices = {name: source[name] for name in projections}
            of_config = options(config, context) | {
                "implementation": config.attention_implementation
            }
            return attention(**heads, **matrices, **of_config)

        spec = attention_spec(config)
        if in_layer:
            spec |= projections
        shared = None if in_layer else projections
        return approximation(self, config, mix, spec, shared=shared)

    def share_of_weight(self, config: ModelConfig) -> float:
        """Multiplications of one token with E or with F, divided by the number of their weights.

        A token is multiplied by one row of E for each feature of its keys, and by one of F for each
        feature of its values.
        """
        uses = {"headwise": 1, "key_value": 2, "layerwise": 2 * config.num_layers}[self.sharing]
        return uses * config.kv_heads * config.head_size / config.context_length


# Wang et al. 2020, arXiv:2006.04768, section 5: RoBERTa's base with 512 keys summed to 256. Heads
# share E and F.
linformer_base = replace(roberta_base, mixer=Linformer(256), attention_dropout_rate=0.0)
