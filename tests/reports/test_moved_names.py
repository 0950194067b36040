"""Names that a library moves: what users of other projects reported, tried on ours."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer
from jaxformer import cli, families, models
from jaxformer.models import ModelConfig

OLD = """
from jaxformer import ops
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig, mixers
from jaxformer.models.mixers.variants import gated
from jaxformer.training import Checkpoints, Experiment, TokenCrossEntropy
from jaxformer.training.objectives import model_inputs


def scaled(config):
    def prepare(params, heads, context):
        return heads._replace(query=ops.elu_plus_one(heads.query))

    return mixers.attention(config, prepare=prepare)


layers = (scaled, mixers.Linear(), gated)
model = ModelConfig(
    vocab_size=13, num_layers=3, d_model=8, num_heads=2, context_length=8, mixer=layers
)
experiment = Experiment(
    name="old",
    model=model,
    data=Reverse(vocab_size=12, length=4),
    objective=TokenCrossEntropy(z_loss=1e-4),
    steps=4,
    batch_size=4,
    eval_every=4,
    checkpoints=Checkpoints(every=2),
)
"""


@pytest.mark.thorough
@pytest.mark.report(
    "ray-project/ray#47426", "ecmwf/anemoi-core#715",
    right="a run whose file imports names that moved since goes on, is opened and evaluated",
    hit="an experiment's function that used `ops` or `mixers` ended in a traceback after the move",
)  # fmt: skip
def test_a_run_whose_imports_moved_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(OLD)
    with monkeypatch.context() as patch:
        patch.setattr("jaxformer.runs.loop.finish", _killed)
        with pytest.raises(Killed):
            cli.main(["train", "old.py"])
    assert cli.main(["train", "old.py"]) == 0
    (folder,) = (tmp_path / "runs").glob("old-*")
    run = jaxformer.open_run(folder)
    assert run.experiment.model.mixer[1].__class__.__module__ == "jaxformer.zoo.linear_attention"
    assert np.isfinite(run.evaluate()["loss"])
    assert cli.main(["evaluate", str(folder)]) == 0


class Killed(BaseException):
    pass


def _killed(*_):
    raise Killed


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#45058",
    right=(
        "a folder whose config.json has another model_type is read as the family that the user "
        "names"
    ),
)
def test_the_family_may_be_named(tmp_path):
    config = ModelConfig(11, 1, 8, 2, context_length=4)
    params = models.init(config, jax.random.key(0))
    gpt2 = families.FAMILIES["gpt2"]
    families.save(
        tmp_path / "other", families.Checkpoint(config, params, model_type="tarsier"), family=gpt2
    )
    found = families.load(tmp_path / "other", family=gpt2)
    assert families.differences(found.config, config) == {}
    jax.tree.map(np.testing.assert_array_equal, found.params, params)


@pytest.mark.thorough
@pytest.mark.report(
    "mjpost/sacrebleu#12", "heartbeatsjp/check_log_ng#34",
    right="help is printed in an ASCII locale, whatever letters it has",
    hit="a path with other letters was a traceback in an ASCII locale without Python's coercion",
)  # fmt: skip
def test_help_in_an_ascii_locale(tmp_path):
    folder = tmp_path / "é火"
    folder.mkdir()
    (folder / "mine.py").write_text(OLD.replace('name="old"', 'name="é"'), encoding="utf-8")
    ascii_locale = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "jaxformer", "train", str(folder / "mine.py"), "--help"]
    done = subprocess.run(command, env=os.environ | ascii_locale, capture_output=True)
    assert done.returncode == 0 and "é" in done.stdout.decode(), done.stderr
