"""Plans ask compilers of chips that are not here: their environment comes before JAX."""

import os
import subprocess
import sys

import pytest

from jaxformer.errors import ConfigError
from jaxformer.tools.planning import topology

ORDER = """
import sys
if "early" in sys.argv:
    import jax
from jaxformer.tools.planning import topology
assert "early" in sys.argv or "jax" not in sys.modules, "it is too late to set the environment"
topology.prepare()
import jax
print(jax.config.jax_platforms)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_the_environment_is_set_before_jax_reads_it(when):
    """JAX was imported first: then its CUDA plugin looked for cuDNN, and no GPU could be planned
    for in the environment that `make plan` makes."""
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", ORDER, when]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "cpu"


def test_one_gpu_has_a_name_that_the_message_gives():
    with pytest.raises(ConfigError, match="h200:1x1 is one GPU"):
        topology.devices("h200:1")


def test_a_plan_names_the_flags_of_its_compiler(monkeypatch):
    """Also a plan of decoding: both print these facts in their last line."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_mine=true")
    assert topology.versions("tpu")["LIBTPU_INIT_ARGS"] == "--xla_mine=true"
    assert "LIBTPU_INIT_ARGS" not in topology.versions("cuda")  # libtpu alone reads them
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    assert "LIBTPU_INIT_ARGS" not in topology.versions("tpu")
