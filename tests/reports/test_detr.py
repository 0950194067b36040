"""DETR and its ResNet: what users of the authors' code, transformers, torchvision and others
reported, tried on ours."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models, zoo
from jaxformer.errors import ConfigError
from jaxformer.models import blocks
from jaxformer.params import paths
from jaxformer.zoo import detr, resnet
from tests import golden
from tests.families import golden_runs as runs


@pytest.fixture(scope="module")
def detector():
    checkpoint = families.load(golden.folder("detr"))
    return checkpoint.config, checkpoint.params


def answer(detector, images, dtype=jnp.float32, **options):
    config, tree = detector
    tree = jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    numbers = detr.object_numbers(config, len(images))
    names = options.pop("intermediates", ())

    @jax.jit
    def run(tree, images, options):
        call = dict(source=images, intermediates=names, **options)
        return models.apply(config, tree, numbers, **call)

    return run(tree, images, options)


def pictures(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.report(
    "facebookresearch/detr#541",
    "facebookresearch/detr#133",
    "fundamentalvision/Deformable-DETR#37",
    right=(
        "the mask of a detector is of padding, not of objects: without it, an image that fills "
        "its array gets the same"
    ),
)
@pytest.mark.thorough
def test_a_mask_of_ones_changes_nothing(detector):
    config, _ = detector
    images = pictures(2, 37, 40, 3)
    backbone = config.encoder.embedding.backbone
    mask = detr.feature_mask(backbone, jnp.ones((2, 37, 40), bool))
    found, expected = answer(detector, images, source_segment_ids=mask), answer(detector, images)
    for name, value in expected.heads.items():
        np.testing.assert_allclose(found.heads[name], value, atol=1e-5)


@pytest.mark.thorough_after(1)
@pytest.mark.report(
    "facebookresearch/detr#70",
    "facebookresearch/detr#286",
    "huggingface/transformers#28363",
    right=(
        "boxes are fractions of the image without its padding: places count only its own lines "
        "and columns, whatever else is in the batch"
    ),
)
@pytest.mark.parametrize("grid", [(3, 4), (3, 9), (7, 4), (5, 5)])
def test_places_do_not_depend_on_the_other_images(grid):
    flags = np.zeros((1, *grid), int)
    flags[:, :3, :4] = 1
    found = detr.places(grid, jnp.asarray(flags.reshape(1, -1))).reshape(*grid, 2)
    np.testing.assert_array_equal(found[:3, :4], detr.places((3, 4)).reshape(3, 4, 2))


@pytest.mark.report(
    "facebookresearch/detr#63",
    "huggingface/transformers#39382",
    "pytorch/vision#4257",
    right=(
        "images of one size get the same alone and together; the same image under more padding "
        "does not, for the bias of a norm makes the padding other than zero"
    ),
)
@pytest.mark.thorough
def test_images_of_one_size_are_answered_alone_as_together(detector):
    images = pictures(3, 37, 40, 3)
    together = answer(detector, images).heads
    for row in range(3):
        alone = answer(detector, images[row : row + 1]).heads
        for name, value in alone.items():
            np.testing.assert_allclose(together[name][row], value[0], atol=1e-5)


@pytest.mark.report(
    "facebookresearch/detr#94",
    "facebookresearch/detr#464",
    "Atten4Vis/ConditionalDETR#11",
    right=(
        "the decoder ends with a norm behind the norm of its last layer; the encoder, whose norms "
        "are the same, does not"
    ),
)
@pytest.mark.thorough
def test_the_decoder_alone_has_a_norm_more(detector):
    config, tree = detector
    assert "final_norm" in tree["decoder"] and "final_norm" not in tree["encoder"]
    assert config.encoder.block is blocks.post_norm
    images = pictures(1, 37, 40, 3)
    factor = tree["decoder"] | {
        "final_norm": jax.tree.map(lambda leaf: 2 * leaf, tree["decoder"]["final_norm"])
    }
    doubled = answer((config, tree | {"decoder": factor}), images).hidden
    np.testing.assert_allclose(doubled, 2 * answer(detector, images).hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.report(
    "facebookresearch/detr#36",
    "facebookresearch/detr#225",
    "open-mmlab/mmdetection#8053",
    right=(
        "the content of an object query is zero, so before the decoder reads the image all queries "
        "are alike; their vectors are trained all the same"
    ),
)
@pytest.mark.thorough
def test_object_queries_begin_alike_and_learn(detector):
    config, tree = detector
    images = pictures(1, 37, 40, 3)
    found = answer(detector, images, intermediates=("decoder/embedding",)).intermediates
    assert not np.any(found["decoder/embedding"])

    def loss(tree):
        return answer((config, tree), images).logits.sum()

    gradient = jax.jit(jax.grad(loss))(tree)["decoder"]["shared"]["positions"]
    assert np.abs(gradient).max(axis=1).min() > 1e-6


@pytest.mark.report(
    "facebookresearch/detr#108",
    "facebookresearch/detr#32",
    "facebookresearch/detr#83",
    "IDEA-Research/DAB-DETR#26",
    right=(
        "the number of classes is that of config.json, 91 for COCO though 80 are used; the head "
        "has one more, the last, for no object"
    ),
)
def test_the_last_class_is_no_object():
    head = zoo.detr.detr_r50.decoder.heads[0]
    assert head.classes == 91
    assert head(zoo.detr.detr_r50.decoder).spec["kernel"].shape == (256, 92)
    labels = families.load(golden.folder("detr")).labels
    assert len(labels) == 4 and golden.witness("detr")["outputs/logits"].shape[-1] == 5


@pytest.mark.report(
    "huggingface/transformers#38823",
    "bubbliiiing/detr-pytorch#4",
    "lch216/VFMDETR#3",
    right=(
        "a new number of classes draws a new classifier and keeps the boxes; without being asked, "
        "a file of other classes is refused by both shapes"
    ),
)
@pytest.mark.thorough
@pytest.mark.parametrize("classes", [1, 3])
def test_another_number_of_classes(classes, tmp_path):
    names = {str(i): f"thing {i}" for i in range(classes)}
    folder = runs.altered(tmp_path, "detr", id2label=names)
    with pytest.raises(ConfigError, match=rf"\(5, 12\), not \({classes + 1}, 12\)"):
        families.load(folder)
    heads = (detr.ObjectClasses(classes, name="mine"), detr.Boxes())
    own = families.load(golden.folder("detr"), heads=(detr.Boxes(),))
    config = replace(own.config, decoder=replace(own.config.decoder, heads=heads))
    fresh = models.init(config, jax.random.key(0))
    fresh["decoder"]["heads"]["boxes"] = own.params["decoder"]["heads"]["boxes"]
    assert answer((config, fresh), pictures(1, 37, 40, 3)).logits.shape == (1, 5, classes + 1)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/vision#1728",
    "facebookresearch/detr#327",
    right="the number of batches that a norm has seen may be in a file: a frozen norm ignores it",
)
def test_counts_of_batches_are_ignored(tmp_path):
    def counted(arrays):
        counts = {
            name.replace("running_var", "num_batches_tracked"): np.zeros((), np.int64)
            for name in arrays
            if name.endswith("running_var")
        }
        assert counts
        return arrays | counts

    found = families.load(runs.altered(tmp_path, "detr", counted))
    jax.tree.map(
        np.testing.assert_array_equal, found.params, families.load(golden.folder("detr")).params
    )


@pytest.mark.report(
    "pytorch/vision#191",
    "pytorch/vision#606",
    "facebookresearch/maskrcnn-benchmark#764",
    "dmlc/gluon-cv#751",
    right=(
        "a bottleneck has its stride in the middle convolution, as in torchvision; in the first "
        "one, as in the paper's own code, only if a file says so"
    ),
)
def test_the_stride_of_a_bottleneck():
    assert [one.stride for one in resnet.ResNet().block(256, 512, 2)] == [1, 2, 1]
    assert [one.stride for one in resnet.early_bottleneck(256, 512, 2)] == [2, 1, 1]
    read = families.FAMILIES["detr"].read
    for name in ("detr", "detr_early"):
        c = golden.config(name)
        is_early = c["backbone_config"]["downsample_in_bottleneck"]
        expected = resnet.early_bottleneck if is_early else resnet.bottleneck
        assert read(c, ()).encoder.embedding.backbone.block is expected


@pytest.mark.report(
    "huggingface/transformers#40300",
    "huggingface/transformers#31639",
    "open-mmlab/mmdetection#4746",
    right=(
        "a detector runs in 16 bits; places are counted in float32 all the same, for bfloat16 has "
        "eight bits"
    ),
)
@pytest.mark.thorough
def test_a_detector_in_bfloat16(detector):
    images = pictures(2, 37, 40, 3)
    found, expected = answer(detector, images, jnp.bfloat16), answer(detector, images)
    assert found.hidden.dtype == jnp.bfloat16 and found.logits.dtype == jnp.float32
    np.testing.assert_allclose(found.heads["boxes"], expected.heads["boxes"], atol=0.1)
    embedder = zoo.FeatureMap(resnet.ResNet(channels=3))(zoo.detr.detr_r50.encoder)
    places = embedder.positions(jnp.zeros((1, 32, 32 * 300, 3), jnp.bfloat16), None)
    assert places.dtype == jnp.float32 and len(np.unique(places[0, :, 1])) == 300


@pytest.mark.report(
    "huggingface/transformers#15764",
    "huggingface/transformers#20833",
    right="a folder is all that a detector needs: its backbone is read from it, not from elsewhere",
)
def test_the_backbone_is_that_of_the_folder(detector):
    _, tree = detector
    backbone = {path for path in paths(tree) if "backbone" in path}
    assert len(backbone) == 5 * 12
    mean = tree["encoder"]["embedding"]["backbone"]["stem"]["norm"]["mean"]
    name = "model.backbone.conv_encoder.model.embedder.embedder.normalization.running_mean"
    np.testing.assert_array_equal(mean, runs.tensors(golden.folder("detr"))[name])
    assert mean.any()
