"""One mesh for every kind of parallelism, and one table that says what is split over which of its axes."""

from jaxformer.parallel.mesh import AXES, Mesh, make_mesh
from jaxformer.parallel.sharding import constrain, describe, gather, partition, shardings

__all__ = ["AXES", "Mesh", "constrain", "describe", "gather", "make_mesh", "partition", "shardings"]
