"""The host's memory: what a CPU run keeps between steps, and what saves and restores may take."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Iterable
from typing import Any

import jax

LEAST = 1 << 27  # bytes in flight, if there is a limit
MOST = 1 << 32
HUGE = 1 << 21  # bytes of a huge page


def one_heap() -> None:
    """If JAX can only run on CPU, lets all threads allocate from one heap.

    Call it before JAX starts its threads. With several heaps a thread cannot reuse memory that
    another one freed: a save left 0.2 GB beside each later step, and `keep` kept nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and _only_cpu():
        mallopt(-8, 1)  # M_ARENA_MAX


def _only_cpu() -> bool:
    """Whether JAX is told to run on CPU, or is installed for nothing else."""
    if jax.config.values["jax_platforms"]:
        return jax.config.values["jax_platforms"] == "cpu"
    return importlib.util.find_spec("libtpu") is None and not importlib.metadata.entry_points(
        group="jax_plugins"
    )


@functools.cache  # one listener a process
def keep() -> None:
    """On CPU, keeps freed memory in the process instead of returning it to the kernel.

    XLA allocates a program's temporaries anew for each call, and glibc returns such large blocks
    to the kernel at once, so each step would fault them in again. Keeping them, in huge pages,
    saves a seventh to a third of the time of a step. Calls `one_heap`; if JAX started before, there
    are other heaps, which cannot hold large blocks. Without glibc this does nothing.
    """
    one_heap()
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        mallopt(-4, 0)  # M_MMAP_MAX
        _in_huge_pages()
        jax.monitoring.register_event_duration_secs_listener(_after_compiling)


def _in_huge_pages() -> None:
    """Asks the kernel for pages of 2 MiB in a part of the heap that is half the memory's size.

    This only marks addresses; no memory is taken yet.
    """
    malloc, free, madvise = map(_of_glibc, ("malloc", "free", "madvise"))
    malloc.restype = ctypes.c_void_p
    malloc.argtypes = [ctypes.c_size_t]
    free.argtypes = [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if block := malloc(size):
        start = -(-block // HUGE) * HUGE
        # 14: MADV_HUGEPAGE. The mark stays when the block is freed.
        madvise(start, (block + size - start) // HUGE * HUGE, 14)
        free(block)


def _after_compiling(event: str, duration_secs: float, **_: Any) -> None:
    """Returns 0.1 GB that the compiler freed and that a step would not reuse."""
    if event.endswith("backend_compile_duration") and duration_secs > 1:
        give_back()


def give_back() -> None:
    """On CPU, returns all freed memory to the kernel.

    The gaps that the arrays of a step leave do not fit arrays of other sizes.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)
        if keep.cache_info().currsize:  # the marked addresses went too
            _in_huge_pages()


def in_flight(leaves: Iterable[Any]) -> int | None:
    """How many bytes may be in flight at once between files and these arrays; None: no limit.

    The limit is an eighth of the bytes that this process holds of the arrays: at least 128 MB, at
    most 4 GB, and always more than the largest array. A limit that is not below the sum of all is
    none. Leaves are arrays, or have a shape, dtype and sharding.
    """
    sizes = [_here(leaf) for leaf in leaves]
    limit = max(LEAST, min(MOST, sum(sizes) // 8), 1 + max(sizes, default=0))
    return limit if limit < sum(sizes) else None


def _here(leaf: Any) -> int:
    """Bytes of an array on the devices of this process."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if jax.default_backend() == "cpu" else None
