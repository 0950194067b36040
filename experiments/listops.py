"""ListOps: the value, 0 to 9, of nested lists such as [MAX 2 9 [MIN 4 7 ] 0 ].

Every kind of attention can be tried on it. Nangia & Bowman 2018, arXiv:1804.06028; operators and
the shape of the trees as in Long Range Arena (Tay et al. 2020, arXiv:2011.04006, section 2.2.1):
MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10) of 2 to `args` values. Each
value is a list with probability 1/4, down to `depth` levels. Longer expressions need larger trees,
as in Long Range Arena: --data.shortest=500 --data.longest=2000 --data.depth=10 --data.args=10
--model.context-length=2000.

Expected accuracy on 1000 unseen expressions of 16 to 64 tokens, after 300 steps (seed 0; standard
error 1.3 %; the most frequent value alone gives 11.6 %). This training is too short to rank the
kinds of attention, but each of them learns.

    attention       options                                                     accuracy
    full                                                                        23.9 %
    local           --model.masks "(window(8, 8),)"                             24.8 %
    Longformer      --model.mixer "Longformer(window=16, global_tokens=1)"      22.7 %
    BigBird         --model.mixer "BigBird(block=8, random=1)"                  24.8 %
    Linformer       --model.mixer "Linformer(rank=16)"                          22.4 %
    linear          --model.mixer "Linear()"                                    23.9 %
    efficient       --model.mixer "Efficient()"                                 24.4 %
    local chunks    --model.mixer "LocalChunks(chunk=16, before=1, after=1)"    23.8 %
    Performer       --model.mixer "Performer(features=64)"                      24.0 %
    Reformer        --model.mixer "Reformer(chunk=16)"                          23.5 %

Time: 17 to 25 seconds of one CPU core each, most of it compilation. Each line of the table is one
such command; this one is the line "linear".
Command: make train EXP=listops ARGS="--name=listops-linear --model.mixer 'Linear()'"
"""

import functools
import hashlib
import random
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.data.sources import Dataset, context_length
from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig
from jaxformer.training import AdamW, ClassCrossEntropy, Cosine, Experiment

OPERATORS = ("MIN", "MAX", "MED", "SM")  # ids 10 to 13; digits are 0 to 9, the end of a list is 14
END = 14
DRAWS = 100_000  # trees that are drawn at most, until one has the right length


def value(operator: str, values: list[int]) -> int:
    """The value of a list."""
    match operator:
        case "MIN":
            return min(values)
        case "MAX":
            return max(values)
        case "MED":
            return int(statistics.median(values))
        case _:
            return sum(values) % 10


def expression(
    rng: random.Random, depth: int, args: int, nested: bool = False
) -> tuple[list[int], int]:
    """(tokens, value) of a random tree."""
    if nested and (depth == 0 or rng.random() > 0.25):
        digit = rng.randrange(10)
        return [digit], digit
    operator = rng.randrange(len(OPERATORS))
    operands = [expression(rng, depth - 1, args, nested=True) for _ in range(rng.randint(2, args))]
    tokens = [token for operand, _ in operands for token in operand]
    result = value(OPERATORS[operator], [operand_value for _, operand_value in operands])
    return [10 + operator, *tokens, END], result


@dataclass(frozen=True)
class ListOps:
    """Expression i is a function of (seed, split, i)."""

    shortest: int = 16  # tokens of an expression
    longest: int = 64  # tokens of an expression
    depth: int = 4  # most levels of a tree
    args: int = 5  # most values of a list
    examples: int = 20_000  # of the training split
    validation_examples: int = 1000  # of the validation split
    seed: int = 0  # of the expressions

    def open(self, model) -> Dataset:
        if not self.shortest <= self.longest:
            raise ConfigError(
                f"data.shortest={self.shortest}: more than data.longest={self.longest}"
            )
        if (length := context_length(model)) < self.longest:
            raise ConfigError(
                f"data.longest={self.longest}: more than model.context_length={length}"
            )
        train, validation = (Expressions(self, split, length) for split in (0, 1))
        # another Python may draw other numbers, so the digest has some of them
        sample = b"".join(train[i]["tokens"].tobytes() for i in range(16))
        digest = hashlib.sha256(f"{self} {length}".encode() + sample).hexdigest()
        return Dataset(train, validation, digest, description=str(self), vocab_size=END + 1)


class Expressions:
    """Example i: tokens, segment_ids (0: padding) int32 [T], labels int32, weights float32."""

    def __init__(self, config: ListOps, split: int, length: int):
        self.config, self.split, self.length = config, split, length
        self._draw = functools.lru_cache(maxsize=1 << 16)(self._drawn)

    def __len__(self) -> int:
        return self.config.validation_examples if self.split else self.config.examples

    def _drawn(self, index: int) -> tuple[list[int], int]:
        config = self.config
        rng = random.Random(f"{config.seed} {self.split} {index}")
        for _ in range(DRAWS):  # until the length is right
            tokens, result = expression(rng, config.depth, config.args)
            if config.shortest <= len(tokens) <= config.longest:
                return tokens, result
        problem = f"none of {DRAWS:,} trees has {config.shortest} to {config.longest} tokens"
        raise ConfigError(
            f"data.depth={config.depth}, data.args={config.args}: {problem}; "
            "raise data.depth or data.args"
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, result = self._draw(range(len(self))[index])
        padding = (0, self.length - len(tokens))
        return {
            "tokens": np.pad(np.array(tokens, np.int32), padding),
            "segment_ids": np.pad(np.ones(len(tokens), np.int32), padding),
            "labels": np.int32(result),
            "weights": np.float32(1),
        }


@dataclass(frozen=True)
class Majority:
    """The accuracy of always giving the class that is most frequent in the validation split."""

    only_final: bool = True

    def __call__(self, scored: Evaluation) -> dict[str, float]:
        split = scored.dataset.validation
        counts = np.bincount([split[i]["labels"] for i in range(len(split))])
        return {"majority": float(counts.max() / counts.sum())}


experiment = Experiment(
    name="listops",
    model=ModelConfig(
        vocab_size=END + 1,
        num_layers=2,
        d_model=32,
        num_heads=2,
        context_length=64,
        feedforward="gelu",
        masks=(full(),),
        heads=(Classification(10, pool="mean"),),
        init_std=0.1,
    ),
    data=ListOps(),
    objective=ClassCrossEntropy(),
    optimizer=AdamW(learning_rate=4e-3, b2=0.98),
    schedule=Cosine(warmup=50),
    steps=300,
    batch_size=32,
    eval_every=300,
    metrics=(Majority(),),
)
