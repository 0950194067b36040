"""Scores of texts that a model writes: the answers to a split's questions beside the right ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxformer import models
from jaxformer.data.sources import Question
from jaxformer.decoding import Beams, Sampling, generate, search
from jaxformer.errors import ConfigError, check_whole
from jaxformer.evaluation.metric import Evaluation
from jaxformer.params import random_key

CHECKED = 200  # references on which scores are tried before a run
Score = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]  # (answers, references) -> scores


@dataclass(frozen=True)
class Generated:
    """Answers to the questions of the validation split, scored by functions of (answers, references).

    `text_metrics` has bleu, chrf, rouge, exact_match and token_f1.
    """

    scores: tuple[Score, ...]  # functions of (answers, references)
    how: Beams | Sampling = Sampling(temperature=0.0)  # how a token is picked, or an answer is searched
    max_tokens: int = 128  # of an answer
    examples: int | None = None  # the first so many questions; None: all
    rows: int = 32  # answers that are written at a time
    only_final: bool = True  # at the end of training; False: at every evaluation

    def __post_init__(self):
        check_whole("metrics: Generated.max_tokens", self.max_tokens)
        check_whole("metrics: Generated.rows", self.rows)
        if not (isinstance(self.scores, tuple | list) and self.scores and all(map(callable, self.scores))):
            shown = getattr(self.scores, "__name__", self.scores)
            raise ConfigError(f"metrics: Generated(scores={shown}): expected a tuple of functions, such as (exact_match,)")

    def questions(self, dataset: Any) -> Sequence[Question]:
        """Those that are asked. Raises ConfigError where there are none."""
        questions = getattr(dataset.validation, "questions", None)
        if not questions:
            raise ConfigError("metrics: Generated needs a validation split with `questions`, such as that of data.pairs.Pairs")
        if self.examples is not None and self.examples < 1:
            raise ConfigError(f"metrics: Generated(examples={self.examples}): must be at least 1, or None for all questions")
        return questions[: self.examples]

    def check(self, model: Any, dataset: Any) -> list[str]:
        """The names of the scores. They are tried on some references, so a missing package or a script is refused at once."""
        references = [question.reference for question in self.questions(dataset)[:CHECKED]]
        return [name for score in self.scores for name in score(references, references)]

    def __call__(self, scored: Evaluation) -> dict[str, Any]:
        questions = self.questions(scored.dataset)
        tokenizer = scored.dataset.tokenizer
        found = answers(
            scored.model, scored.params, questions, tokenizer, self.max_tokens, self.how, rows=self.rows,
            stop_tokens=(tokenizer.end_of_text,), seed=scored.seed, precision=scored.precision,
        )  # fmt: skip
        texts, references = [best_text(some).strip() for some in found], [question.reference for question in questions]
        return {name: value for score in self.scores for name, value in score(texts, references).items()}


def answers(
    model: Any, params: Any, questions: Sequence[Question], tokenizer: Any, max_tokens: int, how: Beams | Sampling, *,
    stop: Sequence[str] | str = (), seed: int = 0, precision: str = "float32", **options,
) -> list[list[str]]:  # fmt: skip
    """What a model writes after each prompt: one text, or the `n_best` of a beam search, up to the first of strings `stop`.

    No text is listed twice, so there may be fewer. Other options are those of `decoding.generate` and
    `decoding.search`, such as `stop_tokens`.
    """
    stop = as_strings(stop)
    order = list(range(len(questions)))
    limits = new_tokens_for(model, max_tokens, [question.prompt for question in questions])
    if isinstance(how, Beams):  # rows of about one length end together
        order.sort(key=lambda i: np.size(questions[i].prompt if questions[i].source is None else questions[i].source))
    prompts, limits = [questions[i].prompt for i in order], [limits[i] for i in order]
    sources = None if questions[0].source is None else [questions[i].source for i in order]
    options |= dict(sources=sources, dtype=jax.numpy.dtype(precision))
    ends = stop_strings(tokenizer.decode, stop)  # refuses strings that no text can end at
    if isinstance(how, Beams):
        found = [[text.tokens for text in some] for some in search(model, params, prompts, limits, beams=how, **options)]
    else:
        key = random_key(seed)
        found = [[text] for text in generate(model, params, prompts, limits, sampling=how, key=key, stop=ends, **options)]

    def text(prompt, tokens):
        return before_stop(continuation(tokenizer.decode, prompt, tokens), stop)

    texts = {i: [text(questions[i].prompt, tokens) for tokens in some] for i, some in zip(order, found, strict=True)}
    return [list(dict.fromkeys(texts[i])) for i in range(len(questions))]


def best_text(texts: Sequence[str]) -> str:
    """The first of the texts that a search found; nothing where it found none."""
    return texts[0] if texts else ""


def new_tokens_for(model: Any, max_tokens: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens may follow each prompt: not more than learned positions are left. ConfigError where none is."""
    limit = models.last_stack(model).position_limit
    for number, prompt in enumerate(prompts):
        if len(prompt) >= limit:
            taken = f"its {len(prompt)} tokens leave none of the {limit} learned positions for an answer"
            raise ConfigError(f"prompt {number + 1} of {len(prompts)}: {taken}; shorten it")
    return [min(max_tokens, limit - len(prompt)) for prompt in prompts]


def continuation(decode: Callable[[list[int]], str], prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens behind those of a prompt: a character may begin in one and end in the other."""
    return decode([*prompt, *new])[len(decode([*prompt])) :]


def stop_strings(decode: Callable[[list[int]], str], strings: Sequence[str]) -> Callable[[list[int]], int | None] | None:
    """`stop` of `generate` for strings, which may begin in one token and end in another. None without strings."""
    if not strings:
        return None
    if "" in strings:
        raise ConfigError("stop: '' is in every text, so nothing would be written; leave it out")
    return lambda tokens: len(tokens) if any(string in decode(tokens) for string in strings) else None


def as_strings(stop: Sequence[str] | str) -> Sequence[str]:
    """Stop strings: one alone is one, not its letters."""
    return [stop] if isinstance(stop, str) else stop


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of the strings."""
    return text[: min((text.index(string) for string in strings if string in text), default=len(text))]
