"""Optimizers and schedules from their configs, on optax.

Every optimizer is built for a learning rate of one; the train step multiplies by the rate of the step. So the rate that
is logged is the rate that was used, also after steps that were skipped.
"""

import math
import re
from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxformer import params
from jaxformer.errors import ConfigError
from jaxformer.training.experiment import (
    WSD,
    Adafactor,
    Adam,
    AdamW,
    Cosine,
    Experiment,
    Lion,
    Muon,
    Noam,
)

Tree = Any


def build(
    config: Adam | AdamW | Adafactor | Lion | Muon, spec: Tree, frozen: str | None = None
) -> optax.GradientTransformation:
    """The optax transformation of a config, for parameters declared by `spec`, at learning rate 1.

    Where the regular expression `frozen` matches a path, updates are zero, and there is no state. Raises ConfigError
    where it matches no parameter, or all of them.
    """
    if frozen is not None:
        stays = params.mask(spec, frozen)
        if len(set(jax.tree.leaves(stays))) == 1:
            count, example = "every" if jax.tree.leaves(stays)[0] else "no", next(iter(params.paths(spec)))
            raise ConfigError(
                f"frozen={frozen!r} matches {count} parameter; match some of their paths, such as {example}"
            )
        labels = jax.tree.map(lambda stays: "frozen" if stays else "trained", stays)
        return optax.partition({"frozen": optax.set_to_zero(), "trained": build(config, spec)}, labels)
    match config:
        case Adam(b1=b1, b2=b2, eps=eps):
            return optax.chain(optax.scale_by_adam(b1, b2, eps), optax.scale(-1))
        case AdamW(b1=b1, b2=b2, eps=eps):
            return optax.chain(optax.scale_by_adam(b1, b2, eps), _decay(config, spec), optax.scale(-1))
        case Lion(b1=b1, b2=b2):
            return optax.chain(optax.scale_by_lion(b1, b2), _decay(config, spec), optax.scale(-1))
        case Adafactor():
            one = optax.chain(
                optax.scale_by_factored_rms(decay_rate=config.decay_rate),
                optax.clip_by_block_rms(config.clipping_threshold),
                optax.scale_by_param_block_rms(),
            )
            return optax.chain(for_each_layer(one, spec), _decay(config, spec), optax.scale(-1))
        case Muon():
            muon = contrib.muon(
                learning_rate=1.0,
                ns_steps=config.newton_schulz_steps,
                beta=config.momentum,
                weight_decay=config.weight_decay,
                weight_decay_mask=_decayed(config, spec),
                muon_weight_dimension_numbers=partial(_dimensions, spec),
            )
            # optax's Muon has Nesterov momentum for what it would hand to Adam, and decays all of it: it gets matrices alone
            adamw = AdamW(b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, not_decayed=config.not_decayed)
            others = optax.chain(build(adamw, spec), optax.scale(config.adam_learning_rate / config.learning_rate))
            labels = jax.tree.map(lambda leaf: "AdamW" if muon_dimensions(leaf) is None else "Muon", spec)
            return optax.partition({"Muon": muon, "AdamW": others}, labels)
    raise TypeError(f"optimizer: expected Adam, AdamW, Adafactor, Lion or Muon; got {type(config).__name__}")


def _decayed(config, spec: Tree) -> Tree:
    return jax.tree.map(lambda left_out: not left_out, params.mask(spec, config.not_decayed))


def _decay(config, spec: Tree) -> optax.GradientTransformation:
    return optax.add_decayed_weights(config.weight_decay, _decayed(config, spec))


def muon_dimensions(leaf: params.Spec) -> contrib.MuonDimensionNumbers | None:
    """Which axes of a parameter are a matrix's inputs and outputs; None for what Adam takes.

    Without this optax would hand every stacked `[L, D, F]` kernel to Adam in silence, since it only takes 2-d leaves.
    """
    if not leaf.contracts or "vocab" in leaf.axes:
        return None
    inputs = tuple(i for i, axis in enumerate(leaf.axes) if axis in leaf.contracts)
    outputs = tuple(i for i in range(len(stack_sizes(leaf)), len(leaf.axes)) if i not in inputs)
    return contrib.MuonDimensionNumbers(inputs, outputs)


def _dimensions(spec: Tree, updates: Tree) -> Tree:
    """`muon_dimensions` of the leaves that `updates` has: optax puts an empty node where another optimizer works."""
    here = lambda leaf, update: muon_dimensions(leaf) if jax.tree.leaves(update) else update
    return jax.tree.map(here, spec, updates)


def stack_sizes(leaf: params.Spec) -> tuple[int, ...]:
    """The sizes of a parameter's first axes along which parameters are stacked: layers, and in them experts."""
    count = next((i for i, axis in enumerate(leaf.axes) if axis not in ("layers", "expert")), len(leaf.axes))
    return leaf.shape[:count]


def for_each_layer(transform: optax.GradientTransformation, spec: Tree) -> optax.GradientTransformation:
    """`transform` of every layer's (and expert's) parameters by themselves, as if they were separate leaves.

    For what takes a norm or a mean of a leaf, or its shape: a stacked leaf `[L, ...]` is L parameters. Leaves that are
    stacked alike go through one `jax.vmap`; what the transformation counts, it counts once a layer.
    """

    def on_stack(sizes):
        init, update = transform.init, transform.update
        for size in reversed(sizes):  # named, because all of them may be frozen
            init, update = jax.vmap(init, axis_size=size), jax.vmap(update, axis_size=size)
        return optax.GradientTransformation(init, update)

    name = lambda leaf: "x".join(map(str, stack_sizes(leaf))) or "single"
    groups: dict[Hashable, optax.GradientTransformation] = {
        name(leaf): on_stack(stack_sizes(leaf)) for leaf in jax.tree.leaves(spec)
    }
    return optax.partition(groups, jax.tree.map(name, spec))


def freeze(parameters: Tree, frozen: str | None) -> Tree:
    """The parameters, those whose path matches without a gradient: it is not computed, and is in no norm to clip."""
    if frozen is None:
        return parameters
    return jax.tree.map(
        lambda leaf, stays: jax.lax.stop_gradient(leaf) if stays else leaf, parameters, params.mask(parameters, frozen)
    )


def routes(config: Adam | AdamW | Adafactor | Lion | Muon, spec: Tree, frozen: str | None = None) -> dict[str, str]:
    """For every parameter path, in words, what the optimizer does with it."""
    decayed = params.paths(_decayed(config, spec)) if getattr(config, "weight_decay", 0) else {}

    def route(path, leaf):
        if frozen is not None and re.search(frozen, path):
            return "frozen"
        name = type(config).__name__
        if isinstance(config, Muon) and muon_dimensions(leaf) is None:
            name = "AdamW"
        return f"{name}{' + decay' if decayed.get(path) else ''}"

    return {path: route(path, leaf) for path, leaf in params.paths(spec).items()}


def schedule(experiment: Experiment) -> optax.Schedule:
    """Learning rate of a 0-based step.

    Warm-up step s of w has the share (s + 1) / w of the peak, so no step has rate 0 and step w - 1 has the peak (step 0
    without a warm-up). The decay begins with the next step, and the last one, number steps - 1, has `final` times the
    peak. A run of a single step has the peak.
    """
    config, peak, last = experiment.schedule, experiment.optimizer.learning_rate, experiment.steps - 1
    if isinstance(config, Noam):
        factor = peak / math.sqrt(experiment.model.d_model)

        def noam(step):
            count = jnp.asarray(step, jnp.float32) + 1
            return factor * jnp.minimum(count**-0.5, count * max(config.warmup, 1) ** -1.5)

        return noam
    warmup, final = max(config.warmup, 1), getattr(config, "final", 1.0)
    start = max(last - config.decay_steps(experiment.steps), 0) if isinstance(config, WSD) else warmup - 1

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - start) / max(last - start, 1), 0, 1)
        if isinstance(config, Cosine):
            done = (1 - jnp.cos(jnp.pi * done)) / 2
        return peak * jnp.minimum((step + 1) / warmup, 1) * (done * final + (1 - done))

    return rate
