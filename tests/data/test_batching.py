"""Batches are a function of (seed, step) on any number of hosts; validation covers its split;
prefetch never hangs."""

import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data import batching
from jaxformer.data.batching import (
    BadBatch,
    Prefetch,
    ValidationBatches,
    _token_counts,
    batches,
    open_dataset,
    take_rows,
    unigram_entropy,
)
from jaxformer.data.sources import Dataset, Windows
from jaxformer.errors import ConfigError

LARGE = (1 << 16) + 37  # just beyond where an order is no table any more
WINDOW_COUNTS = [1, 3, 50, 1000, LARGE]


def split_of(count: int) -> Windows:
    return Windows(np.arange(count + 1, dtype=np.uint32), 1)  # window i is the token i


def numbers(batch) -> list[int]:
    return batch["tokens"][:, 0].tolist()


@pytest.mark.thorough_after(4)
@pytest.mark.parametrize("count", WINDOW_COUNTS)
def test_every_window_once_an_epoch_in_a_new_order(count):
    rows = 7 if count < LARGE else 701
    get = batches(split_of(count), rows, seed=3)
    steps = -(-2 * count // rows)
    seen = np.concatenate([numbers(get[step]) for step in range(steps)])
    first, second = seen[:count], seen[count : 2 * count]
    np.testing.assert_array_equal(np.sort(first), np.arange(count))
    np.testing.assert_array_equal(np.sort(second), np.arange(count))
    if count >= 50:
        assert (first != second).any() and (first != np.arange(count)).any()


@pytest.mark.parametrize("count", WINDOW_COUNTS)
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_hold_the_same_batch(count, hosts):
    split = split_of(count)
    whole = batches(split, 8, seed=5)
    parts = [batches(split, 8, seed=5, rows=rows) for rows in np.split(np.arange(8), hosts)]
    for step in (0, 1, 17, 10**9):
        for name, array in whole[step].items():
            np.testing.assert_array_equal(
                np.concatenate([part[step][name] for part in parts]), array
            )


@pytest.mark.parametrize("count", WINDOW_COUNTS)
def test_a_batch_does_not_depend_on_what_was_asked_before(count):
    steps = [5, 0, 9, 5, 1000, 2, 0]
    once = {step: numbers(batches(split_of(count), 4, seed=1)[step]) for step in steps}
    get = batches(split_of(count), 4, seed=1)
    assert [numbers(get[step]) for step in steps] == [once[step] for step in steps]


@pytest.mark.parametrize("count", [1000, LARGE])
def test_neighbouring_seeds_share_no_epoch(count):
    """An order of seed + epoch alone would make seed 0's second epoch seed 1's first."""
    second = batches(split_of(count), count, seed=0)[1]
    first = batches(split_of(count), count, seed=1)[0]
    assert numbers(second) != numbers(first)


def test_batch_is_the_stack_of_its_examples():
    split = Windows(np.random.default_rng(0).integers(0, 99, 500).astype(np.uint8), 16)
    as_list = [split[i] for i in range(len(split))]  # a split may be anything with len and [i]
    for step in range(3):
        fast, slow = batches(split, 6, seed=0)[step], batches(as_list, 6, seed=0)[step]
        assert fast.keys() == slow.keys()
        for name in fast:
            np.testing.assert_array_equal(fast[name], slow[name])
            assert fast[name].dtype == slow[name].dtype and fast[name].flags.c_contiguous


class Chooser(list):
    """A split that chooses its own batches: step s has the examples s, s + 1, ..."""

    def batch_indices(self, seed, batch_size):
        class Chosen:
            def __getitem__(_, step):
                return (seed + step + np.arange(batch_size)) % len(self)

        return Chosen()


@pytest.mark.parametrize("hosts", [1, 4])
def test_a_split_may_choose_its_own_batches(hosts):
    split = Chooser({"tokens": np.full(3, i)} for i in range(11))
    parts = [batches(split, 8, seed=2, rows=rows) for rows in np.split(np.arange(8), hosts)]
    for step in (0, 5, 10**9):
        found = np.concatenate([part[step]["tokens"] for part in parts])
        np.testing.assert_array_equal(found[:, 0], (2 + step + np.arange(8)) % 11)


def test_an_empty_split_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        batches([], 4, seed=0)


@pytest.mark.thorough
@given(count=st.integers(1, 60), length=st.integers(1, 9), batch_size=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_validation_covers_the_split_once_in_order(count, length, batch_size):
    tokens = np.arange(count + 1, dtype=np.uint8)
    split = Windows(tokens, length, stride=length)
    rows = list(ValidationBatches(split, batch_size))
    assert len(rows) == len(ValidationBatches(split, batch_size)) == -(-len(split) // batch_size)
    assert all(array.shape == (batch_size, length) for row in rows for array in row.values())
    labels = np.concatenate([row["labels"][row["weights"] > 0] for row in rows])
    np.testing.assert_array_equal(labels, tokens[1:])
    assert rows[-1]["weights"].dtype == np.float32


@given(
    count=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    shape=st.sampled_from([(), (3,), (2, 3)]),
)
@settings(max_examples=50, deadline=None)
def test_validation_fills_up_weights_of_any_rank(count, batch_size, shape):
    """Images have one weight an example: [B], which times [B, 1] was [B, B]."""
    rng = np.random.default_rng(count)
    weights = rng.uniform(0.5, 1, (count, *shape)).astype(np.float32)
    split = [
        {"image": np.full((2, 2, 3), i), "labels": np.int32(i), "weights": weights[i]}
        for i in range(count)
    ]
    rows = list(ValidationBatches(split, batch_size))
    assert all(row["weights"].shape == (batch_size, *shape) for row in rows)
    found = np.concatenate([row["weights"] for row in rows])
    np.testing.assert_array_equal(found[:count], weights)
    assert not found[count:].any() and found.dtype == np.float32


def test_unigram_entropy_is_the_formula():
    rng = np.random.default_rng(0)
    train, validation = rng.integers(0, 5, 4000), rng.integers(0, 3, 700)
    parts = Windows(train.astype(np.uint8), 8), Windows(validation.astype(np.uint8), 8, stride=8)
    # id 5 never occurs: smoothed, not infinite
    p = np.array([(train[1:] == v).sum() + 1 for v in range(6)]) / (3999 + 6)
    expected = -np.mean([np.log(p[v]) for v in validation[1:]])
    # float64 sums in another order
    assert unigram_entropy(
        Dataset(*parts, vocab_size=6, digest="", description="")
    ) == pytest.approx(expected, rel=1e-12)


def test_unigrams_of_many_tokens_are_counted_in_evenly_spaced_pieces():
    # 10,000 pieces of 10 tokens, of which 64 are counted
    tokens = np.repeat(np.arange(100, dtype=np.uint8), 1000)
    counts = _token_counts(tokens, 100, piece=10)
    assert counts.sum() == 10 * 64 and counts.max() <= 10
    np.testing.assert_array_equal(_token_counts(tokens, 100, piece=2000), [999, *[1000] * 99])


def test_data_without_a_text_have_no_unigram_entropy():
    split = [{"tokens": np.arange(3), "weights": np.ones(3)}]
    assert unigram_entropy(Dataset(split, split, "d", vocab_size=6)) is None


def test_own_dataset_is_opened_and_others_are_refused():
    class Mine:
        def open(self, model):
            return Dataset([], [], "d", vocab_size=model)

    assert open_dataset(Mine(), 12).vocab_size == 12


def test_what_is_no_data_set_is_refused():
    class Mine:
        def open(self, model):
            return {}

    with pytest.raises(
        ConfigError,
        match=re.escape("Mine.open returned a dict; return a jaxformer.data.sources.Dataset"),
    ):
        open_dataset(Mine(), None)


class Broken(Windows):
    """A split of which example 6 cannot be read."""

    error = KeyError("text")

    def take_rows(self, indices):
        if 6 in indices:
            raise self.error
        return super().take_rows(indices)


class BrokenOneByOne(list):
    def __getitem__(self, index):
        if index == 6:
            raise Broken.error
        return {"tokens": np.full(3, index)}


@pytest.mark.parametrize(
    "split", [Broken(np.arange(12), 1), BrokenOneByOne(range(11))], ids=["at once", "one by one"]
)
def test_an_error_names_the_example(split):
    with pytest.raises(BadBatch, match=r"^example 6: KeyError: 'text'$") as caught:
        batches(split, 11, seed=0)[0]
    assert caught.value.__cause__ is Broken.error
    with pytest.raises(
        BadBatch, match=r"^the batch of step 0 could not be made: example 6: KeyError: 'text'$"
    ) as caught:
        list(Prefetch(batches(split, 11, seed=0).__getitem__, 0, 3))
    assert caught.value.__cause__.__cause__ is Broken.error


def test_examples_that_do_not_fit_together_are_all_named():
    split = [{"tokens": np.zeros(length)} for length in (3, 3, 4)]
    with pytest.raises(
        BadBatch,
        match=r"^examples \[2, 0, 1\]: ValueError: all input arrays must have the same shape",
    ):
        take_rows(split, np.array([2, 0, 1]))


def test_a_mistake_of_the_user_stays_one_line(monkeypatch):
    monkeypatch.setattr(Broken, "error", ConfigError("shard-3.bin: damaged"))
    with pytest.raises(
        ConfigError,
        match=r"^the batch of step 0 could not be made: example 6: shard-3\.bin: damaged$",
    ):
        list(Prefetch(batches(Broken(np.arange(12), 1), 11, seed=0).__getitem__, 0, 3))


class Endless:
    """A split that says it never ends."""

    def __len__(self):
        return sys.maxsize

    def __getitem__(self, index):
        return {"tokens": np.full(3, index % 7)}


def test_a_split_of_any_length_is_shuffled():
    indices = batching.shuffled(np.arange(1000), sys.maxsize, seed=0)
    assert (
        len(np.unique(indices)) == 1000 and indices.min() >= 0 and indices.max() > sys.maxsize // 2
    )
    assert batches(Endless(), 2, 0)[3]["tokens"].shape == (2, 3)


# --- prefetch


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "prefetch" in thread.name]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_yields_everything_in_order(depth):
    assert list(Prefetch(lambda step: step * 10, 3, 9, depth=depth, put=str)) == [
        "30",
        "40",
        "50",
        "60",
        "70",
        "80",
    ]
    assert list(Prefetch(lambda step: step, 3, 3, depth=depth)) == []
    assert list(Prefetch(lambda step: None, 0, 2, depth=depth)) == [None, None]


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_runs_ahead_by_depth_and_no_further(depth):
    made = []
    with Prefetch(lambda step: made.append(step) or step, 0, 100, depth=depth) as steps:
        deadline = time.monotonic() + 10
        # it begins before anything is asked for
        while len(made) < depth + 1 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert made == list(range(depth + 1))  # `depth` waiting and one in hand
        assert next(steps) == 0


@pytest.mark.parametrize("where", ["get", "put"])
def test_prefetch_raises_with_the_step_after_the_good_batches(where):
    def fail_at_7(step):
        if step == 7:
            raise ZeroDivisionError("by zero")
        return step

    calls = {"get": fail_at_7} if where == "get" else {"get": lambda step: step, "put": fail_at_7}
    steps, seen = Prefetch(start=5, stop=100, **calls), []
    with pytest.raises(RuntimeError, match=r"step 7 .*ZeroDivisionError: by zero") as caught:
        for step in steps:
            seen.append(step)
    assert seen == [5, 6] and isinstance(caught.value.__cause__, ZeroDivisionError)
    assert next(steps, "ended") == "ended"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_prefetch_left_early_leaves_no_thread(depth, taken, leave):
    for _ in range(20):  # the thread may be anywhere when it is stopped
        steps = Prefetch(lambda step: step, 0, 5, depth=depth)
        for _ in range(taken):
            next(steps)
        if leave == "close":
            steps.close()
            steps.close()
            assert next(steps, "ended") == "ended"
        elif leave == "with":
            with pytest.raises(KeyError), steps:
                raise KeyError
        else:
            del steps
        assert not prefetch_threads()


def test_prefetch_waits_for_a_slow_producer_and_stops_in_the_middle_of_one():
    def slow(step):
        time.sleep(0.1)
        return step

    assert list(Prefetch(slow, 0, 3)) == [0, 1, 2]
    steps = Prefetch(slow, 0, 10**6)
    next(steps)
    steps.close()


@pytest.mark.thorough
def test_program_ends_though_a_prefetch_is_open():
    code = (
        "from jaxformer.data.batching import Prefetch\n"
        "kept = Prefetch(lambda step: step, 0, 10**9)\nprint(next(kept))\n"
        "blocked = Prefetch(lambda step: __import__('time').sleep(0.2), 0, 10**9)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")
