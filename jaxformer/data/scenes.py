"""Images with several coloured shapes, drawn from numbers: for questions about pictures.

`place` chooses where objects stand, `draw` makes the images.
"""

import numpy as np
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError

SHAPES = ("square", "circle", "triangle")
COLOURS = {
    "red": (0.95, 0.15, 0.15),
    "green": (0.1, 0.75, 0.2),
    "blue": (0.2, 0.35, 1.0),
    "orange": (1.0, 0.55, 0.05),
    "grey": (0.6, 0.6, 0.6),
    "yellow": (0.95, 0.95, 0.2),
}
TRIES = 50  # random places, before all objects are placed anew


def place(
    rng: np.random.Generator, count: int, size: int, margin: float, apart: float
) -> Float[np.ndarray, "n 2"]:
    """The centres (x, y) in pixels of `count` objects in an image of `size` x `size` pixels.

    They stand at least `margin` from each edge and at least `apart` from each other. Raises
    ConfigError where so many objects hardly fit: their discs would cover more than a third of the
    places.
    """
    side = size - 2 * margin
    if side <= 0 or count * apart**2 > 1.3 * (side + apart) ** 2 / 3:
        raise ConfigError(
            f"scenes.place: {count} objects {apart} pixels apart in {size} pixels with margins of "
            f"{margin}: they hardly fit; take fewer objects or a larger image"
        )
    while True:
        centres = np.zeros((0, 2))
        for new in rng.uniform(margin, size - margin, (TRIES, 2)):
            if (((centres - new) ** 2).sum(axis=1) >= apart**2).all():
                centres = np.vstack([centres, new])
            if len(centres) == count:
                return centres


def draw(
    centres: Float[np.ndarray, "B n 2"],
    shapes: Int[np.ndarray, "B n"],
    colours: Float[np.ndarray, "B n 3"],
    size: int,
    radius: float,
) -> Float[np.ndarray, "B size size 3"]:
    """Images from 0 to 1 of shapes (indices of `SHAPES`) on black, with soft edges.

    The centres (x, y) are pixels within the image. The side of a square is twice the radius. A
    later object covers an earlier one.
    """
    reach = int(np.ceil(radius)) + 1
    window = np.arange(2 * reach + 1)
    B = len(centres)
    images = np.zeros((B, size + 2 * reach, size + 2 * reach, 3), np.float32)
    for k in range(centres.shape[1]):
        # a shape touches few pixels: those within `reach` of the pixel of its centre, in an image
        # with a border of that width
        first = np.floor(centres[:, k]).astype(int).clip(0, size - 1)
        columns, lines = first[:, :1] + window, first[:, 1:] + window
        x = (columns + 0.5 - reach - centres[:, k, :1])[:, None, :]
        y = (lines + 0.5 - reach - centres[:, k, 1:])[:, :, None]
        square = radius - np.maximum(abs(x), abs(y))
        circle = radius - np.hypot(x, y)
        # y grows downwards: the point of a triangle is above
        triangle = np.minimum(0.45 * (y + radius) - 0.9 * abs(x), radius - y)
        which = [(shapes[:, k] == i)[:, None, None] for i in range(len(SHAPES))]
        inside = np.select(which, [square, circle, triangle])
        cover = np.clip(inside + 0.5, 0, 1)[..., None]
        at = np.arange(B)[:, None, None], lines[:, :, None], columns[:, None, :]
        images[at] += cover * (colours[:, k, None, None] - images[at])
    return images[:, reach:-reach, reach:-reach]
