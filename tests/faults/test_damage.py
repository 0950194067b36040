"""Row 3: each file of the newest checkpoint damaged in each way.

Found or harmless; the end is that of an undisturbed run.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tensorstore

from jaxformer.runs import checkpoint
from jaxformer.runs.checkpoint import Manager
from tests.faults.harness import Training, assert_same, resumed_after
from tests.runs.test_checkpoint import (
    abstract,
    assert_same as assert_same_state,
    collected,
    make,
    reads_damage,
)

collected = collected  # a fixture that `reads_damage` uses


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


WAYS: dict[str, Callable[[Path, random.Random], object]] = {
    "one bit flipped": flip,
    "truncated": lambda file, rng: os.truncate(file, rng.randrange(file.stat().st_size)),
    "emptied": lambda file, rng: os.truncate(file, 0),
    "deleted": lambda file, rng: file.unlink(),
    "zeros": lambda file, rng: file.write_bytes(bytes(file.stat().st_size)),
}
TWIN = "replaced by that of another step"


def files(step: Path) -> list[Path]:
    return sorted(
        path.relative_to(step) for path in step.rglob("*") if path.is_file() and path.stat().st_size
    )


def swap(one: Path, other: Path) -> None:
    """Two files or folders change places."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def twin_of(name: Path, newest: Path, older: Path) -> Path | None:
    """The file of another step that has this one's part: data files have random names, so the next
    of the same folder."""
    if (older / name).is_file():
        return older / name
    beside = [path for path in files(older) if path.parent == name.parent]
    there = [path for path in files(newest) if path.parent == name.parent]
    return older / beside[min(there.index(name), len(beside) - 1)] if beside else None


@dataclass
class Count:
    """Of the trials of one kind of damage."""

    trials: int = 0
    found: int = 0  # renamed to STEP.corrupt, the older step was taken
    harmless: int = 0  # read to the bit


def trial(folder: Path, count: Count) -> None:
    """What comes back is in any case what was saved; and the run can save again."""
    log: list[str] = []
    with Manager(folder, log=log.append) as manager:
        step, state, metadata = manager.restore(abstract(make(1)))
        assert_same_state(state, make(step))
        assert metadata == {"step": step}
        count.trials += 1
        if step == 2:
            assert not log
            count.harmless += 1
        else:
            assert step == 1 and (folder / "2.corrupt").is_dir()
            (line,) = log
            named = line.partition("step 2 is damaged: ")[2].partition("; renamed to 2.corrupt")[0]
            assert named, line  # the leaf, or what could not be read
            count.found += 1
        manager.save(3, make(3), wait=True)
        assert_same_state(manager.restore(abstract(make(1)))[1], make(3))


@pytest.mark.fault
@reads_damage
@pytest.mark.parametrize("way", [*WAYS, TWIN])
def test_every_file_of_the_newest_checkpoint(way, two_steps, tmp_path, report):
    """In this process, through the manager that a run uses."""
    rng, count = random.Random(way), Count()
    for name in files(two_steps / "2"):
        for _ in range(3 if way == "one bit flipped" else 1):
            copy = tmp_path / "c"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(two_steps, copy)
            if way != TWIN:
                WAYS[way](copy / "2" / name, rng)
            elif (twin := twin_of(name, copy / "2", copy / "1")) is None:
                continue
            else:  # the older step stays good: it is what a run falls back to
                shutil.copyfile(twin, copy / "2" / name)
            trial(copy, count)
    assert count.found >= 3 and count.trials == count.found + count.harmless
    words = f"{count.found} found, {count.harmless} harmless; in one process"
    report(
        3,
        f"checkpoint file: {way}",
        trials=count.trials,
        detected=count.trials,
        recovered=count.trials,
        note=words,
    )


@pytest.mark.thorough
def test_pieces_larger_than_their_array(two_steps, tmp_path, report):
    """Tensorstore would allocate a whole piece, and abort the process where it cannot."""
    shutil.copytree(two_steps, folder := tmp_path / "c")
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/2/state/"}}
    ).result()
    key = next(
        key
        for key in store.list().result()
        if key.endswith(b".zarray") and json.loads(store[key])["shape"]
    )
    array = json.loads(store[key])
    store[key] = json.dumps(array | {"chunks": [1 << 40 for _ in array["shape"]]}).encode()
    count = Count()
    trial(folder, count)
    assert count.found == 1
    report(15, "array pieces of terabytes in a checkpoint", trials=1, detected=1, recovered=1)


STOP, STEPS = 45, 60
OPTIONS = (
    f"--steps={STEPS}",
    "--eval-every=60",
    "--checkpoints.every=15",
    "--checkpoints.keep-latest=9",
)
OPTIONS += ("--log-every=1", "--model.dropout-rate=0.1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the ending of a run that nobody disturbed, its folder as a kill after the save of step 45
    leaves it)."""
    training = Training(tmp_path_factory.mktemp("finished"), *OPTIONS)
    training.finish()
    ending = training.ending()
    shutil.rmtree(training.checkpoints / str(STEPS))
    (training.run / "result.json").unlink()
    assert training.steps() == [15, 30, STOP]
    return ending, training


def copy_of(training: Training, folder: Path) -> Training:
    copy = Training(folder, *OPTIONS)
    shutil.copytree(training.folder / "runs", copy.folder / "runs")
    return copy


@pytest.mark.fault
@pytest.mark.parametrize("way", ["one bit flipped", "truncated", "deleted", "swapped"])
def test_the_same_command_after_damage(way, finished, tmp_path, report):
    """Real processes. Every file of array data of the newest step; its metadata; or its largest
    file and that of step 30."""
    undisturbed, stopped = finished
    training = copy_of(stopped, tmp_path)
    newest, older, rng = (
        training.checkpoints / str(STOP),
        training.checkpoints / "30",
        random.Random(0),
    )
    largest = max(files(newest), key=lambda name: (newest / name).stat().st_size)
    if way == "swapped":
        twin = twin_of(largest, newest, older)
        assert twin is not None
        swap(newest / largest, twin)
    elif way == "deleted":
        (newest / "_CHECKPOINT_METADATA").unlink()
    else:
        for name in files(newest):
            if name.parent.name == "d":
                WAYS[way](newest / name, rng)
    said = training.finish()
    after = resumed_after(said)
    bad = [step for step in (STOP, 30) if step > after]
    assert after and all(
        f"step {step} is damaged: " in said and (training.checkpoints / f"{step}.corrupt").is_dir()
        for step in bad
    )
    assert bad and "Traceback" not in said
    assert_same(training.ending(), undisturbed)
    report(
        3,
        f"the command after: {way}",
        trials=1,
        detected=1,
        recovered=1,
        note=f"went on after step {after} of {STOP}",
    )


@pytest.mark.fault
def test_all_checkpoints_damaged_is_refused(finished, tmp_path, report):
    """Nothing starts over behind the user's back, and nothing is renamed; in an empty folder the
    run begins anew."""
    undisturbed, stopped = finished
    training = copy_of(stopped, tmp_path)
    for step in training.steps():
        (training.checkpoints / str(step) / "_CHECKPOINT_METADATA").unlink()
    said = training.finish(code=2)
    assert "every checkpoint is damaged" in said.splitlines()[-1] and "Traceback" not in said
    assert checkpoint.steps(training.checkpoints) == [15, 30, STOP]
    assert "every checkpoint is damaged" in training.finish(code=2).splitlines()[-1]
    shutil.rmtree(training.checkpoints)
    assert resumed_after(training.finish()) == 0
    assert_same(training.ending(), undisturbed)
    report(
        3,
        "every checkpoint damaged",
        trials=2,
        detected=2,
        recovered=2,
        note="refused (2) until they are removed",
    )
