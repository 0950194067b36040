"""One train step, compiled for devices that are not here, and what the compiler reports of it.

TPUs need the libtpu that `jax[tpu]` pins, GPUs the CUDA plugin; `topology.prepare` must run before JAX is imported.
"""

import math
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer import models, parallel, params, sharding
from jaxformer.data.batching import open_dataset
from jaxformer.errors import ConfigError
from jaxformer.models import cost
from jaxformer.models.config import Alibi, EncoderDecoder, ModelConfig, Relative
from jaxformer.models.stacks.pipeline import bubble
from jaxformer.planning import flops, hlo, roofline, topology
from jaxformer.training.recipe import build
from jaxformer.training.state import init_state, state_shardings
from jaxformer.training.step import make_train_step

FAST: Any = {"exec_time_optimization_effort": -1.0}
# libtpu 0.0.42 ends the process over these on TPU7x (offload_collective_strategies.cc: "Check failed: std::abs(inc)")
_OFFLOAD = ("all_gather", "all_reduce", "reduce_scatter")
TPU7X: Any = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": False for kind in _OFFLOAD}


@dataclass(frozen=True)
class Plan:
    """What a step costs a device. Bytes and collectives are the compiler's, `flops` counted; `seconds` are an estimate."""

    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    tokens: int  # of a step
    flops: float  # products of a step on all devices as it runs: with recomputation, without masked blocks
    model_flops: float  # counted for the step with full attention and no recomputation
    closed_form: float  # 6 N + 12 L N H T a token
    argument_bytes: int
    temporary_bytes: int
    host_bytes: int  # of a device's arrays, in its host's memory
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    donated: bool  # the new state takes the memory of the old one
    moved_bytes: float  # through a device's memory
    collectives: list[dict]
    seconds: dict[str, float]  # compute, memory, and of the network by mesh axes
    step_seconds: float
    tokens_per_second: float
    mfu: dict[str, float]  # at that speed
    compile_seconds: float
    planner_bytes: int  # peak host memory of planning
    notes: list[str]
    largest: list[dict] = field(default_factory=list)


class Traced(NamedTuple):
    """A train step before it is compiled."""

    experiment: Any
    mesh: Any
    stage: Any  # jax.stages.Traced
    batch: dict[str, Any]  # shapes
    notes: list[str]
    argument_bytes: int  # of a device, without the compiler's padding


def trace(experiment: Any, devices: list) -> Traced:
    """The experiment's train step for a mesh of those devices. ConfigError where they, the batch or the model do not fit it."""
    if not models.is_config(experiment.model):
        raise ConfigError(f"plan: model={type(experiment.model).__name__}: expected a ModelConfig or an EncoderDecoder")
    experiment = choose_attention(experiment, devices[0].platform)
    mesh = parallel.make_mesh(experiment.mesh, devices)
    parallel.check_batch(experiment.mesh, dict(mesh.shape), experiment.batch_size // experiment.accumulation)
    recipe, (shapes, notes) = build(experiment), abstract_batch(experiment)
    places = state_shardings(recipe, mesh)
    placed = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    state = jax.tree.map(placed, jax.eval_shape(partial(init_state, recipe)), places)
    batch = jax.tree.map(placed, shapes, sharding.batch_sharding(mesh, shapes))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(places, None))
        stage = step.trace(state, batch)
    shard = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return Traced(experiment, mesh, stage, shapes, notes, sum(map(shard, jax.tree.leaves((state, batch)))))


def abstract_batch(experiment: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], list[str]]:
    """(the shapes of a batch, by the first example of the data; notes). Without the data: text of the model's length."""
    notes = []
    try:
        example = open_dataset(experiment.data, experiment.model).train[0]
    except (ConfigError, OSError) as error:
        notes.append(f"the data cannot be opened here, a batch of tokens is assumed ({error})")
        tokens = np.zeros(models.last_stack(experiment.model).context_length, np.int32)
        example = {"tokens": tokens, "labels": tokens, "weights": tokens.astype(np.float32)}
        if isinstance(experiment.model, EncoderDecoder):
            example["source"] = np.zeros(experiment.model.encoder.context_length, np.int32)
    arrays = {name: np.asarray(value) for name, value in example.items()}
    dtype = jax.dtypes.canonicalize_dtype
    batch = {k: jax.ShapeDtypeStruct((experiment.batch_size, *x.shape), dtype(x.dtype)) for k, x in arrays.items()}
    return batch, notes


def choose_attention(experiment: Any, platform: str) -> Any:
    """The experiment with the attention that the platform chooses where none is named: this process runs on a CPU."""
    if experiment.mesh.context != 1:
        return experiment
    kernel = "splash" if platform == "tpu" and experiment.precision != "float16" else "blockwise"
    return replace(experiment, model=_map_stacks(partial(_with_attention, kernel), experiment.model))


def _with_attention(kernel: str, stack: ModelConfig) -> ModelConfig:
    if stack.attention_implementation is not None:
        return stack
    biased = isinstance(stack.positions, Alibi | Relative) or callable(stack.positions)
    return replace(stack, attention_implementation="blockwise" if stack.attention_dropout_rate or biased else kernel)


def _map_stacks(function: Callable[[ModelConfig], ModelConfig], model: Any) -> Any:
    if isinstance(model, EncoderDecoder):
        return replace(model, encoder=function(model.encoder), decoder=function(model.decoder))
    return function(model)


def plan_step(experiment: Any, name: str, devices: list, fast: bool = False) -> tuple[Plan, Any]:
    """Compiles the experiment's train step for the devices of a topology: (the plan, the step before it is compiled).

    `fast` compiles with less effort: seconds instead of a minute, and memory that is off by up to a fifth. ConfigError
    where the mesh does not fit the devices or the model.
    """
    began = time.monotonic()
    traced = trace(experiment, devices)
    model, mesh, kind = traced.experiment.model, traced.mesh, devices[0].device_kind
    chip, parameters = cost.CHIPS[kind], params.count(models.spec(model))
    counted = flops.of_jaxpr(traced.stage.jaxpr)
    if counted.notes & {flops.ROWS, flops.ONCE}:  # a device's share of routed tokens depends on the data, their sum not
        counted = _on_one_device(traced.experiment, traced.batch)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = traced.stage.lower()
    compiled, log = compile_step(lowered, devices, fast)
    memory = memory_of(compiled, log, traced.argument_bytes)
    text = (compiled.as_text() or "") if compiled else ""
    collectives, moved = hlo.collectives(text, mesh), hlo.traffic(text)
    tokens, length = _tokens(traced)
    once, closed = _model_flops(traced), float(cost.training_flops(model, length) * tokens)
    seconds = {"compute": counted.matmul / len(devices) / chip.peak, "memory": moved / chip.bandwidth}
    seconds |= roofline.network(collectives, mesh, chip)
    step_seconds = roofline.step(seconds)
    speed = tokens / step_seconds
    notes = [*sorted(counted.notes), *_notes(collectives, log, parameters, traced)]
    if abs(once / closed - 1) > 0.01:
        notes.append(f"the closed form has {closed:.4g} model FLOPs, {closed / once - 1:+.1%} of what is counted")
    made = Plan(
        topology=name, chip=kind, devices=len(devices), mesh={k: v for k, v in mesh.shape.items() if v > 1},
        parameters=parameters, tokens=tokens, flops=counted.matmul, model_flops=once, closed_form=closed,
        capacity_bytes=int(chip.memory), fits=compiled is not None and memory["peak_bytes"] <= chip.memory, **memory,
        moved_bytes=moved, collectives=[one._asdict() for one in collectives], seconds=seconds,
        step_seconds=step_seconds, tokens_per_second=speed,
        mfu=cost.utilization(model, length, speed, len(devices), kind), compile_seconds=time.monotonic() - began,
        planner_bytes=planner_bytes(), notes=notes,
    )  # fmt: skip
    return made, lowered


def _tokens(traced: Traced) -> tuple[int, int]:
    """(tokens of a step, of an example); of images, patches."""
    length = models.last_stack(traced.experiment.model).context_length
    if "tokens" in traced.batch:
        length = traced.batch["tokens"].shape[1]
    return traced.experiment.batch_size * length, length


def planner_bytes() -> int:
    """Peak host memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compile_step(lowered: Any, devices: list, fast: bool, **options: Any) -> tuple[Any, topology.Log]:
    """(the program, or None where the compiler reports that it does not fit; the compiler's log)."""
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


def memory_of(compiled: Any, log: topology.Log, argument_bytes: int) -> dict[str, Any]:
    """The fields of a plan about memory; of a program that did not fit, by the compiler's message."""
    if compiled is None:
        found = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|HLO temporaries \(([\d.]+)([KMGT])\)", log.text)
        number, unit = filter(None, found.groups()) if found else ("0", "G")
        peak = int(float(number) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit])
        arguments, temporaries, host, donated = argument_bytes, 0, 0, False
    else:
        size = compiled.memory_analysis()
        arguments, temporaries = size.argument_size_in_bytes or argument_bytes, size.temp_size_in_bytes
        host = size.host_argument_size_in_bytes + size.host_temp_size_in_bytes
        donated = size.alias_size_in_bytes >= 0.99 * size.output_size_in_bytes > 0
        new = size.output_size_in_bytes - size.alias_size_in_bytes
        # the compiler's own peak includes arrays in host memory
        peak = min(size.argument_size_in_bytes + temporaries + new, size.peak_memory_in_bytes)
    return {
        "argument_bytes": arguments, "temporary_bytes": temporaries or max(0, peak - argument_bytes), "host_bytes": host,
        "peak_bytes": peak, "donated": donated,
    }  # fmt: skip


def _notes(collectives: list, log: topology.Log, parameters: int, traced: Traced) -> list[str]:
    """What makes the step slow, in words."""
    notes, sizes, config = [*traced.notes], traced.mesh.shape, traced.experiment.mesh
    reduced = sum(one.bytes for one in collectives if one.kind == "all-reduce" and "fsdp" in one.axes)
    gradients = 2 * parameters // math.prod(sizes[axis] for axis in ("tensor", "expert", "stage"))
    if sizes["fsdp"] > 1 and reduced > gradients / 10:
        kinds = {one.kind for one in collectives if "fsdp" in one.axes}
        notes.append(
            f"{'little' if kinds & {'reduce-scatter', 'collective-permute'} else 'no'} reduce-scatter over fsdp: every "
            f"device sums {reduced / 2**20:,.0f} MiB of gradients whole, at twice the traffic; try a smaller fsdp, with "
            "the rest in data or tensor"
        )
    if log.resharded:
        notes.append(f"{log.resharded} arrays are made whole on every device to be split in another way (compiler's log)")
    if (stages := sizes["stage"]) > 1:
        idle = bubble(stages, config.microbatches or stages, config.repeats)
        notes.append(f"stages idle {idle:.1%} of a step, on work that is counted and not used; more micro-batches help")
    return notes


def _model_flops(traced: Traced) -> float:
    """FLOPs of the step with full attention and no recomputation, which is what the closed form counts."""
    plain = _map_stacks(partial(replace, remat="none", attention_implementation="reference"), traced.experiment.model)
    return _on_one_device(replace(traced.experiment, model=plain, accumulation=1), traced.batch).matmul


def _on_one_device(experiment: Any, batch: dict[str, Any]) -> flops.Count:
    """What the step computes on a single device that is large enough."""
    recipe = build(replace(experiment, mesh=parallel.Mesh(data=1)))
    return flops.count(make_train_step(recipe), jax.eval_shape(partial(init_state, recipe)), batch)
