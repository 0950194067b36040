"""Parameters declared once, as a nested dict of `Spec`.

The declaration gives initial values, the abstract tree, the count, paths and masks.
"""

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
from jax.nn.initializers import normal, truncated_normal, uniform, zeros

from jaxformer.errors import ConfigError

Tree = Any
SEEDS = 2**64  # a key of JAX holds 64 bits
# the functions that these make draw each number alone: the shape only arranges the numbers
DRAW_IN_A_ROW = {getattr(make(), "__code__", make) for make in (normal, uniform, truncated_normal)}


@dataclass(frozen=True)
class Spec:
    """One parameter: its shape, a logical name for each axis, and its initial values.

    `init(key, shape, dtype) -> array` is any of `jax.nn.initializers`. `contracts` names the axes
    that a product sums over: the inputs of the layer. Optimizers such as Muon recognise matrices by
    it; for other parameters it is empty. `rate` is a factor of the learning rate (`models.mup`).
    `trained=False` declares a variable. A variable has no gradient and no optimizer state. A step
    changes it by the `updates` of the model or of the objective (`ops.losses.LossSums`).
    `dtype` is that of a frozen leaf which is no float32, such as codes of 8 bits; None: the dtype
    that `init` or `abstract` is asked for.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable
    contracts: tuple[str, ...] = ()
    rate: float = 1.0
    trained: bool = True
    dtype: Any = None

    def __describe__(self) -> dict[str, Any]:
        """Its fields, without the defaults of `trained` and `dtype`.

        Names of older runs know neither field.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.trained:
            del values["trained"]
        if self.dtype is None:
            del values["dtype"]
        return {"type": type(self).__name__, **values}

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(
                f"Spec: shape {self.shape} has {len(self.shape)} axes, "
                f"names {self.axes} {len(self.axes)}"
            )


def stack_axes(leaf: Spec) -> int:
    """The number of leading axes that stack parameters of one kind: layers, then experts."""
    axes = leaf.axes
    return next((i for i, axis in enumerate(axes) if axis not in ("layers", "expert")), len(axes))


def linear(
    shape, axes, contracts: tuple[str, ...], init: Callable, bias: bool = True
) -> dict[str, Spec]:
    """A linear map: a kernel that sums over the axes `contracts`, and a bias over the other axes.

    The bias starts at zero.
    """
    tree = {"kernel": Spec(shape, axes, init, contracts)}
    if bias:
        outputs = [i for i, axis in enumerate(axes) if axis not in contracts]
        bias_shape = tuple(shape[i] for i in outputs)
        bias_axes = tuple(axes[i] for i in outputs)
        tree["bias"] = Spec(bias_shape, bias_axes, zeros)
    return tree


def scale_init(init: Callable, factor: float) -> Callable:
    """The initial values of `init`, multiplied by `factor`."""
    return lambda key, shape, dtype: factor * init(key, shape, dtype)


def stack(spec: Tree, layers: int, *others: Tree) -> Tree:
    """The same parameters for `layers` layers, along a new first axis `layers`.

    Each layer draws its own values. `others` are specs that differ from `spec` only in their
    initial values: layer i uses the i-th of `spec` and `others`, repeated over the layers.
    """

    def stacked(leaf, *other_leaves):
        inits = [each.init for each in (leaf, *other_leaves)]
        return replace(
            leaf,
            shape=(layers, *leaf.shape),
            axes=("layers", *leaf.axes),
            init=partial(init_layers, inits),
        )

    return jax.tree.map(stacked, spec, *others)


def init_layers(inits: list[Callable], key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Initial values of stacked layers `[L, ...]`: layer i draws by `inits[i mod n]`."""
    values_of = _values_of(key)

    def draw(init, layer):
        return values_of(init, jax.random.fold_in(key, layer), shape[1:], dtype)

    n = len(inits)
    drawn = [
        jax.vmap(partial(draw, init))(jnp.arange(i, shape[0], n)) for i, init in enumerate(inits)
    ]
    if n == 1:
        return drawn[0]
    x = jnp.zeros(shape, dtype)
    for i, values in enumerate(drawn):
        x = x.at[i::n].set(values)
    return x


def init(spec: Tree, key: jax.Array, dtype=jnp.float32) -> Tree:
    """Initial values. A leaf's key depends on its path alone: a new parameter changes no other."""
    values_of = _values_of(key)

    def draw(name, leaf):
        path_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return values_of(leaf.init, path_key, leaf.shape, leaf.dtype or dtype)

    return map_with_name(draw, spec)


def _values_of(key: jax.Array) -> Callable:
    """The function `(init, key, shape, dtype) -> initial values` for numbers of this key.

    Where several devices may split the numbers, they are drawn by their axes.
    """
    is_alone = jax.device_count() == 1 or not isinstance(key, jax.core.Tracer)
    return _values_in_a_row if is_alone and jax.default_backend() == "cpu" else _values


def _values(init: Callable, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return init(key, shape, dtype)


def _values_in_a_row(
    init: Callable, key: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """The numbers of `_values`, which get their shape only when all are drawn.

    XLA:CPU compiles numbers in a row in 0.4 s, and those of four axes in 3 s.
    """
    if getattr(init, "__code__", None) not in DRAW_IN_A_ROW:
        return init(key, shape, dtype)
    row = init(key, (math.prod(shape),), dtype)
    return jax.lax.optimization_barrier(row).reshape(shape)


def check_seed(seed: int, name: str = "seed") -> None:
    """Raises ConfigError for a seed that does not fit into a key: it would equal another seed."""
    if not 0 <= int(seed) < SEEDS:  # JAX's integers cannot be compared with such a large one
        raise ConfigError(f"{name}={seed}: must be in 0 ... {SEEDS - 1}, the 64 bits of a key")


def random_key(seed: int, name: str = "seed") -> jax.Array:
    """`jax.random.key` of a seed that `check_seed` accepts, with all 64 bits of the seed.

    By default JAX has no 64-bit numbers, and `jax.random.key` then cuts a seed to 32 bits, so that
    2^32 would equal 0.
    """
    check_seed(seed, name)
    key = jax.random.key(seed % 2**32)
    if seed < 2**32:
        return key
    words = jnp.array([seed >> 32, seed % 2**32], jnp.uint32)  # as JAX with 64-bit numbers has them
    return jax.random.wrap_key_data(jnp.tile(words, jax.random.key_data(key).size // 2))


def abstract(spec: Tree, dtype=jnp.float32) -> Tree:
    """The tree as shapes and dtypes, without memory."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or dtype), spec)


def count(spec: Tree) -> int:
    """The number of scalars in the tree; works on specs, abstract trees and arrays alike."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(spec))


def map_with_name(function: Callable, tree: Tree) -> Tree:
    """`function(name, leaf)` for every leaf; a name is like `layers/attention/query/kernel`."""
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
    """One line on the first difference between the trees, or None if they agree.

    A difference is a leaf that only one tree has, or that has another shape. The tree may have more
    leaves where the regular expression `unused` matches. A leaf without a shape (quantised) agrees
    with any shape.
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
            problem = mismatch(spec[name], tree.get(name), unused, inner)
        elif re.search(unused, inner):
            problem = None
        else:
            problem = f"{inner} is no parameter of this config"
        if problem:
            return problem
    return None


def check_pattern(name: str, pattern: str | None) -> None:
    """Raises ConfigError if the pattern of an option is no regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r}: no regular expression ({error})") from None


def mask(tree: Tree, pattern: str) -> Tree:
    """True where the regular expression matches somewhere in the leaf's path.

    Used for weight decay and freezing.
    """
    return map_with_name(lambda name, _: bool(re.search(pattern, name)), tree)
