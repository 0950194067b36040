"""Positional encodings as functions of integer positions. Angles are right to float32's last digit, also far out."""

import math
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError, check_positive, check_whole

Layout = Literal["interleaved", "half"]
ANY_LENGTH = 2**30  # more tokens than any text has


def sinusoidal(
    positions: Int[Array, "B T"], width: int, layout: Layout = "interleaved",
    spacing: Literal["paper", "tensor2tensor"] = "paper", base: float = 10_000.0,
) -> Float[Array, "B T D"]:  # fmt: skip
    """sin and cos of position / base^e_i for i < width / 2. Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    `spacing`: e_i = 2i / width (paper, Marian) or i / (width/2 - 1) (tensor2tensor, fairseq, Whisper); the last feature of
    an odd width is one more sine in the paper's, and 0 in tensor2tensor's.
    `layout`: sine at even and cosine at odd features (paper), or all sines, then all cosines (`half`: Marian, tensor2tensor).
    """
    check_whole("sinusoidal: width", width)
    check_positive("sinusoidal: base", base)
    positions = _as_integers("sinusoidal", positions)
    if layout not in ("interleaved", "half") or spacing not in ("paper", "tensor2tensor"):
        raise ValueError(f"sinusoidal: no layout {layout!r} with spacing {spacing!r}; see the docstring")
    if spacing == "tensor2tensor" and width % 2:
        even = sinusoidal(positions, width - 1, layout, spacing, base)
        return jnp.pad(even, ((0, 0), (0, 0), (0, 1)))
    i = np.arange(-(-width // 2))
    angles = _angles(positions, base ** -(2 * i / width if spacing == "paper" else i / max(width // 2 - 1, 1)))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if layout == "half":
        return jnp.concatenate([sin, cos[..., : width // 2]], axis=-1)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions.shape, 2 * len(i))[..., :width]


def _as_integers(function: str, positions: Any) -> Array:
    """Positions as an array. Raises ValueError for fractions, which the angles would round down in silence."""
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        advice = "for a longer context give the rotations a scaling, such as Rope(scaling=Linear(2))"
        raise ValueError(f"{function}: positions are integers, not {positions.dtype}; {advice}")
    return positions


def _angles(positions: Int[Array, "B T"], frequencies: np.ndarray) -> Float[Array, "B T F"]:
    """positions x frequencies modulo a turn, in radians, to float32's last digit at any position."""
    # A float32 product is off by 3e-5 at position 1000, 2e-3 at 100,000. Here a turn is 2^32 units, so that 32-bit integers
    # wrap at whole turns. A frequency is a whole number of units a position and a rest below one.
    if jnp.result_type(float) == jnp.float64:
        return positions[..., None].astype(jnp.float64) * jnp.asarray(frequencies)[None, None]
    units = frequencies / (2 * math.pi) % 1 * 2.0**32
    whole_units = jnp.asarray(np.floor(units).astype(np.uint32))[None, None]
    rests = positions[..., None].astype(jnp.float32) * jnp.asarray(units % 1, jnp.float32)[None, None]
    carried = jnp.floor(rests)
    count = positions[..., None].astype(jnp.uint32) * whole_units + carried.astype(jnp.int32).astype(jnp.uint32)
    return (count.astype(jnp.int32).astype(jnp.float32) + (rests - carried)) * (2 * math.pi / 2**32)


def learned(positions: Int[Array, "B T"], table: Float[Array, "P D"]) -> Float[Array, "B T D"]:
    """Row `position` of a trained table; positions outside it give NaN, not the last row. Gehring et al. 2017."""
    inside = jnp.where(positions < 0, len(table), positions)  # jnp.take would count negative ones from the end
    return jnp.take(table, inside, axis=0, mode="fill", fill_value=jnp.nan)


def check_scaling(config: Any) -> None:
    """The `__post_init__` of a scaling: raises ConfigError for a number that is not above 0, or not finite."""
    for field in fields(config):
        value = getattr(config, field.name)
        has_no_number = field.type is bool or (value is None and field.default is None)
        if has_no_number:
            continue
        for number in value if isinstance(value, tuple | list | np.ndarray) else (value,):
            check_positive(f"{type(config).__name__}.{field.name}", number)


# A scaling of rotary positions has `scale(frequencies, theta, lengths)` -> (frequencies, factor on cos and sin): from the r/2
# frequencies without scaling, on the host in float64. `lengths` [B, T, 1] or [B, 1, 1] is how long the text of each token is;
# None: within the original length. A scaling that reads it has `rotation_until`, as `NTK` and `LongRoPE` have.
@dataclass(frozen=True)
class Linear:
    """Position interpolation: every frequency divided by `factor`. Chen et al. 2023, arXiv:2306.15595, eq. 4."""

    factor: float  # new context length divided by the old one

    __post_init__ = check_scaling

    def scale(self, frequencies: np.ndarray, theta: float, lengths: Array | None) -> tuple[Any, float]:
        return frequencies / self.factor, 1.0


@dataclass(frozen=True)
class NTK:
    """NTK-aware base: base * a^(r / (r - 2)) for r rotated features. Peng et al. 2023, arXiv:2309.00071, section 3.1.

    a = factor; or, with an `original_length`, the "dynamic" a = factor * n / original_length - (factor - 1), where n is the
    largest position of the segment + 1, at least `original_length`. A cache has one n for all of its text,
    `Cache.text_lengths`: beyond the original length, `generate` reads the text anew for each token, which is slow.
    The frequencies of a dynamic NTK are float32: at position p an angle is off by up to some 1e-7 p radians.
    """

    factor: float  # new context length divided by the old one
    original_length: int | None = None  # of the pretraining; None: the factor is fixed

    __post_init__ = check_scaling

    def scale(self, frequencies: np.ndarray, theta: float, lengths: Array | None) -> tuple[Any, float]:
        rotated, factor = 2 * len(frequencies), self.factor
        if rotated < 4:
            raise ValueError(f"rope: NTK needs at least 4 rotated features, for r / (r - 2); got {rotated}")
        if self.original_length is not None:
            if lengths is None:
                return frequencies, 1.0
            factor = factor * jnp.maximum(lengths / self.original_length, 1) - (factor - 1)
            frequencies = frequencies[None, None]
        exponent = np.arange(0, rotated, 2).reshape(frequencies.shape) / rotated
        return frequencies * factor ** (-exponent * rotated / (rotated - 2)), 1.0

    def rotation_until(self, length: Any) -> Any:
        """The longest text that is rotated as one of `length` tokens."""
        if self.original_length is None:
            return length + ANY_LENGTH
        return self.original_length + (length > self.original_length) * (length - self.original_length)


@dataclass(frozen=True)
class LongRoPE:
    """Each frequency divided by its own factor: of `short`, or of `long` in segments with positions beyond `original_length`.

    cos and sin are multiplied by `attention_factor`. Ding et al. 2024, arXiv:2402.13753. A cache has one set of factors
    for all of its text: where this grows beyond `original_length`, `generate` reads it anew, once.
    """

    short: tuple[float, ...]  # divisors of the frequencies up to `original_length`
    long: tuple[float, ...]  # divisors beyond it
    original_length: int  # context length of the pretraining
    attention_factor: float = 1.0  # multiplies cos and sin

    __post_init__ = check_scaling

    def scale(self, frequencies: np.ndarray, theta: float, lengths: Array | None) -> tuple[Any, float]:
        pairs, sizes = len(frequencies), (len(self.short), len(self.long))
        if sizes != (pairs, pairs):
            raise ValueError(f"rope: LongRoPE needs {pairs} factors; got {sizes[0]} short, {sizes[1]} long")
        near, far = frequencies / np.array(self.short), frequencies / np.array(self.long)
        if lengths is not None:
            near = jnp.where(lengths > self.original_length, far[None, None], near[None, None])
        return near, self.attention_factor

    def rotation_until(self, length: Any) -> Any:
        """The longest text that is rotated as one of `length` tokens."""
        return self.original_length + (length > self.original_length) * ANY_LENGTH


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by `factor`, high ones kept, a linear blend between. Llama 3.1 release, 2024."""

    factor: float  # divisor of low frequencies
    original_length: int  # context length of the pretraining
    low: float = 1.0  # turns up to which a frequency is low
    high: float = 4.0  # turns from which a frequency is high

    __post_init__ = check_scaling

    def scale(self, frequencies: np.ndarray, theta: float, lengths: Array | None) -> tuple[Any, float]:
        turns = self.original_length * frequencies / (2 * math.pi)  # full turns within the original context
        keep = np.clip((turns - self.low) / (self.high - self.low), 0, 1) if self.high > self.low else turns >= self.low
        return frequencies * (keep + (1 - keep) / self.factor), 1.0


@dataclass(frozen=True)
class YaRN:
    """Slow dimensions interpolated, fast ones extrapolated; cos, sin times `attention_factor`: arXiv:2309.00071, eq. 17-22."""

    factor: float  # new context length divided by the old one
    original_length: int  # context length of the pretraining
    beta_fast: float = 32.0  # turns from which a dimension is fast
    beta_slow: float = 1.0  # turns up to which a dimension is slow
    truncate: bool = True  # round the ramp's ends outwards, to whole dimensions
    attention_factor: float | None = None  # multiplies cos and sin; None: 0.1 ln(factor) + 1, and 1 for a factor below 1

    __post_init__ = check_scaling

    def scale(self, frequencies: np.ndarray, theta: float, lengths: Array | None) -> tuple[Any, float]:
        pairs, amplitude = len(frequencies), self.attention_factor

        # the (fractional) pair that makes `turns` full turns within the original context
        def pair(turns):
            return pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        # the span is negative where the original context is shorter than one slow turn: then nothing is interpolated
        ramp = np.clip((np.arange(pairs) - first) / (last - first or 1e-3), 0, 1)
        if amplitude is None:
            amplitude = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp, amplitude


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    theta: float = 10_000.0  # base of the frequencies
    fraction: float = 1.0  # of the head that is rotated
    layout: Layout = "half"  # how features form pairs
    scaling: Linear | NTK | Llama3 | YaRN | LongRoPE | None = None  # of frequencies, for longer contexts

    def __post_init__(self):
        check_positive("Rope.theta", self.theta)
        check_positive("Rope.fraction", self.fraction)
        if self.fraction > 1:
            raise ConfigError(f"Rope.fraction={self.fraction}: expected at most 1, the whole head")
        if isinstance(self.scaling, YaRN) and self.theta <= 1:
            expected = "expected a number above 1 with YaRN, which divides by its logarithm"
            raise ConfigError(f"Rope.theta={self.theta}: {expected}")


def rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], config: Rope = Rope(),
    text_lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N H"]:  # fmt: skip
    """Rotates each feature pair by position * theta^(-2i / r). Su et al. 2021, arXiv:2104.09864, eq. 34.

    Pairs are (i, i + r/2) in layout `half` (Hugging Face LLaMA, GPT-NeoX) and (2i, 2i + 1) in `interleaved` (the paper,
    Meta's LLaMA, GPT-J); the first r = fraction * H features are rotated. Raises ValueError where r is odd. `text_lengths`:
    how long the whole text of each row is where `positions` are only a piece of it.
    """
    positions = _as_integers("rope", positions)
    frequencies, amplitude = rope_frequencies(x.shape[-1], config, positions, text_lengths)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = _rotation_angles(positions, frequencies, x.shape[-1], config)[:, :, None, :]
    cos, sin = ((wave(angles) * amplitude).astype(wide) for wave in (jnp.cos, jnp.sin))
    rotated, rest = jnp.split(x, [2 * frequencies.shape[-1]], axis=-1)
    half = config.layout == "half"
    a, b = jnp.split(rotated.astype(wide), 2, axis=-1) if half else (rotated[..., i::2].astype(wide) for i in (0, 1))
    pair = a * cos - b * sin, b * cos + a * sin
    turned = jnp.concatenate(pair, axis=-1) if half else jnp.stack(pair, axis=-1).reshape(rotated.shape)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def _rotation_angles(positions: Int[Array, "#B T"], frequencies: Any, head_width: int, config: Rope) -> Float[Array, "#B T F"]:
    """positions x frequencies, which are an array of the host, or of the device where they depend on the positions."""
    if isinstance(frequencies, np.ndarray):
        return _angles(positions, frequencies)
    if isinstance(config.scaling, LongRoPE):
        # On the device a frequency has 24 bits, too few for large positions. But it is one of two that the host knows.
        near, _ = rope_frequencies(head_width, config)
        only_long = replace(config.scaling, short=config.scaling.long)
        far, _ = rope_frequencies(head_width, replace(config, scaling=only_long))
        is_far = frequencies == jnp.asarray(far, frequencies.dtype)[None, None]
        return jnp.where(is_far, _angles(positions, far), _angles(positions, near))
    return positions[..., None].astype(frequencies.dtype) * frequencies


def rope_frequencies(
    head_width: int, config: Rope, positions: Int[Array, "#B T"] | None = None,
    text_lengths: Int[Array, " B"] | None = None,
) -> tuple[Any, float]:  # fmt: skip
    """Radians a position for each of r/2 pairs, and a factor on cos and sin (1 except for YaRN and LongRoPE).

    On the host in float64; for a dynamic NTK and LongRoPE from the lengths of the rows' texts, which are those that the
    `positions` of the call show where they are not given (without positions: within the original length). Raises
    ValueError for an odd r and for factors that do not fit it.
    """
    # to six digits: 88 features times 30 / 88 are 29.999999999999996
    rotated, scaling = int(round(head_width * config.fraction, 6)), config.scaling
    if config.layout not in ("interleaved", "half"):
        raise ValueError(f"rope: no layout {config.layout!r}; expected 'half' or 'interleaved'")
    if rotated % 2 or not 0 < rotated <= head_width:
        raise ValueError(f"rope: {config.fraction} of a head of {head_width} is {rotated} features, which must be even")
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
    """The frequencies. Raises ConfigError where numbers that are right alone overflow together."""
    if isinstance(frequencies, np.ndarray) and not np.isfinite(frequencies).all():
        raise ConfigError(f"{config}: these numbers give no finite frequencies; expected a theta such as 10000")
    return frequencies


def rotation_until(positions: Any, length: Any) -> Any:
    """The longest text whose rotations are those of a text of `length` tokens, of a config's `positions` (one, or one a layer).

    `length` is a number, or an array of them. None: no rotation depends on the length of the text.
    """
    layers = positions if isinstance(positions, tuple) else (positions,)
    scalings: set[Any] = {one.scaling for one in layers if isinstance(one, Rope)}
    ends = [scaling.rotation_until(length) for scaling in scalings if depends_on_length(scaling)]
    return reduce(jnp.minimum if isinstance(length, Array) else min, ends) if ends else None


def depends_on_length(scaling: Any) -> bool:
    """Whether a scaling rotates a short text otherwise than a long one."""
    return hasattr(scaling, "rotation_until") and scaling.rotation_until(1) < ANY_LENGTH


def _length(positions):  # of each token's segment, [B, T, 1]: positions fall where the next one begins
    ends = jnp.pad(positions[:, 1:] < positions[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    end = lax.cummin(jnp.where(ends, jnp.arange(positions.shape[1])[None], positions.shape[1]), axis=1, reverse=True)
    return (jnp.take_along_axis(positions, end, axis=1)[..., None] + 1).astype(jnp.result_type(float))


def within_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each token in its segment, a run of equal ids. Padding (0) is not counted and does not end a segment."""
    is_token = segment_ids != 0
    previous_ids = jnp.pad(fill_padding(segment_ids)[:, :-1], [(0, 0), (1, 0)])
    index = jnp.cumsum(is_token, axis=1, dtype=jnp.arange(0).dtype) - 1
    first = lax.cummax(jnp.where(is_token & (segment_ids != previous_ids), index, 0), axis=1)
    return jnp.maximum(index - first, 0)


def fill_padding(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The ids, where padding (0) has the id of the last token before it."""
    indices = jnp.arange(segment_ids.shape[1])[None]
    return jnp.take_along_axis(segment_ids, lax.cummax(jnp.where(segment_ids != 0, indices, 0), axis=1), axis=1)
