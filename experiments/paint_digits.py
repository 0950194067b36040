"""Digits painted from their names: "three", "seven".

A decoder reads the letters of a name, and writes the sixteen codes of an image, one after another
(DALL-E: Ramesh et al. 2021, arXiv:2102.12092). The codes are those of a run of `quantise_digits`,
whose decoder then draws the image.
Scores are of 500 samples, 50 of each name: `right` is the share whose class a classifier reads as
asked; `distance` is the mean distance of a sample to the nearest training image. `right_unseen` and
`distance_unseen` are those of 360 unseen digits: a model that repeats its training images has a
much smaller distance. `samples.png` in the run's folder shows samples under their names.
Expected: right 95.0 %, right_unseen 99.4 %, distance 0.76, distance_unseen 0.98 (seed 0).
345,504 parameters.
Time: 12 minutes on two CPU cores beside three other jobs.
Needs pip install 'jaxformer[vision]'.
Command: make train EXP=quantise_digits, then make train EXP=paint_digits
Then: make generate EXP=paint_digits ARGS="--prompt seven"
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.quantise_digits import CODES, MovedDigits, read
from jaxformer import models
from jaxformer.data.arrays import Arrays, dataset_of_arrays
from jaxformer.data.images import DIGIT_NAMES
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Characters
from jaxformer.decoding import generate
from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.samples import nearest
from jaxformer.models import ModelConfig
from jaxformer.params import random_key
from jaxformer.runs.run import Run, open_run
from jaxformer.runs.start import from_text
from jaxformer.tools.analysis import figures
from jaxformer.training import Cosine, Experiment, Muon, TokenCrossEntropy
from jaxformer.zoo.vector_quantised import decode

NAMES = list(DIGIT_NAMES)
LETTERS = Characters("".join(sorted(set("".join(NAMES)))) + " ")
FIRST, PATCHES = LETTERS.vocab_size, 16  # the token of code 0; codes of an image
LENGTH = len("three ") + PATCHES  # tokens of the longest example


def only_codes(logits: jax.Array, history: Any) -> jax.Array:
    """A filter: no letter follows the name."""
    return jnp.where(jnp.arange(FIRST + CODES)[None] < FIRST, -jnp.inf, logits)


@dataclass(frozen=True)
class PaintedNames:
    """The name of a digit, then the codes of its image."""

    quantiser: str = "quantise_digits"  # a run, or an experiment for its newest run
    images: MovedDigits = MovedDigits()  # whose codes are learned

    @cached_property
    def run(self) -> Run:
        """The run that made the code book. Raises ConfigError if there is none."""
        found = from_text(self.quantiser, field="data.quantiser")
        if found is None:
            raise ConfigError(
                f"data.quantiser={self.quantiser}: no such run; "
                "first run make train EXP=quantise_digits, or give a run's folder"
            )
        return open_run(found.path)

    def book(self) -> Any:
        """The quantiser's parameters, on no certain device: the painter may train on several."""
        return jax.tree.map(jnp.asarray, jax.device_get(self.run.params))

    def open(self, model: Any) -> Dataset:
        digits = self.images.open(None)
        splits = digits.train, digits.validation
        known, unseen = map(self.examples, splits)
        made = dataset_of_arrays(known, unseen, digits.description)
        train, validation = (
            Paintings(codes.arrays, self, split.arrays)
            for codes, split in zip((made.train, made.validation), splits, strict=True)
        )
        return replace(made, train=train, validation=validation)

    def examples(self, digits: Arrays) -> dict[str, np.ndarray]:
        """Names and codes of digits as tokens. Letters have the weight 0."""
        apply = jax.jit(models.apply, static_argnums=0)
        images, labels = digits.arrays["images"], digits.arrays["labels"]
        parts = [jnp.asarray(images[i : i + 1000]) for i in range(0, len(images), 1000)]
        book = self.book()
        found = [apply(self.run.model, book, part).heads["codes"] for part in parts]
        tokens = np.zeros((len(images), LENGTH), np.int32)
        weights = np.zeros((len(images), LENGTH), np.float32)
        for i, codes in enumerate(np.concatenate([each.codes for each in found])):
            name = LETTERS.encode(NAMES[labels[i]] + " ")
            end = len(name) + PATCHES
            tokens[i, :end] = [*name, *(codes + FIRST)]
            weights[i, len(name) : end] = 1
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights[:, 1:]}

    def paint(self, model: Any, params: Any, key: Any, names: Sequence[str]) -> np.ndarray:
        """A sampled image [8, 8, 1] of each name, from 0 to 1."""
        prompts = [LETTERS.encode(name + " ") for name in names]
        options = dict(filters=(only_codes,), key=key, rows=100)
        codes = np.array(generate(model, params, prompts, PATCHES, **options)) - FIRST
        return np.clip(decode(self.run.model, self.book(), jnp.asarray(codes)), 0, 1)

    def generate(self, run: Any, key: Any, folder: Any, prompt: str | None = None) -> str:
        """A picture of ten samples of a name, or of two of each."""
        if prompt is not None and prompt not in NAMES:
            raise ConfigError(f"--prompt {prompt!r}: expected one of {', '.join(NAMES)}")
        names = NAMES * 2 if prompt is None else [prompt] * 10
        return save(self.paint(run.model, run.params, key, names), names, folder)


@dataclass(frozen=True, eq=False)
class Paintings(Arrays):
    """A split: its examples, the data that made them, and their digits."""

    data: PaintedNames
    digits: dict[str, np.ndarray]


def save(images: np.ndarray, names: Sequence[str], folder: Any) -> str:
    """The path of a picture of images under their names."""
    picture = folder / "samples.png"
    return str(figures.save(lambda: figures.images(images, names, columns=10), picture))


@dataclass(frozen=True)
class AsAsked:
    """The scores that the head of this file explains."""

    each: int = 50  # samples of each name
    only_final = True

    def __call__(self, scored: Evaluation) -> dict[str, float]:
        names, asked = NAMES * self.each, np.tile(np.arange(len(NAMES)), self.each)
        train, unseen = scored.dataset.train, scored.dataset.validation
        images = train.data.paint(scored.model, scored.params, random_key(scored.seed), names)
        if scored.folder is not None and jax.process_index() == 0:
            save(images[:40], names[:40], scored.folder)
        held_out = unseen.digits["images"]
        return {
            "right": float((read(images) == asked).mean()),
            "right_unseen": float((read(held_out) == unseen.digits["labels"]).mean()),
            "distance": float(nearest(images, train.digits["images"]).distance.mean()),
            "distance_unseen": float(nearest(held_out, train.digits["images"]).distance.mean()),
        }


experiment = Experiment(
    name="paint_digits",
    model=ModelConfig(
        vocab_size=FIRST + CODES,
        num_layers=3,
        d_model=96,
        num_heads=4,
        context_length=LENGTH,
        dropout_rate=0.1,
        init_std=0.1,
    ),
    data=PaintedNames(),
    objective=TokenCrossEntropy(),
    optimizer=Muon(learning_rate=1e-2, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100),
    steps=2000,
    batch_size=128,
    log_every=100,
    eval_every=500,
    metrics=(AsAsked(),),
)
