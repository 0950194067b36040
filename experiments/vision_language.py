"""Questions about a picture, answered in words: "which digit is left of the red circle ?" -> seven.

LLaVA: Liu et al. 2023, arXiv:2304.08485. A vision transformer reads the image, a linear map makes
tokens of its patches, and one causal decoder reads them before the text. Each image of 36 x 36
pixels has three digits of scikit-learn and three coloured shapes, in six of nine places. A row of
training has up to eight questions about one image; by its mask, each sees the image and itself.
`exact_match` is the percentage of greedy answers to single questions about 200 unseen images that
equal the true ones; their digits are those that training never shows. `exact_match_words_alone` is
that of the most frequent answer to the question in training. `answers.png` shows some of them.
Expected: exact_match 97.8 (count, colour, shape 100; digits, all three right, 96.5; place 97.5;
beside 96.1), from the words alone 17.0 (seed 0). 268,224 parameters. Digits beside shapes are
learned last: after 3,200 steps exact_match was 88.8.
Time: 23 minutes on two CPU cores beside three other jobs.
Needs pip install 'jaxformer[vision,text]'.
Command: make train EXP=vision_language
Then: make generate EXP=vision_language ARGS="--prompt 'how many circles ?'"
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxformer.data import scenes
from jaxformer.data.batching import digest_of_drawn, every_row
from jaxformer.data.images import DIGIT_NAMES, Digits
from jaxformer.data.scenes import COLOURS, SHAPES
from jaxformer.data.sources import Dataset, Question, read_example
from jaxformer.data.tokenizers import of_words, stop_tokens
from jaxformer.decoding import Sampling
from jaxformer.evaluation.generation import answers, best_text
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.questions import most_frequent
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.masks import causal, chunked, full, global_tokens
from jaxformer.models import Axial, ModelConfig, Patches
from jaxformer.objectives import LossSums, StepContext
from jaxformer.tools.analysis import answered, figures
from jaxformer.training import Cosine, Experiment, Muon, TokenCrossEntropy
from jaxformer.zoo.llava import ImagePrefix

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


patches = Patches(image=(SIZE, SIZE), patch=(6, 6), class_token=False)
# each question stands behind the image, as if it were the only one
POSITIONS = np.concatenate([np.arange(36), np.tile(36 + np.arange(TURN), MOST)]).astype(np.int32)


class Scenes:
    """Images with questions and answers. Example i is a function of (seed, i)."""

    def __init__(self, digits: Any, count: int, seed: int):
        self.digits = every_row(digits)
        self.count = count
        self.seed = seed
        self.tokenizer = of_words(WORDS, END)

    def __len__(self) -> int:
        return self.count

    def scene(self, index: int) -> tuple[dict[str, np.ndarray], list[tuple[str, str]]]:
        """(what image `index` shows, the questions about it and their answers)."""
        rng = np.random.default_rng((self.seed, range(self.count)[index]))
        chosen = rng.integers(len(self.digits["labels"]), size=OBJECTS)
        colours = rng.permutation(len(COLOURS))[:OBJECTS]
        shapes = rng.integers(len(SHAPES), size=OBJECTS)
        names = list(COLOURS)
        named = [(names[c], SHAPES[i]) for c, i in zip(colours, shapes, strict=True)]
        numbers = [DIGIT_NAMES[label] for label in self.digits["labels"][chosen]]
        places, beside = arranged(rng, numbers, named)
        corners = places * CELL + rng.integers(1, 4, size=places.shape)  # line, column
        asked = questions_about(rng, places, numbers, named, beside)
        shown = {"corners": corners, "shapes": shapes, "colours": colours, "digits": chosen}
        return shown, asked

    def images_of(self, shown: list[dict[str, np.ndarray]]) -> np.ndarray:
        """Images [B, 36, 36, 3] of scenes."""
        corners, shapes, colours, digits = (
            np.stack([each[name] for each in shown])
            for name in ("corners", "shapes", "colours", "digits")
        )
        centres = corners[:, OBJECTS:, ::-1] + RADIUS
        rgb = np.array(list(COLOURS.values()))[colours]
        images = scenes.draw(centres, shapes, rgb, SIZE, RADIUS)
        rows = np.arange(len(images))[:, None, None]
        for k in range(OBJECTS):
            lines, columns = (corners[:, k, i, None] + np.arange(8) for i in range(2))
            at = rows, lines[:, :, None], columns[:, None, :]
            images[at] = self.digits["images"][digits[:, k]]
        return images

    __getitem__ = read_example

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        found = [self.scene(int(index)) for index in indices]
        B = len(found)
        tokens = np.full((B, MOST, TURN + 1), WORDS.index(END), np.int32)
        weights = np.zeros((B, MOST, TURN), np.float32)
        for row, (_, asked) in enumerate(found):
            for i, (question, answer) in enumerate(asked):
                words = f"{question} {answer}".split()
                tokens[row, i, : len(words)] = [WORDS.index(word) for word in words]
                weights[row, i, len(question.split()) - 1 : len(words)] = 1  # and the end
        texts = {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "weights": weights}
        # zeros in front: token 0 stands for a patch
        front = (0, 0), (patches.length, 0)
        batch = {name: np.pad(x.reshape(B, -1), front) for name, x in texts.items()}
        images = self.images_of([shown for shown, _ in found])
        return batch | {"images": images, "positions": np.tile(POSITIONS, (B, 1))}

    @property
    def questions(self) -> list[Question]:
        """All questions about the images of a split."""
        found = []
        for shown, asked in map(self.scene, range(self.count)):
            image = self.images_of([shown])[0]
            for text, answer in asked:
                found.append(Question(prefix.prompt(self.tokenizer.encode(text)), answer, image))
        return found


@dataclass(frozen=True)
class PicturesWithQuestions:
    """Images of digits and shapes, and questions about them."""

    examples: int = 200_000  # of the training split
    validation_examples: int = 200  # of the validation split
    seed: int = 0  # of the images

    def open(self, model: Any) -> Dataset:
        digits = Digits().open(None)
        train = Scenes(digits.train, self.examples, 2 * self.seed)
        validation = Scenes(digits.validation, self.validation_examples, 2 * self.seed + 1)
        digest = digest_of_drawn(f"{digits.digest} {self}", train)
        description = f"questions about pictures with {digits.description}"
        return Dataset(train, validation, digest, description, len(WORDS), train.tokenizer)

    def question(self, model: Any, tokenizer: Any, text: str) -> Question:
        """A question of your own about the first unseen image."""
        image = self.open(model).validation[0]["images"]
        return Question(prefix.prompt(tokenizer.encode(text)), "", image)


def answer_loss(model: Any, params: Any, batch: dict, context: StepContext) -> LossSums:
    """The cross entropy of the answers, given the image and the text before them."""
    batch = batch | {"inputs": {"images": batch["images"]}}
    return TokenCrossEntropy()(model, params, batch, context)


@dataclass(frozen=True)
class Answers:
    """The scores that the head of this file explains, and those of each kind of question."""

    only_final = True

    def __call__(self, scored: Evaluation) -> dict[str, Any]:
        train, unseen = scored.dataset.train, scored.dataset.validation
        asked = unseen.questions
        ends = stop_tokens(unseen.tokenizer)
        greedy = Sampling(temperature=0.0)
        written = answers(
            scored.model, scored.params, asked, unseen.tokenizer, 4, greedy, stop_tokens=ends
        )
        found = [best_text(texts).strip() for texts in written]
        truths = [question.reference for question in asked]
        texts = [text for i in range(len(unseen)) for text, _ in unseen.scene(i)[1]]
        if scored.folder is not None and jax.process_index() == 0:
            figures.save(lambda: picture(asked, texts, found), scored.folder / "answers.png")
        scenes_seen = map(train.scene, range(min(len(train), 4000)))
        learned = most_frequent(pair for _, pairs in scenes_seen for pair in pairs)
        alone = [learned.get(text, "") for text in texts]
        scores = exact_match(found, truths)
        scores["exact_match_words_alone"] = exact_match(alone, truths)["exact_match"]
        kinds = list(map(kind_of, texts))
        for kind in dict.fromkeys(kinds):
            rows = zip(found, truths, kinds, strict=True)
            pairs = [(answer, truth) for answer, truth, other in rows if other == kind]
            scores[kind] = exact_match(*zip(*pairs, strict=True))["exact_match"]
        return scores


def kind_of(text: str) -> str:
    """The kind of a question, by a word that only this kind has."""
    words = text.split()
    return next((kind for kind, word in KIND_WORDS.items() if word in words), "beside")


def picture(asked: list[Question], texts: list[str], found: list[str]) -> Any:
    """The first nine images with the questions about them."""
    images, lines = [], []
    for question, text, answer in zip(asked, texts, found, strict=True):
        if not images or (question.source != images[-1]).any():
            images.append(question.source)
            lines.append([])
        lines[-1].append(answered.Answer(text, answer, question.reference))
    return answered.questions(np.stack(images[:9]), lines[:9], columns=3, size=4.2)


vision = ModelConfig(
    vocab_size=0,
    num_layers=3,
    d_model=64,
    num_heads=4,
    context_length=patches.length,
    positions=Axial(patches.grid, (32, 32)),
    d_ff=192,
    embedding=patches,
    masks=(full(),),
    heads=(),
    init_std=0.1,
)
prefix = ImagePrefix(vision, WORDS.index(IMAGE))
experiment = Experiment(
    name="vision_language",
    model=ModelConfig(
        vocab_size=len(WORDS),
        num_layers=3,
        d_model=64,
        num_heads=4,
        context_length=patches.length + TURN,
        # a token sees the image and its own question
        masks=(causal() & (global_tokens(patches.length) | chunked(TURN)),),
        d_ff=192,
        embedding=prefix,
        init_std=0.1,
    ),
    data=PicturesWithQuestions(),
    objective=answer_loss,
    optimizer=Muon(learning_rate=5e-3, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100),
    steps=4200,
    batch_size=16,
    log_every=100,
    eval_every=2100,
    metrics=(Answers(),),
)
