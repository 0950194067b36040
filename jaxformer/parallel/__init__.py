"""One mesh for every kind of parallelism, and one table that says what is split over which of its axes."""

from jaxformer.parallel.mesh import AXES, Mesh, check_batch, make_mesh, run_mesh, settled
from jaxformer.sharding import (
    PARAMETERS,
    Rules,
    activations,
    automatic,
    constrain,
    describe,
    gather,
    lay,
    over,
    partition,
    rows,
    shardings,
    split,
)

__all__ = [
    "AXES", "PARAMETERS", "Mesh", "Rules", "activations", "automatic", "check_batch", "constrain", "describe",
    "gather", "lay", "make_mesh", "over", "partition", "rows", "run_mesh", "settled", "shardings", "split",
]  # fmt: skip
