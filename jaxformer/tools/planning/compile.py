"""Compiles one train step for devices that this machine does not have, and reads the report.

TPUs need the libtpu that `jax[tpu]` pins, GPUs need the CUDA plugin. `topology.prepare` must run
before JAX is imported.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer import models, parallel, sharding
from jaxformer.data.batching import open_dataset, reads_state
from jaxformer.errors import ConfigError
from jaxformer.tools.planning import topology
from jaxformer.training.recipe import build
from jaxformer.training.step import (
    abstract_references,
    abstract_state,
    make_train_step,
    state_shardings,
)

FAST: Any = {"optimization_level": "O1"}
# With these offloads libtpu 0.0.42 ends the process on TPU7x (offload_collective_strategies.cc:
# "Check failed: std::abs(inc)").
_OFFLOAD = ("all_gather", "all_reduce", "reduce_scatter")
TPU7X: Any = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": False for kind in _OFFLOAD}


@contextmanager
def programs_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """What is traced here is for the devices of the mesh, which this machine may lack.

    Libraries of kernels ask `jax.default_device` what to compile for.
    """
    abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with abstract, jax.default_device(mesh.devices.flat[0]):
        yield


class Traced(NamedTuple):
    """A train step before it is compiled."""

    mesh: Any
    stage: Any  # jax.stages.Traced
    state: Any  # shapes, split over the mesh
    batch: dict[str, Any]  # shapes
    notes: list[str]
    argument_bytes: int  # of a device, without the compiler's padding
    evaluation: Any  # jax.stages.Traced: the loss of a batch of the validation split


def trace(experiment: Any, devices: list) -> Traced:
    """Traces the experiment's train step on a mesh of these devices.

    Raises ConfigError if the devices, the batch or the model do not fit the mesh.
    """
    if not models.is_config(experiment.model):
        raise ConfigError(
            f"plan: model={type(experiment.model).__name__}: "
            "expected a ModelConfig or an EncoderDecoder"
        )
    mesh = parallel.make_mesh(experiment.mesh, devices)
    parallel.check_batch(
        experiment.mesh, dict(mesh.shape), experiment.batch_size // experiment.accumulation
    )
    parallel.check_context(dict(mesh.shape), models.context_lengths(experiment.model))
    recipe = build(experiment)
    shapes, notes = abstract_batch(experiment)
    shardings = state_shardings(recipe, mesh)
    state = abstract_state(recipe, shardings)
    references = abstract_references(recipe, mesh)
    batch = jax.tree.map(placed, shapes, sharding.batch_sharding(mesh, shapes))
    with programs_for(mesh):
        step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(shardings, None))
        stage = step.trace(state, batch, references)
        key = jax.eval_shape(lambda: jax.random.key(0))
        step_number = jax.ShapeDtypeStruct((), np.int32)
        evaluation = jax.jit(recipe.eval_loss).trace(
            state.best, batch, key, step_number, references
        )
    argument_bytes = device_bytes((state, batch, references))
    return Traced(mesh, stage, state, shapes, notes, argument_bytes, evaluation)


def evaluation_bytes(traced: Traced, devices: list, fast: bool) -> int | None:
    """Bytes of a device while it holds the state and scores a batch of the validation split.

    None if that does not fit.
    """
    with programs_for(traced.mesh):
        lowered = traced.evaluation.lower()
    compiled, log = compile_step(lowered, devices, fast)
    if compiled is None:
        return None
    return traced.argument_bytes + memory_of(compiled, log, 0)["temporary_bytes"]


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def device_bytes(tree: Any) -> int:
    """Bytes on a device, without the compiler's padding and without arrays in host memory."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def abstract_batch(experiment: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], list[str]]:
    """(the shapes of a batch, notes). The first example of the data gives the shapes.

    If the data cannot be opened, a batch of the model's own lengths is assumed, and a note says so.
    """
    notes = []
    try:
        train = open_dataset(experiment.data, experiment.model).train
    except (ConfigError, OSError) as error:
        notes.append(
            "the data cannot be opened here, a batch of the model's own lengths is assumed "
            f"({error})"
        )
        train = [_example(experiment.model)]
    if reads_state(train):
        problem = (
            "the training batches are made of the state, "
            "so their arrays are not known before a step"
        )
        raise ConfigError(
            f"plan: {problem}; give data whose training split is a list of such examples"
        )
    batch = {}
    for name, value in train[0].items():
        array = np.asarray(value)
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        batch[name] = jax.ShapeDtypeStruct((experiment.batch_size, *array.shape), dtype)
    return batch, notes


def _example(model: Any) -> dict[str, np.ndarray]:
    """An example of the largest size that the model reads: text, or an image with its class.

    An encoder-decoder also has a source.
    """
    inputs = _inputs(models.last_stack(model))
    if inputs.ndim > 1:
        return {
            "images": inputs,
            "labels": np.zeros((), np.int32),
            "weights": np.ones((), np.float32),
        }
    example = {"tokens": inputs, "labels": inputs, "weights": np.ones(inputs.shape, np.float32)}
    if isinstance(model, models.EncoderDecoder):
        example["source"] = _inputs(model.encoder)
    return example


def _inputs(stack: models.ModelConfig) -> np.ndarray:
    """A text or an image that a stack reads."""
    patches = stack.embedding
    if isinstance(patches, models.Patches):
        return np.zeros((*patches.image, patches.channels), np.float32)
    return np.zeros(stack.context_length, np.int32)


def compile_step(lowered: Any, devices: list, fast: bool) -> tuple[Any, topology.Log]:
    """(the program, or None if it does not fit the device's memory; the compiler's log)."""
    is_tpu = devices[0].platform == "tpu"
    options: Any = {}
    if fast and is_tpu:
        options |= FAST
    if devices[0].device_kind == "TPU7x":
        options |= TPU7X
    with topology.listening(stderr=not is_tpu) as log:
        try:
            return lowered.compile(compiler_options=options or None), log
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failure = str(error)
    log.text += failure
    if "vmem" in failure and "hbm" not in failure.lower():
        raise ConfigError(
            f"a kernel does not fit the chip's fast memory: {failure.splitlines()[0][:300]}"
        )
    return None, log


def memory_of(compiled: Any, log: topology.Log, argument_bytes: int) -> dict[str, Any]:
    """The fields of a plan about memory.

    For a program that did not fit (None) they are read from the compiler's message.
    """
    if compiled is None:
        peak = _reported_peak(log.text)
        return {
            "argument_bytes": argument_bytes,
            "temporary_bytes": max(0, peak - argument_bytes),
            "host_bytes": 0,
            "peak_bytes": peak,
            "donated": False,
        }
    size = compiled.memory_analysis()
    new_bytes = size.output_size_in_bytes - size.alias_size_in_bytes
    # the compiler's own peak includes arrays in host memory
    peak = min(
        size.argument_size_in_bytes + size.temp_size_in_bytes + new_bytes,
        size.peak_memory_in_bytes,
    )
    return {
        "argument_bytes": size.argument_size_in_bytes or argument_bytes,
        "temporary_bytes": size.temp_size_in_bytes or max(0, peak - argument_bytes),
        "host_bytes": size.host_argument_size_in_bytes + size.host_temp_size_in_bytes,
        "peak_bytes": peak,
        "donated": size.alias_size_in_bytes >= 0.99 * size.output_size_in_bytes > 0,
    }


def _reported_peak(text: str) -> int:
    """The bytes that a compiler reports for a program that does not fit; 0 if it reports none."""
    message = re.search(
        r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|HLO temporaries \(([\d.]+)([KMGT])\)",
        text,
    )
    if message is None:
        return 0
    number, unit = filter(None, message.groups())
    return int(float(number) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit])
