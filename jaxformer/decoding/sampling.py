"""From logits to a token. Each filter is a function of its own: it sets what it removes to -inf."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How to pick a token. Filters follow the temperature, in this order."""

    temperature: float = 1.0  # logits are divided by it; 0 is greedy
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the likeliest tokens whose probabilities reach p together
    min_p: float | None = None  # only tokens at least p times as likely as the likeliest

    def __post_init__(self):
        if not (self.temperature == 0 or 1e-6 <= self.temperature < math.inf):  # logits / 1e-40 are inf, tokens noise
            raise ConfigError(f"temperature={self.temperature}: must be 0 (greedy), or finite and at least 1e-6")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: must be at least 1")
        for name in ("top_p", "min_p"):
            p = getattr(self, name)
            if p is not None and not 0 < p <= 1:
                raise ConfigError(f"{name}={p}: must be in (0, 1]")


def top_k(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """Keeps the k largest (and what ties with the k-th). Fan et al. 2018."""
    least = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def top_p(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """Keeps the fewest likeliest tokens whose probability reaches p, at least one. Holtzman et al. 2019, arXiv:1904.09751.

    Of equally likely tokens the first are kept. The sum starts at the least likely token: a float32 sum from the likeliest
    on reaches 1 long before the end of a vocabulary, so that p = 1 would remove the rest.
    """
    order = jnp.argsort(logits, axis=-1, descending=True)
    probabilities = jnp.take_along_axis(_probabilities(logits), order, axis=-1)
    tails = jax.lax.cumsum(probabilities, axis=1, reverse=True)  # of each token and all that are less likely
    count = jnp.maximum(jnp.sum(tails > 1 - p, axis=-1, keepdims=True), 1)
    return jnp.where(jnp.argsort(order, axis=-1) < count, logits, -jnp.inf)


def min_p(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """Keeps tokens at least p times as likely as the likeliest. Nguyen et al. 2024, arXiv:2407.01082."""
    probabilities = _probabilities(logits)
    return jnp.where(probabilities >= p * jnp.max(probabilities, axis=-1, keepdims=True), logits, -jnp.inf)


def _probabilities(logits):
    return jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)


def sample(logits: Float[Array, "B V"], keys: Array, how: Sampling) -> Int[Array, " B"]:
    """One token a row; each row has its own key, so a row's tokens do not depend on its neighbours."""
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / how.temperature
    if how.top_k is not None:
        logits = top_k(logits, how.top_k)
    if how.top_p is not None:
        logits = top_p(logits, how.top_p)
    if how.min_p is not None:
        logits = min_p(logits, how.min_p)
    return jax.vmap(jax.random.categorical)(keys, logits)
