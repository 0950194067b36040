"""Names that the library moved: files of older runs import them from where they were, and runs keep their names."""

import logging
import types

import pytest

from jaxformer import config
from jaxformer.config import moved
from jaxformer.errors import ConfigError

OLD = """
from jaxformer.data.sources import Text
from jaxformer.models import ModelConfig
from jaxformer.training import Experiment, FromRun, TokenCrossEntropy
from jaxformer.training.corruption import MaskedTokens
from jaxformer.training.initial import FromRun as Start
from jaxformer.training.objectives import TokenCrossEntropy as Loss, model_inputs
from jaxformer import analysis, ops
from jaxformer.models import mixers
from jaxformer.models.mixers import variants
from jaxformer.models.mixers.variants import gated

assert Start is FromRun and Loss is TokenCrossEntropy and analysis.__name__ == "jaxformer.tools.analysis"
assert ops.attention and ops.linear_attention.__module__ == "jaxformer.zoo.linear_attention"
assert mixers.Performer.__module__ == "jaxformer.zoo.performer" and variants.gated is gated
model = ModelConfig(256, 1, 8, 1, context_length=8)
experiment = Experiment(name="old", model=model, data=Text("text.txt"), objective=MaskedTokens(255))
"""


@pytest.mark.parametrize("old", [*moved.MODULES, *moved.NAMES])
def test_what_moved_is_there(old):
    module, _, name = old.rpartition(".")
    found = getattr(moved.import_from(module, (name,)), name)
    assert found is not None
    if old in moved.NAMES and isinstance(found, types.FunctionType):
        now = found.__module__, found.__name__
        assert moved._now(*moved.first_name(*now)) == now


def test_an_older_experiment_file_imports_what_moved(tmp_path, caplog):
    path = tmp_path / "old.py"
    path.write_text(OLD)
    with caplog.at_level(logging.WARNING, "jaxformer"):
        experiment = config.load(str(path))
    assert type(experiment.objective).__module__ == "jaxformer.objectives.masked"
    assert "jaxformer.training.FromRun is now jaxformer.runs.initial.FromRun; change the import" in caplog.messages
    assert not any("Experiment" in line or "ModelConfig" in line for line in caplog.messages)


def test_what_never_was_is_refused_as_usual(tmp_path):
    for line in "from jaxformer.training.initial import NoSuch", "from jaxformer.training import NoSuch":
        path = tmp_path / "wrong.py"
        path.write_text(line)
        with pytest.raises(ConfigError, match="NoSuch"):
            config.load(str(path))


def test_only_imports_of_experiment_files_are_served():
    """The library's own modules name things where they are."""
    with pytest.raises(ModuleNotFoundError):
        import jaxformer.training.initial  # noqa: F401  # pyrefly: ignore[missing-import]
