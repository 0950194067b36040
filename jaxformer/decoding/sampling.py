"""From logits to a token. What a token may be is in `filters`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.decoding.filters import Filter, MinP, Temperature, TopK, TopP, Typical


@dataclass(frozen=True)
class Sampling:
    """How to pick a token. Filters follow the temperature, in this order. Raises ConfigError for a number out of range."""

    temperature: float = 1.0  # logits are divided by it; 0 is greedy: the other filters are ignored
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the likeliest tokens whose probabilities reach p together
    min_p: float | None = None  # only tokens at least p times as likely as the likeliest
    typical: float | None = None  # only the tokens closest to the entropy whose probabilities reach this together

    def __post_init__(self):
        self.filters()

    def filters(self) -> tuple[Filter, ...]:
        """What this does to logits, in the order of transformers."""
        kinds = {TopK: self.top_k, TopP: self.top_p, MinP: self.min_p, Typical: self.typical}
        more = [kind(number) for kind, number in kinds.items() if number is not None]
        return Temperature(self.temperature), *(more if self.temperature else ())


def draw(logits: Float[Array, "B V"], keys: Array, temperature: Any) -> Int[Array, " B"]:
    """One token a row with probability softmax(logits); the likeliest in rows of temperature 0, of equals the first.

    The temperature is one number or one per row; `filters.Temperature` has divided by it. Each row has its own key, so
    its token does not depend on its neighbours. A token is where the running sum of probabilities passes one random
    number, in two levels of 256: Gumbel noise for each token of a vocabulary takes 20 times as long.
    """
    B, V = logits.shape
    largest, greedy_rows = jnp.max(logits, axis=-1, keepdims=True), jnp.broadcast_to(jnp.asarray(temperature) == 0, B)
    greedy = jnp.min(jnp.where(logits == largest, jnp.arange(V)[None], V - 1), axis=-1)  # half the time of argmax on CPU

    def drawn() -> Array:
        weights = jnp.pad(jnp.exp(logits - largest), ((0, 0), (0, -V % 256))).reshape(B, -1, 256)
        lines = weights.sum(axis=-1)
        level = jax.vmap(jax.random.uniform)(keys)[:, None] * lines.sum(axis=-1, keepdims=True)
        line, level = _pass(lines, level)
        place, _ = _pass(jnp.take_along_axis(weights, line[..., None], axis=1)[:, 0], level)
        return jnp.where(greedy_rows, greedy, (line * 256 + place)[:, 0])

    return jax.lax.cond(greedy_rows.all(), lambda: greedy, drawn)


def probabilities(logits: Float[Array, "B V"], temperature: Any) -> Float[Array, "B V"]:
    """What `draw` draws from, for a temperature that all rows have; zeros where all logits are -inf, NaN where one is."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    p = jnp.where(temperature == 0, greedy, jax.nn.softmax(logits, axis=-1))
    return jnp.where(jnp.isnan(largest), jnp.nan, jnp.where(largest == -jnp.inf, 0.0, p))


def _pass(weights: Float[Array, "B n"], level: Float[Array, "B 1"]) -> tuple[Int[Array, "B 1"], Float[Array, "B 1"]]:
    """Where the running sum of weights first is above `level`, and what of the level is left there. Never at a weight of 0."""
    sums = jnp.cumsum(weights, axis=-1)
    above = jnp.where(weights > 0, sums, 0.0)
    level = jnp.clip(level, 0.0, jnp.nextafter(above.max(axis=-1, keepdims=True), jnp.zeros_like(level)))  # sums round
    place = jnp.argmax(above > level, axis=-1, keepdims=True)
    return place, level - jnp.take_along_axis(sums - weights, place, axis=1)
