"""Sampled continuations of prompts: `generate` and `stream`.

Both call `serve`. It decodes a batch of rows, and refills each row that ends with the next prompt.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import masks, models
from jaxformer.decoding.arguments import (
    Settings,
    as_key,
    as_lists,
    check_logits,
    rows_for,
    sampling_settings,
)
from jaxformer.decoding.cache import Cache, init_cache
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.model import (
    Model,
    Prompts,
    Tokens,
    open_model,
    padded,
    padded_length,
    rotation_end,
    source_inputs,
)
from jaxformer.decoding.sampling import Sampling
from jaxformer.decoding.state import DecodeState, append, end_row, insert, new_tokens, repeat
from jaxformer.decoding.steps import decode_step, prefill
from jaxformer.errors import check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.sharding import is_split, on_host

CHUNK = 1024  # tokens of one prompt that are read at a time
BATCH_TOKENS = 16 * CHUNK  # tokens of all prompts that are read at a time
SLOTS = 128  # the length of a cache is a multiple of this


def generate(
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompts: Prompts,
    max_tokens: int | Tokens,
    *,
    sources: Sequence[Any] | None = None,
    sampling: Sampling = Sampling(),
    filters: Sequence[Filter] = (),
    key: Array | None = None,
    stop_tokens: Tokens = (),
    stop: Callable[[list[int]], int | None] | None = None,
    rows: int = 16,
    dtype=None,
    cache_dtype=None,
) -> list[list[int]]:
    """Continues each prompt by at most `max_tokens` tokens, up to the first stop token.

    The stop token is left out. `max_tokens` is one number for all prompts, or one for each. A text
    also ends where filters leave no token. `stop(new tokens)` returns how many of a row's new
    tokens to keep, or None to go on.

    For an encoder-decoder, `sources` are the tokens of the encoder, or images `[height, width, C]`,
    and a prompt is the beginning of the target (T5: [0]). If `config.embedding` has an attribute
    `source`, they are what it reads as `inputs[source]`, such as the images of `zoo.llava`.
    `filters` (from `decoding.filters`, or your own functions) come before those of `sampling`.
    `cache_dtype` is the dtype of keys and values, such as int8.

    At most `rows` texts are decoded at a time; a row that ends takes the next prompt. A row's
    tokens do not depend on its neighbours. The last bits of its logits do: where the neighbours
    fill more slots of the cache, in steps of 128, and where the first prompts are read together.

    Raises ConfigError for an empty prompt, a token outside the vocabulary, more tokens than a table
    of learned positions has rows, and logits that are NaN.
    """
    request = Request(
        prompts=prompts,
        max_tokens=max_tokens,
        sources=sources,
        sampling=sampling,
        filters=filters,
        key=key,
        stop_tokens=stop_tokens,
        stop=stop,
        rows=rows,
        dtype=dtype,
        cache_dtype=cache_dtype,
        every=None if stop is None else 8,
    )
    outs = {index: tokens for index, tokens, is_done in serve(config, params, request) if is_done}
    return [outs[i] for i in range(len(prompts))]


def stream(
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompt: Tokens,
    max_tokens: int,
    *,
    every: int = 1,
    source: Any = None,
    sampling: Sampling = Sampling(),
    filters: Sequence[Filter] = (),
    key: Array | None = None,
    stop_tokens: Tokens = (),
    stop: Callable[[list[int]], int | None] | None = None,
    dtype=None,
    cache_dtype=None,
) -> Iterator[list[int]]:
    """Yields the tokens of `generate` for one prompt as they are made, `every` tokens at a time."""
    check_whole("stream: every", every)
    request = Request(
        prompts=[prompt],
        max_tokens=max_tokens,
        sources=None if source is None else [source],
        sampling=sampling,
        filters=filters,
        key=key,
        stop_tokens=stop_tokens,
        stop=stop,
        rows=1,
        dtype=dtype,
        cache_dtype=cache_dtype,
        every=every,
    )
    shown = 0
    for _, tokens, _ in serve(config, params, request):
        if tokens[shown:]:
            yield tokens[shown:]
        shown = max(shown, len(tokens))


class Request(NamedTuple):
    """The arguments of `generate`, and how often the new tokens are looked at."""

    prompts: Any
    max_tokens: Any
    sources: Any
    sampling: Sampling
    filters: Sequence[Filter]
    key: Any
    stop_tokens: Any
    stop: Callable[[list[int]], int | None] | None
    rows: int
    dtype: Any
    cache_dtype: Any
    every: int | None  # number of steps between two looks; None: only when a row ends


def serve(
    config: ModelConfig | EncoderDecoder, params: Any, request: Request
) -> Iterator[tuple[int, list[int], bool]]:
    """Yields (number of a prompt, its new tokens so far, whether the text is complete).

    It does so for every row, after each `every` steps and whenever a row ends.
    """
    check_whole("generate: rows", request.rows)
    prompts = as_lists(request.prompts)
    sources = request.sources
    stop_tokens = as_lists(request.stop_tokens)
    key = as_key(request.key)
    model = open_model(
        config, params, prompts, request.max_tokens, sources, request.dtype, request.cache_dtype
    )
    # sums over another number of slots would round differently
    model = model._replace(cache_length=-(-model.cache_length // SLOTS) * SLOTS)
    settings = jax.device_put(
        sampling_settings(model, request.filters, request.sampling, stop_tokens)
    )
    counts = np.broadcast_to(request.max_tokens, len(prompts))
    rows = rows_for(request.rows, len(prompts))
    queue = deque(range(len(prompts)))
    open_texts: dict[int, Text] = {}  # row -> the text that it continues
    to_read: dict[int, Text] = {}  # row -> a text that must be read before the next step
    state: Any = None  # a DecodeState once the first texts are read
    while queue or open_texts:
        for row in range(rows):
            if row not in open_texts and queue:
                open_texts[row] = text_of(queue.popleft(), prompts, sources, counts)
                to_read[row] = open_texts[row]
        steps = request.every or 2**30
        if to_read:
            state = fill_rows(model, state, to_read, rows, key, settings)
            to_read = {}
            if request.every is not None:
                steps = 0  # the first token is shown at once
        least = len(open_texts) if queue else 1  # the next prompt takes the first row that ends
        limits = jax.device_put((np.int32(steps), np.int32(least)))
        state = _run(model.config, model.dtype, model.params, state, settings, *limits)
        history, done, ends, broken = on_host((state.history, state.done, state.end, state.broken))
        for row, text in list(open_texts.items()):
            check_logits(broken[row], text.index)
            tokens = new_tokens(history, row, stop_tokens)
            is_complete = bool(done[row])
            keep = None if request.stop is None else request.stop(tokens)
            if keep is not None:
                tokens = tokens[:keep]
                is_complete = True
                state = end_row(state, row)
            elif is_complete and has_outgrown(history, row, ends[row], text, stop_tokens):
                so_far = history.tokens[row, : history.length[row]].tolist()
                to_read[row] = text._replace(tokens=so_far)
                is_complete = False
            if is_complete:
                del open_texts[row]
            yield text.index, tokens, is_complete


class Text(NamedTuple):
    """A text that is read into a row and continued there."""

    index: int  # the number of the prompt; the row's random numbers depend on it
    tokens: list[int]
    source: Any
    prompt_length: int  # the number of tokens that the user gave
    limit: int  # the largest number of tokens of the text


def text_of(index: int, prompts: Any, sources: Any, counts: np.ndarray) -> Text:
    """The text that begins with prompt `index`; `counts` are the largest numbers of new tokens."""
    prompt = list(prompts[index])
    source = None if sources is None else sources[index]
    return Text(index, prompt, source, len(prompt), len(prompt) + int(counts[index]))


def has_outgrown(history: History, row: int, end: Any, text: Text, stop_tokens: Any) -> bool:
    """Whether a row ended only because its text needs the rotations of a longer text."""
    length = history.length[row]
    last = int(history.tokens[row, length - 1])
    return bool(length == end < text.limit) and last not in stop_tokens


def fill_rows(
    model: Model,
    state: DecodeState | None,
    texts: dict[int, Text],
    rows: int,
    key: Array,
    settings: Settings,
) -> DecodeState:
    """The state after `texts` {row: text} are read, each with its first new token.

    Rows that never had a text are done.
    """
    batch = list(texts.values())
    if state is None and fit_one_batch([len(text.tokens) for text in batch], rows):
        # the rows after the texts hold copies of the first text
        copies = batch[:1] * (rows - len(batch))
        return first_tokens(model, batch + copies, len(batch), key, settings)
    for row, text in texts.items():
        single = first_tokens(model, [text], 1, key, settings)
        if state is None:
            state = replace(repeat(rows, single), done=jax.device_put(np.ones(rows, bool)))
        state = insert(state, jax.device_put(np.int32(row)), single)
    assert state is not None
    return state


def first_tokens(
    model: Model, texts: list[Text], count: int, key: Array, settings: Settings
) -> DecodeState:
    """A row for each text, with its first new token. Rows from `count` on are done."""
    prompts = [text.tokens for text in texts]
    sources = None if texts[0].source is None else [text.source for text in texts]
    prompt_lengths = [text.prompt_length for text in texts]
    logits, cache, history = read(model, prompts, sources, prompt_lengths)
    # a row also ends where its text outgrows the rotations of its cache
    ends = [min(text.limit, rotation_end(model, len(text.tokens))) for text in texts]
    indices = [text.index for text in texts]
    numbers = jax.device_put(np.array([ends, indices], np.int32))
    is_unused = jax.device_put(np.arange(len(texts)) >= count)
    return _first_tokens(logits, cache, history, *numbers, is_unused, key, settings)


def fit_one_batch(lengths: Sequence[int], rows: int) -> bool:
    """Whether prompts of these lengths are read as one batch of `rows` rows.

    They are if there are several, of similar length, on one device. Otherwise each is read alone:
    a batch is as long as its longest prompt, so a short prompt would pay for a long one.
    """
    fits = max(lengths) <= CHUNK and rows * max(lengths) <= BATCH_TOKENS
    return len(lengths) > 1 and fits and max(lengths) <= 2 * min(lengths) and not is_split()


def read(
    model: Model,
    prompts: list[list[int]],
    sources: Sequence[Any] | None,
    counts: Sequence[int] | None = None,
) -> tuple[Any, Any, History]:
    """Reads prompts in pieces of `CHUNK` tokens: (logits after each prompt, cache, history).

    Several prompts must fit one piece each. Under a mask that shows later tokens (a prefix, global
    tokens) a prompt is read whole, because a piece cannot see the tokens after it. The first
    `counts` tokens of each prompt are the user's; None: all of them.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    stack = models.last_stack(model.config)
    is_causal = all(map(masks.is_causal, stack.masks))
    piece_length = CHUNK if is_causal else max(longest, CHUNK)
    assert len(prompts) == 1 or longest <= piece_length
    sizes = model.cache_length, model.cache_dtype, model.ahead
    options = {} if sources is None else source_inputs(model, sources)
    logits = None
    cache = None
    for first in range(0, longest, piece_length):
        pieces = [prompt[first : first + piece_length] for prompt in prompts]
        width = min(padded_length(max(map(len, pieces)), stack), max(piece_length, CHUNK))
        tokens = np.concatenate([padded(piece, width) for piece in pieces])
        piece_lengths = np.array([len(piece) for piece in pieces], np.int32)
        arrays = jax.device_put((tokens, piece_lengths, options, lengths))
        logits, cache = _read(model.config, model.dtype, sizes, model.params, *arrays, cache)
        options = {}  # the cache has the source from now on
    prompt_lengths = lengths if counts is None else np.array(counts, np.int32)
    tokens = np.concatenate([padded(prompt, model.cache_length) for prompt in prompts])
    return logits, cache, History(*jax.device_put((tokens, lengths, prompt_lengths)))


def read_rows(
    opened: list[Model], prompts, sources, numbers, rows: int
) -> tuple[Array, History, list[Cache]]:
    """Reads the prompts of these numbers, one a row: (logits, history, caches of all models).

    Rows without a prompt hold the first one. If all prompts are equal, one is read, so many samples
    of one prompt cost one reading. Different prompts that fit one batch are read together.
    Otherwise each is read alone, except copies of the first one.
    """
    texts = [
        (list(prompts[i]), [] if sources is None else sources[i])
        for i in numbers
        if i < len(prompts)
    ]
    first_prompt, first_source = texts[0]
    others = [
        row
        for row, (prompt, source) in enumerate(texts)
        if prompt != first_prompt or not np.array_equal(source, first_source)
    ]
    if others and fit_one_batch([len(prompt) for prompt, _ in texts], rows):
        return read_by_all(opened, texts + texts[:1] * (rows - len(texts)))
    batch = repeat(rows, read_by_all(opened, texts[:1]))
    for row in others:
        batch = insert(batch, jax.device_put(np.int32(row)), read_by_all(opened, [texts[row]]))
    return batch


def read_by_all(
    opened: list[Model], texts: list[tuple[list[int], Any]]
) -> tuple[Array, History, list[Cache]]:
    """(logits, history, caches of all models) after these (prompt, source) texts.

    The logits are those of the first model.
    """
    prompts = [prompt for prompt, _ in texts]
    sources = [source for _, source in texts]
    results = [read(model, prompts, sources if model.source_length else None) for model in opened]
    logits, _, history = results[0]
    return logits, history, [cache for _, cache, _ in results]


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="cache")
def _read(config, dtype, sizes, params, tokens, lengths, options, text_lengths, cache):
    if cache is None:
        cache = init_cache(config, len(tokens), *sizes, text_lengths=text_lengths)
    return prefill(config, params, tokens, cache, lengths=lengths, dtype=dtype, **options)


@partial(jax.jit, donate_argnames="cache")
def _first_tokens(
    logits, cache, history: History, ends, indices, is_unused, key, settings: Settings
) -> DecodeState:
    keys = jax.vmap(partial(jax.random.fold_in, key))(indices)
    return append(
        DecodeState(history, cache, ends, is_unused, keys, jnp.zeros_like(is_unused)),
        logits,
        settings,
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _run(
    config, dtype, params, state: DecodeState, settings: Settings, steps, least
) -> DecodeState:
    """Adds up to `steps` tokens to each row, while at least `least` rows are not done."""

    def advance(carry):
        step, state = carry
        history = state.history
        last = jnp.take_along_axis(history.tokens, history.length[:, None] - 1, axis=1)
        new_lengths = jnp.where(state.done, 0, 1)
        logits, cache = decode_step(
            config, params, last, state.cache, lengths=new_lengths, dtype=dtype
        )
        return step + 1, append(replace(state, cache=cache), logits[:, 0], settings)

    def more(carry):
        return (carry[0] < steps) & (jnp.sum(~carry[1].done) >= least)

    return jax.lax.while_loop(more, advance, (jnp.int32(0), state))[1]
