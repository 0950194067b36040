"""LLaVA: a decoder that reads an image as a few of its tokens.

Liu et al. 2023, arXiv:2304.08485, section 4.1. A vision transformer reads the image, a linear map W
takes its patches to the width of the decoder, and they stand before the text:

    prefix = ImagePrefix(vision, image_token=0)
    model = ModelConfig(embedding=prefix, ...)
    models.apply(model, params, tokens, inputs={"images": images})
    generate(model, params, prompts, 20, sources=images)       # each prompt: prefix.prompt(tokens)

All else is the trunk's decoder with its causal mask, cache and heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Bool, Float, Int

from jaxformer import models, params
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import embedding, transformer
from jaxformer.models.config import Embedding, ModelConfig
from jaxformer.models.inputs import Inputs
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.params import Tree


def put_patches(
    x: Float[Array, "B T D"], is_image: Bool[Array, "B T"], patches: Float[Array, "B P D"]
) -> Float[Array, "B T D"]:
    """x with the patches of each row in the place of the image tokens that begin the row.

    They must be P or none. Any other row becomes NaN: its tokens were cut, or are those of another
    image size. An image token behind a text token is text: a model may write one.
    """
    T, P = x.shape[1], patches.shape[1]
    count = jnp.cumprod(is_image, axis=1).sum(axis=1)[:, None]  # image tokens before the text
    as_long = jnp.pad(patches[:, :T], ((0, 0), (0, max(T - P, 0)), (0, 0)))
    x = jnp.where((jnp.arange(T)[None] < count)[..., None], as_long.astype(x.dtype), x)
    return jnp.where(((count == 0) | (count == P))[..., None], x, jnp.nan)


@dataclass(frozen=True)
class ImagePrefix:
    """The embedding of text tokens [B, T], among which `image_token` stands for a patch.

    x_t = E[token_t], or W z_t for the image tokens that begin a row, where z is the output of
    `vision` for the image of the row: `inputs={"images": [B, height, width, C]}`. Section 4.1,
    eq. 1. The hidden states of a row are NaN if these tokens are more or fewer than the patches,
    and if there are some but no image. Behind a cache, all tokens are text. Raises ConfigError for
    a vision model with heads or with an auxiliary loss, for an image token outside the vocabulary,
    and for images of another size or number.
    """

    vision: ModelConfig  # reads images [B, height, width, C]; it has no heads
    image_token: int = 0  # the token that stands for a patch; no text has it
    source = "images"  # `decoding.generate` passes its sources as this field of `inputs`

    def __post_init__(self):
        check_whole("ImagePrefix.image_token", self.image_token, least=0)
        if self.vision.heads:
            raise ConfigError("ImagePrefix.vision has heads, which nobody reads; give heads=()")

    # the number of patches of an image
    patches = property(lambda self: self.vision.embedding.length)

    def evaluation(self) -> "ImagePrefix":
        """The embedding without dropout."""
        return replace(self, vision=models.evaluation(self.vision))

    def prompt(self, tokens: Any) -> list[int]:
        """The tokens of an image, then those of a text."""
        return [self.image_token] * self.patches + [int(token) for token in tokens]

    def __call__(self, config: ModelConfig) -> Embedder:
        if self.image_token >= config.vocab_size:
            raise ConfigError(
                f"ImagePrefix.image_token={self.image_token} is outside the vocabulary of "
                f"{config.vocab_size}; enlarge model.vocab_size by one for it"
            )
        text = embedding.token_embedder(config, Embedding())
        width = self.vision.hidden_width
        projector = params.linear(
            (width, config.d_model), ("embed", None), ("embed",), normal(width**-0.5)
        )
        spec = text.spec | {"vision": transformer.spec(self.vision), "projector": projector}

        def apply(
            params: Tree, tokens: Int[Array, "B T"], inputs: Tree, context: Context
        ) -> Float[Array, "B T D"]:
            x = text.apply(params, tokens, None, context)
            images = inputs.get(self.source) if isinstance(inputs, dict) else None
            if images is None and context.lengths is not None:
                return x
            is_image = tokens == self.image_token
            if context.padding_mask is not None:
                is_image &= context.padding_mask
            if images is None:
                return jnp.where(is_image[:, :1, None], jnp.nan, x)
            if len(images) != len(tokens):
                raise ConfigError(
                    f"inputs: images {list(images.shape)} and tokens {list(tokens.shape)}: "
                    "expected one image for each row"
                )
            return put_patches(x, is_image, self.projected(params, images, context))

        return Embedder(spec, apply, text.length)

    def projected(
        self, params: Tree, images: Float[Array, "B height width C"], context: Context
    ) -> Float[Array, "B P D"]:
        """W z of eq. 1: the patches of images as vectors of the decoder."""
        inputs = Inputs(images, dropout_key=context.dropout_key, dtype=context.dtype)
        output = transformer.encode(self.vision, params["vision"], inputs)
        if output.loss is not None or output.updates is not None:
            raise ConfigError(
                "ImagePrefix.vision has an auxiliary loss or updates, which an embedding cannot "
                "pass on; give a model without them"
            )
        return linear("bpw,wd->bpd", output.hidden, params["projector"])
