"""What users of DINO and of masked autoencoders reported, tried here."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import dino_digits, mae_digits
from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.objectives import StepContext
from jaxformer.training import recipe
from jaxformer.zoo.dino import SelfDistillation, centred
from jaxformer.zoo.masked_patches import MaskedPatches
from jaxformer.zoo.sinkhorn import balanced
from tests.zoo.test_dino import MODEL, K, batch_of, context_of, same

MAE: ModelConfig = replace(mae_digits.experiment.model, num_layers=1)


def statistics(kind):
    """The statistics of a teacher after a collapse: to one direction, or to all alike; or none."""
    params, batch = models.init(MODEL, jax.random.key(0)), batch_of(64)
    temperature = {"uniform": 1e6, "one": 0.04, "none": 1e-3}[kind]
    objective = SelfDistillation(same, teacher_temperature=temperature)
    context = context_of(params, objective)
    if kind == "one":
        context.params["centre"] = jnp.where(jnp.arange(K) == 2, -5.0, 5.0)
    if kind == "none":
        teacher = context.params["teacher"]
        scores = models.apply(MODEL, teacher, batch["images"]).heads["prototypes"]
        context.params["centre"] = scores.mean(axis=0)
    metrics = objective(MODEL, params, batch, context).metrics
    return {name: float(total / weight) for name, (total, weight) in metrics.items()}


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/dino#43",
    right="A figure says that the answers tell nothing about the images.",
    hit="the one figure, the entropy of the mean answer, hid a uniform collapse",
)
@pytest.mark.parametrize(
    ("kind", "spread", "information"),
    [("one", 0.0, 0.0), ("uniform", math.log(K), 0.0)],
)
def test_a_collapse_is_seen(kind, spread, information):
    """The loss of a uniform collapse stands at log K, which looks like slow learning."""
    found = statistics(kind)
    # a softmax in float32, whose logits differ by 125 ("one") or by 1e-6 ("uniform")
    assert found["spread"] == pytest.approx(spread, abs=1e-4)
    assert found["information"] == pytest.approx(information, abs=1e-4)
    assert statistics("none")["information"] > 0.1


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/dinov2#173",
    right="Small batches in accumulation move the centre as one large batch does.",
)
def test_parts_of_a_batch_move_the_centre_as_the_whole_does():
    params, batch = models.init(MODEL, jax.random.key(0)), batch_of(8)
    objective = SelfDistillation(same)
    context = context_of(params, objective)

    def centre(rows):
        part = jax.tree.map(lambda x: x[rows], batch)
        return objective(MODEL, params, part, context).updates["objective"]["centre"]

    halves = (centre(slice(0, 4)) + centre(slice(4, 8))) / 2
    np.testing.assert_allclose(halves, centre(slice(None)), atol=1e-6)  # float32


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/dinov2#583",
    right="Scores that are large beside the temperature give finite answers.",
)
def test_balanced_answers_of_large_scores_are_finite():
    scores = 10 * jax.random.normal(jax.random.key(0), (2, 8, K))  # up to 3,000 after division
    told = balanced(scores, jnp.zeros(K), jnp.ones(8), 0.01)
    assert np.isfinite(told).all()
    np.testing.assert_allclose(told.sum(axis=-1), 1, rtol=1e-5)  # float32


@pytest.mark.report(
    "facebookresearch/dinov2#360",
    right="Several devices balance the answers of the whole batch, as one device does.",
    hit="accumulation and pmap balanced each part of a batch by itself",
)
def test_parts_of_a_batch_are_never_balanced_alone():
    """A mesh sees the whole batch. Accumulation and pmap show parts of it, and are refused."""
    whole, parts = (replace(dino_digits.experiment, accumulation=n) for n in (1, 2))
    recipe.build(whole)
    with pytest.raises(ConfigError, match=r"accumulation=2.*compares all rows"):
        recipe.build(parts)
    assert not SelfDistillation(same, targets=centred).whole_batch


def noise_of(count, seed=0):
    return jax.random.uniform(jax.random.key(seed), (count, mae_digits.PATCHES))


def digits_of(count):
    return jax.random.uniform(jax.random.key(9), (count, 8, 8, 1))


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/vit-pytorch#97",
    right="What is hidden decides the loss: another hidden image has another one.",
)
def test_the_target_is_the_image():
    params = models.init(MAE, jax.random.key(0))
    images, noise = digits_of(2), noise_of(2)
    hidden = np.asarray(mae_digits.hidden_patches(noise, MAE.embedding.kept))
    flags = mae_digits.as_images(np.repeat(hidden[..., None], 4, axis=2))

    def loss(images):
        batch = {"images": images, "weights": jnp.ones(2), "inputs": {"noise": noise}}
        return float(MaskedPatches()(MAE, params, batch, StepContext(jax.random.key(0))).loss)

    assert abs(loss(images + 0.5 * flags) - loss(images)) > 1e-2
    # the answer for the same seen patches is the same, so the loss has its least value there
    answer = models.apply(MAE, params, images, inputs={"noise": noise}).heads["reconstruction"]
    drawn = jnp.where(flags > 0, mae_digits.as_images(answer), images)
    assert loss(drawn) < 1e-10


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/mae#203",
    right="A probe of the trained encoder sees every patch.",
)
def test_a_probe_sees_every_patch():
    params = models.init(MAE, jax.random.key(0))
    images = np.asarray(digits_of(1))
    plain = mae_digits.features(MAE, params, images)
    for line in range(0, 8, 2):
        for column in range(0, 8, 2):
            changed = images.copy()
            changed[:, line : line + 2, column : column + 2] += 1.0
            assert np.abs(mae_digits.features(MAE, params, changed) - plain).max() > 1e-4


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/mae#146",
    right="A picture shows the seen patches as they are, and draws the hidden ones alone.",
)
def test_the_picture_keeps_what_was_seen():
    params = models.init(MAE, jax.random.key(0))
    images = np.asarray(digits_of(3))
    seen, drawn = mae_digits.reconstructed(MAE, params, images)
    is_seen = seen == images
    # 4 of 16 patches; a hidden pixel that happens to be 0.4 would count, too
    assert is_seen.mean() == pytest.approx(0.25)
    assert (drawn[is_seen] == images[is_seen]).all()
    assert np.abs(drawn - images)[~is_seen].min() > 0


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/vit-pytorch#253",
    right="A patch has the position of its place in the image, whichever patches are seen.",
)
def test_a_seen_patch_has_the_position_of_its_place():
    """The encoder alone, one patch seen: another place of the same pixels, another state."""
    one = replace(MAE, embedding=replace(MAE.embedding, ratio=0.9), heads=())
    assert one.embedding.kept == 1
    params = models.init(one, jax.random.key(0))
    images = jnp.ones((16, 8, 8, 1))
    noise = 1 - jnp.eye(16)  # image i shows patch i
    hidden = models.apply(one, params, images, inputs={"noise": noise}).hidden[:, 1]
    distances = jnp.linalg.norm(hidden[:, None] - hidden[None], axis=-1) + 1e3 * jnp.eye(16)
    assert distances.min() > 1e-2
