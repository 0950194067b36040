"""Regular expressions over names: find the alternatives that match no name."""

import functools
import logging
import re
from collections.abc import Sequence
from itertools import pairwise

_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")  # [a-z], [^)], []|]
# the beginning of a group that neither looks ahead nor behind
_PLAIN = re.compile(r"\((?:\?(?:P<\w+>|[a-zA-Z-]*:)|(?!\?))")
_NAME = re.compile(r"\w\w")


@functools.cache
def warn_of_idle(option: str, pattern: str, names: tuple[str, ...]) -> None:
    """Logs once, in one line, the alternatives of an option's pattern that match no name."""
    if idle := idle_alternatives(pattern, names):
        problem = f"{option}: {', '.join(idle)} of {pattern!r} matches nothing"
        advice = f"correct it or leave it out; there are {', '.join(names)}"
        logging.getLogger("jaxformer").warning("%s; %s", problem, advice)


def idle_alternatives(pattern: str, names: Sequence[str]) -> list[str]:
    """The alternatives in a pattern that match no name: perhaps `valu` in `(query|valu)/`.

    Alternatives without a word in them are left out, such as both of `(^|/)`.
    """
    return _idle("", pattern, "", names)


def _idle(prefix: str, section: str, suffix: str, names: Sequence[str]) -> list[str]:
    """`idle_alternatives` of `section`, which is the whole pattern or a group of it.

    The whole pattern is `prefix + section + suffix`.
    """
    bars, groups = _bars_and_groups(section)
    idle = []
    for left, right in pairwise([-1, *bars, len(section)]):
        alternative = section[left + 1 : right]
        if (
            bars
            and _NAME.search(alternative)
            and not _matches(prefix + alternative + suffix, names)
        ):
            idle.append(alternative)
            continue
        for begin, end in groups:
            if left < begin and end <= right:
                before = prefix + section[left + 1 : begin]
                after = section[end:right] + suffix
                idle += _idle(before, section[begin:end], after, names)
    return idle


def _matches(pattern: str, names: Sequence[str]) -> bool:
    try:
        compiled = re.compile(pattern)
    except re.error:  # it refers to a group of another alternative; so assume a match
        return True
    return any(map(compiled.search, names))


def _bars_and_groups(pattern: str) -> tuple[list[int], list[tuple[int, int]]]:
    """(positions of the bars outside of all groups, (begin, end) inside each outermost group)."""
    bars = []
    groups = []
    opened: list[int] = []  # the position of each open group; -1 for one that looks ahead or behind
    position = 0
    while position < len(pattern):
        letter = pattern[position]
        length = 1
        if letter == "\\":
            length = 2
        elif match := _CLASS.match(pattern, position):
            length = len(match[0])
        elif letter == "(":
            match = _PLAIN.match(pattern, position)
            length = len(match[0]) if match else 1
            opened.append(position + length if match else -1)
        elif letter == ")" and opened:
            begin = opened.pop()
            if begin >= 0 and not opened:
                groups.append((begin, position))
        elif letter == "|" and not opened:
            bars.append(position)
        position += length
    return bars, groups
