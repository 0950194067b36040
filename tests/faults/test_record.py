"""Rows 13 and 16: a record that was torn, a clock that goes backwards, a device that computes wrong
in silence."""

import json
import signal

import pytest

from tests.faults.harness import Training, assert_same, resumed_after
from tests.tiny import EXPERIMENT

OPTIONS = (
    "--steps=120",
    "--log-every=1",
    "--eval-every=20",
    "--checkpoints.every=20",
    "--batch-size=8",
)
# A metric runs at each evaluation. This one flips a bit of the parameters where device 2 keeps its
# copy.
STRUCK = (
    EXPERIMENT
    + """
import ctypes, dataclasses, os, time, jax

def strike(evaluation):
    if "STRIKE" in os.environ:
        del os.environ["STRIKE"]
        leaf = jax.tree.leaves(evaluation.params)[0]
        (shard,) = [shard for shard in leaf.addressable_shards if shard.device.id == 2]
        ctypes.c_uint8.from_address(shard.data.unsafe_buffer_pointer() + 1).value ^= 4
    return {}

experiment = dataclasses.replace(experiment, metrics=(strike,))

if "BACKWARDS" in os.environ:
    now, began = time.time, time.time()
    time.time = lambda: began - 1000 * (now() - began)
"""
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed"), *OPTIONS, experiment=STRUCK)
    training.finish()
    return training.ending()


@pytest.mark.fault
@pytest.mark.parametrize(
    "torn", ['{"step": 7', '{"step": 70, "loss": 3.1}\n{"step": 71, "lo', "\x00" * 37]
)
def test_a_torn_record_is_tolerated_and_no_step_is_there_twice(torn, tmp_path, undisturbed, report):
    training = Training(tmp_path, *OPTIONS, experiment=STRUCK)
    with training.start() as process:
        process.wait_for("step  60/120")
        process.kill()
    with (training.run / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert resumed_after(training.finish()) > 0
    assert_same(training.ending(), undisturbed)
    report(13, f"the record ends in {torn[:20]!r}...", trials=1, detected=1, recovered=1)


@pytest.mark.fault
def test_a_clock_that_goes_backwards_changes_nothing(tmp_path, undisturbed, report):
    training = Training(tmp_path, *OPTIONS, experiment=STRUCK, BACKWARDS="1")
    with training.start() as process:
        process.wait_for("step  50/120")
        process.send(signal.SIGTERM)
        assert process.end() == 143
    training.finish()
    assert_same(training.ending(), undisturbed)
    starts = json.loads((training.run / "goodput.json").read_text())["starts"]
    assert len(starts) == 2 and all(seconds >= 0 for start in starts for seconds in start.values())
    report(13, "the clock goes backwards", trials=1, detected=1, recovered=1)


@pytest.mark.fault
def test_a_flipped_bit_on_one_device_stops_the_run_and_a_restart_ends_as_if_it_had_not_been(
    tmp_path, report
):
    mesh = {"JAX_NUM_CPU_DEVICES": "4"}
    whole = Training(tmp_path / "whole", *OPTIONS, "--mesh.data=4", experiment=STRUCK, **mesh)
    whole.finish()
    training = Training(tmp_path / "struck", *OPTIONS, "--mesh.data=4", experiment=STRUCK, **mesh)
    said = training.finish(code=3, STRIKE="1")
    assert (
        "device 2 differs from its copies on devices 0, 1, 3: suspect the hardware" in said
        and "Traceback" not in said
    )
    good = training.steps()[-1]
    assert resumed_after(training.finish()) == good
    assert_same(training.ending(), whole.ending())
    report(
        16,
        "one bit flipped in one device's copy",
        trials=1,
        detected=1,
        recovered=1,
        note="named device 2; bit-identical",
    )
