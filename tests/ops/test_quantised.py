"""Blocks of few bits: levels and codes against bitsandbytes, rounding against float64 NumPy."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.ops.quantised import NF4, Int4, Int8, dequantise, quantise, sizes

# bitsandbytes 0.50.2, bitsandbytes/functional.py: `get_4bit_type("nf4")`, called on a CPU
THEIR_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
# the same function's list for "int4", before it is divided by the largest (which raises there)
THEIR_INT4 = [7, 6, 5, 4, 3, 2, 1, 0, -0, -1, -2, -3, -4, -5, -6, -7]
# bitsandbytes 0.50.2 on a CPU: `quantize_4bit(x, blocksize=64, quant_type="nf4")` of `samples()`
THEIR_CODES = (
    "777777777777777777777777777777777777777777777777777777777777777796eda07bc4e24c7f84522aad4e6e"
    "548c8421ac62b24a094878b4dbbdbb71631843389d7cdc0d999995174c6735719720a656e771ebc7b9a61c1663a6"
    "5a5d9512b76d3559552aa5835c8e4969754f715a5cb65452bd332403c6a5d86e6387b4aa584e45367a5624fb4347"
    "743c966507335a32aa49683a"
)
THEIR_SCALES = [
    0.0, 2.250141143798828, 2.398232936859131, 3.106336832046509, 2.9360454082489014,
]  # fmt: skip
FORMS = [NF4(), Int4(), Int8(), NF4(16), Int4(6)]


def samples():
    """300 numbers; the first block is all zeros and the last is not full."""
    x = np.random.default_rng(0).normal(size=300).astype(np.float32)
    x[:64] = 0
    return x


@partial(jax.jit, static_argnums=(1,))
def both_ways(x, form):
    codes, scales = quantise(x, form)
    return codes, scales, dequantise(codes, scales, form, x.shape[-1])


def by_hand(x, form):
    """What one row of x comes back as, in float64: each value's nearest level, block by block."""
    levels = form.levels().astype(np.float64)
    found = np.zeros(len(x))
    for start in range(0, len(x), form.block):
        block = x[start : start + form.block].astype(np.float64)
        largest = np.abs(block).max()
        if largest > 0:
            distance = np.abs(block[:, None] / largest - levels)
            found[start : start + form.block] = largest * levels[distance.argmin(axis=1)]
    return found


def test_levels_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(NF4().levels(), np.array(THEIR_NF4, np.float32))
    theirs = np.unique(np.array(THEIR_INT4, np.float32)) / np.float32(7)
    np.testing.assert_array_equal(Int4().levels(), theirs)
    assert len(Int8().levels()) == 255 and Int8().levels()[127] == 0


@pytest.mark.thorough
def test_nf4_codes_and_scales_are_those_of_bitsandbytes():
    """The same bytes in the same order, also where a block is not full."""
    codes, scales, _ = both_ways(samples(), NF4())
    packed = np.asarray(codes).reshape(-1)[:150]
    assert packed.tobytes().hex() == THEIR_CODES
    np.testing.assert_array_equal(scales, np.array(THEIR_SCALES, np.float32))


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_value_gets_its_nearest_level(form):
    x = np.random.default_rng(1).normal(size=(2, 130)).astype(np.float32)
    x[0, :64] *= 1e-20
    x[1, :32] = 0
    codes, scales, found = both_ways(x, form)
    blocks, width = sizes(130, form)
    assert codes.shape == (2, blocks, width) and codes.dtype == jnp.uint8
    for row, back in zip(x, found, strict=True):
        # one product in float32
        np.testing.assert_allclose(back, by_hand(row, form), rtol=1e-6)
    gap = np.diff(form.levels()).max() / 2
    room = gap * np.repeat(scales, form.block, axis=1)[:, :130]
    assert (np.abs(np.asarray(found) - x) <= room * (1 + 1e-6)).all()
    # what a block gives back is a fixed point
    again = both_ways(np.asarray(found), form)
    np.testing.assert_array_equal(again[2], found)


@pytest.mark.parametrize("block", [0, 3, -64, True])
def test_a_block_of_no_even_number_is_refused(block):
    with pytest.raises(ConfigError, match=r"NF4.block=.*: expected an even number"):
        NF4(block)


@dataclass(frozen=True)
class Ternary:
    """A format of the user's own."""

    block: int = 8

    def levels(self):
        return np.array([-1, 0, 1], np.float32)


@pytest.mark.thorough
def test_a_format_of_ones_own():
    x = np.random.default_rng(2).normal(size=(1, 20)).astype(np.float32)
    _, _, found = both_ways(x, Ternary())
    np.testing.assert_allclose(found[0], by_hand(x[0], Ternary()), rtol=1e-6)
