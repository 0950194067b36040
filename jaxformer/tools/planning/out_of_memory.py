"""The message for a run that does not fit its devices' memory: what needs memory, what would help.

`explain` makes it.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jax

from jaxformer import config, models, parallel, sharding
from jaxformer.errors import ConfigError
from jaxformer.models import cost
from jaxformer.tools.planning import hlo
from jaxformer.tools.planning.compile import (
    Traced,
    compile_step,
    device_bytes,
    memory_of,
    programs_for,
    trace,
)
from jaxformer.training.experiment import Experiment
from jaxformer.training.step import TrainState

FAILURES = (ConfigError, NotImplementedError, jax.errors.JaxRuntimeError)  # of a plan
# the words by which a device, its libraries and its network report a lack of memory
NO_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "OUT_OF_MEMORY",
    "ALLOC_FAILED",
    "out of memory",
    "Out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a device lacked memory.

    CUDA's libraries report this as an internal error. A network message that is too long also says
    RESOURCE_EXHAUSTED; it does not count.
    """
    text = str(error)
    known = isinstance(error, jax.errors.JaxRuntimeError) and any(
        word in text for word in NO_MEMORY
    )
    return known and "message larger than max" not in text


def explain(experiment: Experiment) -> str:
    """The memory of a step on the devices of this machine, its largest arrays, and useful changes.

    Bytes are counted as by `plan`. With several processes the text names the command of `plan`
    instead: all processes would have to compile together, and some may not be out of memory.
    """
    if jax.process_count() > 1:
        return (
            f"make plan EXP={experiment.name} TOPOLOGY=... says what a step needs, on any machine"
        )
    try:
        peak, compiled, traced = needed(experiment)
    except FAILURES as problem:
        return f"the step could not be planned here: {str(problem).splitlines()[0][:200]}"
    lines = [f"a step needs {gib(peak)} on each device: {parts(traced.state, peak)}"]
    if compiled is not None:
        for array in hlo.largest_results(compiled.as_text() or ""):
            lines.append(f"  large: {gib(array['bytes'])} {array['shape']}, {array['source']}")
    shards = math.prod(traced.mesh.shape[axis] for axis in sharding.ACTIVATIONS["batch"])
    helpful = []
    for options, note in changes(experiment, shards):
        with suppress(*FAILURES):  # a change may not fit the experiment, its mesh or its model
            size, *_ = needed(config.override(experiment, options.split()))
            if size < peak:
                helpful.append((size, options, note))
    lines += [
        f"  with {options} {gib(size)}: {note}" for size, options, note in sorted(helpful)[:3]
    ]
    return "\n".join(lines)


def gib(size: int) -> str:
    return f"{size / cost.GIB:.3g} GiB"


def needed(experiment: Experiment) -> tuple[int, Any, Traced]:
    """(bytes of a step on a device, the compiled program, the traced step).

    The program is None if the compiler reports that it does not fit.
    """
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size // experiment.accumulation)
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel().tolist()
    traced = trace(experiment, devices)
    with programs_for(traced.mesh):
        compiled, log = compile_step(traced.stage.lower(), devices, fast=True)
    memory = memory_of(compiled, log, traced.argument_bytes)
    return memory["argument_bytes"] + memory["temporary_bytes"], compiled, traced


def parts(state: TrainState, peak: int) -> str:
    """The bytes of a device by kind: parameters, optimizer, averaged parameters, the rest."""
    sizes = {"parameters": device_bytes(state.params), "optimizer": device_bytes(state.opt_state)}
    if state.ema is not None:
        sizes["averaged parameters"] = device_bytes(state.ema)
    sizes["activations, gradients and batch"] = max(0, peak - sum(sizes.values()))
    return ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())


def changes(experiment: Experiment, shards: int) -> Iterator[tuple[str, str]]:
    """(options with which a step may need less memory, a note about the run that results).

    The mesh splits a batch into `shards`.
    """
    model = experiment.model
    size = experiment.batch_size
    same = "the same run goes on"
    if isinstance(model, models.ModelConfig) and model.remat != "full":
        yield "--model.remat=full", f"recomputes layers; {same}"
    if isinstance(model, models.ModelConfig) and model.attention_implementation is None:
        yield "--model.attention-implementation=blockwise", f"keeps no scores; {same}"
    if isinstance(model, models.EncoderDecoder):
        yield "--model.encoder.remat=full --model.decoder.remat=full", f"recomputes layers; {same}"
    if jax.device_count() > 1 and experiment.mesh.fsdp == 1:
        yield (
            "--mesh.data=1 --mesh.fsdp=-1",
            f"splits parameters and batch over all devices; {same}",
        )
    micro_batch = size // experiment.accumulation
    for factor in (8, 4, 2):
        if micro_batch % (factor * shards) == 0:
            yield (
                f"--accumulation={experiment.accumulation * factor}",
                "the same mean gradient; another run",
            )
            yield f"--batch-size={size // factor}", "another run"
            break
    if experiment.precision == "float32":
        yield "--precision=bfloat16", "another run"
