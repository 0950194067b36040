"""A mixture: exact shares, each source in epochs of its own, the same on any number of hosts and
after any restart."""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data import batching, tokenizers
from jaxformer.data.mixing import Mixed, Mixture, count_before
from jaxformer.data.sources import Dataset, Text, Windows
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Numbered:
    """Example i of source k: tokens [k, i]."""

    source: int
    count: int
    width: int = 2
    tokenizer: Any = None

    def open(self, model):
        examples = [
            {
                "tokens": np.array([self.source, i, *[0] * (self.width - 2)], np.int32),
                "weights": np.ones(2, np.float32),
            }
            for i in range(self.count)
        ]
        validation = examples[: 1 + self.count // 10]
        return Dataset(
            examples,
            validation,
            f"{self.source} {self.count}",
            f"source {self.source}",
            tokenizer=self.tokenizer,
        )


def mixed(*shares, counts=(7, 100, 3)):
    sources = zip(shares, (Numbered(k, count) for k, count in enumerate(counts)), strict=False)
    return batching.open_dataset(Mixed(tuple(sources)), SimpleNamespace())


def rows(batches, steps):
    return np.concatenate([batches[step]["tokens"] for step in steps])


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6), st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_shares_hold_everywhere(shares, start):
    positions = start + np.arange(500)
    counts = count_before(positions, shares)
    np.testing.assert_array_equal(counts.sum(axis=0), positions)
    steps = np.diff(counts)
    assert set(np.unique(steps)) <= {0, 1}  # every place has one owner
    for share, count in zip(shares, counts, strict=True):
        exact = [share * int(position) / sum(shares) for position in positions]
        assert np.abs(count - exact).max() <= len(shares) + 1e-3


@pytest.mark.parametrize("shares", [(0.7, 0.3), (3, 1, 1), (1.0,), (0.001, 0.999)])
def test_a_run_has_the_shares(shares):
    found = rows(batching.batches(mixed(*shares).train, 10, seed=0), range(400))[:, 0]
    for source, share in enumerate(shares):
        assert abs((found == source).sum() - 4000 * share / sum(shares)) <= len(shares)


def test_each_source_goes_through_its_own_epochs():
    found = rows(batching.batches(mixed(0.5, 0.4, 0.1).train, 10, seed=1), range(100))
    for source, count in enumerate((7, 100, 3)):
        seen = found[found[:, 0] == source, 1]
        epochs = [seen[start : start + count] for start in range(0, len(seen) - count, count)]
        assert len(epochs) > 2
        for epoch in epochs:
            np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
        if count > 3:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize("step", [0, 1, 17, 99])
def test_any_step_is_a_function_of_seed_and_step(step):
    whole = batching.batches(mixed(0.7, 0.3).train, 6, seed=2)
    for earlier in range(step):
        whole[earlier]
    again = batching.batches(mixed(0.7, 0.3).train, 6, seed=2)[step]
    np.testing.assert_array_equal(whole[step]["tokens"], again["tokens"])
    other = batching.batches(mixed(0.7, 0.3).train, 6, seed=3)
    assert (rows(other, range(20)) != rows(whole, range(20))).any()


def test_hosts_together_hold_the_same_batch():
    split = mixed(0.7, 0.2, 0.1).train
    whole = batching.batches(split, 8, seed=5)
    parts = [batching.batches(split, 8, seed=5, rows=part) for part in np.split(np.arange(8), 4)]
    for step in (0, 1, 17, 10**9):
        for name, array in whole[step].items():
            np.testing.assert_array_equal(
                np.concatenate([part[step][name] for part in parts]), array
            )


@pytest.mark.thorough
def test_large_splits_are_shuffled_too():
    counts = (70_000, 80_000)
    split = mixed(1, 1, counts=counts).train
    found = rows(batching.batches(split, 500, seed=0), range(20))
    for source, count in enumerate(counts):
        seen = found[found[:, 0] == source, 1]
        assert len(np.unique(seen)) == len(seen) == 5_000 and seen.max() > count * 0.95


def test_validation_is_all_validations_in_order():
    dataset = mixed(0.9, 0.1)
    found = [example["tokens"].tolist() for example in dataset.validation]
    assert found == [[0, 0], *([1, i] for i in range(11))]
    batches = list(batching.ValidationBatches(dataset.validation, 5))
    np.testing.assert_array_equal(
        np.concatenate([batch["tokens"] for batch in batches])[:12], found
    )
    assert sum((batch["weights"] > 0).all(axis=1).sum() for batch in batches) == 12


def test_digest_follows_shares_and_sources():
    digests = {mixed(*shares).digest for shares in [(1, 1), (1, 2), (1, 1, 1), (2, 2, 1)]}
    assert len(digests) == 4 and mixed(1, 1).digest == mixed(2, 2).digest
    assert "66.7% source 0 + 33.3% source 1" in mixed(2, 1).description


def test_texts_are_mixed(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name * 1000)
    texts = tuple((share, Text(str(tmp_path / name))) for share, name in [(3, "a"), (1, "b")])
    dataset = batching.open_dataset(Mixed(texts), SimpleNamespace(context_length=8))
    batch = batching.batches(dataset.train, 8, 0)[0]
    assert sorted(batch["tokens"][:, 0].tolist()) == [97] * 6 + [98] * 2
    assert dataset.vocab_size == 256 and batching.unigram_entropy(dataset) is None


class Chooser(list):
    def batch_indices(self, seed, batch_size):
        return None


class Chosen:
    def open(self, model):
        return Dataset(Chooser(Numbered(0, 3).open(None).train), [], "d", "buckets")


REFUSED = {
    "none": ((), r"expected pairs \(finite share above 0, data\)"),
    "share": (
        ((0.5, Numbered(0, 3)), (0.0, Numbered(1, 3))),
        r"expected pairs \(finite share above 0, data\)",
    ),
    "infinite": (
        ((1, Numbered(0, 3)), (float("inf"), Numbered(1, 3))),
        r"expected pairs \(finite share above 0, data\)",
    ),
    "shapes": (
        ((1, Numbered(0, 3)), (1, Numbered(1, 3, width=4))),
        r"sources\[1\] gives tokens int32\[4\].* tokens int32\[2\]",
    ),
    "tokenizer": (
        ((1, Numbered(0, 3)), (1, Numbered(1, 3, tokenizer=tokenizers.Bytes()))),
        (
            r"sources\[1\] gives .*tokenizer [0-9a-f]+, but data.sources\[0\] .*tokenizer None; "
            r"all must be alike"
        ),
    ),
    "buckets": (((1, Chosen()),), r"sources\[0\] chooses its own batches \(buckets\)"),
    "empty": (((1, Numbered(0, 0)),), r"sources\[0\] has no training example"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mixed_is_refused_in_one_line(name):
    sources, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        Mixed(sources).open(SimpleNamespace())
    assert "\n" not in str(caught.value) and re.match("data.sources", str(caught.value))


def test_batches_of_a_mixture_mark_control_tokens():
    """All batches have the same arrays, also those in which no example is of a source with
    documents."""
    tokens = np.array([1, 2, 9, 3, 4, 9, 5, 6, 9], np.uint8)
    marked, plain = Windows(tokens, 2, 2, end_of_text=9), Windows(tokens, 2, 2)
    mixture = Mixture([marked, plain], [1, 1])
    nested = Mixture([plain, mixture], [1, 1])
    for split, rows, ends in (
        (mixture, [0, 1, 2], 2),
        (mixture, [4, 5], 0),
        (nested, [0, 1], 0),
        (nested, [4, 5, 6], 2),
    ):
        batch = batching.take_rows(split, np.array(rows))
        assert batch["control_tokens"].dtype == bool
        assert batch["control_tokens"].sum() == ends
