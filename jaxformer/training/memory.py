"""The host's memory: what a CPU run keeps between steps, and what a save or a restore may take beside the state."""

import ctypes
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax

LEAST, MOST = 1 << 27, 1 << 32


def one_heap() -> None:
    """Where JAX is told to run on CPU, lets all threads allocate from one heap; before JAX starts its threads.

    Else what a thread has freed is no room for another one: a save left 0.2 GB beside each later step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and jax.config.values["jax_platforms"] == "cpu":
        mallopt(-8, 1)  # M_ARENA_MAX


@functools.cache  # one listener a process
def keep() -> None:
    """On CPU, lets the process keep freed memory instead of giving it back after every step and faulting it in again.

    XLA allocates a program's temporaries anew for each call; glibc returns such large blocks to the kernel at once. Keeping
    them took a third off the time of a small step. Elsewhere than on glibc this does nothing.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX
        jax.monitoring.register_event_duration_secs_listener(_after_compiling)


def _after_compiling(event: str, duration_secs: float, **_: Any) -> None:
    """The compiler leaves 0.1 GB of freed memory; a step would be beside it."""
    if event.endswith("backend_compile_duration") and duration_secs > 1:
        give_back()


def give_back() -> None:
    """On CPU, returns all freed memory to the kernel: what a step left between its arrays is no room for other sizes."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


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
