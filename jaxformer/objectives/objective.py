"""What a model is trained to do: `objective(model, params, batch, key, dtype) -> LossSums`.

Any function of that form is an objective. `key` is always given, and is a function of (seed, step): for dropout, for
random masks. An objective that is scored by another one has a method `evaluation()` that returns it.
An objective that compares the rows of a batch, so that its loss is no sum over rows, has an attribute `whole_batch = True`:
accumulation and pmap, which would show it parts of the batch, are then refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.ops.losses import LossSums, TokenSums

Batch = dict[str, Array]
# the fields of a batch that are arguments of `models.apply`
INPUTS = ("positions", "segment_ids", "token_types", "inputs", "source", "source_segment_ids", "source_positions")


def model_inputs(batch: Batch) -> Batch:
    """The fields of a batch that are arguments of `models.apply`."""
    return {name: batch[name] for name in INPUTS if name in batch}


def with_reports(sums: TokenSums, output: models.Output) -> LossSums:
    """The sums with the model's own loss, which changes only the gradient, and its figures, means over layers.

    A figure whose name ends in /layers has a value for each layer.
    """
    loss = sums.loss
    if output.loss is not None:
        # the routing loss changes the gradient but not the reported loss
        loss = loss + ((output.loss - jax.lax.stop_gradient(output.loss)) * sums.weight).astype(loss.dtype)
    figures = {name: value for name, value in (output.stats or {}).items() if value.ndim == 1}  # one a layer
    values = {name: value if name.endswith("/layers") else jnp.mean(value) for name, value in figures.items()}
    means = {name: (value.astype(loss.dtype) * sums.weight, sums.weight) for name, value in values.items()}
    return LossSums(loss, sums.weight, {"accuracy": (sums.correct, sums.weight), **means})


def check_smoothing(share: float) -> None:
    """Raises ConfigError for a label smoothing that is no share of a target."""
    if not 0 <= share < 1:
        raise ConfigError(f"objective: label_smoothing={share} must be in [0, 1)")


def vocab_size(model: Any, largest: int) -> int:
    """Of a model that is no config, as large as it must be."""
    return models.last_stack(model).vocab_size if models.is_config(model) else largest + 1
