"""Images of six coloured shapes, 36 questions about each, and an embedding of these questions.

Sort-of-CLEVR: Santoro et al. 2017, arXiv:1706.01427, section 4.2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import normal

from jaxformer.data import scenes
from jaxformer.data.scenes import COLOURS, SHAPES
from jaxformer.errors import ConfigError
from jaxformer.evaluation.questions import most_frequent
from jaxformer.models import ModelConfig
from jaxformer.models.embedding import look_up
from jaxformer.models.layer import Embedder
from jaxformer.params import Spec

SIZE, RADIUS, APART = 48, 4.0, 9.0  # pixels: of a side, of a shape, between two centres
NUMBERS = ("one", "two", "three", "four", "five", "six")
QUESTIONS = {
    "shape": "what shape is {} ?",
    "side": "is {} left or right ?",
    "height": "is {} above or below ?",
    "closest": "what shape is closest to {} ?",
    "furthest": "what shape is furthest from {} ?",
    "count": "how many have the shape of {} ?",
}
RELATIONAL = ("closest", "furthest", "count")
ANSWERS = (*SHAPES[:2], "left", "right", "above", "below", *NUMBERS)
WORDS = ["", *sorted({*" ".join(QUESTIONS.values()).split(), *ANSWERS, *COLOURS} - {"{}"})]
ASKED = [(kind, k) for kind in QUESTIONS for k in range(len(COLOURS))]  # about every image
TEXTS = [QUESTIONS[kind].format(list(COLOURS)[k]) for kind, k in ASKED]
LONGEST = max(len(text.split()) for text in TEXTS)  # words


class Objects(NamedTuple):
    """The objects of an image, in the order of `COLOURS`."""

    centres: np.ndarray  # [6, 2]: x and y in pixels
    shapes: np.ndarray  # [6]: 0 a square, 1 a circle


def objects(rng: np.random.Generator) -> Objects:
    """Random objects."""
    centres = scenes.place(rng, len(COLOURS), SIZE, RADIUS + 0.5, APART)
    return Objects(centres, rng.integers(2, size=len(COLOURS)))


def answers(centres: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """The answers [36], as words, to the questions about objects with these centres and shapes."""
    distances = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    names = np.array(SHAPES)[shapes]
    left, above = (centres < SIZE / 2).T
    found = {
        "shape": names,
        "side": np.where(left, "left", "right"),
        "height": np.where(above, "above", "below"),
        "closest": names[distances.argsort(axis=1)[:, 1]],  # the first is the object itself
        "furthest": names[distances.argmax(axis=1)],
        "count": np.array(NUMBERS)[(shapes[:, None] == shapes[None]).sum(axis=1) - 1],
    }
    return np.array([WORDS.index(found[kind][k]) for kind, k in ASKED], np.int32)


def tokens_of(text: str) -> list[int]:
    """The number of each word, and zeros. Raises ConfigError for a word that no question has."""
    words = text.split()
    if unknown := [word for word in words if word not in WORDS[1:]]:
        raise ConfigError(f"{unknown[0]!r} is no word of a question; expected {' '.join(WORDS)}")
    return [*map(WORDS.index, words), *[0] * (LONGEST - len(words))]


TOKENS = np.array([tokens_of(text) for text in TEXTS], np.int32)


def batch_of(drawn: Sequence[Objects]) -> dict[str, np.ndarray]:
    """The images of objects, with all questions and their answers."""
    centres, shapes = map(np.stack, zip(*drawn, strict=True))
    colours = np.broadcast_to(np.array(list(COLOURS.values())), (*shapes.shape, 3))
    images = scenes.draw(centres, shapes, colours, SIZE, RADIUS)
    labels = np.stack([answers(*each) for each in drawn])
    tokens = np.broadcast_to(TOKENS, (len(drawn), *TOKENS.shape))
    weights = np.ones(labels.shape, np.float32)
    return {"source": images, "tokens": tokens, "labels": labels, "weights": weights}


def rarity() -> np.ndarray:
    """The inverse document frequency of each word: log(questions / questions that have it)."""
    counts = [sum(word in text.split() for text in TEXTS) for word in WORDS]
    return np.log(len(TEXTS) / np.maximum(counts, 1))


def sum_of_words(config: ModelConfig) -> Embedder:
    """The embedding of questions [B, T, words]: the sum of the vectors of a question's words.

    A vector starts as long as its word is rare, so that a question is mostly its colour and kind.
    """

    def start(key: jax.Array, shape: tuple, dtype: Any) -> jax.Array:
        scale = jnp.asarray(rarity(), dtype)[:, None]
        return scale * normal(config.std)(key, shape, dtype)

    def apply(params: Any, tokens: Any, inputs: Any, context: Any) -> jax.Array:
        B, T, W = tokens.shape
        x = look_up(params["tokens"], tokens.reshape(B, T * W), context.dtype)
        is_word = (tokens != 0).astype(x.dtype)
        return jnp.einsum("btwd,btw->btd", x.reshape(B, T, W, -1), is_word)

    table = Spec((config.vocab_size, config.d_model), ("vocab", "embed"), start)
    return Embedder({"tokens": table}, apply)


def most_frequent_answers(split: Any, images: int = 4000) -> np.ndarray:
    """The most frequent answer [36] to each question about the first images of a split."""
    labels = split.take_rows(np.arange(min(len(split), images)))["labels"]
    pairs = ((k, answer) for row in labels.tolist() for k, answer in enumerate(row))
    found = most_frequent(pairs)
    return np.array([found[k] for k in range(len(TEXTS))])


def accuracies(found: np.ndarray, labels: np.ndarray, alone: np.ndarray) -> dict[str, float]:
    """Shares of right answers [n, 36]: of relational questions, of the others, of each kind.

    `alone` are answers [36] to the questions without any image.
    """
    relational = np.array([kind in RELATIONAL for kind, _ in ASKED])
    scores = {}
    for name, given in (("", found), ("_words_alone", alone)):
        right = given == labels
        scores[f"relational{name}"] = float(right[:, relational].mean())
        scores[f"not_relational{name}"] = float(right[:, ~relational].mean())
    right = (found == labels).reshape(len(labels), len(QUESTIONS), len(COLOURS))
    return scores | dict(zip(QUESTIONS, right.mean(axis=(0, 2)).tolist(), strict=True))
