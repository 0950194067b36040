"""The gradient of a batch, summed over micro-batches; clipping."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxformer.errors import ConfigError
from jaxformer.models.stacks.trees import combine
from jaxformer.objectives.objective import Batch
from jaxformer.ops.losses import LossSums
from jaxformer.params import Tree
from jaxformer.training.micro_batches import sum_over_micro_batches
from jaxformer.training.optimizers import without_gradient
from jaxformer.training.recipe import Recipe


def accumulate(
    recipe: Recipe,
    params: Tree,
    batch: Batch,
    key: Array,
    scale: Any,
    step: Any = 0,
    references: Tree = None,
) -> tuple[LossSums, Tree]:
    """(sums of losses and weights, gradient of `scale` times the loss sum), over micro-batches.

    The caller divides the sums once, at the end. So the gradient does not depend on how the batch
    is split, even where padding is uneven. Leaves without a gradient (`without_gradient`) have
    zeros in the gradient; nothing is computed or summed for them.
    """
    loss_of = partial(recipe.loss, step=step, references=references)
    rounded = round_matrices(recipe, params)
    trained, others = split_trained(recipe, rounded)

    def scaled_loss(trained, batch, key):
        sums = loss_of(combine(trained, others), batch, key)
        return sums.loss * scale, sums

    def sums_and_gradient(batch, key):
        gradients, sums = jax.grad(scaled_loss, has_aux=True)(trained, batch, key)
        dtypes, _ = split_trained(recipe, params)
        return sums, jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), gradients, dtypes)

    if recipe.accumulation > 1 or recipe.mesh.backend == "pmap":
        check_weight(loss_of, rounded, batch, key)
    if recipe.accumulation == 1:
        sums, gradients = sums_and_gradient(batch, key)
    else:
        sums, gradients = sum_over_micro_batches(sums_and_gradient, batch, key, recipe.accumulation)
    return sums, combine(gradients, jax.tree.map(jnp.zeros_like, others))


def split_trained(recipe: Recipe, params: Tree) -> tuple[Tree, Tree]:
    """(leaves that have a gradient, the other leaves); None stands for a missing leaf."""
    without = without_gradient(recipe.spec, recipe.frozen)
    trained = jax.tree.map(lambda held, leaf: None if held else leaf, without, params)
    others = jax.tree.map(lambda held, leaf: leaf if held else None, without, params)
    return trained, others


def round_matrices(recipe: Recipe, params: Tree) -> Tree:
    """The parameters, with the matrices of products in the dtype of `gradient_sums`.

    A gradient has the dtype of its weight, and devices sum it in that dtype. Products round these
    weights to this dtype anyway. A router is not rounded, because it works in float32.
    """
    dtype = jnp.dtype(recipe.gradient_sums)
    if dtype.itemsize >= 4:
        return params

    def round_leaf(spec, leaf):
        is_router = spec.axes[-1:] == ("expert",)
        return leaf.astype(dtype) if spec.contracts and not is_router else leaf

    return jax.tree.map(round_leaf, recipe.spec, params)


def check_weight(loss: Callable, params: Tree, batch: Batch, key: Array) -> None:
    """Raises ConfigError if an objective's weight does not depend on the number of examples.

    A sum over parts would count such a weight once for each part, so the mean loss and the gradient
    would be too small.
    """
    weight = constant_weight(loss, params, batch, key)
    if weight is None:
        return
    doubled_batch = jax.tree.map(lambda x: jnp.repeat(x, 2, 0), batch)
    if weight == constant_weight(loss, params, doubled_batch, key):
        problem = (
            "its weight is the same number however many rows a batch has, "
            "so a part of a batch would count as a whole one"
        )
        raise ConfigError(
            f"objective: {problem}; return the sum of batch['weights'], "
            "or of what else the loss sums over"
        )


def constant_weight(loss: Callable, params: Tree, batch: Batch, key: Array) -> str | None:
    """The program that computes the weight of a batch of this shape; None if it reads the batch."""
    closed = jax.make_jaxpr(lambda batch: jnp.asarray(loss(params, batch, key).weight))(batch)
    jaxpr = closed.jaxpr
    outputs: list[Any] = list(jaxpr.outvars)
    program = [str(variable.val) for variable in outputs if is_literal(variable)]
    needed = {variable for variable in outputs if not is_literal(variable)}
    for equation in reversed(jaxpr.eqns):
        if not needed.intersection(equation.outvars):
            continue
        needed.update(variable for variable in equation.invars if not is_literal(variable))
        inputs = [getattr(variable, "val", variable.aval) for variable in equation.invars]
        program.append(f"{equation.primitive} {equation.params} {inputs}")
    if needed.intersection(jaxpr.invars):
        return None
    for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
        if variable not in needed:
            continue
        if isinstance(value, jax.core.Tracer):
            return None
        program.append(str(value))
    return "; ".join(program)


def is_literal(variable: Any) -> bool:
    """Whether a variable of a jaxpr is a constant number."""
    return hasattr(variable, "val")


def clip(gradients: Tree, largest: float | None) -> tuple[Tree, Array]:
    """(gradients * min(1, largest / norm), norm)."""
    norm = optax.tree.norm(gradients)
    return jax.tree.map(lambda g: g * clip_factor(norm, largest), gradients), norm


def clip_factor(norm: Array, largest: float | None) -> Array:
    """The factor of clipping for gradients of this norm: min(1, largest / norm)."""
    return jnp.minimum(1.0, jnp.inf if largest is None else largest / norm)
