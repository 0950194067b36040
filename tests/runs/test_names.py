"""What the command line offers: every name is a function or config, and every field says what it
means."""

import dataclasses

import pytest

from jaxformer.config.override import meanings
from jaxformer.runs.names import NAMES
from jaxformer.training import Experiment

OFFERED = {
    f"{field} {name}": value for field, names in NAMES.items() for name, value in names.items()
}
CONFIGS = {name: value for name, value in OFFERED.items() if isinstance(value, type)} | {
    "Experiment": Experiment
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_says_in_a_comment_what_it_means(name):
    fields = [
        field.name
        for field in dataclasses.fields(CONFIGS[name])
        if field.init and field.name != "name"
    ]
    assert not [field for field in fields if not meanings(CONFIGS[name]).get(field)]


@pytest.mark.parametrize("name", OFFERED)
def test_every_name_is_a_function_a_config_or_a_preset(name):
    assert callable(OFFERED[name]) or dataclasses.is_dataclass(OFFERED[name])
