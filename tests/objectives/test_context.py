"""What an objective is called with, and what its sums say: both forms, the unit, and whether there
is a perplexity."""

import inspect
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.evaluation.perplexity import mean_scores
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, TokenClassification
from jaxformer.objectives import (
    ClassCrossEntropy,
    LossSums,
    MaskedTokens,
    SpanCrossEntropy,
    StepContext,
    TokenCrossEntropy,
)
from jaxformer.runs.checks import check_scores, open_data
from jaxformer.runs.reporter import Console, Reporter, in_words
from jaxformer.training import Checkpoints, Experiment
from jaxformer.training.recipe import build, with_context
from jaxformer.training.step import StepMetrics

MODEL = ModelConfig(
    vocab_size=17, num_layers=1, d_model=8, num_heads=2, context_length=16, dropout_rate=0.2
)
TINY = Experiment(name="x", model=MODEL, data=Reverse())
TOKENS = jax.random.randint(jax.random.key(0), (4, 16), 0, 17)
BATCH = {"tokens": TOKENS, "labels": jnp.roll(TOKENS, -1, 1), "weights": jnp.ones((4, 16))}
KEY = jax.random.key(3)


def older(model, params, batch, key, dtype):
    return TokenCrossEntropy()(model, params, batch, key, dtype)


def newer(model, params, batch, context):
    return TokenCrossEntropy()(model, params, batch, context)


@dataclass(frozen=True)
class OlderClass:
    def __call__(self, model, params, batch, key, dtype):
        loss, weight, metrics = older(model, params, batch, key, dtype)
        return TokenCrossEntropy()(model, params, batch, key, dtype)._replace(
            loss=loss, weight=weight, metrics=metrics
        )


@pytest.mark.thorough
def test_an_objective_of_five_arguments_is_called_as_before(caplog):
    """Files of older runs have such ones, call ours so, and take the sums for a tuple."""
    params = models.init(MODEL, jax.random.key(1))
    with caplog.at_level("WARNING", "jaxformer"):
        recipes = [
            build(replace(TINY, objective=objective)) for objective in (newer, older, OlderClass())
        ]
        build(replace(TINY, objective=older))
    sums = [jax.jit(recipe.loss)(params, BATCH, KEY) for recipe in recipes]
    for other in sums[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, sums[0])
    told = [text for text in caplog.messages if "is the older form" in text]
    # once for each
    assert len(told) == 2 and all("(model, params, batch, context)" in text for text in told)


def test_the_form_is_told_by_the_signature():
    def with_option(model, params, batch, context, scale=2.0):
        return LossSums(context.key, scale)

    def any_number(*arguments):
        return LossSums(arguments[3].key, len(arguments))

    context = StepContext("key", jnp.dtype("bfloat16"))
    for objective in (with_option, any_number, newer):
        assert with_context(objective) is objective
    assert with_context(lambda a, b, c, key, dtype: (key, dtype))(1, 2, {}, context) == (
        "key",
        jnp.dtype("bfloat16"),
    )
    assert list(inspect.signature(TokenCrossEntropy()).parameters) == [
        "model",
        "params",
        "batch",
        "context",
    ]


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (1.0, "returned float; expected LossSums"),
        ((1.0, 2.0, {}, None), "returned tuple; expected LossSums"),
        (LossSums(jnp.ones(3), 1.0), "loss and weight are numbers"),
        (
            LossSums(1.0, 1.0, unit="pairs of answers"),
            "unit='pairs of answers': expected a word in the plural",
        ),
        (LossSums(1.0, 1.0, unit="loss"), "unit='loss': expected a word"),
        (
            LossSums(1.0, 1.0, {"pairs": (1.0, 1.0)}, unit="pairs"),
            "a metric is called 'pairs', which the record has already",
        ),
    ],
)
def test_sums_that_say_nothing_are_refused_in_a_line(sums, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(replace(TINY, objective=lambda *_: sums)).loss({}, BATCH, KEY)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_the_unit_of_each_objective():
    def sums(objective, model=MODEL, **fields):
        params = jax.eval_shape(lambda: models.init(model, KEY))
        batch = BATCH | fields
        found = jax.eval_shape(
            lambda params: objective(model, params, batch, StepContext(KEY)), params
        )
        return found.unit, found.perplexity

    rows = {"labels": jnp.zeros(4, jnp.int32), "weights": jnp.ones(4)}
    seen = replace(MODEL, masks=(full(),))
    assert sums(TokenCrossEntropy()) == ("tokens", True)
    assert (
        sums(TokenCrossEntropy(z_loss=1e-4))
        == sums(TokenCrossEntropy(label_smoothing=0.1))
        == ("tokens", False)
    )
    assert sums(MaskedTokens(16), seen) == ("tokens", True)
    assert sums(ClassCrossEntropy(), replace(seen, heads=(Classification(3),)), **rows) == (
        "examples",
        False,
    )
    assert sums(ClassCrossEntropy(), replace(seen, heads=(TokenClassification(17),))) == (
        "tokens",
        False,
    )
    passage = {
        "passage": jnp.ones((4, 16)),
        "labels": jnp.zeros((4, 2), jnp.int32),
        "weights": jnp.ones(4),
    }
    assert sums(SpanCrossEntropy(), replace(seen, heads=(TokenClassification(2),)), **passage) == (
        "answers",
        False,
    )


@pytest.mark.parametrize("unit", ["tokens", "pairs", "examples"])
@pytest.mark.parametrize("perplexity", [True, False])
def test_perplexity_and_bits_are_of_cross_entropies_of_tokens_alone(unit, perplexity):
    def score(trained, batch, number):
        return LossSums(6.0, 2.0, {"accuracy": (1.0, 2.0)}, unit=unit, perplexity=perplexity)

    scores = mean_scores(score, None, [{"x": np.ones(1)}])
    has = unit == "tokens" and perplexity
    assert ("perplexity" in scores) == ("bits" in scores) == has
    assert (
        scores["loss"] == 3
        and scores[unit] == 2
        and scores["unit"] == unit
        and scores["accuracy"] == 0.5
    )
    words = in_words(scores | {"scored": "all 2 examples"}, 4.0)
    assert ("perplexity" in words) == ("entropy" in words) == has
    assert (" a pair (all 2 examples, 2 pairs)" in words) == (unit == "pairs")
    assert ("nats a token" in words) == has


@dataclass(frozen=True)
class Pairs:
    """A loss that is none of tokens."""

    def __call__(self, model, params, batch, context):
        sums = TokenCrossEntropy()(model, params, batch, context)
        return LossSums(sums.loss, sums.weight, {"margin": (sums.loss, sums.weight)}, unit="pairs")


@pytest.mark.thorough
@pytest.mark.parametrize("best", ["perplexity", "bits", "-tokens"])
def test_checkpoints_are_not_ranked_by_a_perplexity_that_there_is_not(best):
    made = replace(TINY, objective=Pairs(), checkpoints=Checkpoints(best=best))
    with pytest.raises(
        ConfigError,
        match=rf"checkpoints.best='{best}': an evaluation here gives loss, margin; name one",
    ):
        check_scores(made, build(made), open_data(made))
    for good in ("loss", "-margin", "pairs"):
        other = replace(made, checkpoints=Checkpoints(best=good))
        assert check_scores(other, build(other), open_data(other))
    text = replace(TINY, checkpoints=Checkpoints(best=best))
    assert check_scores(text, build(text), open_data(text))


def test_a_rate_has_the_name_of_the_unit():
    shown = []
    console = Console(9)
    console.step = lambda step, values: shown.append(values)  # type: ignore[method-assign]
    report = Reporter(lambda *_: None, console, every=1, last=9, max_skipped=2)
    values = {
        "loss": jnp.ones(()),
        "grad_norm": jnp.ones(()),
        "skipped": jnp.zeros(()),
        "pairs": jnp.full((), 8.0),
    }
    for step in range(3):
        report.later(step, StepMetrics(values, "pairs"))
    report.now()
    assert all(
        "pairs/s" in each and "tokens/s" not in each and "pairs" not in each for each in shown[1:]
    )
    copied = jax.tree.map(lambda leaf: leaf + 1, StepMetrics(values, "pairs"))
    assert copied.unit == "pairs" and dict(copied).keys() == values.keys() and copied["loss"] == 2
