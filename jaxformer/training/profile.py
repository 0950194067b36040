"""A trace of a few steps, for TensorBoard's profiler, XProf or Perfetto."""

import tempfile
from contextlib import AbstractContextManager
from typing import Any

import jax
from etils import epath

FIRST, LAST = 10, 15  # counted from the start of the process: the first steps compile


def trace_folder(run: epath.Path) -> str:
    """Where the trace of a run goes: into its folder, or into a temporary one here if that is in a bucket."""
    return tempfile.mkdtemp(prefix="profile-") if "://" in str(run) else str(run / "profile")


class Profile(AbstractContextManager):
    """Traces steps 10 to 15 into `folder`; does nothing where it is None. A context manager, since a trace must end."""

    def __init__(self, folder: str | None, start: int):
        self._folder, self._tracing = folder, False
        self._first, self._last = start + FIRST, start + LAST

    def before(self, step: int) -> None:
        if self._folder is not None and step == self._first:
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def after(self, step: int, state: Any) -> bool:
        """Whether the trace has just ended. The last step is waited for."""
        if not self._tracing or step != self._last:
            return False
        jax.block_until_ready(state)
        self.__exit__()
        return True

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
