"""Attention masks as values: small, hashable specs that every kernel understands.

    mask = causal() & (window(256) | prefix(16))

`&` binds before `|`. Without the brackets every query would see the prefix.

A mask is a rule over absolute positions, `(q_positions, kv_positions) -> bool`: True where a query
may attend to a key. Every mask is a pytree. A mask without arrays is hashable and may be a static
argument of `jax.jit`. A mask with arrays (`segments`, `lengths`) may not.
"""

# ruff: noqa: F401, I001 (names that the package offers)
from jaxformer.masks.blocks import EMPTY, FULL, PARTIAL
from jaxformer.masks.builders import (
    as_mask, bigbird, block_sparse, by_head, causal, chunked, columns, full, global_tokens,
    is_causal, lengths, longformer, prefix, random_blocks, reach, segments, shift_invariant,
    sparse_transformer_fixed, sparse_transformer_strided, strided, window,
)  # fmt: skip
from jaxformer.masks.mask import FAR, Mask
