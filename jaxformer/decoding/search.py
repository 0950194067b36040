"""The likeliest continuations of prompts by beam search, and how likely given continuations are."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import models
from jaxformer.decoding.beam import BeamOutput, Beams, beam_search
from jaxformer.decoding.filters import Filter
from jaxformer.decoding.generate import (
    as_filters,
    as_lists,
    padded,
    read_rows,
    rows_for,
    source_inputs,
    stops,
)
from jaxformer.decoding.model import Prompts, Tokens, bucket, check_rotations, open_model
from jaxformer.decoding.steps import decode_step, logits_of
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import heads
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.sharding import on_host


class Hypothesis(NamedTuple):
    """A continuation that a search found."""

    tokens: list[int]  # without the stop token
    score: float  # as `Beams` says


def search(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Prompts, max_tokens: int | Tokens, *,
    sources: Sequence[Any] | None = None, beams: Beams = Beams(), filters: Sequence[Filter] = (),
    stop_tokens: Tokens = (), rows: int = 8, dtype=None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """The `beams.n_best` best continuations of each prompt, best first; `rows` prompts are searched at a time.

    There may be fewer, but at least one, which may be empty: a text is listed once. Arguments and errors are those of
    `generate`. Filters change log-probabilities, and so scores. Raises NotImplementedError for texts that would outgrow the
    rotations of their cache (LongRoPE, a dynamic NTK).
    """
    check_whole("search: rows", rows)
    prompts, stop_tokens = as_lists(prompts), as_lists(stop_tokens)
    model = open_model(config, params, prompts, max_tokens, sources, dtype)
    check_rotations("search", config, prompts, max_tokens)
    rows = rows_for(rows, prompts)
    stop_ids = stops(stop_tokens, models.last_stack(config).vocab_size)
    settings = jax.device_put((beams, stop_ids, as_filters(filters, model)))
    counts, found = np.broadcast_to(max_tokens, len(prompts)), []
    for first in range(0, len(prompts), rows):
        numbers = range(first, min(first + rows, len(prompts)))
        batch = read_rows([model], prompts, sources, numbers, rows)
        count = np.pad(counts[first : first + rows], (0, rows - len(numbers)), constant_values=1).astype(np.int32)
        best = on_host(_search(model.config, model.dtype, model.params, *batch, jax.device_put(count), *settings))
        found += [_hypotheses(beams, best, row, len(prompts[i]), set(stop_tokens)) for row, i in enumerate(numbers)]
    return found


@partial(jax.jit, static_argnums=(0, 1))
def _search(config, dtype, params, logits, history, caches, max_tokens, beams: Beams, stop_tokens, filters) -> BeamOutput:
    (cache,) = caches
    source = cache.source  # which all beams of a text share

    def advance(tokens: Array, cache):
        logits, cache = decode_step(config, params, tokens[:, None], replace(cache, source=source), dtype=dtype)
        return logits[:, 0], replace(cache, source=None)

    return beam_search(advance, logits, replace(cache, source=None), history, max_tokens, beams, stop_tokens, filters)


def _hypotheses(beams: Beams, best: BeamOutput, row: int, prompt: int, stop_tokens: set[int]) -> list[Hypothesis]:
    """The texts that were found for one prompt. Raises ConfigError for scores that are no numbers, and where none was found."""
    found = []
    for m in range(beams.n_best):
        length, total = int(best.length[row, m]), float(best.total[row, m])
        new = best.tokens[row, m, prompt:length].tolist()
        if total > -np.inf:
            score = _score_of(beams, total, length - prompt, float(best.score[row, m]))
            found.append(Hypothesis(new[:-1] if new and new[-1] in stop_tokens else new, score))
    if not found or any(np.isnan(hypothesis.score) for hypothesis in found):
        problem = "the model's logits, or the scores of your length_penalty, are not numbers (NaN)"
        raise ConfigError(f"search: {problem}; look at its parameters (a run that diverged?) and at `dtype`")
    return found


def _score_of(beams: Beams, total: float, length: int, score: float) -> float:
    """The score in float64, whose range is that of length penalties; a function of the user's computed its own."""
    logs = beams.log_divisor(np.float64(max(length, 1)), np.log)
    with np.errstate(over="ignore"):
        return score if logs is None else float(total * np.exp(-logs))


class Score(NamedTuple):
    """How likely a continuation is."""

    log_likelihood: float  # the sum over its tokens, in nats
    greedy: bool  # whether each of its tokens is the likeliest one
    tokens: list[float]  # log-likelihood of each token


def score(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Prompts,
    continuations: Prompts, *, sources: Sequence[Any] | None = None, rows: int = 8, dtype=None,
) -> list[Score]:  # fmt: skip
    """The log-likelihood of each continuation after its prompt, sum_t log p(y_t | x, y_<t), in batches of `rows`.

    Raises ConfigError as `generate` does, for an empty continuation, and where a mask would show its tokens before they count.
    """
    prompts, continuations = as_lists(prompts), as_lists(continuations)
    texts = (*prompts, *continuations)
    if not all(hasattr(text, "__len__") for text in texts):
        raise ConfigError("score: expected a list of tokens for each prompt and continuation, such as [[1, 2, 3]]")
    if len(prompts) != len(continuations) or not texts or not all(map(len, texts)):
        raise ConfigError(f"score: {len(prompts)} prompts need as many continuations; no prompt or continuation may be empty")
    check_whole("score: rows", rows)
    vocabulary = models.last_stack(config).vocab_size
    for *_, last in continuations:  # `open_model` checks what is read, which is all but this
        if not 0 <= last < vocabulary:
            raise ConfigError(f"score: token {last} is outside the vocabulary of {vocabulary}")
    shortest, longest = min(map(len, prompts)), max(map(len, prompts)) + max(map(len, continuations))
    if heads.shows_labels(models.last_stack(config), shortest, longest):
        raise ConfigError(f"score: the mask shows tokens behind a prompt of {shortest} to earlier ones, which predict them")
    config = models.evaluation(config)
    texts = [[*prompt, *new] for prompt, new in zip(prompts, continuations, strict=True)]
    model = open_model(config, params, [text[:-1] for text in texts], None, sources, dtype)
    rows, found = rows_for(rows, texts), []
    for first in range(0, len(texts), rows):
        index = [min(i, len(texts) - 1) for i in range(first, first + rows)]
        some = [texts[i] for i in index]
        length = bucket(max(map(len, some)) - 1, models.last_stack(config))
        tokens, labels = (np.concatenate([padded(text[part], length) for text in some]) for part in (slice(-1), slice(1, None)))
        options = {"segment_ids": np.concatenate([padded([1] * (len(text) - 1), length) for text in some])}
        if sources is not None:
            options |= source_inputs(model, [sources[i] for i in index])
        logs, greedy = on_host(_score(config, model.dtype, model.params, *jax.device_put((tokens, labels, options))))
        for row, i in enumerate(range(first, min(first + rows, len(texts)))):
            place = slice(len(prompts[i]) - 1, len(texts[i]) - 1)
            found.append(Score(float(logs[row, place].sum()), bool(greedy[row, place].all()), logs[row, place].tolist()))
    return found


@partial(jax.jit, static_argnums=(0, 1))
def _score(config, dtype, params, tokens, labels, options):
    """(log-likelihood of each label, whether it is the likeliest) [B, T]; the logits of one row at a time."""
    hidden = models.encode(config, params, tokens, dtype=dtype, **options).hidden

    def row(inputs):
        hidden, labels = inputs
        logits = logits_of(config, params, hidden[None])[0]
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return own - jax.nn.logsumexp(logits, axis=-1), own >= logits.max(axis=-1)

    return jax.lax.map(row, (hidden, labels))
