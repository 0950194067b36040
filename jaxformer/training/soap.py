"""SOAP: Adam in the eigenbasis of Shampoo. Vyas et al. 2024, arXiv:2409.11321, algorithm 3.

For each layer's matrix [inputs, outputs] with gradient G:

    L = b2 L + (1 - b2) G G^T,    R = b2 R + (1 - b2) G^T G
    G' = Q_L^T G Q_R              Q_L, Q_R: eigenvectors of L and R
    M = b1 M + (1 - b1) G,        V = b2 V + (1 - b2) G'^2
    update = Q_L (Q_L^T M Q_R / (sqrt(V) + eps)) Q_R^T, with Adam's bias corrections

Every `every` steps one step of power iteration and a QR decomposition renew Q_L and Q_R. Read
`scale_by_soap` first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxformer.errors import check_numbers
from jaxformer.params import Spec, Tree
from jaxformer.training.optimizers import AdamW, check_optimizer, stack_sizes, weight_decay


class Side(NamedTuple):
    """One side of a matrix of size n: of the inputs or of the outputs."""

    gram: Any  # L or R, [*stack, n, n]
    basis: Any  # its eigenvectors as columns, [*stack, n, n]


class Moments(NamedTuple):
    """What is kept for one parameter. A side that is too large has None, and stays unrotated."""

    mean: Any  # M, in the shape of the parameter
    mean_square: Any  # V, in the rotated basis; in the shape of the parameter
    left: Side | None
    right: Side | None


class SoapState(NamedTuple):
    """What a step carries to the next."""

    count: Array  # updates until now
    # one for each parameter: a tree for each of the fields of `Moments`
    mean: Tree
    mean_square: Tree
    left: Tree
    right: Tree


def _check(optimizer) -> None:
    check_optimizer(optimizer)
    check_numbers("optimizer.", optimizer, every=1, largest_side=1)


@dataclass(frozen=True)
class SOAP:
    """Adam in the eigenbasis of Shampoo, for matrices and tables of tokens; AdamW for the rest.

    The first step only decays matrices: its gradient makes the first bases, and no update. A
    matrix [m, n] keeps 2 m^2 + 2 n^2 numbers besides Adam's.
    """

    learning_rate: float = 3e-3  # peak of the schedule
    b1: float = 0.95  # decay of the mean of gradients
    b2: float = 0.95  # decay of the mean of their squares, and of the products L and R
    eps: float = 1e-8  # added to the root of the mean square
    every: int = 10  # steps between two renewals of the bases
    largest_side: int = 10_000  # a longer side of a matrix, such as a vocabulary, is not rotated
    weight_decay: float = 0.01  # a step of rate 1 subtracts this share of a parameter
    # regular expression: a parameter has no decay if it matches anywhere in the parameter's path;
    # None: parameters that are not a matrix have none
    not_decayed: str | None = None
    __post_init__ = _check
    takes_rates = False  # a basis mixes the parameters of a matrix

    def __call__(self, spec: Tree) -> optax.GradientTransformation:
        soap = optax.chain(
            scale_by_soap(spec, self.b1, self.b2, self.eps, self.every, self.largest_side),
            weight_decay(self, spec),
            optax.scale(-1),
        )
        adamw = AdamW(
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            not_decayed=self.not_decayed,
        )
        routes = jax.tree.map(self.route, spec)
        return optax.partition({"SOAP": soap, "AdamW": adamw(spec)}, routes)

    def route(self, leaf: Spec) -> str:
        """Which of the two optimizers updates a parameter."""
        is_table = "vocab" in leaf.axes and len(leaf.axes) > 1
        return "SOAP" if leaf.contracts or is_table else "AdamW"


def scale_by_soap(
    spec: Tree, b1: float, b2: float, eps: float, every: int, largest_side: int
) -> optax.GradientTransformation:
    """The transformation for the parameters of `spec`; masked leaves stay masked.

    Stacked layers and experts are matrices of their own. There is one counter, so that the bases
    of all are renewed in the same step.
    """

    def init(params: Tree) -> SoapState:
        moments = _map(partial(first_moments, largest_side), spec, params)
        return _state(jnp.zeros((), jnp.int32), moments)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, SoapState]:
        first = partial(begin, b2)
        later = partial(step, state.count, b1, b2, eps, every)
        pairs = jax.lax.cond(
            state.count == 0,
            partial(_map, first, spec),
            partial(_map, later, spec),
            updates,
            _moments(spec, state),
        )
        changes = _map(lambda _, pair: pair[0], spec, pairs)
        kept = _map(lambda _, pair: pair[1], spec, pairs)
        return changes, _state(state.count + 1, kept)

    return optax.GradientTransformation(init, update)


class Matrix(NamedTuple):
    """A parameter as matrices [*stack, m, n], and back."""

    to_matrix: Callable[[Array], Array]
    from_matrix: Callable[[Array], Array]
    stack: tuple[int, ...]
    m: int
    n: int


def matrix_of(leaf: Spec) -> Matrix:
    """Inputs are rows and outputs are columns; a table of tokens has its tokens as rows."""
    stack = stack_sizes(leaf)
    own = range(len(stack), len(leaf.axes))
    inputs = [i for i in own if leaf.axes[i] in leaf.contracts] or [len(stack)]
    outputs = [i for i in own if i not in inputs]
    order = (*range(len(stack)), *inputs, *outputs)
    m = math.prod(leaf.shape[i] for i in inputs)
    n = math.prod(leaf.shape[i] for i in outputs)
    moved = tuple(leaf.shape[i] for i in order)
    back = tuple(order.index(i) for i in range(len(order)))

    def to_matrix(x: Array) -> Array:
        return x.transpose(order).reshape(*stack, m, n)

    def from_matrix(x: Array) -> Array:
        return x.reshape(moved).transpose(back)

    return Matrix(to_matrix, from_matrix, stack, m, n)


def first_moments(largest_side: int, leaf: Spec, x: Array) -> Moments:
    """Zeros, and the identity as bases."""
    matrix = matrix_of(leaf)

    def side(size: int) -> Side | None:
        if size > largest_side:
            return None
        eye = jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), (*matrix.stack, size, size))
        return Side(jnp.zeros_like(eye), eye)

    return Moments(jnp.zeros_like(x), jnp.zeros_like(x), side(matrix.m), side(matrix.n))


def begin(b2: float, leaf: Spec, g: Array, moments: Moments) -> tuple[Array, Moments]:
    """(no update, the moments with the first bases): eigenvectors of the first products."""
    matrix = matrix_of(leaf)
    G = matrix.to_matrix(g)

    def side(old: Side | None, product: Array) -> Side | None:
        if old is None:
            return None
        gram = (1 - b2) * product
        _, vectors = jnp.linalg.eigh(gram)
        return Side(gram, vectors[..., ::-1])  # the largest eigenvalue first

    left = side(moments.left, _product("...in,...jn->...ij", G, G))
    right = side(moments.right, _product("...mi,...mj->...ij", G, G))
    return jnp.zeros_like(g), moments._replace(left=left, right=right)


def step(
    count: Array,
    b1: float,
    b2: float,
    eps: float,
    every: int,
    leaf: Spec,
    g: Array,
    moments: Moments,
) -> tuple[Array, Moments]:
    """(the update, the next moments). `count` is 1 for the first step that changes parameters."""
    matrix = matrix_of(leaf)
    G = matrix.to_matrix(g)
    rotated = rotate(moments, G)
    mean = b1 * matrix.to_matrix(moments.mean) + (1 - b1) * G
    mean_square = b2 * matrix.to_matrix(moments.mean_square) + (1 - b2) * jnp.square(rotated)
    t = count.astype(jnp.float32)
    correction = jnp.sqrt(1 - b2**t) / (1 - b1**t)
    update = correction * rotate(moments, mean) / (jnp.sqrt(mean_square) + eps)
    update = matrix.from_matrix(rotate_back(moments, update))

    def add(old: Side | None, product: Array) -> Side | None:
        if old is None:
            return None
        return old._replace(gram=b2 * old.gram + (1 - b2) * product)

    left = add(moments.left, _product("...in,...jn->...ij", G, G))
    right = add(moments.right, _product("...mi,...mj->...ij", G, G))

    def renew():
        new_left, rows = renewed(left)
        new_right, columns = renewed(right)
        moved = mean_square
        if rows is not None:
            moved = jnp.take_along_axis(moved, rows[..., :, None], axis=-2)
        if columns is not None:
            moved = jnp.take_along_axis(moved, columns[..., None, :], axis=-1)
        return new_left, new_right, moved

    left, right, mean_square = jax.lax.cond(
        count % every == 0, renew, lambda: (left, right, mean_square)
    )
    return update, Moments(matrix.from_matrix(mean), matrix.from_matrix(mean_square), left, right)


def renewed(side: Side | None) -> tuple[Side | None, Array | None]:
    """(the side with a new basis, the order of its old columns by their eigenvalues).

    The squares V belong to directions, so they move with them.
    """
    if side is None:
        return None, None
    values = jnp.sum(side.basis * _product("...ij,...jk->...ik", side.gram, side.basis), axis=-2)
    order = jnp.argsort(-values, axis=-1)
    basis = jnp.take_along_axis(side.basis, order[..., None, :], axis=-1)
    basis, _ = jnp.linalg.qr(_product("...ij,...jk->...ik", side.gram, basis))
    return side._replace(basis=basis), order


def rotate(moments: Moments, x: Array) -> Array:
    """Q_L^T x Q_R."""
    if moments.left is not None:
        x = _product("...ij,...in->...jn", moments.left.basis, x)
    if moments.right is not None:
        x = _product("...mi,...ij->...mj", x, moments.right.basis)
    return x


def rotate_back(moments: Moments, x: Array) -> Array:
    """Q_L x Q_R^T."""
    if moments.left is not None:
        x = _product("...ij,...jn->...in", moments.left.basis, x)
    if moments.right is not None:
        x = _product("...mj,...ij->...mi", x, moments.right.basis)
    return x


def _product(spec: str, a: Array, b: Array) -> Array:
    """At full precision: a basis that is not orthogonal would change the size of steps."""
    return jnp.einsum(spec, a, b, precision="highest")


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _map(function: Callable, spec: Tree, *trees: Tree) -> Tree:
    """`function(spec of a leaf, its subtree in each tree)`; masked leaves stay masked."""

    def call(leaf, *nodes):
        return nodes[0] if _is_masked(nodes[0]) else function(leaf, *nodes)

    return jax.tree.map(call, spec, *trees)


def _state(count: Array, moments: Tree) -> SoapState:
    """The state, from a tree with `Moments` for each leaf."""

    def field(name):
        return jax.tree.map(
            lambda node: node if _is_masked(node) else getattr(node, name),
            moments,
            is_leaf=lambda node: isinstance(node, Moments) or _is_masked(node),
        )

    return SoapState(count, *map(field, Moments._fields))


def _moments(spec: Tree, state: SoapState) -> Tree:
    """The tree with `Moments` for each leaf, from the state."""
    trees = [getattr(state, name) for name in Moments._fields]

    def join(_, *nodes):
        return Moments(*nodes)

    return _map(join, spec, *trees)
