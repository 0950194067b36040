"""Digits of any size anywhere in an image: which ones are there, and in which boxes.

DETR: Carion et al. 2020, arXiv:2005.12872. A small ResNet makes 8 x 8 features of the image, an
encoder reads them, and a decoder answers with a set of eight classes and boxes; each object is
matched to one answer. Images of 64 x 64 pixels have one to four digits of scikit-learn, 12 to 22
pixels large; validation images have other digits. Scores are COCO's average precision (pycocotools)
on 300 unseen images. `boxes.png` in the run's folder shows boxes: found ones in colour with their
class, true ones in dotted white.
Expected: AP50 0.929, mAP 0.695 (seed 0). 832,447 parameters. With patches of 8 x 8 pixels instead
of the ResNet, AP50 is 0.03 after as many steps; with AdamW instead of Muon, too, 0.01 after 1,000.
Time: 10 minutes on two CPU cores beside other work.
Needs pip install 'jaxformer[vision,detection]'.
Command: make train EXP=detect_digits
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.data.batching import digest_of_drawn, every_row
from jaxformer.data.images import Digits
from jaxformer.data.sources import Dataset
from jaxformer.evaluation.detection import Objects, average_precision
from jaxformer.evaluation.metric import Evaluation
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.models.config import AttentionPositions, Learned
from jaxformer.tools.analysis import figures
from jaxformer.training import Cosine, Experiment, Muon
from jaxformer.zoo.detr import (
    Boxes,
    FeatureMap,
    ObjectClasses,
    grid_sines,
    no_content,
    object_numbers,
)
from jaxformer.zoo.resnet import ResNet, basic
from jaxformer.zoo.set_prediction import SetPrediction

SIZE, MOST, QUERIES = 64, 4, 8  # pixels of a side; digits of an image; answers
BRIGHT = ("#ff5c5c", "#4dd07a", "#5ca8ff", "#ffd84d", "#ff7de9")
SMALLEST, LARGEST = 12, 22  # pixels of a digit


def resized(digit: np.ndarray, size: int) -> np.ndarray:
    """A digit [8, 8] with `size` lines and columns, by linear interpolation."""
    places = np.clip((np.arange(size) + 0.5) * 8 / size - 0.5, 0, 7)
    weights = np.maximum(0, 1 - abs(places[:, None] - np.arange(8)[None]))
    return weights @ digit @ weights.T


class Scenes:
    """Images with digits. Image i is a function of (seed, i)."""

    def __init__(self, digits: Any, count: int, seed: int):
        self.digits = every_row(digits)
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, range(self.count)[index]))
        image = np.zeros((SIZE, SIZE), np.float32)
        taken = np.zeros((SIZE, SIZE), bool)
        classes = np.zeros(MOST, np.int32)
        boxes = np.zeros((MOST, 4), np.float32)
        count, wanted = 0, rng.integers(1, MOST + 1)
        while count < wanted:
            i = rng.integers(len(self.digits["labels"]))
            size = int(rng.integers(SMALLEST, LARGEST + 1))
            top, left = rng.integers(SIZE - size + 1, size=2)
            place = slice(top, top + size), slice(left, left + size)
            if taken[place].any():
                continue
            digit = resized(self.digits["images"][i, :, :, 0], size)
            image[place], taken[place] = digit, True
            lines, columns = (np.flatnonzero(digit.max(axis=axis) > 0.2) for axis in (1, 0))
            low = np.array([left + columns[0], top + lines[0]])
            high = np.array([left + columns[-1], top + lines[-1]]) + 1
            boxes[count] = np.concatenate([(low + high) / 2, high - low]) / SIZE
            classes[count] = self.digits["labels"][i]
            count += 1
        is_object = (np.arange(MOST) < count).astype(np.float32)
        objects = {"classes": classes, "boxes": boxes, "is_object": is_object}
        return {"images": image[:, :, None], **objects, "weights": np.ones((), np.float32)}


@dataclass(frozen=True)
class ScenesOfDigits:
    """Images of one to four digits with their boxes."""

    examples: int = 50_000  # of the training split
    validation_examples: int = 300  # of the validation split
    seed: int = 0  # of the images

    def open(self, model: Any) -> Dataset:
        digits = Digits().open(None)
        train = Scenes(digits.train, self.examples, self.seed)
        validation = Scenes(digits.validation, self.validation_examples, self.seed + 1)
        digest = digest_of_drawn(f"{digits.digest} {self}", train)
        return Dataset(train, validation, digest, f"scenes of {digits.description}")


def found_objects(model: Any, params: Any, images: np.ndarray) -> list[Objects]:
    """What the model sees in images: each query's surest class, and the probability of it."""

    @jax.jit
    def run(params, images):
        numbers = object_numbers(model, len(images))
        heads = models.apply(model, params, numbers, source=images).heads
        return jax.nn.softmax(heads["classes"])[..., :-1], heads["boxes"]

    probabilities, boxes = map(np.asarray, run(params, jnp.asarray(images)))
    answers = zip(probabilities, boxes, strict=True)
    return [Objects(p.argmax(axis=-1), box, p.max(axis=-1)) for p, box in answers]


def precision(scored: Evaluation) -> dict[str, float]:
    """COCO's scores, and a picture of the first images."""
    split = scored.dataset.validation
    batch = every_row(split)
    found = found_objects(scored.model, scored.params, batch["images"])
    counts = batch["is_object"].astype(int).sum(axis=1)
    rows = zip(batch["classes"], batch["boxes"], counts, strict=True)
    truth = [Objects(classes[:n], boxes[:n]) for classes, boxes, n in rows]
    if scored.folder is not None and jax.process_index() == 0:
        first = batch["images"][:15], found[:15], truth[:15]
        figures.save(lambda: picture(*first), scored.folder / "boxes.png")
    return average_precision(found, truth, SIZE)


def picture(images: np.ndarray, found: list[Objects], truth: list[Objects]) -> Any:
    figure = figures.images(images, columns=5, size=1.8)
    for axes, answers, objects in zip(figure.axes, found, truth, strict=True):
        for box in objects.boxes:
            figures.outline(axes, box, (SIZE, SIZE), color="white", lw=0.8, ls=":")
        for i in np.flatnonzero(np.asarray(answers.scores) > 0.5):
            label = int(answers.classes[i])
            color = BRIGHT[label % len(BRIGHT)]
            figures.outline(axes, answers.boxes[i], (SIZE, SIZE), str(label), color=color, lw=1.2)
    return figure


encoder = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=96,
    num_heads=4,
    context_length=64,
    embedding=FeatureMap(ResNet((1, 1), (32, 96), basic, stem=16, channels=1)),
    positions=AttentionPositions(grid_sines),
    masks=(full(),),
    heads=(),
    init_std=0.1,
)
decoder = replace(
    encoder,
    num_layers=3,
    context_length=QUERIES,
    positions=AttentionPositions(Learned()),
    embedding=no_content,
    heads=(ObjectClasses(10), Boxes()),
    tie_embeddings=False,
)
experiment = Experiment(
    name="detect_digits",
    model=EncoderDecoder(encoder, decoder, share_embeddings=False),
    data=ScenesOfDigits(),
    objective=SetPrediction(),
    optimizer=Muon(learning_rate=1e-2, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=200),
    steps=1500,
    batch_size=32,
    log_every=100,
    eval_every=500,
    metrics=(precision,),
)
