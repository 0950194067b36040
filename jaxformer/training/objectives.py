"""What a model is trained to do: (experiment, params, batch, dropout key) -> LossSums."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jaxformer.models import transformer
from jaxformer.ops.losses import LossSums, projected_cross_entropy

if TYPE_CHECKING:
    from jaxformer.training.experiment import Experiment


def token_cross_entropy(
    experiment: "Experiment", params: Any, batch: dict[str, Array], dropout_key: Array | None = None
) -> LossSums:
    """Cross entropy of `labels` given `tokens`, summed with `weights`, all `[B, T]`.

    The data say what a label is: for text the next token (language modelling), for aligned tasks the answer at that
    place. `segment_ids` and `positions` are passed on where a batch has them.
    """
    hidden, _, _ = transformer.encode(
        experiment.model,
        params,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        dropout_key=dropout_key,
        dtype=jnp.dtype(experiment.precision),
    )
    return projected_cross_entropy(
        hidden,
        transformer.head(experiment.model, params),
        batch["labels"],
        batch["weights"],
        softcap=experiment.model.logit_softcap,
        label_smoothing=experiment.label_smoothing,
        z_loss=experiment.z_loss,
    )
