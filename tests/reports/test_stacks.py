"""Stacks: layers that are skipped, repeated or reordered, and those outside of a scan."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models
from jaxformer.models import ModelConfig
from jaxformer.models.stacks import join_layers, layer_functions

GREEDY = decoding.Sampling(temperature=0.0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 9)), jnp.int32)


@dataclass(frozen=True)
class Order:
    """Runs these layers, one after another."""

    numbers: tuple[int, ...]

    def __call__(self, config, layers, x, context):
        functions = layer_functions(config, layers, x, context)
        runs = []
        for number in self.numbers:
            runs.append(functions[number](x))
            x = runs[-1].hidden
        return x, join_layers(runs)


@dataclass(frozen=True)
class LayerDrop:
    """Drops each layer with this probability in training: Fan et al. 2019, arXiv:1909.11556."""

    rate: float

    def __call__(self, config, layers, x, context):
        runs = []
        for i, layer in enumerate(layer_functions(config, layers, x, context)):
            runs.append(layer(x))
            keep = True
            if context.dropout_key is not None:
                key = jax.random.fold_in(context.dropout_key, 1000 + i)
                keep = jax.random.bernoulli(key, 1 - self.rate)
            x = jnp.where(keep, runs[-1].hidden, x)
        return x, join_layers(runs)

    def evaluation(self):
        return LayerDrop(0.0)


def model(stack=None, **changes):
    sizes = dict(vocab_size=13, num_layers=3, d_model=16, num_heads=2, context_length=12)
    return ModelConfig(**sizes | dict(init_std=0.3, stack=stack) | changes)


def tree():
    return models.init(model(), jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/executorch#19324",
    right="a layer that runs twice is refused with a cache, which has one state for it",
    hit="the states of all runs became the cache, and the next token read those of other layers",
)
@pytest.mark.parametrize("numbers", [(0, 1, 1, 2), (0, 2), (0, 1, 1)])
def test_a_layer_that_runs_twice_has_no_cache(numbers):
    match = f"layers .{', '.join(map(str, numbers))}. of 3 ran; with a cache each layer runs once"
    with pytest.raises(NotImplementedError, match=match):
        decoding.generate(model(Order(numbers)), tree(), [[1, 2]], 3)


@pytest.mark.thorough
@pytest.mark.report(
    "s3prl/s3prl#350",
    right="a value of a layer is that layer's, or refused where layers are skipped or repeated",
    hit="`layers/2/residual` of a stack that skipped a layer was the value of another one",
)
def test_values_of_layers_are_theirs():
    names = ("layers/*/residual", "layers/1/residual")

    def values(stack):
        return models.apply(model(stack), tree(), TOKENS, intermediates=names).intermediates

    for numbers in ((0, 2), (0, 1, 1)):
        with pytest.raises(NotImplementedError, match="with intermediates each layer runs once"):
            values(Order(numbers))
    last = models.apply(model(Order((2, 0, 1))), tree(), TOKENS).hidden
    reordered = values(Order((2, 0, 1)))
    np.testing.assert_array_equal(reordered["layers/1/residual"], reordered["layers/*/residual"][1])
    # layer 1 ran last: the final norm of its stream is the output
    stream = reordered["layers/1/residual"]
    normed = (stream - stream.mean(-1, keepdims=True)) / stream.std(-1, keepdims=True)
    np.testing.assert_allclose(last, normed, atol=1e-3)


@pytest.mark.thorough
@pytest.mark.report(
    "ml-explore/mlx-lm#1702",
    right="a stack of one's own computes the same with a cache and without",
)
def test_reordered_layers_decode_as_they_were_trained():
    config = model(Order((2, 0, 1)))
    (answer,) = decoding.generate(config, tree(), [[1, 2, 3]], 5, sampling=GREEDY)
    logits = models.apply(config, tree(), jnp.asarray([[1, 2, 3, *answer]])).logits
    assert jnp.argmax(logits[0, 2:-1], axis=-1).tolist() == answer


@pytest.mark.thorough
@pytest.mark.report(
    "mosaicml/composer#372",
    "WangFeng18/Swin-Transformer#7",
    right="layers are dropped in training alone: an evaluation has no key, and asks the stack",
    hit="`models.evaluation` asked mixers, feed-forwards and blocks, not stacks",
)
def test_layers_are_dropped_in_training_alone():
    config = model(LayerDrop(0.5))
    assert models.evaluation(config).stack == LayerDrop(0.0)
    plain = models.apply(model(), tree(), TOKENS).logits
    np.testing.assert_allclose(models.apply(config, tree(), TOKENS).logits, plain, atol=1e-5)
    dropped = models.apply(config, tree(), TOKENS, dropout_key=jax.random.key(3)).logits
    assert float(jnp.abs(dropped - plain).max()) > 0.1


@pytest.mark.thorough
@pytest.mark.report(
    "apple/axlearn#1171",
    right="a layer behind a scan is computed again in the backward pass, as those within it",
    hit="it might be merged with its first computation, which undoes `remat`",
)
def test_layers_behind_a_scan_are_computed_again():
    """Two kinds of layers in turn, three in all: two in the loop, and one behind it."""
    in_turn = masks.causal(), masks.causal() & masks.window(3)
    config = model(remat="full", unroll=1, masks=in_turn)
    program = jax.make_jaxpr(lambda p: models.apply(config, p, TOKENS).hidden)(tree())
    outside = [equation.params.get("prevent_cse") for equation in program.eqns]
    assert [kept for kept in outside if kept is not None] == [True]
