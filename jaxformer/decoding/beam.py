"""Beam search, plain and diverse: it looks for the likeliest text, not for a likely next token.

`search.search` calls `beam_search`, which is one loop over tokens under jit.
"""

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
# (tokens [R], cache) -> (logits [R, V], cache): reads one more token in each of R rows
Advance = Callable[[Array, Any], tuple[Array, Any]]


@struct.dataclass
class Beams:
    """How to search: score = log-probability / n^length_penalty, for n new tokens.

    A stop token counts as a new token. A text also ends where filters leave it no token.

    `length_penalty` may also be a function `(log-probabilities, lengths) -> scores`, such as
    `gnmt`. The function must rise with the log-probability. In the length it must be monotone:
    only rise or only fall. Texts are compared by the logarithms of their scores, so a penalty
    that is a number, or that of `gnmt`, may have any size.

    `early_stopping` says when a search with `beams` finished texts ends:

    - True: at once.
    - False: when the best open text, at its present length, scores no more than the worst
      finished one.
    - "never": when no open text could score more than the worst finished one, at any length up
      to the limit. This is exact.

    `groups` divides the beams into groups of equal size. Each group is a search of its own. For a
    group, a token costs `diversity` nats for each beam of the earlier groups that took the same
    token at this step. Vijayakumar et al. 2016, arXiv:1610.02424, section 4 (Hamming diversity).

    Raises ConfigError for a value out of range.
    """

    beams: int = struct.field(pytree_node=False, default=4)  # texts that are followed at a time
    n_best: int = struct.field(pytree_node=False, default=1)  # texts that are returned
    length_penalty: Any = 1.0  # exponent of the length, or a function such as gnmt(0.6)
    # True, False or "never"
    early_stopping: bool | str = struct.field(pytree_node=False, default=False)
    groups: int = struct.field(pytree_node=False, default=1)  # of beams, each a search of its own
    diversity: Any = 0.0  # cost in nats of a token that an earlier group took

    def __post_init__(self):
        for name in ("beams", "n_best", "groups"):
            check_whole(name, getattr(self, name))
        if not self.n_best <= self.beams:
            raise ConfigError(
                f"beams={self.beams}, n_best={self.n_best}: 1 <= n_best <= beams is needed"
            )
        if self.beams % self.groups:
            raise ConfigError(f"groups={self.groups}: must divide beams={self.beams}")
        # 1 equals True but is not True, so the type is checked
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ConfigError(
                f'early_stopping={self.early_stopping!r}: must be True, False or "never"'
            )
        if isinstance(self.diversity, int | float) and not math.isfinite(self.diversity):
            raise ConfigError(f"diversity={self.diversity}: must be a finite number")
        if (
            isinstance(self.length_penalty, int | float)
            and not abs(self.length_penalty) < LARGEST_PENALTY
        ):
            raise ConfigError(
                f"length_penalty={self.length_penalty}: must be a finite number, "
                "or a function such as gnmt(0.6)"
            )
        if callable(self.length_penalty) and not isinstance(self.length_penalty, Partial):
            # jit needs a pytree
            object.__setattr__(self, "length_penalty", Partial(self.length_penalty))

    def score(self, total: Array, length: Array) -> Array:
        """The score of texts of `length` new tokens whose log-probabilities are `total`."""
        if callable(self.length_penalty):
            return self.length_penalty(total, length)
        return total / length**self.length_penalty

    def log_divisor(self, length: Any, log: Callable = jnp.log) -> Any:
        """log(divisor), where score = log-probability / divisor. None for a user's own penalty."""
        penalty: Any = self.length_penalty
        if not callable(penalty):
            return penalty * log(length)
        if getattr(penalty, "func", None) is _gnmt:
            # getattr, because a type checker knows no `args` of a function
            return getattr(penalty, "args")[0] * log((5 + length) / 6)  # noqa: B009
        return None

    def rank(self, total: Array, length: Array) -> Array:
        """Numbers in the order of the scores, which may exceed float32; -inf where `total` is."""
        logs = self.log_divisor(length)
        if logs is None:
            least = jnp.finfo(jnp.float32).min
            largest = jnp.finfo(jnp.float32).max
            scores = self.score(total, length)
            scores = jnp.nan_to_num(scores, nan=least, posinf=largest, neginf=least)
            return jnp.where(total == -jnp.inf, -jnp.inf, scores)
        # x = log |score| may have either sign. x + sqrt(x^2 + 1) is positive, rises with x, and
        # keeps its digits
        x = jnp.log(jnp.abs(total)) - logs
        root = jnp.sqrt(x * x + 1)
        size = jnp.where(x < 0, 1 / (root - x), root + x)
        return jnp.where(total == 0, 0.0, jnp.sign(total) * size)


def gnmt(alpha) -> Callable[[Array, Array], Array]:
    """The penalty log-probability / ((5 + n) / 6)^alpha. Wu et al. 2016, arXiv:1609.08144, eq. 14.

    Raises ConfigError for an alpha that is not finite.
    """
    if not abs(alpha) < LARGEST_PENALTY:
        raise ConfigError(f"gnmt({alpha}): must be a finite number")
    return Partial(_gnmt, alpha)


def _gnmt(alpha, total, length):
    return total / ((5 + length) / 6) ** alpha


@struct.dataclass
class BeamOutput:
    """The best finished texts of each row, best first; no text is listed twice."""

    tokens: Any  # [B, n_best, S] prompt and new tokens, including a stop token
    length: Any  # [B, n_best] tokens in use
    total: Any  # [B, n_best] log-probability of the new tokens; -inf: there is no such text
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
        return jax.tree.map(
            lambda *parts: jnp.concatenate(parts, axis=-parts[0].ndim + 2), self, *others
        )

    def best(self, count: int) -> "Finished":
        """The best `count` of the texts of each group, best first."""
        order = jnp.lexsort((-self.total, -self.rank), axis=-1)[..., :count]
        return jax.tree.map(lambda x: _take(x, order), self)

    def keep(self, mask: Array) -> "Finished":
        """The texts where `mask` is True; the others become "no text"."""
        return replace(
            self,
            total=jnp.where(mask, self.total, -jnp.inf),
            rank=jnp.where(mask, self.rank, -jnp.inf),
        )


class Candidates(NamedTuple):
    """Texts that are one token longer, best first: `[B, ...]` in each field."""

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
    cache_row: Any  # [B x G x M] the row that holds an open text without its last token
    cache: Any


def beam_search(
    advance: Advance,
    logits: Float[Array, "B V"],
    cache: Any,
    history: History,
    max_tokens: Any,
    beams: Beams,
    stop_tokens: Int[Array, " n"],
    filters: Sequence[Filter] = (),
) -> BeamOutput:
    """The `n_best` likeliest continuations of each row that beam search finds. Call it under jit.

    `logits` follow the texts in `history`. Every leaf of `cache` has the B rows as its first axis.
    `advance` sees B * beams rows; the beams of one row are neighbours. Whatever is equal for all
    beams of a row (an encoder's output) costs less inside `advance` than in `cache`.

    A text ends with one of `stop_tokens`, after `max_tokens` (a number or `[B]`, at least 1), where
    S cache positions are full, or where filters leave no token. Two texts that differ only in
    their stop token count as one text: the likelier of the two. `filters` change
    log-probabilities, one after another, and their changes count in the score (see `Beams`).
    """
    B, S = history.tokens.shape
    G = beams.groups
    M = beams.beams // G
    repeat = partial(jax.tree.map, lambda x: jnp.repeat(x, beams.beams, axis=0))
    total = jnp.full((B, G, M), -jnp.inf)
    open_texts = repeat(history)
    finished = Finished(
        open_texts.tokens.reshape(B, G, M, S), open_texts.length.reshape(B, G, M), total, total
    )
    total = total.at[:, :, 0].set(0.0)  # M copies of a prompt would become M copies of each text
    cache_row = jnp.arange(B * beams.beams, dtype=jnp.int32)
    start = Search(total, open_texts, finished, jnp.ones((B, G), bool), cache_row, repeat(cache))
    limit = jnp.minimum(max_tokens, S - history.prompt)[:, None, None]
    choose = partial(_choose, beams=beams, limit=limit, stop_tokens=stop_tokens, filters=filters)

    def step(search: Search) -> Search:
        reorder = partial(jnp.take, indices=search.cache_row, axis=0, mode="clip")
        cache = jax.tree.map(reorder, search.cache)
        last = jnp.take_along_axis(
            search.history.tokens, search.history.length[:, None] - 1, axis=1, mode="clip"
        )
        logits, cache = advance(last[:, 0], cache)
        return choose(replace(search, cache=cache), logits)

    first = choose(start, repeat(logits))
    end = lax.while_loop(lambda search: search.active.any(), step, first)
    # the texts of all groups side by side
    texts = jax.tree.map(lambda x: x.reshape(B, beams.beams, *x.shape[3:]), end.finished)
    if G > 1:
        texts = _without_copies(texts.best(beams.beams), stop_tokens)
    best = texts.best(beams.n_best)
    n = jnp.maximum(best.length - history.prompt[:, None], 1).astype(jnp.float32)
    score = jnp.where(best.total == -jnp.inf, -jnp.inf, beams.score(best.total, n))
    return BeamOutput(best.tokens, best.length, best.total, score)


def _without_copies(texts: Finished, stop_tokens: Array) -> Finished:
    """Each text once, whatever its stop token: several groups may have found it.

    Texts are `[B, M]`, best first.
    """
    _, M, S = texts.tokens.shape
    last = jnp.take_along_axis(texts.tokens, texts.length[..., None] - 1, axis=2)[..., 0]
    visible = texts.length - jnp.isin(last, stop_tokens)
    shown = jnp.where(jnp.arange(S)[None, None] < visible[..., None], texts.tokens, -1)

    def is_copy(m: Array) -> Array:
        """Whether text m equals an earlier text, [B]."""
        own = lax.dynamic_slice_in_dim(shown, m, 1, axis=1)
        return ((shown == own).all(axis=2) & (jnp.arange(M)[None] < m)).any(axis=1)

    return texts.keep(~lax.map(is_copy, jnp.arange(M)).T)


def _take(x: Array, index: Array) -> Array:
    """x[b, ..., index[b, ..., m]] along the last axis of `index`; x may have one more axis."""
    return jnp.take_along_axis(
        x, index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim)), axis=index.ndim - 1
    )


def _choose(search: Search, logits, beams: Beams, limit, stop_tokens, filters) -> Search:
    """Adds one token to each open text; texts that end with it move to the finished ones."""
    B, G, M = search.total.shape
    V = logits.shape[-1]
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    for filter in filters:
        scores = filter(scores, search.history)
    # logits of other rows may be NaN: their cache may be full
    live = search.active[..., None] & (search.total > -jnp.inf)
    stuck = live & (scores.max(axis=-1).reshape(B, G, M) == -jnp.inf)  # filters left no token
    totals = jnp.where(
        live[..., None], scores.reshape(B, G, M, V) + search.total[..., None], -jnp.inf
    )
    best, continuing = _candidates(totals, beams.diversity, stop_tokens)

    length = search.history.length.reshape(B, G, M) + 1  # the same in all beams of a row
    n = (length - search.history.prompt.reshape(B, G, M)).astype(jnp.float32)
    tokens = search.history.tokens.reshape(B, G, M, -1)
    end = lax.broadcasted_iota(jnp.int32, tokens.shape, 3) == length[..., None] - 1

    def append(texts: Candidates) -> Array:
        return jnp.where(end, texts.token[..., None], _take(tokens, texts.parent))

    ended = (best.score > -jnp.inf) & (jnp.isin(best.token, stop_tokens) | (n >= limit))
    new = Finished(append(best), length, best.score, beams.rank(best.score, n)).keep(ended)
    stuck_rank = beams.rank(search.total, jnp.maximum(n - 1, 1))
    stuck_texts = Finished(tokens, length - 1, search.total, stuck_rank).keep(stuck)
    finished = search.finished.joined(new, stuck_texts).best(M)

    total = jnp.where(n >= limit, -jnp.inf, continuing.score)
    attainable = beams.rank(total, n)
    if beams.early_stopping == "never":
        # a score that is monotone in the length is largest at the shortest or the longest length
        longest = jnp.broadcast_to(limit, n.shape).astype(jnp.float32)
        attainable = jnp.maximum(attainable, beams.rank(total, longest))
    worst = finished.rank[..., -1]  # -inf while there are fewer than M
    active = search.active & (total[..., 0] > -jnp.inf) & (attainable[..., 0] > worst)
    if beams.early_stopping is True:
        active &= worst == -jnp.inf
    first_rows = jnp.arange(0, B * G * M, M, dtype=jnp.int32).reshape(B, G, 1)
    cache_row = (continuing.parent + first_rows).reshape(-1)
    new_tokens = append(continuing).reshape(search.history.tokens.shape)
    history = History(new_tokens, length.reshape(-1), search.history.prompt)
    return Search(total, history, finished, active, cache_row, search.cache)


def _candidates(
    totals: Float[Array, "B G M V"], diversity, stop_tokens
) -> tuple[Candidates, Candidates]:
    """(the M best texts, the M best without a stop token) of each group, `[B, G, M]` each."""
    B, G, M, V = totals.shape
    groups = []
    counts = jnp.zeros((B, 1, V))  # number of beams of earlier groups that took each token
    for group in range(G):
        scores = totals[:, group] - diversity * counts if group else totals[:, 0]
        top = _top(scores, min(V, M + stop_tokens.shape[0]), stop_tokens)
        open_scores = jnp.where(jnp.isin(top.token, stop_tokens), -jnp.inf, top.score)
        score, index = lax.top_k(open_scores, M)
        continuing = Candidates(score, _take(top.parent, index), _take(top.token, index))
        groups.append((Candidates(*(x[:, :M] for x in top)), continuing))
        is_text = jnp.isfinite(score).astype(counts.dtype)
        counts = counts.at[jnp.arange(B)[:, None], 0, continuing.token].add(is_text)
    return jax.tree.map(lambda *groups: jnp.stack(groups, axis=1), *groups)


def _top(totals: Float[Array, "B M V"], k: int, stop_tokens: Int[Array, " n"]) -> Candidates:
    """The k best tokens of each of the M beams: M x k texts, best first.

    With n stop tokens and k = M + n, at least M of them do not end. For each beam only the best
    stop token counts, because the others end the same text.
    """
    B, M, _ = totals.shape
    score, token = lax.top_k(totals, k)
    is_stop = jnp.isin(token, stop_tokens)
    score = jnp.where(is_stop & (jnp.cumsum(is_stop, axis=2) > 1), -jnp.inf, score)
    score, index = lax.top_k(score.reshape(B, M * k), M * k)
    return Candidates(score, index // k, _take(token.reshape(B, M * k), index))
