"""Scores of texts that a model writes: the answers to a split's questions beside the right ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxformer.data.sources import Question
from jaxformer.decoding import Beams, Sampling, generate, search
from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation

Score = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]  # (answers, references) -> scores


@dataclass(frozen=True)
class Generated:
    """Answers to the questions of the validation split, scored by functions of (answers, references).

    `text_metrics` has bleu, chrf, rouge, exact_match and token_f1.
    """

    scores: tuple[Score, ...]
    how: Beams | Sampling = Sampling(temperature=0.0)
    max_tokens: int = 128  # of an answer
    examples: int | None = None  # the first so many questions; None: all
    rows: int = 32  # answers that are written at a time
    only_final: bool = True  # at the end of training; False: at every evaluation

    def __call__(self, scored: Evaluation) -> dict[str, Any]:
        questions = getattr(scored.dataset.validation, "questions", None)
        if not questions:
            raise ConfigError("metrics: Generated needs a validation split with `questions`, such as that of data.pairs.Pairs")
        questions = questions[: self.examples]
        found = answers(
            scored.model, scored.params, questions, scored.dataset.tokenizer, self.max_tokens, self.how, rows=self.rows,
            seed=scored.seed, precision=scored.precision,
        )  # fmt: skip
        texts, references = [some[0] for some in found], [question.reference for question in questions]
        return {name: value for score in self.scores for name, value in score(texts, references).items()}


def answers(
    model: Any, params: Any, questions: Sequence[Question], tokenizer: Any, max_tokens: int, how: Beams | Sampling, *,
    rows: int = 32, seed: int = 0, precision: str = "float32", **options,
) -> list[list[str]]:  # fmt: skip
    """What a model answers to each question: one text, or the `n_best` of a beam search; options of `decoding.generate`."""
    order = sorted(range(len(questions)), key=lambda i: len(_read(questions[i])))  # rows of one length end together
    prompts = [questions[i].prompt for i in order]
    sources = [questions[i].source for i in order]
    options |= dict(
        sources=None if all(source is None for source in sources) else sources, how=how, rows=rows,
        stop_tokens=(tokenizer.end,), dtype=jax.numpy.dtype(precision),
    )  # fmt: skip
    if isinstance(how, Beams):
        found = [[text.tokens for text in some] for some in search(model, params, prompts, max_tokens, **options)]
    else:
        key = jax.random.key(seed)
        found = [[tokens] for tokens in generate(model, params, prompts, max_tokens, key=key, **options)]
    texts = {i: [tokenizer.decode(tokens).strip() for tokens in some] for i, some in zip(order, found, strict=True)}
    return [texts[i] for i in range(len(questions))]


def _read(question: Question) -> Any:
    return np.asarray(question.prompt if question.source is None else question.source)
