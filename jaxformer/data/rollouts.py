"""Answers of the current policy as training data: `Rollouts`.

Read `Rollouts`, then `Sampler`: it makes the batch of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer import models
from jaxformer.data.sources import Dataset, Question
from jaxformer.data.tokenizers import stop_tokens
from jaxformer.decoding import Sampling, generate
from jaxformer.errors import ConfigError, check_positive, check_whole

LENGTHS = 16  # the length of a row is a multiple of this


class Answer(NamedTuple):
    """An answer that the policy wrote."""

    question: Question  # its prompt, and the right answer if the data have one
    tokens: list[int]  # with the token that ends it
    text: str  # without the end
    is_complete: bool  # whether it ended by itself, within `max_tokens`


def is_right(answers: Sequence[Answer]) -> list[float]:
    """1 for each complete answer that is the data's own, up to spaces around it; else 0."""
    return [
        float(answer.is_complete and answer.text.strip() == answer.question.reference.strip())
        for answer in answers
    ]


@dataclass(frozen=True)
class Rollouts:
    """Answers that the current policy draws before each step, `group` for each of B questions.

    B is the experiment's batch size. The questions are drawn from the training split of
    `questions`, whose validation split is that of the run. The batch is that of
    `objectives.policy`. The same seed, step and parameters give the same batch.
    """

    questions: Any  # data with questions, such as Chat(...)
    # (answers) -> a number for each: of their texts or of their tokens
    reward: Callable[[Sequence[Answer]], Sequence[float]] = is_right
    group: int = 8  # answers to each question
    max_tokens: int = 128  # of an answer
    temperature: float = 1.0  # divides the logits
    updates: int = 1  # number of steps that use one batch of samples
    rows: int = 128  # answers that are written at a time
    precision: str = "float32"  # of the activations in writing

    def __post_init__(self):
        for name, least in {"group": 2, "max_tokens": 1, "updates": 1, "rows": 1}.items():
            check_whole(f"data.{name}", getattr(self, name), least)
        check_positive("data.temperature", self.temperature)

    # data without questions of a user's text have no such method
    question = property(lambda self: self.questions.question)

    def open(self, model: Any) -> Dataset:
        dataset = self.questions.open(model)
        questions = getattr(dataset.train, "questions", ())
        if not len(questions) or dataset.tokenizer is None:
            kind = type(self.questions).__name__
            raise ConfigError(
                f"data.questions={kind}: its training split has no questions; "
                "give Chat(...) or Pairs(...)"
            )
        sampler = Sampler(
            self, model, fitting_questions(questions, model, self.max_tokens), dataset.tokenizer
        )
        return replace(
            dataset,
            train=sampler,
            description=f"{self.group} answers to each of {len(sampler.questions):,} questions; "
            f"{dataset.description}",
        )


def fitting_questions(questions: Sequence[Question], model: Any, max_tokens: int) -> list[Question]:
    """The questions that leave `max_tokens` for an answer.

    Raises ConfigError if none does, and for questions to an encoder.
    """
    made = list(questions)
    if made[0].source is not None:
        raise ConfigError(
            "data.questions: its questions have a source; expected questions to a decoder alone"
        )
    limit = models.last_stack(model).context_length
    found = [each for each in made if len(each.prompt) + max_tokens <= limit]
    if not found:
        raise ConfigError(
            f"data.max_tokens={max_tokens}: no question leaves so many of the model's {limit} "
            "tokens; give a smaller number, or a longer context"
        )
    return found


@dataclass(frozen=True, eq=False)
class Sampler:
    """(params, key, step, batch_size) -> the batch of a step."""

    rollouts: Rollouts
    model: Any
    questions: Sequence[Question]
    tokenizer: Any

    def __call__(self, params: Any, key: Any, step: int, batch_size: int) -> dict[str, np.ndarray]:
        rollouts = self.rollouts
        if step % rollouts.updates:  # the objective has the samples of an earlier step
            return self.batch([], batch_size)
        question_key, answer_key = jax.random.split(key)
        count = len(self.questions)
        chosen = jax.random.choice(question_key, count, (batch_size,), replace=batch_size > count)
        questions = [self.questions[i] for i in jax.device_get(chosen).tolist()]
        repeated = [question for question in questions for _ in range(rollouts.group)]
        return self.batch(self.answers(params, repeated, answer_key), batch_size)

    def answers(self, params: Any, questions: Sequence[Question], key: Any) -> list[Answer]:
        """An answer to each question."""
        ends = frozenset(stop_tokens(self.tokenizer))
        rollouts = self.rollouts

        def stop(tokens: list[int]) -> int | None:
            """How many of the tokens to keep: up to the first that ends an answer."""
            return next((i + 1 for i, token in enumerate(tokens) if token in ends), None)

        written = generate(
            models.evaluation(self.model),
            params,
            [question.prompt for question in questions],
            rollouts.max_tokens,
            sampling=Sampling(temperature=rollouts.temperature),
            key=key,
            stop=stop,
            rows=rollouts.rows,
            dtype=jax.numpy.dtype(rollouts.precision),
        )
        answers = []
        for question, tokens in zip(questions, written, strict=True):
            is_complete = tokens[-1] in ends
            text = self.tokenizer.decode(tokens[:-1] if is_complete else tokens)
            answers.append(Answer(question, tokens, text, is_complete))
        return answers

    def batch(self, answers: Sequence[Answer], batch_size: int) -> dict[str, np.ndarray]:
        """The batch of the answers, G for each question; zeros without answers."""
        rollouts = self.rollouts
        B, G, T = batch_size, rollouts.group, self.length
        batch: dict[str, np.ndarray] = {
            "tokens": np.zeros((B * G, T), np.int32),
            "labels": np.zeros((B * G, T), np.int32),
            "answers": np.zeros((B * G, T), np.float32),
        }
        for row, answer in enumerate(answers):
            prompt = answer.question.prompt
            text = [*prompt, *answer.tokens]
            n = len(text) - 1
            batch["tokens"][row, :n] = text[:-1]
            batch["labels"][row, :n] = text[1:]
            batch["answers"][row, len(prompt) - 1 : n] = 1
        batch = {name: rows.reshape(B, G, T) for name, rows in batch.items()}
        rewards = np.zeros((B, G), np.float32)
        if answers:
            rewards = rewards_of(rollouts.reward, answers).reshape(B, G)
        batch |= {
            "rewards": rewards,
            "weights": np.full(B, bool(answers), np.float32),
            "temperature": np.full(B, rollouts.temperature, np.float32),
        }
        if rollouts.updates > 1:
            batch["fresh"] = np.full(B, bool(answers), np.float32)
        return batch

    @cached_property
    def length(self) -> int:
        """T: enough for the longest prompt with an answer."""
        longest = max(len(question.prompt) for question in self.questions)
        length = longest + self.rollouts.max_tokens - 1
        return min(-(-length // LENGTHS) * LENGTHS, models.last_stack(self.model).context_length)


def rewards_of(reward: Callable, answers: Sequence[Answer]) -> np.ndarray:
    """The rewards, float32 [n]. Raises ConfigError unless they are one finite number an answer."""
    name = getattr(reward, "__name__", type(reward).__name__)
    values = jax.device_get(reward(answers))
    try:
        rewards = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data.reward={name}: gave {type(values).__name__}; expected a number for each of "
            f"{len(answers)} answers"
        ) from error
    problem = None
    if rewards.shape != (len(answers),):
        problem = f"shape {rewards.shape}"
    elif not np.isfinite(rewards).all():
        problem = f"{rewards[~np.isfinite(rewards)][0]} for one answer"
    if problem is not None:
        raise ConfigError(
            f"data.reward={name}: gave {problem}; expected a finite number for each of "
            f"{len(answers)} answers"
        )
    return rewards
