"""The capacity of routed experts: `within_capacity` marks the choices that an expert drops.

The result is that of one device with all tokens, on any mesh (`Split`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from jaxformer.sharding import PARAMETERS, mesh_axes


class Split(NamedTuple):
    """The mesh axes that split B, T, E, D (of weights) and F, without axes of one device."""

    batch: tuple[str, ...]
    length: tuple[str, ...]
    experts: tuple[str, ...]
    embed: tuple[str, ...]
    mlp: tuple[str, ...]

    @property
    def experts_split_tokens(self) -> bool:
        """Whether the axes that split the experts also split the batch."""
        return set(self.experts) <= set(self.batch)


def split_of(x_shape: tuple[int, ...], up_shape: tuple[int, ...]) -> Split:
    """How the mesh of `jax.set_mesh` splits tokens `[B, T, D]` and weights `[E, D, F]`."""
    B, T, D = x_shape
    E, _, F = up_shape
    mesh = jax.sharding.get_abstract_mesh()
    batch = mesh_axes("batch", B)
    embed = [name for name in PARAMETERS["embed"] if name in batch and D % mesh.shape[name] == 0]
    return Split(
        batch=batch,
        length=mesh_axes("length", T),
        experts=mesh_axes("expert", E),
        embed=tuple(embed),
        mlp=mesh_axes("mlp", F),
    )


class Limits(NamedTuple):
    """The choices within the capacity, and the limits that are left to apply on a device."""

    expert_ids: Array  # [top_k, B, T]; E for a choice that is marked as dropped
    # The choices that an expert of this device takes; it drops later ones. None: no limit, or all
    # dropped choices are marked already.
    expert_capacity: int | None
    choice_limit: int | None  # of all choices of this device; None: no limit is known


def within_capacity(
    split: Split, expert_ids: Int[Array, "top_k B T"], E: int, capacity: float | None, groups: int
) -> Limits:
    """The first ceil(capacity top_k n / E) choices of each expert in each group of n tokens.

    `expert_ids` are those of this device. If the tokens of a group are on several devices, or a
    device has several groups, dropped choices are marked here.
    """
    if capacity is None:
        return Limits(expert_ids, None, None)
    if not expert_ids.size:  # without tokens nothing is dropped, and blocks would have no size
        return Limits(expert_ids, 0, None)
    top_k, B, T = expert_ids.shape
    devices = _count(split.batch)
    tokens = B * devices * T * _count(split.length) // groups  # of a group
    # A token takes no expert twice. The small number is subtracted because a product such as
    # 1.1 x 10 is not 11 in floating point.
    expert_capacity = min(math.ceil(capacity * top_k * tokens / E - 1e-9), tokens)
    if split.length or groups % devices:
        expert_ids = _first_choices(split, expert_ids, E, expert_capacity, groups)
        local_experts = E // _count(split.experts)
        return Limits(expert_ids, None, local_experts * expert_capacity * groups)
    groups_of_device = groups // devices
    if groups_of_device > 1:
        here = split._replace(batch=())
        expert_ids = _first_choices(here, expert_ids, E, expert_capacity, groups_of_device)
    # with one group, the bucket of an expert has this capacity and drops the rest
    return Limits(expert_ids, groups_of_device * expert_capacity, None)


def _count(axes: tuple[str, ...]) -> int:
    """The number of devices along mesh axes."""
    return lax.axis_size(axes) if axes else 1


def _first_choices(
    split: Split, expert_ids: Int[Array, "top_k B T"], E: int, expert_capacity: int, groups: int
) -> Int[Array, "top_k B T"]:
    """The choices; E for each one beyond the first `expert_capacity` of its expert in its group.

    A group has consecutive batch rows. The order of choices is that of one device with all tokens:
    first choices before second ones, then by batch row, then by position.
    """
    clipped_ids = jnp.minimum(expert_ids, E - 1)
    ranks, counts = _ranks_in_row(expert_ids, clipped_ids, E)
    earlier_counts = _earlier_counts(split, counts, groups)
    ranks = ranks + jnp.take_along_axis(earlier_counts, clipped_ids, -1)
    return jnp.where(ranks < expert_capacity, expert_ids, E)


def _ranks_in_row(expert_ids: Int[Array, "top_k B T"], clipped_ids: Array, E: int):
    """(rank of each choice among those of its batch row on this device, their number by expert).

    The rank is among choices of the same expert and the same place in the top k. The numbers are
    `[top_k, B, E]`.
    """
    T = expert_ids.shape[2]
    order = jnp.argsort(expert_ids, axis=-1)  # stable
    counts = jnp.sum(expert_ids[..., None] == jnp.arange(E)[None, None, None], axis=2)
    starts = jnp.cumsum(counts, axis=-1) - counts
    index = jnp.arange(T)[None, None]
    ranks = index - jnp.take_along_axis(starts, jnp.take_along_axis(clipped_ids, order, -1), -1)
    return jnp.take_along_axis(ranks, jnp.argsort(order, axis=-1), -1), counts


def _earlier_counts(split: Split, counts: Int[Array, "top_k B E"], groups: int):
    """The number of choices of each expert before those of a batch row on this device.

    Devices exchange the number of choices that each batch row has for each expert.
    """
    top_k, B, E = counts.shape
    earlier_counts = jnp.zeros_like(counts)
    if split.length:  # other devices have earlier tokens of the batch row
        device_counts = lax.all_gather(counts, split.length)
        is_earlier = jnp.arange(len(device_counts)) < lax.axis_index(split.length)
        earlier_device_counts = jnp.where(is_earlier[:, None, None, None], device_counts, 0)
        earlier_counts = jnp.sum(earlier_device_counts, axis=0)
        counts = jnp.sum(device_counts, axis=0)
    first_row = 0
    if split.batch:
        counts = lax.all_gather(counts, split.batch, axis=1, tiled=True)
        first_row = lax.axis_index(split.batch) * B
    in_group = jnp.moveaxis(counts.reshape(top_k, groups, -1, E), 1, 0).reshape(groups, -1, E)
    # of earlier places in the top k, then of earlier batch rows
    totals = jnp.cumsum(in_group, axis=1) - in_group
    totals = jnp.moveaxis(totals.reshape(groups, top_k, -1, E), 0, 1).reshape(top_k, -1, E)
    return earlier_counts + lax.dynamic_slice_in_dim(totals, first_row, B, axis=1)


def count_choices(experts: Int[Array, "..."], E: int) -> Int[Array, " E"]:
    """The number of choices of each expert."""
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(E)[None], axis=0)
