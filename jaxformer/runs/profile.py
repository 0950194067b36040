"""A profile of some steps of a run: a trace that TensorBoard and Perfetto show."""

import contextlib
import tempfile
from typing import Any

import jax

from jaxformer.runs.metrics import Console
from jaxformer.runs.run_folder import RunFolder

# the first and last step of a profile, counted from the start of the process: the first ones compile
TRACED = 10, 15


def place_of_profile(folder: RunFolder) -> str:
    """Where a profile goes: into the run's folder; of a bucket, which no profiler writes, elsewhere."""
    traces = folder.for_library(folder.path / "profile")
    return tempfile.mkdtemp(prefix="profile-") if "://" in str(folder.path) else str(traces)


def end_profile(trace: contextlib.ExitStack, state: Any, console: Console, line: str) -> None:
    """Writes the profile, once the device has done the steps that it is of."""
    jax.block_until_ready(state)
    trace.close()
    console.say(line)
