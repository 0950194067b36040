"""Frozen matrices in blocks of few bits, below an adaptation: QLoRA, arXiv:2305.14314.

Matrices of products are stored as codes and scales (`ops.quantised`). Tables of the vocabulary,
routers, norms, biases and all that trains stay in float32. Each layer and each expert has blocks
of its own.
"""

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.nn.initializers import zeros

from jaxformer import params, sharding
from jaxformer.ops import cpu, quantised
from jaxformer.params import Spec, Tree


def is_stored(leaf: Spec) -> bool:
    """Whether a frozen parameter is stored in blocks: the matrix of a product, but no router."""
    is_router = leaf.axes[-1:] == ("expert",)
    return bool(leaf.contracts) and "vocab" not in leaf.axes and not is_router and leaf.trained


def stored_paths(spec: Tree, trained: Collection[str]) -> set[str]:
    """The paths that are stored in blocks, of a model whose parameters `trained` train."""
    leaves = params.paths(spec)
    return {path for path, leaf in leaves.items() if is_stored(leaf) and path not in trained}


def stored_spec(spec: Tree, stored: Collection[str], form: Any) -> Tree:
    """The spec of a model's parameters, with `{"codes", "scales"}` at the paths `stored`.

    Blocks are split over devices like the inputs of a layer. All values start at zero: they come
    from weights (`store`), not from a random key.
    """

    def blocks_of(path: str, leaf: Spec) -> Any:
        if path not in stored:
            return leaf
        stack = params.stack_axes(leaf)
        count, width = quantised.sizes(math.prod(leaf.shape[stack:]), form)
        shape, axes = (*leaf.shape[:stack], count), (*leaf.axes[:stack], "embed")
        return {
            "codes": Spec((*shape, width), (*axes, None), zeros, dtype=jnp.uint8),
            "scales": Spec(shape, axes, zeros),
        }

    return params.map_with_name(blocks_of, spec)


def store(spec: Tree, stored: Collection[str], form: Any, weights: Tree) -> Tree:
    """The parameters of a model in the form of `stored_spec`."""
    leaves = params.paths(spec)

    def to_blocks(path: str, array: Any) -> Any:
        if path not in stored:
            return array
        stack = params.stack_axes(leaves[path])
        flat = jnp.reshape(array, (*array.shape[:stack], -1))
        codes, scales = quantised.quantise(flat, form)
        return {"codes": codes, "scales": scales}

    return params.map_with_name(to_blocks, weights)


def read(spec: Tree, stored: Collection[str], form: Any, weights: Tree) -> Tree:
    """The parameters of a model in float32, from the form of `stored_spec`."""

    def from_blocks(path: str, leaf: Spec) -> Any:
        array = weights
        for name in path.split("/"):
            array = array[name]
        if path not in stored:
            return array
        count = math.prod(leaf.shape[params.stack_axes(leaf) :])
        flat = quantised.dequantise(array["codes"], array["scales"], form, count)
        # Else XLA:CPU may fuse the product with the sum of a merge, which rounds once less.
        return cpu.barrier(flat).reshape(leaf.shape)

    # XLA would split a matrix as it splits its blocks, and then move it to where the layer has it
    found = params.map_with_name(from_blocks, spec)
    return sharding.with_spec_sharding(found, spec, sharding.PARAMETERS)
