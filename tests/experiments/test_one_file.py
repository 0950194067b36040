"""The whole GPT of one file is the library's: logits, loss, gradients and initial values for the
same parameters."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import one_file
from jaxformer import models, params
from jaxformer.models import ModelConfig
from jaxformer.training import TokenCrossEntropy

SIZES = [one_file.GPT(19, 3, 12, 2, 9), one_file.GPT(7, 1, 8, 4, 5)]


def library_model(config: one_file.GPT) -> ModelConfig:
    return ModelConfig(
        config.vocab_size,
        config.num_layers,
        config.d_model,
        config.num_heads,
        context_length=config.context_length,
    )


def draw(config: one_file.GPT, seed: int):
    """(parameters that are nowhere 0 or 1, tokens, labels)."""
    generator = np.random.default_rng(seed)
    weights = jax.tree.map(
        lambda leaf: generator.normal(0, 0.3, leaf.shape).astype(np.float32), one_file.spec(config)
    )
    shape = (2, config.context_length)
    return (
        weights,
        generator.integers(0, config.vocab_size, shape),
        generator.integers(0, config.vocab_size, shape),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("config", SIZES)
def test_the_parameters_are_the_librarys(config):
    """By name, shape and axes, and with the same initial values from the same key."""
    ours, theirs = one_file.spec(config), models.spec(library_model(config))
    facts = lambda tree: {
        path: (leaf.shape, leaf.contracts) for path, leaf in params.paths(tree).items()
    }
    assert facts(ours) == facts(theirs)
    key = jax.random.key(3)
    jax.tree.map(np.testing.assert_array_equal, params.init(ours, key), params.init(theirs, key))


@pytest.mark.thorough
@pytest.mark.parametrize("config", SIZES)
def test_logits_loss_and_gradients_are_the_librarys(config):
    weights, tokens, labels = draw(config, 0)
    model = library_model(config)
    ours, theirs = jax.jit(partial(one_file.forward, config)), jax.jit(partial(models.apply, model))
    np.testing.assert_allclose(
        ours(weights, tokens), theirs(weights, tokens).logits, rtol=1e-5, atol=1e-5
    )

    def library_loss(weights):
        batch = {
            "tokens": jnp.asarray(tokens),
            "labels": jnp.asarray(labels),
            "weights": jnp.ones(labels.shape),
        }
        sums = TokenCrossEntropy()(model, weights, batch, jax.random.key(0), np.dtype(np.float32))
        return sums.loss / sums.weight

    value, gradients = jax.jit(jax.value_and_grad(partial(one_file.loss, config)))(
        weights, tokens, labels
    )
    expected, expected_gradients = jax.jit(jax.value_and_grad(library_loss))(weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, expected_gradients
    )


@pytest.mark.thorough
def test_it_learns_and_writes():
    config = one_file.GPT(256, 1, 16, 2, 8)
    text = np.frombuffer(b"abcd" * 400, np.uint8)
    weights = one_file.train(config, text, steps=400, rows=8)
    assert one_file.evaluate(config, weights, text, batches=2, rows=4) < 0.3  # chance: log 4 = 1.39
    assert one_file.generate(config, weights, b"ab", 12, temperature=0.1) == b"abcdabcdabcdab"


@pytest.mark.thorough
def test_only_matrices_decay():
    config = SIZES[0]
    weights = params.init(one_file.spec(config), jax.random.key(0))
    optimizer = one_file.make_optimizer(config, 10)
    nothing = jax.tree.map(np.zeros_like, weights)
    _, state = optimizer.update(nothing, optimizer.init(weights), weights)
    updates, _ = optimizer.update(nothing, state, weights)
    moved = {path for path, update in params.paths(updates).items() if np.any(np.asarray(update))}
    assert moved == {path for path in params.paths(weights) if path.endswith("kernel")}


def test_the_file_is_short_and_stands_alone():
    """At most 250 lines, on `ops`, `masks`, `params` and optax alone."""
    text = Path(one_file.__file__).read_text()
    assert text.count("\n") <= 250
    lines = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    ours = [line for line in lines if "jaxformer" in line]
    allowed = (
        "from jaxformer import masks, ops, params",
        "from jaxformer.ops",
        "from jaxformer.params",
    )
    assert all(line.startswith(allowed) for line in ours)
    others = {line.split()[1].split(".")[0] for line in lines} - {"jaxformer"}
    assert others == {"os", "dataclasses", "functools", "pathlib", "jax", "numpy", "optax"}
