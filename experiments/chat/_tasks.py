"""The facts as data: texts for pre-training, conversations, choices between answers, and a score.

`Statements` tell the facts, `Talks` are conversations that ask for them, `Choices` have a right and
a wrong answer. A question that validation asks is told and asked nowhere in training.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.chat._facts import ALL, SUMS_FIRST, facts, result
from jaxformer.data import chat, tokenizers
from jaxformer.data.chat_template import built_in
from jaxformer.data.preferences import Choice, open_preferences
from jaxformer.data.rollouts import Answer
from jaxformer.data.sources import Dataset, Question, Windows, context_length
from jaxformer.decoding import Sampling
from jaxformer.evaluation.generation import answers, best_text
from jaxformer.evaluation.metric import Evaluation


@dataclass(frozen=True)
class Statements:
    """Facts told one after another, as bytes."""

    training: int = 100_000  # facts
    validation: int = 1000
    kinds: tuple[str, ...] = SUMS_FIRST
    seed: int = 0  # of the facts
    end_of_text = 0xFF  # an answer may end there

    def open(self, model: Any) -> Dataset:
        length = context_length(model)
        tokens = []
        for split, count in enumerate((self.training, self.validation)):
            rng = np.random.default_rng((self.seed, split))
            found = facts(rng, count, bool(split), self.kinds)
            text = "\n".join(fact.statement for fact in found)
            tokens.append(tokenizers.Bytes().encode_text(text))
        digest = hashlib.sha256(b"".join(each.tobytes() for each in tokens)).hexdigest()
        train, validation = tokens
        return Dataset(
            train=Windows(train, length),
            validation=Windows(validation, length, stride=length),
            digest=digest,
            description=f"{self.training:,} statements, {len(train):,} bytes",
            vocab_size=256,
            tokenizer=tokenizers.Bytes(),
        )


@dataclass(frozen=True)
class Talks:
    """Conversations of one or two questions, each with its answer."""

    training: int = 20_000  # conversations
    validation: int = 400
    kinds: tuple[str, ...] = ALL
    questions: int = 2  # at most, in a conversation
    seed: int = 0  # of the facts

    def open(self, model: Any) -> Dataset:
        splits = []
        for split, count in enumerate((self.training, self.validation)):
            rng = np.random.default_rng((self.seed, 2 + split))
            splits.append([self._talk(rng, i, bool(split)) for i in range(count)])
        train, validation = splits
        return chat.open_chat(train, validation, chat_tokenizer(), model, name="talks")

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        return chat.user_question(tokenizer, text, reference)

    def _talk(self, rng: np.random.Generator, number: int, held_out: bool) -> chat.Conversation:
        messages: list[dict] = []
        for fact in facts(rng, int(rng.integers(self.questions)) + 1, held_out, self.kinds):
            messages += user_says(fact.question) + assistant_says(fact.answer)
        return chat.Conversation(f"talk {number}", messages)


@dataclass(frozen=True)
class Choices:
    """Questions with the right answer, and with that of another question of the same kind."""

    training: int = 8000  # questions
    validation: int = 400
    kinds: tuple[str, ...] = ALL
    seed: int = 0  # of the facts

    def open(self, model: Any) -> Dataset:
        train, validation = (
            self._choices(np.random.default_rng((self.seed, 4 + split)), count, bool(split))
            for split, count in enumerate((self.training, self.validation))
        )
        return open_preferences(train, validation, chat_tokenizer(), model, name="choices")

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        return chat.user_question(tokenizer, text, reference)

    def _choices(self, rng: np.random.Generator, count: int, held_out: bool) -> list[Choice]:
        choices = []
        for i in range(count):
            kind = self.kinds[int(rng.integers(len(self.kinds)))]
            fact, other = facts(rng, 2, held_out, (kind,))
            while result(other.answer) == result(fact.answer):
                (other,) = facts(rng, 1, held_out, (kind,))
            right, wrong = (assistant_says(each.answer) for each in (fact, other))
            choices.append(Choice(i, user_says(fact.question), right, wrong))
        return choices


def user_says(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def assistant_says(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def chat_tokenizer() -> Any:
    """Bytes, with the template of conversations."""
    return tokenizers.Bytes().with_chat(built_in("chatml"))


def has_right_result(answers: Sequence[Answer]) -> list[float]:
    """1 for each complete answer that ends with the right result, else 0."""
    return [
        float(answer.is_complete and result(answer.text) == result(answer.question.reference))
        for answer in answers
    ]


@dataclass(frozen=True)
class ExactByKind:
    """The share of unseen questions of each kind with the exact result, and the mean of shares."""

    count: int = 200  # questions of each kind
    max_tokens: int = 28  # of an answer
    only_final = True

    def check(self, model: Any, dataset: Dataset) -> list[str]:
        return ["exact", *(f"exact_{kind}" for kind in ALL)]

    def __call__(self, scored: Evaluation) -> dict[str, float]:
        tokenizer = chat_tokenizer()
        scores = {}
        for kind in ALL:
            found = facts(np.random.default_rng(6), self.count, True, (kind,))
            questions = [
                chat.user_question(tokenizer, fact.question, fact.answer) for fact in found
            ]
            texts = answers(
                scored.model,
                scored.params,
                questions,
                tokenizer,
                self.max_tokens,
                Sampling(temperature=0.0),
                stop_tokens=tokenizers.stop_tokens(tokenizer),
                rows=64,
                precision=scored.precision,
            )
            right = [
                result(best_text(each)) == result(question.reference)
                for each, question in zip(texts, questions, strict=True)
            ]
            scores[f"exact_{kind}"] = float(np.mean(right))
        return {"exact": float(np.mean(list(scores.values()))), **scores}
