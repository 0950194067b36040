"""The host's memory: what a CPU run keeps between steps, and what a save or a restore may take beside the state."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Iterable
from typing import Any

import jax

LEAST, MOST = 1 << 27, 1 << 32
HUGE = 1 << 21  # bytes of a huge page


def one_heap() -> None:
    """Where JAX can only run on CPU, lets all threads allocate from one heap; before JAX starts its threads.

    Otherwise a thread cannot reuse what another one freed: a save left 0.2 GB beside each later step, and `keep` kept nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and _only_cpu():
        mallopt(-8, 1)  # M_ARENA_MAX


def _only_cpu() -> bool:
    """Whether JAX is told to run on CPU, or is installed for nothing else."""
    if jax.config.values["jax_platforms"]:
        return jax.config.values["jax_platforms"] == "cpu"
    return importlib.util.find_spec("libtpu") is None and not importlib.metadata.entry_points(group="jax_plugins")


@functools.cache  # one listener a process
def keep() -> None:
    """On CPU, lets the process keep freed memory instead of giving it back after every step and faulting it in again.

    XLA allocates a program's temporaries anew for each call; glibc returns such large blocks to the kernel at once. Keeping
    them, in huge pages, takes a seventh to a third off the time of a step. It calls `one_heap`; if JAX started before, there
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
    """Asks the kernel to give the heap pages of 2 MiB, in as many addresses as half of the memory; no memory is taken yet."""
    malloc, free, madvise = map(_of_glibc, ("malloc", "free", "madvise"))
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if block := malloc(size):
        start = -(-block // HUGE) * HUGE
        madvise(start, (block + size - start) // HUGE * HUGE, 14)  # MADV_HUGEPAGE: a mark of the addresses, which stays
        free(block)


def _after_compiling(event: str, duration_secs: float, **_: Any) -> None:
    """Gives back 0.1 GB that the compiler freed and that a step would not reuse."""
    if event.endswith("backend_compile_duration") and duration_secs > 1:
        give_back()


def give_back() -> None:
    """On CPU, returns all freed memory to the kernel: gaps between the arrays of a step do not fit arrays of other sizes."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)
        if keep.cache_info().currsize:  # the marked addresses went too
            _in_huge_pages()


def in_flight(leaves: Iterable[Any]) -> int | None:
    """Bytes that may be on their way between files and these arrays at once: an eighth of what this process holds of them.

    At least 128 MB and the largest of them, at most 4 GB; None, no limit, if that is no less than all of them. Leaves are
    arrays, or have a shape, dtype and sharding.
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
