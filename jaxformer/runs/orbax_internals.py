"""Every private name of orbax that this library needs, and why: seen in orbax-checkpoint 0.12.8.

There is no public way to these; tests/test_private_names.py says what to look at when one changes.
Importing this file changes nothing in orbax: `Manager` calls `install`.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxformer.runs import silence


@functools.cache
def install(wait_for_all: Callable) -> None:
    """Once: changes how orbax waits for other processes, counts bytes and prints errors.

    Orbax then waits by `wait_for_all(name)`. Its own wait lasts for minutes where a process failed,
    and hides the reason from us. It counts no written bytes: the count is only for its log, and
    comes from a call that never frees its lists (tensorstore 0.1.86), 60 kB a save. Each process
    makes the folder of the arrays' metadata. It prints no errors that it also raises.
    """
    multihost.sync_global_processes = wait_for_all
    counter: Any = count_nothing
    tensorstore_utils.get_tensorstore_raw_bytes = counter
    store: Any = array_metadata_store.Store
    store._maybe_create_base_dir = make_base_dir
    silence.install()


def count_nothing(direction: Any = None) -> int:
    """In place of orbax's count of bytes."""
    return 0


async def make_base_dir(self: Any, base_dir: Any) -> None:
    """In place of orbax's wait, of up to ten minutes, until process 0 makes the folder.

    A process 0 that failed never makes it, or has removed it again.
    """
    await asyncio.to_thread(base_dir.mkdir, parents=True, exist_ok=True)


def limit_bytes(handler: Any, limit: int | None) -> None:
    """Limits the bytes that a save copies and writes at once. None: it copies the whole state."""
    writer = handler._impl._handler_impl
    writer._save_device_host_concurrent_bytes = writer._save_concurrent_bytes = limit


def checkpointer_of(manager: Any) -> Any:
    """The object by which a manager of orbax saves.

    It keeps the errors of a failed save, which later saves would raise.
    """
    return manager._checkpointer
