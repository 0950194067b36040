"""Pictures of questions about images, with a model's answers and where it looked for them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxformer.tools.analysis import figures
from jaxformer.tools.analysis.labels import plain

RIGHT, WRONG = "#1d7a45", "#b3243b"
LINE = 0.16  # inches of a line of text


class Answer(NamedTuple):
    """A question about an image, a model's answer to it, and the right one."""

    question: str
    found: str
    truth: str

    @property
    def text(self) -> str:
        """Question and answer in one line, with the right answer where it differs."""
        right = "" if self.found == self.truth else f" (true: {self.truth})"
        return f"{self.question} {self.found}{right}"


def questions(
    images: Float[np.ndarray, "n height width 3"],
    asked: Sequence[Sequence[Answer]],
    columns: int = 4,
    size: float = 2.9,
) -> Any:
    """A figure of images, each above the questions about it. A wrong answer is red.

    A column is `size` inches wide.
    """
    most = max(map(len, asked))
    height = 0.8 * size * images.shape[1] / images.shape[2]
    all_axes = figures.panels(len(images), columns, size, height + (most + 0.5) * LINE)
    for axes, image, of_image in zip(all_axes, images, asked, strict=True):
        axes.imshow(np.clip(image, 0, 1))
        axes.set_axis_off()
        # empty lines, so that all images have one size
        for i in range(most):
            text, color = " ", RIGHT
            if i < len(of_image):
                text = of_image[i].text
                color = RIGHT if of_image[i].found == of_image[i].truth else WRONG
            place = dict(xytext=(0, -4 - 72 * LINE * i), textcoords="offset points")
            style = dict(ha="center", va="top", fontsize=7.5, color=color)
            axes.annotate(plain(text), (0.5, 0), xycoords="axes fraction", **place, **style)
    return all_axes[0].figure


def lit(
    image: Float[np.ndarray, "height width 3"], weights: Float[np.ndarray, "lines columns"]
) -> Float[np.ndarray, "height width 3"]:
    """The image, dark where a patch has no attention weight, and bright where it has the most."""
    size = image.shape[0] // weights.shape[0], image.shape[1] // weights.shape[1]
    light = np.kron(weights / weights.max(), np.ones(size))[..., None]
    return (0.15 + 0.85 * light) * np.maximum(image, 0.35)


def beside(
    images: Float[np.ndarray, "n height width 3"], weights: Float[np.ndarray, "n lines columns"]
) -> Float[np.ndarray, "n height wide 3"]:
    """Each image, and on its right the same image in the light of attention weights."""
    lights = np.stack([lit(*each) for each in zip(images, weights, strict=True)])
    gap = np.ones((*images.shape[:2], max(1, images.shape[2] // 16), 3))
    return np.concatenate([images, gap, lights], axis=2)
