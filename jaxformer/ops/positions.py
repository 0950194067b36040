"""Positional encodings: functions of integer positions.

`sinusoidal`, `learned` and `rope` are the functions to read. Angles are exact to the last digit of
float32, also at large positions (`_angles`). A `Rope` may have a scaling of its frequencies for
contexts longer than those of the pretraining. Biases of scores stand in `ops.bias`.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError, check_positive, check_whole
from jaxformer.ops import tpu
from jaxformer.sharding import platform

Layout = Literal["interleaved", "half"]
ANY_LENGTH = 2**30  # more tokens than any text has


def sinusoidal(
    positions: Int[Array, "B T"],
    width: int,
    layout: Layout = "interleaved",
    spacing: Literal["paper", "tensor2tensor"] = "paper",
    base: float = 10_000.0,
) -> Float[Array, "B T D"]:
    """sin and cos of position / base^e_i for i < width / 2.

    `spacing`: e_i = 2i / width in "paper" (also Marian), and i / (width/2 - 1) in "tensor2tensor"
    (also fairseq, Whisper). The last feature of an odd width is one more sine in "paper", and 0 in
    "tensor2tensor". `layout`: sine at even and cosine at odd features in "interleaved" (the paper),
    all sines before all cosines in "half" (Marian, tensor2tensor). Vaswani et al. 2017,
    arXiv:1706.03762, section 3.5.
    """
    check_whole("sinusoidal: width", width)
    check_positive("sinusoidal: base", base)
    positions = _as_integers("sinusoidal", positions)
    if layout not in ("interleaved", "half") or spacing not in ("paper", "tensor2tensor"):
        raise ValueError(
            f"sinusoidal: no layout {layout!r} with spacing {spacing!r}; see the docstring"
        )
    if spacing == "tensor2tensor" and width % 2:
        even = sinusoidal(positions, width - 1, layout, spacing, base)
        return jnp.pad(even, ((0, 0), (0, 0), (0, 1)))
    i = np.arange(-(-width // 2))
    exponent = 2 * i / width if spacing == "paper" else i / max(width // 2 - 1, 1)
    angles = _angles(positions, base**-exponent)
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    if layout == "half":
        return jnp.concatenate([sin, cos[..., : width // 2]], axis=-1)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions.shape, 2 * len(i))[..., :width]


def _as_integers(function: str, positions: Any) -> Array:
    """Positions as an array.

    Raises ValueError for positions that are no integers: the angles would round them down.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        advice = (
            "for a longer context give the rotations a scaling, such as Rope(scaling=Linear(2))"
        )
        raise ValueError(f"{function}: positions are integers, not {positions.dtype}; {advice}")
    return positions


def _angles(positions: Int[Array, "B T"], frequencies: np.ndarray) -> Float[Array, "B T F"]:
    """positions x frequencies modulo 2 pi, exact to the last digit of float32 at any position.

    A float32 product has an error of 3e-5 at position 1,000, and of 2e-3 at 100,000. Here a full
    turn is 2^32 units, so that 32-bit integers wrap around at full turns. A frequency is a whole
    number of units per position, and a fraction of a unit.
    """
    if jnp.result_type(float) == jnp.float64:
        return positions[..., None].astype(jnp.float64) * jnp.asarray(frequencies)[None, None]
    units = frequencies / (2 * math.pi) % 1 * 2.0**32
    integer_units = jnp.asarray(np.floor(units).astype(np.uint32))[None, None]
    float_positions = positions[..., None].astype(jnp.float32)
    fractions = jnp.asarray(units % 1, jnp.float32)[None, None]
    rest = float_positions * fractions
    carry = jnp.floor(rest)
    count = positions[..., None].astype(jnp.uint32) * integer_units
    count = count + carry.astype(jnp.int32).astype(jnp.uint32)
    return (count.astype(jnp.int32).astype(jnp.float32) + (rest - carry)) * (2 * math.pi / 2**32)


def learned(positions: Int[Array, "B T"], table: Float[Array, "P D"]) -> Float[Array, "B T D"]:
    """table[position]; NaN for a position outside of the table. Gehring et al. 2017."""
    # jnp.take would count negative positions from the end
    inside = jnp.where(positions < 0, len(table), positions)
    return jnp.take(table, inside, axis=0, mode="fill", fill_value=jnp.nan)


def check_scaling(config: Any) -> None:
    """The `__post_init__` of a scaling.

    Raises ConfigError for a number that is not above 0, or not finite.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        has_no_number = field.type is bool or (value is None and field.default is None)
        if has_no_number:
            continue
        for number in value if isinstance(value, tuple | list | np.ndarray) else (value,):
            check_positive(f"{type(config).__name__}.{field.name}", number)


# A scaling of rotary positions is a class with `scale(frequencies, theta, lengths)`, which returns
# (scaled frequencies, factor on cos and sin). `frequencies` are the r/2 frequencies without
# scaling, float64 on the host. `lengths` [B, T, 1] or [B, 1, 1] has the length of the text of each
# token; None: it is within the original length. A scaling that reads `lengths` also has
# `rotation_until`, as `NTK` and `LongRoPE` have.
@dataclass(frozen=True)
class Linear:
    """Position interpolation: frequency / factor. Chen et al. 2023, arXiv:2306.15595, eq. 4."""

    factor: float  # new context length divided by the old one

    __post_init__ = check_scaling

    def scale(
        self, frequencies: np.ndarray, theta: float, lengths: Array | None
    ) -> tuple[Any, float]:
        return frequencies / self.factor, 1.0


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling of the base: base * a^(r / (r - 2)) for r rotated features.

    a = factor. With an `original_length` it is "dynamic": a = factor * n / original_length -
    (factor - 1), where n is the largest position of the segment + 1, and at least
    `original_length`. A cache has one n for all of its text, `Cache.text_lengths`. Beyond the
    original length n changes with each token, so `generate` reads the whole text again for each
    token, which is slow. The frequencies of a dynamic NTK are float32: at position p an angle has
    an error of up to about 1e-7 p radians. Peng et al. 2023, arXiv:2309.00071, section 3.1.
    """

    factor: float  # new context length divided by the old one
    original_length: int | None = None  # of the pretraining; None: the factor is fixed

    __post_init__ = check_scaling

    def scale(
        self, frequencies: np.ndarray, theta: float, lengths: Array | None
    ) -> tuple[Any, float]:
        rotated = 2 * len(frequencies)
        factor = self.factor
        if rotated < 4:
            raise ValueError(
                f"rope: NTK needs at least 4 rotated features, for r / (r - 2); got {rotated}"
            )
        if self.original_length is not None:
            if lengths is None:
                return frequencies, 1.0
            factor = factor * jnp.maximum(lengths / self.original_length, 1) - (factor - 1)
            frequencies = frequencies[None, None]
        exponent = np.arange(0, rotated, 2).reshape(frequencies.shape) / rotated
        return frequencies * factor ** (-exponent * rotated / (rotated - 2)), 1.0

    def rotation_until(self, length: Any) -> Any:
        """The longest text that is rotated as a text of `length` tokens is."""
        if self.original_length is None:
            return length + ANY_LENGTH
        beyond = length - self.original_length
        return self.original_length + (length > self.original_length) * beyond


@dataclass(frozen=True)
class LongRoPE:
    """frequency_i / short_i, or / long_i in a segment with positions beyond `original_length`.

    cos and sin are multiplied by `attention_factor`. A cache has one set of factors for all of its
    text. When the text grows beyond `original_length`, `generate` reads all of it again, once. Ding
    et al. 2024, arXiv:2402.13753.
    """

    short: tuple[float, ...]  # divisors of the frequencies up to `original_length`
    long: tuple[float, ...]  # divisors beyond it
    original_length: int  # context length of the pretraining
    attention_factor: float = 1.0  # multiplies cos and sin

    __post_init__ = check_scaling

    def scale(
        self, frequencies: np.ndarray, theta: float, lengths: Array | None
    ) -> tuple[Any, float]:
        pairs = len(frequencies)
        sizes = len(self.short), len(self.long)
        if sizes != (pairs, pairs):
            raise ValueError(
                f"rope: LongRoPE needs {pairs} factors; got {sizes[0]} short, {sizes[1]} long"
            )
        short = frequencies / np.array(self.short)
        if lengths is None:
            return short, self.attention_factor
        long = frequencies / np.array(self.long)
        is_long = lengths > self.original_length
        return jnp.where(is_long, long[None, None], short[None, None]), self.attention_factor

    def rotation_until(self, length: Any) -> Any:
        """The longest text that is rotated as a text of `length` tokens is."""
        return self.original_length + (length > self.original_length) * ANY_LENGTH


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by `factor`, high ones unchanged, a linear blend between them.

    Llama 3.1 release, 2024.
    """

    factor: float  # divisor of low frequencies
    original_length: int  # context length of the pretraining
    low: float = 1.0  # turns up to which a frequency is low
    high: float = 4.0  # turns from which a frequency is high

    __post_init__ = check_scaling

    def scale(
        self, frequencies: np.ndarray, theta: float, lengths: Array | None
    ) -> tuple[Any, float]:
        # full turns within the original context
        turns = self.original_length * frequencies / (2 * math.pi)
        if self.high > self.low:
            share_of_high = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        else:
            share_of_high = (turns >= self.low).astype(float)
        return frequencies * (share_of_high + (1 - share_of_high) / self.factor), 1.0


@dataclass(frozen=True)
class YaRN:
    """Slow dimensions are interpolated, fast ones are unchanged, with a linear ramp between them.

    cos and sin are multiplied by `attention_factor`. Peng et al. 2023, arXiv:2309.00071, eq. 17-22.
    """

    factor: float  # new context length divided by the old one
    original_length: int  # context length of the pretraining
    beta_fast: float = 32.0  # turns from which a dimension is fast
    beta_slow: float = 1.0  # turns up to which a dimension is slow
    truncate: bool = True  # round the ramp's ends outwards, to whole dimensions
    # multiplies cos and sin; None: 0.1 ln(factor) + 1, and 1 for a factor below 1
    attention_factor: float | None = None

    __post_init__ = check_scaling

    def scale(
        self, frequencies: np.ndarray, theta: float, lengths: Array | None
    ) -> tuple[Any, float]:
        pairs = len(frequencies)

        # the pair, a fraction, that makes this number of full turns within the original context
        def pair(turns):
            return pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        first = pair(self.beta_fast)
        last = pair(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, 2 * pairs - 1)
        # If the original context is shorter than one slow turn, last - first is negative. Then
        # nothing is interpolated.
        ramp = np.clip((np.arange(pairs) - first) / (last - first or 1e-3), 0, 1)
        amplitude = self.attention_factor
        if amplitude is None:
            amplitude = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp, amplitude


@dataclass(frozen=True)
class Rope:
    """Rotary positions: how `rope` rotates queries and keys."""

    theta: float = 10_000.0  # base of the frequencies
    fraction: float = 1.0  # of the head that is rotated
    layout: Layout = "half"  # how features form pairs
    # of frequencies, for longer contexts
    scaling: Linear | NTK | Llama3 | YaRN | LongRoPE | None = None

    def __post_init__(self):
        check_positive("Rope.theta", self.theta)
        check_positive("Rope.fraction", self.fraction)
        if self.fraction > 1:
            raise ConfigError(f"Rope.fraction={self.fraction}: expected at most 1, the whole head")
        if isinstance(self.scaling, YaRN) and self.theta <= 1:
            expected = "expected a number above 1 with YaRN, which divides by its logarithm"
            raise ConfigError(f"Rope.theta={self.theta}: {expected}")


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    config: Rope = Rope(),
    text_lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Rotates pair i of the features by the angle position * theta^(-2i / r).

    The first r = fraction * H features are rotated. Pairs are (i, i + r/2) in layout "half"
    (Hugging Face LLaMA, GPT-NeoX) and (2i, 2i + 1) in "interleaved" (the paper, Meta's LLaMA,
    GPT-J). `text_lengths` has the length of the whole text of each batch row if `positions` are
    only a piece of it. Raises ValueError if r is odd. Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    positions = _as_integers("rope", positions)
    frequencies, amplitude = rope_frequencies(x.shape[-1], config, positions, text_lengths)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = _rotation_angles(positions, frequencies, x.shape[-1], config)[:, :, None, :]
    cos = (jnp.cos(angles) * amplitude).astype(wide)
    sin = (jnp.sin(angles) * amplitude).astype(wide)
    # what depends on the text may have a gradient, and float64 has a forward mode: pairs have both
    is_fixed = isinstance(frequencies, np.ndarray) and x.dtype.itemsize <= 4
    rotate = tpu.rotated if is_fixed and platform() == "tpu" else rotated_pairs
    return rotate(x, cos, sin, config.layout)


def rotated_pairs(x: Float[Array, "B T N H"], cos: Array, sin: Array, layout: str) -> Array:
    """(a cos - b sin, b cos + a sin) of each pair (a, b); cos and sin are `[#B, T, 1, pairs]`."""
    features, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    if layout == "half":
        a, b = jnp.split(features.astype(cos.dtype), 2, axis=-1)
    else:
        a, b = (features[..., i::2].astype(cos.dtype) for i in (0, 1))
    pair = a * cos - b * sin, b * cos + a * sin
    if layout == "half":
        rotated = jnp.concatenate(pair, axis=-1)
    else:
        rotated = jnp.stack(pair, axis=-1).reshape(features.shape)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _rotation_angles(
    positions: Int[Array, "#B T"], frequencies: Any, head_width: int, config: Rope
) -> Float[Array, "#B T F"]:
    """positions x frequencies.

    Frequencies that depend on the positions are an array of the device, others one of the host.
    """
    if isinstance(frequencies, np.ndarray):
        return _angles(positions, frequencies)
    if isinstance(config.scaling, LongRoPE):
        # On the device a frequency has 24 bits, too few for large positions. But it is one of two
        # frequencies that the host knows exactly.
        short, _ = rope_frequencies(head_width, config)
        only_long = replace(config.scaling, short=config.scaling.long)
        long, _ = rope_frequencies(head_width, replace(config, scaling=only_long))
        is_long = frequencies == jnp.asarray(long, frequencies.dtype)[None, None]
        return jnp.where(is_long, _angles(positions, long), _angles(positions, short))
    return positions[..., None].astype(frequencies.dtype) * frequencies


def rope_frequencies(
    head_width: int,
    config: Rope,
    positions: Int[Array, "#B T"] | None = None,
    text_lengths: Int[Array, " B"] | None = None,
) -> tuple[Any, float]:
    """(radians per position of each of r/2 pairs, factor on cos and sin).

    The factor is 1 except for YaRN and LongRoPE. The frequencies are computed on the host in
    float64. Those of a dynamic NTK and of LongRoPE depend on the lengths of the texts. Without
    `text_lengths` these come from `positions`; without both, texts are within the original length.
    Raises ValueError for an odd r and for a scaling that does not fit r.
    """
    # rounded to six digits: 88 features times 30 / 88 are 29.999999999999996
    rotated = int(round(head_width * config.fraction, 6))
    scaling = config.scaling
    if config.layout not in ("interleaved", "half"):
        raise ValueError(f"rope: no layout {config.layout!r}; expected 'half' or 'interleaved'")
    if rotated % 2 or not 0 < rotated <= head_width:
        raise ValueError(
            f"rope: {config.fraction} of a head of {head_width} is {rotated} features, "
            "which must be even"
        )
    frequencies = config.theta ** -(np.arange(0, rotated, 2) / rotated)
    if scaling is None:
        return _finite(frequencies, config), 1.0
    if text_lengths is not None:
        lengths = text_lengths[:, None, None].astype(jnp.result_type(float))
    else:
        lengths = None if positions is None else _length(positions)
    scaled, amplitude = scaling.scale(frequencies, config.theta, lengths)
    return _finite(scaled, config), amplitude


def _finite(frequencies: Any, config: Rope) -> Any:
    """The frequencies. Raises ConfigError if one is not finite, because the numbers overflow."""
    if isinstance(frequencies, np.ndarray) and not np.isfinite(frequencies).all():
        raise ConfigError(
            f"{config}: these numbers give no finite frequencies; expected a theta such as 10000"
        )
    return frequencies


def rotation_until(positions: Any, length: Any) -> Any:
    """The longest text that is rotated as a text of `length` tokens is.

    `positions` is that of a config: one value, or one a layer. `length` is a number or an array.
    None: no rotation depends on the length of the text.
    """
    layers = positions if isinstance(positions, tuple) else (positions,)
    scalings: set[Any] = {one.scaling for one in layers if isinstance(one, Rope)}
    ends = [scaling.rotation_until(length) for scaling in scalings if depends_on_length(scaling)]
    return reduce(jnp.minimum if isinstance(length, Array) else min, ends) if ends else None


def depends_on_length(scaling: Any) -> bool:
    """Whether a scaling rotates a short text and a long one differently."""
    return hasattr(scaling, "rotation_until") and scaling.rotation_until(1) < ANY_LENGTH


def _length(positions):
    """The length of each token's segment, `[B, T, 1]`. A segment begins where positions fall."""
    T = positions.shape[1]
    is_end = jnp.pad(positions[:, 1:] < positions[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    end = lax.cummin(jnp.where(is_end, jnp.arange(T)[None], T), axis=1, reverse=True)
    last_position = jnp.take_along_axis(positions, end, axis=1)
    return (last_position[..., None] + 1).astype(jnp.result_type(float))


def within_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token in its segment, a run of equal ids.

    Padding (id 0) is not counted and does not end a segment.
    """
    is_token = segment_ids != 0
    previous_ids = jnp.pad(fill_padding(segment_ids)[:, :-1], [(0, 0), (1, 0)])
    index = jnp.cumsum(is_token, axis=1, dtype=jnp.arange(0).dtype) - 1
    first = lax.cummax(jnp.where(is_token & (segment_ids != previous_ids), index, 0), axis=1)
    return jnp.maximum(index - first, 0)


def fill_padding(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The ids, where padding (id 0) gets the id of the last token before it."""
    indices = jnp.arange(segment_ids.shape[1])[None]
    last_token = lax.cummax(jnp.where(segment_ids != 0, indices, 0), axis=1)
    return jnp.take_along_axis(segment_ids, last_token, axis=1)
