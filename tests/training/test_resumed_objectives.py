"""Each objective that draws at random, or reads more than tokens, is stopped and resumed to the same bits."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from jaxformer.data.sources import Dataset
from jaxformer.masks import causal, full, prefix
from jaxformer.models import Classification, EncoderDecoder, LanguageModel, ModelConfig, TokenClassification
from jaxformer.models.mixers import Performer, Reformer
from jaxformer.training import (
    Checkpoints,
    ClassCrossEntropy,
    Experiment,
    MaskedTokens,
    NextSentence,
    PrefixLanguageModel,
    SpanCorruption,
    SpanCrossEntropy,
    loop,
)  # fmt: skip
from jaxformer.training.metrics import Reporter

STACK = ModelConfig(40, 1, 8, 2, context_length=16, masks=(full(),), dropout_rate=0.1)
PAIR = EncoderDecoder(replace(STACK, heads=(), context_length=20), replace(STACK, masks=(causal(),)))
CASES = {
    "masked": (STACK, MaskedTokens(30), {}),
    "next sentence": (
        replace(STACK, heads=(LanguageModel(), Classification(2, name="next_sentence"))),
        NextSentence(MaskedTokens(30)), {"labels": ((), 2)},
    ),
    "prefix": (replace(STACK, masks=(causal() | prefix(4),)), PrefixLanguageModel(4), {"labels": ((16,), 30)}),
    "corrupted spans": (PAIR, SpanCorruption(39, 30), {}),
    "answers": (
        replace(STACK, heads=(TokenClassification(2),)), SpanCrossEntropy(), {"labels": ((2,), 16), "passage": ((16,), (1, 2))},
    ),
    "classes": (replace(STACK, heads=(Classification(3),)), ClassCrossEntropy(), {"labels": ((), 3)}),
    "drawn constants": (
        replace(STACK, heads=(Classification(3),), mixer=(Performer(features=8), Reformer(chunk=4)), num_layers=2),
        ClassCrossEntropy(), {"labels": ((), 3)},
    ),
}  # fmt: skip


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


class Stopped(BaseException):
    """Nothing in the library catches it, as nothing catches SIGKILL."""


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_ends_as_one_that_was_not(name, tmp_path, monkeypatch):
    model, objective, others = CASES[name]
    experiment = Experiment(
        name="undisturbed", model=model, objective=objective, steps=5, batch_size=8, log_every=1, eval_every=5,
        data=Random(tuple(others.items()), isinstance(objective, SpanCrossEntropy | ClassCrossEntropy)),
        checkpoints=Checkpoints(every=2),
    )  # fmt: skip
    whole = loop.train(experiment, tmp_path)
    later = Reporter.later

    def stop(self, step, metrics):
        if step == 3:
            raise Stopped
        later(self, step, metrics)

    stopped = replace(experiment, name="stopped")
    with pytest.raises(Stopped), monkeypatch.context() as patch:
        patch.setattr(Reporter, "later", stop)
        loop.train(stopped, tmp_path)
    resumed = loop.train(stopped, tmp_path)
    records = [(result.folder / "metrics.jsonl").read_text() for result in (whole, resumed)]
    assert records[0] == records[1] and records[0].count("\n") >= 5
    assert whole.validation == resumed.validation and np.isfinite(whole.validation["loss"])
    states = [saved(result.folder, experiment) for result in (whole, resumed)]
    assert all(np.array_equal(one, other) for one, other in zip(*states, strict=True))


def saved(folder, experiment):
    """The trained numbers of the last checkpoint."""
    from jaxformer import models, params
    from jaxformer.training import checkpoint

    step, tree, _ = checkpoint.restore_params(folder / "checkpoints", params.abstract(models.spec(experiment.model)))
    assert step == 5
    return jax.tree.leaves(jax.device_get(tree))
