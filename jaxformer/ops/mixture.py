"""Routed experts: each token goes to the few feed-forward layers that a router picks for it.

Shazeer et al. 2017, arXiv:1701.06538; GShard, Lepikhin et al. 2020, arXiv:2006.16668; Switch, Fedus et al. 2021,
arXiv:2101.03961; ST-MoE, Zoph et al. 2022, arXiv:2202.08906; Mixtral, Jiang et al. 2024, arXiv:2401.04088.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jaxformer.errors import ConfigError
from jaxformer.ops.einsum import einsum
from jaxformer.sharding import PARAMETERS, mesh_axes


class Routing(NamedTuple):
    """For each token: its experts, best first, what each is weighted with `[.., top_k]`, the softmax over all `[.., E]`."""

    weights: Array
    experts: Array
    probabilities: Array


class RoutingStatistics(NamedTuple):
    """Of the real tokens: choices a token that fell on each expert (sums to top_k), mean probability of each, `[E]`;
    the share of choices that found no room; the router's z-loss."""

    fraction: Array
    probability: Array
    dropped: Array
    z: Array


def route(logits: Float[Array, "*batch E"], top_k: int, normalise: bool = True) -> Routing:
    """The top_k largest of softmax(logits), in float32 or better; `normalise` makes their weights sum to one.

    With it this is Mixtral (section 2.1: the same as a softmax over the top_k logits), without it Switch (eq. 2). Of
    equals the first expert wins. Raises ConfigError for a top_k that E experts cannot give.
    """
    E = logits.shape[-1]
    if not 1 <= top_k <= E:
        raise ConfigError(f"top_k={top_k}: expected 1 to {E}, the number of experts")
    probabilities = jax.nn.softmax(_wide(logits), axis=-1)
    weights, experts = lax.top_k(probabilities, top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights, experts, probabilities)


def balance_loss(fraction: Float[Array, " E"], probability: Float[Array, " E"]) -> Float[Array, ""]:
    """E sum_e fraction_e probability_e: top_k where all experts get alike, up to E where they do not. Switch, eq. 4-6."""
    return fraction.shape[0] * jnp.sum(fraction * probability)


def router_z_loss(logits: Float[Array, "*batch E"], real: Bool[Array, "*batch"] | None = None) -> Float[Array, ""]:
    """The mean over tokens of logsumexp(logits)^2, which keeps logits small. ST-MoE, eq. 5."""
    real = jnp.ones(logits.shape[:-1], bool) if real is None else real
    return _mean(_squared(logits), real)


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
    real: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], RoutingStatistics]:
    """sum_k w_k expert_{e_k}(x), where w and e are `route`d by x router, and what became of the choices.

    An expert is activation(x up) down, or (activation(x gate) * (x up)) down. The router works in float32 or better
    (Switch, section 2.4). Tokens with real=False go to no expert: their output is zero, and they count in nothing.

    Without a capacity no choice is dropped (`mixture_reference` is the same, written plainly). With one, an expert takes
    ceil(capacity top_k B T / E) choices and drops the rest: first choices before second ones (GShard, section 2.2), and
    among these the first in the batch. What a token gets then hangs on the tokens of the whole batch, later ones included.

    On the mesh of `jax.set_mesh` each device routes its own tokens; the statistics are those of all. Experts that are
    split over `expert` are reached so (n tokens and E/P experts a device, P devices along `expert`):
      with a capacity, by two all-to-alls of E C D numbers, C = ceil(capacity top_k n / E): B T above is n. A device's tokens
        are a group (GShard, section 3.2), and which choices are dropped hangs on how many devices there are;
      without, by an all-gather of the P n tokens and a reduce-scatter of their sums, P n D numbers each, with memory for
        P n min(top_k, E/P) rows of D and F, whatever the router does. Work is what the choices ask for.
    Over `fsdp` weights are gathered here, over `tensor` outputs are summed, once, after a token's experts have been.

    Raises ConfigError for a top_k that E experts cannot give, and for a capacity that is not above zero.
    """
    if capacity is not None and capacity <= 0:
        raise ConfigError(f"capacity={capacity}: expected a factor above 0, or None for room without bound")
    real = jnp.ones(x.shape[:2], bool) if real is None else real
    split = _split(x, up)
    run = partial(_mixture, split, activation, top_k, normalise, capacity)
    if any(split):
        into, back = P(split.experts, split.embed, split.mlp), P(split.experts, split.mlp, split.embed)
        tokens = P(split.batch, split.length)
        ins = tokens, P(), into, into, back, tokens
        run = jax.shard_map(run, in_specs=ins, out_specs=(tokens, P()), axis_names=frozenset(sum(split, ())))
    return run(x, router, gate, up, down, real)


class _Split(NamedTuple):
    """The mesh axes, longer than one, over which B, T, E, D (of weights) and F are split."""

    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()


def _split(x, up) -> _Split:
    batch, length = mesh_axes("batch", x.shape[0]), mesh_axes("length", x.shape[1])
    mesh = jax.sharding.get_abstract_mesh()
    embed = tuple(name for name in PARAMETERS["embed"] if name in batch and up.shape[1] % mesh.shape[name] == 0)
    return _Split(batch, length, mesh_axes("expert", up.shape[0]), embed, mesh_axes("mlp", up.shape[2]))


def _mixture(split, activation, top_k, normalise, capacity, x, router, gate, up, down, real):
    """`mixture` on one device: its tokens `[B, T, D]`, the weights of its E/P experts, with D and F as they are split."""
    (B, T, D), E = x.shape, router.shape[1]
    logits = _router(x, router)
    routing = route(logits, top_k, normalise)
    # slot by slot: all first choices stand before the second ones
    choices = jnp.where(real[:, :, None], routing.experts, E).reshape(B * T, top_k).T
    # a token takes no expert twice; the small number is for products like 1.1 x 10, which are not 11 in floating point
    room = None if capacity is None else min(math.ceil(capacity * top_k * B * T / E - 1e-9), B * T)

    # said here and not left to where they meet: the transposes of these are sums, over what is smallest
    spread = lambda a: _varying(a, {*split.batch, *split.length, *split.experts, *split.mlp})
    whole = lambda w, axis: _gathered(split.embed, axis, x.dtype, spread(w)) if split.embed else spread(w)
    experts = None if gate is None else whole(gate, 1), whole(up, 1), whole(down, 2)
    tokens, weights = spread(x.reshape(B * T, D)), routing.weights.reshape(B * T, top_k).T
    out = _through(split, E, room, tokens, choices, weights, experts, activation)

    total = lambda a: lax.psum(a, split.batch + split.length)
    sizes = _sizes(choices, E)
    asked, dropped = total(jnp.sum(sizes)), total(jnp.sum(jnp.maximum(sizes - (B * T if room is None else room), 0)))
    statistics = RoutingStatistics(
        fraction=total(sizes).astype(logits.dtype) * top_k / jnp.maximum(asked, 1),
        probability=_mean(routing.probabilities, real, total),
        dropped=dropped.astype(logits.dtype) / jnp.maximum(asked, 1),
        z=_mean(_squared(logits), real, total),
    )
    return out.reshape(B, T, D), statistics


def _through(split, E, room, x, choices, weights, experts, activation):
    """Tokens `[N, D]` through the experts `[top_k, N]` of their choice and back, weighted and summed."""
    gate, up, down = experts
    top_k, D, here = choices.shape[0], x.shape[1], up.shape[0]
    ours = set(split.experts) <= set(split.batch)  # tokens are split over the axis of experts, too
    send = room is not None and ours  # tokens to experts elsewhere; else experts fetch the tokens of all
    if split.experts and not send:
        if ours:
            x = lax.all_gather(x, split.experts, axis=0, tiled=True)
            choices, weights = (lax.all_gather(a, split.experts, axis=1, tiled=True) for a in (choices, weights))
        choices = choices - lax.axis_index(split.experts) * here
        choices = jnp.where((choices >= 0) & (choices < here), choices, here)
    known = E if send else here
    sizes = _sizes(choices, known)
    if room is None:
        rows = _block_rows(choices.size, E)
        blocks = -(-sizes // rows)  # of each expert, the last one partly empty
        ends = jnp.cumsum(blocks)
        most = choices.size // top_k * min(top_k, here)
        count = min((most + here * (rows - 1)) // rows, most)  # the most that there can be
        owners = jnp.minimum(jnp.sum(ends[None] <= jnp.arange(count)[:, None], axis=1), here - 1)
        product = lambda x, w: _grouped(*_alike(x, w), owners, ends[-1])
        places = _places(choices, sizes, (ends - blocks) * rows, choices.size, count * rows)
    else:
        rows, count = room, known
        product = lambda x, w: einsum("ebd,edf->ebf", *_alike(x, w))
        places = _places(choices, sizes, jnp.arange(count) * rows, rows, count * rows)

    y = x.at[places.tokens].get(mode="fill", fill_value=0).reshape(count, rows, D)
    if split.experts and send:
        y = lax.all_to_all(y, split.experts, 0, 1, tiled=True)
    y = _experts(product, y, gate, up, down, activation)
    if split.experts and send:
        y = lax.all_to_all(y, split.experts, 1, 0, tiled=True)
    y = y.reshape(count * rows, D).at[places.rows].get(mode="fill", fill_value=0)  # [top_k, N, D]
    out = jnp.sum(_wide(y) * weights[:, :, None].astype(_wide(y).dtype), axis=0).astype(x.dtype)
    if split.experts and not send:
        out = lax.psum_scatter(out, split.experts, tiled=True) if ours else lax.psum(out, split.experts)
    return lax.psum(out, split.mlp)


def mixture_reference(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    gate: Float[Array, "E D F"] | None,
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    activation: Callable,
    *,
    top_k: int,
    normalise: bool = True,
    real: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """The output of `mixture` without a capacity, with every expert at work on every token. The oracle."""
    E = router.shape[1]
    routing = route(_router(x, router), top_k, normalise)
    weights = jnp.sum(jax.nn.one_hot(routing.experts, E, dtype=_wide(x).dtype) * routing.weights[..., None], axis=2)
    if real is not None:
        weights = jnp.where(real[:, :, None], weights, 0)
    everyone = jnp.broadcast_to(x[None], (E, *x.shape))
    y = _experts(partial(einsum, "ebtd,edf->ebtf"), everyone, gate, up, down, activation)
    return jnp.sum(_wide(y) * jnp.moveaxis(weights, 2, 0)[..., None], axis=0).astype(x.dtype)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _router(x, router):
    return einsum("btd,de->bte", _wide(x), router)


def _squared(logits):
    return jnp.square(jax.nn.logsumexp(_wide(logits), axis=-1))


def _mean(x, real, total=lambda a: a):
    """The mean over the real tokens; x has the axes of `real`, and perhaps others behind them. `total` adds devices up."""
    chosen = real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
    sums = jnp.sum(jnp.where(chosen, x, 0), axis=tuple(range(real.ndim)))
    return total(sums) / jnp.maximum(total(jnp.sum(real)), 1)


def _sizes(choices, E):
    return jnp.sum(choices.reshape(-1, 1) == jnp.arange(E)[None], axis=0)


def _varying(x, axes):
    """x, as an array that may differ along mesh axes of an enclosing `shard_map`; the transpose is a sum over them."""
    return (
        lax.pcast(x, tuple(axes), to="varying") if (axes := set(axes) - jax.typeof(x).manual_axis_type.varying) else x
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(mesh_axes, axis, dtype, w):
    """The parts of w along mesh axes, rounded to `dtype` on the way; the gradient's are summed in its own precision."""
    return lax.all_gather(w.astype(dtype), mesh_axes, axis=axis, tiled=True).astype(w.dtype)


_gathered.defvjp(
    lambda mesh_axes, axis, dtype, w: (_gathered(mesh_axes, axis, dtype, w), None),
    lambda mesh_axes, axis, dtype, _, g: (lax.psum_scatter(g, mesh_axes, scatter_dimension=axis, tiled=True),),
)


def _alike(*arrays):
    """Arrays that may differ along the same mesh axes, as a custom VJP and the carry of a loop want them."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    return [_varying(a, axes) for a in arrays]


def _experts(product, x, gate, up, down, activation):
    hidden = product(x, up)
    hidden = activation(hidden) if gate is None else activation(product(x, gate)) * hidden
    return product(hidden, down)


class _Places(NamedTuple):
    """The table of rows that experts work on, both ways round."""

    tokens: Array  # [rows], the token that stands in each row; past the last one where none does
    rows: Array  # [top_k, tokens], the row in which each choice stands; past the last one where it has none


def _places(choices: Int[Array, "top_k N"], sizes: Int[Array, " E"], first: Int[Array, " E"], room: int, rows: int):
    """Each expert's choices in a run of rows from `first[expert]` on, in their order, as many as there is room for."""
    E, (_, N) = sizes.shape[0], choices.shape
    order = jnp.argsort(choices.reshape(-1))  # stable
    expert = choices.reshape(-1)[order]
    known = jnp.minimum(expert, E - 1)
    rank = jnp.arange(order.size) - (jnp.cumsum(sizes) - sizes)[known]
    row = jnp.where((expert < E) & (rank < room), first[known] + rank, rows)
    tokens = jnp.full(rows, N, order.dtype).at[row].set(order % N, mode="drop")
    return _Places(tokens, jnp.zeros_like(row).at[order].set(row, unique_indices=True).reshape(choices.shape))


def _block_rows(choices: int, E: int) -> int:
    """Rows of one block: a quarter of an expert's even share, in eights. Its last block is half empty: an eighth is lost."""
    return min(8 * -(-choices // (32 * E)), 512)


# A loop over blocks, each of one expert, instead of `lax.ragged_dot`: that multiplies, on CPU (jax 0.10), every row by
# every expert, and is as slow as doing so. Blocks that nobody fills are not visited, nor the weights of idle experts read.
# The gradient is our own because autodiff would add a zero array of all experts for each block.
@jax.custom_vjp
def _grouped(x: Float[Array, "n b D"], w: Float[Array, "E D F"], owners: Int[Array, " n"], used: Int[Array, ""]):
    """x[i] w[owners[i]] for the first `used` blocks i of x, zeros for the rest. Reverse mode, first order."""
    return _each_block("bd,df->bf", x, w.astype(x.dtype), owners, used)


def _grouped_forward(x, w, owners, used):
    return _grouped(x, w, owners, used), (x, w, owners, used)


def _grouped_backward(residuals, g):
    x, w, owners, used = residuals

    def add(i, dw):
        part = einsum("bd,bf->df", _at(x, i), _at(g, i), dtype=dw.dtype)
        return _put(dw, _at(dw, owners[i]) + part, owners[i])

    dx = _each_block("bf,df->bd", g, w.astype(x.dtype), owners, used)
    zeros = jnp.zeros(w.shape, jnp.promote_types(x.dtype, jnp.float32))
    dw = lax.fori_loop(0, used, add, _alike(zeros, x)[0])
    return dx, dw.astype(w.dtype), None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _each_block(spec, x, w, owners, used):
    product = lambda i: einsum(spec, _at(x, i), _at(w, owners[i]))
    out, _ = _alike(jnp.zeros((x.shape[0], *jax.eval_shape(product, 0).shape), x.dtype), x)
    return lax.fori_loop(0, used, lambda i, out: _put(out, product(i), i), out)


def _at(x, i):
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, part, i):  # x.at[i].set is a scatter, which XLA:CPU does in float32
    return lax.dynamic_update_index_in_dim(x, part, i, 0)
