"""What a model reports beside its outputs, as a part of an objective's sums."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.models.inputs import Output
from jaxformer.ops.losses import LossSums


def with_own(sums: LossSums, output: Output) -> LossSums:
    """The sums, with the model's own loss, its statistics, and its variables' new values.

    The model's own loss (routing) changes only the gradient. A statistic is a mean over layers; if
    its name ends in /layers, it has a value for each layer. New values of the objective's variables
    stay. An output of a model of your own may lack all three.
    """
    loss = sums.loss
    own = getattr(output, "loss", None)
    if own is not None:
        # the routing loss changes the gradient, but not the reported loss
        zero = own - jax.lax.stop_gradient(own)
        loss = loss + (zero * sums.weight).astype(loss.dtype)
    metrics = dict(sums.metrics)
    for name, value in (getattr(output, "stats", None) or {}).items():
        if value.ndim == 1:  # one value for each layer
            mean = value if name.endswith("/layers") else jnp.mean(value)
            metrics[name] = (mean.astype(loss.dtype) * sums.weight, sums.weight)
    updates = {**(getattr(output, "updates", None) or {}), **(sums.updates or {})} or None
    return replace(sums, loss=loss, metrics=metrics, updates=updates)
