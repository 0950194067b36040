"""Where the time of a step went: a table by part of the model, read from a trace of the profiler.

The trace names the instructions that ran, and when. The compiled programs say which named scope of
the source each instruction comes from.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

# named scope -> line of the table; the innermost scope counts
PARTS = {
    "embedding": "embedding",
    "attention": "attention",
    "cross_attention": "cross attention",
    "feedforward": "feed-forward",
    "norm": "norms",
    "final_norm": "norms",
    "head": "head and loss",
    "loss": "head and loss",
    "optimizer": "optimizer",
}
COLLECTIVE = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute")
CONTAINERS = {"while", "conditional", "call"}  # the time of their instructions is counted itself
DIRECTIONS = "forward", "again", "backward"

# `%name = shape opcode(operands), metadata={op_name="scope/scope/primitive"}`
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][a-z0-9\-]*)\(")
OP_NAME = re.compile(r'op_name="([^"]*)"')


class Source(NamedTuple):
    """Where an instruction comes from."""

    opcode: str  # of HLO
    op_name: str  # its scopes and its primitive, such as "jit(f)/transpose(jvp(attention))/mul"


class Ran(NamedTuple):
    """An instruction that ran once on a device."""

    program: str
    instruction: str
    start: float  # nanoseconds
    end: float


def sources_of(programs: Iterable[Any]) -> dict[tuple[str, str], Source]:
    """{(program, instruction): its source} of compiled programs."""
    found = {}
    for program in programs:
        for module in program.hlo_modules():
            for line in module.to_string().splitlines():
                if instruction := INSTRUCTION.match(line):
                    name, opcode = instruction.groups()
                    op_name = OP_NAME.search(line)
                    source = Source(opcode, op_name[1] if op_name else "")
                    found[module.name, name] = source
    return found


def scopes(op_name: str) -> list[str]:
    """The scopes of an op_name, without transforms: "a/transpose(jvp(b))/mul" -> [a, b, mul]."""
    return [re.sub(r"^.*\(|\)+$", "", each) for each in op_name.split("/")]


def part_of(source: Source) -> str:
    """The line of the table that an instruction belongs to."""
    if COLLECTIVE.match(source.opcode):
        return "collectives"
    known = (PARTS[scope] for scope in reversed(scopes(source.op_name)) if scope in PARTS)
    return next(known, "other")


def direction_of(source: Source) -> str:
    """Whether an instruction belongs to the forward pass, to remat's second one, or to gradients.

    The optimizer counts as forward.
    """
    if "rematted_computation" in source.op_name:
        return "again"
    return "backward" if "transpose(" in source.op_name else "forward"


def instructions_of(trace: str) -> list[Ran]:
    """What ran on the first device, in a file of the profiler (`*.xplane.pb`)."""
    # JAX's reader gives a warning on new Pythons. As an error it would end the process.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return _read_trace(trace)


def _read_trace(trace: str) -> list[Ran]:
    # the planes, lines and events are views of this object, which has to stay
    profile = jax.profiler.ProfileData.from_file(trace)
    names = [plane.name for plane in profile.planes]
    device = next((name for name in sorted(names) if name.startswith("/device:")), "/host:CPU")
    plane = profile.find_plane_with_name(device)
    if plane is None:
        return []
    on_tpu = any(line.name == "XLA Ops" for line in plane.lines)
    ran = []
    for line in plane.lines:
        if on_tpu and line.name != "XLA Ops":
            continue
        for event in line.events:
            about = dict(event.stats)
            name = about.get("hlo_op") or (event.name.split(" = ")[0].lstrip("%") if on_tpu else "")
            is_first = str(about.get("device_ordinal", 0)) == "0"  # simulated devices share a host
            if name and is_first and not event.name.startswith("end: "):
                program = str(about.get("hlo_module", ""))
                end = event.start_ns + event.duration_ns
                ran.append(Ran(program, str(name), float(event.start_ns), float(end)))
    return ran


def shared_time(intervals: list[tuple[float, float]]) -> list[float]:
    """The time of each interval; where several overlap, each has an equal share of it.

    So their sum is the time in which any of them ran.
    """
    edges = []
    for i, (start, end) in enumerate(intervals):
        if end > start:
            edges += [(start, 1, i), (end, 0, i)]
    times = [0.0] * len(intervals)
    running: set[int] = set()
    last = 0.0
    for moment, begins, i in sorted(edges):
        for other in running:
            times[other] += (moment - last) / len(running)
        last = moment
        if begins:
            running.add(i)
        else:
            running.discard(i)
    return times


class Table(NamedTuple):
    """Milliseconds of a step."""

    parts: dict[str, dict[str, float]]  # line -> {direction: milliseconds}
    idle: float  # in which no instruction ran
    step: float  # all of it


def table_of(ran: list[Ran], sources: dict[tuple[str, str], Source], steps: int) -> Table:
    """The time of each part, for one of so many steps."""
    nowhere = Source("", "")
    found = [(each, sources.get((each.program, each.instruction), nowhere)) for each in ran]
    found = [(each, source) for each, source in found if source.opcode not in CONTAINERS]
    if not found:
        return Table({}, 0.0, 0.0)
    unit = 1e6 * steps  # nanoseconds of all steps in a millisecond of one
    times = shared_time([(each.start, each.end) for each, _ in found])
    parts: dict[str, dict[str, float]] = {}
    for (_, source), time in zip(found, times, strict=True):
        part = parts.setdefault(part_of(source), dict.fromkeys(DIRECTIONS, 0.0))
        part[direction_of(source)] += time / unit
    whole = max(each.end for each, _ in found) - min(each.start for each, _ in found)
    return Table(parts, (whole - sum(times)) / unit, whole / unit)


def lines_of(table: Table) -> list[str]:
    """The table as text, the slowest part first."""
    nothing = dict.fromkeys(DIRECTIONS, 0.0)
    rows = [(name, sum(times.values()), times) for name, times in table.parts.items()]
    rows.sort(key=lambda row: -row[1])
    rows += [("idle", table.idle, nothing), ("the step", table.step, nothing)]
    lines = [f"{'ms of a step':<32}" + "".join(f"{name:>10}" for name in DIRECTIONS)]
    for name, time, times in rows:
        cells = [f"{times[each]:>10.2f}" if times[each] else " " * 10 for each in DIRECTIONS]
        line = f"{name:<16}{time:>9.2f}{time / table.step:>7.0%}" + "".join(cells)
        lines.append(line.rstrip())
    return lines


def read_profile(folder: str, steps: int) -> list[str]:
    """The table of the newest trace in the folder; no line for a trace without instructions."""
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        return []
    sources = sources_of(jax.local_devices()[0].client.live_executables())
    table = table_of(instructions_of(str(traces[-1])), sources, steps)
    return lines_of(table) if table.step else []
