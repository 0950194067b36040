"""Average precision of detected objects, by pycocotools: Lin et al. 2014, arXiv:1405.0312."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError, package_of


class Objects(NamedTuple):
    """The objects of an image."""

    classes: np.ndarray  # [n], integers from 0
    boxes: np.ndarray  # [n, 4]: (x, y) of the centre, width and height; fractions of the image
    scores: np.ndarray | None = None  # [n], of detections: larger is surer


def average_precision(
    found: Sequence[Objects], truth: Sequence[Objects], pixels: int = 1000
) -> dict[str, float]:
    """COCO's mean average precision, from 0 to 1, and that at an overlap of 0.5: `mAP`, `AP50`.

    At most 100 detections of an image count, those of the largest scores. Sizes are in units of an
    image of `pixels` squared. Raises ConfigError for unequal numbers of images, for detections
    without scores, and for images without any object.
    """
    with package_of("detection"):
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    if len(found) != len(truth):
        raise ConfigError(
            f"average_precision: {len(found)} images with detections, {len(truth)} with objects"
        )
    if any(each.scores is None for each in found):
        raise ConfigError("average_precision: detections need scores")
    objects = [_as_coco(i, each, pixels) for i, each in enumerate(truth)]
    detections = [_as_coco(i, each, pixels) for i, each in enumerate(found)]
    every = [each for of_image in objects for each in of_image]
    if not every:
        raise ConfigError("average_precision: no image has an object")
    answers = [each for of_image in detections for each in of_image]
    if not answers:  # pycocotools takes no empty list
        return {"mAP": 0.0, "AP50": 0.0}
    categories = sorted({each["category_id"] for each in (*every, *answers)})
    with contextlib.redirect_stdout(io.StringIO()):
        coco: Any = COCO()
        coco.dataset = {
            "info": {},  # pycocotools 2.0.10 copies it
            "images": [{"id": i} for i in range(len(truth))],
            "categories": [{"id": category} for category in categories],
            "annotations": [each | {"id": i} for i, each in enumerate(every, 1)],
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(answers), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {"mAP": float(evaluation.stats[0]), "AP50": float(evaluation.stats[1])}


def _as_coco(image: int, objects: Objects, pixels: int) -> list[dict[str, Any]]:
    """The objects of an image in COCO's form: a box is (left, top, width, height)."""
    boxes = np.asarray(objects.boxes, np.float64).reshape(-1, 4) * pixels
    boxes[:, :2] -= boxes[:, 2:] / 2
    entries = []
    for i, (box, label) in enumerate(zip(boxes, objects.classes, strict=True)):
        entry = {
            "image_id": image,
            "category_id": int(label) + 1,
            "bbox": box.tolist(),
            "area": float(box[2] * box[3]),
            "iscrowd": 0,
        }
        if objects.scores is not None:
            entry["score"] = float(objects.scores[i])
        entries.append(entry)
    return entries
