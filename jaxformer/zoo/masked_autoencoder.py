"""MAE: the encoder sees a quarter of an image's patches, and a small decoder draws the others.

He et al. 2021, arXiv:2111.06377. Random numbers of the caller, `inputs={"noise": [B, patches]}`,
choose the patches: the encoder sees those of the smallest numbers. `zoo.masked_patches` has
the objective that trains both.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int

from jaxformer import params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import full
from jaxformer.models import transformer
from jaxformer.models.config import ModelConfig, Patches, TokenClassification
from jaxformer.models.heads import Head
from jaxformer.models.inputs import Inputs, Output
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.models.patches import patch_embedder
from jaxformer.params import Spec, Tree


def order(noise: Float[Array, "B P"]) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """(patches by their noise, the place of each patch in that order)."""
    by_noise = jnp.argsort(noise, axis=1)
    return by_noise, jnp.argsort(by_noise, axis=1)


def hidden_patches(noise: Float[Array, "B P"], count: int) -> Float[Array, "B P"]:
    """1 for a patch that the encoder does not see, 0 for the `count` patches that it sees."""
    _, place = order(noise)
    return (place >= count).astype(noise.dtype)


def take(x: Float[Array, "B S D"], indices: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The vectors at the indices."""
    return jnp.take_along_axis(x, indices[..., None], axis=1)


def noise_of(inputs: Any) -> Float[Array, "B P"]:
    """`inputs["noise"]`. Raises ConfigError if there is none."""
    noise = inputs.get("noise") if isinstance(inputs, dict) else None
    if noise is None:
        raise ConfigError(
            "inputs: a masked autoencoder chooses its patches by random numbers; "
            'give models.apply(..., inputs={"noise": numbers [B, patches]})'
        )
    return noise


def sines(grid: tuple[int, int], width: int) -> Float[np.ndarray, "P D"]:
    """The fixed positions: sine and cosine of the column, then of the line; zeros come first.

    He et al. 2021, appendix A.1, in the order of the published weights. Raises ConfigError for a
    width that is no multiple of four.
    """
    if width % 4:
        raise ConfigError(f"a width of {width}: sines of lines and columns need a multiple of four")
    lines, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    frequencies = 10_000.0 ** -(np.arange(width // 4) / (width // 4))
    angles = [np.outer(numbers, frequencies) for numbers in (columns, lines)]
    table = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1)
    return np.concatenate([np.zeros((1, width)), table])


def positions_spec(grid: tuple[int, int], width: int) -> Spec:
    """`sines` as a parameter that is not trained."""

    def init(key, shape, dtype):
        return jnp.asarray(sines(grid, width), dtype)

    shape = grid[0] * grid[1] + 1, width
    return Spec(shape, ("length", "embed"), init, trained=False)


@dataclass(frozen=True)
class KeptPatches:
    """The embedding of the encoder: a class token, and the patches that it sees.

    The position is added before the choice. He et al. 2021, section 3.
    """

    patches: Patches  # how an image is cut; its class token is not read
    ratio: float = 0.75  # of the patches that are hidden

    def __post_init__(self):
        check_numbers("KeptPatches.", self, ratio=0)
        if not 0 <= self.ratio < 1 or self.kept < 1:
            raise ConfigError(f"KeptPatches.ratio={self.ratio}: hides all of the patches")

    count = property(lambda self: self.patches.grid[0] * self.patches.grid[1])
    kept = property(lambda self: int(self.count * (1 - self.ratio)))
    length = property(lambda self: self.kept + 1)

    def __call__(self, config: ModelConfig) -> Embedder:
        plain = replace(self.patches, class_token=False)
        images = patch_embedder(config, plain)
        spec = images.spec | {
            "class_token": Spec((config.d_model,), ("embed",), normal(config.std)),
            "positions": positions_spec(plain.grid, config.d_model),
        }

        def apply(
            params: Tree, x: Float[Array, "B height width C"], inputs: Tree, context: Context
        ) -> Array:
            x = images.apply({"patches": params["patches"]}, x, None, context)
            table = params["positions"].astype(x.dtype)
            by_noise, _ = order(noise_of(inputs))
            x = take(x + table[None, 1:], by_noise[:, : self.kept])
            first = params["class_token"].astype(x.dtype) + table[0]
            first = jnp.broadcast_to(first[None, None], (len(x), 1, config.d_model))
            return jnp.concatenate([first, x], axis=1)

        def length(x: Float[Array, "B height width C"]) -> int:
            images.length(x)  # it checks the size of the images
            return self.length

        return Embedder(spec, apply, length)


@dataclass(frozen=True)
class Latents:
    """The embedding of the decoder: the encoder's states, and a mask token for hidden patches."""

    width: int  # of the encoder
    grid: tuple[int, int]  # of the patches

    def __call__(self, config: ModelConfig) -> Embedder:
        D, start = config.d_model, normal(config.std)
        spec = {
            "latents": params.linear((self.width, D), ("embed", None), ("embed",), start, True),
            "mask_token": Spec((D,), ("embed",), start),
            "positions": positions_spec(self.grid, D),
        }

        def apply(params: Tree, x: Float[Array, "B T D"], inputs: Tree, context: Context) -> Array:
            x = linear("btd,dc->btc", x, params["latents"])
            B, seen = len(x), x.shape[1] - 1
            hidden = self.grid[0] * self.grid[1] - seen
            token = params["mask_token"].astype(x.dtype)[None, None]
            _, place = order(noise_of(inputs))
            by_noise = jnp.concatenate([x[:, 1:], jnp.broadcast_to(token, (B, hidden, D))], axis=1)
            x = jnp.concatenate([x[:, :1], take(by_noise, place)], axis=1)
            return x + params["positions"].astype(x.dtype)[None]

        return Embedder(spec, apply, lambda x: self.grid[0] * self.grid[1] + 1)


@dataclass(frozen=True)
class PixelDecoder:
    """A head: a small transformer, whose output is the pixels `[B, P, line * column * channel]`.

    `reconstruction_loss` compares them with the image. He et al. 2021, section 3.
    """

    d_model: int = 512  # width of the decoder
    num_layers: int = 8  # layers of the decoder
    num_heads: int = 16  # query heads of a layer
    d_ff: int = 2048  # width of the feed-forward
    normalised: bool = False  # whether the loss compares with pixels normalised by patch
    name: str = "reconstruction"  # key of its parameters and of its output

    def stack(self, config: ModelConfig) -> ModelConfig:
        """The decoder. Raises ConfigError for an encoder that is no masked autoencoder's."""
        if not isinstance(config.embedding, KeptPatches):
            raise ConfigError(f"model.heads: {self} needs model.embedding=zoo.KeptPatches(...)")
        patches = config.embedding.patches
        pixels = patches.patch[0] * patches.patch[1] * patches.channels
        return replace(
            config,
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            context_length=config.embedding.count + 1,
            masks=(full(),),
            embedding=Latents(config.d_model, patches.grid),
            heads=(TokenClassification(pixels, name="pixels"),),
        )

    def __call__(self, config: ModelConfig) -> Head:
        decoder = self.stack(config)

        def apply(params: Tree, hidden: Float[Array, "B T D"], padding_mask, inputs: Tree) -> Array:
            output: Output = transformer.encode(decoder, params, Inputs(hidden, inputs=inputs))
            return transformer.read(decoder, params, output).logits[:, 1:]

        return Head(self.name, transformer.spec(decoder), apply)
