"""Addition of two numbers of up to six digits, with and without written steps.

Nye et al. 2021, arXiv:2112.00114. With steps the answer to 29+57 begins with "970=16,251=08,": a
step for each digit, from the right. 251=08 says that the digits 2 and 5 and the carry 1 make 8.
The sum follows. Without steps the answer is the sum alone. Numbers are written with six digits:
000029+000057. A sum that validation asks is nowhere in training, also not as 57+29.

Expected (seed 0): of 100 unseen sums each, with 1 to 6 digits, 100, 100, 100, 96, 87 and 45 % are
right with steps, and 52, 65, 39, 18, 10 and 5 % without. The number of sums was chosen for a wide
gap: steps save data. With --data.examples=50000 --steps=800, 100 and 82 % are right at 6 digits.
Time: 8 to 11 minutes each on two CPU cores beside much other work.
Command: make train EXP=scratchpad
    make train EXP=scratchpad ARGS="--name=scratchpad_direct --data.answer=direct"
Then: make generate EXP=scratchpad ARGS="--prompt 123456+654321"
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.data import pairs, tokenizers
from jaxformer.data.sources import Dataset, Question
from jaxformer.evaluation.generation import Generated
from jaxformer.models import ModelConfig
from jaxformer.training import AdamW, Cosine, Experiment, Sample

DIGITS = 6  # of the longest numbers; all are written with as many
HELD_OUT = 10  # one sum of ten is for validation


def written(number: int, digits: int) -> str:
    """A number with zeros in front."""
    return f"{number:0{digits}d}"


def direct(a: str, b: str) -> str:
    """The sum alone, with one digit more than the numbers."""
    return written(int(a) + int(b), len(a) + 1)


def with_steps(a: str, b: str) -> str:
    """The sum after one step for each digit: the two digits and the carry, and their sum."""
    steps = []
    carry = 0
    for x, y in zip(reversed(a), reversed(b), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}{y}{carry}={written(total, 2)},")
        carry = total // 10
    return "".join(steps) + direct(a, b)


def is_held_out(a: int, b: int) -> bool:
    """Whether a sum is for validation. The order of the two numbers plays no role."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % HELD_OUT == 0


@dataclass(frozen=True)
class Addition:
    """Pairs of a sum and its answer. The larger number has 1 to 6 digits, each as often."""

    answer: Callable = with_steps  # what the model writes: with_steps or direct
    examples: int = 1000  # of the training split
    validation_examples: int = 600  # of the validation split, in the order of their digits
    seed: int = 0  # of the sums

    def open(self, model: Any) -> Dataset:
        rng = np.random.default_rng(self.seed)
        splits = []
        for held_out, count in ((False, self.examples), (True, self.validation_examples)):
            sizes = 1 + np.arange(count) * DIGITS // count
            splits.append([self._pair(rng, size, held_out) for size in sizes.tolist()])
        tokenizer = tokenizers.Characters("+,0123456789=")
        one_a_row = pairs.Buckets((24,))  # an answer without steps fits into 24 tokens
        train, validation = splits
        return pairs.open_pairs(train, validation, tokenizer, model, one_a_row, name="addition")

    def question(self, model: Any, tokenizer: Any, text: str) -> Question:
        return pairs.question(model, tokenizer, text)

    def _pair(self, rng: np.random.Generator, size: int, held_out: bool) -> pairs.Pair:
        while True:
            a, b = rng.integers(10**size, size=2).tolist()
            if max(a, b) >= 10 ** (size - 1) and is_held_out(a, b) == held_out:
                break
        left, right = (written(number, DIGITS) for number in (a, b))
        return pairs.Pair(f"{size} digits", f"{left}+{right}", self.answer(left, right))


def exact_by_digits(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The percentage of right sums, for each number of digits. The steps are not compared."""
    sums = ([text.split(",")[-1] for text in each] for each in (texts, references))
    right = [found == expected for found, expected in zip(*sums, strict=True)]
    parts = np.array_split(right, DIGITS)  # the validation split has this order
    return {f"exact_{i}": 100 * float(part.mean()) for i, part in enumerate(parts, 1)}


experiment = Experiment(
    name="scratchpad",
    model=ModelConfig(
        vocab_size=14,
        num_layers=2,
        d_model=64,
        num_heads=4,
        context_length=64,
        init_std=0.1,
    ),
    data=Addition(),
    optimizer=AdamW(learning_rate=2e-3, b2=0.98),
    schedule=Cosine(warmup=100),
    steps=500,
    batch_size=64,
    log_every=50,
    eval_every=500,
    metrics=(Generated(scores=(exact_by_digits,), max_tokens=50, rows=300),),
    sample=Sample(prompt="123456+654329", tokens=50),
)
