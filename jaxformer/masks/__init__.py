"""Attention masks as values: small, hashable specs that every kernel understands.

    mask = causal() & window(256) | prefix(16)

A mask is a rule over absolute positions, `(q_positions, kv_positions) -> bool`, True where a query may attend. No array of
size T x S exists until `.dense(T, S)` is called; `.blocks(T, S, block)` tells a kernel which blocks to compute.
Masks without arrays are hashable and may be static arguments of `jax.jit`; masks with arrays (`segments`, `lengths`,
and `prefix`, `global_tokens`, `block_sparse` of arrays) are pytrees and may be traced.
"""

from jaxformer.masks.mask import (
    EMPTY,
    FAR,
    FULL,
    PARTIAL,
    Mask,
    as_mask,
    bigbird,
    block_sparse,
    by_head,
    causal,
    chunked,
    columns,
    full,
    global_tokens,
    lengths,
    longformer,
    parse,
    prefix,
    random_blocks,
    segments,
    shift_invariant,
    sparse_transformer_fixed,
    sparse_transformer_strided,
    strided,
    window,
)  # fmt: skip

__all__ = [
    "EMPTY", "FAR", "FULL", "PARTIAL", "Mask", "as_mask", "bigbird", "block_sparse", "by_head", "causal", "chunked",
    "columns", "full", "global_tokens", "lengths", "longformer", "parse", "prefix", "random_blocks", "segments",
    "shift_invariant", "sparse_transformer_fixed", "sparse_transformer_strided", "strided", "window",
]  # fmt: skip
