"""What a compiled program moves, by its text: collectives, memory traffic, its largest arrays."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "send")
_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")  # name, shape, opcode, operands
_FREE = re.compile(  # operations that move nothing
    "parameter|tuple|get-tuple-element|bitcast|constant|while|conditional|call|after-all|partition-id|replica-id|iota|"
    "opt-barrier|add-dependency|.*-done"
)
_PRODUCTS = ("convolution", "dot", "custom-call")
_PIECES = ("slice", "dynamic-slice", "gather")  # operations that read no more of their operand than they return
_WRITES = {"dynamic-update-slice": 1, "scatter": 2}  # operations that write into their operand, and which operand they write
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# of a tuple's shape, an element: a tuple or an array
_ELEMENT = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\w+\[[^\]]*\](?:\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")


class Op(NamedTuple):
    """An operation of a program."""

    shape: str
    code: str
    operands: list[str]  # names; of a parameter or a constant its number
    called: list[str]  # names of computations
    line: str

    @property
    def kind(self) -> str:
        """Which exchange it is, or "". The TPU compiler writes a reduce-scatter as a fusion that calls an all-reduce."""
        if any(name.startswith("all-reduce-scatter") for name in self.called):
            return "reduce-scatter"
        kind = self.code.removesuffix("-start")
        return kind if kind in KINDS else ""

    # the value of a whole constant, 0 of anything else
    number = property(lambda self: int(self.operands[0]) if self.code == "constant" and self.operands[0].isdigit() else 0)


Computation = dict[str, Op]  # by name


class Exchange(NamedTuple):
    """Exchanges of one kind among devices: how many run in a step, and the bytes of their results on a device."""

    kind: str
    group: tuple[int, ...]  # the first group of devices that exchange, by their place in the mesh; (): not known
    overlapped: bool  # runs beside other operations
    count: int
    bytes: int


class Collective(NamedTuple):
    """One kind of exchange over some mesh axes: how many run in a step, and the bytes of their results on a device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


def _parse(text: str) -> dict[str, Computation]:
    """The computations of a program by name; that which runs first also as `ENTRY`."""
    computations: dict[str, Computation] = {"ENTRY": {}}
    inside = None
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            inside = computations[begin[1]] = {}
            if line.startswith("ENTRY"):
                computations["ENTRY"] = inside
        elif line.rstrip() == "}":  # not any line that begins with it: a constant's may
            inside = None
        elif inside is not None and (found := _OP.match(line)):
            name, shape, code, operands = found.groups()
            called = re.findall(r"%?([\w.\-]+)", " ".join(_CALLED.findall(line)))
            if "true_computation=" in line:  # a condition of bits: branch 0 is that of False, which is written last
                called.reverse()
            inside[name] = Op(shape, code, re.findall(r"%([\w.\-]+)", operands) or [operands], called, line)
    return computations


def _visited(computations: dict[str, Computation], branch: int | None = None) -> Iterator[tuple[Op, Computation, int, bool]]:
    """(operation, the computation in which it stands, how often it runs, whether as part of a fusion) of all operations.

    Of a conditional, those in all branches, or in the branch of that number.
    """
    todo = [("ENTRY", 1, False)]
    while todo:
        name, times, fused = todo.pop()
        inside = computations.get(name, {})
        for op in inside.values():
            yield op, inside, times, fused
            if op.kind:
                continue  # the sum that a reduction applies exchanges nothing
            turns = _turns(op.line, computations) if op.code == "while" else 1
            called = op.called
            if branch is not None and op.code == "conditional":
                called = called[min(branch, len(called) - 1) :][:1]
            todo += [(body, times * turns, fused or op.code == "fusion") for body in called]


def exchanges(text: str) -> list[Exchange]:
    """The exchanges of a program (`compiled.as_text()`); in a loop, one for each turn.

    The TPU compiler writes an exchange that runs beside other work into each fusion beside which it runs, on one channel;
    it counts once. A loop with an unknown number of turns counts once.
    """
    computations = _parse(text)
    counts, sizes = Counter[Any](), Counter[Any]()
    channels = set()
    for op, _, times, fused in _visited(computations):
        if not op.kind:
            continue
        if fused and (channel := re.search(r"channel_id=\d+", op.line)):
            if (op.kind, channel[0]) in channels:
                continue
            channels.add((op.kind, channel[0]))
        lines = [op.line, *(one.line for name in op.called for one in computations.get(name, {}).values())]
        group = tuple(next(filter(None, map(_group, lines)), []))
        if len(group) == 1:  # a device alone
            continue
        overlapped = (fused or op.code.endswith("-start") or op.kind == "send") and '"is_sync":true' not in op.line
        counts[op.kind, group, overlapped] += times
        sizes[op.kind, group, overlapped] += int(times * _bytes(op))
    return [
        Exchange(kind, group, overlapped, n, sizes[kind, group, overlapped]) for (kind, group, overlapped), n in counts.items()
    ]


def collectives(text: str, mesh) -> list[Collective]:
    """The exchanges of a program by the axes of its mesh, largest first."""
    return by_axes(exchanges(text), mesh)


def by_axes(found: list[Exchange], mesh) -> list[Collective]:
    """Exchanges by the axes of a mesh, largest first."""
    counts, sizes = Counter[Any](), Counter[Any]()
    for one in found:
        places = np.unravel_index(np.array(one.group, int), tuple(mesh.shape.values()))
        axes = tuple(name for name, row in zip(mesh.shape, places, strict=True) if len(set(row.tolist())) > 1)
        counts[one.kind, axes] += one.count
        sizes[one.kind, axes] += one.bytes
    merged = [Collective(kind, axes, n, sizes[kind, axes]) for (kind, axes), n in counts.items()]
    return sorted(merged, key=lambda one: -one.bytes)


class Traffic(NamedTuple):
    """Bytes that a device reads from and writes to its memory in one run of a program."""

    products: float  # of matrix products and kernels, with what is fused to them
    others: float


def traffic(text: str, branch: int | None = None) -> Traffic:
    """What operations move through a device's memory, loops multiplied out.

    Of a conditional, all branches count, or the one with that number (the last, if there are fewer).

    Each operation reads its operands and writes its results. Where a fusion cuts a piece out of an array, or writes one into
    it, the size of the piece counts. Arrays in the chip's fast memory (S(1) in their layout) do not count.
    """
    computations = _parse(text)
    total = {True: 0.0, False: 0.0}
    for op, inside, times, fused in _visited(computations, branch):
        if fused or _FREE.fullmatch(op.code) or "ConcatBitcast" in op.line:
            continue
        result = _in_memory(op.shape)
        sizes = [_in_memory(inside[name].shape) if name in inside else 0.0 for name in op.operands]
        if op.code == "fusion" and op.called[0] in computations:
            moved = _fusion(computations, computations[op.called[0]], sizes, result)
        elif op.code in _PIECES:
            moved = 2 * result
        elif op.code == "slice-start":  # of what it reads, a part, and where to
            moved = 2 * _size(*re.findall(r"(\w+)\[([\d,]*)\]", op.shape)[-2])
            moved -= moved / 2 if "S(1)" in _ELEMENT.findall(op.shape[1:])[1] else 0
        elif op.code == "copy-start":  # where to, and what it reads
            moved = result
        elif op.code == "dynamic-update-slice":
            moved = 2 * sizes[1]
        else:
            moved = result + sum(sizes)
        total[_has_product(computations, op)] += times * moved
    return Traffic(total[True], total[False])


def _has_product(computations: dict[str, Computation], op: Op) -> bool:
    inside = (other for name in op.called for other in computations.get(name, {}).values()) if op.code == "fusion" else ()
    return op.code in _PRODUCTS or any(_has_product(computations, other) for other in inside)


def _fusion(computations: dict[str, Computation], inside: Computation, operands: list[float], result: float) -> float:
    """Bytes that a fusion moves."""
    total = 0.0
    for name, op in inside.items():
        if op.code == "parameter" and int(op.operands[0]) < len(operands):
            total += _read(computations, inside, name, operands[int(op.operands[0])])
    pieces = [other.operands[_WRITES[other.code]] for other in inside.values() if other.code in _WRITES]
    updates = [_in_memory(inside[piece].shape) for piece in pieces if piece in inside]
    root = _root(inside)
    in_place = updates and root and (root.code in ("bitcast", "tuple") or any(code in root.line for code in _WRITES))
    return total + (sum(updates) if in_place else result)


def _read(computations: dict[str, Computation], inside: Computation, name: str, size: float) -> float:
    """Bytes that the operations of a fusion read of an array of that name and size; fusions in it may cut out a piece."""
    users, total = [(result, other) for result, other in inside.items() if name in other.operands], 0.0
    for result, user in users:
        body = computations.get(user.called[0], {}) if user.code == "fusion" else {}
        number = str(user.operands.index(name))
        entry = next((key for key, op in body.items() if op.code == "parameter" and op.operands[0] == number), "")
        if entry:
            total += _read(computations, body, entry, size)
        elif user.code == "bitcast" and "ROOT" not in user.line:  # the same array under another shape
            total += _read(computations, inside, result, size)
        elif user.code in _PIECES and user.operands[0] == name:
            total += _in_memory(user.shape) if size else 0.0
        elif user.code not in _WRITES or user.operands[0] != name:
            return size
    return min(size, total) if users else size


def _in_memory(shapes: str) -> float:
    """Bytes of the arrays of a result that lie in the device's main memory."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
    return math.fsum(_size(dtype, dims) for dtype, dims, layout in arrays if "S(1)" not in layout)


def _size(dtype: str, dims: str) -> float:
    bits = re.search(r"\d+", dtype.replace("pred", "u8"))
    return math.prod(int(n) for n in dims.split(",") if n) * (int(bits[0]) if bits else 0) / 8


def largest(report: str, count: int = 8) -> list[dict]:
    """The largest buffers in the compiler's memory-usage report, as `{"count", "bytes", "shape"}` of the largest array in each.

    Equal ones are one entry. The TPU compiler writes one report several times, as messages of its log: each is read once.
    """
    messages = re.split(r"^(?=[IWEF]\d{4} )", report, flags=re.MULTILINE)
    tables = {tuple(re.findall(r"\);\s+([\d.]+)(\w*i?B);\s+(\d+);\s+\d+; (.*)", message)) for message in messages}
    buffers = Counter[tuple[int, str]]()
    for size, unit, _, shapes in (row for table in tables for row in table):
        first = max(re.findall(r"\w+\[[\d,]*\]", shapes), key=_in_memory)
        buffers[int(float(size) * _UNITS[unit]), first] += 1
    rows = [{"count": number, "bytes": size, "shape": shape} for (size, shape), number in buffers.items()]
    return sorted(rows, key=lambda one: (-one["bytes"], one["shape"]))[:count]


def largest_results(text: str, count: int = 4) -> list[dict]:
    """The largest arrays that the operations of a program write, as `{"bytes", "shape", "source"}`; of equal ones, one."""
    arrays: dict[str, dict[str, Any]] = {}
    for op, _, _, fused in _visited(_parse(text)):
        if not (fused or _FREE.fullmatch(op.code) or op.shape.startswith("(")):
            name = re.search(r'op_name="jit\([^)]*\)/([^"]*)"', op.line)
            shape, source = op.shape.partition("{")[0], name[1] if name else op.code
            arrays.setdefault(shape, {"bytes": int(_bytes(op)), "shape": shape, "source": source})
    return sorted(arrays.values(), key=lambda one: -one["bytes"])[:count]


def _turns(line: str, computations: dict[str, Computation]) -> int:
    """The turns of a loop: as the compiler wrote, or the constant that bounds its counter, divided by the step."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    names = [re.search(rf"{part}=%?([\w.\-]+)", line) for part in ("condition", "body")]
    condition, body = (computations.get(name[1], {}) if name else {} for name in names)
    bounds = [op.number for op in condition.values() if re.match(r"[su]\d+\[\]", op.shape)]
    return max(1, math.ceil(max(bounds, default=1) / _step(condition, body)))


def _step(condition: Computation, body: Computation) -> int:
    """What a turn adds to the counter in the condition; 1 where a fusion hides it."""
    compared = next((op.operands[0] for op in condition.values() if op.code == "compare"), "")
    place = re.search(r"index=(\d+)", condition[compared].line) if compared in condition else None
    root = _root(body)
    if not place or not root or root.code != "tuple":
        return 1
    added = body.get(root.operands[int(place[1])])
    if not added or added.code != "add":
        return 1
    return max([1, *(body[name].number for name in added.operands if name in body)])


def _root(inside: Computation) -> Op | None:
    """The operation whose result is the computation's."""
    return next((op for op in inside.values() if op.line.lstrip().startswith("ROOT")), None)


def _bytes(op: Op) -> float:
    """Bytes of the result. A started exchange has a tuple of what it reads, its results, and more."""
    result = op.shape
    if op.code.endswith("-start") and op.kind != "all-reduce" and result.startswith("("):
        result = _ELEMENT.findall(result[1:])[1]
    return math.fsum(_size(dtype, dims) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result))


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
