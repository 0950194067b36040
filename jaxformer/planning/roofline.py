"""The least time that a step's exchanges take on a network: an estimate, by the rules of rings."""

import math
from collections import Counter, defaultdict
from typing import Any

from jaxformer.models.cost import Chip
from jaxformer.planning.hlo import Collective

# over these axes an exchange stands between two products that wait for it; over the others it can run beside them
BLOCKING = ("tensor", "expert", "stage")
_TORUS = {4: (16,), 6: tuple(range(4, 1025, 4))}  # extents at which a 2D (v5e, v6e) or 3D torus closes into a ring


def network(found: list[Collective], mesh: Any, chip: Chip) -> dict[str, float]:
    """Seconds of a step's exchanges by the axes they run over; `outside ...` is what leaves a slice (TPU) or a host (GPU).

    A ring of n moves (n - 1) / n of an array to gather or scatter it, twice that to sum it everywhere; a torus gives a ring
    for each dimension that an axis lies along, an open line half of one (Chan et al. 2007; the JAX scaling book, chapter 3).
    """
    seconds: dict[str, float] = defaultdict(float)
    extents = _extents([device for device in mesh.devices.flat])
    for one in found:
        devices = _group(mesh, one.axes)
        name, n = "*".join(one.axes) or "others", max(2, len(devices))
        parts = Counter(map(_island, devices)) if one.kind != "send" else {0: 1, 1: 1}
        moved = _moved(one.kind, one.bytes, n)
        if len(parts) > 1 or one.kind == "send":
            h, members = len(parts), min(parts.values())
            seconds[f"outside {name}"] += _moved(
                one.kind, one.bytes * (n / h if one.kind == "reduce-scatter" else 1), h
            ) / (chip.outside * (1 if one.kind in ("send", "collective-permute") else members))
        if one.kind != "send" and max(parts.values(), default=1) > 1:
            seconds[name] += moved / _speed(devices, extents, chip)
    return dict(seconds)


def step(seconds: dict[str, float]) -> float:
    """The least time of a step: products and what they wait for, or memory, or what can run beside them, whichever is most."""
    blocking = sum(value for name, value in seconds.items() if any(axis in name for axis in BLOCKING))
    beside = sum(value for name, value in seconds.items() if name not in ("compute", "memory")) - blocking
    return max(seconds["compute"] + blocking, seconds["memory"], beside)


def _moved(kind: str, size: int | float, n: int | float) -> float:
    """Bytes that each of n devices sends, for a result of so many bytes."""
    match kind:
        case "all-reduce":
            return 2 * (n - 1) / n * size
        case "reduce-scatter":
            return (n - 1.0) * size
        case "collective-permute" | "send":
            return float(size)
    return (n - 1) / n * size


def _group(mesh: Any, axes: tuple[str, ...]) -> list:
    """The devices of the mesh's first group along some axes; all for none."""
    at = tuple(slice(None) if axis in axes or not axes else 0 for axis in mesh.axis_names)
    return list(mesh.devices[at].flat)


def _island(device) -> int:
    """What the fast network joins: a slice of TPUs, a host of GPUs."""
    return device.process_index if device.platform in ("gpu", "cuda") else getattr(device, "slice_index", 0)


def _extents(devices: list) -> list[int]:
    coords = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return [len(set(column)) for column in zip(*coords, strict=True)]


def _speed(devices: list, extents: list[int], chip: Chip) -> float:
    """Bytes/s with which a device sends along a group."""
    if not chip.links:
        return chip.network / 2
    own = [device for device in devices if _island(device) == _island(devices[0])]
    spans = _extents(own)
    rings = [
        1.0 if span == whole and span in _TORUS[chip.links] else 0.5
        for span, whole in zip(spans, extents, strict=True)
        if span > 1
    ]
    return chip.network / chip.links * max(0.5, math.fsum(rings))
