"""How near generated images are to known ones: a model that only repeats them is very near."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Nearest(NamedTuple):
    """The nearest known image of each image."""

    index: Int[np.ndarray, " N"]  # among the known images
    distance: Float[np.ndarray, " N"]  # Euclidean, over all pixels


def nearest(images: Float[np.ndarray, "N ..."], known: Float[np.ndarray, "M ..."]) -> Nearest:
    """argmin and min of |a - b|, over the known images b, for each image a."""
    a, b = images.reshape(len(images), -1), known.reshape(len(known), -1)
    index = (np.square(b).sum(axis=1)[None] - 2 * a @ b.T).argmin(axis=1)
    return Nearest(index, np.linalg.norm(a - b[index], axis=1))
