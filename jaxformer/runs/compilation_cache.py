"""A cache of compiled programs: the second start of an experiment does not compile."""

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
    """Keeps compiled programs in the user's cache folder; of runs in a bucket, beside the runs.

    Programs are native code, so the folder is the user's own. Hosts share a bucket, and a new host
    has no cache folder yet. JAX_COMPILATION_CACHE_DIR names another folder. If the folder cannot be
    written, nothing is kept. Programs that compile within 0.2 s, or within
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, are not kept.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = (
            Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            / "jaxformer"
            / "compiled"
        )
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
    """Keeps the compiled program of one of several processes, in place of JAX's own function.

    JAX writes only the programs of process 0, so the others would compile at each start. A
    program's cache key names the devices of its process, so processes of one machine can share a
    folder. Older versions of JAX pass the callbacks of a program: their addresses are valid in this
    start only, so such a program is not kept. Newer versions bind callbacks when they read it.
    """
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    if host_callbacks or compile_time_secs < least:
        return
    try:
        jax_internals.put_program(
            cache_key, module_name, executable, backend, int(compile_time_secs)
        )
    except Exception as error:
        log.warning("the compiled program %s is not kept: %s", module_name, error)


def tidy(folder: Path) -> None:
    """Removes programs that nobody used for a month, and those that JAX cannot read here.

    JAX would not replace an unreadable one. A killed process leaves a torn file; another Python may
    compress in another way. Only programs written since the last call are read: older ones were
    read then, and reading them again would make them look used.
    """
    way = jax_internals.way_of_compression()
    marker = folder / f"tidied-{way}"
    tidied = marker.stat().st_mtime if storage.exists(marker) else 0.0
    for path in (folder / name for name in storage.list_names(folder) if name.endswith("-cache")):
        with contextlib.suppress(OSError):  # another process removes it
            times = path.stat()
            # The clocks of machines that share a folder differ by some seconds.
            is_new = times.st_mtime >= tidied - 60.0
            if time.time() - times.st_atime > UNUSED or (is_new and is_torn(path.read_bytes())):
                path.unlink()
    with contextlib.suppress(OSError):  # a folder that this user may only read
        marker.touch()


def is_torn(data: bytes) -> bool:
    """Whether JAX cannot decompress the file of a program."""
    try:
        jax_internals.decompress(data)
    except Exception:  # each compression method raises errors of its own
        return True
    return False
