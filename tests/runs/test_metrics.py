"""What a run says of its steps."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation
from jaxformer.runs import metrics
from jaxformer.runs.checks import ranked
from jaxformer.runs.metrics import Record, read_records, steps_done
from jaxformer.runs.reporter import Console, NonFinite, Reporter
from jaxformer.runs.scores import scores_of

GOOD = {
    "loss": 1.0,
    "accuracy": 0.5,
    "tokens": 8.0,
    "grad_norm": 2.0,
    "learning_rate": 0.5,
    "skipped": 0,
}
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


def test_a_weight_that_is_no_number_is_a_bad_step_like_any():
    bad = (
        GOOD
        | dict.fromkeys(("loss", "accuracy", "tokens", "grad_norm"), float("nan"))
        | {"skipped": 1}
    )
    record, console = report([GOOD, bad, bad, GOOD, GOOD])
    assert [line[:6] for line in console.lines] == ["step 1", "step 2"] and list(record) == [
        0,
        2,
        4,
    ]
    assert all(values.get("tokens/s", 0) >= 0 for _, values in console.logged)


def test_a_batch_without_weight_is_told_from_a_bad_step_and_never_ends_a_run():
    record, console = report([GOOD, GOOD, *[EMPTY | {"skipped": 1}] * 4], max_skipped=2)
    assert console.lines == [
        f"step {step} changed nothing: the weights of its batch sum to 0" for step in (2, 3, 4, 5)
    ]
    # no loss of 0
    assert record[4] == {
        "tokens": 0.0,
        "grad_norm": 0.0,
        "learning_rate": 0.5,
        "skipped": 1,
    }
    assert "loss" not in console.logged[-1][1]
    with pytest.raises(NonFinite, match="2 steps in a row, up to step 1"):
        report([GOOD, GOOD | {"loss": float("nan"), "skipped": 2}], max_skipped=2)


def test_utilization_counts_positions_and_tokens_a_second_the_weights(monkeypatch):
    """A step a second, of which each is a quarter of a second's work, whatever the weights of its
    batch sum to."""
    clock = itertools.count()
    monkeypatch.setattr(metrics.time, "monotonic", lambda: float(next(clock)))
    for weight in (8.0, 1200.0):
        console = Listener()
        reporter = Reporter({}.__setitem__, console, every=1, last=3, max_skipped=9)
        for step in range(4):
            reporter.later(
                step,
                {name: jnp.asarray(value) for name, value in (GOOD | {"tokens": weight}).items()},
                0.25,
            )
        reporter.now()
        assert "MFU" not in console.logged[0][1]  # the first step was compiled
        assert [values["MFU"] for _, values in console.logged[1:]] == [0.25] * 3
        assert [values["tokens/s"] for _, values in console.logged[1:]] == [weight] * 3
    report([GOOD, GOOD])  # and where the peak is not known there is none


SCORED = Evaluation(None, None, None, lambda: iter(()), "float32", 0)
NUMBERS = [
    1,
    1.5,
    True,
    np.float32(1.5),
    np.float64(1.5),
    np.int64(3),
    np.bool_(True),
    np.array(1.5),
    jnp.float32(1.5),
]


@pytest.mark.parametrize(
    "number", [*NUMBERS, jnp.bfloat16(1.5), jnp.int32(3)], ids=lambda value: type(value).__name__
)
def test_a_metric_may_find_a_number_of_any_kind(number):
    scores = scores_of(lambda scored: {"norm": number, "signature": "of it"}, SCORED)
    assert json.loads(json.dumps(scores)) == {"norm": number, "signature": "of it"} and ranked(
        scores, "-norm"
    ) == -float(number)


@pytest.mark.parametrize(
    "found",
    [{"norms": np.ones(3)}, {"norms": jnp.ones((2, 40))}, {"norm": None}, {"n": [1.0]}, 1.0, None],
)
def test_a_metric_that_finds_no_number_gets_one_line(found):
    def mine(scored):
        return found

    with pytest.raises(
        ConfigError, match=r"metrics: mine returned .*; expected {name: number, or text}"
    ) as caught:
        scores_of(mine, SCORED)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.integers(0, 60))
def test_the_steps_that_were_recorded(done, log_every, eval_every, step):
    """Of a run that was killed: `reached` is the last logged step or evaluation, and no step that
    never ran."""
    record = Record(None)
    for number in range(done):
        if number % log_every == 0:  # a step without weight has no loss
            record.lines.append(
                {"step": number, "grad_norm": 1.0} | ({"loss": 1.0} if number % 3 else {})
            )
        if (number + 1) % eval_every == 0:
            record.lines.append({"step": number + 1, "validation_loss": 1.0})
    evaluated, logged = (
        done // eval_every * eval_every,
        (done - 1) // log_every * log_every + 1 if done else 0,
    )
    assert steps_done(record.lines) == max(evaluated, logged) <= done
    record.rewind(step)
    assert record.reached == max(evaluated, logged) and steps_done(record.lines) <= step


DAMAGED = {
    "a flipped bit": b'{"step": 3, "loss"; 1.0}',
    "no text": b'\xff\xfe{"step": 3}',
    "no step": b'{"loss": 1.0}',
    "no object": b"[3]",
    "a step that is no number": b'{"step": "3"}',
    "brackets": b"[" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_costs_that_line_alone(tmp_path, name, caplog):
    """The file as it was stays beside; a run that goes on keeps all others."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() for step in range(9)]
    # and the last one torn
    before = b"\n".join([*lines[:3], DAMAGED[name], *lines[4:], b'{"step": 9, "lo'])
    path.write_bytes(before)
    assert [line["step"] for line in read_records(path)] == [0, 1, 2, 4, 5, 6, 7, 8]
    record = Record(path)
    record.rewind(7)
    record.write(7, {"loss": 2.0})
    record.close()
    assert [line["step"] for line in read_records(path)] == [0, 1, 2, 4, 5, 6, 7]
    assert (
        tmp_path / "metrics.jsonl.damaged-1"
    ).read_bytes() == before and "lines [4]" in caplog.text
    caplog.clear()
    Record(path).close()
    assert not caplog.text and not (tmp_path / "metrics.jsonl.damaged-2").exists()


def test_a_torn_last_line_is_no_damage(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    assert [line["step"] for line in Record(path).lines] == [0, 1] and not caplog.text
    path.write_bytes(b'{"step": 0}\n{"step": 1}')  # without its end, but whole
    assert [line["step"] for line in Record(path).lines] == [0, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.thorough
def test_a_full_disk_costs_no_line(small_disk, fill, caplog):
    """The run goes on, with one warning; the file has every line once there is room."""
    path = small_disk / "metrics.jsonl"
    record = Record(path)
    record.write(0, {"loss": 1.0})
    ballast = fill(small_disk)
    for step in range(1, 200):  # beyond the page that the file already has
        record.write(step, {"loss": 1.0, "accuracy": 0.25})
    assert caplog.text.count("cannot be written") == 1 and "No space left" in caplog.text
    assert len(read_records(path)) < 200
    ballast.unlink()
    record.write(200, {"loss": 2.0})
    assert [line["step"] for line in read_records(path)] == list(range(201))
    ballast = fill(small_disk)
    for step in range(201, 400):
        record.write(step, {"loss": 1.0, "accuracy": 0.25})
    ballast.unlink()
    record.close()
    assert [line["step"] for line in read_records(path)] == list(range(400))
