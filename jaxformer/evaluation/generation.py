"""Scores of texts that a model writes: its answers to a split's questions, against the references.

`Generated` is the metric; `answers` writes the texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxformer import models
from jaxformer.data.sources import Question
from jaxformer.data.tokenizers import stop_tokens
from jaxformer.decoding import Beams, Sampling, generate, search
from jaxformer.errors import ConfigError, check_whole
from jaxformer.evaluation.metric import Evaluation
from jaxformer.params import random_key

CHECKED = 200  # number of references on which scores are tried before a run
Score = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]  # (answers, references) -> scores


@dataclass(frozen=True)
class Generated:
    """Scores a model's answers to the questions of the validation split.

    Each score is a function of (answers, references). `text_metrics` has bleu, chrf, rouge,
    exact_match and token_f1.
    """

    scores: tuple[Score, ...]  # functions of (answers, references)
    # how a token is picked (Sampling), or an answer is searched (Beams)
    how: Beams | Sampling = Sampling(temperature=0.0)
    max_tokens: int = 128  # of an answer
    examples: int | None = None  # number of questions to ask, the first ones; None: all
    rows: int = 32  # answers that are written at a time
    only_final: bool = True  # at the end of training; False: at every evaluation

    def __post_init__(self):
        check_whole("metrics: Generated.max_tokens", self.max_tokens)
        check_whole("metrics: Generated.rows", self.rows)
        if not (
            isinstance(self.scores, tuple | list)
            and self.scores
            and all(map(callable, self.scores))
        ):
            shown = getattr(self.scores, "__name__", self.scores)
            raise ConfigError(
                f"metrics: Generated(scores={shown}): "
                "expected a tuple of functions, such as (exact_match,)"
            )

    def questions(self, dataset: Any) -> Sequence[Question]:
        """The questions that are asked. Raises ConfigError if there are none."""
        questions = getattr(dataset.validation, "questions", None)
        if not questions:
            raise ConfigError(
                "metrics: Generated needs a validation split with `questions`, "
                "such as that of data.pairs.Pairs"
            )
        if self.examples is not None and self.examples < 1:
            raise ConfigError(
                f"metrics: Generated(examples={self.examples}): "
                "must be at least 1, or None for all questions"
            )
        return questions[: self.examples]

    def check(self, model: Any, dataset: Any) -> list[str]:
        """The names of the scores.

        The scores are tried on some references. So a missing package, or a writing system that a
        score does not support, is refused before the first step.
        """
        references = [question.reference for question in self.questions(dataset)[:CHECKED]]
        return [name for score in self.scores for name in score(references, references)]

    def __call__(self, scored: Evaluation) -> dict[str, Any]:
        questions = self.questions(scored.dataset)
        tokenizer = scored.dataset.tokenizer
        answer_lists = answers(
            scored.model,
            scored.params,
            questions,
            tokenizer,
            self.max_tokens,
            self.how,
            rows=self.rows,
            stop_tokens=stop_tokens(tokenizer),
            seed=scored.seed,
            precision=scored.precision,
        )
        texts = [best_text(answer_list).strip() for answer_list in answer_lists]
        references = [question.reference for question in questions]
        return {
            name: value for score in self.scores for name, value in score(texts, references).items()
        }


def answers(
    model: Any,
    params: Any,
    questions: Sequence[Question],
    tokenizer: Any,
    max_tokens: int,
    how: Beams | Sampling,
    *,
    stop: Sequence[str] | str = (),
    seed: int = 0,
    precision: str = "float32",
    **options,
) -> list[list[str]]:
    """The texts that a model writes after each prompt: one, or the `n_best` of a beam search.

    Each text ends before the first of the strings `stop`. No text is listed twice, so there may be
    fewer than `n_best`. Other options are those of `decoding.generate` and `decoding.search`, such
    as `stop_tokens`.
    """
    stop = as_strings(stop)
    limits = new_tokens_for(model, max_tokens, [question.prompt for question in questions])
    order = list(range(len(questions)))
    if isinstance(how, Beams):  # rows of similar length end together
        order.sort(key=lambda i: _length_read(questions[i]))
    prompts = [questions[i].prompt for i in order]
    limits = [limits[i] for i in order]
    sources = None if questions[0].source is None else [questions[i].source for i in order]
    options |= dict(sources=sources, dtype=jax.numpy.dtype(precision))
    ends = stop_strings(tokenizer.decode, stop)  # refuses an empty string
    if isinstance(how, Beams):
        hypotheses = search(model, params, prompts, limits, beams=how, **options)
        token_lists = [[each.tokens for each in of_prompt] for of_prompt in hypotheses]
    else:
        options |= dict(sampling=how, key=random_key(seed), stop=ends)
        token_lists = [[new] for new in generate(model, params, prompts, limits, **options)]
    texts: dict[int, list[str]] = {}
    for i, prompt, of_prompt in zip(order, prompts, token_lists, strict=True):
        found = [continuation(tokenizer.decode, prompt, tokens) for tokens in of_prompt]
        cut = [before_stop(text, stop) for text in found]
        texts[i] = list(dict.fromkeys(cut))
    return [texts[i] for i in range(len(questions))]


def _length_read(question: Question) -> int:
    """The size of the source, or of the prompt if there is no source."""
    return np.size(question.prompt if question.source is None else question.source)


def best_text(texts: Sequence[str]) -> str:
    """The first of the texts that a search found, or "" if it found none."""
    return texts[0] if texts else ""


def new_tokens_for(model: Any, max_tokens: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """The number of tokens that may follow each prompt: `max_tokens`, or the free positions.

    A table of learned positions limits the positions. Raises ConfigError for a prompt that leaves
    none.
    """
    limit = models.last_stack(model).position_limit
    for number, prompt in enumerate(prompts):
        if len(prompt) >= limit:
            taken = (
                f"its {len(prompt)} tokens leave none of the {limit} learned positions "
                "for an answer"
            )
            raise ConfigError(f"prompt {number + 1} of {len(prompts)}: {taken}; shorten it")
    return [min(max_tokens, limit - len(prompt)) for prompt in prompts]


def continuation(
    decode: Callable[[list[int]], str], prompt: Sequence[int], new: Sequence[int]
) -> str:
    """The text of new tokens after a prompt: one character may span the end of the prompt."""
    return decode([*prompt, *new])[len(decode([*prompt])) :]


def stop_strings(
    decode: Callable[[list[int]], str], strings: Sequence[str]
) -> Callable[[list[int]], int | None] | None:
    """The argument `stop` of `generate` for these strings; None without strings.

    A string may begin in one token and end in another. Raises ConfigError for an empty string.
    """
    if not strings:
        return None
    if "" in strings:
        raise ConfigError("stop: '' is in every text, so nothing would be written; leave it out")
    return lambda tokens: (
        len(tokens) if any(string in decode(tokens) for string in strings) else None
    )


def as_strings(stop: Sequence[str] | str) -> Sequence[str]:
    """Stop strings as a list. A single string is one stop string, not a list of its letters."""
    return [stop] if isinstance(stop, str) else stop


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text before the first of the strings."""
    return text[
        : min((text.index(string) for string in strings if string in text), default=len(text))
    ]
