"""Arrays in blocks of few bits: a code for each value, and a scale for each block.

    x ~ scale * levels[code],   scale = max |x| over the block

A format is an object with `block`, the number of values that share a scale, and `levels()`, at most
256 ascending numbers in [-1, 1] with a zero. `NF4`, `Int4` and `Int8` are here. Codes of at most 16
levels are stored two to a byte.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt8

from jaxformer.errors import ConfigError

# Dettmers et al. 2023, arXiv:2305.14314, appendix E: quantiles of a normal distribution, divided by
# the largest
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _check(form) -> None:
    name = type(form).__name__
    is_number = isinstance(form.block, int) and not isinstance(form.block, bool)
    if not is_number or form.block < 2 or form.block % 2:
        raise ConfigError(
            f"{name}.block={form.block!r}: expected an even number of values, such as 64"
        )


@dataclass(frozen=True)
class NF4:
    """NormalFloat in 4 bits: about equally many values of a normal distribution at each level.

    Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, section 3. Scales are not quantised again.
    """

    block: int = 64  # values that share a scale
    __post_init__ = _check

    def levels(self) -> np.ndarray:
        return np.array(NF4_LEVELS, np.float32)


@dataclass(frozen=True)
class Int4:
    """Symmetric integers -7 ... 7 in 4 bits; the level of k is k / 7."""

    block: int = 64  # values that share a scale
    __post_init__ = _check

    def levels(self) -> np.ndarray:
        return np.arange(-7, 8, dtype=np.float32) / np.float32(7)


@dataclass(frozen=True)
class Int8:
    """Symmetric integers -127 ... 127 in 8 bits; the level of k is k / 127."""

    block: int = 64  # values that share a scale
    __post_init__ = _check

    def levels(self) -> np.ndarray:
        return np.arange(-127, 128, dtype=np.float32) / np.float32(127)


def is_packed(form: Any) -> bool:
    """Whether two codes of a format share a byte."""
    return len(form.levels()) <= 16


def sizes(count: int, form: Any) -> tuple[int, int]:
    """(blocks, bytes of codes in a block) for `count` values. The last block may have padding."""
    return math.ceil(count / form.block), form.block // 2 if is_packed(form) else form.block


def quantise(
    x: Float[Array, "*stack n"], form: Any
) -> tuple[UInt8[Array, "*stack blocks bytes"], Float[Array, "*stack blocks"]]:
    """(codes, scales) of values along the last axis; each code is that of the nearest level.

    A value half-way between two levels gets the lower one. The last block is padded with zeros.
    Scales are float32. The first of two codes is in the upper half of their byte.
    """
    levels = form.levels()
    count = x.shape[-1]
    blocks, _ = sizes(count, form)
    padding = blocks * form.block - count
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    x = x.reshape(*x.shape[:-1], blocks, form.block)
    scales = jnp.max(jnp.abs(x), axis=-1)
    unit = jnp.where(scales > 0, scales, 1)[..., None]
    middles = (levels[1:] + levels[:-1]) / 2
    codes = jnp.searchsorted(jnp.asarray(middles), x / unit).astype(jnp.uint8)
    if is_packed(form):
        codes = codes[..., ::2] * jnp.uint8(16) + codes[..., 1::2]
    return codes, scales


def dequantise(
    codes: UInt8[Array, "*stack blocks bytes"],
    scales: Float[Array, "*stack blocks"],
    form: Any,
    count: int,
) -> Float[Array, "*stack {count}"]:
    """The `count` values of `quantise`, in float32: scale * levels[code]."""
    if is_packed(form):
        codes = jnp.stack([codes // jnp.uint8(16), codes % jnp.uint8(16)], axis=-1)
    codes = codes.reshape(*scales.shape, form.block)
    x = jnp.asarray(form.levels())[codes] * scales.astype(jnp.float32)[..., None]
    return x.reshape(*scales.shape[:-1], -1)[..., :count]
