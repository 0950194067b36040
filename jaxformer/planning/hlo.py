"""What a compiled program sends between devices: the collectives in its text, each as often as it runs."""

import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "send")
WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*)$")
_SCATTER = re.compile(r"calls=%?(all-reduce-scatter[\w.\-]*)")
_PARTS = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")
_STILL = re.compile(  # what moves nothing by itself
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


def collectives(text: str, mesh) -> list[Collective]:
    """The collectives of a program (`compiled.as_text()`) on a mesh, loops multiplied out, largest first.

    The TPU compiler writes a reduce-scatter as a fusion that calls an all-reduce; it counts as what it is. An exchange that
    goes on beside other work is written into each fusion that it goes on beside, on one channel; it counts once. So does a
    loop whose number of turns the compiler does not know.
    """
    bodies, entry = _computations(text)
    counts: dict[tuple, int] = Counter()
    sizes: dict[tuple, float] = defaultdict(float)
    begun = set()
    for line, times, (_, fused) in _visited(bodies, entry):
        scatter = _SCATTER.search(line)
        kind = "reduce-scatter" if scatter else _kind(line)
        if kind:
            channel = re.search(r"channel_id=\d+", line)
            if fused and channel and (kind, channel[0]) in begun:
                continue
            begun |= {(kind, channel[0])} if fused and channel else set()
            described = _inner(bodies, scatter[1]) if scatter else line
            if len(_group(described)) == 1:  # with nobody
                continue
            axes = _axes(described, mesh)
            counts[kind, axes] += times
            sizes[kind, axes] += times * _bytes(line, kind)
    found = [Collective(kind, axes, counts[kind, axes], int(sizes[kind, axes])) for kind, axes in counts]
    return sorted(found, key=lambda one: -one.bytes)


def _visited(bodies: dict[str, list[str]], entry: str):
    """(line, how often it runs, computation) of every operation, also of those inside fusions and loops."""
    todo = [(entry, 1, False)]
    while todo:
        name, times, fused = todo.pop()
        for line in bodies.get(name, ()):
            yield line, times, (name, fused)
            if _SCATTER.search(line) or _kind(line):
                continue  # the sum that a reduction applies exchanges nothing
            turns = _turns(line, bodies) if " while(" in line else 1
            inside = fused or " fusion(" in line
            for one, several in _CALLED.findall(line):
                called = [one] if one else re.findall(r"%?([\w.\-]+)", several)
                todo += [(body, times * turns, inside) for body in called]


def traffic(text: str) -> float:
    """Bytes that a device reads from and writes to its memory in one run of a program, loops multiplied out.

    Each operation reads its operands and writes its results; what a fusion cuts out of an array, or writes into one, counts
    with the size of the piece. What lies in the chip's own fast memory (S(1) in its layout) counts nothing.
    """
    bodies, entry = _computations(text)
    parsed: dict[str, dict[str, tuple]] = {}

    def of(name):
        if name not in parsed:
            parsed[name] = {found[1]: found.groups()[1:] for line in bodies[name] if (found := _PARTS.match(line))}
        return parsed[name]

    total = 0.0
    for line, times, (name, fused) in _visited(bodies, entry):
        if fused or not (found := _PARTS.match(line)) or _STILL.fullmatch(found[3]):
            continue
        _, shape, opcode, operands = found.groups()
        names = re.findall(r"%([\w.\-]+)", operands)
        size = lambda one, known=of(name): _in_memory(known[one][0]) if one in known else 0.0
        if opcode == "fusion" and (called := re.search(r"calls=%?([\w.\-]+)", line)) and called[1] in bodies:
            total += times * _fusion(of(called[1]), bodies[called[1]], [size(one) for one in names], _in_memory(shape))
        elif opcode == "dynamic-slice":
            total += times * 2 * _in_memory(shape)
        elif opcode == "dynamic-update-slice":
            total += times * 2 * size(names[1])
        else:
            total += times * (_in_memory(shape) + sum(map(size, names)))
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
    return float(math.prod(int(n) for n in dims.split(",") if n) * WIDTHS.get(dtype, _width(dtype)))


class Buffer(NamedTuple):
    """A piece of a device's memory: its bytes, and the arrays that lie there one after the other."""

    bytes: int
    shape: str
    name: str


def largest(report: str, text: str, count: int = 8) -> list[Buffer]:
    """The largest buffers of a program, by the compiler's memory-usage report and the names in the program's text."""
    names: dict[str, Counter] = defaultdict(Counter)
    for shape, name in re.findall(r"= (\w+\[[\d,]*\])\S* (?!bitcast|get-tuple|tuple).*?op_name=\"([^\"]*)\"", text):
        names[shape][_plain(name)] += 1000 if name.startswith("args[") else 1  # what the user gave a name goes first
    found = []
    for size, unit, shapes in re.findall(r"\);\s+([\d.]+)(\w*i?B);\s+\d+;\s+\d+; (.*)", report):
        first = max(re.findall(r"\w+\[[\d,]*\]", shapes), key=_in_memory)
        called = names[first].most_common(1)[0][0] if names[first] else "-"
        found.append(Buffer(int(float(size) * _UNITS[unit]), first, called))
    return sorted(found, key=lambda one: -one.bytes)[:count]


def _plain(name: str) -> str:
    """`params/layers/query/kernel` of an argument, the last words of an operation's path, without what all paths have."""
    if name.startswith("args["):
        return "/".join(re.findall(r"\w+", name.partition(".")[2])) or name
    begin = r"jit\(\w+\)|while|body|closed_call|cond|branch.*"
    return "/".join([part for part in name.split("/") if not re.fullmatch(begin, part)][-4:])


def _turns(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a loop turns: what the compiler says, or the constant that its counter is compared with by its step."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition, body = (re.search(rf"{part}=%?([\w.\-]+)", line) for part in ("condition", "body"))
    if not condition or not body:
        return 1
    inside = "\n".join(bodies.get(condition[1], ()))
    bounds = [int(n) for n in re.findall(r"[su]\d+\[\]\S* constant\((\d+)\)", inside)]
    return max(1, math.ceil(max(bounds, default=1) / _step(inside, bodies.get(body[1], []))))


def _step(condition: str, body: list[str]) -> int:
    """What a turn adds to the counter that the condition compares; 1 where that is hidden in a fusion."""
    parsed = {found[1]: found for line in body if (found := _PARTS.match(line))}
    compared = re.search(r" compare\(%([\w.\-]+)", condition)
    place = compared and re.search(rf"%{re.escape(compared[1])} = .*index=(\d+)", condition)
    root = next((found for line in body if "ROOT" in line and (found := _PARTS.match(line))), None)
    if not place or not root or root[3] != "tuple":
        return 1
    added = parsed.get(re.findall(r"%([\w.\-]+)", root[4])[int(place[1])])
    if not added or added[3] != "add":
        return 1
    by = [parsed[name] for name in re.findall(r"%([\w.\-]+)", added[4]) if name in parsed]
    return next((int(one[4]) for one in by if one[3] == "constant" and one[4].isdigit() and int(one[4])), 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            name = begin[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.rstrip() == "}":  # a line of a constant may begin with one, too
            name = None
        elif name is not None and _OP.match(line):
            bodies[name].append(line)
    return bodies, entry


def _kind(line: str) -> str | None:
    found = re.search(rf" ({'|'.join(KINDS)})(?:-start)?\(", line)
    return found[1] if found else None


def _inner(bodies: dict[str, list[str]], name: str) -> str:
    return next((line for line in bodies.get(name, ()) if "all-reduce" in line), "")


def _bytes(line: str, kind: str) -> float:
    """Of the result; a started exchange names what it reads beside it: (reads, results, ...)."""
    result = line.partition(" = ")[2]
    result = result[: result.index(f" {kind}") if f" {kind}" in result else result.index(" fusion(")]
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


def _width(dtype: str) -> float:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) / 8 if digits else 0.0


def _axes(line: str, mesh) -> tuple[str, ...]:
    """The mesh axes along which a group of devices lies."""
    shape = tuple(mesh.shape.values())
    if group := _group(line):
        places = np.array(np.unravel_index(np.array(group), shape))
        return tuple(name for name, row in zip(mesh.shape, places, strict=True) if len(set(row.tolist())) > 1)
    return ()


def _group(line: str) -> list[int]:
    """The group of the first device, in any of HLO's three spellings."""
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
        return next((pair for pair in both if pair[0] != pair[1]), [0])  # each to itself
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    return []


def _iota(dims: str, turned: str | None) -> np.ndarray:
    """0, 1, 2, ... in an array of the dimensions, its axes in another order."""
    sizes = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in turned.split(",")]) if turned else ids
