"""Several real processes as one run, disturbed."""

import re
import sys
import time
from pathlib import Path

from experiments.launch import pod_sim
from tests.faults.harness import LONG, Process


class Pod:
    """Processes of one run of the experiment `tiny` in a folder; whatever they do, none outlives
    the `with`.

    `which` of them start now (all); `code` runs instead of the command `train`, `prefix[i]` before
    it; `each[i]` is the environment of process i alone.
    """

    def __init__(
        self,
        count,
        *options,
        folder=None,
        which=None,
        code=None,
        devices=None,
        prefix=None,
        host="127.0.0.1",
        each=None,
        **environment,
    ):
        folder = folder or Path.cwd()
        command = [
            sys.executable,
            *(["-c", code, *options] if code else ["-m", "jaxformer", "train", "tiny", *options]),
        ]
        self.environment = {
            "JAX_NUM_CPU_DEVICES": str(devices or 8 // count),
            "JAXFORMER_COORDINATOR": f"{host}:{pod_sim.free_port()}",
            "JAXFORMER_PROCESSES": str(count),
            **environment,
        }
        self.folder, self.command, self.prefix, self.each = (
            folder,
            command,
            prefix or {},
            each or {},
        )
        self.processes: dict[int, Process] = {}
        for i in range(count) if which is None else which:
            self.start(i)

    def start(self, i):
        """Process i, which a pod that did not begin with it misses."""
        command, environment = (
            [*self.prefix.get(i, []), *self.command],
            self.environment | self.each.get(i, {}),
        )
        self.processes[i] = Process(
            command, self.folder, self.folder / f"out-{i}", JAXFORMER_PROCESS=str(i), **environment
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()

    def __getitem__(self, i) -> Process:
        return self.processes[i]

    def said(self, i):
        return self[i].said()

    def name(self, i):
        return f"process {i} (pid {self[i].process.pid} on "

    def wait_for(self, text, times=1, limit=LONG):
        """Until process 0 has said it."""
        self[0].wait_for(text, times, limit)

    def codes(self, limit=LONG, but=()):
        """The exit codes of all but some, which have to end by themselves."""
        end = time.monotonic() + limit
        return {
            i: self[i].end(max(end - time.monotonic(), 0.1)) for i in self.processes if i not in but
        }

    def finish(self):
        assert set(self.codes().values()) == {0}, {i: self.said(i)[-3000:] for i in self.processes}

    def lines(self, i):
        """What process i said, without what the C++ runtime says of its connections."""
        gloo = ("[Gloo]", "peer ranks")  # two threads of it may break a line in two
        return [
            line for line in self.said(i).splitlines() if not any(word in line for word in gloo)
        ]

    def assert_lost(self, victim, limit=60):
        """All others end by themselves, each with exit code 4 and a line that names the victim; the
        seconds."""
        begin = time.monotonic()
        codes = self.codes(limit, but=(victim,))
        seconds = time.monotonic() - begin
        for i, code in codes.items():
            said = self.said(i)
            assert (
                code == 4 and f"jaxformer: {self.name(victim)}" in said and "Traceback" not in said
            ), said[-3000:]
        return seconds


def found(pattern, text):
    """Its first group."""
    match = re.search(pattern, text)
    assert match, text
    return match[1]
