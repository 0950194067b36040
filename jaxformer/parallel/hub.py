"""The state of process 0 about the common work of all: who has come, who is missing, for how long.

A call is a meeting point of several processes, each with a value: an exchange of values, or a wait
until all are there. This file has neither sockets nor clocks. `Peers` passes in the messages and
the time, and sends the answers.
"""

from dataclasses import dataclass, field
from typing import Any

Replies = list[tuple[int, dict[str, Any]]]  # (index of the receiving process, message)


@dataclass
class Call:
    """A call that some members have not come to yet.

    `what` is its purpose in words. The run ends after `limit` seconds without progress (None:
    never). `work` is the number of the common work that it is a part of, or -1.
    """

    what: str
    members: list[int]
    limit: float | None
    work: int = -1
    values: dict[int, Any] = field(default_factory=dict)
    waited: float = 0.0

    def missing(self) -> list[int]:
        return [index for index in self.members if index not in self.values]


class Hub:
    """`receive` takes a message of a process and returns the replies. Each beat calls `late`."""

    def __init__(self, names: list[str]):
        self.names = names
        self.calls: dict[str, Call] = {}
        # process -> (how often it reported progress, where it is)
        self.places: dict[int, tuple[int, str]] = {}
        self._abandoned: set[int] = set()  # works whose calls nobody comes to any more
        self._counted: dict[int, int] = {}
        self._stopping: int | None = None

    def receive(self, index: int, message: dict[str, Any]) -> Replies:
        match message:
            case {
                "call": str(key),
                "what": str(what),
                "value": value,
                "members": list(members),
                "limit": limit,
            }:
                call = Call(what, members, limit, message.get("work", -1))
                return [] if call.work in self._abandoned else self._come(index, key, value, call)
            case {"abandon": int(work), "text": str()}:
                self._abandoned.add(work)
                self.calls = {key: call for key, call in self.calls.items() if call.work != work}
                return self._to_all(message)
            case {"place": str(place), "moves": int(moves)}:
                self._move(index, moves, place)
            case {"stop": int(signum)}:
                if self._stopping is None:
                    self._stopping = signum
                    return self._to_all({"count": True})
            case {"counted": int(step)}:
                self._counted[index] = step
                if len(self._counted) == len(self.names):
                    return self._to_all(
                        {"stop_after": max(self._counted.values()) + 1, "signal": self._stopping}
                    )
        return []

    def late(self, seconds: float) -> str | None:
        """Adds `seconds` to all waits; a message with the missing if a call is over its limit."""
        for call in self.calls.values():
            call.waited += seconds
            if call.limit is not None and call.waited > call.limit:
                late = ", ".join(self.names[index] for index in call.missing())
                return f"{late} did not come to {call.what} within {call.limit:g} s{self.where()}"
        return None

    def where(self) -> str:
        """The place that each process last reported, in words."""
        places = [
            f"process {index} at {place}"
            for index, (_, place) in sorted(self.places.items())
            if place
        ]
        more = f", and {len(places) - 8} more" if len(places) > 8 else ""
        return f" ({', '.join(places[:8])}{more})" if places else ""

    def _to_all(self, message: dict[str, Any]) -> Replies:
        return [(index, message) for index in range(len(self.names))]

    def _come(self, index: int, key: str, value: Any, new: Call) -> Replies:
        call = self.calls.setdefault(key, new)
        if call.what != new.what:
            here = ", ".join(self.names[other] for other in call.values)
            text = (
                f"{self.names[index]} came to {new.what}, but {here} to {call.what}: "
                "they do not do the same work"
            )
            return self._to_all({"end": 1, "text": text})
        call.values[index], call.waited = value, 0.0
        if call.missing():
            return []
        del self.calls[key]
        answer = {"answer": key, "values": [call.values[member] for member in call.members]}
        return [(member, answer) for member in call.members]

    def _move(self, index: int, moves: int, place: str) -> None:
        """Notes a report of a process. If it made progress, the waits for it start again at 0."""
        if self.places.get(index, (None, ""))[0] != moves:
            for call in self.calls.values():
                if index in call.missing():
                    call.waited = 0.0
        self.places[index] = moves, place


class Silence:
    """Counts the beats of this process since it heard each of the others.

    Time during which this process itself slept has no beats and does not count.
    """

    def __init__(self, others: list[int], limit: int):
        self.limit = limit  # beats
        self._beats = dict.fromkeys(others, 0)

    def heard(self, index: int) -> None:
        if index in self._beats:
            self._beats[index] = 0

    def forget(self, index: int) -> None:
        self._beats.pop(index, None)

    def beat(self) -> int | None:
        """Counts a beat; the index of a process that was silent for over `limit` beats, or None."""
        for index in self._beats:
            self._beats[index] += 1
        return next((index for index, beats in self._beats.items() if beats > self.limit), None)
