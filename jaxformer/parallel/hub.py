"""What process 0 knows about the common work of all processes: who has come to it, who has not, and for how long.

A call is a place that several processes come to, each with a value: an exchange of values, or a wait until all are there. Here
are neither sockets nor clocks: `Peers` hands over the messages and the time, and sends the answers.
"""

from dataclasses import dataclass, field
from typing import Any

Replies = list[tuple[int, dict[str, Any]]]  # (to which process, message)


@dataclass
class Call:
    """`what` it is for, as a person says it; after `limit` seconds without any progress the run ends (None: never)."""

    what: str
    members: list[int]
    limit: float | None
    values: dict[int, Any] = field(default_factory=dict)
    waited: float = 0.0

    def missing(self) -> list[int]:
        return [index for index in self.members if index not in self.values]


class Hub:
    """`receive` takes a message of a process and returns the answers to it; `late` is asked again and again."""

    def __init__(self, names: list[str]):
        self.names = names
        self.calls: dict[str, Call] = {}
        self.places: dict[int, tuple[int, str]] = {}  # process -> (how often it went on, where it is)
        self._counted: dict[int, int] = {}
        self._stopping: int | None = None

    def receive(self, index: int, message: dict[str, Any]) -> Replies:
        match message:
            case {"call": str(key), "what": str(what), "value": value, "members": list(members), "limit": limit}:
                return self._come(index, key, value, Call(what, members, limit))
            case {"abandon": int(), "text": str()}:
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
                    return self._to_all({"stop_after": max(self._counted.values()) + 1, "signal": self._stopping})
        return []

    def late(self, seconds: float) -> str | None:
        """`seconds` passed: who keeps the others waiting for longer than the limit of a call. None: nobody."""
        for call in self.calls.values():
            call.waited += seconds
            if call.limit is not None and call.waited > call.limit:
                late = ", ".join(self.names[index] for index in call.missing())
                return f"{late} did not come to {call.what} within {call.limit:g} s{self.where()}"
        return None

    def where(self) -> str:
        """Where all processes are, as far as they said."""
        places = [f"process {index} at {place}" for index, (_, place) in sorted(self.places.items()) if place]
        more = f", and {len(places) - 8} more" if len(places) > 8 else ""
        return f" ({', '.join(places[:8])}{more})" if places else ""

    def _to_all(self, message: dict[str, Any]) -> Replies:
        return [(index, message) for index in range(len(self.names))]

    def _come(self, index: int, key: str, value: Any, new: Call) -> Replies:
        call = self.calls.setdefault(key, new)
        if call.what != new.what:
            here = ", ".join(self.names[other] for other in call.values)
            text = f"{self.names[index]} came to {new.what}, but {here} to {call.what}: they do not do the same work"
            return self._to_all({"end": 1, "text": text})
        call.values[index], call.waited = value, 0.0
        if call.missing():
            return []
        del self.calls[key]
        answer = {"answer": key, "values": [call.values[member] for member in call.members]}
        return [(member, answer) for member in call.members]

    def _move(self, index: int, moves: int, place: str) -> None:
        """A process that goes on is not late: those who wait for it begin to count again."""
        if self.places.get(index, (None, ""))[0] != moves:
            for call in self.calls.values():
                if index in call.missing():
                    call.waited = 0.0
        self.places[index] = moves, place


class Silence:
    """Counts the beats of this process since it heard each of the others. What this process slept through does not count."""

    def __init__(self, others: list[int], most: int):
        self._beats, self.most = dict.fromkeys(others, 0), most

    def heard(self, index: int) -> None:
        if index in self._beats:
            self._beats[index] = 0

    def forget(self, index: int) -> None:
        self._beats.pop(index, None)

    def beat(self) -> int | None:
        """A beat passed: who was silent for more than `most` beats. None: nobody."""
        for index in self._beats:
            self._beats[index] += 1
        return next((index for index, beats in self._beats.items() if beats > self.most), None)
