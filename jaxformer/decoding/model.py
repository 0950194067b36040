"""A model as decoding takes it: checked against the prompts, with lengths that few programs serve."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxformer import models
from jaxformer.decoding.steps import prepare
from jaxformer.errors import ConfigError
from jaxformer.models.config import EncoderDecoder, ModelConfig, Patches
from jaxformer.ops.positions import rotation_until
from jaxformer.sharding import is_explicit, platform

Tokens = Sequence[int] | Int[Array, " _"] | Int[np.ndarray, " _"]  # of a text
Prompts = Sequence[Tokens] | Int[Array, "_ _"] | Int[np.ndarray, "_ _"]  # an array: of texts of one length


class Model(NamedTuple):
    """What the compiled programs of decoding have in common."""

    config: Any
    params: Any  # as `prepare` makes them
    dtype: Any
    cache_length: int  # most tokens of a row
    source_length: int  # most tokens of a source
    cache_dtype: Any
    ahead: int = 0  # how many tokens its caches can take back


def open_model(config, params, prompts, max_tokens, sources, dtype=None, cache_dtype=None, ahead: int = 0) -> Model:
    """The model for these prompts, which are only read if `max_tokens` is None. ConfigError for what does not fit it."""
    problems = _wrong_dtypes(dtype, cache_dtype), _problems(config, prompts, max_tokens, sources)
    for problem in itertools.chain(*problems):
        raise ConfigError(f"generate: {problem}")
    floats = (leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating))
    dtype = jnp.dtype(next(floats) if dtype is None else dtype)
    source_length = bucket(max(map(len, sources)), config.encoder) if sources is not None else 0
    cache_length = bucket(sum(_longest(prompts, 0 if max_tokens is None else max_tokens)), models.last_stack(config))
    if cache_dtype is None:  # to write one token, XLA:CPU makes a cache of 16 bits one of 32, and back
        cache_dtype = jnp.promote_types(dtype, jnp.float32) if platform() == "cpu" else dtype
    return Model(config, prepare(config, params, dtype), dtype, cache_length, source_length, jnp.dtype(cache_dtype), ahead)


def bucket(length: int, config: ModelConfig) -> int:
    """The length to compile for: at most a quarter more, so that four programs serve all lengths from n to 2 n."""
    step = max(16, 1 << length.bit_length() >> 3)
    length = -(-length // step) * step
    return min(length, config.position_limit)


def rotation_end(model: Model, length: int) -> int:
    """How long a text of `length` tokens may grow until its cache has to be read anew: its last token is not read."""
    until = rotation_until(models.last_stack(model.config).positions, length)
    return model.cache_length if until is None else until + 1


def check_rotations(name: str, config, prompts, max_tokens: int | Tokens) -> None:
    """Raises NotImplementedError where a text may outgrow the rotations of its cache, which only `generate` reads anew."""
    positions = models.last_stack(config).positions
    for prompt, count in zip(prompts, np.broadcast_to(max_tokens, len(prompts)).tolist(), strict=True):
        until = rotation_until(positions, len(prompt))
        if until is not None and len(prompt) + count > until + 1:
            problem = f"{len(prompt)} + {count} new tokens exceed the original length of {positions}"
            advice = f"its rotations change there; give at most {max(until + 1 - len(prompt), 0)} new tokens, or use `generate`"
            raise NotImplementedError(f"{name}: {problem}; {advice}")


def _longest(texts, more: int | Tokens) -> tuple[int, int]:
    """(tokens, new tokens) of the text that is the longest with those that follow: so many for all, or for each."""
    return max(zip(map(len, texts), np.broadcast_to(more, len(texts)).tolist(), strict=True), key=sum)


def _wrong_dtypes(dtype, cache_dtype) -> Iterator[str]:
    """One line for each precision in which numbers cannot be kept. Integers would cut them off without an error."""
    floats = [jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")]
    if dtype is not None and jnp.dtype(dtype) not in floats:
        yield f"dtype={jnp.dtype(dtype)}: expected float16, bfloat16, float32 or float64; `quantize` gives weights in 8 bits"
    if cache_dtype is not None and jnp.dtype(cache_dtype) not in (*floats, jnp.dtype("int8")):
        yield f"cache_dtype={jnp.dtype(cache_dtype)}: expected float16, bfloat16, float32, float64 or int8"


def _problems(config, prompts, max_tokens: int | Tokens | None, sources) -> Iterator[str]:
    """One line for each thing that does not fit the model."""
    decoder, pair = models.last_stack(config), isinstance(config, EncoderDecoder)
    if is_explicit():
        yield "a mesh of Explicit axes is for training; put the parameters on one of Auto axes"
    if pair != (sources is not None):
        yield f"{'an encoder-decoder needs' if pair else 'only an encoder-decoder has'} `sources`"
    if pair and (len(sources) != len(prompts) or not all(map(len, sources))):
        yield f"{len(prompts)} prompts need as many sources, none of them empty"
    if not all(hasattr(prompt, "__len__") for prompt in prompts):
        yield "prompts: expected a list of tokens for each text, such as [[1, 2, 3]]"
    if not prompts or not all(map(len, prompts)):
        yield "a prompt is empty; give at least one token (a start token, a newline)"
    if max_tokens is not None and (np.shape(max_tokens) not in ((), (len(prompts),)) or np.min(max_tokens) < 1):
        yield f"max_tokens={max_tokens}: must be at least 1, of all prompts or of each"
    images = pair and isinstance(config.encoder.embedding, Patches)
    if images:
        expected = (*config.encoder.embedding.image, config.encoder.embedding.channels)
        yield from (f"source image {np.shape(image)}: expected {expected}" for image in sources if np.shape(image) != expected)
    texts = [("source", sources, config.encoder, 0)] if pair and not images else []
    for name, rows, stack, new in (*texts, ("prompt", prompts, decoder, 0 if max_tokens is None else max_tokens)):
        for token in itertools.chain.from_iterable(rows):
            whole = isinstance(token, SupportsIndex)
            if not whole:
                yield f"{name} token {token!r} is no whole number; a tokenizer's `encode` makes tokens of a text"
            elif not 0 <= operator.index(token) < stack.vocab_size:
                yield f"{name} token {token} is outside the vocabulary of {stack.vocab_size}"
        (longest, new), limit = _longest(rows, new), stack.position_limit
        if longest + new > limit:
            yield f"{longest} {name}{f' + {new} new' if new else ''} tokens exceed the {limit} learned positions"
