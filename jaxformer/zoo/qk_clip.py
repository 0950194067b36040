"""QK-clip: queries and keys shrink where a head's scores grow too large. Kimi K2.

`qk_clip` is a mixer that records the largest score of each head. `QKClip` reads the record after
each update. Use both:

    Experiment(..., model=ModelConfig(mixer=qk_clip, ...), after_update=QKClip(100.0))

Moonshot AI 2025, arXiv:2507.20534, section 2.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import zeros
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.params import Spec, Tree

RECORD = "largest_score"
QUERIES = 128  # whose scores are in memory at a time


@dataclass(frozen=True)
class QKClip:
    """W_q, W_k of a head times sqrt(threshold / largest) each, where its largest score is above it.

    The largest score is that of the step's batch, before the update. Where several query heads
    share a key head, the factor of the queries is threshold / largest, and the keys stay. Biases
    are multiplied, too. Raises ConfigError for parameters without a record of `qk_clip`.
    """

    threshold: float = 100.0  # of a score, scale included

    def __post_init__(self):
        check_numbers("after_update.", self, threshold=1e-6)

    def __call__(self, params: Tree) -> Tree:
        found: list[str] = []
        clipped = self.clip(params, "", found)
        if not found:
            raise ConfigError(
                "after_update=QKClip: no attention records its largest scores; "
                "give model.mixer=qk_clip"
            )
        return clipped

    def clip(self, tree: Tree, path: str, found: list[str]) -> Tree:
        """The tree with clipped heads; the paths of the attentions are added to `found`."""
        if not isinstance(tree, Mapping):
            return tree
        if RECORD in tree:
            found.append(path)
            return {**tree, **self.scaled(tree)}
        return {name: self.clip(leaf, f"{path}/{name}", found) for name, leaf in tree.items()}

    def scaled(self, attention: Tree) -> Tree:
        """The new `query` and `key` of an attention."""
        largest = attention[RECORD]
        factor = jnp.minimum(1.0, self.threshold / jnp.maximum(largest, self.threshold))
        heads = [attention[name]["kernel"].shape[-2] for name in ("query", "key")]
        if heads[0] != heads[1]:
            return {"query": times(attention["query"], factor)}
        root = jnp.sqrt(factor)
        return {name: times(attention[name], root) for name in ("query", "key")}


def times(linear: Tree, factor: Float[Array, "*layers N"]) -> Tree:
    """A linear map to N heads, each head times its factor.

    The kernel is `[..., D, N, H]`, the bias `[..., N, H]`.
    """
    scaled = {"kernel": linear["kernel"] * factor[..., None, :, None]}
    if "bias" in linear:
        scaled["bias"] = linear["bias"] * factor[..., None]
    return {**linear, **scaled}


def qk_clip(config: ModelConfig) -> Mixer:
    """Attention with a variable `largest_score` `[N]`: the largest visible score over the batch.

    It computes the scores a second time, without a gradient. Its decoding is that of attention.
    With accumulation or pmap, the record is the mean of the largest scores of a batch's parts.
    """
    extra = {RECORD: Spec((config.num_heads,), ("heads",), zeros, trained=False)}

    def observe(
        params: Tree, query: Array, key: Array, *, mask: Mask, scale: float | None, **_: Any
    ) -> Tree:
        query, key = jax.lax.stop_gradient((query, key))
        return {RECORD: largest_scores(query, key, mask, scale)}

    return attention(config, extra=extra, observe=observe)


def largest_scores(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    mask: Mask,
    scale: float | None = None,
) -> Float[Array, " N"]:
    """The largest of scale * q . k over the batch and its visible pairs, in float32.

    By default the scale is 1 / sqrt(H). A head without a visible pair has the lowest float32.
    """
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    size = min(T, QUERIES)
    lowest = jnp.finfo(jnp.float32).min
    first = mask.first(T, S)

    def of_block(start):
        # past the end, the last query comes again: it changes no largest score
        rows = jnp.minimum(start + jnp.arange(size), T - 1)
        block = query[:, rows].reshape(B, size, K, N // K, H)
        scores = ops.einsum("btkgh,bskh->bkgts", block, key, dtype=jnp.float32)
        visible = mask(first + rows, jnp.arange(S))
        scores = jnp.where(visible, scores.reshape(B, N, size, S), lowest)
        return scores.max(axis=(0, 2, 3))

    largest = jax.lax.map(of_block, jnp.arange(0, T, size)).max(axis=0)
    return largest * (H**-0.5 if scale is None else scale)
