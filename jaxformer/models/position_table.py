"""Vectors of positions, added to the first hidden states or to the inputs of queries and keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int

from jaxformer.models.config import AttentionPositions, Axial, Learned, ModelConfig, Sinusoidal
from jaxformer.models.layer import Context
from jaxformer.ops.positions import learned, sinusoidal
from jaxformer.params import Spec, Tree


class PositionTable(NamedTuple):
    """A vector for each position.

    `AttentionPositions(mine)` takes any function `config -> PositionTable`.
    """

    spec: Tree  # of `Spec`
    # (params, positions [B or 1, T], or what `Embedder.positions` makes) -> [B or 1, T, D]
    apply: Callable


def table_of(config: ModelConfig, positions: Any, width: int | None = None) -> PositionTable | None:
    """The table of `Learned`, `Axial` and `Sinusoidal` positions; None for other positions.

    Its vectors have `width` features, D by default.
    """
    D = width or config.d_model
    start = normal(config.std)
    match positions:
        case Learned(offset):
            spec = Spec((config.context_length + offset, D), ("length", "embed"), start)
            return PositionTable(spec, lambda table, positions: learned(positions + offset, table))
        case Axial(shape, widths):
            tables = zip(("lines", "columns"), shape, widths, strict=True)
            spec = {
                name: Spec((count, width), ("length", None), start) for name, count, width in tables
            }
            return PositionTable(spec, lambda tables, positions: axial(tables, positions, shape[1]))
        case Sinusoidal(layout, spacing):
            return PositionTable({}, lambda _, positions: sinusoidal(positions, D, layout, spacing))
    return None


def axial(tables: Tree, positions: Int[Array, "B T"], columns: int) -> Float[Array, "B T D"]:
    """[line vector, column vector] of each position; positions fill the grid line by line."""
    line, column = jnp.divmod(positions, columns)
    return jnp.concatenate(
        [learned(line, tables["lines"]), learned(column, tables["columns"])], axis=-1
    )


def attention_table(config: ModelConfig) -> PositionTable | None:
    """The table that every attention adds to the inputs of its queries and keys, or None."""
    if not isinstance(config.positions, AttentionPositions):
        return None
    table = config.positions.table
    return table(config) if callable(table) else table_of(config, table)


def attention_positions(config: ModelConfig, context: Context) -> Float[Array, "B T D"] | None:
    """The vectors that every attention adds to the inputs of queries and keys, or None.

    Carion et al. 2020, arXiv:2005.12872, appendix A.3.
    """
    table = attention_table(config)
    if table is None:
        return None
    shared = context.shared or {}
    return table.apply(shared.get("positions", {}), context.positions)
