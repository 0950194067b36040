"""A pod run before the pod is rented: the real train step, compiled for devices that are not here."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxformer import models, parallel, params, sharding
from jaxformer.data.sources import Stdlib
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import cost
from jaxformer.models.heads import language_model
from jaxformer.models.stacks.pipeline import bubble
from jaxformer.tools.planning import flops, hlo, roofline, topology
from jaxformer.tools.planning.compile import compile_step, evaluation_bytes, memory_of, trace
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build, row_lengths, trained_weights
from jaxformer.training.step import abstract_references, abstract_state, make_train_step


@dataclass(frozen=True)
class Plan:
    """What a step costs a device. Bytes and collectives are the compiler's, `flops` counted; `seconds` are an estimate.

    Of a step that does not fit nothing runs, so it has no seconds and no speed: these are None, and `seconds` is empty.
    """

    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    tokens: int  # of a step
    flops: float  # products of a step on all devices as it runs: with recomputation, without masked blocks
    model_flops: int  # with full attention and no recomputation: 6 N + 12 L N H T a token
    argument_bytes: int
    temporary_bytes: int
    host_bytes: int  # of a device's arrays, in its host's memory
    peak_bytes: int
    evaluation_bytes: int | None  # at an evaluation, beside the state; None: the compiler finds no room for it
    capacity_bytes: int
    fits: bool  # a step, and an evaluation
    donated: bool  # the new state takes the memory of the old one
    moved_bytes: float  # through a device's memory
    collectives: list[dict]
    seconds: dict[str, float]  # the parts of `roofline.Seconds`
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: dict[str, float]  # at that speed
    compile_seconds: float
    versions: dict[str, str]  # of jax and the compiler
    notes: list[str]
    largest: list[dict]  # arrays of a step that does not fit


def of_preset(name: str, model: Any) -> Any:
    """An experiment that pretrains a preset in the usual way: bfloat16, layers recomputed, 256 sequences a step."""
    if not isinstance(model, models.ModelConfig) or language_model(model) is None:
        raise ConfigError(f"{name}: plans train language models, one stack with a LanguageModel head; this is none")
    model = replace(model, remat="full", dropout_rate=0.0, attention_dropout_rate=0.0)
    return Experiment(name, model, Stdlib(), batch_size=256, precision="bfloat16", mesh=parallel.Mesh(data=1, fsdp=-1))


def sharding_table(experiment: Experiment, devices: int | None) -> str:
    """How each parameter of an experiment is split over its mesh of so many devices. None: as many as the mesh says."""
    sizes = [getattr(experiment.mesh, axis) for axis in parallel.AXES]
    if devices is None and -1 in sizes:
        raise ConfigError("show --sharding: a mesh axis is -1, the devices left over; give --devices N")
    devices = math.prod(sizes) if devices is None else devices
    check_whole("show --sharding: devices", devices)
    shape = experiment.mesh.shape(devices)
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    return sharding.describe(models.spec(experiment.model), mesh)


def plan(experiment: Any, name: str, devices: list, fast: bool = False) -> Plan:
    """Compiles the experiment's train step for the devices of a topology. Nothing of the model is allocated.

    `fast` compiles with less effort: seconds instead of a minute, and memory that is off by up to a fifth. ConfigError
    where the mesh does not fit the devices or the model.
    """
    began = time.monotonic()
    traced = trace(experiment, devices)
    model, mesh, kind = experiment.model, traced.mesh, devices[0].device_kind
    chip, parameters = cost.CHIPS[kind], params.count(models.spec(model))
    counted = flops.of_jaxpr(traced.stage.jaxpr)
    if counted.notes & {flops.ROWS, flops.ONCE}:  # a device's share of routed tokens depends on the data, their sum not
        counted = _on_one_device(experiment, traced.batch, devices)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = traced.stage.lower()
    compiled, log = compile_step(lowered, devices, fast)
    memory = memory_of(compiled, log, traced.argument_bytes)
    scoring = evaluation_bytes(traced, devices, fast)
    fits = compiled is not None and scoring is not None and max(memory["peak_bytes"], scoring) <= chip.memory
    text = (compiled.as_text() or "") if compiled else ""
    exchanges, moved = hlo.exchanges(text), hlo.traffic(text)
    length, source = row_lengths(experiment, traced.batch)
    tokens, trained = experiment.batch_size * length, trained_weights(experiment)
    seconds = roofline.seconds(counted.matmul / len(devices), moved, exchanges, mesh, chip)
    speed = tokens / seconds.step
    share = cost.utilization(model, length, speed, len(devices), kind, source, trained)
    return Plan(
        topology=name, chip=kind, devices=len(devices), mesh={k: v for k, v in mesh.shape.items() if v > 1},
        parameters=parameters, tokens=tokens, flops=counted.matmul,
        model_flops=cost.training_flops(model, length, source, trained) * tokens,
        capacity_bytes=int(chip.memory), fits=fits, evaluation_bytes=scoring, **memory,
        moved_bytes=sum(moved), collectives=[one._asdict() for one in hlo.by_axes(exchanges, mesh)],
        seconds=seconds.parts() if fits else {}, step_seconds=seconds.step if fits else None,
        tokens_per_second=speed if fits else None, mfu=share if fits else {},
        compile_seconds=time.monotonic() - began,
        versions=topology.versions(devices[0].platform),
        notes=[*traced.notes, *sorted(counted.notes), *_notes(log, experiment.mesh, mesh.shape["stage"])],
        largest=[] if compiled else hlo.largest(log.text),
    )  # fmt: skip


def _notes(log: topology.Log, config: parallel.Mesh, stages: int) -> list[str]:
    """What makes the step slow, in words."""
    notes = []
    if log.resharded:
        notes.append(f"{log.resharded} arrays are made whole on every device to be split in another way (compiler's log)")
    if stages > 1:
        idle = bubble(stages, config.microbatches or stages, config.repeats)
        notes.append(f"stages idle {idle:.1%} of a step, on work that is counted and not used; more micro-batches help")
    return notes


def _on_one_device(experiment: Any, batch: dict[str, Any], devices: list) -> flops.Count:
    """What the step computes on a single device that is large enough."""
    recipe = build(replace(experiment, mesh=parallel.Mesh(data=1)))
    with jax.sharding.use_abstract_mesh(parallel.make_mesh(recipe.mesh, devices[:1]).abstract_mesh):
        return flops.count(make_train_step(recipe), abstract_state(recipe), batch, abstract_references(recipe))


def table(plan: Plan) -> str:
    """The plan in words."""

    def gib(size):
        return f"{size / cost.GIB:.2f} GiB"

    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "data=1"
    host = f", {gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    rows = [
        f"{plan.topology}: {plan.devices} x {plan.chip}, {mesh}",
        f"parameters         {plan.parameters:,}",
        f"FLOPs a step       {plan.flops:.4g} counted, with recomputation; {plan.model_flops:.4g} of the model alone",
        f"memory a device    {gib(plan.argument_bytes)} arguments, {gib(plan.temporary_bytes)} temporaries{host}, "
        f"{gib(plan.peak_bytes)} peak of {gib(plan.capacity_bytes)}: {'fits' if plan.fits else 'DOES NOT FIT'}",
    ]
    scoring = "no room" if plan.evaluation_bytes is None else gib(plan.evaluation_bytes)
    rows.append(f"evaluation         {scoring} with the state, for a batch of the validation split")
    if plan.donated or plan.fits:
        rows.append(f"state in place     {'yes' if plan.donated else 'no'}")
    for one in plan.collectives:
        axes = "*".join(one["axes"]) or "-"
        rows.append(f"{one['kind']:<18} {one['count']:>5} a step over {axes}, {one['bytes'] / 2**20:,.1f} MiB a device")
    if plan.tokens_per_second is not None:
        parts = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in plan.seconds.items())
        rows += [
            f"roofline, an estimate: {parts}; most is {max(plan.seconds, key=plan.seconds.__getitem__)}",
            f"at best            {plan.tokens_per_second:,.0f} tokens/s, MFU "
            + ", ".join(f"{value:.0%} ({name})" for name, value in plan.mfu.items()),
        ]
    rows += [f"large              {one['count']} x {gib(one['bytes'])}  {one['shape']}" for one in plan.largest]
    rows += [f"note: {note}" for note in plan.notes]
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return "\n".join([*rows, f"planned in {plan.compile_seconds:.0f} s with {versions}"])
