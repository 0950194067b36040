"""Tracebacks that orbax, tensorstore and asyncio print of errors which reach `checkpoint` as exceptions: not printed."""

import functools
import logging
import sys
import traceback
import warnings
from typing import Any


def _is_orbax(record: logging.LogRecord) -> bool:
    """Whether a line of a log is about an error of orbax or tensorstore, which reaches us as an exception as well."""
    _, error, frames = record.exc_info or (None, None, None)
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in traceback.walk_tb(frames))]
    return any("/orbax/" in file for file in files) or "tensorstore" in str(error)


_hook = sys.unraisablehook


def _unraisable(found: Any) -> None:
    # After one error, tensorstore calls the rest back into an event loop that orbax has closed, and coroutines are dropped.
    file = getattr(getattr(found.object, "cr_code", None), "co_filename", "")
    if str(found.exc_value) != "Event loop is closed" and "/orbax/" not in file:
        _hook(found)


@functools.cache
def install() -> None:
    """Once in a process: whoever opens checkpoints calls it. Importing this file changes nothing."""
    for name in ("absl", "asyncio"):  # orbax logs what fails, asyncio what nobody waited for any more, both with tracebacks
        logging.getLogger(name).addFilter(lambda record: not _is_orbax(record))
    sys.unraisablehook = _unraisable
    warnings.filterwarnings("ignore", r"coroutine 'async_serialize_from_host", RuntimeWarning)
