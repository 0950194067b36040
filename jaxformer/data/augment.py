"""Random augmentations of training images: `(key, image [H, W, C]) -> image` of the same shape.

`ClassCrossEntropy(augment=(Crop(1), Flip()))` applies them in this order. Your own function is used
in the same way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError, check_numbers

Image = Float[Array, "H W C"]


def augmented(
    functions: Sequence[Callable], key: Array, images: Float[Array, "B H W C"]
) -> Float[Array, "B H W C"]:
    """Every image after all functions in order.

    Each function gets another key for each image. All keys are made of `key`, so the result is a
    function of `key` and the images.
    """
    for number, function in enumerate(functions):
        keys = jax.random.split(jax.random.fold_in(key, number), len(images))
        images = jax.vmap(function)(keys, images)
    return images


@dataclass(frozen=True)
class Flip:
    """Mirrors an image, left to right. Do not use it for digits and letters."""

    probability: float = 0.5  # of mirroring an image

    def __post_init__(self):
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"Flip.probability={self.probability}: must be in [0, 1]")

    def __call__(self, key: Array, image: Image) -> Image:
        return jnp.where(jax.random.bernoulli(key, self.probability), image[:, ::-1], image)


@dataclass(frozen=True)
class Crop:
    """Adds a border of zeros and crops to the old size: a shift by up to `padding` pixels.

    He et al. 2015, section 4.2.
    """

    padding: int = 4  # pixels on each side

    def __post_init__(self):
        check_numbers("Crop.", self, padding=0)

    def __call__(self, key: Array, image: Image) -> Image:
        down, across = jax.random.randint(key, (2,), 0, 2 * self.padding + 1)
        border = ((self.padding, self.padding), (self.padding, self.padding), (0, 0))
        return jax.lax.dynamic_slice(jnp.pad(image, border), (down, across, 0), image.shape)


@dataclass(frozen=True)
class ResizedCrop:
    """A random crop inside the image, resized bilinearly to the image's size.

    Szegedy et al. 2014, section 6.
    """

    area: tuple[float, float] = (0.08, 1.0)  # of the crop, as a share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width : height of the crop; log-uniform

    def __post_init__(self):
        for name, largest in (("area", 1), ("ratio", math.inf)):
            pair = getattr(self, name)
            if not (
                len(pair) == 2 and 0 < pair[0] <= pair[1] <= largest and math.isfinite(pair[1])
            ):
                upper = f" of at most {largest}" if math.isfinite(largest) else ""
                raise ConfigError(
                    f"ResizedCrop.{name}={pair}: expected two numbers above 0{upper}, "
                    "the smaller first"
                )

    def __call__(self, key: Array, image: Image) -> Image:
        size = jnp.array(image.shape[:2], jnp.float32)
        area, ratio, *corner = jax.random.uniform(key, (4,))
        area = size.prod() * (self.area[0] + area * (self.area[1] - self.area[0]))
        ratio = self.ratio[0] * (self.ratio[1] / self.ratio[0]) ** ratio
        crop = jnp.minimum(jnp.sqrt(jnp.stack([area / ratio, area * ratio])), size)
        scale = size / crop
        corner = jnp.stack(corner) * (size - crop)
        return jax.image.scale_and_translate(
            image, image.shape, (0, 1), scale, -corner * scale, "linear"
        )


@dataclass(frozen=True)
class Move:
    """Rotates and shifts an image, bilinearly, with zeros beyond its edges."""

    degrees: float = 10.0  # the largest rotation to either side
    pixels: float = 1.0  # the largest shift in each direction

    def __post_init__(self):
        check_numbers("Move.", self, degrees=0, pixels=0)

    def __call__(self, key: Array, image: Image) -> Image:
        rotation, *shift = jax.random.uniform(key, (3,), minval=-1.0)
        angle = rotation * jnp.deg2rad(self.degrees)
        line, column = (jnp.arange(n) - (n - 1) / 2 for n in image.shape[:2])
        line, column = jnp.meshgrid(
            line - shift[0] * self.pixels, column - shift[1] * self.pixels, indexing="ij"
        )
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        middle = [(n - 1) / 2 for n in image.shape[:2]]
        coordinates = [cos * line - sin * column + middle[0], sin * line + cos * column + middle[1]]
        read = partial(jax.scipy.ndimage.map_coordinates, coordinates=coordinates, order=1)
        return jax.vmap(read, in_axes=-1, out_axes=-1)(image)
