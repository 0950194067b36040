"""Which mesh, batch and recomputation: many by closed form in a moment, the best of them by the compiler."""

import itertools
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax

from jaxformer import models, parallel, params, sharding
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import ModelConfig, cost
from jaxformer.models.stacks import layout
from jaxformer.tools.planning.plan import Plan, plan
from jaxformer.training import optimizers
from jaxformer.training.recipe import trained_weights

MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences a device and pass


class Estimate(NamedTuple):
    """A device's peak in bytes and a step in seconds, by closed form: good enough to choose what to compile."""

    bytes: float
    seconds: float


def estimate(experiment: Any, devices: int, chip: Any) -> Estimate:
    """Bytes: state, gradients, saved activations, one layer's work. Seconds: products, rings. ConfigError for a bad mesh."""
    model, mesh = experiment.model, experiment.mesh
    shape = mesh.shape(devices)
    split = shape["tensor"]
    local, gathered = _bytes(model, tuple(shape.values())), 4.0 * params.count(models.spec(model))
    width = 4 if experiment.precision == "float32" else 2
    moments = _moments(experiment.optimizer, model, experiment.frozen) + (experiment.ema_decay is not None)
    state = 2 * local if mesh.offload else local * (1 + moments / (shape["data"] if mesh.zero1 else 1))

    rows = math.prod(shape[axis] for axis in sharding.ACTIVATIONS["batch"])
    tokens = experiment.batch_size / rows * model.context_length / shape["context"]
    D, N, K, H, L = model.d_model, model.num_heads, model.kv_heads, model.head_size, model.num_layers / shape["stage"]
    experts = max(getattr(each, "top_k", 1) for each in layout.as_pattern(model.feedforward))
    inner = tokens * width * (2 * (N + K) * H + 3 * experts * model.ff_width) / split
    stream = tokens * D * width
    attended = tokens * N * H * width / split
    # of a layer, for the backward pass
    saved = {"full": stream, "attention": stream + attended, "dots": inner + 2 * stream, "none": 1.5 * inner + 4 * stream}
    table = 4.0 * model.vocab_size * D
    layer = (gathered - table) / model.num_layers / split / shape["expert"]
    working = layer * (1 + 2 * width / 4) + 2 * inner + 4 * stream + 2 * table / split
    peak = state + local + L * saved[model.remat] + working + 3 * 2**26

    trained = trained_weights(experiment)
    total = cost.training_flops(model, model.context_length, trained=trained) * experiment.batch_size * model.context_length
    again = {"full": 1.33, "attention": 1.3, "dots": 1.03, "none": 1.0}[model.remat]
    link = chip.network / (chip.links or 2)
    far = link if chip.links or devices <= 8 else chip.outside * 8
    weights = (2 * width + 4) * gathered / 4 / split / shape["expert"] if shape["fsdp"] > 1 else 0
    summed = 2 * local if shape["data"] > 1 else 0
    reduced = (6 if model.remat in ("full", "attention") else 4) * 2 * L * stream * (split - 1) / split
    blocking = total * again / devices / (chip.peak * chip.reached) + reduced / link
    return Estimate(peak, max(blocking, (weights + summed) / far))


@cache
def _bytes(model: ModelConfig, shape: tuple[int, ...]) -> float:
    """Bytes of a device's parameters in float32."""
    mesh = jax.sharding.AbstractMesh(shape, parallel.AXES)
    return float(sum(sharding.shard_bytes(models.spec(model), mesh).values()))


@cache
def _moments(optimizer: Any, model: ModelConfig, frozen: str | None) -> float:
    """Bytes of the optimizer's state for each byte of parameters."""
    spec = models.spec(model)
    weights = params.abstract(spec)
    state = jax.eval_shape(optimizers.build(optimizer, spec, frozen).init, weights)

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    return size(state) / size(weights)


def options(experiment: Any, base: Any) -> str:
    """The options of the command line that turn the base into the experiment."""
    words = [f"--mesh.{axis}={size}" for axis, size in vars(experiment.mesh).items() if size != getattr(base.mesh, axis)]
    changed = [name for name in ("batch_size", "accumulation") if getattr(experiment, name) != getattr(base, name)]
    words += [f"--{name.replace('_', '-')}={getattr(experiment, name)}" for name in changed]
    return " ".join([*words, f"--model.remat={experiment.model.remat}"])


def candidates(experiment: Any, devices: int) -> Iterator[Any]:
    """The experiment on every mesh of data, fsdp, tensor (and expert) by powers of two, batch and recomputation."""
    mesh, model = experiment.mesh, experiment.model
    fixed = {axis: max(1, getattr(mesh, axis)) for axis in ("context", "stage")}
    rest = devices // math.prod(fixed.values())
    powers = [2**n for n in range(rest.bit_length()) if rest % 2**n == 0]
    counts = [getattr(each, "experts", None) for each in layout.as_pattern(model.feedforward)]
    experts = [n for n in powers if all(count % n == 0 for count in counts if count) and (any(counts) or n == 1)]
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


def search(experiment: Any, name: str, devices: list, count: int = 12, most: int = 24) -> list[tuple[Any, Plan]]:
    """(experiment, plan), fastest first: compiled fast in the order of estimates until `count` fit or `most` were tried."""
    if not isinstance(experiment.model, ModelConfig):
        raise ConfigError(f"plan --search: model={type(experiment.model).__name__}: expected a ModelConfig")
    check_whole("plan --search: count", count)
    check_whole("plan --search: most", most)
    chip = cost.CHIPS[devices[0].device_kind]
    pairs: list[tuple[Estimate, Any]] = []
    for one in candidates(experiment, len(devices)):
        with suppress(ConfigError):  # its mesh does not divide it
            pairs.append((estimate(one, len(devices), chip), one))
    if not pairs:
        raise ConfigError(f"{name}: no mesh of {len(devices)} devices goes into the model; see show --sharding")
    fits = [pair for pair in pairs if pair[0].bytes < 1.15 * chip.memory]
    fits.sort(key=lambda pair: -pair[1].batch_size / pair[0].seconds)
    others = sorted((pair for pair in pairs if pair[0].bytes >= 1.15 * chip.memory), key=lambda pair: pair[0].bytes)
    plans: list[tuple[Any, Plan]] = []
    for number, (_, one) in enumerate(_varied([*fits, *others])[:most], 1):
        try:
            planned = plan(one, name, devices, fast=True)
        except (ConfigError, NotImplementedError) as error:
            print(f"{number}: {options(one, experiment)}: {error}", file=sys.stderr, flush=True)
            continue
        plans.append((one, planned))
        speed = "does not fit" if planned.tokens_per_second is None else f"{planned.tokens_per_second:,.0f} tokens/s"
        line = f"{number}: {options(one, experiment)}: {planned.peak_bytes / cost.GIB:.1f} GiB, {speed}"
        print(line, file=sys.stderr, flush=True)
        if sum(planned.fits for _, planned in plans) >= count:
            break
    return sorted(plans, key=lambda pair: (not pair[1].fits, -(pair[1].tokens_per_second or 0), pair[1].peak_bytes))


def _varied(pairs: list[tuple]) -> list[tuple]:
    """The pairs in order, but only two batches of a mesh and recomputation before the rest, so that kinds vary early."""
    early, late, counts = [], [], Counter()
    for pair in pairs:
        kind = pair[1].mesh, pair[1].model.remat
        counts[kind] += 1
        (early if counts[kind] <= 2 else late).append(pair)
    return early + late


def table(found: list[tuple[Any, Any]], base: Any, name: str, topology: str, overrides: Sequence[str] = ()) -> str:
    """The candidates in order, and the command line of the first; `overrides` are the options that made the base."""
    rows = [f"{'':>3} {'tokens/s':>11} {'MFU':>5} {'peak GiB':>9}  {'bound by':<14} options"]
    for place, (one, made) in enumerate(found, 1):
        bound = max(made.seconds, key=made.seconds.__getitem__) if made.fits else "-"
        speed = f"{made.tokens_per_second:,.0f}" if made.fits else "no fit"
        share = f"{made.mfu['6N+12LNHT']:.0%}" if made.fits else "-"
        peak = made.peak_bytes / cost.GIB
        rows.append(f"{place:>3} {speed:>11} {share:>5} {peak:>9.2f}  {bound:<14} {options(one, base)}")
    fits = sum(made.fits for _, made in found)
    rows.append(f"{fits} of {len(found)} fit; speeds are estimates of the roofline, memory is that of a fast compile")
    if fits:
        arguments = shlex.join([*overrides, *options(found[0][0], base).split()])
        rows.append(shlex.join(["make", "plan", f"EXP={name}", f"TOPOLOGY={topology}", f"ARGS={arguments}"]))
    return "\n".join(rows)
