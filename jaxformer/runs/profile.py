"""A profile of some steps of a run: a trace that TensorBoard and Perfetto show, and a table."""

import contextlib
import tempfile
from typing import Any

import jax

from jaxformer.runs import profile_table
from jaxformer.runs.best_effort import BestEffort
from jaxformer.runs.reporter import Console
from jaxformer.runs.run_folder import RunFolder

# The first and the last step of a profile, counted from this start. Earlier ones compile.
TRACED = 10, 15


def place_of_profile(folder: RunFolder) -> str:
    """The folder of a profile: in the run's folder; for a run in a bucket, a temporary one.

    No profiler can write to a bucket.
    """
    traces = folder.for_library(folder.path / "profile")
    return tempfile.mkdtemp(prefix="profile-") if "://" in str(folder.path) else str(traces)


class Profile(contextlib.ExitStack):
    """Traces the steps `TRACED` of a start into `folder`; without a folder it does nothing."""

    def __init__(self, folder: str | None, start: int, console: Console):
        super().__init__()
        self.folder = folder
        self.first = start + TRACED[0]
        self.last = start + TRACED[1]
        self.console = console

    def before(self, step: int) -> None:
        """Begins the trace before its first step."""
        if self.folder is not None and step == self.first:
            self.enter_context(jax.profiler.trace(self.folder))

    def after(self, step: int, state: Any) -> None:
        """Writes the trace after its last step, once the device has finished it."""
        if self.folder is not None and step == self.last:
            jax.block_until_ready(state)
            self.close()
            self.console.say(f"profile of steps {self.first} to {step}: {self.folder}")
            table = BestEffort(profile_table.read_profile)(self.folder, step + 1 - self.first)
            for line in table or []:
                self.console.say(line)
