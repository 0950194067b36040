"""Sets of objects and their scores: what users of DETR, its relatives and pycocotools reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.arrays import dataset_of_arrays
from jaxformer.errors import ConfigError
from jaxformer.evaluation.detection import Objects, average_precision
from jaxformer.models import EncoderDecoder
from jaxformer.training import AdamW, Constant, Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import first_state, make_train_step
from jaxformer.zoo.set_prediction import SetPrediction, generalised_iou
from tests.zoo import test_set_prediction as sets

MODEL = EncoderDecoder(sets.ENCODER, sets.DECODER, share_embeddings=False)
BOX = np.array([[0.5, 0.5, 0.2, 0.1]])


class Images:
    """Images without objects."""

    def open(self, model):
        rows = {
            "images": np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32),
            "classes": np.zeros((8, 3), np.int32),
            "boxes": np.zeros((8, 3, 4), np.float32),
            "is_object": np.zeros((8, 3), np.float32),
            "weights": np.ones(8, np.float32),
        }
        return dataset_of_arrays(rows, rows)


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#9",
    "facebookresearch/detr#335",
    "facebookresearch/maskrcnn-benchmark#169",
    right="images without any object teach the model to say 'no object'",
    hit="a batch of such images had the weight 0, and its step was left out",
)
def test_images_without_objects_are_learned():
    experiment = Experiment(
        name="empty",
        model=MODEL,
        data=Images(),
        objective=SetPrediction(),
        optimizer=AdamW(learning_rate=1e-3),
        schedule=Constant(),
        steps=20,
        batch_size=8,
    )
    recipe = build(experiment)
    step = jax.jit(make_train_step(recipe))
    batch = Images().open(None).train.take_rows(np.arange(8))
    state, losses = first_state(recipe), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#28",
    "fundamentalvision/Deformable-DETR#185",
    "Intellindust-AI-Lab/DEIMv2#64",
    "sovit-123/vision_transformers#21",
    right="a class that the head does not have makes the loss NaN, which a run reports and skips",
    hit="the number of 'no object' was learned as a class in silence",
)
@pytest.mark.parametrize("wrong", [-1, sets.C - 1, sets.C, 90])
def test_a_class_that_does_not_exist(wrong):
    logits, boxes, batch = sets.predictions(0)
    batch["is_object"] = jnp.ones((sets.B, sets.M))
    good = SetPrediction().of_predictions(logits, boxes, batch)
    classes = batch["classes"].at[0, 0].set(wrong)
    found = SetPrediction().of_predictions(logits, boxes, batch | {"classes": classes})
    assert np.isfinite(good.loss) and np.isnan(found.loss)


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#101",
    "ZhangGongjie/SAM-DETR#1",
    "hujiecpp/ISTR#11",
    right="boxes of no size are compared, and boxes that are NaN end neither the run nor its step",
)
def test_degenerate_boxes():
    logits, boxes, batch = sets.predictions(1)
    empty = boxes.at[:, :, 2:].set(0)
    assert np.isfinite(SetPrediction().of_predictions(logits, empty, batch).loss)
    broken = boxes.at[0, 0].set(jnp.nan)
    run = jax.jit(lambda boxes: SetPrediction().of_predictions(logits, boxes, batch).loss)
    assert run(broken).shape == ()  # the matching ends
    point = jnp.array([0.3, 0.3, 0.0, 0.0])
    assert generalised_iou(point, point) == 0
    assert generalised_iou(point, jnp.array([0.6, 0.3, 0.2, 0.2])) >= -1


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#590",
    right="no gradient flows through the matching: it is that of a fixed assignment",
)
def test_no_gradient_of_the_matching():
    """A second loss whose costs are all scaled has the same matching and the same gradient."""
    logits, boxes, batch = sets.predictions(2)

    class Scaled(SetPrediction):
        def cost(self, *arguments):
            return 1000 * super().cost(*arguments)

    grads = [
        jax.grad(lambda *x, of=of: of.of_predictions(*x, batch).loss, argnums=(0, 1))(logits, boxes)
        for of in (SetPrediction(), Scaled())
    ]
    jax.tree.map(np.testing.assert_array_equal, *grads)


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#365",
    right="answers that repeat an object are punished: all queries but one should say 'no object'",
)
def test_an_object_that_is_found_twice():
    _, _, batch = sets.predictions(3)
    batch["is_object"] = jnp.asarray([[1, 0, 0]] * sets.B, jnp.float32)
    boxes = jnp.broadcast_to(batch["boxes"][:, :1], (sets.B, sets.Q, 4))
    says = 10 * jax.nn.one_hot(batch["classes"][:, :1], sets.C)
    nothing = 10 * jax.nn.one_hot(jnp.full((sets.B, sets.Q - 1), sets.C - 1), sets.C)
    once = jnp.concatenate([says, nothing], axis=1)
    always = jnp.broadcast_to(says, (sets.B, sets.Q, sets.C))
    losses = [SetPrediction().of_predictions(x, boxes, batch).loss for x in (once, always)]
    assert losses[1] > losses[0] + 1


@pytest.mark.report(
    "cocodataset/cocoapi#675",
    "cocodataset/cocoapi#450",
    right="a model that finds nothing has the score 0",
)
def test_nothing_found():
    nothing = Objects(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0))
    assert average_precision([nothing], [Objects(np.array([3]), BOX)]) == {"mAP": 0, "AP50": 0}


@pytest.mark.report(
    "pytorch/vision#1530",
    "cvat-ai/cvat#748",
    "open-edge-platform/datumaro#156",
    "cocodataset/cocoapi#546",
    right="a single object of class 0 that is found has the score 1, small or large",
)
@pytest.mark.parametrize("size", [0.004, 0.05, 0.9])
def test_one_object_of_the_first_class(size):
    box = np.array([[0.5, 0.5, size, size]])
    truth = [Objects(np.array([0]), box)]
    found = [Objects(np.array([0]), box, np.array([0.3]))]
    # float64: a mean over 101 recalls
    assert average_precision(found, truth) == pytest.approx({"mAP": 1.0, "AP50": 1.0})


@pytest.mark.report(
    "facebookresearch/maskrcnn-benchmark#498",
    right="no object in any image is refused: pycocotools would give -1",
)
def test_no_object_at_all():
    found = [Objects(np.array([0]), BOX, np.ones(1))]
    with pytest.raises(ConfigError, match="no image has an object"):
        average_precision(found, [Objects(np.zeros(0, int), np.zeros((0, 4)))])
