"""Each objective that draws at random, or reads more than tokens, is stopped and resumed to the same bits."""

import shutil
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


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_in_the_middle_ends_as_it_did(name, tmp_path, capsys):
    """Without its later checkpoints it is that of a process killed before them; kills themselves are tested elsewhere."""
    model, objective, others = CASES[name]
    experiment = Experiment(
        name="resumed", model=model, objective=objective, steps=5, batch_size=8, log_every=1, eval_every=5,
        data=Random(tuple(others.items()), isinstance(objective, SpanCrossEntropy | ClassCrossEntropy)),
        checkpoints=Checkpoints(every=2, keep_latest=3),
    )  # fmt: skip
    whole = loop.train(experiment, tmp_path)
    record, state = (whole.folder / "metrics.jsonl").read_text(), saved(whole.folder, experiment)
    for step in ("4", "5"):
        shutil.rmtree(whole.folder / "checkpoints" / step)
    capsys.readouterr()
    resumed = loop.train(experiment, tmp_path)
    assert "resuming after step 2" in capsys.readouterr().out
    assert (resumed.folder / "metrics.jsonl").read_text() == record and record.count("\n") >= 5
    assert whole.validation == resumed.validation and np.isfinite(whole.validation["loss"])
    assert all(np.array_equal(one, other) for one, other in zip(state, saved(resumed.folder, experiment), strict=True))


def saved(folder, experiment):
    """The trained numbers of the last checkpoint."""
    from jaxformer import models, params
    from jaxformer.training import checkpoint

    step, tree, _ = checkpoint.restore_params(folder / "checkpoints", params.abstract(models.spec(experiment.model)))
    assert step == 5
    return jax.tree.leaves(jax.device_get(tree))
