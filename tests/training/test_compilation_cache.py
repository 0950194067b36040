"""The second start of an experiment compiles nothing that takes long: programs persist beside the runs."""

import subprocess
import sys

import pytest

EXPERIMENT = """
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig
from jaxformer.training import Experiment
experiment = Experiment(
    name="tiny", model=ModelConfig(vocab_size=17, num_layers=2, d_model=16, num_heads=2, context_length=16),
    data=Reverse(), steps=2, batch_size=4, eval_batches=1,
)
"""
START = """
import collections, json, sys, jax
from jaxformer import cli
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
assert cli.main(["train", "tiny.py", *sys.argv[1:]]) == 0
print(events["cache_hits"], events["cache_misses"])
"""


@pytest.mark.slow
def test_a_second_process_takes_the_train_step_from_the_cache(tmp_path):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)

    def start(name):
        """(hits, misses) of a process that trains a run of this name: another run, the same programs."""
        words = [sys.executable, "-c", START, f"--name={name}"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return map(int, done.stdout.splitlines()[-1].split())

    hits, misses = start("first")
    assert hits == 0 and misses > 0
    written = list((tmp_path / "runs" / ".compiled").glob("*-cache"))
    hits, _ = start("second")  # what compiles within 0.2 s is not kept, and is a miss again
    assert hits >= len(written) > 0
