"""Positional encodings as functions of integer positions. Angles are right to float32's last digit, also far out."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError, check_positive, check_whole
from jaxformer.ops.einsum import einsum

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
    positions = _whole("sinusoidal", positions)
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


def _whole(function: str, positions: Any) -> Array:
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
    whole = jnp.asarray(np.floor(units).astype(np.uint32))[None, None]
    rests = positions[..., None].astype(jnp.float32) * jnp.asarray(units % 1, jnp.float32)[None, None]
    carried = jnp.floor(rests)
    count = positions[..., None].astype(jnp.uint32) * whole + carried.astype(jnp.int32).astype(jnp.uint32)
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
    positions = _whole("rope", positions)
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


@struct.dataclass
class Bias:
    """A score bias as a rule of positions, evaluated only where it is needed, differentiable in its arrays.

    `rule(bias, q_positions [T], kv_positions [S]) -> [B or 1, N, T, S]`; or, where `by_distance`, `rule(bias, distances
    [R]) -> [N, R]` of the distances key - query. `arrays` are its parameters (floating point). `rows`, each `[B, T, ...]`,
    have a line for every query; the rule gets only those of its queries.
    """

    rule: Callable = struct.field(pytree_node=False)
    args: tuple = struct.field(pytree_node=False, default=())
    by_distance: bool = struct.field(pytree_node=False, default=False)
    arrays: tuple = ()
    rows: tuple = ()

    def block(self, q_start, q_length: int, kv_start, kv_length: int) -> Float[Array, "#B N T S"]:
        """The bias of `q_length` queries from absolute position `q_start` on and of keys likewise."""
        if self.by_distance:
            distances = kv_start - q_start + jnp.arange(1 - q_length, kv_length)
            return _toeplitz(self.rule(self, distances), q_length)[None]
        bias = self.rule(self, q_start + jnp.arange(q_length), kv_start + jnp.arange(kv_length))
        return bias if bias.ndim == 4 else bias[None]


def bias_between(bias: Bias | Callable, q: Int[Array, "#B T"], kv: Int[Array, "#B S"]) -> Float[Array, "#B N T S"]:
    """The bias of queries and keys at these positions of their rows. Raises ConfigError for a bias that differs by row."""

    def of_row(q: Array, kv: Array) -> Array:
        if isinstance(bias, Bias) and bias.by_distance:
            return bias.rule(bias, (kv[None] - q[:, None]).reshape(-1)).reshape(-1, q.shape[0], kv.shape[0])
        scores = bias.rule(bias, q, kv) if isinstance(bias, Bias) else bias(q, kv)
        if (scores.ndim == 4 and scores.shape[0] > 1) or getattr(bias, "rows", ()):
            raise ConfigError(f"positions: a bias {scores.shape} by row; return [N, T, S], the same for all rows")
        return scores.reshape(scores.shape[-3:])

    rows = max(len(q), len(kv))
    return jax.vmap(of_row)(*(jnp.broadcast_to(x, (rows, x.shape[1])) for x in (q, kv)))


def _toeplitz(diagonals: Float[Array, "N R"], rows: int) -> Float[Array, "N T S"]:
    """out[n, i, j] = diagonals[n, j - i + rows - 1] for R = rows + S - 1, without a gather."""
    N, R = diagonals.shape
    # copies of the diagonals, one zero after each, are read as lines one entry shorter: each begins one entry earlier
    copies = jnp.broadcast_to(jnp.pad(diagonals, ((0, 0), (0, 1)))[:, None], (N, rows, R + 1)).reshape(N, -1)
    return copies[:, rows - 1 : -1].reshape(N, rows, R)[:, :, : R - rows + 1]


def alibi(num_heads: int) -> Bias:
    """-m_n |i - j|, linear in the distance, with a slope for each head. Press et al. 2022, arXiv:2108.12409, section 3.

    m_n = 2^(-8 n / N) for a power of two N; else the slopes of the power below, then every second of the power above.
    """
    check_whole("alibi: num_heads", num_heads)
    num_heads = operator.index(num_heads)  # of NumPy's integers, too
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * n / below) for n in range(1, below + 1)]
    slopes += [2 ** (-4 * n / below) for n in range(1, 2 * (num_heads - below), 2)]
    return Bias(_alibi, (tuple(slopes),), by_distance=True)


def _alibi(bias, distances):
    wide = jnp.result_type(float)
    return -jnp.asarray(bias.args[0], wide)[:, None] * jnp.abs(distances).astype(wide)[None]


def t5(table: Float[Array, "R N"], bidirectional: bool, max_distance: int = 128) -> Bias:
    """table[bucket(j - i), n]: each near distance has a bucket, far ones share buckets by their logarithm.

    Raffel et al. 2020, arXiv:1910.10683, section 2.1. Keys after the query have half of the R buckets, or share bucket 0.
    """
    return Bias(_t5, (bidirectional, max_distance), by_distance=True, arrays=(table,))


def _t5(bias, distances):
    (table,) = bias.arrays
    return table[t5_bucket(distances, *bias.args, table.shape[0])].T


def check_t5(buckets: int, max_distance: int, bidirectional: bool, name: str = "t5: ") -> None:
    """Raises ConfigError unless some buckets have one distance each, and these end before the maximum."""
    check_whole(f"{name}buckets", buckets)
    check_whole(f"{name}max_distance", max_distance)
    exact = (buckets // 2 if bidirectional else buckets) // 2
    if not 0 < exact < max_distance:
        expected = f"which must be in (0, {max_distance})"
        raise ConfigError(f"{name}buckets={buckets} has {exact} exact distances, {expected}")


def t5_bucket(distances: Int[Array, "..."], bidirectional: bool, max_distance: int, buckets: int) -> Int[Array, "..."]:
    """Bucket of each distance key - query. Boundaries are computed on the host, so that all devices have the same."""
    check_t5(buckets, max_distance, bidirectional)
    half = buckets // 2 if bidirectional else buckets
    exact = half // 2
    far = np.arange(exact, max_distance + 1)
    logs = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    of_far = np.minimum(exact + (logs * np.float32(half - exact)).astype(np.int64), half - 1)
    firsts = far[np.searchsorted(of_far, np.arange(exact + 1, half))]  # least distance of each far bucket
    length = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    bucket = jnp.minimum(length, exact)
    for first in firsts.tolist():
        bucket = bucket + (length >= first)
    return bucket + jnp.where(distances > 0, half, 0) if bidirectional else bucket


def shaw(query: Float[Array, "B T N H"], table: Float[Array, "R H"], scale: float | None = None) -> Bias:
    """scale q_i . a[clip(j - i, -k, k) + k] for a table of R = 2 k + 1 relative keys. Shaw et al. 2018, arXiv:1803.02155.

    Equation 5: q_i (k_j + a_ij) / sqrt(H) is the keys' score plus this bias. `scale` (1/sqrt(H)) must be that of `attention`.
    """
    if table.shape[0] % 2 != 1 or table.shape[1] != query.shape[-1]:
        raise ValueError(f"shaw: a table [2 k + 1, H] of relative keys; got {table.shape} for queries {query.shape}")
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = einsum("btnh,rh->btnr", query, table, dtype=wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return Bias(_shaw, rows=(scores,))


def _shaw(bias, q_positions, kv_positions):
    (scores,) = bias.rows
    k = scores.shape[-1] // 2
    distances = jnp.clip(kv_positions[None, :] - q_positions[:, None], -k, k) + k
    return jnp.take_along_axis(scores.transpose(0, 2, 1, 3), distances[None, None], axis=-1)


def within_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each token in its segment, a run of equal ids. Padding (0) is not counted and does not end a segment."""
    real = segment_ids != 0
    before = jnp.pad(fill_padding(segment_ids)[:, :-1], [(0, 0), (1, 0)])
    index = jnp.cumsum(real, axis=1, dtype=jnp.arange(0).dtype) - 1
    first = lax.cummax(jnp.where(real & (segment_ids != before), index, 0), axis=1)
    return jnp.maximum(index - first, 0)


def fill_padding(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The ids, where padding (0) has the id of the last token before it."""
    slots = jnp.arange(segment_ids.shape[1])[None]
    return jnp.take_along_axis(segment_ids, lax.cummax(jnp.where(segment_ids != 0, slots, 0), axis=1), axis=1)
