"""Questions about six coloured shapes: "what shape is closest to red ?" -> square.

Sort-of-CLEVR: Santoro et al. 2017, arXiv:1706.01427, section 4.2. Each image of 48 x 48 pixels has
a square or a circle in each of six colours. Three questions are about one object (its shape, and
the half of the image where it stands), three are about its relation to all others (the shape of
the closest and of the furthest object, and how many have its shape). A vision transformer reads
the image once, and a decoder reads all 36 questions about it side by side; cross-attention joins
them, as in Vaswani et al. 2017, arXiv:1706.03762. A question is the sum of its words' vectors, and
its answer is the most likely word.
Scores are accuracies on 1,000 unseen images; `..._words_alone` are those of the most frequent
answer to each question in training. The paper's relation network has 94 % for both kinds.
`answers.png` in the run's folder shows questions, answers, and the attention of each answer.
Expected: relational 97.6 and 95.2 % (closest 95 and 89, furthest 98 and 97, count 99.9 %), not
relational 99.9 % (seeds 0 and 1); from the words alone: 43.5 and 49.8 %. 260,992 parameters. After
1,800 steps it was 95.7 and 85.0 %; with `Learned()` positions and an encoder of two layers, 79.9 %.
Time: 11 minutes on two CPU cores beside two other jobs.
Command: make train EXP=answer_about_images
Then: make generate EXP=answer_about_images ARGS="--prompt 'how many have the shape of red ?'"
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import normal

from jaxformer import models
from jaxformer.data import scenes
from jaxformer.data.batching import digest_of_drawn, every_row
from jaxformer.data.scenes import COLOURS, SHAPES
from jaxformer.data.sources import Dataset, read_example
from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.questions import most_frequent
from jaxformer.masks import full, window
from jaxformer.models import Axial, EncoderDecoder, ModelConfig, Patches
from jaxformer.models.embedding import look_up
from jaxformer.models.layer import Embedder
from jaxformer.params import Spec
from jaxformer.tools.analysis import answered, figures
from jaxformer.training import Cosine, Experiment, Muon, TokenCrossEntropy

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
LONGEST = max(len(text.split()) for text in QUESTIONS.values())  # words


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


TEXTS = [QUESTIONS[kind].format(list(COLOURS)[k]) for kind, k in ASKED]
TOKENS = np.array([tokens_of(text) for text in TEXTS], np.int32)


class Scenes:
    """Images with the answers to all questions. Example i is a function of (seed, i)."""

    def __init__(self, count: int, seed: int):
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    __getitem__ = read_example

    def objects(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(centres [6, 2], shapes [6]) of example `index`."""
        rng = np.random.default_rng((self.seed, int(index)))
        centres = scenes.place(rng, len(COLOURS), SIZE, RADIUS + 0.5, APART)
        return centres, rng.integers(2, size=len(COLOURS))

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = [self.objects(index) for index in indices]
        centres, shapes = map(np.stack, zip(*rows, strict=True))
        colours = np.broadcast_to(np.array(list(COLOURS.values())), (*shapes.shape, 3))
        images = scenes.draw(centres, shapes, colours, SIZE, RADIUS)
        labels = np.stack([answers(*row) for row in rows])
        tokens = np.broadcast_to(TOKENS, (len(rows), *TOKENS.shape))
        weights = np.ones(labels.shape, np.float32)
        return {"source": images, "tokens": tokens, "labels": labels, "weights": weights}


@dataclass(frozen=True)
class SortOfClevr:
    """Images of six shapes, with 36 questions about each."""

    examples: int = 200_000  # images of the training split
    validation_examples: int = 1000  # of the validation split
    seed: int = 0  # of the images

    def open(self, model: Any) -> Dataset:
        train = Scenes(self.examples, 2 * self.seed)
        validation = Scenes(self.validation_examples, 2 * self.seed + 1)
        digest = digest_of_drawn(str(self), train)
        description = f"{self.examples:,} images with questions"
        return Dataset(train, validation, digest, description, len(WORDS))

    def generate(self, run: Any, key: Any, folder: Any, prompt: str | None = None) -> str:
        """A picture of a question about twelve unseen images, with the answers."""
        question = TEXTS[0] if prompt is None else prompt
        if question not in TEXTS:
            raise ConfigError(f"--prompt {prompt!r}: expected one of {'; '.join(TEXTS)}")
        batch = Scenes(12, 2 * self.seed + 1).take_rows(np.arange(12))
        found, seen = ask(run.model, run.params, batch["source"])
        rows = [(i, TEXTS.index(question)) for i in range(12)]
        draw = partial(picture, batch, found, seen, rows)
        return str(figures.save(draw, folder / "answers.png"))


def rarity(words: list[str], texts: list[str]) -> np.ndarray:
    """The inverse document frequency of each word: log(texts / texts that have it)."""
    counts = [sum(word in text.split() for text in texts) for word in words]
    return np.log(len(texts) / np.maximum(counts, 1))


def sum_of_words(config: ModelConfig) -> Embedder:
    """The embedding of questions [B, T, words]: the sum of the vectors of a question's words.

    A vector starts as long as its word is rare, so that a question is mostly its colour and kind.
    """

    def start(key: jax.Array, shape: tuple, dtype: Any) -> jax.Array:
        scale = jnp.asarray(rarity(WORDS, TEXTS), dtype)[:, None]
        return scale * normal(config.std)(key, shape, dtype)

    def apply(params: Any, tokens: Any, inputs: Any, context: Any) -> jax.Array:
        B, T, W = tokens.shape
        x = look_up(params["tokens"], tokens.reshape(B, T * W), context.dtype)
        is_word = (tokens != 0).astype(x.dtype)
        return jnp.einsum("btwd,btw->btd", x.reshape(B, T, W, -1), is_word)

    table = Spec((config.vocab_size, config.d_model), ("vocab", "embed"), start)
    return Embedder({"tokens": table}, apply)


@partial(jax.jit, static_argnums=0)
def run_on(model: Any, params: Any, images: jax.Array, tokens: jax.Array) -> Any:
    names = ("decoder/layers/*/cross_attention/weights",)
    output = models.apply(model, params, tokens, source=images, intermediates=names)
    # [B, 36, patches], the mean over layers and heads
    return output.logits.argmax(axis=-1), output.intermediates[names[0]].mean(axis=(0, 2))


def ask(model: Any, params: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(answers [n, 36] to all questions about each image, where they look [n, 36, 8, 8])."""
    parts = []
    for first in range(0, len(images), 100):
        part = jnp.asarray(images[first : first + 100])
        tokens = jnp.broadcast_to(TOKENS, (len(part), *TOKENS.shape))
        parts.append(run_on(model, params, part, tokens))
    found, seen = (np.concatenate(each) for each in zip(*parts, strict=True))
    return found, seen.reshape(*found.shape, *patches.grid)


def accuracies(scored: Evaluation) -> dict[str, float]:
    """The scores that the head of this file explains; `answers.png` draws some answers."""
    train, unseen = scored.dataset.train, scored.dataset.validation
    batch = every_row(unseen)
    labels = batch["labels"]
    found, seen = ask(scored.model, scored.params, batch["source"])
    if scored.folder is not None and jax.process_index() == 0:
        # two questions of each kind, each about another image and another colour
        rows = [(i, len(COLOURS) * i + i) for i in range(len(QUESTIONS))]
        rows += [(6 + i, len(COLOURS) * i + (i + 3) % 6) for i in range(len(QUESTIONS))]
        path = scored.folder / "answers.png"
        figures.save(lambda: picture(batch, found, seen, rows), path)
    learned = train.take_rows(np.arange(min(len(train), 4000)))["labels"]
    pairs = ((text, str(x)) for row in learned.tolist() for text, x in zip(TEXTS, row, strict=True))
    alone = np.array([int(word) for word in most_frequent(pairs).values()])  # in the order of TEXTS
    relational = np.array([kind in RELATIONAL for kind, _ in ASKED])
    scores = {}
    for name, given in (("", found), ("_words_alone", alone)):
        right = given == labels
        scores[f"relational{name}"] = float(right[:, relational].mean())
        scores[f"not_relational{name}"] = float(right[:, ~relational].mean())
    right = (found == labels).reshape(len(labels), len(QUESTIONS), len(COLOURS))
    return scores | dict(zip(QUESTIONS, right.mean(axis=(0, 2)).tolist(), strict=True))


def picture(batch: dict, found: np.ndarray, seen: np.ndarray, rows: list[tuple[int, int]]) -> Any:
    """Questions (image, question), each with its answer, and the image as the answer sees it."""
    at = tuple(np.array(rows).T)
    words = zip((TEXTS[k] for k in at[1]), found[at], batch["labels"][at], strict=True)
    lines = [[answered.Answer(text, WORDS[x], WORDS[truth])] for text, x, truth in words]
    images = answered.beside(batch["source"][at[0]], seen[at])
    return answered.questions(images, lines, columns=3, size=4.0)


decoder = ModelConfig(
    vocab_size=len(WORDS),
    num_layers=3,
    d_model=64,
    num_heads=4,
    context_length=len(ASKED),
    positions=None,
    embedding=sum_of_words,
    masks=(window(0),),
    d_ff=128,
    init_std=0.1,
)
patches = Patches(image=(SIZE, SIZE), patch=(6, 6), class_token=False)
encoder = replace(
    decoder,
    vocab_size=0,
    num_layers=3,
    context_length=patches.length,
    positions=Axial(patches.grid, (32, 32)),
    embedding=patches,
    masks=(full(),),
    heads=(),
)
experiment = Experiment(
    name="answer_about_images",
    model=EncoderDecoder(encoder, decoder, share_embeddings=False),
    data=SortOfClevr(),
    objective=TokenCrossEntropy(),
    optimizer=Muon(learning_rate=5e-3, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=100),
    steps=2600,
    batch_size=32,
    log_every=100,
    eval_every=1300,
    metrics=(accuracies,),
)
