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
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One kind of exchange over some mesh axes: how many run in a step, and the bytes of their results on a device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


def collectives(text: str, mesh) -> list[Collective]:
    """The collectives of a program (`compiled.as_text()`) on a mesh, loops multiplied out, largest first.

    The TPU compiler writes a reduce-scatter as a fusion that calls an all-reduce; it counts as what it is. A loop whose
    number of turns the compiler does not know counts once.
    """
    bodies, entry = _computations(text)
    counts: dict[tuple, int] = Counter()
    sizes: dict[tuple, float] = defaultdict(float)

    def walk(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            scatter = re.search(r"calls=%?all-reduce-scatter[\w.\-]*", line)
            kind = "reduce-scatter" if scatter else _kind(line)
            if kind:
                axes = _axes(line if not scatter else _inner(bodies, scatter[0].partition("=")[2].lstrip("%")), mesh)
                counts[kind, axes] += times
                sizes[kind, axes] += times * _bytes(line, kind)
                if scatter:
                    continue
            turns = _turns(line, bodies) if " while(" in line else 1
            for one, several in _CALLED.findall(line):
                for called in [one] if one else re.findall(r"%?([\w.\-]+)", several):
                    if kind is None:  # the sum that a reduction applies exchanges nothing
                        walk(called, times * turns)

    walk(entry, 1)
    found = [Collective(kind, axes, counts[kind, axes], int(sizes[kind, axes])) for kind, axes in counts]
    return sorted(found, key=lambda one: -one.bytes)


def _turns(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a loop turns: what the compiler says, or the constant that its condition compares with."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    bounds = re.findall(r"s32\[\]\S* constant\((\d+)\)", "\n".join(bodies.get(condition[1], ()))) if condition else []
    return max(map(int, bounds), default=1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            name = begin[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
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
    """Of the result; a started exchange names what it reads beside it, the largest is what arrives."""
    result = line.partition(" = ")[2]
    result = result[: result.index(f" {kind}") if f" {kind}" in result else result.index(" fusion(")]
    arrays = [
        math.prod(int(n) for n in shape.split(",") if n) * WIDTHS.get(dtype, _width(dtype))
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
    ]
    return float(max(arrays) if "-start(" in line else sum(arrays)) if arrays else 0.0


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
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([\w.]+)'=(\d+)", named[1]))
        ids = np.arange(math.prod(map(int, sizes.values()))).reshape([int(n) for n in sizes.values()])
        along = re.findall(r"'([\w.]+)'", named[2])
        return ids[tuple(slice(None) if axis in along else 0 for axis in sizes)].ravel().tolist()
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims = [int(n) for n in iota[3].split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose([int(n) for n in iota[4].split(",")]) if iota[4] else ids
        return ids.reshape(int(iota[1]), int(iota[2]))[0].tolist()
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    return []
