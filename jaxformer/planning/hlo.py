"""What a compiled program moves, by its text: collectives, memory traffic, its largest arrays."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "send")
WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")  # name, shape, opcode, operands
_SCATTER = re.compile(r"calls=%?(all-reduce-scatter[\w.\-]*)")
_FREE = re.compile(  # operations that move nothing
    "parameter|tuple|get-tuple-element|bitcast|constant|while|conditional|call|after-all|partition-id|replica-id|iota|"
    "opt-barrier|add-dependency|.*-done"
)
_NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One kind of exchange over some mesh axes: how many run in a step, and the bytes of their results on a device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


class Line(NamedTuple):
    """An operation of a program."""

    text: str
    times: int  # it runs
    computation: str
    fused: bool


def collectives(text: str, mesh) -> list[Collective]:
    """The collectives of a program (`compiled.as_text()`) on a mesh, largest first; in a loop, one for each turn.

    The TPU compiler writes a reduce-scatter as a fusion that calls an all-reduce; it counts as a reduce-scatter. It writes
    an exchange that runs beside other work into each fusion beside which it runs, on one channel; it counts once. A loop
    with an unknown number of turns counts once.
    """
    bodies, entry = _computations(text)
    counts: dict[tuple, int] = Counter()
    sizes: dict[tuple, float] = defaultdict(float)
    begun = set()
    for line in _visited(bodies, entry):
        scatter = _SCATTER.search(line.text)
        kind = "reduce-scatter" if scatter else _kind(line.text)
        if not kind:
            continue
        if line.fused and (channel := re.search(r"channel_id=\d+", line.text)):
            if (kind, channel[0]) in begun:
                continue
            begun.add((kind, channel[0]))
        group = _group(_all_reduce(bodies, scatter[1]) if scatter else line.text)
        if len(group) == 1:  # a device alone
            continue
        axes = _axes(group, mesh)
        counts[kind, axes] += line.times
        sizes[kind, axes] += line.times * _bytes(line.text, kind)
    found = [Collective(kind, axes, counts[kind, axes], int(sizes[kind, axes])) for kind, axes in counts]
    return sorted(found, key=lambda one: -one.bytes)


def _visited(bodies: dict[str, list[str]], entry: str) -> Iterator[Line]:
    """Every operation, also those inside fusions and loops."""
    todo = [(entry, 1, False)]
    while todo:
        name, times, fused = todo.pop()
        for text in bodies.get(name, ()):
            yield Line(text, times, name, fused)
            if _SCATTER.search(text) or _kind(text):
                continue  # the sum that a reduction applies exchanges nothing
            turns = _turns(text, bodies) if " while(" in text else 1
            for one, several in _CALLED.findall(text):
                called = [one] if one else re.findall(r"%?([\w.\-]+)", several)
                todo += [(body, times * turns, fused or " fusion(" in text) for body in called]


def traffic(text: str) -> float:
    """Bytes that a device reads from and writes to its memory in one run of a program, loops multiplied out.

    Each operation reads its operands and writes its results. Where a fusion cuts a piece out of an array, or writes one into
    it, the size of the piece counts. Arrays in the chip's fast memory (S(1) in their layout) do not count.
    """
    bodies, entry = _computations(text)
    parsed = {
        name: {found[1]: found.groups()[1:] for found in map(_OP.match, body) if found} for name, body in bodies.items()
    }
    total = 0.0
    for line in _visited(bodies, entry):
        found = _OP.match(line.text)
        if line.fused or not found or _FREE.fullmatch(found[3]):
            continue
        _, shape, opcode, operands = found.groups()
        known, result = parsed[line.computation], _in_memory(shape)
        sizes = [_in_memory(known[one][0]) if one in known else 0.0 for one in re.findall(r"%([\w.\-]+)", operands)]
        called = re.search(r"calls=%?([\w.\-]+)", line.text)
        if opcode == "fusion" and called and called[1] in bodies:
            moved = _fusion(parsed[called[1]], bodies[called[1]], sizes, result)
        elif opcode == "dynamic-slice":
            moved = 2 * result
        elif opcode == "dynamic-update-slice":
            moved = 2 * sizes[1]
        else:
            moved = result + sum(sizes)
        total += line.times * moved
    return total


def _fusion(inside: dict[str, tuple], lines: list[str], operands: list[float], result: float) -> float:
    """Bytes that a fusion moves."""
    total = 0.0
    for one, (_, opcode, rest) in inside.items():
        if opcode != "parameter" or int(rest) >= len(operands):
            continue
        users = [other for other in inside.values() if re.search(rf"%{re.escape(one)}\b", other[2])]
        if users and all(user[1] == "dynamic-slice" for user in users):
            total += min(operands[int(rest)], sum(_in_memory(user[0]) for user in users))
        elif not any(user[1] == "dynamic-update-slice" and user[2].startswith(f"%{one},") for user in users):
            total += operands[int(rest)]
    pieces = [other[2].split(",") for other in inside.values() if other[1] == "dynamic-update-slice"]
    updates = [_in_memory(inside[piece[1].strip(" %")][0]) for piece in pieces if piece[1].strip(" %") in inside]
    root = next((line for line in lines if line.lstrip().startswith("ROOT")), "")
    in_place = updates and ("dynamic-update-slice" in root or " bitcast(" in root or " tuple(" in root)
    return total + (sum(updates) if in_place else result)


def _in_memory(shapes: str) -> float:
    """Bytes of the arrays of a result that lie in the device's main memory."""
    found = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
    return math.fsum(_size(dtype, dims) for dtype, dims, layout in found if "S(1)" not in layout)


def _size(dtype: str, dims: str) -> float:
    digits = re.search(r"\d+", dtype)
    width = WIDTHS.get(dtype, int(digits[0]) / 8 if digits else 0.0)
    return float(math.prod(int(n) for n in dims.split(",") if n) * width)


class Buffer(NamedTuple):
    """A piece of a device's memory, by the largest array that it holds."""

    bytes: int
    shape: str
    name: str


def largest(report: str, text: str, count: int = 8) -> list[Buffer]:
    """The largest buffers of a program, by the compiler's memory-usage report and the names in the program's text."""
    names: dict[str, Counter] = defaultdict(Counter)
    for shape, name in re.findall(r"= (\w+\[[\d,]*\])\S* (?!bitcast|get-tuple|tuple).*?op_name=\"([^\"]*)\"", text):
        names[shape][_plain(name)] += 1000 if name.startswith("args[") else 1  # prefer a name that the user gave
    found = []
    for size, unit, shapes in re.findall(r"\);\s+([\d.]+)(\w*i?B);\s+\d+;\s+\d+; (.*)", report):
        first = max(re.findall(r"\w+\[[\d,]*\]", shapes), key=_in_memory)
        called = names[first].most_common(1)[0][0] if names[first] else "-"
        found.append(Buffer(int(float(size) * _UNITS[unit]), first, called))
    return sorted(found, key=lambda one: -one.bytes)[:count]


def _plain(name: str) -> str:
    """`params/layers/query/kernel` of an argument; of an operation's path the last words, without those of all paths."""
    if name.startswith("args["):
        return "/".join(re.findall(r"\w+", name.partition(".")[2])) or name
    begin = r"jit\(\w+\)|while|body|closed_call|cond|branch.*"
    return "/".join([part for part in name.split("/") if not re.fullmatch(begin, part)][-4:])


def _turns(line: str, bodies: dict[str, list[str]]) -> int:
    """The turns of a loop: as the compiler wrote, or the constant that bounds its counter, divided by the step."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition, body = (re.search(rf"{part}=%?([\w.\-]+)", line) for part in ("condition", "body"))
    if not condition or not body:
        return 1
    inside = "\n".join(bodies.get(condition[1], ()))
    bounds = [int(n) for n in re.findall(r"[su]\d+\[\]\S* constant\((\d+)\)", inside)]
    return max(1, math.ceil(max(bounds, default=1) / _step(inside, bodies.get(body[1], []))))


def _step(condition: str, body: list[str]) -> int:
    """What a turn adds to the counter in the condition; 1 where a fusion hides it."""
    parsed = {found[1]: found for line in body if (found := _OP.match(line))}
    compared = re.search(r" compare\(%([\w.\-]+)", condition)
    place = compared and re.search(rf"%{re.escape(compared[1])} = .*index=(\d+)", condition)
    root = next((found for line in body if "ROOT" in line and (found := _OP.match(line))), None)
    if not place or not root or root[3] != "tuple":
        return 1
    added = parsed.get(re.findall(r"%([\w.\-]+)", root[4])[int(place[1])])
    if not added or added[3] != "add":
        return 1
    by = [parsed[name] for name in re.findall(r"%([\w.\-]+)", added[4]) if name in parsed]
    return next((int(one[4]) for one in by if one[3] == "constant" and one[4].isdigit() and int(one[4])), 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(the lines of each computation, the name of the first to run)."""
    bodies: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            name = begin[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.rstrip() == "}":  # not any line that begins with it: a constant's may
            name = None
        elif name is not None and " = " in line:
            bodies[name].append(line)
    return bodies, entry


def _kind(line: str) -> str | None:
    found = re.search(rf" ({'|'.join(KINDS)})(?:-start)?\(", line)
    return found[1] if found else None


def _all_reduce(bodies: dict[str, list[str]], name: str) -> str:
    return next((line for line in bodies.get(name, ()) if "all-reduce" in line), "")


def _bytes(line: str, kind: str) -> float:
    """Bytes of the result. A started exchange has a tuple of what it reads, its results, and more."""
    result = line.partition(" = ")[2]
    result = result[: result.index(f" {kind}" if f" {kind}" in result else " fusion(")]
    if "-start(" in line and kind != "all-reduce" and result.startswith("("):
        result = _elements(result)[1]
    return math.fsum(_size(dtype, dims) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result))


def _elements(shape: str) -> list[str]:
    """`((a, b), c{0,1})` -> `["(a, b)", "c{0,1}"]`."""
    parts, depth, begin = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:at].strip())
            begin = at + 1
        if depth == 0:
            break
    return parts


def _axes(group: list[int], mesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    places = np.unravel_index(np.array(group, int), tuple(mesh.shape.values()))
    return tuple(name for name, row in zip(mesh.shape, places, strict=True) if len(set(row.tolist())) > 1)


def _group(line: str) -> list[int]:
    """The group of the first device, in any of the ways in which HLO writes groups."""
    if named := _NAMED.search(line):
        sizes = dict(re.findall(r"'([\w.]+)'=(\d+)", named[1]))
        ids = _iota(named[2] or str(math.prod(map(int, sizes.values()))), named[3])
        ids = ids.reshape([int(n) for n in sizes.values()])
        along = re.findall(r"'([\w.]+)'", named[4])
        return ids[tuple(slice(None) if axis in along else 0 for axis in sizes)].ravel().tolist()
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))[0].tolist()
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        both = [[int(one), int(other)] for one, other in re.findall(r"(\d+),(\d+)", pairs[1])]
        return next((pair for pair in both if pair[0] != pair[1]), [0])  # [0]: each sends to itself
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    return []


def _iota(dims: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in an array of these dimensions, with its axes transposed."""
    sizes = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids
