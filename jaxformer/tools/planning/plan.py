"""Plans of training before its devices are rented.

The real train step is compiled for devices that this machine does not have. `plan` makes a `Plan`;
`table` prints it.
"""

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
from jaxformer.tools.planning import flops, hlo, lines, roofline, topology
from jaxformer.tools.planning.compile import (
    Traced,
    compile_step,
    evaluation_bytes,
    memory_of,
    programs_for,
    trace,
)
from jaxformer.tools.planning.lines import gib
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build, example_lengths, trained_weights
from jaxformer.training.step import abstract_references, abstract_state, make_train_step


@dataclass(frozen=True)
class Plan:
    """The cost of a train step on a device.

    Bytes and collectives are the compiler's, `flops` are counted, `seconds` are an estimate. If the
    step does not fit, it cannot run: `step_seconds` and `tokens_per_second` are None, `seconds` and
    `mfu` are empty.
    """

    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    tokens: int  # of a step
    # products of a step on all devices, as it runs: with recomputation, without masked blocks
    flops: float
    model_flops: int  # with full attention, without recomputation: 6 N + 12 L N H T a token
    argument_bytes: int
    temporary_bytes: int
    host_bytes: int  # of a device's arrays, in its host's memory
    peak_bytes: int
    # of the state and an evaluation; None: the compiler reports that this does not fit
    evaluation_bytes: int | None
    capacity_bytes: int
    fits: bool  # both a step and an evaluation
    donated: bool  # the new state takes the memory of the old one
    moved_bytes: float  # through a device's memory
    collectives: list[dict]
    seconds: dict[str, float]  # the parts of `roofline.Seconds`
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: dict[str, float]  # at that speed, by definition
    compile_seconds: float
    versions: dict[str, str]  # of jax and the compiler, and the compiler's flags
    notes: list[str]
    largest: list[dict]  # the largest arrays of a step that does not fit


def of_preset(name: str, model: Any) -> Any:
    """An experiment that pretrains a preset: bfloat16, remat="full", 256 sequences a step.

    Raises ConfigError if the model is not a language model of one stack.
    """
    if not isinstance(model, models.ModelConfig) or language_model(model) is None:
        raise ConfigError(
            f"{name}: plans train language models, one stack with a LanguageModel head; "
            "this is none"
        )
    model = replace(model, remat="full", dropout_rate=0.0, attention_dropout_rate=0.0)
    return Experiment(
        name,
        model,
        Stdlib(),
        batch_size=256,
        precision="bfloat16",
        mesh=parallel.Mesh(data=1, fsdp=-1),
    )


def sharding_table(experiment: Experiment, devices: int | None) -> str:
    """A table that says how each parameter of an experiment is split over its mesh.

    `devices` is their number; None: the product of the mesh axes.
    """
    sizes = [getattr(experiment.mesh, axis) for axis in parallel.AXES]
    if devices is None and -1 in sizes:
        raise ConfigError(
            "show --sharding: a mesh axis is -1, the devices left over; give --devices N"
        )
    devices = math.prod(sizes) if devices is None else devices
    check_whole("show --sharding: devices", devices)
    shape = experiment.mesh.shape(devices)
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    return sharding.describe(models.spec(experiment.model), mesh)


def plan(experiment: Any, name: str, devices: list, fast: bool = False) -> Plan:
    """Compiles the experiment's train step for the devices of a topology.

    Nothing of the model is allocated. `fast` compiles with less effort: it takes seconds instead of
    a minute, and its memory is wrong by up to a fifth. Raises ConfigError if the mesh does not fit
    the devices or the model.
    """
    began = time.monotonic()
    traced = trace(experiment, devices)
    model = experiment.model
    mesh = traced.mesh
    kind = devices[0].device_kind
    chip = cost.CHIPS[kind]
    counted = _count(experiment, traced, devices)
    with programs_for(mesh):
        lowered = traced.stage.lower()
    compiled, log = compile_step(lowered, devices, fast)
    memory = memory_of(compiled, log, traced.argument_bytes)
    scoring = evaluation_bytes(traced, devices, fast)
    fits = (
        compiled is not None
        and scoring is not None
        and max(memory["peak_bytes"], scoring) <= chip.memory
    )
    text = (compiled.as_text() or "") if compiled else ""
    exchanges = hlo.exchanges(text)
    moved = hlo.traffic(text)
    length, source = example_lengths(experiment, traced.batch)
    tokens = experiment.batch_size * length
    trained = trained_weights(experiment)
    seconds = roofline.seconds(counted.matmul / len(devices), moved, exchanges, mesh, chip)
    speed = tokens / seconds.step
    mfu = cost.utilization(model, length, speed, len(devices), kind, source, trained)
    notes = _notes(log, experiment.mesh, mesh.shape["stage"])
    return Plan(
        topology=name,
        chip=kind,
        devices=len(devices),
        mesh={k: v for k, v in mesh.shape.items() if v > 1},
        parameters=params.count(models.spec(model)),
        tokens=tokens,
        flops=counted.matmul,
        model_flops=cost.training_flops(model, length, source, trained) * tokens,
        capacity_bytes=int(chip.memory),
        fits=fits,
        evaluation_bytes=scoring,
        **memory,
        moved_bytes=sum(moved),
        collectives=[collective._asdict() for collective in hlo.by_axes(exchanges, mesh)],
        seconds=seconds.parts() if fits else {},
        step_seconds=seconds.step if fits else None,
        tokens_per_second=speed if fits else None,
        mfu=mfu if fits else {},
        compile_seconds=time.monotonic() - began,
        versions=topology.versions(devices[0].platform),
        notes=[*traced.notes, *sorted(counted.notes), *notes],
        largest=[] if compiled else hlo.largest(log.text),
    )


def _notes(log: topology.Log, config: parallel.Mesh, stages: int) -> list[str]:
    """Sentences about what makes the step slow."""
    notes = []
    if log.resharded:
        notes.append(
            f"{log.resharded} arrays are made whole on every device to be split in another way "
            "(compiler's log)"
        )
    if stages > 1:
        idle = bubble(stages, config.microbatches or stages, config.repeats)
        notes.append(
            f"stages idle {idle:.1%} of a step, on work that is counted and not used; "
            "more micro-batches help"
        )
    return notes


def _count(experiment: Any, traced: Traced, devices: list) -> flops.Count:
    """The FLOPs of a step on all devices.

    The number of tokens that are routed to one device depends on the data, their sum does not. So a
    step with such a number is counted on a single device of unlimited memory. So is a step with a
    kernel of tokamax, which does not say its products: without `jax.default_device` our own
    functions stand in its place.
    """
    counted = flops.of_jaxpr(traced.stage.jaxpr)
    if not counted.notes & {flops.ROWS, flops.ONCE, flops.UNSEEN}:
        return counted
    recipe = build(replace(experiment, mesh=parallel.Mesh(data=1)))
    step = make_train_step(recipe)
    mesh = parallel.make_mesh(recipe.mesh, devices[:1])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = abstract_state(recipe)
        return flops.count(step, state, traced.batch, abstract_references(recipe))


def table(plan: Plan) -> str:
    """The plan as lines of text."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "data=1"
    host = f", {gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    scoring = "no room" if plan.evaluation_bytes is None else gib(plan.evaluation_bytes)
    text = [
        f"{plan.topology}: {plan.devices} x {plan.chip}, {mesh}",
        f"parameters         {plan.parameters:,}",
        f"FLOPs a step       {plan.flops:.4g} counted, with recomputation; "
        f"{plan.model_flops:.4g} of the model alone",
        f"memory a device    {gib(plan.argument_bytes)} arguments, "
        f"{gib(plan.temporary_bytes)} temporaries{host}, {gib(plan.peak_bytes)} peak "
        f"of {gib(plan.capacity_bytes)}: {verdict}",
        f"evaluation         {scoring} with the state, for a batch of the validation split",
    ]
    if plan.donated or plan.fits:
        text.append(f"state in place     {'yes' if plan.donated else 'no'}")
    text += lines.collectives(plan.collectives, digits=1)
    if plan.tokens_per_second is not None:
        longest = max(plan.seconds, key=plan.seconds.__getitem__)
        mfu = ", ".join(f"{value:.0%} ({name})" for name, value in plan.mfu.items())
        text += [
            f"roofline, an estimate: {lines.milliseconds(plan.seconds, digits=1)}; "
            f"most is {longest}",
            f"at best            {plan.tokens_per_second:,.0f} tokens/s, MFU {mfu}",
        ]
    for array in plan.largest:
        text.append(
            f"large              {array['count']} x {gib(array['bytes'])}  {array['shape']}"
        )
    text += [f"note: {note}" for note in plan.notes]
    text.append(f"planned in {plan.compile_seconds:.0f} s with {lines.versions(plan.versions)}")
    return "\n".join(text)
