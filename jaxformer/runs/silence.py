"""Suppresses tracebacks that orbax, tensorstore and asyncio print.

`checkpoint` gets the same errors as exceptions.
"""

import functools
import logging
import sys
import traceback
import warnings
from typing import Any


def _is_orbax(record: logging.LogRecord) -> bool:
    """Whether a log line is about an error of orbax or tensorstore, which is also an exception."""
    _, error, frames = record.exc_info or (None, None, None)
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in traceback.walk_tb(frames))]
    return any("/orbax/" in file for file in files) or "tensorstore" in str(error)


_hook = sys.unraisablehook


def _unraisable(found: Any) -> None:
    # After an error, tensorstore calls back into an event loop that orbax has closed, and
    # coroutines are dropped.
    file = getattr(getattr(found.object, "cr_code", None), "co_filename", "")
    if str(found.exc_value) != "Event loop is closed" and "/orbax/" not in file:
        _hook(found)


@functools.cache
def install() -> None:
    """Once in a process; whoever opens checkpoints calls it. An import alone changes nothing."""
    # Orbax logs what fails, asyncio what nobody waited for any more, both with tracebacks.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(lambda record: not _is_orbax(record))
    sys.unraisablehook = _unraisable
    warnings.filterwarnings("ignore", r"coroutine 'async_serialize_from_host", RuntimeWarning)
