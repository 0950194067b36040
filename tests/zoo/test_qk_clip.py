"""QK-clip beside its definition: the scores of all pairs at once, and weights scaled by hand."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, params as P
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.ops.positions import Rope
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.training import AdamW, Constant, Experiment, ScheduleFree
from jaxformer.training.recipe import build
from jaxformer.training.step import first_state, make_train_step
from jaxformer.zoo.qk_clip import QKClip, largest_scores, qk_clip

rng = np.random.default_rng(0)
MASKS = {
    "full": masks.Mask(lambda mask, q, kv: jnp.ones((q.size, kv.size), bool)),
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(5),
    "segments": masks.causal() & masks.segments(jnp.asarray([[1] * 60 + [2] * 90] * 2)),
}
MODEL = ModelConfig(
    vocab_size=14,
    num_layers=2,
    d_model=16,
    num_heads=4,
    context_length=8,
    positions=Rope(),
    init_std=0.8,  # so that scores are large
    mixer=qk_clip,
)
EXPERIMENT = Experiment(
    name="clipped",
    model=MODEL,
    data=Copy(vocab_size=8, length=4),
    optimizer=AdamW(learning_rate=1e-2),
    schedule=Constant(),
    steps=20,
    batch_size=8,
    after_update=QKClip(2.0),
)


def dense(query, key, mask, scale):
    """By NumPy in float64, all pairs at once."""
    N, K = query.shape[2], key.shape[2]
    key = np.repeat(np.float64(key), N // K, axis=2)
    scores = scale * np.einsum("btnh,bsnh->bnts", np.float64(query), key)
    visible = np.broadcast_to(mask.dense(query.shape[1], key.shape[1]), scores.shape)
    return np.where(visible, scores, -np.inf).max(axis=(0, 2, 3))


@pytest.mark.thorough
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["causal", "window", "segments"])
def test_the_largest_score_of_each_head(name, kv_heads):
    """Over 150 queries: two blocks, and the second one has queries past the end."""
    query = normal((2, 150, 4, 8))
    key = normal((2, 150, kv_heads, 8))
    mask = MASKS[name]
    # float32: a sum of eight products
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    close(largest_scores(query, key, mask), dense(query, key, mask, 8**-0.5))
    close(largest_scores(query, key, mask, 0.3), dense(query, key, mask, 0.3))


def normal(shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def batch(seed=0):
    tokens = np.random.default_rng(seed).integers(0, 14, (8, 8)).astype(np.int32)
    weights = np.ones((8, 8), np.float32)
    return {"tokens": tokens, "labels": np.roll(tokens, -1, axis=1), "weights": weights}


def largest_of(model, tree, tokens):
    """{layer: the record} of a forward pass."""
    tokens = jnp.asarray(tokens)
    return models.apply(model, tree, tokens).updates["layers"]["attention"]["largest_score"]


@pytest.mark.thorough
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("use_bias", [True, False])
def test_no_score_of_the_same_batch_is_above_the_threshold_afterwards(kv_heads, use_bias):
    model = replace(MODEL, num_kv_heads=kv_heads, use_bias=use_bias, num_layers=1)
    tree = P.init(models.spec(model), jax.random.key(1))
    tree = jax.tree.map(lambda leaf: leaf + 0.3 * normal(leaf.shape), tree)  # biases of 0, too
    tokens = batch()["tokens"]
    before = largest_of(model, tree, tokens)
    threshold = float(jnp.median(before))
    assert before.shape == (1, 4) and before.min() < threshold < before.max()
    tree["layers"]["attention"]["largest_score"] = before
    clipped = QKClip(threshold)(tree)
    np.testing.assert_allclose(
        largest_of(model, clipped, tokens), np.minimum(before, threshold), rtol=1e-5
    )
    same = {"query", "key"} if kv_heads == 4 else {"query"}
    for path, leaf in P.paths(tree).items():
        changed = not np.array_equal(leaf, P.paths(clipped)[path])
        assert changed == (path.split("/")[-2] in same), path


@pytest.mark.thorough
def test_a_step_is_an_update_and_then_the_clip():
    """The same step without it, its result scaled by hand."""
    plain = replace(EXPERIMENT, after_update=None)
    states = []
    for experiment in (EXPERIMENT, plain):
        recipe = build(experiment)
        states.append(jax.jit(make_train_step(recipe))(first_state(recipe), batch())[0])
    clipped, expected = (state.params["layers"]["attention"] for state in states)
    largest = largest_of(MODEL, first_state(build(plain)).params, batch()["tokens"])
    np.testing.assert_array_equal(expected["largest_score"], clipped["largest_score"])
    np.testing.assert_allclose(expected["largest_score"], largest, rtol=1e-6)
    root = np.sqrt(np.minimum(1, 2.0 / largest))
    assert (root < 1).any()
    for name in ("query", "key"):
        kernel = expected[name]["kernel"] * root[:, None, :, None]
        np.testing.assert_allclose(clipped[name]["kernel"], kernel, rtol=1e-6)
    np.testing.assert_array_equal(expected["value"]["kernel"], clipped["value"]["kernel"])


@pytest.mark.thorough
def test_what_is_frozen_stays():
    recipe = build(replace(EXPERIMENT, frozen="query"))
    before = first_state(recipe).params["layers"]["attention"]
    state, _ = jax.jit(make_train_step(recipe))(first_state(recipe), batch())
    after = state.params["layers"]["attention"]
    np.testing.assert_array_equal(before["query"]["kernel"], after["query"]["kernel"])
    assert not np.array_equal(before["key"]["kernel"], after["key"]["kernel"])


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [Mesh(data=8), Mesh(data=1, fsdp=4, tensor=2)], ids=str)
def test_on_a_mesh_as_on_one_device(mesh):
    def after_steps(experiment):
        recipe = build(experiment)
        state = first_state(recipe)
        step = jax.jit(make_train_step(recipe))
        for i in range(3):
            state, _ = step(state, batch(i))
        return state.params

    expected = after_steps(EXPERIMENT)
    with jax.set_mesh(make_mesh(mesh)):
        found = after_steps(replace(EXPERIMENT, mesh=mesh))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(MODEL, mixer=None)}, "give model.mixer=qk_clip"),
        ({"adaptation": Lora()}, "trains factors"),
        ({"optimizer": ScheduleFree()}, "optimizer=ScheduleFree evaluates an average"),
        ({"after_update": lambda params: {}}, "after_update=<lambda>: parameter .* is missing"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(replace(EXPERIMENT, **changes))
    with pytest.raises(ConfigError, match="threshold"):
        QKClip(0.0)
