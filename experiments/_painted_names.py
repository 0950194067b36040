"""Names of digits, and the codes of their images: the data of paint_digits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.quantise_digits import CODES, MovedDigits
from jaxformer import models
from jaxformer.data.arrays import Arrays, dataset_of_arrays
from jaxformer.data.images import DIGIT_NAMES
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Characters
from jaxformer.decoding import generate
from jaxformer.errors import ConfigError
from jaxformer.runs.run import Run, open_run
from jaxformer.runs.start import from_text
from jaxformer.tools.analysis import figures
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
