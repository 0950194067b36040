"""What to say when a run does not fit into its devices' memory: what needs how much, and what would help."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxformer import models, parallel
from jaxformer.errors import ConfigError
from jaxformer.models import cost
from jaxformer.planning import hlo
from jaxformer.planning.compile import compile_step, device_bytes, memory_of, placed, trace
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, state_shardings


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def explain(experiment: Experiment) -> str:
    """The bytes of a step as `plan` counts them, on the devices that are here; its largest arrays; changes that help.

    Of several processes each would have to compile along with the others, which may not be out of memory: `plan` says it.
    """
    if jax.process_count() > 1:
        return f"make plan EXP={experiment.name} TOPOLOGY=... says what a step needs, on any machine"
    try:
        peak, compiled = needed(experiment)
        lines = [f"a step needs {gib(peak)} on each device: {parts(experiment, peak)}"]
        if compiled is not None:
            large = hlo.largest_results(compiled.as_text() or "")
            lines += [f"  large: {gib(one['bytes'])} {one['shape']}, {one['source']}" for one in large]
        tried = [(needed(other)[0], option, note) for other, option, note in changes(experiment)]
        helpful = sorted(found for found in tried if found[0] < peak)[:3]
        lines += [f"  with {option} {gib(size)}: {note}" for size, option, note in helpful]
    except (ConfigError, NotImplementedError, jax.errors.JaxRuntimeError) as problem:
        lines = [f"the step could not be planned here: {str(problem).splitlines()[0][:200]}"]
    return "\n".join(lines)


def gib(size: float) -> str:
    return f"{size / cost.GIB:.3g} GiB"


def needed(experiment: Experiment) -> tuple[float, Any]:
    """(bytes of a step on a device, the program; None where the compiler itself finds no room)."""
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size // experiment.accumulation)
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel().tolist()
    traced = trace(experiment, devices)
    with jax.sharding.use_abstract_mesh(traced.mesh.abstract_mesh):
        compiled, log = compile_step(traced.stage.lower(), devices, fast=True)
    memory = memory_of(compiled, log, traced.argument_bytes)
    return memory["argument_bytes"] + memory["temporary_bytes"], compiled


def parts(experiment: Experiment, peak: float) -> str:
    """The bytes of a device by what they are."""
    recipe = build(experiment)
    state = jax.eval_shape(partial(init_state, recipe))
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size // experiment.accumulation)
    mesh = parallel.make_mesh(parallel.Mesh(data=1), jax.devices()[:1]) if mesh is None else mesh
    state = jax.tree.map(placed, state, state_shardings(recipe, mesh))
    sizes = {"parameters": device_bytes(state.params), "optimizer": device_bytes(state.opt_state)}
    sizes["activations, gradients and batch"] = max(0, int(peak) - sum(sizes.values()))
    return ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())


def changes(experiment: Experiment) -> Iterator[tuple[Experiment, str, str]]:
    """(an experiment that may need less, the option, whether it is the same run)."""
    model, size, same = experiment.model, experiment.batch_size, "the same run goes on"
    if isinstance(model, models.ModelConfig) and model.remat != "full":
        yield replace(experiment, model=replace(model, remat="full")), "--model.remat=full", f"recomputes layers; {same}"
    if isinstance(model, models.ModelConfig) and model.attention_implementation is None:
        blocks = replace(experiment, model=replace(model, attention_implementation="blockwise"))
        yield blocks, "--model.attention-implementation=blockwise", f"keeps no scores; {same}"
    if isinstance(model, models.EncoderDecoder):
        stacks = {name: replace(getattr(model, name), remat="full") for name in ("encoder", "decoder")}
        options = " ".join(f"--model.{name}.remat=full" for name in stacks)
        yield replace(experiment, model=replace(model, **stacks)), options, f"recomputes layers; {same}"
    if jax.device_count() > 1 and experiment.mesh.fsdp == 1 and size % jax.device_count() == 0:
        split = replace(experiment, mesh=parallel.Mesh(data=1, fsdp=-1))
        yield split, "--mesh.data=1 --mesh.fsdp=-1", f"splits parameters and batch over all devices; {same}"
    rows = size // experiment.accumulation
    for factor in (8, 4, 2):
        if rows % factor == 0:
            several = experiment.accumulation * factor
            yield replace(experiment, accumulation=several), f"--accumulation={several}", "the same mean gradient; another run"
            yield replace(experiment, batch_size=size // factor), f"--batch-size={size // factor}", "another run"
            break
    if experiment.precision == "float32":
        yield replace(experiment, precision="bfloat16"), "--precision=bfloat16", "another run"
