"""Shuffling, epochs, batches and mixtures: what users of levanter, torchtitan, datasets and PyTorch
reported."""

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jaxformer.data import mixing
from jaxformer.data.batching import ValidationBatches, batches, scattered, shuffled
from jaxformer.data.sources import Dataset
from jaxformer.errors import ConfigError


class Numbers:
    """Examples that are their own numbers."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def take_rows(self, indices):
        return {
            "number": np.asarray(indices) + self.first,
            "weights": np.ones(len(indices), np.float32),
        }

    def __getitem__(self, index):
        return {name: rows[0] for name, rows in self.take_rows(np.array([index])).items()}


class Source:
    """Data with so many training examples."""

    def __init__(self, length, first=0):
        self.split = Numbers(length, first)

    def open(self, model):
        return Dataset(self.split, self.split, digest=f"{self.split.length}")


def seen(split, steps, batch_size=8, seed=0):
    get = batches(split, batch_size, seed)
    return np.concatenate([get[step]["number"] for step in steps])


@pytest.mark.report(
    "marin-community/marin#1800",
    "marin-community/levanter#932",
    right=(
        "A shuffle of many examples is a permutation, in which places near each other are not "
        "correlated."
    ),
    hit=(
        "Of 65,537 examples some came twice an epoch, and every second index was correlated with "
        "-0.38."
    ),
)
@pytest.mark.parametrize("n", [(1 << 16) + 1, 1 << 17, 99_991])
def test_a_large_shuffle_is_a_permutation_without_correlation(n):
    epochs = [shuffled(np.arange(n) + epoch * n, n, seed=3) for epoch in range(2)]
    assert all((np.sort(epoch) == np.arange(n)).all() for epoch in epochs)

    def correlation(a, b):
        # in standard deviations of independent ones
        return abs(np.corrcoef(a, b)[0, 1]) * len(a) ** 0.5

    assert correlation(*epochs) < 5
    for lag in (1, 2, 3, 256):
        assert correlation(epochs[0][lag:], epochs[0][:-lag]) < 5
    assert correlation(epochs[0], np.arange(n)) < 5


@pytest.mark.report(
    "Bears-R-Us/arkouda#4789",
    right="A Feistel network permutes any length, also one that is no square of a power of two.",
)  # fmt: skip
@given(st.integers(1, 700), st.integers(0, 2**70))
@settings(max_examples=60, deadline=None)
def test_any_length_is_permuted(n, seed):
    assert sorted(scattered(np.arange(n), n, (seed, 1))) == list(range(n))


@pytest.mark.report(
    "pytorch/torchtitan#3023", "dbiir/UER-py#240",
    right="Each epoch has another order of all examples.",
)  # fmt: skip
@pytest.mark.parametrize("n", [40, (1 << 16) + 8])
def test_epochs_have_other_orders(n):
    first, second = (seen(Numbers(n), range(start // 8, start // 8 + 5)) for start in (0, n))
    assert (first != second).any()


@pytest.mark.report(
    "ByteDance-Seed/VeOmni#1075",
    right="An order follows from the seed and the epoch; neither stands for the other.",
)  # fmt: skip
@pytest.mark.parametrize("n", [40, (1 << 16) + 8])
def test_seed_and_epoch_both_decide(n):
    orders = {
        tuple(shuffled(np.arange(20) + epoch * n, n, seed))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


@pytest.mark.report(
    "huggingface/datasets#7901",
    "mosaicml/composer#3453",
    "lightseekorg/TorchSpec#43",
    right=(
        "A resumed run takes the batches that the undisturbed one takes: none twice, none left out."
    ),
)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_a_batch_is_a_function_of_seed_and_step(n, batch_size, start):
    split = mixing.Mixture([Numbers(n), Numbers(7, 100)], [3, 1])
    through = seen(split, range(start + 3), batch_size)
    resumed = seen(split, range(start, start + 3), batch_size)
    assert through[start * batch_size :].tolist() == resumed.tolist()


@pytest.mark.report(
    "pytorch/pytorch#25162", "roboflow/rf-detr#1507", "mosaicml/composer#2218",
    right="What fills the last validation batch has weight 0, on every number of hosts.",
)  # fmt: skip
@given(st.integers(1, 40), st.sampled_from([2, 4, 6, 8]), st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_each_validation_example_counts_once(n, batch_size, hosts):
    counts = np.zeros(n)
    for rows in np.split(np.arange(batch_size), hosts):
        for batch in ValidationBatches(Numbers(n), batch_size, rows):
            np.add.at(counts, batch["number"], batch["weights"])
    assert (counts == 1).all()


@pytest.mark.report(
    "NKI-AI/direct#50",
    right="The last validation example is in a batch, whatever the batch size.",
)  # fmt: skip
@pytest.mark.parametrize("batch_size", [1, 3, 5, 10, 11, 64])
def test_the_last_validation_example_is_not_dropped(batch_size):
    found = list(ValidationBatches(Numbers(10), batch_size))
    assert found[-1]["number"][found[-1]["weights"] > 0][-1] == 9
    assert all(len(batch["number"]) == batch_size for batch in found)


@pytest.mark.report(
    "huggingface/datasets#8626",
    right="A source of a mixture that has no example is refused by its number.",
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_source_is_refused(place):
    sources = [Source(4), Source(4)]
    sources[place] = Source(0)
    with pytest.raises(ConfigError, match=rf"sources\[{place}\] has no training example"):
        mixing.Mixed(tuple((1, source) for source in sources)).open(None)


@pytest.mark.report(
    "huggingface/datasets#7157",
    right="A share of 0 is refused: such a source would never be read.",
)  # fmt: skip
@pytest.mark.parametrize("share", [0, 0.0, -1, float("nan"), float("inf")])
def test_a_share_of_nothing_is_refused(share):
    with pytest.raises(ConfigError, match="share above 0"):
        mixing.Mixed(((1, Source(4)), (share, Source(4)))).open(None)


@pytest.mark.report(
    "huggingface/datasets#7786", "huggingface/datasets#7955",
    right="A source gives each of its examples once before it gives one again.",
)  # fmt: skip
def test_each_source_goes_through_epochs_of_its_own():
    split = mixing.Mixed(((5, Source(6)), (3, Source(4, 100)))).open(None).train
    found = seen(split, range(30))
    for numbers, length in ((found[found < 100], 6), (found[found >= 100], 4)):
        epochs = numbers[: len(numbers) // length * length].reshape(-1, length)
        assert len(epochs) > 10
        assert all(len(set(epoch)) == length for epoch in epochs)


@pytest.mark.report(
    "NVIDIA/Megatron-LM#705",
    listed="third 21",
    right=(
        "Any shares and sizes: a source gives its share, in whole epochs, and no index is outside."
    ),
)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([1e-3, 0.2, 1, 3, 1e6])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**32 - 1),
)
@example([(50, 1e6), (50, 1)], 0)
@example([(3, 0.999), (60, 0.001)], 0)
@example([(40, 1), (40, 1)], 0)
@settings(max_examples=15, deadline=None)
def test_shares_and_epochs_of_any_mixture(sources, seed):
    firsts = [1000 * number for number in range(len(sources))]
    pairs = [
        (share, Source(size, first)) for (size, share), first in zip(sources, firsts, strict=True)
    ]
    found = seen(mixing.Mixed(tuple(pairs)).open(None).train, range(40), seed=seed)
    total, orders = sum(share for _, share in sources), []
    for (size, share), first in zip(sources, firsts, strict=True):
        own = found[found // 1000 == first // 1000] - first
        assert abs(len(own) - len(found) * share / total) <= len(sources)
        whole = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(whole, axis=1) == np.arange(size)).all()
        assert len(set(own[whole.size :])) == len(own) - whole.size
        orders.append(own[:20].tolist() if size > 20 else None)
    long = [order for order in orders if order and len(order) == 20]
    assert len(set(map(tuple, long))) == len(long), "one source twice has one order"


@pytest.mark.report(
    "fe1ixxu/ALMA#63",
    "huggingface/datasets#4831",
    right=(
        "Shares hold in every batch, whatever the sizes of the sources: a small one is not read "
        "more than that."
    ),
)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 500))
@settings(max_examples=30, deadline=None)
def test_shares_do_not_follow_sizes(first, second, size):
    split = mixing.Mixed(((first, Source(3)), (second, Source(size, 1000)))).open(None).train
    found = seen(split, range(10), batch_size=10)
    expected = 100 * first / (first + second)
    assert abs((found < 1000).sum() - expected) <= 2
