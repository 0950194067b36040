"""What a run says of its steps."""

import jax.numpy as jnp
import pytest

from jaxformer.training.metrics import Console, NonFinite, Reporter

GOOD = {"loss": 1.0, "accuracy": 0.5, "tokens": 8.0, "grad_norm": 2.0, "learning_rate": 0.5, "skipped": 0}
EMPTY = GOOD | {"loss": float("nan"), "accuracy": float("nan"), "tokens": 0.0, "grad_norm": 0.0}


class Listener(Console):
    def __init__(self):
        super().__init__(total=20, heard=False)
        self.lines, self.logged = [], []

    def say(self, text):
        self.lines.append(text)

    def step(self, step, values):
        self.logged.append((step, values))


def report(steps, max_skipped=10):
    record, console = {}, Listener()
    reporter = Reporter(record.__setitem__, console, every=2, last=19, max_skipped=max_skipped)
    for step, values in enumerate(steps):
        reporter.later(step, {name: jnp.asarray(value) for name, value in values.items()})
    reporter.now()
    return record, console


def test_a_step_that_changed_nothing_is_reported_whether_it_is_logged_or_not():
    bad = GOOD | {"loss": float("nan"), "skipped": 1}
    overflow = GOOD | {"grad_norm": float("inf"), "skipped": 2, "loss_scale": 64.0}
    record, console = report([GOOD, bad, overflow, GOOD])
    assert console.lines == [
        "step 1 changed nothing: loss nan, gradient norm 2",
        "step 2 changed nothing: loss 1, gradient norm inf; the loss scale is now 64",
    ]
    assert list(record) == [0, 2]


def test_a_batch_without_weight_is_told_from_a_bad_step_and_never_ends_a_run():
    record, console = report([GOOD, GOOD, *[EMPTY | {"skipped": 1}] * 4], max_skipped=2)
    assert console.lines == [f"step {step} changed nothing: the weights of its batch sum to 0" for step in (2, 3, 4, 5)]
    assert record[4] == {"tokens": 0.0, "grad_norm": 0.0, "learning_rate": 0.5, "skipped": 1}  # no loss of 0
    assert "loss" not in console.logged[-1][1]
    with pytest.raises(NonFinite, match="2 steps in a row, up to step 1"):
        report([GOOD, GOOD | {"loss": float("nan"), "skipped": 2}], max_skipped=2)
