"""Small facts about sums, dates, units and spelling, told and asked for: nothing to download."""

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FIRST_DAY = datetime.date(2000, 1, 1)
DAYS = 36_525  # to choose from: a hundred years
HELD_OUT = 10  # one question of ten is asked in validation alone
VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprstvz"
# (unit, its name, a smaller unit, its name, how many of them it has)
UNITS = (
    ("km", "kilometres", "m", "metres", 1000),
    ("m", "metres", "cm", "centimetres", 100),
    ("cm", "centimetres", "mm", "millimetres", 10),
    ("kg", "kilograms", "g", "grams", 1000),
    ("t", "tons", "kg", "kilograms", 1000),
)
ALL = ("sums", "dates", "units", "spelling")
SUMS_FIRST = ("sums", "sums", "sums", "dates", "units", "spelling")


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
    count = int(rng.integers(2, 1000))
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


def facts(
    rng: np.random.Generator, count: int, held_out: bool, kinds: Sequence[str] = ALL
) -> list[Fact]:
    """Random facts, of training or held out. A kind that is named twice comes twice as often."""
    found: list[Fact] = []
    while len(found) < count:
        fact = KINDS[kinds[int(rng.integers(len(kinds)))]](rng)
        if fact.is_held_out == held_out:
            found.append(fact)
    return found
