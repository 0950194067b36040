"""One mesh for every kind of parallelism, and one table that says what is split over which of its axes."""

from jaxformer.parallel.mesh import AXES, Mesh, check_batch, make_mesh, run_mesh, settled
from jaxformer.parallel.pipeline import bubble, pipeline
from jaxformer.parallel.sharding import (
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
    "AXES", "PARAMETERS", "Mesh", "Rules", "activations", "automatic", "bubble", "check_batch", "constrain", "describe",
    "gather", "lay", "make_mesh", "over", "partition", "pipeline", "rows", "run_mesh", "settled", "shardings", "split",
]  # fmt: skip
