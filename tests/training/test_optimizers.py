"""Optimizers and schedules against their published definitions."""

import math
import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.training import (
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
    optimizers,
)

from tests.training.test_step import EXPERIMENT  # isort: skip

CONFIG = replace(EXPERIMENT.model, d_model=32, num_layers=3)
SPEC = models.spec(CONFIG)
DECAYED = {"kernel", "tokens"}
init = jax.jit(partial(models.init, CONFIG))


def update(config, steps=1):
    """(parameters, gradients, updates) after some steps, at learning rate 1."""
    parameters = init(jax.random.key(0))
    gradients = jax.tree.map(lambda g: g + 0.01, init(jax.random.key(1)))
    transform = optimizers.build(config, SPEC)
    state = transform.init(parameters)
    step = jax.jit(transform.update)
    for _ in range(steps):
        updates, state = step(gradients, state, parameters)
    return tuple(params.paths(tree) for tree in (parameters, gradients, updates))


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_lion_is_a_sign():
    parameters, gradients, updates = update(Lion(weight_decay=0.5))
    for path, g in gradients.items():
        decay = 0.5 if path.split("/")[-1] in DECAYED else 0.0
        np.testing.assert_allclose(
            updates[path], -(jnp.sign(g) + decay * parameters[path]), atol=1e-6
        )


@pytest.mark.thorough
def test_adafactor_steps_are_relative_to_the_parameters():
    parameters, gradients, updates = update(Adafactor())
    kernel = "layers/feedforward/up/kernel"
    # clipped to a root mean square of 1, then scaled by the parameter's own
    rms = lambda x: float(jnp.sqrt(jnp.mean(jnp.square(x))))
    assert rms(updates[kernel]) == pytest.approx(rms(parameters[kernel]), rel=0.1)
    assert (jnp.sign(updates[kernel]) == -jnp.sign(gradients[kernel])).mean() > 0.99


def apart(tree):
    """The same parameters, each layer's (and expert's) in a leaf of its own."""
    leaves = {}
    for path, spec in params.paths(STACKED).items():
        sizes = optimizers.stack_sizes(spec)
        for index in np.ndindex(sizes):
            leaves["/".join([path, *map(str, index)])] = params.paths(tree)[path][index]
    return leaves


ZEROS = jax.nn.initializers.zeros
STACKED = {
    # large enough to be factored
    "kernel": params.Spec((2, 130, 140), ("layers", "embed", "mlp"), ZEROS, ("embed",)),
    "scale": params.Spec((130, 128), ("layers", "embed"), ZEROS),  # 130 vectors: no matrix
    # experts are its outputs
    "router": params.Spec((2, 6, 4), ("layers", "embed", "expert"), ZEROS, ("embed",)),
    "experts": params.Spec((2, 4, 6, 5), ("layers", "expert", "embed", "mlp"), ZEROS, ("embed",)),
    "tokens": params.Spec((150, 130), ("vocab", "embed"), ZEROS),
    "bias": params.Spec((7,), ("embed",), ZEROS),
}


def random_trees(count, seed=0):
    """Trees of `STACKED` whose layers differ in size, as gradients and parameters do."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        size = np.exp(
            rng.normal(
                size=(
                    *optimizers.stack_sizes(spec),
                    *(1,) * (len(spec.shape) - len(optimizers.stack_sizes(spec))),
                )
            )
        )
        return jnp.asarray(rng.normal(size=spec.shape) * size, jnp.float32)

    return [jax.tree.map(leaf, STACKED) for _ in range(count)]


def steps_of(transform, parameters, gradients):
    """The parameters after a step of 0.1 with each gradient."""
    state = transform.init(parameters)

    @jax.jit
    def step(parameters, state, gradient):
        updates, state = transform.update(gradient, state, parameters)
        return jax.tree.map(lambda p, u: p + 0.1 * u, parameters, updates), state

    for gradient in gradients:
        parameters, state = step(parameters, state, gradient)
    return parameters


@pytest.mark.thorough
def test_adafactor_of_stacked_layers_is_optax_on_each_of_them():
    """The norms, means and factors of the paper are those of one layer's matrix, however parameters
    are stored."""
    start, *gradients = random_trees(9)
    ours = apart(steps_of(optimizers.build(Adafactor(), STACKED), start, gradients))
    some = lambda tree: {
        path: leaf for path, leaf in apart(tree).items() if not path[-2:].isdigit()
    }
    # nine of the 130 vectors are enough
    theirs = steps_of(optax.adafactor(), some(start), map(some, gradients))
    for path, leaf in theirs.items():
        # eight steps of 10 % of float32 numbers, each of which passes two means
        np.testing.assert_allclose(ours[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.thorough
def test_adafactor_where_a_whole_stack_is_frozen():
    start, gradient = random_trees(2)
    transform = optimizers.build(Adafactor(), STACKED, "experts|kernel|router")
    updates, _ = jax.jit(transform.update)(gradient, transform.init(start), start)
    assert not any(np.asarray(updates[name]).any() for name in ("experts", "kernel", "router"))
    assert all(np.asarray(updates[name]).all() for name in ("scale", "tokens", "bias"))


@pytest.mark.thorough
def test_muon_is_optax_muon_on_matrices_and_optax_adamw_elsewhere():
    """Plain AdamW: optax's own Muon gives Nesterov momentum to what it hands to Adam, and decays
    all of it."""
    config = Muon(weight_decay=0.1, not_decayed="bias|scale")
    start, *gradients = random_trees(9)
    ours = apart(steps_of(optimizers.build(config, STACKED), start, gradients))
    by_muon = {path for path in ours if path.split("/")[0] in ("kernel", "router", "experts")}
    few = lambda tree, paths: {path: leaf for path, leaf in apart(tree).items() if path in paths}
    muon = optax.contrib.muon(1.0, beta=config.momentum, weight_decay=0.1)
    share = config.adam_learning_rate / config.learning_rate
    decayed = {path: path.startswith("tokens") for path in ours if path not in by_muon}
    adamw = optax.adamw(share, b1=config.b1, b2=config.b2, weight_decay=0.1, mask=decayed)
    for transform, paths in ((muon, by_muon), (adamw, set(decayed))):
        theirs = steps_of(
            transform, few(start, paths), [few(gradient, paths) for gradient in gradients]
        )
        for path, leaf in theirs.items():
            # five Newton-Schulz steps in float32, compiled in a batch of layers and alone; steps
            # are of size 0.1
            np.testing.assert_allclose(ours[path], leaf, rtol=1e-5, atol=1e-4, err_msg=path)


def as_matrices(path, update):
    """[L, ...] -> [L, inputs, outputs] by the layer's own meaning."""
    D = CONFIG.d_model
    if path.endswith("out/kernel"):
        return update.reshape(3, -1, D)
    return (
        update.reshape(3, D, -1) if not path.endswith("down/kernel") else update.reshape(3, -1, D)
    )


@pytest.mark.thorough
def test_muon_orthogonalises_every_layers_matrix_and_no_other_leaf():
    _, _, updates = update(Muon())
    routes = optimizers.routes(Muon(), SPEC)
    muon = [path for path, route in routes.items() if route.startswith("Muon")]
    assert sorted(muon) == sorted(
        p for p in routes if p.startswith("layers/") and p.endswith("kernel")
    )
    for path in muon:
        for layer in as_matrices(path, updates[path]):
            values = np.linalg.svd(np.asarray(layer), compute_uv=False)
            values = values / np.sqrt(max(1.0, layer.shape[1] / layer.shape[0]))
            # five Newton-Schulz steps bring singular values to 0.7 .. 1.2 (Jordan et al. 2024), the
            # smallest not all the way
            assert np.median(values) > 0.6 and values.min() > 0.05 and values.max() < 1.3, path


@pytest.mark.thorough
def test_muons_decay_spares_what_it_should():
    """With zero gradients an update is decay alone: on matrices by Muon's rate, on embeddings by
    Adam's, on the rest none."""
    config = Muon(weight_decay=0.1)
    parameters = jax.tree.map(lambda a: a + 1.0, init(jax.random.key(0)))
    transform = optimizers.build(config, SPEC)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = transform.update(zeros, transform.init(parameters), parameters)
    for path, update in params.paths(updates).items():
        share = (
            0.0
            if path.split("/")[-1] not in DECAYED
            else 1.0
            if path.endswith("kernel")
            else 1e-3 / 2e-2
        )
        np.testing.assert_allclose(update, -0.1 * share * params.paths(parameters)[path], atol=1e-6)


def test_routes_name_every_leaf():
    assert set(optimizers.routes(Muon(), SPEC)) == set(params.paths(SPEC))
    routes = optimizers.routes(AdamW(), SPEC)
    assert routes["layers/attention/query/kernel"] == "AdamW + decay"
    assert routes["layers/attention/query/bias"] == routes["final_norm/scale"] == "AdamW"


@dataclass(frozen=True)
class Decayed:
    """An optimizer of the user's own: its field has the name of ours, and the rest is its own
    affair."""

    weight_decay: float = 0.1

    def __call__(self, spec):
        return optax.adamw(1.0, weight_decay=self.weight_decay)


@pytest.mark.parametrize("frozen", [None, "bias"])
@pytest.mark.parametrize("rate", [1.0, 0.25])  # of MuP
def test_an_optimizer_of_the_users_own_may_have_weight_decay(frozen, rate):
    spec = jax.tree.map(lambda leaf: replace(leaf, rate=rate), SPEC)
    assert isinstance(optimizers.build(Decayed(), spec, frozen), optax.GradientTransformation)
    routes = optimizers.routes(Decayed(), spec, frozen)
    factor = "" if rate == 1 else ", 0.25 of the rate"
    assert routes["layers/attention/query/kernel"] == f"Decayed{factor}"
    assert routes["layers/attention/query/bias"] == (
        f"Decayed{factor}" if frozen is None else "frozen"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [AdamW(), Adafactor(weight_decay=0.1), Muon(weight_decay=0.1)],
    ids=lambda config: type(config).__name__,
)
def test_what_is_frozen_gets_no_update_and_no_state_and_the_rest_trains_as_ever(config):
    frozen = "embedding|attention"
    mask = params.paths(params.mask(SPEC, frozen))
    parameters = init(jax.random.key(0))
    updates, sizes = [], []
    for transform in (optimizers.build(config, SPEC), optimizers.build(config, SPEC, frozen)):
        state = transform.init(parameters)
        updates.append(params.paths(jax.jit(transform.update)(parameters, state, parameters)[0]))
        sizes.append(
            {
                jax.tree_util.keystr(path): leaf.size
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            }
        )
    for path, stays in mask.items():
        # float32: the same sums, compiled together with others
        np.testing.assert_allclose(
            updates[1][path], 0 if stays else updates[0][path], rtol=1e-5, atol=1e-6
        )
    assert not [path for path in sizes[1] if "attention" in path or "embedding" in path]
    assert sum(sizes[1].values()) < 0.7 * sum(sizes[0].values())
    routes = optimizers.routes(config, SPEC, frozen)
    assert {path for path, route in routes.items() if route == "frozen"} == {
        path for path in mask if mask[path]
    }


@pytest.mark.thorough
def test_frozen_parameters_have_no_gradient():
    parameters = init(jax.random.key(0))
    square = lambda tree: optax.tree.norm(optimizers.freeze(tree, SPEC, "kernel"), squared=True)
    gradient = params.paths(jax.grad(square)(parameters))
    for path, leaf in params.paths(parameters).items():
        np.testing.assert_array_equal(gradient[path], 0 * leaf if "kernel" in path else 2 * leaf)


def test_freezing_everything_or_nothing_is_a_mistake():
    for frozen, count in (("", "every"), ("no_such_layer", "no")):
        with pytest.raises(ConfigError, match=f"matches {count} parameter; .* such as embedding/"):
            optimizers.build(AdamW(), SPEC, frozen)
    with pytest.raises(ConfigError, match=r"frozen='\(': no regular expression"):
        replace(EXPERIMENT, frozen="(")


@pytest.mark.thorough
@pytest.mark.parametrize("config", [Adam(), AdamW(), Adafactor(), Lion(), Muon()])
def test_every_optimizer_descends(config):
    """On a quadratic around zero, with a small rate."""
    transform = optimizers.build(config, SPEC)
    parameters = init(jax.random.key(0))
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
    f = schedule(replace(EXPERIMENT, schedule=schedule, steps=steps, **changes))
    # of one shape: other ones would be compiled anew
    return np.asarray(f(np.minimum(np.arange(300), steps - 1)))[:steps]


RUNS = st.integers(1, 300).flatmap(
    lambda steps: st.tuples(st.just(steps), st.integers(0, steps - 1))
)
SHARES = st.floats(0, 1, width=32)


@pytest.mark.thorough
@settings(deadline=None, max_examples=30)
@given(RUNS, st.sampled_from([Cosine, Linear, WSD, Constant]), SHARES, SHARES)
def test_schedules_keep_their_word_at_both_ends(run, kind, final, decay):
    """Warm-up in equal parts up to the peak, which is reached; never up again; the last step has
    `final` of the peak."""
    steps, warmup = run
    peak, top = EXPERIMENT.optimizer.learning_rate, max(warmup, 1) - 1
    options = {"final": final} if kind in (Cosine, Linear) else {}
    if kind is WSD:
        length = max(round(steps * decay), 1) if decay else 0
        if warmup and warmup + length > steps:
            with pytest.raises(
                ConfigError,
                match=f"schedule.warmup={warmup}: overlaps the last {length} of steps={steps}",
            ):
                replace(EXPERIMENT, steps=steps, schedule=WSD(warmup, decay, final))
            return
        options = {"final": final, "decay": decay}
    found = rates(kind(warmup=warmup, **options), steps) / peak
    float32 = dict(rtol=1e-5, atol=1e-6)  # some roundings of numbers up to one
    np.testing.assert_allclose(found[: top + 1], np.arange(1, top + 2) / max(warmup, 1), **float32)
    assert found.max() <= 1 + 1e-6 and (np.diff(found[top:]) <= 1e-6).all()
    assert (found[:-1] > 0).all() or final < 1e-6 or kind is Cosine
    if steps > 1:
        stays = kind is Constant or (kind is WSD and not decay)
        np.testing.assert_allclose(found[-1], 1.0 if stays else final, **float32)
    done = (np.arange(steps) - top)[top:] / max(steps - 1 - top, 1)
    if kind is Linear:
        np.testing.assert_allclose(found[top:], 1 + (final - 1) * done, **float32)
    if kind is Cosine:
        np.testing.assert_allclose(
            found[top:], final + (1 - final) * (1 + np.cos(np.pi * done)) / 2, **float32
        )
    if kind is WSD and top < steps - 1 - length:
        np.testing.assert_allclose(found[top : steps - length], 1, **float32)
        if length:
            np.testing.assert_allclose(
                np.diff(found[steps - 1 - length :]), (final - 1) / length, **float32
            )


@pytest.mark.thorough
def test_schedules_agree_with_optax_where_it_counts_alike():
    """Optax's decay over steps - 1 intervals has its end at the last step."""
    for ours, theirs in (
        (Cosine(final=0.1), optax.cosine_decay_schedule(1.0, 99, alpha=0.1)),
        (Linear(final=0.2), optax.linear_schedule(1.0, 0.2, 99)),
        (WSD(decay=0.3, final=0.2), optax.linear_schedule(1.0, 0.2, 30, transition_begin=69)),
    ):
        found = rates(ours) / EXPERIMENT.optimizer.learning_rate
        # float32 cosines
        np.testing.assert_allclose(found, jax.vmap(theirs)(jnp.arange(100)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Cosine(warmup=20), "schedule.warmup=20: must be below steps=20; lower it or raise steps"),
        (Constant(warmup=21), "schedule.warmup=21: must be below steps=20"),
        (WSD(warmup=11, decay=0.5), "schedule.warmup=11: overlaps the last 10 of steps=20"),
        (WSD(decay=1.5), "schedule.decay=1.5: must be in"),
        (Linear(final=-0.1), "schedule.final=-0.1: must be in"),
        (Cosine(final=2.0), "schedule.final=2.0: must be in"),
    ],
)
def test_impossible_schedules_are_refused(schedule, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        replace(EXPERIMENT, schedule=schedule)
    replace(EXPERIMENT, schedule=Noam(4000))  # the paper's, for runs of any length


def test_noam_peaks_where_the_paper_says():
    model = replace(EXPERIMENT.model, d_model=512, num_heads=8)
    noam = Noam(4000)(replace(EXPERIMENT, model=model, steps=10_000))
    assert float(noam(3999)) == pytest.approx(6.99e-4, rel=1e-3)
    for step in (0, 10, 3000, 9000):
        s = step + 1
        assert float(noam(step)) == pytest.approx(
            512**-0.5 * min(s**-0.5, s * 4000**-1.5), rel=1e-5
        )


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_a_learning_rate_must_be_a_positive_number(rate):
    for kind in (Adam, AdamW, Adafactor, Lion, Muon):
        with pytest.raises(ConfigError, match="learning_rate"):
            kind(learning_rate=rate)
