"""Which mesh, batch and recomputation: many by closed form in a moment, the best of them by the compiler."""

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.planning.compile import GIB, Change, attending, plan_step

ROWS = ("data", "fsdp", "expert", "stage")  # the axes that divide a batch
MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences a device and pass


@dataclass(frozen=True)
class Estimate:
    """A device's peak in bytes and a step in seconds, by closed form: to choose what is worth a compile, not to believe."""

    bytes: float
    seconds: float


def estimate(experiment: Any, devices: int, chip: Any) -> Estimate:
    """State, gradients, what the backward pass keeps, and the working set of one layer; products and ring traffic.

    ConfigError where the mesh does not go into the devices or the model.
    """
    from jaxformer.models import cost

    model, mesh = experiment.model, experiment.mesh
    shape = mesh.shape(devices)
    split = shape["tensor"]
    rows = math.prod(shape[axis] for axis in ROWS)
    local, whole = _local(model, tuple(shape.items())), _local(model, (("fsdp", shape["fsdp"]),)) * shape["fsdp"]
    width = 4 if experiment.precision == "float32" else 2
    state = local * (1 + _moments(experiment) / (shape["data"] if mesh.zero1 else 1))
    if mesh.offload:
        state = 2 * local
    grads = local * (1 if experiment.accumulation == 1 else 2)

    tokens = experiment.batch_size / rows / experiment.accumulation * model.context_length / shape["context"]
    D, N, K, H, L = model.d_model, model.num_heads, model.kv_heads, model.head_size, model.num_layers / shape["stage"]
    experts = getattr(model.feedforward, "top_k", 1)
    inner = tokens * width * (2 * (N + K) * H + 3 * experts * model.ff_width) / split
    stream, scores = tokens * D * width, 0.0
    if model.attention_implementation == "reference":
        scores = tokens * model.context_length * N / split * (12 + width)
    kept = {
        "full": stream,
        "attention": stream + tokens * width * N * H / split,
        "dots": inner + 2 * stream,
        "none": 1.5 * inner + 4 * stream + scores,
    }[model.remat]
    layer = (whole - _table(model)) / model.num_layers / split / shape["expert"]
    working = layer * (1 + 2 * width / 4) + 2 * inner + 4 * stream + scores + 2 * _table(model) / split
    peak = state + grads + L * kept + working + 3 * 2**26

    total = cost.training_flops(model, model.context_length) * experiment.batch_size * model.context_length
    attended = 12 * model.num_layers * N * H * experiment.batch_size * model.context_length**2
    again = {"full": 4 / 3, "attention": (4 - attended / total) / 3, "dots": 1.03, "none": 1.0}[model.remat]
    link = chip.network / chip.links if chip.links else chip.network / 2
    far = link if chip.links or devices <= 8 else chip.outside * 8
    passes = experiment.accumulation
    gathered = (2 * width + 4) * whole / 4 / split / shape["expert"] * passes if shape["fsdp"] > 1 else 0
    summed = 2 * local if shape["data"] > 1 else 0
    reduced = (6 if model.remat in ("full", "attention") else 4) * 2 * L * stream * passes * (split - 1) / split
    blocking = total * again / devices / chip.peak + reduced / link
    return Estimate(peak, max(blocking, (gathered + summed) / far))


@cache
def _local(model: Any, shape: tuple) -> float:
    """Bytes of a device's parameters in float32."""
    import jax

    from jaxformer import models, parallel, params, sharding

    sizes = {**dict.fromkeys(parallel.AXES, 1), **dict(shape)}
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), parallel.AXES)
    leaves, specs = params.paths(models.spec(model)), params.paths(sharding.partition_specs(models.spec(model), mesh))
    over = lambda spec: [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis]
    return math.fsum(
        4 * params.count(leaf) / math.prod(sizes[axis] for axis in over(specs[path])) for path, leaf in leaves.items()
    )


def _table(model: Any) -> float:
    return 4.0 * model.vocab_size * model.d_model


def _moments(experiment: Any) -> float:
    """Bytes of optimizer state (and averages) a byte of parameters."""
    return float(_moments_of(experiment.optimizer) + (experiment.ema_decay is not None))


@cache
def _moments_of(optimizer: Any) -> int:
    return {"Adam": 2, "AdamW": 2, "Lion": 1, "Muon": 1, "Adafactor": 0}.get(type(optimizer).__name__, 2)


def options(experiment: Any, base: Any) -> str:
    """What to write on the command line for the experiment, where it differs from the base."""
    found = [
        f"--mesh.{axis}={getattr(experiment.mesh, axis)}"
        for axis in vars(base.mesh)
        if differs(experiment.mesh, base.mesh, axis)
    ]
    found += [
        f"--{name.replace('_', '-')}={getattr(experiment, name)}"
        for name in ("batch_size", "accumulation", "precision")
        if differs(experiment, base, name)
    ]
    for name in ("remat", "attention_implementation"):
        if (
            differs(experiment.model, base.model, name) and getattr(base.model, name) is not None
        ):  # None: the platform's
            found.append(f"--model.{name.replace('_', '-')}={getattr(experiment.model, name)}")
    return " ".join(found).replace("=True", "")


def differs(one: Any, other: Any, name: str) -> bool:
    return getattr(one, name) != getattr(other, name)


def changes(experiment: Any, name: str, devices: list, made: Any, fast: bool, tries: int = 5) -> list[dict]:
    """The three changes of one thing that save most of a device's memory: by closed form first, then compiled.

    Where none of them is enough, the best two together are the first of the three.
    """
    from jaxformer.models import cost

    chip = cost.CHIPS[devices[0].device_kind]
    sized = replace(experiment, mesh=replace(experiment.mesh, **experiment.mesh.shape(len(devices))))
    expected = []
    for other in _changes(sized, devices[0].platform):
        try:
            expected.append((estimate(other, len(devices), chip).bytes, other))
        except ConfigError:  # that one does not divide
            continue
    expected.sort(key=lambda one: one[0])
    base = made.peak_bytes
    if devices[0].platform == "tpu" and not fast:  # fast compiles are compared with a fast one
        base = plan_step(sized, name, devices, fast=True)[0].peak_bytes or base

    def measured(other) -> tuple[Change, Any] | None:
        words = options(other, sized)
        _progress(words)
        try:
            tried, _ = plan_step(other, name, devices, fast=True)
        except Exception as error:  # whatever speaks against it: this one is no help, the others may be
            _progress(f"   {str(error).splitlines()[0][:200]}")
            return None
        return Change(words, base - tried.peak_bytes, tried.fits), other

    found = [one for _, other in expected[:tries] if (one := measured(other)) and one[0].saved > base / 100]
    found.sort(key=lambda one: -one[0].saved)
    alone = len(found) < 2 or any(change.fits for change, _ in found)
    if not alone and (together := measured(_both(sized, found[0][1], found[1][1]))):
        found = [together, *found]
    return [change._asdict() for change, _ in found[:3]]


def _both(base: Any, one: Any, other: Any) -> Any:
    """The base with what either of two variants of it changes; the first one's where both change the same."""
    changed = {}
    for name in vars(base):
        a, b, start = getattr(one, name), getattr(other, name), getattr(base, name)
        both = is_dataclass(start) and a != start and b != start
        changed[name] = _both(start, a, b) if both else b if a == start else a
    return replace(base, **changed)


def _changes(base: Any, platform: str) -> Iterator[Any]:
    mesh, model = base.mesh, base.model
    if model.remat != "full":
        yield replace(base, model=replace(model, remat="full"))
    if model.attention_implementation == "reference":
        yield replace(
            base, model=replace(model, attention_implementation="splash" if platform == "tpu" else "blockwise")
        )
    if base.precision == "float32":
        yield replace(base, precision="bfloat16")
    micro = base.batch_size // (math.prod(getattr(mesh, axis) for axis in ROWS) * base.accumulation)
    if micro > 1:
        for parts in {2, micro}:
            if micro % parts == 0:
                yield replace(base, accumulation=base.accumulation * parts)
    for give, take in itertools.permutations(("data", "fsdp", "tensor"), 2):
        if getattr(mesh, give) % 2 == 0:
            sizes = {give: getattr(mesh, give) // 2, take: getattr(mesh, take) * 2}
            passes = base.accumulation * (2 if take == "tensor" else 1)  # as many sequences a pass and device as before
            if passes * micro <= base.batch_size:
                yield replace(base, mesh=replace(mesh, **sizes), accumulation=passes)
    if not mesh.zero1 and mesh.data > 1:
        yield replace(base, mesh=replace(mesh, zero1=True))
    if not mesh.offload and platform == "tpu":
        yield replace(base, mesh=replace(mesh, offload=True))


def candidates(experiment: Any, devices: int) -> Iterator[Any]:
    """The experiment on every mesh of data, fsdp, tensor (and expert) by powers of two, batch and recomputation."""
    mesh, model = experiment.mesh, experiment.model
    fixed = {axis: max(1, getattr(mesh, axis)) for axis in ("context", "stage")}
    rest = devices // math.prod(fixed.values())
    powers = [2**n for n in range(rest.bit_length()) if rest % 2**n == 0]
    experts = [n for n in powers if getattr(model.feedforward, "experts", 1) % n == 0]
    for tensor, expert, data in itertools.product(powers, experts, powers):
        fsdp = rest // (tensor * expert * data)
        if tensor * expert * data * fsdp != rest or tensor > 16 or data % mesh.slices:
            continue
        sizes = replace(mesh, data=data, fsdp=fsdp, tensor=tensor, expert=expert, **fixed)
        for micro, remat in itertools.product(MICRO_BATCHES, ("none", "dots", "attention", "full")):
            yield replace(
                experiment, mesh=sizes, model=replace(model, remat=remat), accumulation=1,
                batch_size=micro * data * fsdp * expert * fixed["stage"],
            )  # fmt: skip


def search(experiment: Any, name: str, devices: list, count: int = 12, most: int = 24) -> list[tuple[Any, Any]]:
    """(experiment, plan) of the candidates, fastest by the roofline first, those that do not fit last.

    Closed forms choose; the compiler, in fast mode, says what fits, until `count` do or `most` were tried.
    """
    from jaxformer.models import cost

    chip, known = cost.CHIPS[devices[0].device_kind], []
    experiment = attending(experiment, devices[0].platform)
    for one in candidates(experiment, len(devices)):
        try:
            known.append((estimate(one, len(devices), chip), one))
        except ConfigError:  # does not divide
            continue
    if not known:
        raise ConfigError(f"{name}: no mesh of {len(devices)} devices goes into the model; see show --sharding")
    speed = lambda pair: pair[1].batch_size / pair[0].seconds
    hopeful = sorted((pair for pair in known if pair[0].bytes < 1.15 * chip.memory), key=speed, reverse=True)
    small = sorted((pair for pair in known if pair[0].bytes >= 1.15 * chip.memory), key=lambda pair: pair[0].bytes)
    found: list[tuple[Any, Any]] = []
    for number, (_, one) in enumerate(itertools.islice(_spread([*hopeful, *small]), most), 1):
        try:
            made, _ = plan_step(one, name, devices, fast=True)
        except (ConfigError, NotImplementedError) as error:
            _progress(f"{number}: {options(one, experiment)}: {error}")
            continue
        found.append((one, made))
        words = f"{made.tokens_per_second:,.0f} tokens/s" if made.fits else "does not fit"
        _progress(f"{number}: {options(one, experiment)}: {made.peak_bytes / GIB:.1f} GiB, {words}")
        if sum(made.fits for _, made in found) >= count:
            break
    return sorted(found, key=lambda pair: (not pair[1].fits, -pair[1].tokens_per_second, pair[1].peak_bytes))


def _spread(pairs: list) -> Iterator[tuple]:
    """In order, but no more than two batches of a mesh and recomputation before the rest: not twelve of one kind."""
    seen: dict[Any, int] = {}
    late = []
    for pair in pairs:
        kind = pair[1].mesh, pair[1].model.remat
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] > 2:
            late.append(pair)
        else:
            yield pair
    yield from late


def table(found: list[tuple[Any, Any]], base: Any, name: str, topology: str) -> str:
    """The candidates in order, and the command line of the first."""
    rows = [f"{'':>3} {'tokens/s':>11} {'MFU':>5} {'peak GiB':>9}  {'bound by':<14} options"]
    for place, (one, made) in enumerate(found, 1):
        bound = max(made.seconds, key=made.seconds.__getitem__) if made.fits else "-"
        speed = f"{made.tokens_per_second:,.0f}" if made.fits else "no fit"
        share = f"{made.mfu['6N+12LNHT']:.0%}" if made.fits else "-"
        rows.append(
            f"{place:>3} {speed:>11} {share:>5} {made.peak_bytes / GIB:>9.2f}  {bound:<14} {options(one, base)}"
        )
    fits = sum(made.fits for _, made in found)
    rows.append(
        f"{fits} of {len(found)} fit; speeds are the roofline's, an estimate, and memory that of a fast compile"
    )
    if fits:
        best = options(found[0][0], base)
        rows.append(f'make plan EXP={name} TOPOLOGY={topology} ARGS="{best}"')
    return "\n".join(rows)


def _progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
