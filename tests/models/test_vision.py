"""Position tables at other resolutions, against torch and Hugging Face's ViT
(tests/witnesses/position_resize.py)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, Learned, ModelConfig, Patches, Sinusoidal, vision
from tests import witnesses
from tests.witnesses.position_resize import EPS, GRIDS, IMAGES, PATCH, D, F, N

init = jax.jit(models.init, static_argnums=0)

KEPT = witnesses.load("position_resize")
VIT = ModelConfig(
    vocab_size=0,
    num_layers=1,
    d_model=D,
    num_heads=N,
    d_ff=F,
    context_length=17,
    feedforward="gelu",
    norm_eps=EPS,
    masks=(masks.full(),),
    embedding=Patches(image=(8, 8), patch=(PATCH, PATCH)),
    heads=(),
)


@pytest.mark.parametrize("name", GRIDS)
def test_the_weights_are_torchs(name):
    """Both in float64: torch computes its cubic weights in the same precision, in another order."""
    (height, width), (new_height, new_width) = GRIDS[name]
    down, across = vision.bicubic(height, new_height), vision.bicubic(width, new_width)
    resized = np.einsum("yh,xw,hwd->yxd", down, across, KEPT[f"table/{name}"])
    np.testing.assert_allclose(resized, KEPT[f"resized/{name}"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("old,new", [(1, 5), (4, 4), (4, 9), (7, 3), (14, 24)])
def test_weights_keep_constants_and_mirror_images(old, new):
    matrix = vision.bicubic(old, new)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(matrix, matrix[::-1, ::-1], atol=1e-12)
    if old == new:
        np.testing.assert_array_equal(matrix, np.eye(old))


def converted():
    """Hugging Face's ViT of one layer, as our parameters."""
    weight = lambda name: KEPT[f"weights/{name}"]
    norm = lambda name: {"scale": weight(f"{name}.weight"), "bias": weight(f"{name}.bias")}
    linear = lambda name: {"kernel": weight(f"{name}.weight").T, "bias": weight(f"{name}.bias")}
    first = "embeddings.patch_embeddings.projection"
    layer = {
        "attention_norm": norm("layers.0.layernorm_before"),
        "feedforward_norm": norm("layers.0.layernorm_after"),
    }
    layer["attention"] = {
        name: linear(f"layers.0.attention.{name[0]}_proj")
        for name in ("query", "key", "value", "out")
    }
    layer["feedforward"] = {"up": linear("layers.0.mlp.fc1"), "down": linear("layers.0.mlp.fc2")}
    tree = {
        "embedding": {
            "patches": {
                "kernel": weight(f"{first}.weight").transpose(1, 2, 3, 0),
                "bias": weight(f"{first}.bias"),
            },
            "class_token": weight("embeddings.cls_token")[0, 0],
            "positions": weight("embeddings.position_embeddings")[0],
        },
        "layers": jax.tree.map(lambda a: a[None], layer),
        "final_norm": norm("layernorm"),
    }
    return jax.tree.map(
        lambda leaf, array: jnp.asarray(array).reshape(leaf.shape), models.spec(VIT), tree
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", IMAGES)
def test_resized_models_are_hugging_faces(name):
    """`interpolate_pos_encoding=True`, for grids larger, not square, and not square with as many
    patches."""
    config, weights = vision.resize(VIT, converted(), IMAGES[name])
    assert config.context_length == config.embedding.length
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(
        lambda leaf: leaf.shape, models.spec(config)
    )
    output = models.apply(config, weights, jnp.asarray(KEPT[f"image/{name}"].transpose(0, 2, 3, 1)))
    # ours in float32, theirs in float64; through two layer norms
    np.testing.assert_allclose(output.hidden, KEPT[f"hidden/{name}"], rtol=1e-4, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "class_token,offset", [(True, 3), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_only_the_grid_changes(class_token, offset):
    """Rows of the offset and the class token stay, as do all other parameters; a round trip ends at
    the same config."""
    embedding = replace(VIT.embedding, class_token=class_token)
    config = replace(
        VIT,
        embedding=embedding,
        context_length=embedding.length,
        positions=Learned(offset),
        heads=(Classification(3),),
    )
    weights = init(config, jax.random.key(0))
    same, unchanged = vision.resize(config, weights, (8, 8))
    assert same == config
    np.testing.assert_array_equal(
        unchanged["embedding"]["positions"], weights["embedding"]["positions"]
    )
    larger, wide = vision.resize(config, weights, (12, 20))
    before, after = params.paths(weights), params.paths(wide)
    first = offset + class_token
    for path in before:
        if path == "embedding/positions":
            np.testing.assert_array_equal(before[path][:first], after[path][:first])
            assert after[path].shape == (first + 6 * 10, D)
        else:
            np.testing.assert_array_equal(before[path], after[path])
    assert vision.resize(larger, wide, (8, 8))[0] == config
    assert models.apply(larger, wide, jnp.ones((2, 12, 20, 3))).logits.shape == (2, 3)


@pytest.mark.thorough
def test_low_precision_tables_are_interpolated_in_float32():
    weights = init(VIT, jax.random.key(0))
    halved = optax.tree.cast(weights, jnp.bfloat16)
    _, resized = vision.resize(VIT, halved, (14, 14))
    _, expected = vision.resize(VIT, optax.tree.cast(halved, jnp.float32), (14, 14))
    assert resized["embedding"]["positions"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        resized["embedding"]["positions"], expected["embedding"]["positions"].astype(jnp.bfloat16)
    )


@pytest.mark.thorough
def test_what_has_no_table_only_changes_its_config_and_what_has_no_patches_is_refused():
    config = replace(VIT, positions=Sinusoidal())
    weights = init(config, jax.random.key(0))
    larger, same = vision.resize(config, weights, (16, 16))
    assert same is weights and larger.embedding.image == (16, 16) and larger.context_length == 65
    with pytest.raises(ConfigError, match="is no models"):
        vision.resize(ModelConfig(11, 1, 8, 2, 16), weights, (16, 16))
    with pytest.raises(ConfigError, match="does not divide"):
        vision.resize(VIT, weights, (15, 16))


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 1), (2, 2, 3), (2, 7)])
def test_flags_of_hidden_patches_are_one_for_each(shape):
    """One a row would hide whole images; a class token is no patch."""
    patches = Patches(image=(4, 6), patch=(2, 2), channels=3, mask_token=True)
    config = replace(VIT, embedding=patches, context_length=7)
    with pytest.raises(
        ConfigError, match=r"inputs: masked \[2, .*\]: expected flags \[B, patches\], here \[2, 6\]"
    ):
        images, flags = jnp.zeros((2, 4, 6, 3)), {"masked": jnp.ones(shape, bool)}
        jax.eval_shape(
            lambda p: models.apply(config, p, images, inputs=flags), init(config, jax.random.key(0))
        )


@pytest.mark.thorough
def test_a_reconstruction_puts_each_patch_where_it_was():
    """Pixel (c, y, x) of a patch is feature (c, y, x) of its linear map; a hidden patch leaves no
    trace of its pixels."""
    patches = Patches(image=(4, 6), patch=(2, 2), channels=3, mask_token=True)
    config = replace(VIT, embedding=patches, context_length=7, heads=(vision.Reconstruction(2),))
    weights = init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.float32(rng.normal(size=leaf.shape))
    weights["heads"] = jax.tree.map(draw, weights["heads"])
    weights["embedding"]["mask_token"] = draw(weights["embedding"]["mask_token"])
    images, hide = rng.normal(size=(2, 4, 6, 3)).astype(np.float32), rng.random((2, 6)) < 0.5
    hide[:, 0] = True
    output = models.apply(
        config, weights, jnp.asarray(images), inputs={"masked": jnp.asarray(hide)}
    )
    head = weights["heads"]["reconstruction"]
    features = np.asarray(output.hidden)[:, 1:] @ np.asarray(head["kernel"]).reshape(
        D, 12
    ) + np.asarray(head["bias"])
    features = features.reshape(2, 2, 3, 3, 2, 2)
    expected = np.zeros((2, 4, 6, 3), np.float32)
    for down, across, c, y, x in np.ndindex(features.shape[1:]):
        expected[:, 2 * down + y, 2 * across + x, c] = features[:, down, across, c, y, x]
    # float32 sums
    np.testing.assert_allclose(output.heads["reconstruction"], expected, rtol=1e-5, atol=1e-5)
    images[:, :2, :2] += 1.0  # of the first patch, which is hidden
    other = models.apply(config, weights, jnp.asarray(images), inputs={"masked": jnp.asarray(hide)})
    np.testing.assert_array_equal(other.hidden, output.hidden)
    with pytest.raises(ConfigError, match="no mask token"):
        bare = replace(config, embedding=replace(patches, mask_token=False))
        del weights["embedding"]["mask_token"]
        models.apply(bare, weights, jnp.asarray(images), inputs={"masked": jnp.asarray(hide)})
    with pytest.raises(ConfigError, match="gives an image"):
        models.spec(ModelConfig(11, 1, 8, 2, 16, heads=(vision.Reconstruction(2),)))
