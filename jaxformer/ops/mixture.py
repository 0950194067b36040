"""Routed experts: a router picks a few feed-forward layers for each token.

`route` and `mixture` are the equations. `expert_capacity` says which choices an expert drops,
`expert_dispatch` brings tokens to their experts and back.

Shazeer et al. 2017, arXiv:1701.06538; GShard, Lepikhin et al. 2020, arXiv:2006.16668; Switch, Fedus
et al. 2021, arXiv:2101.03961; ST-MoE, Zoph et al. 2022, arXiv:2202.08906; Mixtral, Jiang et al.
2024, arXiv:2401.04088.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from jaxformer.errors import ConfigError
from jaxformer.ops.einsum import einsum, in_float32
from jaxformer.ops.expert_capacity import Split, count_choices, split_of, within_capacity
from jaxformer.ops.expert_dispatch import (
    Choices,
    Experts,
    Outputs,
    all_to_all,
    gather_scatter,
    local,
)
from jaxformer.ops.grouped_product import GroupedImplementation
from jaxformer.sharding import (
    PARAMETERS,
    auto_axis_names,
    is_explicit,
    psum,
    reduce_scatter,
    varying,
    with_sharding,
)


class Routing(NamedTuple):
    """The experts of each token, best first, and their weights."""

    weights: Array  # [.., top_k]
    experts: Array  # [.., top_k]
    probabilities: Array  # [.., E], the softmax over all experts


class RoutingStatistics(NamedTuple):
    """What the router did with the tokens. Padding does not count."""

    fraction: Array  # [E], the choices of each expert per token; the sum is top_k
    probability: Array  # [E], the mean of the softmax
    dropped: Array  # the share of choices that no expert served
    z: Array  # the z-loss, mean of logsumexp(logits)^2, which keeps logits small. ST-MoE, eq. 5


def route(logits: Float[Array, "*batch E"], top_k: int, normalise: bool = True) -> Routing:
    """The top_k largest entries of softmax(logits), in float32 or better.

    `normalise` makes the weights of a token sum to one. With it this is Mixtral (section 2.1),
    without it Switch (eq. 2). Of experts with equal probabilities the first one is taken.
    """
    probabilities = jax.nn.softmax(in_float32(logits), axis=-1)
    weights, experts = lax.top_k(probabilities, top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights, experts, probabilities)


def balance_loss(fraction: Float[Array, " E"], probability: Float[Array, " E"]) -> Float[Array, ""]:
    """E sum_e fraction_e probability_e. Switch, eq. 4-6.

    It is top_k where all experts get the same, and E at most.
    """
    return fraction.shape[0] * jnp.sum(fraction * probability)


def mixture(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    gate: Float[Array, "E D F"] | None,
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    activation: Callable,
    *,
    top_k: int,
    normalise: bool = True,
    capacity: float | None = None,
    device_capacity: float | None = None,
    padding_mask: Bool[Array, "B T"] | None = None,
    groups: int = 1,
    implementation: GroupedImplementation = None,
) -> tuple[Float[Array, "B T D"], RoutingStatistics]:
    """sum_k w_k expert_{e_k}(x) for the weights w and experts e of `route(x router)`.

    An expert is activation(x up) down, or (activation(x gate) * (x up)) down. The router works in
    float32 or better (Switch, section 2.4). A token where `padding_mask` is False goes to no
    expert: its output is zero. The second result has statistics of the choices of other tokens.

    Without a capacity no choice is dropped. With a `capacity` the batch is cut into `groups` of
    consecutive batch rows, n = B T / groups tokens each (GShard, section 3.2). An expert takes
    ceil(capacity top_k n / E) choices of each group and drops the rest. First choices come before
    second ones (GShard, section 2.2); then the order of the batch decides. So a token may depend on
    later tokens. Raises ConfigError unless `groups` divides B.

    On a mesh the choices, the drops and the statistics equal those of one device. Weights are
    gathered over `fsdp`. Where experts are split over `expert`, tokens reach them by
    `gather_scatter`, or by `all_to_all` if there is a capacity and each device has whole groups.
    `all_to_all` needs memory and communication for the capacity of a device's own groups. Without a
    capacity each of P devices along `expert` reserves memory for all choices that its experts may
    get. With a `device_capacity` it reserves memory for ceil(device_capacity top_k n / P) choices
    of n tokens, and drops later ones.

    `implementation`: of the products without a capacity, a name of `ops.grouped_product` or a
    `GroupedProduct`; None: the fastest one. Raises NotImplementedError if it refuses the product.
    """
    B = x.shape[0]
    if padding_mask is None:
        padding_mask = jnp.ones(x.shape[:2], bool)
    if B % groups:
        advice = f"expected a divisor of {B}" if B > 1 else "expected 1"
        raise ConfigError(
            f"model.feedforward.groups={groups}: does not divide a batch of {B} rows; {advice}"
        )
    options = _Options(
        activation, top_k, normalise, capacity, device_capacity, groups, implementation
    )
    split = split_of(x.shape, up.shape)
    run = partial(_on_device, options, split)
    arrays = x, router, gate, up, down, padding_mask
    return _on_mesh(run, split, arrays) if any(split) else run(*arrays)


class _Options(NamedTuple):
    """The options of `mixture`."""

    activation: Callable
    top_k: int
    normalise: bool
    capacity: float | None
    device_capacity: float | None
    groups: int
    implementation: GroupedImplementation


def _on_device(options: _Options, split: Split, x, router, gate, up, down, padding_mask):
    """`mixture` on one device: its tokens `[B, T, D]`, its experts, and its part of D and F."""
    B, T, D = x.shape
    E = router.shape[1]
    top_k = options.top_k
    logits = einsum("btd,de->bte", in_float32(x), router)
    routing = route(logits, top_k, options.normalise)
    # [top_k, B, T]
    expert_ids = jnp.moveaxis(jnp.where(padding_mask[:, :, None], routing.experts, E), 2, 0)
    # without tokens, blocks have no size and collectives have nothing to gather
    capacity = options.capacity if x.size else 0.0
    limits = within_capacity(split, expert_ids, E, capacity, options.groups)
    experts = _whole_experts(split, x.dtype, gate, up, down, options)
    tokens = _spread(split, x.reshape(B * T, D))
    weights = routing.weights.reshape(B * T, top_k).T
    choices = Choices(tokens, limits.expert_ids.reshape(top_k, B * T), weights)
    choice_limit = limits.choice_limit
    if options.device_capacity is not None and split.experts:
        # of the tokens that a device of `gather_scatter` sees
        count = B * T if split.experts_split_tokens else B * T / lax.axis_size(split.experts)
        choice_limit = math.ceil(options.device_capacity * top_k * count - 1e-9)
    out, served_count = _apply_experts(
        split, choices, experts, E, limits.expert_capacity, choice_limit
    )
    out = psum(out, split.mlp).reshape(B, T, D)
    # at most one device serves a choice, also a choice that several devices gathered
    axes = tuple(dict.fromkeys(split.batch + split.length + split.experts))
    served_count = lax.psum(served_count, axes)
    expert_ids = expert_ids.reshape(top_k, B * T)
    return out, _statistics(split, logits, routing, expert_ids, padding_mask, served_count)


def _apply_experts(
    split: Split,
    choices: Choices,
    experts: Experts,
    E: int,
    expert_capacity: int | None,
    choice_limit: int | None,
) -> Outputs:
    """The outputs of all experts for the tokens of this device."""
    axes = split.experts
    if not axes:
        return local(choices, experts, E, expert_capacity, choice_limit)
    if split.experts_split_tokens and expert_capacity is not None:
        return all_to_all(choices, experts, E, expert_capacity, axes)
    return gather_scatter(
        choices, experts, E, expert_capacity, axes, split.experts_split_tokens, choice_limit
    )


def _statistics(
    split: Split, logits, routing: Routing, expert_ids, padding_mask, served_count
) -> RoutingStatistics:
    """The statistics of all tokens of the mesh."""

    def total(a):
        return lax.psum(a, split.batch + split.length)

    top_k = expert_ids.shape[0]
    sizes = count_choices(expert_ids, logits.shape[-1])
    choice_count = total(jnp.sum(sizes))
    fraction = total(sizes).astype(logits.dtype) * top_k / jnp.maximum(choice_count, 1)
    probability = _mean(routing.probabilities, padding_mask, total)
    z = _mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), padding_mask, total)
    dropped = (choice_count - served_count).astype(logits.dtype) / jnp.maximum(choice_count, 1)
    return RoutingStatistics(fraction, probability, dropped, z)


def _mean(x, padding_mask, total):
    """The mean of x over the tokens that are no padding.

    x has the axes of the mask, and may have more behind them. `total` sums over devices.
    """
    flags = padding_mask.reshape(*padding_mask.shape, *(1,) * (x.ndim - padding_mask.ndim))
    sums = jnp.sum(jnp.where(flags, x, 0), axis=tuple(range(padding_mask.ndim)))
    return total(sums) / jnp.maximum(total(jnp.sum(padding_mask)), 1)


# The mesh
def _on_mesh(run: Callable, split: Split, arrays: tuple):
    """run(*arrays), computed by each device of the mesh on its share of them."""
    mesh = jax.sharding.get_abstract_mesh()
    names = auto_axis_names()
    tokens = P(split.batch, split.length)
    inward = P(split.experts, split.embed, split.mlp)
    outward = P(split.experts, split.mlp, split.embed)
    in_specs = tokens, P(), inward, inward, outward, tokens
    # A chip's own kernels need all axes to be manual. A batch with few rows may leave weights split
    # over axes that do not split the batch: the compiler keeps these axes.
    parameter_axes = [name for name in PARAMETERS["embed"] if name in names]
    all_manual = all(name in split.embed for name in parameter_axes if mesh.shape[name] > 1)
    if all_manual and is_explicit():
        pairs = zip(arrays, in_specs, strict=True)
        arrays = tuple(a if a is None else with_sharding(a, spec) for a, spec in pairs)
    axes = frozenset(names if all_manual else sum(split, ()))
    out_specs = tokens, P()
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=axes)(*arrays)


def _spread(split: Split, x: Array) -> Array:
    """x as an array that differs between the devices of the mesh.

    The transpose of this cast is a sum over devices. So it is applied to the tokens and weights
    themselves, which are the smallest arrays.
    """
    return varying(x, {*split.batch, *split.length, *split.experts, *split.mlp})


def _whole_experts(split: Split, dtype, gate, up, down, options: _Options) -> Experts:
    """The experts of this device, with all of D."""

    def gather(w, axis):
        w = _spread(split, w)
        return _gather(split.embed, axis, dtype, w) if split.embed else w

    gate = None if gate is None else gather(gate, 1)
    weights = gate, gather(up, 1), gather(down, 2)
    return Experts(*weights, options.activation, options.implementation)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh_axes, axis, dtype, w):
    """w gathered along mesh axes and rounded to `dtype` before. Its gradient is not rounded."""
    return lax.all_gather(w.astype(dtype), mesh_axes, axis=axis, tiled=True).astype(w.dtype)


def _gather_forward(mesh_axes, axis, dtype, w):
    return _gather(mesh_axes, axis, dtype, w), None


def _gather_backward(mesh_axes, axis, dtype, _, g):
    return (reduce_scatter(g, mesh_axes, axis),)


_gather.defvjp(_gather_forward, _gather_backward)
