"""Parameters that are filled part by part, while a folder is read."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

# A leaf of at most this many bytes is put together on the host, in one transfer and without a
# compilation. A larger leaf is put together on its devices: the host then holds one part of it.
HOST_BYTES = 1 << 28
# A part goes to its device in copies of at most this many bytes: the host holds one of them.
COPY_BYTES = 1 << 26


class OnHost(NamedTuple):
    """A leaf that goes to its devices when it is complete."""

    host: np.ndarray
    sharding: Sharding

    def fill(self, index: tuple[int, ...], values: np.ndarray) -> None:
        self.host[index] = values

    def array(self) -> jax.Array:
        copy = jax.make_array_from_callback(self.host.shape, self.sharding, self.host.__getitem__)
        # an unfinished copy would keep the leaf on the host
        return jax.block_until_ready(copy)


class Piece(NamedTuple):
    """What one device has of a leaf: the numbers from `start` to `stop` of each axis."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    on_device: jax.Array


class OnDevices(NamedTuple):
    """A leaf whose parts go to their devices at once."""

    shape: tuple[int, ...]
    sharding: Sharding
    pieces: list[Piece]  # one for each device of this process

    def fill(self, index: tuple[int, ...], values: np.ndarray) -> None:
        for i, piece in enumerate(self.pieces):
            self.pieces[i] = _filled(piece, index, values)

    def array(self) -> jax.Array:
        arrays = [piece.on_device for piece in self.pieces]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


def empty_leaf(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> OnHost | OnDevices:
    """A leaf of this shape. `fill` sets leaf[index] = values, and `array` ends it."""
    if np.prod(shape) * jnp.dtype(dtype).itemsize <= HOST_BYTES:
        return OnHost(np.empty(shape, dtype), sharding)
    boxes = sharding.addressable_devices_indices_map(shape)
    pieces = [_empty_piece(device, box or (), shape, dtype) for device, box in boxes.items()]
    return OnDevices(shape, sharding, pieces)


def _empty_piece(device: jax.Device, box: Sequence[slice], shape: tuple[int, ...], dtype) -> Piece:
    bounds = [part.indices(size) for part, size in zip(box, shape, strict=True)]
    start = tuple(first for first, _, _ in bounds)
    stop = tuple(last for _, last, _ in bounds)
    return Piece(start, stop, jnp.zeros(np.subtract(stop, start), dtype, device=device))


def _filled(piece: Piece, index: tuple[int, ...], values: np.ndarray) -> Piece:
    """The piece after leaf[index] = values, as far as the device has them."""
    n = len(index)
    bounds = list(zip(piece.start, piece.stop, strict=True))
    if not all(first <= i < last for i, (first, last) in zip(index, bounds[:n], strict=True)):
        return piece
    part = values[tuple(slice(*each) for each in bounds[n:])][(None,) * n]
    axis = min(n, part.ndim - 1)
    place = np.zeros(part.ndim, np.int32)
    place[:n] = np.subtract(index, piece.start[:n])
    leaf = piece.on_device
    for first, copy in _copies(part, axis, leaf.dtype):
        here = place.copy()  # the CPU's device may read it where it is
        here[axis] += first
        on_device = jax.device_put((copy, here), leaf.device)
        # the host would keep the copies of unfinished transfers
        leaf = jax.block_until_ready(_put(leaf, *on_device))
    return piece._replace(on_device=leaf)


def _copies(part: np.ndarray, axis: int, dtype: Any) -> Iterator[tuple[int, np.ndarray]]:
    """(first index along the axis, copy) of slices of the part, each of at most COPY_BYTES."""
    size = part.shape[axis]
    width = max(1, COPY_BYTES * size // max(part.size * dtype.itemsize, 1))
    for first in range(0, size, width):
        some = (slice(None),) * axis + (slice(first, first + width),)
        yield first, np.array(part[some], dtype, order="C")


@partial(jax.jit, donate_argnums=0)
def _put(leaf: jax.Array, part: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(leaf, part, place)
