"""Contrastive search: likely tokens whose hidden states differ from the earlier ones.

Su et al. 2022, arXiv:2202.06417.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxformer import models
from jaxformer.decoding.arguments import (
    Settings,
    as_filters,
    as_lists,
    check_logits,
    padded_stop_tokens,
    rows_for,
)
from jaxformer.decoding.cache import init_cache
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.model import (
    Prompts,
    Tokens,
    check_rotations,
    open_model,
    padded,
    padded_length,
    source_inputs,
)
from jaxformer.decoding.state import new_tokens
from jaxformer.decoding.steps import logits_of
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.sharding import on_host


def contrast(
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompts: Prompts,
    max_tokens: int | Tokens,
    *,
    k: int = 4,
    alpha: float = 0.6,
    sources: Sequence[Any] | None = None,
    filters: Sequence[Filter] = (),
    stop_tokens: Tokens = (),
    rows: int = 16,
    dtype=None,
) -> list[list[int]]:
    """Continuations whose next token is argmax_v (1 - alpha) p(v) - alpha max_j cos(h_v, h_j).

    v is one of the k likeliest tokens, j runs over all earlier tokens, and h are final hidden
    states (section 3.2, eq. 5). Other arguments and errors are those of `generate`. Raises
    ConfigError also for a k or an alpha out of range. Raises NotImplementedError for texts that
    would outgrow the rotations of their cache (LongRoPE, a dynamic NTK).
    """
    if not (0 <= alpha <= 1 and 1 <= k <= models.last_stack(config).vocab_size):
        raise ConfigError(
            f"contrast: k={k}, alpha={alpha}: k must be 1 to the size of the vocabulary, "
            "alpha in [0, 1]"
        )
    check_whole("contrast: rows", rows)
    prompts = as_lists(prompts)
    stop_tokens = as_lists(stop_tokens)
    model = open_model(config, params, prompts, max_tokens, sources, dtype)
    check_rotations("contrast", config, prompts, max_tokens)
    stop_ids = padded_stop_tokens(stop_tokens, models.last_stack(config).vocab_size)
    settings = Settings(as_filters(filters, model), np.float32(1), stop_ids)
    numbers = jax.device_put((np.float32(alpha), settings))
    counts = np.broadcast_to(max_tokens, len(prompts))
    rows = rows_for(rows, len(prompts))
    continuations = []
    for first in range(0, len(prompts), rows):
        index = [min(i, len(prompts) - 1) for i in range(first, first + rows)]
        texts = [prompts[i] for i in index]
        T = padded_length(max(map(len, texts)), models.last_stack(config))
        tokens = np.concatenate([padded(text, T) for text in texts])
        lengths = np.array([len(text) for text in texts], np.int32)
        ends = lengths + counts[index].astype(np.int32)
        options = {} if sources is None else source_inputs(model, [sources[i] for i in index])
        arrays = jax.device_put((tokens, lengths, ends, options))
        history, broken = on_host(
            _run(config, model.dtype, model.cache_length, k, model.params, *arrays, *numbers)
        )
        for row in range(min(rows, len(prompts) - first)):
            check_logits(broken[row], first + row)
            continuations.append(new_tokens(history, row, stop_tokens))
    return continuations


@struct.dataclass
class ContrastState:
    """The state of each row of a batch. The first axis of every array is that of the rows."""

    history: History
    cache: Any  # of all tokens, without a source
    directions: Any  # [B, S, D]: hidden states of norm 1
    last: Any  # [B, 1, D]: the hidden state of the last token
    done: Any  # [B]: whether the row has ended
    broken: Any  # [B]: whether the row ended because its logits were NaN


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    config,
    dtype,
    cache_length: int,
    k: int,
    params,
    tokens,
    lengths,
    ends,
    options,
    alpha,
    settings: Settings,
):
    """(the history of all texts, whether the logits of each row were NaN [B])."""
    B, T = tokens.shape
    encode = partial(models.encode, config, params, dtype=dtype)
    output = encode(
        tokens, cache=init_cache(config, B, cache_length, dtype), lengths=lengths, **options
    )
    source = output.cache.source  # the k candidates of a row share it
    unwritten = cache_length - T
    directions = jnp.pad(_direction(output.hidden), ((0, 0), (0, unwritten), (0, 0)))
    last = jnp.take_along_axis(output.hidden, lengths[:, None, None] - 1, axis=1)
    history = History(jnp.pad(tokens, ((0, 0), (0, unwritten))), lengths, lengths)
    cache = replace(output.cache, source=None)
    start = ContrastState(history, cache, directions, last, lengths < 0, lengths < 0)
    logits = partial(logits_of, config, params)
    step = partial(_step, encode, logits, source, ends, k, alpha, settings)
    state = jax.lax.while_loop(lambda state: ~state.done.all(), step, start)
    return state.history, state.broken


def _step(
    encode, logits, source, ends, k: int, alpha, settings: Settings, state: ContrastState
) -> ContrastState:
    """Adds the best of the k likeliest tokens to each row that is not done."""
    B, cache_length, _ = state.directions.shape
    history = state.history
    filtered = settings.filtered(logits(state.last)[:, 0], history)
    largest = jnp.max(filtered, axis=-1)
    broken = state.broken | ~state.done & jnp.isnan(largest)
    done = state.done | (largest == -jnp.inf) | broken  # -inf: filters left no token
    p, candidates = jax.lax.top_k(jax.nn.softmax(filtered, axis=-1), k)
    new_lengths = jnp.where(done, 0, 1)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, k, axis=0), state.cache)
    output = encode(
        candidates.reshape(-1, 1),
        cache=replace(repeated, source=source),
        lengths=jnp.repeat(new_lengths, k),
    )
    new = _direction(output.hidden).reshape(B, k, -1)
    cosines = jnp.einsum("bkd,bsd->bks", new, state.directions, precision="highest")
    is_earlier = jnp.arange(cache_length)[None, None] < history.length[:, None, None]
    penalty = jnp.where(is_earlier, cosines, -1).max(axis=2)
    score = jnp.where(p > 0, (1 - alpha) * p - alpha * penalty, -jnp.inf)
    chosen = jnp.arange(B) * k + jnp.argmax(score, axis=1)
    take = partial(jnp.take, indices=chosen, axis=0)
    directions = state.directions.at[jnp.arange(B), history.length].set(
        take(new.reshape(B * k, -1)), mode="drop"
    )
    token = take(candidates.reshape(-1))
    history = history.extend(token[:, None], new_lengths)
    done = done | jnp.isin(token, settings.stop_tokens) | (history.length >= ends)
    cache = jax.tree.map(take, replace(output.cache, source=None))
    return ContrastState(history, cache, directions, take(output.hidden), done, broken)


def _direction(hidden: Array) -> Array:
    """hidden / |hidden| in float32."""
    hidden = hidden.astype(jnp.float32)
    return hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True)
