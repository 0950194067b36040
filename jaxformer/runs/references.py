"""The frozen models of a run (`Experiment.references`).

Every start of a run reads them, and refuses models that differ from those of the first start.
"""

import hashlib
import shlex
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxformer import models, params, sharding
from jaxformer.errors import ConfigError
from jaxformer.params import Tree
from jaxformer.runs import manifest
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.start import read_params
from jaxformer.training.references import references_of


class References(NamedTuple):
    """The references of a run by name."""

    params: dict[str, Tree]
    digests: dict[str, str]


def read_references(
    experiment: Any,
    mesh: jax.sharding.Mesh | None,
    runs: epath.PathLike = "runs",
    weights_of: Callable[[str], Callable] | None = None,
) -> References:
    """The references of an experiment, split over the mesh by their specs' axes.

    Raises ConfigError for wrong shapes.
    """
    found = {}
    for name, reference in references_of(experiment).items():
        model = experiment.model if reference.model is None else reference.model
        key = jax.random.fold_in(params.random_key(experiment.seed), zlib.crc32(name.encode()))
        tree = read_params(f"references[{name!r}]", reference.initial, model, key, runs, weights_of)
        found[name] = tree if mesh is None else _split(tree, experiment.mesh.backend, model, mesh)
    return References(found, digests(found))


def _split(tree: Tree, backend: str, model: Any, mesh: jax.sharding.Mesh) -> Tree:
    if backend == "pmap":  # pmap itself copies the tree to each device
        return jax.device_put(tree, mesh.devices.flat[0])

    def place(leaf, split):
        # Every process has the whole arrays, so each takes its part.
        return jax.make_array_from_callback(leaf.shape, split, lambda index: leaf[index])

    return jax.tree.map(place, jax.device_get(tree), sharding.shardings(models.spec(model), mesh))


def digests(references: Mapping[str, Tree]) -> dict[str, str]:
    """A digest of each reference's parameters: any other bit changes it, another mesh does not."""
    found = {}
    for name, tree in references.items():
        leaves = dict(manifest.named_leaves(tree))
        prints = zip(leaves, manifest.fingerprints(leaves.values()), strict=True)
        text = " ".join(f"{path} {leaves[path].shape} {digits}" for path, digits in prints)
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def check_references(
    folder: RunFolder, metadata: Mapping[str, Any], found: Mapping[str, str]
) -> None:
    """Raises ConfigError where a reference is not the one of the checkpoint's training."""
    trained_with = metadata.get("references", {})
    for name in sorted({**trained_with, **found}):
        if trained_with.get(name) != found.get(name):
            problem = (
                f"is another model than when this run began (digest {trained_with.get(name)},"
                f" now {found.get(name)})"
            )
            initial = f"--initial={shlex.quote(str(folder.path))} --name=..."
            advice = f"restore it, or train on from the run's parameters as another run: {initial}"
            raise ConfigError(f"{folder.path}: references[{name!r}] {problem}; {advice}")


def with_references(step: Callable, frozen: Tree) -> Callable:
    """A step that gets these references with every batch."""

    def step_with_references(state: Any, batch: Any) -> Any:
        return step(state, batch, frozen)

    return step_with_references
