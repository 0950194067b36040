"""Residual orders, feed-forwards by layer, embeddings and heads: what users of other projects
reported, tried on ours."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, Mixture, ModelConfig, blocks
from jaxformer.models.config import Classification
from jaxformer.models.heads import Head
from jaxformer.models.layer import Block, Embedder
from jaxformer.models.norm import norm
from jaxformer.params import Spec
from jaxformer.training import Experiment
from jaxformer.training.recipe import build
from jaxformer.zoo.reversible import Reversible

TINY = ModelConfig(
    vocab_size=13, num_layers=3, d_model=16, num_heads=2, context_length=8, d_ff=24, init_std=0.3
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 8)), jnp.int32)
ORDERS = {
    "pre_norm": None,
    "post_norm": blocks.post_norm,
    "sandwich": blocks.sandwich,
    "output_norm": blocks.output_norm,
    "parallel": blocks.parallel,
    "parallel_norms": blocks.parallel_norms,
}
CLOSE = dict(rtol=1e-4, atol=2e-5)  # float32 sums in another order
apply = jax.jit(models.apply, static_argnums=0)


def params_of(config, seed=0):
    return models.init(config, jax.random.key(seed))


@pytest.mark.report(
    "pytorch/pytorch#50086",
    "AnswerDotAI/ModernBERT#50",
    "marian-nmt/marian-dev#719",
    right=(
        "a stack whose layers end with a norm has no other one behind it, one whose stream is "
        "not normalised has exactly one"
    ),
)
@pytest.mark.parametrize("name", ORDERS)
def test_the_norms_of_a_stack_are_those_of_its_order(name):
    config = replace(TINY, block=ORDERS[name])
    scales = [path for path in params.paths(models.spec(config)) if path.endswith("scale")]
    in_layer = {"sandwich": 4, "parallel": 1}.get(name, 2)
    assert len([path for path in scales if path.startswith("layers/")]) == in_layer
    assert ("final_norm/scale" in scales) == (name != "post_norm")
    pair = EncoderDecoder(replace(config, heads=()), config)
    both = [path for path in params.paths(models.spec(pair)) if path.endswith("final_norm/scale")]
    assert len(both) == (0 if name == "post_norm" else 2)


def two_norms(config, names):
    """x + f(norm(x)) + g(norm'(x)): GPT-NeoX."""

    def apply(params, x, sublayers, context):
        return x + sum(f(norm(config, params[f"{name}_norm"], x)) for name, f in sublayers.items())

    spec = blocks.norms(config, names, "{}_norm")
    return Block(spec, apply, blocks.final_norm_spec(config), end=blocks.final_norm(config))


@pytest.mark.thorough
@pytest.mark.report(
    "EleutherAI/gpt-neox#481",
    "EleutherAI/gpt-neox#728",
    "huggingface/transformers#18695",
    right=(
        "side by side with one norm (GPT-J) and with two (GPT-NeoX) are two blocks, equal where "
        "the two norms are equal"
    ),
)
def test_one_norm_or_two_side_by_side():
    one, two = replace(TINY, block=blocks.parallel), replace(TINY, block=two_norms)
    tree = params_of(one)
    layers = dict(tree["layers"])
    shared = layers.pop("norm")
    doubled = tree | {"layers": layers | {"attention_norm": shared, "feedforward_norm": shared}}
    assert params.mismatch(models.spec(two), doubled) is None
    expected = apply(one, tree, TOKENS).logits
    np.testing.assert_allclose(apply(two, doubled, TOKENS).logits, expected, **CLOSE)
    doubled["layers"]["feedforward_norm"] = jax.tree.map(lambda leaf: 2 * leaf, shared)
    assert np.abs(apply(two, doubled, TOKENS).logits - expected).max() > 1e-3


@pytest.mark.thorough
@pytest.mark.report(
    "TransformerLensOrg/TransformerLens#1649",
    right=(
        "what is read inside a layer is what its order computes: a stream is the one before it "
        "and what was added"
    ),
)
@pytest.mark.parametrize("name", ["pre_norm", "parallel"])
def test_intermediates_add_up_in_each_order(name):
    names = ("embedding", "layers/*/residual", "layers/*/attention/out", "layers/*/feedforward/out")
    config = replace(TINY, block=ORDERS[name])
    found = apply_with(config, names)
    before = jnp.concatenate([found["embedding"][None], found["layers/*/residual"][:-1]])
    added = found["layers/*/attention/out"] + found["layers/*/feedforward/out"]
    np.testing.assert_allclose(found["layers/*/residual"], before + added, **CLOSE)


def apply_with(config, names):
    return jax.jit(partial(models.apply, config, intermediates=names))(
        params_of(config), TOKENS
    ).intermediates


@pytest.mark.thorough
@pytest.mark.report(
    "PrimeIntellect-ai/prime-rl#807",
    "databricks/megablocks#113",
    right=(
        "dense layers among experts report no load, and the loss of the router is a mean over "
        "the layers that have one"
    ),
)
@pytest.mark.parametrize(
    "pattern", [("relu", "experts", "experts"), ("experts", "relu", "experts")]
)
def test_dense_layers_do_not_dilute_the_loss_of_the_router(pattern):
    experts = Mixture(4, 2, d_ff=8, balance_loss=0.1)
    config = replace(
        TINY, feedforward=tuple(experts if each == "experts" else each for each in pattern)
    )
    output = apply(config, params_of(config), TOKENS)
    assert output.stats["fraction"].shape == (2, 4) and output.stats["expert_load"].shape == (2,)
    each = (
        0.1 * experts.experts * (output.stats["fraction"] * output.stats["probability"]).sum(axis=1)
    )
    np.testing.assert_allclose(output.loss, each.mean(), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "OpenNMT/OpenNMT-tf#28",
    "huggingface/transformers#10311",
    right=(
        "an embedding may be narrower than the model, and a head that would read by a table of "
        "another width is refused"
    ),
)
def test_a_factorised_embedding():
    def narrow(config):
        spec = {
            "tokens": Spec((config.vocab_size, 4), ("vocab", None), normal(0.3)),
            "wider": params.linear(
                (4, config.d_model), (None, "embed"), (), normal(0.3), bias=False
            ),
        }

        def embed(tree, tokens, inputs):
            return tree["tokens"][tokens] @ tree["wider"]["kernel"]

        return Embedder(spec, embed)

    with pytest.raises(
        ConfigError,
        match=(
            r"the head reads by a table `tokens` \(13, 16\) of the embedding, which has \(13, 4\)"
        ),
    ):
        models.spec(replace(TINY, embedding=narrow))
    with pytest.raises(ConfigError, match="reads 32 features by the embedding's rows"):
        replace(TINY, stack=Reversible(streams=2))
    config = replace(TINY, embedding=narrow, tie_embeddings=False)
    tree = params_of(config)
    assert params.count(tree["embedding"]["tokens"]) == 13 * 4
    found = models.apply(config, tree, TOKENS, intermediates=("embedding",)).intermediates[
        "embedding"
    ]
    expected = (
        tree["embedding"]["tokens"][TOKENS] @ tree["embedding"]["wider"]["kernel"]
        + tree["embedding"]["positions"][None]
    )
    np.testing.assert_allclose(found, expected, **CLOSE)


@dataclass(frozen=True)
class DropPath:
    """x + keep / (1 - rate) * f(norm(x)): a row leaves out a sub-layer with this probability."""

    rate: float = 0.5

    def evaluation(self):
        return DropPath(0.0)

    def __call__(self, config, names):
        def apply(params, x, sublayers, context):
            for i, (name, f) in enumerate(sublayers.items()):
                y = f(norm(config, params[f"{name}_norm"], x))
                if self.rate and context.dropout_key is not None:
                    key = jax.random.fold_in(context.dropout_key, i)
                    y = (
                        y
                        * jax.random.bernoulli(key, 1 - self.rate, (len(x), 1, 1))
                        / (1 - self.rate)
                    )
                x = x + y
            return x

        spec = blocks.norms(config, names, "{}_norm")
        return Block(spec, apply, blocks.final_norm_spec(config), end=blocks.final_norm(config))


@pytest.mark.thorough
@pytest.mark.report(
    "LibreYOLO/libreyolo#422",
    "wandb/senpai#2316",
    "huggingface/pytorch-image-models#2118",
    "cybertronai/gradient-checkpointing#35",
    right=(
        "a block that drops paths draws for each row and sub-layer, the same when computed "
        "again; a score drops none"
    ),
)
def test_a_block_that_drops_paths():
    config = replace(TINY, block=DropPath(), unroll=1)
    tree, key = params_of(config), jax.random.key(5)
    tokens = jnp.tile(TOKENS[:1], (64, 1))
    names = ("layers/*/residual",)
    streams = models.apply(
        config, tree, tokens, dropout_key=key, intermediates=names
    ).intermediates[names[0]]
    kinds = {tuple(np.round(np.asarray(streams[0, row, 0]), 4)) for row in range(64)}
    assert len(kinds) == 4  # neither, one, the other, both: drawn for each row and sub-layer

    def gradient(**changes):
        of = lambda p: jnp.sum(
            jnp.sin(models.apply(replace(config, **changes), p, TOKENS, dropout_key=key).logits)
        )
        return jax.jit(jax.grad(of))(tree)

    for changes in (dict(unroll=3), dict(remat="full")):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4),
            gradient(**changes),
            gradient(),
        )
    recipe = build(Experiment(name="paths", model=config, data=Nothing(), steps=1))
    batch = {"tokens": TOKENS, "labels": TOKENS, "weights": jnp.ones(TOKENS.shape)}
    scores = [float(recipe.eval_loss(tree, batch, jax.random.key(i)).loss) for i in range(2)]
    losses = [float(recipe.loss(tree, batch, jax.random.key(i)).loss) for i in range(2)]
    assert scores[0] == scores[1] and losses[0] != losses[1]


class Nothing:
    """No data: only the recipe of an experiment is looked at."""

    def open(self, model):
        raise NotImplementedError


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#266",
    right=(
        "a head may read what came with the tokens; one of three parameters, as heads had "
        "before, is called as before"
    ),
)
def test_heads_see_what_came_with_the_tokens():
    def shifted(config):
        return Head(
            "shifted",
            {},
            lambda tree, hidden, padding_mask, inputs: hidden.mean(axis=(1, 2)) + inputs["shift"],
        )

    def older(config):
        return Head("older", {}, lambda tree, hidden, padding_mask: hidden.mean(axis=(1, 2)))

    config = replace(TINY, heads=(shifted, older, Classification(2)))
    found = models.apply(
        config, params_of(config), TOKENS, inputs={"shift": jnp.array([1.0, 2.0])}
    ).heads
    np.testing.assert_allclose(found["shifted"] - found["older"], [1.0, 2.0], rtol=1e-5)
    assert found["classification"].shape == (2, 2)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#33660", "MeiGen-AI/MultiTalk#54",
    hit="a run of a named kernel could not be looked into: its weights were refused",
    right="weights of attention can be read of a model whatever kernel it is trained with",
)  # fmt: skip
@pytest.mark.parametrize("kernel", ["blockwise", "query_blocked", ("blockwise", "reference")])
def test_weights_are_read_of_a_model_of_any_kernel(kernel):
    names = ("layers/*/attention/weights",)
    expected = apply_with(TINY, names)[names[0]]
    found = apply_with(replace(TINY, attention_implementation=kernel), names)[names[0]]
    np.testing.assert_array_equal(found, expected)
