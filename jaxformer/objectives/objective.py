"""What a model is trained to do: `objective(model, params, batch, context) -> LossSums`.

Any function of that form is an objective. An objective may also have

    evaluation() -> objective   the one that scores it; by default itself
    spec(model) -> tree         parameters of its own beside the model's, which train with them: `context.params`
    whole_batch = True          it compares the rows of a batch, so that its loss is no sum over rows. Accumulation
                                and pmap, which would show it parts of the batch, are then refused
    example(model, batch)       what a report may draw: what the model reads of a batch of one row (`tokens` or `images`, and
                                other arguments of `models.apply`). Without it, or of None, a report draws no example
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.ops.losses import LossSums, TokenSums
from jaxformer.params import Tree

Batch = dict[str, Array]
# the fields of a batch that are arguments of `models.apply`
INPUTS = ("positions", "segment_ids", "token_types", "inputs", "source", "source_segment_ids", "source_positions")


@struct.dataclass
class StepContext:
    """What an objective knows of the step that calls it, besides the model, its parameters and the batch."""

    # for dropout and other draws: a function of (seed, step), another one in each micro-batch and on each device of pmap
    key: Any
    dtype: Any = struct.field(pytree_node=False, default=jnp.dtype("float32"))  # of activations
    step: Any = 0  # the optimizer's step, an int32 array; of an evaluation, how many were done
    references: dict[str, Tree] = struct.field(default_factory=dict)  # parameters of frozen models: `Experiment.references`
    params: Tree = struct.field(default_factory=dict)  # the objective's own, which `spec(model)` declares
    # values of `params.Spec(trained=False)` by their paths: those of the model, and "objective/..." of the objective's own
    variables: dict[str, Array] = struct.field(default_factory=dict)


def in_both_forms(call: Callable[..., LossSums]) -> Callable[..., LossSums]:
    """A method (model, params, batch, context) that also takes (model, params, batch, key, dtype).

    Objectives had that form before. Experiment files of older runs call ours so.
    """

    @wraps(call)
    def either(
        self: Any, model: Any, params: Any, batch: Batch, context: Any = None, dtype: Any = None, *, key: Any = None
    ) -> LossSums:
        if not isinstance(context, StepContext):
            key = key if context is None else context
            context = StepContext(key, jnp.dtype("float32" if dtype is None else dtype))
        return call(self, model, params, batch, context)

    return either


def batch_of_row(objective: Any, model: Any, batch: Batch) -> Batch:
    """A method `example` of an objective whose batch is what the model reads: a report may draw that."""
    return batch


def model_inputs(batch: Batch) -> Batch:
    """The fields of a batch that are arguments of `models.apply`."""
    return {name: batch[name] for name in INPUTS if name in batch}


def with_reports(sums: TokenSums, output: models.Output, unit: str = "examples", perplexity: bool = False) -> LossSums:
    """The sums with the model's own loss, which changes only the gradient, its figures, and its variables' new values.

    A figure is a mean over layers; one whose name ends in /layers has a value for each layer.
    """
    loss = sums.loss
    if output.loss is not None:
        # the routing loss changes the gradient but not the reported loss
        loss = loss + ((output.loss - jax.lax.stop_gradient(output.loss)) * sums.weight).astype(loss.dtype)
    figures = {name: value for name, value in (output.stats or {}).items() if value.ndim == 1}  # one a layer
    values = {name: value if name.endswith("/layers") else jnp.mean(value) for name, value in figures.items()}
    means = {name: (value.astype(loss.dtype) * sums.weight, sums.weight) for name, value in values.items()}
    metrics = {"accuracy": (sums.correct, sums.weight), **means}
    updates = getattr(output, "updates", None)
    return LossSums(loss, sums.weight, metrics, updates, unit=unit, perplexity=perplexity)


def check_smoothing(share: float) -> None:
    """Raises ConfigError for a label smoothing that is no share of a target."""
    if not 0 <= share < 1:
        raise ConfigError(f"objective: label_smoothing={share} must be in [0, 1)")


def vocab_size(model: Any, largest: int) -> int:
    """Of a model that is no config, as large as it must be."""
    return models.last_stack(model).vocab_size if models.is_config(model) else largest + 1
