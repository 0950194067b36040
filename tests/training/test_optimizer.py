"""Optimizers and schedules against their published definitions."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import models, params
from jaxformer.config import ConfigError
from jaxformer.training import optimizer
from jaxformer.training.experiment import (
    WSD,
    Adafactor,
    Adam,
    AdamW,
    Constant,
    Cosine,
    Linear,
    Lion,
    Muon,
    Noam,
)

from tests.training.test_step import EXPERIMENT  # isort: skip

CONFIG = replace(EXPERIMENT.model, d_model=32, num_layers=3)
SPEC = models.spec(CONFIG)
DECAYED = {"kernel", "tokens", "positions"}


def update(config, steps=1):
    """(parameters, gradients, updates) after some steps, at learning rate 1."""
    parameters = models.init(CONFIG, jax.random.key(0))
    gradients = models.init(CONFIG, jax.random.key(1))
    gradients = jax.tree.map(lambda g: g + 0.01, gradients)
    transform = optimizer.build(config, SPEC)
    state = transform.init(parameters)
    step = jax.jit(transform.update)
    for _ in range(steps):
        updates, state = step(gradients, state, parameters)
    return tuple(params.paths(tree) for tree in (parameters, gradients, updates))


@pytest.mark.parametrize("config", [Adam(), AdamW(), AdamW(weight_decay=0.0)])
def test_adam_first_update(config):
    """From zero moments, bias correction makes the first step g / (|g| + eps)."""
    parameters, gradients, updates = update(config)
    for path, g in gradients.items():
        decay = getattr(config, "weight_decay", 0.0) if path.split("/")[-1] in DECAYED else 0.0
        # float32: the bias-corrected ratio rounds at 1e-7 a few times
        np.testing.assert_allclose(
            updates[path], -(g / (jnp.abs(g) + config.eps) + decay * parameters[path]), atol=1e-5
        )


def test_lion_is_a_sign():
    parameters, gradients, updates = update(Lion(weight_decay=0.5))
    for path, g in gradients.items():
        decay = 0.5 if path.split("/")[-1] in DECAYED else 0.0
        np.testing.assert_allclose(updates[path], -(jnp.sign(g) + decay * parameters[path]), atol=1e-6)


def test_adafactor_steps_are_relative_to_the_parameters():
    parameters, gradients, updates = update(Adafactor())
    kernel = "layers/feedforward/up/kernel"
    # clipped to a root mean square of 1, then scaled by the parameter's own
    rms = lambda x: float(jnp.sqrt(jnp.mean(jnp.square(x))))
    assert rms(updates[kernel]) == pytest.approx(rms(parameters[kernel]), rel=0.1)
    assert (jnp.sign(updates[kernel]) == -jnp.sign(gradients[kernel])).mean() > 0.99


def as_matrices(path, update):
    """[L, ...] -> [L, inputs, outputs] by the layer's own meaning."""
    D = CONFIG.d_model
    if path.endswith("out/kernel"):
        return update.reshape(3, -1, D)
    return update.reshape(3, D, -1) if not path.endswith("down/kernel") else update.reshape(3, -1, D)


def test_muon_orthogonalises_every_layers_matrix_and_no_other_leaf():
    _, _, updates = update(Muon())
    routes = optimizer.routes(Muon(), SPEC)
    muon = [path for path, route in routes.items() if route.startswith("Muon")]
    assert sorted(muon) == sorted(p for p in routes if p.startswith("layers/") and p.endswith("kernel"))
    for path in muon:
        for layer in as_matrices(path, updates[path]):
            values = np.linalg.svd(np.asarray(layer), compute_uv=False)
            values = values / np.sqrt(max(1.0, layer.shape[1] / layer.shape[0]))
            # five Newton-Schulz steps bring singular values to 0.7 .. 1.2 (Jordan et al. 2024), the smallest not all the way
            assert np.median(values) > 0.6 and values.min() > 0.05 and values.max() < 1.3, path


def test_muons_decay_spares_what_it_should():
    """With zero gradients an update is decay alone: on matrices by Muon's rate, on embeddings by Adam's, on the rest none."""
    config = Muon(weight_decay=0.1)
    parameters = jax.tree.map(lambda a: a + 1.0, models.init(CONFIG, jax.random.key(0)))
    transform = optimizer.build(config, SPEC)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = transform.update(zeros, transform.init(parameters), parameters)
    for path, update in params.paths(updates).items():
        share = 0.0 if path.split("/")[-1] not in DECAYED else 1.0 if path.endswith("kernel") else 1e-3 / 2e-2
        np.testing.assert_allclose(update, -0.1 * share * params.paths(parameters)[path], atol=1e-6)


def test_routes_name_every_leaf():
    assert set(optimizer.routes(Muon(), SPEC)) == set(params.paths(SPEC))
    routes = optimizer.routes(AdamW(), SPEC)
    assert routes["layers/attention/query/kernel"] == "AdamW + decay"
    assert routes["layers/attention/query/bias"] == routes["final_norm/scale"] == "AdamW"


@pytest.mark.parametrize(
    "config", [AdamW(), Adafactor(weight_decay=0.1), Muon(weight_decay=0.1)], ids=lambda config: type(config).__name__
)
def test_what_is_frozen_gets_no_update_and_no_state_and_the_rest_trains_as_ever(config):
    frozen = "embedding|attention"
    mask = params.paths(params.mask(SPEC, frozen))
    parameters = models.init(CONFIG, jax.random.key(0))
    updates, sizes = [], []
    for transform in (optimizer.build(config, SPEC), optimizer.build(config, SPEC, frozen)):
        state = transform.init(parameters)
        updates.append(params.paths(jax.jit(transform.update)(parameters, state, parameters)[0]))
        sizes.append(
            {jax.tree_util.keystr(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        )
    for path, stays in mask.items():
        # float32: the same sums, compiled together with others
        np.testing.assert_allclose(updates[1][path], 0 if stays else updates[0][path], rtol=1e-5, atol=1e-6)
    assert not [path for path in sizes[1] if "attention" in path or "embedding" in path]
    assert sum(sizes[1].values()) < 0.7 * sum(sizes[0].values())
    routes = optimizer.routes(config, SPEC, frozen)
    assert {path for path, route in routes.items() if route == "frozen"} == {path for path in mask if mask[path]}


def test_frozen_parameters_have_no_gradient():
    parameters = models.init(CONFIG, jax.random.key(0))
    square = lambda tree: optax.tree.norm(optimizer.freeze(tree, "kernel"), squared=True)
    gradient = params.paths(jax.grad(square)(parameters))
    for path, leaf in params.paths(parameters).items():
        np.testing.assert_array_equal(gradient[path], 0 * leaf if "kernel" in path else 2 * leaf)


def test_freezing_everything_or_nothing_is_a_mistake():
    for frozen, count in (("", "every"), ("no_such_layer", "no")):
        with pytest.raises(ConfigError, match=f"matches {count} parameter; .* such as embedding/"):
            optimizer.build(AdamW(), SPEC, frozen)
    with pytest.raises(ConfigError, match=r"frozen='\(': no regular expression"):
        replace(EXPERIMENT, frozen="(")


@pytest.mark.parametrize("config", [Adam(), AdamW(), Adafactor(), Lion(), Muon()])
def test_every_optimizer_descends(config):
    """On a quadratic around zero, with a small rate."""
    transform = optimizer.build(config, SPEC)
    parameters = models.init(CONFIG, jax.random.key(0))
    state = transform.init(parameters)

    @jax.jit
    def step(parameters, state):
        updates, state = transform.update(parameters, state, parameters)
        return jax.tree.map(lambda p, u: p + 0.003 * u, parameters, updates), state

    before = float(optax.tree.norm(parameters))
    for _ in range(20):
        parameters, state = step(parameters, state)
    assert float(optax.tree.norm(parameters)) < before


def rates(schedule, steps=100, **changes):
    f = optimizer.schedule(replace(EXPERIMENT, schedule=schedule, steps=steps, **changes))
    return np.array([float(f(jnp.int32(step))) for step in range(steps)])


def test_schedules():
    peak = EXPERIMENT.optimizer.learning_rate
    for schedule in (Cosine(warmup=10), Linear(warmup=10), WSD(warmup=10), Constant(warmup=10)):
        np.testing.assert_allclose(rates(schedule)[:10], peak * np.arange(1, 11) / 10, rtol=1e-5)
        assert (rates(schedule) > 0).all()  # the first update does something
        assert rates(type(schedule)())[0] == pytest.approx(peak)
    steps = np.arange(90)
    np.testing.assert_allclose(
        rates(Cosine(warmup=10, final=0.1))[10:], peak * (0.1 + 0.45 * (1 + np.cos(np.pi * steps / 90))), rtol=1e-5
    )
    np.testing.assert_allclose(rates(Linear(warmup=10, final=0.5))[10:], peak * (1 - 0.5 * steps / 90), rtol=1e-5)
    wsd = rates(WSD(warmup=10, decay=0.3, final=0.0))
    np.testing.assert_allclose(wsd[10:71], peak, rtol=1e-6)
    np.testing.assert_allclose(wsd[70:], peak * (1 - np.arange(30) / 30), rtol=1e-5)


def test_noam_peaks_where_the_paper_says():
    model = replace(EXPERIMENT.model, d_model=512, num_heads=8)
    noam = optimizer.schedule(replace(EXPERIMENT, model=model, optimizer=Adam(), schedule=Noam(4000), steps=10_000))
    assert float(noam(3999)) == pytest.approx(6.99e-4, rel=1e-3)
    for step in (0, 10, 3000, 9000):
        s = step + 1
        assert float(noam(step)) == pytest.approx(512**-0.5 * min(s**-0.5, s * 4000**-1.5), rel=1e-5)


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_a_learning_rate_must_be_a_positive_number(rate):
    for kind in (Adam, AdamW, Adafactor, Lion, Muon):
        with pytest.raises(ConfigError, match="learning_rate"):
            kind(learning_rate=rate)
