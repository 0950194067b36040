"""Regular expressions over names: which of their parts match nothing."""

import functools
import logging
import re
from collections.abc import Sequence
from itertools import pairwise

_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")  # [a-z], [^)], []|]
# the beginning of a group, but not of one that looks ahead or behind
_PLAIN = re.compile(r"\((?:\?(?:P<\w+>|[a-zA-Z-]*:)|(?!\?))")
_NAME = re.compile(r"\w\w")


@functools.cache
def warn_of_idle(option: str, pattern: str, names: tuple[str, ...]) -> None:
    """Says once, in one line, which alternatives of an option's pattern match none of the names."""
    if idle := idle_alternatives(pattern, names):
        problem = f"{option}: {', '.join(idle)} of {pattern!r} matches nothing"
        advice = f"correct it or leave it out; there are {', '.join(names)}"
        logging.getLogger("jaxformer").warning("%s; %s", problem, advice)


def idle_alternatives(pattern: str, names: Sequence[str]) -> list[str]:
    """The alternatives in the pattern by which no name matches: of `attention/(query|valu)/` perhaps `valu`.

    What holds no name, such as both alternatives of `(^|/)`, is left out.
    """
    return _idle("", pattern, "", names)


def _idle(before: str, part: str, after: str, names: Sequence[str]) -> list[str]:
    """Those of a part of the pattern `before + part + after`: of all of it, or of a group."""
    bars, groups = _bars_and_groups(part)
    found = []
    for left, right in pairwise([-1, *bars, len(part)]):
        alternative = part[left + 1 : right]
        if bars and _NAME.search(alternative) and not _matches(before + alternative + after, names):
            found.append(alternative)
            continue
        for begin, end in groups:
            if left < begin and end <= right:
                outside = before + part[left + 1 : begin], part[end:right] + after
                found += _idle(outside[0], part[begin:end], outside[1], names)
    return found


def _matches(pattern: str, names: Sequence[str]) -> bool:
    try:
        compiled = re.compile(pattern)
    except re.error:  # it refers to a group of another alternative: nothing is known
        return True
    return any(map(compiled.search, names))


def _bars_and_groups(part: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The places of the bars outside of all groups, and (begin, end) inside each outermost group."""
    bars, groups = [], []
    opened: list[int] = []  # where each open group begins; -1: it looks ahead or behind
    place = 0
    while place < len(part):
        letter, length = part[place], 1
        if letter == "\\":
            length = 2
        elif found := _CLASS.match(part, place):
            length = len(found[0])
        elif letter == "(":
            found = _PLAIN.match(part, place)
            length = len(found[0]) if found else 1
            opened.append(place + length if found else -1)
        elif letter == ")" and opened:
            begin = opened.pop()
            if begin >= 0 and not opened:
                groups.append((begin, place))
        elif letter == "|" and not opened:
            bars.append(place)
        place += length
    return bars, groups
