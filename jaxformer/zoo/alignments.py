"""Parts of a model that reads an alignment of sequences: AlphaFold 2 without its structures.

    ModelConfig(embedding=Alignment(types), mixer=AlignmentUpdate(), feedforward=PairUpdate(),
                block=blocks.bare, heads=(Distogram(bins),), positions=None, masks=(full(),), ...)

reads types `[B, S, R]` of S sequences and R residues. If cells are missing, give
`inputs={"padding_mask": flags [B, S, R]}`; if residues are missing, give `positions`. A layer is
the Evoformer's (`zoo.evoformer`): its mixer updates the alignment, its feed-forward the pairs of
residues. The stream of a residue is its line of pairs, then its column of the alignment; `unpack`
takes both out of `Output.hidden`.
Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplementary methods 1.5 and 1.6.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int, Shaped

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import full
from jaxformer.models.blocks import Stream
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import (
    Context,
    Embedder,
    FeedForward,
    FeedForwardOutput,
    Mixer,
    MixerOutput,
)
from jaxformer.ops.positions import learned
from jaxformer.params import Spec, Tree
from jaxformer.zoo import triangles
from jaxformer.zoo.evoformer import (
    CellMask,
    Cells,
    change_of_alignment,
    change_of_pairs,
    outer_product_spec,
    transition_spec,
)
from jaxformer.zoo.triangles import Pairs, norm_spec


def pack(alignment: Cells, pairs: Pairs) -> Float[Array, "B R W"]:
    """The stream: for each residue its line of pairs, then its column of the alignment."""
    B, S, R, C = alignment.shape
    column = alignment.swapaxes(1, 2).reshape(B, R, S * C)
    return jnp.concatenate([pairs.reshape(B, R, -1), column], axis=-1)


def unpack(config: ModelConfig, x: Float[Array, "B R W"]) -> tuple[Cells, Pairs]:
    """(alignment, pairs) of the stream, also of `Output.hidden`."""
    B, R, _ = x.shape
    Z, C = alignment_of(config).pair_width, config.d_model
    pairs = x[:, :, : R * Z].reshape(B, R, R, Z)
    return x[:, :, R * Z :].reshape(B, R, -1, C).swapaxes(1, 2), pairs


def alignment_of(config: ModelConfig) -> Any:
    """`config.embedding`. Raises ConfigError for one without `pair_width`, and for other parts.

    An Evoformer has no masks of layers and no vectors of absolute positions.
    """
    if not hasattr(config.embedding, "pair_width"):
        raise ConfigError(
            f"model.embedding={config.embedding}: expected zoo.Alignment(types), or an embedding "
            "of your own with an attribute `pair_width`"
        )
    if config.positions is not None or set(config.masks) != {full()}:
        raise ConfigError(
            "model: an Evoformer knows distances of residues by its pairs, and every residue sees "
            "all others; expected positions=None, masks=(full(),)"
        )
    return config.embedding


def cell_mask(inputs: Any, alignment: Shaped[Array, "B S R *rest"], context: Context) -> CellMask:
    """`inputs["padding_mask"]`, 1 without one.

    Raises ConfigError for another shape, and for segment_ids.
    """
    if context.padding_mask is not None:
        raise ConfigError(
            "apply: an Evoformer reads no segment_ids; cells that are missing, and residues of "
            'padding, are 0 in inputs={"padding_mask": flags [B, S, R]}'
        )
    shape = alignment.shape[:3]
    flags = inputs.get("padding_mask") if isinstance(inputs, dict) else None
    if flags is not None and flags.shape != shape:
        raise ConfigError(f"inputs: padding_mask {list(flags.shape)}: expected flags {list(shape)}")
    return jnp.ones(shape, bool) if flags is None else flags


@dataclass(frozen=True)
class Alignment:
    """The embedding: a vector of each cell's type, and the pairs of the first sequence.

    A cell adds the vector of the first sequence's type. A pair i-j starts as a vector of the first
    type, one of the second type, and one of the distance i - j, which is cut at `farthest`.
    Algorithms 3 and 4. A type that does not exist gives NaN.
    """

    types: int  # of residues, with that of a gap
    pair_width: int = 128  # Z
    farthest: int = 32  # distances from here on share one vector

    def __post_init__(self):
        check_numbers("Alignment.", self, types=1, pair_width=1, farthest=1)

    def __call__(self, config: ModelConfig) -> Embedder:
        alignment_of(config)
        widths = {"cell": config.d_model, "first": config.d_model}
        widths |= {"left": self.pair_width, "right": self.pair_width}
        spec = {
            name: Spec((self.types, width), (None, "embed"), normal(self.types**-0.5))
            for name, width in widths.items()
        }
        count = 2 * self.farthest + 1
        spec["distance"] = Spec((count, self.pair_width), (None, "embed"), normal(count**-0.5))

        def apply(
            params: Tree, types: Int[Array, "B S R"], inputs: Any, context: Context
        ) -> Float[Array, "B R W"]:
            B, S, R = types.shape
            mask = cell_mask(inputs, types, context)
            types = jnp.where(mask != 0, types, 0)
            of_first = {name: learned(types[:, 0], params[name]) for name in widths}
            cells = learned(types.reshape(B, S * R), params["cell"]).reshape(B, S, R, -1)
            places = context.positions
            distances = jnp.clip(
                places[:, :, None] - places[:, None], -self.farthest, self.farthest
            )
            of_distance = learned(
                distances.reshape(-1, R * R) + self.farthest, params["distance"]
            ).reshape(-1, R, R, self.pair_width)
            pairs = of_first["left"][:, :, None] + of_first["right"][:, None] + of_distance
            stream = pack(cells + of_first["first"][:, None], pairs)
            return stream.astype(context.dtype or stream.dtype)

        return Embedder(spec, apply, check_types)


def check_types(types: Array) -> int:
    """R of types `[B, S, R]`. Raises ConfigError for anything but integers of three axes."""
    if types.ndim != 3 or not jnp.issubdtype(types.dtype, jnp.integer):
        raise ConfigError(
            f"apply: an alignment {types.dtype}{list(types.shape)}: expected integers [B, S, R], "
            "S sequences of R residues"
        )
    return types.shape[2]


@dataclass(frozen=True)
class AlignmentUpdate:
    """The mixer: `change_of_alignment`, with the model's width, heads and d_ff."""

    dropout_rate: float = 0.15  # of the row attention

    def evaluation(self) -> "AlignmentUpdate":
        return replace(self, dropout_rate=0.0)

    def __call__(self, config: ModelConfig) -> Mixer:
        Z, C = alignment_of(config).pair_width, config.d_model
        size = C, config.num_heads, config.head_size
        row = triangles.attention_spec(*size, Z) | {"pair_norm": norm_spec(Z)}
        spec = {
            "row": row,
            "column": triangles.attention_spec(*size),
            "transition": transition_spec(C, config.ff_width),
        }

        def apply(params: Tree, x: Stream, context: Context) -> MixerOutput:
            alignment, pairs = unpack(config, x)
            mask = cell_mask(context.inputs, alignment, context)
            change = change_of_alignment(
                params, alignment, pairs, mask, self.dropout_rate, context.dropout_key
            )
            return MixerOutput(pack(change, jnp.zeros_like(pairs)))

        return Mixer(spec, apply)


@dataclass(frozen=True)
class PairUpdate:
    """The feed-forward: `change_of_pairs`. None stands for the width of the pairs."""

    num_heads: int = 4  # of triangle attention
    head_width: int | None = None  # of triangle attention; None: pair_width / num_heads
    triangle_width: int | None = None  # features that triangle updates multiply
    outer_width: int = 32  # features of each of the two vectors of the outer product
    d_ff: int | None = None  # hidden features of the transition; None: 4 pair_width
    dropout_rate: float = 0.25  # of triangle updates and attention

    def __post_init__(self):
        check_numbers("PairUpdate.", self, num_heads=1, outer_width=1)

    def evaluation(self) -> "PairUpdate":
        return replace(self, dropout_rate=0.0)

    def __call__(self, config: ModelConfig) -> FeedForward:
        Z = alignment_of(config).pair_width
        attention = triangles.attention_spec(
            Z, self.num_heads, self.head_width or Z // self.num_heads, Z
        )
        product = triangles.multiplication_spec(Z, self.triangle_width or Z)
        spec = {
            "outer_product": outer_product_spec(config.d_model, self.outer_width, Z),
            "outgoing": product,
            "incoming": product,
            "starting": attention,
            "ending": attention,
            "transition": transition_spec(Z, self.d_ff or 4 * Z),
        }

        def apply(params: Tree, x: Stream, context: Context) -> FeedForwardOutput:
            alignment, pairs = unpack(config, x)
            mask = cell_mask(context.inputs, alignment, context)
            change = change_of_pairs(
                params, alignment, pairs, mask, self.dropout_rate, context.dropout_key
            )
            return FeedForwardOutput(pack(jnp.zeros_like(alignment), change))

        return FeedForward(spec, apply)
