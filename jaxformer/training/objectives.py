"""What a model is trained to do: (experiment, params, batch, dropout key) -> LossSums."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer.errors import ConfigError
from jaxformer.models import heads, transformer
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
    config = experiment.model
    output = transformer.encode(
        config,
        params,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        token_types=batch.get("token_types"),
        dropout_key=dropout_key,
        dtype=jnp.dtype(experiment.precision),
    )
    head = heads.language_model(config)
    if head is None:
        raise ConfigError(f"model.heads={config.heads}: this objective needs a LanguageModel among them")
    own, tokens_table = params.get("heads", {}).get(head.name, {}), params["embedding"].get("tokens")
    hidden, kernel, bias = heads.unembedding(config, head, own, output.hidden, tokens_table)
    sums = projected_cross_entropy(
        hidden,
        kernel,
        batch["labels"],
        batch["weights"],
        bias=bias,
        softcap=config.logit_softcap,
        label_smoothing=experiment.label_smoothing,
        z_loss=experiment.z_loss,
    )
    if output.loss is None:
        return sums
    # what routed experts ask for steers the gradient; the loss that is reported stays the cross entropy
    steer = (output.loss - jax.lax.stop_gradient(output.loss)) * sums.weight
    return sums._replace(loss=sums.loss + steer.astype(sums.loss.dtype))
