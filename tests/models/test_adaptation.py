"""Trained models made into others: low-rank updates, partial restores, vocabularies, position
tables."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import (
    Alibi,
    Axial,
    Classification,
    EncoderDecoder,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    adaptation,
)
from jaxformer.models.mixture import Mixture
from jaxformer.ops.positions import Rope

V, L, D, N, K, H, F, E, RANK = 13, 3, 12, 3, 1, 4, 20, 2, 2
GPT = ModelConfig(V, L, D, N, 16, num_kv_heads=K, d_ff=F, init_std=0.3)
UNTIED = replace(GPT, tie_embeddings=False, heads=(LanguageModel(bias=True),))
EXPERTS = replace(GPT, feedforward=Mixture(experts=E, top_k=1, normalise=False), positions=None)
PAIR = EncoderDecoder(replace(GPT, masks=(masks.full(),), heads=()), UNTIED)
merge = jax.jit(adaptation.merge)
TOKENS = jax.random.randint(jax.random.key(5), (2, 7), 0, V)
EVERYTHING = "kernel"


@cache
def weights_of(config, seed=0):
    return jax.jit(partial(models.init, config))(jax.random.key(seed))


@cache
def model(config):
    return jax.jit(partial(models.apply, config))


def factors_of(config, pattern, seed=1):
    """Factors of which none is zero."""
    spec = adaptation.lora(models.spec(config), pattern, RANK)
    return jax.jit(lambda key: jax.tree.map(lambda a: a + 0.1, params.init(spec, key)))(
        jax.random.key(seed)
    )


def equal(a, b):
    return jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)


# Low-rank updates


def test_factors_follow_what_a_kernel_contracts():
    """Inputs and outputs are those of the product, layers and experts have factors of their own."""
    shapes = lambda config: jax.tree.map(
        lambda leaf: leaf.shape, adaptation.lora(models.spec(config), EVERYTHING, RANK)
    )
    found = shapes(UNTIED)
    assert found["layers/attention/query/kernel"] == {"a": (L, D, RANK), "b": (L, RANK, N, H)}
    assert found["layers/attention/value/kernel"] == {"a": (L, D, RANK), "b": (L, RANK, K, H)}
    assert found["layers/attention/out/kernel"] == {"a": (L, N, H, RANK), "b": (L, RANK, D)}
    assert found["layers/feedforward/down/kernel"] == {"a": (L, F, RANK), "b": (L, RANK, D)}
    assert found["heads/language_model/kernel"] == {"a": (V, RANK), "b": (RANK, D)}
    found = shapes(EXPERTS)
    assert found["layers/feedforward/up/kernel"] == {"a": (L, E, D, RANK), "b": (L, E, RANK, F)}
    assert found["layers/feedforward/router/kernel"] == {"a": (L, D, RANK), "b": (L, RANK, E)}


@pytest.mark.thorough
@pytest.mark.parametrize("config", [UNTIED, EXPERTS], ids=["untied", "experts"])
def test_adapted_models_start_as_they_were(config):
    """The input side's factor is drawn, with variance 1 / inputs; the other is zero, so the weights
    stay bit for bit."""
    weights = weights_of(config)
    factors = jax.jit(partial(params.init, adaptation.lora(models.spec(config), EVERYTHING, 50)))(
        jax.random.key(1)
    )
    assert jax.tree.all(equal(merge(weights, factors, 2.0), weights))
    for path, pair in factors.items():
        drawn, zero = ("b", "a") if path.startswith("heads") else ("a", "b")
        inputs = {"out/kernel": N * H, "down/kernel": F}.get("/".join(path.split("/")[-2:]), D)
        assert not pair[zero].any()
        # the standard deviation of at least 600 draws
        np.testing.assert_allclose(np.std(pair[drawn]) * inputs**0.5, 1, rtol=0.1, err_msg=path)


@pytest.mark.thorough
def test_merge_adds_the_product_in_each_layer_and_takes_it_away():
    weights, factors = weights_of(UNTIED), factors_of(UNTIED, EVERYTHING)
    merged = merge(weights, factors, 1.5)
    before, after = params.paths(weights), params.paths(merged)
    for path in before:
        if path not in factors:
            np.testing.assert_array_equal(after[path], before[path])
            continue
        a, b = (
            np.asarray(factors[path]["a"], np.float64),
            np.asarray(factors[path]["b"], np.float64),
        )
        update = np.einsum("vr,rd->vd", a, b) if path.startswith("heads") else 0
        if path.startswith("layers"):
            update = np.stack([np.tensordot(a[layer], b[layer], 1) for layer in range(L)])
        # float32
        np.testing.assert_allclose(after[path], before[path] + 1.5 * update, rtol=1e-5, atol=1e-6)
    back = params.paths(jax.jit(adaptation.merge)(merged, factors, -1.5))
    for path in before:
        # one rounding each way, of numbers near 1
        np.testing.assert_allclose(back[path], before[path], atol=1e-6)


@pytest.mark.thorough
def test_an_adapted_layer_is_the_layer_plus_its_low_rank_path():
    """merge computes what the paper's side branch does: x (W + s a b) = x W + s (x a) b."""
    weights, factors = weights_of(UNTIED), factors_of(UNTIED, "language_model")
    merged = adaptation.merge(weights, factors, 0.5)
    pair = factors["heads/language_model/kernel"]
    plain, adapted = (model(UNTIED)(w, TOKENS) for w in (weights, merged))
    side = jnp.einsum("btd,rd,vr->btv", plain.hidden, pair["b"], pair["a"])
    np.testing.assert_allclose(adapted.logits, plain.logits + 0.5 * side, atol=1e-4)  # float32 sums


@pytest.mark.thorough
def test_only_the_factors_train():
    """Gradient steps on the factors alone lower the loss; the weights are the same arrays as
    before."""
    weights = weights_of(GPT)
    kept = jax.tree.map(np.array, weights)
    factors = params.init(
        adaptation.lora(models.spec(GPT), "attention/(query|value)", RANK), jax.random.key(1)
    )

    @jax.jit
    @jax.value_and_grad
    def loss(factors, weights):
        logits = models.apply(GPT, adaptation.merge(weights, factors, 2.0), TOKENS).logits
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), TOKENS[:, 1:, None], -1)
        )

    losses = []
    for _ in range(10):
        value, gradient = loss(factors, weights)
        factors = jax.tree.map(lambda p, g: p - 0.1 * g, factors, gradient)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.02
    assert set(factors) == {f"layers/attention/{name}/kernel" for name in ("query", "value")}
    assert jax.tree.all(equal(weights, kept))
    merged = params.paths(equal(merge(weights, factors, 2.0), weights))
    assert {path for path, same in merged.items() if not same} == set(factors)


@pytest.mark.thorough
def test_low_precision_weights_keep_their_dtype():
    weights = optax.tree.cast(weights_of(GPT), jnp.bfloat16)
    factors = factors_of(GPT, "up")
    merged = adaptation.merge(weights, factors, 1.0)
    wide = adaptation.merge(optax.tree.cast(weights, jnp.float32), factors, 1.0)
    # summed in float32, rounded once
    assert jax.tree.all(equal(merged, optax.tree.cast(wide, jnp.bfloat16)))


@pytest.mark.thorough
def test_lora_refuses_by_name():
    with pytest.raises(
        ConfigError, match=r"no matrix matches 'queries'.*layers/attention/query/kernel"
    ):
        adaptation.lora(models.spec(GPT), "queries", 2)
    with pytest.raises(ConfigError, match="have no heads/language_model/kernel"):
        adaptation.merge(weights_of(GPT), factors_of(UNTIED, "heads"), 1.0)
    with pytest.raises(ConfigError, match="do not make layers/attention/key/kernel"):
        adaptation.merge(weights_of(GPT), factors_of(replace(GPT, num_kv_heads=3), "key"), 1.0)


# Partial restores


@pytest.mark.thorough
def test_a_trained_stack_gets_a_new_head():
    classifier = replace(GPT, heads=(Classification(4),))
    source, target = weights_of(UNTIED), weights_of(classifier, 1)
    with pytest.raises(
        ConfigError, match=r"missing: heads/classification/.*; unused: heads/language_model"
    ):
        adaptation.transfer(target, source)
    moved, report = adaptation.transfer(target, source, allow="^heads/")
    assert jax.tree.structure(moved) == jax.tree.structure(target)
    for path, leaf in params.paths(moved).items():
        origin = target if path.startswith("heads/") else source
        np.testing.assert_array_equal(leaf, params.paths(origin)[path])
        assert path in (report.missing if path.startswith("heads/") else report.taken)
    assert sorted(report.unused) == ["heads/language_model/bias", "heads/language_model/kernel"]
    assert report.misshapen == []


@pytest.mark.thorough
def test_renamed_leaves_find_their_place():
    """A stack becomes the encoder of a pair; what else the pair has is its own."""
    encoder = replace(PAIR.encoder, heads=())
    pair = replace(PAIR, share_embeddings=False)
    source, target = weights_of(encoder), weights_of(pair, 1)
    moved, report = adaptation.transfer(target, source, rename={"^": "encoder/"}, allow="^decoder/")
    assert jax.tree.all(equal(moved["encoder"], source)) and jax.tree.all(
        equal(moved["decoder"], target["decoder"])
    )
    assert len(report.taken) == len(jax.tree.leaves(source)) and report.unused == []
    with pytest.raises(ConfigError, match="the path one; make them differ"):
        adaptation.transfer(target, source, rename={"^.*$": "one"})


@pytest.mark.thorough
def test_other_shapes_are_reported_and_dtypes_are_the_targets():
    source, target = (
        weights_of(GPT),
        optax.tree.cast(weights_of(replace(GPT, d_ff=8), 1), jnp.bfloat16),
    )
    with pytest.raises(
        ConfigError,
        match=r"misshapen: layers/feedforward/down/kernel \(3, 20, 12\) for \(3, 8, 12\)",
    ):
        adaptation.transfer(target, source)
    moved, report = adaptation.transfer(target, source, allow="feedforward/")
    assert sorted(report.misshapen) == [
        f"layers/feedforward/{n}" for n in ("down/kernel", "up/bias", "up/kernel")
    ]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), moved) == jax.tree.map(
        lambda a: (a.shape, a.dtype), target
    )
    assert moved["embedding"]["tokens"][0, 0] == source["embedding"]["tokens"][0, 0].astype(
        jnp.bfloat16
    )


# Vocabularies

KINDS = {
    "tied": GPT,
    "untied": UNTIED,
    "shared": PAIR,
    "separate": replace(PAIR, share_embeddings=False),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k == "separate" else ()) for k in KINDS]
)
def test_a_larger_vocabulary_leaves_old_tokens_as_they_were(kind):
    """Their logits stay; a new token's logit is the mean of the old ones, so that nothing much
    moves."""
    config, options = (
        KINDS[kind],
        {"source": TOKENS} if isinstance(KINDS[kind], EncoderDecoder) else {},
    )
    weights = weights_of(config)
    larger, grown = adaptation.resize_vocabulary(
        config, weights, V + 4, jax.random.key(2), noise=0.0
    )
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(
        lambda leaf: leaf.shape, models.spec(larger)
    )
    before, after = (
        model(c)(w, TOKENS, **options).logits for c, w in ((config, weights), (larger, grown))
    )
    # float32 products of another width
    np.testing.assert_allclose(after[..., :V], before, atol=1e-5)
    np.testing.assert_allclose(
        after[..., V:], jnp.broadcast_to(before.mean(-1, keepdims=True), (2, 7, 4)), atol=1e-4
    )
    smaller, cut = adaptation.resize_vocabulary(larger, grown, V, jax.random.key(3))
    assert smaller == config and jax.tree.all(equal(cut, weights))


@pytest.mark.thorough
def test_new_rows_differ_and_each_table_has_its_own():
    config = KINDS["separate"]
    _, grown = adaptation.resize_vocabulary(config, weights_of(config), V + 500, jax.random.key(2))
    tables = [grown[half]["embedding"]["tokens"] for half in ("encoder", "decoder")]
    for table in tables:
        old, new = table[:V], table[V:]
        # a standard deviation of 500 draws, and their mean
        np.testing.assert_allclose(new.std(axis=0), 0.01 * old.std(axis=0), rtol=0.2)
        np.testing.assert_allclose(new.mean(axis=0), old.mean(axis=0), atol=0.01 * 0.3)
    noise = [table[V:] - table[:V].mean(axis=0, keepdims=True) for table in tables]
    assert abs(np.corrcoef(np.ravel(noise[0]), np.ravel(noise[1]))[0, 1]) < 0.1


@pytest.mark.thorough
def test_a_half_of_a_pair_changes_by_itself():
    config = KINDS["separate"]
    weights = weights_of(config)
    for half in ("encoder", "decoder"):
        one, own = adaptation.resize_vocabulary(
            getattr(config, half), weights[half], V + 3, jax.random.key(2)
        )
        pair, both = replace(config, **{half: one}), weights | {half: own}
        assert jax.tree.map(jnp.shape, both) == jax.tree.map(
            lambda leaf: leaf.shape, models.spec(pair)
        )


# Position tables


@pytest.mark.thorough
@pytest.mark.parametrize("length,offset", [(40, 0), (40, 2), (16, 2), (10, 2)])
def test_positions_are_repeated(length, offset):
    config = replace(GPT, positions=Learned(offset))
    table = np.random.default_rng(0).normal(size=(16 + offset, D)).astype(np.float32)
    weights = weights_of(config)
    weights = weights | {"embedding": weights["embedding"] | {"positions": jnp.asarray(table)}}
    longer, extended = adaptation.extend_positions(config, weights, length)
    assert longer == replace(config, context_length=length)
    expected = np.concatenate([table[:offset], np.concatenate([table[offset:]] * 3)[:length]])
    np.testing.assert_array_equal(extended["embedding"]["positions"], expected)
    assert (
        extended["layers"] is weights["layers"]
        and extended["embedding"]["tokens"] is weights["embedding"]["tokens"]
    )


@pytest.mark.thorough
def test_a_longer_model_reads_old_texts_as_before():
    weights = weights_of(GPT)
    longer, extended = adaptation.extend_positions(GPT, weights, 32)
    np.testing.assert_array_equal(
        model(longer)(extended, TOKENS).logits, model(GPT)(weights, TOKENS).logits
    )
    assert model(longer)(extended, jnp.tile(TOKENS, (1, 4))).logits.shape == (2, 28, V)


@pytest.mark.parametrize("positions", [Rope(), Alibi(), Axial((4, 4), (D // 2, D // 2)), None])
def test_what_has_no_table_to_extend_is_refused(positions):
    with pytest.raises(
        ConfigError,
        match=r"no table of Learned rows .* set model.context_length \(and Rope\(scaling=...\)\)",
    ):
        adaptation.extend_positions(replace(GPT, positions=positions), {}, 32)


def test_the_positions_of_patches_are_not_extended():
    patches = Patches((8, 8), (2, 2))
    config = replace(
        GPT,
        embedding=patches,
        vocab_size=0,
        heads=(),
        masks=(masks.full(),),
        context_length=patches.length,
    )
    with pytest.raises(ConfigError, match=r"for patches use models\.vision\.resize"):
        adaptation.extend_positions(config, {}, 32)
