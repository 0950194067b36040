"""A pod run before the pod is rented: the real train step, compiled for devices that are not here.

`topology.prepare` must run before JAX is imported.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxformer.data.sources import Stdlib
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.models.cost import GIB
from jaxformer.models.heads import language_model
from jaxformer.parallel import Mesh
from jaxformer.planning import hlo
from jaxformer.planning.compile import Plan, compile_step, plan_step, planner_bytes
from jaxformer.training.experiment import Experiment


def of_preset(name: str, model: Any) -> Any:
    """An experiment that pretrains a preset in the usual way: bfloat16, layers recomputed, 256 sequences a step."""
    if not isinstance(model, ModelConfig) or language_model(model) is None:
        raise ConfigError(f"{name}: plans train language models, one stack with a LanguageModel head; this is none")
    model = replace(model, remat="full", dropout_rate=0.0, attention_dropout_rate=0.0)
    return Experiment(name, model, Stdlib(), batch_size=256, precision="bfloat16", mesh=Mesh(data=1, fsdp=-1))


def plan(experiment: Any, name: str, devices: list, fast: bool = False) -> Plan:
    """Compiles the experiment's train step for the devices of a topology. Nothing of the model is allocated.

    `fast` compiles with less effort: seconds instead of a minute, and memory that is off by up to a fifth. For a step that
    does not fit, one more compile finds its largest arrays. ConfigError where the mesh does not fit the devices or the model.
    """
    made, lowered = plan_step(experiment, name, devices, fast)
    if made.fits:
        return made
    with tempfile.TemporaryDirectory() as folder:
        compile_step(lowered, devices, True, xla_dump_to=folder, xla_dump_hlo_as_text=True)
        read = lambda end: "".join(path.read_text(errors="replace") for path in Path(folder).glob(f"*{end}"))
        report, text = read("after_optimizations-memory-usage-report.txt"), read("after_optimizations.txt")
    return replace(made, largest=hlo.largest(report, text), planner_bytes=planner_bytes())


def table(plan: Plan) -> str:
    """The plan in words."""
    gib = lambda size: f"{size / GIB:.2f} GiB"
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "data=1"
    room = gib(abs(plan.capacity_bytes - plan.peak_bytes))
    room = f"fits, {room} free" if plan.fits else f"DOES NOT FIT, {room} too much"
    host = f", {gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    rows = [
        f"{plan.topology}: {plan.devices} x {plan.chip}, {mesh}",
        f"parameters         {plan.parameters:,}",
        f"FLOPs a step       {plan.flops:.4g} counted, with recomputation; {plan.model_flops:.4g} of the model alone",
        f"memory a device    {gib(plan.argument_bytes)} arguments, {gib(plan.temporary_bytes)} temporaries{host}, "
        f"{gib(plan.peak_bytes)} peak of {gib(plan.capacity_bytes)}: {room}",
    ]
    if plan.donated or plan.fits:
        rows.append(f"state in place     {'yes' if plan.donated else 'no'}")
    for one in plan.collectives:
        axes = "*".join(one["axes"]) or "-"
        rows.append(f"{one['kind']:<18} {one['count']:>5} a step over {axes}, {one['bytes'] / 2**20:,.1f} MiB a device")
    if plan.collectives or plan.fits:
        parts = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in plan.seconds.items())
        rows += [
            f"roofline, an estimate: {parts}; most is {max(plan.seconds, key=plan.seconds.__getitem__)}",
            f"at best            {plan.tokens_per_second:,.0f} tokens/s, MFU "
            + ", ".join(f"{value:.0%} ({name})" for name, value in plan.mfu.items()),
        ]
    rows += [f"large              {gib(one['bytes'])}  {one['shape']}  {one['name']}" for one in plan.largest]
    rows += [f"note: {note}" for note in plan.notes]
    rows.append(f"planned in {plan.compile_seconds:.0f} s, with {gib(plan.planner_bytes)} of this machine's memory")
    return "\n".join(rows)
