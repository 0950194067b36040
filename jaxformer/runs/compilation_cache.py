"""Compiled programs that persist: the second start of an experiment does not compile."""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxformer.config import storage
from jaxformer.parallel import jax_internals

log = logging.getLogger("jaxformer")
UNUSED = 30 * 24 * 3600.0  # seconds after which a program is removed


def enable(runs: epath.PathLike = "") -> None:
    """Keeps compiled programs in the user's own cache folder, because they are native code; of runs in a bucket beside them.

    Hosts share a bucket, and a new host has no cache folder. JAX_COMPILATION_CACHE_DIR names another folder. If none can be
    written, nothing is kept. Programs that compile within 0.2 s, or JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, are not kept.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer" / "compiled"
        if "://" in str(runs):
            folder = epath.Path(runs) / ".compiled"
        else:
            try:
                storage.retry(lambda: folder.mkdir(mode=0o700, parents=True, exist_ok=True), folder)
                tidy(folder)
            except OSError as error:  # programs are compiled again, to the same numbers
                return log.warning("compiled programs are not kept: %s", error)
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if jax.process_count() > 1 and "://" not in str(jax.config.values["jax_compilation_cache_dir"]):
        jax_internals.replace_cache_write(write)


def write(
    cache_key: str,
    compile_time_secs: float,
    module_name: str,
    backend: Any,
    executable: Any,
    host_callbacks: Sequence[Any] = (),
) -> None:
    """Keeps a program of one of several processes.

    JAX writes the programs of process 0 alone, and the others would compile at each start. A key names the devices of its
    process, so processes of one machine share a folder. Older versions of JAX hand over the callbacks of a program, whose
    addresses are those of this start; newer versions bind callbacks when they read the program.
    """
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    if host_callbacks or compile_time_secs < least:
        return
    try:
        jax_internals.put_program(cache_key, module_name, executable, backend, int(compile_time_secs))
    except Exception as error:
        log.warning("the compiled program %s is not kept: %s", module_name, error)


def tidy(folder: Path) -> None:
    """Removes programs that nobody used for a month, and those that JAX cannot read here: it would not replace them.

    A killed process leaves a torn file; another Python may compress in another way. What was written before the last call
    was read then and is whole. Reading it again would make it look used.
    """
    way = jax_internals.way_of_compression()
    marker = folder / f"tidied-{way}"
    tidied = marker.stat().st_mtime if storage.exists(marker) else 0.0
    for path in (folder / name for name in storage.list_names(folder) if name.endswith("-cache")):
        with contextlib.suppress(OSError):  # another process removes it
            times = path.stat()
            is_new = times.st_mtime >= tidied - 60.0  # clocks of machines that share a folder differ
            if time.time() - times.st_atime > UNUSED or (is_new and is_torn(path.read_bytes())):
                path.unlink()
    with contextlib.suppress(OSError):  # a folder that this user may only read
        marker.touch()


def is_torn(data: bytes) -> bool:
    """Whether JAX cannot decompress a program's file."""
    try:
        jax_internals.decompress(data)
    except Exception:  # each way of compression has an error of its own
        return True
    return False
