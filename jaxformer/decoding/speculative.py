"""Speculative decoding: a cheap draft proposes tokens, and one step of the model checks them all.

Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from jaxformer import masks, models
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.generate import (
    DecodeState,
    Settings,
    append,
    as_key,
    as_lists,
    check_numbers,
    new_tokens,
    read_rows,
    rows_for,
    sampling_settings,
)
from jaxformer.decoding.model import Prompts, Tokens, check_rotations, open_model
from jaxformer.decoding.sampling import Sampling, draw, probabilities
from jaxformer.decoding.steps import decode_step
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.sharding import on_host


class Speculation(NamedTuple):
    """Continuations, and how well the draft foresaw them."""

    tokens: list[list[int]]  # as `generate` returns them
    proposed: list[int]  # for each prompt, tokens of the draft that the model judged
    accepted: list[int]  # how many of these it took


class Proposal(NamedTuple):
    """What a draft proposes."""

    tokens: Array  # [B, A]
    probabilities: Array | None = None  # [B, A, V], from which each was drawn; None: there was no choice
    cache: Any = None  # of the draft


@struct.dataclass
class Draft:
    """A model of the same vocabulary as draft; `dtype` None: that of its parameters."""

    config: Any = struct.field(pytree_node=False)
    params: Any
    dtype: Any = struct.field(pytree_node=False, default=None)

    def propose(self, ahead: int, history: History, cache: Any, most, keys, settings: Settings) -> Proposal:
        """Tokens drawn one after another, of which row b needs `most[b]`."""
        config = _causal(self.config)

        def step(carry, i):
            history, cache = carry
            # after a proposal that was taken whole, two tokens are new to the cache; otherwise one of two is read again
            two = jnp.take_along_axis(history.tokens, history.length[:, None] + jnp.array([[-2, -1]]), axis=1)
            cache, new = replace(cache, lengths=history.length - 2), jnp.where(i < most, 1, 0)
            logits, cache = decode_step(config, self.params, two, cache, lengths=2 * new, dtype=self.dtype)
            logits = settings.filtered(logits[:, 1], history)
            token = draw(logits, _fold(keys, i), settings.temperature)
            return (history.extend(token[:, None], new), cache), (token, probabilities(logits, settings.temperature))

        (_, cache), (tokens, q) = lax.scan(step, (history, cache), jnp.arange(ahead))
        return Proposal(tokens.T, q.swapaxes(0, 1), cache)


@struct.dataclass
class Lookup:
    """No model: what followed where the last tokens of a row, at most n, stood before. Saxena 2023, prompt lookup decoding.

    The longest match counts, of equals the latest; beyond the end of the row it repeats. Without a match, the row's beginning.
    """

    n: int = struct.field(pytree_node=False, default=3)

    def __post_init__(self):
        check_whole("Lookup.n", self.n)

    def propose(self, ahead: int, history: History, cache: Any, most, keys, settings: Settings) -> Proposal:
        """The tokens after the match, `ahead` of them."""
        tokens, length = history.tokens, history.length[:, None]
        ends = jnp.arange(tokens.shape[1])[None]  # slots behind a match
        same, matched = ends < length, jnp.zeros(tokens.shape, jnp.int32)
        for i in range(self.n):
            last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - i, 0), axis=1)
            same &= (ends > i) & (jnp.roll(tokens, i + 1, axis=1) == last)
            matched += same
        best = jnp.argmax(jnp.where(matched > 0, matched * tokens.shape[1] + ends, 0), axis=1, keepdims=True)
        return Proposal(jnp.take_along_axis(tokens, best + jnp.arange(ahead)[None] % (length - best), axis=1))


def speculate(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Prompts, max_tokens: int | Tokens, *,
    draft: Draft | Lookup, ahead: int = 4, sources: Sequence[Sequence[int]] | None = None, sampling: Sampling = Sampling(),
    filters: Sequence[Filter] = (), key: Array | None = None, stop_tokens: Tokens = (), rows: int = 16, dtype=None,
) -> Speculation:  # fmt: skip
    """Continuations with the distribution of `generate`, in fewer steps of the model; at temperature 0 the same tokens.

    A step checks `ahead` tokens of the draft, whose logits pass the same filters. `rows` prompts are continued at a time,
    until the last of them is done. Arguments and errors are those of `generate`; ConfigError also for a draft of another
    vocabulary, NotImplementedError for a mixer that cannot take tokens back and for texts that would outgrow the rotations of
    their cache (LongRoPE, a dynamic NTK).
    """
    _check(config, draft, ahead)
    check_whole("speculate: rows", rows)
    prompts, stop_tokens = as_lists(prompts), as_lists(stop_tokens)
    opened = [open_model(config, params, prompts, max_tokens, sources, dtype, ahead=ahead)]
    if isinstance(draft, Draft):
        given = sources if isinstance(draft.config, EncoderDecoder) else None
        opened += [open_model(draft.config, draft.params, prompts, max_tokens, given, draft.dtype, ahead=ahead)]
        draft = replace(draft, params=opened[1].params, dtype=opened[1].dtype)
    ahead = min(ahead, *(each.cache_length - 1 for each in opened))  # more tokens than a row has slots are never taken
    for each in opened:
        check_rotations("speculate", each.config, prompts, max_tokens)
    settings = jax.device_put(sampling_settings(opened[0], filters, sampling, stop_tokens))
    key, rows, most = as_key(key), rows_for(rows, prompts), np.broadcast_to(max_tokens, len(prompts))
    limits = [len(prompt) + int(count) for prompt, count in zip(prompts, most, strict=True)]
    found, main = Speculation([], [], []), opened[0]
    for first in range(0, len(prompts), rows):
        ends = np.array(limits[first : first + rows], np.int32)
        index = np.arange(first, first + rows, dtype=np.int32)
        numbers = jax.device_put((np.pad(ends, (0, rows - len(ends))), index))  # no text ends at 0: such rows are empty
        batch = read_rows(opened, prompts, sources, index, rows)
        state, _, counts = _run(main.config, main.dtype, ahead, main.params, draft, *batch, *numbers, key, settings)
        history, broken, counts = on_host((state.history, state.broken, counts))
        for row in range(len(ends)):
            check_numbers(broken[row], first + row)
            found.tokens.append(new_tokens(history, row, stop_tokens))
            found.proposed.append(int(counts[row, 0]))
            found.accepted.append(int(counts[row, 1]))
    return found


def _check(config, draft, ahead: int) -> None:
    """Raises what `speculate` says."""
    own, size = (models.last_stack(each).vocab_size for each in (config, getattr(draft, "config", config)))
    if size != own:
        raise ConfigError(f"speculate: a draft of {size} tokens for a model of {own}: not one vocabulary")
    if ahead < 1 or getattr(draft, "n", 1) < 1:
        raise ConfigError(f"speculate: ahead={ahead}, {draft}: must be at least 1")


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="caches")
def _run(config, dtype, ahead: int, params, draft, logits, history, caches, ends, index, key, settings):
    """(the texts when all are done, the cache of the draft, [B, 2] how many tokens were proposed and accepted)."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    state = append(DecodeState(history, caches[0], ends, ends == 0, keys, ends < 0), logits, settings)
    start = state, caches[-1] if len(caches) > 1 else None, jnp.zeros((len(ends), 2), jnp.int32)
    step = partial(_round, _causal(config), dtype, ahead, params, draft, settings)
    return lax.while_loop(lambda carry: ~carry[0].done.all(), step, start)


def _round(config, dtype, ahead: int, params, draft, settings: Settings, carry):
    """In each row that is not done, the tokens of the draft that are accepted, and one more."""
    state, cache, counts = carry
    history, going = state.history, jnp.where(state.done, 0, 1)
    most = going * jnp.minimum(state.end - history.length - 1, ahead)  # so that no token beyond the limit is read
    keys = _fold(state.keys, history.length - history.prompt)
    proposal = draft.propose(ahead, history, cache, most, keys, settings)
    tokens, slots = history.extend(proposal.tokens, most).tokens, history.length[:, None] + jnp.arange(ahead + 1)[None]
    last = jnp.take_along_axis(tokens, slots - 1, axis=1, mode="clip")
    cache = replace(state.cache, lengths=history.length - 1)  # what was rejected is taken back
    logits, cache = decode_step(config, params, last, cache, lengths=going + most, dtype=dtype)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, ahead + 1, axis=0), replace(history, tokens=tokens))
    each = replace(repeated, length=slots.reshape(-1))
    p = probabilities(settings.filtered(logits.reshape(len(slots) * (ahead + 1), -1), each), settings.temperature)
    p = p.reshape(logits.shape)
    new, taken = accept(p, proposal, most, keys, settings.temperature)
    mass = jnp.take_along_axis(p.sum(axis=2), taken[:, None], axis=1)[:, 0]  # 0: filters left no token behind those taken
    broken = state.broken | ~state.done & jnp.isnan(mass)
    count = taken + (mass > 0)
    stop = jnp.isin(new, settings.stop_tokens) & (jnp.arange(ahead + 1)[None] < count[:, None])
    stopped = stop.any(axis=1)
    history = history.extend(new, going * jnp.where(stopped, jnp.argmax(stop, axis=1) + 1, count))
    done = state.done | stopped | (history.length >= state.end) | ~(mass > 0)
    state = replace(state, history=history, cache=cache, done=done, broken=broken)
    return state, proposal.cache, counts + jnp.stack([most, taken], axis=1)


def accept(
    p: Float[Array, "B T V"], proposal: Proposal, most: Int[Array, " B"], keys: Array, temperature: Any
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """(new tokens, how many of them were proposed): these, then one more; the rest of a row is its copy.

    A token d that was drawn from q is taken with probability min(1, p(d) / q(d)), up to `most` and to the first that is not;
    the one more is drawn from max(p - q, 0), or from p where none was rejected: so that all follow p.
    """
    A, q = proposal.tokens.shape[1], proposal.probabilities
    q = jax.nn.one_hot(proposal.tokens, p.shape[2]) if q is None else q

    def of_token(x):
        return jnp.take_along_axis(x, proposal.tokens[..., None], axis=2)[..., 0]

    level = jax.vmap(lambda key: jax.random.uniform(key, (A,)))(_fold(keys, A))
    drawn = of_token(q) > 0  # a draft whose filters left no token drew none
    accepted = drawn & (level * of_token(q) < of_token(p[:, :A])) & (jnp.arange(A)[None] < most[:, None])
    taken = jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    p, q = (jnp.take_along_axis(x, taken[:, None, None], axis=1, mode="clip")[:, 0] for x in (p, q))
    rest = jnp.where((taken < most)[:, None], jnp.maximum(p - q, 0), p)
    rest = jnp.where(rest.sum(axis=1, keepdims=True) > 0, rest, p)  # p = q but for rounding
    more = draw(jnp.log(rest), _fold(keys, A + 1), temperature)[:, None]
    return jnp.where(jnp.arange(A + 1)[None] < taken[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, 1))), more), taken


def _causal(config: Any) -> Any:
    """The config, with masks under which no token sees a later one, as if each were read alone. A prefix shows later ones."""
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=_causal(config.decoder))
    return replace(config, masks=tuple(m if masks.is_causal(m) else m & masks.causal() for m in config.masks))


def _fold(keys: Array, numbers) -> Array:
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(numbers, keys.shape))
