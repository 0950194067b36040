"""Rows 1 and 2: a run that is killed or asked to stop, at any moment, ends as one that was not."""

import random
import shutil
import signal
import time

import pytest

from tests.faults.harness import Training, assert_same, last_step, resumed_after
from tests.tiny import EXPERIMENT

EVERY = 20
OPTIONS = (
    "--steps=200",
    "--log-every=1",
    "--eval-every=50",
    f"--checkpoints.every={EVERY}",
    "--model.dropout-rate=0.1",
)

# The experiment's file sends SIGKILL to its own process at a moment that cannot be hit from
# outside.
MORTAL = (
    EXPERIMENT
    + """
import os, pathlib, shutil, signal
from jax._src import compiler
from jaxformer import config
from jaxformer.runs import checkpoint, loop, metrics, reporter

def die_at(count, owner, name, path="", after=False):
    original = getattr(owner, name)

    def call(*arguments, **options):
        nonlocal count
        count -= path in str(arguments[:1])
        if count == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)

if "DIE" in os.environ:
    eval(os.environ["DIE"])
"""
)
MOMENTS = {
    "the first compilation": 'die_at(1, compiler, "compile_or_get_cached")',
    "a later compilation": 'die_at(4, compiler, "compile_or_get_cached")',
    "the first step": 'die_at(1, reporter.Reporter, "later")',
    "an evaluation": 'die_at(2, loop, "evaluate")',
    "the start of a save": 'die_at(3, checkpoint.orbax.CheckpointManager, "save")',
    "a save, as it has begun": 'die_at(3, checkpoint.orbax.CheckpointManager, "save", after=True)',
    "the wait for a save": 'die_at(3, checkpoint.Manager, "_finish")',
    "finalisation, before the rename": 'die_at(3, os, "rename", "orbax-checkpoint-tmp")',
    "finalisation, after the rename": 'die_at(3, os, "rename", "orbax-checkpoint-tmp", after=True)',
    "deletion of an old step": 'die_at(2, shutil, "rmtree")',
    "the record's rewriting": 'die_at(1, config, "write_atomically", "metrics.jsonl")',
    "a line of the record": 'die_at(30, metrics.Record, "_append")',
    "the last save": 'die_at(1, loop, "finish")',
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed"), *OPTIONS)
    training.finish()
    return training.ending()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.thorough
def test_a_signal_saves_at_the_current_step_and_nothing_is_done_again(
    signum, tmp_path, undisturbed, report
):
    training = Training(tmp_path / "a run", *OPTIONS)
    with training.start() as process:
        process.wait_for("step  30/200")
        process.send(signum)
        assert process.end() == 128 + signum
    done = last_step(process.said())
    assert (
        training.steps()[-1] == done
        and signum.name in process.said()
        and "Traceback" not in process.said()
    )
    output = training.finish()
    assert resumed_after(output) == done
    assert_same(training.ending(), undisturbed)
    report(2, f"{signum.name} once", trials=1, detected=1, recovered=1, note="0 steps done again")


@pytest.mark.fault
def test_sigkill_at_random_moments(tmp_path, undisturbed, report):
    """Of a start, a compilation, a step, an evaluation, a save.

    Runs that reach their end are compared, and begun anew.
    """
    training, rng, kills, again, reached = Training(tmp_path, *OPTIONS), random.Random(0), 0, [], 0
    while kills < 20:
        with training.start() as process:
            lines = rng.randrange(1, 15) if rng.random() < 0.7 else 0
            while process.running and process.said().count("/200 loss") < lines:
                time.sleep(0.005)
            # while it trains; or while it starts and compiles
            time.sleep(rng.uniform(0, 0.3 if lines else 8))
            if ended := not process.running:
                assert process.end() == 0, process.said()
            output = process.kill()
        if ended:
            assert_same(training.ending(), undisturbed)
            shutil.rmtree(training.folder / "runs")
            reached = 0
            continue
        kills += 1
        if resumed_after(output):
            again.append(max(0, reached - resumed_after(output)))
        reached = max(reached, last_step(output))
    training.finish()
    assert_same(training.ending(), undisturbed)
    # the last line may be of a step more than had been fetched
    assert max(again, default=0) <= EVERY + 1
    report(
        1,
        "SIGKILL at random moments",
        trials=kills,
        detected=kills,
        recovered=kills,
        note=f"steps done again: {again}",
    )


ALWAYS = "finalisation, before the rename"  # one real kill is among the fast tests


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[pytest.mark.fault] * (name != ALWAYS)) for name in MOMENTS]
)
def test_sigkill_at_a_moment(moment, tmp_path, undisturbed, report):
    training = Training(tmp_path, *OPTIONS, experiment=MORTAL)
    training.finish(code=-signal.SIGKILL, DIE=MOMENTS[moment])
    output = training.finish()
    assert_same(training.ending(), undisturbed)
    report(
        1,
        f"SIGKILL in {moment}",
        trials=1,
        detected=1,
        recovered=1,
        note=f"resumed after {resumed_after(output)}",
    )


@pytest.mark.fault
def test_a_second_signal_ends_at_once_and_nothing_saved_is_lost(tmp_path, undisturbed, report):
    training = Training(tmp_path, *OPTIONS, experiment=MORTAL)
    slow = 'setattr(checkpoint.Manager, "save", lambda *_, **__: __import__("time").sleep(300))'
    with training.start(DIE=slow) as process:
        process.wait_for("step  10/200")  # then the first save
        process.send(signal.SIGTERM)
        time.sleep(1)
        process.send(signal.SIGTERM)
        assert process.end(limit=20) == 143
    training.finish()
    assert_same(training.ending(), undisturbed)
    report(2, "SIGTERM twice, the second in a save that hangs", trials=1, detected=1, recovered=1)
