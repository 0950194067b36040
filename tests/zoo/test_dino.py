"""DINO beside a second definition: NumPy in float64, image by image and view by view."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import ModelConfig, Patches
from jaxformer.objectives import StepContext
from jaxformer.zoo.dino import (
    Prototypes,
    SelfDistillation,
    between_views,
    centred,
    mean_of_images,
    unit,
)
from jaxformer.zoo.sinkhorn import balanced

W, V, B, K = 2, 5, 3, 7
HEAD = Prototypes(count=K, hidden=10, bottleneck=4)
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=8,
    num_heads=2,
    context_length=5,
    embedding=Patches(image=(4, 4), patch=(2, 2), channels=1),
    heads=(HEAD,),
    masks=(full(),),
    init_std=0.3,
)


def same(key, images):
    """A view that is the image."""
    return images


def brighter(key, images):
    return images + jax.random.uniform(key, (len(images), 1, 1, 1))


OBJECTIVE = SelfDistillation(brighter, brighter, small_views=2, momentum=0.9)


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def batch_of(count=B, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.random((count, 4, 4, 1)).astype(np.float32)
    return {"images": jnp.asarray(images), "weights": jnp.ones(count)}


def context_of(params, objective=OBJECTIVE, step=1, seed=5):
    """A step whose teacher is another model, with a centre."""
    own = parameters.init(objective.spec(MODEL), jax.random.key(seed))
    own["centre"] = jax.random.normal(jax.random.key(seed + 1), (K,)) / 10
    return StepContext(jax.random.key(3), step=jnp.int32(step), params=own)


@pytest.mark.thorough
def test_the_loss_is_the_mean_over_pairs_of_different_views():
    rng = np.random.default_rng(0)
    known, answers = rng.standard_normal((W, B, K)), rng.standard_normal((V, B, K))
    centre = rng.standard_normal(K)
    with jax.enable_x64(True):
        told = centred(jnp.asarray(known), jnp.asarray(centre), jnp.ones(B), 0.3)
        loss = between_views(told, jnp.asarray(answers), 0.2)
    for b in range(B):
        pairs = [
            -(np.exp(log_softmax((known[w, b] - centre) / 0.3)) * log_softmax(answers[v, b] / 0.2))
            for w in range(W)
            for v in range(V)
            if v != w
        ]
        # sums of a few dozen numbers in float64
        np.testing.assert_allclose(loss[b], np.sum(pairs) / len(pairs), rtol=1e-13)
        assert len(pairs) == W * (V - 1)


@pytest.mark.thorough
def test_balanced_answers_are_those_of_sinkhorn_and_knopp():
    """The loop of the paper on the matrix of exp(s / T), without the image of weight 0."""
    rng = np.random.default_rng(1)
    known = rng.standard_normal((W, B, K))
    known[:, 1] = np.nan
    weights = np.array([1.0, 0.0, 2.0])
    with jax.enable_x64(True):
        told = balanced(jnp.asarray(known), jnp.zeros(K), jnp.asarray(weights), 0.3)
    q = np.exp(known[:, [0, 2]] / 0.3)
    for _ in range(3):
        q /= (weights[[0, 2]][:, None] * q).sum(axis=(0, 1))
        q /= q.sum(axis=2, keepdims=True)
    # products and sums of a few dozen numbers in float64
    np.testing.assert_allclose(told[:, [0, 2]], q, rtol=1e-12)
    assert np.isfinite(told).all()
    assert np.isfinite(balanced(jnp.asarray(known), jnp.zeros(K), jnp.zeros(B), 0.3)).all()


@pytest.mark.thorough
def test_balanced_answers_use_all_directions_alike():
    rng = np.random.default_rng(2)
    known = rng.standard_normal((2, 64, K)) / 10
    known[..., 0] += 1  # one direction is ahead everywhere
    told = balanced(jnp.asarray(known), jnp.zeros(K), jnp.ones(64), 0.1)
    used = told.mean(axis=(0, 1))
    np.testing.assert_allclose(used, 1 / K, rtol=0.1)  # after three rounds
    wins = centred(jnp.asarray(known), jnp.zeros(K), jnp.ones(64), 0.1).mean(axis=(0, 1))
    assert wins[0] > 0.9


@pytest.mark.thorough
def test_the_head_answers_with_cosines():
    with jax.enable_x64(True):
        spec = HEAD(MODEL).spec
        params = parameters.init(spec, jax.random.key(0), jnp.float64)
        hidden = jax.random.normal(jax.random.key(1), (B, 5, 8), jnp.float64)
        answers = HEAD(MODEL).apply(params, hidden, None, None)
        params, hidden = jax.tree.map(np.asarray, (params, hidden))
    for b in range(B):
        x = hidden[b, 0]
        for i in range(3):
            x = x @ params[f"map_{i}"]["kernel"] + params[f"map_{i}"]["bias"]
            if i < 2:
                x = np.array([z * (1 + math.erf(z / math.sqrt(2))) / 2 for z in x])
        for k in range(K):
            direction = params["directions"][:, k]
            cosine = x @ direction / np.linalg.norm(x) / np.linalg.norm(direction)
            np.testing.assert_allclose(answers[b, k], cosine, atol=1e-13)


@pytest.mark.thorough
def test_a_vector_of_zeros_has_no_gradient():
    x = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(unit(x), [[0, 0], [0.6, 0.8]], atol=1e-7)  # float32
    gradient = jax.grad(lambda x: unit(x).sum())(x)
    assert (gradient[0] == 0).all() and np.isfinite(gradient).all()


@pytest.mark.thorough
def test_the_objective_is_its_parts():
    params, batch = models.init(MODEL, jax.random.key(0)), batch_of()
    context = context_of(params)
    sums = OBJECTIVE(MODEL, params, batch, context)
    keys = jax.random.split(context.key, 5)[:4]
    views = [brighter(key, batch["images"]) for key in keys]

    def scores(tree, seen):
        return jnp.stack([models.apply(MODEL, tree, view).heads["prototypes"] for view in seen])

    known = scores(context.params["teacher"], views[:2])
    told = centred(known, context.params["centre"], batch["weights"], OBJECTIVE.teacher_temperature)
    loss = between_views(told, scores(params, views), OBJECTIVE.temperature).sum()
    # float32; views are computed one by one here, together there
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    assert sums.weight == B and sums.unit == "images"
    centre = context.params["centre"]
    new = sums.updates["objective"]
    np.testing.assert_allclose(
        new["centre"], 0.9 * centre + 0.1 * known.mean(axis=(0, 1)), atol=1e-6
    )
    for old, student, moved in zip(
        *map(jax.tree.leaves, (context.params["teacher"], params, new["teacher"])), strict=True
    ):
        np.testing.assert_allclose(moved, 0.9 * old + 0.1 * student, atol=1e-6)


@pytest.mark.thorough
def test_before_the_first_step_the_teacher_is_the_student():
    params = models.init(MODEL, jax.random.key(0))
    sums = OBJECTIVE(MODEL, params, batch_of(), context_of(params, step=0))
    new = sums.updates["objective"]["teacher"]
    assert all(map(np.array_equal, jax.tree.leaves(new), jax.tree.leaves(params)))


@pytest.mark.thorough
def test_the_teacher_has_no_gradient_and_no_dropout():
    model = replace(MODEL, dropout_rate=0.5)
    params, batch = models.init(model, jax.random.key(0)), batch_of()
    objective = SelfDistillation(same)
    context = context_of(params, objective)

    def loss(params, own):
        return objective(model, params, batch, replace(context, params=own)).loss

    of_student, of_own = jax.grad(loss, argnums=(0, 1))(params, context.params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(of_own))
    assert any((leaf != 0).any() for leaf in jax.tree.leaves(of_student))
    # the first step's loss is not that of a student with itself: the student has dropout
    scores = models.apply(model, context.params["teacher"], batch["images"]).heads["prototypes"]
    new = objective(model, params, batch, context).updates["objective"]["centre"]
    np.testing.assert_allclose(
        new, 0.9 * context.params["centre"] + 0.1 * scores.mean(axis=0), atol=1e-6
    )


@pytest.mark.thorough
@pytest.mark.parametrize("targets", [centred, balanced])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_an_image_without_weight_may_be_anything(weight, targets):
    """It counts neither in the loss, nor in the centre, nor in the spread."""
    params, batch = models.init(MODEL, jax.random.key(0)), batch_of()
    objective = SelfDistillation(same, targets=targets)
    context = context_of(params, objective)
    damaged = {
        "images": batch["images"].at[1].set(jnp.nan),
        "weights": batch["weights"].at[1].set(weight),
    }
    kept = jax.tree.map(lambda x: x[jnp.array([0, 2])], batch)
    sums = objective(MODEL, params, damaged, context)
    expected = objective(MODEL, params, kept, context)
    for of_sums in (
        lambda sums: sums.loss,
        lambda sums: sums.updates["objective"]["centre"],
        lambda sums: sums.metrics["spread"][0],
    ):
        if weight:
            assert not np.isfinite(of_sums(sums)).all()  # a damaged image is not hidden
        else:
            np.testing.assert_allclose(of_sums(sums), of_sums(expected), rtol=1e-5)


def test_a_batch_without_any_weight_changes_no_centre_to_nan():
    assert (mean_of_images(jnp.full((2, 3, 4), jnp.nan), jnp.zeros(3)) == 0).all()


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    params, batch = models.init(MODEL, jax.random.key(0)), batch_of()
    bare = replace(MODEL, heads=())
    with pytest.raises(ConfigError, match=r"needs a model with the head zoo.dino.Prototypes"):
        SelfDistillation(same).spec(bare)

    def cut(key, images):
        return images[:, :2]

    with pytest.raises(ConfigError, match=r"view 2 gives \[3, 2, 4, 1\] for images \[3, 4, 4, 1\]"):
        objective = SelfDistillation(same, cut, small_views=1)
        objective(MODEL, params, batch, context_of(params, objective))
    for field in ("momentum", "centre_momentum", "temperature", "teacher_temperature"):
        with pytest.raises(ConfigError, match=rf"objective.{field}=-0.1"):
            partial(SelfDistillation, same)(**{field: -0.1})
