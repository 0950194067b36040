"""Decoding planned before its devices are rented: prefill and the step of one token a row, compiled for a topology."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from jaxformer.tools.planning import hlo, roofline, topology
from jaxformer.tools.planning.compile import compile_step, device_bytes, memory_of, placed

KERNELS = {"splash": "splash", "cudnn": "__cudnn"}  # and how a program names them


@dataclass(frozen=True)
class DecodePlan:
    """What one token more for each of `rows` texts of `length` tokens costs a device. Bytes are the compiler's.

    Where it does not fit nothing runs, so there are no seconds and no speed: these are None, and `seconds` is empty.
    """

    where: str  # devices, mesh, rows and length
    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int  # of the step or of prefill, whichever needs more
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    donated: bool  # the new cache takes the memory of the old one
    needed_bytes: int  # weights that a product reads, and the filled part of the cache
    moved_bytes: float  # by the step as it is compiled
    collectives: list[dict]
    seconds: dict[str, float]
    tokens_per_second: float | None  # of all rows, by memory and network
    bound: float | None  # the same where a step moves no more than it needs
    kernel: str  # of attention inside prefill
    versions: dict[str, str]  # of jax and the compiler


def plan_decode(
    experiment: Any, name: str, devices: list, rows: int = 8, length: int | None = None, room: int | None = None,
    fast: bool = False,
) -> DecodePlan:  # fmt: skip
    """Compiles prefill of a prompt and the step that follows, with `length` tokens in a cache of `room` (as many).

    By default 2,048 tokens, or as many as the model has positions. Rows are split over `data`, heads over `tensor`. ConfigError
    where the mesh does not fit the devices or the model, or `length` its positions.
    """
    config, chip = experiment.model, cost.CHIPS[devices[0].device_kind]
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"plan --decode: model={type(config).__name__}: expected a ModelConfig, one stack")
    length = min(2048, config.position_limit) if length is None else length
    room = length if room is None else room
    check_whole("plan --decode: rows", rows)
    check_whole("plan --decode: length", length)
    check_whole(f"plan --decode: length={length}: room", room, least=length)
    if length > config.position_limit:
        raise ConfigError(f"plan --decode: {length} tokens do not fit the model's {config.position_limit} learned positions")
    mesh, dtype = parallel.make_mesh(experiment.mesh, devices), jnp.dtype(experiment.precision)

    def compiled(function, *shape):
        weights, cache, *_ = arguments = abstract_arguments(config, mesh, dtype, *shape)

        def call(weights, cache, tokens, lengths):
            return function(config, weights, tokens, cache, lengths=lengths, dtype=dtype)

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(call, donate_argnums=1).lower(*arguments)
        program, log = compile_step(lowered, devices, fast)
        return program, memory_of(program, log, device_bytes(arguments)), weights, cache

    prefill, first, *_ = compiled(decoding.prefill, 1, min(length, CHUNK), room, False)
    step, size, weights, cache = compiled(decoding.decode_step, rows, 1, room, True)
    text = (step.as_text() or "") if step else ""
    exchanges, factors = hlo.exchanges(text), params.paths(weights)
    if not config.tie_embeddings:  # of an untied table a step looks up a few rows
        factors.pop("embedding/tokens", None)
    needed = device_bytes(factors) + device_bytes(cache) * length // room
    traffic = hlo.traffic(text, sum(width < length for width in widths(room)))
    traffic = traffic if any(traffic) else hlo.Traffic(needed, 0.0)
    seconds = roofline.seconds(0.0, traffic, exchanges, mesh, chip)  # no product is large: memory and network decide
    peak, temporary = (max(size[name], first[name]) for name in ("peak_bytes", "temporary_bytes"))
    split = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "data=1"
    fits = bool(step and prefill) and peak <= chip.memory
    return DecodePlan(
        f"{name}: {len(devices)} x {devices[0].device_kind}, {split}; {rows} rows of {length:,} tokens",
        weight_bytes=device_bytes(weights), cache_bytes=device_bytes(cache), temporary_bytes=temporary, peak_bytes=peak,
        capacity_bytes=int(chip.memory), fits=fits,
        donated=bool(step) and step.memory_analysis().alias_size_in_bytes >= 0.99 * device_bytes(cache),
        needed_bytes=needed, moved_bytes=sum(traffic), seconds=seconds.parts() if fits else {},
        collectives=[one._asdict() for one in hlo.by_axes(exchanges, mesh)],
        tokens_per_second=rows / seconds.step if fits else None, bound=rows * chip.bandwidth / needed if fits else None,
        kernel=next((kernel for kernel, mark in KERNELS.items() if prefill and mark in (prefill.as_text() or "")), "blockwise"),
        versions=topology.versions(devices[0].platform),
    )  # fmt: skip


def abstract_arguments(config: ModelConfig, mesh, dtype, rows: int, tokens: int, room: int, used: bool) -> list[Any]:
    """Shapes on a mesh: prepared parameters, a cache that is new or `used`, new tokens, how many of them are text."""
    kinds = [kind.spec for kind in layout.kinds(config)]
    spec = models.spec(config) | {"layers": tuple(kinds[i % len(kinds)] for i in range(config.num_layers))}
    # one device has its matrices in an order of its own; those that are split have the order of their declaration
    platforms = {mesh.devices.flat[0].platform} if mesh.size == 1 else set()
    weights = jax.eval_shape(lambda: prepare_params(config, models.init(config, jax.random.key(0)), dtype, platforms))
    whole = NamedSharding(mesh, P())
    places = sharding.shardings(spec, mesh) if mesh.size > 1 else jax.tree.map(lambda _: whole, weights)

    def number(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    cache = jax.eval_shape(partial(decoding.init_cache, config, rows, room, dtype))
    states = replace(cache, lengths=number(rows) if used else None), number(rows, tokens), number(rows)
    return [jax.tree.map(placed, weights, places), *jax.tree.map(partial(_place, mesh), states)]


def _place(mesh, leaf: Any) -> jax.ShapeDtypeStruct:
    """Rows over `data`, heads over `tensor`."""
    names = ("batch", "kv_heads") if leaf.ndim == 4 else ("batch",)
    axes = (sharding.mesh_axes(name, size, mesh) or None for name, size in zip(names, leaf.shape, strict=False))
    return placed(leaf, NamedSharding(mesh, P(*axes)))


def table(plan: DecodePlan) -> str:
    """The plan in words."""

    def gib(size):
        return f"{size / cost.GIB:.2f} GiB"

    rows = [
        plan.where,
        f"memory a device    {gib(plan.weight_bytes)} weights, {gib(plan.cache_bytes)} cache, {gib(plan.temporary_bytes)} "
        f"temporaries, {gib(plan.peak_bytes)} peak of {gib(plan.capacity_bytes)}: {'fits' if plan.fits else 'DOES NOT FIT'}",
        f"cache in place     {'yes' if plan.donated else 'no'}",
        f"prefill            attention by {plan.kernel}",
        f"a step moves       {gib(plan.moved_bytes)} a device, {plan.moved_bytes / plan.needed_bytes:.2f} x weights and cache",
    ]
    for one in plan.collectives:
        axes = "*".join(one["axes"]) or "-"
        rows.append(f"{one['kind']:<18} {one['count']:>5} a step over {axes}, {one['bytes'] / 2**20:,.2f} MiB a device")
    if plan.tokens_per_second is not None:
        parts = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in plan.seconds.items())
        best = f"{plan.tokens_per_second:,.0f} tokens/s; {plan.bound:,.0f} by the bandwidth of memory alone"
        rows += [f"roofline, an estimate: {parts}", f"at best            {best}"]
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return "\n".join([*rows, f"planned with {versions}"])
