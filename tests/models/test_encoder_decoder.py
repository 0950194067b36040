"""Properties of encoder-decoders, over random parameters and inputs; numerics against others are in
tests/parity."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import (
    Embedding,
    EncoderDecoder,
    LanguageModel,
    ModelConfig,
    Relative,
    Sinusoidal,
    blocks,
)

V, B, S, T = 19, 2, 6, 5

STACK = ModelConfig(
    vocab_size=V,
    num_layers=2,
    d_model=16,
    num_heads=2,
    context_length=16,
    d_ff=24,
    init_std=0.3,
    block=blocks.post_norm,
    positions=Sinusoidal(),
    embedding=Embedding(scale=4.0),
)
T5 = replace(
    STACK,
    norm="rms_norm",
    block=None,
    feedforward="geglu",
    use_bias=False,
    attention_scale=1.0,
    head_width=6,
    embedding=Embedding(),
)
FAMILIES = {
    "vaswani": EncoderDecoder(replace(STACK, masks=(masks.full(),), heads=()), STACK),
    "t5": EncoderDecoder(
        replace(T5, positions=Relative(8, 6), masks=(masks.full(),), heads=()),
        replace(
            T5, positions=Relative(8, 6, bidirectional=False), heads=(LanguageModel(scale=0.25),)
        ),
    ),
    # a narrower, shallower encoder of another vocabulary; learned positions; fewer key heads
    "unequal": EncoderDecoder(
        ModelConfig(
            13,
            1,
            12,
            3,
            16,
            init_std=0.3,
            masks=(masks.full(),),
            heads=(),
            embedding=Embedding(norm=True),
        ),
        ModelConfig(
            V,
            2,
            16,
            4,
            16,
            num_kv_heads=2,
            init_std=0.3,
            masks=(masks.causal(), masks.causal() & masks.window(2)),
            heads=(LanguageModel(bias=True),),
            tie_embeddings=False,
            block=blocks.sandwich,
        ),
        share_embeddings=False,
    ),
}
families = pytest.mark.parametrize("name", FAMILIES, scope="module")
apply = jax.jit(models.apply, static_argnums=0, static_argnames=("dtype", "intermediates"))


@cache
def make(name):
    """(config, parameters of which no bias is zero and no scale one, source, target)."""
    config, rng = FAMILIES[name], np.random.default_rng(1)
    draw = lambda path, leaf: (path[-1].key == "scale") + 0.3 * rng.normal(size=leaf.shape)
    parameters = jax.tree_util.tree_map_with_path(
        lambda *leaf: jnp.float32(draw(*leaf)), models.spec(config)
    )
    source, target = rng.integers(0, 13, (B, S)), rng.integers(0, V, (B, T))
    return config, parameters, source.astype(np.int32), target.astype(np.int32)


@cache
def alone(name):
    config, parameters, source, target = make(name)
    return np.asarray(apply(config, parameters, target, source=source).logits)


def close(a, b, tolerance=5e-6):
    # float32 sums in another order, up to five attentions and norms deep
    np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance * float(np.abs(np.asarray(b)).max())
    )


def padded(name, source, source_ids, target, target_ids):
    """Logits of rows among whatever stands where the ids, here of shapes [S + 3] and [T + 2], are
    0."""
    config, parameters, *_ = make(name)
    assert (
        source.shape[1] == len(source_ids) == S + 3 and target.shape[1] == len(target_ids) == T + 2
    )
    rows = lambda ids: np.tile(np.array(ids, np.int32), (B, 1))
    return np.asarray(
        apply(
            config,
            parameters,
            target,
            source=source,
            source_segment_ids=rows(source_ids),
            segment_ids=rows(target_ids),
        ).logits
    )


def junk(length, seed=5):
    return np.random.default_rng(seed).integers(0, 13, (B, length)).astype(np.int32)


def beside(*parts):
    return np.concatenate(parts, axis=1)


@pytest.mark.thorough
@families
def test_a_target_token_sees_those_before_it_and_all_of_the_source(name):
    config, parameters, source, target = make(name)
    changed = lambda tokens, k: np.where(
        np.arange(tokens.shape[1]) == k, (tokens + 1) % 13, tokens
    ).astype(np.int32)
    for k in (1, T - 1):
        other = np.asarray(apply(config, parameters, changed(target, k), source=source).logits)
        close(other[:, :k], alone(name)[:, :k])
        assert np.abs(other[:, k:] - alone(name)[:, k:]).max(axis=-1).min() > 1e-4
    # the encoder sees both ways, so that every target token depends on every source token
    for k in range(S):
        other = np.asarray(apply(config, parameters, target, source=changed(source, k)).logits)
        assert np.abs(other - alone(name)).max(axis=-1).min() > 1e-4


@pytest.mark.thorough
@families
def test_padding_on_either_side_of_source_and_target_changes_nothing(name):
    *_, source, target = make(name)
    on, off = [1] * S, [1] * T
    for seed in (5, 6):
        right = padded(
            name,
            beside(source, junk(3, seed)),
            on + [0] * 3,
            beside(target, junk(2, seed)),
            off + [0] * 2,
        )
        close(right[:, :T], alone(name))
        left = padded(
            name,
            beside(junk(3, seed), source),
            [0] * 3 + on,
            beside(junk(2, seed), target),
            [0] * 2 + off,
        )
        close(left[:, 2:], alone(name))


@pytest.mark.thorough
@pytest.mark.parametrize("cached", [False, True])
def test_positions_of_the_source_are_the_encoders(cached):
    """Those of a row alone give its logits; those that count padding (Marian) give others, as with
    a table moved by them."""
    config, parameters, source, target = make("unequal")
    wide, ids = beside(junk(3), source), np.array([[0] * 3 + [1] * S] * B, np.int32)
    cache = lambda: decoding.init_cache(config, B, T) if cached else None
    run = lambda p, **options: apply(config, p, target, cache=cache(), **options).logits
    place = lambda start: np.maximum(np.arange(-3, S), 0)[None].astype(np.int32) + start
    close(
        run(parameters, source=wide, source_segment_ids=ids, source_positions=place(0)),
        alone("unequal"),
    )
    table = parameters["encoder"]["embedding"]["positions"]
    embedding = parameters["encoder"]["embedding"] | {"positions": jnp.roll(table, -3, axis=0)}
    moved = parameters | {"encoder": parameters["encoder"] | {"embedding": embedding}}
    counted = run(parameters, source=wide, source_segment_ids=ids, source_positions=place(3))
    close(counted, run(moved, source=source))
    assert np.abs(counted - alone("unequal")).max() > 1e-3


@pytest.mark.thorough
def test_where_only_the_source_has_segments_the_target_sees_all_that_is_no_padding():
    config, parameters, source, target = make("t5")
    ids = np.array([[0, 1, 1, 1, 1, 1, 1, 0]] * B, np.int32)
    wide = beside(junk(1), source, junk(1))
    close(
        apply(config, parameters, target, source=wide, source_segment_ids=ids).logits, alone("t5")
    )


@pytest.mark.thorough
@families
def test_packed_pairs_are_the_pairs_alone(name):
    *_, source, target = make(name)
    packed = padded(
        name, beside(junk(3), source), [1] * 3 + [2] * S, beside(junk(2), target), [1] * 2 + [2] * T
    )
    close(packed[:, 2:], alone(name))
    first = padded(
        name, beside(junk(3), source), [1] * 3 + [0] * S, beside(junk(2), target), [1] * 2 + [0] * T
    )
    close(packed[:, :2], first[:, :2])


@pytest.mark.thorough
@families
def test_cached_decoding_equals_the_forward_pass(name):
    """The source is given once; prompts that are padded continue as they would alone."""
    config, parameters, source, target = make(name)
    for padding in (0, 2):
        prompt = beside(target[:, : 5 - padding], junk(padding))
        cache = decoding.init_cache(config, B, 9)
        source_ids = np.array([[1] * S + [0] * 2] * B, np.int32)
        out = apply(
            config,
            parameters,
            prompt,
            source=beside(source, junk(2)),
            source_segment_ids=source_ids,
            lengths=np.full(B, 5 - padding),
            cache=cache,
        )
        close(out.logits[:, : 5 - padding], alone(name)[:, : 5 - padding])
        for k in range(5 - padding, T):
            out = apply(config, parameters, target[:, k : k + 1], cache=out.cache)
            close(out.logits[:, 0], alone(name)[:, k])
        assert out.cache.lengths.tolist() == [T] * B


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "unequal"])
def test_gradients_reach_every_parameter_of_every_layer(name):
    """But a key bias, which moves all scores of a query alike."""
    config, parameters, source, target = make(name)
    loss = lambda p: jnp.mean(
        jnp.square(models.apply(config, p, jnp.asarray(target), source=jnp.asarray(source)).logits)
    )
    gradient = jax.jit(jax.grad(loss))(parameters)
    for path, leaf in params.paths(gradient).items():
        if "key/bias" in path:
            continue
        rows = leaf if "layers" in path else leaf[None]
        for i, row in enumerate(rows):
            assert np.isfinite(row).all() and np.abs(row).max() > 1e-6, f"{path} of layer {i}"


@pytest.mark.slow  # the stacks are those of test_transformer, where it is quick
def test_unrolled_layers_and_no_jit_at_all_give_the_same():
    config, parameters, source, target = make("t5")
    for layers in (9, 1):
        changed = replace(
            config,
            encoder=replace(config.encoder, unroll=layers),
            decoder=replace(config.decoder, unroll=layers),
        )
        close(apply(changed, parameters, target, source=source).logits, alone("t5"))
    with jax.disable_jit():
        close(
            models.apply(
                config, parameters, jnp.asarray(target), source=jnp.asarray(source)
            ).logits,
            alone("t5"),
        )


@pytest.mark.thorough
def test_dropout_acts_in_both_stacks_and_follows_its_key():
    config, parameters, source, target = make("vaswani")
    dropping = lambda stack: replace(stack, dropout_rate=0.3, attention_dropout_rate=0.3)
    both = EncoderDecoder(dropping(config.encoder), dropping(config.decoder))
    run = lambda p, key: apply(both, p, target, source=source, dropout_key=jax.random.key(key))
    one, again, other = (run(parameters, key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one.logits, again.logits)
    assert np.abs(one.logits - other.logits).max() > 1e-2
    plain = apply(config, parameters, target, source=source)
    assert np.abs(one.source - plain.source).max() > 1e-2
    # a decoder that does not listen: what differs is its own
    layers = parameters["decoder"]["layers"]
    deaf = layers | {"cross_attention": jax.tree.map(jnp.zeros_like, layers["cross_attention"])}
    deaf = parameters | {"decoder": parameters["decoder"] | {"layers": deaf}}
    plain = apply(config, deaf, target, source=source)
    assert np.abs(run(deaf, 1).logits - plain.logits).max() > 1e-2


@pytest.mark.thorough
def test_bfloat16_activations_and_attention_maps_of_the_decoder_itself():
    config, parameters, source, target = make("t5")
    name = "decoder/layers/*/attention/weights"
    out = apply(
        config, parameters, target, source=source, dtype=jnp.bfloat16, intermediates=(name,)
    )
    assert out.hidden.dtype == out.source.dtype == jnp.bfloat16 and out.logits.dtype == jnp.float32
    # 8 bits of mantissa through four layers
    assert np.linalg.norm(out.logits - alone("t5")) < 0.06 * np.linalg.norm(alone("t5"))
    maps = out.intermediates[name]
    assert maps.shape == (2, B, 2, T, T)
    close(maps.sum(-1), np.ones((2, B, 2, T)))
    assert (np.triu(maps, 1) == 0).all()


@pytest.mark.thorough
@families
def test_the_encoder_is_a_model_of_its_own(name):
    """Its hidden states are those of `models.apply`; of a shared table only the decoder keeps a
    copy."""
    config, parameters, source, target = make(name)
    own = parameters["encoder"]
    if config.share_embeddings:
        assert "tokens" not in own.get("embedding", {})
        own = {**own, "embedding": {"tokens": parameters["decoder"]["embedding"]["tokens"]}}
    expected = np.asarray(apply(config.encoder, own, source).hidden)
    close(apply(config, parameters, target, source=source).source, expected)
    if name != "t5":
        return
    separate = replace(config, share_embeddings=False)
    spec = models.spec(separate)
    assert jax.tree.map(jnp.shape, parameters | {"encoder": own}) == jax.tree.map(
        lambda leaf: leaf.shape, spec
    )
    assert params.count(spec) == params.count(models.spec(config)) + V * 16
    close(apply(separate, parameters | {"encoder": own}, target, source=source).logits, alone(name))


def test_what_cannot_be_is_refused_in_a_line():
    config, parameters, _, target = make("t5")
    target, other = jnp.asarray(target), replace(config.encoder, d_model=20)
    for build, said in (
        (lambda: models.apply(config, parameters, target), "needs `source`"),
        (
            lambda: models.apply(
                config, parameters, target, cache=decoding.init_cache(config, B, 9)
            ),
            "a cache that began with it",
        ),
        (lambda: replace(config, encoder=config.decoder), r"encoder.heads.*heads=\(\)"),
        (lambda: replace(config, encoder=other), r"\(19, 20\).*\(19, 16\)"),
        (
            lambda: replace(config, encoder=replace(config.encoder, vocab_size=20)),
            "make them equal",
        ),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            build()
        assert "\n" not in str(caught.value)
    EncoderDecoder(other, config.decoder, share_embeddings=False)
    config, parameters, *_ = make("unequal")
    with pytest.raises(ConfigError, match="17 tokens do not fit the 16 learned positions"):
        models.apply(config, parameters, target, source=jnp.zeros((B, 17), int))
