"""What a run says before it wastes hours: slow steps on a CPU, rows without a token, a validation
split that is too small."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import models
from jaxformer.models import cost
from jaxformer.sharding import platform
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import example_lengths, trained_weights

MANY = 10**12  # FLOPs of a step, below which no CPU takes long
SLOW = 10.0  # seconds of a step that are worth a line
FEW = 5000  # tokens, of which the mean loss is uncertain by 0.03 nats
MOST_HELD_OUT = 0.1  # of the tokens
PADDING = 128  # a vocabulary is padded to a multiple of this, so that devices can split it


def first_warnings(experiment: Experiment, dataset: Any) -> list[str]:
    """Lines for the start of a run."""
    lines = small_validation(experiment.data, dataset)
    if not models.is_config(experiment.model):
        return lines
    return [*lines, *rows_without_token(experiment, dataset), *slow_steps(experiment)]


def small_validation(data: Any, dataset: Any) -> list[str]:
    """A line, if a text's validation split is too small for its loss to mean much.

    The losses of single tokens have a standard deviation of about 2 nats.
    """
    fraction = getattr(data, "validation_fraction", None)
    if fraction is None or getattr(data, "validation", None) is not None:
        return []
    train, validation = (
        len(getattr(split, "tokens", ())) for split in (dataset.train, dataset.validation)
    )
    if not 0 < validation < FEW or fraction >= MOST_HELD_OUT:
        return []
    better = MOST_HELD_OUT
    while better / 2 * (train + validation) > 2 * FEW:
        better /= 2
    return [
        f"validation: {validation:,} tokens, so their mean loss is uncertain by some "
        f"{2 / validation**0.5:.2f} nats; --data.validation-fraction={better:g} holds out "
        f"{better * (train + validation):,.0f}"
    ]


def rows_without_token(experiment: Experiment, dataset: Any) -> list[str]:
    """A line, if the model's vocabulary is much larger than that of the data.

    A few rows more, such as a token that hides others, or a padded size, are on purpose.
    """
    size = models.last_stack(experiment.model).vocab_size
    known = dataset.vocab_size
    if known is None:
        return []
    padded = -(-known // PADDING) * PADDING
    if size - padded <= PADDING:
        return []
    return [
        f"vocabulary: {size - known:,} of {size:,} rows have no token of the data, which have "
        f"{known:,}; --model.vocab-size={padded} has the same tokens"
    ]


def slow_steps(experiment: Experiment) -> list[str]:
    """A line, if a step takes longer than `SLOW` on this CPU, by its FLOPs and a product's rate."""
    if platform() != "cpu":
        return []
    length, source = example_lengths(experiment, {})
    per_token = cost.training_flops(experiment.model, length, source, trained_weights(experiment))
    flops = per_token * experiment.batch_size * length
    if flops < MANY:
        return []
    seconds = flops / product_rate()
    if seconds < SLOW:
        return []
    return [
        f"a CPU: a step has {flops / 1e12:,.1f} TFLOP and takes about {duration(seconds)} here, "
        f"all {experiment.steps:,} steps {duration(seconds * experiment.steps)}; try it with a "
        "smaller model, and plan the large one for other devices (the command `plan`)"
    ]


def duration(seconds: float) -> str:
    """A time in a unit that fits: "40 s", "12 min", "5.5 hours", "3.2 days"."""
    for unit, size, largest in (("s", 1, 120), ("min", 60, 7200), ("hours", 3600, 172_800)):
        if seconds < largest:
            return f"{seconds / size:.{int(unit == 'hours')}f} {unit}"
    return f"{seconds / 86400:.1f} days"


def product_rate(n: int = 1024) -> float:
    """FLOPs a second of a product of two matrices `[n, n]` in float32, the faster of two."""
    x = jnp.ones((n, n), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)
