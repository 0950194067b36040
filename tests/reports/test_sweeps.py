"""Sweeps: every error of one trial is one failed row; the rest goes on, and the table says which
failed and why."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from etils import epath

from jaxformer import cli, config
from jaxformer.cli import sweeps
from jaxformer.cli.trials import combinations
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.runs.reporter import NonFinite
from jaxformer.runs.run_folder import run_folder
from jaxformer.runs.signals import Interrupted
from jaxformer.training import Checkpoints, Experiment
from tests.tiny import furnish

MODEL = ModelConfig(vocab_size=17, num_layers=1, d_model=8, num_heads=1, context_length=16)


def trial(seed, **fields):
    experiment = Experiment(name="a", model=MODEL, data=Reverse(), seed=seed, steps=1, **fields)
    return sweeps.Trial({"seed": str(seed)}, config.Source("", f"file-{seed}.py"), experiment)


def attempts(folder, train, count=3):
    return [sweeps.attempt(train, folder, trial(seed), f"{seed}/{count}") for seed in range(count)]


def cells(table):
    """The cells of each row of a Markdown table, by the bars that are not escaped."""
    lines = table.replace("\\|", "\0").splitlines()
    return [
        [cell.strip().replace("\0", "|") for cell in line.strip("| ").split("|")] for line in lines
    ]


ERRORS = [
    (ConfigError("refused"), "refused"),
    (NonFinite("not finite", 3), "not finite"),
    (TypeError("add got incompatible shapes"), "TypeError: add got incompatible shapes"),
    (KeyError("labels"), "KeyError: 'labels'"),
    (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    (MemoryError(), "MemoryError"),
    (SystemExit(0), "SystemExit: 0"),
    (ConfigError(""), "ConfigError"),
]


@pytest.mark.parametrize(
    ("error", "said"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS]
)
@pytest.mark.report(
    "hydra-ecosystem/hydra#1513",
    "hydra-ecosystem/hydra#2551",
    "clearml/clearml#886",
    right="whatever ends one trial is a row that says why; the others go on",
    hit="an error that was not foreseen ended the sweep with a traceback, without a table",
    listed="third 20",
)
def test_any_error_of_one_trial_is_one_row(tmp_path, error, said):
    def train(one):
        if one.options["seed"] == "1":
            raise error
        return {"loss": 1.0 + int(one.options["seed"])}

    ended = attempts(tmp_path, train)
    assert [one.problem for one in ended] == ["", f"failed: {said}", ""]
    rows = cells(sweeps.table(sorted(ended, key=lambda one: one.rank), tmp_path))
    assert [row[0] for row in rows[2:]] == ["0", "2", "1"] and rows[-1][-1] == f"failed: {said}"


@pytest.mark.report(
    "wandb/wandb#2031",
    right="a sweep that was stopped is no failed trial: it ends, and the same command goes on",
)
def test_signals_still_stop_a_sweep(tmp_path):
    for error in (Interrupted(signal.SIGTERM, 3), KeyboardInterrupt()):

        def train(one, error=error):
            raise error

        with pytest.raises(type(error)):
            attempts(tmp_path, train)


@pytest.mark.thorough
@pytest.mark.report(
    "ray-project/ray#9364",
    "ray-project/ray#31276",
    "keras-team/keras-tuner#817",
    right="a trial without a finite score is never the best one, in whichever order they ran",
)
def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    nan, inf = math.nan, math.inf
    for best, scores in {
        "loss": [nan, 2.0, inf, None, 1.0],
        "-loss": [-inf, 1.0, nan, "text", 2.0],
    }.items():
        some = [
            trial(seed, checkpoints=Checkpoints(best=best))._replace(scores={"loss": x})
            for seed, x in enumerate(scores)
        ]
        for turned in (some, some[::-1]):
            ordered = sorted(turned, key=lambda one: one.rank)
            assert [one.options["seed"] for one in ordered[:2]] == ["4", "1"]
            assert sweeps.figure(ordered, epath.Path(tmp_path / "scores.png"))
            assert len(cells(sweeps.table(ordered, tmp_path))) == 7


@pytest.mark.report(
    "ray-project/ray#29013",
    right=(
        "a run that finished earlier without the score that counts now is a row that says so; "
        "the table is written"
    ),
    hit="the sweep ended with an error behind all training, before its table",
    listed="third 20",
)
def test_a_finished_run_without_the_score_is_one_row(tmp_path):
    def train(one):
        return {"loss": 1.0, "bleu": 3.0}

    old, new = (trial(seed, checkpoints=Checkpoints(best="-bleu")) for seed in range(2))
    result = run_folder(old.experiment, tmp_path).result
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"validation": {"loss": 2.0}}))
    ended = sorted(
        (sweeps.attempt(train, tmp_path, one, "") for one in (old, new)), key=lambda one: one.rank
    )
    assert [one.options["seed"] for one in ended] == ["1", "0"]
    assert "checkpoints.best='-bleu': an evaluation here gives loss" in ended[1].problem
    rows = cells(sweeps.table(ended, tmp_path))
    assert rows[0] == ["seed", "loss", "bleu", "run"] and rows[3][:3] == ["0", "2", ""]


@pytest.mark.report(
    "microsoft/markitdown#2035",
    "lzakharov/csv2md#33",
    right=(
        "every row of the table has as many cells as its head, whatever stands in an error or an "
        "option"
    ),
    hit="a reason of two lines broke the row",
)
def test_a_reason_of_several_lines_stays_in_its_cell(tmp_path):
    options = {"mask": "causal() | full()", "text": "a\nb"}
    one = trial(0)._replace(options=options, problem="failed: a | b\nsecond\r\nthird")
    rows = cells(
        sweeps.table([one, one._replace(problem="", scores={"loss": 1.0, "note": "x"})], tmp_path)
    )
    assert {len(row) for row in rows} == {4}
    assert rows[2] == ["causal() | full()", "a b", "", "failed: a | b second third"]


@pytest.mark.report(
    "ray-project/ray#9826",
    right="a score that is a text in one trial and a number in another is shown, not an error",
    hit="the table failed with a ValueError where the text came first",
    listed="third 20",
)
def test_a_score_of_two_kinds_is_shown(tmp_path):
    for first, second in (("none", 3.0), (3.0, "none"), (None, 3.0)):
        some = [
            trial(seed)._replace(scores={"loss": 1.0, "bleu": x})
            for seed, x in enumerate((first, second))
        ]
        rows = cells(sweeps.table(some, tmp_path))
        assert [row[2] for row in rows[2:]] == [
            str(first) if first != 3.0 else "3",
            str(second) if second != 3.0 else "3",
        ]


@pytest.mark.report(
    "dolthub/doltlite#2999",
    right="a process that was killed is a row that names the signal, and does not end the sweep",
    hit="the row said 'failed: no message'; one that got a SIGTERM ended the whole sweep",
)
def test_a_killed_process_is_one_row(tmp_path, monkeypatch, capfd):
    real = subprocess.Popen
    codes = {
        "file-0.py": "import os; os.kill(os.getpid(), 9)",
        "file-1.py": (
            "import sys; print('jaxformer: stopped by SIGTERM after step 3', file=sys.stderr); "
            "sys.exit(143)"
        ),
        "file-2.py": "import sys; sys.exit(7)",
    }

    def popen(words, **more):
        code = next(code for name, code in codes.items() if name in words)
        return real([sys.executable, "-S", "-c", code], **more)

    monkeypatch.setattr(sweeps.subprocess, "Popen", popen)
    ended = sweeps.in_processes(
        [trial(seed) for seed in range(3)], ["1/3", "2/3", "3/3"], tmp_path, 3
    )
    assert "killed by SIGKILL" in ended[0].problem and "memory" in ended[0].problem
    assert "stopped by SIGTERM after step 3" in ended[1].problem
    assert "exit code 7, without a message" in ended[2].problem


@pytest.mark.report(
    "hydra-ecosystem/hydra#3227",
    "hydra-ecosystem/hydra#2284",
    right="a trial that fails says so at once, and each one with its own traceback",
    hit=(
        "with --parallel only the last line of a failed trial was kept; its traceback was thrown "
        "away"
    ),
)
def test_each_failed_trial_leaves_its_traceback(tmp_path, monkeypatch, capfd):
    real = subprocess.Popen

    def popen(words, **more):
        code = f"def own(): raise TypeError('of {words[4]}')\nown()"
        return real([sys.executable, "-S", "-c", code], **more)

    monkeypatch.setattr(sweeps.subprocess, "Popen", popen)
    sweeps.in_processes([trial(seed) for seed in range(2)], ["1/2", "2/2"], tmp_path, 2)

    def train(one):
        raise TypeError(f"here {one.options['seed']}")

    attempts(tmp_path, train, 2)
    out, err = capfd.readouterr()
    assert err.count("Traceback") == 4 and all(
        f"of file-{n}.py" in err and f"here {n}" in err for n in range(2)
    )
    assert out.count("failed: TypeError: ") == 4


GRIDS = {
    "--a=1,2 --b=x,y": 4,
    "--m='causal() & window(3)',full()": 2,
    '--p="a,b",c': 2,
    "--hca=mlx5_0:1": 1,
    "--a=f(',')": 1,
    '--a={"x":1,"y":2},{}': 2,
    "--a=1,,2": ConfigError,
    "--a=1 --a=2": ConfigError,
    "--a=(1,2": ConfigError,
    "": ConfigError,
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.report(
    "NVIDIA/cloudai#557",
    right="a comma inside brackets or quotes separates nothing; a grid that is none is refused",
    listed="third 13",
)
def test_grids(grid):
    if GRIDS[grid] is ConfigError:
        with pytest.raises(ConfigError, match="--grid"):
            combinations(grid)
    else:
        assert len(combinations(grid)) == GRIDS[grid]


@pytest.mark.report(
    "python/cpython#131175",
    "brentyi/tyro#45",
    right="an option of the experiment is never taken for a longer option of the sweep",
    hit="--run or --par was read as --runs or --parallel, in silence",
)
def test_an_abbreviated_option_is_no_option_of_the_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(furnish(tmp_path))
    for word in ("--run=elsewhere", "--par=2"):
        assert cli.run(sweeps.main, ["tiny", "--grid", "--seed=0,1", word]) == 2
        err = capsys.readouterr().err
        assert f"{word.partition('=')[0]}: no such option" in err and err.count("\n") == 1
    assert not os.path.exists("elsewhere") and not os.path.exists("runs")


@pytest.mark.report(
    "microsoft/nni#1474",
    "syne-tune/syne-tune#560",
    right="two spellings of one value are one run: refused before anything is trained",
)
def test_two_spellings_of_one_value_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(furnish(tmp_path))
    for grid in ("--optimizer.learning-rate=1e-3,0.001", "--seed=0,0x0"):
        assert cli.run(sweeps.main, ["tiny", "--grid", grid]) == 2
        assert "two combinations are the same run" in capsys.readouterr().err


@pytest.mark.report(
    "ray-project/ray#16891",
    "ray-project/ray#8647",
    "llm-d/llm-d-benchmark#250",
    right=(
        "called again, finished trials are not trained again and failed ones are tried again; no "
        "table is lost"
    ),
    hit="on a full disk the table was not even printed: the error came instead of it",
)
def test_a_second_call_tries_what_failed(tmp_path, monkeypatch, capsys):
    trained = []

    def train(one):
        trained.append(one.options["seed"])
        if one.options["seed"] == "1" and trained.count("1") == 1:
            raise TypeError("the first time")
        result = run_folder(one.experiment, tmp_path).result
        result.parent.mkdir(parents=True)
        result.write_text(json.dumps({"validation": {"loss": 1.0}}))
        return {"loss": 1.0}

    assert [bool(one.problem) for one in attempts(tmp_path, train)] == [False, True, False]
    assert [bool(one.problem) for one in attempts(tmp_path, train)] == [False, False, False]
    assert trained == ["0", "1", "2", "1"]

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(config, "write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        sweeps.sweep([trial(seed) for seed in range(3)], tmp_path)
    assert [row[:2] for row in cells(capsys.readouterr().out)[-3:]] == [
        ["0", "1"],
        ["1", "1"],
        ["2", "1"],
    ]
