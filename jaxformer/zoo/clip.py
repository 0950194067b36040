"""CLIP: two towers whose features of an image and of its text point in the same direction.

Radford et al. 2021, arXiv:2103.00020. A tower is a model of its own: `models.apply(tower, params,
images)`. Its head gives the features; `similarity` compares those of the two towers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops, params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import causal, full
from jaxformer.models.blocks import norms, pre_norm
from jaxformer.models.config import ModelConfig, Patches
from jaxformer.models.heads import Head
from jaxformer.models.layer import Block, Context, linear
from jaxformer.models.norm import norm, norm_spec
from jaxformer.models.presets import cut, sized
from jaxformer.params import Tree

Features = Float[Array, "B C"]


def embedding_norm(config: ModelConfig, names: Sequence[str]) -> Block:
    """A norm of the embedding, then the layers of `pre_norm`, and no norm at the end.

    Radford et al. 2021, section 2.4: the norm before the vision tower's layers.
    """

    def begin(params: Tree, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        return norm(config, params["embedding_norm"], x)

    spec = norms(config, names, "{}_norm")
    layer = pre_norm(config, names).apply
    return Block(spec, layer, {"embedding_norm": norm_spec(config)}, begin=begin)


def projection(config: ModelConfig, width: int | None) -> Tree:
    """The spec of a linear map of a hidden state to `width` features, without a bias; None: {}."""
    if width is None:
        return {}
    shape = config.hidden_width, width
    return params.linear(shape, ("embed", None), ("embed",), normal(config.std), False)


def project(params: Tree, pooled: Float[Array, "B D"]) -> Features:
    """The features of a pooled hidden state, by the parameters of `projection`, if it has any."""
    wide = jnp.promote_types(pooled.dtype, jnp.float32)
    if "kernel" not in params:
        return pooled.astype(wide)
    return linear("bd,dc->bc", pooled, params, wide)


@dataclass(frozen=True)
class ImageFeatures:
    """A head: a norm of position 0, the class token, and its projection to `width` features."""

    width: int | None = None  # None: no projection
    name: str = "features"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("ImageFeatures.", self, width=1)

    def __call__(self, config: ModelConfig) -> Head:
        def apply(params: Tree, hidden: Float[Array, "B T D"], *_) -> Features:
            return project(params, norm(config, params["norm"], hidden[:, 0]))

        spec = projection(config, self.width) | {"norm": norm_spec(config, config.hidden_width)}
        return Head(self.name, spec, apply)


@dataclass(frozen=True)
class TextFeatures:
    """A head: the hidden state of the first end token, and its projection to `width` features.

    Radford et al. 2021, section 2.4. A text without an end token gives position 0, as in Hugging
    Face's code. The position counts even if it is padding. Raises ConfigError where the tokens
    are not known, as in decoding.
    """

    end: int | None = None  # the end token; None: the largest id of the text, as in OpenAI's code
    width: int | None = None  # None: no projection
    name: str = "features"  # key of its parameters and of its output

    reads_padding = True  # no field

    def __post_init__(self):
        check_numbers("TextFeatures.", self, end=0, width=1)

    def __call__(self, config: ModelConfig) -> Head:
        def apply(
            params: Tree, hidden: Float[Array, "B T D"], padding_mask, inputs: Tree, tokens
        ) -> Features:
            if tokens is None:
                raise ConfigError(
                    f"model.heads: {self} finds the end token among the tokens; "
                    "they are given by models.apply"
                )
            ends = tokens if self.end is None else tokens == self.end
            position = jnp.argmax(ends, axis=1)[:, None, None]
            return project(params, jnp.take_along_axis(hidden, position, axis=1)[:, 0])

        return Head(self.name, projection(config, self.width), apply)


def similarity(
    images: Features, texts: Float[Array, "other C"], scale: float | Float[Array, ""] = 100.0
) -> Float[Array, "B other"]:
    """The cosine of each image with each text, times `scale`. Radford et al. 2021, figure 3.

    `scale` is at most 100, which the published models reach; their files have its logarithm.
    """
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (images, texts)]
    return scale * ops.einsum("bc,oc->bo", *unit, dtype=unit[0].dtype)


# Radford et al. 2021, tables 19 and 20: the towers of ViT-B/32 and of ViT-L/14
clip_base_32_vision = ModelConfig(
    vocab_size=0,
    num_layers=12,
    d_model=768,
    num_heads=12,
    context_length=50,
    feedforward="quick_gelu",
    block=embedding_norm,
    masks=(full(),),
    use_bias="query|key|value|out|up|down|norm",
    embedding=Patches(patch=(32, 32)),
    heads=(ImageFeatures(512),),
)
clip_base_32_text = ModelConfig(
    vocab_size=49_408,
    num_layers=12,
    d_model=512,
    num_heads=8,
    context_length=77,
    feedforward="quick_gelu",
    masks=(causal(),),
    heads=(TextFeatures(width=512),),
)
clip_large_14_vision = sized(
    cut(clip_base_32_vision, 224, 14), 24, 1024, 16, heads=(ImageFeatures(768),)
)
clip_large_14_text = sized(clip_base_32_text, 12, 768, 12, heads=(TextFeatures(width=768),))
