"""Trees of several layers: their outputs joined, their parameters split."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.errors import ConfigError
from jaxformer.models.layer import LayerOutput
from jaxformer.params import Tree


@struct.dataclass
class LayerRun:
    """What a function of `layer_functions` returns: one run of one layer."""

    hidden: Any  # x after the layer, [B, T, ...]
    carry: Any  # a value of its mixer for the next layer
    output: LayerOutput  # all else, for `join_layers`
    number: int = struct.field(pytree_node=False)  # of the layer
    num_layers: int = struct.field(pytree_node=False)


def join_layers(runs: Sequence[LayerRun]) -> LayerOutput:
    """What a stack of your own returns besides x: the outputs of its runs, in the order of layers.

    A stack may skip and repeat layers, but a cache, new values of variables and intermediates
    belong to a layer. Raises NotImplementedError for these if not each layer ran once.
    """
    if not runs:
        return LayerOutput()
    outputs = [run.output for run in sorted(runs, key=lambda run: run.number)]
    numbers = [run.number for run in runs]
    if sorted(numbers) == list(range(runs[0].num_layers)):
        return stack_outputs(outputs)
    for name, of_layer in (
        ("a cache", "state"),
        ("variables", "updates"),
        ("intermediates", "intermediates"),
    ):
        if any(jax.tree.leaves(getattr(output, of_layer)) for output in outputs):
            raise NotImplementedError(
                f"model.stack: layers {numbers} of {runs[0].num_layers} ran; "
                f"with {name} each layer runs once"
            )
    return stack_outputs([run.output for run in runs])


def stack_outputs(outputs: Sequence[LayerOutput]) -> LayerOutput:
    """The outputs of several layers as one: stacked leaves, and a tuple of states."""
    states = tuple(output.state for output in outputs)
    stacked = joined([output._replace(state=None) for output in outputs], stack_leaves)
    return stacked._replace(state=None if states[0] is None else states)


def join_parts(outputs: Sequence[LayerOutput]) -> LayerOutput:
    """The outputs of several parts of a stack as the output of the whole."""
    states = [output.state for output in outputs if output.state is not None]
    whole = joined([output._replace(state=None) for output in outputs], jnp.concatenate)
    return whole._replace(state=sum(states, ()) if states else None)


def stack_leaves(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(leaves)


def joined(outputs: Sequence[LayerOutput], combine: Callable) -> LayerOutput:
    """The outputs of several layers as one output.

    Each value is `combine(values)` over the layers that report it, in their order. Raises
    ConfigError for intermediates that not every layer computes.
    """
    if len({frozenset(output.intermediates) for output in outputs}) > 1:
        names = ", ".join(sorted({path for output in outputs for _, path in output.intermediates}))
        raise ConfigError(f"intermediates: {names}: not every layer computes all of these")

    def of(name):
        return _merged([getattr(output, name) for output in outputs], combine)

    return LayerOutput(
        loss=of("loss"),
        stats=of("stats"),
        intermediates=of("intermediates") or {},
        updates=of("updates"),
    )


def _merged(trees: Sequence[Tree], combine: Callable) -> Tree:
    """The trees as one: dictionaries are merged key by key, other trees are combined leaf by leaf.

    A key may be missing in some of the dictionaries.
    """
    trees = [tree for tree in trees if tree is not None]
    if not trees:
        return None
    if all(isinstance(tree, Mapping) for tree in trees):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return {
            name: _merged([tree[name] for tree in trees if name in tree], combine) for name in names
        }
    return jax.tree.map(lambda *leaves: combine(leaves), *trees)


def unstack(tree: Tree, length: int) -> list[Tree]:
    """`[length, ...]` leaves -> `length` trees, by `lax.split`.

    The transpose of a split is one concatenation. That of indexing would be a scatter.
    """
    leaves, structure = jax.tree.flatten(tree)
    split_leaves = []
    for leaf in leaves:
        slices = jax.lax.split(leaf, (1,) * length)
        split_leaves.append([each.reshape(leaf.shape[1:]) for each in slices])
    return [jax.tree.unflatten(structure, each) for each in zip(*split_leaves, strict=True)]


def partition(tree: Tree, keep: Callable) -> tuple[Tree, Tree]:
    """(leaves for which `keep(leaf)` holds, the other leaves), as two trees of the same structure.

    None stands for a missing leaf.
    """

    def pick(flag):
        return jax.tree.map(lambda leaf: leaf if bool(keep(leaf)) == flag else None, tree)

    return pick(True), pick(False)


def combine(tree: Tree, other: Tree) -> Tree:
    """The inverse of `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, tree, other, is_leaf=lambda leaf: leaf is None
    )
