"""Losses as sums over tokens. The caller divides once, by the weight of all parts of a batch."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Integer

from jaxformer.ops.einsum import add_bias, einsum, einsum_gradients, in_float32, reverse_mode_alone
from jaxformer.sharding import (
    all_gather_weight,
    auto_axes,
    mesh_axes,
    psum,
    reduce_scatter,
    with_logical_constraint,
)  # fmt: skip


@struct.dataclass
class LossSums:
    """What an objective returns: sums over a batch, not yet divided by the weight.

    The loss of a step is `loss / weight`, summed over all parts of its batch first. `updates` is a partial tree of
    the parameters: new values of variables (`params.Spec(trained=False)`), by the model's paths, and under
    "objective" by those of the objective's own.
    """

    loss: Any  # to be minimised
    weight: Any  # what the loss is a sum over, counted in `unit`
    metrics: dict[str, tuple[Any, Any]] = struct.field(default_factory=dict)  # {name: (sum, weight)}
    updates: Any = None
    unit: str = struct.field(pytree_node=False, default="examples")  # of the weight, in the plural: tokens, images, pairs
    # whether the loss is a cross entropy of tokens in nats, so that the exponential of its mean is a perplexity
    perplexity: bool = struct.field(pytree_node=False, default=False)

    def __iter__(self) -> Iterator[Any]:
        """loss, weight, metrics: files of older runs unpack a tuple of these three."""
        return iter((self.loss, self.weight, self.metrics))

    def _replace(self, **changes: Any) -> "LossSums":
        """A copy with other fields: files of older runs call it so."""
        return dataclasses.replace(self, **changes)


class TokenSums(NamedTuple):
    """Weighted sums over tokens, float32: loss in nats, weight in tokens, correct predictions in tokens."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]


@auto_axes(P())
@jax.named_scope("loss")
def cross_entropy(
    logits: Float[Array, "*batch V"], labels: Integer[Array, "*batch"], weights: Float[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> TokenSums:  # fmt: skip
    """Sum of weight * (-log softmax(logits)[label]), in float32 or better, with the sum of weights.

    Label smoothing e puts 1 - e on the label and e / V on every class (Szegedy et al. 2016, section 7); classes whose logit
    is -inf are no classes of that token. `z_loss` adds
    z (log sum exp logits)^2 (Chowdhery et al. 2022, section 5). A label outside 0..V-1 makes the loss NaN. A token of weight 0
    may have any label and logits, also NaN: their gradient is 0. A token is correct where `jnp.argmax` gives its label.
    Raises ValueError for labels or weights of another shape than the tokens': spread over them, they would count twice.
    """
    weights = jnp.ones(jnp.shape(labels), jnp.float32) if weights is None else weights
    _check_shapes("cross_entropy", jnp.shape(logits)[:-1], labels=labels, weights=weights)
    logits = jnp.where(weights[..., None] == 0, 0, logits)  # 0 * NaN is NaN: select before anything is multiplied
    return _cross_entropy(logits, labels, weights, label_smoothing, z_loss)


def _check_shapes(function: str, tokens: tuple, **arrays: Any) -> None:
    """Raises ValueError for an array that does not have one number for each token."""
    for name, array in arrays.items():
        if jnp.shape(array) != tokens:
            raise ValueError(f"{function}: {name} {jnp.shape(array)}; expected one for each token, {tokens}")


def _cross_entropy(logits, labels, weights, label_smoothing: float, z_loss: float) -> TokenSums:
    logits = in_float32(logits)
    weights = weights.astype(logits.dtype)
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # uint8 does not hold every V
    V = logits.shape[-1]
    legal = (labels >= 0) & (labels < V)
    labels = jnp.where(legal, labels, -1)  # of JAX's integer type: NumPy's may be wider
    picked = jnp.where(legal, _pick(logits, jnp.maximum(labels, 0)), jnp.nan)
    top, correct = _maximum(jax.lax.stop_gradient(logits), jax.lax.stop_gradient(picked), labels)
    log_total = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    losses = log_total - picked
    if label_smoothing:
        possible = logits != -jnp.inf
        mean = jnp.sum(jnp.where(possible, logits, 0), axis=-1) / jnp.sum(possible, axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_total - mean)
    if z_loss:
        losses = losses + z_loss * jnp.square(log_total)
    losses = jnp.where(weights == 0, 0, losses * weights)
    return TokenSums(jnp.sum(losses), jnp.sum(weights), jnp.sum(correct * weights))


def _maximum(logits, picked, labels):
    """(the largest logit, or 0 where that is not finite; whether the label is its first place)."""

    def by_bits(logits, picked, labels):
        picked, class_ids = picked[..., None], jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
        first = (logits < picked) | ((logits == picked) & (class_ids >= labels[..., None]))
        return jnp.max(logits, axis=-1), jnp.all(first, axis=-1)

    def by_index(logits, picked, labels):
        best = jnp.argmax(logits, axis=-1)
        return _pick(logits, best), best == labels

    # a GPU reads the logits once more for the bits; a CPU takes twice the time of the loss for the place
    top, correct = jax.lax.platform_dependent(logits, picked, labels, cuda=by_index, default=by_bits)
    return jnp.where(jnp.isfinite(top), top, 0), correct


@jax.custom_jvp
def _pick(logits, labels):
    """The logit of each label."""
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


@_pick.defjvp
def _pick_tangent(primals, tangents):
    def by_index(d_logits, labels):
        class_ids = jax.lax.broadcasted_iota(labels.dtype, d_logits.shape, d_logits.ndim - 1)
        return jnp.sum(jnp.where(class_ids == labels[..., None], d_logits, 0), axis=-1)

    (logits, labels), (d_logits, _) = primals, tangents
    # Transposed, the one is a scatter, which a GPU writes as an array of its own, and the other a part of the loss's gradient
    # there. A CPU takes as long for both.
    return _pick(logits, labels), jax.lax.platform_dependent(d_logits, labels, cpu=_pick, default=by_index)


class _Options(NamedTuple):
    chunk: int | None
    softcap: float | None
    label_smoothing: float
    z_loss: float


class _Head(NamedTuple):
    kernel: Any  # [V, D]
    bias: Any  # [V] or None


class _Tokens(NamedTuple):
    hidden: Any  # [B, T, D]
    labels: Any  # [B, T]
    weights: Any  # [B, T]


@auto_axes(P())
@jax.named_scope("head")
def projected_cross_entropy(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], labels: Integer[Array, "B T"],
    weights: Float[Array, "B T"] | None = None, *, bias: Float[Array, " V"] | None = None, softcap: float | None = None,
    label_smoothing: float = 0.0, z_loss: float = 0.0, chunk: int | None = None,
) -> TokenSums:  # fmt: skip
    """`cross_entropy(hidden @ head^T + bias, ...)` with the logits of only `chunk` positions of T at a time.

    The gradients of hidden and head are formed chunk by chunk while the logits are there, so nothing is computed twice.
    By default a chunk has 1,024 tokens on a device, or as many as have 64 MiB of float32 logits. Weights get no gradient.
    `softcap` c maps a logit l to c tanh(l / c). On a mesh each device has its own tokens and its part of the vocabulary.
    Raises ValueError for shapes as `cross_entropy` does, for a chunk below 1, and for a softcap that is not above 0.
    """
    weights = jnp.ones(jnp.shape(labels), jnp.float32) if weights is None else weights
    _check_shapes("projected_cross_entropy", jnp.shape(hidden)[:-1], labels=labels, weights=weights)
    if chunk is not None and chunk < 1:
        raise ValueError(f"projected_cross_entropy: chunk={chunk}: must be at least 1, or None")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"projected_cross_entropy: softcap is a number above 0 and finite, or None; got {softcap}")
    options, tokens = _Options(chunk, softcap, label_smoothing, z_loss), _Tokens(hidden, labels, weights)
    if not labels.size:
        return _zero_sums(tokens)
    with reverse_mode_alone("projected_cross_entropy"):
        return _projected(options, tokens, _Head(head, bias))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(options: _Options, tokens: _Tokens, head: _Head) -> TokenSums:
    return _on_shards(_loss, options, tokens, head)[0]


def _projected_forward(options: _Options, tokens: _Tokens, head: _Head):
    """The sums and, in the same pass, the gradients of the loss; the backward pass multiplies them by its cotangent."""
    # gradients of float16 operands are float32 until then, because the cotangent may be a loss scale
    sums, gradients = _on_shards(_loss_and_gradients, options, tokens, head)
    return sums, (gradients, jax.tree.map(lambda a: jnp.zeros(0, a.dtype), (tokens.hidden, head)))  # for their dtypes


def _projected_backward(options: _Options, residuals, cotangents: TokenSums):
    gradients, operands = residuals
    d_loss = cotangents.loss  # float32: 1 / tokens in bfloat16 would scale every gradient by the same error
    d_hidden, d_head = jax.tree.map(lambda d, a: (d * d_loss).astype(a.dtype), gradients, operands)
    return _Tokens(d_hidden, None, None), d_head


_projected.defvjp(_projected_forward, _projected_backward)


def _on_shards(function, options: _Options, tokens: _Tokens, head: _Head):
    """`function(options, tokens, head)` -> (sums, gradients) on each device of the mesh, added up over all tokens."""
    head = head._replace(kernel=head.kernel.astype(tokens.hidden.dtype))  # the loop would round it anew for each chunk
    # left to the compiler, the gradient of the head would be summed over devices once a chunk
    batch_axes, length_axes = (
        mesh_axes(name, size) for name, size in zip(("batch", "length"), tokens.labels.shape, strict=True)
    )
    axes, vocab = batch_axes + length_axes, mesh_axes("vocab", head.kernel.shape[0]) or None
    if not axes:
        return function(options, tokens, head)
    tokens_spec, bias_spec = P(batch_axes or None, length_axes or None), P(vocab)
    kernel_spec = P(vocab, "fsdp" if "fsdp" in batch_axes else None)
    head = head._replace(kernel=all_gather_weight(tokens.hidden.dtype, bias_spec, kernel_spec, head.kernel))

    def on_each(tokens, head):
        sums, (d_hidden, d_head) = function(options, tokens, head)
        return jax.lax.psum(sums, axes), d_hidden, jax.tree.map(lambda d: d[None], d_head)

    specs = dict(in_specs=(tokens_spec, P()), out_specs=(P(), tokens_spec, P(axes)))
    sums, d_hidden, d_heads = jax.shard_map(on_each, **specs, axis_names=frozenset(axes), check_vma=False)(tokens, head)

    def total(d):
        return _total(d, axes, vocab or (), kernel_spec if d.ndim == 3 else bias_spec)

    return sums, (d_hidden, jax.tree.map(total, d_heads))


def _total(d, axes: tuple[str, ...], vocab: tuple[str, ...], spec: P):
    """The sum of the gradients that the devices of `axes` made; split by `spec`."""

    def on_each(d):
        if "fsdp" not in spec:
            return psum(d[0], axes)
        others = tuple(axis for axis in axes if axis != "fsdp")
        gradient = reduce_scatter(d[0].T, "fsdp").T
        return psum(gradient, others) if others else gradient

    specs = dict(in_specs=P(axes, *spec[:1]), out_specs=spec, axis_names=frozenset(axes + vocab))
    return jax.shard_map(on_each, **specs, check_vma=False)(d)


def _loss(options: _Options, tokens: _Tokens, head: _Head):
    def add(sums, chunk):
        logits = _logits(tokens.hidden.dtype, chunk.hidden, head)
        return jax.tree.map(jnp.add, sums, _chunk_loss(options, chunk, logits)[1]), None

    return jax.lax.scan(add, _zero_sums(tokens), _chunks(options, tokens, head))[0], (None, None)


def _loss_and_gradients(options: _Options, tokens: _Tokens, head: _Head):
    B, T, D = tokens.hidden.shape
    d_head = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), head)
    add = partial(_add_chunk, options, head)
    (sums, d_head), d_hidden = jax.lax.scan(add, (_zero_sums(tokens), d_head), _chunks(options, tokens, head))
    return sums, (d_hidden.swapaxes(0, 1).reshape(B, -1, D)[:, :T], d_head)


def _add_chunk(options: _Options, head: _Head, carry, chunk: _Tokens):
    """One step of a scan: ((sums, gradient of the head) with those of this chunk, its gradient of hidden)."""
    sums, d_head = carry
    dtype = chunk.hidden.dtype
    logits = _logits(dtype, chunk.hidden, head)
    d_logits, chunk_sums = jax.grad(partial(_chunk_loss, options, chunk), has_aux=True)(logits)
    dtypes = jnp.float32 if dtype == jnp.float16 else dtype, d_head.kernel.dtype
    pullback = partial(einsum_gradients, "btd,vd->btv", chunk.hidden, head.kernel, dtypes=dtypes)
    d_hidden, d_kernel = _pull_back_in_range(dtype, pullback, d_logits)
    d_bias = None if head.bias is None else d_head.bias + jnp.sum(d_logits, axis=(0, 1))
    return (jax.tree.map(jnp.add, sums, chunk_sums), _Head(d_head.kernel + d_kernel, d_bias)), d_hidden


def _pull_back_in_range(dtype, pullback, d_logits):
    """`pullback(d_logits)` of products that round `d_logits` to `dtype`, without underflow in float16."""
    if dtype != jnp.float16:
        return pullback(d_logits)
    # at vocabulary 50,000 most of p - target is below float16's smallest number: multiplied by a power of two, it is not
    _, exponent = jnp.frexp(jnp.max(jnp.abs(d_logits)))
    exponent = jnp.minimum(15 - exponent, 100)  # the largest is then below 2^15, which is finite
    factor = jnp.ldexp(jnp.ones((), d_logits.dtype), exponent)
    return jax.tree.map(lambda d: d / factor, pullback(d_logits * factor))


def _logits(dtype, hidden, head: _Head):
    """hidden head^T + bias in float32 or better, of operands that are rounded to `dtype`."""
    wide = jnp.promote_types(dtype, jnp.float32)
    logits = einsum("btd,vd->btv", hidden, head.kernel, dtype=wide, operand_dtype=dtype)
    return with_logical_constraint(add_bias(logits, head.bias), "batch", "length", "vocab")


def _chunk_loss(options: _Options, chunk: _Tokens, logits) -> tuple[Array, TokenSums]:
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    sums = _cross_entropy(logits, chunk.labels, chunk.weights, options.label_smoothing, options.z_loss)
    return sums.loss, sums


def _zero_sums(tokens: _Tokens) -> TokenSums:
    zero = jnp.zeros((), jnp.promote_types(tokens.hidden.dtype, jnp.float32))
    return TokenSums(zero, zero, zero)


def _chunks(options: _Options, tokens: _Tokens, head: _Head) -> _Tokens:
    """Arrays `[chunks, B, chunk, ...]`, cut along T: a batch that is split over B stays on its devices."""
    B, T = tokens.labels.shape
    V = head.kernel.shape[0]
    V //= math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in mesh_axes("vocab", V))
    # Each chunk reads and writes the float32 gradient of the head, 8 V D bytes for 6 V D FLOPs a token: with 1,024 tokens the
    # products take longer than that on every chip of `models.cost`.
    count = -(-T // min(T, options.chunk or max(1, max(1024, 2**24 // V) // B)))
    size = -(-T // count)  # of equal chunks, because padding of the last one is computed for nothing

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, -T % size)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1)

    # the gradient of the head is a product with hidden states, also those of weight 0, and 0 * NaN is NaN
    hidden = jnp.where(tokens.weights[..., None] == 0, 0, tokens.hidden)
    return jax.tree.map(cut, tokens._replace(hidden=hidden))
