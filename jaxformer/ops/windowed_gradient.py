"""The sum of a gradient over TPUs, which travels while the products of the gradient run.

libtpu (0.0.42) makes the whole gradient first, and then a reduce-scatter that nothing hides. Here
each device makes the products of two chunks at a time. The sum of one chunk goes around the ring of
devices, that of the other comes back, and both travel while the next two products run:

    step s on device p:  forward += product(p + R/2 - 1 - s),  back += product(p - R/2 + s)

Each sum passes half of the R devices and ends at the device that keeps the chunk. The idea is that
of windowed einsums: Wang et al. 2023, doi:10.1145/3567955.3567959, section 3.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer.sharding import device_kind, platform, psum_scatter

FEWEST = 16  # devices; a smaller ring was not measured
ROW = 16  # devices of a row, where other axes of the mesh share the torus
FLAT = ("TPU v5 lite", "TPU v6 lite")  # chips whose torus has two dimensions
# {devices of a whole torus: rows}, so that a message passes two links at most: 4 x 8, 8 x 8,
# 8 x 16, 4 x 8 x 8, 8 x 8 x 8, 8 x 8 x 16, 8 x 16 x 16. The compiler's coordinates were asked.
ROWS = {32: 4, 64: 8, 128: 8, 256: 4, 512: 8, 1024: 8, 2048: 8}
FLAT_ROWS = ROWS | {256: 16}  # 16 x 16


class Ring(NamedTuple):
    """Rings among the devices of a mesh axis: device i is in row i // `inner` of them."""

    order: tuple[int, ...]  # the rows as a sum passes them
    inner: int = 1  # devices of a row; each has a ring of its own through all rows

    @property
    def size(self) -> int:
        """R: the devices of a ring."""
        return len(self.order)

    def pairs(self) -> list[tuple[int, int]]:
        """(device, the next device of its ring)."""
        after = dict(zip(self.order, (*self.order[1:], self.order[0]), strict=True))
        devices = range(self.size * self.inner)
        return [(i, after[i // self.inner] * self.inner + i % self.inner) for i in devices]


def ring_of(size: int) -> Ring | None:
    """The rings in which `size` TPUs sum; None where a reduce-scatter is as good.

    On a torus of 16 x 16, libtpu exchanges along a whole closed ring of columns at once, and along
    a folded one (0, 2, ..., 15, 13, ..., 1) while products run.
    """
    if platform() != "tpu" or size < FEWEST:
        return None
    if size == FEWEST:
        return Ring(tuple(range(size)))
    if size % ROW:
        return None
    rows = size // ROW
    if jax.sharding.get_abstract_mesh().size == size:
        rows = (FLAT_ROWS if device_kind() in FLAT else ROWS).get(size, rows)
    return None if rows % 2 else folded(rows, size // rows)


def folded(rows: int, inner: int) -> Ring:
    """A ring whose neighbours are at most two rows apart."""
    return Ring((*range(0, rows, 2), *range(rows - 1, 0, -2)), inner)


def windowed(
    ring: Ring, product: Callable[[Array], Array], x: Array, axis: int, name: str
) -> Array:
    """The sum of product(x) over the manual mesh axis `name`; each device keeps its share of it.

    `product` maps each slice of x along `axis` to the same slice of its result's first axis. R is
    even and divides both.
    """
    R, half = ring.size, ring.size // 2
    order = jnp.asarray(ring.order)
    places = jnp.argsort(order)  # of each row in the ring
    here = places[jax.lax.axis_index(name) // ring.inner]
    chunk = x.shape[axis] // R

    def piece(place: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, order[place % R] * chunk, chunk, axis)

    def products(step) -> tuple[Array, Array]:
        both = [piece(here + half - 1 - step), piece(here - half + step)]
        made = product(jnp.concatenate(both, axis))  # one product of twice the size
        return made[: len(made) // 2], made[len(made) // 2 :]

    there = ring.pairs()
    back = [(after, device) for device, after in there]

    def turn(sums: tuple[Array, Array], step) -> tuple[tuple[Array, Array], None]:
        arrived = jax.lax.ppermute(sums[0], name, there), jax.lax.ppermute(sums[1], name, back)
        made = products(step)
        return (arrived[0] + made[0], arrived[1] + made[1]), None

    (forward, backward), _ = jax.lax.scan(turn, products(0), jnp.arange(1, half))
    total = forward + jax.lax.ppermute(backward, name, back)
    if ring.inner == 1:
        return total
    rows = [list(range(i * ring.inner, (i + 1) * ring.inner)) for i in range(R)]
    return psum_scatter(total, name, axis_index_groups=rows, tiled=True)
