"""The least time that a step's exchanges take on a network: an estimate, by the rules of rings."""

import math
from collections import Counter, defaultdict
from typing import Any

from jaxformer.models.cost import Chip
from jaxformer.planning.hlo import Collective

# products wait for exchanges over these axes; exchanges over the others can run at the same time
BLOCKING = ("tensor", "expert", "stage")
_TORUS = {4: (16,), 6: tuple(range(4, 1025, 4))}  # extents at which a 2D (v5e, v6e) or 3D torus closes into a ring


def network(found: list[Collective], mesh: Any, chip: Chip) -> dict[str, float]:
    """Seconds of a step's exchanges by mesh axes; `outside ...` is the traffic between slices (TPU) or hosts (GPU).

    A ring of n moves (n - 1) / n of an array to gather or scatter it, twice that to sum it everywhere. A torus has a ring in
    each dimension that an axis fills, an open line half of one (Chan et al. 2007; the JAX scaling book, chapter 3).
    """
    seconds: dict[str, float] = defaultdict(float)
    extents = _extents(list(mesh.devices.flat))
    for one in found:
        # the mesh's first group along its axes; all devices where they are not known
        at = tuple(slice(None) if axis in one.axes or not one.axes else 0 for axis in mesh.axis_names)
        devices = list(mesh.devices[at].flat)
        name, n = "*".join(one.axes) or "others", max(2, len(devices))
        islands = {0: 1, 1: 1} if one.kind == "send" else Counter(map(_island, devices))
        if len(islands) > 1:
            size = one.bytes * n / len(islands) if one.kind == "reduce-scatter" else one.bytes
            senders = 1 if one.kind in ("send", "collective-permute") else min(islands.values())
            seconds[f"outside {name}"] += _moved(one.kind, size, len(islands)) / (chip.outside * senders)
        if max(islands.values()) > 1:
            seconds[name] += _moved(one.kind, one.bytes, n) / _speed(devices, extents, chip)
    return dict(seconds)


def step(seconds: dict[str, float]) -> float:
    """The least time of a step: the largest of products with the exchanges that they wait for, memory, and other exchanges."""
    blocking = sum(value for name, value in seconds.items() if any(axis in name for axis in BLOCKING))
    others = sum(value for name, value in seconds.items() if name not in ("compute", "memory")) - blocking
    return max(seconds["compute"] + blocking, seconds["memory"], others)


def _moved(kind: str, size: int | float, n: int | float) -> float:
    """Bytes that each of n devices sends, for a result of so many bytes."""
    factors = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1, "send": 1}
    return float(factors.get(kind, (n - 1) / n) * size)


def _island(device) -> int:
    """The number of its slice (TPU) or host (GPU), within which the network is fast."""
    return device.process_index if device.platform in ("gpu", "cuda") else getattr(device, "slice_index", 0)


def _extents(devices: list) -> list[int]:
    coords = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return [len(set(column)) for column in zip(*coords, strict=True)]


def _speed(devices: list, extents: list[int], chip: Chip) -> float:
    """Bytes/s with which a device sends along a group."""
    if not chip.links:
        return chip.network / 2
    neighbours = [device for device in devices if _island(device) == _island(devices[0])]
    pairs = zip(_extents(neighbours), extents, strict=True)
    rings = [1.0 if span == full and span in _TORUS[chip.links] else 0.5 for span, full in pairs if span > 1]
    return chip.network / chip.links * max(0.5, math.fsum(rings))
