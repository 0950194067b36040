"""Speculative decoding: a cheap draft proposes tokens, and one step of the model checks them all.

Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from jaxformer import masks, models
from jaxformer.decoding.filters import Filter, History
from jaxformer.decoding.generate import Model, Settings, Texts, append, as_filters, insert, open_model, read, stops
from jaxformer.decoding.sampling import Sampling, draw
from jaxformer.decoding.steps import decode_step
from jaxformer.errors import ConfigError
from jaxformer.models.config import EncoderDecoder, ModelConfig


class Speculation(NamedTuple):
    """Continuations, and how well the draft foresaw them."""

    tokens: list[list[int]]  # what `generate` returns
    proposed: list[int]  # for each prompt, tokens of the draft that the model judged
    accepted: list[int]  # how many of these it took


class Proposal(NamedTuple):
    """What a draft proposes."""

    tokens: Array  # [B, ahead]
    probabilities: Array | None  # [B, ahead, V], from which each was drawn; None: there was no choice
    cache: Any = None  # of the draft


@struct.dataclass
class Draft:
    """A model of the same vocabulary as draft; `dtype` None: that of its parameters."""

    config: Any = struct.field(pytree_node=False)
    params: Any
    dtype: Any = struct.field(pytree_node=False, default=None)

    def propose(self, ahead: int, history: History, cache: Any, most, keys, settings: Settings) -> Proposal:
        """Tokens drawn one after another; of row b, no more than `most[b]` matter. Each step reads the last two tokens.

        When all tokens of a round were taken, the last two are new to the cache. Otherwise one of them is read again.
        """
        config = _causal(self.config)

        def step(carry, i):
            history, cache = carry
            two = jnp.take_along_axis(history.tokens, history.length[:, None] + jnp.array([[-2, -1]]), axis=1)
            cache, going = replace(cache, lengths=history.length - 2), i < most
            logits, cache = decode_step(config, self.params, two, cache, lengths=jnp.where(going, 2, 0), dtype=self.dtype)
            logits = _filtered(logits[:, 1], history, settings)
            token = draw(logits, _fold(keys, i), settings.temperature)
            history = _extended(history, token[:, None], going.astype(jnp.int32))
            return (history, cache), (token, _probabilities(logits, settings.temperature))

        (_, cache), (tokens, q) = lax.scan(step, (history, cache), jnp.arange(ahead))
        return Proposal(tokens.T, q.swapaxes(0, 1), cache)


@struct.dataclass
class Lookup:
    """No model: what followed the last tokens of a row where they stood before in it. Saxena 2023, prompt lookup decoding.

    Of places where at most n last tokens stood before, the longest match counts, then the latest. Beyond the end of the row
    the proposal repeats itself. Where there is no match it is the beginning of the row.
    """

    n: int = struct.field(pytree_node=False, default=3)

    def propose(self, ahead: int, history: History, cache: Any, most, keys, settings: Settings) -> Proposal:
        """The same `ahead` tokens whatever the settings are."""
        tokens, length = history.tokens, history.length[:, None]
        ends = jnp.arange(tokens.shape[1])[None]  # slots behind a match
        same, matched = ends < length, jnp.zeros(tokens.shape, jnp.int32)
        for i in range(self.n):
            last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - i, 0), axis=1)
            same &= (ends > i) & (jnp.roll(tokens, i + 1, axis=1) == last)
            matched += same
        best = jnp.argmax(jnp.where(matched > 0, matched * tokens.shape[1] + ends, 0), axis=1, keepdims=True)
        return Proposal(jnp.take_along_axis(tokens, best + jnp.arange(ahead)[None] % (length - best), axis=1), None)


@struct.dataclass
class Rows:
    """Rows of a batch, with what speculation adds to them."""

    texts: Texts
    cache: Any  # of the draft
    proposed: Any  # [B]
    accepted: Any  # [B]


def speculate(
    config: ModelConfig | EncoderDecoder, params: Any, prompts: Sequence[Sequence[int]], max_tokens: int, *,
    draft: Draft | Lookup, ahead: int = 4, sources: Sequence[Sequence[int]] | None = None, how: Sampling = Sampling(),
    filters: Sequence[Filter] = (), key: Array | None = None, stop_tokens: Sequence[int] = (), rows: int = 16, dtype=None,
) -> Speculation:  # fmt: skip
    """Continuations with the distribution of `generate`, in fewer steps of the model: at temperature 0 the same tokens.

    A step checks `ahead` tokens of the draft, whose logits pass the same filters. Prompts are continued in batches of `rows`.
    Arguments and errors are those of `generate`; ConfigError also for a draft of another vocabulary, NotImplementedError for a
    mixer that cannot take tokens back.
    """
    sizes = [models.last_stack(c).vocab_size for c in (config, getattr(draft, "config", config))]
    if ahead < 1 or getattr(draft, "n", 1) < 1 or sizes[0] != sizes[1]:
        raise ConfigError(f"speculate: ahead={ahead}, {draft.__class__.__name__} of vocabulary {sizes[1]}, not {sizes[0]}")
    opened = [open_model(config, params, prompts, max_tokens, sources, dtype)._replace(ahead=ahead)]
    if isinstance(draft, Draft):
        given = sources if isinstance(draft.config, EncoderDecoder) else None
        opened += [open_model(draft.config, draft.params, prompts, max_tokens, given, draft.dtype)._replace(ahead=ahead)]
        draft = replace(draft, params=opened[1].params, dtype=opened[1].dtype)
    settings = jax.device_put(Settings(as_filters((*filters, *how.filters())), np.float32(how.temperature), stops(stop_tokens)))
    key, rows = jax.random.key(0) if key is None else key, min(rows, 1 << (len(prompts) - 1).bit_length())
    found = Speculation([], [], [])
    for first in range(0, len(prompts), rows):
        texts = [(list(prompts[i]), sources and list(sources[i])) for i in range(first, min(first + rows, len(prompts)))]
        index, end = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)  # -1: an empty row
        index[: len(texts)] = first + np.arange(len(texts))
        end[: len(texts)] = [len(prompt) + max_tokens for prompt, _ in texts]
        batch, arrays = _read_batch(opened, texts, rows), jax.device_put((index, end))
        main = opened[0]
        ended = jax.device_get(_run(main.config, main.dtype, ahead, main.params, draft, batch, *arrays, key, settings))
        for row in range(len(texts)):
            tokens = ended[0].tokens[row, ended[0].prompt[row] : ended[0].length[row]].tolist()
            found.tokens.append(tokens[:-1] if tokens[-1] in stop_tokens else tokens)
            found.proposed.append(int(ended[1][row]))
            found.accepted.append(int(ended[2][row]))
    return found


def _read_batch(opened: list[Model], texts: list, rows: int) -> Any:
    """What each model has read of the texts, one a row; the first text stands in all other rows."""
    batch: Any = None
    for row, (prompt, source) in enumerate(texts):
        if batch is None or (prompt, source) != texts[0]:
            one = [read(model, prompt, source if model.source_room else None) for model in opened]
            batch = _repeat(rows, one) if batch is None else insert(batch, jax.device_put(np.int32(row)), one)
    return batch


@partial(jax.jit, static_argnums=0)
def _repeat(rows: int, one: Any) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), one)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="batch")
def _run(config, dtype, ahead: int, params, draft, batch, index, end, key, settings: Settings) -> tuple[History, Array, Array]:
    """(all rows until they are done, tokens proposed [B], tokens accepted [B])."""
    keys, (logits, cache, history) = jax.vmap(jax.random.fold_in, (None, 0))(key, index), batch[0]
    texts = append(Texts(history, cache, end, index < 0, keys), logits, settings)
    rows = Rows(texts, batch[1][1] if len(batch) > 1 else None, jnp.zeros_like(end), jnp.zeros_like(end))
    step = partial(_round, _causal(config), dtype, ahead, params, draft, settings)
    rows = lax.while_loop(lambda rows: ~rows.texts.done.all(), step, rows)
    return rows.texts.history, rows.proposed, rows.accepted


def _round(config, dtype, ahead: int, params, draft, settings: Settings, rows: Rows) -> Rows:
    """Each row that is not done with the tokens of its draft that are accepted, and one more."""
    texts, history = rows.texts, rows.texts.history
    most = jnp.where(texts.done, 0, jnp.minimum(texts.end - history.length - 1, ahead))  # no token beyond the limit is read
    keys = _fold(texts.keys, history.length - history.prompt)
    proposal = draft.propose(ahead, history, rows.cache, most, keys, settings)
    tokens, slots = _extended(history, proposal.tokens, most).tokens, history.length[:, None] + jnp.arange(ahead + 1)[None]
    checked = jnp.take_along_axis(tokens, slots - 1, axis=1, mode="clip")
    cache = replace(texts.cache, lengths=history.length - 1)  # what was rejected is taken back
    logits, cache = decode_step(config, params, checked, cache, lengths=jnp.where(texts.done, 0, most + 1), dtype=dtype)
    repeat = partial(jnp.repeat, repeats=ahead + 1, axis=0)
    each = History(repeat(tokens), slots.reshape(-1), repeat(history.prompt))
    p = _probabilities(_filtered(logits.reshape(-1, logits.shape[-1]), each, settings), settings.temperature)
    new, taken = accept(p.reshape(logits.shape), proposal, most, keys, settings.temperature)
    stopped = jnp.isin(new, settings.stop_tokens) & (slots - history.length[:, None] <= taken[:, None])
    count = jnp.where(stopped.any(axis=1), jnp.argmax(stopped, axis=1), taken) + 1
    history = _extended(history, new, jnp.where(texts.done, 0, count))
    done = texts.done | stopped.any(axis=1) | (history.length >= texts.end)
    texts = replace(texts, history=history, cache=cache, done=done)
    return Rows(texts, proposal.cache, rows.proposed + most, rows.accepted + taken)


def accept(
    p: Float[Array, "B A1 V"], proposal: Proposal, most: Int[Array, " B"], keys: Array, temperature: Any
) -> tuple[Int[Array, "B A1"], Int[Array, " B"]]:
    """(the new tokens, how many proposed ones are among them): then comes one more token, and then anything.

    A token d that was drawn from q is taken with probability min(1, p(d) / q(d)), up to `most` and to the first that is not;
    the one more is drawn from max(p - q, 0), or p if there was none to reject: so all are drawn from p.
    """
    A, q = proposal.tokens.shape[1], proposal.probabilities
    q = jax.nn.one_hot(proposal.tokens, p.shape[2]) if q is None else q
    of_token = lambda x: jnp.take_along_axis(x, proposal.tokens[..., None], axis=2)[..., 0]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (A,)))(_fold(keys, A))
    accepted = (uniform * of_token(q) < of_token(p[:, :A])) & (jnp.arange(A)[None] < most[:, None])
    taken = jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)
    own, drafted = (jnp.take_along_axis(x, taken[:, None, None], axis=1, mode="clip")[:, 0] for x in (p, q))
    rest = jnp.where((taken < most)[:, None], jnp.maximum(own - drafted, 0), own)
    rest = jnp.where(rest.sum(axis=1, keepdims=True) > 0, rest, own)  # p = q but for rounding
    one = draw(jnp.log(rest), _fold(keys, A + 1), temperature)
    return jnp.where(jnp.arange(A + 1)[None] < taken[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, 1))), one[:, None]), taken


def _causal(config):
    """The config, with masks under which no token sees a later one, as if each were read alone: a prefix would."""
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=_causal(config.decoder))
    return replace(config, masks=tuple(m if masks.is_causal(m) else m & masks.causal() for m in config.masks))


def _fold(keys: Array, numbers) -> Array:
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(numbers, keys.shape))


def _filtered(logits: Float[Array, "R V"], history: History, settings: Settings) -> Float[Array, "R V"]:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return reduce(lambda logits, function: function(logits, history), settings.filters, wide)


def _probabilities(logits: Float[Array, "R V"], temperature: Any) -> Float[Array, "R V"]:
    """What `draw` draws from: at temperature 0 the likeliest token."""
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(temperature == 0, greedy, jax.nn.softmax(logits, axis=-1))


def _extended(history: History, tokens: Int[Array, "B n"], count: Int[Array, " B"]) -> History:
    """Each row with the first `count` of its new tokens behind it."""
    i = jnp.arange(tokens.shape[1])[None]
    slots = jnp.where(i < count[:, None], history.length[:, None] + i, history.tokens.shape[1])  # nothing is written outside
    tokens = history.tokens.at[jnp.arange(len(tokens))[:, None], slots].set(tokens, mode="drop")
    return History(tokens, history.length + count, history.prompt)
