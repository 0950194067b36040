"""Devices as a grid with named axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils

from jaxformer.errors import ConfigError

# `stage` comes before the axes that a layer makes manual within a stage. XLA (jaxlib 0.12.0) lists
# the manual axes of nested `shard_map`s from the outside in, and aborts if that is not their order
# in the mesh.
AXES = ("data", "stage", "fsdp", "tensor", "context", "expert")


@dataclass(frozen=True)
class Mesh:
    """The number of devices for each kind of parallelism. The product is the number of all devices.

    One axis may be -1: it gets the devices that are left over.
    """

    data: int = -1  # copies of the model, each with its share of the batch
    fsdp: int = 1  # splits the batch, and the parameters with it (Rajbhandari et al. 2020, ZeRO-3)
    tensor: int = 1  # splits heads and inner widths (Shoeybi et al. 2019)
    context: int = 1  # splits the length of a sequence
    expert: int = 1  # splits routed experts, and the batch
    stage: int = 1  # splits layers (Narayanan et al. 2021)
    # number of TPU slices that a slower network joins; they are split along `data`
    slices: int = 1
    microbatches: int | None = None  # micro-batches of a pipeline; None: as many as stages
    repeats: int = 1  # how often each micro-batch goes around the ring of stages
    # optimizer state split over `data` as well (Rajbhandari et al. 2020, ZeRO-1)
    zero1: bool = False
    offload: bool = False  # optimizer state in the hosts' memory between steps
    # JAX's Explicit axes (shardings are types) instead of Auto ones (the compiler's choice)
    explicit: bool = False
    backend: Literal["jit", "pmap"] = "jit"  # pmap: older, with `data` alone

    def __post_init__(self):
        sizes = [getattr(self, axis) for axis in AXES]
        if self.repeats < 1 or (self.microbatches is not None and self.microbatches < 1):
            raise ConfigError(
                f"mesh.microbatches={self.microbatches}, "
                f"mesh.repeats={self.repeats}: must be at least 1"
            )
        names = ("slices", "zero1", "offload", "explicit", *AXES[1:])
        others = [name for name in names if getattr(self, name) != getattr(Mesh, name)]
        if self.backend == "pmap" and others:
            raise ConfigError(
                "mesh.backend=pmap copies the model to each device: "
                f"no mesh.{others[0]}; use backend=jit"
            )
        if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes) or self.slices < 1:
            raise ConfigError(
                f"mesh={self}: axes are at least 1, and one of them may be -1 for "
                "the devices left over"
            )

    def shape(self, devices: int) -> dict[str, int]:
        """{axis: size} on this number of devices. Raises ConfigError if the sizes do not fit it."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if devices % fixed or (-1 not in sizes.values() and devices != fixed):
            product = (
                " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1"
            )
            advice = (
                "let the product divide it"
                if -1 in sizes.values()
                else f"let the product be {devices}, or one axis -1"
            )
            raise ConfigError(
                f"mesh: {product} = {fixed} devices do not make up {devices}; {advice}"
            )
        sizes = {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}
        if sizes["data"] % self.slices:
            raise ConfigError(
                f"mesh.slices={self.slices} does not divide mesh.data={sizes['data']}"
            )
        return sizes


def run_mesh(config: Mesh, batch_size: int) -> jax.sharding.Mesh | None:
    """The mesh of a run, of all devices or of the first ones that it needs; None for one device.

    Raises ConfigError if `batch_size` does not divide among the devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    devices = jax.devices()
    if -1 not in sizes and math.prod(sizes) <= len(devices):
        devices = devices[: math.prod(sizes)]
    check_batch(config, config.shape(len(devices)), batch_size)
    return None if len(devices) == 1 else make_mesh(config, devices)


def check_batch(config: Mesh, shape: dict[str, int], batch_size: int) -> None:
    """Raises ConfigError if the examples of one gradient do not divide among the devices.

    With a pipeline they must divide among its stages and micro-batches, too.
    """
    replicas = shape["data"] * shape["fsdp"] * shape["expert"]
    stages = shape["stage"]
    microbatches = (config.microbatches or stages) if stages > 1 else 1
    factor = replicas * math.lcm(microbatches, stages)
    if batch_size % factor:
        parts = f"{replicas} devices (mesh.data x fsdp x expert)"
        if stages > 1:
            parts += f" in {microbatches} micro-batches and {stages} stages"
        below = batch_size // factor * factor
        near = f"{below} or {below + factor}" if below else str(factor)
        raise ConfigError(
            f"batch_size={batch_size} does not divide among {parts}; sizes that do: {near}"
        )


def check_context(shape: dict[str, int], lengths: Sequence[int]) -> None:
    """Raises ConfigError if `context` divides none of the model's lengths and so splits nothing."""
    parts = shape["context"]
    if any(length % parts == 0 for length in lengths):
        return
    shown = " and ".join(map(str, dict.fromkeys(lengths)))
    problem = (
        f"does not divide the context_length of {shown}, so each of {parts} devices would "
        "compute all of it"
    )
    raise ConfigError(
        f"mesh.context={parts} {problem}; choose a divisor, or give these devices to mesh.data"
    )


def make_mesh(config: Mesh = Mesh(), devices: Sequence | None = None) -> jax.sharding.Mesh:
    """The devices (all by default) as a mesh with the axes `AXES`.

    On TPUs, neighbours in the mesh are neighbours in the network of the chips.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.shape(len(devices))
    shape = tuple(sizes.values())
    if config.slices > 1:
        within = (sizes["data"] // config.slices, *shape[1:])
        across = (config.slices, *(1,) * (len(shape) - 1))
        grid = mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(devices).reshape(shape)
    kind = jax.sharding.AxisType.Explicit if config.explicit else jax.sharding.AxisType.Auto
    return jax.sharding.Mesh(grid, AXES, axis_types=(kind,) * len(AXES))


def block_if_simulated(tree: Any) -> Any:
    """The tree. If its arrays are on several simulated CPU devices, it first waits for them.

    Simulated devices share the few threads of the machine. Two programs that run at the same time
    and both exchange data can wait for each other for ever. XLA then ends the process.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    simulated = any(
        len(array.devices()) > 1 and next(iter(array.devices())).platform == "cpu"
        for array in arrays
    )
    return jax.block_until_ready(tree) if simulated else tree
