"""Perplexity by overlapping windows equals a recomputation in float64 from the logits, token by
token."""

import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer import config, masks, models
from jaxformer.data import batching, sources, tokenizers
from jaxformer.data.corpus import Corpus
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.perplexity import (
    StridedPerplexity,
    count_bytes,
    perplexity,
    strided_batches,
)
from jaxformer.models import ModelConfig
from jaxformer.ops.losses import LossSums
from jaxformer.runs.run import evaluator
from jaxformer.training.recipe import build

T = 12
MODEL = ModelConfig(vocab_size=256, num_layers=2, d_model=16, num_heads=2, context_length=T)
TEXT = "Straße, naïve café – 3½ €. " * 9


def evaluation(tokenizer, tokens, model=MODEL, rows=4):
    params = models.init(model, jax.random.key(1))
    # far from uniform predictions
    params = jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, params)
    validation = sources.Windows(tokens, T, stride=T)
    dataset = sources.Dataset(validation, validation, "", tokenizer=tokenizer)
    batches = batching.ValidationBatches(validation, rows)
    return Evaluation(
        model,
        params,
        dataset,
        lambda: map(jax.device_put, map(batches.__getitem__, range(len(batches)))),
        "float32",
        0,
    )


def nats_by_hand(scored, stride):
    """-log p of every token but the first, float64, each by the window that scores it."""
    tokens = np.asarray(scored.dataset.validation.tokens, np.int64)
    nats, start = {}, 0
    forward = jax.jit(lambda window: models.apply(scored.model, scored.params, window).logits[0])
    while len(nats) < len(tokens) - 1:
        window = tokens[start : start + T]
        padded = np.pad(window, (0, T - len(window)))[None]  # which no earlier token sees
        logits = np.asarray(forward(jax.device_put(padded)), np.float64)
        for place in range(len(window)):
            if start + place + 1 < len(tokens) and start + place + 1 not in nats:
                row = logits[place] - logits[place].max()
                nats[start + place + 1] = (
                    math.log(np.exp(row).sum()) - row[tokens[start + place + 1]]
                )
        start += stride
    return nats


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "stride", "length"),
    [
        ("bytes", 5, 3 * T + 5),
        ("characters", 1, 2 * T),
        ("characters", 5, T - 4),
        ("bytes", T, T + 1),
    ],
)
def test_it_equals_a_recomputation_in_float64(kind, stride, length):
    tokenizer = tokenizers.Bytes() if kind == "bytes" else tokenizers.Characters.of(TEXT)
    text = TEXT[2 : 2 + length]
    scored = evaluation(tokenizer, tokenizer.encode_text(text))
    nats = nats_by_hand(scored, stride)
    scores = StridedPerplexity(stride)(scored)
    assert scores["strided_perplexity"] == pytest.approx(
        math.exp(np.mean(list(nats.values()))), rel=1e-5
    )
    # the first character is one byte
    bits = sum(nats.values()) / math.log(2) / len(text[1:].encode())
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("stride", [1, 3, T])
@pytest.mark.parametrize("length", [2, T, T + 1, T + 2, 50])
def test_every_label_is_scored_once_with_enough_tokens_before_it(stride, length):
    seen = {}
    for batch in strided_batches(np.arange(length), T, stride, 3):
        for tokens, labels, weights in zip(
            batch["tokens"], batch["labels"], batch["weights"], strict=True
        ):
            for place in np.flatnonzero(weights):
                assert labels[place] not in seen
                assert labels[place] == tokens[place] + 1
                seen[int(labels[place])] = place + 1  # tokens before it
    assert sorted(seen) == list(range(1, length))
    assert all(before == label or before > T - stride for label, before in seen.items())


@pytest.mark.thorough
def test_stride_of_the_whole_length_equals_the_plain_one_in_an_experiment(tmp_path, monkeypatch):
    from tests.tiny import furnish

    monkeypatch.chdir(furnish(tmp_path))
    experiment = replace(
        config.load("tiny"), metrics=(StridedPerplexity(16), StridedPerplexity(4, only_final=False))
    )
    dataset = batching.open_dataset(experiment.data, experiment.model)
    trained = models.init(experiment.model, jax.random.key(0))
    evaluate = evaluator(experiment, build(experiment), dataset)
    assert "bits_per_byte" in evaluate(trained)
    scores = evaluator(
        replace(experiment, metrics=(StridedPerplexity(16),)), build(experiment), dataset
    )(trained, final=True)
    assert scores["strided_perplexity"] == pytest.approx(scores["perplexity"], rel=1e-6)
    assert scores["bits_per_byte"] == pytest.approx(scores["bits"], rel=1e-6)  # a token is a byte


@pytest.mark.thorough
def test_on_a_mesh_the_numbers_are_the_same():
    scored = evaluation(tokenizers.Bytes(), tokenizers.Bytes().encode_text(TEXT))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    put = partial(jax.device_put, device=jax.NamedSharding(mesh, jax.P("data")))
    batches = lambda: (
        {name: put(leaf) for name, leaf in batch.items()} for batch in scored.batches()
    )
    params = jax.device_put(scored.params, jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        split = StridedPerplexity(5)(replace(scored, batches=batches, params=params))
    assert split == pytest.approx(StridedPerplexity(5)(scored), rel=1e-6)


def test_bytes_are_those_of_the_text():
    text = "naïve €\n"
    characters = tokenizers.Characters.of(text)
    assert count_bytes(characters.encode_text(text), characters) == len(text.encode())
    # no UTF-8, and the end of a document
    assert count_bytes(np.array([0xFE, 0x80, 0xFF]), tokenizers.Bytes()) == 2
    bpe = tokenizers.BPE.train(text * 9, 300)
    assert count_bytes(np.append(bpe.encode_text(text), bpe.encode_text(text)), bpe) == 2 * len(
        text.encode()
    )
    assert count_bytes(
        np.array([*bpe.encode(text), bpe.end_of_text, *bpe.encode(text)]), bpe
    ) == 2 * len(text.encode())


def test_a_metric_with_a_value_for_each_layer_is_recorded_as_in_training():
    score = lambda params, batch, number: LossSums(
        6.0, 2.0, {"load/layers": (batch["x"], 2.0), "accuracy": (1.0, 2.0)}
    )
    scores = perplexity(score, None, [{"x": np.array([1.0, 3.0])}, {"x": np.array([3.0, 5.0])}])
    assert scores.pop("perplexity") == pytest.approx(math.exp(3))
    assert scores.pop("bits") == pytest.approx(3 / math.log(2))
    assert scores == {
        "loss": 3.0,
        "load/layers/0": 1.0,
        "load/layers/1": 2.0,
        "accuracy": 0.5,
        "tokens": 4.0,
    }


@pytest.mark.parametrize("batches", [[], [{"x": np.zeros(1)}]])
def test_a_split_without_weight_is_refused_in_a_line(batches):
    with pytest.raises(
        ConfigError, match="the validation split is empty, or shorter than the model's context"
    ):
        perplexity(lambda *_: LossSums(0.0, 0.0, {}), None, batches)


@pytest.mark.thorough
def test_what_is_no_text_is_refused():
    scored = evaluation(tokenizers.Bytes(), tokenizers.Bytes().encode_text(TEXT))
    for stride in (0, T + 1):
        with pytest.raises(ConfigError, match=f"stride={stride}"):
            StridedPerplexity(stride)(scored)
    with pytest.raises(ConfigError, match="no text"):
        StridedPerplexity(4)(replace(scored, dataset=replace(scored.dataset, tokenizer=None)))
    for mask in (
        masks.full(),
        masks.window(3, 1),
        masks.chunked(5),
        masks.causal() | masks.prefix(3),
    ):
        with pytest.raises(ConfigError, match="sees later tokens"):
            StridedPerplexity(4)(replace(scored, model=replace(MODEL, masks=(mask,))))


@pytest.mark.parametrize("bad", [0, -2])
def test_sizes_of_windows_that_are_none_are_refused(bad):
    right = {"length": 4, "stride": 2, "rows": 3}
    for name in right:
        with pytest.raises(
            ConfigError, match=f"strided_batches: {name}={bad}: expected a whole number"
        ):
            next(strided_batches(np.arange(20), **right | {name: bad}))
    for name in ("rows", "max_tokens"):
        with pytest.raises(ConfigError, match=f"Generated.{name}={bad}: expected a whole number"):
            Generated((), **{name: bad})


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_on_disk_have_the_scores_of_those_in_memory(tmp_path, tokenizer):
    """A corpus keeps its tokens in files: with byte pairs its bytes could not be counted."""
    (tmp_path / "text.txt").write_text(TEXT * 20)
    size = 260 if tokenizer == "bpe" else None
    data = Corpus(
        str(tmp_path / "text.txt"),
        tokenizer=tokenizer,
        vocab_size=size,
        validation_fraction=0.1,
        cache=str(tmp_path / "cache"),
    )
    model = replace(MODEL, vocab_size=264)
    dataset = data.open(model)
    on_disk = evaluation(dataset.tokenizer, dataset.validation.tokens, model)
    in_memory = evaluation(dataset.tokenizer, dataset.validation.tokens[:], model)
    assert StridedPerplexity(5)(on_disk) == StridedPerplexity(5)(in_memory)
