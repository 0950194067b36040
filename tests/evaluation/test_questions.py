"""The baseline of the question alone."""

from jaxformer.evaluation.questions import most_frequent


def test_the_most_frequent_answer_to_each_question():
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "3"), ("b", "1")]
    assert most_frequent(pairs) == {"a": "3", "b": "2"}
    assert most_frequent(iter([])) == {}
