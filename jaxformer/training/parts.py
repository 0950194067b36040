"""The tree that trains: the model's parameters or an adaptation's, and the objective's own.

{**model, "objective": own}                             an objective with parameters of its own
{"weights": model, "factors": ..., "objective": own}    the same under models.adaptation.Lora
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import params
from jaxformer.errors import ConfigError
from jaxformer.models.adaptation import Adapted
from jaxformer.objectives.objective import StepContext
from jaxformer.ops.einsum import in_float32
from jaxformer.params import Tree
from jaxformer.training.references import base_names

OWN = "objective"  # name of the objective's parameters in the tree
WEIGHTS = "weights/"  # prefix of the model's parameters in an adaptation's tree


@dataclass(frozen=True, eq=False)
class Parts:
    """The declaration of the tree that trains, and the functions that read its parts."""

    spec: Tree  # of the whole tree: trained, frozen and variable leaves
    frozen: str | None  # a regular expression; leaves whose path it matches do not train
    adapted: Adapted | None
    bases: tuple[str, ...]  # names of the references that are the adaptation's base
    has_own: bool  # whether the objective has parameters

    def split(self, trained: Tree) -> tuple[Tree, Tree]:
        """(the model's or the adaptation's parameters; the objective's own, {} without)."""
        if not self.has_own:
            return trained, {}
        return {name: subtree for name, subtree in trained.items() if name != OWN}, trained[OWN]

    def weights(self, trained: Tree) -> Tree:
        """The model's parameters; those of an adaptation are merged."""
        tree, _ = self.split(trained)
        return tree if self.adapted is None else self.adapted.merge(tree)

    def merged(self, trained: Tree) -> Tree:
        """The tree that the same experiment would train without its adaptation."""
        weights = self.weights(trained)
        if not self.has_own:
            return weights
        return {**weights, OWN: trained[OWN]}

    def base(self, trained: Tree) -> dict[str, Tree]:
        """{name: frozen weights below the adaptation}, for references that are its base."""
        if not self.bases:
            return {}
        # `parts_of` refuses others
        assert self.adapted is not None and self.adapted.base is not None
        base = jax.lax.stop_gradient(self.adapted.base(self.split(trained)[0]))
        return dict.fromkeys(self.bases, base)

    def context(
        self, trained: Tree, key: Array, dtype: Any, step: Any, references: Any
    ) -> StepContext:
        """The context of an objective: key, dtype, step, references, own parameters, variables."""
        leaves = params.paths(trained) if params.variables(self.spec) else {}
        return StepContext(
            key=key,
            dtype=dtype,
            step=jnp.asarray(step, jnp.int32),
            references={**(references or {}), **self.base(trained)},
            params=self.split(trained)[1],
            variables={
                self._path_of_model(path): leaves[path] for path in params.variables(self.spec)
            },
        )

    def updates(self, updates: Tree) -> dict[str, Array] | None:
        """{path in the tree that trains: new value} of variables; None without.

        Raises ConfigError for an unknown path, a path that is not declared `trained=False`, and a
        value of another shape.
        """
        if not jax.tree.leaves(updates):
            return None
        specs = params.paths(self.spec)
        values = {}
        for path, value in params.paths(updates).items():
            place = self._path_in_tree(path)
            if place not in specs:
                raise ConfigError(f"updates: {path} is no parameter; variables are {self._known()}")
            if specs[place].trained:
                advice = "declare it with Spec(..., trained=False), or leave it to the optimizer"
                raise ConfigError(f"updates: {path} trains, so a step may not write it; {advice}")
            if jnp.shape(value) != specs[place].shape:
                raise ConfigError(
                    f"updates: {path} has shape {jnp.shape(value)}; expected {specs[place].shape}"
                )
            values[place] = jax.lax.stop_gradient(in_float32(jnp.asarray(value)))
        return values

    def _known(self) -> str:
        return (
            ", ".join(map(self._path_of_model, params.variables(self.spec)))
            or "declared by Spec(..., trained=False)"
        )

    def _path_of_model(self, path: str) -> str:
        return path if self.adapted is None else path.removeprefix(WEIGHTS)

    def _path_in_tree(self, path: str) -> str:
        is_own = self.has_own and path.startswith(f"{OWN}/")
        return path if self.adapted is None or is_own else WEIGHTS + path


def parts_of(experiment: Any, model_spec: Tree) -> Parts:
    """The parts of an experiment's tree. Raises ConfigError if they do not fit each other."""
    spec = model_spec
    frozen = experiment.frozen
    adapted = None
    bases = base_names(experiment)
    if experiment.adaptation is not None:
        if experiment.gradient_sums == "bfloat16":
            raise ConfigError(
                "gradient_sums=bfloat16: rounds the weights that an adaptation "
                "merges; leave one of them out"
            )
        adapted = experiment.adaptation(model_spec)
        spec = adapted.spec
        frozen = either_pattern(adapted.frozen, frozen)
    if bases and (adapted is None or adapted.base is None):
        problem = (
            "without an adaptation there is none"
            if adapted is None
            else "some of the adaptation's weights train"
        )
        advice = (
            "give adaptation=Lora(trains=None), or a reference that is read, "
            "such as the run that the weights are from"
        )
        raise ConfigError(
            f"references[{bases[0]!r}]=Base(): expected frozen weights; {problem}; {advice}"
        )
    own = own_spec(experiment.objective, experiment.model)
    if own:
        if not isinstance(spec, Mapping) or OWN in spec:
            problem = (
                f"has a part {OWN!r}"
                if isinstance(spec, Mapping)
                else f"is a {type(spec).__name__}"
            )
            raise ConfigError(
                f"objective: it has parameters, and the model's tree {problem}; "
                "expected a dict without it"
            )
        spec = {**spec, OWN: own}
    return Parts(spec, frozen, adapted, bases, bool(own))


def either_pattern(*patterns: str | None) -> str | None:
    """The regular expression that matches where one of the patterns does; None without any."""
    return "|".join(f"({pattern})" for pattern in patterns if pattern) or None


def own_spec(objective: Any, model: Any) -> Tree:
    """The specs of an objective's own parameters, from its method `spec(model)`; {} without one."""
    if not hasattr(objective, "spec"):
        return {}
    own = objective.spec(model)
    if not isinstance(own, Mapping) or not all(
        isinstance(leaf, params.Spec) for leaf in jax.tree.leaves(own)
    ):
        raise ConfigError(
            f"objective: spec(model) gives a {type(own).__name__}; "
            "expected a nested dict of params.Spec"
        )
    return own
