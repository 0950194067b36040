"""Positional encodings against their definitions in float64, and the properties they exist for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.errors import ConfigError
from jaxformer.ops.bias import alibi, t5_bucket
from jaxformer.ops.positions import (
    NTK,
    Linear,
    Llama3,
    LongRoPE,
    Rope,
    YaRN,
    learned,
    rope,
    rope_frequencies,
    sinusoidal,
    within_segments,
)


def angle_error(largest):
    """Frequency and product are float32: the angle is off by two relative roundings of 2^-24, sine
    and cosine by as much."""
    return 2.1 * 2.0**-24 * largest + 2e-7


def table(positions, width, layout, spacing, base=10_000.0):
    """The definition, entry by entry."""
    out = np.zeros((len(positions), width))
    for row, p in enumerate(positions):
        for i in range(width // 2):
            exponent = 2 * i / width if spacing == "paper" else i / (width // 2 - 1)
            angle = p / base**exponent
            sin, cos = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2)
            out[row, sin], out[row, cos] = math.sin(angle), math.cos(angle)
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("spacing", ["paper", "tensor2tensor"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoids_by_definition(layout, spacing):
    positions = np.array([[0, 1, 2, 511], [-7, 1000, 131_071, 10_000_000]])
    ours = sinusoidal(jnp.asarray(positions), 16, layout, spacing)
    assert ours.dtype == jnp.float32
    # angles up to pi, sines and cosines are rounded once each
    for row, p in zip(ours, positions, strict=True):
        np.testing.assert_allclose(row, table(p, 16, layout, spacing), rtol=0, atol=4e-7)
    other_base = sinusoidal(jnp.asarray(positions[:1]), 6, layout, spacing, base=100.0)[0]
    np.testing.assert_allclose(
        other_base, table(positions[0], 6, layout, spacing, 100.0), rtol=0, atol=4e-7
    )


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_an_odd_width_has_one_sine_more(layout):
    """As Marian's table: sines of exponents 0, 2, 4 of 5, cosines of 0, 2."""
    angle = lambda e: 7 / 10_000 ** (e / 5)
    sines, cosines = [math.sin(angle(e)) for e in (0, 2, 4)], [math.cos(angle(e)) for e in (0, 2)]
    want = (
        [*sines, *cosines]
        if layout == "half"
        else [sines[0], cosines[0], sines[1], cosines[1], sines[2]]
    )
    np.testing.assert_allclose(sinusoidal(jnp.array([[7]]), 5, layout)[0, 0], want, atol=4e-7)


@pytest.mark.thorough
def test_the_three_published_tables():
    """Row 1 of width 4: the paper interleaves; Marian puts sines first; tensor2tensor also ends at
    1/10000 exactly."""
    s, c = math.sin, math.cos
    one = jnp.array([[1]])
    rows = {
        ("interleaved", "paper"): [s(1), c(1), s(0.01), c(0.01)],
        ("half", "paper"): [s(1), s(0.01), c(1), c(0.01)],
        ("half", "tensor2tensor"): [s(1), s(1e-4), c(1), c(1e-4)],
    }
    for (layout, spacing), row in rows.items():
        # float32 sine and cosine
        np.testing.assert_allclose(sinusoidal(one, 4, layout, spacing)[0, 0], row, rtol=1e-6)


@pytest.mark.thorough
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 500), st.integers(-300, 500))
def test_a_shift_is_a_rotation_that_does_not_depend_on_position(p, shift):
    """PE(p + k) = R(k) PE(p) with R(k) block diagonal: section 3.5 of the paper."""
    width = 8
    now, later = np.float64(sinusoidal(jnp.array([[p, p + shift]]), width))[0]
    for i in range(width // 2):
        turn = shift * 10_000.0 ** (-2 * i / width)
        rotation = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
        np.testing.assert_allclose(
            later[2 * i : 2 * i + 2],
            rotation @ now[2 * i : 2 * i + 2],
            rtol=0,
            atol=3 * angle_error(1000),
        )


def test_learned_positions_are_rows_and_beyond_the_table_nan():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 3))
    positions = np.array([[0, 4, 2], [3, 3, 1]])
    np.testing.assert_array_equal(
        learned(jnp.asarray(positions), jnp.asarray(rows)), np.float32(rows)[positions]
    )
    outside = np.asarray(learned(jnp.array([[-1, 0, 5, 1000]]), jnp.asarray(rows, jnp.bfloat16)))[
        0
    ].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(outside).all(-1), [True, False, True, True])
    gradient = jax.grad(lambda t: learned(jnp.asarray(positions), t).sum())(jnp.asarray(rows))
    np.testing.assert_array_equal(gradient[:, 0], np.bincount(positions.ravel(), minlength=5))


def rotated(x, positions, inverse, layout, sharpen=1.0):
    """The definition in float64: each pair is a complex number, multiplied by exp(i angle)."""
    out = np.array(x, np.float64)
    half = len(inverse)
    for i, frequency in enumerate(inverse):
        a, b = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        turned = (out[..., a] + 1j * out[..., b]) * (sharpen * np.exp(1j * positions * frequency))[
            ..., None
        ]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_rope_by_definition(layout, fraction):
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 5, 3, 16)), rng.integers(0, 1000, (2, 5))
    config = Rope(theta=500.0, fraction=fraction, layout=layout)
    ours = jax.jit(rope, static_argnums=2)(
        jnp.asarray(x, jnp.float32), jnp.asarray(positions), config
    )
    r = int(16 * fraction)
    inverse = [500.0 ** (-2 * i / r) for i in range(r // 2)]
    expected = rotated(x, positions, inverse, layout)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=np.abs(x).max() * 2 * angle_error(1000))
    # the rest passes untouched
    np.testing.assert_array_equal(ours[..., r:], np.float32(x)[..., r:])
    # a rotation keeps norms; three float32 roundings an entry
    np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_rope_in_float64():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 5, 3, 8)), rng.integers(0, 100_000, (2, 5))
    with jax.enable_x64(True):
        ours = rope(jnp.asarray(x), jnp.asarray(positions))
        assert ours.dtype == jnp.float64
        # relative error 2^-53 in an angle of 1e5 is 1e-11
        np.testing.assert_allclose(
            ours, rotated(x, positions, 10_000.0 ** -(np.arange(4) / 4), "half"), atol=1e-10
        )


turn = jax.jit(rope, static_argnums=2)


@pytest.mark.thorough
@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, 2**31),
    st.integers(-50, 500),
    st.sampled_from(["half", "interleaved"]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([None, Linear(4.0), Llama3(8.0, 64), YaRN(4.0, 64)]),
)
def test_rope_scores_depend_on_distance_alone(seed, shift, layout, fraction, scaling):
    rng = np.random.default_rng(seed)
    query, key = (jnp.asarray(rng.normal(size=(1, 4, 1, 16)), jnp.float32) for _ in range(2))
    i, j = (jnp.asarray(rng.integers(50, 500, (1, 4))) for _ in range(2))
    config = Rope(layout=layout, fraction=fraction, scaling=scaling)
    score = lambda s: np.einsum(
        "btnh,bsnh->bts", *(np.float64(turn(x, p + s, config)) for x, p in ((query, i), (key, j)))
    )
    # sixteen products of order one, angles of at most 1000
    np.testing.assert_allclose(score(shift), score(0), rtol=0, atol=100 * angle_error(1000))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31), st.sampled_from([1.0, 0.5]), st.sampled_from([None, YaRN(4.0, 64)]))
def test_layouts_are_one_another_permuted(seed, fraction, scaling):
    """Interleaved features (2i, 2i + 1) are half features (i, i + r/2): converting checkpoints is
    this permutation."""
    rng = np.random.default_rng(seed)
    x, positions = (
        jnp.asarray(rng.normal(size=(2, 3, 2, 8)), jnp.float32),
        jnp.asarray(rng.integers(0, 100, (2, 3))),
    )
    r = int(8 * fraction)
    to_half = np.concatenate([np.arange(0, r, 2), np.arange(1, r, 2), np.arange(r, 8)])
    half, interleaved = (
        Rope(fraction=fraction, layout=layout, scaling=scaling)
        for layout in ("half", "interleaved")
    )
    ours = np.asarray(turn(x, positions, interleaved))[..., to_half]
    # the same products and sums; the compiler may contract one of them into a fused multiply-add
    np.testing.assert_allclose(
        ours, turn(jnp.asarray(np.asarray(x)[..., to_half]), positions, half), rtol=0, atol=1e-6
    )


def test_meta_rows_to_hugging_face_rows_give_the_same_scores():
    """models.md 2.4: W.reshape(h, d/2, 2, D).transpose(0, 2, 1, 3) turns interleaved projections
    into half projections."""
    rng = np.random.default_rng(0)
    N, H, D = 2, 8, 6
    x = rng.normal(size=(1, 5, D))
    meta = rng.normal(size=(2, N * H, D))
    hf = [w.reshape(N, H // 2, 2, D).transpose(0, 2, 1, 3).reshape(N * H, D) for w in meta]

    def scores(weights, layout):
        q, k = (jnp.asarray((x @ w.T).reshape(1, 5, N, H), jnp.float32) for w in weights)
        return np.einsum(
            "btnh,bsnh->bnts", *(turn(y, jnp.arange(5)[None], Rope(layout=layout)) for y in (q, k))
        )

    # scores of size ~50 in float32
    np.testing.assert_allclose(
        scores(meta, "interleaved"), scores(hf, "half"), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_keep_float32_angles(dtype):
    """At position 131,071 a bfloat16 angle would be off by hundreds of radians; the result may be
    off by one rounding."""
    rng = np.random.default_rng(0)
    positions = np.array([[0, 1, 255, 257, 4097, 65_535, 100_003, 131_071]])
    x = jnp.asarray(rng.normal(size=(1, 8, 2, 8)), dtype)
    ours = turn(x, jnp.asarray(positions), Rope())
    assert ours.dtype == dtype
    expected = rotated(np.float64(x), positions, 10_000.0 ** -(np.arange(4) / 4), "half")
    roundoff = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-11
    bound = (
        roundoff * np.abs(expected)
        + 3 * angle_error(positions)[..., None, None] * np.abs(np.float64(x)).max()
    )
    assert (np.abs(np.float64(ours) - expected) <= bound).all()


THETA, OLD = 10_000.0, 128
PLAIN = [THETA ** (-2 * i / 32) for i in range(16)]


SHORT = tuple(np.linspace(1.0, 3.0, 16).tolist())
LONG = tuple(np.linspace(2.0, 9.0, 16).tolist())


def yarn(factor, original, fast=32.0, slow=1.0, truncate=True):
    """Peng et al. 2023, section 3.2, pair by pair: ramp over the pair index, ends where a pair
    turns fast or slow times."""
    ends = [
        32 / 2 * math.log(original / (2 * math.pi * turns)) / math.log(THETA)
        for turns in (fast, slow)
    ]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    first, last = max(first, 0), min(last, 31)
    out = []
    for i, frequency in enumerate(PLAIN):
        ramp = min(max((i - first) / (last - first), 0), 1)
        out.append(frequency / factor * ramp + frequency * (1 - ramp))
    return out


def llama3(factor, original, low=1.0, high=4.0):
    """The released code's three cases, by wavelength."""
    out = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            out.append(frequency / factor)
        elif wavelength < original / high or high < low:
            out.append(frequency)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return out


def rebased(base):
    return [base ** (-2 * i / 32) for i in range(16)]


SCALINGS = [
    (None, PLAIN, 1.0),
    (Linear(4.0), [f / 4.0 for f in PLAIN], 1.0),
    (NTK(4.0), rebased(THETA * 4.0 ** (32 / 30)), 1.0),
    (NTK(4.0, OLD), PLAIN, 1.0),  # dynamic: nothing changes within the original length
    (Llama3(8.0, OLD), llama3(8.0, OLD), 1.0),
    (Llama3(32.0, 8192, 0.5, 8.0), llama3(32.0, 8192, 0.5, 8.0), 1.0),
    (YaRN(4.0, OLD), yarn(4.0, OLD), 0.1 * math.log(4.0) + 1),
    (YaRN(16.0, 4096), yarn(16.0, 4096), 0.1 * math.log(16.0) + 1),
    (
        YaRN(4.0, 4096, 64.0, 2.0, truncate=False),
        yarn(4.0, 4096, 64.0, 2.0, False),
        0.1 * math.log(4.0) + 1,
    ),
    # not one slow turn fits: the ramp runs backwards, as in transformers
    (
        YaRN(4.0, 3),
        PLAIN,
        0.1 * math.log(4.0) + 1,
    ),
    (YaRN(0.5, OLD, attention_factor=0.7), yarn(0.5, OLD), 0.7),
    (YaRN(0.5, OLD), yarn(0.5, OLD), 1.0),
    (Llama3(8.0, OLD, 4.0, 4.0), llama3(8.0, OLD, 4.0, 4.0), 1.0),
    (Llama3(8.0, OLD, 4.0, 1.0), llama3(8.0, OLD, 4.0, 1.0), 1.0),
    (LongRoPE((2.0,) * 16, SHORT, OLD, 1.3), [f / 2 for f in PLAIN], 1.3),
]


@pytest.mark.parametrize(("scaling", "expected", "sharpen"), SCALINGS, ids=lambda x: str(x)[:40])
def test_scaling_formulas(scaling, expected, sharpen):
    inverse, factor = rope_frequencies(32, Rope(theta=THETA, scaling=scaling))
    np.testing.assert_allclose(inverse, expected, rtol=1e-13)  # float64 powers
    assert factor == pytest.approx(sharpen, rel=1e-15)
    partial, _ = rope_frequencies(64, Rope(theta=THETA, fraction=0.5, scaling=scaling))
    # exponents count rotated features, not the head
    np.testing.assert_array_equal(partial, inverse)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("length", [3, OLD, OLD + 1, 1000])
def test_scalings_that_read_the_positions_of_the_call(length, fraction):
    """transformers: a = factor n / L - (factor - 1) of a dynamic base, or the long factors, where n
    = max(position) + 1 > L.

    Of each row its own n: a row beside a longer one is turned as it is alone.
    """
    positions, width = jnp.array([[0, 1, 2], [0, 1, length - 1]]), int(32 / fraction)
    growth = [4.0 * max(n, OLD) / OLD - 3.0 for n in (3, length)]
    factors = [LONG if n > OLD else SHORT for n in (3, length)]
    find = jax.jit(
        lambda p, s: rope_frequencies(width, Rope(THETA, fraction, scaling=s), p)[0],
        static_argnums=1,
    )
    for scaling, expected in (
        (NTK(4.0, OLD), [rebased(THETA * each ** (32 / 30)) for each in growth]),
        (
            LongRoPE(SHORT, LONG, OLD, 1.2),
            [[f / by for f, by in zip(PLAIN, each, strict=True)] for each in factors],
        ),
    ):
        found = find(positions, scaling)
        for token in range(3):
            np.testing.assert_allclose(found[:, token], expected, rtol=1e-6)  # one power in float32
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 1, width)), jnp.float32)
        ours = turn(x, positions, Rope(THETA, fraction, scaling=scaling))
        sharpen = getattr(scaling, "attention_factor", 1.0)
        for row in range(2):
            wanted = rotated(
                x[row : row + 1],
                np.asarray(positions)[row : row + 1],
                expected[row],
                "half",
                sharpen,
            )
            np.testing.assert_allclose(
                ours[row : row + 1], wanted, rtol=0, atol=10 * angle_error(1000)
            )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scaling", [NTK(4.0, 4), LongRoPE(SHORT, LONG, 4)], ids=["ntk", "longrope"]
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_packed_segment_is_turned_as_it_is_alone(scaling, seed):
    rng = np.random.default_rng(seed)
    # 0: padding, which counts nowhere
    ids = np.repeat(rng.integers(0, 4, 12), rng.integers(1, 8, 12))[None, :20]
    ids = np.pad(ids, ((0, 0), (0, 20 - ids.shape[1])))
    x = jnp.asarray(rng.normal(size=(1, 20, 1, 32)), jnp.float32)
    found = turn(x, within_segments(jnp.asarray(ids)), Rope(scaling=scaling))
    real = np.flatnonzero(ids[0])
    for run in np.split(real, np.flatnonzero(np.diff(ids[0, real])) + 1):
        alone = turn(x[:, run], jnp.arange(len(run))[None], Rope(scaling=scaling))
        np.testing.assert_allclose(found[:, run], alone, rtol=0, atol=1e-5)


def test_yarn_sharpens_the_scores():
    """cos and sin carry sqrt of the temperature: a score at distance 0 grows by (0.1 ln s +
    1)^2."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 3, 1, 32)), jnp.float32)
    ours = np.float64(turn(x, jnp.array([[0, 5, 90]]), Rope(scaling=YaRN(4.0, OLD))))
    growth = (0.1 * math.log(4.0) + 1) ** 2
    # float32 rotation
    np.testing.assert_allclose((ours**2).sum(-1), growth * (np.float64(x) ** 2).sum(-1), rtol=1e-6)
    expected = rotated(x, np.array([[0, 5, 90]]), yarn(4.0, OLD), "half", math.sqrt(growth))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=5 * angle_error(90))


def test_scalings_at_factor_one_change_nothing():
    for scaling in (Linear(1.0), NTK(1.0), Llama3(1.0, OLD), YaRN(1.0, OLD)):
        inverse, factor = rope_frequencies(32, Rope(scaling=scaling))
        np.testing.assert_allclose(inverse, PLAIN, rtol=1e-14)  # float64 rounding
        assert factor == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_within_segments(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 3, (3, 12))
    found = np.asarray(within_segments(jnp.asarray(ids)))
    for b in range(3):
        before, position = 0, -1
        for t in np.flatnonzero(ids[b]):  # padding is not counted and ends nothing
            position = position + 1 if ids[b, t] == before else 0
            before = ids[b, t]
            assert found[b, t] == position
    assert found.min() >= 0 and found.max() < 12  # of padding, too: a row of a learned table


@pytest.mark.thorough
def test_left_padding_does_not_count():
    ids = jnp.array([[0, 0, 0, 1, 1, 1], [1, 1, 2, 2, 2, 3]])
    np.testing.assert_array_equal(within_segments(ids)[:, 3:], [[0, 1, 2], [1, 2, 0]])
    np.testing.assert_array_equal(within_segments(jnp.ones((1, 1), jnp.int32)), [[0]])


def test_positions_broadcast_over_the_batch():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 2, 8)), jnp.float32)
    row = jnp.arange(4)[None]
    np.testing.assert_array_equal(turn(x, row, Rope()), turn(x, jnp.tile(row, (3, 1)), Rope()))


def test_errors():
    for width, fraction in ((6, 0.5), (8, 0.1), (5, 1.0)):
        with pytest.raises(ValueError, match="even"):
            rope(jnp.ones((1, 1, 1, width)), jnp.array([[0]]), Rope(fraction=fraction))
    with pytest.raises(ValueError, match="16 factors; got 16 short, 3 long"):
        rope_frequencies(32, Rope(scaling=LongRoPE(SHORT, (1.0,) * 3, OLD)))
    with pytest.raises(ValueError, match="at least 4"):
        rope_frequencies(2, Rope(scaling=NTK(2.0)))


@pytest.mark.parametrize("name", ["short", "long"])
def test_one_bad_factor_of_many_is_refused(name):
    right = {"short": (1.0, 1.0), "long": (2.0, 2.0), "original_length": 8}
    with pytest.raises(ConfigError, match=rf"LongRoPE\.{name}=0\.0"):
        LongRoPE(**right | {name: (1.0, 0.0)})


def test_numbers_that_cannot_work_together_are_refused():
    Rope(1.0)  # every pair turns at the same speed: allowed
    with pytest.raises(ConfigError, match=r"theta=1\.0: expected a number above 1 with YaRN"):
        Rope(1.0, scaling=YaRN(2.0, 8))
    with pytest.raises(ConfigError, match="at most 1"):
        Rope(fraction=1.5)
    with np.errstate(over="ignore"), pytest.raises(ConfigError, match="no finite frequencies"):
        rope_frequencies(8, Rope(scaling=Linear(5e-324)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sinusoidal(jnp.array([[1]]), 0), "width=0"),
        (lambda: sinusoidal(jnp.array([[1]]), 4, base=0.0), "base=0"),
        (lambda: sinusoidal(jnp.array([[1]]), 4, base=math.nan), "base=nan"),
        (lambda: alibi(0), "num_heads=0"),
        (lambda: t5_bucket(jnp.arange(3), True, 128, 3), "buckets=3"),
        (lambda: t5_bucket(jnp.arange(3), True, 0, 32), "max_distance=0"),
    ],
)
def test_functions_of_positions_refuse_numbers_that_cannot_work(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
