"""Optimizers as configs: `optimizer(spec) -> optax.GradientTransformation`.

Your own function of that form works as well. The optimizers here have a learning rate of 1, and the
train step multiplies their updates by the rate of the step. So the logged rate is the rate that was
used, also after skipped steps. `learning_rate` is the peak of a schedule. A transformation of your
own may include its rate: the schedule is then a factor with a peak of 1.
"""

import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from jaxformer import params
from jaxformer.config import check_types, patterns
from jaxformer.errors import ConfigError
from jaxformer.params import Tree

# axes that occur only in matrices of the first and the last layer
OUTER = {"vocab", "channel", "class"}


def check_optimizer(optimizer: Any) -> None:
    """Raises ConfigError for a field of an optimizer that has no meaning."""
    check_types(optimizer, "optimizer.")
    for name in ("learning_rate", "adam_learning_rate"):
        rate = getattr(optimizer, name, 1.0)
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"optimizer.{name}={rate}: must be a positive finite number")
    decay = getattr(optimizer, "weight_decay", 0.0)
    if not (math.isfinite(decay) and decay >= 0):
        raise ConfigError(f"optimizer.weight_decay={decay}: must be finite and at least 0")
    # 1 never forgets: the correction of Adam divides by 1 - b^t
    for name in ("b1", "b2", "momentum"):
        share = getattr(optimizer, name, 0.0)
        if not 0 <= share < 1:
            raise ConfigError(f"optimizer.{name}={share}: must be in [0, 1)")
    positive = ("eps", "clipping_threshold", "decay_rate", "newton_schulz_steps", "update_rms")
    for name in positive:
        value = getattr(optimizer, name, 1.0)
        if value is None:
            continue
        if not (math.isfinite(value) and value > 0):  # eps 0: 0 / 0 where a gradient is 0
            raise ConfigError(f"optimizer.{name}={value}: must be a positive finite number")
    params.check_pattern("optimizer.not_decayed", getattr(optimizer, "not_decayed", None))


@dataclass(frozen=True)
class Adam:
    """Kingma & Ba 2014, with the constants of Vaswani et al. 2017, section 5.3."""

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay of the mean of gradients
    b2: float = 0.98  # decay of the mean of their squares
    eps: float = 1e-9  # added to the root of the mean square
    __post_init__ = check_optimizer

    def __call__(self, spec: Tree) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(self.b1, self.b2, self.eps), optax.scale(-1))


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay. Loshchilov & Hutter 2017, arXiv:1711.05101."""

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay of the mean of gradients
    b2: float = 0.95  # decay of the mean of their squares
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.1  # a step of rate 1 subtracts this share of a parameter
    # regular expression: a parameter has no decay if it matches anywhere in the parameter's path;
    # None: parameters that are not a matrix have none
    not_decayed: str | None = None
    __post_init__ = check_optimizer

    def __call__(self, spec: Tree) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            weight_decay(self, spec),
            optax.scale(-1),
        )


@dataclass(frozen=True)
class Adafactor:
    """Factored second moments, and updates relative to a parameter's scale. Shazeer & Stern 2018.

    A matrix with a side below 128 is not factored.
    """

    learning_rate: float = 1e-2  # peak of the schedule
    decay_rate: float = 0.8  # exponent of the second moment's decay
    clipping_threshold: float = 1.0  # largest root mean square of an update
    weight_decay: float = 0.0  # a step of rate 1 subtracts this share of a parameter
    # regular expression: a parameter has no decay if it matches anywhere in the parameter's path;
    # None: parameters that are not a matrix have none
    not_decayed: str | None = None
    __post_init__ = check_optimizer
    takes_rates = False  # updates are relative to a parameter's size

    def __call__(self, spec: Tree) -> optax.GradientTransformation:
        factored = optax.scale_by_factored_rms(decay_rate=self.decay_rate)
        layer = optax.chain(
            factored,
            optax.clip_by_block_rms(self.clipping_threshold),
            optax.scale_by_param_block_rms(),
        )
        return optax.chain(for_each_layer(layer, spec), weight_decay(self, spec), optax.scale(-1))


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum. Chen et al. 2023, arXiv:2302.06675."""

    learning_rate: float = 1e-4  # peak of the schedule
    b1: float = 0.9  # share of the momentum in the update
    b2: float = 0.99  # decay of the momentum
    weight_decay: float = 1.0  # a step of rate 1 subtracts this share of a parameter
    # regular expression: a parameter has no decay if it matches anywhere in the parameter's path;
    # None: parameters that are not a matrix have none
    not_decayed: str | None = None
    __post_init__ = check_optimizer

    def __call__(self, spec: Tree) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_lion(self.b1, self.b2), weight_decay(self, spec), optax.scale(-1)
        )


@dataclass(frozen=True)
class Muon:
    """Orthogonalised momentum for each layer's matrices (Jordan et al. 2024); AdamW for the rest.

    The rest are embeddings, heads, norms and biases.
    """

    learning_rate: float = 2e-2  # peak of the schedule for matrices
    momentum: float = 0.95  # decay of the momentum
    newton_schulz_steps: int = 5  # iterations that make the update orthogonal
    # None: a matrix's orthogonal update is multiplied by sqrt(max(1, outputs / inputs)), as Jordan
    # et al. publish it. A number: by that number times sqrt(max(inputs, outputs)), so that an
    # update has this root mean square; 0.2 is about that of AdamW, whose learning rate then serves
    # (Liu et al. 2025, arXiv:2502.16982, section 2.2)
    update_rms: float | None = None
    adam_learning_rate: float = 1e-3  # peak of the same schedule for the rest
    b1: float = 0.9  # of AdamW: decay of the mean of gradients
    b2: float = 0.95  # of AdamW: decay of the mean of their squares
    weight_decay: float = 0.0  # a step of rate 1 subtracts this share of a parameter
    # regular expression: a parameter has no decay if it matches anywhere in the parameter's path;
    # None: parameters that are not a matrix have none
    not_decayed: str | None = None
    __post_init__ = check_optimizer
    takes_rates = False  # an orthogonal update has the same size in all directions

    def __call__(self, spec: Tree) -> optax.GradientTransformation:
        # optax puts an empty node where another optimizer updates
        def dimensions(leaf, update):
            return muon_dimensions(leaf) if jax.tree.leaves(update) else update

        muon = optax.contrib.muon(
            learning_rate=1.0,
            ns_steps=self.newton_schulz_steps,
            beta=self.momentum,
            consistent_rms=self.update_rms,
            weight_decay=self.weight_decay,
            weight_decay_mask=decayed(self, spec),
            muon_weight_dimension_numbers=lambda updates: jax.tree.map(dimensions, spec, updates),
        )
        # optax's Muon gets only the matrices: its own Adam part uses Nesterov momentum and decays
        # all its parameters
        adamw = AdamW(
            b1=self.b1, b2=self.b2, weight_decay=self.weight_decay, not_decayed=self.not_decayed
        )
        others = optax.chain(adamw(spec), optax.scale(self.adam_learning_rate / self.learning_rate))
        return optax.partition({"Muon": muon, "AdamW": others}, jax.tree.map(self.route, spec))

    def route(self, leaf: params.Spec) -> str:
        """Which of the two optimizers updates a parameter."""
        return "AdamW" if muon_dimensions(leaf) is None else "Muon"


def decayed(config: Any, spec: Tree) -> Tree:
    """True where a parameter has weight decay.

    Without `config.not_decayed` these are the matrices (`is_matrix`), else all that it does not
    match.
    """
    if config.not_decayed is None:
        return params.map_with_name(is_matrix, spec)
    return jax.tree.map(lambda matches: not matches, params.mask(spec, config.not_decayed))


def is_matrix(path: str, leaf: params.Spec) -> bool:
    """Whether a parameter is the matrix of a product, or the table of tokens.

    Biases, scales, position tables, relative biases, class tokens and mixing weights are not. A
    Flax module declares no contraction, but calls its matrices `kernel`.
    """
    is_table = "vocab" in leaf.axes and len(leaf.axes) > 1
    return bool(leaf.contracts) or is_table or path.endswith("kernel")


def weight_decay(config: Any, spec: Tree) -> optax.GradientTransformation:
    """optax's weight decay of the parameters for which `decayed` is True."""
    return optax.add_decayed_weights(config.weight_decay, decayed(config, spec))


def build(
    optimizer: Callable, spec: Tree, frozen: str | None = None
) -> optax.GradientTransformation:
    """The optimizer for parameters declared by `spec`; parameters whose path matches `frozen` stay.

    `frozen` is a regular expression. Frozen parameters and variables have no optimizer state.
    Raises ConfigError if `frozen` matches no parameter or all, or if the optimizer makes no
    transformation. Warns if an alternative in `frozen`, such as `a` in `a|b`, matches none.
    """
    transform = with_rates(optimizer, spec)
    if not isinstance(transform, optax.GradientTransformation):
        kind = type(transform).__name__
        raise ConfigError(
            f"optimizer={optimizer}: a {kind}; expected (spec) -> optax.GradientTransformation"
        )
    if frozen is not None:
        _check_frozen(spec, frozen)
    without = without_gradient(spec, frozen)
    if not any(jax.tree.leaves(without)):
        return transform
    labels = jax.tree.map(lambda held: "frozen" if held else "trained", without)
    return optax.partition({"frozen": optax.set_to_zero(), "trained": transform}, labels)


def _check_frozen(spec: Tree, frozen: str) -> None:
    """Raises ConfigError if the pattern matches no parameter, or all of them."""
    matches = jax.tree.leaves(params.mask(spec, frozen))
    if len(set(matches)) == 1:
        count = "every" if matches[0] else "no"
        example = next(iter(params.paths(spec)))
        raise ConfigError(
            f"frozen={frozen!r} matches {count} parameter; "
            f"match some of their paths, such as {example}"
        )
    patterns.warn_of_idle("frozen", frozen, tuple(params.paths(spec)))


def without_gradient(spec: Tree, frozen: str | None) -> Tree:
    """True where a leaf has no gradient: it is a variable, or `frozen` matches its path."""

    def is_held(path, leaf):
        return not leaf.trained or (frozen is not None and re.search(frozen, path) is not None)

    return params.map_with_name(is_held, spec)


def with_rates(optimizer: Callable, spec: Tree) -> Any:
    """The optimizer, its updates multiplied by each parameter's `rate`; decay is not multiplied.

    Raises ConfigError for an optimizer with `takes_rates = False`.
    """
    if all(leaf.rate == 1 for leaf in jax.tree.leaves(spec)):
        return optimizer(spec)
    if not getattr(optimizer, "takes_rates", True):
        name = type(optimizer).__name__
        raise ConfigError(
            f"optimizer={name}: parameters have rates of their own (MuP), "
            "which are for Adam, AdamW and Lion"
        )
    decays = isinstance(optimizer, AdamW | Lion)
    transform = (replace(optimizer, weight_decay=0.0) if decays else optimizer)(spec)

    def scale(leaf, update):
        return jax.tree.map(lambda u: u * leaf.rate, update)  # none where another optimizer updates

    scaled = optax.stateless(lambda updates, _: jax.tree.map(scale, spec, updates))
    if not decays:
        return optax.chain(transform, scaled)
    decay = optax.add_decayed_weights(-optimizer.weight_decay, decayed(optimizer, spec))
    return optax.chain(transform, scaled, decay)


def muon_dimensions(leaf: params.Spec) -> optax.contrib.MuonDimensionNumbers | None:
    """The input and output axes of a matrix that Muon updates; None for a parameter of Adam.

    Without these numbers optax would give every stacked `[L, D, F]` kernel to Adam. Matrices of the
    first and the last layer are Adam's too: their inputs or outputs are tokens, pixels or classes,
    and an update of equal size in all directions does not suit them (Jordan et al. 2024).
    """
    if not leaf.contracts or OUTER.intersection(leaf.axes):
        return None
    inputs = tuple(i for i, axis in enumerate(leaf.axes) if axis in leaf.contracts)
    outputs = tuple(i for i in range(len(stack_sizes(leaf)), len(leaf.axes)) if i not in inputs)
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def stack_sizes(leaf: params.Spec) -> tuple[int, ...]:
    """The sizes of a parameter's leading stacking axes: layers, then experts."""
    return leaf.shape[: params.stack_axes(leaf)]


def for_each_layer(
    transform: optax.GradientTransformation, spec: Tree
) -> optax.GradientTransformation:
    """`transform` for each layer's (and expert's) parameters, as if they were separate leaves.

    A transformation that uses the norm, mean or shape of a leaf needs this, because a stacked leaf
    `[L, ...]` is L parameters. Leaves with the same stacking axes share one `jax.vmap`. A counter
    of the transformation then counts once for each layer.
    """

    def name(leaf):
        return "x".join(map(str, stack_sizes(leaf))) or "single"

    groups: dict[Hashable, Any] = {}
    for leaf in jax.tree.leaves(spec):
        init, update = transform.init, transform.update
        # the sizes are given because all leaves of a group may be frozen
        for size in reversed(stack_sizes(leaf)):
            init, update = jax.vmap(init, axis_size=size), jax.vmap(update, axis_size=size)
        groups[name(leaf)] = optax.GradientTransformation(init, update)
    return optax.partition(groups, jax.tree.map(name, spec))


def freeze(parameters: Tree, spec: Tree, frozen: str | None) -> Tree:
    """The parameters, with `stop_gradient` where `without_gradient` is True.

    So no gradient is computed for these, and none is part of the norm that clipping uses.
    """
    without = without_gradient(spec, frozen)
    if not any(jax.tree.leaves(without)):
        return parameters

    def stop(held, leaf):
        return jax.lax.stop_gradient(leaf) if held else leaf

    return jax.tree.map(stop, without, parameters)


def routes(optimizer: Any, spec: Tree, frozen: str | None = None) -> dict[str, str]:
    """{path: how it is updated, in words, such as "AdamW + decay" or "frozen"}."""
    # a user's own optimizer may not say
    decays = getattr(optimizer, "weight_decay", 0) and hasattr(optimizer, "not_decayed")
    has_decay = params.paths(decayed(optimizer, spec)) if decays else {}

    def route(path, leaf):
        if not leaf.trained:
            return "a variable"
        if frozen is not None and re.search(frozen, path):
            return "frozen"
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        name = optimizer.route(leaf) if hasattr(optimizer, "route") else name
        factor = "" if leaf.rate == 1 else f", {leaf.rate:.3g} of the rate"
        return f"{name}{' + decay' if has_decay.get(path) else ''}{factor}"

    return {path: route(path, leaf) for path, leaf in params.paths(spec).items()}
