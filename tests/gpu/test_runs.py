"""Runs on a GPU: the same bits in every process, after a kill too, and on a mesh of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.joints.harness import leaves, run_of

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
# on a GPU, sums of scattered rows and cuDNN's backward pass have no fixed order of their own accord
DETERMINISTIC = (
    {"XLA_FLAGS": "--xla_gpu_exclude_nondeterministic_ops=true"}
    if jax.default_backend() == "gpu"
    else {}
)
WIDTH = 256 if jax.default_backend() == "gpu" else 32
EXPERIMENT = f"""
from jaxformer.data.sources import Stdlib
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.training import Checkpoints, Experiment
experiment = Experiment(
    name="tiny",
    model=ModelConfig(
        vocab_size=256,
        num_layers=4,
        d_model={WIDTH},
        num_heads=4,
        context_length=128,
        dropout_rate=0.1,
        positions=Rope(),
    ),
    data=Stdlib(),
    steps=24,
    batch_size=16,
    log_every=1,
    eval_every=24,
    eval_examples=32,
    final_examples=32,
    checkpoints=Checkpoints(every=8),
)
"""
# `train` of the joints' harness, in a process of its own
TRAIN = """
import json, sys
from pathlib import Path
from tests.joints.harness import train
folder, file, options, stop = json.loads(sys.argv[1])
train(Path(folder), {"tiny": file}, *options, stop=stop)
"""


def start(folder: Path, *options: str, stop: dict[str, int] | None = None) -> subprocess.Popen:
    """A run by the command, in a process that has no program of an earlier one: it chooses its
    algorithms anew."""
    # packages may stand on the path alone
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    added = {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": path}
    variables = os.environ | added | DETERMINISTIC
    command = [sys.executable, "-c", TRAIN, json.dumps([str(folder), EXPERIMENT, options, stop])]
    return subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(*runs: subprocess.Popen) -> None:
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors[-3000:]


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_killed_run_ends_with_the_bits_of_one_that_went_on(tmp_path, precision):
    option = f"--precision={precision}"
    finish(start(tmp_path / "whole", option), start(tmp_path / "killed", option, stop={"tiny": 13}))
    finish(start(tmp_path / "killed", option))
    whole, killed = (leaves(run_of(tmp_path / name, "tiny")) for name in ("whole", "killed"))
    assert different(whole, killed) == []


def test_fsdp_over_one_device_trains_the_same(tmp_path):
    option = "--precision=bfloat16"
    finish(start(tmp_path / "plain", option), start(tmp_path / "fsdp", option, "--mesh.fsdp=1"))
    assert different(*(leaves(run_of(tmp_path / name, "tiny")) for name in ("plain", "fsdp"))) == []
