"""Dates in words to ISO form: an encoder-decoder on bytes.

"the twenty-first of may, nineteen eighty-four" is 1984-05-21. Pairs come from a grammar with six
forms of a date. No day of the validation split is in the training split, in any form.
Expected: exact match 98.7 % (296 of 300 unseen days; seed 0, CPU).
Time: 65 seconds on 2 CPU cores.

Command: make train EXP=dates
    make generate EXP=dates ARGS="--prompt 'the third of may, two thousand and seven'"
"""
# ruff: noqa: SIM905 (words in a line are read at once)

import datetime
from dataclasses import dataclass, replace

import numpy as np

from jaxformer.data import pairs, tokenizers
from jaxformer.data.sources import Dataset
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.training import AdamW, Cosine, Experiment, Sample

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = dict(
    one="first",
    two="second",
    three="third",
    five="fifth",
    eight="eighth",
    nine="ninth",
    twelve="twelfth",
)
MONTHS = (
    "january february march april may june july august september october november december".split()
)


def words(number: int) -> str:
    """A number below 100 in words."""
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


def ordinal(number: int) -> str:
    """The ordinal of a number, such as twenty-first."""
    *front, last = words(number).split("-")
    regular = (last[:-1] + "ie" if last.endswith("y") else last) + "th"
    return "-".join([*front, ORDINALS.get(last, regular)])


def year(number: int) -> str:
    """A year from 1100 to 2099 in spoken form."""
    century, rest = divmod(number, 100)
    if century == 20 and rest < 10:
        return "two thousand" + (f" and {ONES[rest]}" if rest else "")
    if rest == 0:
        return f"{words(century)} hundred"
    return f"{words(century)} " + (f"oh {ONES[rest]}" if rest < 10 else words(rest))


def phrase(day: datetime.date, form: int) -> str:
    """A day in one of six forms."""
    month = MONTHS[day.month - 1]
    return (
        f"the {ordinal(day.day)} of {month}, {year(day.year)}",
        f"{month} the {ordinal(day.day)}, {year(day.year)}",
        f"{month} {day.day}, {day.year}",
        f"{day.day} {month[:3]} {day.year}",
        f"{words(day.day)} {month} {year(day.year)}",
        f"{day.day}. {day.month}. {year(day.year)}",
    )[form]


@dataclass(frozen=True)
class Dates:
    """Days from 1100 to 2099, each in one of the forms, as pairs."""

    examples: int = 30_000  # of the training split
    validation_examples: int = 300  # of the validation split
    seed: int = 0  # of the examples

    def open(self, model) -> Dataset:
        rng = np.random.default_rng(self.seed)
        first = datetime.date(1100, 1, 1)
        count = self.examples + self.validation_examples
        offsets = rng.permutation((datetime.date(2100, 1, 1) - first).days)[:count]
        days = [first + datetime.timedelta(int(offset)) for offset in offsets]
        texts = [
            pairs.Pair(f"day {i}", phrase(day, int(rng.integers(6))), day.isoformat())
            for i, day in enumerate(days)
        ]
        held_out, learned = texts[: self.validation_examples], texts[self.validation_examples :]
        one_a_row = pairs.Buckets(())
        return pairs.open_pairs(
            learned, held_out, tokenizers.Bytes(), model, one_a_row, name="dates"
        )

    def question(self, model, tokenizer, text):
        return pairs.question(model, tokenizer, text)


stack = ModelConfig(
    vocab_size=257,
    num_layers=2,
    d_model=64,
    num_heads=4,
    context_length=16,
    feedforward="gelu",
    init_std=0.1,
)
experiment = Experiment(
    name="dates",
    model=EncoderDecoder(
        encoder=replace(stack, heads=(), masks=(full(),), context_length=64), decoder=stack
    ),
    data=Dates(),
    optimizer=AdamW(learning_rate=3e-3, b2=0.98),
    schedule=Cosine(warmup=100),
    steps=1000,
    batch_size=32,
    eval_every=250,
    metrics=(Generated(scores=(exact_match,), max_tokens=12),),
    sample=Sample(prompt="the third of may, two thousand and seven", tokens=12),
)
