"""All tests: 8 simulated CPU devices, no silent rank promotion; shapes in signatures are checked."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
