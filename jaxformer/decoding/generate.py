"""Prompts in, continuations out."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import models
from jaxformer.decoding.cache import init_cache
from jaxformer.decoding.sampling import Sampling, sample
from jaxformer.errors import ConfigError
from jaxformer.models.config import Axial, EncoderDecoder, Learned, ModelConfig
from jaxformer.ops.positions import NTK, LongRoPE, Rope


def generate(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Sequence[Sequence[int]], max_tokens: int, *,
    sources: Sequence[Sequence[int]] | None = None, how: Sampling = Sampling(), key: Array | None = None,
    stop_tokens: Sequence[int] = (), dtype=None,
) -> list[list[int]]:  # fmt: skip
    """Continues each prompt by at most `max_tokens` tokens, up to the first stop token, which is left out.

    Of an encoder-decoder, `sources` are the tokens of the encoder and a prompt is how the target begins (T5: [0]).
    Prompts of different length are padded on the left, and each is continued exactly as it would be alone. Raises
    ConfigError for an empty prompt, a token outside the vocabulary, more tokens than a learned position table has rows, and
    for prompts of different length beyond the original length of a dynamic NTK or LongRoPE.
    """
    for problem in _problems(config, prompts, max_tokens, sources):
        raise ConfigError(f"generate: {problem}")
    tokens, segment_ids = _padded(prompts, left=True)
    source = {}
    if sources is not None:
        source = dict(zip(("source", "source_segment_ids"), _padded(sources, left=False), strict=True))
    key = jax.random.key(0) if key is None else key
    dtype = jnp.dtype(jax.tree.leaves(params)[0].dtype if dtype is None else dtype)
    arrays = jax.device_put((tokens, segment_ids, source))
    out = _generate(config, how, max_tokens, tuple(stop_tokens), dtype, params, *arrays, key)
    until_stop = lambda row: list(itertools.takewhile(lambda token: token not in stop_tokens, row))
    return [until_stop(row) for row in np.asarray(out).tolist()]


def _padded(rows, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segment ids: 1 for tokens, 0 for padding) of rows of different length."""
    longest = max(map(len, rows))
    tokens, segment_ids = np.zeros((2, len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        tokens[i, place], segment_ids[i, place] = row, 1
    return tokens, segment_ids


def _problems(config, prompts, max_tokens: int, sources) -> Iterator[str]:
    """One line for each thing that does not fit the model."""
    decoder, pair = models.last_stack(config), isinstance(config, EncoderDecoder)
    if pair != (sources is not None):
        yield f"{'an encoder-decoder needs' if pair else 'only an encoder-decoder has'} `sources`"
    if pair and (len(sources) != len(prompts) or not all(map(len, sources))):
        yield f"{len(prompts)} prompts need as many sources, none of them empty"
    if not prompts or not all(map(len, prompts)):
        yield "a prompt is empty; give at least one token (a start token, a newline)"
    if max_tokens < 1:
        yield f"max_tokens={max_tokens}: must be at least 1"
    texts = [("source", sources, config.encoder, 0)] if pair else []
    for name, rows, stack, new in (*texts, ("prompt", prompts, decoder, max_tokens)):
        for token in itertools.chain.from_iterable(rows):
            if not 0 <= token < stack.vocab_size:
                yield f"{name} token {token} is outside the vocabulary of {stack.vocab_size}"
        longest, more = max(map(len, rows)), f" + {new} new" if new else ""
        if isinstance(stack.positions, Learned | Axial) and longest + new > stack.context_length:
            yield f"{longest} {name}{more} tokens exceed the {stack.context_length} learned positions"
    lengths = set(map(len, prompts))
    for rope in decoder.positions if isinstance(decoder.positions, tuple) else (decoder.positions,):
        scaling = rope.scaling if isinstance(rope, Rope) and len(lengths) > 1 else None
        if isinstance(scaling, NTK | LongRoPE) and max(lengths) + max_tokens > (scaling.original_length or math.inf):
            yield (
                f"{scaling} turns all rows by the longest one, beyond its original length; give prompts of one length, or one "
                "prompt at a time"
            )


class Progress(NamedTuple):
    """What the loop over new tokens carries."""

    step: Array  # tokens that each row has
    token: Array  # the last one of each row [B]
    out: Array  # [B, max_tokens]
    done: Array  # [B], True after a stop token
    cache: Any


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(config, how, max_tokens, stop_tokens, dtype, params, tokens, segment_ids, source, key):
    B, T = tokens.shape
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(B))
    stops = jnp.array(stop_tokens, jnp.int32)

    def advance(progress: Progress, tokens, **inputs) -> Progress:
        """One more token in each row, after `tokens`."""
        step = progress.step
        output = models.apply(config, params, tokens, cache=progress.cache, dtype=dtype, **inputs)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, step))(row_keys)
        token = sample(output.logits[:, -1], keys, how).astype(jnp.int32)
        out = jax.lax.dynamic_update_slice_in_dim(progress.out, token[:, None], step, axis=1)
        done = progress.done | (token[:, None] == stops[None, :]).any(axis=1)
        return Progress(step + 1, token, out, done, output.cache)

    cache, out = init_cache(config, B, T + max_tokens, dtype), jnp.zeros((B, max_tokens), jnp.int32)
    start = Progress(jnp.zeros((), jnp.int32), tokens[:, -1], out, jnp.zeros(B, bool), cache)
    first = advance(start, tokens, segment_ids=segment_ids, **source)
    more = lambda progress: (progress.step < max_tokens) & ~progress.done.all()
    return jax.lax.while_loop(more, lambda progress: advance(progress, progress.token[:, None]), first).out
