"""Prompts in, continuations out: rows of a batch that are refilled from the queue of prompts."""

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer import masks, models
from jaxformer.decoding.cache import Cache, init_cache
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.model import Model, Prompts, Tokens, bucket, open_model, rotation_end
from jaxformer.decoding.sampling import Sampling, draw
from jaxformer.decoding.steps import decode_step, prefill
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig, Patches
from jaxformer.sharding import is_split, mesh_axes, on_host, with_logical_constraint, with_sharding

CHUNK = 1024  # tokens of a prompt that are read at a time
BATCH_TOKENS = 16 * CHUNK  # tokens of all prompts that are read at a time
SLOTS = 128  # the length of a cache is a multiple of these


@struct.dataclass
class DecodeState:
    """Rows of a batch: what stands in each, and what decoding needs to go on. Every array has the rows first."""

    history: History
    cache: Cache  # of all tokens but the last one
    end: Any  # [B]: a row ends at so many tokens
    done: Any  # [B]
    keys: Any  # [B] of random numbers
    broken: Any  # [B]: the row ended because its logits were NaN


@struct.dataclass
class Settings:
    """How tokens are picked and when a row ends: arguments of the compiled program, so that other numbers compile nothing."""

    filters: tuple
    temperature: Any
    stop_tokens: Any  # [n]; -1: none

    def filtered(self, logits: Array, history: History) -> Array:
        """The logits [B, V] after all filters, in float32."""
        return reduce(lambda logits, function: function(logits, history), self.filters, logits.astype(jnp.float32))


def generate(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Prompts, max_tokens: int | Tokens, *,
    sources: Sequence[Any] | None = None, sampling: Sampling = Sampling(), filters: Sequence[Filter] = (),
    key: Array | None = None, stop_tokens: Tokens = (), stop: Callable[[list[int]], int | None] | None = None,
    rows: int = 16, dtype=None, cache_dtype=None,
) -> list[list[int]]:  # fmt: skip
    """Continues each prompt by at most `max_tokens` (of all or of each) tokens, up to the first stop token, which is left out.

    Of an encoder-decoder, `sources` are the tokens of the encoder, or images `[height, width, C]`, and a prompt is how the
    target begins (T5: [0]).
    `filters` (`decoding.filters`, or functions of yours) come before those of `sampling`. `stop(new tokens)` says how many of a
    row's new tokens to keep, or None to go on. At most `rows` texts are decoded at a time; a row that ends takes the next
    prompt. A row's tokens do not depend on its neighbours; the last bits of its logits do where these fill more slots of the
    cache, in steps of 128, and where the first prompts are read together. `cache_dtype` is that of keys and
    values, such as int8. Where filters leave no token, the text ends.
    Raises ConfigError for an empty prompt, a token outside the vocabulary, more tokens than a learned position table has
    rows, and logits that are no numbers.
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


def stream(config: ModelConfig | EncoderDecoder, params: Any, prompt: Tokens, max_tokens: int, *, every: int = 1,
    source: Any = None, sampling: Sampling = Sampling(), filters: Sequence[Filter] = (), key: Array | None = None,
    stop_tokens: Tokens = (), stop: Callable[[list[int]], int | None] | None = None, dtype=None, cache_dtype=None,
) -> Iterator[list[int]]:  # fmt: skip
    """The tokens of `generate` for one prompt as they are made, `every` so many."""
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
    """The arguments of `generate`, and after how many steps the new tokens are looked at."""

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
    every: int | None  # None: when a row ends


def serve(config: ModelConfig | EncoderDecoder, params: Any, request: Request) -> Iterator[tuple[int, list[int], bool]]:
    """(number of a prompt, its new tokens so far, whether they are all) after `every` steps, and whenever a row ends."""
    check_whole("generate: rows", request.rows)
    prompts, sources, stop, every = as_lists(request.prompts), request.sources, request.stop, request.every
    stop_tokens, key = as_lists(request.stop_tokens), as_key(request.key)
    model = open_model(config, params, prompts, request.max_tokens, sources, request.dtype, request.cache_dtype)
    # sums over a number of slots that is no multiple of these round otherwise
    model = model._replace(cache_length=-(-model.cache_length // SLOTS) * SLOTS)
    settings = jax.device_put(sampling_settings(model, request.filters, request.sampling, stop_tokens))
    state: Any = None  # a DecodeState, from the first texts on
    number_of: dict[int, int] = {}  # of the prompt in each row
    longer: dict[int, list[int]] = {}  # texts of rows that need the rotations of a longer text
    queue, rows = deque(range(len(prompts))), rows_for(request.rows, prompts)
    counts = np.broadcast_to(request.max_tokens, len(prompts))
    limits = [len(prompt) + int(count) for prompt, count in zip(prompts, counts, strict=True)]

    def text_of(index: int, tokens: list[int]) -> Text:
        end = min(limits[index], rotation_end(model, len(tokens)))
        return Text(index, tokens, None if sources is None else sources[index], len(prompts[index]), end)

    while queue or number_of:
        to_read = {row: text_of(number_of[row], tokens) for row, tokens in longer.items()}
        longer = {}
        for row in range(rows):
            if row not in number_of and queue:
                number_of[row] = queue.popleft()
                to_read[row] = text_of(number_of[row], list(prompts[number_of[row]]))
        steps = every or 2**30
        if to_read:
            state = fill_rows(model, state, to_read, rows, key, settings)
            steps = steps if every is None else 0  # a first token is shown at once
        least = jax.device_put((np.int32(steps), np.int32(len(number_of) if queue else 1)))
        state = _run(model.config, model.dtype, model.params, state, settings, *least)
        history, done, ends, broken = on_host((state.history, state.done, state.end, state.broken))
        for row, index in list(number_of.items()):
            check_numbers(broken[row], index)
            tokens, ended = new_tokens(history, row, stop_tokens), bool(done[row])
            if stop is not None and (keep := stop(tokens)) is not None:
                tokens, ended = tokens[:keep], True
                state = replace(state, done=insert(state.done, *jax.device_put((np.int32(row), np.ones(1, bool)))))
            elif ended and history.length[row] == ends[row] < limits[index]:
                text = history.tokens[row, : history.length[row]].tolist()
                if text[-1] not in stop_tokens:
                    longer[row], ended = text, False
            if ended:
                del number_of[row]
            yield index, tokens, ended


class Text(NamedTuple):
    """What is read into a row."""

    index: int  # the number of the prompt, which the row's random numbers depend on
    tokens: list[int]
    source: Any
    prompt_length: int  # so many of the tokens are the user's
    end: int  # the row ends at so many tokens


def fill_rows(
    model: Model, state: DecodeState | None, texts: dict[int, Text], rows: int, key: Array, settings: Settings
) -> DecodeState:
    """The state with these texts in these rows, each with its first new token. Rows that never had a text are done."""
    several = list(texts.values())
    if state is None and fit_one_batch([len(text.tokens) for text in several], rows):
        # the rows behind the texts hold a copy of the first one
        return first_tokens(model, several + several[:1] * (rows - len(several)), len(several), key, settings)
    for row, text in texts.items():
        one = first_tokens(model, [text], 1, key, settings)
        if state is None:
            state = replace(repeat(rows, one), done=jax.device_put(np.ones(rows, bool)))
        state = insert(state, jax.device_put(np.int32(row)), one)
    assert state is not None
    return state


def first_tokens(model: Model, texts: list[Text], count: int, key: Array, settings: Settings) -> DecodeState:
    """A row for each text, with its first new token. Rows from number `count` on are done."""
    sources = None if texts[0].source is None else [text.source for text in texts]
    logits, cache, history = read(model, [text.tokens for text in texts], sources, [text.prompt_length for text in texts])
    numbers = [[text.end for text in texts], [text.index for text in texts]]
    ends, indices = jax.device_put(np.array(numbers, np.int32))
    is_unused = jax.device_put(np.arange(len(texts)) >= count)
    return _first_tokens(logits, cache, history, ends, indices, is_unused, key, settings)


def fit_one_batch(lengths: Sequence[int], rows: int) -> bool:
    """Whether prompts of these lengths are read as one batch of so many rows: several, of about one length, on one device.

    Else each is read alone, so that its neighbours cost it nothing: a batch is as long as its longest prompt.
    """
    fits = max(lengths) <= CHUNK and rows * max(lengths) <= BATCH_TOKENS
    return len(lengths) > 1 and fits and max(lengths) <= 2 * min(lengths) and not is_split()


def as_lists(tokens: Any) -> Any:
    """Tokens of one text or of several as lists, where they are arrays; all else as it is."""
    if hasattr(tokens, "tolist"):
        return tokens.tolist()
    if isinstance(tokens, list | tuple):
        return [one.tolist() if hasattr(one, "tolist") else one for one in tokens]
    return tokens


def as_key(key: Any) -> Array:
    """A key of random numbers, also one of the old `jax.random.PRNGKey`. ConfigError for what is no single key."""
    if key is None:
        return jax.random.key(0)
    if getattr(key, "dtype", None) == jnp.uint32 and jnp.shape(key) == jnp.shape(jax.random.key_data(jax.random.key(0))):
        return jax.random.wrap_key_data(key)
    if not jnp.issubdtype(getattr(key, "dtype", int), jax.dtypes.prng_key) or jnp.shape(key):
        shown = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise ConfigError(f"generate: key={shown}: expected one key, such as jax.random.key(0)")
    return key


def rows_for(rows: int, texts: Sequence[Any]) -> int:
    """How many rows so many texts take, of `rows` at most."""
    return min(rows, 1 << (len(texts) - 1).bit_length())


def check_numbers(broken: Any, index: int) -> None:
    """Raises ConfigError where the logits after a prompt were no numbers, so that no token could be picked."""
    if broken:
        problem = "the model's logits are not numbers (NaN)"
        advice = "look at its parameters (a run that diverged?) and at `dtype` (float16 overflows at 65,504)"
        raise ConfigError(f"generate: prompt {index}: {problem}; {advice}")


def as_filters(filters: Sequence[Filter], model: Model) -> tuple[Filter, ...]:
    """Filters as pytrees, which a user's function is not.

    Raises ConfigError for one whose result for a row is not logits [1, V], and for one that names a token that the model
    does not have.
    """
    array = jax.ShapeDtypeStruct
    logits, count = array((1, models.last_stack(model.config).vocab_size), jnp.float32), array((1,), jnp.int32)
    history = History(array((1, model.cache_length), jnp.int32), count, count)
    for number, f in enumerate(filters, 1):
        try:
            result = jax.eval_shape(lambda *row, f=f: f(*row), logits, history)
            if getattr(result, "shape", None) != logits.shape:
                raise TypeError(f"it makes {result} of logits {list(logits.shape)}")
        except Exception as error:  # a function of a user's may raise anything
            raise ConfigError(f"filters: number {number} is no function (logits, history) -> logits: {error}") from error
        for token in getattr(f, "named_tokens", list)():
            if token >= logits.shape[1]:
                raise ConfigError(f"filters: number {number}: token {token} is outside the vocabulary of {logits.shape[1]}")
    return tuple(jax.tree_util.Partial(f) if jax.tree_util.all_leaves([f]) else f for f in filters)


def sampling_settings(model: Model, filters: Sequence[Filter], sampling: Sampling, stop_tokens: Tokens) -> Settings:
    """The settings of these options, with the filters of `sampling` behind the others."""
    stop_ids = stops(stop_tokens, models.last_stack(model.config).vocab_size)
    return Settings((*as_filters(filters, model), *sampling.filters()), np.float32(sampling.temperature), stop_ids)


def stops(tokens: Any, vocabulary: int) -> np.ndarray:
    """Stop tokens, and -1 up to a multiple of 8: another number of them compiles nothing.

    Raises ConfigError for one outside the vocabulary, which would never stop a text, and for a number in place of a list.
    """
    tokens = as_lists(tokens)
    if np.ndim(tokens) != 1:
        raise ConfigError(f"stop_tokens={tokens}: must be a list of tokens, such as [{tokens}]")
    for token in tokens:
        if not isinstance(token, SupportsIndex):
            raise ConfigError(f"stop_tokens: {token!r} is no whole number; a tokenizer's `encode` makes tokens of a text")
        if not 0 <= operator.index(token) < vocabulary:
            problem = f"is outside the vocabulary of {vocabulary}, so no text would stop there"
            raise ConfigError(f"stop_tokens: {token} {problem}; leave it out, or give the id of this model's tokenizer")
    return np.pad(np.asarray(tokens, np.int32), (0, -len(tokens) % 8 or 8 * (not tokens)), constant_values=-1)


def padded(tokens: Sequence[int], length: int) -> np.ndarray:
    """The tokens and zeros behind them, [1, length]."""
    return np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)))[None]


def source_inputs(model: Model, sources: Sequence[Any]) -> dict[str, np.ndarray]:
    """The sources as `models.apply` takes them: rows of tokens with padding, or images as they are."""
    if isinstance(model.config.encoder.embedding, Patches):
        return {"source": np.stack(sources)}
    rows = [padded(source, model.source_length) for source in sources]
    ids = [padded([1] * len(source), model.source_length) for source in sources]
    return {"source": np.concatenate(rows), "source_segment_ids": np.concatenate(ids)}


def read(
    model: Model, prompts: list[list[int]], sources: Sequence[Any] | None, counts: Sequence[int] | None = None
) -> tuple[Any, Any, History]:
    """(logits after each prompt, the cache, the history), read in pieces of at most `CHUNK` tokens; several are one piece each.

    A prompt whose tokens see later ones (a prefix, global tokens) is read whole: a piece knows nothing of those behind it.
    The first `counts` tokens are what the user gave; None: all.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    options = {} if sources is None else source_inputs(model, sources)
    stack, longest, cache, logits = models.last_stack(model.config), int(lengths.max()), None, None
    size = CHUNK if all(map(masks.is_causal, stack.masks)) else max(longest, CHUNK)
    assert len(prompts) == 1 or longest <= size
    sizes = model.cache_length, model.cache_dtype, model.ahead
    for first in range(0, longest, size):
        pieces = [prompt[first : first + size] for prompt in prompts]
        width = min(bucket(max(map(len, pieces)), stack), max(size, CHUNK))
        tokens = np.concatenate([padded(piece, width) for piece in pieces])
        piece_lengths = np.array([len(piece) for piece in pieces], np.int32)
        arrays = jax.device_put((tokens, piece_lengths, options, lengths))
        logits, cache = _read(model.config, model.dtype, sizes, model.params, *arrays, cache)
        options = {}
    prompt_lengths = lengths if counts is None else np.array(counts, np.int32)
    tokens = np.concatenate([padded(prompt, model.cache_length) for prompt in prompts])
    return logits, cache, History(*jax.device_put((tokens, lengths, prompt_lengths)))


def read_rows(opened: list[Model], prompts, sources, numbers, rows: int) -> tuple[Array, History, list[Cache]]:
    """(logits, history, caches of all models) after the prompts of these numbers, one a row; in further rows is the first.

    A prompt like the first is not read again, so that many samples for one prompt begin at once.
    """
    texts = [(list(prompts[i]), [] if sources is None else sources[i]) for i in numbers if i < len(prompts)]

    def read_by_all(texts: list[tuple[list[int], Any]]) -> tuple[Array, History, list[Cache]]:
        some, given = [prompt for prompt, _ in texts], [source for _, source in texts]
        found = [read(model, some, given if model.source_length else None) for model in opened]
        return found[0][0], found[0][2], [cache for _, cache, _ in found]

    others = [
        row for row, (prompt, source) in enumerate(texts)
        if prompt != texts[0][0] or not np.array_equal(source, texts[0][1])
    ]  # fmt: skip
    if others and fit_one_batch([len(prompt) for prompt, _ in texts], rows):
        return read_by_all(texts + texts[:1] * (rows - len(texts)))
    batch = repeat(rows, read_by_all(texts[:1]))
    for row in others:
        batch = insert(batch, jax.device_put(np.int32(row)), read_by_all([texts[row]]))
    return batch


def new_tokens(history: History, row: int, stop_tokens: Sequence[int]) -> list[int]:
    """What follows the prompt of a row, up to its stop token. The arrays are on the host."""
    tokens = history.tokens[row, history.prompt[row] : history.length[row]].tolist()
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="cache")
def _read(config, dtype, sizes, params, tokens, lengths, options, whole, cache):
    cache = init_cache(config, len(tokens), *sizes, text_lengths=whole) if cache is None else cache
    return prefill(config, params, tokens, cache, lengths=lengths, dtype=dtype, **options)


@partial(jax.jit, donate_argnames="cache")
def _first_tokens(logits, cache, history: History, ends, indices, is_unused, key, settings: Settings) -> DecodeState:
    keys = jax.vmap(partial(jax.random.fold_in, key))(indices)
    return append(DecodeState(history, cache, ends, is_unused, keys, jnp.zeros_like(is_unused)), logits, settings)


@partial(jax.jit, static_argnums=0)
def repeat(rows: int, one: Any) -> Any:
    """A tree of one row as one of so many equal rows, split over the mesh where there is one."""
    split = partial(P, mesh_axes("batch", rows) or None)

    def repeated(x):
        x = jnp.broadcast_to(x, (rows, *x.shape[1:]))
        return with_sharding(x, split(*[P.UNCONSTRAINED] * (x.ndim - 1))) if is_split() else x

    return jax.tree.map(repeated, one)


@partial(jax.jit, donate_argnums=0)
def insert(tree: Any, row, one: Any) -> Any:
    """The tree with another row in place of this one; every array has the rows first, `one` has a single row."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, axis=0), tree, one)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _run(config, dtype, params, state: DecodeState, settings: Settings, steps, least) -> DecodeState:
    """Up to `steps` more tokens in each row, as long as at least `least` rows are not done."""

    def advance(carry):
        step, state = carry
        history = state.history
        last = jnp.take_along_axis(history.tokens, history.length[:, None] - 1, axis=1)
        going = jnp.where(state.done, 0, 1)
        logits, cache = decode_step(config, params, last, state.cache, lengths=going, dtype=dtype)
        return step + 1, append(replace(state, cache=cache), logits[:, 0], settings)

    def more(carry):
        return (carry[0] < steps) & (jnp.sum(~carry[1].done) >= least)

    return jax.lax.while_loop(more, advance, (jnp.int32(0), state))[1]


def append(state: DecodeState, logits: Array, settings: Settings) -> DecodeState:
    """Each row that is not done with one more token, picked by the logits [B, V]; it ends where filters leave no token."""
    history, done = state.history, state.done
    logits = with_logical_constraint(logits, "batch", None)  # filters go over a vocabulary many times
    keys = jax.vmap(jax.random.fold_in)(state.keys, history.length - history.prompt)
    filtered = settings.filtered(logits, history)
    largest = jnp.max(filtered, axis=-1)
    broken = state.broken | ~done & jnp.isnan(largest)
    token = draw(filtered, keys, settings.temperature)
    done = done | (largest == -jnp.inf) | broken
    history = history.extend(token[:, None], jnp.where(done, 0, 1))
    done = done | jnp.isin(token, settings.stop_tokens) | (history.length >= state.end)
    return replace(state, history=history, done=done, broken=broken)
