"""A pod run before the pod is rented: the real train step, compiled for a TPU topology on a machine without one.

`plan` needs the libtpu that `jax[tpu]` pins; `prepare` must run before JAX is imported.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from jaxformer.config import ConfigError

GIB = 2**30
FAST: Any = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True)
class Plan:
    """What a step costs a device. Bytes and counts are the compiler's; `seconds` are a roofline, an estimate.

    Of memory it takes arguments and temporaries to move three times, of the network an all-reduce twice its bytes.
    """

    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    flops: float  # of a step, all devices
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    donated: bool  # the new state lies where the old one was
    collectives: list[dict]
    seconds: dict[str, float]
    compile_seconds: float
    notes: list[str]


def prepare() -> None:
    """The environment under which libtpu compiles for chips that are not there. Before JAX is imported."""
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)


def of_preset(name: str, model: Any) -> Any:
    """An experiment that pretrains a preset as such runs are made: bfloat16, layers recomputed, one example a device."""
    from dataclasses import replace

    from jaxformer.data.sources import Stdlib
    from jaxformer.models.config import ModelConfig
    from jaxformer.parallel import Mesh
    from jaxformer.training.experiment import Experiment

    if not isinstance(model, ModelConfig):
        raise ConfigError(f"{name}: only decoders are planned so far")
    model = replace(model, remat="full", dropout_rate=0.0, attention_dropout_rate=0.0)
    return Experiment(name, model, Stdlib(), batch_size=256, precision="bfloat16", mesh=Mesh(data=1, fsdp=-1))


def topology(name: str, slices: int = 1) -> list:
    """The devices of a TPU topology such as `v5e:2x2` or `v5p:8x8x8`. ConfigError for a name that libtpu does not know."""
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4"):
        options["chip_config_name"] = "megacore"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except Exception as error:
        words = str(error).splitlines()[0][:200]
        if "libtpu" in words.lower() or "platform" in words.lower():
            raise ConfigError(
                f"no TPU compiler here ({words}); make plan installs it, or pip install 'jax[tpu]'"
            ) from None
        raise ConfigError(
            f"--topology={name}: {words}; expected a name such as v5e:4x4, v5p:8x8x8, v4:8x16x16, v6e:16x16, tpu7x:4x4x8"
        ) from None


def plan(experiment: Any, name: str, devices: list, fast: bool = False) -> Plan:
    """Compiles the experiment's train step for the devices of a topology. Nothing of the model is allocated.

    `fast` compiles with less effort: seconds instead of a minute, and memory that is off by up to a fifth. Raises
    ConfigError where the mesh does not fit the devices or the model.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxformer import models, parallel, params
    from jaxformer.analysis import cost, hlo
    from jaxformer.training.state import init_state, state_shardings
    from jaxformer.training.step import make_train_step

    mesh = parallel.make_mesh(experiment.mesh, devices)
    places = state_shardings(experiment, mesh)
    placed = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    state = jax.tree.map(placed, jax.eval_shape(partial(init_state, experiment)), places)
    B, T = experiment.batch_size, experiment.model.context_length
    rows = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    if B % rows:
        raise ConfigError(f"batch_size={B} does not divide among {rows} devices (data x fsdp x expert)")
    place = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert"), "context"))
    kinds = {"tokens": jnp.int32, "labels": jnp.int32, "weights": jnp.float32}
    batch = {key: jax.ShapeDtypeStruct((B, T), kind, sharding=place) for key, kind in kinds.items()}

    began = time.monotonic()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = jax.jit(make_train_step(experiment), donate_argnums=0, out_shardings=(places, None))
        lowered = step.lower(state, batch)
    chip = cost.CHIPS[devices[0].device_kind]
    flops = float(cost.training_flops(experiment.model, T) * B * T)
    peak, compiled, notes = 0, None, []
    try:
        compiled = lowered.compile(compiler_options=FAST if fast else None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        notes.append(str(error).splitlines()[0][:300])
    memory: Any = compiled.memory_analysis() if compiled else None
    found = hlo.collectives(compiled.as_text() or "", mesh) if compiled else []
    if memory:
        peak = memory.peak_memory_in_bytes
    if compiled and mesh.shape["fsdp"] > 1 and not any(one.kind == "reduce-scatter" for one in found):
        notes.append(
            "no reduce-scatter: gradients are summed whole on every device, twice the traffic; try another fsdp"
        )
    sent = sum(one.bytes * (2 if one.kind == "all-reduce" else 1) for one in found)
    moved = 3 * (memory.argument_size_in_bytes + memory.temp_size_in_bytes) if memory else 0
    seconds = {
        "compute": flops / len(devices) / chip.peak,
        "memory": moved / chip.bandwidth,
        "network": sent / chip.network,
    }
    return Plan(
        name, devices[0].device_kind, len(devices), {k: v for k, v in mesh.shape.items() if v > 1},
        params.count(models.spec(experiment.model)), flops, memory.argument_size_in_bytes if memory else 0,
        memory.temp_size_in_bytes if memory else 0, peak, int(chip.memory), bool(memory) and peak <= chip.memory,
        bool(memory) and memory.alias_size_in_bytes >= 0.99 * memory.output_size_in_bytes,
        [one._asdict() for one in found], seconds, time.monotonic() - began, notes,
    )  # fmt: skip


def table(plan: Plan) -> str:
    """The plan in words."""
    gib = lambda size: f"{size / GIB:.2f} GiB"
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "data=1"
    rows = [
        f"{plan.topology}: {plan.devices} x {plan.chip}, {mesh}",
        f"parameters         {plan.parameters:,}",
        f"FLOPs a step       {plan.flops:.4g}",
        f"memory a device    {gib(plan.argument_bytes)} arguments, {gib(plan.temporary_bytes)} temporaries, "
        f"{gib(plan.peak_bytes)} peak of {gib(plan.capacity_bytes)}: "
        + (f"fits, {gib(plan.capacity_bytes - plan.peak_bytes)} free" if plan.fits else "DOES NOT FIT"),
        f"state in place     {'yes' if plan.donated else 'no'}",
    ]
    for one in plan.collectives:
        over = "*".join(one["axes"]) or "-"
        rows.append(f"{one['kind']:<18} {one['count']:>5} a step over {over}, {one['bytes'] / 2**20:,.1f} MiB a device")
    slowest: Callable = lambda name: plan.seconds[name]
    rows.append(
        "roofline, an estimate: "
        + ", ".join(f"{name} {1e3 * plan.seconds[name]:.1f} ms" for name in plan.seconds)
        + f"; bound by {max(plan.seconds, key=slowest)}"
    )
    rows += [f"note: {note}" for note in plan.notes]
    return "\n".join([*rows, f"compiled in {plan.compile_seconds:.0f} s"])


def as_json(plan: Plan) -> dict:
    """The plan as JSON has it."""
    return asdict(plan)
