"""DiT and flow matching beside a second definition: NumPy in float64, one image at a time."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import Mixture, ModelConfig, Patches, TokenClassification
from jaxformer.models.norm import Unscaled
from jaxformer.objectives import StepContext
from jaxformer.zoo.dit import AdaLNZero, Pixels, time_features
from jaxformer.zoo.flow_matching import FlowMatching, between, follow, guided, logit_normal, sample
from tests.zoo.plain_layers import attention, gelu, standardised

LABELS = (3, 4)
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=3,
    d_model=16,
    num_heads=2,
    context_length=6,
    d_ff=24,
    feedforward="gelu_tanh",
    norm=Unscaled(),
    embedding=Patches(image=(4, 6), patch=(2, 2), class_token=False),
    block=AdaLNZero(LABELS, features=8),
    heads=(Pixels(),),
    masks=(full(),),
)


def silu(x):
    return x / (1 + np.exp(-x))


def condition(tree, time, labels):
    half = 4
    angles = [1000 * time * 10_000 ** (-i / half) for i in range(half)]
    features = np.array([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    hidden = silu(features @ tree["time_in"]["kernel"] + tree["time_in"]["bias"])
    c = hidden @ tree["time_out"]["kernel"] + tree["time_out"]["bias"]
    for kind, label in enumerate(labels):
        c = c + tree[f"labels_{kind}"][label]
    return silu(c)


def feedforward(tree, x):
    hidden = gelu(x @ tree["up"]["kernel"] + tree["up"]["bias"])
    return hidden @ tree["down"]["kernel"] + tree["down"]["bias"]


def layer(tree, x, c):
    kernel, bias = tree["modulation"]["kernel"], tree["modulation"]["bias"]
    for n, f in enumerate((attention, feedforward)):
        shift, scale, gate = (c @ kernel[:, n, k] + bias[n, k] for k in range(3))
        name = ("attention", "feedforward")[n]
        x = x + gate * f(tree[name], standardised(x) * (1 + scale) + shift)
    return x


def image_of(tree, image, time, labels):
    """The answer of the model for one image."""
    c = condition(tree["shared"]["condition"], time, labels)
    x = []
    for line in range(2):
        for column in range(3):
            patch = image[2 * line : 2 * line + 2, 2 * column : 2 * column + 2]
            of_patches = tree["embedding"]["patches"]
            kernel = of_patches["kernel"]  # [channels, i, j, D]
            x.append(np.einsum("ijc,cijd->d", patch, kernel) + of_patches["bias"])
    x = np.array(x) + tree["embedding"]["positions"]
    for i in range(3):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]), x, c)
    final = tree["final_modulation"]
    shift, scale = (c @ final["kernel"][:, k] + final["bias"][k] for k in range(2))
    x = standardised(x) * (1 + scale) + shift
    head = tree["heads"]["pixels"]
    answer = np.zeros_like(image)
    for t in range(6):
        line, column = 2 * (t // 3), 2 * (t % 3)
        patch = np.einsum("d,dijc->ijc", x[t], head["kernel"]) + head["bias"]
        answer[line : line + 2, column : column + 2] = patch
    return answer


def random_parameters(model, seed=0):
    """Every parameter random: at the start of training most are zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32),
        models.spec(model),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
def test_a_dit_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    params = random_parameters(MODEL, seed)
    images = rng.standard_normal((5, 4, 6, 3)).astype(np.float32)
    time = rng.uniform(size=5).astype(np.float32)
    labels = np.stack([rng.integers(count + 1, size=5) for count in LABELS], axis=1).astype(
        np.int32
    )
    inputs = {"time": time, "labels": labels}
    found = models.apply(MODEL, params, jnp.asarray(images), inputs=inputs).logits
    wide = jax.tree.map(np.float64, params)
    rows = zip(np.float64(images), time, labels, strict=True)
    expected = [image_of(wide, *each) for each in rows]
    # float32: angles of up to 1000 are off by 1000 x 6e-8
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.thorough
def test_a_new_dit_answers_zero_and_its_layers_are_the_identity():
    params = models.init(MODEL, jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (2, 4, 6, 3))
    inputs = {"time": jnp.array([0.1, 0.7]), "labels": jnp.array([[0, 0], [2, 3]])}
    output = models.apply(MODEL, params, images, inputs=inputs)
    assert (output.logits == 0).all()
    other = {"time": jnp.array([0.9, 0.2]), "labels": jnp.array([[1, 3], [0, 0]])}
    hidden = models.apply(MODEL, params, images, inputs=other).hidden
    np.testing.assert_array_equal(output.hidden, hidden)


def test_features_of_the_time():
    time = jnp.array([0.0, 0.25, 1.0])
    found = time_features(time, 6)
    frequencies = 1000 * 10_000 ** (-np.arange(3) / 3)
    angles = np.float64(time)[:, None] * frequencies
    np.testing.assert_allclose(found, np.hstack([np.cos(angles), np.sin(angles)]), atol=1e-4)


def batch_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "images": jnp.asarray(rng.standard_normal((count, 4, 6, 3)), jnp.float32),
        "labels": jnp.asarray([[i % 3, i % 4] for i in range(count)], jnp.int32),
        "weights": jnp.asarray(np.arange(count) > 0, jnp.float32),
    }


@pytest.mark.thorough
def test_the_loss_is_the_square_of_what_the_velocity_lacks():
    """With the keys of the objective: noise, time and dropped labels are drawn in that order."""
    params, batch, key = random_parameters(MODEL), batch_of(64), jax.random.key(3)
    objective = FlowMatching(drop=0.4, times=logit_normal)
    sums = objective(MODEL, params, batch, StepContext(key))
    of_noise, of_time, of_drop, _ = jax.random.split(key, 4)
    noise = np.asarray(jax.random.normal(of_noise, batch["images"].shape))
    time = np.asarray(logit_normal(of_time, 64))
    dropped = np.asarray(jax.random.bernoulli(of_drop, 0.4, (64, 1)))[:, 0]
    assert 15 < dropped.sum() < 37 and (time > 0).all() and (time < 1).all()
    wide = jax.tree.map(np.float64, params)
    total = 0
    for i in range(1, 64):
        image = np.float64(batch["images"][i])
        labels = LABELS if dropped[i] else batch["labels"][i]
        x = (1 - time[i]) * noise[i] + time[i] * image
        total += ((image_of(wide, x, time[i], labels) - (image - noise[i])) ** 2).mean()
    assert sums.weight == 63 and sums.unit == "images"
    np.testing.assert_allclose(sums.loss, total, rtol=1e-4)


def test_evaluation_keeps_all_labels():
    assert FlowMatching(drop=0.5).evaluation().drop == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_guidance_goes_beyond_the_labels(scale):
    params, batch = random_parameters(MODEL), batch_of(3)
    x, time = batch["images"], jnp.array([0.2, 0.5, 0.9])
    answer = lambda labels: (
        models.apply(MODEL, params, x, inputs={"time": time, "labels": labels}).logits
    )
    free, asked = answer(jnp.tile(jnp.array([LABELS]), (3, 1))), answer(batch["labels"])
    found = guided(MODEL, params, batch["labels"], scale)(x, time)
    np.testing.assert_allclose(found, free + scale * (asked - free), rtol=1e-4, atol=1e-4)


def test_the_sampler_follows_a_known_field():
    """dx / dt = a x + t has a closed form; Heun's error falls with the square of the step."""
    x = jnp.linspace(-1, 1, 6).reshape(3, 2)
    exact = np.float64(x) * math.exp(-1) + 1 - (1 - math.exp(-1))
    errors = [
        np.abs(follow(lambda x, t: -x + t[:, None], x, steps) - exact).max()
        for steps in (5, 10, 20)
    ]
    assert errors[2] < 1e-3 and 3 < errors[0] / errors[1] < 5 and 3 < errors[1] / errors[2] < 5


def test_straight_lines_need_one_step():
    """The velocity image - noise is constant along a line, so each sampler ends at the image."""
    noise, image = (jax.random.normal(jax.random.key(i), (2, 4, 6, 3)) for i in (0, 1))
    for steps in (1, 3):
        found = follow(lambda x, t: image - noise, noise, steps)
        np.testing.assert_allclose(found, image, atol=1e-5)
    ends = [between(noise, image, jnp.full(2, t)) for t in (0.0, 1.0)]
    np.testing.assert_array_equal(ends[0], noise)
    np.testing.assert_array_equal(ends[1], image)


@pytest.mark.thorough
def test_samples_have_the_size_of_the_images_and_follow_their_labels():
    params = random_parameters(MODEL)
    labels = batch_of(4)["labels"]
    key = jax.random.key(5)
    found = jax.jit(sample, static_argnums=0, static_argnames="steps")(
        MODEL, params, key, labels, steps=3
    )
    noise = jax.random.normal(key, (4, 4, 6, 3))
    expected = follow(guided(MODEL, params, labels, 2.0), noise, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
def test_a_model_without_labels_trains_and_samples():
    model = replace(MODEL, block=AdaLNZero(features=8))
    params = random_parameters(model)
    batch = {name: batch_of(3)[name] for name in ("images", "weights")}
    sums = FlowMatching()(model, params, batch, StepContext(jax.random.key(0)))
    assert np.isfinite(sums.loss)
    labels = jnp.zeros((2, 0), jnp.int32)
    images = sample(model, params, jax.random.key(1), labels, steps=2)
    assert images.shape == (2, 4, 6, 3)


@pytest.mark.thorough
def test_dropout_acts_in_training_alone():
    """The loss of a model with dropout depends on the key of the model, and not in evaluation."""
    params, batch = random_parameters(MODEL), batch_of(8)
    context = StepContext(jax.random.key(2))
    plain, dropped = (
        FlowMatching()(replace(MODEL, dropout_rate=rate), params, batch, context).loss
        for rate in (0.0, 0.5)
    )
    assert abs(plain - dropped) > 1e-3 * abs(plain)
    config = models.evaluation(replace(MODEL, dropout_rate=0.5))
    assert FlowMatching()(config, params, batch, context).loss == plain


@pytest.mark.thorough
def test_the_time_keeps_its_precision_in_bfloat16():
    params, batch = random_parameters(MODEL), batch_of(1)
    # both times are 0.5 in bfloat16
    answers = [
        models.apply(
            MODEL,
            params,
            batch["images"],
            inputs={"time": jnp.array([time]), "labels": batch["labels"]},
            dtype=jnp.bfloat16,
        ).logits
        for time in (0.5, 0.5005)
    ]
    assert np.abs(answers[0] - answers[1]).max() > 0.01 * np.abs(answers[0]).max()
    assert jnp.bfloat16(0.5005) == 0.5


@pytest.mark.thorough
def test_a_dit_with_experts_learns_to_balance_them():
    """The model's own loss has a gradient, and its statistics are reported."""
    gradients = []
    for weight in (0.0, 1.0):
        experts = Mixture(experts=4, top_k=2, d_ff=16, balance_loss=weight)
        model = replace(MODEL, feedforward=experts)

        def sums(params, model=model):
            return FlowMatching()(model, params, batch_of(4), StepContext(jax.random.key(0)))

        params = random_parameters(model)
        assert sums(params).metrics  # what the experts report
        tree = jax.grad(lambda params, sums=sums: sums(params).loss)(params)
        gradients.append(tree["layers"]["feedforward"]["router"]["kernel"])
    assert np.abs(gradients[0] - gradients[1]).max() > 1e-4


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    images = jnp.zeros((2, 4, 6, 3))
    params = models.init(MODEL, jax.random.key(0))
    good = {"time": jnp.zeros(2), "labels": jnp.zeros((2, 2), jnp.int32)}
    for inputs, named in [
        (None, "'time'"),
        ({"time": good["time"]}, "'labels'"),
        (good | {"time": jnp.zeros((2, 1))}, "time"),
        (good | {"labels": jnp.zeros((2, 3), jnp.int32)}, r"labels \[2, 3\]"),
    ]:
        with pytest.raises(ConfigError, match=named):
            models.apply(MODEL, params, images, inputs=inputs)
    with pytest.raises(ConfigError, match="norm=Unscaled"):
        models.spec(replace(MODEL, norm="layer_norm"))
    with pytest.raises(ConfigError, match="extra tokens"):
        models.spec(replace(MODEL, embedding=Patches(image=(4, 6), patch=(2, 2)), context_length=7))
    with pytest.raises(ConfigError, match="even"):
        AdaLNZero(features=7)
    with pytest.raises(ConfigError, match="drop"):
        FlowMatching(drop=1.0)
    with pytest.raises(ConfigError, match="unread"):
        models.spec(
            replace(MODEL, embedding=Patches((5, 6), (2, 2), class_token=False, unread=(1, 0)))
        )
    with pytest.raises(ConfigError, match=r"labels \[2, 1\]: the model reads 2"):
        batch = batch_of(2)
        FlowMatching()(MODEL, params, batch | {"labels": batch["labels"][:, :1]}, StepContext(None))
    with pytest.raises(ConfigError, match="the first head answers"):
        heads = (TokenClassification(3),)
        model = replace(MODEL, heads=heads)
        FlowMatching()(model, random_parameters(model), batch_of(2), StepContext(jax.random.key(0)))
    with pytest.raises(ConfigError, match="attribute `labels`"):
        FlowMatching()(
            replace(MODEL, block=None), params, batch_of(2), StepContext(jax.random.key(0))
        )
