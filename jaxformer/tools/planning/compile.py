"""One train step, compiled for devices that are not here, and what the compiler reports of it.

TPUs need the libtpu that `jax[tpu]` pins, GPUs the CUDA plugin; `topology.prepare` must run before JAX is imported.
"""

import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer import models, parallel, sharding
from jaxformer.data.batching import open_dataset, reads_state
from jaxformer.errors import ConfigError
from jaxformer.tools.planning import topology
from jaxformer.training.recipe import build
from jaxformer.training.step import abstract_references, abstract_state, make_train_step, state_shardings

FAST: Any = {"optimization_level": "O1"}
# libtpu 0.0.42 ends the process over these on TPU7x (offload_collective_strategies.cc: "Check failed: std::abs(inc)")
_OFFLOAD = ("all_gather", "all_reduce", "reduce_scatter")
TPU7X: Any = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": False for kind in _OFFLOAD}


class Traced(NamedTuple):
    """A train step before it is compiled."""

    mesh: Any
    stage: Any  # jax.stages.Traced
    state: Any  # shapes, split over the mesh
    batch: dict[str, Any]  # shapes
    notes: list[str]
    argument_bytes: int  # of a device, without the compiler's padding
    evaluation: Any  # jax.stages.Traced of what scores a batch of the validation split


def trace(experiment: Any, devices: list) -> Traced:
    """The experiment's train step for a mesh of those devices. ConfigError where they, the batch or the model do not fit it."""
    if not models.is_config(experiment.model):
        raise ConfigError(f"plan: model={type(experiment.model).__name__}: expected a ModelConfig or an EncoderDecoder")
    mesh = parallel.make_mesh(experiment.mesh, devices)
    parallel.check_batch(experiment.mesh, dict(mesh.shape), experiment.batch_size // experiment.accumulation)
    parallel.check_context(dict(mesh.shape), models.context_lengths(experiment.model))
    recipe, (shapes, notes) = build(experiment), abstract_batch(experiment)
    places = state_shardings(recipe, mesh)
    state, references = abstract_state(recipe, places), abstract_references(recipe, mesh)
    batch = jax.tree.map(placed, shapes, sharding.batch_sharding(mesh, shapes))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(places, None))
        stage = step.trace(state, batch, references)
        key, number = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), np.int32)
        evaluation = jax.jit(recipe.score).trace(state.best, batch, key, number, references)
    return Traced(mesh, stage, state, shapes, notes, device_bytes((state, batch, references)), evaluation)


def evaluation_bytes(traced: Traced, devices: list, fast: bool) -> int | None:
    """Bytes of a device while a batch of the validation split is scored, beside the whole state; None: it does not fit."""
    with jax.sharding.use_abstract_mesh(traced.mesh.abstract_mesh):
        lowered = traced.evaluation.lower()
    compiled, log = compile_step(lowered, devices, fast)
    if compiled is None:
        return None
    return traced.argument_bytes + memory_of(compiled, log, 0)["temporary_bytes"]


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def device_bytes(tree: Any) -> int:
    """Bytes on a device, without the compiler's padding and without what its host holds."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def abstract_batch(experiment: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], list[str]]:
    """(the shapes of a batch, by the first example of the data; notes). Without the data: text of the model's length."""
    notes = []
    try:
        train = open_dataset(experiment.data, experiment.model).train
    except (ConfigError, OSError) as error:
        notes.append(f"the data cannot be opened here, a batch of the model's own lengths is assumed ({error})")
        train = [_example(experiment.model)]
    if reads_state(train):
        problem = "the training batches are made of the state, so their arrays are not known before a step"
        raise ConfigError(f"plan: {problem}; give data whose training split is a list of such examples")
    example = train[0]
    arrays = {name: np.asarray(value) for name, value in example.items()}
    dtype = jax.dtypes.canonicalize_dtype
    batch = {k: jax.ShapeDtypeStruct((experiment.batch_size, *x.shape), dtype(x.dtype)) for k, x in arrays.items()}
    return batch, notes


def _example(model: Any) -> dict[str, np.ndarray]:
    """An example as large as the model reads: text, or an image with its class; of a pair with a source."""

    def inputs(stack: models.ModelConfig) -> np.ndarray:
        patches = stack.embedding
        if isinstance(patches, models.Patches):
            return np.zeros((*patches.image, patches.channels), np.float32)
        return np.zeros(stack.context_length, np.int32)

    read = inputs(models.last_stack(model))
    if read.ndim > 1:
        return {"images": read, "labels": np.zeros((), np.int32), "weights": np.ones((), np.float32)}
    example = {"tokens": read, "labels": read, "weights": np.ones(read.shape, np.float32)}
    return example | ({"source": inputs(model.encoder)} if isinstance(model, models.EncoderDecoder) else {})


def compile_step(lowered: Any, devices: list, fast: bool) -> tuple[Any, topology.Log]:
    """(the program, or None where the compiler reports that it does not fit; the compiler's log)."""
    tpu = devices[0].platform == "tpu"
    with topology.listening(stderr=not tpu) as log:
        try:
            options = (FAST if fast and tpu else {}) | (TPU7X if devices[0].device_kind == "TPU7x" else {})
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
    """The fields of a plan about memory; for a program that did not fit, from the compiler's message."""
    if compiled is None:
        message = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|HLO temporaries \(([\d.]+)([KMGT])\)", log.text)
        number, unit = filter(None, message.groups()) if message else ("0", "G")
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
