"""Prompts in, continuations out: rows of a batch that are refilled from the queue of prompts."""

import itertools
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
from jaxtyping import Int

from jaxformer import masks, models
from jaxformer.decoding.cache import Cache, init_cache
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.sampling import Sampling, draw
from jaxformer.decoding.steps import decode_step, prefill, prepare
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig, Patches
from jaxformer.ops.positions import rotation_until
from jaxformer.sharding import is_explicit, is_split, mesh_axes, on_host, platform, with_logical_constraint, with_sharding

CHUNK = 1024  # tokens of a prompt that are read at a time
TOGETHER = 16 * CHUNK  # tokens of all prompts that are read at a time
SLOTS = 128  # the length of a cache is a multiple of these
Tokens = Sequence[int] | Int[Array, " _"] | Int[np.ndarray, " _"]  # of a text
Prompts = Sequence[Tokens] | Int[Array, "_ _"] | Int[np.ndarray, "_ _"]  # an array: of texts of one length


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


class Model(NamedTuple):
    """What the compiled programs of decoding have in common."""

    config: Any
    params: Any  # as `prepare` makes them
    dtype: Any
    cache_length: int  # most tokens of a row
    source_length: int  # most tokens of a source
    cache_dtype: Any
    ahead: int = 0  # how many tokens its caches can take back


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
    every = None if stop is None else 8
    rows_of_text = serve(
        config,
        params,
        prompts,
        max_tokens,
        sources,
        sampling,
        filters,
        key,
        stop_tokens,
        stop,
        rows,
        (dtype, cache_dtype),
        every,
    )
    outs = {index: tokens for index, tokens, done in rows_of_text if done}
    return [outs[i] for i in range(len(prompts))]


def stream(config: ModelConfig | EncoderDecoder, params: Any, prompt: Tokens, max_tokens: int, *, every: int = 1,
    source: Any = None, sampling: Sampling = Sampling(), filters: Sequence[Filter] = (), key: Array | None = None,
    stop_tokens: Tokens = (), stop: Callable[[list[int]], int | None] | None = None, dtype=None, cache_dtype=None,
) -> Iterator[list[int]]:  # fmt: skip
    """The tokens of `generate` for one prompt as they are made, `every` so many."""
    sources, shown = None if source is None else [source], 0
    for _, tokens, _ in serve(
        config, params, [prompt], max_tokens, sources, sampling, filters, key, stop_tokens, stop, 1, (dtype, cache_dtype), every
    ):
        if tokens[shown:]:
            yield tokens[shown:]
        shown = max(shown, len(tokens))


def serve(
    config, params, prompts, max_tokens, sources, sampling: Sampling, filters, key, stop_tokens, stop, rows: int, dtypes,
    every: int | None,
) -> Iterator[tuple[int, list[int], bool]]:  # fmt: skip
    """(number of a prompt, its new tokens so far, whether they are all) after `every` steps, and whenever a row ends."""
    check_whole("generate: rows", rows)
    if every is not None:
        check_whole("stream: every", every)
    prompts, stop_tokens = as_lists(prompts), as_lists(stop_tokens)
    model = open_model(config, params, prompts, max_tokens, sources, *dtypes)
    # sums over a number of slots that is no multiple of these round otherwise
    model = model._replace(cache_length=-(-model.cache_length // SLOTS) * SLOTS)
    settings = jax.device_put(sampling_settings(model, filters, sampling, stop_tokens))
    key = as_key(key)
    state: Any = None
    number_of: dict[int, int] = {}  # of the prompt in each row
    longer: dict[int, list[int]] = {}  # texts of rows that need the rotations of a longer text
    queue = deque(range(len(prompts)))
    rows, counts = rows_for(rows, prompts), np.broadcast_to(max_tokens, len(prompts))
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
            state = start(model, state, to_read, rows, key, settings)
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


def start(model: Model, state: DecodeState | None, texts: dict[int, Text], rows: int, key, settings) -> DecodeState:
    """The state with these texts in these rows, and their first new tokens. Rows that never had a text are done."""
    if state is None and reads_together(model, list(texts.values()), rows):
        some = list(texts.values())
        return _started(model, some + some[:1] * (rows - len(some)), len(some), key, settings)
    for row, text in texts.items():
        one = _started(model, [text], 1, key, settings)
        if state is None:
            state = replace(repeat(rows, one), done=jax.device_put(np.ones(rows, bool)))
        state = insert(state, jax.device_put(np.int32(row)), one)
    assert state is not None
    return state


def reads_together(model: Model, texts: list[Text], rows: int) -> bool:
    """Whether these texts are read as one batch of so many rows: several, none much longer than another, on one device.

    Else each is read alone, so that its neighbours cost it nothing: a batch is as long as its longest text.
    """
    lengths = [len(text.tokens) for text in texts]
    few = max(lengths) <= CHUNK and rows * max(lengths) <= TOGETHER
    return len(texts) > 1 and few and max(lengths) <= 2 * min(lengths) and not is_split()


def _started(model: Model, texts: list[Text], count: int, key, settings: Settings) -> DecodeState:
    """The first `count` of these texts, one a row, each with its first new token."""
    sources = None if texts[0].source is None else [text.source for text in texts]
    logits, cache, history = read(model, [text.tokens for text in texts], sources, [text.prompt_length for text in texts])
    numbers = [[text.end for text in texts], [text.index for text in texts]]
    ends, indices = jax.device_put(np.array(numbers, np.int32))
    return _start(logits, cache, history, ends, indices, jax.device_put(np.arange(len(texts)) >= count), key, settings)


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


def bucket(length: int, config: ModelConfig) -> int:
    """The length to compile for: at most a quarter more, so that four programs serve all lengths from n to 2 n."""
    step = max(16, 1 << length.bit_length() >> 3)
    length = -(-length // step) * step
    return min(length, config.position_limit)


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
        counted = np.array([len(piece) for piece in pieces], np.int32)
        arrays = jax.device_put((tokens, counted, options, lengths))
        logits, cache = _read(model.config, model.dtype, sizes, model.params, *arrays, cache)
        options = {}
    prompt_lengths = lengths if counts is None else np.array(counts, np.int32)
    tokens = np.concatenate([padded(prompt, model.cache_length) for prompt in prompts])
    return logits, cache, History(*jax.device_put((tokens, lengths, prompt_lengths)))


def read_rows(opened: list[Model], prompts, sources, numbers, rows: int) -> tuple[Array, History, list[Cache]]:
    """(logits, history, caches of all models) after the prompts of these numbers, one a row; in further rows is the first.

    A prompt like the first is not read again, so that many samples for one prompt begin at once.
    """
    batch: Any = None
    texts = [(list(prompts[i]), [] if sources is None else sources[i]) for i in numbers if i < len(prompts)]
    for row, (prompt, source) in enumerate(texts):
        if batch is None or prompt != texts[0][0] or not np.array_equal(source, texts[0][1]):
            found = [read(model, [prompt], [source] if model.source_length else None) for model in opened]
            one = found[0][0], found[0][2], [cache for _, cache, _ in found]
            batch = repeat(rows, one) if batch is None else insert(batch, jax.device_put(np.int32(row)), one)
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
def _start(logits, cache, history: History, ends, indices, unused, key, settings: Settings) -> DecodeState:
    """Rows of a prompt and its first new token; `unused` rows are done before."""
    keys = jax.vmap(partial(jax.random.fold_in, key))(indices)
    return append(DecodeState(history, cache, ends, unused, keys, jnp.zeros_like(unused)), logits, settings)


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
