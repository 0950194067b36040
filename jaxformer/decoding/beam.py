"""Beam search, plain and diverse: the likeliest texts rather than a likely next token. One loop over tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.tree_util import Partial
from jaxtyping import Float, Int

from jaxformer.decoding.filters import Filter, History
from jaxformer.errors import ConfigError, check_whole

LARGEST_PENALTY = 1e15  # the square of a score's logarithm has to fit in float32
Advance = Callable[[Array, Any], tuple[Array, Any]]  # (tokens [R], cache) -> (logits [R, V], cache): one token more a row


@struct.dataclass
class Beams:
    """How to search. The score of a text of n new tokens (a stop token counts) is its log-probability / n^length_penalty.

    A function `(log-probabilities, lengths) -> scores` in place of the number is used as it is (`gnmt`); it rises with the
    log-probability and, in the length, only rises or only falls. Texts are compared by the logarithms of their scores, so a
    number, and that of `gnmt`, may have any size. A text also ends where filters leave it no token.

    `early_stopping`, once there are `beams` finished texts:
    True ends the search; False goes on while the best open text, at its present length, scores above the worst finished one;
    "never" goes on while it could at any length up to the limit, which is exact. With `groups` the beams are divided into
    groups of equal size, each a search of its own; a token costs `diversity` (in nats) for each beam of earlier groups that
    took it at the same step. Vijayakumar et al. 2016, arXiv:1610.02424, section 4 (Hamming diversity).
    """

    beams: int = struct.field(pytree_node=False, default=4)  # texts that are followed at a time
    n_best: int = struct.field(pytree_node=False, default=1)  # texts that are returned
    length_penalty: Any = 1.0  # exponent of the length, or a function such as gnmt(0.6)
    early_stopping: bool | str = struct.field(pytree_node=False, default=False)  # True, False or "never"
    groups: int = struct.field(pytree_node=False, default=1)  # of beams, each a search of its own
    diversity: Any = 0.0  # nats that a token costs which an earlier group took

    def __post_init__(self):
        for name in ("beams", "n_best", "groups"):
            check_whole(name, getattr(self, name))
        if not self.n_best <= self.beams:
            raise ConfigError(f"beams={self.beams}, n_best={self.n_best}: 1 <= n_best <= beams is needed")
        if self.beams % self.groups:
            raise ConfigError(f"groups={self.groups}: must divide beams={self.beams}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":  # 1 equals True, and is not True
            raise ConfigError(f'early_stopping={self.early_stopping!r}: must be True, False or "never"')
        if isinstance(self.diversity, int | float) and not math.isfinite(self.diversity):
            raise ConfigError(f"diversity={self.diversity}: must be a finite number")
        if isinstance(self.length_penalty, int | float) and not abs(self.length_penalty) < LARGEST_PENALTY:
            raise ConfigError(f"length_penalty={self.length_penalty}: must be a finite number, or a function such as gnmt(0.6)")
        if callable(self.length_penalty) and not isinstance(self.length_penalty, Partial):  # a pytree, as jit needs
            object.__setattr__(self, "length_penalty", Partial(self.length_penalty))

    def score(self, total: Array, length: Array) -> Array:
        """The score of texts of `length` new tokens whose log-probabilities are `total`."""
        if callable(self.length_penalty):
            return self.length_penalty(total, length)
        return total / length**self.length_penalty

    def log_divisor(self, length: Any, log: Callable = jnp.log) -> Any:
        """The logarithm of what a log-probability is divided by to give the score; None: a function of yours decides."""
        penalty: Any = self.length_penalty
        if not callable(penalty):
            return penalty * log(length)
        if getattr(penalty, "func", None) is _gnmt:
            return getattr(penalty, "args")[0] * log((5 + length) / 6)  # noqa: B009 (a function has no `args`)
        return None

    def rank(self, total: Array, length: Array) -> Array:
        """Numbers in the order of the scores, which may themselves be beyond float32; -inf where `total` is."""
        logs = self.log_divisor(length)
        if logs is None:
            least, most = jnp.finfo(jnp.float32).min, jnp.finfo(jnp.float32).max
            scores = jnp.nan_to_num(self.score(total, length), nan=least, posinf=most, neginf=least)
            return jnp.where(total == -jnp.inf, -jnp.inf, scores)
        # the logarithm x of the score's size may have both signs. It becomes a positive number that rises with it, and keeps
        # its digits: x + sqrt(x^2 + 1)
        x = jnp.log(jnp.abs(total)) - logs
        root = jnp.sqrt(x * x + 1)
        size = jnp.where(x < 0, 1 / (root - x), root + x)
        return jnp.where(total == 0, 0.0, jnp.sign(total) * size)


def gnmt(alpha) -> Callable[[Array, Array], Array]:
    """A length penalty: log-probability / ((5 + n) / 6)^alpha. Wu et al. 2016, arXiv:1609.08144, eq. 14."""
    if not abs(alpha) < LARGEST_PENALTY:
        raise ConfigError(f"gnmt({alpha}): must be a finite number")
    return Partial(_gnmt, alpha)


def _gnmt(alpha, total, length):
    return total / ((5 + length) / 6) ** alpha


@struct.dataclass
class BeamOutput:
    """The best finished texts of each row, best first; no text is there twice."""

    tokens: Any  # [B, n_best, S] prompt and new tokens, a stop token with them
    length: Any  # [B, n_best] tokens in use
    total: Any  # [B, n_best] log-probability of the new tokens; -inf: there are fewer texts than asked for
    score: Any  # [B, n_best]


@struct.dataclass
class Finished:
    """Finished texts of each group, best first: `[B, G, M]`."""

    tokens: Any  # [B, G, M, S]
    length: Any
    total: Any  # -inf: there is no such text
    rank: Any  # `Beams.rank`

    def joined(self, *others: "Finished") -> "Finished":
        """These texts and others, side by side along M."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-parts[0].ndim + 2), self, *others)

    def best(self, count: int) -> "Finished":
        """The best `count` of the texts of each group, best first."""
        order = jnp.lexsort((-self.total, -self.rank), axis=-1)[..., :count]
        return jax.tree.map(lambda x: _take(x, order), self)

    def keep(self, which: Array) -> "Finished":
        """The same, without the texts of which this is False."""
        return replace(
            self, total=jnp.where(which, self.total, -jnp.inf), rank=jnp.where(which, self.rank, -jnp.inf)
        )  # fmt: skip


class Candidates(NamedTuple):
    """Texts of one token more, best first: `[B, ...]` in each field."""

    score: Array  # log-probabilities; -inf: there is no such text
    parent: Array  # the beam of its group that it continues
    token: Array


@struct.dataclass
class Search:
    """What the loop over tokens carries: G groups of M beams."""

    total: Any  # log-probabilities of open texts [B, G, M], best first
    history: History  # of open texts, B x G x M rows
    finished: Finished
    active: Any  # [B, G] whether finished texts may still change
    row: Any  # [B x G x M] row of the cache that holds an open text without its last token
    cache: Any


def beam_search(
    advance: Advance, logits: Float[Array, "B V"], cache: Any, history: History, max_tokens: Any, beams: Beams,
    stop_tokens: Int[Array, " n"], filters: Sequence[Filter] = (),
) -> BeamOutput:  # fmt: skip
    """The `n_best` likeliest continuations of each row that beam search finds; scores as `Beams` says. To be called under jit.

    `logits` follow the texts in `history`; all leaves of `cache` have its B rows first. What is the same for all beams of a
    row (an encoder's output) costs less inside `advance`, whose rows are `beams` neighbours for each of B, than in `cache`.
    A text ends with one of `stop_tokens`, after `max_tokens` (a number or `[B]`, at least 1), where S slots are full, or where
    filters leave no token. Two texts that differ in their stop token alone are one text, the likelier of them.
    Filters change log-probabilities, in this order; what they add counts in the score.
    """
    (B, S), G, M = history.tokens.shape, beams.groups, beams.beams // beams.groups
    repeat = partial(jax.tree.map, lambda x: jnp.repeat(x, beams.beams, axis=0))
    total = jnp.full((B, G, M), -jnp.inf)
    texts = repeat(history)
    finished = Finished(texts.tokens.reshape(B, G, M, S), texts.length.reshape(B, G, M), total, total)
    total = total.at[:, :, 0].set(0.0)  # M copies of a prompt would become M copies of each text
    row = jnp.arange(B * beams.beams, dtype=jnp.int32)
    start = Search(total, texts, finished, jnp.ones((B, G), bool), row, repeat(cache))
    limit = jnp.minimum(max_tokens, S - history.prompt)[:, None, None]
    choose = partial(_choose, beams=beams, limit=limit, stop_tokens=stop_tokens, filters=filters)

    def step(search: Search) -> Search:
        cache = jax.tree.map(lambda x: jnp.take(x, search.row, axis=0, mode="clip"), search.cache)
        last = jnp.take_along_axis(search.history.tokens, search.history.length[:, None] - 1, axis=1, mode="clip")
        logits, cache = advance(last[:, 0], cache)
        return choose(replace(search, cache=cache), logits)

    found = lax.while_loop(lambda search: search.active.any(), step, choose(start, repeat(logits))).finished
    flat = jax.tree.map(lambda x: x.reshape(B, beams.beams, *x.shape[3:]), found)
    if G > 1:
        flat = _without_copies(flat.best(beams.beams), stop_tokens)
    best = flat.best(beams.n_best)
    n = jnp.maximum(best.length - history.prompt[:, None], 1).astype(jnp.float32)
    score = jnp.where(best.total == -jnp.inf, -jnp.inf, beams.score(best.total, n))
    return BeamOutput(best.tokens, best.length, best.total, score)


def _without_copies(texts: Finished, stop_tokens: Array) -> Finished:
    """Texts `[B, M]`, best first, of which groups may have found the same: each once, whatever its stop token is."""
    _, M, S = texts.tokens.shape
    last = jnp.take_along_axis(texts.tokens, texts.length[..., None] - 1, axis=2)[..., 0]
    visible = texts.length - jnp.isin(last, stop_tokens)
    shown = jnp.where(jnp.arange(S)[None, None] < visible[..., None], texts.tokens, -1)

    def is_copy(m: Array) -> Array:  # of a text before the m-th
        own = lax.dynamic_slice_in_dim(shown, m, 1, axis=1)
        return ((shown == own).all(axis=2) & (jnp.arange(M)[None] < m)).any(axis=1)

    return texts.keep(~lax.map(is_copy, jnp.arange(M)).T)


def _take(x: Array, index: Array) -> Array:
    """x[b, ..., index[b, ..., m]] along the last axis of `index`; x may have one axis more."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim)), axis=index.ndim - 1)


def _choose(search: Search, logits, beams: Beams, limit, stop_tokens, filters) -> Search:
    """One token more in each open text; texts that end with it go to the finished ones."""
    (B, G, M), V = search.total.shape, logits.shape[-1]
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    for filter in filters:
        scores = filter(scores, search.history)
    live = search.active[..., None] & (search.total > -jnp.inf)  # logits of other rows may be NaN: their cache may be full
    stuck = live & (scores.max(axis=-1).reshape(B, G, M) == -jnp.inf)  # filters left no token
    totals = jnp.where(live[..., None], scores.reshape(B, G, M, V) + search.total[..., None], -jnp.inf)
    best, rest = _candidates(totals, beams.diversity, stop_tokens)

    length = search.history.length.reshape(B, G, M) + 1  # the same in all beams of a row
    n = (length - search.history.prompt.reshape(B, G, M)).astype(jnp.float32)
    tokens = search.history.tokens.reshape(B, G, M, -1)
    end = lax.broadcasted_iota(jnp.int32, tokens.shape, 3) == length[..., None] - 1

    def append(texts):
        return jnp.where(end, texts.token[..., None], _take(tokens, texts.parent))

    ended = (best.score > -jnp.inf) & (jnp.isin(best.token, stop_tokens) | (n >= limit))
    new = Finished(append(best), length, best.score, beams.rank(best.score, n)).keep(ended)
    left = Finished(tokens, length - 1, search.total, beams.rank(search.total, jnp.maximum(n - 1, 1))).keep(stuck)
    finished = search.finished.joined(new, left).best(M)

    total = jnp.where(n >= limit, -jnp.inf, rest.score)
    attainable = beams.rank(total, n)
    if beams.early_stopping == "never":  # a score that is monotone in the length is largest at one of the ends
        attainable = jnp.maximum(attainable, beams.rank(total, jnp.broadcast_to(limit, n.shape).astype(jnp.float32)))
    worst = finished.rank[..., -1]  # -inf while there are fewer than M
    active = search.active & (total[..., 0] > -jnp.inf) & (attainable[..., 0] > worst)
    if beams.early_stopping is True:
        active &= worst == -jnp.inf
    row = rest.parent + jnp.arange(0, B * G * M, M, dtype=jnp.int32).reshape(B, G, 1)
    history = History(append(rest).reshape(search.history.tokens.shape), length.reshape(-1), search.history.prompt)
    return Search(total, history, finished, active, row.reshape(-1), search.cache)


def _candidates(totals: Float[Array, "B G M V"], diversity, stop_tokens) -> tuple[Candidates, Candidates]:
    """(the M best texts of each group, the M best that do not end with a stop token), `[B, G, M]` each."""
    B, G, M, V = totals.shape
    chosen, used = [], jnp.zeros((B, 1, V))  # how many beams of earlier groups took each token
    for group in range(G):
        scores = totals[:, group] - diversity * used if group else totals[:, 0]
        found = _top(scores, min(V, M + stop_tokens.shape[0]), stop_tokens)
        open_scores = jnp.where(jnp.isin(found.token, stop_tokens), -jnp.inf, found.score)
        score, index = lax.top_k(open_scores, M)
        rest = Candidates(score, _take(found.parent, index), _take(found.token, index))
        chosen.append((Candidates(*(x[:, :M] for x in found)), rest))
        used = used.at[jnp.arange(B)[:, None], 0, rest.token].add(jnp.isfinite(score).astype(used.dtype))
    return jax.tree.map(lambda *groups: jnp.stack(groups, axis=1), *chosen)


def _top(totals: Float[Array, "B M V"], k: int, stop_tokens: Int[Array, " n"]) -> Candidates:
    """The k best tokens of each beam, all M x k in order: with n stop tokens and k = M + n, at least M go on.

    Of the stop tokens of a beam the best one counts: the others end the same text.
    """
    B, M, _ = totals.shape
    score, token = lax.top_k(totals, k)
    stops = jnp.isin(token, stop_tokens)
    score = jnp.where(stops & (jnp.cumsum(stops, axis=2) > 1), -jnp.inf, score)
    score, token = score.reshape(B, M * k), token.reshape(B, M * k)
    score, index = lax.top_k(score, M * k)
    return Candidates(score, index // k, _take(token, index))
