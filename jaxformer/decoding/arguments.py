"""Checks the arguments of `generate`, `search`, `contrast` and `speculate`, and converts them."""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxformer import models
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.model import Model, Tokens
from jaxformer.decoding.sampling import Sampling
from jaxformer.errors import ConfigError


@struct.dataclass
class Settings:
    """How tokens are picked, and which ones end a row.

    These are arguments of the compiled program, so other numbers compile nothing.
    """

    filters: tuple
    temperature: Any
    stop_tokens: Any  # [n]; -1: none

    def filtered(self, logits: Array, history: History) -> Array:
        """The logits [B, V] after all filters, in float32."""
        return reduce(
            lambda logits, function: function(logits, history),
            self.filters,
            logits.astype(jnp.float32),
        )


def sampling_settings(
    model: Model, filters: Sequence[Filter], sampling: Sampling, stop_tokens: Tokens
) -> Settings:
    """The settings of these options; the filters of `sampling` come after the others."""
    stop_ids = padded_stop_tokens(stop_tokens, models.last_stack(model.config).vocab_size)
    all_filters = (*as_filters(filters, model), *sampling.filters())
    return Settings(all_filters, np.float32(sampling.temperature), stop_ids)


def as_filters(filters: Sequence[Filter], model: Model) -> tuple[Filter, ...]:
    """Filters as pytrees: a user's plain function is wrapped.

    Raises ConfigError for a filter whose result for one row is not logits [1, V], and for a filter
    that names a token outside the vocabulary.
    """
    array = jax.ShapeDtypeStruct
    logits = array((1, models.last_stack(model.config).vocab_size), jnp.float32)
    count = array((1,), jnp.int32)
    history = History(array((1, model.cache_length), jnp.int32), count, count)
    for number, f in enumerate(filters, 1):
        try:
            result = jax.eval_shape(lambda *args, f=f: f(*args), logits, history)
            if getattr(result, "shape", None) != logits.shape:
                raise TypeError(f"it makes {result} of logits {list(logits.shape)}")
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(
                f"filters: number {number} is no function (logits, history) -> logits: {error}"
            ) from error
        for token in getattr(f, "named_tokens", list)():
            if token >= logits.shape[1]:
                raise ConfigError(
                    f"filters: number {number}: token {token} is outside "
                    f"the vocabulary of {logits.shape[1]}"
                )
    return tuple(jax.tree_util.Partial(f) if jax.tree_util.all_leaves([f]) else f for f in filters)


def padded_stop_tokens(tokens: Any, vocabulary: int) -> np.ndarray:
    """The stop tokens, padded with -1 to a multiple of 8, so that another number compiles nothing.

    Raises ConfigError for a token outside the vocabulary, which would never stop a text, and for a
    number in place of a list.
    """
    tokens = as_lists(tokens)
    if np.ndim(tokens) != 1:
        raise ConfigError(f"stop_tokens={tokens}: must be a list of tokens, such as [{tokens}]")
    for token in tokens:
        if not isinstance(token, SupportsIndex):
            raise ConfigError(
                f"stop_tokens: {token!r} is no whole number; "
                "a tokenizer's `encode` makes tokens of a text"
            )
        if not 0 <= operator.index(token) < vocabulary:
            problem = f"is outside the vocabulary of {vocabulary}, so no text would stop there"
            raise ConfigError(
                f"stop_tokens: {token} {problem}; leave it out, "
                "or give the id of this model's tokenizer"
            )
    length = 8 * max(1, -(-len(tokens) // 8))
    return np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)), constant_values=-1)


def as_lists(tokens: Any) -> Any:
    """Tokens of one text or of several, with arrays as lists. Other values are unchanged."""
    if hasattr(tokens, "tolist"):
        return tokens.tolist()
    if isinstance(tokens, list | tuple):
        return [text.tolist() if hasattr(text, "tolist") else text for text in tokens]
    return tokens


def as_key(key: Any) -> Array:
    """One typed key of random numbers; an old `jax.random.PRNGKey` is wrapped. None: key(0).

    Raises ConfigError for a value that is not one key.
    """
    if key is None:
        return jax.random.key(0)
    is_raw = getattr(key, "dtype", None) == jnp.uint32
    if is_raw and jnp.shape(key) == jnp.shape(jax.random.key_data(jax.random.key(0))):
        return jax.random.wrap_key_data(key)
    if not jnp.issubdtype(getattr(key, "dtype", int), jax.dtypes.prng_key) or jnp.shape(key):
        shown = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise ConfigError(f"generate: key={shown}: expected one key, such as jax.random.key(0)")
    return key


def rows_for(rows: int, count: int) -> int:
    """The number of rows for `count` texts: the next power of two, but at most `rows`."""
    return min(rows, 1 << (count - 1).bit_length())


def check_logits(broken: Any, index: int) -> None:
    """Raises ConfigError if logits of prompt `index` were NaN, so that no token could be picked."""
    if broken:
        problem = "the model's logits are not numbers (NaN)"
        advice = (
            "look at its parameters (a run that diverged?) "
            "and at `dtype` (float16 overflows at 65,504)"
        )
        raise ConfigError(f"generate: prompt {index}: {problem}; {advice}")
