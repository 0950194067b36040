"""Contrastive search: likely tokens whose hidden states are unlike those before. Su et al. 2022, arXiv:2202.06417."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.decoding.cache import init_cache
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.generate import (
    Settings,
    as_filters,
    as_lists,
    check_numbers,
    new_tokens,
    padded,
    rows_for,
    source_inputs,
    stops,
)
from jaxformer.decoding.model import Prompts, Tokens, bucket, check_rotations, open_model
from jaxformer.decoding.steps import logits_of
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.sharding import on_host


def contrast(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Prompts, max_tokens: int | Tokens, *,
    k: int = 4, alpha: float = 0.6, sources: Sequence[Any] | None = None, filters: Sequence[Filter] = (),
    stop_tokens: Tokens = (), rows: int = 16, dtype=None,
) -> list[list[int]]:  # fmt: skip
    """Continuations by argmax_v (1 - alpha) p(v) - alpha max_j cos(h_v, h_j), v of the k likeliest, j of all tokens before.

    h are final hidden states (section 3.2, eq. 5). Other arguments and errors are those of `generate`.
    """
    if not (0 <= alpha <= 1 and 1 <= k <= models.last_stack(config).vocab_size):
        raise ConfigError(f"contrast: k={k}, alpha={alpha}: k must be 1 to the size of the vocabulary, alpha in [0, 1]")
    check_whole("contrast: rows", rows)
    prompts, stop_tokens = as_lists(prompts), as_lists(stop_tokens)
    model = open_model(config, params, prompts, max_tokens, sources, dtype)
    check_rotations("contrast", config, prompts, max_tokens)
    stop_ids = stops(stop_tokens, models.last_stack(config).vocab_size)
    settings = jax.device_put((np.float32(alpha), Settings(as_filters(filters, model), np.float32(1), stop_ids)))
    rows, counts, found = rows_for(rows, prompts), np.broadcast_to(max_tokens, len(prompts)), []
    for first in range(0, len(prompts), rows):
        index = [min(i, len(prompts) - 1) for i in range(first, first + rows)]
        texts, options = [prompts[i] for i in index], {}
        T, lengths = bucket(max(map(len, texts)), models.last_stack(config)), np.array([len(text) for text in texts], np.int32)
        if sources is not None:
            options = source_inputs(model, [sources[i] for i in index])
        tokens, ends = np.concatenate([padded(text, T) for text in texts]), lengths + counts[index].astype(np.int32)
        arrays = jax.device_put((tokens, lengths, ends, options))
        history, broken = on_host(_run(config, model.dtype, model.cache_length, k, model.params, *arrays, *settings))
        for row in range(min(rows, len(prompts) - first)):
            check_numbers(broken[row], first + row)
            found.append(new_tokens(history, row, stop_tokens))
    return found


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(config, dtype, cache_length: int, k: int, params, tokens, lengths, ends, options, alpha, settings: Settings):
    """(the texts, the rows that ended because their logits were NaN)."""
    B, T = tokens.shape
    encode = partial(models.encode, config, params, dtype=dtype)
    output = encode(tokens, cache=init_cache(config, B, cache_length, dtype), lengths=lengths, **options)
    source = output.cache.source  # which all tokens that are tried share

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    states = jnp.pad(unit(output.hidden.astype(jnp.float32)), ((0, 0), (0, cache_length - T), (0, 0)))

    def step(carry):
        history, cache, states, last, done, broken = carry
        filtered = settings.filtered(logits_of(config, params, last)[:, 0], history)
        largest = jnp.max(filtered, axis=-1)
        broken = broken | ~done & jnp.isnan(largest)
        done = done | (largest == -jnp.inf) | broken  # filters left no token: the text ends
        p, tried = jax.lax.top_k(jax.nn.softmax(filtered, axis=-1), k)
        going = jnp.where(done, 0, 1)
        wide = jax.tree.map(lambda x: jnp.repeat(x, k, axis=0), cache)
        output = encode(tried.reshape(-1, 1), cache=replace(wide, source=source), lengths=jnp.repeat(going, k))
        own = unit(output.hidden.astype(jnp.float32)).reshape(B, k, -1)
        cosines = jnp.einsum("bkd,bsd->bks", own, states, precision="highest")
        penalty = jnp.where(jnp.arange(cache_length)[None, None] < history.length[:, None, None], cosines, -1).max(axis=2)
        best = jnp.argmax(jnp.where(p > 0, (1 - alpha) * p - alpha * penalty, -jnp.inf), axis=1)

        def take(x):
            return jnp.take(x, jnp.arange(B) * k + best, axis=0)

        states = states.at[jnp.arange(B), history.length].set(take(own.reshape(B * k, -1)), mode="drop")
        token = take(tried.reshape(-1))
        history = history.extend(token[:, None], going)
        done = done | jnp.isin(token, settings.stop_tokens) | (history.length >= ends)
        return history, jax.tree.map(take, replace(output.cache, source=None)), states, take(output.hidden), done, broken

    last = jnp.take_along_axis(output.hidden, lengths[:, None, None] - 1, axis=1)
    history = History(jnp.pad(tokens, ((0, 0), (0, cache_length - T))), lengths, lengths)
    start = history, replace(output.cache, source=None), states, last, lengths < 0, lengths < 0
    history, *_, broken = jax.lax.while_loop(lambda carry: ~carry[4].all(), step, start)
    return history, broken
