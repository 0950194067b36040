"""One mesh for every kind of parallelism. What is split over which of its axes is in `jaxformer.sharding`."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.parallel.mesh import AXES, Mesh, block_if_simulated, check_batch, check_context, make_mesh, run_mesh
