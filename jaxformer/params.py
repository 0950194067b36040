"""Parameters declared once: a nested dict of `Spec` gives initial values, abstract tree, count, paths and masks."""

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.nn.initializers import zeros

from jaxformer.errors import ConfigError

Tree = Any
SEEDS = 2**64  # a key of JAX holds 64 bits


@dataclass(frozen=True)
class Spec:
    """One parameter: its shape, a logical name for each axis, and how it starts.

    `init(key, shape, dtype) -> array` is any of `jax.nn.initializers`. `contracts` names the axes that a product sums
    over (the inputs of the layer); optimizers such as Muon read matrices from it. It is empty for what is not a matrix.
    `rate` is a factor of the learning rate (`models.mup`). `trained=False` declares a variable: it has no gradient and no
    optimizer state, and a step changes it by the `updates` of the model or the objective (`ops.losses.LossSums`).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable
    contracts: tuple[str, ...] = ()
    rate: float = 1.0
    trained: bool = True

    def __describe__(self) -> dict[str, Any]:
        """Its fields. `trained` came after some runs, whose names must stay."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.trained:
            del values["trained"]
        return {"type": type(self).__name__, **values}

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


def scale_init(init: Callable, factor: float) -> Callable:
    """The initial values of `init` times a factor."""
    return lambda key, shape, dtype: factor * init(key, shape, dtype)


def stack(spec: Tree, layers: int, *turns: Tree) -> Tree:
    """The same parameters for `layers` layers, along a new first axis `layers`; each layer draws its own values.

    `turns` are specs that differ from `spec` only in their initial values: the layers take the values of `spec` and of these
    in turn.
    """

    def init_layers(inits: list[Callable], key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
        def draw(init, layer):
            return init(jax.random.fold_in(key, layer), shape[1:], dtype)

        drawn = [jax.vmap(partial(draw, init))(jnp.arange(i, shape[0], len(inits))) for i, init in enumerate(inits)]
        if len(inits) == 1:
            return drawn[0]
        x = jnp.zeros(shape, dtype)
        for i, values in enumerate(drawn):
            x = x.at[i :: len(inits)].set(values)
        return x

    def sizes(leaf):
        return {"shape": (layers, *leaf.shape), "axes": ("layers", *leaf.axes)}

    def stacked(*each):
        return replace(each[0], **sizes(each[0]), init=partial(init_layers, [leaf.init for leaf in each]))

    return jax.tree.map(stacked, spec, *turns)


def init(spec: Tree, key: jax.Array, dtype=jnp.float32) -> Tree:
    """Initial values. A leaf's key depends on its path alone, so adding a parameter changes no other."""

    def draw(name, leaf):
        return leaf.init(jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.shape, dtype)

    return map_with_name(draw, spec)


def check_seed(seed: int, name: str = "seed") -> None:
    """Raises ConfigError for a seed that no key holds: it would draw the numbers of another one."""
    if not 0 <= int(seed) < SEEDS:  # JAX's integers cannot be compared with such a large one
        raise ConfigError(f"{name}={seed}: must be in 0 ... {SEEDS - 1}, the 64 bits of a key")


def random_key(seed: int, name: str = "seed") -> jax.Array:
    """`jax.random.key` of a seed that `check_seed` accepts, with all of its bits.

    Where 64-bit numbers are off, which is JAX's default, `jax.random.key` itself cuts a seed to 32 bits: 2^32 is 0 to it.
    """
    check_seed(seed, name)
    key = jax.random.key(seed % 2**32)
    if seed < 2**32:
        return key
    words = jnp.array([seed >> 32, seed % 2**32], jnp.uint32)  # as JAX with 64-bit numbers has them
    return jax.random.wrap_key_data(jnp.tile(words, jax.random.key_data(key).size // 2))


def abstract(spec: Tree, dtype=jnp.float32) -> Tree:
    """The tree as shapes and dtypes, without memory."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), spec)


def count(spec: Tree) -> int:
    """How many numbers the tree holds; works on specs, abstract trees and arrays alike."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(spec))


def map_with_name(function: Callable, tree: Tree) -> Tree:
    """`function(name, leaf)` of every leaf, with names such as `layers/attention/query/kernel`."""
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(name(path), leaf), tree)


def variables(spec: Tree) -> list[str]:
    """The paths of the variables: leaves that a step changes without a gradient."""
    named = map_with_name(lambda path, leaf: None if leaf.trained else path, spec)
    return jax.tree.leaves(named)


def paths(tree: Tree) -> dict[str, Any]:
    """The tree as `{'layers/attention/query/kernel': leaf}`."""
    return flatten_dict(tree, sep="/")


def mismatch(spec: Tree, tree: Tree, unused: str = "$^", path: str = "") -> str | None:
    """One line on the first leaf that only one of the two trees has, or whose shapes differ; None where they agree.

    The tree may hold more where the regular expression `unused` matches. A leaf without a shape (quantised) agrees with any.
    """
    if isinstance(spec, Spec):
        if tree is None:
            return f"{path} {spec.shape} is missing"
        shape = getattr(tree, "shape", spec.shape)
        return None if shape == spec.shape else f"{path} has shape {shape}; expected {spec.shape}"
    tree = {} if tree is None else tree
    if not isinstance(spec, Mapping) or not isinstance(tree, Mapping):
        return None
    for name in sorted({**spec, **tree}):
        inner = f"{path}/{name}" if path else name
        if name in spec:
            found = mismatch(spec[name], tree.get(name), unused, inner)
        else:
            found = None if re.search(unused, inner) else f"{inner} is no parameter of this config"
        if found:
            return found
    return None


def check_pattern(name: str, pattern: str | None) -> None:
    """Raises ConfigError where the pattern of an option is no regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r}: no regular expression ({error})") from None


def mask(tree: Tree, pattern: str) -> Tree:
    """True where the regular expression matches somewhere in the leaf's path (weight decay, freezing)."""
    return map_with_name(lambda name, _: bool(re.search(pattern, name)), tree)
