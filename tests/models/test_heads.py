"""Heads against their formulas, alone and under the training objective."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import (
    Classification,
    LanguageModel,
    Mixture,
    ModelConfig,
    TokenClassification,
    heads,
)
from jaxformer.models.heads import Head
from jaxformer.models.inputs import Output
from jaxformer.models.transformer import read
from jaxformer.objectives import StepContext
from jaxformer.ops import cross_entropy
from jaxformer.ops.losses import TokenSums
from jaxformer.params import Spec
from jaxformer.training import TokenCrossEntropy

B, T, V, D = 3, 5, 13, 8
CONFIG = ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=D,
    num_heads=2,
    context_length=16,
    norm_eps=1e-3,
    masks=(masks.full(),),
)
LANGUAGE = {
    "tied": CONFIG,
    "untied": replace(CONFIG, tie_embeddings=False),
    "scaled": replace(CONFIG, heads=(LanguageModel(scale=0.3, bias=True),)),
    "transformed": replace(CONFIG, heads=(LanguageModel("gelu", bias=True),)),
    "capped": replace(
        CONFIG,
        heads=(LanguageModel("relu", bias=True, scale=2.0),),
        logit_softcap=1.5,
        tie_embeddings=False,
    ),
}
ROUNDING = dict(rtol=1e-5, atol=1e-5)  # float32 sums of a dozen terms of order one


def random(config):
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: (path[-1].key == "scale") + 0.5 * rng.normal(size=leaf.shape)
    return jax.tree_util.tree_map_with_path(
        lambda *leaf: jnp.float32(draw(*leaf)), models.spec(config)
    )


def hidden():
    return jnp.float32(np.random.default_rng(1).normal(size=(B, T, D)))


def tokens(seed=2, length=T):
    return np.random.default_rng(seed).integers(0, V, (B, length)).astype(np.int32)


def linear(x, own):
    return x @ np.asarray(own["kernel"]) + np.asarray(own.get("bias", 0))


@pytest.mark.parametrize("how", ["first", "mean", "last"])
def test_pooling_skips_padding_on_either_side(how):
    x, lengths = np.asarray(hidden()), [5, 2, 1]
    for left in (False, True):
        rows = [slice(T - n, T) if left else slice(n) for n in lengths]
        real = np.zeros((B, T), bool)
        for row, kept in zip(real, rows, strict=True):
            row[kept] = True
        parts = [x[i][kept] for i, kept in enumerate(rows)]
        expected = [
            {"first": part[0], "mean": part.mean(0), "last": part[-1]}[how] for part in parts
        ]
        np.testing.assert_allclose(
            heads.pool(jnp.asarray(x), how, jnp.asarray(real)), expected, **ROUNDING
        )
        np.testing.assert_array_equal(
            heads.pool(jnp.asarray(x), "position_0", jnp.asarray(real)), x[:, 0]
        )
    everything = {"first": x[:, 0], "mean": x.mean(1), "last": x[:, -1]}[how]
    np.testing.assert_allclose(heads.pool(jnp.asarray(x), how), everything, **ROUNDING)


@pytest.mark.thorough
def test_several_heads_at_once_each_under_its_name():
    """`logits` is the first's; a padded row is classified as it is alone, and one head does not
    change another."""
    kinds = [
        Classification(4, pool=how, name=how, pooler=None) for how in ("last", "mean", "first")
    ]
    config = replace(CONFIG, heads=(*kinds, TokenClassification(2), LanguageModel()))
    parameters = random(config)
    assert {path: leaf.shape for path, leaf in params.paths(parameters["heads"]).items()} == {
        **{f"{how}/kernel": (D, 4) for how in ("first", "mean", "last")},
        **{f"{how}/bias": (4,) for how in ("first", "mean", "last")},
        "token_classification/kernel": (D, 2),
        "token_classification/bias": (2,),
    }
    apply = jax.jit(partial(models.apply, config))
    alone = apply(parameters, tokens())
    assert set(alone.heads) == {"last", "mean", "first", "token_classification", "language_model"}
    np.testing.assert_array_equal(alone.logits, alone.heads["last"])
    pad, ids = tokens(7, 2), np.ones((B, T), np.int32)
    left = apply(
        parameters,
        np.concatenate([pad, tokens()], 1),
        segment_ids=np.concatenate([pad * 0, ids], 1),
    )
    right = apply(
        parameters,
        np.concatenate([tokens(), pad], 1),
        segment_ids=np.concatenate([ids, pad * 0], 1),
    )
    for name, expected in alone.heads.items():
        for beside, kept in ((left, slice(2, None)), (right, slice(T))):
            found = beside.heads[name] if expected.ndim == 2 else beside.heads[name][:, kept]
            np.testing.assert_allclose(found, expected, **ROUNDING)


@pytest.mark.thorough
def test_classifiers_by_their_formulas():
    """On given hidden states: pooled, through the pooler, then to classes."""
    kinds = (
        Classification(4),
        Classification(None, pool="last", name="pooled"),
        Classification(3, pool="mean", pooler="relu", bias=False, name="mean"),
        TokenClassification(2),
    )
    config = replace(CONFIG, heads=kinds)
    parameters, x = random(config), np.asarray(hidden())
    out = read(config, parameters, Output(None, hidden()))
    own = parameters["heads"]
    expected = {
        "classification": linear(
            np.tanh(linear(x[:, 0], own["classification"]["pooler"])), own["classification"]
        ),
        "pooled": np.tanh(linear(x[:, -1], own["pooled"]["pooler"])),
        "mean": np.maximum(linear(x.mean(1), own["mean"]["pooler"]), 0)
        @ np.asarray(own["mean"]["kernel"]),
        "token_classification": linear(x, own["token_classification"]),
    }
    assert set(own["pooled"]) == {"pooler"} and set(own["mean"]) == {"pooler", "kernel"}
    for name, array in expected.items():
        np.testing.assert_allclose(out.heads[name], array, **ROUNDING)
    narrow = read(config, parameters, Output(None, hidden().astype(jnp.bfloat16)))
    assert {array.dtype for array in narrow.heads.values()} == {jnp.dtype("float32")}


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_by_their_formula(name):
    """softcap tanh(logits / softcap), of norm(activation(hidden W + b)) scale times the rows of a
    table, plus a bias."""
    config = LANGUAGE[name]
    parameters, (head,) = random(config), config.heads
    own, x = parameters.get("heads", {}).get("language_model", {}), np.asarray(hidden())
    if head.transform:
        x = np.asarray(
            {"gelu": partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}[head.transform](
                linear(x, own["transform"])
            )
        )
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
        x = x * np.asarray(own["transform"]["norm"]["scale"]) + np.asarray(
            own["transform"]["norm"]["bias"]
        )
    table = own["kernel"] if not config.tie_embeddings else parameters["embedding"]["tokens"]
    logits = head.scale * x @ np.asarray(table).T + np.asarray(own.get("bias", 0))
    if name == "capped":
        logits = 1.5 * np.tanh(logits / 1.5)
    np.testing.assert_allclose(
        read(config, parameters, Output(None, hidden())).logits, logits, **ROUNDING
    )


KEY = jax.random.key(0)  # of dropout, which these models have not


def token_sums(config, p, data, **changes):
    """The objective's sums as `cross_entropy` gives them."""
    sums = TokenCrossEntropy(**changes)(config, p, data, StepContext(KEY))
    return TokenSums(sums.loss, sums.weight, sums.metrics["accuracy"][0])


def batch():
    weights = np.random.default_rng(3).uniform(0, 2, (B, T)).astype(np.float32) * (tokens(4) > 3)
    return {"tokens": tokens(), "labels": tokens(5), "weights": weights}


def both(config, **changes):
    """(sums, gradient) of the objective, and of `cross_entropy` of what `models.apply` gives."""

    def objective(p):
        sums = token_sums(config, p, jax.tree.map(jnp.asarray, batch()), **changes)
        return sums.loss, sums

    def explicit(p):
        data = jax.tree.map(jnp.asarray, batch())
        logits = models.apply(config, p, data["tokens"]).heads[heads.language_model(config).name]
        sums = cross_entropy(logits, data["labels"], data["weights"], **changes)
        return sums.loss, sums

    parameters = random(config)
    return [jax.jit(jax.grad(f, has_aux=True))(parameters)[::-1] for f in (objective, explicit)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scaled", "transformed", "capped"])
def test_the_objective_is_the_cross_entropy_of_the_logits(name):
    """In value and in every gradient: of the table by both of its uses, of the head's bias, of the
    transform."""
    config = LANGUAGE[name]
    changes = {}
    if name == "capped":  # beside another head, which this objective does not read
        config = replace(config, heads=(Classification(3), *config.heads))
        changes = dict(label_smoothing=0.1, z_loss=1e-2)
    (sums, gradient), (expected, expected_gradient) = both(config, **changes)
    np.testing.assert_allclose(sums, expected, rtol=2e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), gradient, expected_gradient
    )
    for path, leaf in params.paths(gradient["heads"]).items():
        assert (np.abs(leaf).max() > 1e-6) == path.startswith("language_model"), path


@pytest.mark.thorough
def test_losses_of_experts_steer_and_are_not_reported():
    """The gradient is that of cross entropy + tokens x auxiliary loss, the loss the cross entropy
    alone."""
    free = replace(CONFIG, feedforward=Mixture(4, 2, d_ff=6))
    steered = replace(
        free, feedforward=replace(free.feedforward, balance_loss=0.5, router_z_loss=0.1)
    )
    parameters, data = random(free), jax.tree.map(jnp.asarray, batch())

    @partial(jax.jit, static_argnums=0)
    def objective(config, p):
        sums = lambda p: token_sums(config, p, data)
        return jax.grad(lambda p: (sums(p).loss, sums(p)), has_aux=True)(p)

    @jax.jit
    def auxiliary(p):
        return jax.grad(
            lambda p: models.apply(steered, p, data["tokens"]).loss * data["weights"].sum()
        )(p)

    (plain, sums), (pulled, same) = objective(free, parameters), objective(steered, parameters)
    np.testing.assert_array_equal(sums, same)
    pull = auxiliary(parameters)
    assert np.abs(pull["layers"]["feedforward"]["router"]["kernel"]).max() > 1e-3
    expected = jax.tree.map(jnp.add, plain, pull)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), pulled, expected)


def distances(config):
    """Squared distances to trained centres: a head of one's own."""
    spec = {
        "centres": Spec((4, config.d_model), ("class", "embed"), jax.nn.initializers.normal(1.0))
    }

    def apply(params, hidden, real):
        last = heads.pool(hidden, "last", real)
        return jnp.square(last[:, None] - params["centres"][None]).sum(-1)

    return Head("distances", spec, apply)


@pytest.mark.thorough
def test_a_head_of_ones_own_and_none_at_all():
    config = replace(CONFIG, heads=(distances, LanguageModel()))
    parameters, x = random(config), np.asarray(hidden())
    real = jnp.arange(T)[None] < jnp.array([5, 2, 3])[:, None]
    out = read(config, parameters, Output(None, hidden()), real)
    last = x[np.arange(B), [4, 1, 2]]
    expected = np.square(
        last[:, None] - np.asarray(parameters["heads"]["distances"]["centres"])
    ).sum(-1)
    np.testing.assert_allclose(out.logits, expected, **ROUNDING)
    assert set(out.heads) == {"distances", "language_model"}
    bare = replace(CONFIG, heads=())
    assert "heads" not in models.spec(bare)
    out = jax.eval_shape(
        partial(models.apply, bare), params.abstract(models.spec(bare)), jnp.asarray(tokens())
    )
    assert out.logits is None and out.heads == {} and out.hidden.shape == (B, T, D)


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ConfigError, match=r"2 of them are called 'classification'; give each a name"
    ):
        models.spec(replace(CONFIG, heads=(Classification(2), Classification(3))))
    without = replace(CONFIG, heads=(Classification(2),))
    with pytest.raises(ConfigError, match="needs a LanguageModel"):
        jax.eval_shape(
            partial(token_sums, without), random(CONFIG), jax.tree.map(jnp.asarray, batch())
        )


CAUSAL, WINDOW, PREFIX = masks.causal(), masks.window, masks.prefix
BLIND = [
    CAUSAL,
    WINDOW(3),
    CAUSAL & masks.strided(4),
    masks.by_head(WINDOW(1), CAUSAL),
    CAUSAL & masks.chunked(16),
]
LEAKS = [
    masks.full(),
    WINDOW(4, 4),
    WINDOW(40, 1),
    masks.chunked(16),
    masks.strided(8),
    masks.by_head(CAUSAL, WINDOW(2, 1)),
]
LEAKS += [
    CAUSAL | masks.Mask(lambda mask, q, kv: kv == q + 1),
    CAUSAL | PREFIX(20) | masks.strided(7),
    CAUSAL | PREFIX(9999),
]


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 2, 3, 17, 40, 64, 65])
def test_a_mask_that_shows_later_tokens_is_seen(length):
    """Anywhere: as the mask written out; behind a prefix: whatever its length, unless all is
    prefix."""
    prefixes = [CAUSAL | PREFIX(n) for n in (2, 16, 39, 64) if n < length]
    for mask in BLIND + LEAKS + prefixes:
        config = replace(CONFIG, context_length=length, masks=(CAUSAL, mask))
        dense = np.triu(mask.dense(length, length), 1).any()
        assert heads.sees_later_tokens(config, everywhere=True) == dense, mask
        expected = (mask in LEAKS and length > 20) or (mask in LEAKS[:3] and length > 1)
        if mask in BLIND + prefixes or expected:
            assert heads.sees_later_tokens(config) == expected, mask


def test_a_long_context_is_asked_at_its_ends():
    long = replace(CONFIG, context_length=1 << 17)
    for mask in LEAKS[:6]:
        assert heads.sees_later_tokens(replace(long, masks=(mask,)))
    for n in (100, 1 << 16, (1 << 17) - 9):
        prefix = replace(long, masks=(CAUSAL | PREFIX(n),))
        assert not heads.sees_later_tokens(prefix) and heads.sees_later_tokens(
            prefix, everywhere=True
        )


@pytest.mark.parametrize(
    "head", [Classification(2, pooler="tahn"), LanguageModel(transform="gelo")]
)
def test_misspelt_activations_are_refused_with_the_config(head):
    with pytest.raises(ConfigError, match="expected one of"):
        ModelConfig(
            vocab_size=5, num_layers=1, d_model=4, num_heads=1, context_length=4, heads=(head,)
        )


def test_pooling_knows_its_ways():
    with pytest.raises(ConfigError, match="pool='median'"):
        heads.pool(jnp.ones((1, 2, 3)), "median")


@pytest.mark.thorough
@pytest.mark.parametrize("pool", ["first", "position_0"])
def test_a_padded_slot_0_sees_the_rows_tokens(pool):
    """BERT's code hides padding as keys only: as if the first slots were real, but no key.

    Nothing else changes.
    """
    head = Classification(3, pool=pool)
    config = replace(CONFIG, num_layers=2, heads=(head,))
    p, text, pads = random(config), jnp.asarray(tokens()), 2
    real = jnp.ones((B, T), jnp.int32).at[:, :pads].set(0)
    positions = jnp.arange(T)[None]
    found = models.apply(config, p, text, segment_ids=real, positions=positions)
    hiding = replace(config, masks=(~masks.prefix(pads),))
    keys_only = models.apply(hiding, p, text, positions=positions)
    np.testing.assert_allclose(found.hidden[:, pads:], keys_only.hidden[:, pads:], **ROUNDING)
    same = np.allclose(found.logits, keys_only.logits, **ROUNDING)
    assert same == (pool == "position_0")
