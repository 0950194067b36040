"""The form of an objective: `objective(model, params, batch, context) -> LossSums`.

Any function of this form is an objective. An objective may also have

    evaluation() -> objective   the objective that evaluation uses; by default itself
    spec(model) -> tree         parameters of its own, which train beside the model's. They are
                                `context.params`
    whole_batch = True          it compares the rows of a batch, so its loss is no sum over rows.
                                Accumulation and pmap, which show it parts of a batch, are refused
    example(model, batch)       the inputs of the model for a batch of one row, which a report
                                draws: `tokens` or `images`, and other arguments of `models.apply`.
                                Without this method, or for None, a report draws no example
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models import reports
from jaxformer.ops.losses import LossSums, TokenSums
from jaxformer.params import Tree

Batch = dict[str, Array]
# the fields of a batch that are arguments of `models.apply`
INPUTS = (
    "positions",
    "segment_ids",
    "token_types",
    "inputs",
    "source",
    "source_segment_ids",
    "source_positions",
)


@struct.dataclass
class StepContext:
    """The facts of a training step that an objective needs besides model, parameters and batch."""

    # for dropout and other random numbers: a function of (seed, step). Each micro-batch, and each
    # device of pmap, has another key
    key: Any
    dtype: Any = struct.field(pytree_node=False, default=jnp.dtype("float32"))  # of activations
    step: Any = 0  # the optimizer's step, an int32 array; in evaluation, the number of steps done
    # parameters of frozen models: `Experiment.references`
    references: dict[str, Tree] = struct.field(default_factory=dict)
    # the objective's own parameters, which `spec(model)` declares
    params: Tree = struct.field(default_factory=dict)
    # values of `params.Spec(trained=False)` by path: those of the model, and those of the objective
    # under "objective/..."
    variables: dict[str, Array] = struct.field(default_factory=dict)


def in_both_forms(call: Callable[..., LossSums]) -> Callable[..., LossSums]:
    """A method (model, params, batch, context) that also takes (model, params, batch, key, dtype).

    The second form is an older one. Experiment files of older runs call our objectives so.
    """

    @wraps(call)
    def either(
        self: Any,
        model: Any,
        params: Any,
        batch: Batch,
        context: Any = None,
        dtype: Any = None,
        *,
        key: Any = None,
    ) -> LossSums:
        if not isinstance(context, StepContext):
            key = key if context is None else context
            context = StepContext(key, jnp.dtype("float32" if dtype is None else dtype))
        return call(self, model, params, batch, context)

    return either


def batch_of_row(objective: Any, model: Any, batch: Batch) -> Batch:
    """The method `example` of an objective whose batch holds the model's inputs unchanged."""
    return batch


def model_inputs(batch: Batch) -> Batch:
    """The fields of a batch that are arguments of `models.apply`."""
    return {name: batch[name] for name in INPUTS if name in batch}


def with_reports(
    sums: TokenSums, output: models.Output, unit: str = "examples", perplexity: bool = False
) -> LossSums:
    """The loss sums and the accuracy, with what the model itself reports: `models.reports`."""
    metrics = {"accuracy": (sums.correct, sums.weight)}
    total = LossSums(sums.loss, sums.weight, metrics, unit=unit, perplexity=perplexity)
    return reports.with_own(total, output)


def frozen_model(context: StepContext, name: str) -> Any:
    """The parameters of a reference. Raises ConfigError for an unknown name."""
    if name not in context.references:
        known = ", ".join(context.references) or "none"
        raise ConfigError(
            f"objective.reference={name!r}: there is no such model in Experiment.references "
            f"({known}); add one: references={{{name!r}: RUN}}"
        )
    return context.references[name]


def check_smoothing(share: float) -> None:
    """Raises ConfigError for a label smoothing outside [0, 1)."""
    if not 0 <= share < 1:
        raise ConfigError(f"objective: label_smoothing={share} must be in [0, 1)")


def vocab_size(model: Any, largest: int) -> int:
    """The vocabulary size of a config; for any other model, the smallest size with id `largest`."""
    return models.last_stack(model).vocab_size if models.is_config(model) else largest + 1
