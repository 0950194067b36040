"""A search for the fastest mesh, batch and recomputation of an experiment.

`search` estimates all candidates by closed form and compiles the best ones. `table` prints them.
"""

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
from jaxformer.models.feedforward import feed
from jaxformer.models.stacks import layout
from jaxformer.models.stacks.remat import POLICIES
from jaxformer.tools.planning.plan import Plan, plan
from jaxformer.training import optimizers
from jaxformer.training.recipe import trained_weights

MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences of a device in one pass
# {word of `ModelConfig.remat`: the FLOPs of a step, of those without recomputation}
COMPUTED = {
    "offload": 1.34,
    "full": 1.33,
    "attention": 1.3,
    "qkv": 1.2,
    "dots": 1.03,
    "none": 1.0,
}


class Estimate(NamedTuple):
    """Peak memory of a device (bytes) and time of a step (seconds), by closed form.

    It is good enough to choose what to compile.
    """

    bytes: float
    seconds: float


def estimate(experiment: Any, devices: int, chip: Any) -> Estimate:
    """Estimates memory and time of a step.

    Bytes: state, gradients, saved activations, and the work of one layer. Seconds: products and
    ring exchanges. Raises ConfigError if the mesh does not fit the devices.
    """
    model, mesh = experiment.model, experiment.mesh
    shape = mesh.shape(devices)
    split = shape["tensor"]
    local = _bytes(model, tuple(shape.values()))
    gathered = 4.0 * params.count(models.spec(model))
    width = 4 if experiment.precision == "float32" else 2
    moments = _moments(experiment.optimizer, model, experiment.frozen)
    moments += experiment.ema_decay is not None or hasattr(experiment.optimizer, "averaged")
    if mesh.offload:
        state = 2 * local
    else:
        state = local * (1 + moments / (shape["data"] if mesh.zero1 else 1))

    shards = math.prod(shape[axis] for axis in sharding.ACTIVATIONS["batch"])
    tokens = experiment.batch_size / shards * model.context_length / shape["context"]
    D = model.d_model
    N = model.num_heads
    K = model.kv_heads
    H = model.head_size
    L = model.num_layers / shape["stage"]
    feedforwards = set(layout.as_pattern(model.feedforward))
    experts = max(feed(replace(model, feedforward=each)).visited or 1 for each in feedforwards)
    inner = tokens * width * (2 * (N + K) * H + 3 * experts * model.ff_width) / split
    stream = tokens * D * width
    attended = tokens * N * H * width / split
    # bytes that a layer saves for the backward pass
    saved = {
        "full": stream,
        "offload": 0,
        "attention": stream + attended,
        "qkv": stream + 2 * attended + 2 * tokens * K * H * width / split,
        "dots": inner + 2 * stream,
        "none": 1.5 * inner + 4 * stream,
    }
    table = 4.0 * model.vocab_size * D
    layer = (gathered - table) / model.num_layers / split / shape["expert"]
    working = layer * (1 + 2 * width / 4) + 2 * inner + 4 * stream + 2 * table / split
    kept = saved.get(model.remat, saved["none"])  # a policy of the user's own: at most all
    peak = state + local + L * kept + working + 3 * 2**26

    trained = trained_weights(experiment)
    a_token = cost.training_flops(model, model.context_length, trained=trained)
    total = a_token * experiment.batch_size * model.context_length
    recomputed = COMPUTED.get(model.remat, COMPUTED["none"])
    # bytes/s of one link, and of the network between the devices of fsdp and data
    link = chip.network / (chip.links or 2)
    far = link if chip.links or devices <= 8 else chip.outside * 8
    # bytes of a step: weights that fsdp gathers, gradients that data sums, activations that tensor
    # sums in each layer
    weights = (2 * width + 4) * gathered / 4 / split / shape["expert"] if shape["fsdp"] > 1 else 0
    summed = 2 * local if shape["data"] > 1 else 0
    sums = 6 if model.remat in ("offload", "full", "attention", "qkv") else 4
    reduced = sums * 2 * L * stream * (split - 1) / split
    blocking = total * recomputed / devices / (chip.peak * chip.reached) + reduced / link
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
    """The command line options that turn `base` into the experiment."""
    words = [
        f"--mesh.{axis}={size}"
        for axis, size in vars(experiment.mesh).items()
        if size != getattr(base.mesh, axis)
    ]
    changed = [
        name
        for name in ("batch_size", "accumulation")
        if getattr(experiment, name) != getattr(base, name)
    ]
    words += [f"--{name.replace('_', '-')}={getattr(experiment, name)}" for name in changed]
    return " ".join([*words, f"--model.remat={experiment.model.remat}"])


def candidates(experiment: Any, devices: int) -> Iterator[Any]:
    """The experiment with every mesh, batch and recomputation that the search considers.

    The axes data, fsdp, tensor and expert are powers of two.
    """
    mesh, model = experiment.mesh, experiment.model
    fixed = {axis: max(1, getattr(mesh, axis)) for axis in ("context", "stage")}
    rest = devices // math.prod(fixed.values())
    powers = [2**n for n in range(rest.bit_length()) if rest % 2**n == 0]
    counts = [getattr(each, "experts", None) for each in layout.as_pattern(model.feedforward)]
    experts = [1]
    if any(counts):
        experts = [n for n in powers if all(count % n == 0 for count in counts if count)]
    for tensor, expert, data in itertools.product(powers, experts, powers):
        fsdp = rest // (tensor * expert * data)
        if tensor * expert * data * fsdp != rest or tensor > 16 or data % mesh.slices:
            continue
        sizes = replace(mesh, data=data, fsdp=fsdp, tensor=tensor, expert=expert, **fixed)
        for micro, remat in itertools.product(MICRO_BATCHES, POLICIES):
            yield replace(
                experiment,
                mesh=sizes,
                model=replace(model, remat=remat),
                accumulation=1,
                batch_size=micro * data * fsdp * expert * fixed["stage"],
            )


def search(
    experiment: Any, name: str, devices: list, count: int = 12, most: int = 24
) -> list[tuple[Any, Plan]]:
    """[(experiment, plan)] of the best candidates, fastest first.

    Candidates are compiled (with `fast`) in the order of their estimates, until `count` fit or
    `most` were tried. Raises ConfigError if no mesh fits the model.
    """
    if not isinstance(experiment.model, ModelConfig):
        raise ConfigError(
            f"plan --search: model={type(experiment.model).__name__}: expected a ModelConfig"
        )
    check_whole("plan --search: count", count)
    check_whole("plan --search: most", most)
    chip = cost.CHIPS[devices[0].device_kind]
    pairs: list[tuple[Estimate, Any]] = []
    for candidate in candidates(experiment, len(devices)):
        with suppress(ConfigError):  # of a candidate whose mesh does not divide the model
            pairs.append((estimate(candidate, len(devices), chip), candidate))
    if not pairs:
        raise ConfigError(
            f"{name}: no mesh of {len(devices)} devices goes into the model; see show --sharding"
        )
    # the fastest of those that should fit, then the smallest of the others
    fits = [pair for pair in pairs if pair[0].bytes < 1.15 * chip.memory]
    fits.sort(key=lambda pair: -pair[1].batch_size / pair[0].seconds)
    others = [pair for pair in pairs if pair[0].bytes >= 1.15 * chip.memory]
    others.sort(key=lambda pair: pair[0].bytes)
    ordered = _varied([candidate for _, candidate in (*fits, *others)])
    plans: list[tuple[Any, Plan]] = []
    for number, candidate in enumerate(ordered[:most], 1):
        changed = options(candidate, experiment)
        try:
            planned = plan(candidate, name, devices, fast=True)
        except (ConfigError, NotImplementedError) as error:
            print(f"{number}: {changed}: {error}", file=sys.stderr, flush=True)
            continue
        plans.append((candidate, planned))
        speed = "does not fit"
        if planned.tokens_per_second is not None:
            speed = f"{planned.tokens_per_second:,.0f} tokens/s"
        line = f"{number}: {changed}: {planned.peak_bytes / cost.GIB:.1f} GiB, {speed}"
        print(line, file=sys.stderr, flush=True)
        if sum(planned.fits for _, planned in plans) >= count:
            break
    return sorted(
        plans,
        key=lambda pair: (not pair[1].fits, -(pair[1].tokens_per_second or 0), pair[1].peak_bytes),
    )


def _varied(candidates: list[Any]) -> list[Any]:
    """Reorders candidates so that different kinds come early.

    The first two batches of each mesh and recomputation come first, then the rest.
    """
    first = []
    later = []
    counts = Counter()
    for candidate in candidates:
        kind = candidate.mesh, candidate.model.remat
        counts[kind] += 1
        (first if counts[kind] <= 2 else later).append(candidate)
    return first + later


def table(
    plans: list[tuple[Any, Any]], base: Any, name: str, topology: str, overrides: Sequence[str] = ()
) -> str:
    """The candidates as lines of text, and the command line of the first one.

    `overrides` are the options that made the base experiment.
    """
    lines = [f"{'':>3} {'tokens/s':>11} {'MFU':>5} {'peak GiB':>9}  {'bound by':<14} options"]
    for number, (candidate, planned) in enumerate(plans, 1):
        bound = max(planned.seconds, key=planned.seconds.__getitem__) if planned.fits else "-"
        speed = f"{planned.tokens_per_second:,.0f}" if planned.fits else "no fit"
        mfu = f"{planned.mfu['6N+12LNHT']:.0%}" if planned.fits else "-"
        peak = planned.peak_bytes / cost.GIB
        lines.append(
            f"{number:>3} {speed:>11} {mfu:>5} {peak:>9.2f}  {bound:<14} {options(candidate, base)}"
        )
    fits = sum(planned.fits for _, planned in plans)
    lines.append(
        f"{fits} of {len(plans)} fit; speeds are estimates of the roofline, "
        "memory is that of a fast compile"
    )
    if fits:
        arguments = shlex.join([*overrides, *options(plans[0][0], base).split()])
        lines.append(
            shlex.join(["make", "plan", f"EXP={name}", f"TOPOLOGY={topology}", f"ARGS={arguments}"])
        )
    return "\n".join(lines)
