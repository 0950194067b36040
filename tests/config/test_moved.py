"""Names that the library moved: files of older runs import them from where they were, and runs keep
their names."""

import importlib
import importlib.util
import logging
import types

import pytest

from jaxformer import config
from jaxformer.config import code, moved
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

assert (
    Start is FromRun
    and Loss is TokenCrossEntropy
    and analysis.__name__ == "jaxformer.tools.analysis"
)
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
    assert (
        "jaxformer.training.FromRun is now jaxformer.runs.initial.FromRun; change the import"
        in caplog.messages
    )
    assert not any("Experiment" in line or "ModelConfig" in line for line in caplog.messages)


@pytest.mark.parametrize("name", sorted(moved._left()))
def test_a_module_that_lost_names_is_in_all_else_itself(name):
    """What asks a module for a name that it never had, as `hasattr` and `describe` do, gets the
    usual answer."""
    parent, _, last = name.rpartition(".")
    seen = getattr(moved.import_from(parent, (last,)), last)
    assert not hasattr(seen, "__experiment_text__") and not hasattr(seen, "no_such_name")
    assert config.describe(seen) == name
    if importlib.util.find_spec(name) is not None:
        real = importlib.import_module(name)
        assert not code.is_users_module(seen) and not code.is_users_module(real)
        names = [each for each in vars(real) if not each.startswith("__")]
        assert all(getattr(seen, each) is getattr(real, each) for each in names)


MINE = """
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig
from jaxformer.training import Experiment
{imports}

def scaled(config):
    def prepare(params, heads, context):
        return heads._replace(query=2 * ops.rms_norm(heads.query, heads.query[0, 0, 0]))

    return mixers.attention(config, prepare=prepare)


model = ModelConfig(17, 1, 16, 2, context_length=9, mixer=scaled)
experiment = Experiment(name="mine", model=model, data=Reverse())
"""


def test_a_users_function_is_described_alike_however_its_modules_were_imported(tmp_path):
    """`from jaxformer import ops` gives a file what may know earlier names; the run's name does not
    depend on it."""
    ways = (
        "from jaxformer import ops\nfrom jaxformer.models import mixers",
        "import jaxformer.ops as ops\nimport jaxformer.models.mixers as mixers",
    )
    found = []
    for number, imports in enumerate(ways):
        path = tmp_path / str(number) / "mine.py"
        path.parent.mkdir()
        path.write_text(MINE.format(imports=imports))
        found.append(config.load(str(path)))
    assert config.describe(found[0]) == config.describe(found[1])
    assert config.fingerprint(found[0]) == config.fingerprint(found[1])


def test_an_earlier_name_warns_once(caplog):
    mixers = moved.import_from("jaxformer.models", ("mixers",)).mixers
    with caplog.at_level(logging.WARNING, "jaxformer"):
        assert mixers.Performer is mixers.Performer
    assert len(caplog.messages) == 1


def test_what_never_was_is_refused_as_usual(tmp_path):
    for line in (
        "from jaxformer.training.initial import NoSuch",
        "from jaxformer.training import NoSuch",
    ):
        path = tmp_path / "wrong.py"
        path.write_text(line)
        with pytest.raises(ConfigError, match="NoSuch"):
            config.load(str(path))


def test_only_imports_of_experiment_files_are_served():
    """The library's own modules name things where they are."""
    with pytest.raises(ModuleNotFoundError):
        import jaxformer.training.initial  # noqa: F401  # pyrefly: ignore[missing-import]


PLACED = """
from dataclasses import replace
from jaxformer.data.sources import Text
from jaxformer.models import ModelConfig
from jaxformer.training import Experiment

model = replace(ModelConfig(256, 1, 8, 1, context_length=8, norm_placement="post"), num_layers=2)
experiment = Experiment(name="old", model=model, data=Text("text.txt"))
"""


def test_the_place_of_norms_is_read_as_a_block_and_keeps_its_name(tmp_path, caplog):
    """A field that another took the place of: in a file, as an option of an older run, and in the
    description of a run."""
    (tmp_path / "old.py").write_text(PLACED)
    (tmp_path / "new.py").write_text(
        PLACED.replace('norm_placement="post"', "block=post_norm").replace(
            "from jaxformer.training",
            "from jaxformer.models.blocks import post_norm\nfrom jaxformer.training",
        )
    )
    with caplog.at_level(logging.WARNING):
        old, new = (config.load(str(tmp_path / name)) for name in ("old.py", "new.py"))
    assert "norm_placement='post' is model.block=post_norm now" in caplog.text
    assert old.model == new.model and config.fingerprint(old) == config.fingerprint(new)
    described = config.describe(new)["model"]
    assert described["norm_placement"] == "post" and "block" not in described
    names = {"block": {"post_norm": new.model.block, "sandwich": None}}
    found = [
        config.override(old, [option], names)
        for option in ("--model.norm-placement=post", "--model.block=post_norm")
    ]
    assert found[0].model == found[1].model == new.model
    with pytest.raises(
        ConfigError, match="norm_placement='Post': expected one of pre, post, sandwich"
    ):
        type(new.model)(256, 1, 8, 1, context_length=8, norm_placement="Post")
