"""One mesh for every kind of parallelism. `jaxformer.sharding` says what its axes split."""

# ruff: noqa: F401 (names that the package offers)
from jaxformer.parallel.mesh import (
    AXES,
    Mesh,
    block_if_simulated,
    check_batch,
    check_context,
    make_mesh,
    run_mesh,
)
