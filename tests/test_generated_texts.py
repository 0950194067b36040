"""The data that experiments generate: answers are right when found in another way, lengths give
nothing away."""

import datetime
import statistics

import numpy as np
import pytest

from experiments import bert_pretrain, dates, listops, question_answering
from jaxformer.models import ModelConfig


def worth(tokens):
    """The value of an expression, read from its end by a stack."""
    stack = []
    for token in reversed(tokens):
        if 10 <= token < listops.END:
            values = []
            while stack[-1] != "]":
                values.append(stack.pop())
            stack[-1] = (min, max, lambda x: int(statistics.median(x)), lambda x: sum(x) % 10)[
                token - 10
            ](values)
        else:
            stack.append("]" if token == listops.END else token)
    (found,) = stack
    return found


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("shortest", "longest", "depth", "args"), [(4, 32, 3, 5), (200, 400, 10, 10)]
)
def test_expressions_are_worth_what_their_labels_say(shortest, longest, depth, args):
    config = listops.ListOps(shortest, longest, depth, args, examples=40)
    split = config.open(ModelConfig(15, 1, 8, 1, context_length=longest)).train
    seen = set()
    for i in range(len(split)):
        row = split[i]
        tokens = row["tokens"][: row["segment_ids"].sum()].tolist()
        assert shortest <= len(tokens) <= longest and row["labels"] == worth(tokens)
        assert (
            tokens[0] >= 10 and tokens[-1] == listops.END and not row["tokens"][len(tokens) :].any()
        )
        seen |= set(tokens)
    assert seen == set(range(15))
    again = config.open(ModelConfig(15, 1, 8, 1, context_length=longest)).train[7]["tokens"]
    np.testing.assert_array_equal(again, split[7]["tokens"])


def test_medians_are_rounded_down():
    assert (
        listops.value("MED", [4, 7]) == 5
        and listops.value("MED", [9, 1, 4]) == 4
        and listops.value("SM", [9, 9, 3]) == 1
    )


def test_answers_are_where_the_labels_say():
    dataset = question_answering.Passages().open(question_answering.experiment.model)
    for i in range(300):
        row = dataset.train[i]
        words = [
            question_answering.WORDS[token] for token in row["tokens"][: row["segment_ids"].sum()]
        ]
        question, passage = words[1 : words.index("[SEP]")], words[words.index("[SEP]") + 1 :]
        sentences = " ".join(passage).split(" . ")
        about = question[-3] if question[0] == "How" else question[2]  # the thing, or the person
        (sentence,) = [each for each in sentences if about in each.split()]
        answer = words[row["labels"][0] : row["labels"][1] + 1]
        assert (
            row["passage"][row["labels"][0] : row["labels"][1] + 1].all()
            and " ".join(answer) in sentence
        )
        match question[0]:
            case "How":
                assert (
                    all(word.isdigit() for word in answer)
                    and " ".join(["holds", *answer, "coins"]) in sentence
                )
            case "Where":
                assert (
                    answer[-1] in question_answering.PLACES
                    and answer[-1] == sentence.rstrip(" .").split()[-1]
                )
            case "What":
                assert answer[-1] in question_answering.THINGS


def test_a_day_has_six_names():
    day = datetime.date(1984, 5, 21)
    assert [dates.phrase(day, form) for form in range(6)] == [
        "the twenty-first of may, nineteen eighty-four",
        "may the twenty-first, nineteen eighty-four",
        "may 21, 1984",
        "21 may 1984",
        "twenty-one may nineteen eighty-four",
        "21. 5. nineteen eighty-four",
    ]
    ordinals = {
        3: "third",
        12: "twelfth",
        20: "twentieth",
        30: "thirtieth",
        31: "thirty-first",
        8: "eighth",
        14: "fourteenth",
    }
    assert {number: dates.ordinal(number) for number in ordinals} == ordinals
    years = {
        1905: "nineteen oh five",
        2000: "two thousand",
        2007: "two thousand and seven",
        1300: "thirteen hundred",
    }
    assert {number: dates.year(number) for number in years} == years
    names = {dates.year(number) for number in range(1100, 2100)}
    assert len(names) == 1000


@pytest.mark.thorough
def test_pairs_of_sentences_have_the_same_lengths_whether_one_follows_or_not():
    rng, vocabulary = np.random.default_rng(0), [f"word{i}" for i in range(50)]
    texts = [" ".join(rng.choice(vocabulary, int(rng.integers(60, 150)))) for _ in range(200)]

    class Numbers:
        def encode(self, word):
            return [int(word.removeprefix(" word"))]  # one token a word

    pairs = bert_pretrain.Pairs(
        bert_pretrain.Docstrings(words=30, least=24), Numbers(), texts, 0, 100
    )
    rows = [pairs[i] for i in range(len(pairs))]
    follows = np.array([row["labels"] for row in rows])
    seconds = np.array([row["token_types"].sum() - 1 for row in rows])
    assert abs(follows.mean() - 0.5) < 5 * 0.5 / len(rows) ** 0.5  # five standard deviations
    means = [seconds[follows == label].mean() for label in (0, 1)]
    assert abs(means[0] - means[1]) < 5 * seconds.std() * 2 / len(rows) ** 0.5
    assert seconds.min() == 24 and seconds.max() == 30
    for row in rows[:200]:
        end = row["segment_ids"].sum()
        special = np.flatnonzero(row["tokens"] > bert_pretrain.MASK)
        assert special.tolist() == [0, end - 2 - row["token_types"].sum() + 1, end - 1]
        assert not row["weights"][special].any() and row["weights"].sum() == end - 3
