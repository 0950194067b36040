"""One train step, compiled for devices that are not here, and what the compiler says of it.

TPUs need the libtpu that `jax[tpu]` pins, GPUs the CUDA plugin; `topology.prepare` must run before JAX is imported.
"""

import math
import re
import resource
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.planning import topology

GIB = 2**30
FAST: Any = {"exec_time_optimization_effort": -1.0}
# libtpu 0.0.42 ends the process over these on TPU7x (offload_collective_strategies.cc: "Check failed: std::abs(inc)")
_OFFLOAD = ("all_gather", "all_reduce", "reduce_scatter")
TPU7X: Any = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": False for kind in _OFFLOAD}


class Change(NamedTuple):
    """Options that save memory, what they save of a device's (bytes; measured by a compile), and whether it fits then."""

    options: str
    saved: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What a step costs a device. Bytes and collectives are the compiler's, `flops` counted; `seconds` are an estimate."""

    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    tokens: int  # of a step
    flops: float  # products of a step on all devices, as it runs: recomputed, and without what masks hide
    model_flops: float  # counted too: of the step with full attention and nothing computed twice
    closed_form: float  # 6 N + 12 L N H T a token
    argument_bytes: int
    temporary_bytes: int
    host_bytes: int  # of a device's arrays, in its host's memory
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    donated: bool  # the new state lies where the old one was
    moved_bytes: float  # through a device's memory
    collectives: list[dict]
    seconds: dict[str, float]  # compute, memory, and of the network by mesh axes
    step_seconds: float
    tokens_per_second: float
    mfu: dict[str, float]  # at that speed
    compile_seconds: float
    planner_bytes: int  # of host memory that planning took at most
    notes: list[str]
    largest: list[dict] = field(default_factory=list)
    changes: list[dict] = field(default_factory=list)


class Traced(NamedTuple):
    """A train step before it is compiled."""

    experiment: Any
    mesh: Any
    stage: Any  # jax.stages.Traced
    argument_bytes: int  # of a device, by hand: padding, where the compiler has any, is not in here


def trace(experiment: Any, devices: list) -> Traced:
    """The experiment's train step for a mesh of those devices. ConfigError where they, the batch or the model do not fit it."""
    import jax
    import jax.numpy as jnp

    from jaxformer import parallel, sharding
    from jaxformer.training.recipe import build
    from jaxformer.training.state import init_state, state_shardings
    from jaxformer.training.step import make_train_step

    experiment = attending(experiment, devices[0].platform)
    mesh = parallel.make_mesh(experiment.mesh, devices)
    B, T = experiment.batch_size, experiment.model.context_length
    parallel.check_batch(experiment.mesh, dict(mesh.shape), B // experiment.accumulation)
    recipe = build(experiment)
    places = state_shardings(recipe, mesh)
    placed = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    state = jax.tree.map(placed, jax.eval_shape(partial(init_state, recipe)), places)
    kinds = {"tokens": jnp.int32, "labels": jnp.int32, "weights": jnp.float32}
    batch = {key: jax.ShapeDtypeStruct((B, T), kind) for key, kind in kinds.items()}
    batch = jax.tree.map(placed, batch, sharding.batch_sharding(mesh, batch))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(places, None))
        traced = step.trace(state, batch)
    shard = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return Traced(experiment, mesh, traced, sum(map(shard, jax.tree.leaves((state, batch)))))


def attending(experiment: Any, platform: str) -> Any:
    """With the attention that the platform would choose where the experiment leaves the choice: this process is on a CPU."""
    from jaxformer.models.config import Alibi, Relative

    model = experiment.model
    if model.attention_implementation is not None or experiment.mesh.context != 1:
        return experiment
    biased = isinstance(model.positions, Alibi | Relative) or callable(model.positions)
    plain = not model.attention_dropout_rate and not biased
    name = "splash" if platform == "tpu" and plain and experiment.precision != "float16" else "blockwise"
    return replace(experiment, model=replace(model, attention_implementation=name))


def plan_step(experiment: Any, name: str, devices: list, fast: bool = False) -> tuple[Plan, Any]:
    """Compiles the experiment's train step for the devices of a topology: (the plan, the step before it is compiled).

    `fast` compiles with less effort: seconds instead of a minute, and memory that is off by up to a fifth. ConfigError
    where the mesh does not fit the devices or the model.
    """
    import jax

    from jaxformer import models, params
    from jaxformer.models import cost
    from jaxformer.models.stacks.pipeline import bubble
    from jaxformer.planning import flops, hlo, roofline

    began = time.monotonic()
    traced = trace(experiment, devices)
    experiment, mesh, model = traced.experiment, traced.mesh, traced.experiment.model
    counted = flops.of_jaxpr(traced.stage.jaxpr)
    if counted.notes & {
        flops.ROWS,
        flops.ONCE,
    }:  # of routed tokens the data say how many a device gets, not how many there are
        counted = _alone(experiment)
    chip = cost.CHIPS[devices[0].device_kind]
    notes = sorted(counted.notes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = traced.stage.lower()
    compiled, log = compile_step(lowered, devices, fast)
    peak, memory = _peak(compiled, log)
    text = (compiled.as_text() or "") if compiled else ""
    found = hlo.collectives(text, mesh) if text else []
    moved = hlo.traffic(text) if text else 0.0
    tokens = experiment.batch_size * model.context_length
    notes += _notes(found, log, params.count(models.spec(model)), mesh)
    once, closed = _model_flops(experiment), float(cost.training_flops(model, model.context_length) * tokens)
    if (stages := mesh.shape["stage"]) > 1:
        share = bubble(stages, experiment.mesh.microbatches or stages, experiment.mesh.repeats)
        notes.append(
            f"stages idle {share:.1%} of a step, on work that is counted and thrown away; more micro-batches, less"
        )
    if abs(once / closed - 1) > 0.01:
        notes.append(f"the closed form has {closed:.4g} model FLOPs, {closed / once - 1:+.1%} of what is counted")
    seconds = {
        "compute": counted.matmul / len(devices) / chip.peak, "memory": moved / chip.bandwidth,
        **roofline.network(found, mesh, chip),
    }  # fmt: skip
    time_of_step = roofline.step(seconds)
    fits = compiled is not None and peak <= chip.memory
    size = lambda field: getattr(memory, field) if memory else 0
    made = Plan(
        topology=name, chip=devices[0].device_kind, devices=len(devices),
        mesh={k: v for k, v in mesh.shape.items() if v > 1}, parameters=params.count(models.spec(model)), tokens=tokens,
        flops=counted.matmul, model_flops=once, closed_form=closed,
        argument_bytes=size("argument_size_in_bytes") or traced.argument_bytes,
        temporary_bytes=size("temp_size_in_bytes") or max(0, peak - traced.argument_bytes),
        host_bytes=size("host_argument_size_in_bytes") + size("host_temp_size_in_bytes"), peak_bytes=peak,
        capacity_bytes=int(chip.memory), fits=fits,
        donated=size("alias_size_in_bytes") >= 0.99 * size("output_size_in_bytes") > 0, moved_bytes=moved,
        collectives=[one._asdict() for one in found], seconds=seconds, step_seconds=time_of_step,
        tokens_per_second=tokens / time_of_step,
        mfu=cost.utilization(model, model.context_length, tokens / time_of_step, len(devices), devices[0].device_kind),
        compile_seconds=time.monotonic() - began, planner_bytes=planner_bytes(), notes=notes,
    )  # fmt: skip
    return made, lowered


def planner_bytes() -> int:
    """Host memory that this process took at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compile_step(lowered: Any, devices: list, fast: bool, **options: Any) -> tuple[Any, topology.Log]:
    """(the program, or None where the compiler says that it does not fit; what it said)."""
    import jax

    tpu = devices[0].platform == "tpu"
    with topology.listening(stderr=not tpu) as log:
        try:
            options |= (FAST if fast and tpu else {}) | (TPU7X if devices[0].device_kind == "TPU7x" else {})
            return lowered.compile(compiler_options=options or None), log
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failure = str(error)
    log.text += failure
    if "vmem" in failure and "hbm" not in failure.lower():
        raise ConfigError(f"a kernel does not fit the chip's fast memory: {failure.splitlines()[0][:300]}")
    return None, log


def _peak(compiled: Any, log: topology.Log) -> tuple[int, Any]:
    """A device's peak in bytes, also of a program that did not fit."""
    if compiled is not None:
        memory = compiled.memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new
        return min(
            held, memory.peak_memory_in_bytes
        ), memory  # the compiler's peak counts what lies in host memory, too
    said = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|HLO temporaries \(([\d.]+)([KMGT])\)", log.text)
    number, unit = [one for one in said.groups() if one] if said else ("0", "G")
    return int(float(number) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit]), None


def _notes(found: list, log: topology.Log, parameters: int, mesh: Any) -> list[str]:
    notes = []
    whole = sum(one.bytes for one in found if one.kind == "all-reduce" and "fsdp" in one.axes)
    kept = 2 * parameters // math.prod(mesh.shape[axis] for axis in ("tensor", "expert", "stage"))
    if mesh.shape["fsdp"] > 1 and found and whole > kept / 10:
        scatters = any(one.kind in ("reduce-scatter", "collective-permute") and "fsdp" in one.axes for one in found)
        notes.append(
            f"{'little' if scatters else 'no'} reduce-scatter over fsdp: {whole / 2**20:,.0f} MiB of gradients are summed "
            "whole on every device, at twice the traffic; try a smaller fsdp, with the rest in data or tensor"
        )
    if log.resharded:
        notes.append(
            f"{log.resharded} arrays are made whole on every device to be split otherwise (the partitioner's log)"
        )
    return notes


def _model_flops(experiment: Any) -> float:
    """FLOPs of the step with full attention, whole, nothing computed twice: what the closed form is about."""
    plain = replace(experiment.model, remat="none", attention_implementation="reference")
    return _alone(replace(experiment, model=plain, accumulation=1)).matmul


def _alone(experiment: Any) -> Any:
    """What the step computes on one device, as large as it would have to be."""
    import jax
    import jax.numpy as jnp

    from jaxformer.planning import flops
    from jaxformer.training.recipe import build
    from jaxformer.training.state import init_state
    from jaxformer.training.step import make_train_step

    alone = replace(experiment, mesh=type(experiment.mesh)(data=1))
    shape = experiment.batch_size, experiment.model.context_length
    batch = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in ("tokens", "labels")}
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    recipe = build(alone)
    return flops.count(make_train_step(recipe), jax.eval_shape(partial(init_state, recipe)), batch)
