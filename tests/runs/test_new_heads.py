"""A head that the first weights do not have: it trains under Lora, or the run says that it stays
random."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from jaxformer import masks, models, params
from jaxformer.data.tasks import Copy
from jaxformer.models import (
    Classification,
    EncoderDecoder,
    LanguageModel,
    ModelConfig,
    TokenClassification,
    adaptation,
)
from jaxformer.models.adaptation import Lora
from jaxformer.models.heads import Head
from jaxformer.objectives import LossSums
from jaxformer.runs.facts import what_trains
from jaxformer.runs.start import drawn_paths, first_params
from jaxformer.training import AdamW, Constant, Experiment
from jaxformer.training.optimizers import without_gradient
from jaxformer.training.recipe import build
from jaxformer.training.step import first_state, make_train_step

# The weights of all runs here: a stack without any head.
STACK = ModelConfig(
    17, 1, 16, 2, context_length=8, masks=(masks.full(),), heads=(), tie_embeddings=False
)


def own_head(config):
    """A number for each row, from a matrix and a scale with a name of its own."""
    spec = {
        "readout": params.Spec((config.d_model,), ("embed",), normal(1.0)),
        "scale": params.Spec((1,), (None,), jax.nn.initializers.ones),
    }
    return Head("own", spec, lambda p, hidden, *_: hidden[:, 0] @ p["readout"] * p["scale"])


@dataclass(frozen=True)
class EveryHead:
    """A sum over all that the heads give, and over a head of the objective's own (a reward)."""

    def __call__(self, model, p, batch, context):
        output = models.apply(model, p, batch["tokens"])
        found = [*output.heads.values(), output.hidden @ context.params["reward"]]
        total = sum(jnp.sum(jnp.square(value - 1.0)) for value in found)
        return LossSums(total, batch["weights"].sum())

    def spec(self, model):
        return {"reward": params.Spec((16,), ("embed",), normal(0.1))}


def without_head(spec, key):
    """The weights of a stack without a head, and a head as `spec` draws it."""
    base = jax.tree.map(
        lambda leaf: 0.3 * jax.random.normal(jax.random.key(9), leaf.shape), without(spec)
    )
    return adaptation.transfer(params.init(spec, key), base, allow="heads/")[0]


def without(spec):
    return {
        name: without(tree) if name in ("encoder", "decoder") else tree
        for name, tree in spec.items()
        if name != "heads"
    }


HEADS = {
    "masked": LanguageModel(transform="gelu", bias=True),  # a vocabulary's head has no transform
    "classes": Classification(3),
    "spans": TokenClassification(2),
    "own": own_head,
}
NEW = {
    "classes": "classification",
    "spans": "token_classification",
    "own": "own",
    "masked": "language_model",
}


def experiment_of(*heads, **lora):
    return Experiment(
        name="head",
        model=replace(STACK, heads=heads),
        data=Copy(vocab_size=16, length=3),
        objective=EveryHead(),
        initial=without_head,
        adaptation=Lora(rank=2, **lora),
        optimizer=AdamW(learning_rate=1e-2, weight_decay=0.0),
        schedule=Constant(),
        batch_size=4,
    )


def started(experiment, caplog):
    """(recipe, the first tree, the warnings about new parameters that are frozen)."""
    recipe = build(experiment)
    caplog.clear()
    with caplog.at_level("WARNING", "jaxformer"):
        tree = first_params(experiment.initial, experiment.model, recipe)
    return recipe, tree, [text for text in caplog.messages if "as it was drawn" in text]


@pytest.mark.thorough
def test_a_new_head_trains_or_the_run_says_that_it_does_not(caplog):
    """After a step each random parameter of a new head differs, or a warning has named it."""
    experiment = experiment_of(*HEADS.values())
    recipe, tree, warned = started(experiment, caplog)
    before = params.paths(jax.tree.map(np.array, tree))
    batch = {
        "tokens": np.arange(32, dtype=np.int32).reshape(4, 8) % 17,
        "weights": np.ones(4, np.float32),
    }
    state, _ = jax.jit(make_train_step(recipe))(first_state(recipe, None, tree), batch)
    after = params.paths(state.params)
    # a factor is zero at first, so one step leaves the other as it is
    changed = {path for path in after if (np.asarray(after[path]) != before[path]).any()}
    heads = {path for path in after if path.startswith(("weights/heads/", "objective/"))}
    new = {path for path in heads if "language_model" not in path}
    assert {path.split("/")[2] for path in new if path.startswith("weights/")} == {
        "classification", "token_classification", "own",
    }  # fmt: skip
    assert "objective/reward" in new
    assert new <= changed and not [path for path in changed - new if "weights/" in path]
    random = {path for path in heads - new if path.endswith("kernel")}
    assert len(random) == 2 and len(warned) == 1
    assert all(path.removeprefix("weights/") in warned[0] for path in random)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", HEADS)
def test_the_line_and_the_warning_agree_for_each_kind(kind, caplog):
    recipe, _, warned = started(experiment_of(HEADS[kind]), caplog)
    line = what_trains(recipe, 1000)
    if kind == "masked":
        assert line.endswith("; frozen: the head language_model") and len(warned) == 1
        recipe, _, warned = started(experiment_of(HEADS[kind], trains="heads/"), caplog)
        assert what_trains(recipe, 1000).endswith("with the head language_model") and not warned
        return
    assert line.endswith(f"with the head {NEW[kind]}") and not warned
    recipe, _, warned = started(experiment_of(HEADS[kind], trains=None), caplog)
    assert (
        what_trains(recipe, 1000).endswith(f"; frozen: the head {NEW[kind]}") and len(warned) == 1
    )


@pytest.mark.thorough
def test_a_frozen_head_that_the_weights_have_is_no_news(caplog):
    """Trained weights do not equal drawn ones, so nothing is said; constants never are."""
    other = jax.random.key(77)
    experiment = experiment_of(HEADS["masked"])
    _, _, warned = started(
        replace(experiment, initial=lambda spec, key: params.init(spec, other)), caplog
    )
    assert not warned
    spec = models.spec(experiment.model)
    key = jax.random.key(3)
    found = drawn_paths(spec, params.init(spec, key), key)
    assert set(found) == {
        "embedding/tokens",
        "embedding/positions",
        "heads/language_model/kernel",
        "heads/language_model/transform/kernel",
    }


def test_the_line_counts_what_trains():
    factors = 2 * (16 * 2 + 2 * 16)  # query and value, rank 2
    head = 16 * 16 + 16 + 16 * 3 + 3  # a pooler and classes
    line = what_trains(build(experiment_of(HEADS["classes"])), 5000)
    assert line.startswith(
        f"trains: {factors + head + 16:,} of 5,000 parameters"
    )  # and the reward's 16


def test_heads_of_the_decoder_of_a_pair_train():
    pair = EncoderDecoder(STACK, replace(STACK, masks=(masks.causal(),), heads=(HEADS["spans"],)))
    adapted = Lora(rank=2)(models.spec(pair))
    held = params.paths(without_gradient(adapted.spec, adapted.frozen))
    heads = {path for path in held if "heads/" in path}
    assert heads and not any(held[path] for path in heads)
    assert all(held[path] for path in held if path.startswith("weights/") and path not in heads)
