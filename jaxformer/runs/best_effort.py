"""Reports that no run waits for, and that no run fails with."""

import logging
import time
from collections.abc import Callable
from typing import Any

from jaxformer.config import storage

log = logging.getLogger("jaxformer")


class BestEffort:
    """A report, skipped while its calls took more than `share` of the time since the first call.

    If it fails, it is dropped with one warning, because no picture stops a run.
    """

    def __init__(self, report: Callable, share: float = 1.0):
        self.report = report
        self.share = share
        self.spent = 0.0  # seconds
        self.began: float | None = None  # the time of the first call
        self.failed = False

    def __call__(self, *arguments: Any) -> Any:
        now = time.monotonic()
        if self.began is None:
            self.began = now
        if self.failed or self.spent > self.share * (now - self.began):
            return None
        try:
            return self.report(*arguments)
        except Exception as error:
            self.failed = not storage.passes(error)  # what could not be written now is drawn again later
            name = getattr(self.report, "__name__", self.report)
            log.warning("%s failed: %s: %s; the run goes on without it", name, type(error).__name__, error)
            return None
        finally:
            self.spent += time.monotonic() - now
