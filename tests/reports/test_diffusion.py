"""Diffusion transformers, guidance and flows: what users of their public code reported."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.models import Patches
from jaxformer.models.patches import patches as patches_of
from jaxformer.objectives import StepContext
from jaxformer.zoo.dit import AdaLNZero, Pixels
from jaxformer.zoo.flow_matching import FlowMatching, guided, sample, unknown_labels
from tests.zoo import test_dit as dits


@pytest.mark.thorough_after(1)
@pytest.mark.report(
    "facebookresearch/DiT#91",
    "huggingface/diffusers#5672",
    "apple/ml-stable-diffusion#168",
    right="images and patches that are not square come back with every pixel in its place",
)
@pytest.mark.parametrize("patch", [(2, 2), (4, 3), (2, 6), (1, 1)])
def test_patches_go_back_to_their_places(patch):
    of = Patches(image=(8, 12), patch=patch, channels=3, class_token=False)
    width = patch[0] * patch[1] * 3
    config = replace(dits.MODEL, embedding=of, d_model=width, num_heads=1, context_length=of.length)
    head = Pixels()(config)
    images = jax.random.normal(jax.random.key(0), (2, 8, 12, 3))
    hidden = patches_of(images, patch)  # a feature for each pixel: channel, line, column
    identity = jnp.eye(width).reshape(width, 3, *patch).transpose(0, 2, 3, 1)
    params = {"kernel": identity, "bias": jnp.zeros((*patch, 3))}
    np.testing.assert_array_equal(head.apply(params, hidden, None, None), images)


@pytest.mark.report(
    "huggingface/diffusers#13616",
    right="the unknown label is that of the model, whatever its number of labels",
)
@pytest.mark.parametrize("counts", [(3,), (10, 2), ()])
def test_the_unknown_label_follows_the_model(counts):
    model = replace(dits.MODEL, block=AdaLNZero(counts, features=8))
    assert unknown_labels(model).tolist() == [list(counts)]
    tables = models.spec(model)["shared"]["condition"]
    assert [tables[f"labels_{i}"].shape[0] - 1 for i in range(len(counts))] == list(counts)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/diffusers#1806",
    right="a model without labels trains, and draws images",
    hit="its data needed labels of no kind",
)
def test_a_model_without_labels():
    dits.test_a_model_without_labels_trains_and_samples()


@pytest.mark.thorough
@pytest.mark.report(
    "soran-ghaderi/torchebm#262",
    right="guidance of scale 0 is the model without labels, and of scale 1 the model with them",
)
def test_the_scales_zero_and_one():
    params, batch = dits.random_parameters(dits.MODEL), dits.batch_of(3)
    x, time = batch["images"], jnp.array([0.1, 0.5, 0.9])
    unknown = jnp.tile(unknown_labels(dits.MODEL), (3, 1))
    for scale, labels in ((0.0, unknown), (1.0, batch["labels"])):
        inputs = {"time": time, "labels": labels}
        expected = models.apply(dits.MODEL, params, x, inputs=inputs).logits
        found = guided(dits.MODEL, params, batch["labels"], scale)(x, time)
        # float32: free + (asked - free) is rounded twice
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.report(
    "YuchuanTian/U-DiT#12",
    "lucidrains/DALLE2-pytorch#235",
    "mlfoundations/open-diffusion#6",
    "pytorch/torchtitan#1259",
    right="the labels of an image are dropped together, in the asked share; dropping them acts",
)
def test_labels_are_dropped_together():
    """Read off the gradients of the tables: the rows of dropped labels get none."""
    params = dits.random_parameters(dits.MODEL)
    batch = dits.batch_of(1)

    def rows(key):
        objective = FlowMatching(drop=0.3)
        loss = lambda params: objective(dits.MODEL, params, batch, StepContext(key)).loss
        tables = jax.grad(loss)(params)["shared"]["condition"]
        return [jnp.abs(tables[f"labels_{i}"]).sum(axis=1) > 0 for i in range(2)]

    # the weight of an image is 1: the first one of `batch_of` has none
    batch["weights"] = jnp.ones(1)
    first, second = jax.jit(jax.vmap(rows))(jax.random.split(jax.random.key(0), 400))
    assert (first.sum(axis=1) == 1).all() and (second.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(first[:, -1], second[:, -1])
    assert 0.22 < first[:, -1].mean() < 0.38  # four standard deviations
    assert FlowMatching(drop=0.3).evaluation().drop == 0


@pytest.mark.report(
    "lucidrains/pi-zero-pytorch#13",
    "hpcaitech/Open-Sora#628",
    "lucidrains/rectified-flow-pytorch#18",
    "soran-ghaderi/torchebm#284",
    right="noise is at time 0 and images at time 1; the sampler goes from the one to the other",
)
def test_the_direction_of_time():
    dits.test_straight_lines_need_one_step()


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/diffusers#13616",
    right="a label that does not exist gives NaN, and no label of somebody else",
    hit="the last label of the table stood in for it",
)
@pytest.mark.parametrize("label", [-1, 4, 100])
def test_a_label_that_does_not_exist(label):
    params = dits.random_parameters(dits.MODEL)
    labels = jnp.array([[1, 1], [label, 1]])
    found = sample(dits.MODEL, params, jax.random.key(0), labels, steps=1)
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()
