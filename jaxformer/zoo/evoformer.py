"""The Evoformer of AlphaFold 2: an alignment of sequences and its pairs of residues, in turns.

Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplementary methods 1.6. Functions that are
usable alone read an alignment `[B, S, R, C]` of S sequences and R residues, pairs `[B, R, R, Z]`
and a padding mask of cells `[B, S, R]`, and return what the caller adds:

    alignment += evoformer.row_attention(params, alignment, pairs, padding_mask)
    pairs += evoformer.outer_product_mean(params, alignment, padding_mask)

`zoo.alignments` has the parts of a model that are made of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from jaxformer import ops
from jaxformer.models.layer import linear
from jaxformer.ops.dropout import rescaled
from jaxformer.params import Tree
from jaxformer.zoo import triangles
from jaxformer.zoo.triangles import Pairs, layer_norm, line_attention, map_of, norm_spec

Cells = Float[Array, "B S R C"]
CellMask = Shaped[Array, "B S R"]  # 0 or False for a cell that is missing


def row_attention(params: Tree, alignment: Cells, pairs: Pairs, padding_mask: CellMask) -> Cells:
    """Each sequence attends over its residues, with a bias from the pairs. Algorithm 7."""
    x = layer_norm(params["norm"], alignment)
    bias = triangles.pair_bias(params, layer_norm(params["pair_norm"], pairs))
    return line_attention(params, x, padding_mask, bias)


def column_attention(params: Tree, alignment: Cells, padding_mask: CellMask) -> Cells:
    """Each residue attends over the sequences. Algorithm 8."""
    x = layer_norm(params["norm"], alignment).swapaxes(1, 2)
    return line_attention(params, x, padding_mask.swapaxes(1, 2)).swapaxes(1, 2)


def outer_product_mean(params: Tree, alignment: Cells, padding_mask: CellMask) -> Pairs:
    """W mean_s(a_si b_sj^T) over the sequences that have both residues. Algorithm 10.

    a and b are linear maps of the normalised alignment. The mean is 0 if no sequence has both.
    """
    x = layer_norm(params["norm"], alignment)
    factors = linear("bsrc,ckd->bsrkd", x, params["factors"])
    factors = jnp.where((padding_mask != 0)[..., None, None], factors, 0)
    # float32: a sum over many sequences loses digits in 16 bits
    wide = jnp.promote_types(x.dtype, jnp.float32)
    counted = (padding_mask != 0).astype(wide)
    count = jnp.maximum(ops.einsum("bsi,bsj->bij", counted, counted), 1)
    outer = ops.einsum("bsic,bsjd->bijcd", factors[:, :, :, 0], factors[:, :, :, 1], wide)
    outer = outer / count[..., None, None]
    return linear("bijcd,cdz->bijz", outer.astype(x.dtype), params["out"])


def transition(params: Tree, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """W relu(W' norm(x)), of the alignment or of the pairs. Algorithms 9 and 15."""
    flat = layer_norm(params["norm"], x).reshape(1, -1, x.shape[-1])
    hidden = jax.nn.relu(linear("btd,df->btf", flat, params["up"]))
    return linear("btf,fd->btd", hidden, params["down"]).reshape(x.shape)


def transition_spec(width: int, hidden: int) -> Tree:
    """The parameters of `transition`."""
    up = map_of(width, (hidden,), ("mlp",), bias=True)
    down = triangles.last_map((hidden,), ("mlp",), width)
    return {"norm": norm_spec(width), "up": up, "down": down}


def outer_product_spec(width: int, hidden: int, pair_width: int) -> Tree:
    """The parameters of `outer_product_mean`; `hidden` features of each of the two vectors."""
    factors = map_of(width, (2, hidden), (None, "mlp"), bias=True)
    out = triangles.last_map((hidden, hidden), ("mlp", "channel"), pair_width)
    return {"norm": norm_spec(width), "factors": factors, "out": out}


def shared_dropout(x: Array, rate: float, key: Array | None, axis: int) -> Array:
    """Dropout whose choice is the same along an axis. Supplementary methods 1.11.6."""
    if key is None or rate == 0.0:
        return x
    shape = [1 if i == axis else size for i, size in enumerate(x.shape)]
    return rescaled(x, jax.random.bernoulli(key, 1.0 - rate, shape), rate)


def change_of_alignment(
    params: Tree,
    alignment: Cells,
    pairs: Pairs,
    padding_mask: CellMask,
    rate: float = 0.0,
    key: Array | None = None,
) -> Cells:
    """What lines 2 to 4 of algorithm 6 add to the alignment.

    Dropout of the row attention is the same for all sequences.
    """
    change = row_attention(params["row"], alignment, pairs, padding_mask)
    change = shared_dropout(change, rate, key, axis=1)
    change = change + column_attention(params["column"], alignment + change, padding_mask)
    return change + transition(params["transition"], alignment + change)


# the updates of the pairs in the order of algorithm 6, and the axis that shares their dropout
UPDATES: tuple[tuple[str, Callable, int], ...] = (
    ("outgoing", triangles.multiply_outgoing, 1),
    ("incoming", triangles.multiply_incoming, 1),
    ("starting", triangles.attend_starting, 1),
    ("ending", triangles.attend_ending, 2),
)


def change_of_pairs(
    params: Tree,
    alignment: Cells,
    pairs: Pairs,
    padding_mask: CellMask,
    rate: float = 0.0,
    key: Array | None = None,
) -> Pairs:
    """What lines 5 to 10 of algorithm 6 add to the pairs.

    A residue that no sequence has is padding.
    """
    residues = (padding_mask != 0).any(axis=1)
    change = outer_product_mean(params["outer_product"], alignment, padding_mask)
    for i, (name, update, axis) in enumerate(UPDATES):
        of_update = None if key is None else jax.random.fold_in(key, i)
        added = update(params[name], pairs + change, residues)
        change = change + shared_dropout(added, rate, of_update, axis)
    return change + transition(params["transition"], pairs + change)
