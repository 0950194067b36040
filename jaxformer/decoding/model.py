"""Opens a model for decoding: checks it against the prompts, and rounds lengths up.

Rounded lengths need few compiled programs.
"""

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

Tokens = Sequence[int] | Int[Array, " _"] | Int[np.ndarray, " _"]  # the tokens of one text
# several texts; in an array they have one length
Prompts = Sequence[Tokens] | Int[Array, "_ _"] | Int[np.ndarray, "_ _"]


class Model(NamedTuple):
    """A model, and the lengths and dtypes that its compiled programs share."""

    config: Any
    params: Any  # as `prepare` makes them
    dtype: Any
    cache_length: int  # largest number of tokens of a row
    source_length: int  # largest number of tokens of a source
    cache_dtype: Any
    ahead: int = 0  # number of tokens that its caches can take back


def open_model(
    config, params, prompts, max_tokens, sources, dtype=None, cache_dtype=None, ahead: int = 0
) -> Model:
    """The model for these prompts. With `max_tokens` None, the prompts are read but not continued.

    Raises ConfigError for prompts, sources or dtypes that do not fit the model.
    """
    wrong_dtypes = _wrong_dtypes(dtype, cache_dtype)
    problems = _problems(config, prompts, max_tokens, sources)
    for problem in itertools.chain(wrong_dtypes, problems):
        raise ConfigError(f"generate: {problem}")
    floats = (
        leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
    dtype = jnp.dtype(next(floats) if dtype is None else dtype)
    source_length = 0 if sources is None else length_of_sources(config, sources)
    longest = sum(_longest(prompts, 0 if max_tokens is None else max_tokens))
    cache_length = padded_length(longest, models.last_stack(config))
    if cache_dtype is None:
        cache_dtype = dtype
        if platform() == "cpu" and jax.__version_info__ < (0, 12):
            # to write one token, XLA:CPU then converts a 16-bit cache to 32 bits and back
            cache_dtype = jnp.promote_types(dtype, jnp.float32)
    return Model(
        config,
        prepare(config, params, dtype),
        dtype,
        cache_length,
        source_length,
        jnp.dtype(cache_dtype),
        ahead,
    )


def padded_length(length: int, config: ModelConfig) -> int:
    """The length to compile for: `length` rounded up by at most a quarter.

    So four programs serve all lengths from n to 2 n.
    """
    step = max(16, 1 << length.bit_length() >> 3)
    length = -(-length // step) * step
    return min(length, config.position_limit)


def rotation_end(model: Model, length: int) -> int:
    """The length to which a text of `length` tokens may grow before its cache must be read anew.

    The last token of a text is not read, so it may lie one position beyond the rotations.
    """
    until = rotation_until(models.last_stack(model.config).positions, length)
    return model.cache_length if until is None else until + 1


def check_rotations(name: str, config, prompts, max_tokens: int | Tokens) -> None:
    """Raises NotImplementedError if a text may outgrow the rotations of its cache.

    Only `generate` reads such a text anew.
    """
    positions = models.last_stack(config).positions
    counts = np.broadcast_to(max_tokens, len(prompts)).tolist()
    for prompt, count in zip(prompts, counts, strict=True):
        until = rotation_until(positions, len(prompt))
        if until is not None and len(prompt) + count > until + 1:
            problem = (
                f"{len(prompt)} + {count} new tokens exceed the original length of {positions}"
            )
            advice = (
                "its rotations change there; "
                f"give at most {max(until + 1 - len(prompt), 0)} new tokens, or use `generate`"
            )
            raise NotImplementedError(f"{name}: {problem}; {advice}")


def padded(tokens: Any, length: int) -> np.ndarray:
    """The tokens, then zeros, [1, length]."""
    return np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)))[None]


def length_of_sources(config: ModelConfig | EncoderDecoder, sources: Sequence[Any]) -> int:
    """The length to compile for: that of the longest source, rounded up for an encoder."""
    longest = max(map(len, sources))
    if isinstance(config, EncoderDecoder):
        return padded_length(longest, config.encoder)
    return longest


def source_field(config: ModelConfig | EncoderDecoder) -> str | None:
    """The attribute `source` of an embedding of your own: it reads sources as `inputs[source]`.

    None for an encoder-decoder, and for an embedding that reads tokens alone.
    """
    if isinstance(config, EncoderDecoder):
        return None
    return getattr(config.embedding, "source", None)


def reads_sources(config: ModelConfig | EncoderDecoder) -> bool:
    """Whether an encoder or an embedding reads `sources`."""
    return isinstance(config, EncoderDecoder) or source_field(config) is not None


def source_inputs(model: Model, sources: Sequence[Any]) -> dict[str, Any]:
    """The sources as arguments of `models.apply`: padded rows of tokens, or a batch of arrays."""
    if (field := source_field(model.config)) is not None:
        return {"inputs": {field: np.stack(sources)}}
    if are_arrays(sources):
        return {"source": np.stack(sources)}
    tokens = [padded(source, model.source_length) for source in sources]
    ids = [padded([1] * len(source), model.source_length) for source in sources]
    return {"source": np.concatenate(tokens), "source_segment_ids": np.concatenate(ids)}


def are_arrays(sources: Sequence[Any]) -> bool:
    """Whether the sources are arrays of several axes, such as images, and not tokens."""
    return any(np.ndim(source) > 1 for source in sources if not isinstance(source, list | tuple))


def _longest(texts, new_tokens: int | Tokens) -> tuple[int, int]:
    """(tokens, new tokens) of the text with the largest sum.

    `new_tokens` is one number for all texts, or one for each.
    """
    counts = np.broadcast_to(new_tokens, len(texts)).tolist()
    return max(zip(map(len, texts), counts, strict=True), key=sum)


def _wrong_dtypes(dtype, cache_dtype) -> Iterator[str]:
    """One line for each unsupported dtype. Integers would cut off fractions without an error."""
    floats = [jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")]
    if dtype is not None and jnp.dtype(dtype) not in floats:
        yield (
            f"dtype={jnp.dtype(dtype)}: expected float16, bfloat16, float32 or float64; "
            "`quantize` gives weights in 8 bits"
        )
    if cache_dtype is not None and jnp.dtype(cache_dtype) not in (*floats, jnp.dtype("int8")):
        yield (
            f"cache_dtype={jnp.dtype(cache_dtype)}: "
            "expected float16, bfloat16, float32, float64 or int8"
        )


def _problems(config, prompts, max_tokens: int | Tokens | None, sources) -> Iterator[str]:
    """One line for each argument that does not fit the model."""
    decoder = models.last_stack(config)
    pair = isinstance(config, EncoderDecoder)
    if is_explicit():
        yield "a mesh of Explicit axes is for training; put the parameters on one of Auto axes"
    if pair and sources is None:
        yield "an encoder-decoder needs `sources`"
    if sources is not None and not reads_sources(config):
        yield "only an encoder-decoder has `sources`, or an embedding with an attribute `source`"
    if sources is not None and (len(sources) != len(prompts) or not all(map(len, sources))):
        yield f"{len(prompts)} prompts need as many sources, none of them empty"
    if not all(hasattr(prompt, "__len__") for prompt in prompts):
        yield "prompts: expected a list of tokens for each text, such as [[1, 2, 3]]"
    if not prompts or not all(map(len, prompts)):
        yield "a prompt is empty; give at least one token (a start token, a newline)"
    if max_tokens is not None and (
        np.shape(max_tokens) not in ((), (len(prompts),)) or np.min(max_tokens) < 1
    ):
        yield f"max_tokens={max_tokens}: must be at least 1, of all prompts or of each"
    images = pair and isinstance(config.encoder.embedding, Patches)
    if images:
        expected = (*config.encoder.embedding.image, config.encoder.embedding.channels)
        yield from (
            f"source image {np.shape(image)}: expected {expected}"
            for image in sources
            if np.shape(image) != expected
        )
    arrays = sources is not None and are_arrays(sources)
    if sources is not None and not (pair or arrays):
        yield "sources: expected arrays of several axes, such as images"
    if arrays and len({np.shape(source) for source in sources}) > 1:
        shapes = ", ".join(map(str, sorted({np.shape(source) for source in sources})))
        yield f"sources: expected arrays of one shape, such as images; got {shapes}"
    if pair and not images and not arrays:
        yield from _problems_of_texts("source", sources, config.encoder, 0)
    new_tokens = 0 if max_tokens is None else max_tokens
    yield from _problems_of_texts("prompt", prompts, decoder, new_tokens)


def _problems_of_texts(
    name: str, texts, stack: ModelConfig, new_tokens: int | Tokens
) -> Iterator[str]:
    """One line for each token outside the vocabulary, and one if a text exceeds the positions."""
    for token in itertools.chain.from_iterable(texts):
        if not isinstance(token, SupportsIndex):
            yield (
                f"{name} token {token!r} is no whole number; "
                "a tokenizer's `encode` makes tokens of a text"
            )
        elif not 0 <= operator.index(token) < stack.vocab_size:
            yield f"{name} token {token} is outside the vocabulary of {stack.vocab_size}"
    longest, new = _longest(texts, new_tokens)
    limit = stack.position_limit
    if longest + new > limit:
        yield (
            f"{longest} {name}{f' + {new} new' if new else ''} tokens "
            f"exceed the {limit} learned positions"
        )
