"""ResNet and the parts of DETR, against loops and each other."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models, params
from jaxformer.errors import ConfigError
from jaxformer.params import paths
from jaxformer.zoo import detr, resnet
from jaxformer.zoo.resnet import Convolution, ResNet
from tests import golden

RNG = np.random.default_rng(0)
SMALL = ResNet((1, 2), (4, 8), stem=5, channels=2)


def drawn(tree):
    """Random parameters; variances are positive."""
    rng = np.random.default_rng(1)

    def draw(name, leaf):
        x = rng.normal(size=leaf.shape)
        return jnp.asarray(np.exp(x / 3) if name.endswith("variance") else x / 2, jnp.float32)

    return params.map_with_name(draw, tree)


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
def test_a_convolution_is_a_sum_over_neighbours(size, stride):
    one = Convolution(2, 3, size, stride)
    own = drawn(resnet.convolution_spec(one))
    x = RNG.normal(size=(2, 6, 5, 2)).astype(np.float32)
    found = resnet.convolve(one, own, jnp.asarray(x))
    half = size // 2
    padded = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0))).astype(float)
    norm = {name: np.asarray(leaf, float) for name, leaf in own["norm"].items()}
    kernel = np.asarray(own["kernel"], float)
    expected = np.zeros((2, -(-6 // stride), -(-5 // stride), 3))
    for line, column in np.ndindex(*expected.shape[1:3]):
        top, left = line * stride, column * stride
        window = padded[:, top : top + size, left : left + size]
        expected[:, line, column] = np.einsum("bhwc,chwd->bd", window, kernel)
    expected = (expected - norm["mean"]) / np.sqrt(norm["variance"] + 1e-5)
    expected = expected * norm["scale"] + norm["bias"]
    np.testing.assert_allclose(found, expected, atol=1e-4)  # float32 sums of some fifty terms


def test_the_largest_of_nine_neighbours():
    x = RNG.normal(size=(1, 5, 4, 2)).astype(np.float32) - 3  # below the zeros of a padded map
    found = resnet.max_pool(jnp.asarray(x))
    for line, column in np.ndindex(3, 2):
        lines = slice(max(2 * line - 1, 0), 2 * line + 2)
        columns = slice(max(2 * column - 1, 0), 2 * column + 2)
        window = x[:, lines, columns]
        np.testing.assert_array_equal(found[:, line, column], window.max(axis=(1, 2)))


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize("block", [resnet.basic, resnet.bottleneck, resnet.early_bottleneck])
@pytest.mark.parametrize("first_stride", [1, 2])
@pytest.mark.parametrize("size", [(32, 33), (7, 50)])
def test_a_map_has_the_lines_and_columns_of_the_grid(block, first_stride, size):
    config = replace(SMALL, block=block, first_stride=first_stride)
    tree = params.abstract(resnet.spec(config))
    images = jax.ShapeDtypeStruct((1, *size, 2), jnp.float32)
    found = jax.eval_shape(lambda *call: resnet.features(config, *call), tree, images)
    assert found.shape == (1, *config.grid(*size), 8)


@pytest.mark.thorough
def test_a_block_without_weights_passes_its_input():
    """Norms of factor 0 in front of the sum: what is left is the shortcut's map, or the input."""
    config = ResNet((2,), (4,), stem=4, channels=2)
    tree = drawn(resnet.spec(config))
    assert "shortcut" not in tree["stage_0"]["block_0"]
    for block in tree["stage_0"].values():
        last = block["convolution_2"]["norm"]
        last |= {name: jnp.zeros_like(last[name]) for name in ("scale", "bias")}
    images = jnp.asarray(RNG.normal(size=(1, 16, 16, 2)), jnp.float32)
    stem = resnet.convolve(resnet.stem(config), tree["stem"], images)
    expected = resnet.max_pool(jax.nn.relu(stem))
    np.testing.assert_allclose(resnet.features(config, tree, images), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depths": (1,)}, "ResNet.depths=.1,., widths=.4, 8.: expected two numbers"),
        ({"depths": (), "widths": ()}, "expected two numbers"),
        ({"activation": "rule"}, "ResNet.activation='rule'"),
        ({"stem": 0}, "ResNet.stem=0"),
    ],
)
def test_wrong_sizes_of_a_network_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **change)


def test_sines_are_those_of_the_appendix():
    places = RNG.random((1, 3, 2))
    found = detr.sines(jnp.asarray(places, jnp.float32), 8)
    for feature in range(3):
        expected = []
        for place in places[0, feature]:  # the line, then the column
            for i in range(2):
                angle = 2 * math.pi * place / 10_000 ** (2 * i / 4)
                expected += [math.sin(angle), math.cos(angle)]
        np.testing.assert_allclose(found[0, feature], expected, atol=1e-5)


@pytest.mark.thorough
def test_places_are_those_of_the_image_without_its_padding():
    whole = np.asarray(detr.places((2, 3))).reshape(2, 3, 2)
    np.testing.assert_allclose(whole[..., 0], [[0.5] * 3, [1] * 3], atol=1e-5)
    np.testing.assert_allclose(whole[..., 1], [[1 / 3, 2 / 3, 1]] * 2, atol=1e-5)
    flags = np.zeros((1, 4, 5), int)
    flags[:, :2, :3] = 1
    padded = np.asarray(detr.places((4, 5), jnp.asarray(flags.reshape(1, -1)))).reshape(4, 5, 2)
    np.testing.assert_array_equal(padded[:2, :3], whole)


def test_a_feature_is_padding_if_its_first_pixel_is():
    mask = np.zeros((3, 20, 17), bool)
    for row, (height, width) in enumerate(((20, 17), (8, 1), (9, 16))):
        mask[row, :height, :width] = True
    found = detr.feature_mask(SMALL, jnp.asarray(mask)).reshape(3, *SMALL.grid(20, 17))
    assert found.shape == (3, 3, 3)
    assert found[0].all()
    # pixels 0, 6, 13 of 20 lines, and 0, 5, 11 of 17 columns
    np.testing.assert_array_equal(found[1], [[1, 0, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(found[2], [[1, 1, 1], [1, 1, 1], [0, 0, 0]])


@pytest.fixture(scope="module")
def detector():
    checkpoint = families.load(golden.folder("detr_basic"))
    return checkpoint.config, checkpoint.params


def images(*shape):
    return jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.float32)


@pytest.mark.thorough
def test_of_hidden_pixels_nothing_is_seen(detector):
    config, tree = detector
    numbers, backbone = detr.object_numbers(config, 1), config.encoder.embedding.backbone
    mask = jnp.zeros((1, 128, 160), int).at[:, :48, :64].set(1)

    @jax.jit
    def boxes(pixels, segment_ids):
        options = {"source": pixels, "source_segment_ids": segment_ids}
        return models.apply(config, tree, numbers, **options).heads["boxes"]

    pixels = images(1, 128, 160, 3)
    # behind the field that the last visible feature reads, which ends some 70 pixels further
    other = pixels.at[:, :, 144:].set(3.0)
    hidden = detr.feature_mask(backbone, mask)
    np.testing.assert_array_equal(boxes(pixels, hidden), boxes(other, hidden))
    seen = jnp.ones_like(hidden)
    assert float(jnp.abs(boxes(pixels, seen) - boxes(other, seen)).max()) > 1e-3


@pytest.mark.thorough
def test_the_numbers_choose_the_queries(detector):
    """Objects are a set: in another order of the queries, they are the same."""
    config, tree = detector
    numbers, source = detr.object_numbers(config, 2), images(2, 33, 40, 3)
    order = jnp.array([3, 0, 4, 1, 2])
    run = jax.jit(lambda numbers: models.apply(config, tree, numbers, source=source).heads)
    found, turned = run(numbers), run(numbers[:, order])
    for name in ("classes", "boxes"):
        np.testing.assert_allclose(turned[name], found[name][:, order], atol=1e-5)


@pytest.mark.thorough
def test_norms_of_the_backbone_are_variables(detector):
    config, tree = detector
    norms = [path for path in paths(models.spec(config)) if "backbone" in path and "/norm/" in path]
    assert sorted(params.variables(models.spec(config))) == sorted(norms)
    assert len(norms) == 4 * 9

    def loss(tree):
        numbers = detr.object_numbers(config, 1)
        return models.apply(config, tree, numbers, source=images(1, 32, 32, 3)).logits.sum()

    gradients = paths(jax.jit(jax.grad(loss))(tree))
    assert not any(gradients[path].any() for path in norms)
    kernels = [path for path in gradients if "backbone" in path and path.endswith("kernel")]
    assert all(gradients[path].any() for path in kernels)


@pytest.mark.thorough
def test_boxes_are_fractions_and_the_last_class_is_no_object(detector):
    config, tree = detector
    found = models.apply(config, tree, detr.object_numbers(config, 1), source=images(1, 32, 32, 3))
    assert found.heads["boxes"].shape == (1, 5, 4)
    assert found.heads["boxes"].min() > 0 and found.heads["boxes"].max() < 1
    assert config.decoder.heads[0].classes == 2 and found.logits.shape == (1, 5, 3)


@pytest.mark.thorough
def test_detections_are_the_surest_classes_that_are_objects(detector):
    """Also where "no object" is surer; padding is told as to `apply`."""
    config, tree = detector
    source, numbers = images(2, 33, 40, 3), detr.object_numbers(config, 2)
    mask = np.ones((2, 33, 40), bool)
    mask[1, :, 30:] = False
    hidden = detr.feature_mask(config.encoder.embedding.backbone, mask)
    options = {"source_segment_ids": hidden}
    heads = models.apply(config, tree, numbers, source=source, **options).heads
    logits = np.asarray(heads["classes"], np.float64)
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = (odds / odds.sum(axis=-1, keepdims=True))[..., :2]
    found = detr.detect(config, tree, np.asarray(source), **options)
    np.testing.assert_array_equal(found.classes, probabilities.argmax(axis=-1))
    np.testing.assert_allclose(found.scores, probabilities.max(axis=-1), rtol=1e-4)
    np.testing.assert_allclose(found.boxes, heads["boxes"], atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": jnp.zeros((1, 32, 32, 1))}, r"expected images \[B, height, width, 3\]"),
        ({"source": jnp.zeros((1, 32, 32))}, r"expected images \[B, height, width, 3\]"),
        (
            {"source": jnp.zeros((1, 32, 32, 3)), "source_positions": jnp.arange(4)[None]},
            "grid_sines reads places",
        ),
        (
            {"source": jnp.zeros((1, 32, 32, 3)), "source_segment_ids": jnp.ones((1, 5), int)},
            r"segment_ids int32\[1, 5\]: expected integers \[1, 4\]",
        ),
    ],
)
def test_other_sources_are_refused(detector, options, said):
    config, tree = detector
    with pytest.raises(ConfigError, match=said):
        models.apply(config, tree, detr.object_numbers(config, 1), **options)


def test_a_width_without_four_parts_is_refused():
    config = detr.detr_r50.encoder
    with pytest.raises(ConfigError, match=r"model\.d_model=258: sines of lines and columns"):
        detr.grid_sines(replace(config, d_model=258, num_heads=6))
