"""Attention in linear time: a product of feature maps instead of the exponential, so that keys can be summed once.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)

The sums run over the keys that the mask shows: all of them, those before the query (`causal`), those of the query's own
segment. Every function of this file takes these masks and refuses others by name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxformer.masks import Mask, as_mask, rules
from jaxformer.ops.einsum import einsum

FeatureMap = Callable[[Array], Array]  # [B, T, N, H] -> [B, T, N, M], token by token or along the sequence


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + 1 above zero, e^x below. Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def relu_plus_epsilon(x: Float[Array, "..."], eps: float = 1e-3) -> Float[Array, "..."]:
    """max(x, 0) + eps: never all zero, so every query has something to divide by."""
    return jax.nn.relu(x) + eps


def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = elu_plus_one,
    eps: float = 1e-6,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:
    """phi(q) sum phi(k) v^T / (phi(q) sum phi(k) + eps). Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 4-9.

    K divides N as in `attention`, and there is no scale. `feature_map` is a function of `[B, T, N, H]`, or one for the
    query and one for the key; tokens that take no part are zero when their map is called, so padding cannot leak through
    maps that look along the sequence. Sums are float32 (float64 for float64 inputs). A query that sees no key yields zeros.

    `mask` is `full()` or `causal()`, with or without `lengths` and `segments`; segments are contiguous runs of one id,
    padding (id 0) between them aside; a row where an id comes again behind another one is NaN. With `causal` or `segments`
    the sums are carried along, `chunk` tokens at a time: memory is linear in T, in the backward pass too.

    Raises NotImplementedError for other masks, ValueError for shapes that do not fit.
    """
    _check(query, key, value)
    view = visibility(mask, query.shape[1], key.shape[1], "linear_attention")
    query, key, value, dtype = _widen(query, key, value)
    of_query, of_key = _pair(feature_map)
    features = of_query(_hide(query, view.queries)), of_key(_hide(key, view.keys))
    numerator, denominator = weighted_sums(*features, value, view, chunk)
    return _divide(numerator, denominator + eps).astype(dtype)


def efficient_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:
    """softmax(q over features) / sqrt(H) @ softmax(k over length)^T v. Shen et al. 2021, arXiv:1812.01243, sec. 3.2.

    Under `causal()`, where a softmax over the length would see the future, exp(k) with the denominator of
    `linear_attention`, held above 1e-3 (the form of the linear-attention-transformer package). Masks, shapes and
    errors as in `linear_attention`.
    """
    _check(query, key, value)
    view = visibility(mask, query.shape[1], key.shape[1], "efficient_attention")
    query, key, value, dtype = _widen(query, key, value)
    query = jax.nn.softmax(_hide(query, view.queries), axis=-1) * query.shape[-1] ** -0.5
    key = jnp.exp(_hide(key, view.keys)) if view.causal else _softmax_over_keys(key, view)
    numerator, denominator = weighted_sums(query, key, value, view, chunk)
    if view.causal:
        numerator = _divide(numerator, jnp.maximum(denominator, 1e-3))
    return numerator.astype(dtype)


def favor_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    projection: Float[Array, "M H"],
    *,
    mask: Mask | None = None,
    stabiliser: float | Float[Array, "#B 1 #K 1"] | None = None,
    eps: float = 1e-6,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:
    """`attention` estimated by FAVOR+, with an error of O(1/sqrt(M)): Choromanski et al. 2021, arXiv:2009.14794, eq. 5-7.

    `linear_attention` with `favor_features` of `projection`, which is data: see `orthogonal_projection` and `redraw`. The
    key's `stabiliser` is by default the largest exponent of its row and head, which later tokens have a part in; it
    cancels, but for `eps`. So a causal model is causal to the last bit with eps = 0 or a stabiliser of its own (0.0 will
    do while |k|^2 / sqrt(H) stays below 100), and needs one to decode by `linear_attention_step`.

    The variance grows with exp(|q|^2 / sqrt(H)): large queries and keys need many features. For the ReLU kernel, take
    `linear_attention(..., feature_map=partial(favor_relu_features, projection=projection), eps=0)`.
    """
    _check(query, key, value)
    if stabiliser is None:
        shown = visibility(mask, query.shape[1], key.shape[1], "favor_attention").keys
        products = jax.lax.stop_gradient(_project(_widen(key)[0], projection))
        shown = True if shown is None else shown[..., None, None]
        top = jnp.max(products, axis=(1, 3), keepdims=True, where=shown, initial=-jnp.inf)
        stabiliser = jnp.where(jnp.isfinite(top), top, 0)
    of_query = partial(favor_features, projection=projection, eps=eps)
    maps = of_query, partial(of_query, stabiliser=stabiliser)
    return linear_attention(query, key, value, mask=mask, feature_map=maps, eps=0.0, chunk=chunk)


def favor_features(
    x: Float[Array, "B T N H"],
    projection: Float[Array, "M H"],
    *,
    stabiliser: float | Float[Array, "#B #T #N 1"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, "B T N M"]:
    """(exp(P z - |z|^2 / 2 - stabiliser) + eps) / sqrt(M), z = x / H^(1/4): Choromanski et al. 2021, lemma 1.

    phi(q) . phi(k) has the mean exp(q . k / sqrt(H)), up to the factors exp(-stabiliser), which cancel in attention: for
    queries one a token (the default, the token's largest exponent), for keys one that all tokens share. eps is the 1e-6 of
    the authors' code.
    """
    products = _project(x, projection)
    if stabiliser is None:
        stabiliser = jax.lax.stop_gradient(jnp.max(products, axis=-1, keepdims=True))
    norm = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / (2 * x.shape[-1] ** 0.5)
    return projection.shape[0] ** -0.5 * (jnp.exp(products - norm - stabiliser) + eps)


def favor_relu_features(
    x: Float[Array, "B T N H"], projection: Float[Array, "M H"], eps: float = 1e-3
) -> Float[Array, "B T N M"]:
    """max(P z, 0) + eps, z = x / H^(1/4): the ReLU kernel of Choromanski et al. 2021, sec. 4; eps as in their code."""
    return relu_plus_epsilon(_project(x, projection), eps)


def _project(x, projection):
    return einsum("btnh,mh->btnm", x * x.shape[-1] ** -0.25, projection)


def orthogonal_projection(
    key: Array, features: int, width: int, *, norms: str = "chi", dtype: Any = jnp.float32
) -> Float[Array, "features width"]:
    """Gaussian rows that are orthogonal in blocks of `width`: Choromanski et al. 2021, sec. 2.4 and 3.

    Row norms are those of independent Gaussian rows ("chi", unbiased) or all sqrt(width) ("constant", biased, with less
    variance). The directions are Haar distributed: a QR decomposition is, only after the signs of R's diagonal are put
    right, as `jax.random.orthogonal` does; the public Performers leave that out, and their error stops falling near 4e-3.
    """
    if norms not in ("chi", "constant"):
        raise ValueError(f"orthogonal_projection: norms are 'chi' or 'constant'; got {norms!r}")
    directions, lengths = jax.random.split(key)
    blocks = jax.random.orthogonal(directions, width, (-(-features // width),), dtype)
    rows = blocks.reshape(-1, width)[:features]
    if norms == "constant":
        return rows * width**0.5
    return rows * jnp.linalg.norm(jax.random.normal(lengths, rows.shape, dtype), axis=1, keepdims=True)


def redraw(key: Array, step: int | Int[Array, ""], every: int) -> Array:
    """The key of the projection in use at `step`: another one every `every` steps, and the same after a restart.

    orthogonal_projection(redraw(key, step, 1000), M, H). Choromanski et al. 2021, sec. 4.2, redraw while training.
    """
    if every < 1:
        raise ValueError(f"redraw: every {every} steps; it takes at least 1")
    return jax.random.fold_in(key, step // every)


@struct.dataclass
class LinearState:
    """What a prefix leaves behind: sum phi(k) v^T, `[B, K, M, Hv]`, and sum phi(k), `[B, K, M]`. Its size is fixed."""

    products: Any
    sums: Any


def linear_attention_state(
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = elu_plus_one,
) -> LinearState:
    """The state after these keys, for `linear_attention_step`. With segments, each row's last one; padding is skipped."""
    S = key.shape[1]
    view = visibility(mask, S, S, "linear_attention_state")
    key, value, _ = _widen(key, value)
    features = _hide(_pair(feature_map)[1](_hide(key, view.keys)), view.keys)
    if view.ids is not None and S:
        runs = _runs(_at(view.ids, jnp.arange(S)))
        features = _but_nan(_hide(features, runs == runs[:, -1:]), _recurs(view.ids))
    return _sum_keys(features, _hide(value, view.keys))


def linear_attention_step(
    state: LinearState,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    *,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = elu_plus_one,
    eps: float = 1e-6,
    chunk: int = 128,
) -> tuple[LinearState, Float[Array, "B T N Hv"]]:
    """T further tokens (one, when decoding) of a causal sequence: the new state and their outputs.

    state += phi(k) v^T, then out = phi(q) state: Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 16-20.
    """
    _check(query, key, value)
    query, key, value, dtype = _widen(query, key, value)
    of_query, of_key = _pair(feature_map)
    view = View(True, 0, None, None, None)
    numerator, denominator, state = _by_chunks(of_query(query), of_key(key), value, view, chunk, state)
    return state, _divide(numerator, denominator + eps).astype(dtype)


class View(NamedTuple):
    """What a mask of this file shows: which queries see and which keys are seen at all (None: all), and the segments."""

    causal: bool
    first: Any  # the absolute position of the first query
    queries: Bool[Array, "#B T"] | None
    keys: Bool[Array, "#B S"] | None
    ids: Int[Array, "#B L"] | None  # segments by absolute position


def visibility(mask: Any, T: int, S: int, who: str) -> View:
    """Reads `full() / causal() & lengths(...) & segments(ids)`; NotImplementedError in the name of `who` for the rest."""
    mask = as_mask(mask, who)
    first = mask.first(T, S)
    q, kv = first + jnp.arange(T), jnp.arange(S)
    causal, queries, keys, ids = False, None, None, None
    for part in mask.conjuncts():
        if part.rule is rules.causal:
            causal = True
        elif part.rule is rules.lengths:
            before = lambda at, end: None if end is None else at[None] < end[:, None]
            queries, keys = _both(queries, before(q, part.arrays[0])), _both(keys, before(kv, part.arrays[1]))
        elif part.rule is rules.segments and ids is None and (part.offset is None or part.arrays[0] is part.arrays[1]):
            ids = part.arrays[0]
            queries, keys = _both(queries, _at(ids, q) != 0), _both(keys, _at(ids, kv) != 0)
        elif part.rule is not rules.full:
            raise NotImplementedError(
                f"{who}: sums of keys cannot keep {part}, part of the mask {mask}; they keep full(), causal(), "
                "lengths(...) and one segments(ids). attention(implementation='blockwise') takes any mask"
            )
    return View(causal, first, queries, keys, ids)


def weighted_sums(
    query: Float[Array, "B T N M"],
    key: Float[Array, "B S K M"],
    value: Float[Array, "B S K Hv"],
    view: View,
    chunk: int,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """sum_j (q_i . k_j) v_j and sum_j (q_i . k_j) over the keys j that query i sees, for features of query and key."""
    query, key, value = _hide(query, view.queries), _hide(key, view.keys), _hide(value, view.keys)
    if view.causal or view.ids is not None:
        numerator, denominator, _ = _by_chunks(query, key, value, view, chunk)
        return numerator if view.ids is None else _but_nan(numerator, _recurs(view.ids)), denominator
    (B, T, N, M), K = query.shape, key.shape[2]
    numerator, denominator = _look(query.reshape(B, T, K, N // K, M), _sum_keys(key, value))
    return numerator.reshape(B, T, N, value.shape[-1]), denominator.reshape(B, T, N)


def _by_chunks(query, key, value, view, chunk, state=None):
    """Numerator, denominator and the state after the last key: on one axis of positions, padded to whole chunks."""
    if not isinstance(view.first, int | np.integer):
        raise NotImplementedError(
            "linear attention under causal() or segments(...): the query offset must be a number, not traced; "
            "linear_attention_step continues a sequence at any position"
        )
    (B, T, N, M), (S, K) = query.shape, key.shape[1:3]
    # queries sit at positions first ... first + T - 1 and keys at 0 ... S - 1; position -shift comes first in the arrays
    shift = max(-view.first, 0)
    start = view.first + shift
    length = max(start + T, shift + S, 1)
    chunk = min(chunk, length)
    length = -(-length // chunk) * chunk
    query = _place(query.reshape(B, T, K, N // K, M), start, length)
    key, value = _place(key, shift, length), _place(value, shift, length)
    runs = jnp.zeros((1, length), jnp.int32) if view.ids is None else _runs(_at(view.ids, jnp.arange(length) - shift))
    if state is None:
        state = LinearState(jnp.zeros((B, K, M, value.shape[-1]), value.dtype), jnp.zeros((B, K, M), value.dtype))
    within = np.tri(chunk, dtype=bool) if view.causal else np.ones((chunk, chunk), bool)
    numerator, denominator, state = _scan(query, key, value, runs, state, within, chunk)
    if not view.causal:  # and what comes after the chunk
        after = _scan(query, key, value, runs, jax.tree.map(jnp.zeros_like, state), None, chunk)
        numerator, denominator = numerator + after[0], denominator + after[1]
    cut = lambda x: x.reshape(B, length, N, *x.shape[5:])[:, start : start + T]
    return cut(numerator), cut(denominator), state


def _scan(query, key, value, runs, state, within, chunk):
    """One pass over the chunks. Each query meets the keys of its run that are in `state`, and of its chunk by `within`.

    `within` is the mask `[chunk, chunk]` inside a chunk; with None the pass goes backwards and leaves the chunk itself out.
    The body is recomputed in the backward pass, which keeps one state a chunk: fewer numbers than the chunk's own keys
    and values have once `chunk` reaches the number of features.
    """
    reverse = within is None
    edge = 0 if reverse else -1
    split = lambda x: x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def body(carry, inputs):
        state, run = carry
        query, key, value, runs = inputs
        numerator, denominator = _look(_hide(query, runs == run[:, None]), state)
        if within is not None:
            shown = within[None] & (runs[:, :, None] == runs[:, None, :])
            weights = einsum("bikgm,bjkm->bkgij", query, key) * shown[:, None, None]
            numerator = numerator + einsum("bkgij,bjkv->bikgv", weights, value)
            denominator = denominator + jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 1)
        last = runs[:, edge]
        kept = jax.tree.map(lambda x: _hide(x, last == run), state)
        added = _sum_keys(_hide(key, runs == last[:, None]), value)
        return (jax.tree.map(jnp.add, kept, added), last), (numerator, denominator)

    start = (state, runs[:, 0] if not reverse else runs[:, -1])
    inputs = tuple(map(split, (query, key, value, runs)))
    (state, _), outputs = jax.lax.scan(body, start, inputs, reverse=reverse)
    numerator, denominator = (x.swapaxes(0, 1) for x in outputs)
    return numerator, denominator, state


def _sum_keys(key, value):
    return LinearState(einsum("bskm,bskv->bkmv", key, value), jnp.sum(key, axis=1))


def _look(query, state):
    return einsum("btkgm,bkmv->btkgv", query, state.products), einsum("btkgm,bkm->btkg", query, state.sums)


def _divide(numerator, denominator):
    """numerator / denominator, and 0 where nothing was summed."""
    return numerator / jnp.where(denominator == 0, 1, denominator)[..., None]


def _softmax_over_keys(key, view):
    """exp(k) / sum exp(k) over the keys of a segment that are seen, feature by feature."""
    B, S = key.shape[:2]
    runs = jnp.zeros((B, S), jnp.int32) if view.ids is None else _runs(_at(view.ids, jnp.arange(S)))
    runs, segments = jnp.broadcast_to(runs, (B, S)), 1 if view.ids is None else S
    shown = True if view.keys is None else view.keys[..., None, None]
    each = lambda reduce, x: jax.vmap(lambda x, run: reduce(x, run, num_segments=segments)[run])(x, runs)
    top = each(jax.ops.segment_max, jax.lax.stop_gradient(jnp.where(shown, key, -jnp.inf)))
    weights = jnp.where(shown, jnp.exp(jnp.where(shown, key - top, 0)), 0)
    total = each(jax.ops.segment_sum, weights)
    return weights / jnp.where(total == 0, 1, total)


def _at(ids, positions):
    """ids `[B, L]` at positions `[n]`; positions beyond the array are padding, 0."""
    return rules.lookup(ids, positions[None])


def _runs(ids):
    """The number of a token's segment in its row, counted from the left. Padding does not end a segment."""
    ids = _without_padding(ids)
    return jnp.cumsum(ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1), axis=1)


def _without_padding(ids):
    """Padding has the id of the last token before it."""
    at = jnp.arange(ids.shape[1])[None]
    return jnp.take_along_axis(ids, jax.lax.cummax(jnp.where(ids != 0, at, 0), axis=1), axis=1)


def _recurs(ids):
    """[B]: whether an id of a row comes again behind another one: sums have forgotten its keys by then."""
    changes = lambda ids: jnp.sum(ids[:, 1:] != ids[:, :-1], axis=1)
    ids = _without_padding(ids)
    return changes(ids) > changes(jnp.sort(ids, axis=1))


def _but_nan(x, rows):
    """x, NaN in these rows of the batch, which cannot be refused when ids are traced."""
    return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)


def packed(ids: Int[Array, "B L"]) -> Bool[Array, " B"]:
    """Whether a row of ids has several segments that are not padding, 0."""
    smallest = jnp.min(jnp.where(ids == 0, jnp.iinfo(ids.dtype).max, ids), axis=1)
    return jnp.max(ids, axis=1) > smallest


def _hide(x, shown):
    """Zeros where `shown`, over x's first axes, is False: not a product, which would let NaN and infinity through."""
    return x if shown is None else jnp.where(shown.reshape(*shown.shape, *(1,) * (x.ndim - shown.ndim)), x, 0)


def _pair(feature_map):
    maps = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    if len(maps) != 2 or not all(map(callable, maps)):
        raise ValueError(f"linear attention: feature_map is a function, or a pair of them; got {feature_map!r}")
    return maps


def _place(x, start, length):
    return jnp.pad(x, [(0, 0), (start, length - start - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _both(a, b):
    return b if a is None else a if b is None else a & b


def _widen(*arrays):
    """The arrays in float32, or float64 if one is, and the dtype that the answer should have."""
    dtype = jnp.result_type(jnp.float32, *(x.dtype for x in arrays))
    return *(x.astype(dtype) for x in arrays), arrays[-1].dtype


def _check(query, key, value):
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"linear attention takes [B, T, N, H], [B, S, K, H], [B, S, K, Hv]; got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"linear attention: B, S, K of key and value, B and H of query and key must agree; got {shapes}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"linear attention: {key.shape[2]} key/value heads do not divide {query.shape[2]} query heads")
