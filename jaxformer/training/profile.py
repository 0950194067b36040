"""A trace of a few steps, for TensorBoard's profiler, XProf or Perfetto."""

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from etils import epath

FIRST, LAST = 10, 15  # counted from the start of the process: the first steps compile


class Profile(AbstractContextManager):
    """Traces steps 10 to 15 into `folder`; does nothing where it is None. A context manager, since a trace must end."""

    def __init__(self, folder: epath.Path | None, start: int):
        self._folder: Any = folder
        self._first, self._last = start + FIRST, start + LAST
        self._traces: Any = None  # the folder of an open trace

    def before(self, step: int) -> None:
        if self._folder is not None and step == self._first:
            self._traces = tempfile.TemporaryDirectory()
            jax.profiler.start_trace(self._traces.name)

    def after(self, step: int, state: Any) -> bool:
        """Whether the trace has just ended. The last step is waited for."""
        if self._traces is None or step != self._last:
            return False
        jax.block_until_ready(state)
        self.__exit__()
        return True

    def __exit__(self, *_: object) -> None:
        if self._traces is None:
            return
        jax.profiler.stop_trace()
        with self._traces as name:  # the profiler knows no buckets
            for file in filter(Path.is_file, Path(name).rglob("*")):
                target = self._folder / file.relative_to(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        self._traces = None
