"""First hidden states, and positions inside the block, against explicit formulas."""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from jaxformer import decoding, masks, models, ops
from jaxformer.errors import ConfigError
from jaxformer.models import (
    Alibi,
    Axial,
    Classification,
    Embedding,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    Relative,
    Sinusoidal,
    embedding,
)
from jaxformer.models.layer import Context
from jaxformer.models.mixers.attention import attention, positions_spec
from jaxformer.ops.bias import t5_bucket
from jaxformer.params import Spec

B, V, D, T = 2, 13, 8, 6
TEXT = ModelConfig(
    vocab_size=V, num_layers=1, d_model=D, num_heads=2, context_length=T, positions=None
)
IMAGES = replace(
    TEXT,
    vocab_size=0,
    heads=(Classification(3),),
    embedding=Patches((6, 8), (2, 4), 3, class_token=False),
    context_length=6,
    masks=(masks.full(),),
)
ROUNDING = dict(rtol=1e-5, atol=1e-5)  # float32 sums of a dozen terms of order one


def random(config):
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: (path[-1].key == "scale") + 0.5 * rng.normal(size=leaf.shape)
    return jax.tree_util.tree_map_with_path(
        lambda *leaf: jnp.float32(draw(*leaf)), models.spec(config)
    )


def tokens(length=T):
    return jnp.asarray(np.random.default_rng(1).integers(0, V, (B, length)), jnp.int32)


def embedded(config, inputs, positions=None, **options):
    """(the embedding's parameters in NumPy, what it makes of the inputs)."""
    own = random(config)["embedding"]
    positions = (
        jnp.arange(embedding.length(config, inputs))[None] if positions is None else positions
    )
    return jax.tree.map(np.asarray, own), np.asarray(
        embedding.embed(config, own, inputs, Context(masks.full(), positions, **options))
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how", [Patches((6, 8), (2, 4)), Patches((6, 6), (3, 3), 1), Patches((4, 10), (4, 5), 2, False)]
)
@pytest.mark.parametrize("use_bias", [True, "query"])
def test_patches_are_a_convolution_with_its_stride(how, use_bias):
    config = replace(IMAGES, embedding=how, context_length=how.length, use_bias=use_bias)
    images = jnp.float32(np.random.default_rng(3).normal(size=(B, *how.image, how.channels)))
    own, x = embedded(config, images)
    assert ("bias" in own["patches"]) == (use_bias is True) and (
        "class_token" in own
    ) == how.class_token
    kernel = own["patches"]["kernel"]  # [channel, line, column, D]
    convolved = jax.lax.conv_general_dilated(
        images,
        kernel,
        window_strides=how.patch,
        padding="VALID",
        dimension_numbers=("NHWC", "IHWO", "NHWC"),
    )
    assert convolved.shape[1:3] == how.grid
    expected = np.array(convolved).reshape(B, -1, D) + own["patches"].get("bias", 0)
    if how.class_token:
        expected = np.concatenate(
            [np.broadcast_to(own["class_token"], (B, 1, D)), expected], axis=1
        )
    assert x.shape == (B, how.length, D)
    np.testing.assert_allclose(x, expected, **ROUNDING)


@pytest.mark.thorough
def test_images_take_positions_and_are_of_one_size():
    """The class token's position is the first."""
    config = replace(
        IMAGES,
        embedding=replace(IMAGES.embedding, class_token=True),
        context_length=7,
        positions=Learned(),
    )
    images = jnp.float32(np.random.default_rng(3).normal(size=(B, 6, 8, 3)))
    own, x = embedded(config, images)
    _, plain = embedded(replace(config, positions=None), images)
    np.testing.assert_allclose(x, plain + own["positions"], **ROUNDING)
    for shape in ((8, 6, 3), (6, 8, 1), (6, 12, 3)):
        with pytest.raises(
            ConfigError, match=re.escape(f"images {shape} where model.embedding expects (6, 8, 3)")
        ):
            models.apply(config, random(config), jnp.zeros((1, *shape)))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_tokens_types_scale_and_norm(dtype):
    config = replace(
        TEXT,
        embedding=Embedding(scale=3.0, norm=True, token_types=2),
        positions=Learned(),
        norm_eps=1e-3,
    )
    types = jnp.asarray(np.random.default_rng(5).integers(0, 2, (B, T)), jnp.int32)
    own, x = embedded(config, tokens(), token_types=types, dtype=dtype)
    assert x.dtype == (dtype or jnp.float32)
    summed = 3 * own["tokens"][tokens()] + own["token_types"][types] + own["positions"][None]
    deviation = summed - summed.mean(-1, keepdims=True)
    scaled = deviation / np.sqrt(np.square(deviation).mean(-1, keepdims=True) + 1e-3)
    expected = scaled * own["norm"]["scale"] + own["norm"]["bias"]
    # one rounding to 8 bits of numbers below 4 at the end
    np.testing.assert_allclose(np.float32(x), expected, **(dict(atol=0.02) if dtype else ROUNDING))
    without = embedded(config, tokens(), dtype=dtype)[1]
    np.testing.assert_array_equal(
        without, embedded(config, tokens(), token_types=types * 0, dtype=dtype)[1]
    )


def test_learned_positions_stand_behind_their_offset():
    at = jnp.array([[4, 0, 1, 5, 5, 2]])
    own, x = embedded(replace(TEXT, positions=Learned(offset=2)), tokens(), at)
    assert own["positions"].shape == (T + 2, D)
    np.testing.assert_allclose(x, own["tokens"][tokens()] + own["positions"][at + 2], **ROUNDING)


def test_axial_positions_are_a_line_beside_a_column():
    config = replace(TEXT, positions=Axial((2, 3), (5, 3)))
    own, x = embedded(config, tokens())
    lines, columns = own["positions"]["lines"], own["positions"]["columns"]
    assert lines.shape == (2, 5) and columns.shape == (3, 3)
    rows = np.array([[*lines[i // 3], *columns[i % 3]] for i in range(6)])
    np.testing.assert_allclose(x, own["tokens"][tokens()] + rows, **ROUNDING)


@pytest.mark.thorough
def test_sinusoidal_positions_have_no_parameters():
    own, x = embedded(replace(TEXT, positions=Sinusoidal()), tokens())
    assert set(own) == {"tokens"}
    angles = np.arange(T)[:, None] / 10_000 ** (np.arange(0, D, 2) / D)
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(T, D)
    np.testing.assert_allclose(x, own["tokens"][tokens()] + expected, **ROUNDING)


def narrow(config):
    """Tables of four features, and a map to D behind the sum."""
    spec = {
        "tokens": Spec((config.vocab_size, 4), ("vocab", None), normal(0.3)),
        "types": Spec((2, 4), (None, None), normal(0.3)),
        "wider": Spec((4, config.d_model), (None, "embed"), normal(0.3)),
    }

    def apply(params, tokens, inputs, context):
        return params["tokens"][tokens] + params["types"][context.token_types]

    def end(params, x, context):
        mask = 1.0 if context.padding_mask is None else context.padding_mask[..., None]
        return x @ params["wider"] * mask

    return embedding.Embedder(spec, apply, width=4, end=end)


@pytest.mark.thorough
def test_an_embedding_of_ones_own_reads_token_types_and_ends_the_sum():
    """Positions are as wide as its tables, and come before its end."""
    config = replace(TEXT, embedding=narrow, tie_embeddings=False, positions=Learned())
    types = jnp.asarray(np.random.default_rng(5).integers(0, 2, (B, T)), jnp.int32)
    own, x = embedded(config, tokens(), token_types=types)
    assert own["positions"].shape == (T, 4)
    summed = own["tokens"][tokens()] + own["types"][types] + own["positions"][None]
    np.testing.assert_allclose(x, summed @ own["wider"], **ROUNDING)
    segments = jnp.asarray(np.arange(T) < np.array([[T], [4]]), jnp.int32)
    options = dict(token_types=types, segment_ids=segments, intermediates=("embedding",))
    found = models.apply(config, random(config), tokens(), **options).intermediates["embedding"]
    np.testing.assert_allclose(found, x * np.asarray(segments)[..., None], **ROUNDING)
    with pytest.raises(ConfigError, match="7 tokens do not fit the 6 learned positions"):
        models.apply(config, random(config), tokens(7))


@pytest.mark.parametrize("positions", [Learned(), Axial((2, 3), (5, 3))])
def test_tables_end_where_the_context_does(positions):
    config = replace(TEXT, positions=positions)
    with pytest.raises(ConfigError, match="7 tokens do not fit the 6 learned positions"):
        models.apply(config, random(config), tokens(7))
    with pytest.raises(
        ConfigError, match=r"5 prompt \+ 2 new tokens exceed the 6 learned positions"
    ):
        decoding.generate(config, random(config), [[1] * 5], 2)


@pytest.mark.parametrize(
    "build, said",
    [
        (
            lambda: Patches((6, 8), (2, 3)),
            r"patch=\(2, 3\) does not divide embedding.image=\(6, 8\)",
        ),
        (lambda: replace(IMAGES, heads=(LanguageModel(),)), "none: they are patches"),
        (lambda: replace(TEXT, vocab_size=0), "vocab_size=0"),
        (lambda: replace(TEXT, positions=Axial((2, 4), (5, 3))), "makes 8 positions of width 8"),
        (lambda: replace(TEXT, positions=Axial((2, 3), (5, 5))), "makes 6 positions of width 10"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(build, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build()
    assert "\n" not in str(caught.value)


# Biases on scores

BIASED = ModelConfig(
    vocab_size=V,
    num_layers=2,
    d_model=12,
    num_heads=4,
    num_kv_heads=2,
    head_width=3,
    context_length=32,
    d_ff=16,
    attention_scale=0.7,
)
BIASES = {
    "alibi": replace(BIASED, positions=Alibi()),
    "t5": replace(BIASED, positions=Relative(8, 6, bidirectional=False)),
    "t5_encoder": replace(BIASED, positions=Relative(8, 6), masks=(masks.full(),)),
}
biases = pytest.mark.parametrize("name", BIASES, scope="module")
apply = jax.jit(models.apply, static_argnums=0, static_argnames="intermediates")


@cache
def logits(name):
    return apply(BIASES[name], random(BIASES[name]), tokens()).logits


def explicit(positions, config):
    """A mixer that knows no positions and gives attention a bias array, and the scale, itself."""

    def attend(params, context, query, key, value, **options):
        distances = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
        # Press et al. 2022: 4 heads have slopes 2^-2, 2^-4, 2^-6, 2^-8
        if isinstance(positions, Alibi):
            bias = (
                -(jnp.float32(4.0) ** -jnp.arange(1, 5)[:, None, None]) * jnp.abs(distances)[None]
            )
        else:
            table = context.shared["relative"]
            bias = jnp.moveaxis(table[t5_bucket(distances, positions.bidirectional, 6, 8)], -1, 0)
        return ops.attention(query, key, value, **options | dict(bias=bias[None], scale=0.7))

    mixer = attention(replace(config, positions=None), attend=attend)
    return mixer._replace(shared=positions_spec(replace(config, positions=positions)))


@pytest.mark.thorough
@biases
def test_biases_of_positions_equal_an_explicit_array(name):
    """Of every head and layer; all layers read one table.

    `attention_scale` is what multiplies the scores.
    """
    config = BIASES[name]
    parameters = random(config)
    assert ("shared" in parameters) == (name != "alibi")
    plain = replace(
        config, positions=None, mixer=partial(explicit, config.positions), attention_scale=None
    )
    assert jax.tree.structure(models.spec(plain)) == jax.tree.structure(models.spec(config))
    np.testing.assert_allclose(apply(plain, parameters, tokens()).logits, logits(name), **ROUNDING)
    without = apply(replace(config, attention_scale=None), parameters, tokens()).logits
    assert np.abs(without - logits(name)).max() > 1e-2


@pytest.mark.thorough
@biases
def test_blockwise_attention_has_the_biases_too(name):
    config = replace(BIASES[name], attention_implementation="blockwise")
    np.testing.assert_allclose(
        apply(config, random(config), tokens()).logits, logits(name), **ROUNDING
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_distances_do_not_see_the_cache_nor_padding(name):
    """A prompt padded on the right, then a token at a time; the cache has more slots than
    tokens."""
    config = BIASES[name]
    parameters = random(config)
    prompt = jnp.concatenate([tokens()[:, :3], jnp.full((B, 2), 7)], axis=1)
    out = apply(
        config, parameters, prompt, lengths=jnp.full(B, 3), cache=decoding.init_cache(config, B, 10)
    )
    np.testing.assert_allclose(out.logits[:, :3], logits(name)[:, :3], **ROUNDING)
    for k in range(3, T):
        out = apply(config, parameters, tokens()[:, k : k + 1], cache=out.cache)
        np.testing.assert_allclose(out.logits[:, 0], logits(name)[:, k], **ROUNDING)


@pytest.mark.thorough
def test_the_table_of_relative_positions_trains_through_all_layers():
    config = BIASES["t5"]
    loss = lambda p: jnp.sum(jnp.square(models.apply(config, p, tokens()).logits))
    gradient = jax.jit(jax.grad(loss))(random(config))["shared"]["relative"]
    assert gradient.shape == (8, 4) and (np.abs(gradient) > 1e-6).all(axis=1)[: T - 1].all()


@pytest.mark.thorough
@pytest.mark.parametrize("token", [-1, -19, 19, 400])
def test_tokens_beyond_the_vocabulary_give_nan_on_both_ends(token):
    """A negative one would be counted from the table's end, in silence."""
    config = ModelConfig(vocab_size=19, num_layers=1, d_model=8, num_heads=2, context_length=4)
    logits = apply(config, random(config), jnp.array([[1, token], [2, 18]])).logits
    assert np.isnan(logits[0, 1]).all() and np.isfinite(logits[1]).all()


def counted_by_three(config):
    """An embedding without parameters whose tokens stand three positions apart."""

    def apply(own, tokens, inputs, context):
        return jax.nn.one_hot(tokens % D, D)

    def positions(tokens, segment_ids):
        places = 3 * jnp.arange(tokens.shape[1])[None]
        return places if segment_ids is None else places + segment_ids

    return embedding.Embedder({}, apply, positions=positions)


PLACED = replace(
    TEXT,
    embedding=counted_by_three,
    positions=models.AttentionPositions(Sinusoidal()),
    heads=(Classification(3),),
    tie_embeddings=False,
)


@pytest.mark.thorough
def test_an_embedding_of_ones_own_may_make_the_positions():
    """They are those that a caller would give, who goes before them; and it needs no parameters."""
    own = random(PLACED)
    assert "embedding" not in own
    run = jax.jit(lambda **options: models.apply(PLACED, own, tokens(), **options).hidden)
    np.testing.assert_allclose(run(), run(positions=3 * jnp.arange(T)[None]), **ROUNDING)
    assert float(jnp.abs(run() - run(positions=jnp.arange(T)[None])).max()) > 1e-3
    ids = jnp.ones((B, T), int)
    given = run(segment_ids=ids, positions=jnp.broadcast_to(3 * jnp.arange(T) + 1, (B, T)))
    np.testing.assert_allclose(run(segment_ids=ids), given, **ROUNDING)


def test_positions_that_an_embedding_makes_are_in_no_cache():
    config = replace(PLACED, vocab_size=V, heads=(LanguageModel(),))
    with pytest.raises(ConfigError, match=r"positions that model\.embedding makes"):
        decoding.generate(config, random(config), [[1, 2]], 2)
