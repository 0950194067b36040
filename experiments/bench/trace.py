"""A trace of a CPU program as a table that adds up to its wall time.

It has the wall time of each thunk (one run of an operation), over all threads, and the time in
which no thunk runs.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Thunk(NamedTuple):
    """One run of an operation of the compiled program."""

    start: float  # nanoseconds
    end: float
    name: str


def thunks(folder: str) -> list[Thunk]:
    """The thunks of the newest trace of `jax.profiler.trace` in a folder."""
    from jax.profiler import ProfileData

    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    lines = (line for plane in ProfileData.from_file(str(newest)).planes for line in plane.lines)
    events = ((event, dict(event.stats)) for line in lines for event in line.events)
    return [
        Thunk(event.start_ns, event.end_ns, str(stats["hlo_op"]))
        for event, stats in events
        if "hlo_op" in stats
    ]


def wall_time(found: Iterable[Thunk]) -> tuple[dict[str, float], list[float]]:
    """({name: milliseconds}, [milliseconds in which 0, 1, 2, ... thunks ran]).

    Thunks that run at the same time share that time equally.
    """
    found = list(found)
    edges = sorted(
        [(one.start, 1, i) for i, one in enumerate(found)]
        + [(one.end, 0, i) for i, one in enumerate(found)]
    )
    shares, counts, running, before = defaultdict(float), defaultdict(float), set(), edges[0][0]
    for time, begins, i in edges:
        took, before = 1e-6 * (time - before), time
        counts[len(running)] += took
        for j in running:
            shares[found[j].name] += took / len(running)
        (running.add if begins else running.discard)(i)
    return dict(shares), [counts[n] for n in range(max(2, *counts) + 1)]


def describe(text: str) -> dict[str, str]:
    """{name: "kind, operands -> result, place in the model"} of a compiled program's operations."""
    shapes, found = {}, {}
    for line in text.splitlines():
        if match := re.match(
            (
                r"\s*(?:ROOT )?%?([\w.\-]+) = ([a-z]\w*\[[\d,]*\])\S* "
                r"[\w\-]+\(([^)]*)\)"
            ),
            line,
        ):
            name, result, operands = match[1], match[2], re.findall(r"%([\w.\-]+)", match[3])
            shapes[name] = result
            where = re.search(r'op_name="(?:jit\([^"/]*\)/)?([^"]*)"', line)
            inputs = " ".join(shapes.get(operand, "?") for operand in operands[:3])
            place = "/".join(where[1].split("/")[-3:]) if where else ""
            found[name] = f"{re.sub(r'[.0-9]+$', '', name)}  {inputs} -> {result}  {place}"
    return found


def profile(call: Callable[[], Any], compiled: Any, folder: str, name: str, count: int = 3) -> None:
    """Writes a trace of `count` calls that run a compiled program; prints the time of its parts."""
    import jax

    for turn in range(2 + count):  # the first two do not count
        if turn == 2:
            jax.profiler.start_trace(folder)
        jax.block_until_ready(call())
    jax.profiler.stop_trace()
    print(f"{name}, {count} calls: {folder}")
    report(folder, str(compiled.as_text()), count)


def report(folder: str, text: str, calls: int, most: int = 40) -> None:
    """Prints the milliseconds of a call by operation, from a trace of `calls` calls.

    Operations of one kind, with the same operands, are added up.
    """
    shares, counts = wall_time(thunks(folder))
    names, total, number = describe(text), defaultdict(float), defaultdict(int)
    for name, ms in shares.items():
        kind = names.get(name, re.sub(r"[.0-9]+$", "", name))
        total[kind] += ms / calls
        number[kind] += 1
    none, one, several = counts[0] / calls, counts[1] / calls, sum(counts[2:]) / calls
    print(
        f"{none + one + several:.1f} ms a call: one operation runs {one:.1f}, "
        f"several {several:.1f}, none {none:.1f}"
    )
    largest = sorted(total.items(), key=lambda item: -item[1])
    for kind, ms in largest[:most]:
        print(f"  {ms:8.2f} ms  {number[kind]:3} x  {kind}")
    print(f"  {sum(ms for _, ms in largest[most:]):8.2f} ms  the rest", flush=True)
