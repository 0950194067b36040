"""The versions, options and code that decide the numbers of a process, so that all can compare."""

import hashlib
import os
from importlib import metadata
from pathlib import Path

import jax
import jaxlib

# options of JAX that decide numbers
OPTIONS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl",
    "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_dtype_bits",
    "jax_random_seed_offset", "jax_softmax_custom_jvp", "jax_use_shardy_partitioner",
    "jax_exec_time_optimization_effort", "jax_disable_jit",
)  # fmt: skip
# variables that decide numbers in the compilers and libraries below JAX
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# flags in these variables that change no number
HARMLESS = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_log")
CODE = Path(__file__).parents[1]


def version_of(package: str) -> str | None:
    """The version of an installed package; None for one that was never installed.

    A package may be found on the path without that, as a checkout or a copied folder.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numerics() -> dict[str, str]:
    """{name: value} of versions, options and code that decide this process's numbers.

    Its experiment and devices decide them, too, and are compared elsewhere.
    """
    values = {
        "the version of jax": jax.__version__,
        "the version of jaxlib": jaxlib.__version__,
    }
    values |= {name: str(jax.config.values[name]) for name in OPTIONS if name in jax.config.values}
    for name in VARIABLES:
        flags = [flag for flag in os.environ.get(name, "").split() if not flag.startswith(HARMLESS)]
        values[name] = " ".join(sorted(flags))
    code = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        code.update(str(path.relative_to(CODE)).encode() + path.read_bytes())
    return values | {"the digest of jaxformer's code": code.hexdigest()[:12]}
