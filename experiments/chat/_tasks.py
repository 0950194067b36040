"""Small questions about sums, dates, units and spelling, with their answers: nothing to download.

`Statements` are texts that tell the facts, for pre-training. `Talks` are conversations that ask for
them. A question that validation asks is told and asked nowhere in training.
"""

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import chat, tokenizers
from jaxformer.data.chat_template import built_in
from jaxformer.data.sources import Dataset, Question, Windows, context_length

FIRST_DAY = datetime.date(2000, 1, 1)
DAYS = 36_525  # to choose from: a hundred years
HELD_OUT = 10  # one question of ten is asked in validation alone
VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprstvz"
# (unit, its name, a smaller unit, its name, how many of them it has)
UNITS = (
    ("km", "kilometres", "m", "metres", 1000),
    ("m", "metres", "cm", "centimetres", 100),
    ("kg", "kilograms", "g", "grams", 1000),
    ("h", "hours", "min", "minutes", 60),
    ("d", "days", "h", "hours", 24),
)


class Fact(NamedTuple):
    """A fact: told in a sentence, and asked for."""

    statement: str
    question: str
    answer: str

    @property
    def is_held_out(self) -> bool:
        """Whether only validation tells it or asks for it."""
        return hashlib.sha256(self.question.encode()).digest()[0] % HELD_OUT == 0


def sums(rng: np.random.Generator) -> Fact:
    a, b = rng.integers(1, 100, 2).tolist()
    return Fact(f"{a} + {b} = {a + b}.", f"What is {a} + {b}?", str(a + b))


def dates(rng: np.random.Generator) -> Fact:
    day = FIRST_DAY + datetime.timedelta(int(rng.integers(DAYS)))
    before, after = (
        f"{each.day} {each:%B} {each.year}" for each in (day, day + datetime.timedelta(1))
    )
    return Fact(f"After {before} comes {after}.", f"Which day follows {before}?", after)


def units(rng: np.random.Generator) -> Fact:
    unit, name, part, part_name, times = UNITS[rng.integers(len(UNITS))]
    count = int(rng.integers(2, 100))
    return Fact(
        f"{count} {unit} = {count * times} {part}.",
        f"How many {part_name} are {count} {name}?",
        str(count * times),
    )


def spelling(rng: np.random.Generator) -> Fact:
    word = "".join(
        CONSONANTS[rng.integers(len(CONSONANTS))] + VOWELS[rng.integers(len(VOWELS))]
        for _ in range(rng.integers(2, 5))
    )
    letters = "-".join(word)
    return Fact(f"{word} is spelled {letters}.", f"Spell {word}.", letters)


KINDS: dict[str, Callable[[np.random.Generator], Fact]] = {
    "sums": sums,
    "dates": dates,
    "units": units,
    "spelling": spelling,
}


def facts(rng: np.random.Generator, count: int, held_out: bool) -> list[Fact]:
    """Random facts of all kinds, of training or held out."""
    kinds = list(KINDS.values())
    found: list[Fact] = []
    while len(found) < count:
        fact = kinds[rng.integers(len(kinds))](rng)
        if fact.is_held_out == held_out:
            found.append(fact)
    return found


@dataclass(frozen=True)
class Statements:
    """Facts told one after another, as bytes."""

    training: int = 60_000  # facts
    validation: int = 1000
    seed: int = 0  # of the facts
    end_of_text = 0xFF  # an answer may end there

    def open(self, model: Any) -> Dataset:
        length = context_length(model)
        tokens = []
        for split, count in enumerate((self.training, self.validation)):
            found = facts(np.random.default_rng((self.seed, split)), count, bool(split))
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
    seed: int = 0  # of the facts

    def open(self, model: Any) -> Dataset:
        splits = []
        for split, count in enumerate((self.training, self.validation)):
            rng = np.random.default_rng((self.seed, 2 + split))
            found = facts(rng, 2 * count, bool(split))
            splits.append([self._talk(rng, i, found[2 * i : 2 * i + 2]) for i in range(count)])
        tokenizer = tokenizers.Bytes().with_chat(built_in("chatml"))
        train, validation = splits
        return chat.open_chat(train, validation, tokenizer, model, name="talks")

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        return chat.question(tokenizer, [{"role": "user", "content": text}], reference)

    def _talk(self, rng: np.random.Generator, number: int, found: list[Fact]) -> chat.Conversation:
        messages = []
        for fact in found[: rng.integers(1, 3)]:
            messages.append({"role": "user", "content": fact.question})
            messages.append({"role": "assistant", "content": fact.answer})
        return chat.Conversation(f"talk {number}", messages)
