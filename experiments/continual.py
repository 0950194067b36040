"""A second task after a first one, and what is forgotten: with and without replay.

The model of `dates` learned to write dates in ISO form. Here it learns Roman numerals: 1984 is
MCMLXXXIV. Without replay every example is a number. With replay a share of each batch are dates
again (Robins 1995, Catastrophic forgetting, rehearsal and pseudorehearsal). Scores are exact
matches of 300 unseen dates and 300 unseen numbers, before and after.

Expected (seed 0): before, 99.7 % of the dates are right. After numerals without replay 0 % of the
dates and 97.7 % of the numerals are right, with 10 % replay 87.3 and 96.7 %.
Time: 2 minutes each on two CPU cores beside other work.
Command: make train EXP=dates, then make train EXP=continual
    make train EXP=continual ARGS="--name=continual_replay --data.replay=0.1"
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.dates import Dates, experiment as first
from jaxformer.data import pairs, tokenizers
from jaxformer.data.sources import Dataset
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.training import Sample

SYMBOLS = dict(M=1000, CM=900, D=500, CD=400, C=100, XC=90, L=50, XL=40, X=10, IX=9, V=5, IV=4, I=1)
LARGEST = 3999  # of the numbers that these symbols write


def roman(number: int) -> str:
    """A number in Roman numerals."""
    text = ""
    for symbol, value in SYMBOLS.items():
        count, number = divmod(number, value)
        text += symbol * count
    return text


@dataclass(frozen=True)
class Numerals:
    """Pairs of a number, 1 to 3999, and its numeral; and a share of dates that are read again."""

    replay: float = 0.0  # share of dates in the training split
    validation_examples: int = 300  # numbers of the validation split
    seed: int = 0  # of the order of the numbers

    def open(self, model: Any) -> Dataset:
        if not 0 <= self.replay < 1:
            raise ConfigError(f"data.replay={self.replay}: expected a share of at least 0, below 1")
        numbers = np.random.default_rng(self.seed).permutation(LARGEST) + 1
        texts = [pairs.Pair(f"number {n}", str(n), roman(n)) for n in numbers.tolist()]
        held_out, learned = texts[: self.validation_examples], texts[self.validation_examples :]
        if self.replay:
            learned += dates(model, round(len(learned) * self.replay / (1 - self.replay)))
        one_a_row = pairs.Buckets(())
        return pairs.open_pairs(
            learned, held_out, tokenizers.Bytes(), model, one_a_row, name="numerals"
        )

    question = Dates.question


def dates(model: Any, count: int) -> list[pairs.Pair]:
    """The first pairs of the training split of the first task."""
    dataset = Dates(examples=count).open(model)
    decode = dataset.tokenizer.decode
    questions = dataset.train.questions
    return [pairs.Pair("date", decode(each.source[:-1]), each.reference) for each in questions]


def exact_by_task(scored: Evaluation) -> dict[str, float]:
    """The exact match of both tasks, in percent."""
    metric = Generated(scores=(exact_match,), max_tokens=16)
    scores = {}
    # their validation splits do not depend on the number of examples
    for name, task in (("dates", Dates(examples=1)), ("numerals", Numerals())):
        of_task = replace(scored, dataset=task.open(scored.model))
        scores[name] = metric(of_task)["exact_match"]
    return scores


experiment = replace(
    first,
    name="continual",
    initial="dates",
    data=Numerals(),
    steps=300,
    eval_every=300,
    metrics=(exact_by_task,),
    sample=Sample(prompt="1984", tokens=16),
)
