"""Optimizers and schedules from their configs, on optax.

Every optimizer is built for a learning rate of one; the train step multiplies by the rate of the step. So the rate that
is logged is the rate that was used, also after steps that were skipped.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxformer import params
from jaxformer.config import ConfigError
from jaxformer.training.experiment import (
    WSD,
    Adafactor,
    Adam,
    AdamW,
    Constant,
    Cosine,
    Experiment,
    Linear,
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
            return optax.adafactor(
                learning_rate=None,
                decay_rate=config.decay_rate,
                clipping_threshold=config.clipping_threshold,
                weight_decay_rate=config.weight_decay or None,
                weight_decay_mask=_decayed(config, spec),
            )
        case Muon():
            share = config.adam_learning_rate / config.learning_rate
            by_adam = jax.tree.map(lambda leaf, d: d and muon_dimensions(leaf) is None, spec, _decayed(config, spec))
            muon = contrib.muon(
                learning_rate=1.0,
                ns_steps=config.newton_schulz_steps,
                beta=config.momentum,
                weight_decay=config.weight_decay,
                weight_decay_mask=_decayed(config, spec),
                adam_b1=config.b1,
                adam_b2=config.b2,
                adam_learning_rate=share,
                muon_weight_dimension_numbers=jax.tree.map(muon_dimensions, spec),
            )
            # optax's Muon decays everything that it hands to Adam, norms and biases too; so that part's decay is ours
            return optax.chain(muon, optax.add_decayed_weights(-config.weight_decay * share, by_adam))
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
    outputs = tuple(i for i, axis in enumerate(leaf.axes) if axis not in (*leaf.contracts, "layers"))
    return contrib.MuonDimensionNumbers(inputs, outputs)


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
    """Learning rate of a 0-based step. Warm-up step s of w has the share (s + 1) / w, so no step has rate 0."""
    config, peak, steps = experiment.schedule, experiment.optimizer.learning_rate, experiment.steps
    if isinstance(config, Noam):
        factor = peak / math.sqrt(experiment.model.d_model)

        def noam(step):
            count = jnp.asarray(step, jnp.float32) + 1
            return factor * jnp.minimum(count**-0.5, count * max(config.warmup, 1) ** -1.5)

        return noam
    rest = max(steps - config.warmup, 1)
    match config:
        case Cosine():
            body = optax.cosine_decay_schedule(peak, rest, alpha=config.final)
        case Linear():
            body = optax.linear_schedule(peak, peak * config.final, rest)
        case WSD():
            decay = max(round(steps * config.decay), 1)
            stable = max(rest - decay, 0)
            body = optax.linear_schedule(peak, peak * config.final, decay, transition_begin=stable)
        case Constant():
            body = optax.constant_schedule(peak)
    if config.warmup == 0:
        return body
    warmup = optax.linear_schedule(peak / config.warmup, peak, max(config.warmup - 1, 1))
    return optax.join_schedules([warmup, body], [config.warmup])
