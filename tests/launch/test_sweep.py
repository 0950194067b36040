"""A sweep trains every combination once, goes on where it was stopped, and keeps what failed in its
table."""

import contextlib
import json
import shutil

import jax
import pytest

from experiments.launch import scaling
from jaxformer import cli
from jaxformer.cli import sweeps
from jaxformer.cli.trials import combinations
from jaxformer.data.batching import BadBatch
from jaxformer.errors import ConfigError
from jaxformer.runs import loop
from tests.tiny import furnish

# a model that sees later tokens ends without a sample: nothing is compiled for one
QUICK = ["--eval-batches=1", "--log-every=1", "--checkpoints.every=1", "--model.masks=full()"]
GRID = "--optimizer.learning-rate=1e-3,1e-1 --seed=0,1"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(furnish(tmp_path))
    return tmp_path / "runs"


def sweep(grid, *more):
    return cli.run(sweeps.main, ["tiny", "--grid", grid, "--steps=2", *QUICK, *more])


def rows(runs):
    """The cells of the only table, line by line, without its head."""
    (path,) = runs.glob("sweep-tiny-*.md")
    lines = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in path.read_text().splitlines()
    ]
    return lines[0], lines[2:]


def test_every_combination_the_last_option_first():
    assert combinations("--a=1,2 --b-c.d=x,y") == [
        {"a": a, "b-c.d": b} for a, b in (("1", "x"), ("1", "y"), ("2", "x"), ("2", "y"))
    ]  # fmt: skip
    values = lambda text: [each["a"] for each in combinations(f"--a={text}")]
    assert values("Lion(b1=0.9, b2=(0.1, 0.2)),AdamW()") == [
        "Lion(b1=0.9, b2=(0.1, 0.2))",
        "AdamW()",
    ]
    assert values("(1,2),[3,4],{5:6,7:8}") == ["(1,2)", "[3,4]", "{5:6,7:8}"]
    assert values("'x, y',\"z\",Name('(,')") == ["x, y", "z", "Name('(,')"]


@pytest.mark.parametrize(
    "grid",
    ["", "  ", "--a", "--a=", "--a=1,,2", "a=1", "--a=1 --a=2", "--a=(1", "--a='x", "--a=1 2"],
)
def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(ConfigError, match="--grid"):
        combinations(grid)


@pytest.mark.thorough
def test_a_table_and_a_figure_and_nothing_is_trained_twice(runs, capsys, monkeypatch):
    assert sweep(GRID) == 0
    out = capsys.readouterr().out
    head, body = rows(runs)
    assert head[:3] == ["optimizer.learning-rate", "seed", "loss"] and head[-1] == "run"
    assert sorted((row[0], row[1]) for row in body) == [
        (a, b) for a in ("1e-1", "1e-3") for b in "01"
    ]
    for row in body:
        result = json.loads((runs.parent / row[-1] / "result.json").read_text())
        assert float(row[2]) == pytest.approx(result["validation"]["loss"], rel=1e-3)
    assert [float(row[2]) for row in body] == sorted(float(row[2]) for row in body)
    (picture,) = runs.glob("sweep-tiny-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture.name) in out
    monkeypatch.setattr(loop, "train", None)  # a call would fail
    assert sweep(GRID) == 0 and rows(runs) == (head, body)


@pytest.mark.thorough
def test_a_killed_sweep_goes_on_where_it_was(runs, monkeypatch):
    class Killed(BaseException):
        pass

    started, train = [], loop.train

    def until_the_second(experiment, *rest, **options):
        started.append(experiment)
        if len(started) == 2:
            raise Killed
        return train(experiment, *rest, **options)

    monkeypatch.setattr(loop, "train", until_the_second)
    with contextlib.suppress(Killed):
        sweep("--seed=0,1,2")
    assert sweep("--seed=0,1,2") == 0
    assert len(started) == 4 and started[1] == started[2]  # the second again, then the third
    assert len(rows(runs)[1]) == 3


@pytest.mark.thorough
def test_what_fails_stays_in_the_table_and_the_others_go_on(runs, capsys):
    assert (
        sweep(
            "--optimizer.learning-rate=1e38,1e-3",
            "--clip-norm=1e30",
            "--max-skipped=1",
            "--steps=4",
        )
        == 0
    )
    _, body = rows(runs)
    assert [row[0] for row in body] == ["1e-3", "1e38"] and "failed: not finite" in body[1][-1]
    assert (
        sweep("--optimizer.learning-rate=1e38", "--clip-norm=1e30", "--max-skipped=1", "--steps=4")
        == 3
    )


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("--seed=0,1 --optimizer.learning-rte=1", "did you mean --optimizer.learning-rate"),
        ("--seed=0,x", "--seed=x"),
        ("--steps=2,3,2", "same run"),
        ("--log-every=1,2", "same run"),
        ("--model.num-heads=2,3", "does not divide"),
        ("--seed=0,,1", "--grid"),
        ("--model.context-length=16,4000", "context of 4,000"),
    ],
)
def test_bad_options_are_refused_before_the_first_run(runs, capsys, grid, said):
    assert sweep(grid) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not runs.exists()


ROOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nby 3 GiB")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ROOM, "RESOURCE_EXHAUSTED: out of memory"),
        (BadBatch("step 3: bad"), "step 3: bad"),
        (RuntimeError("other"), "RuntimeError: other"),
    ],
)
def test_a_trial_that_cannot_be_trained_fails_alone(runs, monkeypatch, error, said):
    monkeypatch.setattr(loop, "train", lambda *_, **__: (_ for _ in ()).throw(error))
    assert sweep("--seed=0,1") == 3
    assert [row[-1] for row in rows(runs)[1]] == [f"failed: {said}"] * 2


@pytest.mark.parametrize(("given", "first"), [(None, "0"), ("", ""), ("3,5", "3")])
def test_a_run_sees_only_gpus_that_the_sweep_sees(runs, monkeypatch, capsys, given, first):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert sweeps.one_device(0)["CUDA_VISIBLE_DEVICES"] == first
    if given:
        assert sweep("--seed=0,1", "--parallel=3") == 2
        assert "CUDA_VISIBLE_DEVICES=3,5 has 2 devices" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_runs_at_a_time_are_a_number(runs, capsys, count):
    assert sweep("--seed=0,1", f"--parallel={count}") == 2
    assert (
        f"{count}: expected a whole number from 1 to " in capsys.readouterr().err
        and not runs.exists()
    )


def test_too_few_runs_for_the_law_are_refused_before_training(runs, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train", None)  # a call would fail
    words = ["tiny", "--sizes", "--model.d-model=16,32", "--steps", "2,3", *QUICK]
    assert cli.run(scaling.main, words) == 2
    assert "4 runs, and the law has 5 constants" in capsys.readouterr().err and not runs.exists()


@pytest.mark.thorough
def test_runs_in_processes_of_their_own(runs, capfd):
    """The same table as one after the other; one whose numbers stay bad fails alone."""
    grid, patience = "--optimizer.learning-rate=1e-3,1e-1,1e38", "--max-skipped=1"
    assert sweep(grid, patience, "--parallel=2") == 0
    _, body = rows(runs)
    assert "not finite" in body[2][-1]
    for path in runs.glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert sweep(grid, patience) == 0
    assert [row[:-1] for row in rows(runs)[1]] == [row[:-1] for row in body]
    assert sweeps.one_device(1)["CUDA_VISIBLE_DEVICES"] == "1"
