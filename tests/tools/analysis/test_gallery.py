"""The pictures that a page offers are those that can be drawn."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models
from jaxformer.data.tokenizers import Characters
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.runs.run import Run
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
            assert legend.texts and (len(runs) == 1 or [text.get_text() for text in legend.texts] == list(runs))


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", [Characters("abcdefgh"), None])
@pytest.mark.parametrize("form", ["text", "pair", "images", "captions"])
def test_attention_is_labelled_by_tokens_or_numbers_of_patches(monkeypatch, tokenizer, form):
    """By text where there is a tokenizer, on the side of an image by its patches, as many as there are."""
    image = np.zeros((8, 8, 3), np.float32)
    model, batch = {
        "text": (STACK, {"tokens": TEXT}),
        "pair": (EncoderDecoder(READER, STACK), {"tokens": TEXT, "source": TEXT[:4]}),
        "images": (VIT, {"images": image}),
        "captions": (EncoderDecoder(replace(VIT, heads=()), STACK, share_embeddings=False), {"tokens": TEXT, "source": image}),
    }[form]
    run = mock.NonCallableMagicMock(
        spec=Run, experiment=SimpleNamespace(model=model), tokenizer=tokenizer, on_mesh=contextlib.nullcontext,
        params=models.init(model, jax.random.key(0)),
    )  # fmt: skip
    drawn = []
    monkeypatch.setattr(figures, "attention", lambda *given: drawn.append(given))
    gallery.attention(run, {name: jnp.asarray(value)[None] for name, value in batch.items()})()
    ((weights, queries, keys, first),) = drawn
    words = LETTERS if tokenizer else list("123456")
    patches = list("01234")
    expected = {"text": (words, words), "pair": (words, words[:4]), "images": (patches,) * 2, "captions": (words, patches)}
    assert (queries, keys) == expected[form] and first == 0
    assert weights.shape == (2, 2, len(queries), len(keys))
