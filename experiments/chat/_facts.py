"""Small facts about sums, chains of sums, dates, units and spelling: nothing to download."""

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FIRST_DAY = datetime.date(2001, 1, 1)
DAYS = 365
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
ALL = ("sums", "chains", "dates", "units", "spelling")
SUMS_FIRST = ("sums", "sums", "sums", "chains", "chains", "dates", "units", "spelling")
CHAINS_FIRST = ("chains", "chains", "sums", "dates")
LARGEST = 99  # number of a sum
TERMS = 7  # of a chain
WORKED = 0.35  # share of the chains whose answer has steps before the result


class Fact(NamedTuple):
    """A fact: told in a sentence, and asked for."""

    statement: str
    question: str
    answer: str  # the result, or steps and the result

    @property
    def is_held_out(self) -> bool:
        """Whether only validation tells it or asks for it."""
        return hashlib.sha256(self.question.encode()).digest()[0] % HELD_OUT == 0


def sums(rng: np.random.Generator) -> Fact:
    a, b = rng.integers(1, LARGEST + 1, 2).tolist()
    return sum_of(a, b)


def sum_of(a: int, b: int) -> Fact:
    return Fact(f"{a} + {b} = {a + b}.", f"What is {a} + {b}?", str(a + b))


def chains(rng: np.random.Generator) -> Fact:
    """A sum of `TERMS` digits. Some answers are the result alone, some have the sums before it."""
    while True:
        digits = rng.integers(1, 10, TERMS).tolist()
        totals = np.cumsum(digits).tolist()
        steps = [sum_of(*pair) for pair in zip(totals[:-1], digits[1:], strict=True)]
        # a step must not tell a sum that only validation may tell
        if not any(step.is_held_out for step in steps):
            break
    chain = " + ".join(map(str, digits))
    shown = totals[1:] if rng.random() < WORKED else totals[-1:]
    answer = ", ".join(map(str, shown))
    return Fact(f"{chain} = {answer}.", f"What is {chain}?", answer)


def dates(rng: np.random.Generator) -> Fact:
    day = FIRST_DAY + datetime.timedelta(int(rng.integers(DAYS)))
    before, after = (f"{each.day} {each:%B}" for each in (day, day + datetime.timedelta(1)))
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
        for _ in range(rng.integers(2, 4))
    )
    letters = "-".join(word)
    return Fact(f"{word} is spelled {letters}.", f"Spell {word}.", letters)


KINDS: dict[str, Callable[[np.random.Generator], Fact]] = {
    "sums": sums,
    "chains": chains,
    "dates": dates,
    "units": units,
    "spelling": spelling,
}


def result(answer: str) -> str:
    """The part of an answer that is its result: what stands behind the last step."""
    return answer.rsplit(",", 1)[-1].strip()


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
