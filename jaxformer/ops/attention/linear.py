"""Attention in linear time: a product of feature maps instead of the exponential, so that keys can be summed once.

The sums run over the keys that the mask shows: all, those before the query (`causal`), or those of its segment; other masks
are refused. Linformer is here too: it sums keys and values down to a few rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from jaxformer.masks import Mask, as_mask, rules
from jaxformer.ops.attention import attention
from jaxformer.ops.attention.call import check_shapes, mask_refusal
from jaxformer.ops.einsum import cpu_barrier, einsum, in_float32
from jaxformer.ops.positions import fill_padding

FeatureMap = Callable[[Array], Array]  # [B, T, N, H] -> [B, T, N, M], token by token or along the sequence
FeatureMaps = FeatureMap | tuple[FeatureMap, FeatureMap]


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + 1 above zero, e^x below. Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@jax.named_scope("linear_attention")
def linear_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"], *, mask: Mask | None = None,
    feature_map: FeatureMaps = elu_plus_one, eps: float = 1e-6, chunk: int = 128,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """phi(q) sum phi(k) v^T / (phi(q) sum phi(k) + eps). Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 4-9.

    `feature_map` is phi, or a pair for query and key; hidden tokens are zero when it is called. `mask` is `full()` or
    `causal()`, with or without `lengths` and `segments` (runs of one id; a row in which an id comes again after another id is
    NaN). Otherwise NotImplementedError. With `causal` or `segments` the sums are carried along, `chunk` tokens at a time:
    memory is linear in T. Sums are float32 or wider. A query that sees no key yields zeros.
    """
    check_shapes("linear_attention", query, key, value)
    view = visibility(mask, query.shape[1], key.shape[1], "linear_attention")
    query, key, value, dtype = _widen(query, key, value)
    of_query, of_key = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    features = of_query(_hide(query, view.queries)), of_key(_hide(key, view.keys))
    numerator, denominator = _weighted_sums(*features, value, view, chunk)
    return _divide(numerator, denominator + eps).astype(dtype)


@jax.named_scope("efficient_attention")
def efficient_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"], *, mask: Mask | None = None,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """softmax(q over features) / sqrt(H) @ softmax(k over length)^T v. Shen et al. 2021, arXiv:1812.01243, sec. 3.2.

    Masks and errors as in `linear_attention`. Under `causal()` a softmax over the length would see the future: it is exp(k)
    with the denominator of `linear_attention`, at least 1e-3 (the form of the linear-attention-transformer package). There
    a key above 60 counts as 60: float32 holds the sums of a million such tokens.
    """
    check_shapes("efficient_attention", query, key, value)
    view = visibility(mask, query.shape[1], key.shape[1], "efficient_attention")
    query, key, value, dtype = _widen(query, key, value)
    query = jax.nn.softmax(_hide(query, view.queries), axis=-1) * query.shape[-1] ** -0.5
    key = jnp.exp(jnp.minimum(_hide(key, view.keys), 60)) if view.causal else _softmax_over_keys(key, view)
    numerator, denominator = _weighted_sums(query, key, value, view, chunk)
    if view.causal:
        numerator = _divide(numerator, jnp.maximum(denominator, 1e-3))
    return numerator.astype(dtype)


@struct.dataclass
class LinearState:
    """Sums over the tokens so far, of a fixed size: phi(k) v^T, `[B, K, M, Hv]`, and phi(k), `[B, K, M]`."""

    products: Any
    sums: Any


@jax.named_scope("linear_attention_step")
def linear_attention_step(
    state: LinearState, query: Float[Array, "B T N H"], key: Float[Array, "B T K H"], value: Float[Array, "B T K Hv"], *,
    feature_map: FeatureMaps = elu_plus_one, eps: float = 1e-6, chunk: int = 128,
) -> tuple[LinearState, Float[Array, "B T N Hv"]]:  # fmt: skip
    """T further tokens of a causal sequence: state += phi(k) v^T, out = phi(q) state. Katharopoulos et al. 2020, eqs. 16-20."""
    check_shapes("linear_attention_step", query, key, value)
    query, key, value, dtype = _widen(query, key, value)
    of_query, of_key = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    view = View(True, 0, jnp.ones((1, 1), int), jnp.ones((1, 1), int), None)
    numerator, denominator, state = _by_chunks(of_query(query), of_key(key), value, view, chunk, state)
    return state, _divide(numerator, denominator + eps).astype(dtype)


class View(NamedTuple):
    """What a mask shows: a query sees the keys with its own number, if causal those before it. 0 is padding."""

    causal: bool
    first: Any  # the absolute position of the first query
    q_ids: Int[Array, "#B T"]
    kv_ids: Int[Array, "#B S"]
    ids: Int[Array, "#B L"] | None  # segments by absolute position

    queries = property(lambda self: self.q_ids != 0)
    keys = property(lambda self: self.kv_ids != 0)

    def runs(self, positions):
        """`[B|1, n]`: the number of each position's segment in its row, from the left. Padding does not end a segment."""
        if self.ids is None:
            return jnp.zeros((1, len(positions)), jnp.int32)
        ids = fill_padding(rules.lookup(self.ids, positions[None]))
        return jnp.cumsum(ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1), axis=1)

    def refuse_recurring(self, x):
        """x with NaN in rows where an id comes again after another id: sums have dropped its keys. Traced ids cannot raise."""
        if self.ids is None:
            return x
        changes = lambda ids: jnp.sum(ids[:, 1:] != ids[:, :-1], axis=1)
        ids = fill_padding(self.ids)
        recurs = (changes(ids) > changes(jnp.sort(ids, axis=1))).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(recurs, jnp.nan, x)

    def refuse_several(self, x):
        """x with NaN in rows of several segments. Traced ids cannot raise."""
        least = jnp.min(self.kv_ids, axis=1, where=self.keys, initial=jnp.iinfo(self.kv_ids.dtype).max)
        largest = jnp.max(self.kv_ids, axis=1, initial=0)  # a row may have no tokens
        return jnp.where((largest > least).reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)


def visibility(mask: Any, T: int, S: int, function: str, takes_causal: bool = True) -> View:
    """Reads `full() / causal() & lengths(...) & segments(ids)`. NotImplementedError, which names `function`, for the rest."""
    mask = as_mask(mask, function)
    causal, ids, padding = False, None, []
    for part in mask.conjuncts():
        if part.rule is rules.causal and takes_causal:
            causal = True
        elif part.rule is rules.lengths:
            padding.append(part)
        elif part.rule is rules.segments and ids is None and (part.offset is None or len(part.arrays) == 1):
            ids = part.arrays[0]
            padding.append(part)
        elif part.rule is not rules.full:
            takes = "full(), causal()" if takes_causal else "full()"
            raise mask_refusal(function, mask, part, f"{takes}, lengths(...) and one segments(ids)")
    q_ids, kv_ids = rules.segment_ids(padding, *mask.positions(T, S))
    return View(causal, mask.first(T, S), q_ids, kv_ids, ids)


def _hide(x, shown):
    """Zeros where `shown`, along x's first axes, is False. A product would let NaN and infinity through."""
    return jnp.where(shown.reshape(*shown.shape, *(1,) * (x.ndim - shown.ndim)), x, 0)


def _weighted_sums(query, key, value, view: View, chunk: int):
    """sum_j (q_i . k_j) v_j and sum_j (q_i . k_j) over the keys j that query i sees."""
    query, key, value = _hide(query, view.queries), _hide(key, view.keys), _hide(value, view.keys)
    if view.causal or view.ids is not None:
        numerator, denominator, _ = _by_chunks(query, key, value, view, chunk)
        return view.refuse_recurring(numerator), denominator
    (B, T, N, M), K = query.shape, key.shape[2]
    numerator, denominator = _apply(query.reshape(B, T, K, N // K, M), _sum_keys(key, value))
    return numerator.reshape(B, T, N, value.shape[-1]), denominator.reshape(B, T, N)


def _by_chunks(query, key, value, view: View, chunk: int, state=None):
    """Numerator, denominator and the state after the last key, on one axis of positions, padded to whole chunks."""
    if not isinstance(view.first, int):
        problem = "linear attention under causal() or segments(...): the query offset must be a number, not traced"
        raise NotImplementedError(f"{problem}; linear_attention_step continues a sequence at any position")
    (B, T, N, M), (S, K) = query.shape, key.shape[1:3]
    # queries sit at positions first ... first + T - 1 and keys at 0 ... S - 1; position -shift comes first in the arrays
    shift = max(-view.first, 0)
    start = view.first + shift
    length = max(start + T, shift + S, 1)
    chunk = min(chunk, length)
    length = -(-length // chunk) * chunk
    place = lambda x, at: jnp.pad(x, [(0, 0), (at, length - at - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    query = place(query.reshape(B, T, K, N // K, M), start)
    key, value, runs = place(key, shift), place(value, shift), view.runs(jnp.arange(length) - shift)
    if state is None:
        state = LinearState(jnp.zeros((B, K, M, value.shape[-1]), value.dtype), jnp.zeros((B, K, M), value.dtype))
    within = np.tri(chunk, dtype=bool) if view.causal else np.ones((chunk, chunk), bool)
    numerator, denominator, state = _scan(query, key, value, runs, state, within, chunk)
    if not view.causal:  # add the keys after the chunk
        after = _scan(query, key, value, runs, jax.tree.map(jnp.zeros_like, state), None, chunk)
        numerator, denominator = numerator + after[0], denominator + after[1]
    cut = lambda x: x.reshape(B, length, N, *x.shape[5:])[:, start : start + T]
    return cut(numerator), cut(denominator), state


def _scan(query, key, value, runs, state, within, chunk):
    """One pass over the chunks. Each query meets the keys of its run that are in `state`, and of its chunk by `within`.

    `within` is the mask `[chunk, chunk]` inside a chunk; with None the pass goes backwards and leaves the chunk out.
    """
    reverse = within is None
    edge = 0 if reverse else -1
    split = lambda x: x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def body(carry, inputs):
        state, run = carry
        query, key, value, runs = inputs
        numerator, denominator = _apply(_hide(query, runs == run[:, None]), state)
        if within is not None:
            shown = within[None] & (runs[:, :, None] == runs[:, None, :])
            weights = einsum("bikgm,bjkm->bkgij", query, key) * shown[:, None, None]
            numerator = numerator + einsum("bkgij,bjkv->bikgv", weights, value)
            denominator = denominator + jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 1)
        last = runs[:, edge]
        kept = jax.tree.map(lambda x: _hide(x, last == run), state)
        added = _sum_keys(_hide(key, runs == last[:, None]), value)
        return (jax.tree.map(jnp.add, kept, added), last), (numerator, denominator)

    start = state, runs[:, -1 if reverse else 0]
    (state, _), outputs = jax.lax.scan(body, start, tuple(map(split, (query, key, value, runs))), reverse=reverse)
    return *(x.swapaxes(0, 1) for x in outputs), state


def _sum_keys(key, value) -> LinearState:
    return LinearState(einsum("bskm,bskv->bkmv", key, value), jnp.sum(key, axis=1))


def _apply(query, state: LinearState):
    return einsum("btkgm,bkmv->btkgv", query, state.products), einsum("btkgm,bkm->btkg", query, state.sums)


def _divide(numerator, denominator):
    """numerator / denominator, and 0 where nothing was summed."""
    return numerator / jnp.where(denominator == 0, 1, denominator)[..., None]


def _softmax_over_keys(key, view: View):
    """exp(k) / sum exp(k) over the visible keys of a segment, feature by feature."""
    B, S = key.shape[:2]
    runs, segments = jnp.broadcast_to(view.runs(jnp.arange(S)), (B, S)), 1 if view.ids is None else S
    shown = view.keys[..., None, None]
    each = lambda reduce, x: jax.vmap(lambda x, run: reduce(x, run, num_segments=segments)[run])(x, runs)
    top = each(jax.ops.segment_max, jax.lax.stop_gradient(jnp.where(shown, key, -jnp.inf)))
    weights = jnp.where(shown, jnp.exp(jnp.where(shown, key - top, 0)), 0)
    total = each(jax.ops.segment_sum, weights)
    return weights / jnp.where(total == 0, 1, total)


def _widen(*arrays):
    """The arrays in float32, or float64 if one is, and the dtype of the answer."""
    dtype = jnp.result_type(jnp.float32, *(x.dtype for x in arrays))
    return *(x.astype(dtype) for x in arrays), arrays[-1].dtype


@jax.named_scope("favor_attention")
def favor_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"],
    projection: Float[Array, "M H"], *, mask: Mask | None = None, stabiliser: float | Float[Array, "#B 1 #K 1"] | None = None,
    eps: float = 1e-6, chunk: int = 128,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """`linear_attention` with `favor_features`: `attention` with an error of O(1/sqrt(M)). Choromanski et al. 2021, eq. 5-7.

    `projection` is data: see `orthogonal_projection`. The key's `stabiliser` is by default the largest exponent of its row and
    head. It cancels, except in `eps` and where float32 underflows. So under `causal()`, where it would show later tokens, it
    is 0.0, which will do while |k|^2 / sqrt(H) stays below 100. The variance grows with exp(|q|^2 / sqrt(H)).
    """
    check_shapes("favor_attention", query, key, value)
    if stabiliser is None:
        view = visibility(mask, query.shape[1], key.shape[1], "favor_attention")
        shown = view.keys[..., None, None]
        products = jax.lax.stop_gradient(_project(in_float32(key), projection))
        top = jnp.max(products, axis=(1, 3), keepdims=True, where=shown, initial=-jnp.inf)
        stabiliser = 0.0 if view.causal else jnp.where(jnp.isfinite(top), top, 0)
    of_query = partial(favor_features, projection=projection, eps=eps)
    maps = of_query, partial(of_query, stabiliser=stabiliser)
    return linear_attention(query, key, value, mask=mask, feature_map=maps, eps=0.0, chunk=chunk)


def favor_features(
    x: Float[Array, "B T N H"], projection: Float[Array, "M H"], *,
    stabiliser: float | Float[Array, "#B #T #N 1"] | None = None, eps: float = 1e-6,
) -> Float[Array, "B T N M"]:  # fmt: skip
    """(exp(P z - |z|^2 / 2 - stabiliser) + eps) / sqrt(M), z = x / H^(1/4): Choromanski et al. 2021, lemma 1.

    phi(q) . phi(k) has the mean exp(q . k / sqrt(H)), up to the factors exp(-stabiliser), which cancel in attention: by
    default each token's largest exponent, which will do for queries; keys share one. eps is that of the authors' code.
    """
    products = _project(x, projection)
    if stabiliser is None:
        stabiliser = jax.lax.stop_gradient(jnp.max(products, axis=-1, keepdims=True))
    norm = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / (2 * x.shape[-1] ** 0.5)
    return projection.shape[0] ** -0.5 * (jnp.exp(products - norm - stabiliser) + eps)


def favor_relu_features(x: Float[Array, "B T N H"], projection: Float[Array, "M H"], eps=1e-3) -> Float[Array, "B T N M"]:
    """max(P z, 0) + eps, z = x / H^(1/4): for the ReLU kernel of Choromanski et al. 2021, sec. 4, by `linear_attention`."""
    return jax.nn.relu(_project(x, projection)) + eps


def _project(x, projection):
    return einsum("btnh,mh->btnm", x * x.shape[-1] ** -0.25, projection)


def orthogonal_projection(key: Array, features: int, width: int, dtype: Any = jnp.float32) -> Float[Array, "features width"]:
    """Gaussian rows that are orthogonal in blocks of `width`, unbiased: Choromanski et al. 2021, sec. 2.4 and 3."""
    directions, lengths = jax.random.split(key)
    # Haar distributed, unlike those of public Performers, whose error stops falling near 4e-3
    blocks = jax.random.orthogonal(directions, width, (-(-features // width),), dtype)
    rows = blocks.reshape(-1, width)[:features]
    return rows * jnp.linalg.norm(jax.random.normal(lengths, rows.shape, dtype), axis=1, keepdims=True)


@jax.named_scope("linformer_attention")
def linformer_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"],
    key_projection: Float[Array, "L R"] | Float[Array, "K L R"],
    value_projection: Float[Array, "L R"] | Float[Array, "K L R"] | None = None, *, mask: Mask | None = None,
    scale: float | None = None, dropout_rate: float = 0.0, dropout_key: Array | None = None,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """softmax(q (E^T k)^T * scale) F^T v. Wang et al. 2020, arXiv:2006.04768, eq. 7.

    E is `key_projection` and F `value_projection` (None: F = E), from L >= S positions to R rows, of which a sequence takes
    the first S; for all heads or for each. `mask` may be `full()`, `lengths(...)` and `segments(ids)` with one segment a row;
    a row with several is NaN, because traced ids cannot be refused. Padding yields zeros. NotImplementedError otherwise.
    """
    view = visibility(mask, query.shape[1], key.shape[1], "linformer_attention", takes_causal=False)
    value_projection = key_projection if value_projection is None else value_projection
    key, value = _reduce(key, key_projection, view.keys), _reduce(value, value_projection, view.keys)
    shown = view.queries[:, :, None, None]
    query = jnp.where(shown, query, 0)
    out: Any = attention(query, key, value, scale=scale, dropout_rate=dropout_rate, dropout_key=dropout_key)
    return view.refuse_several(jnp.where(shown, out, 0))


def _reduce(x, projection, shown):
    """E^T x, `[B, S, K, H]` to `[B, R, K, H]`, without the positions that are padding."""
    S = x.shape[1]
    x = jnp.where(shown[:, :, None, None], x, 0)
    if projection.ndim == 2:
        reduced = jnp.moveaxis(einsum("bskh,sr->bkhr", x, projection[:S]), -1, 1)
    else:
        reduced = jnp.moveaxis(einsum("bskh,ksr->kbhr", x, projection[:, :S]), (0, -1), (2, 1))
    # XLA:CPU would fold the transposition into attention's 16-bit products, and then has no kernel for them
    return cpu_barrier(reduced)
