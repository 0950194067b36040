"""Pairs of texts: files and their faults, rows of several pairs, buckets of length, and that
packing changes no number."""

import contextlib
import gzip
import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer import masks, models
from jaxformer.data import batching, pairs, tokenizers
from jaxformer.data.pairs import Buckets, Example, Packed, Pair, Pairs
from jaxformer.errors import ConfigError
from jaxformer.objectives import StepContext
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.training import TokenCrossEntropy

DECODER = models.ModelConfig(256, 1, 32, 2, context_length=32)
PAIR = models.EncoderDecoder(
    replace(DECODER, heads=(), masks=(masks.full(),), context_length=20), DECODER
)
TEXTS = [
    ("eins", "one"),
    ("zwei", "two"),
    ("drei und vier", "three and four"),
    ("f", "five"),
    ("sechs", "six"),
]


def write(folder, name, sources, targets, end="\n"):
    for ending, texts in (("de", sources), ("en", targets)):
        (folder / f"{name}.{ending}").write_text("".join(text + end for text in texts))
    return str(folder / name)


def config(folder, **changes):
    train = write(folder, "train", *zip(*TEXTS, strict=True))
    validation = write(folder, "val", *zip(*TEXTS[:2], strict=True))
    return Pairs(
        train, validation, "de", "en", **{"tokenizer": "bytes", "vocab_size": None, **changes}
    )


def in_memory(model, rows=Packed(), texts=TEXTS):
    named = [Pair(f"pair {i}", *text) for i, text in enumerate(texts)]
    return pairs.open_pairs(named, named, tokenizers.Bytes(), model, rows)


def decoded(ids):
    return tokenizers.Bytes().decode(ids)


def test_a_packed_row_holds_whole_pairs_each_once(tmp_path):
    data = config(tmp_path).open(PAIR)
    seen = []
    for row in (data.train[i] for i in range(len(data.train))):
        assert {name: array.shape for name, array in row.items()} == {
            **dict.fromkeys(("tokens", "labels", "weights", "segment_ids"), (32,)),
            **dict.fromkeys(("source", "source_segment_ids"), (20,)),
        }
        for segment in range(1, row["segment_ids"].max() + 1):
            here, there = row["segment_ids"] == segment, row["source_segment_ids"] == segment
            source, tokens, labels = row["source"][there], row["tokens"][here], row["labels"][here]
            assert (
                source[-1] == labels[-1] == tokens[0] == 255 and (tokens[1:] == labels[:-1]).all()
            )
            seen.append((decoded(source[:-1]), decoded(labels[:-1])))
        np.testing.assert_array_equal(row["weights"], row["segment_ids"] > 0)
    assert sorted(seen) == sorted(TEXTS) and len(data.train) < len(TEXTS)
    assert "padding" in data.description and data.vocab_size == 256


def test_a_decoder_alone_reads_the_source_and_learns_the_target():
    row = in_memory(DECODER, texts=[("ab", "cd")]).train[0]
    assert row["tokens"][:5].tolist() == [97, 98, 255, 99, 100] and row["labels"][:5].tolist() == [
        98,
        255,
        99,
        100,
        255,
    ]
    assert row["weights"][:6].tolist() == [0, 0, 1, 1, 1, 0] and "source" not in row


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("lengths", [(32, 32), (0, 40)])
def test_packing_wastes_little_and_loses_nothing(lengths):
    rng = np.random.default_rng(0)
    sizes = [(min(int(s), lengths[0]), int(t)) for s, t in rng.integers(1, 17, (500, 2))]
    examples = [Example(*(np.ones(t, np.int32),) * 3, np.ones(s, np.int32)) for s, t in sizes]
    rows = Packed()(examples, lengths)
    assert sorted(number for row in rows.members for number in row) == list(range(500))
    for row in rows.members:
        assert (
            sum(sizes[i][0] for i in row) <= lengths[0]
            and sum(sizes[i][1] for i in row) <= lengths[1]
        )
    assert rows.members == Packed()(examples, lengths).members and rows.padding() < 0.15


def test_no_more_rows_are_open_than_asked():
    """One open row is closed by the first pair that does not fit: rows hold the pairs in the order
    in which they come."""
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(1, 9, 30)
        examples = [Example(*(np.ones(t, np.int32),) * 3, np.ones(0, np.int32)) for t in sizes]
        members = Packed(open_rows=1)(examples, (0, 10)).members
        assert np.concatenate(members).tolist() == np.random.default_rng(0).permutation(30).tolist()
    with pytest.raises(ConfigError, match=r"open_rows=0\): must be at least 1"):
        Packed(open_rows=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "implementation"),
    [
        pytest.param(PAIR, "blockwise", id="pair-blockwise"),
        pytest.param(DECODER, "reference", id="decoder-reference"),
        pytest.param(PAIR, "reference", id="pair-reference", marks=pytest.mark.slow),
        pytest.param(DECODER, "blockwise", id="decoder-blockwise", marks=pytest.mark.slow),
        pytest.param(DECODER, "splash", id="decoder-splash", marks=pytest.mark.slow),
        pytest.param(PAIR, "splash", id="pair-splash", marks=pytest.mark.slow),
        pytest.param(DECODER, "ring", id="decoder-ring", marks=pytest.mark.slow),
    ],
)
def test_packed_pairs_have_the_loss_and_gradients_of_single_ones(model, implementation):
    kernel = lambda config: replace(config, attention_implementation=implementation)
    model = (
        models.EncoderDecoder(kernel(model.encoder), kernel(model.decoder))
        if model is PAIR
        else kernel(model)
    )
    params, objective = jax.jit(partial(models.init, model))(jax.random.key(0)), TokenCrossEntropy()

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        return objective(model, params, batch, StepContext(jax.random.key(0))).loss

    def total(rows):
        found = [
            loss(params, jax.device_put(rows.take_rows(np.array([i])))) for i in range(len(rows))
        ]
        return jax.tree.map(lambda *leaves: np.sum(np.stack(leaves), axis=0), *found)

    packed, single = in_memory(model), in_memory(model, Buckets((16,)))
    assert len(packed.train) < len(single.train) == len(TEXTS)
    with (
        jax.set_mesh(make_mesh(Mesh(context=4)))
        if implementation == "ring"
        else contextlib.nullcontext()
    ):
        found, expected = total(packed.train), total(single.train)
    # sums of float32 in another order
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), found, expected
    )


def test_buckets_give_batches_of_one_shape_and_every_pair_in_each_epoch():
    rng = np.random.default_rng(1)
    texts = [("a" * s, "b" * t) for s, t in rng.integers(1, 20, (100, 2))]
    rows = in_memory(PAIR, Buckets((6, 12)), texts).train
    steps = batching.batches(rows, 8, seed=3)
    shapes = {
        (batch["source"].shape, batch["tokens"].shape) for batch in (steps[i] for i in range(60))
    }
    assert shapes == {((8, 6), (8, 6)), ((8, 12), (8, 12)), ((8, 20), (8, 32))}
    order = rows.batch_indices(3, 8)
    for epoch in range(2):
        seen = np.concatenate(
            [order[step] for step in range(epoch * order.count, (epoch + 1) * order.count)]
        )
        assert set(seen) == set(range(100)) and len(seen) < 100 + 3 * 8
    assert not np.array_equal(order[0], order[order.count])
    again = rows.batch_indices(3, 8)
    # a function of (seed, step): a resumed run asks for a later step first
    np.testing.assert_array_equal(again[17], order[17])
    halves = [
        batching.batches(rows, 8, 3, np.arange(8)[part])[5] for part in (slice(0, 4), slice(4, 8))
    ]
    for name, whole in steps[5].items():
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), whole)


def test_questions_are_the_validation_pairs(tmp_path):
    question = config(tmp_path).open(PAIR).validation.questions[0]
    assert (
        question.prompt == [255]
        and question.reference == "one"
        and question.source == [*b"eins", 255]
    )
    alone = in_memory(DECODER).validation.questions[0]
    assert alone.prompt == [*b"eins", 255] and alone.source is None


@pytest.mark.thorough
def test_shared_byte_pairs_and_rows_of_json(tmp_path):
    for name in ("train", "val"):
        lines = [
            json.dumps({"translation": {"de": source, "en": target}})
            for source, target in TEXTS * 20
        ]
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    files = [str(tmp_path / f"{name}.jsonl.gz") for name in ("train", "val")]
    data = Pairs(*files, "translation.de", "translation.en", vocab_size=270)
    model = replace(
        PAIR,
        encoder=replace(PAIR.encoder, vocab_size=270),
        decoder=replace(DECODER, vocab_size=270),
    )
    dataset = data.open(model)
    assert dataset.vocab_size == 270 and dataset.tokenizer.end_of_text == 0
    assert dataset.tokenizer.decode(dataset.validation.questions[0].source[:-1]) == "eins"


FAULTS = {
    "empty": (["eins", ""], ["one", "two"], r"train.de:2: empty"),
    "no line beside it": (
        ["eins", "zwei"],
        ["one"],
        r"train.de:2: no line beside it in .*train.en",
    ),
    "source longer than the model's 20 tokens": (
        ["eins", "z" * 30],
        ["one", "two"],
        r"train.de:2: source longer.*\(31\)",
    ),
    "target longer than the model's 32 tokens": (
        ["eins", "zwei"],
        ["one", "t" * 40],
        r"train.de:2: target longer.*\(41\)",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_row_is_refused_with_its_place_or_counted(tmp_path, kind):
    sources, targets, message = FAULTS[kind]
    data = replace(config(tmp_path), train=write(tmp_path, "train", sources, targets))
    with pytest.raises(ConfigError, match=message):
        data.open(PAIR)
    dataset = replace(data, bad_rows="skip").open(PAIR)
    assert (
        f"1 rows skipped: 1 {kind} (first " in dataset.description
        and "1 training" in dataset.description
    )


def test_a_field_that_is_no_text_is_a_bad_row(tmp_path):
    """It was trained on as Python writes it: {'a': 1}."""
    rows = [{"source": source, "target": target} for source, target in TEXTS]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(map(json.dumps, [*rows, {"source": "x", "target": {"a": 1}}]))
    )
    data = Pairs(*[str(tmp_path / "a.jsonl")] * 2, tokenizer="bytes", vocab_size=None)
    with pytest.raises(ConfigError, match=r"a\.jsonl:6: no text but str and dict"):
        data.open(PAIR)
    assert f"{len(TEXTS)} training" in replace(data, bad_rows="skip").open(PAIR).description


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    data = config(tmp_path)
    (tmp_path / "train.en").write_bytes(b"one\ntwo\nthr\xffee\nfive\nsix\n")
    with pytest.raises(ConfigError, match=r"train.en:3: not UTF-8"):
        data.open(PAIR)
    assert "4 training" in replace(data, bad_rows="skip").open(PAIR).description
    with pytest.raises(ConfigError, match=r"there is no .*nothing.de"):
        replace(data, train=str(tmp_path / "nothing")).open(PAIR)


def test_a_split_of_which_nothing_fits_is_refused():
    with pytest.raises(ConfigError, match="no training pair fits"):
        pairs.open_pairs(
            [Pair("a:1", "x" * 99, "y")],
            [],
            tokenizers.Bytes(),
            PAIR,
            problems=pairs.Problems("skip"),
        )
