"""What a CPU run does with the memory that its steps have freed."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxformer.runs import memory

REPEATED = """
import resource
import jax, jax.numpy as jnp
from jaxformer.runs import memory

memory.keep()
double = jax.jit(
    lambda x: jnp.sort(x * 2)[::-1].sum() + jnp.sort(x * 3).sum()
)  # 0.1 GB of temporaries
x = jnp.ones(1 << 24)
counts = []
for _ in range(5):
    double(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[-2])
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    memory._of_glibc("mallopt") is None, reason="the memory is kept by glibc's malloc"
)
def test_a_repeated_program_faults_in_no_memory():
    """A program with 0.1 GB of temporaries would fault in 25,000 pages of 4 KiB at each call if
    they were given back."""
    done = subprocess.run(
        [sys.executable, "-c", REPEATED], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1000


@pytest.mark.parametrize(
    "platforms, plugins, expected",
    [("cpu", ["cuda"], True), ("cuda,cpu", [], False), (None, [], True), (None, ["cuda"], False)],
)
def test_one_heap_is_for_processes_that_can_only_use_the_cpu(
    monkeypatch, platforms, plugins, expected
):
    config = SimpleNamespace(values={"jax_platforms": platforms})
    monkeypatch.setattr(memory, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert memory._only_cpu() == expected
