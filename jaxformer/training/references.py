"""Frozen models that an objective reads: `Experiment(references={"teacher": "runs/big-1a2b3c4d"})`.

A start reads each once (`runs.references`). The objective gets it as `context.references[name]`. It
is in no checkpoint; the metadata of a checkpoint hold its digest.
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

    initial: Any  # a folder or name of a run or of Hugging Face, or (spec, key) -> params
    model: Any = None  # the model of these parameters; None: the experiment's model


@dataclass(frozen=True)
class Base:
    """The frozen weights below an adaptation such as `models.adaptation.Lora`.

    They take no memory of their own. Variables of the model (`params.Spec(trained=False)`) have the
    same values in it as in training.
    """


def check_references(references: Any) -> None:
    """Raises ConfigError unless the references are a mapping of names to readable values."""
    if not isinstance(references, Mapping):
        raise ConfigError(
            f"references={type(references).__name__}: "
            f"expected a mapping, such as {{'teacher': 'runs/...'}}"
        )
    for name, value in references.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"references: {name!r} is no name; expected letters, digits and _")
        initial = value.initial if isinstance(value, Reference) else value
        if not (
            isinstance(value, Base) or isinstance(initial, str | os.PathLike) or callable(initial)
        ):
            expected = (
                "a run's or Hugging Face folder or name, (spec, key) -> params, "
                "Reference(...) or Base()"
            )
            raise ConfigError(f"references[{name!r}]={type(initial).__name__}: expected {expected}")


def references_of(experiment: Any) -> dict[str, Reference]:
    """{name: reference} for the references that are read: all except an adaptation's base."""
    references = {}
    for name, value in experiment.references.items():
        if not isinstance(value, Base):
            references[name] = value if isinstance(value, Reference) else Reference(value)
    return references


def reference_specs(experiment: Any, model_spec: Tree) -> dict[str, Tree]:
    """{name: spec} for the references that are read."""
    return {
        name: model_spec if reference.model is None else models.spec(reference.model)
        for name, reference in references_of(experiment).items()
    }


def base_names(experiment: Any) -> tuple[str, ...]:
    """The names of the references that are the adaptation's base."""
    return tuple(name for name, value in experiment.references.items() if isinstance(value, Base))


def without_adaptation(experiment: Any) -> Any:
    """The experiment without its adaptation: it trains the merged parameters.

    The base of the adaptation becomes an ordinary reference.
    """
    bases = dict.fromkeys(base_names(experiment), Reference(_never_read))
    return replace(experiment, adaptation=None, references={**experiment.references, **bases})


def _never_read(spec: Tree, key: Any) -> Tree:
    raise AssertionError("the base of an adaptation is not read")
