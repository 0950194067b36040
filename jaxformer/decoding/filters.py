"""Filters: functions `(logits, history) -> logits`, applied one after another. What one removes is -inf.

`TopK(50)` is a filter, and any function of these two is. Numbers are leaves of a pytree, so arguments of the compiled program:
another temperature compiles nothing. The n of an n-gram is static. A number may be one per row, [B], where you call a filter
yourself; `generate` and the other functions of `decoding` refill and repeat rows, so they need one for all.

A filter that makes some tokens likely, or forces them, may say which by a method `named_tokens() -> tokens`. `generate` and
its relatives then refuse those that are outside the model's vocabulary. `LogitBias` and `ForcedPrefix` have it.
"""

import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.tree_util import Partial
from jaxtyping import Bool, Float, Int

from jaxformer.errors import ConfigError

__all__ = [
    "BadWords", "ForcedPrefix", "Frequency", "LogitBias", "MinLength", "MinP", "NoRepeatNgram", "Presence", "Repetition",
    "Temperature", "TopK", "TopP", "Typical",
]  # fmt: skip


ROUNDING = 3e-7  # of sums of probabilities in float32


@struct.dataclass
class History:
    """What stands in each row."""

    tokens: Any  # [B, S]: prompt, then new tokens, from slot 0 on; beyond `length` anything
    length: Any  # [B]: tokens in use
    prompt: Any  # [B]: how many of them are the prompt

    def extend(self, tokens: Int[Array, "B n"], count: Int[Array, " B"]) -> "History":
        """Each row with the first `count` of its n tokens more."""
        i = jnp.arange(tokens.shape[1])[None]
        slots = jnp.where(i < count[:, None], self.length[:, None] + i, self.tokens.shape[1])  # nothing is written outside
        tokens = self.tokens.at[jnp.arange(len(tokens))[:, None], slots].set(tokens.astype(self.tokens.dtype), mode="drop")
        return History(tokens, self.length + count.astype(self.length.dtype), self.prompt)


Logits = Float[Array, "B V"]
Filter = Callable[[Array, History], Array]  # (logits [B, V] float32, history) -> logits


def filter_of(valid: Callable, must: str, function: Callable, dtype: Any = np.float32) -> Callable[..., Filter]:
    """From a function (number, logits, history) -> logits, one of a number that gives a filter; ConfigError if not `valid`."""

    def construct(number, *more):
        return Partial(function, check_number(function.__name__, valid, must, number, dtype), *more)

    construct.__name__, construct.__doc__ = function.__name__, function.__doc__
    return construct


def check_number(name: str, valid: Callable, must: str, number: Any, dtype: Any) -> Any:
    """The number or numbers of a filter in this dtype; a tracer as it is. ConfigError if not `valid`."""
    if not isinstance(number, int | float | Sequence | np.ndarray | np.generic):
        return number
    if not np.all(valid(np.asarray(number))) or (dtype == np.int32 and np.any(np.asarray(number) % 1)):
        raise ConfigError(f"{name}({number}): must be {must}")
    return np.asarray(number, dtype)


@partial(filter_of, lambda t: (t == 0) | (t >= 1e-6) & (t < np.inf), "0 (greedy), or finite and at least 1e-6")
def Temperature(t: Any, logits: Logits, history: Any) -> Logits:  # logits / 1e-40 are inf, and tokens noise
    """logits / t. Rows with t = 0 stay as they are: `sampling.draw` takes their likeliest token."""
    return logits / _column(jnp.where(t == 0, 1.0, t))


@partial(filter_of, lambda k: k >= 1, "a whole number, at least 1", dtype=np.int32)
def TopK(k: Any, logits: Logits, history: Any) -> Logits:
    """Keeps the k largest, and what ties with the k-th. Fan et al. 2018."""
    logits, k = lax.optimization_barrier(logits), _column(k)  # computed once, so that equal stays equal
    x = _folded(logits, -jnp.inf)
    return jnp.where(logits >= _least(logits, lambda t: _sum(jnp.where(x > t, 1.0, 0.0)) < k), logits, -jnp.inf)


@partial(filter_of, lambda p: (p > 0) & (p <= 1), "in (0, 1]")
def TopP(p: Any, logits: Logits, history: Any) -> Logits:
    """Keeps the fewest likeliest tokens whose probability reaches p, the first of equals. Holtzman et al., arXiv:1904.09751."""
    # sums of the least likely: one from the likeliest on reaches 1 in float32 before the end, and p = 1 would remove the rest
    probabilities, rest = lax.optimization_barrier(jax.nn.softmax(logits, axis=-1)), _rest(p)
    x = _folded(probabilities, 0.0)
    least = _least(probabilities, lambda t: _sum(jnp.where(x <= t, x, 0.0)) > rest)
    ties, less = probabilities == least, _sum(jnp.where(x < least[..., None], x, 0.0))
    count = jnp.sum(ties, axis=-1, keepdims=True)
    removed = jnp.clip(jnp.floor((rest - less) / least).astype(jnp.int32), 0, count - 1)  # of the ties

    def first():
        return ties & (jnp.cumsum(ties, axis=-1) <= count - removed)

    ties = lax.cond((removed > 0).any(), first, lambda: ties)  # seldom needed, and slow
    return jnp.where((probabilities > least) | ties, logits, -jnp.inf)


@partial(filter_of, lambda p: (p >= 0) & (p <= 1), "in [0, 1]")
def MinP(p: Any, logits: Logits, history: Any) -> Logits:
    """Keeps tokens at least p times as likely as the likeliest; p = 0 keeps all. Nguyen et al. 2024, arXiv:2407.01082."""
    return jnp.where(logits - logits.max(axis=-1, keepdims=True) >= jnp.log(_column(p)), logits, -jnp.inf)


@partial(filter_of, lambda mass: (mass > 0) & (mass <= 1), "in (0, 1]")
def Typical(mass: Any, logits: Logits, history: Any) -> Logits:
    """Keeps tokens of least |-log p - entropy|, and ties, until they reach a mass. Meister et al. 2022, arXiv:2202.00666."""
    logs, rest = jax.nn.log_softmax(logits, axis=-1), _rest(mass)
    p = _folded(jnp.exp(logs), 0.0)
    entropy = -_sum(jnp.where(p > 0, p * _folded(logs, 0.0), 0.0))
    distance = lax.optimization_barrier(jnp.abs(-logs - entropy))
    x = _folded(distance, jnp.inf)
    return jnp.where(distance <= _least(distance, lambda t: _sum(jnp.where(x > t, p, 0.0)) <= rest), logits, -jnp.inf)


@partial(filter_of, lambda penalty: (penalty > 0) & (penalty < np.inf), "positive and finite")
def Repetition(penalty: Any, logits: Logits, history: History) -> Logits:
    """Divides positive logits of all tokens so far by a penalty, multiplies negative ones. Keskar et al., arXiv:1909.05858."""
    penalised = jnp.where(logits < 0, logits * _column(penalty), logits / _column(penalty))
    return jnp.where(_counts(logits, history, 0) > 0, penalised, logits)


@partial(filter_of, np.isfinite, "finite")
def Presence(penalty: Any, logits: Logits, history: History) -> Logits:
    """logits - penalty, of each token among the new ones: `presence_penalty` of OpenAI's API."""
    return logits - _column(penalty) * (_counts(logits, history, history.prompt[:, None]) > 0)


@partial(filter_of, np.isfinite, "finite")
def Frequency(penalty: Any, logits: Logits, history: History) -> Logits:
    """logits - penalty * how often a token is among the new ones: `frequency_penalty` of OpenAI's API."""
    return logits - _column(penalty) * _counts(logits, history, history.prompt[:, None])


@struct.dataclass
class NoRepeatNgram:
    """Removes tokens that would repeat an n-gram of the row, prompt included. Paulus et al. 2017, arXiv:1705.04304."""

    n: int = struct.field(pytree_node=False)

    def __post_init__(self):
        if not isinstance(self.n, numbers.Integral) or self.n < 1:
            raise ConfigError(f"NoRepeatNgram({self.n}): must be a whole number of at least 1")

    def __call__(self, logits: Logits, history: History) -> Logits:
        n, tokens, last = self.n, history.tokens, _last(history, self.n - 1)
        repeats = jnp.arange(tokens.shape[1])[None] + n <= history.length[:, None]  # [B, S]: an n-gram here begins with `last`
        for i in range(n - 1):
            repeats &= jnp.roll(tokens, -i, axis=1) == last[:, i, None]
        return _remove(logits, jnp.roll(tokens, 1 - n, axis=1), repeats)


def BadWords(words: Sequence[Sequence[int]]) -> Filter:
    """Removes the last token of each of `words` in rows that end with all tokens before it."""
    if not all(len(word) and min(word) >= 0 and not any(token % 1 for token in word) for word in words):
        raise ConfigError(f"BadWords({words}): each must be a list of at least one token, none negative")
    longest = max(map(len, words), default=1)
    rows = [[-1] * (longest - len(word)) + list(word) for word in words]
    return Partial(_bad_words, np.array(rows, np.int32).reshape(-1, longest))


def _bad_words(words: Any, logits: Logits, history: History) -> Logits:
    words = jnp.asarray(words)  # [W, n], of NumPy outside a compiled program
    before, last = words[None, :, :-1], words[None, :, -1]
    ends = ((before < 0) | (before == _last(history, before.shape[2])[:, None])).all(axis=-1)
    return _remove(logits, last, ends)


def LogitBias(bias: Any) -> Filter:
    """logits + bias: an array [V] or [B, V], or {token: bias}. A bias of -inf removes the token."""
    if not isinstance(bias, Mapping):
        return _Bias(None, bias)
    if min(bias, default=0) < 0 or any(token % 1 for token in bias) or not max(bias.values(), default=0) < np.inf:
        raise ConfigError(f"LogitBias({bias}): must be {{token: number below inf}}, tokens whole and not negative")
    return _Bias(np.fromiter(bias, np.int32), np.fromiter(bias.values(), np.float32))


@struct.dataclass
class _Bias:
    tokens: Any  # that have a bias, [n]; None: all have one
    bias: Any  # [n], or [V] or [B, V]

    def __call__(self, logits: Logits, history: Any) -> Logits:
        if self.tokens is None:
            return logits + jnp.atleast_2d(self.bias)
        return logits.at[:, self.tokens].add(self.bias, mode="drop")

    def named_tokens(self) -> list[int]:
        return [] if self.tokens is None else np.asarray(self.tokens).tolist()


@partial(filter_of, lambda length: length >= 0, "a whole number, at least 0", dtype=np.int32)
def MinLength(length: Any, stop_tokens: Any, logits: Logits, history: History) -> Logits:
    """Removes the stop tokens [n] (a negative one is none) while a row has fewer than `length` new tokens."""
    return _remove(logits, jnp.asarray(stop_tokens, jnp.int32)[None], _column(history.length - history.prompt < length))


def ForcedPrefix(tokens: Any) -> Filter:
    """The first new tokens are these, [P] or [B, P]; -1: any. The logit of a forced one is 0, also if it was removed before."""
    must = "tokens, or -1 where any may stand"
    return _Forced(check_number("ForcedPrefix", lambda tokens: tokens >= -1, must, tokens, np.int32))


@struct.dataclass
class _Forced:
    tokens: Any  # [P] or [B, P]

    def __call__(self, logits: Logits, history: History) -> Logits:
        tokens = jnp.broadcast_to(jnp.atleast_2d(self.tokens), (len(logits), self.tokens.shape[-1]))
        new = (history.length - history.prompt)[:, None]
        token = jnp.take_along_axis(tokens, new, axis=1, mode="fill", fill_value=-1)
        return jnp.where(token < 0, logits, jnp.where(jnp.arange(logits.shape[1])[None] == token, 0.0, -jnp.inf))

    def named_tokens(self) -> list[int]:
        return np.ravel(np.asarray(self.tokens)).tolist()


def _rest(mass) -> Array:
    """What probabilities may leave out that have to reach a mass: rounding does not add a token where they reach it exactly."""
    mass = _column(mass)
    return jnp.where(mass < 1, 1 - mass + ROUNDING, 0.0)


def _column(numbers) -> Array:
    """One number for all rows, or one per row, as [1, 1] or [B, 1]."""
    return jnp.reshape(jnp.asarray(numbers), (-1, 1))


def _least(values: Logits, enough: Callable) -> Float[Array, "B 1"]:
    """The least of a row's values t that is enough ([B, 1, 1] -> [B, 1]), as all above it are; the largest if none is."""

    # bisects the integers that have the order of float32: 32 sums over a row, where a sort takes 20 times as long
    def ordered(bits):
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # its own inverse

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # low + high would overflow
        fits = enough(lax.bitcast_convert_type(ordered(middle), jnp.float32)[..., None])
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    high = ordered(lax.bitcast_convert_type(values.max(axis=-1, keepdims=True), jnp.int32))
    low = jnp.full_like(high, -0x7F800001)  # -inf
    return lax.bitcast_convert_type(ordered(lax.fori_loop(0, 32, halve, (low, high))[1]), jnp.float32)


def _folded(x: Logits, fill: float) -> Float[Array, "B C 256"]:
    """A row in lines of 256: their sum is of vectors, and rounds far less than a sum of one after another."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 256)), constant_values=fill).reshape(len(x), -1, 256)


def _sum(folded: Float[Array, "B C 256"]) -> Float[Array, "B 1"]:
    return folded.sum(axis=1).sum(axis=1, keepdims=True)


def _last(history: History, n: int) -> Int[Array, "B n"]:
    """The last n tokens of each row, -2 before its beginning."""
    slots = history.length[:, None] - n + jnp.arange(n)[None]
    return jnp.where(slots < 0, -2, jnp.take_along_axis(history.tokens, jnp.maximum(slots, 0), axis=1))


def _counts(logits: Logits, history: History, start) -> Logits:
    """How often each token of the vocabulary stands in a row from slot `start` on."""
    slots = jnp.arange(history.tokens.shape[1])[None]
    return _mentions(logits, history.tokens, (slots >= start) & (slots < history.length[:, None]))


def _mentions(logits: Logits, tokens: Int[Array, "b n"], where: Bool[Array, "B m"]) -> Logits:
    """How often each token of the vocabulary is among a row's `tokens` where `where`; negative ones are none."""
    zeros, tokens = jnp.zeros_like(logits), jnp.where(where & (tokens >= 0), tokens, logits.shape[1])
    return jax.vmap(lambda zeros, tokens: zeros.at[tokens].add(1.0, mode="drop"))(zeros, tokens)  # a mesh may divide the rows


def _remove(logits: Logits, tokens: Int[Array, "b n"], where: Bool[Array, "B m"]) -> Logits:
    return jnp.where(_mentions(logits, tokens, where) > 0, -jnp.inf, logits)
