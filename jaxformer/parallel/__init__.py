"""One mesh for every kind of parallelism. What is split over which of its axes is in `jaxformer.sharding`."""

from jaxformer.parallel.mesh import AXES, Mesh, block_if_simulated, check_batch, make_mesh, run_mesh

__all__ = ["AXES", "Mesh", "block_if_simulated", "check_batch", "make_mesh", "run_mesh"]
