"""Vision transformers at another resolution than that of their training, and images as output."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import normal, zeros

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Learned, ModelConfig, Patches
from jaxformer.models.heads import Head
from jaxformer.ops.einsum import add_bias
from jaxformer.params import Spec, Tree


@dataclass(frozen=True)
class Reconstruction:
    """A head that returns images `[B, height, width, channels]`.

    A linear map of a patch's hidden state gives stride^2 pixels. With `Patches(mask_token=True)` it
    is SimMIM: Xie et al. 2021, arXiv:2111.09886, section 3.3. Raises ConfigError for tokens.
    """

    stride: int = 16  # pixels of a patch in each direction
    name: str = "reconstruction"  # key of its parameters and of its output

    def __call__(self, config: ModelConfig) -> Head:
        patches = config.embedding
        D = config.hidden_width
        if not isinstance(patches, Patches):
            raise ConfigError(
                f"model.heads: {self} gives an image; model.embedding is no models.Patches"
            )
        pixels = patches.channels * self.stride**2
        spec = {  # a convolution of width 1, like Hugging Face's
            "kernel": Spec(
                (D, 1, 1, pixels), ("embed", None, None, None), normal(config.std), ("embed",)
            ),
            "bias": Spec((pixels,), (None,), zeros),
        }

        def apply(params, hidden, padding_mask, inputs):
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            x = hidden[:, patches.first_patch :]
            x = ops.einsum("btd,dp->btp", x, params["kernel"][:, 0, 0], dtype=wide)
            x = add_bias(x, params["bias"])
            down, across = patches.grid
            x = x.reshape(-1, down, across, patches.channels, self.stride, self.stride)
            x = x.transpose(0, 1, 4, 2, 5, 3)
            return x.reshape(-1, down * self.stride, across * self.stride, patches.channels)

        return Head(self.name, spec, apply)


def resize(config: ModelConfig, weights: Tree, image: tuple[int, int]) -> tuple[ModelConfig, Tree]:
    """(config, parameters) for another image size: learned positions are interpolated on the grid.

    The interpolation is bicubic, like Hugging Face's `interpolate_pos_encoding`; Dosovitskiy et al.
    2020, section 3.2. Raises ConfigError for tokens.
    """
    if not isinstance(config.embedding, Patches):
        raise ConfigError(
            "vision.resize: model.embedding is no models.Patches; for tokens see models.adaptation"
        )
    patches = replace(config.embedding, image=image, unread=(0, 0))
    new = replace(config, embedding=patches, context_length=patches.length)
    if not isinstance(config.positions, Learned):
        return new, weights
    table = weights["embedding"]["positions"]
    height, width = config.embedding.grid
    other_positions = len(table) - height * width  # rows of the offset and of the class token
    wide = jnp.promote_types(table.dtype, jnp.float32)
    down = jnp.asarray(bicubic(height, patches.grid[0]), wide)
    across = jnp.asarray(bicubic(width, patches.grid[1]), wide)
    grid = table[other_positions:].reshape(height, width, -1).astype(wide)
    grid = jnp.einsum("yh,xw,hwd->yxd", down, across, grid, precision="highest")
    new_positions = grid.reshape(-1, grid.shape[-1]).astype(table.dtype)
    positions = jnp.concatenate([table[:other_positions], new_positions])
    return new, weights | {"embedding": weights["embedding"] | {"positions": positions}}


def bicubic(old: int, new: int) -> np.ndarray:
    """The weights `[new, old]` of cubic convolution with a = -3/4; edges are repeated.

    Keys 1981, eq. 4 (there a = -1/2). Equal to
    torch.nn.functional.interpolate(mode="bicubic", align_corners=False). `jax.image.resize`
    differs: it has a = -1/2 and drops samples beyond the edges. Sample i is at
    (i + 1/2) old / new - 1/2. The image is not smoothed before it shrinks.
    """
    a = -0.75
    samples = (np.arange(new) + 0.5) * old / new - 0.5
    matrix = np.zeros((new, old))
    for tap in (-1, 0, 1, 2):
        source = np.floor(samples).astype(int) + tap
        x = np.abs(samples - source)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * (x**3 - 5 * x**2 + 8 * x - 4)
        entries = np.arange(new), np.clip(source, 0, old - 1)
        np.add.at(matrix, entries, np.where(x <= 1, near, far))
    return matrix
