"""The pictures that a page offers are those that can be drawn."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxformer import masks, models, training
from jaxformer.data.tokenizers import Characters
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.runs.reporter import unit_of_loss
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.tools.analysis import figures, gallery

STACK = ModelConfig(vocab_size=9, num_layers=2, d_model=16, num_heads=2, context_length=6)
VIT = replace(
    STACK, vocab_size=0, context_length=5, embedding=Patches((8, 8), (4, 4)), masks=(masks.full(),),
    heads=(models.Classification(3),),
)  # fmt: skip
READER = replace(STACK, masks=(masks.full(),), heads=())
TEXT = np.arange(1, 7, dtype=np.int32)
LETTERS = list("bcdefg")


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 0, "loss": 1.0}],
        [{"step": 3, "validation_loss": 2.0}],
        [{"step": 1, "loss": 1.0, "skipped": 0, "accuracy": 0.5}],
        [{"step": 3, "validation_accuracy": 0.5}],
    ],
)
def test_what_the_records_lack_is_not_offered(records):
    offered = gallery.record_pictures({"run": records, "new": []}, None)
    names = {name.removeprefix("validation_") for record in records for name in record}
    assert ("Loss" in offered, "Other numbers" in offered) == ("loss" in names, "accuracy" in names)
    for draw in offered.values():
        assert draw().axes
    for runs in ({"run": records}, {"run": records, "other": records}):
        if records and "loss" in names:
            legend = figures.losses(runs).axes[0].get_legend()
            assert legend.texts and (
                len(runs) == 1 or [text.get_text() for text in legend.texts] == list(runs)
            )


@pytest.mark.parametrize(
    ("scores", "unit"),
    [
        ({"unit": "tokens", "perplexity": 2.0}, "nats a token"),
        ({"unit": "images"}, "an image"),
        ({"unit": "pairs"}, "a pair"),
        ({"unit": "examples"}, ""),
        ({}, ""),
    ],
)
def test_the_axis_of_the_loss_has_the_unit_of_the_scores(scores, unit):
    assert unit_of_loss(scores) == unit
    pictures = gallery.record_pictures({"a": [{"step": 1, "loss": 1.0}]}, None, unit)
    label = pictures["Loss"]().axes[0].get_ylabel()
    assert label == (f"loss ({unit})" if unit else "loss")


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", [Characters("abcdefgh"), None])
@pytest.mark.parametrize("form", ["text", "pair", "images", "captions"])
def test_attention_is_labelled_by_tokens_or_numbers_of_patches(monkeypatch, tokenizer, form):
    """By text where there is a tokenizer, on the side of an image by its patches, as many as there
    are."""
    image = np.zeros((8, 8, 3), np.float32)
    model, batch = {
        "text": (STACK, {"tokens": TEXT}),
        "pair": (EncoderDecoder(READER, STACK), {"tokens": TEXT, "source": TEXT[:4]}),
        "images": (VIT, {"images": image}),
        "captions": (
            EncoderDecoder(replace(VIT, heads=()), STACK, share_embeddings=False),
            {"tokens": TEXT, "source": image},
        ),
    }[form]
    run = mock.NonCallableMagicMock(
        spec=Run,
        experiment=SimpleNamespace(model=model),
        tokenizer=tokenizer,
        on_mesh=contextlib.nullcontext,
        params=models.init(model, jax.random.key(0)),
    )
    drawn = []
    monkeypatch.setattr(figures, "attention", lambda *given: drawn.append(given))
    gallery.attention(run, {name: jnp.asarray(value)[None] for name, value in batch.items()})()
    ((weights, queries, keys, first),) = drawn
    words = LETTERS if tokenizer else list("123456")
    patches = list("01234")
    expected = {
        "text": (words, words),
        "pair": (words, words[:4]),
        "images": (patches,) * 2,
        "captions": (words, patches),
    }
    assert (queries, keys) == expected[form] and first == 0
    assert weights.shape == (2, 2, len(queries), len(keys))


def run_with(folder, monkeypatch, objective, model=STACK):
    """`gallery.run_pictures` of a run with this objective; what was drawn of an example."""
    examples = [{"tokens": TEXT, "labels": TEXT, "weights": np.ones(6, np.float32)}]
    experiment = SimpleNamespace(model=model, name="one", objective=objective, data=None)
    drawn = {}
    monkeypatch.setattr(gallery, "open_run", lambda path: SimpleNamespace(experiment=experiment))
    monkeypatch.setattr(
        gallery.batching, "open_dataset", lambda *_: SimpleNamespace(validation=examples)
    )
    monkeypatch.setattr(
        gallery, "attention", lambda run, batch: drawn.setdefault("Attention", batch)
    )
    monkeypatch.setattr(
        gallery, "gradients", lambda run, batch: drawn.setdefault("Gradients", batch)
    )
    (folder / "checkpoints").mkdir()
    return gallery.run_pictures(RunFolder(epath.Path(folder))), drawn


def shown(model, batch):
    return {"tokens": batch["tokens"] + 1}


def with_example(example):
    def objective(model, params, batch, context):
        raise AssertionError("a report trains nothing")

    objective.example = example
    return objective


def test_a_report_draws_what_the_objective_gives(tmp_path, monkeypatch, caplog):
    pictures, drawn = run_with(tmp_path, monkeypatch, with_example(shown))
    assert drawn["Attention"]["tokens"].tolist() == [(TEXT + 1).tolist()]
    # those of the loss of the example itself
    assert drawn["Gradients"]["labels"].tolist() == [TEXT.tolist()]
    assert {"Architecture", "Attention", "Gradients"} <= set(pictures) and not caplog.text


class Scored:
    """An objective that another one scores, which gives an example."""

    def evaluation(self):
        return training.TokenCrossEntropy()


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "objective", [training.TokenCrossEntropy(), Scored(), training.MaskedTokens(8)]
)
def test_objectives_of_tokens_give_their_example(tmp_path, monkeypatch, objective, caplog):
    _, drawn = run_with(tmp_path, monkeypatch, objective)
    assert drawn["Attention"]["tokens"].tolist() == [TEXT.tolist()] and not caplog.text


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "objective",
    [lambda *_: None, with_example(lambda model, batch: None)],
    ids=["no method", "None"],
)
def test_without_an_example_nothing_is_drawn_and_nothing_is_said(
    tmp_path, monkeypatch, objective, caplog
):
    pictures, drawn = run_with(tmp_path, monkeypatch, objective)
    assert (
        not drawn
        and {"Attention", "Gradients"}.isdisjoint(pictures)
        and "Architecture" in pictures
        and not caplog.text
    )


def test_a_model_of_ones_own_has_a_report_without_a_warning(tmp_path, monkeypatch, caplog):
    pictures, drawn = run_with(tmp_path, monkeypatch, with_example(shown), model=SimpleNamespace())
    assert not drawn and not pictures and not caplog.text


def test_an_example_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    def fails(model, batch):
        raise KeyError("boxes")

    pictures, drawn = run_with(tmp_path, monkeypatch, with_example(fails))
    assert (
        not drawn
        and "Architecture" in pictures
        and "what needs the model is left out: 'boxes'" in caplog.text
    )


@pytest.mark.thorough
def test_the_example_of_corrupted_spans_is_a_pair():
    """Source and target as a training step makes them."""
    objective = training.SpanCorruption(sentinel=40, end=30)
    batch = {"tokens": jnp.arange(20)[None], "weights": jnp.ones((1, 20))}
    made = objective.example(None, batch)
    target, source = objective.lengths(20)
    assert made["source"].shape == (1, source) and made["tokens"].shape == (1, target)
    assert set(np.asarray(made["source"]).ravel()) & set(range(20))
