"""The data that a compiled program moves, read from its HLO text.

`collectives` lists the exchanges between devices, `traffic` counts the bytes through memory,
`largest` and `largest_results` list the largest arrays.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "send")
# the first line of a computation: its name
_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# an operation: its name, shape, opcode and operands
_OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")
# operations that move nothing
_FREE = re.compile(
    "parameter|tuple|get-tuple-element|bitcast|constant|while|conditional|call|after-all|"
    "partition-id|replica-id|iota|opt-barrier|add-dependency|.*-done"
)
_PRODUCTS = ("convolution", "dot", "custom-call")
# operations that read no more of their operand than they return
_PIECES = ("slice", "dynamic-slice", "gather")
# {operation that writes into its first operand: the operand that it writes there}
_WRITES = {"dynamic-update-slice": 1, "scatter": 2}
# groups of devices by the names of mesh axes
_NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]"
    r"(?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# an element in the shape of a tuple: a tuple or an array
_ELEMENT = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\w+\[[^\]]*\](?:\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")


class Op(NamedTuple):
    """An operation of a program."""

    shape: str
    code: str
    operands: list[str]  # names; for a parameter or a constant its number
    called: list[str]  # names of computations
    line: str

    @property
    def kind(self) -> str:
        """The kind of exchange (one of KINDS), or "" for another operation.

        The TPU compiler writes a reduce-scatter as a fusion that calls an all-reduce.
        """
        if any(name.startswith("all-reduce-scatter") for name in self.called):
            return "reduce-scatter"
        kind = self.code.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def number(self) -> int:
        """The value of an integer constant; 0 for any other operation."""
        is_integer = self.code == "constant" and self.operands[0].isdigit()
        return int(self.operands[0]) if is_integer else 0


Computation = dict[str, Op]  # by name


class _Visit(NamedTuple):
    """An operation at one place of a program."""

    op: Op
    computation: Computation  # in which it stands
    times: int  # how often it runs
    fused: bool  # whether it is part of a fusion


class Exchange(NamedTuple):
    """Exchanges of one kind within one group of devices."""

    kind: str
    # the first group of devices that exchange, as positions in the mesh; (): not known
    group: tuple[int, ...]
    overlapped: bool  # runs beside other operations
    count: int  # in a step
    bytes: int  # of the results on a device


class Collective(NamedTuple):
    """Exchanges of one kind over the same mesh axes."""

    kind: str
    axes: tuple[str, ...]
    count: int  # in a step
    bytes: int  # of the results on a device


def _parse(text: str) -> dict[str, Computation]:
    """{name: computation} of a program. The one that runs first also has the name `ENTRY`."""
    computations: dict[str, Computation] = {"ENTRY": {}}
    inside = None
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            inside = computations[begin[1]] = {}
            if line.startswith("ENTRY"):
                computations["ENTRY"] = inside
        elif line.rstrip() == "}":  # a line of a constant may begin with }, too
            inside = None
        elif inside is not None and (found := _OP.match(line)):
            name, shape, code, operands = found.groups()
            called = re.findall(r"%?([\w.\-]+)", " ".join(_CALLED.findall(line)))
            # a condition on a boolean: branch 0 is that of False, which is written last
            if "true_computation=" in line:
                called.reverse()
            inside[name] = Op(
                shape, code, re.findall(r"%([\w.\-]+)", operands) or [operands], called, line
            )
    return computations


def _visits(computations: dict[str, Computation], branch: int | None = None) -> Iterator[_Visit]:
    """All operations of a program.

    Of a conditional, the operations of all branches, or only those of the branch with that number.
    """
    todo = [("ENTRY", 1, False)]
    while todo:
        name, times, fused = todo.pop()
        computation = computations.get(name, {})
        for op in computation.values():
            yield _Visit(op, computation, times, fused)
            if op.kind:
                continue  # the sum that a reduction applies exchanges nothing
            iterations = _iterations(op.line, computations) if op.code == "while" else 1
            called = op.called
            if branch is not None and op.code == "conditional":
                called = called[min(branch, len(called) - 1) :][:1]
            for body in called:
                todo.append((body, times * iterations, fused or op.code == "fusion"))


def exchanges(text: str) -> list[Exchange]:
    """The exchanges of a program (`compiled.as_text()`); in a loop, one for each iteration.

    The TPU compiler writes an overlapped exchange into each fusion that runs beside it, always with
    the same channel; it counts once. A loop with an unknown number of iterations counts once.
    """
    computations = _parse(text)
    counts, sizes = Counter[Any](), Counter[Any]()
    channels = set()
    for visit in _visits(computations):
        op = visit.op
        if not op.kind:
            continue
        if visit.fused and (channel := re.search(r"channel_id=\d+", op.line)):
            if (op.kind, channel[0]) in channels:
                continue
            channels.add((op.kind, channel[0]))
        lines = [op.line]
        for name in op.called:
            lines += [inner.line for inner in computations.get(name, {}).values()]
        group = tuple(next(filter(None, map(_group, lines)), []))
        if len(group) == 1:  # a device alone
            continue
        is_started = visit.fused or op.code.endswith("-start") or op.kind == "send"
        overlapped = is_started and '"is_sync":true' not in op.line
        key = (op.kind, group, overlapped)
        counts[key] += visit.times
        sizes[key] += int(visit.times * _bytes(op))
    return [
        Exchange(kind, group, overlapped, n, sizes[kind, group, overlapped])
        for (kind, group, overlapped), n in counts.items()
    ]


def collectives(text: str, mesh) -> list[Collective]:
    """The exchanges of a program (`compiled.as_text()`) by mesh axes, largest first."""
    return by_axes(exchanges(text), mesh)


def by_axes(found: list[Exchange], mesh) -> list[Collective]:
    """Exchanges by mesh axes, largest first."""
    counts, sizes = Counter[Any](), Counter[Any]()
    for exchange in found:
        group = np.array(exchange.group, int)
        positions = np.unravel_index(group, tuple(mesh.shape.values()))  # of each mesh axis
        axes = tuple(
            name
            for name, along in zip(mesh.shape, positions, strict=True)
            if len(set(along.tolist())) > 1
        )
        counts[exchange.kind, axes] += exchange.count
        sizes[exchange.kind, axes] += exchange.bytes
    merged = [Collective(kind, axes, n, sizes[kind, axes]) for (kind, axes), n in counts.items()]
    return sorted(merged, key=lambda collective: -collective.bytes)


class Traffic(NamedTuple):
    """Bytes that a device reads from and writes to its memory in one run of a program."""

    products: float  # of matrix products and kernels, with the operations fused to them
    others: float


def traffic(text: str, branch: int | None = None) -> Traffic:
    """The bytes that a program moves through a device's memory, with loops multiplied out.

    Each operation reads its operands and writes its results. If a fusion cuts a piece out of an
    array, or writes a piece into it, the size of the piece counts. Arrays in the chip's fast memory
    (S(1) in their layout) do not count. Of a conditional all branches count, or only the branch
    with that number (the last one if there are fewer).
    """
    computations = _parse(text)
    products = 0.0
    others = 0.0
    for visit in _visits(computations, branch):
        op = visit.op
        if visit.fused or _FREE.fullmatch(op.code) or "ConcatBitcast" in op.line:
            continue
        moved = visit.times * _moved(computations, visit.computation, op)
        if _has_product(computations, op):
            products += moved
        else:
            others += moved
    return Traffic(products, others)


def _moved(computations: dict[str, Computation], computation: Computation, op: Op) -> float:
    """Bytes that one operation of a computation moves."""
    result = _in_memory(op.shape)
    operands = [
        _in_memory(computation[name].shape) if name in computation else 0.0 for name in op.operands
    ]
    if op.code == "fusion" and op.called[0] in computations:
        return _moved_by_fusion(computations, computations[op.called[0]], operands, result)
    if op.code in _PIECES:
        return 2 * result
    if op.code == "slice-start":  # its shape: (the array, the slice, a context)
        moved = 2 * _size(*re.findall(r"(\w+)\[([\d,]*)\]", op.shape)[-2])
        return moved / 2 if "S(1)" in _ELEMENT.findall(op.shape[1:])[1] else moved
    if op.code == "copy-start":  # its shape: (the copy, the array, a context)
        return result
    if op.code == "dynamic-update-slice":
        return 2 * operands[1]
    return result + sum(operands)


def _has_product(computations: dict[str, Computation], op: Op) -> bool:
    """Whether an operation is a product, or a fusion that contains one."""
    if op.code in _PRODUCTS:
        return True
    if op.code != "fusion":
        return False
    bodies = [computations.get(name, {}) for name in op.called]
    return any(_has_product(computations, inner) for body in bodies for inner in body.values())


def _moved_by_fusion(
    computations: dict[str, Computation], body: Computation, operands: list[float], result: float
) -> float:
    """Bytes that a fusion moves; `operands` and `result` are the sizes of its whole arrays."""
    read = 0.0
    for name, op in body.items():
        if op.code == "parameter" and int(op.operands[0]) < len(operands):
            read += _read(computations, body, name, operands[int(op.operands[0])])
    pieces = [op.operands[_WRITES[op.code]] for op in body.values() if op.code in _WRITES]
    updates = [_in_memory(body[piece].shape) for piece in pieces if piece in body]
    root = _root(body)
    if not updates or root is None:
        return read + result
    in_place = root.code in ("bitcast", "tuple") or any(code in root.line for code in _WRITES)
    return read + (sum(updates) if in_place else result)


def _read(computations: dict[str, Computation], body: Computation, name: str, size: float) -> float:
    """Bytes that the operations of a fusion read of the array `name`, which has `size` bytes.

    An operation, or a fusion inside, may read only a piece of it.
    """
    users = [(result, user) for result, user in body.items() if name in user.operands]
    total = 0.0
    for result, user in users:
        inner = computations.get(user.called[0], {}) if user.code == "fusion" else {}
        parameter = _parameter(inner, user.operands.index(name))
        if parameter:
            total += _read(computations, inner, parameter, size)
        elif user.code == "bitcast" and "ROOT" not in user.line:
            total += _read(computations, body, result, size)  # the same array in another shape
        elif user.code in _PIECES and user.operands[0] == name:
            total += _in_memory(user.shape) if size else 0.0
        elif user.code not in _WRITES or user.operands[0] != name:
            return size
    return min(size, total) if users else size


def _parameter(computation: Computation, number: int) -> str:
    """The name of a computation's parameter with that number, or ""."""
    for name, op in computation.items():
        if op.code == "parameter" and op.operands[0] == str(number):
            return name
    return ""


def _in_memory(shapes: str) -> float:
    """Bytes of those arrays in a shape that lie in the device's main memory."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
    return math.fsum(_size(dtype, dims) for dtype, dims, layout in arrays if "S(1)" not in layout)


def _size(dtype: str, dims: str) -> float:
    bits = re.search(r"\d+", dtype.replace("pred", "u8"))
    return math.prod(int(n) for n in dims.split(",") if n) * (int(bits[0]) if bits else 0) / 8


def largest(report: str, count: int = 8) -> list[dict]:
    """The largest buffers in the compiler's memory report, as `{"count", "bytes", "shape"}`.

    `shape` is that of the largest array in a buffer; a buffer of the compiler alone has none and is
    left out. Equal buffers are one entry. The TPU compiler writes a report several times into its
    log; equal reports are read once.
    """
    messages = re.split(r"^(?=[IWEF]\d{4} )", report, flags=re.MULTILINE)
    tables = {
        tuple(re.findall(r"\);\s+([\d.]+)(\w*i?B);\s+(\d+);\s+\d+; (.*)", message))
        for message in messages
    }
    counts = Counter[tuple[int, str]]()
    for table in tables:
        for size, unit, _, shapes in table:
            if arrays := re.findall(r"\w+\[[\d,]*\]", shapes):
                shape = max(arrays, key=_in_memory)
                counts[int(float(size) * _UNITS[unit]), shape] += 1
    buffers = [
        {"count": number, "bytes": size, "shape": shape} for (size, shape), number in counts.items()
    ]
    return sorted(buffers, key=lambda buffer: (-buffer["bytes"], buffer["shape"]))[:count]


def largest_results(text: str, count: int = 4) -> list[dict]:
    """The largest results of a program's operations, as `{"bytes", "shape", "source"}`.

    Each shape appears once.
    """
    arrays: dict[str, dict[str, Any]] = {}
    for visit in _visits(_parse(text)):
        op = visit.op
        if not (visit.fused or _FREE.fullmatch(op.code) or op.shape.startswith("(")):
            name = re.search(r'op_name="jit\([^)]*\)/([^"]*)"', op.line)
            shape = op.shape.partition("{")[0]
            source = name[1] if name else op.code
            arrays.setdefault(shape, {"bytes": int(_bytes(op)), "shape": shape, "source": source})
    return sorted(arrays.values(), key=lambda array: -array["bytes"])[:count]


def _iterations(line: str, computations: dict[str, Computation]) -> int:
    """The number of iterations of a loop.

    The compiler writes it, or it is the constant that bounds the counter, divided by its step.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    names = [re.search(rf"{role}=%?([\w.\-]+)", line) for role in ("condition", "body")]
    condition, body = (computations.get(name[1], {}) if name else {} for name in names)
    bounds = [op.number for op in condition.values() if re.match(r"[su]\d+\[\]", op.shape)]
    return max(1, math.ceil(max(bounds, default=1) / _step(condition, body)))


def _step(condition: Computation, body: Computation) -> int:
    """The number that an iteration adds to the counter of the condition; 1 if a fusion hides it."""
    compared = next((op.operands[0] for op in condition.values() if op.code == "compare"), "")
    index = re.search(r"index=(\d+)", condition[compared].line) if compared in condition else None
    root = _root(body)
    if not index or not root or root.code != "tuple":
        return 1
    added = body.get(root.operands[int(index[1])])
    if not added or added.code != "add":
        return 1
    return max([1, *(body[name].number for name in added.operands if name in body)])


def _root(computation: Computation) -> Op | None:
    """The operation whose result is the result of the computation."""
    return next((op for op in computation.values() if op.line.lstrip().startswith("ROOT")), None)


def _bytes(op: Op) -> float:
    """Bytes of the result. The shape of a started exchange is (operands, results, ...)."""
    result = op.shape
    if op.code.endswith("-start") and op.kind != "all-reduce" and result.startswith("("):
        result = _ELEMENT.findall(result[1:])[1]
    return math.fsum(_size(dtype, dims) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result))


def _group(line: str) -> list[int]:
    """The first group of devices of an exchange; HLO has several ways to write groups."""
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
