"""Distillation: what users of others reported, tried here."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig, Output
from jaxformer.objectives import (
    Distillation,
    HiddenStates,
    JensenShannon,
    StepContext,
    forward_kl,
    reverse_kl,
)

KEY = jax.random.key(0)
B, T, V = 2, 6, 5
rng = np.random.default_rng(0)


@dataclass(frozen=True)
class Table:
    """A model whose parameters are its logits."""

    classes: int = V

    def spec(self):
        shape = B, T, self.classes
        return {"logits": P.Spec(shape, (None,) * 3, jax.nn.initializers.normal(1.0))}

    def apply(self, params, tokens, **options):
        return Output(params["logits"], None)


@pytest.fixture(scope="module")
def given():
    """(the student's logits, the teacher's, a batch)."""
    student, teacher = jnp.float32(rng.normal(0, 2, (2, B, T, V)))
    tokens = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    return student, teacher, {"tokens": tokens, "labels": tokens, "weights": jnp.ones((B, T))}


def value_and_gradient(objective, student, teacher, batch):
    """((loss, LossSums), gradient of the student's logits)."""

    @jax.jit
    def run(student, teacher, batch):
        def loss(logits):
            context = StepContext(KEY, references={"teacher": {"logits": teacher}})
            sums = objective(Table(V), {"logits": logits}, batch, context)
            return sums.loss, sums

        return jax.value_and_grad(loss, has_aux=True)(student)

    return run(student, teacher, batch)


@pytest.mark.report(
    "huggingface/trl#2202",
    right="the mixture of a Jensen-Shannon divergence is one of probabilities, not of logarithms",
)
def test_a_mixture_of_probabilities():
    sure = jnp.log(jnp.float32([[[1e-30, 1 - 1e-30]], [[1 - 1e-30, 1e-30]]]))
    found = JensenShannon(0.5)(sure[:1], sure[1:])
    # the largest value that there is; of mixed logarithms it would be some 17
    np.testing.assert_allclose(found, np.log(2), rtol=1e-6)


@pytest.mark.report(
    "huggingface/trl#3043",
    "modelscope/ms-swift#10078",
    "verl-project/verl-recipe#151",
    right="beta weighs the teacher in the mixture; 0 and 1, where the loss is 0, are refused",
)
def test_the_weights_and_the_ends_of_a_jensen_shannon_divergence(given):
    student, teacher = map(jax.nn.log_softmax, given[:2])
    near = 1e-3
    np.testing.assert_allclose(
        JensenShannon(near)(teacher, student) / near, forward_kl(teacher, student), rtol=0.02
    )
    np.testing.assert_allclose(
        JensenShannon(1 - near)(teacher, student) / near, reverse_kl(teacher, student), rtol=0.02
    )
    for beta in (0.0, 1.0):
        with pytest.raises(ConfigError, match=r"the divergence is 0.*forward_kl or reverse_kl"):
            JensenShannon(beta)


@pytest.mark.report(
    "huggingface/trl#6252",
    "meta-pytorch/torchtune#2119",
    right="two vocabularies are refused in a line that has both sizes",
)
def test_a_padded_vocabulary_of_the_teacher(given):
    student, _, batch = given
    context = StepContext(KEY, references={"teacher": {"logits": jnp.zeros((B, T, V + 3))}})
    with pytest.raises(ConfigError, match=r"\[2, 6, 8\].*\[2, 6, 5\].*one vocabulary") as caught:
        Distillation(teacher=Table(V + 3))(Table(V), {"logits": student}, batch, context)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
@pytest.mark.report(
    "peremartra/optipfair#34",
    "huggingface/trl#5594",
    right="a token of weight 0 counts in no term, whatever its logits are, also -inf and NaN",
)
@pytest.mark.parametrize("fill", [7.0, -np.inf, np.nan])
def test_padding_counts_in_no_term(given, fill):
    student, teacher, batch = given
    weights = jnp.asarray(np.arange(T) < [[4], [2]], jnp.float32)
    batch = batch | {"weights": weights}
    objective = Distillation(JensenShannon(), teacher=Table(V))
    (_, known), gradient = value_and_gradient(objective, student, teacher, batch)
    is_padding = (weights == 0)[..., None]
    changed = [jnp.where(is_padding, fill, logits) for logits in (student, teacher)]
    (_, found), changed_gradient = value_and_gradient(objective, *changed, batch)
    np.testing.assert_array_equal(found.loss, known.loss)
    np.testing.assert_array_equal(found.weight, 6)
    for name in ("divergence", "label_loss", "teacher_loss"):
        np.testing.assert_array_equal(found.metrics[name][0], known.metrics[name][0])
    np.testing.assert_array_equal(changed_gradient, gradient)


@pytest.mark.thorough
@pytest.mark.report(
    "neuralmagic/sparseml#592",
    "facebookresearch/deit#116",
    right="the divergence is a mean over tokens alone: neither more classes nor more rows scale it",
)
def test_the_divergence_is_a_mean_over_tokens(given):
    student, teacher, batch = given
    objective = Distillation(share=1.0, temperature=1.0, teacher=Table(V))
    (_, sums), _ = value_and_gradient(objective, student, teacher, batch)
    p, q = (np.asarray(jax.nn.softmax(logits), float) for logits in (teacher, student))
    expected = np.mean(np.sum(p * (np.log(p) - np.log(q)), axis=-1))
    np.testing.assert_allclose(sums.loss / sums.weight, expected, rtol=1e-5)
    impossible = jnp.full((B, T, 9), -jnp.inf)
    wider = [
        jax.nn.log_softmax(jnp.concatenate([logits, impossible], axis=-1))
        for logits in (teacher, student)
    ]
    np.testing.assert_allclose(jnp.mean(forward_kl(*wider)), expected, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "haitongli/knowledge-distillation-pytorch#25",
    "vrvlive/knowlege-distillation#2",
    right="the teacher has neither a gradient nor dropout",
)
def test_the_teacher_is_frozen_and_without_dropout():
    model = ModelConfig(V, 2, 8, 2, context_length=T, dropout_rate=0.5, init_std=0.3)
    tree = jax.jit(lambda key: models.init(model, key))(KEY)
    batch = {
        "tokens": jnp.zeros((B, T), jnp.int32),
        "labels": jnp.ones((B, T), jnp.int32),
        "weights": jnp.ones((B, T)),
    }

    @jax.jit
    def run(teacher, key):
        def loss(teacher):
            context = StepContext(key, references={"teacher": teacher})
            sums = Distillation()(model, tree, batch, context)
            return sums.loss, sums.metrics["teacher_loss"][0]

        return jax.value_and_grad(loss, has_aux=True)(teacher)

    (loss, of_teacher), gradient = run(tree, jax.random.key(1))
    (other_loss, other_of_teacher), _ = run(tree, jax.random.key(2))
    assert loss != other_loss  # the student has dropout
    assert of_teacher == other_of_teacher
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#1181",
    "huggingface/transformers#12299",
    right="T^2 keeps the gradient's size: at high temperatures it no longer depends on T",
)
def test_the_gradient_does_not_shrink_with_the_temperature(given):
    student, teacher, batch = given
    sizes = []
    for temperature in (50.0, 100.0):
        objective = Distillation(share=1.0, temperature=temperature, teacher=Table(V))
        _, gradient = value_and_gradient(objective, student, teacher, batch)
        sizes.append(float(jnp.linalg.norm(gradient)))
    np.testing.assert_allclose(sizes[0], sizes[1], rtol=0.02)
    # Hinton et al., equation 4: (z - v) / V for logits of mean 0
    z, v = (logits - logits.mean(axis=-1, keepdims=True) for logits in (student, teacher))
    np.testing.assert_allclose(sizes[1], float(jnp.linalg.norm((z - v) / V)), rtol=0.05)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#6526",
    "NVIDIA/Model-Optimizer#892",
    right="hidden states of two widths are compared token by token, without the padding",
)
def test_hidden_states_of_two_widths():
    small = ModelConfig(V, 1, 8, 2, context_length=T, init_std=0.3)
    large = replace(small, d_model=12, num_heads=3)
    hidden = HiddenStates("layers/0/residual", "layers/0/residual")
    objective = Distillation(share=1.0, hidden=hidden, teacher=large)
    own = P.init(objective.spec(small), KEY)
    assert own["hidden"]["kernel"].shape == (8, 12)
    trees = [P.init(models.spec(model), KEY) for model in (small, large)]
    context = StepContext(KEY, references={"teacher": trees[1]}, params=own)
    tokens = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(np.arange(T) < [[4], [2]], jnp.float32)
    errors = []
    for filled in (tokens, jnp.where(weights == 0, 3, tokens)):
        batch = {"tokens": filled, "labels": tokens, "weights": weights}
        sums = jax.jit(objective, static_argnums=0)(small, trees[0], batch, context)
        errors.append(sums.metrics["hidden_error"])
    assert errors[0] == errors[1] and errors[0][0] > 0 and errors[0][1] == 6
