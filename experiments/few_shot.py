"""Learning from examples in the context: a mapping that a decoder never saw in training.

Each sequence k1 v1 k2 v2 ... has a random one-to-one mapping of its own, of 4 keys out of 16 to 16
values. The keys come again, in any order. The weights cannot know a mapping, so the decoder must
look back (Brown et al. 2020, arXiv:2005.14165, section 2; Olsson et al. 2022, arXiv:2209.11895).
A perfect learner gives the value of a key that it saw, and else guesses among the values that it
did not see. With m keys seen it is right with probability m / 4 + (1 - m / 4) / (16 - m).
`accuracy.png` in the run's folder draws the accuracy against the number of examples.

Expected: after 1, 2, 4, 8 and 16 examples 31, 47, 67, 79 and 85 % are right (seed 0); a perfect
learner has 30, 47, 71, 91 and 99 %. With 800 steps 64 % are right after 16 examples. The loss
still falls at the last step.
Time: 5 minutes on two CPU cores beside other work.
Command: make train EXP=few_shot
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.data.batching import every_row
from jaxformer.data.sources import Dataset, read_example
from jaxformer.evaluation.metric import Evaluation
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.tools.analysis import figures
from jaxformer.training import AdamW, Cosine, Experiment

KEYS, USED, PAIRS = 16, 4, 17  # keys, and as many values; keys and pairs of a sequence


@dataclass(frozen=True, eq=False)
class Sequences:
    """Pairs of a key, 0 to 15, and its value, 16 to 31: int32 [n, P, 2]."""

    pairs: np.ndarray
    __getitem__ = read_example

    def __len__(self) -> int:
        return len(self.pairs)

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Next-token data [B, 2 P - 1], with weight 1 on values and 0 on keys."""
        text = self.pairs[indices].reshape(len(indices), -1)
        weights = np.zeros(text[:, 1:].shape, np.float32)
        weights[:, ::2] = 1
        return {"tokens": text[:, :-1], "labels": text[:, 1:], "weights": weights}


@dataclass(frozen=True)
class Mappings:
    """Sequences of random mappings."""

    examples: int = 100_000  # sequences of the training split
    validation_examples: int = 2000
    seed: int = 0  # of the sequences

    def open(self, model: Any) -> Dataset:
        counts = (self.examples, self.validation_examples)
        train, validation = (self._sequences(split, count) for split, count in enumerate(counts))
        content = train.pairs.tobytes() + validation.pairs.tobytes()
        digest = hashlib.sha256(content).hexdigest()
        return Dataset(train, validation, digest, str(self), vocab_size=2 * KEYS)

    def _sequences(self, split: int, count: int) -> Sequences:
        rng = np.random.default_rng((self.seed, split))
        every = np.tile(np.arange(KEYS), (count, 1))
        mappings, used = rng.permuted(every, axis=1), rng.permuted(every, axis=1)
        keys = np.take_along_axis(used, rng.integers(USED, size=(count, PAIRS)), axis=1)
        values = KEYS + np.take_along_axis(mappings, keys, axis=1)
        return Sequences(np.stack([keys, values], axis=-1).astype(np.int32))


def perfect_accuracy(keys: np.ndarray) -> np.ndarray:
    """The accuracy [P] of a perfect learner after 0, 1, ... examples, for keys [n, P]."""
    seen = [[len(set(row[:examples])) for row in keys.tolist()] for examples in range(PAIRS)]
    share = np.array(seen) / USED
    return (share + (1 - share) / (KEYS - np.array(seen))).mean(axis=1)


def accuracy_by_examples(scored: Evaluation) -> dict[str, float]:
    """The accuracy after 1, 2, 4, 8 and 16 examples, and that of a perfect learner."""
    split = scored.dataset.validation
    batch = every_row(split)
    found = models.apply(scored.model, scored.params, jnp.asarray(batch["tokens"])).logits[:, ::2]
    right = np.asarray(found).argmax(axis=-1) == batch["labels"][:, ::2]
    curves = {"decoder": right.mean(axis=0), "perfect": perfect_accuracy(split.pairs[..., 0])}
    if scored.folder is not None and jax.process_index() == 0:
        series = {name: (np.arange(PAIRS), curve) for name, curve in curves.items()}
        labels = dict(xlabel="examples", ylabel="accuracy")
        figures.save(lambda: figures.lines(series, **labels), scored.folder / "accuracy.png")
    places = (1, 2, 4, 8, 16)
    return {f"{name}_{k}": float(curve[k]) for name, curve in curves.items() for k in places}


experiment = Experiment(
    name="few_shot",
    model=ModelConfig(
        vocab_size=2 * KEYS,
        num_layers=2,
        d_model=64,
        num_heads=4,
        context_length=2 * PAIRS - 1,
        positions=Rope(),
        init_std=0.1,
    ),
    data=Mappings(),
    optimizer=AdamW(learning_rate=3e-3, b2=0.98),
    schedule=Cosine(warmup=100),
    steps=2500,
    batch_size=64,
    log_every=50,
    eval_every=500,
    metrics=(accuracy_by_examples,),
)
