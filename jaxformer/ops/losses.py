"""Losses as sums: callers divide once, by the weight of the whole batch, however the batch was cut up."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Integer

from jaxformer.ops.einsum import add_bias, einsum
from jaxformer.sharding import all_gather_weight, in_auto_axes, mesh_axes, with_logical_constraint, with_sharding


class LossSums(NamedTuple):
    """What an objective returns: sums over a batch, and metrics as `{name: (sum, weight)}`; nothing is divided yet."""

    loss: Any  # what is descended, in nats
    weight: Any  # in tokens or examples
    metrics: dict[str, tuple[Any, Any]] = {}  # noqa: RUF012 (never changed)


class TokenSums(NamedTuple):
    """Weighted sums over tokens, float32: loss in nats, weight in tokens, correct predictions in tokens."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(
    logits: Float[Array, "*batch V"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenSums:
    """Sum of weight * (-log softmax(logits)[label]), in float32 whatever the logits are, with the sum of weights.

    Label smoothing e puts 1 - e on the label and e / V on every class (Szegedy et al. 2016, section 7). `z_loss` adds
    z (log sum exp logits)^2 (Chowdhery et al. 2022, section 5). A label outside 0..V-1 is legal where its weight is 0, and
    makes the loss NaN elsewhere. The logits of a token of weight 0 do not matter, be they NaN: their gradient is 0. A token
    is correct where its label is the argmax of its logits, of equal ones the first, as `jnp.argmax` has it.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights

    def run(logits, labels, weights):
        logits = jnp.where(weights[..., None] == 0, 0, logits)  # 0 * NaN is NaN: select before anything is multiplied
        return _cross_entropy((label_smoothing, z_loss), logits, labels, weights)

    return in_auto_axes(run, lambda _: P())(logits, labels, weights)


def _cross_entropy(options, logits, labels, weights) -> TokenSums:
    label_smoothing, z_loss = options
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    weights = weights.astype(logits.dtype)
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # uint8 does not hold every V
    V = logits.shape[-1]
    log_total = jax.nn.logsumexp(logits, axis=-1)
    legal = (labels >= 0) & (labels < V)
    picked = jnp.take_along_axis(logits, jnp.where(legal, labels, 0)[..., None], axis=-1)[..., 0]
    picked = jnp.where(legal, picked, jnp.nan)
    losses = log_total - picked
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_total - jnp.mean(logits, axis=-1))
    if z_loss:
        losses = losses + z_loss * jnp.square(log_total)
    correct = _is_argmax(logits, labels, picked)
    losses = jnp.where(weights == 0, 0, losses * weights)
    return TokenSums(jnp.sum(losses), jnp.sum(weights), jnp.sum(correct * weights))


def _is_argmax(logits, labels, picked):
    """jnp.argmax(logits, axis=-1) == labels, where `picked` are the logits of the labels; false where one is NaN.

    One reduction to bits. On CPU `jnp.argmax` adds twice its time to a loss, and the least index of the maxima its memory.
    """
    picked, places = picked[..., None], jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    return jnp.all((logits < picked) | ((logits == picked) & (places >= labels[..., None])), axis=-1)


def projected_cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Integer[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> TokenSums:
    """`cross_entropy(hidden @ head^T + bias, ...)` with the logits of `chunk` positions of T at a time, not of all.

    The gradients of hidden and head are formed chunk by chunk while the logits are there, so nothing is computed twice.
    By default a chunk's float32 logits take at most 64 MiB of a device (or one position's). Weights get no gradient.
    `softcap` c maps a logit l to c tanh(l / c). On a mesh each device has the logits of its own tokens and its own part of
    the vocabulary; gradients of the head are summed over devices once, after the last chunk.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    options = (chunk, softcap, label_smoothing, z_loss)
    return TokenSums(*in_auto_axes(partial(_projected, options), lambda _: P())(hidden, (head, bias), labels, weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(options, hidden, head, labels, weights):
    def body(hidden, head, labels, weights):
        def step(sums, part):
            logits = _logits(hidden.dtype, part[0], head)
            return jax.tree.map(jnp.add, sums, _chunk_loss(options, logits, *part[1:])), None

        sums, _ = jax.lax.scan(step, _zeros(hidden), _chunks(_chunk(options[0], hidden, head), hidden, labels, weights))
        return (tuple(sums),)

    return _on_each_device(body, hidden, head, labels, weights)[0]


def _projected_forward(options, hidden, head, labels, weights):
    """Losses and, at the same pass, their gradients: the cotangent of a sum is one number, so it can multiply later.

    Until then float16 could not hold them: the cotangent may be a loss scale. Parts of float16 operands stay float32.
    """

    def body(hidden, head, labels, weights):
        wide = partial(jax.tree.map, lambda a: a.astype(jnp.float32) if a.dtype == jnp.float16 else a)
        dtype, head = hidden.dtype, wide(head)

        def step(carry, part):
            sums, d_head = carry
            part_hidden, *rest = part
            logits, pullback = jax.vjp(partial(_logits, dtype), wide(part_hidden), head)
            loss, to_logits, others = jax.vjp(
                lambda logits: _loss_first(_chunk_loss(options, logits, *rest)), logits, has_aux=True
            )
            d_hidden, d_part = _in_range_of(dtype, pullback)(*to_logits(jnp.ones_like(loss)))
            sums = jax.tree.map(jnp.add, sums, TokenSums(loss, *others))
            return (sums, jax.tree.map(lambda d, part: d + part.astype(d.dtype), d_head, d_part)), d_hidden

        parts = _chunks(_chunk(options[0], hidden, head), hidden, labels, weights)
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), head)
        (sums, d_head), d_hidden = jax.lax.scan(step, (_zeros(hidden), zeros), parts)
        B, T, D = hidden.shape
        d_hidden = d_hidden.swapaxes(0, 1).reshape(B, -1, D)[:, :T]
        return tuple(sums), (d_hidden, d_head)

    sums, gradients = _on_each_device(body, hidden, head, labels, weights)
    return sums, (gradients, jax.tree.map(lambda a: jnp.zeros(0, a.dtype), (hidden, head)))


def _in_range_of(dtype, pullback):
    """The pullback of products whose cotangent is rounded to `dtype`, without underflow in float16: at vocabulary 50,000
    most of p - target is below its smallest number. Scaled by a power of two before, the gradients divided by it after.
    """
    if dtype != jnp.float16:
        return pullback

    def scaled(g):
        _, exponent = jnp.frexp(jnp.max(jnp.abs(g)))
        factor = jnp.ldexp(jnp.ones((), g.dtype), jnp.minimum(15 - exponent, 100))  # the largest is below 2^15, finite
        return jax.tree.map(lambda d: d / factor, pullback(g * factor))

    return scaled


def _projected_backward(options, residuals, cotangents):
    gradients, operands = residuals
    d_loss = cotangents[0]  # float32: 1 / tokens in bfloat16 would scale every gradient below by the same error
    d_hidden, d_head = jax.tree.map(lambda d, a: (d * d_loss).astype(a.dtype), gradients, operands)
    return d_hidden, d_head, None, None


_projected.defvjp(_projected_forward, _projected_backward)


def _on_each_device(body, hidden, head, labels, weights):
    """`body` of each device's tokens, with the head whole but for its vocabulary; its sums, and the sum of what it says of
    the head, over all devices.

    Left to the compiler, the gradient of the head would be summed over devices once a chunk.
    """
    rows, columns = mesh_axes("batch", hidden.shape[0]), mesh_axes("length", hidden.shape[1])
    if not rows + columns:
        return body(hidden, head, labels, weights)
    vocabulary, tokens = mesh_axes("vocab", head[0].shape[0]), P(rows or None, columns or None)
    parts, whole = P(vocabulary or None, "fsdp" if "fsdp" in rows else None), P(vocabulary or None)
    kernel = all_gather_weight(hidden.dtype, whole, parts, head[0])

    def local(*operands):
        sums, *gradients = body(*operands)
        sums = jax.lax.psum(sums, rows + columns)
        return (sums, *((d_hidden, jax.tree.map(lambda d: d[None], d_head)) for d_hidden, d_head in gradients))

    shapes = jax.eval_shape(body, hidden, head, labels, weights)
    mapped = jax.shard_map(
        local, in_specs=(tokens, P(), tokens, tokens), out_specs=(P(), *((tokens, P(rows + columns)) for _ in shapes[1:])),
        axis_names={*rows, *columns}, check_vma=False,
    )  # fmt: skip
    sums, *gradients = mapped(hidden, (kernel, head[1]), labels, weights)
    total = lambda d: with_sharding(jnp.sum(d, axis=0), parts if d.ndim == 3 else P(vocabulary or None))
    return (sums, *((d_hidden, jax.tree.map(total, d_head)) for d_hidden, d_head in gradients))


def _chunk(chunk: int | None, hidden, head) -> int:
    """Positions a chunk: as asked, or as many as keep a device's float32 logits at 64 MiB."""
    (B, T, _), V = hidden.shape, head[0].shape[0]
    split = mesh_axes("vocab", V)
    held = B * V // math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in split) if split else B * V
    count = -(-T // min(T, chunk or max(1, 2**24 // held)))
    return -(-T // count)  # as even as they come: the rest of the last one would be computed for nothing


def _logits(dtype, hidden, head):
    """hidden head^T + bias in float32 or better, of operands that are rounded to `dtype`."""
    kernel, bias = head
    wide = jnp.promote_types(dtype, jnp.float32)
    logits = einsum("btd,vd->btv", hidden, kernel, dtype=wide, operand_dtype=dtype)
    return with_logical_constraint(logits if bias is None else add_bias(logits, bias), "batch", "length", "vocab")


def _chunk_loss(options, logits, labels, weights) -> TokenSums:
    _, softcap, *rest = options
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return _cross_entropy(rest, logits, labels, weights)


def _loss_first(sums: TokenSums):
    return sums.loss, (sums.weight, sums.correct)


def _zeros(hidden) -> TokenSums:
    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    return TokenSums(zero, zero, zero)


def _chunks(chunk, hidden, labels, weights):
    """[B, T, ...] -> [ceil(T / chunk), B, chunk, ...]: cut along T, so a batch sharded over B stays where it is.

    Hidden states of weight 0 become 0: the gradient of the head is a product with them, and 0 * NaN is NaN.
    """
    hidden = jnp.where(weights[..., None] == 0, 0, hidden)

    def cut(x):
        pad = -x.shape[1] % chunk
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    return cut(hidden), cut(labels), cut(weights)
