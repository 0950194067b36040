"""Pictures of images with boxes around the objects that a model found in them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxformer.tools.analysis import figures

BRIGHT = ("#ff5c5c", "#4dd07a", "#5ca8ff", "#ffd84d", "#ff7de9")  # by class
SURE = 0.5  # the least score of a box that is drawn


def detections(
    images: Float[np.ndarray, "n height width c"],
    found: Sequence[Any],
    truth: Sequence[Any],
    columns: int = 5,
) -> Any:
    """A figure of images: found boxes in colour with their class, true ones in dotted white.

    `found` and `truth` hold for each image its `classes`, `boxes` (as `evaluation.detection`) and,
    of the found ones, `scores`.
    """
    size = images.shape[1:3]
    figure = figures.images(images, columns=columns, size=1.8)
    for axes, answers, objects in zip(figure.axes, found, truth, strict=True):
        for box in objects.boxes:
            figures.outline(axes, box, size, color="white", lw=0.8, ls=":")
        for i in np.flatnonzero(np.asarray(answers.scores) > SURE):
            label = int(answers.classes[i])
            color = BRIGHT[label % len(BRIGHT)]
            figures.outline(axes, answers.boxes[i], size, str(label), color=color, lw=1.2)
    return figure
