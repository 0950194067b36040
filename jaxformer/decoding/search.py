"""`search`: the likeliest continuations of prompts. `score`: the likelihood of continuations."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import models
from jaxformer.decoding.arguments import as_filters, as_lists, padded_stop_tokens, rows_for
from jaxformer.decoding.beam import BeamOutput, Beams, beam_search
from jaxformer.decoding.filters import Filter
from jaxformer.decoding.generate import read_rows
from jaxformer.decoding.model import (
    Model,
    Prompts,
    Tokens,
    check_rotations,
    open_model,
    padded,
    padded_length,
    source_inputs,
)
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
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompts: Prompts,
    max_tokens: int | Tokens,
    *,
    sources: Sequence[Any] | None = None,
    beams: Beams = Beams(),
    filters: Sequence[Filter] = (),
    stop_tokens: Tokens = (),
    rows: int = 8,
    dtype=None,
) -> list[list[Hypothesis]]:
    """The `beams.n_best` best continuations of each prompt, best first.

    No text is listed twice, so there may be fewer than `n_best`. There is at least one, which may
    be empty. `rows` prompts are searched at a time. Filters change log-probabilities, and so
    scores. Arguments and errors are those of `generate`. Raises NotImplementedError for texts that
    would outgrow the rotations of their cache (LongRoPE, a dynamic NTK).
    """
    check_whole("search: rows", rows)
    prompts = as_lists(prompts)
    stop_tokens = as_lists(stop_tokens)
    model = open_model(config, params, prompts, max_tokens, sources, dtype)
    check_rotations("search", config, prompts, max_tokens)
    rows = rows_for(rows, len(prompts))
    stop_ids = padded_stop_tokens(stop_tokens, models.last_stack(config).vocab_size)
    settings = jax.device_put((beams, stop_ids, as_filters(filters, model)))
    counts = np.broadcast_to(max_tokens, len(prompts)).astype(np.int32)
    hypotheses = []
    for first in range(0, len(prompts), rows):
        numbers = range(first, min(first + rows, len(prompts)))
        batch = read_rows([model], prompts, sources, numbers, rows)
        without_prompt = rows - len(numbers)
        limits = np.pad(counts[first : first + rows], (0, without_prompt), constant_values=1)
        arrays = (*batch, jax.device_put(limits), *settings)
        best = on_host(_search(model.config, model.dtype, model.params, *arrays))
        hypotheses += [
            _hypotheses(beams, best, row, len(prompts[i]), set(stop_tokens))
            for row, i in enumerate(numbers)
        ]
    return hypotheses


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    config, dtype, params, logits, history, caches, max_tokens, beams: Beams, stop_tokens, filters
) -> BeamOutput:
    (cache,) = caches
    source = cache.source  # all beams of a text share it

    def advance(tokens: Array, cache):
        logits, cache = decode_step(
            config, params, tokens[:, None], replace(cache, source=source), dtype=dtype
        )
        return logits[:, 0], replace(cache, source=None)

    return beam_search(
        advance,
        logits,
        replace(cache, source=None),
        history,
        max_tokens,
        beams,
        stop_tokens,
        filters,
    )


def _hypotheses(
    beams: Beams, best: BeamOutput, row: int, prompt: int, stop_tokens: Any
) -> list[Hypothesis]:
    """The texts that were found for the prompt in `row`, which has `prompt` tokens.

    Raises ConfigError if a score is NaN, and if no text was found.
    """
    hypotheses = []
    for m in range(beams.n_best):
        length = int(best.length[row, m])
        total = float(best.total[row, m])
        if total > -np.inf:
            new = best.tokens[row, m, prompt:length].tolist()
            shown = new[:-1] if new and new[-1] in stop_tokens else new
            score = _score_of(beams, total, length - prompt, float(best.score[row, m]))
            hypotheses.append(Hypothesis(shown, score))
    if not hypotheses or any(np.isnan(hypothesis.score) for hypothesis in hypotheses):
        problem = "the model's logits, or the scores of your length_penalty, are not numbers (NaN)"
        raise ConfigError(
            f"search: {problem}; look at its parameters (a run that diverged?) and at `dtype`"
        )
    return hypotheses


def _score_of(beams: Beams, total: float, length: int, score: float) -> float:
    """The score in float64, whose range suits every length penalty.

    `score` is returned where the penalty is a user's function.
    """
    logs = beams.log_divisor(np.float64(max(length, 1)), np.log)
    with np.errstate(over="ignore"):
        return score if logs is None else float(total * np.exp(-logs))


class Score(NamedTuple):
    """The likelihood of a continuation."""

    log_likelihood: float  # the sum over its tokens, in nats
    greedy: bool  # whether every token is the likeliest one
    tokens: list[float]  # log-likelihood of each token


def score(
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompts: Prompts,
    continuations: Prompts,
    *,
    sources: Sequence[Any] | None = None,
    rows: int = 8,
    dtype=None,
) -> list[Score]:
    """The log-likelihood of each continuation y after its prompt x: sum_t log p(y_t | x, y_<t).

    `rows` texts are scored at a time. Raises ConfigError as `generate` does, for an empty
    continuation, and for a mask under which a token of the continuation sees itself or later ones.
    """
    prompts = as_lists(prompts)
    continuations = as_lists(continuations)
    _check_texts(prompts, continuations)
    check_whole("score: rows", rows)
    _check_labels(models.last_stack(config), prompts, continuations)
    config = models.evaluation(config)
    texts = [[*prompt, *new] for prompt, new in zip(prompts, continuations, strict=True)]
    model = open_model(config, params, [text[:-1] for text in texts], None, sources, dtype)
    rows = rows_for(rows, len(texts))
    scores = []
    for first in range(0, len(texts), rows):
        index = [min(i, len(texts) - 1) for i in range(first, first + rows)]
        arrays = jax.device_put(_shifted(model, texts, sources, index))
        logs, greedy = on_host(_score(config, model.dtype, model.params, *arrays))
        for row, i in enumerate(range(first, min(first + rows, len(texts)))):
            labels = slice(len(prompts[i]) - 1, len(texts[i]) - 1)
            log_likelihoods = logs[row, labels]
            total = float(log_likelihoods.sum())
            is_greedy = bool(greedy[row, labels].all())
            scores.append(Score(total, is_greedy, log_likelihoods.tolist()))
    return scores


def _check_texts(prompts: Any, continuations: Any) -> None:
    """Raises ConfigError unless both are lists of texts, as many of each, and none is empty."""
    texts = (*prompts, *continuations)
    if not all(hasattr(text, "__len__") for text in texts):
        raise ConfigError(
            "score: expected a list of tokens for each prompt and continuation, such as [[1, 2, 3]]"
        )
    if len(prompts) != len(continuations) or not texts or not all(map(len, texts)):
        raise ConfigError(
            f"score: {len(prompts)} prompts need as many continuations; "
            "no prompt or continuation may be empty"
        )


def _check_labels(stack: ModelConfig, prompts: Any, continuations: Any) -> None:
    """Raises ConfigError for a last token outside the vocabulary, and for a mask that shows labels.

    `open_model` checks the other tokens: the model reads them, but not the last one.
    """
    for *_, last in continuations:
        if not 0 <= last < stack.vocab_size:
            raise ConfigError(
                f"score: token {last} is outside the vocabulary of {stack.vocab_size}"
            )
    shortest = min(map(len, prompts))
    longest = max(map(len, prompts)) + max(map(len, continuations))
    if heads.shows_labels(stack, shortest, longest):
        raise ConfigError(
            f"score: the mask shows tokens behind a prompt of {shortest} to earlier ones, "
            "which predict them"
        )


def _shifted(
    model: Model, texts: Sequence[Any], sources: Sequence[Any] | None, index: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(tokens [B, T], labels [B, T], options of `models.encode`) of the texts in `index`."""
    batch = [texts[i] for i in index]
    length = padded_length(max(map(len, batch)) - 1, models.last_stack(model.config))
    tokens = np.concatenate([padded(text[:-1], length) for text in batch])
    labels = np.concatenate([padded(text[1:], length) for text in batch])
    segments = np.concatenate([padded([1] * (len(text) - 1), length) for text in batch])
    options = {"segment_ids": segments}
    if sources is not None:
        options |= source_inputs(model, [sources[i] for i in index])
    return tokens, labels, options


@partial(jax.jit, static_argnums=(0, 1))
def _score(config, dtype, params, tokens, labels, options):
    """(log-likelihood of each label, whether it is the likeliest token), both [B, T].

    The logits of one row are computed at a time, because those of all rows need much memory.
    """
    hidden = models.encode(config, params, tokens, dtype=dtype, **options).hidden

    def row(inputs):
        hidden, labels = inputs
        logits = logits_of(config, params, hidden[None])[0]
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return own - jax.nn.logsumexp(logits, axis=-1), own >= logits.max(axis=-1)

    return jax.lax.map(row, (hidden, labels))
