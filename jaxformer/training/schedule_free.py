"""Schedule-Free AdamW: an average of all steps takes the place of a decaying learning rate.

    y = (1 - b1) z + b1 x                    where gradients are taken: the state's parameters
    v = b2 v + (1 - b2) g^2
    z = z - rate_t (g / (sqrt(v) + eps) + decay y)
    x = (1 - c) x + c z                      what is evaluated: the state's average, `ema`

    rate_t = rate sqrt(1 - b2^t),   c = rate_t^2 / sum over i <= t of rate_i^2

Defazio et al. 2024, arXiv:2405.15682, algorithm 1. Read `scale_by_schedule_free` first.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxformer.errors import ConfigError
from jaxformer.params import Tree
from jaxformer.training.optimizers import check_optimizer, decayed


class ScheduleFreeState(NamedTuple):
    """What a step carries to the next, besides y."""

    count: Array  # updates until now
    weight_sum: Array  # the sum of rate_i^2
    z: Tree  # the sequence of plain steps
    mean_square: Tree  # v


def _check(optimizer) -> None:
    check_optimizer(optimizer)
    if optimizer.b1 == 0:  # y = z then, and nothing would hold x
        raise ConfigError("optimizer.b1=0: must be in (0, 1), because x is read from y and z")


@dataclass(frozen=True)
class ScheduleFree:
    """Schedule-Free AdamW. Use `Constant(warmup=...)` as schedule: the average replaces a decay.

    Evaluations, samples, `checkpoints.best`, exports and `FromRun` take x. It is kept where
    averaged parameters are, so `ema_decay` must be None. The state has y, z, x and v.
    """

    learning_rate: float = 2.5e-3  # peak of the schedule; larger than for AdamW
    b1: float = 0.9  # share of the average x in the point where gradients are taken
    b2: float = 0.999  # decay of the mean of squared gradients
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.0  # a step of rate 1 subtracts this share of a parameter, at y
    # regular expression: a parameter has no decay if it matches anywhere in the parameter's path;
    # None: parameters that are not a matrix have none
    not_decayed: str | None = None
    __post_init__ = _check
    takes_rates = False  # rates of single parameters (MuP) would take y off the line from z to x

    def __call__(self, spec: Tree) -> optax.GradientTransformationExtraArgs:
        return scale_by_schedule_free(
            self.b1, self.b2, self.eps, self.weight_decay, decayed(self, spec)
        )

    def averaged(self, params: Tree, opt_state: Tree) -> Tree:
        """x = (y - (1 - b1) z) / b1, for parameters y; frozen leaves stay."""
        return jax.tree.map(partial(interpolated_average, self.b1), params, state_of(opt_state).z)


def scale_by_schedule_free(
    b1: float, b2: float, eps: float, weight_decay: float, decays: Tree
) -> optax.GradientTransformationExtraArgs:
    """Updates u of y, for a step that adds `rate` u. `decays`: True where a parameter has decay.

    `update` needs the parameters y and `rate`, the learning rate of the step. A rate of 0 changes
    nothing but v.
    """

    def init(params: Tree) -> ScheduleFreeState:
        return ScheduleFreeState(
            count=jnp.zeros((), jnp.int32),
            weight_sum=jnp.zeros((), jnp.float32),
            z=jax.tree.map(jnp.array, params),
            mean_square=jax.tree.map(jnp.zeros_like, params),
        )

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, ScheduleFreeState]:
        rate = extra["rate"]
        count = state.count + 1
        corrected = rate * jnp.sqrt(1 - b2 ** count.astype(jnp.float32))
        weight = corrected**2
        weight_sum = state.weight_sum + weight
        share = jnp.where(weight_sum > 0, weight / jnp.where(weight_sum > 0, weight_sum, 1), 0.0)
        mean_square = jax.tree.map(
            lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.mean_square, updates
        )
        move = partial(moved_z, eps, weight_decay, corrected)
        z = jax.tree.map(move, decays, state.z, mean_square, updates, params)
        changes = jax.tree.map(partial(change_of_y, b1, share, rate), params, state.z, z)
        return changes, ScheduleFreeState(count, weight_sum, z, mean_square)

    return optax.GradientTransformationExtraArgs(init, update)


def moved_z(
    eps: float, weight_decay: float, rate: Array, has_decay: bool, z: Any, v: Any, g: Any, y: Any
) -> Any:
    """z after a step of Adam from it, with the gradient and the decay at y; masked z stays."""
    if isinstance(z, optax.MaskedNode):
        return z
    direction = g / (jnp.sqrt(v) + eps)
    if has_decay:
        direction = direction + weight_decay * y
    return z - rate * direction


def change_of_y(b1: float, share: Array, rate: Any, y: Array, z: Array, new_z: Array) -> Array:
    """u, so that y + rate u is the next y; 0 for a rate of 0."""
    x = interpolated_average(b1, y, z)
    new_x = x + share * (new_z - x)
    new_y = (1 - b1) * new_z + b1 * new_x
    return jnp.where(rate > 0, (new_y - y) / jnp.where(rate > 0, rate, 1), 0.0)


def interpolated_average(b1: float, y: Array, z: Any) -> Array:
    """x from y = (1 - b1) z + b1 x; y where z is masked."""
    if isinstance(z, optax.MaskedNode):
        return y
    return z + (y - z) / b1


def state_of(opt_state: Tree) -> ScheduleFreeState:
    """The state of Schedule-Free within an optimizer's state."""

    def is_state(node):
        return isinstance(node, ScheduleFreeState)

    (state,) = filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))
    return state
