"""Numbers of tokens from some positions' logits at a time, beside those from all at once."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.objectives import DPO, Preference, TokenCrossEntropy, logits as of_tokens
from jaxformer.objectives.policy import log_probability_and_entropy
from jaxformer.ops.losses import log_probabilities
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.training import AdamW, Base, Constant, Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, make_train_step

rng = np.random.default_rng(0)
MODEL = ModelConfig(vocab_size=23, num_layers=1, d_model=8, num_heads=2, context_length=32)


def inputs(B, T):
    tokens, labels = rng.integers(0, 23, (2, B, T))
    return jnp.asarray(tokens), jnp.asarray(labels)


@pytest.mark.thorough
@pytest.mark.parametrize(("T", "size"), [(7, 3), (8, 4), (5, 1), (9, 8)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunks_change_nothing(monkeypatch, T, size, softcap):
    """Values and gradients, also where the last chunk has padding."""
    model = replace(MODEL, logit_softcap=softcap)
    tree = P.init(models.spec(model), jax.random.key(1))
    tokens, labels = inputs(3, T)
    shares = jnp.asarray(rng.normal(size=(3, T)), jnp.float32)

    def value(tree):
        (found, spread), _ = of_tokens.of_logits(
            log_probability_and_entropy, model, tree, tokens, labels
        )
        assert found.shape == spread.shape == (3, T)
        return jnp.sum(found * shares), (found, spread)

    def in_chunks_of(length):
        monkeypatch.setattr(of_tokens, "chunk_length", lambda *_: length)
        (_, arrays), gradient = jax.value_and_grad(value, has_aux=True)(tree)
        return arrays, gradient

    # float32: sums in another order
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, in_chunks_of(size), in_chunks_of(T))


@pytest.mark.thorough
@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "context": 4}])
def test_on_a_mesh(monkeypatch, axes):
    model = replace(MODEL, vocab_size=24)
    tree = P.init(models.spec(model), jax.random.key(1))
    tokens, labels = inputs(8, 16)

    def value(tree):
        return of_tokens.of_logits(log_probabilities, model, tree, tokens, labels).values.mean()

    expected = jax.value_and_grad(value)(tree)
    monkeypatch.setattr(of_tokens, "chunk_length", lambda *_: 5)
    with jax.set_mesh(make_mesh(Mesh(**{"data": 1} | axes))):
        found = jax.jit(jax.value_and_grad(value))(tree)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.thorough
def test_a_model_of_ones_own_and_one_without_a_language_model():
    tokens, labels = inputs(2, 4)

    class Own:
        def apply(self, params, tokens, **options):
            return models.Output(jnp.zeros((*tokens.shape, 23)) + params, hidden=None)

    found, _ = of_tokens.of_logits(log_probabilities, Own(), jnp.float32(1.0), tokens, labels)
    np.testing.assert_allclose(found, -np.log(23), rtol=1e-6)
    without = replace(MODEL, heads=(Classification(3),))
    with pytest.raises(ConfigError, match="needs a LanguageModel"):
        tree = P.init(models.spec(without), jax.random.key(1))
        of_tokens.of_logits(log_probabilities, without, tree, tokens, labels)


@pytest.mark.thorough
@pytest.mark.parametrize("V", [256, 8192, 32_768])
def test_a_preference_over_a_shared_base_takes_little_more_than_a_plain_one(V):
    """At most 1.15 of the memory of a step of the same rows with TokenCrossEntropy."""
    pairs, T = 8, 128
    model = ModelConfig(vocab_size=V, num_layers=4, d_model=128, num_heads=4, context_length=T)
    plain = Experiment(
        name="lora",
        model=model,
        data=Copy(vocab_size=8, length=4),
        adaptation=Lora(rank=8),
        initial=P.init,
        optimizer=AdamW(),
        schedule=Constant(),
        steps=1,
        batch_size=2 * pairs,
    )
    preferring = replace(
        plain,
        batch_size=pairs,
        objective=Preference(DPO()),
        references={"reference": Base()},
    )
    flat = {name: (2 * pairs, T) for name in ("tokens", "labels", "weights")}
    paired = {name: (pairs, 2, T) for name in ("tokens", "labels", "answers")}
    before = peak_bytes(replace(plain, objective=TokenCrossEntropy()), flat)
    after = peak_bytes(preferring, paired | {"weights": (pairs,)})
    assert after <= 1.15 * before, f"{after / before:.3f}"


def peak_bytes(experiment, shapes):
    recipe = build(experiment)
    kinds = {"tokens": jnp.int32, "labels": jnp.int32}
    batch = {
        name: jax.ShapeDtypeStruct(shape, kinds.get(name, jnp.float32))
        for name, shape in shapes.items()
    }
    state = jax.eval_shape(partial(init_state, recipe))
    step = jax.jit(make_train_step(recipe), donate_argnums=0)
    memory = step.lower(state, batch).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes
