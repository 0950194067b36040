"""Losses as sums over tokens. The caller divides once, by the weight of the whole batch.

`cross_entropy` is the function to read. `projected_cross_entropy` is the same without an array of
all logits. `LossSums` is what an objective returns.
"""

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

from jaxformer.ops.einsum import add_bias, einsum, in_float32, reverse_mode_alone
from jaxformer.ops.einsum_gradients import einsum_gradients
from jaxformer.sharding import (
    all_gather_weight,
    auto_axes,
    mesh_axes,
    psum,
    reduce_scatter,
    with_logical_constraint,
)


@struct.dataclass
class LossSums:
    """What an objective returns: sums over a batch, not yet divided by the weight.

    The loss of a step is `loss / weight`. Both are summed over all parts of its batch first.
    `updates` is a partial tree of the parameters with new values of variables
    (`params.Spec(trained=False)`). Variables of the model have the model's paths. The objective's
    own variables stand under "objective".
    """

    loss: Any  # the sum to be minimised
    weight: Any  # the number of units that the loss is a sum over
    # {name: (sum, weight)}
    metrics: dict[str, tuple[Any, Any]] = struct.field(default_factory=dict)
    updates: Any = None
    # the unit of the weight, in the plural: tokens, images, pairs
    unit: str = struct.field(pytree_node=False, default="examples")
    # whether the loss is a cross entropy of tokens in nats: then exp(loss / weight) is a perplexity
    perplexity: bool = struct.field(pytree_node=False, default=False)

    def __iter__(self) -> Iterator[Any]:
        """loss, weight, metrics: experiment files of older runs unpack a tuple of these three."""
        return iter((self.loss, self.weight, self.metrics))

    def _replace(self, **changes: Any) -> "LossSums":
        """A copy with other fields. Experiment files of older runs call this method."""
        return dataclasses.replace(self, **changes)


def weighted_sum(values: Float[Array, " B"], weights: Float[Array, " B"]) -> Float[Array, ""]:
    """The sum of values times weights. A value of weight 0 is left out, also if it is NaN."""
    return jnp.where(weights == 0, 0, values * weights).sum()


class TokenSums(NamedTuple):
    """Weighted sums over tokens, in float32: loss in nats; weight and correct ones in tokens."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]


@auto_axes(P())
@jax.named_scope("loss")
def cross_entropy(
    logits: Float[Array, "*batch V"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenSums:
    """Sum over tokens of weight * (-log softmax(logits)[label]), in float32 or better.

    Label smoothing e puts 1 - e on the label and e / V on every class (Szegedy et al. 2016, section
    7). A class whose logit is -inf is no class of that token. `z_loss` z adds
    z (log sum exp logits)^2 (Chowdhery et al. 2022, section 5). A label outside 0..V-1 makes the
    loss NaN. A token of weight 0 may have any label and any logits, also NaN: its gradient is 0. A
    token is correct if `jnp.argmax` of its logits is its label.

    Raises ValueError if the shape of labels or weights is not that of the tokens. Broadcast, they
    would count several times.
    """
    weights = jnp.ones(jnp.shape(labels), jnp.float32) if weights is None else weights
    _check_shapes("cross_entropy", jnp.shape(logits)[:-1], labels=labels, weights=weights)
    # 0 * NaN is NaN: select before anything is multiplied
    logits = jnp.where(weights[..., None] == 0, 0, logits)
    return _cross_entropy(logits, labels, weights, label_smoothing, z_loss)


def _check_shapes(function: str, tokens: tuple, **arrays: Any) -> None:
    """Raises ValueError for an array that does not have exactly one number for each token."""
    for name, array in arrays.items():
        if jnp.shape(array) != tokens:
            raise ValueError(
                f"{function}: {name} {jnp.shape(array)}; expected one for each token, {tokens}"
            )


def _cross_entropy(logits, labels, weights, label_smoothing: float, z_loss: float) -> TokenSums:
    logits = in_float32(logits)
    weights = weights.astype(logits.dtype)
    # uint8 does not hold every V
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    V = logits.shape[-1]
    legal = (labels >= 0) & (labels < V)
    # `where` gives JAX's integer type: NumPy's may be wider
    labels = jnp.where(legal, labels, -1)
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
    """(the largest logit, or 0 if it is not finite; whether the label is its first place)."""

    def by_bits(logits, picked, labels):
        picked = picked[..., None]
        class_ids = _class_ids(logits, labels)
        first = (logits < picked) | ((logits == picked) & (class_ids >= labels[..., None]))
        return jnp.max(logits, axis=-1), jnp.all(first, axis=-1)

    def by_index(logits, picked, labels):
        best = jnp.argmax(logits, axis=-1)
        return _pick(logits, best), best == labels

    # On a GPU `by_bits` reads the logits once more. On a CPU `by_index` takes twice the time of the
    # loss.
    top, correct = jax.lax.platform_dependent(
        logits, picked, labels, cuda=by_index, default=by_bits
    )
    return jnp.where(jnp.isfinite(top), top, 0), correct


def _class_ids(logits, labels):
    """The class of each logit, in the type of the labels."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)


@jax.custom_jvp
def _pick(logits, labels):
    """The logit of each label."""
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


@_pick.defjvp
def _pick_tangent(primals, tangents):
    def by_index(d_logits, labels):
        is_label = _class_ids(d_logits, labels) == labels[..., None]
        return jnp.sum(jnp.where(is_label, d_logits, 0), axis=-1)

    logits, labels = primals
    d_logits, _ = tangents
    # The transpose of `_pick` is a scatter, which a GPU writes as a separate array. A GPU fuses the
    # transpose of `by_index` with the gradient of the loss. A CPU takes as long for both.
    d_picked = jax.lax.platform_dependent(d_logits, labels, cpu=_pick, default=by_index)
    return _pick(logits, labels), d_picked


def log_probabilities(
    logits: Float[Array, "*batch V"], labels: Integer[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """log softmax(logits)[label], in nats, in float32 or wider."""
    logits = in_float32(logits)
    return _pick(logits, labels) - jax.nn.logsumexp(logits, axis=-1)


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
    """`cross_entropy(hidden head^T + bias, ...)`, with the logits of `chunk` positions at a time.

    A chunk is cut along T. The gradients of hidden and head are computed in the same pass, while
    the logits of a chunk are there, so nothing is computed twice. By default a chunk has 1,024
    tokens on a device, or more if their float32 logits fit in 64 MiB. Weights get no gradient.
    `softcap` c maps a logit l to c tanh(l / c). On a mesh each device has its own tokens and its
    part of the vocabulary.

    Raises ValueError for wrong shapes as `cross_entropy` does, for a chunk below 1, and for a
    softcap that is not above 0 and finite.
    """
    weights = jnp.ones(jnp.shape(labels), jnp.float32) if weights is None else weights
    _check_shapes("projected_cross_entropy", jnp.shape(hidden)[:-1], labels=labels, weights=weights)
    if chunk is not None and chunk < 1:
        raise ValueError(f"projected_cross_entropy: chunk={chunk}: must be at least 1, or None")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            "projected_cross_entropy: softcap is a number above 0 and finite, or None; "
            f"got {softcap}"
        )
    options = _Options(chunk, softcap, label_smoothing, z_loss)
    tokens = _Tokens(hidden, labels, weights)
    if not labels.size:
        return _zero_sums(tokens)
    with reverse_mode_alone("projected_cross_entropy"):
        return _projected(options, tokens, _Head(head, bias))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(options: _Options, tokens: _Tokens, head: _Head) -> TokenSums:
    return _on_shards(_loss, options, tokens, head)[0]


def _projected_forward(options: _Options, tokens: _Tokens, head: _Head):
    """The sums and, in the same pass, the gradients of the loss.

    The backward pass multiplies these gradients by its cotangent. It may be a loss scale, so the
    gradients of float16 operands are float32 until then.
    """
    sums, gradients = _on_shards(_loss_and_gradients, options, tokens, head)
    # empty arrays that only tell the dtypes of the operands
    operands = jax.tree.map(lambda a: jnp.zeros(0, a.dtype), (tokens.hidden, head))
    return sums, (gradients, operands)


def _projected_backward(options: _Options, residuals, cotangents: TokenSums):
    gradients, operands = residuals
    # in float32: rounded to bfloat16, 1 / tokens would scale every gradient by the same error
    d_loss = cotangents.loss
    d_hidden, d_head = jax.tree.map(lambda d, a: (d * d_loss).astype(a.dtype), gradients, operands)
    return _Tokens(d_hidden, None, None), d_head


_projected.defvjp(_projected_forward, _projected_backward)


def _on_shards(function, options: _Options, tokens: _Tokens, head: _Head):
    """`function(options, tokens, head)` on each device of the mesh, summed over all tokens.

    The function returns (sums, gradients).
    """
    # the loop would round the kernel again for each chunk
    head = head._replace(kernel=head.kernel.astype(tokens.hidden.dtype))
    # left to the compiler, the gradient of the head would be summed over devices once a chunk
    B, T = tokens.labels.shape
    batch_axes = mesh_axes("batch", B)
    length_axes = mesh_axes("length", T)
    axes = batch_axes + length_axes
    if not axes:
        return function(options, tokens, head)
    vocab = mesh_axes("vocab", head.kernel.shape[0]) or None
    tokens_spec = P(batch_axes or None, length_axes or None)
    bias_spec = P(vocab)
    kernel_spec = P(vocab, "fsdp" if "fsdp" in batch_axes else None)
    kernel = all_gather_weight(tokens.hidden.dtype, bias_spec, kernel_spec, head.kernel)
    head = head._replace(kernel=kernel)

    def on_each(tokens, head):
        sums, (d_hidden, d_head) = function(options, tokens, head)
        return jax.lax.psum(sums, axes), d_hidden, jax.tree.map(lambda d: d[None], d_head)

    specs = dict(in_specs=(tokens_spec, P()), out_specs=(P(), tokens_spec, P(axes)))
    run = jax.shard_map(on_each, **specs, axis_names=frozenset(axes), check_vma=False)
    sums, d_hidden, d_heads = run(tokens, head)

    def total(d):
        return _total(d, axes, vocab or (), kernel_spec if d.ndim == 3 else bias_spec)

    return sums, (d_hidden, jax.tree.map(total, d_heads))


def _total(d, axes: tuple[str, ...], vocab: tuple[str, ...], spec: P):
    """The sum of the gradients of the devices along `axes`, split by `spec`."""

    def on_each(d):
        if "fsdp" not in spec:
            return psum(d[0], axes)
        others = tuple(axis for axis in axes if axis != "fsdp")
        gradient = reduce_scatter(d[0].T, ("fsdp",)).T
        return psum(gradient, others) if others else gradient

    specs = dict(in_specs=P(axes, *spec[:1]), out_specs=spec, axis_names=frozenset(axes + vocab))
    return jax.shard_map(on_each, **specs, check_vma=False)(d)


def _loss(options: _Options, tokens: _Tokens, head: _Head):
    """The sums of all chunks; no gradients."""

    def add(sums, chunk):
        logits = _logits(tokens.hidden.dtype, chunk.hidden, head)
        _, chunk_sums = _chunk_loss(options, chunk, logits)
        return jax.tree.map(jnp.add, sums, chunk_sums), None

    sums, _ = jax.lax.scan(add, _zero_sums(tokens), _chunks(options, tokens, head))
    return sums, (None, None)


def _loss_and_gradients(options: _Options, tokens: _Tokens, head: _Head):
    """The sums of all chunks; the gradients of the hidden states and of the head."""
    B, T, D = tokens.hidden.shape

    def zeros(w):
        return jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32))

    d_head = jax.tree.map(zeros, head)
    carry = _zero_sums(tokens), d_head
    add = partial(_add_chunk, options, head)
    (sums, d_head), d_hidden = jax.lax.scan(add, carry, _chunks(options, tokens, head))
    return sums, (d_hidden.swapaxes(0, 1).reshape(B, -1, D)[:, :T], d_head)


def _add_chunk(options: _Options, head: _Head, carry, chunk: _Tokens):
    """A scan step: adds a chunk to (sums, gradient of the head); its gradient of `hidden`."""
    sums, d_head = carry
    dtype = chunk.hidden.dtype
    logits = _logits(dtype, chunk.hidden, head)
    d_logits, chunk_sums = jax.grad(partial(_chunk_loss, options, chunk), has_aux=True)(logits)
    hidden_dtype = jnp.float32 if dtype == jnp.float16 else dtype
    dtypes = hidden_dtype, d_head.kernel.dtype
    pullback = partial(einsum_gradients, "btd,vd->btv", chunk.hidden, head.kernel, dtypes=dtypes)
    d_hidden, d_kernel = _pull_back_in_range(dtype, pullback, d_logits)
    d_bias = None if head.bias is None else d_head.bias + jnp.sum(d_logits, axis=(0, 1))
    sums = jax.tree.map(jnp.add, sums, chunk_sums)
    return (sums, _Head(d_head.kernel + d_kernel, d_bias)), d_hidden


def _pull_back_in_range(dtype, pullback, d_logits):
    """`pullback(d_logits)` without underflow in float16, where it rounds `d_logits` to `dtype`.

    With a vocabulary of 50,000 most entries of p - target are below the smallest number of float16.
    So d_logits is multiplied by a power of two before the products, and the result is divided.
    """
    if dtype != jnp.float16:
        return pullback(d_logits)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(d_logits)))
    exponent = jnp.minimum(15 - exponent, 100)  # the largest is then below 2^15, which is finite
    factor = jnp.ldexp(jnp.ones((), d_logits.dtype), exponent)
    return jax.tree.map(lambda d: d / factor, pullback(d_logits * factor))


def _logits(dtype, hidden, head: _Head):
    """hidden head^T + bias in float32 or better, with operands rounded to `dtype`."""
    wide = jnp.promote_types(dtype, jnp.float32)
    logits = einsum("btd,vd->btv", hidden, head.kernel, dtype=wide, operand_dtype=dtype)
    return with_logical_constraint(add_bias(logits, head.bias), "batch", "length", "vocab")


def _chunk_loss(options: _Options, chunk: _Tokens, logits) -> tuple[Array, TokenSums]:
    """(the loss, all sums) of a chunk, from logits before the softcap."""
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    sums = _cross_entropy(
        logits, chunk.labels, chunk.weights, options.label_smoothing, options.z_loss
    )
    return sums.loss, sums


def _zero_sums(tokens: _Tokens) -> TokenSums:
    zero = jnp.zeros((), jnp.promote_types(tokens.hidden.dtype, jnp.float32))
    return TokenSums(zero, zero, zero)


def chunk_length(B: int, T: int, V: int, chunk: int | None = None) -> int:
    """The number of positions whose logits are in memory at a time: at most `chunk`, if given.

    Chunks have equal sizes, because the padding of the last chunk is wasted work.
    """
    V //= math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in mesh_axes("vocab", V))
    # Each chunk reads and writes the float32 gradient of the head: 8 V D bytes for 6 V D FLOPs a
    # token. With 1,024 tokens the products take longer than that on every chip of `models.cost`.
    chunk = chunk or max(1, max(1024, 2**24 // V) // B)
    count = -(-T // min(T, chunk))
    return -(-T // count)


def cut_length(x: Array, size: int) -> Array:
    """`[B, T, ...]` as `[chunks, B, size, ...]`; the last chunk ends in zeros.

    So a batch that a mesh splits along B stays on its devices.
    """
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1)


def _chunks(options: _Options, tokens: _Tokens, head: _Head) -> _Tokens:
    """Arrays `[chunks, B, chunk, ...]`, cut along T."""
    B, T = tokens.labels.shape
    size = chunk_length(B, T, head.kernel.shape[0], options.chunk)

    # The gradient of the head is a product with all hidden states, also those of weight 0, which
    # may be NaN. 0 * NaN is NaN.
    hidden = jnp.where(tokens.weights[..., None] == 0, 0, tokens.hidden)
    return jax.tree.map(lambda x: cut_length(x, size), tokens._replace(hidden=hidden))
