"""The objective of MAE: the pixels of the patches that the encoder does not see.

He et al. 2021, arXiv:2111.06377, section 3. The model is that of `zoo.masked_autoencoder`.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, random
from jaxtyping import Float

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models.patches import patches
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum
from jaxformer.params import Tree
from jaxformer.zoo.masked_autoencoder import KeptPatches, PixelDecoder, hidden_patches


def reconstruction_loss(
    encoder: KeptPatches,
    decoder: PixelDecoder,
    images: Float[Array, "B height width C"],
    pixels: Float[Array, "B P _"],
    noise: Float[Array, "B P"],
) -> Float[Array, ""]:
    """The mean square error of the pixels of hidden patches. He et al. 2021, section 3."""
    return errors_of_images(encoder, decoder, images, pixels, noise).mean()


def errors_of_images(
    encoder: KeptPatches,
    decoder: PixelDecoder,
    images: Float[Array, "B height width C"],
    pixels: Float[Array, "B P _"],
    noise: Float[Array, "B P"],
) -> Float[Array, " B"]:
    """The mean square error of the pixels of each image's hidden patches.

    The variance of a normalised target is that of a sample, as in the authors' code.
    """
    patch = encoder.patches.patch
    C = images.shape[-1]
    target = patches(images, patch)
    shape = *target.shape[:2], C, patch[0] * patch[1]
    target = target.reshape(shape).swapaxes(2, 3).reshape(target.shape)
    if decoder.normalised:
        mean, variance = (f(axis=-1, keepdims=True) for f in (target.mean, target.var))
        sample = variance * target.shape[-1] / (target.shape[-1] - 1)
        target = (target - mean) / jnp.sqrt(sample + 1e-6)
    error = jnp.square(pixels - target).mean(axis=-1)
    hidden = hidden_patches(noise, encoder.kept)
    return (error * hidden).sum(axis=1) / hidden.sum(axis=1)


@dataclass(frozen=True)
class MaskedPatches:
    """An objective: the mean square error of the pixels of hidden patches, for each image.

    The batch has `images` `[B, height, width, C]` and their `weights` `[B]`. Which patches are
    hidden is a function of (seed, step), unless the batch gives `inputs={"noise": [B, patches]}`.
    With PixelDecoder(normalised=True) the pixels of a patch are normalised first. He et al. 2021,
    section 3. Raises ConfigError for a model without KeptPatches that hide some, or without a
    PixelDecoder.
    """

    def __call__(self, model: Any, params: Tree, batch: Tree, context: Any) -> LossSums:
        encoder, decoder = parts_of(model)
        noise_key, model_key = random.split(context.key)
        images, weights = batch["images"], batch["weights"]
        noise = self.noise(encoder, batch, noise_key)
        output = models.apply(
            model,
            params,
            images,
            inputs=batch.get("inputs", {}) | {"noise": noise},
            dropout_key=model_key,
            dtype=context.dtype,
        )
        wide = jnp.promote_types(images.dtype, jnp.float32)
        pixels = output.heads[decoder.name].astype(wide)
        errors = errors_of_images(encoder, decoder, images.astype(wide), pixels, noise)
        weights = weights.astype(wide)
        sums = LossSums(weighted_sum(errors, weights), weights.sum(), unit="images")
        return with_own(sums, output)

    def noise(self, encoder: KeptPatches, batch: Tree, key: Array) -> Float[Array, "B P"]:
        """The numbers that choose the patches: those of the batch, or uniform ones from 0 to 1."""
        if "noise" in batch.get("inputs", {}):
            return batch["inputs"]["noise"]
        return random.uniform(key, (len(batch["images"]), encoder.count))

    def example(self, model: Any, batch: Tree) -> Tree:
        """The inputs of the model for a report: the image, and the patches that it sees."""
        noise = self.noise(parts_of(model)[0], batch, random.key(0))
        return batch | {"inputs": batch.get("inputs", {}) | {"noise": noise}}


def parts_of(model: Any) -> tuple[KeptPatches, PixelDecoder]:
    """The embedding of the encoder, and the decoder. Raises ConfigError."""
    encoder = getattr(model, "embedding", None)
    heads = getattr(model, "heads", ())
    decoder = next((head for head in heads if isinstance(head, PixelDecoder)), None)
    if not isinstance(encoder, KeptPatches) or decoder is None:
        raise ConfigError(
            "objective: MaskedPatches needs a ModelConfig with embedding=zoo.KeptPatches(...) and "
            f"the head zoo.PixelDecoder(...); got embedding={encoder}, heads={heads}"
        )
    if encoder.kept == encoder.count:
        raise ConfigError(
            f"objective: MaskedPatches: model.embedding.ratio={encoder.ratio} of "
            f"{encoder.count} patches hides none; the loss has nothing to compare"
        )
    return encoder, decoder
