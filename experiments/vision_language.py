"""Questions about a picture, answered in words: "which digit is left of the red circle ?" -> seven.

LLaVA: Liu et al. 2023, arXiv:2304.08485. A vision transformer reads the image, a linear map makes
tokens of its patches, and one causal decoder reads them before the text. Each image of 36 x 36
pixels has three digits of scikit-learn and three coloured shapes, in six of nine places. A training
text is a conversation of five questions and answers about one image, as in section 4.1.
`exact_match` is the percentage of greedy answers to single questions about 400 unseen images that
equal the true ones; their digits are those that training never shows. `exact_match_words_alone` is
that of the most frequent answer to the question in training. `answers.png` shows some of them.
Expected: exact_match 62.5 (colour 100, shape 100, count 92, digit 10.5), words alone 23.0 (seed 0).
484,032 parameters. It has not learned the digits yet.
Time: 12 minutes on two CPU cores beside other work.
Needs pip install 'jaxformer[vision,text]'.
Command: make train EXP=vision_language
Then: make generate EXP=vision_language ARGS="--prompt 'how many circles ?'"
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxformer.data import scenes
from jaxformer.data.batching import take_rows
from jaxformer.data.images import Digits
from jaxformer.data.scenes import COLOURS, SHAPES
from jaxformer.data.sources import Dataset, Question
from jaxformer.data.tokenizers import of_words, stop_tokens
from jaxformer.decoding import Sampling
from jaxformer.evaluation.generation import answers, best_text
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.questions import most_frequent
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.masks import full
from jaxformer.models import ModelConfig, Patches
from jaxformer.objectives import LossSums, StepContext
from jaxformer.tools.analysis import answered, figures
from jaxformer.training import Cosine, Experiment, Muon, TokenCrossEntropy
from jaxformer.zoo.llava import ImagePrefix

CELL, RADIUS, OBJECTS = 12, 4.0, 3  # pixels of a place; of a shape; digits, and as many shapes
SIZE = 3 * CELL  # pixels of a side
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SIDES = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
COUNT, COLOUR, SHAPE = "how many {}s ?", "what colour is the {} ?", "what shape is {} ?"
DIGIT = "which digit is {} the {} {} ?"
KINDS = (COUNT, COLOUR, SHAPE, DIGIT, DIGIT)  # of the questions about an image
IMAGE, END = "<image>", "</s>"
TEXTS = [*KINDS, *SIDES, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), *NUMBERS]
WORDS = [IMAGE, END, *sorted({word for text in TEXTS for word in text.split()} - {"{}", "{}s"})]
LENGTH = 36 + len(KINDS) * 9 + 2  # tokens of the longest conversation


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


def questions_about(rng: np.random.Generator, named: list, beside: list) -> list[tuple[str, str]]:
    """Questions and answers: one of each kind, and two about digits, in random order."""
    counts = Counter(shape for _, shape in named)
    counted = SHAPES[rng.integers(len(SHAPES))]
    found = [(COUNT.format(counted), NUMBERS[counts[counted]])]
    single = [(COLOUR.format(shape), colour) for colour, shape in named if counts[shape] == 1]
    colour, shape = named[rng.integers(OBJECTS)]
    found += [*single[:1], (SHAPE.format(colour), shape)]
    for i in rng.permutation(len(beside))[:2]:
        *place, number = beside[i]
        found.append((DIGIT.format(*place), number))
    return [found[i] for i in rng.permutation(len(found))]


class Scenes:
    """Images with questions and answers. Example i is a function of (seed, i)."""

    def __init__(self, digits: Any, count: int, seed: int):
        self.digits = take_rows(digits, np.arange(len(digits)))
        self.count = count
        self.seed = seed
        self.tokenizer = of_words(WORDS, END)

    def __len__(self) -> int:
        return self.count

    def scene(self, index: int) -> tuple[np.ndarray, list[tuple[str, str]]]:
        """(image [36, 36, 3], its questions and answers)."""
        rng = np.random.default_rng((self.seed, range(self.count)[index]))
        chosen = rng.integers(len(self.digits["labels"]), size=OBJECTS)
        colours = rng.permutation(list(COLOURS))[:OBJECTS].tolist()
        shapes = rng.integers(len(SHAPES), size=OBJECTS)
        named = [(colour, SHAPES[i]) for colour, i in zip(colours, shapes, strict=True)]
        numbers = [NUMBERS[label] for label in self.digits["labels"][chosen]]
        places, beside = arranged(rng, numbers, named)
        corners = places * CELL + rng.integers(CELL - 8 + 1, size=places.shape)  # line, column
        centres = corners[None, OBJECTS:, ::-1] + RADIUS
        rgb = np.array([[COLOURS[colour] for colour in colours]])
        image = scenes.draw(centres, shapes[None], rgb, SIZE, RADIUS)[0]
        for (line, column), digit in zip(corners, self.digits["images"][chosen], strict=False):
            image[line : line + 8, column : column + 8] = digit
        return image, questions_about(rng, named, beside)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        image, asked = self.scene(index)
        tokens, weights = prefix.prompt([]), [0.0] * prefix.patches
        for texts in asked:
            question, answer = map(self.tokenizer.encode, texts)
            tokens += [*question, *answer, WORDS.index(END)]
            weights += [0.0] * len(question) + [1.0] * (len(answer) + 1)
        padding = LENGTH + 1 - len(tokens)
        ids = np.array(tokens + [WORDS.index(END)] * padding, np.int32)
        flags = np.array(weights + [0.0] * padding, np.float32)
        return {"images": image, "tokens": ids[:-1], "labels": ids[1:], "weights": flags[1:]}

    @property
    def questions(self) -> list[Question]:
        """All questions about the images of a split."""
        return [
            Question(prefix.prompt(self.tokenizer.encode(question)), answer, image)
            for image, asked in map(self.scene, range(self.count))
            for question, answer in asked
        ]


@dataclass(frozen=True)
class PicturesWithQuestions:
    """Images of digits and shapes, and conversations about them."""

    examples: int = 200_000  # of the training split
    validation_examples: int = 400  # of the validation split
    seed: int = 0  # of the images

    def open(self, model: Any) -> Dataset:
        digits = Digits().open(None)
        train = Scenes(digits.train, self.examples, 2 * self.seed)
        validation = Scenes(digits.validation, self.validation_examples, 2 * self.seed + 1)
        digest = hashlib.sha256(f"{digits.digest} {self} {WORDS} {KINDS}".encode()).hexdigest()
        description = f"conversations about pictures with {digits.description}"
        return Dataset(train, validation, digest, description, len(WORDS), train.tokenizer)

    def question(self, model: Any, tokenizer: Any, text: str) -> Question:
        """A question of your own about the first unseen image."""
        image, _ = self.open(model).validation.scene(0)
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
        for kind in dict.fromkeys(text.split()[1] for text in texts):
            pairs = [(x, y) for x, y, t in zip(found, truths, texts, strict=True) if kind in t]
            name = "count" if kind == "many" else kind
            scores[name] = exact_match(*zip(*pairs, strict=True))["exact_match"]
        return scores


def picture(asked: list[Question], texts: list[str], found: list[str]) -> Any:
    """The first twelve images with the questions about them."""
    images, lines = [], []
    for question, text, answer in zip(asked, texts, found, strict=True):
        if not images or (question.source != images[-1]).any():
            images.append(question.source)
            lines.append([])
        lines[-1].append(answered.Answer(text, answer, question.reference))
    return answered.questions(np.stack(images[:12]), lines[:12])


patches = Patches(image=(SIZE, SIZE), patch=(6, 6), class_token=False)
vision = ModelConfig(
    vocab_size=0,
    num_layers=3,
    d_model=96,
    num_heads=4,
    context_length=patches.length,
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
        d_model=96,
        num_heads=4,
        context_length=LENGTH,
        d_ff=192,
        embedding=prefix,
        init_std=0.1,
    ),
    data=PicturesWithQuestions(),
    objective=answer_loss,
    optimizer=Muon(learning_rate=5e-3, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100),
    steps=1800,
    batch_size=16,
    log_every=100,
    eval_every=900,
    metrics=(Answers(),),
)
