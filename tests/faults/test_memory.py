"""Row 14: a step that does not fit says what needs how much, and what helps; checkpoints stay."""

import sys

import pytest

from tests.faults.harness import Process, Training


@pytest.mark.thorough
def test_out_of_memory_is_an_explanation(tmp_path, report):
    """Under a real limit of the process's memory, in a run that has a checkpoint."""
    training = Training(tmp_path, "--eval-batches=1", "--checkpoints.every=2")
    training.finish("--steps=4")
    kept = training.ending()
    command = (
        f"ulimit -v 12000000; exec {sys.executable} -m jaxformer train tiny --batch-size=1048576 "
        f"--steps=4"
    )
    with Process(["bash", "-c", command], tmp_path, tmp_path / "output") as process:
        assert process.end() == 2
    said = process.said()
    assert "jaxformer: out of device memory: RESOURCE_EXHAUSTED" in said and "Traceback" not in said
    assert (
        "a step needs" in said and "GiB on each device: parameters" in said and "  large: " in said
    )
    assert sum(line.startswith("  with --") for line in said.splitlines()) == 3, said
    (folder,) = [
        path for path in (tmp_path / "runs").glob("tiny-*") if (path / "checkpoints" / "4").exists()
    ]
    assert kept.step == 4 and folder.exists()
    report(
        14,
        "a step larger than memory",
        trials=1,
        detected=1,
        recovered=1,
        note="three changes, with their bytes",
    )
