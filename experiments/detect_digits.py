"""Digits of any size anywhere in an image: which ones are there, and in which boxes.

DETR: Carion et al. 2020, arXiv:2005.12872. A small ResNet makes 8 x 8 features of the image, an
encoder reads them, and a decoder answers with a set of eight classes and boxes; each object is
matched to one answer. Images of 64 x 64 pixels have one to four digits of scikit-learn, 12 to 22
pixels large; validation images have other digits. Scores are COCO's average precision (pycocotools)
on 300 unseen images. `boxes.png` in the run's folder shows boxes: found ones in colour with their
class, true ones in dotted white.
Expected: AP50 0.929, 0.942, 0.918, mAP 0.695, 0.715, 0.677 (seeds 0, 1, 2). 832,447 parameters.
With patches of 8 x 8 pixels instead of the ResNet, AP50 is 0.03 after as many steps; with AdamW
instead of Muon, too, 0.01 after 1,000.
Time: 8 minutes of one CPU core.
Needs pip install 'jaxformer[vision,detection]'.
Command: make train EXP=detect_digits
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxformer.data.batching import every_row
from jaxformer.data.drawn import Drawn, dataset_of_drawn
from jaxformer.data.images import Digits
from jaxformer.data.sources import Dataset
from jaxformer.evaluation.detection import Objects, average_precision
from jaxformer.evaluation.metric import Evaluation
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.models.config import AttentionPositions, Learned
from jaxformer.tools.analysis import figures
from jaxformer.tools.analysis.detected import detections
from jaxformer.training import Cosine, Experiment, Muon
from jaxformer.zoo.detr import Boxes, FeatureMap, ObjectClasses, detect, grid_sines, no_content
from jaxformer.zoo.resnet import ResNet, basic
from jaxformer.zoo.set_prediction import SetPrediction

SIZE, MOST, QUERIES = 64, 4, 8  # pixels of a side; digits of an image; answers
SMALLEST, LARGEST = 12, 22  # pixels of a digit


def resized(digit: np.ndarray, size: int) -> np.ndarray:
    """A digit [8, 8] with `size` lines and columns, by linear interpolation."""
    places = np.clip((np.arange(size) + 0.5) * 8 / size - 0.5, 0, 7)
    weights = np.maximum(0, 1 - abs(places[:, None] - np.arange(8)[None]))
    return weights @ digit @ weights.T


def scene(digits: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An image with digits, each away from the others, and their boxes."""
    image = np.zeros((SIZE, SIZE), np.float32)
    taken = np.zeros((SIZE, SIZE), bool)
    classes = np.zeros(MOST, np.int32)
    boxes = np.zeros((MOST, 4), np.float32)
    count, wanted = 0, rng.integers(1, MOST + 1)
    while count < wanted:
        i = rng.integers(len(digits["labels"]))
        size = int(rng.integers(SMALLEST, LARGEST + 1))
        top, left = rng.integers(SIZE - size + 1, size=2)
        place = slice(top, top + size), slice(left, left + size)
        if taken[place].any():
            continue
        digit = resized(digits["images"][i, :, :, 0], size)
        image[place], taken[place] = digit, True
        lines, columns = (np.flatnonzero(digit.max(axis=axis) > 0.2) for axis in (1, 0))
        low = np.array([left + columns[0], top + lines[0]])
        high = np.array([left + columns[-1], top + lines[-1]]) + 1
        boxes[count] = np.concatenate([(low + high) / 2, high - low]) / SIZE
        classes[count] = digits["labels"][i]
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
        of_training, of_validation = (
            partial(scene, every_row(split)) for split in (digits.train, digits.validation)
        )
        return dataset_of_drawn(
            Drawn(of_training, self.examples, self.seed),
            Drawn(of_validation, self.validation_examples, self.seed + 1),
            f"{digits.digest} {self}",
            f"scenes of {digits.description}",
        )


def precision(scored: Evaluation) -> dict[str, float]:
    """COCO's scores, and a picture of the first images."""
    batch = every_row(scored.dataset.validation)
    answers = detect(scored.model, scored.params, batch["images"])
    found = [Objects(*each) for each in zip(*answers, strict=True)]
    counts = batch["is_object"].astype(int).sum(axis=1)
    rows = zip(batch["classes"], batch["boxes"], counts, strict=True)
    truth = [Objects(classes[:n], boxes[:n]) for classes, boxes, n in rows]
    if scored.folder is not None and jax.process_index() == 0:
        first = batch["images"][:15], found[:15], truth[:15]
        figures.save(lambda: detections(*first), scored.folder / "boxes.png")
    return average_precision(found, truth, SIZE)


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
