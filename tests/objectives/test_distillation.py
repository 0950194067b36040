"""Distillation beside its equations in float64, as an objective of models, and over devices."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P, sharding
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, window
from jaxformer.models import Classification, EncoderDecoder, ModelConfig, Output
from jaxformer.objectives import (
    Distillation,
    HiddenStates,
    JensenShannon,
    StepContext,
    TokenCrossEntropy,
    forward_kl,
    reverse_kl,
)
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh
from jaxformer.training import Experiment, Reference
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, make_train_step, state_shardings

rng = np.random.default_rng(0)
B, T, V = 3, 8, 11
STUDENT = ModelConfig(V, 2, 8, 2, context_length=T, dropout_rate=0.5, init_std=0.3)
TEACHER = ModelConfig(V, 3, 12, 3, context_length=T, dropout_rate=0.5, init_std=0.3)
HIDDEN = HiddenStates("layers/0/residual", "layers/1/residual", weight=0.7)
KEY = jax.random.key(5)


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def kl(p, q):
    return np.sum(p * (np.log(p) - np.log(q)), axis=-1)


def jensen_shannon(p, q, beta=0.2):
    mixed = beta * p + (1 - beta) * q
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


DIVERGENCES = {
    "forward": (forward_kl, kl),
    "reverse": (reverse_kl, lambda p, q: kl(q, p)),
    "Jensen-Shannon": (JensenShannon(0.2), jensen_shannon),
}


@dataclass(frozen=True)
class Table:
    """A model of one's own: its parameters are the logits."""

    def spec(self):
        return {"logits": P.Spec((B, T, V), (None, None, None), jax.nn.initializers.normal(1.0))}

    def apply(self, params, tokens, **options):
        return Output(params["logits"], None)


def batch_of(vocab=V, length=T):
    tokens = jnp.asarray(rng.integers(0, vocab, (B, length)), jnp.int32)
    labels = jnp.asarray(rng.integers(0, vocab, (B, length)), jnp.int32)
    weights = rng.choice([0.0, 0.5, 1.0], (B, length))
    return {"tokens": tokens, "labels": labels, "weights": jnp.float32(weights)}


def init(model, seed):
    return jax.jit(partial(models.init, model))(jax.random.key(seed))


def both(student=STUDENT, teacher=TEACHER):
    return init(student, 0), init(teacher, 1)


def sums_of(objective, model, params, batch, context):
    return jax.jit(objective, static_argnums=0)(model, params, batch, context)


def context_of(teacher, objective=None, model=STUDENT):
    own = {} if objective is None else P.init(objective.spec(model), jax.random.key(2))
    return StepContext(KEY, references={"teacher": teacher}, params=own)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature, share", [(1.0, 1.0), (2.5, 0.3)])
def test_the_loss_and_its_gradient(name, temperature, share):
    """As the papers write them, in float64; gradients by central differences."""
    divergence, expected = DIVERGENCES[name]
    objective = Distillation(divergence, temperature, share, teacher=Table())
    student, teacher = rng.normal(0, 3, (2, B, T, V))
    batch = batch_of()
    weights, labels = np.asarray(batch["weights"], float), np.asarray(batch["labels"])

    def theirs(student):
        soft = expected(softmax(teacher / temperature), softmax(student / temperature))
        picked = np.take_along_axis(softmax(student), labels[..., None], axis=-1)[..., 0]
        losses = (1 - share) * -np.log(picked) + share * temperature**2 * soft
        return np.sum(losses * weights)

    def ours(student):
        context = context_of({"logits": jnp.float32(teacher)})
        return objective(Table(), {"logits": student}, batch, context).loss

    value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.float32(student))
    np.testing.assert_allclose(value, theirs(student), rtol=1e-5)
    for index in zip(*(rng.integers(0, n, 40) for n in (B, T, V)), strict=True):
        change = np.zeros((B, T, V))
        change[index] = 1e-5
        slope = (theirs(student + change) - theirs(student - change)) / 2e-5
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=2e-6)
    assert not np.asarray(gradient)[weights == 0].any()


def test_the_gradient_of_soft_targets_is_that_of_hinton():
    """T (softmax(z / T) - softmax(v / T)): T^2 leaves one factor T of the two."""
    student, teacher = rng.normal(0, 2, (2, B, T, V))
    batch = batch_of() | {"weights": jnp.ones((B, T))}
    objective = Distillation(temperature=3.0, share=1.0, teacher=Table())

    def loss(logits):
        context = context_of({"logits": jnp.float32(teacher)})
        return objective(Table(), {"logits": logits}, batch, context).loss

    gradient = jax.jit(jax.grad(loss))(jnp.float32(student))
    np.testing.assert_allclose(
        gradient, 3 * (softmax(student / 3) - softmax(teacher / 3)), atol=1e-5
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_impossible_classes_and_far_logits(name):
    """A class that both models exclude counts nothing; the gradient is finite."""
    divergence, expected = DIVERGENCES[name]
    student, teacher = rng.normal(0, 1, (2, 1, 1, V))
    excluded = jnp.float32(np.where(np.arange(V) < 4, -np.inf, 0))[None, None]

    def ours(student):
        logs = [jax.nn.log_softmax(jnp.float32(x) + excluded) for x in (teacher, student)]
        return divergence(*logs).sum()

    value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.float32(student))
    found = expected(softmax(teacher[..., 4:]), softmax(student[..., 4:])).sum()
    np.testing.assert_allclose(value, found, rtol=1e-4)
    assert np.isfinite(gradient).all()
    far = jnp.float32(np.eye(V) * 200)[None]
    logs = jax.nn.log_softmax(far[:, :1]), jax.nn.log_softmax(far[:, 1:2])
    assert np.isfinite(divergence(*logs)).all()
    np.testing.assert_allclose(divergence(logs[0], logs[0]), 0, atol=1e-6)


@pytest.mark.thorough
def test_the_objective_of_two_models():
    """Sums and reports are those of both models' logits; the student alone has dropout."""
    objective = Distillation(reverse_kl, 2.0, 0.4, hidden=HIDDEN, teacher=TEACHER)
    first, second = both()
    batch = batch_of()
    context = context_of(second, objective)
    sums = sums_of(objective, STUDENT, first, batch, context)
    names = (HIDDEN.student,)
    student = jax.jit(partial(models.apply, STUDENT, dropout_key=KEY, intermediates=names))(
        first, batch["tokens"]
    )
    teacher = jax.jit(partial(models.apply, TEACHER, intermediates=(HIDDEN.teacher,)))(
        second, batch["tokens"]
    )
    logits, known = (np.asarray(x.logits, float) for x in (student, teacher))
    weights, labels = np.asarray(batch["weights"], float), np.asarray(batch["labels"])

    def cross_entropy(logits):
        picked = np.take_along_axis(softmax(logits), labels[..., None], axis=-1)[..., 0]
        return -np.sum(np.log(picked) * weights)

    kernel = np.asarray(context.params["hidden"]["kernel"], float)
    assert kernel.shape == (8, 12)
    projected = np.asarray(student.intermediates[HIDDEN.student], float) @ kernel
    squares = (projected - np.asarray(teacher.intermediates[HIDDEN.teacher], float)) ** 2
    error = np.sum(squares.mean(axis=-1) * weights)
    divergence = np.sum(kl(softmax(logits / 2), softmax(known / 2)) * weights)
    loss = 0.6 * cross_entropy(logits) + 0.4 * 4 * divergence + 0.7 * error
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    expected = {
        "label_loss": cross_entropy(logits),
        "divergence": divergence,
        "teacher_loss": cross_entropy(known),
        "agreement": np.sum((logits.argmax(-1) == known.argmax(-1)) * weights),
        "accuracy": np.sum((logits.argmax(-1) == labels) * weights),
        "hidden_error": error,
    }
    assert set(sums.metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(sums.metrics[name][0], value, rtol=1e-5, err_msg=name)
        assert sums.metrics[name][1] == sums.weight
    np.testing.assert_allclose(sums.weight, weights.sum())
    assert sums.unit == "tokens" and not sums.perplexity


@pytest.mark.thorough
def test_the_teacher_gets_no_gradient_and_the_projection_does():
    objective = Distillation(share=1.0, hidden=HIDDEN, teacher=TEACHER)
    first, second = both()
    batch = batch_of()
    context = context_of(second, objective)

    def loss(teacher, own):
        changed = replace(context, references={"teacher": teacher}, params=own)
        return objective(STUDENT, first, batch, changed).loss

    of_teacher, of_own = jax.jit(jax.grad(loss, argnums=(0, 1)))(second, context.params)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_teacher))
    assert np.asarray(of_own["hidden"]["kernel"]).all()


@pytest.mark.thorough
def test_evaluation_is_the_cross_entropy_of_the_labels():
    """So a student that was distilled and one that was not have comparable losses."""
    objective = Distillation(share=0.9, hidden=HIDDEN, teacher=TEACHER).evaluation()
    first, second = both()
    batch = batch_of()
    model = models.evaluation(STUDENT)
    sums = sums_of(objective, model, first, batch, context_of(second))
    plain = sums_of(TokenCrossEntropy(), model, first, batch, StepContext(KEY))
    np.testing.assert_allclose(sums.loss, plain.loss, rtol=1e-6)
    assert sums.perplexity and plain.perplexity
    assert {"divergence", "teacher_loss", "agreement"} < set(sums.metrics)
    far = {"logits": jnp.zeros((B, T, V)).at[..., 0].set(-jnp.inf)}  # an infinite forward KL
    table = replace(objective, teacher=Table())
    sums = sums_of(
        table,
        Table(),
        far,
        batch | {"labels": jnp.ones((B, T), int)},
        context_of({"logits": jnp.zeros((B, T, V))}),
    )
    assert np.isfinite(sums.loss) and np.isinf(sums.metrics["divergence"][0])


@pytest.mark.thorough
def test_a_teacher_beside_itself():
    """Nothing to learn: no divergence, no gradient, the same first choices."""
    model = models.evaluation(STUDENT)
    tree, _ = both()
    frozen = tree
    batch = batch_of()

    def loss(tree):
        sums = Distillation(share=1.0)(model, tree, batch, context_of(frozen))
        return sums.loss, sums

    gradient, sums = jax.jit(jax.grad(loss, has_aux=True))(tree)
    np.testing.assert_allclose(sums.loss, 0, atol=1e-5)
    assert sums.metrics["agreement"][0] == sums.weight
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-5


@pytest.mark.thorough
def test_packed_rows_count_as_their_texts_alone():
    """Both models read segments, and no token of a neighbour."""
    model = replace(models.evaluation(STUDENT), masks=(causal() & window(3),))
    large = replace(models.evaluation(TEACHER), masks=(causal(),))
    objective = Distillation(temperature=1.5, share=0.5, hidden=HIDDEN, teacher=large)
    first, second = both(model, large)
    context = context_of(second, objective, model)
    batch = batch_of()
    segments = jnp.asarray([[1] * 3 + [2] * 4 + [0]] * B, jnp.int32)
    weights = jnp.float32(segments != 0)
    packed = sums_of(
        objective, model, first, batch | {"segment_ids": segments, "weights": weights}, context
    )
    total = 0.0
    for start, stop in ((0, 3), (3, 7)):
        alone = {name: array[:, start:stop] for name, array in batch.items()}
        alone["weights"] = jnp.ones((B, stop - start))
        total += sums_of(objective, model, first, alone, context).loss
    np.testing.assert_allclose(packed.loss, total, rtol=1e-5)
    assert packed.weight == 7 * B


@pytest.mark.thorough
def test_an_encoder_decoder_and_bfloat16():
    stack = ModelConfig(V, 1, 8, 2, context_length=T, init_std=0.3)
    pair = EncoderDecoder(replace(stack, heads=()), stack)
    large = EncoderDecoder(replace(stack, heads=(), d_model=12), replace(stack, d_model=12))
    hidden = HiddenStates("decoder/layers/0/residual", "decoder/layers/0/residual")
    objective = Distillation(hidden=hidden, teacher=large)
    first, second = both(pair, large)
    batch = batch_of() | {"source": batch_of()["tokens"][:, :5]}
    context = context_of(second, objective, pair)
    exact = sums_of(objective, pair, first, batch, context)
    rounded = sums_of(objective, pair, first, batch, replace(context, dtype=jnp.dtype("bfloat16")))
    assert rounded.loss.dtype == jnp.float32
    np.testing.assert_allclose(rounded.loss, exact.loss, rtol=0.02)  # 8 bits of a mantissa


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    first, second = both()
    batch = batch_of()

    def refused(match, objective, model=STUDENT, tree=first, teacher=second, own=None):
        context = context_of(teacher)
        context = replace(context, params=own or {})
        with pytest.raises(ConfigError, match=match) as caught:
            objective(model, tree, batch, context)
        assert "\n" not in str(caught.value)

    refused(r"'big'.*\(teacher\).*references=", Distillation(reference="big"))
    refused(r"objective\.teacher: parameter .*Reference\(RUN, model=LARGE\)", Distillation())
    wide = replace(TEACHER, vocab_size=V + 1)
    refused(
        r"logits \[3, 8, 12\].*\[3, 8, 11\].*vocab_size",
        Distillation(teacher=wide),
        teacher=both(teacher=wide)[1],
    )
    classes = replace(STUDENT, heads=(Classification(3),))
    refused("needs a LanguageModel", Distillation(), classes, both(classes)[0], both(classes)[0])
    refused(
        r"objective\.divergence: returned \[3\]",
        Distillation(lambda teacher, student: jnp.zeros(3), teacher=TEACHER),
    )
    other = HiddenStates("layers/0/feedforward/hidden", "layers/0/residual")
    objective = Distillation(hidden=other, teacher=TEACHER)
    own = P.init(objective.spec(STUDENT), KEY)
    refused(r"objective\.hidden: layers/0/feedforward/hidden is \[3, 8, 32\]", objective, own=own)
    for make, match in (
        (lambda: Distillation(temperature=0.0), r"objective\.temperature=0\.0: must be above 0"),
        (lambda: Distillation(share=1.1), r"objective\.share=1\.1"),
        (lambda: JensenShannon(0.0), r"beta=0\.0.*forward_kl"),
        (lambda: JensenShannon(1.0), r"beta=1\.0.*reverse_kl"),
        (lambda: HiddenStates("layers/*/residual", "layers/0/residual"), r"hidden\.student="),
        (lambda: HiddenStates("layers/0/residual", "encoder/layers/0/residual"), r"hidden\.teach"),
        (lambda: HiddenStates("a", "b", weight=-1.0), "weight"),
        (lambda: Distillation(hidden=HIDDEN).spec(Table()), "Table is no config"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()


def experiment_of(mesh, accumulation=1):
    # sizes that every mesh divides
    # without biases: the gradient of a key's is rounding alone, and Adam makes it a step
    sizes = dict(vocab_size=24, context_length=16, use_bias=False)
    teacher = replace(TEACHER, d_model=32, num_heads=4, **sizes)
    return Experiment(
        name="student",
        model=replace(STUDENT, dropout_rate=0.0, d_model=16, **sizes),
        data=Reverse(),
        objective=Distillation(JensenShannon(), hidden=HIDDEN, teacher=teacher),
        references={"teacher": Reference(P.init, teacher)},
        batch_size=16,
        accumulation=accumulation,
        mesh=mesh,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh, accumulation",
    [
        pytest.param(Mesh(data=1, fsdp=8), 1, id="fsdp"),
        pytest.param(
            Mesh(data=1, fsdp=2, tensor=2, context=2), 2, id="tensor, context, accumulated"
        ),
        pytest.param(Mesh(data=2, fsdp=2, tensor=2, explicit=True), 1, id="explicit"),
    ],
)
def test_a_step_on_eight_devices_is_that_of_one(mesh, accumulation):
    tokens = jax.random.randint(jax.random.key(1), (16, 16), 0, 24)
    batch = {
        "tokens": tokens,
        "labels": jnp.roll(tokens, -1, 1),
        "weights": (tokens % 5 > 0).astype(jnp.float32),
    }
    one = build(experiment_of(Mesh(data=1)))
    frozen = {"teacher": P.init(one.references["teacher"], jax.random.key(7))}
    state = jax.jit(partial(init_state, one))()
    known, metrics = jax.device_get(jax.jit(make_train_step(one))(state, batch, frozen))
    experiment = experiment_of(mesh, accumulation)
    recipe = build(experiment)
    devices = make_mesh(experiment.mesh)
    places = state_shardings(recipe, devices)
    split = sharding.shardings(recipe.references["teacher"], devices)
    with jax.set_mesh(devices):
        state = block_if_simulated(jax.jit(partial(init_state, recipe), out_shardings=places)())
        step = jax.jit(make_train_step(recipe), out_shardings=(places, None))
        there = jax.device_put(batch, sharding.batch_sharding(devices, batch))
        teacher = {"teacher": jax.device_put(frozen["teacher"], split)}
        found, scores = block_if_simulated(step(state, there, teacher))
    for name in ("loss", "divergence", "hidden_error", "agreement", "teacher_loss"):
        np.testing.assert_allclose(scores[name], metrics[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(scores["grad_norm"], metrics["grad_norm"], rtol=1e-5)
    for path, leaf in P.paths(known.params).items():
        # Adam divides by the size of the gradient, which is mostly noise for the smallest
        np.testing.assert_allclose(P.paths(found.params)[path], leaf, atol=2e-5, err_msg=path)
