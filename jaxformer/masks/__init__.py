"""Attention masks as values: small, hashable specs that every kernel understands.

    mask = causal() & (window(256) | prefix(16))  # & binds before |; without the brackets all queries see the prefix

A mask is a rule over absolute positions, `(q_positions, kv_positions) -> bool`, True where a query may attend. Every mask is
a pytree. Without arrays it is hashable and may be a static argument of `jax.jit`; with arrays (`segments`, `lengths`) not.
"""

# ruff: noqa: F401, I001 (names that the package offers)
from jaxformer.masks.blocks import EMPTY, FULL, PARTIAL
from jaxformer.masks.mask import (
    FAR, Mask, as_mask, bigbird, block_sparse, by_head, causal, chunked, columns, full, global_tokens, is_causal, lengths,
    longformer, prefix, random_blocks, reach, segments, shift_invariant, sparse_transformer_fixed,
    sparse_transformer_strided, strided, window,
)  # fmt: skip
