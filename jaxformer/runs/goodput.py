"""Where the wall time of a run goes, over all its starts: goodput.json, and a line at the end."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from etils import epath

from jaxformer import config
from jaxformer.config import storage
from jaxformer.errors import ConfigError

# "step": steps that count. "start" and "compile": the time before the first step. "data": the host
# waited for a batch, and the device had nothing to do when it came. "recomputed": steps that an
# earlier start had already recorded.
PARTS = "step", "start", "compile", "data", "evaluation", "save", "recomputed"


class Goodput:
    """The seconds of each part, of this start and of earlier ones.

    A start that was killed counts up to its last save. `began` is a time of `time.monotonic`.
    Without a path (not on the first process) nothing is written.
    """

    def __init__(self, path: epath.PathLike | None, began: float):
        self.path = None if path is None else epath.Path(path)
        self._last = began
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.earlier: list[dict[str, Any]] = []
        if self.path is not None and storage.exists(self.path):
            with suppress(ConfigError):  # a damaged account must not stop the run
                starts = config.read_json(self.path, "", self.path.parent, starts=list)["starts"]
                self.earlier = [start for start in starts if isinstance(start, dict)]

    def lap(self, part: str) -> None:
        """Counts the time since the last lap as this part."""
        now = time.monotonic()
        self.seconds[part] += now - self._last
        self._last = now

    def save(self) -> None:
        """Writes the account. If the disk is full, the account is lost and the run goes on."""
        if self.path is not None:
            with suppress(OSError):
                config.write_atomically(
                    self.path, json.dumps({"starts": [*self.earlier, self.seconds]}, indent=2)
                )

    def summary(self) -> str:
        """One line: the share of wall time in steps that count, and the seconds of each part."""
        starts = [*self.earlier, self.seconds]

        def seconds(start, part):
            return start[part] if isinstance(start.get(part), float) else 0.0

        totals = {part: sum(seconds(start, part) for start in starts) for part in PARTS}
        wall = max(sum(totals.values()), 1e-9)
        parts = ", ".join(f"{part} {total:.1f}" for part, total in totals.items())
        several = f" in {len(starts)} starts" if len(starts) > 1 else ""
        return f"goodput {100 * totals['step'] / wall:.0f} % of {wall:.0f} s{several}: {parts}"


def program_began() -> float:
    """The time of `time.monotonic` when this process started; now where there is no /proc."""
    try:
        # Field 22: the start of the process, in ticks since the machine booted.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        age = 0.0
    return time.monotonic() - age
