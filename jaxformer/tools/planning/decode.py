"""Plans of decoding before its devices are rented.

Prefill and one decoding step are compiled for a topology that this machine does not have.
`plan_decode` makes a `DecodePlan`; `table` prints it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxformer import decoding, models, parallel, params, sharding
from jaxformer.decoding.generate import CHUNK
from jaxformer.decoding.steps import prepare_params
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import ModelConfig, cost
from jaxformer.models.stacks import layout
from jaxformer.ops.attention.cached import widths
from jaxformer.tools.planning import hlo, lines, roofline, topology
from jaxformer.tools.planning.compile import (
    compile_step,
    device_bytes,
    memory_of,
    placed,
    programs_for,
)
from jaxformer.tools.planning.lines import gib

# {kernel: the text by which it is recognised in a program}
KERNELS = {"splash": "splash", "cudnn": "__cudnn"}


@dataclass(frozen=True)
class DecodePlan:
    """The cost of one decoding step on a device: one new token for each text of a batch.

    Bytes are the compiler's. If the step does not fit, it cannot run: `tokens_per_second` and
    `bound` are None, and `seconds` is empty.
    """

    where: str  # devices, mesh, rows and length
    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int  # the larger one of the step and of prefill
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    donated: bool  # the new cache takes the memory of the old one
    needed_bytes: int  # weights that a product reads, and the filled part of the cache
    moved_bytes: float  # by the compiled step
    collectives: list[dict]
    seconds: dict[str, float]
    tokens_per_second: float | None  # of all texts, limited by memory and network
    bound: float | None  # the same if a step moved only `needed_bytes`
    kernel: str  # of attention inside prefill
    versions: dict[str, str]  # of jax and the compiler, and the compiler's flags


def plan_decode(
    experiment: Any,
    name: str,
    devices: list,
    rows: int = 8,
    length: int | None = None,
    capacity: int | None = None,
    fast: bool = False,
) -> DecodePlan:
    """Compiles prefill and one decoding step of `rows` texts of `length` tokens.

    `length` is 2,048 by default, or the number of the model's positions if that is smaller.
    `capacity` is the length of the cache, by default `length`. Texts are split over `data`, heads
    over `tensor`. `fast` compiles with less effort. Raises ConfigError if the mesh does not fit the
    devices or the model, and if `length` exceeds the model's positions.
    """
    config = experiment.model
    chip = cost.CHIPS[devices[0].device_kind]
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"plan --decode: model={type(config).__name__}: expected a ModelConfig, one stack"
        )
    if length is None:
        length = min(2048, config.position_limit)
    if capacity is None:
        capacity = length
    _check_sizes(config, rows, length, capacity)
    mesh = parallel.make_mesh(experiment.mesh, devices)
    compiler = _Compiler(config, mesh, jnp.dtype(experiment.activation_dtype), devices, fast)
    prefill = compiler.compile(decoding.prefill, 1, min(length, CHUNK), capacity, used=False)
    step = compiler.compile(decoding.decode_step, rows, 1, capacity, used=True)

    text = step.text()
    exchanges = hlo.exchanges(text)
    needed = _needed_bytes(config, step, length, capacity)
    traffic = hlo.traffic(text, sum(width < length for width in widths(capacity)))
    traffic = traffic if any(traffic) else hlo.Traffic(needed, 0.0)
    # the products of a step are small, so memory and network limit it and FLOPs are left out
    seconds = roofline.seconds(0.0, traffic, exchanges, mesh, chip)
    peak = max(step.memory["peak_bytes"], prefill.memory["peak_bytes"])
    fits = bool(step.program and prefill.program) and peak <= chip.memory
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    where = f"{name}: {len(devices)} x {devices[0].device_kind}, {axes or 'data=1'}"
    return DecodePlan(
        f"{where}; {rows} rows of {length:,} tokens",
        weight_bytes=device_bytes(step.weights),
        cache_bytes=device_bytes(step.cache),
        temporary_bytes=max(step.memory["temporary_bytes"], prefill.memory["temporary_bytes"]),
        peak_bytes=peak,
        capacity_bytes=int(chip.memory),
        fits=fits,
        donated=step.reuses_cache(),
        needed_bytes=needed,
        moved_bytes=sum(traffic),
        seconds=seconds.parts() if fits else {},
        collectives=[collective._asdict() for collective in hlo.by_axes(exchanges, mesh)],
        tokens_per_second=rows / seconds.step if fits else None,
        bound=rows * chip.bandwidth / needed if fits else None,
        kernel=_attention_kernel(prefill.text()),
        versions=topology.versions(devices[0].platform),
    )


def _check_sizes(config: ModelConfig, rows: int, length: int, capacity: int) -> None:
    check_whole("plan --decode: rows", rows)
    check_whole("plan --decode: length", length)
    check_whole(f"plan --decode: length={length}: capacity", capacity, least=length)
    if length > config.position_limit:
        raise ConfigError(
            f"plan --decode: {length} tokens do not fit the model's {config.position_limit} "
            "learned positions"
        )


class _Compiled(NamedTuple):
    """A compiled function of decoding."""

    program: Any  # None: it does not fit
    memory: dict[str, Any]  # of `memory_of`
    weights: Any  # shapes of its parameters
    cache: Any  # shapes of its cache

    def text(self) -> str:
        return (self.program.as_text() or "") if self.program else ""

    def reuses_cache(self) -> bool:
        """Whether the new cache takes the memory of the old one."""
        if not self.program:
            return False
        reused_bytes = self.program.memory_analysis().alias_size_in_bytes
        return reused_bytes >= 0.99 * device_bytes(self.cache)


@dataclass(frozen=True)
class _Compiler:
    """Compiles functions of decoding for the devices of a mesh."""

    config: ModelConfig
    mesh: Any
    dtype: Any
    devices: list
    fast: bool

    def compile(
        self, function: Callable, rows: int, tokens: int, capacity: int, *, used: bool
    ) -> _Compiled:
        """Compiles `prefill` or `decode_step` for these sizes (see `abstract_arguments`)."""
        arguments = abstract_arguments(
            self.config, self.mesh, self.dtype, rows, tokens, capacity, used
        )

        def call(weights, cache, tokens, lengths):
            return function(self.config, weights, tokens, cache, lengths=lengths, dtype=self.dtype)

        with programs_for(self.mesh):
            lowered = jax.jit(call, donate_argnums=1).lower(*arguments)
        program, log = compile_step(lowered, self.devices, self.fast)
        memory = memory_of(program, log, device_bytes(arguments))
        weights, cache, *_ = arguments
        return _Compiled(program, memory, weights, cache)


def _needed_bytes(config: ModelConfig, step: _Compiled, length: int, capacity: int) -> int:
    """Bytes of the weights that products read, and of the filled part of the cache."""
    weights = params.paths(step.weights)
    if not config.tie_embeddings:  # a step reads only a few vectors of an untied table
        weights.pop("embedding/tokens", None)
    return device_bytes(weights) + device_bytes(step.cache) * length // capacity


def _attention_kernel(program: str) -> str:
    """The kernel of attention in a program's text."""
    for kernel, mark in KERNELS.items():
        if mark in program:
            return kernel
    return "blockwise"


def abstract_arguments(
    config: ModelConfig, mesh, dtype, rows: int, tokens: int, capacity: int, used: bool
) -> list[Any]:
    """[parameters, cache, tokens, lengths] of a decoding step, as shapes with shardings on a mesh.

    Parameters are prepared for decoding. A `used` cache has the length of each text. `lengths`
    counts the new tokens of each text.
    """
    kinds = [kind.spec for kind in layout.kinds(config)]
    spec = models.spec(config) | {
        "layers": tuple(kinds[i % len(kinds)] for i in range(config.num_layers))
    }
    # A single device has its own order of the axes of a matrix. Matrices that are split over
    # several devices have the declared order.
    platforms = {mesh.devices.flat[0].platform} if mesh.size == 1 else set()
    weights = jax.eval_shape(
        lambda: prepare_params(config, models.init(config, jax.random.key(0)), dtype, platforms)
    )
    if mesh.size > 1:
        places = sharding.shardings(spec, mesh)
    else:
        replicated = NamedSharding(mesh, P())
        places = jax.tree.map(lambda _: replicated, weights)
    cache = jax.eval_shape(partial(decoding.init_cache, config, rows, capacity, dtype))
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    states = (
        replace(cache, lengths=lengths if used else None),
        jax.ShapeDtypeStruct((rows, tokens), jnp.int32),
        lengths,
    )
    return [jax.tree.map(placed, weights, places), *jax.tree.map(partial(_place, mesh), states)]


def _place(mesh, leaf: Any) -> jax.ShapeDtypeStruct:
    """Splits an array on the mesh: texts over `data`, heads over `tensor`."""
    names = ("batch", "kv_heads") if leaf.ndim == 4 else ("batch",)
    axes = (
        sharding.mesh_axes(name, size, mesh) or None
        for name, size in zip(names, leaf.shape, strict=False)
    )
    return placed(leaf, NamedSharding(mesh, P(*axes)))


def table(plan: DecodePlan) -> str:
    """The plan as lines of text."""
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    text = [
        plan.where,
        f"memory a device    {gib(plan.weight_bytes)} weights, {gib(plan.cache_bytes)} cache, "
        f"{gib(plan.temporary_bytes)} temporaries, {gib(plan.peak_bytes)} peak "
        f"of {gib(plan.capacity_bytes)}: {verdict}",
        f"cache in place     {'yes' if plan.donated else 'no'}",
        f"prefill            attention by {plan.kernel}",
        f"a step moves       {gib(plan.moved_bytes)} a device, "
        f"{plan.moved_bytes / plan.needed_bytes:.2f} x weights and cache",
        *lines.collectives(plan.collectives, digits=2),
    ]
    if plan.tokens_per_second is not None:
        text += [
            f"roofline, an estimate: {lines.milliseconds(plan.seconds, digits=2)}",
            f"at best            {plan.tokens_per_second:,.0f} tokens/s; "
            f"{plan.bound:,.0f} by the bandwidth of memory alone",
        ]
    text.append(f"planned with {lines.versions(plan.versions)}")
    return "\n".join(text)
