"""Reports that may neither slow a run down nor stop it."""

import logging
import time
from collections.abc import Callable
from typing import Any

from jaxformer.config import storage

log = logging.getLogger("jaxformer")


class BestEffort:
    """A report that is skipped while its calls took more than `share` of the time since the first.

    A report that fails is dropped with one warning, because a picture must not stop a run.
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
            # Where the error may pass, the report is tried again later.
            self.failed = not storage.passes(error)
            name = getattr(self.report, "__name__", self.report)
            log.warning(
                "%s failed: %s: %s; the run goes on without it", name, type(error).__name__, error
            )
            return None
        finally:
            self.spent += time.monotonic() - now
