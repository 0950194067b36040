"""Real training processes: disturbed, started again by the same command, and compared with one that
nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from jaxformer.runs import checkpoint, checkpoint_reader
from tests.tiny import EXPERIMENT, furnish

ROOT = Path(__file__).parents[2]
LONG = 400  # seconds that a process may take, beside whatever else the machine does


class Process:
    """A process whose output goes to a file. It does not outlive its `with`."""

    def __init__(self, command: list[str], folder: Path, output: Path, **environment: str):
        self.output = output
        inherited = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | inherited | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    running = property(lambda self: self.process.poll() is None)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1, limit: float = LONG) -> None:
        """Until the process has said `text` so many times. It must not end before."""
        end = time.monotonic() + limit
        while self.said().count(text) < times:
            assert self.running and time.monotonic() < end, (
                f"{text!r} never came:\n{self.said()[-3000:]}"
            )
            time.sleep(0.005)

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill(self) -> str:
        """By SIGKILL; what it said."""
        self.process.kill()
        self.process.wait()
        return self.said()

    def end(self, limit: float = LONG) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.said()[-3000:]}") from None


@dataclass(frozen=True)
class Ending:
    """What a finished run left: the fingerprint of each leaf of its last state, and its record."""

    step: int
    leaves: dict[str, str]
    record: list[dict[str, Any]]


class Training:
    """A folder with an experiment file, and the processes that train it there; `options` are those
    of the command line."""

    def __init__(
        self, folder: Path, *options: str, experiment: str = EXPERIMENT, **environment: str
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.options, self.environment, self.count = (
            furnish(folder, experiment),
            options,
            environment,
            0,
        )

    def start(self, *more: str, **environment: str) -> Process:
        """The command that a user types, in a new process."""
        self.count += 1
        command = [sys.executable, "-m", "jaxformer", "train", "tiny", *self.options, *more]
        return Process(
            command,
            self.folder,
            self.folder / f"output-{self.count}",
            **self.environment,
            **environment,
        )

    def finish(self, *more: str, code: int = 0, **environment: str) -> str:
        """What a process says that ends by itself with this exit code."""
        with self.start(*more, **environment) as process:
            found = process.end()
            assert found == code, f"exit code {found}:\n{process.said()[-3000:]}"
            return process.said()

    @property
    def run(self) -> Path:
        """The run folder; there must be one."""
        (folder,) = (self.folder / "runs").glob("tiny-*")
        return folder

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def steps(self) -> list[int]:
        """The checkpoints that are complete."""
        return checkpoint.steps(self.checkpoints)

    def ending(self) -> Ending:
        """What is there now."""
        step = self.steps()[-1]
        leaves = checkpoint_reader.read_manifest(epath.Path(self.checkpoints / str(step)))["leaves"]
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return Ending(
            step,
            {name: leaf["fingerprint"] for name, leaf in leaves.items()},
            [json.loads(line) for line in lines],
        )


def assert_same(found: Ending, expected: Ending) -> None:
    """To the bit: state and record."""
    assert found.step == expected.step
    assert found.leaves == expected.leaves
    assert found.record == expected.record


def resumed_after(output: str) -> int:
    """The step after which a process went on; 0 where it began."""
    _, found, rest = output.partition("resuming after step ")
    return int(rest.split()[0]) if found else 0


def last_step(output: str) -> int:
    """How many steps a process said that it had done, under --log-every=1."""
    lines = [
        line.split()[1] for line in output.splitlines() if line.startswith("step ") and "/" in line
    ]
    done = [int(line.split("/")[0]) for line in lines if line.split("/")[0].isdecimal()]
    return max(done, default=0)
