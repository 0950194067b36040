"""Row 17: ten thousand steps in which nothing grows; and how long a start takes before its first
step."""

import itertools
import json
import os
import statistics
import time
from pathlib import Path

import pytest

from tests.faults.harness import Process, Training


def usage(process: Process) -> dict[str, int]:
    """Kilobytes in memory, open files and threads of a process."""
    folder = Path(f"/proc/{process.process.pid}")
    words = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "memory": int(words["VmRSS"].split()[0]),
        "files": len(os.listdir(folder / "fd")),
        "threads": int(words["Threads"]),
    }


@pytest.mark.fault
@pytest.mark.slow
def test_nothing_grows_in_ten_thousand_steps(tmp_path, report):
    training = Training(
        tmp_path,
        "--steps=10000",
        "--log-every=100",
        "--eval-every=100",
        "--checkpoints.every=50",
        "--eval-batches=2",
    )
    seen, times = [], []
    with training.start() as process:
        for step in range(500, 10001, 500):
            process.wait_for(
                f"step {step + 1:>5}/10000" if step < 10000 else "step 10000/10000", limit=1500
            )
            times.append(time.monotonic())
            if process.running:
                seen.append(usage(process))
        assert process.end() == 0
    early, late = seen[3:8], seen[-5:]
    middle = lambda rows, name: statistics.median(row[name] for row in rows)
    growth = {name: middle(late, name) / middle(early, name) for name in seen[0]}
    assert growth["memory"] < 1.05, seen
    assert (
        abs(middle(late, "files") - middle(early, "files")) <= 3
        and abs(middle(late, "threads") - middle(early, "threads")) <= 3
    )
    assert len(training.steps()) <= 4  # two latest, the best, one half-way
    laps = [later - earlier for earlier, later in itertools.pairwise(times)]
    drift = statistics.median(laps[-5:]) / statistics.median(laps[2:7])
    note = (
        f"memory {middle(early, 'memory') // 1024} to {middle(late, 'memory') // 1024} MB; step "
        f"time times {drift:.2f}"
    )
    report(
        17, "10,000 steps, 400 saves, 100 evaluations", trials=1, detected=1, recovered=1, note=note
    )


@pytest.mark.fault
def test_a_warm_start_takes_at_most_half_of_a_cold_one(tmp_path, report):
    """From the start of the process to its first step, compilation cache cold and warm, in
    turns."""
    sizes = (
        "--model.num-layers=6",
        "--model.d-model=64",
        "--steps=400",
        "--log-every=1",
        "--model.unroll=6",
    )
    training, seconds = Training(tmp_path, *sizes), {"cold": [], "warm": []}
    for turn in range(3):
        for kind in seconds:
            cache = tmp_path / f"cache-{turn}"
            began = time.monotonic()
            with training.start(XDG_CACHE_HOME=str(cache), XLA_FLAGS="") as process:
                process.wait_for("/400 loss")
                seconds[kind].append(time.monotonic() - began)
                process.kill()
    cold, warm = (statistics.median(values) for values in seconds.values())
    parts = json.dumps(
        {kind: [round(value, 1) for value in values] for kind, values in seconds.items()}
    )
    report(
        17,
        "start to first step, compilation cache warm",
        trials=6,
        detected=6,
        recovered=6,
        note=f"{warm / cold:.0%} of cold; {parts} s",
    )
