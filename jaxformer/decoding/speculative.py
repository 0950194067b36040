"""Speculative decoding: a cheap draft proposes tokens, and one step of the model checks them.

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
from jaxformer.decoding.arguments import (
    Settings,
    as_key,
    as_lists,
    check_logits,
    rows_for,
    sampling_settings,
)
from jaxformer.decoding.cache import init_cache
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.generate import read_rows
from jaxformer.decoding.model import (
    Model,
    Prompts,
    Tokens,
    check_rotations,
    open_model,
    padded_length,
    reads_sources,
)
from jaxformer.decoding.sampling import Sampling, draw, probabilities
from jaxformer.decoding.state import DecodeState, append, new_tokens
from jaxformer.decoding.steps import decode_step
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.sharding import on_host


class Speculation(NamedTuple):
    """Continuations, and how many tokens of the draft the model accepted."""

    tokens: list[list[int]]  # as `generate` returns them
    proposed: list[int]  # for each prompt, the number of draft tokens that the model checked
    accepted: list[int]  # for each prompt, the number of draft tokens that it accepted


class Proposal(NamedTuple):
    """The tokens that a draft proposes."""

    tokens: Array  # [B, A]
    # [B, A, V], the distribution of each token; None: the draft had no choice
    probabilities: Array | None = None
    cache: Any = None  # of the draft


@struct.dataclass
class Draft:
    """A smaller model of the same vocabulary as draft; `dtype` None: that of its parameters."""

    config: Any = struct.field(pytree_node=False)
    params: Any
    dtype: Any = struct.field(pytree_node=False, default=None)

    def propose(
        self, ahead: int, history: History, cache: Any, proposed, keys, settings: Settings
    ) -> Proposal:
        """Draws `ahead` tokens for each row, one after another; row b needs only `proposed[b]`."""
        config = _causal(self.config)
        temperature = settings.temperature

        def step(carry, i):
            history, cache = carry
            # if all proposed tokens were accepted, two tokens are new to the cache; otherwise one
            # of the two is read again
            two = jnp.take_along_axis(
                history.tokens, history.length[:, None] + jnp.array([[-2, -1]]), axis=1
            )
            cache = replace(cache, lengths=history.length - 2)
            new = jnp.where(i < proposed, 1, 0)
            logits, cache = decode_step(
                config, self.params, two, cache, lengths=2 * new, dtype=self.dtype
            )
            logits = settings.filtered(logits[:, 1], history)
            token = draw(logits, _fold(keys, i), temperature)
            history = history.extend(token[:, None], new)
            return (history, cache), (token, probabilities(logits, temperature))

        (_, cache), (tokens, q) = lax.scan(step, (history, cache), jnp.arange(ahead))
        return Proposal(tokens.T, q.swapaxes(0, 1), cache)


@struct.dataclass
class Lookup:
    """A draft without a model: the tokens that followed an earlier copy of a row's last tokens.

    It looks for the longest earlier match of at most n last tokens. Of equally long matches it
    takes the latest. Tokens beyond the end of the row repeat those after the match. Without a
    match, it proposes the row's beginning. Saxena 2023, prompt lookup decoding.
    """

    n: int = struct.field(pytree_node=False, default=3)

    def __post_init__(self):
        check_whole("Lookup.n", self.n)

    def propose(
        self, ahead: int, history: History, cache: Any, proposed, keys, settings: Settings
    ) -> Proposal:
        """The `ahead` tokens after the match."""
        tokens = history.tokens
        length = history.length[:, None]
        S = tokens.shape[1]
        ends = jnp.arange(S)[None]  # positions after a match
        is_match = ends < length
        match_lengths = jnp.zeros(tokens.shape, jnp.int32)
        for i in range(self.n):
            last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - i, 0), axis=1)
            is_match &= (ends > i) & (jnp.roll(tokens, i + 1, axis=1) == last)
            match_lengths += is_match
        # the longest match has the largest rank; of equally long ones, the latest
        rank = jnp.where(match_lengths > 0, match_lengths * S + ends, 0)
        best = jnp.argmax(rank, axis=1, keepdims=True)
        positions = best + jnp.arange(ahead)[None] % (length - best)
        return Proposal(jnp.take_along_axis(tokens, positions, axis=1))


@struct.dataclass
class Followed:
    """How far a `HiddenDraft` has read the texts."""

    cache: Any  # of the draft
    hidden: Any  # [B, A + 1, D]: the model's hidden states that the draft reads next
    count: Any  # [B]: the number of these states


@struct.dataclass
class HiddenDraft:
    """A draft that reads the model's hidden states, such as a module of multi-token prediction.

    `config` is a model that reads hidden states `[B, T, D]` as `inputs["hidden"]`. At position i it
    reads the state of token i and the token i + 1, and its logits are those of token i + 2. For the
    later tokens of a draft, it reads its own hidden states. The model reads each prompt twice.
    DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; Li et al. 2024, arXiv:2401.15077.
    """

    config: Any = struct.field(pytree_node=False)
    params: Any
    dtype: Any = struct.field(pytree_node=False, default=None)

    def propose(
        self, ahead: int, history: History, cache: Followed, proposed, keys, settings: Settings
    ) -> Proposal:
        """Reads the tokens that the model read last, and draws `ahead` tokens for each row."""
        read = partial(models.apply, _causal(self.config), self.params, dtype=self.dtype)
        before = history.length - 1 - cache.count  # number of positions in the draft's cache
        positions = before[:, None] + 1 + jnp.arange(cache.hidden.shape[1])[None]
        tokens = jnp.take_along_axis(history.tokens, positions, axis=1, mode="clip")
        output = read(
            tokens,
            cache=replace(cache.cache, lengths=before),
            lengths=cache.count,
            inputs={"hidden": cache.hidden},
        )
        last = jnp.maximum(cache.count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(output.hidden, last, axis=1)
        logits = jnp.take_along_axis(output.logits, last, axis=1)[:, 0]
        drawn = []
        distributions = []
        start = history.length - 1
        for i in range(ahead):
            new = jnp.where(i < proposed, 1, 0)
            filtered = settings.filtered(logits, history)
            drawn.append(draw(filtered, _fold(keys, i), settings.temperature))
            distributions.append(probabilities(filtered, settings.temperature))
            history = history.extend(drawn[-1][:, None], new)
            if i + 1 < ahead:
                output = read(
                    drawn[-1][:, None],
                    cache=replace(output.cache, lengths=start + i),
                    lengths=new,
                    inputs={"hidden": hidden},
                )
                hidden, logits = output.hidden, output.logits[:, 0]
        return Proposal(
            jnp.stack(drawn, axis=1),
            jnp.stack(distributions, axis=1),
            replace(cache, cache=output.cache),
        )

    def observe(self, cache: Followed, hidden: Float[Array, "B T D"], count) -> Followed:
        """Keeps the model's hidden states of the last step; the first `count` are of new tokens."""
        return replace(cache, hidden=hidden, count=count)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _follow(model, draft, ahead: int, width: int, params, draft_params, history: History):
    """`Followed` after prompts of at most `width` tokens: all but the last state are read.

    `model` and `draft` are (config, dtype, cache length, cache dtype).
    """
    config, dtype, *_ = model
    draft_config, draft_dtype, cache_length, cache_dtype = draft
    tokens = history.tokens[:, :width]
    hidden = models.encode(_causal(config), params, tokens, dtype=dtype).hidden
    cache = init_cache(draft_config, len(tokens), cache_length, cache_dtype, ahead)
    output = models.encode(
        _causal(draft_config),
        draft_params,
        jnp.roll(tokens, -1, axis=1),
        cache=cache,
        lengths=history.length - 1,
        dtype=draft_dtype,
        inputs={"hidden": hidden},
    )
    last = jnp.take_along_axis(hidden, history.length[:, None, None] - 1, axis=1)
    padded_hidden = jnp.pad(last, ((0, 0), (0, ahead), (0, 0)))
    return Followed(output.cache, padded_hidden, jnp.ones(len(tokens), jnp.int32))


def speculate(
    config: ModelConfig | EncoderDecoder,
    params: Any,
    prompts: Prompts,
    max_tokens: int | Tokens,
    *,
    draft: Draft | Lookup | HiddenDraft,
    ahead: int = 4,
    sources: Sequence[Any] | None = None,
    sampling: Sampling = Sampling(),
    filters: Sequence[Filter] = (),
    key: Array | None = None,
    stop_tokens: Tokens = (),
    rows: int = 16,
    dtype=None,
) -> Speculation:
    """Continuations with the distribution of `generate`, in fewer steps of the model.

    At temperature 0 the tokens are those of `generate`. A step checks `ahead` tokens of the draft,
    whose logits pass the same filters. `rows` prompts are continued at a time, until the last of
    them is done.

    Arguments and errors are those of `generate`. Raises ConfigError also for a draft of another
    vocabulary. Raises NotImplementedError for a mixer that cannot take tokens back, and for texts
    that would outgrow the rotations of their cache (LongRoPE, a dynamic NTK).
    """
    _check(config, draft, ahead)
    check_whole("speculate: rows", rows)
    prompts = as_lists(prompts)
    stop_tokens = as_lists(stop_tokens)
    model = open_model(config, params, prompts, max_tokens, sources, dtype, ahead=ahead)
    opened = [model]
    if isinstance(draft, Draft | HiddenDraft):
        opened.append(_open_draft(draft, prompts, max_tokens, sources, ahead))
        draft = replace(draft, params=opened[1].params, dtype=opened[1].dtype)
    # more tokens than a row can hold are never accepted
    ahead = min(ahead, *(each.cache_length - 1 for each in opened))
    for each in opened:
        check_rotations("speculate", each.config, prompts, max_tokens)
    settings = jax.device_put(sampling_settings(model, filters, sampling, stop_tokens))
    key = as_key(key)
    rows = rows_for(rows, len(prompts))
    counts = np.broadcast_to(max_tokens, len(prompts))
    limits = [len(prompt) + int(count) for prompt, count in zip(prompts, counts, strict=True)]
    result = Speculation([], [], [])
    for first in range(0, len(prompts), rows):
        ends = np.array(limits[first : first + rows], np.int32)
        index = np.arange(first, first + rows, dtype=np.int32)
        # no text ends at 0: a row that does is empty
        numbers = jax.device_put((np.pad(ends, (0, rows - len(ends))), index))
        batch = _read_prompts(draft, ahead, opened, prompts, sources, index, rows)
        arrays = (*batch, *numbers, key, settings)
        state, _, judged = _run(model.config, model.dtype, ahead, model.params, draft, *arrays)
        history, broken, judged = on_host((state.history, state.broken, judged))
        for row in range(len(ends)):
            check_logits(broken[row], first + row)
            result.tokens.append(new_tokens(history, row, stop_tokens))
            result.proposed.append(int(judged[row, 0]))
            result.accepted.append(int(judged[row, 1]))
    return result


def _read_prompts(draft: Any, ahead: int, opened: list[Model], prompts, sources, index, rows: int):
    """(logits, history, caches) of `read_rows`; the cache of a `HiddenDraft` is its `Followed`."""
    if not isinstance(draft, HiddenDraft):
        return read_rows(opened, prompts, sources, index, rows)
    model, _ = opened
    logits, history, caches = read_rows([model], prompts, sources, index, rows)
    longest = max(len(prompts[i]) for i in index if i < len(prompts))
    width = min(padded_length(longest, model.config), history.tokens.shape[1])
    settings = ((each.config, each.dtype, each.cache_length, each.cache_dtype) for each in opened)
    followed = _follow(*settings, ahead, width, model.params, draft.params, history)
    return logits, history, [*caches, followed]


def _open_draft(draft: Draft | HiddenDraft, prompts, max_tokens, sources, ahead: int) -> Model:
    """The draft's model for these prompts, with the sources if it reads any."""
    read_sources = sources if reads_sources(draft.config) else None
    return open_model(
        draft.config, draft.params, prompts, max_tokens, read_sources, draft.dtype, ahead=ahead
    )


def _check(config, draft, ahead: int) -> None:
    """Raises ConfigError for a draft of another vocabulary, and for an `ahead` below 1."""
    size = models.last_stack(config).vocab_size
    draft_size = models.last_stack(getattr(draft, "config", config)).vocab_size
    if draft_size != size:
        raise ConfigError(
            f"speculate: a draft of {draft_size} tokens for a model of {size}: not one vocabulary"
        )
    if isinstance(draft, HiddenDraft) and isinstance(config, EncoderDecoder):
        raise ConfigError(
            "speculate: HiddenDraft reads the hidden states of a decoder alone; "
            "give an encoder-decoder a Draft or a Lookup"
        )
    if ahead < 1 or getattr(draft, "n", 1) < 1:
        raise ConfigError(f"speculate: ahead={ahead}, {draft}: must be at least 1")


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="caches")
def _run(
    config, dtype, ahead: int, params, draft, logits, history, caches, ends, index, key, settings
):
    """(the state when all texts are done, the draft's cache, numbers of tokens [B, 2]).

    The two numbers are those of proposed and of accepted tokens.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    state = append(
        DecodeState(history, caches[0], ends, ends == 0, keys, ends < 0), logits, settings
    )
    draft_cache = caches[-1] if len(caches) > 1 else None
    start = state, draft_cache, jnp.zeros((len(ends), 2), jnp.int32)
    step = partial(_round, _causal(config), dtype, ahead, params, draft, settings)
    return lax.while_loop(lambda carry: ~carry[0].done.all(), step, start)


def _round(config, dtype, ahead: int, params, draft, settings: Settings, carry):
    """Adds the accepted draft tokens and one more token to each row that is not done."""
    state, draft_cache, counts = carry
    history = state.history
    is_open = jnp.where(state.done, 0, 1)
    # no token beyond the end of a row may be read
    proposed = is_open * jnp.minimum(state.end - history.length - 1, ahead)
    keys = _fold(state.keys, history.length - history.prompt)
    proposal = draft.propose(ahead, history, draft_cache, proposed, keys, settings)
    tokens = history.extend(proposal.tokens, proposed).tokens
    lengths = history.length[:, None] + jnp.arange(ahead + 1)[None]  # before each new token
    last = jnp.take_along_axis(tokens, lengths - 1, axis=1, mode="clip")
    cache = replace(state.cache, lengths=history.length - 1)  # takes rejected tokens back
    read = is_open + proposed
    output = models.apply(config, params, last, cache=cache, lengths=read, dtype=dtype)
    logits = output.logits
    repeated = jax.tree.map(
        lambda x: jnp.repeat(x, ahead + 1, axis=0), replace(history, tokens=tokens)
    )
    before_each = replace(repeated, length=lengths.reshape(-1))
    filtered = settings.filtered(logits.reshape(len(lengths) * (ahead + 1), -1), before_each)
    p = probabilities(filtered, settings.temperature).reshape(logits.shape)
    new, accepted = accept(p, proposal, proposed, keys, settings.temperature)
    # 0: filters left no token after the accepted ones
    mass = jnp.take_along_axis(p.sum(axis=2), accepted[:, None], axis=1)[:, 0]
    broken = state.broken | ~state.done & jnp.isnan(mass)
    count = accepted + (mass > 0)
    is_stop = jnp.isin(new, settings.stop_tokens) & (jnp.arange(ahead + 1)[None] < count[:, None])
    stopped = is_stop.any(axis=1)
    up_to_stop = jnp.where(stopped, jnp.argmax(is_stop, axis=1) + 1, count)
    history = history.extend(new, is_open * up_to_stop)
    draft_cache = proposal.cache
    if isinstance(draft, HiddenDraft):
        draft_cache = draft.observe(draft_cache, output.hidden, is_open * up_to_stop)
    done = state.done | stopped | (history.length >= state.end) | ~(mass > 0)
    state = replace(state, history=history, cache=output.cache, done=done, broken=broken)
    return state, draft_cache, counts + jnp.stack([proposed, accepted], axis=1)


def accept(
    p: Float[Array, "B T V"],
    proposal: Proposal,
    proposed: Int[Array, " B"],
    keys: Array,
    temperature: Any,
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """(new tokens, number of accepted ones): accepted draft tokens, then one sampled token.

    Copies of the sampled token fill the rest of a row. A token d that was drawn from q is accepted
    with probability min(1, p(d) / q(d)). A row accepts at most `proposed` tokens, and none after
    the first rejected one. The sampled token is drawn from max(p - q, 0), or from p if no token was
    rejected. So every new token has the distribution p.
    """
    A = proposal.tokens.shape[1]
    q = proposal.probabilities
    q = jax.nn.one_hot(proposal.tokens, p.shape[2]) if q is None else q

    def of_token(x):
        return jnp.take_along_axis(x, proposal.tokens[..., None], axis=2)[..., 0]

    level = jax.vmap(lambda key: jax.random.uniform(key, (A,)))(_fold(keys, A))
    drawn = of_token(q) > 0  # False: filters left the draft no token, so it drew none
    is_proposed = jnp.arange(A)[None] < proposed[:, None]
    is_accepted = drawn & (level * of_token(q) < of_token(p[:, :A])) & is_proposed
    # a row accepts no token after the first rejected one
    count = jnp.cumprod(is_accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    p = jnp.take_along_axis(p, count[:, None, None], axis=1, mode="clip")[:, 0]
    q = jnp.take_along_axis(q, count[:, None, None], axis=1, mode="clip")[:, 0]
    rest = jnp.where((count < proposed)[:, None], jnp.maximum(p - q, 0), p)
    rest = jnp.where(rest.sum(axis=1, keepdims=True) > 0, rest, p)  # p = q up to rounding
    sampled = draw(jnp.log(rest), _fold(keys, A + 1), temperature)[:, None]
    padded_draft = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(A + 1)[None] < count[:, None], padded_draft, sampled), count


def _causal(config: Any) -> Any:
    """The config with causal masks, so that no token sees a later one, as in decoding one by one.

    A mask such as a prefix would show later tokens.
    """
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=_causal(config.decoder))
    return replace(
        config, masks=tuple(m if masks.is_causal(m) else m & masks.causal() for m in config.masks)
    )


def _fold(keys: Array, numbers) -> Array:
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(numbers, keys.shape))
