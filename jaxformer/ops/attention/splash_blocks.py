"""The sizes of splash's blocks on each chip: its cost model."""

from typing import NamedTuple

from jaxformer.sharding import device_kind

LANES = 128  # of a TPU; a block is a multiple of them
FEWEST = 4  # blocks of a long text, so that those above the diagonal are left out


class Limits(NamedTuple):
    """The sizes that a chip's on-chip memory and its matrix unit decide."""

    block: int  # the most queries or keys that one block holds
    product: int  # keys of one product within a block
    is_fused: bool  # whether one backward pass gives the gradients of query, key and value


# On-chip memory holds a block of each operand twice and some float32 squares of scores:
# 512 x 512 x 4 B = 1 MB. Those of v6e are the sizes of MaxText's recipes for that chip
# (sa_block_q=2048, sa_use_fused_bwd_kernel).
OTHERS = Limits(block=512, product=512, is_fused=False)
LIMITS = {"TPU v6 lite": Limits(block=2048, product=512, is_fused=True)}


class Blocks(NamedTuple):
    """The blocks of one call."""

    query: int
    key: int
    product: int  # keys of one product within a block; it divides `key`
    is_fused: bool


def blocks_of(T: int, S: int, head_width: int, devices: int = 1) -> Blocks | None:
    """The blocks for T queries on each of `devices` and S keys; None: no size fits.

    Queries that are split among devices are not padded, so a block must divide them.
    """
    limits = limits_of(head_width)
    query = query_block(T, limits, devices)
    if query is None:
        return None
    key = block_size(S, limits)
    product = limits.product if key % limits.product == 0 else key
    return Blocks(query, key, product, limits.is_fused)


def limits_of(head_width: int) -> Limits:
    """The limits of the program's chip; wide heads fill its memory sooner."""
    limits = LIMITS.get(device_kind(), OTHERS)
    return limits if head_width <= 256 else Limits(256, 256, limits.is_fused)


def block_size(length: int, limits: Limits) -> int:
    """Queries or keys of a block, so that whole blocks pad `length` little.

    It is a multiple of 128, and of the keys of a product where it may hold more than one.
    """
    largest = max(limits.product, length // FEWEST // limits.product * limits.product)
    largest = min(limits.block, largest)
    unit = LANES if largest <= limits.product else limits.product
    count = max(1, -(-length // largest))
    return -(-max(1, length) // (count * unit)) * unit


def query_block(T: int, limits: Limits, devices: int) -> int | None:
    """The number of queries of a block; None: no size fits."""
    if devices == 1:
        return block_size(T, limits)
    for block in (2048, 1024, 512, 384, 256, 128):
        if T // devices % block == 0 and block <= block_size(T, limits):
            return block
    return None
