"""Random changes of images: functions of the key and the row, of the same shape and range; nothing
of them is scored."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from jaxformer import models
from jaxformer.data.augment import Crop, Flip, Move, ResizedCrop, augmented
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, Patches
from jaxformer.objectives import StepContext
from jaxformer.training import ClassCrossEntropy

FUNCTIONS = [
    Flip(),
    Crop(2),
    ResizedCrop(),
    ResizedCrop((0.3, 0.9), (0.5, 2.0)),
    Move(),
    Move(45.0, 2.0),
]
IMAGES = jax.random.uniform(jax.random.key(0), (6, 8, 10, 3), minval=0.2)
KEYS = jax.random.split(jax.random.key(1), 40)


@pytest.mark.thorough
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_a_change_is_a_function_of_key_and_row(function):
    run = jax.jit(partial(augmented, (function,)))
    found = run(KEYS[0], IMAGES)
    assert found.shape == IMAGES.shape and found.dtype == IMAGES.dtype
    assert found.min() >= 0 and found.max() <= 1 + 1e-5  # float32 sums of products
    np.testing.assert_array_equal(found, run(KEYS[0], IMAGES))
    assert (np.asarray(found) != run(KEYS[1], IMAGES)).any()
    same = run(KEYS[0], jnp.broadcast_to(IMAGES[:1], IMAGES.shape))
    assert (np.asarray(same) != same[:1]).any()  # rows have keys of their own
    np.testing.assert_array_equal(run(KEYS[0], IMAGES.at[3].set(0))[0], found[0])  # and do not meet


@pytest.mark.thorough
def test_functions_follow_each_other_with_keys_of_their_own():
    by_hand = IMAGES
    for number, function in enumerate(FUNCTIONS):
        keys = jax.random.split(jax.random.fold_in(KEYS[0], number), len(IMAGES))
        by_hand = jnp.stack(
            [function(key, image) for key, image in zip(keys, by_hand, strict=True)]
        )
    # vmap sums in another order
    np.testing.assert_allclose(augmented(FUNCTIONS, KEYS[0], IMAGES), by_hand, atol=1e-5)
    np.testing.assert_array_equal(augmented((), KEYS[0], IMAGES), IMAGES)


@pytest.mark.thorough
def test_a_flip_undoes_itself():
    always, never = Flip(1.0), Flip(0.0)
    np.testing.assert_array_equal(always(KEYS[0], IMAGES[0])[:, 0], IMAGES[0, :, -1])
    np.testing.assert_array_equal(always(KEYS[0], always(KEYS[1], IMAGES[0])), IMAGES[0])
    np.testing.assert_array_equal(never(KEYS[0], IMAGES[0]), IMAGES[0])
    flipped = sum(bool((Flip()(key, IMAGES[0]) == always(key, IMAGES[0])).all()) for key in KEYS)
    assert 8 <= flipped <= 32  # 40 coins, within four standard deviations


@pytest.mark.thorough
def test_a_crop_is_the_image_moved():
    image, seen = np.asarray(IMAGES[0]), set()
    wide = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    crops = {(d, a): wide[d : d + 8, a : a + 10] for d in range(5) for a in range(5)}
    for key in KEYS:
        found = np.asarray(Crop(2)(key, IMAGES[0]))
        places = [place for place, crop in crops.items() if (crop == found).all()]
        assert len(places) == 1
        seen |= set(places)
    assert len(seen) > 10


@pytest.mark.thorough
def test_a_resized_crop_reads_a_part_of_the_image():
    """Of a ramp, bilinear, it is a ramp again: slope and ends say which part was read."""
    line, column = np.mgrid[:32, :48].astype(np.float32)
    ramp = jnp.asarray(np.stack([line, column], axis=-1))
    for key in KEYS:
        found = np.asarray(ResizedCrop((0.2, 0.6), (0.8, 1.25))(key, ramp))[4:-4, 4:-4]
        slopes = np.diff(found[..., 0], axis=0), np.diff(found[..., 1], axis=1)
        for slope in slopes:
            # float32 differences of numbers up to 48
            np.testing.assert_allclose(slope, slope.mean(), atol=1e-3)
        height, width = slopes[0].mean() * 32, slopes[1].mean() * 48
        assert height <= 32.01 and width <= 48.01
        assert 0.199 <= height * width / (32 * 48) <= 0.601
        assert 0.79 <= width / height <= 1.26
        assert found[..., 0].min() >= 0 and found[..., 0].max() <= 31 and found[..., 1].max() <= 47
    np.testing.assert_allclose(ResizedCrop((1.0, 1.0), (1.5, 1.5))(KEYS[0], ramp), ramp, atol=1e-4)


@pytest.mark.thorough
def test_a_move_is_scipys_affine_map():
    image = np.asarray(IMAGES[0])
    for key in KEYS[:5]:
        turn, down, across = np.asarray(jax.random.uniform(key, (3,), minval=-1.0), np.float64)
        angle, middle = np.deg2rad(30) * turn, np.array([3.5, 4.5])
        matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        shift = 1.5 * np.array([down, across])
        options = dict(offset=middle - matrix @ (middle + shift), order=1, mode="grid-constant")
        channels = [
            scipy.ndimage.affine_transform(image[..., c], matrix, **options) for c in range(3)
        ]
        np.testing.assert_allclose(
            Move(30.0, 1.5)(key, IMAGES[0]), np.stack(channels, axis=-1), atol=1e-4
        )
    np.testing.assert_allclose(Move(0.0, 0.0)(KEYS[0], IMAGES[0]), image, atol=1e-6)


MODEL = ModelConfig(
    vocab_size=0,
    num_layers=1,
    d_model=8,
    num_heads=2,
    context_length=20,
    masks=(full(),),
    embedding=Patches((8, 10), (2, 2), 3, class_token=False),
    heads=(Classification(3, pool="mean"),),
)
BATCH = {"images": IMAGES, "labels": jnp.arange(6) % 3, "weights": jnp.ones(6)}


@pytest.mark.thorough
def test_training_sees_changed_images_and_scoring_does_not():
    parameters = models.init(MODEL, jax.random.key(0))
    score = lambda objective, batch, key: objective(MODEL, parameters, batch, StepContext(key)).loss
    plain, objective = ClassCrossEntropy(), ClassCrossEntropy(augment=(Crop(2), Flip()))
    assert objective.evaluation() == plain
    changed = augmented(objective.augment, jax.random.split(KEYS[0])[1], IMAGES)
    found = score(objective, BATCH, KEYS[0])
    np.testing.assert_array_equal(found, score(objective, BATCH, KEYS[0]))
    np.testing.assert_allclose(found, score(plain, BATCH | {"images": changed}, KEYS[0]), rtol=1e-6)
    assert found != score(objective, BATCH, KEYS[1])
    assert score(objective.evaluation(), BATCH, KEYS[0]) == score(plain, BATCH, KEYS[1])
    black = lambda key, image: 0 * image  # a function of one's own
    own = score(replace(objective, augment=(black,)), BATCH, KEYS[0])
    np.testing.assert_allclose(
        own, score(plain, BATCH | {"images": 0 * IMAGES}, KEYS[0]), rtol=1e-6
    )


@pytest.mark.thorough
def test_a_change_does_not_depend_on_the_mesh():
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    split = jax.device_put(IMAGES, jax.NamedSharding(mesh, jax.P("data")))
    key = jax.device_put(KEYS[0], jax.NamedSharding(mesh, jax.P()))
    run = jax.jit(partial(augmented, FUNCTIONS))
    np.testing.assert_allclose(run(key, split), run(KEYS[0], IMAGES), atol=1e-6)
