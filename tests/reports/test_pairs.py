"""Pairs: what users of transformers, torchtune, trl, lhotse and translation toolkits reported."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import models, params
from jaxformer.data.pairs import Buckets, Packed, Pair, Pairs, open_pairs
from jaxformer.data.records import Problems
from jaxformer.data.tokenizers import Bytes
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full
from jaxformer.models import LanguageModel, Learned, ModelConfig, Relative
from jaxformer.objectives import StepContext
from jaxformer.ops.positions import within_segments
from jaxformer.training import TokenCrossEntropy

END = 0xFF
DECODER = SimpleNamespace(context_length=32)
BOTH = SimpleNamespace(
    encoder=SimpleNamespace(context_length=32), decoder=SimpleNamespace(context_length=32)
)
TEXTS = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=12), st.text("xyz", min_size=1, max_size=12)),
    min_size=1,
    max_size=12,
)


def pairs_of(texts):
    return [Pair(str(number), *text) for number, text in enumerate(texts)]


def dataset_of(texts, model, rows=Packed(), **more):
    pairs = pairs_of(texts)
    return open_pairs(pairs, pairs, Bytes(), model, rows, **more)


def write_rows(path, texts):
    path.write_text(
        "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in texts)
    )
    return str(path)


def answers(dataset):
    """(source, target) of each segment of each training row, from what a model reads and learns."""
    batch = dataset.train.take_rows(np.arange(len(dataset.train)))
    for row in range(len(dataset.train)):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            at = batch["segment_ids"][row] == segment
            learned = at & (batch["weights"][row] > 0)
            yield batch["tokens"][row][at], batch["labels"][row][at], batch["labels"][row][learned]


@pytest.mark.report(
    "huggingface/transformers#5987",
    "huggingface/transformers#7719",
    listed="first 07",
    right=(
        "The decoder begins with the token that the model was trained with: a field, by default "
        "the end of a text."
    ),
    hit="It always began with the end of a text, which is wrong for T5 and Marian.",
)
@pytest.mark.parametrize(("start", "first"), [(None, END), (0, 0), (300, 300)])
def test_the_first_token_of_a_target_is_a_choice(tmp_path, start, first):
    path = write_rows(tmp_path / "rows.jsonl", [("abc", "xy"), ("ab", "xyz")])
    data = Pairs(path, path, tokenizer="bytes", vocab_size=None, start=start)
    dataset = data.open(BOTH)
    assert all(tokens[0] == first for tokens, _, _ in answers(dataset))
    assert all(question.prompt == [first] for question in dataset.validation.questions)
    assert data.question(BOTH, dataset.tokenizer, "abc").prompt == [first]
    assert dataset.vocab_size == max(256, first + 1)
    if start is not None:
        assert (
            dataset.digest
            != Pairs(path, path, tokenizer="bytes", vocab_size=None).open(BOTH).digest
        )
        with pytest.raises(ConfigError, match=r"data\.start"):
            data.open(DECODER)


@pytest.mark.report(
    "kohya-ss/sd-scripts#473",
    "kohya-ss/sd-scripts#2141",
    listed="third 11",
    right=(
        "Buckets fill a short last batch with examples of the same bucket; each pair comes at "
        "least once an epoch."
    ),
)
@pytest.mark.report(
    "lhotse-speech/lhotse#610",
    right="No bucket drops a pair, whatever the sizes of buckets and batches.",
)  # fmt: skip
@given(TEXTS, st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_buckets_drop_no_pair(texts, batch_size):
    rows = dataset_of(texts, BOTH, Buckets((8, 16))).train
    batches = rows.batch_indices(0, batch_size)
    epoch = [batches[step] for step in range(batches.count)]
    assert set(np.concatenate(epoch).tolist()) == set(range(len(texts)))
    assert all(len({rows.shape([row]) for row in batch}) == 1 for batch in epoch)


@pytest.mark.report(
    "lhotse-speech/lhotse#364",
    right="Within an epoch, lengths come in random order, and within a bucket pairs do.",
)  # fmt: skip
def test_buckets_come_in_random_order():
    texts = [("a" * (1 + number % 14), "x") for number in range(56)]
    rows = dataset_of(texts, BOTH, Buckets((4, 8))).train
    batches = rows.batch_indices(0, 4)
    epochs = [
        [batches[epoch * batches.count + step].tolist() for step in range(batches.count)]
        for epoch in range(2)
    ]
    lengths = [[rows.shape(batch) for batch in epoch] for epoch in epochs]
    assert lengths[0] != sorted(lengths[0]) and lengths[0] != lengths[1]
    assert sorted(map(sorted, epochs[0])) != sorted(map(sorted, epochs[1]))


@pytest.mark.report(
    "meta-pytorch/torchtune#2613",
    right="In a packed row no pair is asked for the first token of the next one.",
)  # fmt: skip
@given(
    TEXTS, st.sampled_from([DECODER, BOTH]), st.sampled_from([Packed(), Packed(1), Buckets((8,))])
)
@settings(max_examples=40, deadline=None)
def test_labels_are_shifted_within_a_pair(texts, model, rows):
    found = list(answers(dataset_of(texts, model, rows)))
    assert len(found) == len(texts)
    for tokens, labels, _ in found:
        assert tokens[1:].tolist() == labels[:-1].tolist()
        assert labels[-1] == END


@pytest.mark.report(
    "stochasticai/xTuring#129", "rasbt/reasoning-from-scratch#185",
    right="The end of an answer is learned, so that generation stops; nothing of the source is.",
)  # fmt: skip
@given(TEXTS, st.sampled_from([DECODER, BOTH]))
@settings(max_examples=30, deadline=None)
def test_what_is_learned_is_the_target_and_its_end(texts, model):
    learned = sorted(
        bytes(labels.astype(np.uint8)) for _, _, labels in answers(dataset_of(texts, model))
    )
    assert learned == sorted(target.encode() + b"\xff" for _, target in texts)


@pytest.mark.report(
    "huggingface/transformers#18249", "huggingface/transformers#18985",
    right="The decoder never reads the end of its own target, in a padded row neither.",
)  # fmt: skip
def test_a_decoder_does_not_read_the_end_of_its_target():
    batch = dataset_of(
        [("abc", "xy"), ("a" * 20, "z" * 20)], BOTH, Buckets((8,)), start=7
    ).train.take_rows(np.arange(2))
    assert not (batch["tokens"] == END).any()
    assert ((batch["tokens"] == 0) == (batch["segment_ids"] == 0)).all()
    assert not batch["weights"][batch["segment_ids"] == 0].any()


@pytest.mark.report(
    "huggingface/trl#6668",
    "huggingface/trl#5826",
    right=(
        "A pair too long for the model is a bad row: no example is left whose target was cut away."
    ),
)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_no_example_without_a_target_is_left(lengths):
    texts = [("ab", "xy"), *(("a" * length, "x" * 3) for length in lengths)]
    problems = Problems("skip")
    dataset = dataset_of(texts, DECODER, problems=problems)
    found = list(answers(dataset))
    assert all(len(learned) >= 3 for _, _, learned in found)
    dropped = sum(length + 1 + 3 > 32 for length in lengths)
    assert len(found) == len(texts) - dropped
    assert sum(problems.counts.values()) == 2 * dropped  # training and validation


@pytest.mark.thorough
@pytest.mark.report(
    "hiyouga/LlamaFactory#2289", "huggingface/nanoVLM#201", "marin-community/marin#7087",
    right="Positions begin anew with each pair of a packed row.",
)  # fmt: skip
def test_positions_begin_anew_with_each_pair():
    batch = dataset_of([("ab", "x"), ("abc", "xyz"), ("a", "x")], DECODER).train.take_rows(
        np.array([0])
    )
    segments = batch["segment_ids"]
    positions = np.asarray(within_segments(jnp.asarray(segments)))
    assert segments.max() == 3
    for segment in range(1, 4):
        at = segments[0] == segment
        assert positions[0][at].tolist() == list(range(at.sum()))


@pytest.mark.report(
    "stefan-it/nmt-en-vi#6", "sillsdev/silnlp#137",
    right="A blank line on one side takes its pair away and moves no other pair.",
)  # fmt: skip
def test_blank_lines_do_not_move_pairs(tmp_path):
    (tmp_path / "t.vi").write_text("one\n\nthree\nfour\n  \n")
    (tmp_path / "t.en").write_text("eins\nzwei\ndrei\n\nfuenf\n")
    data = Pairs(
        str(tmp_path / "t"), str(tmp_path / "t"), "vi", "en", "bytes", None, bad_rows="skip"
    )
    dataset = data.open(BOTH)
    sources = [bytes(example.source.astype(np.uint8)) for example in dataset.train.examples]
    targets = [bytes(example.labels.astype(np.uint8)) for example in dataset.train.examples]
    assert (sources, targets) == ([b"one\xff", b"three\xff"], [b"eins\xff", b"drei\xff"])
    assert "3 empty" in dataset.description or "6 empty" in dataset.description


@pytest.mark.report(
    "EdinburghNLP/code-docstring-corpus#12",
    right=(
        "Only \\n ends a line: other separators of Unicode within a text do not make the files "
        "uneven."
    ),
)
@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_other_separators_end_no_line(tmp_path, separator):
    (tmp_path / "t.a").write_bytes(f"one{separator}two\nthree\r\n".encode())
    (tmp_path / "t.b").write_bytes(b"x\ny\n")
    dataset = Pairs(str(tmp_path / "t"), str(tmp_path / "t"), "a", "b", "bytes", None).open(BOTH)
    sources = [
        bytes(example.source[:-1].astype(np.uint8)).decode() for example in dataset.train.examples
    ]
    assert sources == [f"one{separator}two", "three"]


@pytest.mark.report(
    "BIMSBbioinfo/flexynesis#156",
    right=(
        "What only the validation pairs have, here a character, is a bad row by name, and "
        "skipped where that is asked for."
    ),
    hit="bad_rows='skip' ended with an error that named no row.",
)
def test_a_character_that_training_lacks_is_a_bad_row(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [("abc", "xyz")])
    validation = write_rows(
        tmp_path / "validation.jsonl", [("cab", "zy"), ("abq", "x"), ("a", "y")]
    )
    data = Pairs(train, validation, tokenizer="characters", vocab_size=None, bad_rows="skip")
    dataset = data.open(BOTH)
    assert len(dataset.validation.examples) == 2
    assert "1 not a text of the tokenizer" in dataset.description
    with pytest.raises(
        ConfigError, match=r"validation\.jsonl:2: not a text of the tokenizer .*'q'"
    ):
        Pairs(train, validation, tokenizer="characters", vocab_size=None).open(BOTH)


# --- padding

READER = ModelConfig(
    vocab_size=16,
    num_layers=1,
    d_model=8,
    num_heads=2,
    context_length=16,
    init_std=0.5,
    masks=(full(),),
    heads=(),
)


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/FasterTransformer#270",
    "joeynmt/joeynmt#151",
    listed="third 26",
    right=(
        "Padding of a source or a target, in front, behind or both, of any token, changes no loss."
    ),
)
@pytest.mark.parametrize("positions", [Learned(), Relative()])
def test_padding_of_pairs_changes_no_loss(positions):
    decoder = replace(READER, positions=positions, masks=(causal(),), heads=(LanguageModel(),))
    model = models.EncoderDecoder(replace(READER, positions=positions), decoder)
    rng = np.random.default_rng(0)
    shapes = params.abstract(models.spec(model))
    draw = lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype)
    drawn = jax.tree.map(draw, shapes)
    pairs = [(rng.integers(0, 16, s), rng.integers(0, 16, t + 1)) for s, t in ((5, 4), (2, 6))]
    loss = jax.jit(
        lambda batch: TokenCrossEntropy()(model, drawn, batch, StepContext(jax.random.key(0))).loss
    )

    def batch(pairs, source, target, place):
        """The pairs in rows of these lengths; `place`: how much of the padding is in front."""
        wide = lambda length, dtype=np.int32: np.zeros((len(pairs), length), dtype)
        filled = {
            name: rng.integers(0, 16, (len(pairs), n))
            for name, n in (("source", source), ("tokens", target))
        }
        filled |= {"labels": wide(target), "weights": wide(target, np.float32)}
        filled |= {"source_segment_ids": wide(source), "segment_ids": wide(target)}
        for row, (read, written) in enumerate(pairs):
            at = slice(first := int(place * (source - len(read))), first + len(read))
            filled["source"][row, at], filled["source_segment_ids"][row, at] = read, 1
            at = slice(first := int(place * (target - len(written) + 1)), first + len(written) - 1)
            filled["tokens"][row, at], filled["labels"][row, at] = written[:-1], written[1:]
            filled["segment_ids"][row, at] = filled["weights"][row, at] = 1
        return filled

    alone = sum(float(loss(batch([pair], len(pair[0]), len(pair[1]) - 1, 0))) for pair in pairs)
    for place in (0, 0.5, 1):
        assert float(loss(batch(pairs, 9, 8, place))) == pytest.approx(alone, rel=1e-5)
    turned = [(pairs[0][0][::-1], pairs[0][1]), pairs[1]]
    assert abs(float(loss(batch(turned, 9, 8, 1))) - alone) > 1e-3
