"""Hidden tokens, next sentences, prefixes, corrupted spans: statistics, what can be read back,
losses of a batch by hand."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, chunked, full, prefix, window
from jaxformer.models import Classification, Embedding, EncoderDecoder, LanguageModel, ModelConfig
from jaxformer.objectives import StepContext
from jaxformer.objectives.corruption import SpanCorruption, _partition, corrupt_spans, span_counts
from jaxformer.objectives.masked import MaskedTokens, NextSentence, hide_tokens
from jaxformer.objectives.tokens import PrefixLanguageModel

MASK, END, SENTINEL = 50, 51, 99
init, apply = jax.jit(models.init, static_argnums=0), jax.jit(models.apply, static_argnums=0)
hide = jax.jit(hide_tokens, static_argnums=(2, 3))


def sums_of(objective, model, params, batch, key):
    """In float32."""
    return jax.jit(objective, static_argnums=0)(model, params, batch, StepContext(key))


def text(rows, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, MASK, (rows, length)), jnp.int32)


def within(count, total, rate):
    """Five standard deviations of a binomial."""
    return abs(count - total * rate) <= 5 * math.sqrt(total * rate * (1 - rate))


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_shares_of_hidden_tokens(rate):
    tokens = text(200, 1000)
    hidden, chosen = hide(jax.random.key(0), tokens, MASK, rate)
    hidden, chosen, tokens = map(np.asarray, (hidden, chosen, tokens))
    count = chosen.sum()
    assert within(count, chosen.size, rate)
    assert (hidden[~chosen] == tokens[~chosen]).all()
    assert within((hidden[chosen] == MASK).sum(), count, 0.8)
    same = 0.1 + 0.1 / MASK  # a random token may be the old one
    assert within((hidden[chosen] == tokens[chosen]).sum(), count, same)
    drawn = hidden[chosen & (hidden != MASK) & (hidden != tokens)]
    assert len(np.unique(drawn)) == MASK and drawn.max() < MASK


@pytest.mark.thorough
def test_whole_words_are_hidden_together():
    tokens = text(100, 1000)
    starts = jnp.asarray(np.random.default_rng(1).random(tokens.shape) < 0.4)
    _, chosen = hide(jax.random.key(0), tokens, MASK, 0.15, starts)
    chosen, words = np.asarray(chosen), np.cumsum(np.asarray(starts), axis=1)
    total = count = 0
    for row in range(len(tokens)):
        by_word = [chosen[row, words[row] == word] for word in np.unique(words[row])]
        assert all(len(set(word.tolist())) == 1 for word in by_word)
        total, count = total + len(by_word), count + sum(bool(word[0]) for word in by_word)
    assert within(count, total, 0.15)


@pytest.mark.thorough
def test_a_key_decides_and_rows_differ():
    tokens = jnp.broadcast_to(text(1, 500), (2, 500))
    first, again, other = (hide(jax.random.key(seed), tokens, MASK)[1] for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).any() and (first[0] != first[1]).any()


@pytest.mark.parametrize("bad", [dict(rate=0.0), dict(rate=1.5), dict(mean_span=0.5)])
def test_spans_that_cannot_be_are_refused(bad):
    with pytest.raises(
        ConfigError, match=rf"objective[:.] ?{next(iter(bad))}=.*(must be in \(0, 1\)|at least 1)"
    ):
        SpanCorruption(SENTINEL, END, **bad)


@pytest.mark.thorough
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


def test_random_tokens_are_of_the_whole_vocabulary_where_the_mask_is_a_small_id():
    """As in Google's BERT, whose mask is 103 of 30,522."""
    tokens = jnp.full((200, 100), 300)
    hidden, chosen = hide_tokens(jax.random.key(0), tokens, 10, vocab_size=1000)
    drawn = np.asarray(hidden)[np.asarray(chosen & (hidden != 10) & (hidden != 300))]
    assert len(drawn) > 200 and drawn.max() > 900 and within((drawn < 500).sum(), len(drawn), 0.5)
    config = ModelConfig(600, 1, 16, 2, context_length=32)
    with pytest.raises(ConfigError, match=r"model.vocab_size=600 must be at least 1000"):
        MaskedTokens(10, vocab_size=1000).hidden(
            config, {"tokens": tokens, "weights": jnp.ones(tokens.shape)}, jax.random.key(0)
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("length", "rate", "mean"),
    [(100, 0.15, 3.0), (37, 0.5, 2.0), (8, 0.15, 3.0), (2, 0.15, 3.0), (60, 0.3, 1.0)],
)
def test_spans_come_back_from_the_target(length, rate, mean):
    tokens = text(50, length)
    source, target = jax.jit(corrupt_spans, static_argnums=(2, 3, 4, 5))(
        jax.random.key(3), tokens, SENTINEL, END, rate, mean
    )
    count, spans = span_counts(length, rate, mean)
    assert source.shape == (50, length - count + spans + 1) and target.shape == (
        50,
        count + spans + 1,
    )
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
    return float(
        (weights * (losses - np.take_along_axis(logits, labels[..., None], -1)[..., 0])).sum()
    )


@pytest.mark.thorough
def test_the_loss_of_hidden_tokens_by_hand():
    config = ModelConfig(MASK + 1, 1, 16, 2, context_length=32)
    params, tokens, key = init(config, jax.random.key(0)), text(3, 32), jax.random.key(7)
    weights = jnp.asarray(np.arange(32)[None] < np.array([[32], [20], [5]]), jnp.float32)
    sums = sums_of(MaskedTokens(MASK), config, params, {"tokens": tokens, "weights": weights}, key)
    hidden, chosen = hide_tokens(jax.random.split(key)[0], tokens, MASK)
    inputs, counted = jnp.where(weights > 0, hidden, tokens), np.asarray(chosen * weights)
    logits = apply(config, params, inputs).logits
    assert float(sums.weight) == counted.sum() > 0
    # float32
    assert float(sums.loss) == pytest.approx(
        cross_entropy(logits, np.asarray(tokens), counted), rel=1e-5
    )
    with pytest.raises(
        ConfigError, match=r"objective.mask_token=51: model.vocab_size=51 must be at least 52"
    ):
        MaskedTokens(51)(config, params, {"tokens": tokens, "weights": weights}, StepContext(key))
    with pytest.raises(ConfigError, match=r"objective.rate=1.0: must be in"):
        MaskedTokens(MASK, rate=1.0)


@pytest.mark.thorough
def test_the_loss_of_spans_by_hand():
    stack = ModelConfig(100, 1, 16, 2, context_length=32)
    config = EncoderDecoder(replace(stack, heads=(), masks=(full(),)), stack)
    params, tokens, key = init(config, jax.random.key(0)), text(3, 30), jax.random.key(7)
    weights = jnp.ones((3, 30)).at[2, -1].set(0)  # the last row is not full
    sums = sums_of(
        SpanCorruption(SENTINEL, END), config, params, {"tokens": tokens, "weights": weights}, key
    )
    source, target = corrupt_spans(jax.random.split(key)[0], tokens, SENTINEL, END)
    inputs = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
    logits = apply(config, params, inputs, source=source).logits
    counted = np.broadcast_to([[1], [1], [0]], target.shape)
    assert float(sums.weight) == counted.sum()
    # float32
    assert float(sums.loss) == pytest.approx(
        cross_entropy(logits, np.asarray(target), counted), rel=1e-5
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"objective: 1 sentinels from 100 down must lie between end=51 and "
            r"model.vocab_size=100"
        ),
    ):
        SpanCorruption(100, END)(
            config, params, {"tokens": tokens, "weights": weights}, StepContext(key)
        )


SENTENCES = ModelConfig(
    SENTINEL + 1,
    1,
    16,
    2,
    context_length=32,
    masks=(full(),),
    embedding=Embedding(token_types=2),
    init_std=0.3,
    heads=(LanguageModel(bias=True), Classification(2, name="next_sentence")),
)


def pairs(rows, length, seed=0):
    """CLS (51) first SEP (52) second SEP padding, as data sets give them."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(10, length + 1, rows)[:, None]
    middles, slots = ends // 2, np.arange(length)
    special = (slots == 0) | (slots == middles) | (slots == ends - 1)
    tokens = np.where(special, np.where(slots == 0, 51, 52), rng.integers(0, MASK, (rows, length)))
    real = slots < ends
    batch = {
        "tokens": np.where(real, tokens, 0).astype(np.int32),
        "weights": (real & ~special).astype(np.float32),
        "segment_ids": real.astype(np.int32),
        "token_types": ((slots > middles) & real).astype(np.int32),
        "labels": rng.integers(0, 2, rows).astype(np.int32),
    }
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.thorough
def test_the_loss_of_next_sentences_by_hand():
    params, batch, key = init(SENTENCES, jax.random.key(0)), pairs(5, 32), jax.random.key(7)
    batch["weights"] = batch["weights"].at[4].set(0)  # a row that only fills the batch
    sums = sums_of(NextSentence(MaskedTokens(MASK)), SENTENCES, params, batch, key)
    hidden, chosen = hide_tokens(jax.random.split(key)[0], batch["tokens"], MASK)
    inputs, counted = (
        jnp.where(batch["weights"] > 0, hidden, batch["tokens"]),
        np.asarray(chosen * batch["weights"]),
    )
    output = apply(
        SENTENCES,
        params,
        inputs,
        segment_ids=batch["segment_ids"],
        token_types=batch["token_types"],
    )
    masked = cross_entropy(output.logits, np.asarray(batch["tokens"]), counted) / float(
        counted.sum()
    )
    rows = np.array([1, 1, 1, 1, 0])
    sentences = cross_entropy(output.heads["next_sentence"], np.asarray(batch["labels"]), rows) / 4
    assert float(sums.weight) == counted.sum() > 0
    assert float(sums.loss / sums.weight) == pytest.approx(masked + sentences, rel=1e-5)  # float32
    found = {name: float(total / weight) for name, (total, weight) in sums.metrics.items()}
    right = np.argmax(output.heads["next_sentence"], -1) == np.asarray(batch["labels"])
    expected = {
        "masked_loss": masked,
        "sentence_loss": sentences,
        "sentence_accuracy": float(right[:4].mean()),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("heads", [(LanguageModel(),), (Classification(2, name="next_sentence"),)])
def test_next_sentences_need_both_heads(heads):
    config = replace(SENTENCES, heads=heads)
    with pytest.raises(
        ConfigError, match=r"heads LanguageModel\(\) and Classification\(2, name='next_sentence'\)"
    ):
        NextSentence(MaskedTokens(MASK))(config, {}, pairs(2, 16), StepContext(jax.random.key(0)))


def test_special_tokens_are_never_hidden():
    batch = pairs(3000, 64)
    config = replace(SENTENCES, vocab_size=60)
    hidden = jax.jit(MaskedTokens(MASK).hidden, static_argnums=0)(config, batch, jax.random.key(3))
    tokens, found, chosen = (
        np.asarray(x) for x in (batch["tokens"], hidden["tokens"], hidden["weights"] > 0)
    )
    may = np.asarray(batch["weights"] > 0)
    assert may.sum() > 1e5 and within(chosen.sum(), may.sum(), 0.15) and not (chosen & ~may).any()
    assert (found[~chosen] == tokens[~chosen]).all() and within(
        (found[chosen] == MASK).sum(), chosen.sum(), 0.8
    )
    assert (found[chosen] <= MASK).all()  # no special token is drawn either


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_behind_a_prefix_by_hand(packed):
    config = ModelConfig(
        MASK, 2, 16, 2, context_length=32, masks=(causal() | prefix(5),), init_std=0.3
    )
    params, rows = init(config, jax.random.key(0)), text(3, 17)
    batch = {
        "tokens": rows[:, :-1],
        "labels": rows[:, 1:],
        "weights": jnp.ones((3, 16)).at[1, 12:].set(0),
    }
    counted, options = np.array(batch["weights"]), {}
    counted[:, :4] = 0  # labels 1 to 4 are of the prefix
    if packed:  # two texts in a row, each with a prefix of its own
        options["segment_ids"] = jnp.asarray(np.repeat([[1] * 7 + [2] * 9], 3, axis=0), jnp.int32)
        counted[:, 7:11] = 0
    sums = sums_of(PrefixLanguageModel(5), config, params, batch | options, jax.random.key(0))
    logits = apply(config, params, batch["tokens"], **options).logits
    assert float(sums.weight) == counted.sum() > 0
    # float32
    assert float(sums.loss) == pytest.approx(
        cross_entropy(logits, np.asarray(batch["labels"]), counted), rel=1e-5
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        full(),
        causal() | prefix(4),
        causal() | prefix(6),
        causal() & window(3) | prefix(9),
        causal() | prefix(5) | chunked(5),
        window(3, 1) | prefix(5),
    ],
)
def test_masks_that_do_not_show_the_prefix_are_refused(mask):
    config = ModelConfig(MASK, 1, 16, 2, context_length=32, masks=(mask,))
    batch = {"tokens": text(2, 16), "labels": text(2, 16), "weights": jnp.ones((2, 16))}
    with pytest.raises(
        ConfigError,
        match=(
            r"objective.prefix=5: 16 tokens under .*; give model.masks=\(causal\(\) \| "
            r"prefix\(5\),\)"
        ),
    ):
        PrefixLanguageModel(5)(
            config,
            init(replace(config, masks=(causal(),)), jax.random.key(0)),
            batch,
            jax.random.key(0),
            jnp.float32,
        )
    with pytest.raises(
        ConfigError, match=r"objective.prefix=0: expected a whole number of at least 1"
    ):
        PrefixLanguageModel(0)
