"""Compares the copies of the same numbers on several devices.

A difference reveals a device that computes wrong results without an error.
"""

import base64
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxformer.parallel.processes import all_gather_object
from jaxformer.runs.manifest import fingerprint, key_data, named_leaves
from jaxformer.runs.reporter import NonFinite


class Diverged(NonFinite):
    """Two devices have different numbers where both should have the same ones."""


def has_no_copies(state: Any, step: int) -> None:
    """The check of a run on one device: there are no copies that could differ."""


def check(mesh: jax.sharding.Mesh, state: Any, step: int) -> None:
    """Raises Diverged, on all processes, where copies of a leaf's part differ in any bit."""
    leaves = leaves_on_devices(state)
    specs = [leaf.sharding.spec for leaf in leaves.values()]
    places = [leaf.sharding.devices_indices_map(leaf.shape) for leaf in leaves.values()]
    parts = [[str(place[device]) for device in mesh.devices.flat] for place in places]
    compare(mesh, leaves, specs, parts, step)


def check_pmapped(state: Any, step: int) -> None:
    """`check` of a state `[devices, ...]` of `jax.pmap`: every device has a copy of everything."""
    leaves = leaves_on_devices(state)
    mesh = next(iter(leaves.values())).sharding.mesh
    compare(
        mesh,
        leaves,
        [P(mesh.axis_names)] * len(leaves),
        [["whole"] * mesh.size] * len(leaves),
        step,
    )


def leaves_on_devices(state: Any) -> dict[str, Any]:
    """The leaves by name that have numbers and lie in device memory; keys as their data."""
    leaves = {name: key_data(leaf) for name, leaf in named_leaves(state)}
    return {
        name: leaf
        for name, leaf in leaves.items()
        if leaf.size and leaf.sharding.memory_kind != "pinned_host"
    }


def compare(
    mesh: jax.sharding.Mesh,
    leaves: dict[str, Any],
    specs: list[P],
    parts: list[list[str]],
    step: int,
) -> None:
    """Raises Diverged if devices with the same part of a leaf differ.

    `parts` names, for each leaf, the part on each device.
    """
    prints = local_fingerprints(mesh, tuple(specs), tuple(leaves.values()))

    def text(rows):
        return base64.b64encode(np.ascontiguousarray(rows)).decode()

    here = [
        [shard.index[0].start or 0, text(np.asarray(shard.data)[0])]
        for shard in prints.addressable_shards
    ]
    every = all_gather_object(here, f"the comparison of copies before step {step}")
    shape = prints.shape[1:]

    def numbers(text):
        return np.frombuffer(base64.b64decode(text), prints.dtype).reshape(shape)

    of_device = {place: numbers(text) for process in every for place, text in process}
    for number, (name, names) in enumerate(zip(leaves, parts, strict=True)):
        copies: dict[str, dict[int, bytes]] = {}
        for place, device in enumerate(mesh.devices.flat):
            copies.setdefault(names[place], {})[device.id] = of_device[place][number].tobytes()
        for values in copies.values():
            if len(set(values.values())) > 1:
                raise Diverged(
                    f"before step {step}, {difference(name, values)}; nothing was saved since", step
                )


@partial(jax.jit, static_argnums=(0, 1))
def local_fingerprints(
    mesh: jax.sharding.Mesh, specs: tuple[P, ...], leaves: tuple[jax.Array, ...]
) -> jax.Array:
    """[devices, leaves, 2]: the fingerprint of each leaf's part on each device."""

    def of_one(leaves):
        return jnp.stack([fingerprint(leaf) for leaf in leaves])[None]

    return jax.shard_map(
        of_one, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False
    )(leaves)


def difference(name: str, values: dict[int, bytes]) -> str:
    """Names the devices that differ from the majority; of two devices either may be wrong."""
    most, count = Counter(values.values()).most_common(1)[0]
    odd = [device for device, value in values.items() if value != most]
    others = [device for device in values if device not in odd]

    def names(ids):
        return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:8]))}"

    doubt = "" if count > len(odd) else " (which of them is right cannot be known)"
    return (
        f"{name} on {names(odd)} differs from its copies on {names(others)}{doubt}:"
        " suspect the hardware"
    )
