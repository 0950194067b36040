"""Hidden tokens and corrupted spans: their statistics, what can be read back from them, and the losses of a batch by hand."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.training.corruption import MaskedTokens, SpanCorruption, _partition, corrupt_spans, hide_tokens, span_counts

MASK, END, SENTINEL = 50, 51, 99


def text(rows, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, MASK, (rows, length)), jnp.int32)


def within(count, total, rate):
    """Five standard deviations of a binomial."""
    return abs(count - total * rate) <= 5 * math.sqrt(total * rate * (1 - rate))


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_shares_of_hidden_tokens(rate):
    tokens = text(200, 1000)
    hidden, chosen = jax.jit(hide_tokens, static_argnums=(2, 3))(jax.random.key(0), tokens, MASK, rate)
    hidden, chosen, tokens = map(np.asarray, (hidden, chosen, tokens))
    count = chosen.sum()
    assert within(count, chosen.size, rate)
    assert (hidden[~chosen] == tokens[~chosen]).all()
    assert within((hidden[chosen] == MASK).sum(), count, 0.8)
    same = 0.1 + 0.1 / MASK  # a random token may be the old one
    assert within((hidden[chosen] == tokens[chosen]).sum(), count, same)
    drawn = hidden[chosen & (hidden != MASK) & (hidden != tokens)]
    assert len(np.unique(drawn)) == MASK and drawn.max() < MASK


def test_whole_words_are_hidden_together():
    tokens = text(100, 1000)
    starts = jnp.asarray(np.random.default_rng(1).random(tokens.shape) < 0.4)
    _, chosen = hide_tokens(jax.random.key(0), tokens, MASK, 0.15, starts)
    chosen, words = np.asarray(chosen), np.cumsum(starts, axis=1)
    total = count = 0
    for row in range(len(tokens)):
        by_word = [chosen[row, words[row] == word] for word in np.unique(words[row])]
        assert all(len(set(word.tolist())) == 1 for word in by_word)
        total, count = total + len(by_word), count + sum(bool(word[0]) for word in by_word)
    assert within(count, total, 0.15)


def test_a_key_decides_and_rows_differ():
    tokens = jnp.broadcast_to(text(1, 500), (2, 500))
    first, again, other = (hide_tokens(jax.random.key(seed), tokens, MASK)[1] for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).any() and (first[0] != first[1]).any()


@pytest.mark.parametrize("bad", [dict(rate=0.0), dict(rate=1.5), dict(mean_span=0.5)])
def test_spans_that_cannot_be_are_refused(bad):
    with pytest.raises(ConfigError, match=r"objective: rate=.* must be in \(0, 1\), mean_span=.* at least 1"):
        SpanCorruption(SENTINEL, END, **bad)


def test_lengths_of_t5():
    assert span_counts(568) == (85, 28)
    source, target = corrupt_spans(jax.random.key(0), text(1, 568), SENTINEL, END)
    assert source.shape == (1, 512) and target.shape == (1, 114)


def restored(source, target):
    """The text, with each sentinel replaced by what follows it in the target."""
    assert source[-1] == END and target[-1] == END
    spans, sentinel = {}, None
    for token in target[:-1]:
        if token > END:
            sentinel = token
            spans[sentinel] = []
        else:
            spans[sentinel].append(token)
    assert all(spans.values()) and list(spans) == [SENTINEL - i for i in range(len(spans))]
    found = [spans[token] if token > END else [token] for token in source[:-1]]
    assert [token for token in source if token > END] == list(spans)
    return [token for part in found for token in part], list(spans.values())


@pytest.mark.parametrize(
    ("length", "rate", "mean"), [(100, 0.15, 3.0), (37, 0.5, 2.0), (8, 0.15, 3.0), (2, 0.15, 3.0), (60, 0.3, 1.0)]
)
def test_spans_come_back_from_the_target(length, rate, mean):
    tokens = text(50, length)
    source, target = jax.jit(corrupt_spans, static_argnums=(2, 3, 4, 5))(jax.random.key(3), tokens, SENTINEL, END, rate, mean)
    count, spans = span_counts(length, rate, mean)
    assert source.shape == (50, length - count + spans + 1) and target.shape == (50, count + spans + 1)
    for row, one, other in zip(tokens.tolist(), source.tolist(), target.tolist(), strict=True):
        back, parts = restored(one, other)
        assert back == row and len(parts) == spans and sum(map(len, parts)) == count


def test_partitions_are_equally_likely():
    found = jax.vmap(lambda key: _partition(key, 6, 3))(jax.random.split(jax.random.key(0), 20_000))
    kinds, counts = np.unique(found, axis=0, return_counts=True)
    assert kinds.min() == 1 and (kinds.sum(axis=1) == 6).all() and len(kinds) == 10
    assert all(within(count, len(found), 0.1) for count in counts)


def cross_entropy(logits, labels, weights):
    """In float64."""
    logits = np.asarray(logits, np.float64)
    losses = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return float((weights * (losses - np.take_along_axis(logits, labels[..., None], -1)[..., 0])).sum())


def test_the_loss_of_hidden_tokens_by_hand():
    config = ModelConfig(MASK + 1, 1, 16, 2, context_length=32)
    params, tokens, key = models.init(config, jax.random.key(0)), text(3, 32), jax.random.key(7)
    weights = jnp.asarray(np.arange(32)[None] < np.array([[32], [20], [5]]), jnp.float32)
    objective = MaskedTokens(MASK)
    sums = objective(config, params, {"tokens": tokens, "weights": weights}, key, jnp.float32)
    hidden, chosen = hide_tokens(jax.random.split(key)[0], tokens, MASK)
    inputs, counted = jnp.where(weights > 0, hidden, tokens), np.asarray(chosen * weights)
    logits = models.apply(config, params, inputs).logits
    assert float(sums.weight) == counted.sum() > 0
    assert float(sums.loss) == pytest.approx(cross_entropy(logits, np.asarray(tokens), counted), rel=1e-5)  # float32
    with pytest.raises(ConfigError, match=r"objective.mask_token=51: model.vocab_size=51 must be larger"):
        MaskedTokens(51)(config, params, {"tokens": tokens, "weights": weights}, key, jnp.float32)
    with pytest.raises(ConfigError, match=r"objective.rate=1.0: must be in"):
        MaskedTokens(MASK, rate=1.0)


def test_the_loss_of_spans_by_hand():
    stack = ModelConfig(100, 1, 16, 2, context_length=32)
    config = EncoderDecoder(replace(stack, heads=(), masks=(full(),)), stack)
    params, tokens, key = models.init(config, jax.random.key(0)), text(3, 30), jax.random.key(7)
    weights = jnp.ones((3, 30)).at[2, -1].set(0)  # the last row is not full
    sums = SpanCorruption(SENTINEL, END)(config, params, {"tokens": tokens, "weights": weights}, key, jnp.float32)
    source, target = corrupt_spans(jax.random.split(key)[0], tokens, SENTINEL, END)
    inputs = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
    logits = models.apply(config, params, inputs, source=source).logits
    counted = np.broadcast_to([[1], [1], [0]], target.shape)
    assert float(sums.weight) == counted.sum()
    assert float(sums.loss) == pytest.approx(cross_entropy(logits, np.asarray(target), counted), rel=1e-5)  # float32
    with pytest.raises(
        ConfigError, match=r"objective: 1 sentinels from 100 down must lie between end=51 and model.vocab_size=100"
    ):
        SpanCorruption(100, END)(config, params, {"tokens": tokens, "weights": weights}, key, jnp.float32)
