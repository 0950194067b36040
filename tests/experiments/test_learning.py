"""Written steps, learning in context and a second task: what their data hold, and that they
train."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments import continual, few_shot, in_context_regression, scratchpad
from jaxformer import cli
from jaxformer.data.batching import take_rows
from jaxformer.params import random_key

TINY = "--model.num-layers=1 --model.d-model=16 --model.num-heads=2"
OPTIONS = {
    "scratchpad": f"{TINY} --data.examples=200 --data.validation-examples=6",
    "few_shot": f"{TINY} --data.examples=200 --data.validation-examples=20",
    "in_context_regression": TINY,
    "continual": "--initial=None --data.replay=0.1 --data.validation-examples=4",
}


def questions(split):
    """The text and the answer of each pair of a split of sums."""
    tokenizer = scratchpad.Addition().open(scratchpad.experiment.model).tokenizer
    return [(tokenizer.decode(each.prompt[:-1]), each.reference) for each in split.questions]


def test_written_steps_are_right_and_end_in_the_sum():
    rng = np.random.default_rng(0)
    for a, b in rng.integers(10**6, size=(200, 2)).tolist():
        left, right = f"{a:06d}", f"{b:06d}"
        *steps, found = scratchpad.with_steps(left, right).split(",")
        assert int(found) == a + b and found == scratchpad.direct(left, right)
        carry = 0
        for place, step in enumerate(steps):
            digits, total = step.split("=")
            x, y, z = map(int, digits)
            assert (x, y) == (a // 10**place % 10, b // 10**place % 10)
            assert z == carry and int(total) == x + y + z
            carry = int(total) // 10
        assert len(steps) == 6


@pytest.mark.thorough
@pytest.mark.parametrize("answer", [scratchpad.with_steps, scratchpad.direct])
def test_no_sum_of_validation_is_in_training(answer):
    data = scratchpad.Addition(answer, examples=3000, validation_examples=300)
    dataset = data.open(scratchpad.experiment.model)
    train, validation = (questions(split) for split in (dataset.train, dataset.validation))
    assert (len(train), len(validation)) == (3000, 300)
    orders = lambda text: {text, "+".join(reversed(text.split("+")))}
    asked = set().union(*(orders(text) for text, _ in validation))
    assert not asked & {text for text, _ in train}
    for split in (train, validation):
        sizes = [max(len(str(int(number))) for number in text.split("+")) for text, _ in split]
        # the metric reads the validation split in this order
        assert sizes == sorted(sizes)
        assert np.bincount(sizes).tolist() == [0, *[len(split) // 6] * 6]
        assert all(target == answer(*text.split("+")) for text, target in split)


def test_sums_are_counted_by_their_digits():
    texts = ["970=16,86", "1", "2", "3", "4", "5", "6"]
    scores = scratchpad.exact_by_digits([*texts[:1] * 2, *texts[2:]], ["86", "87", *texts[2:]])
    # np.array_split gives the first part one more of seven
    assert scores == {"exact_1": 50.0, **{f"exact_{i}": 100.0 for i in range(2, 7)}}


def test_a_sequence_has_one_mapping_and_the_perfect_learner_counts_keys():
    split = few_shot.Mappings(examples=300).open(few_shot.experiment.model).train
    batch = split.take_rows(np.arange(300))
    for tokens, labels, weights in zip(
        batch["tokens"], batch["labels"], batch["weights"], strict=True
    ):
        keys, values = tokens[::2], labels[::2]
        mapping = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [mapping[key] for key in keys.tolist()] == values.tolist()  # the same value again
        assert len(set(mapping.values())) == len(mapping)  # one to one
        assert (
            (keys < 16).all()
            and (values >= 16).all()
            and len(mapping) <= 4
            and (tokens[1::2] == values[:-1]).all()
        )
        assert weights.tolist() == [1, 0] * 16 + [1]
    # a learner that remembers, and else takes the first unseen value, is as often right
    right = np.zeros(few_shot.PAIRS)
    for row in split.pairs.tolist():
        seen: dict[int, int] = {}
        for i, (key, value) in enumerate(row):
            unseen = [guess for guess in range(16, 32) if guess not in seen.values()]
            right[i] += seen.get(key, unseen[0]) == value
            seen[key] = value
    expected = few_shot.perfect_accuracy(split.pairs[..., 0])
    # four standard errors of a share of 300
    np.testing.assert_allclose(right / 300, expected, atol=4 * 0.5 / 300**0.5)
    assert expected[0] == 1 / 16 and np.isclose(expected[1], 1 / 4 + 3 / 4 / 15)


@pytest.mark.thorough
def test_the_values_of_a_regression_are_those_of_one_linear_function():
    batch = jax.device_get(in_context_regression.draw(jax.random.key(3), 2000))
    x, y, values, sequence = (batch[name] for name in ("x", "y", "values", "sequence"))
    w = np.stack([np.linalg.lstsq(a, b)[0] for a, b in zip(x, values, strict=True)])
    np.testing.assert_allclose(np.einsum("bpd,bd->bp", x, w), values, atol=1e-3)  # float32
    assert abs(w.var() - 1) < 0.1 and abs((y - values).var() - 0.25) < 0.02
    assert (sequence[:, ::2, :4] == x).all() and (sequence[:, ::2, 4] == 0).all()
    assert (sequence[:, 1::2, 4] == y[:, :-1]).all() and (sequence[:, 1::2, :4] == x[:, :-1]).all()


@pytest.mark.thorough
def test_the_two_regressions_are_those_of_a_solver():
    batch = jax.device_get(in_context_regression.draw(jax.random.key(4), 50))
    least, ridge = (in_context_regression.regress(batch, weight) for weight in (0.0, 0.25))
    for i in range(50):
        x, y = batch["x"][i].astype(np.float64), batch["y"][i].astype(np.float64)
        for k in range(9):
            w = np.linalg.lstsq(x[:k], y[:k])[0]
            np.testing.assert_allclose(least[k, i], w @ x[k], rtol=1e-5, atol=1e-5)
            # ridge regression is least squares with d more points
            more = np.concatenate([x[:k], 0.5 * np.eye(4)])
            w = np.linalg.lstsq(more, np.concatenate([y[:k], np.zeros(4)]))[0]
            np.testing.assert_allclose(ridge[k, i], w @ x[k], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_functions_of_training_are_new_at_every_step_and_none_of_validation():
    dataset = in_context_regression.experiment.data.open(in_context_regression.experiment.model)
    batches = [dataset.train(None, random_key(i), 0, batch_size=16) for i in (0, 1, 0)]
    first, second, again = (np.asarray(batch["y"]) for batch in batches)
    assert (first == again).all() and not np.isin(first, second).any()
    unseen = take_rows(dataset.validation, np.arange(in_context_regression.UNSEEN))["y"]
    assert not np.isin(first[:, 0], unseen[:, 0]).any()


@pytest.mark.thorough
def test_numerals_are_right_and_replayed_dates_have_their_share():
    worth = dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)
    for number in range(1, 4000):
        letters = [worth[letter] for letter in continual.roman(number)]
        # a smaller letter before a larger one is subtracted
        signs = [-1 if a < b else 1 for a, b in zip(letters, [*letters[1:], 0], strict=True)]
        assert np.dot(letters, signs) == number
    model = continual.experiment.model
    without, replayed = (replace(continual.Numerals(), replay=share) for share in (0.0, 0.1))
    texts = [
        [each.reference for each in data.open(model).train.questions]
        for data in (without, replayed)
    ]
    assert len(texts[0]) == 3699 and not any("-" in text for text in texts[0])
    share = np.mean(["-" in text for text in texts[1]])
    assert abs(share - 0.1) < 1e-3 and texts[1][:3699] == texts[0]
    asked = {each.reference for each in replayed.open(model).validation.questions}
    assert len(asked) == 300 and not asked & set(texts[1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
def test_two_steps_of_training(name, tmp_path):
    options = "--steps=2 --batch-size=4 --schedule.warmup=1 --log-every=1 " + OPTIONS[name]
    assert cli.main(["train", name, "--runs", str(tmp_path), *options.split()]) == 0
    (run,) = tmp_path.glob(f"{name}-*")
    scores = json.loads((run / "result.json").read_text())["validation"]
    wanted = {
        "scratchpad": "exact_6",
        "few_shot": "perfect_16",
        "in_context_regression": "ridge",
        "continual": "numerals",
    }
    assert wanted[name] in scores
    pictures = {"few_shot": ["accuracy.png"], "in_context_regression": ["errors.png"]}
    assert all((run / picture).exists() for picture in pictures.get(name, []))
