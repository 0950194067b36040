"""Each objective that draws at random, or reads more than tokens, is stopped and resumed to the
same bits."""

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from jaxformer import params
from jaxformer.data.sources import Dataset
from jaxformer.masks import causal, full, prefix
from jaxformer.models import (
    Classification,
    EncoderDecoder,
    LanguageModel,
    ModelConfig,
    TokenClassification,
)
from jaxformer.objectives import Distillation, HiddenStates, MultiToken, Preference, SimPO
from jaxformer.runs import loop
from jaxformer.training import (
    Checkpoints,
    ClassCrossEntropy,
    Experiment,
    MaskedTokens,
    NextSentence,
    PrefixLanguageModel,
    Reference,
    SpanCorruption,
    SpanCrossEntropy,
)
from jaxformer.zoo.performer import Performer
from jaxformer.zoo.reformer import Reformer

STACK = ModelConfig(40, 1, 8, 2, context_length=16, masks=(full(),), dropout_rate=0.1)
PAIR = EncoderDecoder(
    replace(STACK, heads=(), context_length=20), replace(STACK, masks=(causal(),))
)
TEACHER = replace(STACK, num_layers=2, d_model=12, masks=(causal(),))
REFERENCES = {"distillation": {"teacher": Reference(params.init, TEACHER)}}
CASES = {
    "masked": (STACK, MaskedTokens(30), {}),
    "next sentence": (
        replace(STACK, heads=(LanguageModel(), Classification(2, name="next_sentence"))),
        NextSentence(MaskedTokens(30)),
        {"labels": ((), 2)},
    ),
    "prefix": (
        replace(STACK, masks=(causal() | prefix(4),)),
        PrefixLanguageModel(4),
        {"labels": ((16,), 30)},
    ),
    "corrupted spans": (PAIR, SpanCorruption(39, 30), {}),
    "answers": (
        replace(STACK, heads=(TokenClassification(2),)),
        SpanCrossEntropy(),
        {"labels": ((2,), 16), "passage": ((16,), (1, 2))},
    ),
    "classes": (
        replace(STACK, heads=(Classification(3),)),
        ClassCrossEntropy(),
        {"labels": ((), 3)},
    ),
    "preferences": (
        replace(STACK, masks=(causal(),)),
        Preference(SimPO(), reference=None),
        {"tokens": ((2, 16), 30), "labels": ((2, 16), 30), "answers": ((2, 16), 2)},
    ),
    "distillation": (
        replace(STACK, masks=(causal(),)),
        Distillation(
            hidden=HiddenStates("layers/0/residual", "layers/1/residual"), teacher=TEACHER
        ),
        {"labels": ((16,), 30)},
    ),
    "several tokens": (
        replace(STACK, masks=(causal(),)),
        MultiToken(modules=2),
        {"labels": ((16,), 30)},
    ),
    "drawn constants": (
        replace(
            STACK,
            heads=(Classification(3),),
            mixer=(Performer(features=8), Reformer(chunk=4)),
            num_layers=2,
        ),
        ClassCrossEntropy(),
        {"labels": ((), 3)},
    ),
}


@dataclass(frozen=True)
class Random:
    """Random tokens, and other arrays by name: (shape, below which number, or between which)."""

    others: tuple
    of_rows: bool  # weights are of rows, not of tokens

    def open(self, model):
        return Dataset(Rows(self, 0, 40), Rows(self, 1, 8), digest="random")


@dataclass(frozen=True)
class Rows:
    config: Random
    split: int
    count: int

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng((self.split, index))
        row = {
            "tokens": rng.integers(0, 30, 16).astype(np.int32),
            "weights": np.ones(() if self.config.of_rows else 16, np.float32),
        }
        for name, (shape, limits) in self.config.others:
            row[name] = np.asarray(rng.integers(*np.atleast_1d(limits), size=shape), np.int32)
        return row


def experiment_of(name, steps, every):
    model, objective, others = CASES[name]
    return Experiment(
        name="resumed",
        model=model,
        objective=objective,
        references=REFERENCES.get(name, {}),
        steps=steps,
        batch_size=8,
        log_every=1,
        eval_every=steps,
        data=Random(
            tuple(others.items()),
            isinstance(objective, SpanCrossEntropy | ClassCrossEntropy | Preference),
        ),
        checkpoints=Checkpoints(every=every, keep_latest=3),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_in_the_middle_ends_as_it_did(name, tmp_path, capsys):
    """Without its later checkpoints it is that of a process killed before them."""
    experiment = experiment_of(name, 5, 2)
    whole = loop.train(experiment, tmp_path)
    record, state = (whole.folder / "metrics.jsonl").read_text(), saved(whole.folder, experiment)
    for step in ("4", "5"):
        shutil.rmtree(whole.folder / "checkpoints" / step)
    capsys.readouterr()
    resumed = loop.train(experiment, tmp_path)
    assert "resuming after step 2" in capsys.readouterr().out
    assert (resumed.folder / "metrics.jsonl").read_text() == record and record.count("\n") >= 5
    assert whole.validation == resumed.validation and np.isfinite(whole.validation["loss"])
    assert all(
        np.array_equal(one, other)
        for one, other in zip(state, saved(resumed.folder, experiment), strict=True)
    )


CHILD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("resumed", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["resumed"] = module
spec.loader.exec_module(module)
module.loop.train(module.experiment_of(sys.argv[2], 400, 20), sys.argv[3])
"""


@pytest.mark.fault
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_three_times_ends_as_it_did(name, tmp_path):
    """By SIGKILL, whatever it was doing then."""
    command = [sys.executable, "-c", CHILD, __file__, name]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    (whole,) = (tmp_path / "whole").glob("resumed-*")
    rng = np.random.default_rng(0)
    for part in range(1, 4):
        process = subprocess.Popen(
            [*command, str(tmp_path / "killed")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None:
            found = [
                file.read_text().count("\n")
                for file in (tmp_path / "killed").glob("resumed-*/metrics.jsonl")
            ]
            if found and found[0] > 100 * part:
                time.sleep(rng.uniform(0, 0.2))
                process.kill()
                process.wait()
        assert process.returncode == -signal.SIGKILL
    subprocess.run([*command, str(tmp_path / "killed")], check=True, capture_output=True)
    (killed,) = (tmp_path / "killed").glob("resumed-*")
    assert (killed / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    numbers = [saved(folder, experiment_of(name, 400, 20), 400) for folder in (killed, whole)]
    assert all(np.array_equal(one, other) for one, other in zip(*numbers, strict=True))


def saved(folder, experiment, last=5):
    """The trained numbers of the last checkpoint, the objective's own among them."""
    from jaxformer.runs import checkpoint_reader
    from jaxformer.training.recipe import build

    step, tree, _ = checkpoint_reader.restore_params(
        folder / "checkpoints", params.abstract(build(experiment).spec)
    )
    assert step == last
    return jax.tree.leaves(jax.device_get(tree))
