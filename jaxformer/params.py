"""Parameters declared once: a nested dict of `Spec` gives initial values, abstract tree, count, paths and masks."""

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.nn.initializers import zeros

Tree = Any


@dataclass(frozen=True)
class Spec:
    """One parameter: its shape, a logical name for each axis, and how it starts.

    `init(key, shape, dtype) -> array` is any of `jax.nn.initializers`. `contracts` names the axes that a product sums
    over (the inputs of the layer); optimizers such as Muon read matrices from it. It is empty for what is not a matrix.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable
    contracts: tuple[str, ...] = ()

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"Spec: shape {self.shape} has {len(self.shape)} axes, names {self.axes} {len(self.axes)}")


def linear(shape, axes, contracts: tuple[str, ...], init: Callable, bias: bool = True) -> dict[str, Spec]:
    """A linear map: a kernel that sums over the axes `contracts`, and a bias over its other axes, at zero."""
    tree = {"kernel": Spec(shape, axes, init, contracts)}
    if bias:
        kept = [i for i, axis in enumerate(axes) if axis not in contracts]
        tree["bias"] = Spec(tuple(shape[i] for i in kept), tuple(axes[i] for i in kept), zeros)
    return tree


def stack(spec: Tree, layers: int) -> Tree:
    """The same parameters for `layers` layers, along a new first axis `layers`; each layer draws its own values."""

    def stacked(leaf: Spec) -> Spec:
        def init(key, shape, dtype):
            keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(shape[0]))
            return jax.vmap(lambda k: leaf.init(k, shape[1:], dtype))(keys)

        return replace(leaf, shape=(layers, *leaf.shape), axes=("layers", *leaf.axes), init=init)

    return jax.tree.map(stacked, spec)


def init(spec: Tree, key: jax.Array, dtype=jnp.float32) -> Tree:
    """Initial values. A leaf's key depends on its path alone, so adding a parameter changes no other."""

    def leaf(path, spec: Spec):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return spec.init(jax.random.fold_in(key, zlib.crc32(name.encode())), spec.shape, dtype)

    return jax.tree_util.tree_map_with_path(leaf, spec)


def abstract(spec: Tree, dtype=jnp.float32) -> Tree:
    """The tree as shapes and dtypes, without memory."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), spec)


def count(spec: Tree) -> int:
    """How many numbers the tree holds; works on specs, abstract trees and arrays alike."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(spec))


def paths(tree: Tree) -> dict[str, Any]:
    """The tree as `{'layers/attention/query/kernel': leaf}`."""
    return flatten_dict(tree, sep="/")


def mismatch(spec: Tree, tree: Tree, unused: str = "$^", path: str = "") -> str | None:
    """The first leaf that only one of the two has, or that has another shape there, in one line; None where all agree.

    The tree may hold more where the regular expression `unused` matches somewhere in a path. What has no shape, in the
    place of a leaf, agrees: a quantised weight or a user's own object.
    """
    if isinstance(spec, Spec):
        shape = getattr(tree, "shape", spec.shape)
        return None if shape == spec.shape else f"{path} has shape {shape}; expected {spec.shape}"
    if not isinstance(spec, Mapping) or not isinstance(tree, Mapping):
        return None
    for name in sorted({**spec, **tree}):
        where = f"{path}/{name}" if path else name
        if name in spec:
            found = mismatch(spec[name], tree[name], unused, where) if name in tree else _missing(spec[name], where)
        else:
            found = None if re.search(unused, where) else f"{where} is no parameter of this config"
        if found:
            return found
    return None


def _missing(spec: Tree, path: str) -> str | None:
    leaves = (
        [(path, spec)] if isinstance(spec, Spec) else [(f"{path}/{name}", leaf) for name, leaf in paths(spec).items()]
    )
    return f"{leaves[0][0]} {leaves[0][1].shape} is missing" if leaves else None


def mask(tree: Tree, pattern: str) -> Tree:
    """True where the regular expression matches somewhere in the leaf's path (weight decay, freezing)."""
    matches = lambda path, _: bool(re.search(pattern, jax.tree_util.keystr(path, simple=True, separator="/")))
    return jax.tree_util.tree_map_with_path(matches, tree)


def cast(tree: Tree, dtype) -> Tree:
    """Floating-point leaves in `dtype`; the others unchanged."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)
