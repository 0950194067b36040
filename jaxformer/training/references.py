"""Frozen models that an objective reads: `Experiment(references={"teacher": "runs/teacher-1a2b3c4d"})`.

Each is read once at a start (`runs.references`) and given to the objective as `context.references[name]`. It is in no
checkpoint; the metadata of a checkpoint keep a digest of it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.params import Tree


@dataclass(frozen=True)
class Reference:
    """A frozen model of another architecture: `Reference("runs/large-1a2b3c4d", model=LARGE)`."""

    initial: Any  # a run's or Hugging Face folder or name, or (spec, key) -> params
    model: Any = None  # whose parameters these are; None: the experiment's model


@dataclass(frozen=True)
class Base:
    """The frozen weights below an adaptation such as `models.adaptation.Lora`. They take no memory of their own.

    Variables of the model (`params.Spec(trained=False)`) have in it the values that they have in training.
    """


def check_references(references: Any) -> None:
    """Raises ConfigError for references that are no mapping of names to what can be read."""
    if not isinstance(references, Mapping):
        raise ConfigError(f"references={type(references).__name__}: expected a mapping, such as {{'teacher': 'runs/...'}}")
    for name, value in references.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"references: {name!r} is no name; expected letters, digits and _")
        initial = value.initial if isinstance(value, Reference) else value
        if not (isinstance(value, Base) or isinstance(initial, str | os.PathLike) or callable(initial)):
            expected = "a run's or Hugging Face folder or name, (spec, key) -> params, Reference(...) or Base()"
            raise ConfigError(f"references[{name!r}]={type(initial).__name__}: expected {expected}")


def references_of(experiment: Any) -> dict[str, Reference]:
    """The references that are read, by name: all but the base of an adaptation."""
    found = {}
    for name, value in experiment.references.items():
        if isinstance(value, Base):
            continue
        found[name] = value if isinstance(value, Reference) else Reference(value)
    return found


def reference_specs(experiment: Any, model_spec: Tree) -> dict[str, Tree]:
    """The spec of each reference that is read."""
    read = references_of(experiment).items()
    return {name: model_spec if each.model is None else models.spec(each.model) for name, each in read}


def base_names(experiment: Any) -> tuple[str, ...]:
    """The references that are the base of the adaptation."""
    return tuple(name for name, value in experiment.references.items() if isinstance(value, Base))


def without_adaptation(experiment: Any) -> Any:
    """The experiment that trains the merged parameters; the adaptation's base is then given to it like any other reference."""
    bases = dict.fromkeys(base_names(experiment), Reference(_given))
    return replace(experiment, adaptation=None, references={**experiment.references, **bases})


def _given(spec: Tree, key: Any) -> Tree:
    raise AssertionError("the base of an adaptation is not read")
