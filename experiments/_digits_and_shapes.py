"""Pictures of digits and coloured shapes, with questions and answers: the data of vision_language.

An image of 36 x 36 pixels has three digits of scikit-learn and three coloured shapes, in six of
nine places. Its questions have one right answer each, in words.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import scenes
from jaxformer.data.batching import every_row
from jaxformer.data.drawn import Drawn, dataset_of_drawn
from jaxformer.data.images import DIGIT_NAMES, Digits
from jaxformer.data.scenes import COLOURS, SHAPES
from jaxformer.data.sources import Dataset, Question
from jaxformer.data.tokenizers import of_words
from jaxformer.evaluation.questions import most_frequent
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.models import Patches

CELL, RADIUS, OBJECTS = 12, 4.0, 3  # pixels of a place; of a shape; digits, and as many shapes
SIZE = 3 * CELL  # pixels of a side
SIDES = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
COUNT, COLOUR, SHAPE = "how many {}s ?", "what colour is the {} ?", "what shape is {} ?"
DIGIT = "which digit is {} the {} {} ?"
PLACE = "which digit is at the {} {} ?"
LINES, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
ALL = "which digits are there ?"  # line by line
KINDS = (COUNT, COLOUR, SHAPE, DIGIT, PLACE, ALL)
KIND_WORDS = {
    "count": "many",
    "place": "at",
    "colour": "colour",
    "shape": "shape",
    "digits": "digits",
}  # other questions are about a digit beside a shape
IMAGE, END = "<image>", "</s>"
TEXTS = [
    *KINDS,
    *SIDES,
    *LINES,
    *COLUMNS,
    *COLOURS,
    *SHAPES,
    *(f"{shape}s" for shape in SHAPES),
    *DIGIT_NAMES,
]
WORDS = [IMAGE, END, *sorted({word for text in TEXTS for word in text.split()} - {"{}", "{}s"})]
MOST, TURN = 8, 12  # questions about an image; places for a question, its answer and the end


def arranged(
    rng: np.random.Generator, numbers: list[str], named: list[tuple[str, str]]
) -> tuple[np.ndarray, list[tuple[str, str, str, str]]]:
    """(places [6, 2] of digits and shapes, (side, colour, shape, number) of digits beside shapes).

    A place is a line and a column of the nine. At least one digit is beside a shape.
    """
    while True:
        places = np.stack(np.divmod(rng.permutation(9)[: 2 * OBJECTS], 3), axis=1)
        digits = dict(zip(map(tuple, places[:OBJECTS]), numbers, strict=True))
        beside = [
            (side, *name, digits[tuple(place + step)])
            for name, place in zip(named, places[OBJECTS:], strict=True)
            for side, step in SIDES.items()
            if tuple(place + step) in digits
        ]
        if beside:
            return places, beside


def questions_about(
    rng: np.random.Generator, places: np.ndarray, numbers: list[str], named: list, beside: list
) -> list[tuple[str, str]]:
    """Questions and answers: one of each kind, and further ones about digits beside shapes."""
    counts = Counter(shape for _, shape in named)
    counted = SHAPES[rng.integers(len(SHAPES))]
    colour, shape = named[rng.integers(OBJECTS)]
    at = rng.integers(OBJECTS)
    line, column = places[at]
    in_order = np.argsort(places[:OBJECTS] @ (3, 1))  # line by line
    found = [
        (ALL, " ".join(numbers[i] for i in in_order)),
        (PLACE.format(LINES[line], COLUMNS[column]), numbers[at]),
        (COUNT.format(counted), DIGIT_NAMES[counts[counted]]),
        (SHAPE.format(colour), shape),
    ]
    single = [(COLOUR.format(shape), colour) for colour, shape in named if counts[shape] == 1]
    found += single[:1]
    for i in rng.permutation(len(beside))[: MOST - len(found)]:
        *place, number = beside[i]
        found.append((DIGIT.format(*place), number))
    return [found[i] for i in rng.permutation(len(found))]


TOKENIZER = of_words(WORDS, END)
patches = Patches(image=(SIZE, SIZE), patch=(6, 6), class_token=False)
# each question stands behind the image, as if it were the only one
turns = np.tile(patches.length + np.arange(TURN), MOST)
POSITIONS = np.concatenate([np.arange(patches.length), turns]).astype(np.int32)


class Scene(NamedTuple):
    """What an image shows: digits, then shapes."""

    corners: np.ndarray  # [6, 2]: line and column of the upper left pixel
    digits: np.ndarray  # [3, 8, 8, 1]: their images
    shapes: np.ndarray  # [3]: indices of `SHAPES`
    colours: np.ndarray  # [3]: indices of `COLOURS`
    asked: list[tuple[str, str]]  # questions about it and their answers


def scene(digits: dict[str, np.ndarray], rng: np.random.Generator) -> Scene:
    """A random scene of some of these digits."""
    chosen = rng.integers(len(digits["labels"]), size=OBJECTS)
    colours = rng.permutation(len(COLOURS))[:OBJECTS]
    shapes = rng.integers(len(SHAPES), size=OBJECTS)
    names = list(COLOURS)
    named = [(names[c], SHAPES[i]) for c, i in zip(colours, shapes, strict=True)]
    numbers = [DIGIT_NAMES[label] for label in digits["labels"][chosen]]
    places, beside = arranged(rng, numbers, named)
    corners = places * CELL + rng.integers(1, 4, size=places.shape)
    asked = questions_about(rng, places, numbers, named, beside)
    return Scene(corners, digits["images"][chosen], shapes, colours, asked)


def images_of(shown: Sequence[Scene]) -> np.ndarray:
    """The images [B, 36, 36, 3] of scenes."""
    corners = np.stack([each.corners for each in shown])
    centres = corners[:, OBJECTS:, ::-1] + RADIUS
    shapes = np.stack([each.shapes for each in shown])
    rgb = np.array(list(COLOURS.values()))[[each.colours for each in shown]]
    images = scenes.draw(centres, shapes, rgb, SIZE, RADIUS)
    rows = np.arange(len(images))[:, None, None]
    for k in range(OBJECTS):
        lines, columns = (corners[:, k, i, None] + np.arange(8) for i in range(2))
        at = rows, lines[:, :, None], columns[:, None, :]
        images[at] = np.stack([each.digits[k] for each in shown])
    return images


def batch_of(shown: Sequence[Scene]) -> dict[str, np.ndarray]:
    """Images, and their texts: `TURN` places for each question and its answer.

    In front of a text are zeros, one for each patch.
    """
    B = len(shown)
    tokens = np.full((B, MOST, TURN + 1), WORDS.index(END), np.int32)
    weights = np.zeros((B, MOST, TURN), np.float32)
    for row, each in enumerate(shown):
        for i, (question, answer) in enumerate(each.asked):
            words = f"{question} {answer}".split()
            tokens[row, i, : len(words)] = [WORDS.index(word) for word in words]
            weights[row, i, len(question.split()) - 1 : len(words)] = 1  # and the end
    texts = {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "weights": weights}
    front = (0, 0), (patches.length, 0)
    batch = {name: np.pad(x.reshape(B, -1), front) for name, x in texts.items()}
    return batch | {"images": images_of(shown), "positions": np.tile(POSITIONS, (B, 1))}


def prompt(text: str) -> list[int]:
    """The tokens of an image, then those of a question."""
    return [WORDS.index(IMAGE)] * patches.length + TOKENIZER.encode(text)


class Scenes(Drawn):
    """A split, with all questions about its images."""

    @property
    def questions(self) -> list[Question]:
        found = []
        for shown in map(self.drawn, range(len(self))):
            image = images_of([shown])[0]
            found += [Question(prompt(text), answer, image) for text, answer in shown.asked]
        return found


@dataclass(frozen=True)
class PicturesWithQuestions:
    """Images of digits and shapes, and questions about them."""

    examples: int = 200_000  # of the training split
    validation_examples: int = 200  # of the validation split
    seed: int = 0  # of the images

    def open(self, model: Any) -> Dataset:
        digits = Digits().open(None)
        seed = 2 * self.seed
        of_training, of_validation = (
            partial(scene, every_row(split)) for split in (digits.train, digits.validation)
        )
        return dataset_of_drawn(
            Scenes(of_training, self.examples, seed, batch_of),
            Scenes(of_validation, self.validation_examples, seed + 1, batch_of),
            f"{digits.digest} {self}",
            f"questions about pictures with {digits.description}",
            vocab_size=len(WORDS),
            tokenizer=TOKENIZER,
        )

    def question(self, model: Any, tokenizer: Any, text: str) -> Question:
        """A question of your own about the first unseen image."""
        return Question(prompt(text), "", self.open(model).validation[0]["images"])


def scores(
    found: Sequence[str], truths: Sequence[str], texts: Sequence[str], train: Scenes
) -> dict[str, Any]:
    """Percentages of exact answers to questions `texts`: of all, and of each kind.

    `exact_match_words_alone` is that of the most frequent answers about 4,000 training images.
    """
    seen = map(train.drawn, range(min(len(train), 4000)))
    learned = most_frequent(pair for shown in seen for pair in shown.asked)
    alone = [learned.get(text, "") for text in texts]
    percentages = exact_match(found, truths)
    percentages["exact_match_words_alone"] = exact_match(alone, truths)["exact_match"]
    kinds = list(map(kind_of, texts))
    for kind in dict.fromkeys(kinds):
        rows = zip(found, truths, kinds, strict=True)
        pairs = [(answer, truth) for answer, truth, other in rows if other == kind]
        percentages[kind] = exact_match(*zip(*pairs, strict=True))["exact_match"]
    return percentages


def kind_of(text: str) -> str:
    """The kind of a question, by a word that only this kind has."""
    words = text.split()
    return next((kind for kind, word in KIND_WORDS.items() if word in words), "beside")
