"""Positions: what users of other projects saw go wrong with rotations, their scalings, and biases
of distance."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, ops, params, zoo
from jaxformer.data import sources
from jaxformer.errors import ConfigError
from jaxformer.ops.bias import t5_bucket
from jaxformer.ops.positions import (
    NTK,
    Linear,
    Llama3,
    LongRoPE,
    Rope,
    YaRN,
    learned,
    rope,
    sinusoidal,
)

LONG = LongRoPE((1.0, 1.1, 1.2, 1.3), (2.0, 3.0, 4.0, 5.0), original_length=64)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def turned(x, angles, layout="half"):
    """x [B, T, N, H], its pairs turned by angles [B, T, H / 2], in float64."""
    x, cos, sin = np.asarray(x, np.float64), np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.report(
    "huggingface/transformers#29285", "EleutherAI/gpt-neox#1003", "sgl-project/sglang-jax#1473",
    right="a rotation at position 10^6 is as right as at position 10", listed="second 07",
    hit="the product of position and frequency in float32: off by 6e-3 at 131,072 and 6e-2 at 10^6",
)  # fmt: skip
@pytest.mark.parametrize(
    "scaling", [None, Linear(4.0), YaRN(8.0, 32), LONG], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_far_out(scaling, layout):
    config = Rope(5e5, layout=layout, scaling=scaling)
    x, positions = (
        normal(2, 3, 2, 8),
        np.array([[1_000, 131_072, 1_048_576], [3, 999_999, 16_777_217]]),
    )
    frequencies, amplitude = ops.positions.rope_frequencies(8, config)
    if scaling is LONG:
        frequencies = 5e5 ** -(np.arange(0, 8, 2) / 8) / np.array(LONG.long)
    out = jax.jit(lambda x, p: rope(x, p, config))(x, jnp.asarray(positions))
    np.testing.assert_allclose(
        out, amplitude * turned(x, positions[..., None] * frequencies, layout), atol=3e-6
    )


@pytest.mark.thorough
@pytest.mark.report(
    "unslothai/unsloth#10681",
    listed="first 29",
    right=(
        "the short factors hold up to the original length itself, the long ones from one token more"
    ),
)
def test_long_rope_at_exactly_the_original_length():
    x = normal(1, 65, 1, 8)
    base = 1e4 ** -(np.arange(0, 8, 2) / 8)
    for T, factors in ((64, LONG.short), (65, LONG.long)):
        out = rope(jnp.asarray(x[:, :T]), jnp.arange(T)[None], Rope(scaling=LONG))
        angles = np.arange(T)[None, :, None] * base / np.array(factors)
        np.testing.assert_allclose(out, turned(x[:, :T], angles), atol=2e-6)


@pytest.mark.report(
    "vllm-project/vllm#30389",
    right="a fraction that was computed as r / H rotates r features, for every r and H",
    hit="30 / 88 of 88 features were 29.999999999999996, so 29: refused as an odd number",
)
def test_a_fraction_of_a_head_is_a_whole_number_of_features():
    for width in range(8, 257, 8):
        for rotated in range(2, width + 1, 2):
            frequencies, _ = ops.positions.rope_frequencies(width, Rope(fraction=rotated / width))
            assert len(frequencies) == rotated // 2
    with pytest.raises(ValueError, match="must be even"):
        ops.positions.rope_frequencies(20, Rope(fraction=0.25))


@pytest.mark.thorough
@pytest.mark.report(
    "pie-project/pie#603",
    "huggingface/transformers#48652",
    "AI-Hypercomputer/maxtext#4616",
    right=(
        "of a part of a head, frequencies and pairs are those of the part, and the rest stays as "
        "it is"
    ),
)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rotations_are_those_of_the_part(layout):
    x, positions = normal(1, 5, 2, 16), jnp.arange(700, 705)[None]
    out = rope(jnp.asarray(x), positions, Rope(fraction=0.25, layout=layout))
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_allclose(
        out[..., :4], rope(jnp.asarray(x[..., :4]), positions, Rope(layout=layout)), atol=1e-6
    )


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/vllm#46280",
    "ml-explore/mlx-lm#1507",
    "NVIDIA/TensorRT-LLM#16379",
    "sgl-project/sglang#33558",
    right=(
        "an attention factor that is given is the factor on cos and sin, used once; without one "
        "it is 0.1 ln(s) + 1"
    ),
)
def test_a_given_attention_factor_of_yarn_replaces_the_formula():
    factor_of = lambda **given: ops.positions.rope_frequencies(
        8, Rope(scaling=YaRN(64.0, 32, **given))
    )[1]
    assert factor_of(attention_factor=1.0) == 1.0
    assert factor_of(attention_factor=1.2079) == 1.2079
    assert factor_of() == pytest.approx(0.1 * np.log(64) + 1)
    x = jnp.asarray(normal(1, 1, 1, 8))
    scaled = rope(x, jnp.zeros((1, 1), int), Rope(scaling=YaRN(64.0, 32, attention_factor=1.2079)))
    np.testing.assert_allclose(scaled, 1.2079 * x, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "ml-explore/mlx#343",
    "ml-explore/mlx#3071",
    "huggingface/transformers#28380",
    right=(
        "slopes of N heads: those of the power of two below, then every second one of the power "
        "above"
    ),
)
@pytest.mark.parametrize("heads", [1, 3, 6, 12, 40])
def test_slopes_of_other_than_powers_of_two(heads):
    slopes = -np.asarray(ops.alibi(heads).block(0, 1, 1, 1))[0, :, 0, 0]  # at distance 1
    below = 2 ** int(np.floor(np.log2(heads)))
    wanted = [2.0 ** (-8 * n / below) for n in range(1, below + 1)]
    above = [2.0 ** (-8 * n / (2 * below)) for n in range(1, 2 * below + 1)]
    np.testing.assert_allclose(slopes, (wanted + above[0::2])[:heads], rtol=1e-6)


@pytest.mark.report(
    "paiml/aprender#2143", right="the first of eight slopes is 1/2 and the last 1/256"
)
def test_exponents_of_slopes_begin_at_one():
    slopes = -np.asarray(ops.alibi(8).block(0, 1, 1, 1))[0, :, 0, 0]
    np.testing.assert_allclose(slopes, 0.5 ** np.arange(1, 9), rtol=1e-6)


@pytest.mark.report(
    "lucidrains/x-transformers#10",
    "huggingface/candle#1312",
    "huggingface/candle#727",
    right=(
        "buckets: half of them exact, then by the logarithm up to the last one, which all far "
        "distances share"
    ),
)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_distances(bidirectional):
    distances = np.arange(-600, 600)
    found = np.asarray(t5_bucket(jnp.asarray(distances), bidirectional, 128, 32))
    half = 16 if bidirectional else 32
    exact, length = half // 2, np.abs(distances) if bidirectional else np.maximum(-distances, 0)
    with np.errstate(divide="ignore"):
        far = exact + (
            np.log(np.maximum(length, 1) / exact) / np.log(128 / exact) * (half - exact)
        ).astype(int)
    wanted = np.where(length < exact, length, np.minimum(far, half - 1))
    wanted = wanted + half * (distances > 0) * bidirectional
    np.testing.assert_array_equal(found, wanted)
    assert found.max() == (31 if bidirectional else half - 1)


@pytest.mark.report(
    "huggingface/transformers#7323",
    "huggingface/transformers#8518",
    right=(
        "T5's attention to the source has no bias of distance; its tables are those of the two "
        "self-attentions"
    ),
)
def test_attention_to_the_source_has_no_relative_table():
    tables = [
        path for path in params.paths(models.spec(zoo.PRESETS["t5_small"])) if "relative" in path
    ]
    assert len(tables) == 2
    assert not any("cross" in path for path in tables)


@pytest.mark.thorough
@pytest.mark.report(
    "ml-explore/mlx#3614",
    "huggingface/transformers#8021",
    "datawhalechina/base-llm#67",
    right=(
        "odd widths have as many features as asked: one more sine as in the paper, a zero as in "
        "tensor2tensor and fairseq"
    ),
    hit="with tensor2tensor's spacing an odd width had a frequency that no table has, unsaid",
)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_tables_of_odd_width(layout):
    positions = jnp.arange(7)[None]
    for width in (1, 3, 5, 8):
        assert sinusoidal(positions, width, layout).shape == (1, 7, width)
    odd, even = (sinusoidal(positions, width, layout, "tensor2tensor") for width in (5, 4))
    np.testing.assert_array_equal(odd, np.pad(even, ((0, 0), (0, 0), (0, 1))))
    # width / 2 - 1 is 0
    assert np.isfinite(sinusoidal(positions, 2, layout, "tensor2tensor")).all()


@pytest.mark.thorough
@pytest.mark.report(
    "Kyubyong/transformer#38",
    "BrianPulfer/PapersReimplementations#9",
    right=(
        "sine and cosine of a pair have one frequency, so that the product of two rows depends "
        "on their distance alone"
    ),
)
def test_products_of_rows_depend_on_the_distance():
    table = np.asarray(sinusoidal(jnp.arange(50)[None], 16)[0], np.float64)
    products = table @ table.T
    for distance in (0, 1, 17):
        np.testing.assert_allclose(np.diag(products, distance), products[0, distance], atol=1e-5)


@pytest.mark.report(
    "jax-ml/jax#4455",
    "google-research/reverse-engineering-neural-networks#26",
    right=(
        "a position outside a trained table is seen as NaN, never as its last row or counted "
        "from the end"
    ),
)
def test_positions_outside_a_table_are_not_clamped():
    rows = learned(jnp.array([[0, 3, 4, -1]]), jnp.ones((4, 2)))
    np.testing.assert_array_equal(np.isnan(rows[0, :, 0]), [False, False, True, True])


@pytest.mark.thorough
@pytest.mark.report(
    "hiyouga/LlamaFactory#7318",
    right="each text of a packed row counts from 0, so its rotations are those of the text alone",
)
def test_rotations_of_packed_texts_are_those_of_each_alone():
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 3, 3]])
    positions = ops.positions.within_segments(ids)
    real = np.asarray(ids[0]) != 0
    np.testing.assert_array_equal(np.asarray(positions[0])[real], [0, 1, 2, 0, 1, 0, 1])
    x = jnp.asarray(normal(1, 8, 1, 8))
    for scaling in (None, NTK(2.0, 2)):
        packed = rope(x, positions, Rope(scaling=scaling))
        alone = rope(x[:, 3:5], jnp.array([[0, 1]]), Rope(scaling=scaling))
        np.testing.assert_allclose(packed[:, 3:5], alone, atol=1e-6)


BAD = (0.0, -1.0, math.nan, math.inf, -math.inf)
# each position config with the name of each number that it takes
NUMBERS = [
    (Rope, {}, ("theta", "fraction")),
    (Linear, {"factor": 2.0}, ("factor",)),
    (NTK, {"factor": 2.0, "original_length": 8}, ("factor", "original_length")),
    (Llama3, {"factor": 2.0, "original_length": 8}, ("factor", "original_length", "low", "high")),
    (
        YaRN,
        {"factor": 2.0, "original_length": 8},
        ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
    ),
    (
        LongRoPE,
        {"short": (1.0,), "long": (2.0,), "original_length": 8},
        ("original_length", "attention_factor"),
    ),
]


@pytest.mark.report(
    "flashinfer-ai/flashinfer#3117",
    "RL-Align/RL-Kernel#236",
    right=(
        "a base, a factor or a length that is no finite number above 0 is refused by name where "
        "it is given"
    ),
    hit="theta=0 and factor=0 gave NaN in every logit, and -inf or NaN were taken as they were",
)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("cls", "right", "names"), NUMBERS, ids=[cls.__name__ for cls, *_ in NUMBERS]
)
def test_numbers_that_cannot_work_are_refused_at_the_door(cls, right, names, bad):
    cls(**right)
    for name in names:
        is_whole = name == "original_length"
        if is_whole and not math.isfinite(bad):
            continue  # no integer: the type says so
        number = int(bad) if is_whole else bad
        with pytest.raises(ConfigError, match=rf"^{cls.__name__}\.{name}={number}: expected"):
            cls(**right | {name: number})


# --- what is handed in


@pytest.mark.report(
    "jasonkyuyim/se3_diffusion#8",
    right="fractions of positions, such as times from 0 to 1, are refused",
    hit="they were rounded down in silence: all times below 1 were position 0",
)
def test_fractions_of_positions_are_refused(as_users_call):
    times = jnp.array([[0.0, 0.25, 1.5]])
    for function in (lambda: sinusoidal(times, 8), lambda: rope(jnp.ones((1, 3, 1, 8)), times)):
        with pytest.raises(ValueError, match="positions are integers, not float32"):
            function()


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/tpu-inference#2755",
    right="positions of 8 and 16 bits, and NumPy's, are positions",
)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_positions_of_any_integer_type(as_users_call, dtype):
    places = np.array([[0, 7, 127]])
    x = normal(1, 3, 1, 8)
    np.testing.assert_array_equal(rope(x, places.astype(dtype)), rope(x, jnp.asarray(places)))
    np.testing.assert_array_equal(
        sinusoidal(places.astype(dtype), 6), sinusoidal(jnp.asarray(places), 6)
    )


@pytest.mark.report(
    "bayesiains/nflows#86",
    "Lasagne/Lasagne#847",
    right="an integer of NumPy is an integer",
    hit=(
        "alibi ended in an AttributeError, and data said that a context of numpy.int64 was no "
        "length"
    ),
)
def test_numpys_integers_are_integers(as_users_call):
    assert ops.alibi(np.int64(6)) == ops.alibi(6)
    assert sources.context_length(SimpleNamespace(context_length=np.int64(8))) == 8


@pytest.mark.report(
    "google/flax#5499",
    right="no positions make no rows",
    hit="a ZeroDivisionError of `sinusoidal` with interleaved features",
)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_no_positions_make_no_rows(layout):
    none = jnp.zeros((2, 0), int)
    assert sinusoidal(none, 7, layout).shape == (2, 0, 7)
    assert rope(jnp.zeros((2, 0, 1, 8)), none, Rope(layout=layout)).shape == (2, 0, 1, 8)


PLACED = models.ModelConfig(
    19, 2, 16, 4, 32, d_ff=8, init_std=0.5, positions=models.AttentionPositions(models.Learned())
)
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 19, (2, 9)), jnp.int32)


def with_other_table(tree, *path):
    """The parameters, with other positions in the stack of this path."""
    if not path:
        table = tree["shared"]["positions"]
        return tree | {"shared": tree["shared"] | {"positions": table + normal(*table.shape)}}
    return tree | {path[0]: with_other_table(tree[path[0]], *path[1:])}


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/detr#105",
    "facebookresearch/detr#415",
    "facebookresearch/detr#607",
    "ultralytics/ultralytics#13832",
    right=(
        "positions `AttentionPositions` reach queries and keys, never values: a token that sees "
        "one key is the same anywhere"
    ),
)
def test_positions_in_attention_do_not_reach_values():
    tree = models.init(PLACED, jax.random.key(0))
    both = [models.apply(PLACED, each, TOKENS).logits for each in (tree, with_other_table(tree))]
    # it sees itself alone
    np.testing.assert_allclose(both[0][:, 0], both[1][:, 0], rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(both[0][:, 1:] - both[1][:, 1:]).max()) > 0.01


@pytest.mark.report(
    "facebookresearch/detr#580",
    "huggingface/transformers#23091",
    right=(
        "a cross-attention adds the decoder's positions to its queries, and the encoder's to its "
        "keys"
    ),
)
@pytest.mark.thorough
def test_each_stack_of_a_pair_has_its_own_positions():
    encoder = replace(PLACED, masks=(masks.full(),), heads=())
    pair = models.EncoderDecoder(encoder, replace(PLACED, num_layers=1))
    tree = models.init(pair, jax.random.key(0))

    def logits(tree, source):
        return models.apply(pair, tree, TOKENS[:, :1], source=source).logits

    other_encoder, other_decoder = (with_other_table(tree, name) for name in ("encoder", "decoder"))
    # one source and one target token: there is nothing to choose between, so positions change
    # nothing
    alone = [logits(each, TOKENS[:, :1]) for each in (tree, other_encoder, other_decoder)]
    np.testing.assert_allclose(alone[0], alone[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone[0], alone[2], rtol=1e-5, atol=1e-5)
    # one target token and several of the source: the decoder's positions choose between them too
    among = [logits(each, TOKENS) for each in (tree, other_encoder, other_decoder)]
    assert all(float(jnp.abs(among[0] - each).max()) > 0.01 for each in among[1:])


@pytest.mark.report(
    "ml-explore/mlx-lm#93",
    "mlfoundations/open_lm#74",
    "skyzh/tiny-llm#46",
    right=(
        "with a cache, the next token has the position behind those of the cache, also in every "
        "attention"
    ),
)
@pytest.mark.thorough
def test_positions_in_attention_go_on_behind_a_cache():
    tree = models.init(PLACED, jax.random.key(0))
    expected = models.apply(PLACED, tree, TOKENS).logits
    cache = decoding.init_cache(PLACED, 2, 16)
    for i in range(TOKENS.shape[1]):
        output = models.apply(PLACED, tree, TOKENS[:, i : i + 1], cache=cache)
        cache = output.cache
        np.testing.assert_allclose(output.logits[:, 0], expected[:, i], rtol=1e-4, atol=1e-4)
