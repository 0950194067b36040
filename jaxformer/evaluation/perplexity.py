"""Loss and perplexity of a model over a split."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops.losses import LossSums
from jaxformer.parallel import block_if_simulated


def perplexity(score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """exp of the mean loss over every weighted token of `batches`.

    `score(params, batch, number of the batch) -> LossSums` should be jitted; sums stay on the device until the last batch
    is in. Returns loss (nats a token), perplexity, bits (a token), what else is scored, and tokens. Raises ValueError
    where no token has weight.
    """
    sums = None
    for number, batch in enumerate(batches):
        # a batch on other processes' devices cannot be put
        there = all(isinstance(leaf, jax.Array) for leaf in batch.values())
        part = block_if_simulated(score(params, batch if there else jax.device_put(batch), np.int32(number)))
        sums = part if sums is None else jax.tree.map(jnp.add, sums, part)
    if sums is None or float(sums.weight) == 0:
        raise ValueError("perplexity: no token to score; is the validation split empty?")
    loss = float(sums.loss) / float(sums.weight)
    metrics = {name: float(total) / max(float(weight), 1e-30) for name, (total, weight) in sums.metrics.items()}
    scores = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits": loss / math.log(2)}
    return scores | metrics | {"tokens": float(sums.weight)}
