"""Filters: functions `(logits, history) -> logits`, applied in order; -inf removes a token.

`TopK(50)` is a filter, and so is any function of logits and history. The numbers of a filter are
leaves of a pytree, so they are arguments of the compiled program: another temperature compiles
nothing. The n of an n-gram is static. If you call a filter yourself, its number may be [B], one for
each row. `generate` and the other functions of `decoding` refill and repeat rows, so they need one
number for all rows.

A filter that makes some tokens likely, or forces them, may list them by a method `named_tokens() ->
tokens`. `generate` and the other functions then refuse tokens outside the model's vocabulary.
`LogitBias` and `ForcedPrefix` have this method.
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
    "BadWords",
    "ForcedPrefix",
    "Frequency",
    "LogitBias",
    "MinLength",
    "MinP",
    "NoRepeatNgram",
    "Presence",
    "Repetition",
    "Temperature",
    "TopK",
    "TopP",
    "Typical",
]


ROUNDING = 3e-7  # rounding error of a sum of probabilities in float32


@struct.dataclass
class History:
    """The tokens of each row so far."""

    tokens: Any  # [B, S]: the prompt from position 0 on, then new tokens; undefined beyond `length`
    length: Any  # [B]: tokens in use
    prompt: Any  # [B]: tokens of the prompt

    def extend(self, tokens: Int[Array, "B n"], count: Int[Array, " B"]) -> "History":
        """Appends to each row the first `count` of its n `tokens`."""
        i = jnp.arange(tokens.shape[1])[None]
        # position S is outside, so nothing is written there
        S = self.tokens.shape[1]
        positions = jnp.where(i < count[:, None], self.length[:, None] + i, S)
        tokens = self.tokens.at[jnp.arange(len(tokens))[:, None], positions].set(
            tokens.astype(self.tokens.dtype), mode="drop"
        )
        return History(tokens, self.length + count.astype(self.length.dtype), self.prompt)


Logits = Float[Array, "B V"]
Filter = Callable[[Array, History], Array]  # (logits [B, V] float32, history) -> logits


def filter_of(
    valid: Callable, must: str, function: Callable, dtype: Any = np.float32
) -> Callable[..., Filter]:
    """Makes a constructor number -> filter of a function (number, logits, history) -> logits.

    The constructor raises ConfigError for a number that is not `valid`; `must` says what is.
    """

    def construct(number, *more):
        checked = check_number(function.__name__, valid, must, number, dtype)
        return Partial(function, checked, *more)

    construct.__name__ = function.__name__
    construct.__doc__ = function.__doc__
    return construct


def check_number(name: str, valid: Callable, must: str, number: Any, dtype: Any) -> Any:
    """The number or numbers of a filter in `dtype`. A tracer is returned unchanged.

    Raises ConfigError for a number that is not `valid`.
    """
    if not isinstance(number, int | float | Sequence | np.ndarray | np.generic):
        return number
    values = np.asarray(number)
    is_whole = np.isfinite(values) & (np.floor(values) == values)
    if not np.all(valid(values)) or (dtype == np.int32 and not np.all(is_whole)):
        raise ConfigError(f"{name}({number}): must be {must}")
    return np.asarray(number, dtype)


@partial(
    filter_of,
    lambda t: (t == 0) | (t >= 1e-6) & (t < np.inf),
    "0 (greedy), or finite and at least 1e-6",
)
def Temperature(t: Any, logits: Logits, history: Any) -> Logits:
    """logits / t. A row with t = 0 is unchanged: `sampling.draw` takes its likeliest token."""
    # t is at least 1e-6: logits / 1e-40 would be inf, and the drawn tokens noise
    return logits / _column(jnp.where(t == 0, 1.0, t))


@partial(filter_of, lambda k: k >= 1, "a whole number, at least 1", dtype=np.int32)
def TopK(k: Any, logits: Logits, history: Any) -> Logits:
    """Keeps the k largest logits, and those equal to the k-th. Fan et al. 2018."""
    # the barrier computes the logits once, so that equal logits stay equal
    logits = lax.optimization_barrier(logits)
    k = _column(k)
    x = _folded(logits, -jnp.inf)
    kth = _least(logits, lambda t: _sum(jnp.where(x > t, 1.0, 0.0)) < k)
    return jnp.where(logits >= kth, logits, -jnp.inf)


@partial(filter_of, lambda p: (p > 0) & (p <= 1), "in (0, 1]")
def TopP(p: Any, logits: Logits, history: Any) -> Logits:
    """Keeps the smallest set of likeliest tokens whose total probability reaches p.

    Of equally likely tokens it keeps the first. Holtzman et al. 2019, arXiv:1904.09751.
    """
    # sums start from the least likely token. A float32 sum that starts from the likeliest reaches 1
    # too early, and p = 1 would remove the remaining tokens
    probabilities = lax.optimization_barrier(jax.nn.softmax(logits, axis=-1))
    removable = _removable(p)
    x = _folded(probabilities, 0.0)
    least = _least(probabilities, lambda t: _sum(jnp.where(x <= t, x, 0.0)) > removable)
    ties = probabilities == least
    below = _sum(jnp.where(x < least[..., None], x, 0.0))
    count = jnp.sum(ties, axis=-1, keepdims=True)
    # how many of the ties are removed
    removed = jnp.clip(jnp.floor((removable - below) / least).astype(jnp.int32), 0, count - 1)

    def first_ties():
        return ties & (jnp.cumsum(ties, axis=-1) <= count - removed)

    ties = lax.cond((removed > 0).any(), first_ties, lambda: ties)  # seldom needed, and slow
    return jnp.where((probabilities > least) | ties, logits, -jnp.inf)


@partial(filter_of, lambda p: (p >= 0) & (p <= 1), "in [0, 1]")
def MinP(p: Any, logits: Logits, history: Any) -> Logits:
    """Keeps tokens at least p times as likely as the likeliest one; p = 0 keeps all tokens.

    Nguyen et al. 2024, arXiv:2407.01082.
    """
    relative = logits - logits.max(axis=-1, keepdims=True)  # log(probability / largest one)
    return jnp.where(relative >= jnp.log(_column(p)), logits, -jnp.inf)


@partial(filter_of, lambda mass: (mass > 0) & (mass <= 1), "in (0, 1]")
def Typical(mass: Any, logits: Logits, history: Any) -> Logits:
    """Keeps the tokens of smallest |-log p - entropy| whose total probability reaches `mass`.

    Ties with the last of them are kept too. Meister et al. 2022, arXiv:2202.00666.
    """
    logs = jax.nn.log_softmax(logits, axis=-1)
    removable = _removable(mass)
    p = _folded(jnp.exp(logs), 0.0)
    entropy = -_sum(jnp.where(p > 0, p * _folded(logs, 0.0), 0.0))
    distance = lax.optimization_barrier(jnp.abs(-logs - entropy))
    x = _folded(distance, jnp.inf)
    largest = _least(distance, lambda t: _sum(jnp.where(x > t, p, 0.0)) <= removable)
    return jnp.where(distance <= largest, logits, -jnp.inf)


@partial(filter_of, lambda penalty: (penalty > 0) & (penalty < np.inf), "positive and finite")
def Repetition(penalty: Any, logits: Logits, history: History) -> Logits:
    """logit / penalty for a positive logit, logit * penalty for a negative one, of earlier tokens.

    Prompt tokens count as earlier tokens. Keskar et al. 2019, arXiv:1909.05858.
    """
    penalised = jnp.where(logits < 0, logits * _column(penalty), logits / _column(penalty))
    return jnp.where(_counts(logits, history, 0) > 0, penalised, logits)


@partial(filter_of, np.isfinite, "finite")
def Presence(penalty: Any, logits: Logits, history: History) -> Logits:
    """logit - penalty for each token among the new ones: `presence_penalty` of OpenAI's API."""
    return logits - _column(penalty) * (_counts(logits, history, history.prompt[:, None]) > 0)


@partial(filter_of, np.isfinite, "finite")
def Frequency(penalty: Any, logits: Logits, history: History) -> Logits:
    """logit - penalty * count among the new tokens: `frequency_penalty` of OpenAI's API."""
    return logits - _column(penalty) * _counts(logits, history, history.prompt[:, None])


@struct.dataclass
class NoRepeatNgram:
    """Removes each token that would repeat an n-gram of the row, including its prompt.

    Raises ConfigError for an n that is no whole number of at least 1. Paulus et al. 2017,
    arXiv:1705.04304.
    """

    n: int = struct.field(pytree_node=False)

    def __post_init__(self):
        if not isinstance(self.n, numbers.Integral) or self.n < 1:
            raise ConfigError(f"NoRepeatNgram({self.n}): must be a whole number of at least 1")

    def __call__(self, logits: Logits, history: History) -> Logits:
        n = self.n
        tokens = history.tokens
        last = _last(history, n - 1)
        # [B, S]: whether the n-gram at this position begins with the last n - 1 tokens
        repeats = jnp.arange(tokens.shape[1])[None] + n <= history.length[:, None]
        for i in range(n - 1):
            repeats &= jnp.roll(tokens, -i, axis=1) == last[:, i, None]
        return _remove(logits, jnp.roll(tokens, 1 - n, axis=1), repeats)


def BadWords(words: Sequence[Sequence[int]]) -> Filter:
    """Removes the last token of a word in each row that ends with the word's earlier tokens.

    Each of `words` is a list of tokens. Raises ConfigError for an empty word or a negative token.
    """
    if not all(
        len(word) and min(word) >= 0 and not any(token % 1 for token in word) for word in words
    ):
        raise ConfigError(
            f"BadWords({words}): each must be a list of at least one token, none negative"
        )
    longest = max(map(len, words), default=1)
    padded = [[-1] * (longest - len(word)) + list(word) for word in words]
    return Partial(_bad_words, np.array(padded, np.int32).reshape(-1, longest))


def _bad_words(words: Any, logits: Logits, history: History) -> Logits:
    words = jnp.asarray(words)  # [W, n]; a NumPy array outside a compiled program
    beginning = words[None, :, :-1]
    row_end = _last(history, beginning.shape[2])[:, None]
    is_there = ((beginning < 0) | (beginning == row_end)).all(axis=-1)
    return _remove(logits, words[None, :, -1], is_there)


def LogitBias(bias: Any) -> Filter:
    """logits + bias, where bias is [V], [B, V] or {token: bias}. A bias of -inf removes the token.

    Raises ConfigError for a bias of inf or NaN, and for a token that is negative or not whole.
    """
    if not isinstance(bias, Mapping):
        return _Bias(None, bias)
    if (
        min(bias, default=0) < 0
        or any(token % 1 for token in bias)
        or not max(bias.values(), default=0) < np.inf
    ):
        raise ConfigError(
            f"LogitBias({bias}): must be {{token: number below inf}}, tokens whole and not negative"
        )
    return _Bias(np.fromiter(bias, np.int32), np.fromiter(bias.values(), np.float32))


@struct.dataclass
class _Bias:
    tokens: Any  # [n], the tokens that have a bias; None: all tokens
    bias: Any  # [n], or [V] or [B, V]

    def __call__(self, logits: Logits, history: Any) -> Logits:
        if self.tokens is None:
            return logits + jnp.atleast_2d(self.bias)
        return logits.at[:, self.tokens].add(self.bias, mode="drop")

    def named_tokens(self) -> list[int]:
        return [] if self.tokens is None else np.asarray(self.tokens).tolist()


@partial(filter_of, lambda length: length >= 0, "a whole number, at least 0", dtype=np.int32)
def MinLength(length: Any, stop_tokens: Any, logits: Logits, history: History) -> Logits:
    """Removes the stop tokens [n] while a row has fewer than `length` new tokens.

    Negative stop tokens are ignored.
    """
    return _remove(
        logits,
        jnp.asarray(stop_tokens, jnp.int32)[None],
        _column(history.length - history.prompt < length),
    )


def ForcedPrefix(tokens: Any) -> Filter:
    """Forces the first P new tokens, [P] or [B, P]; -1 allows any token at that place.

    The logit of a forced token is 0, even if an earlier filter removed it. Raises ConfigError for a
    number below -1 or not whole.
    """
    must = "tokens, or -1 where any may stand"
    numbers = check_number("ForcedPrefix", lambda tokens: tokens >= -1, must, tokens, np.int32)
    return _Forced(numbers)


@struct.dataclass
class _Forced:
    tokens: Any  # [P] or [B, P]

    def __call__(self, logits: Logits, history: History) -> Logits:
        tokens = jnp.broadcast_to(jnp.atleast_2d(self.tokens), (len(logits), self.tokens.shape[-1]))
        new = (history.length - history.prompt)[:, None]
        token = jnp.take_along_axis(tokens, new, axis=1, mode="fill", fill_value=-1)
        forced = jnp.where(jnp.arange(logits.shape[1])[None] == token, 0.0, -jnp.inf)
        return jnp.where(token < 0, logits, forced)

    def named_tokens(self) -> list[int]:
        return np.ravel(np.asarray(self.tokens)).tolist()


def _removable(mass) -> Array:
    """The probability that may be left out: 1 - mass + rounding error, or 0 for a mass of 1.

    The rounding error is added so that no further token is kept where the sum equals the mass.
    """
    mass = _column(mass)
    return jnp.where(mass < 1, 1 - mass + ROUNDING, 0.0)


def _column(numbers) -> Array:
    """One number for all rows as [1, 1], or one for each row as [B, 1]."""
    return jnp.reshape(jnp.asarray(numbers), (-1, 1))


def _least(values: Logits, enough: Callable) -> Float[Array, "B 1"]:
    """The smallest value t of each row with enough(t), or the row's largest value if there is none.

    `enough` maps [B, 1, 1] to [B, 1]. It must hold for every value above one for which it holds.
    """

    # bisects the integers that are ordered as float32 is: 32 sums over a row; a sort takes 20 times
    # as long
    def ordered(bits):
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # its own inverse

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # low + high would overflow
        fits = enough(lax.bitcast_convert_type(ordered(middle), jnp.float32)[..., None])
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    high = ordered(lax.bitcast_convert_type(values.max(axis=-1, keepdims=True), jnp.int32))
    low = jnp.full_like(high, -0x7F800001)  # -inf
    _, smallest = lax.fori_loop(0, 32, halve, (low, high))
    return lax.bitcast_convert_type(ordered(smallest), jnp.float32)


def _folded(x: Logits, fill: float) -> Float[Array, "B C 256"]:
    """Each row in lines of 256, padded with `fill`.

    The sum over lines adds vectors, and it rounds far less than a sum of one number after another.
    """
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 256)), constant_values=fill).reshape(
        len(x), -1, 256
    )


def _sum(folded: Float[Array, "B C 256"]) -> Float[Array, "B 1"]:
    return folded.sum(axis=1).sum(axis=1, keepdims=True)


def _last(history: History, n: int) -> Int[Array, "B n"]:
    """The last n tokens of each row; -2 stands before its beginning."""
    positions = history.length[:, None] - n + jnp.arange(n)[None]
    tokens = jnp.take_along_axis(history.tokens, jnp.maximum(positions, 0), axis=1)
    return jnp.where(positions < 0, -2, tokens)


def _counts(logits: Logits, history: History, start) -> Logits:
    """The count of each token of the vocabulary in a row, from position `start` on."""
    positions = jnp.arange(history.tokens.shape[1])[None]
    counted = (positions >= start) & (positions < history.length[:, None])
    return _mentions(logits, history.tokens, counted)


def _mentions(logits: Logits, tokens: Int[Array, "b n"], where: Bool[Array, "B m"]) -> Logits:
    """The count of each token of the vocabulary among a row's `tokens` where `where` is True.

    Negative tokens are ignored.
    """
    zeros = jnp.zeros_like(logits)
    tokens = jnp.where(where & (tokens >= 0), tokens, logits.shape[1])
    # vmap, because a mesh may divide the rows
    return jax.vmap(lambda zeros, tokens: zeros.at[tokens].add(1.0, mode="drop"))(zeros, tokens)


def _remove(logits: Logits, tokens: Int[Array, "b n"], where: Bool[Array, "B m"]) -> Logits:
    return jnp.where(_mentions(logits, tokens, where) > 0, -jnp.inf, logits)
