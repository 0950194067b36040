"""DETR's matching and losses beside a second definition: NumPy in float64, and every matching."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import ones

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig, Patches, blocks
from jaxformer.models.config import AttentionPositions, Learned
from jaxformer.objectives import StepContext
from jaxformer.params import Spec
from jaxformer.zoo.detr import Boxes, ObjectClasses, no_content
from jaxformer.zoo.set_prediction import SetPrediction, generalised_iou, match

B, Q, M, C = 4, 6, 3, 5  # the last class is "no object"


def predictions(seed):
    """(logits [B, Q, C], boxes [B, Q, 4], a batch)."""
    rng = np.random.default_rng(seed)
    is_object = np.arange(M)[None] < rng.integers(0, M + 1, size=(B, 1))
    batch = {
        "classes": rng.integers(C - 1, size=(B, M)).astype(np.int32),
        "boxes": rng.uniform(0.05, 0.6, (B, M, 4)).astype(np.float32),
        "is_object": is_object.astype(np.float32),
        "weights": np.float32([1, 1, 0, 1]),
    }
    logits = rng.standard_normal((B, Q, C)).astype(np.float32)
    boxes = rng.uniform(0.05, 0.6, (B, Q, 4)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(boxes), jax.tree.map(jnp.asarray, batch)


def iou_of(a, b):
    """GIoU of two boxes, by areas of rectangles."""
    sides = []
    for i in (0, 1):
        low_a, high_a, low_b, high_b = (x[i] + s * x[i + 2] / 2 for x in (a, b) for s in (-1, 1))
        both = max(0.0, min(high_a, high_b) - max(low_a, low_b))
        sides.append((both, max(high_a, high_b) - min(low_a, low_b)))
    both = sides[0][0] * sides[1][0]
    hull = sides[0][1] * sides[1][1]
    either = a[2] * a[3] + b[2] * b[3] - both
    return both / either - (hull - either) / hull


def expected(logits, boxes, batch, objective):
    """(class error, its weights, distance, 1 - GIoU, objects), by trying every matching."""
    logits, boxes, goal = (np.float64(x) for x in (logits, boxes, batch["boxes"]))
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    sums = np.zeros(5)
    for b in np.flatnonzero(batch["weights"]):
        objects = np.flatnonzero(batch["is_object"][b])
        classes = np.asarray(batch["classes"][b])
        distances = np.abs(boxes[b][:, None] - goal[b][None]).sum(axis=-1)
        overlaps = np.array([[iou_of(q, m) for m in goal[b]] for q in boxes[b]])
        cost = objective.box * distances - objective.overlap * overlaps
        cost -= np.exp(log_p[b])[:, classes]
        matchings = itertools.permutations(range(Q), len(objects))
        best = min(matchings, key=lambda chosen, cost=cost, m=objects: cost[list(chosen), m].sum())
        says = dict(zip(best, objects, strict=True))
        for q in range(Q):
            weight = 1.0 if q in says else objective.no_object
            wanted = classes[says[q]] if q in says else C - 1
            sums[:2] += -weight * log_p[b, q, wanted], weight
        for q, m in says.items():
            sums[2:] += distances[q, m], 1 - overlaps[q, m], 1
    return sums


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_losses_are_those_of_the_best_of_all_matchings(seed):
    logits, boxes, batch = predictions(seed)
    objective = SetPrediction(no_object=0.2, box=3.0, overlap=1.5)
    found = objective.of_predictions(logits, boxes, batch)
    error, weights, distance, lacking, count = expected(logits, boxes, batch, objective)
    metrics = [found.metrics[name] for name in ("class_loss", "box_distance", "box_iou_lacking")]
    # float32: sums of some twenty terms
    np.testing.assert_allclose(
        np.float64(metrics), [[error, weights], [distance, count], [lacking, count]], rtol=1e-5
    )
    np.testing.assert_allclose(found.loss, error + 3 * distance + 1.5 * lacking, rtol=1e-5)
    assert found.weight == 3 and found.unit == "images"  # the third image does not count


@pytest.mark.thorough
def test_the_order_of_objects_and_what_padding_holds_change_nothing():
    logits, boxes, batch = predictions(7)
    batch["is_object"] = jnp.asarray([[1, 1, 0]] * B, jnp.float32)
    objective = SetPrediction()
    loss = lambda batch: objective.of_predictions(logits, boxes, batch).loss
    of_objects = {name: batch[name] for name in ("classes", "boxes", "is_object")}
    swapped = jax.tree.map(lambda x: x[:, jnp.array([1, 0, 2])], of_objects)
    np.testing.assert_allclose(loss(batch | swapped), loss(batch), rtol=1e-6)
    other = batch | {
        "classes": batch["classes"].at[:, 2].set(1),
        "boxes": batch["boxes"].at[:, 2].set(0.9),
    }
    assert loss(other) == loss(batch)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["padding", "an image that does not count"])
def test_what_is_no_object_may_be_nan(where):
    logits, boxes, batch = predictions(10)
    batch["is_object"] = jnp.asarray([[1, 1, 0]] * B, jnp.float32)
    grad = jax.value_and_grad(lambda *x: SetPrediction().of_predictions(*x).loss, argnums=(0, 1))
    expected = grad(logits, boxes, batch)
    place = np.index_exp[:, 2] if where == "padding" else np.index_exp[2]
    changed = {
        "boxes": batch["boxes"].at[place].set(jnp.nan),
        "classes": batch["classes"].at[place].set(-7),
    }
    found = grad(logits, boxes, batch | changed)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
def test_gradients_are_finite_also_for_equal_and_empty_boxes_and_no_object():
    logits, boxes, batch = predictions(8)
    batch["boxes"] = batch["boxes"].at[0].set(boxes[0, :M]).at[1, :, 2:].set(0)
    batch["is_object"] = batch["is_object"].at[2].set(0)
    grad = jax.grad(lambda *x: SetPrediction().of_predictions(*x, batch).loss, argnums=(0, 1))
    for gradient in grad(logits, boxes.at[1, :, 2:].set(0)):
        assert np.isfinite(gradient).all()


@pytest.mark.thorough
def test_every_object_has_a_query_of_its_own():
    cost = jnp.asarray(np.random.default_rng(0).standard_normal((50, 9, 9)), jnp.float32)
    is_object = jnp.asarray(np.random.default_rng(1).integers(2, size=(50, 9)))
    found = np.sort(match(cost, is_object), axis=1)
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(9), (50, 9)))


def test_overlap_of_boxes():
    box = jnp.array([0.5, 0.5, 0.2, 0.4])
    assert generalised_iou(box, box) == 1
    # they touch in a corner: no overlap, and the hull is twice as large as both
    other = jnp.array([0.7, 0.9, 0.2, 0.4])
    np.testing.assert_allclose(generalised_iou(box, other), -0.5, atol=1e-5)


ENCODER = ModelConfig(
    vocab_size=0,
    num_layers=1,
    d_model=16,
    num_heads=2,
    context_length=4,
    embedding=Patches(image=(8, 8), patch=(4, 4), channels=1, class_token=False),
    masks=(full(),),
    heads=(),
)
DECODER = replace(
    ENCODER,
    num_layers=3,
    context_length=Q,
    positions=AttentionPositions(Learned()),
    embedding=no_content,
    heads=(ObjectClasses(C - 1), Boxes()),
    tie_embeddings=False,
    init_std=0.3,
)


@pytest.mark.thorough
def test_in_training_every_layer_of_the_decoder_is_read():
    """The loss is the sum of those of the models that end after the first, second, third layer."""
    whole = EncoderDecoder(ENCODER, DECODER, share_embeddings=False)
    params = models.init(whole, jax.random.key(0))
    _, _, batch = predictions(9)
    batch |= {"images": jax.random.normal(jax.random.key(1), (B, 8, 8, 1))}
    context = StepContext(None)
    objective = SetPrediction()
    alone = []
    for count in (1, 2, 3):
        model = replace(whole, decoder=replace(DECODER, num_layers=count))
        layers = jax.tree.map(lambda x, count=count: x[:count], params["decoder"]["layers"])
        cut = {**params, "decoder": {**params["decoder"], "layers": layers}}
        alone.append(objective.evaluation()(model, cut, batch, context))
    found = objective(whole, params, batch, context)
    np.testing.assert_allclose(found.loss, sum(each.loss for each in alone), rtol=1e-5)
    for name, sums in alone[-1].metrics.items():
        np.testing.assert_allclose(found.metrics[name], sums, rtol=1e-6)


@pytest.mark.thorough
def test_a_block_that_ends_in_another_way_is_read_at_its_end_alone():
    def scaled(config, names):
        block = blocks.pre_norm(config, names)
        spec = {"end": {"scale": Spec((config.d_model,), ("embed",), ones)}}
        end = lambda params, x, context: x * params["end"]["scale"][None, None]
        return block._replace(stack_spec=spec, end=end)

    whole = EncoderDecoder(ENCODER, replace(DECODER, block=scaled), share_embeddings=False)
    params = models.init(whole, jax.random.key(0))
    _, _, batch = predictions(9)
    batch |= {"images": jax.random.normal(jax.random.key(1), (B, 8, 8, 1))}
    context = StepContext(None)
    with pytest.raises(ConfigError, match="every_layer"):
        SetPrediction()(whole, params, batch, context)
    assert np.isfinite(SetPrediction(every_layer=False)(whole, params, batch, context).loss)


def test_models_and_data_that_do_not_fit_are_refused():
    logits, boxes, batch = predictions(0)
    with pytest.raises(ConfigError, match="3 objects in an image, and 2 queries"):
        SetPrediction().of_predictions(logits[:, :2], boxes[:, :2], batch)
    for model in (ENCODER, EncoderDecoder(ENCODER, replace(DECODER, heads=(Boxes(),)))):
        with pytest.raises(ConfigError, match=r"zoo\.ObjectClasses"):
            SetPrediction()(model, {}, batch, StepContext(None))


def test_weights_below_zero_are_refused():
    with pytest.raises(ConfigError, match="no_object"):
        SetPrediction(no_object=-1.0)
