"""Rows 1 and 2: a run that is killed or asked to stop, at any moment, ends as one that was not."""

import random
import signal
import time

import pytest

from tests.faults.harness import Training, assert_same, last_step, resumed_after

EVERY = 20
OPTIONS = ("--steps=200", "--log-every=1", "--eval-every=50", f"--checkpoints.every={EVERY}", "--model.dropout-rate=0.1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed"), *OPTIONS)
    training.finish()
    return training.ending()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.thorough
def test_a_signal_saves_at_the_current_step_and_nothing_is_done_again(signum, tmp_path, undisturbed, report):
    training = Training(tmp_path / "a run", *OPTIONS)
    with training.start() as process:
        process.wait_for("step  30/200")
        process.send(signum)
        assert process.end() == 128 + signum
    done = last_step(process.said())
    assert training.steps()[-1] == done and signum.name in process.said() and "Traceback" not in process.said()
    output = training.finish()
    assert resumed_after(output) == done
    assert_same(training.ending(), undisturbed)
    report(2, f"{signum.name} once", trials=1, detected=1, recovered=1, note="0 steps done again")


@pytest.mark.fault
def test_sigkill_at_random_moments(tmp_path, undisturbed, report):
    """Of a start, a compilation, a step, an evaluation, a save."""
    training, rng, kills, again = Training(tmp_path, *OPTIONS), random.Random(0), 0, []
    reached = 0
    while kills < 20:
        with training.start() as process:
            moment = rng.random()
            if moment < 0.7:  # while it trains
                process.wait_for("/200 loss", times=rng.randrange(1, 15))
                time.sleep(rng.uniform(0, 0.3))
            else:
                time.sleep(rng.uniform(0, 8))  # while it starts and compiles
            if not process.running:
                break
            output = process.kill()
        kills += 1
        if resumed_after(output) or last_step(output):
            again.append(max(0, reached - resumed_after(output)))
            reached = max(reached, last_step(output), resumed_after(output))
    training.finish()
    assert_same(training.ending(), undisturbed)
    report(1, "SIGKILL at random moments", trials=kills, detected=kills, recovered=kills, note=f"steps done again: {again}")
