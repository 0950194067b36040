"""One mesh for every kind of parallelism, and one table that says what is split over which of its axes."""

from jaxformer.parallel.mesh import AXES, Mesh, make_mesh, run_mesh, settled
from jaxformer.parallel.sharding import constrain, describe, gather, partition, parts, rows, shardings

__all__ = [
    "AXES", "Mesh", "constrain", "describe", "gather", "make_mesh", "partition", "parts", "rows", "run_mesh", "settled",
    "shardings",
]  # fmt: skip
