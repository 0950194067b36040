"""VQ-VAE beside a second definition: NumPy in float64, state by state."""

from dataclasses import dataclass, replace
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
from jaxformer.zoo.vector_quantised import (
    CodeBook,
    Use,
    VectorQuantisation,
    codes_in_use,
    decode,
    moved,
    nearest,
    restarted,
    straight_through,
)
from tests.zoo.plain_layers import attention, gelu, normed

K, W, B, T = 6, 3, 4, 4
HEAD = CodeBook(count=K, width=W, num_layers=1)
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=1,
    d_model=8,
    num_heads=2,
    context_length=T,
    feedforward="gelu_tanh",
    embedding=Patches(image=(4, 4), patch=(2, 2), channels=1, class_token=False),
    heads=(HEAD,),
    masks=(full(),),
    init_std=0.5,
)


apply = jax.jit(models.apply, static_argnums=0, static_argnames="dtype")
draw_codes = jax.jit(decode, static_argnums=0)


def images_of(seed=0, count=B):
    return np.random.default_rng(seed).random((count, 4, 4, 1)).astype(np.float32)


def parameters_of(seed=0):
    """Random parameters; no bias is zero, and every code was used."""
    rng = np.random.default_rng(seed)
    tree = models.init(MODEL, jax.random.key(seed))

    def noisy(path, leaf):
        noise = rng.normal(0, 0.3, leaf.shape)
        return abs(noise) + 0.5 if path.endswith("counts") else leaf + noise

    return parameters.map_with_name(lambda path, x: jnp.asarray(noisy(path, x), x.dtype), tree)


def context(seed=0, **fields):
    return StepContext(key=jax.random.key(seed), **fields)


def use_of(seed=0, empty=()):
    rng = np.random.default_rng(seed)
    counts = rng.uniform(0.5, 3, K)
    counts[list(empty)] = 0
    sums = rng.normal(size=(K, W))
    return Use(jnp.asarray(counts, jnp.float32), jnp.asarray(sums, jnp.float32))


def plain_layer(tree, x):
    """A pre-norm layer of the stack."""
    x = x + attention(tree["attention"], normed(tree["attention_norm"], x))
    hidden = gelu(
        normed(tree["feedforward_norm"], x) @ tree["feedforward"]["up"]["kernel"]
        + tree["feedforward"]["up"]["bias"]
    )
    return x + hidden @ tree["feedforward"]["down"]["kernel"] + tree["feedforward"]["down"]["bias"]


def plain(tree, image):
    """(image, codes, z, e) of one image, in float64."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    first = jax.tree.map(lambda leaf: leaf[0], tree["layers"])
    kernel = tree["embedding"]["patches"]["kernel"].reshape(4, 8)
    corners = [(i, j) for i in (0, 2) for j in (0, 2)]
    patches = np.stack([image[i : i + 2, j : j + 2, 0].reshape(4) for i, j in corners])
    x = patches @ kernel + tree["embedding"]["patches"]["bias"] + tree["embedding"]["positions"]
    x = normed(tree["final_norm"], plain_layer(first, x))
    head = tree["heads"]["codes"]
    z = x @ head["states"]["kernel"] + head["states"]["bias"]
    book = head["sums"] / head["counts"][:, None]
    codes = np.array([min(range(K), key=lambda k: ((book[k] - each) ** 2).sum()) for each in z])
    e = book[codes]
    decoder = head["decoder"]
    y = e @ decoder["embedding"]["vectors"]["kernel"] + decoder["embedding"]["vectors"]["bias"]
    y = y + decoder["embedding"]["positions"]
    y = plain_layer(jax.tree.map(lambda leaf: leaf[0], decoder["layers"]), y)
    y = normed(decoder["final_norm"], y)
    pixels = np.einsum("td,dijc->tijc", y, decoder["heads"]["pixels"]["kernel"])
    pixels = pixels + decoder["heads"]["pixels"]["bias"]
    drawn = np.zeros_like(image, dtype=np.float64)
    for (i, j), patch in zip(corners, pixels, strict=True):
        drawn[i : i + 2, j : j + 2] = patch
    return drawn, codes, z, e


@pytest.mark.thorough
def test_the_model_equals_a_plain_definition():
    tree, images = parameters_of(), images_of()
    found = apply(MODEL, tree, jnp.asarray(images)).heads["codes"]
    for i, image in enumerate(images):
        drawn, codes, z, e = plain(tree, image)
        np.testing.assert_array_equal(found.codes[i], codes)
        np.testing.assert_allclose(found.states[i], z, atol=2e-5)
        np.testing.assert_allclose(found.vectors[i], e, atol=2e-5)
        np.testing.assert_allclose(found.images[i], drawn, atol=1e-4)
    np.testing.assert_allclose(draw_codes(MODEL, tree, found.codes), found.images, atol=1e-5)


def test_the_nearest_vector_is_the_first_of_equals():
    book = jnp.asarray([[1.0, 0], [0, 1], [1, 0], [3, 3]])
    z = jnp.asarray([[0.9, 0.1], [2.5, 2.5], [0.5, 0.5]])
    np.testing.assert_array_equal(nearest(z, book), [0, 3, 0])
    rng = np.random.default_rng(0)
    z, book = rng.normal(size=(2, 5, W)), rng.normal(size=(40, W))
    exact = ((z[..., None, :] - book) ** 2).sum(axis=-1).argmin(axis=-1)
    np.testing.assert_array_equal(nearest(jnp.asarray(z), jnp.asarray(book)), exact)


def test_the_gradient_passes_the_quantisation_unchanged():
    z, e, y = (jnp.asarray(np.random.default_rng(i).normal(size=(5, W))) for i in range(3))
    # one rounding of the difference, one of the sum
    np.testing.assert_allclose(straight_through(z, e), e, atol=1e-6)
    to_z, to_e = jax.grad(lambda z, e: (straight_through(z, e) * y).sum(), (0, 1))(z, e)
    np.testing.assert_array_equal(to_z, y)
    np.testing.assert_array_equal(to_e, 0)


def test_the_book_is_an_average_over_steps():
    """Equations 6 to 8 in NumPy over three steps; states of weight 0 are NaN."""
    use = use_of()
    counts, sums = (np.asarray(each, np.float64) for each in use)
    rng = np.random.default_rng(1)
    for _ in range(3):
        z, codes = rng.normal(size=(20, W)), rng.integers(K - 1, size=20)
        weights = (rng.random(20) < 0.7).astype(np.float32)
        for k in range(K):
            own = z[(codes == k) & (weights > 0)]
            counts[k] = 0.9 * counts[k] + 0.1 * len(own)
            sums[k] = 0.9 * sums[k] + 0.1 * own.sum(axis=0)
        shown = np.where(weights[:, None] > 0, z, np.nan)
        arrays = (jnp.asarray(each, jnp.float32) for each in (shown, weights))
        shown, weights = arrays
        use = moved(use, shown, jnp.asarray(codes), weights, 0.9)
    np.testing.assert_allclose(use.counts, counts, rtol=1e-5)
    np.testing.assert_allclose(use.sums, sums, atol=1e-5)
    np.testing.assert_allclose(use.book(), sums / counts[:, None], atol=1e-5)


def test_a_code_without_use_starts_again_at_a_state():
    use = use_of(empty=(1, 4))
    z = jnp.asarray(np.random.default_rng(2).normal(size=(9, W)), jnp.float32)
    weights = jnp.asarray([1, 1, 0, 1, 0, 1, 1, 1, 1], jnp.float32)
    again = restarted(use, z, weights, 0.3, jax.random.key(0))
    for k in range(K):
        if k in (1, 4):
            (row,) = np.flatnonzero(
                (np.asarray(again.book()[k])[None] == np.asarray(z)).all(axis=1)
            )
            assert weights[row] > 0 and again.counts[k] == 1
        else:
            np.testing.assert_array_equal(again.sums[k], use.sums[k])
    later = moved(again, z, jnp.zeros(9, jnp.int32), weights, 0.9)
    np.testing.assert_allclose(later.book()[1], again.book()[1], rtol=1e-5)


def test_a_batch_without_weight_restarts_nothing():
    use, z = use_of(empty=(0,)), jnp.full((5, W), jnp.nan)
    again = restarted(use, z, jnp.zeros(5), 0.3, jax.random.key(0))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again, use))


def test_a_book_without_use_is_its_start():
    use = use_of(empty=range(K))
    np.testing.assert_array_equal(use.book(), use.sums)


@pytest.mark.thorough
def test_the_book_reaches_constant_states():
    z = jnp.asarray(np.random.default_rng(3).normal(size=(4, W)), jnp.float32)
    use = Use(jnp.zeros(4), jax.random.normal(jax.random.key(0), (4, W)))
    for step in range(60):
        use = moved(use, z, nearest(z, use.book()), jnp.ones(4), 0.5)
        use = restarted(use, z, jnp.ones(4), 0.05, jax.random.key(step))
    found = use.book()[nearest(z, use.book())]
    np.testing.assert_allclose(found, z, atol=1e-5)


@partial(jax.jit, static_argnums=(0, 3))
def sums_of(objective, tree, batch, dtype=None):
    return objective(MODEL, tree, batch, context(dtype=dtype))


def batch_of(images, weights=None):
    weights = np.ones(len(images), np.float32) if weights is None else weights
    return {"images": jnp.asarray(images), "weights": jnp.asarray(weights, jnp.float32)}


@pytest.mark.thorough
def test_the_objective_equals_a_plain_definition():
    tree, images = parameters_of(), images_of()
    objective = VectorQuantisation(commitment=0.5, decay=0.8, least=0.0)
    sums = sums_of(objective, tree, batch_of(images))
    loss, error, states, codes = 0.0, 0.0, [], []
    for image in images:
        drawn, chosen, z, e = plain(tree, image)
        error += ((drawn - image) ** 2).mean()
        loss += 0.5 * ((z - e) ** 2).mean()
        states += list(z)
        codes += list(chosen)
    np.testing.assert_allclose(sums.loss, loss + error, rtol=1e-4)
    np.testing.assert_allclose(sums.metrics["error"][0], error, rtol=1e-4)
    assert sums.weight == B and sums.unit == "images"
    new = sums.updates["heads"]["codes"]
    old = tree["heads"]["codes"]
    for k in range(K):
        own = [z for z, code in zip(states, codes, strict=True) if code == k]
        count = 0.8 * old["counts"][k] + 0.2 * len(own)
        total = 0.8 * np.asarray(old["sums"][k]) + 0.2 * np.sum(own, axis=0)
        np.testing.assert_allclose(new["counts"][k], count, rtol=1e-5)
        np.testing.assert_allclose(new["sums"][k], total, atol=1e-4)
    share = np.bincount(codes, minlength=K) / len(codes)
    in_use = np.exp(-sum(p * np.log(p) for p in share if p))
    np.testing.assert_allclose(sums.metrics["codes_in_use"][0] / B, in_use, rtol=1e-5)


@pytest.mark.thorough
def test_an_image_of_weight_0_changes_nothing():
    tree, images = parameters_of(), images_of(count=B + 2)
    objective = VectorQuantisation(least=0.0)
    known = sums_of(objective, tree, batch_of(images[:B]))
    images[B:] = np.nan
    weights = np.ones(B + 2)
    weights[B:] = 0
    padded = sums_of(objective, tree, batch_of(images, weights))
    np.testing.assert_allclose(padded.loss, known.loss, rtol=1e-5)
    for name in ("counts", "sums"):
        new, other = (sums.updates["heads"]["codes"][name] for sums in (padded, known))
        np.testing.assert_allclose(new, other, atol=1e-5)
    np.testing.assert_allclose(
        padded.metrics["codes_in_use"][0], known.metrics["codes_in_use"][0], rtol=1e-5
    )


@pytest.mark.thorough
def test_the_book_has_no_gradient_and_the_encoder_has():
    tree = parameters_of()

    def loss(tree):
        return sums_of(VectorQuantisation(), tree, batch_of(images_of())).loss

    gradient = jax.grad(loss)(tree)
    book = gradient["heads"]["codes"]
    assert not book["counts"].any() and not book["sums"].any()
    assert abs(gradient["embedding"]["patches"]["kernel"]).max() > 0
    assert abs(book["decoder"]["embedding"]["vectors"]["kernel"]).max() > 0


@dataclass(frozen=True)
class OwnBook:
    """A book of a user's own, that does as ours does."""

    count: int
    width: int
    name: str = "mine"

    def __call__(self, config):
        return CodeBook(self.count, self.width, 1, self.name)(config)


@pytest.mark.thorough
def test_a_book_of_ones_own_is_moved():
    model = replace(MODEL, heads=(OwnBook(K, W),))
    tree = models.init(model, jax.random.key(0))
    sums = VectorQuantisation()(model, tree, batch_of(images_of()), context())
    assert sums.updates["heads"]["mine"]["sums"].shape == (K, W)


def test_variables_are_declared():
    assert parameters.variables(models.spec(MODEL)) == ["heads/codes/counts", "heads/codes/sums"]


@pytest.mark.thorough
def test_bfloat16_keeps_the_book_in_float32():
    tree, images = parameters_of(), images_of()
    found = apply(MODEL, tree, jnp.asarray(images), dtype=jnp.bfloat16).heads["codes"]
    assert found.states.dtype == found.vectors.dtype == found.images.dtype == jnp.float32
    sums = sums_of(VectorQuantisation(), tree, batch_of(images), jnp.bfloat16)
    assert sums.updates["heads"]["codes"]["sums"].dtype == jnp.float32


def test_codes_in_use():
    codes = jnp.asarray([[0, 1], [2, 3]])
    assert codes_in_use(codes, jnp.ones((2, 2)), K) == pytest.approx(4)
    assert codes_in_use(codes, jnp.asarray([[1.0, 1], [0, 0]]), K) == pytest.approx(2)
    assert codes_in_use(codes, jnp.zeros((2, 2)), K) == 1


@pytest.mark.thorough
def test_a_code_that_does_not_exist_is_drawn_as_nan():
    images = draw_codes(MODEL, parameters_of(), jnp.asarray([[0, 1, 2, K]]))
    assert jnp.isnan(images).any()


def test_the_doors():
    patches = Patches(image=(4, 4), patch=(2, 2), channels=1)
    with_token = replace(MODEL, context_length=T + 1, embedding=patches)
    with pytest.raises(ConfigError, match="class_token=False"):
        models.spec(with_token)
    with pytest.raises(ConfigError, match="a code is that of a patch"):
        models.spec(ModelConfig(10, 1, 8, 2, 4, heads=(HEAD,)))
    with pytest.raises(ConfigError, match=r"CodeBook\.count=1"):
        CodeBook(count=1)
    with pytest.raises(ConfigError, match=r"objective\.decay=1\.0"):
        VectorQuantisation(decay=1.0)
    other = ModelConfig(10, 1, 8, 2, 4)
    with pytest.raises(ConfigError, match="CodeBook"):
        VectorQuantisation()(other, {}, batch_of(images_of()), context())
