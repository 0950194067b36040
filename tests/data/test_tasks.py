"""Generated examples: the answers are right, pure in (seed, index), and the two forms are what they
say."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data import batching
from jaxformer.data.batching import batches, take_rows
from jaxformer.data.tasks import Copy, Recall, Reverse, Sort
from jaxformer.errors import ConfigError


def open_dataset(data, length):
    """The data set as a model of this context length opens it."""
    return batching.open_dataset(data, SimpleNamespace(context_length=length))


ANSWERS = {Reverse: lambda x: x[::-1], Copy: lambda x: x, Sort: sorted}
SIZES = {
    "vocab_size": st.integers(2, 40),
    "length": st.integers(1, 12),
    "seed": st.integers(0, 2**40),
}


@pytest.mark.thorough
@pytest.mark.parametrize("task", ANSWERS)
@given(**SIZES, index=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_answers_of_both_forms(task, vocab_size, length, seed, index):
    config = task(vocab_size, length, 1000, 1000, seed=seed)
    aligned = open_dataset(replace(config, form="aligned"), 64).train[index]
    x = aligned["tokens"].tolist()
    assert aligned["labels"].tolist() == list(ANSWERS[task](x))
    assert aligned["weights"].tolist() == [1] * length
    assert min(x) >= 0 and max(x) < vocab_size

    dataset = open_dataset(config, 64)
    causal = dataset.train[index]
    assert dataset.vocab_size == vocab_size + 1
    whole = [*x, vocab_size, *aligned["labels"].tolist()]
    assert causal["tokens"].tolist() == whole[:-1]
    assert causal["labels"].tolist() == whole[1:]
    assert causal["labels"][causal["weights"] == 1].tolist() == aligned["labels"].tolist()
    assert causal["weights"].sum() == length


@pytest.mark.thorough
@given(
    vocab_size=st.integers(16, 40),
    length=st.integers(1, 8),
    seed=st.integers(0, 99),
    index=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_recall_asks_each_key_once_for_its_value(vocab_size, length, seed, index):
    row = open_dataset(Recall(vocab_size, length, 100, 100, seed), 24).train[index]
    pairs, queries = row["tokens"][: 2 * length].reshape(-1, 2), row["tokens"][2 * length :]
    table = dict(pairs.tolist())
    assert len(table) == length and sorted(queries.tolist()) == sorted(table)
    assert row["labels"][2 * length :].tolist() == [table[key] for key in queries.tolist()]
    assert row["weights"].tolist() == [0] * (2 * length) + [1] * length
    assert max(table) < vocab_size // 2 <= min(table.values()) and max(table.values()) < vocab_size


@pytest.mark.parametrize("config", [Reverse(), Copy(form="aligned"), Sort(), Recall()])
def test_examples_are_pure_and_splits_differ(config):
    first, second = open_dataset(config, 64), open_dataset(config, 64)
    order = np.random.default_rng(0).permutation(40)
    forwards = take_rows(first.train, np.arange(40))
    shuffled = take_rows(second.train, order)
    for name, rows in forwards.items():
        np.testing.assert_array_equal(rows[order], shuffled[name])
        np.testing.assert_array_equal(rows[7], second.train[7][name])
    assert {name: rows.dtype for name, rows in forwards.items()} == {
        "tokens": np.int32,
        "labels": np.int32,
        "weights": np.float32,
    }
    assert (forwards["tokens"] != take_rows(first.validation, np.arange(40))["tokens"]).any()
    assert first.digest == second.digest != open_dataset(replace(config, seed=1), 64).digest
    assert first.tokenizer is None and "\n" not in first.description
    assert len(list(open_dataset(replace(config, examples=5), 64).train)) == 5


def test_a_batch_is_the_callers_own():
    split = open_dataset(Reverse(), 64).train
    split[3]["tokens"][:] = -1
    assert (split[3]["tokens"] >= 0).all()


def test_the_seeds_toy():
    dataset = open_dataset(Reverse(vocab_size=8, length=4, examples=50, form="aligned"), 4)
    assert (len(dataset.train), dataset.vocab_size) == (50, 8)
    batch = batches(dataset.train, 50, seed=0)[0]
    np.testing.assert_array_equal(batch["labels"], batch["tokens"][:, ::-1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Reverse(vocab_size=1), r"data\.vocab_size: 1 is too small; at least 2"),
        (Copy(length=0), r"data\.length: 0"),
        (Sort(examples=0), r"data\.examples: 0"),
        (Sort(validation_examples=-1), r"data\.validation_examples: -1"),
        (Reverse(seed=-1), r"data\.seed: -1"),
        (Recall(vocab_size=8, length=5), r"5 distinct keys need at least 10"),
        (Copy(length=40), r"80 tokens, longer than the context of 64; .* to 80"),
        (Recall(vocab_size=99, length=22), r"66 tokens, longer than the context of 64"),
    ],
)
def test_bad_sizes_are_one_line(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_dataset(config, 64)
    assert "\n" not in str(caught.value)
