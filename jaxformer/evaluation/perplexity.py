"""Loss and perplexity of a model over a split."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.ops.losses import LossSums
from jaxformer.parallel import settled


def perplexity(evaluate: Callable[[Any, dict], LossSums], params: Any, batches: Iterable[dict]) -> dict[str, float]:
    """exp of the mean cross entropy over every weighted token of `batches`.

    `evaluate(params, batch) -> LossSums` should be jitted; sums stay on the device until the last batch is in. Returns
    loss (nats a token), perplexity, bits (a token), accuracy and tokens. Raises ValueError where no token has weight.
    """
    sums = None
    for batch in batches:
        there = all(
            isinstance(leaf, jax.Array) for leaf in batch.values()
        )  # other processes' devices take no device_put
        part = settled(evaluate(params, batch if there else jax.device_put(batch)))
        sums = part if sums is None else jax.tree.map(jnp.add, sums, part)
    if sums is None or float(sums.weight) == 0:
        raise ValueError("perplexity: no token to score; is the validation split empty?")
    tokens = float(sums.weight)
    loss = float(sums.loss) / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits": loss / math.log(2),
        "accuracy": float(sums.correct) / tokens,
        "tokens": tokens,
    }
