"""An estimate of the least time of a step: products, memory traffic, and exchanges on the network.

`seconds` makes it. Exchanges follow the rules of ring algorithms.
"""

import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from jaxformer.models.cost import Chip
from jaxformer.tools.planning.hlo import Exchange, Traffic, by_axes

# {links of a chip: extents at which a dimension of a 2D (v5e, v6e) or 3D torus closes into a ring}
_TORUS = {4: (16,), 6: tuple(range(4, 1025, 4))}


def network(
    exchanges: list[Exchange], mesh: Any, chip: Chip
) -> tuple[dict[str, float], dict[str, float]]:
    """({axes: seconds} of exchanges that operations wait for, the same of overlapped exchanges).

    A ring of n devices moves (n - 1) / n of an array to gather or scatter it, and twice that to sum
    it everywhere. A torus has a ring in each dimension that a group fills; an open line has half
    the speed of a ring (Chan et al. 2007; the JAX scaling book, chapter 3). `outside ...` is the
    traffic between slices (TPU) or hosts (GPU).
    """
    waits: dict[str, float] = defaultdict(float)
    overlapped: dict[str, float] = defaultdict(float)
    everywhere = list(mesh.devices.flat)
    extents = _extents(_coordinates(everywhere))
    for exchange in exchanges:
        kind = exchange.kind
        devices = [everywhere[position] for position in exchange.group] or everywhere
        (collective,) = by_axes([exchange], mesh)
        axes = "*".join(collective.axes) or "others"
        n = max(2, len(devices))
        seconds = overlapped if exchange.overlapped else waits
        # {island: its devices}; the two ends of a send lie in different islands
        islands = {0: 1, 1: 1} if kind == "send" else Counter(map(_island, devices))
        if len(islands) > 1:
            size = exchange.bytes
            if kind == "reduce-scatter":
                size = size * n / len(islands)
            senders = 1 if kind in ("send", "collective-permute") else min(islands.values())
            speed = chip.outside * senders
            seconds[f"outside {axes}"] += _moved(kind, size, len(islands)) / speed
        if max(islands.values()) > 1:
            seconds[axes] += _moved(kind, exchange.bytes, n) / _speed(devices, extents, chip)
    return dict(waits), dict(overlapped)


class Seconds(NamedTuple):
    """Estimated seconds of the parts of a step on a device."""

    products: float  # matrix products: the longer one of arithmetic and memory traffic
    others: float  # all other operations, by their memory traffic
    waits: dict[str, float]  # exchanges that the other operations wait for, by mesh axes
    overlapped: dict[str, float]  # exchanges that run beside other operations, by mesh axes

    @property
    def step(self) -> float:
        return max(
            self.products + self.others + sum(self.waits.values()), sum(self.overlapped.values())
        )

    def parts(self) -> dict[str, float]:
        """{name: seconds} of each part."""
        parts = {"products": self.products, "other operations": self.others}
        parts |= {f"waiting for {name}": seconds for name, seconds in self.waits.items()}
        return parts | {f"beside them {name}": seconds for name, seconds in self.overlapped.items()}


def seconds(
    flops: float, moved: Traffic, exchanges: list[Exchange], mesh: Any, chip: Chip
) -> Seconds:
    """The estimated seconds of a program that computes `flops` on a device."""
    products = max(flops / (chip.peak * chip.reached), moved.products / chip.bandwidth)
    return Seconds(products, moved.others / chip.bandwidth, *network(exchanges, mesh, chip))


def _moved(kind: str, size: int | float, n: int | float) -> float:
    """Bytes that each of n devices sends for a result of `size` bytes."""
    factors = {
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": n - 1,
        "collective-permute": 1,
        "send": 1,
    }
    return float(factors.get(kind, (n - 1) / n) * size)


def _island(device) -> int:
    """The number of a device's slice (TPU) or host (GPU). Inside of it the network is fast."""
    if device.platform in ("gpu", "cuda"):
        return device.process_index
    return getattr(device, "slice_index", 0)


def _coordinates(devices: list) -> list[tuple[int, ...]]:
    """The places of chips in their torus; two cores of a chip have the same."""
    coords = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return [tuple(place) for place in dict.fromkeys(map(tuple, coords))]


def _extents(places: list[tuple[int, ...]]) -> list[int]:
    """The number of different coordinates in each dimension of a torus."""
    return [len(set(column)) for column in zip(*places, strict=True)]


def _speed(devices: list, extents: list[int], chip: Chip) -> float:
    """Bytes/s that a device sends within a group."""
    if not chip.links:
        return chip.network / 2
    neighbours = [device for device in devices if _island(device) == _island(devices[0])]
    places = _coordinates(neighbours)
    spans = _extents(places)
    link = chip.network / chip.links
    if places and math.prod(spans) > len(places):  # a diagonal: it fills no box of the torus
        return link * min(1.0, chip.links / (2 * _mean_hops(places, extents, chip)))
    rings = []  # 1 for each dimension with a ring, 1/2 for an open line
    for span, full in zip(spans, extents, strict=True):
        if span > 1:
            rings.append(1.0 if span == full and span in _TORUS[chip.links] else 0.5)
    return link * max(0.5, math.fsum(rings))


def _mean_hops(places: list[tuple[int, ...]], extents: list[int], chip: Chip) -> float:
    """The mean number of links between neighbours of a ring that visits the places in order.

    A message occupies each link that it passes, so that other groups wait for them.
    """
    hops = 0
    for place, after in zip(places, places[1:] + places[:1], strict=True):
        for a, b, extent in zip(place, after, extents, strict=True):
            steps = abs(a - b)
            hops += min(steps, extent - steps) if extent in _TORUS[chip.links] else steps
    return hops / len(places)
