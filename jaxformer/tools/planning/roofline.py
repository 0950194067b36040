"""The least time that a step's exchanges take on a network: an estimate, by the rules of rings."""

import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from jaxformer.models.cost import Chip
from jaxformer.tools.planning.hlo import Exchange, Traffic, by_axes

_TORUS = {4: (16,), 6: tuple(range(4, 1025, 4))}  # extents at which a 2D (v5e, v6e) or 3D torus closes into a ring


def network(found: list[Exchange], mesh: Any, chip: Chip) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the exchanges that other operations wait for, and of the overlapped ones, by mesh axes.

    A ring of n moves (n - 1) / n of an array to gather or scatter it, twice that to sum it everywhere. A torus has a ring in
    each dimension that a group fills, an open line half of one (Chan et al. 2007; the JAX scaling book, chapter 3).
    `outside ...` is the traffic between slices (TPU) or hosts (GPU).
    """
    waits: dict[str, float] = defaultdict(float)
    overlapped: dict[str, float] = defaultdict(float)
    everywhere = list(mesh.devices.flat)
    extents = _extents(everywhere)
    for one in found:
        devices = [everywhere[place] for place in one.group] or everywhere
        (axes,) = [collective.axes for collective in by_axes([one], mesh)]
        name, n, seconds = "*".join(axes) or "others", max(2, len(devices)), overlapped if one.overlapped else waits
        islands = {0: 1, 1: 1} if one.kind == "send" else Counter(map(_island, devices))
        if len(islands) > 1:
            size = one.bytes * n / len(islands) if one.kind == "reduce-scatter" else one.bytes
            senders = 1 if one.kind in ("send", "collective-permute") else min(islands.values())
            seconds[f"outside {name}"] += _moved(one.kind, size, len(islands)) / (chip.outside * senders)
        if max(islands.values()) > 1:
            seconds[name] += _moved(one.kind, one.bytes, n) / _speed(devices, extents, chip)
    return dict(waits), dict(overlapped)


class Seconds(NamedTuple):
    """Estimates of a step's parts on a device."""

    products: float  # of matrix products: the larger of their arithmetic and of what they move through memory
    others: float  # of all other operations, by what they move
    waits: dict[str, float]  # of exchanges that nothing runs beside, by mesh axes
    overlapped: dict[str, float]  # of exchanges beside other operations, by mesh axes

    @property
    def step(self) -> float:
        return max(self.products + self.others + sum(self.waits.values()), sum(self.overlapped.values()))

    def parts(self) -> dict[str, float]:
        """Each part by its name."""
        parts = {"products": self.products, "other operations": self.others}
        parts |= {f"waiting for {name}": seconds for name, seconds in self.waits.items()}
        return parts | {f"beside them {name}": seconds for name, seconds in self.overlapped.items()}


def seconds(flops: float, moved: Traffic, found: list[Exchange], mesh: Any, chip: Chip) -> Seconds:
    """The parts of a program that does so many FLOPs on a device."""
    products = max(flops / (chip.peak * chip.reached), moved.products / chip.bandwidth)
    return Seconds(products, moved.others / chip.bandwidth, *network(found, mesh, chip))


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
