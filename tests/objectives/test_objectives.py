"""Objectives: what they are given, what they report, what is scored."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxformer import models, zoo
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.interop.flax import FlaxModel
from jaxformer.masks import causal, full
from jaxformer.models import (
    Classification,
    EncoderDecoder,
    Mixture,
    ModelConfig,
    Patches,
    TokenClassification,
)
from jaxformer.objectives import StepContext
from jaxformer.ops import cross_entropy
from jaxformer.training import AdamW, ClassCrossEntropy, Constant, Experiment, TokenCrossEntropy
from jaxformer.training.recipe import build

CONFIG = ModelConfig(
    vocab_size=13, num_layers=2, d_model=16, num_heads=2, context_length=8, init_std=0.3
)
TOKENS = jax.random.randint(jax.random.key(0), (3, 8), 0, 13)
BATCH = {
    "tokens": TOKENS,
    "labels": jnp.roll(TOKENS, -1, 1),
    "weights": (TOKENS % 4 > 0).astype(jnp.float32),
}
KEYS = [jax.random.key(seed) for seed in (1, 2)]
apply = jax.jit(models.apply, static_argnums=0)


def init(model):
    return jax.jit(partial(models.init, model))(jax.random.key(0))


def sums_of(objective, model, params, batch, key):
    """In float32."""
    return jax.jit(objective, static_argnums=0)(model, params, batch, StepContext(key))


class NoData:
    def open(self, model):
        raise NotImplementedError


def recipe(model, **changes):
    return build(Experiment(name="x", model=model, data=NoData(), **changes))


def losses(model, batch=BATCH, **changes):
    """(trained with each key, scored with each key)."""
    made = recipe(model, **changes)
    trained = init(model)
    return tuple(
        [float(jax.jit(f)(trained, batch, key).loss) for key in KEYS]
        for f in (made.loss, made.eval_loss)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model",
    [
        replace(CONFIG, dropout_rate=0.3),
        replace(CONFIG, mixer=zoo.Reformer(chunk=2, rounds=1, buckets=4, chunks_before=0)),
    ],
    ids=["dropout", "drawn rotations"],
)
def test_the_key_reaches_dropout_and_drawn_constants_in_training_alone(model):
    trained, scored = losses(model)
    assert trained[0] != trained[1] and scored[0] == scored[1]


@pytest.mark.thorough
def test_smoothing_and_auxiliary_losses_are_trained_and_not_scored():
    plain = losses(CONFIG)
    smooth = losses(CONFIG, objective=TokenCrossEntropy(label_smoothing=0.1, z_loss=0.01))
    assert plain[0] == plain[1] == smooth[1] and smooth[0][0] > plain[0][0]


@pytest.mark.parametrize("kind", [TokenCrossEntropy, ClassCrossEntropy])
def test_an_objective_of_ones_own_is_scored_by_itself(kind):
    @dataclass(frozen=True)
    class Weighted(kind):
        factor: float = 1.0

        def __call__(self, *args):
            sums = super().__call__(*args)
            return sums._replace(loss=sums.loss * self.factor)

    scored = Weighted(label_smoothing=0.1, factor=3.0).evaluation()
    assert scored == Weighted(factor=3.0) and type(scored) is Weighted


@pytest.mark.thorough
def test_a_pair_is_scored_as_its_decoder_says():
    decoder = replace(CONFIG, masks=(causal(),))
    pair = EncoderDecoder(encoder=replace(CONFIG, masks=(full(),), heads=()), decoder=decoder)
    batch = BATCH | {
        "source": TOKENS[:, ::-1],
        "source_segment_ids": jnp.ones_like(TOKENS).at[0, 5:].set(0),
    }
    parameters = init(pair)
    sources = {name: batch[name] for name in ("source", "source_segment_ids")}
    expected = cross_entropy(
        apply(pair, parameters, TOKENS, **sources).logits, batch["labels"], batch["weights"]
    )
    found = sums_of(TokenCrossEntropy(), pair, parameters, batch, KEYS[0])
    # float32 sums in another order
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    np.testing.assert_array_equal(found.metrics["accuracy"][0], expected.correct)


@pytest.mark.thorough
def test_images_have_classes():
    images = replace(
        CONFIG,
        vocab_size=0,
        embedding=Patches((8, 8), (4, 4), 1),
        context_length=5,
        heads=(Classification(3),),
        masks=(full(),),
    )
    batch = {
        "images": jnp.ones((4, 8, 8, 1)),
        "labels": jnp.array([0, 1, 2, 2]),
        "weights": jnp.array([1.0, 1, 1, 0]),
    }
    parameters = init(images)
    found = sums_of(ClassCrossEntropy(), images, parameters, batch, KEYS[0])
    logits = apply(images, parameters, batch["images"]).logits
    np.testing.assert_allclose(
        found.loss, -jax.nn.log_softmax(logits)[jnp.arange(3), jnp.arange(3)].sum(), rtol=1e-5
    )
    with pytest.raises(
        ConfigError, match=r"logits \[4, 3\], labels \[4\], weights \[4, 1\].*Classification head"
    ):
        ClassCrossEntropy()(
            images, parameters, batch | {"weights": jnp.ones((4, 1))}, StepContext(KEYS[0])
        )


@pytest.mark.thorough
def test_positions_have_classes():
    """Labels [B, T] are of tokens: by hand in float64; labels [B] do not fit them."""
    tagger = replace(CONFIG, heads=(TokenClassification(3),))
    parameters = init(tagger)
    batch = BATCH | {"labels": BATCH["labels"] % 3}
    found = sums_of(ClassCrossEntropy(), tagger, parameters, batch, KEYS[0])
    logits = np.asarray(apply(tagger, parameters, TOKENS).logits, np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    lost = -np.take_along_axis(logs, np.asarray(batch["labels"])[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.loss, (lost * np.asarray(batch["weights"])).sum(), rtol=1e-5)
    np.testing.assert_allclose(found.weight, batch["weights"].sum())
    rows = {"labels": batch["labels"][:, 0], "weights": batch["weights"][:, 0]}
    with pytest.raises(ConfigError, match=r"logits \[\d+, \d+, 3\], labels \[\d+\]"):
        ClassCrossEntropy()(tagger, parameters, batch | rows, StepContext(KEYS[0]))


@pytest.mark.thorough
def test_routed_experts_report_their_load():
    """Figures of one number a layer are metrics, weighted as the loss is."""
    model = replace(CONFIG, feedforward=Mixture(experts=4, top_k=2, d_ff=8))
    parameters = init(model)
    sums = sums_of(TokenCrossEntropy(), model, parameters, BATCH, KEYS[0])
    stats = apply(model, parameters, TOKENS).stats
    total, weight = sums.metrics["expert_load"]
    np.testing.assert_allclose(total / weight, stats["expert_load"].mean(), rtol=1e-6)
    assert set(sums.metrics) == {"accuracy", "expert_load", "dropped"}


class Bigram:
    """A model of the user's own: a table of logits."""

    def spec(self):
        from jaxformer.params import Spec

        return {"table": Spec((13, 13), ("vocab", "embed"), jax.nn.initializers.normal(1.0))}

    def apply(self, params, tokens, dropout_key=None, dtype=None):
        return models.Output(params["table"][tokens], None)


def test_a_model_of_ones_own_needs_only_spec_and_apply():
    trained, scored = losses(Bigram())
    assert trained == scored and trained[0] == trained[1]


@pytest.mark.thorough
def test_what_an_objective_returns_is_checked():
    pair = recipe(
        CONFIG, objective=lambda model, params, batch, context: (jnp.ones(()), jnp.ones(()))
    )
    assert pair.loss(init(CONFIG), BATCH, KEYS[0]).metrics == {}
    with pytest.raises(ConfigError, match="objective: returned float"):
        recipe(CONFIG, objective=lambda *_: 1.0).loss(models.init(CONFIG, KEYS[0]), BATCH, KEYS[0])


class TwoLayers(linen.Module):
    """Somebody's Flax model: tokens -> logits."""

    @linen.compact
    def __call__(self, tokens, train=False):
        x = linen.Embed(13, 8)(tokens)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(13)(linen.gelu(linen.Dense(16)(x)))


class TwoLayersNNX(nnx.Module):
    def __init__(self, rngs):
        self.table, self.out = nnx.Embed(13, 8, rngs=rngs), nnx.Linear(8, 13, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.dropout(self.table(tokens)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model",
    [
        FlaxModel(
            TwoLayers(),
            8,
            13,
            lambda module, x, context: module(x, train=context.dropout_key is not None),
        ),
        FlaxModel(TwoLayersNNX, 8, 13),
    ],
    ids=["linen", "nnx"],
)
def test_a_flax_model_is_a_model(model):
    trained, scored = losses(model)
    assert trained[0] != trained[1] and scored[0] == scored[1] != trained[0]
    parameters = models.init(model, jax.random.key(0))
    logits = models.apply(model, parameters, TOKENS).logits
    np.testing.assert_allclose(
        scored[0], cross_entropy(logits, BATCH["labels"], BATCH["weights"]).loss, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: TokenCrossEntropy(label_smoothing=1.0),
            r"objective: label_smoothing=1.0 must be in \[0, 1\)",
        ),
        (
            lambda: TokenCrossEntropy(z_loss=-1e-4),
            "objective.z_loss=-0.0001: expected a finite number of at least 0",
        ),
        (
            lambda: Constant(warmup=-1)(Experiment("x", None, Reverse())),
            "warmup=-1: must be a whole number of steps, at least 0",
        ),
        (
            lambda: AdamW(weight_decay=-0.1)({}),
            "optimizer.weight_decay=-0.1: must be finite and at least 0",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
