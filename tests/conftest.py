"""All tests: 8 simulated CPU devices, no silent rank promotion; shapes in signatures are checked."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# most of a test's time is compilation of a program that runs once: LLVM need not polish it (HLO passes all run)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
