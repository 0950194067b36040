"""Prompts in, continuations out."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

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
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    how: Sampling = Sampling(),
    key: Array | None = None,
    stop_tokens: Sequence[int] = (),
    dtype=None,
) -> list[list[int]]:
    """Continues each prompt by at most `max_tokens` tokens, up to and without the first stop token.

    Of an encoder-decoder, `sources` are the encoder's tokens and a prompt is how the target begins (T5: [0]).
    Prompts of different length are padded on the left, and each is continued exactly as it would be alone. Raises
    ConfigError for an empty prompt, a token outside the vocabulary, more tokens than a learned position table has rows, and
    for prompts of different length beyond the original length of a dynamic NTK or LongRoPE.
    """
    _check(config, prompts, max_tokens, sources)
    tokens, segment_ids = _padded(prompts, left=True)
    source = {}
    if sources is not None:
        source = dict(zip(("source", "source_segment_ids"), _padded(sources, left=False), strict=True))
    key = jax.random.key(0) if key is None else key
    dtype = jax.tree.leaves(params)[0].dtype if dtype is None else dtype
    out = _generate(
        config,
        how,
        max_tokens,
        tuple(stop_tokens),
        jnp.dtype(dtype),
        params,
        *jax.device_put((tokens, segment_ids, source)),
        key,
    )
    return [_until(row, stop_tokens) for row in np.asarray(out).tolist()]


def _padded(rows, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segment ids: 1 for tokens, 0 for padding) of rows of different length."""
    longest = max(map(len, rows))
    tokens, segment_ids = np.zeros((2, len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        tokens[i, place], segment_ids[i, place] = row, 1
    return tokens, segment_ids


def _check(config, prompts, max_tokens, sources) -> None:
    pair = isinstance(config, EncoderDecoder)
    if pair != (sources is not None):
        raise ConfigError(
            f"generate: {'an encoder-decoder needs' if pair else 'only an encoder-decoder has'} `sources`"
        )
    if pair:
        if len(sources) != len(prompts) or not all(len(s) for s in sources):
            raise ConfigError(f"generate: {len(prompts)} prompts need as many sources, none of them empty")
        _check_tokens("source", sources, config.encoder, max(map(len, sources), default=0))
        config = config.decoder
    if not prompts or not all(len(p) for p in prompts):
        raise ConfigError("generate: a prompt is empty; give at least one token (a start token, a newline)")
    if max_tokens < 1:
        raise ConfigError(f"generate: max_tokens={max_tokens}: must be at least 1")
    longest = max(map(len, prompts))
    ragged, positions = len(set(map(len, prompts))) > 1, config.positions
    for rope in positions if isinstance(positions, tuple) else (positions,):
        scaling = rope.scaling if isinstance(rope, Rope) else None
        if (
            ragged
            and isinstance(scaling, NTK | LongRoPE)
            and longest + max_tokens > (scaling.original_length or math.inf)
        ):
            raise ConfigError(
                f"generate: {scaling} turns all rows by the longest one, beyond its original length; give prompts of one "
                "length, or one prompt at a time"
            )
    _check_tokens("prompt", prompts, config, longest, max_tokens)


def _check_tokens(name: str, rows, config: ModelConfig, longest: int, more: int = 0) -> None:
    for token in itertools.chain.from_iterable(rows):
        if not 0 <= token < config.vocab_size:
            raise ConfigError(f"generate: {name} token {token} is outside the vocabulary of {config.vocab_size}")
    if isinstance(config.positions, Learned | Axial) and longest + more > config.context_length:
        new = f" + {more} new" if more else ""
        raise ConfigError(
            f"generate: {longest} {name}{new} tokens exceed the {config.context_length} learned positions"
        )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(config, how, max_tokens, stop_tokens, dtype, params, tokens, segment_ids, source, key):
    B, T = tokens.shape
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(B))
    stops = jnp.array(stop_tokens, jnp.int32)

    def pick(logits, step):
        return sample(logits, jax.vmap(lambda k: jax.random.fold_in(k, step))(row_keys), how).astype(jnp.int32)

    def emit(out, done, token, step):
        out = jax.lax.dynamic_update_slice_in_dim(out, token[:, None], step, axis=1)
        return out, done | (token[:, None] == stops[None, :]).any(axis=1)

    def going_on(carry):
        step, _, _, done, _ = carry
        return (step < max_tokens) & ~done.all()

    def advance(carry):
        step, token, out, done, cache = carry
        output = models.apply(config, params, token[:, None], cache=cache, dtype=dtype)
        token = pick(output.logits[:, -1], step)
        out, done = emit(out, done, token, step)
        return step + 1, token, out, done, output.cache

    cache = init_cache(config, B, T + max_tokens, dtype)
    output = models.apply(config, params, tokens, segment_ids=segment_ids, cache=cache, dtype=dtype, **source)
    token = pick(output.logits[:, -1], 0)
    out, done = emit(jnp.zeros((B, max_tokens), jnp.int32), jnp.zeros(B, bool), token, 0)
    return jax.lax.while_loop(going_on, advance, (jnp.ones((), jnp.int32), token, out, done, output.cache))[2]


def _until(tokens: list[int], stop_tokens) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tokens[:end]
