"""All private names of JAX that this library needs, and why. Seen in jax 0.10.2 to 0.12.0.1.

JAX has no public interface for them. tests/test_private_names.py holds their signatures, and says
what to check when one changes.

    clusters            finds the processes of Slurm, GKE, MPI and TPU jobs before
                        `jax.distributed.initialize`
    distributed         has the key-value store and the barrier, for a program that joined its
                        processes itself
    compiler            JAX caches compiled programs in process 0 only, and does not let other
                        processes wait for a compilation
    compilation_cache   writes one compiled program, and recognises a torn one

Importing this file changes nothing in JAX. `wrap_compilation` and `replace_cache_write` do;
`processes` and `compilation_cache` call them.
"""

from collections.abc import Callable
from typing import Any

from jax._src import clusters, compilation_cache, compiler, distributed


def find_cluster(limit: int) -> tuple[Any, Any, Any, Any]:
    """(address of process 0, number of processes, index of this one, its devices) of the job.

    A part that is not known is None.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, limit
    )


def service_client() -> Any:
    """The client of the coordination service; None before `jax.distributed.initialize`."""
    return distributed.global_state.client


def wrap_compilation(wrap: Callable[[Callable], Callable]) -> None:
    """Makes JAX compile by `wrap(its own function)`."""
    compiler.compile_or_get_cached = wrap(compiler.compile_or_get_cached)


def replace_cache_write(write: Callable) -> None:
    """Makes JAX write a compiled program to its cache by `write`."""
    compiler._cache_write = write


def put_program(
    cache_key: str, module_name: str, executable: Any, backend: Any, seconds: int
) -> None:
    """Writes one compiled program into JAX's persistent cache."""
    compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, seconds)


def way_of_compression() -> str:
    """A mark of the compression that this process uses for programs: the first byte of it."""
    return compilation_cache.compress_executable(b"")[:1].hex()


def decompress(data: bytes) -> bytes:
    """The program in a file of the cache. Raises whatever the compression raises for a torn one."""
    return compilation_cache.decompress_executable(data)
