"""DETR: objects of an image as a set, by a Transformer. Carion et al. 2020, arXiv:2005.12872.

The source is images `[B, height, width, channels]` of any size, and the target the numbers of the
object queries, `object_numbers(config, B)`. Of each query, the heads tell a class and a box.

    numbers = object_numbers(config, len(images))
    output = models.apply(config, params, numbers, source=images)
    output.heads["classes"], output.heads["boxes"]

`detect(config, params, images)` gives the surest class, its box and its probability.
Images of several sizes stand in the upper left of one array, with zeros behind them, and
`source_segment_ids=feature_mask(backbone, pixel_mask)` hides the rest.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int, Shaped

from jaxformer import models, params
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import full
from jaxformer.models import blocks
from jaxformer.models.config import AttentionPositions, EncoderDecoder, Learned, ModelConfig
from jaxformer.models.heads import Head
from jaxformer.models.layer import Block, Context, Embedder, linear
from jaxformer.models.position_table import PositionTable
from jaxformer.params import Tree
from jaxformer.zoo import resnet
from jaxformer.zoo.resnet import ResNet

PLACE_EPS = 1e-6  # added to the number of lines or columns


@dataclass(frozen=True)
class FeatureMap:
    """The embedding of the encoder: a convolutional backbone, and a linear map to D features.

    Section 3.2. The positions that it makes are places in the image, see `places`.
    """

    backbone: ResNet = ResNet()  # makes the map of features of an image

    def __call__(self, config: ModelConfig) -> Embedder:
        C, D = self.backbone.widths[-1], config.d_model
        axes = "channel", "line", "column", "embed"
        spec = {
            "backbone": resnet.spec(self.backbone),
            "projection": params.linear((C, 1, 1, D), axes, axes[:3], normal(config.std)),
        }

        def apply(
            params: Tree, images: Float[Array, "B height width C"], inputs: Tree, context: Context
        ) -> Float[Array, "B S D"]:
            projection = params["projection"]
            kernel = projection["kernel"].reshape(C, D)
            x = resnet.features(self.backbone, params["backbone"], images.astype(kernel.dtype))
            return linear("bsc,cd->bsd", x.reshape(len(x), -1, C), projection | {"kernel": kernel})

        def positions(images: Array, segment_ids: Array | None) -> Float[Array, "_ S 2"]:
            wide = jnp.promote_types(images.dtype, jnp.float32)
            return places(self.grid(images), segment_ids).astype(wide)

        return Embedder(spec, apply, lambda x: math.prod(self.grid(x)), positions=positions)

    def grid(self, images: Array) -> tuple[int, int]:
        """(lines, columns) of the features. Raises ConfigError for an array that is no images."""
        C = self.backbone.channels
        if images.ndim != 4 or images.shape[3] != C:
            raise ConfigError(
                f"apply: source {list(images.shape)}: expected images [B, height, width, {C}]"
            )
        return self.backbone.grid(*images.shape[1:3])


def places(
    grid: tuple[int, int], segment_ids: Int[Array, "B S"] | None = None
) -> Float[Array, "_ S 2"]:
    """(line / lines, column / columns) of each feature, counted from 1.

    Padding is not counted: in a batch, each image has its own number of lines and columns.
    """
    flags = jnp.ones((1, *grid)) if segment_ids is None else segment_ids != 0
    seen = flags.reshape(-1, *grid).astype(jnp.result_type(float))
    line, column = jnp.cumsum(seen, axis=1), jnp.cumsum(seen, axis=2)
    line = line / (line[:, -1:] + PLACE_EPS)
    column = column / (column[:, :, -1:] + PLACE_EPS)
    return jnp.stack([line, column], axis=-1).reshape(len(seen), -1, 2)


def feature_mask(
    backbone: ResNet,
    pixel_mask: Shaped[Array, "B height width"] | Shaped[np.ndarray, "B height width"],
) -> Int[Array, "B S"]:
    """`source_segment_ids` of images: 1 for a feature, 0 for padding.

    `pixel_mask` is 1 or True for a pixel. A feature takes the flag of its first pixel, as in the
    authors' code.
    """
    shape = pixel_mask.shape[1:]
    # float32 as in torch's nearest neighbour, which rounds down
    lines, columns = (
        np.floor(np.arange(count, dtype=np.float32) * np.float32(pixels / count)).astype(int)
        for count, pixels in zip(backbone.grid(*shape), shape, strict=True)
    )
    flags = pixel_mask[:, lines][:, :, columns] != 0
    return jnp.asarray(flags.reshape(len(pixel_mask), -1), jnp.int32)


def sines(places: Float[Array, "B S 2"], width: int) -> Float[Array, "B S D"]:
    """sin(2 pi p w_i) and cos(2 pi p w_i) in turn, w_i = 10,000^(-4i / D): line, then column.

    Appendix A.4.
    """
    rates = 10_000.0 ** (-4 * np.arange(width // 4) / width)
    angles = places[..., None] * (2 * math.pi * rates)[None, None, None]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*places.shape[:2], width)


def grid_sines(config: ModelConfig) -> PositionTable:
    """`sines` of the places that a `FeatureMap` makes, for `AttentionPositions(grid_sines)`."""
    D = config.d_model
    if D % 4:
        raise ConfigError(f"model.d_model={D}: sines of lines and columns need a multiple of four")

    def apply(params: Tree, positions: Array) -> Float[Array, "B S D"]:
        if positions.ndim != 3:
            raise ConfigError(
                f"apply: positions {list(positions.shape)}: grid_sines reads places [B, S, 2], "
                "which model.embedding=zoo.FeatureMap(...) makes; give no source_positions"
            )
        return sines(positions, D)

    return PositionTable({}, apply)


def no_content(config: ModelConfig) -> Embedder:
    """The embedding of the decoder: zeros for every object query.

    Its positions are the numbers of the queries. `AttentionPositions(Learned())` has their vectors.
    """

    def apply(
        params: Tree, numbers: Int[Array, "B Q"], inputs: Tree, context: Context
    ) -> Float[Array, "B Q D"]:
        source = context.source
        dtype = jnp.float32 if source is None else source.hidden.dtype
        return jnp.zeros((*numbers.shape, config.d_model), dtype)

    return Embedder({}, apply, positions=lambda numbers, segment_ids: numbers)


def object_numbers(config: EncoderDecoder, rows: int) -> Int[Array, "B Q"]:
    """The numbers of all object queries, for each image."""
    Q = config.decoder.context_length
    return jnp.broadcast_to(jnp.arange(Q)[None], (rows, Q))


class Detections(NamedTuple):
    """What each query says of its image, as arrays on the host."""

    classes: np.ndarray  # [B, Q]: the surest class that is an object
    boxes: np.ndarray  # [B, Q, 4]: (x, y) of the centre, width and height
    scores: np.ndarray  # [B, Q]: the probability of that class


def detect(config: EncoderDecoder, params: Tree, images: Any, **options: Any) -> Detections:
    """The objects that a model with the heads of this file finds in images `[B, height, width, C]`.

    `options` are those of `models.apply`, such as `source_segment_ids`. Carion et al. 2020,
    section 3.1: where "no object" is surest, the score is that of the second surest class.
    """

    @jax.jit
    def run(params, images, options):
        numbers = object_numbers(config, len(images))
        heads = models.apply(config, params, numbers, source=images, **options).heads
        probabilities = jax.nn.softmax(heads["classes"])[..., :-1]  # without "no object"
        return probabilities.argmax(axis=-1), heads["boxes"], probabilities.max(axis=-1)

    return Detections(*map(np.asarray, run(params, jnp.asarray(images), options)))


def post_norm_twice(config: ModelConfig, names) -> Block:
    """The block of the decoder: `blocks.post_norm`, and one more norm at the end."""
    spec = blocks.final_norm_spec(config)
    return blocks.post_norm(config, names)._replace(stack_spec=spec, end=blocks.final_norm(config))


@dataclass(frozen=True)
class ObjectClasses:
    """A head: logits `[B, Q, classes + 1]` of each query's class. The last one is "no object"."""

    classes: int  # their number, without "no object"
    name: str = "classes"  # key of its parameters and of its output

    def __post_init__(self):
        check_numbers("ObjectClasses.", self, classes=1)

    def __call__(self, config: ModelConfig) -> Head:
        shape = config.d_model, self.classes + 1
        spec = params.linear(shape, ("embed", "class"), ("embed",), normal(config.std))

        def apply(params: Tree, hidden: Float[Array, "B Q D"], *_) -> Float[Array, "B Q C"]:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            return linear("bqd,dc->bqc", hidden, params, wide)

        return Head(self.name, spec, apply)


@dataclass(frozen=True)
class Boxes:
    """A head: the box of each query, `[B, Q, 4]`, by a perceptron of three layers. Section 3.2.

    (x, y) of the centre, width and height, as fractions of the image without its padding.
    """

    name: str = "boxes"  # key of its parameters and of its output

    def __call__(self, config: ModelConfig) -> Head:
        D, start = config.d_model, normal(config.std)
        spec = {
            f"map_{i}": params.linear((D, out), ("embed", None), ("embed",), start)
            for i, out in enumerate((D, D, 4))
        }

        def apply(params: Tree, hidden: Float[Array, "B Q D"], *_) -> Float[Array, "B Q 4"]:
            wide = jnp.promote_types(hidden.dtype, jnp.float32)
            x = jax.nn.relu(linear("bqd,de->bqe", hidden, params["map_0"]))
            x = jax.nn.relu(linear("bqd,de->bqe", x, params["map_1"]))
            return jax.nn.sigmoid(linear("bqd,de->bqe", x, params["map_2"], wide))

        return Head(self.name, spec, apply)


def published(backbone: ResNet) -> EncoderDecoder:
    """The model of table 1 above a backbone, with the 91 classes of COCO."""
    encoder = ModelConfig(
        vocab_size=0,
        num_layers=6,
        d_model=256,
        num_heads=8,
        context_length=1024,
        d_ff=2048,
        feedforward="relu",
        block=blocks.post_norm,
        positions=AttentionPositions(grid_sines),
        masks=(full(),),
        embedding=FeatureMap(backbone),
        heads=(),
        tie_embeddings=False,
        dropout_rate=0.1,
    )
    decoder = replace(
        encoder,
        context_length=100,
        block=post_norm_twice,
        positions=AttentionPositions(Learned()),
        embedding=no_content,
        heads=(ObjectClasses(91), Boxes()),
    )
    return EncoderDecoder(encoder, decoder, share_embeddings=False)


detr_r50 = published(ResNet())
detr_r101 = published(resnet.resnet_101)
