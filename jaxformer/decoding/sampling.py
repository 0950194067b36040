"""Draws a token from logits. `filters` removes the tokens that must not be drawn."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.decoding.filters import Filter, MinP, Temperature, TopK, TopP, Typical


@dataclass(frozen=True)
class Sampling:
    """How to pick a token: temperature first, then the other filters, in the order of the fields.

    Raises ConfigError for a number out of range.
    """

    temperature: float = 1.0  # divides the logits; 0 is greedy, and the other filters are ignored
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the likeliest tokens whose probabilities reach p together
    min_p: float | None = None  # only tokens at least p times as likely as the likeliest
    # only the tokens closest to the entropy whose probabilities reach this together
    typical: float | None = None

    def __post_init__(self):
        self.filters()

    def filters(self) -> tuple[Filter, ...]:
        """The filters of these options, in the order of Hugging Face transformers."""
        numbers = {TopK: self.top_k, TopP: self.top_p, MinP: self.min_p, Typical: self.typical}
        others = [make(number) for make, number in numbers.items() if number is not None]
        return Temperature(self.temperature), *(others if self.temperature else ())


def draw(logits: Float[Array, "B V"], keys: Array, temperature: Any) -> Int[Array, " B"]:
    """One token a row ~ softmax(logits); at temperature 0 the likeliest, and the first of equals.

    The temperature is one number, or one for each row. It is not applied here:
    `filters.Temperature` has divided the logits by it. Each row has its own key, so its token does
    not depend on its neighbours. The token is where the running sum of probabilities passes one
    random number. The sum has two levels, over lines of 256 tokens and inside one line; Gumbel
    noise for each token would take 20 times as long.
    """
    B, V = logits.shape
    largest = jnp.max(logits, axis=-1, keepdims=True)
    is_greedy = jnp.broadcast_to(jnp.asarray(temperature) == 0, B)
    # takes half the time of argmax on CPU
    greedy = jnp.min(jnp.where(logits == largest, jnp.arange(V)[None], V - 1), axis=-1)

    def drawn() -> Array:
        weights = jnp.pad(jnp.exp(logits - largest), ((0, 0), (0, -V % 256))).reshape(B, -1, 256)
        lines = weights.sum(axis=-1)
        level = jax.vmap(jax.random.uniform)(keys)[:, None] * lines.sum(axis=-1, keepdims=True)
        line, level = _pass(lines, level)
        place, _ = _pass(jnp.take_along_axis(weights, line[..., None], axis=1)[:, 0], level)
        return jnp.where(is_greedy, greedy, (line * 256 + place)[:, 0])

    return jax.lax.cond(is_greedy.all(), lambda: greedy, drawn)


def probabilities(logits: Float[Array, "B V"], temperature: Any) -> Float[Array, "B V"]:
    """The distribution of `draw`, for one temperature of all rows.

    Zeros in a row whose logits are all -inf; NaN in a row where one logit is NaN.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    p = jnp.where(temperature == 0, greedy, jax.nn.softmax(logits, axis=-1))
    return jnp.where(jnp.isnan(largest), jnp.nan, jnp.where(largest == -jnp.inf, 0.0, p))


def _pass(
    weights: Float[Array, "B n"], level: Float[Array, "B 1"]
) -> tuple[Int[Array, "B 1"], Float[Array, "B 1"]]:
    """(the first place whose running sum of weights exceeds `level`, level - the sum before it).

    A place of weight 0 is never taken.
    """
    sums = jnp.cumsum(weights, axis=-1)
    above = jnp.where(weights > 0, sums, 0.0)
    # sums round, so the level may be a little too large
    level = jnp.clip(
        level, 0.0, jnp.nextafter(above.max(axis=-1, keepdims=True), jnp.zeros_like(level))
    )
    place = jnp.argmax(above > level, axis=-1, keepdims=True)
    return place, level - jnp.take_along_axis(sums - weights, place, axis=1)
