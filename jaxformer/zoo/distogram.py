"""A bin of distance for each pair of residues: the head and its loss. Two bins are contacts.

Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplementary methods 1.9.8.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import zeros
from jaxtyping import Float

from jaxformer import models, params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.config import ModelConfig
from jaxformer.models.heads import Head
from jaxformer.models.layer import linear
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.params import Tree
from jaxformer.zoo.alignments import alignment_of, unpack


@dataclass(frozen=True)
class Distogram:
    """A head: logits `[B, R, R, bins]` of each pair, a linear map of z_ij + z_ji. It starts at 0.

    The model reads an alignment (`zoo.alignments`).
    """

    bins: int = 64  # of distance
    name: str = "distogram"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("Distogram.", self, bins=2)

    def __call__(self, config: ModelConfig) -> Head:
        shape = alignment_of(config).pair_width, self.bins
        spec = params.linear(shape, ("embed", "class"), ("embed",), zeros)

        def apply(
            params: Tree, hidden: Float[Array, "B R W"], *rest: Any
        ) -> Float[Array, "B R R bins"]:
            _, pairs = unpack(config, hidden)
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            return linear("bijz,zc->bijc", pairs + pairs.swapaxes(1, 2), params, wide)

        return Head(self.name, spec, apply)


@dataclass(frozen=True)
class PairCrossEntropy:
    """-log p(bin) of each pair, its mean over the pairs of an alignment that have a bin.

    A batch has `alignment` [B, S, R], `bins` [B, R, R], `weights` [B] and, if cells are missing,
    `padding_mask` [B, S, R]. A pair of a negative bin does not count; a bin that does not exist
    gives NaN. `bins_accuracy` is the share of pairs whose most probable bin is right. The model has
    the head `Distogram` first. Raises ConfigError for an answer of another shape.
    """

    def example(self, model: Any, batch: dict) -> dict:
        """The inputs of the model for a report."""
        return {"tokens": batch["alignment"], "inputs": inputs_of(batch)}

    def __call__(self, model: Any, params: Any, batch: dict, context: Any) -> LossSums:
        bins = batch["bins"]
        output = models.apply(
            model,
            params,
            batch["alignment"],
            inputs=inputs_of(batch),
            dropout_key=context.key,
            dtype=context.dtype,
        )
        logits = output.logits
        if logits.ndim != 4 or logits.shape[:3] != bins.shape:
            raise ConfigError(
                f"model: the first head answers with {list(logits.shape)} for bins "
                f"{list(bins.shape)}; expected logits of each pair, as zoo.Distogram gives"
            )
        counts = (bins >= 0).astype(logits.dtype)
        probabilities = jax.nn.log_softmax(logits)
        of_bin = jnp.take_along_axis(
            probabilities, jnp.maximum(bins, 0)[..., None], axis=-1, mode="fill", fill_value=jnp.nan
        )[..., 0]
        is_right = (jnp.argmax(logits, axis=-1) == bins) * counts
        errors = jnp.where(bins >= 0, -of_bin, 0)
        pairs = jnp.maximum(counts.sum(axis=(1, 2)), 1)
        weights = batch["weights"].astype(logits.dtype)
        loss, right = (
            weighted_sum(each.sum(axis=(1, 2)) / pairs, weights) for each in (errors, is_right)
        )
        sums = LossSums(
            loss, weights.sum(), {"bins_accuracy": (right, weights.sum())}, unit="alignments"
        )
        return with_own(sums, output)


def inputs_of(batch: dict) -> dict | None:
    """The argument `inputs` of `models.apply` for a batch: its padding mask, if it has one."""
    name = "padding_mask"
    return {name: batch[name]} if name in batch else None
