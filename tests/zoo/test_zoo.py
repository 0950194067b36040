"""The front door of the papers: what it lists is there, and nothing is there that it does not
list."""

import ast
import importlib
import inspect
import pkgutil

import pytest

from jaxformer import models, zoo
from jaxformer.config.offered import Offered
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.models.presets import PRESETS

FILES = [found.name for found in pkgutil.iter_modules(zoo.__path__)]


@pytest.mark.parametrize("file", FILES)
def test_every_preset_of_a_paper_is_listed(file):
    module = importlib.import_module(f"jaxformer.zoo.{file}")
    own = {
        name
        for name, value in vars(module).items()
        if isinstance(value, ModelConfig | EncoderDecoder)
    }
    assert {name for name in own if name not in PRESETS} == set(zoo.PRESETS_OF.get(file, ()))


def test_every_paper_and_every_name_can_be_reached():
    assert set(FILES) == zoo._FILES and set(FILES) < set(dir(zoo))
    for name, file in zoo.OFFERED.items():
        assert Offered("jaxformer.zoo")[name] is getattr(getattr(zoo, file), name)
    assert zoo.Linear.__module__ == "jaxformer.zoo.linear_attention"
    assert zoo.PRESETS.keys() - models.PRESETS.keys() == {
        name for names in zoo.PRESETS_OF.values() for name in names
    }
    with pytest.raises(AttributeError, match="no attribute 'Perfomer'"):
        zoo.Perfomer  # noqa: B018


@pytest.mark.parametrize("file", FILES)
def test_a_paper_is_one_sitting(file):
    """At most 150 statements, as DESIGN says: so that it can be read, copied and edited."""
    tree = ast.parse(inspect.getsource(importlib.import_module(f"jaxformer.zoo.{file}")))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= 150
