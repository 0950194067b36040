"""What a question alone tells: the baseline of models that answer questions about something."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

Q = TypeVar("Q", bound=Hashable)  # a question
A = TypeVar("A", bound=Hashable)  # an answer


def most_frequent(pairs: Iterable[tuple[Q, A]]) -> dict[Q, A]:
    """The most frequent answer to each question, of (question, answer) pairs.

    A model that is no better than these answers does not see what it is asked about: Goyal et al.
    2017, arXiv:1612.00837, section 5. Of answers that are as frequent, the first one counts.
    """
    counts: dict[Q, Counter[A]] = defaultdict(Counter)
    for question, answer in pairs:
        counts[question][answer] += 1
    return {question: of.most_common(1)[0][0] for question, of in counts.items()}
