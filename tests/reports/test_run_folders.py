"""Run folders, records and loggers, tried against what users of TensorBoard, wandb, Lightning and
others reported."""

import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from etils import epath

from jaxformer import config
from jaxformer.cli import runs as commands
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.runs import checkpoint, lock, loop
from jaxformer.runs.metrics import Record, open_loggers, read_records
from jaxformer.runs.reporter import Console, Reporter
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder, run_folder
from jaxformer.runs.signals import Interrupted
from jaxformer.training import Checkpoints, Experiment

MODEL = ModelConfig(vocab_size=12, num_layers=1, d_model=8, num_heads=1, context_length=8)
DATA = Reverse(vocab_size=11, length=4, examples=64, validation_examples=8)
TINY = Experiment(name="tiny", model=MODEL, data=DATA, steps=9, batch_size=4, log_every=2)
ODD = {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "rate": 1e-3}


def refuse(name):
    raise ValueError(f"{name} is no JSON")


def strict(text):
    return json.loads(text, parse_constant=refuse)


@pytest.mark.report(
    "ludwig-ai/ludwig#4016", "netket/netket#441", "chainer/chainerui#16", listed="second 03",
    right="a record is JSON that every reader takes, and ours reads the number again",
    hit="metrics.jsonl had NaN and Infinity for each skipped step that was logged",
)  # fmt: skip
def test_a_record_is_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = Record(path)
    record.write(3, ODD)
    record.close()
    assert strict(path.read_text()) == {
        "step": 3,
        "loss": "NaN",
        "grad_norm": "Infinity",
        "low": "-Infinity",
        "rate": 1e-3,
    }
    (line,) = read_records(path)
    assert math.isnan(line.pop("loss")) and line == {
        "step": 3,
        "grad_norm": math.inf,
        "low": -math.inf,
        "rate": 1e-3,
    }
    before = path.read_bytes()
    again = Record(path)
    again.rewind(9)
    again.close()
    assert path.read_bytes() == before
    # of an older version; damaged
    path.write_text('{"step": 3, "loss": NaN}\n{"step": 4, "loss": "no number"}\n')
    assert [line["step"] for line in read_records(path)] == [3]


@pytest.mark.report(
    "ludwig-ai/ludwig#4016",
    listed="second 03",
    right="results and what `evaluate` prints are strict JSON, too",
    hit="result.json and stdout had NaN",
)
def test_results_are_strict_json(tmp_path, capsys, monkeypatch):
    folder = RunFolder(epath.Path(tmp_path))
    nested = {
        "validation": {**ODD, "signature": "NaN-free"},
        "rows": [(math.nan, 1), None, True],
        "name": "Infinite",
    }
    config.write_atomically(folder.result, config.to_json(nested, indent=2))
    found = strict(folder.result.read_text())
    assert found["rows"] == [["NaN", 1], None, True] and found["name"] == "Infinite"
    scores = folder.last_scores()
    assert (
        math.isnan(scores["loss"])
        and scores["grad_norm"] == math.inf
        and scores["signature"] == "NaN-free"
    )
    run = SimpleNamespace(folder=folder, evaluate=lambda int8, stored: ODD)
    monkeypatch.setattr(commands, "run_of", lambda options, overrides: run)
    assert commands.evaluate(["tiny"]) == 0
    assert strict(capsys.readouterr().out)["loss"] == "NaN"


def events(folder):
    """(step of each value of "loss", steps of the marks that purge), of all files in the order of
    their names."""
    from tensorboardX.proto import event_pb2

    values, marks = [], []
    for file in sorted((folder / "tensorboard").iterdir()):
        raw, at = file.read_bytes(), 0
        while at < len(raw):
            (size,) = struct.unpack("<Q", raw[at : at + 8])
            event = event_pb2.Event()
            event.ParseFromString(raw[at + 12 : at + 12 + size])
            at += 16 + size
            values += [(len(marks), event.step, value.tag) for value in event.summary.value]
            marks += [event.step] * event.HasField("session_log")
    return values, marks


def start(folder, first, last, names=("tensorboard",)):
    """One start of a run, which logs each step and evaluates at each fourth one; it goes on after
    `first` steps."""
    record = Record(folder / "metrics.jsonl")
    record.rewind(first)
    record.loggers = open_loggers(names, folder, "tiny-0", {})
    for step in range(first, last):
        record.write(step, {"loss": 1.0})
        if (step + 1) % 4 == 0:
            record.write(step + 1, {"validation_loss": 2.0})
    record.close()


@pytest.mark.report(
    "lanpa/tensorboardX#185",
    "tensorflow/tensorboard#3732",
    "fvisin/main_loop_tf#22",
    listed="second 34",
    right="event files forget the steps that are done again, as the record does",
    hit="after a kill the curves had both",
)
def test_steps_that_are_done_again_replace_the_first_ones(tmp_path):
    start(tmp_path, 0, 7)
    start(tmp_path, 4, 10)
    values, marks = events(tmp_path)
    assert marks == [4]
    # what TensorBoard keeps: before the mark only what is of earlier steps
    kept = sorted((step, tag) for after, step, tag in values if after == 1 or step < marks[0])
    recorded = read_records(tmp_path / "metrics.jsonl")
    assert kept == sorted((line["step"], tag) for line in recorded for tag in line if tag != "step")
    assert (4, "validation_loss") in kept  # of a step that is not done again


@pytest.mark.report(
    "wandb/wandb#5860",
    listed="second 34",
    right="two starts within a second have files of their own",
    hit="the second start overwrote the first one's event file",
)
def test_two_starts_within_a_second_have_two_files(tmp_path, monkeypatch):
    import tensorboardX

    monkeypatch.setattr(tensorboardX.event_file_writer.time, "time", lambda: 1.7e9)
    for first in (0, 0, 2):
        start(tmp_path, first, first + 2)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3
    assert events(tmp_path)[1] == [0, 2]


@pytest.mark.report(
    "facebookresearch/ParlAI#2106",
    "Lightning-AI/pytorch-lightning#13163",
    "catalyst-team/catalyst#970",
    right="a run that goes on logs its own steps, not those of the start",
)
def test_a_start_goes_on_with_the_steps_of_the_run(tmp_path):
    start(tmp_path, 0, 4)
    start(tmp_path, 4, 6)
    assert [step for _, step, tag in events(tmp_path)[0] if tag == "loss"] == [0, 1, 2, 3, 4, 5]


class Service:
    """As much of wandb as a logger meets: its counter never goes back."""

    def __init__(self):
        self.started, self.rows, self.refused, self.axes = [], [], [], {}

    def init(self, **options):
        self.started.append(options)
        return self

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        counter = len(self.rows) if step is None else step
        (self.rows if counter >= len(self.rows) else self.refused).append(values)

    def finish(self):
        pass


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    return service


@pytest.mark.report(
    "allenai/tango#152",
    "wandb/wandb#4482",
    "wandb/wandb#2234",
    right="steps that are done again reach the service",
    hit="wandb refused every step up to the one that the first start had reached",
)
def test_the_service_takes_steps_that_are_done_again(tmp_path, service):
    for first, last in ((0, 7), (4, 10)):
        start(tmp_path, first, last, ("wandb",))
    assert not service.refused and service.axes["*"] == "step"
    steps = [row["step"] for row in service.rows if "loss" in row]
    assert steps == [*range(7), *range(4, 10)]


@pytest.mark.report(
    "axolotl-ai-cloud/axolotl#824",
    "ray-project/ray#29916",
    right="the same experiment in another folder is another run",
    hit="two folders of one experiment were one run of the service: their curves were mixed",
)
def test_two_folders_are_two_runs_of_the_service(tmp_path, service):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        start(tmp_path / name, 0, 2, ("wandb",))
    shutil.rmtree(tmp_path / "a")  # and trained anew
    (tmp_path / "a").mkdir()
    start(tmp_path / "a", 0, 2, ("wandb",))
    assert len({options["id"] for options in service.started}) == 3
    assert {options["name"] for options in service.started} == {"tiny-0"}


@pytest.mark.report(
    "KempnerInstitute/KempnerForge#20",
    "huggingface/finetrainers#188",
    right="a resumed run is the same run of the service",
)
def test_a_run_that_goes_on_is_the_same_run_of_the_service(tmp_path, service):
    for first in (0, 3, 0):
        start(tmp_path, first, 5, ("wandb",))
    assert len({options["id"] for options in service.started}) == 1
    old = tmp_path / "old"  # of a version that knew a run by its name alone
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    start(old, 1, 2, ("wandb",))
    assert service.started[-1]["id"] == "tiny-0"


@pytest.mark.report(
    "VMarsocci/pangaea-bench#104", right="runs that differ in a number have folders of their own"
)
def test_runs_that_differ_have_two_folders(tmp_path):
    others = [
        replace(TINY, seed=1),
        replace(TINY, steps=10),
        replace(TINY, model=replace(MODEL, num_layers=2)),
    ]
    assert len({run_folder(one, tmp_path).path for one in (TINY, *others)}) == 4
    same = [
        replace(TINY, log_every=3),
        replace(TINY, eval_examples=4),
        replace(TINY, checkpoints=Checkpoints(best="-x")),
    ]
    assert {run_folder(one, tmp_path).path for one in same} == {run_folder(TINY, tmp_path).path}


@pytest.mark.report(
    "NVIDIA-NeMo/Speech#12290", right="a run that goes on logs the steps that it would have logged"
)
def test_logged_steps_do_not_depend_on_the_start():
    values = {"loss": 1.0, "grad_norm": 1.0, "tokens": 8.0, "learning_rate": 0.1, "skipped": 0}

    def logged(first):
        record = []
        reporter = Reporter(
            lambda step, _: record.append(step),
            Console(20, heard=False),
            every=5,
            last=18,
            max_skipped=3,
        )
        for step in range(first, 19):
            reporter.later(step, {name: jnp.asarray(value) for name, value in values.items()})
        reporter.now()
        return record

    for first in (0, 3, 7, 15):
        assert logged(first) == [step for step in (0, 5, 10, 15, 18) if step >= first]


@pytest.mark.report(
    "genomicsxai/alphagenome-pytorch#19", right="no step is twice in the record after a resume"
)
def test_a_record_has_each_step_once(tmp_path):
    for first, last in ((0, 9), (4, 6), (5, 12), (0, 3), (2, 8)):
        start(tmp_path, first, last, ())
        lines = read_records(tmp_path / "metrics.jsonl")
        assert [line["step"] for line in lines if "loss" in line] == list(range(last))
        assert [line["step"] for line in lines if "validation_loss" in line] == list(
            range(4, last + 1, 4)
        )


@pytest.mark.report(
    "ChrisCummins/clgen#116",
    "ARCC-RACE/deepracer-for-dummies#40",
    right="the lock of a dead process is none",
)
def test_a_lock_ends_with_its_process(tmp_path):
    folder = epath.Path(tmp_path / "checkpoints")
    code = (
        "import fcntl, os, sys\n"
        "file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX); print('held', "
        "flush=True); sys.stdin.read()"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code, f"{folder}.lock"], **pipes) as process:
        process.stdout.readline()
        with pytest.raises(ConfigError, match="another trainer holds this run"):
            lock.take(folder, print)
        process.kill()
        process.wait()
        lock.take(folder, print).close()


def stopped_in_an_evaluation(evaluation):
    """A metric during which the machine is taken away, once."""
    if not os.environ.get("STOPPED"):
        os.environ["STOPPED"] = "yes"
        os.kill(os.getpid(), signal.SIGTERM)
    return {}


@pytest.mark.thorough
@pytest.mark.report(
    "goodfire-ai/spd#677", "goodfire-ai/spd#741", right="a signal during an evaluation is not lost"
)
def test_a_signal_in_an_evaluation_saves_and_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("STOPPED", "")
    experiment = replace(
        TINY, eval_every=4, metrics=(stopped_in_an_evaluation,), checkpoints=Checkpoints(every=100)
    )
    with pytest.raises(Interrupted, match="after step 5, saved"):
        loop.train(experiment, tmp_path)
    folder = run_folder(experiment, tmp_path)
    assert 5 in checkpoint.steps(folder.checkpoints)


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#3800",
    listed="third 28",
    right="a run that its mesh does not fit says what it goes on with",
    hit="a line of INFO, which nobody sees: a model for eight devices went on one",
)
def test_a_run_on_fewer_devices_warns(tmp_path, caplog):
    run = Run(RunFolder(epath.Path(tmp_path)), replace(TINY, mesh=Mesh(data=64), batch_size=64))
    with caplog.at_level("WARNING", "jaxformer"):
        assert run.mesh is None
    assert "one device, and its memory alone" in caplog.text and "64" in caplog.text


@pytest.mark.report(
    "Ericsson/codechecker#3171", right="a score that is null is shown as what it is",
    hit="`runs` and `compare` ended in a TypeError where a result.json held a null",
)  # fmt: skip
def test_a_score_that_is_null_is_shown(tmp_path):
    folder = RunFolder(epath.Path(tmp_path))
    scores = {"loss": 1.25, "bleu": None, "scored": "all 8 examples"}
    folder.result.write_text(json.dumps({"validation": scores}))
    assert "validation_loss 1.25, validation_bleu None" in commands._scores(folder)
