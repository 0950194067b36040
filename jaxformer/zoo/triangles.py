"""Updates of pairs of residues along triangles: what i-k and k-j say about i-j.

Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplementary methods 1.6.5 and 1.6.6.
Each function reads pairs `[B, R, R, Z]` and a padding mask of residues `[B, R]`, and returns what
the caller adds to the pairs. `line_attention` is the gated attention of `zoo.evoformer`, too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, ones, zeros
from jaxtyping import Float, Shaped

from jaxformer import ops
from jaxformer.masks import segments
from jaxformer.models.layer import linear
from jaxformer.params import Spec, Tree, linear as linear_map

Pairs = Float[Array, "B R R Z"]
Residues = Shaped[Array, "B R"]  # 0 or False for padding


def norm_spec(width: int) -> Tree:
    """The parameters of a layer norm over `width` features."""
    return {"scale": Spec((width,), ("embed",), ones), "bias": Spec((width,), ("embed",), zeros)}


def layer_norm(params: Tree, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """`ops.layer_norm` with the parameters of `norm_spec`."""
    return ops.layer_norm(x, params["scale"], params["bias"])


def map_of(inputs: int, shape: tuple[int, ...], axes: tuple, bias: bool = False) -> Tree:
    """A linear map of `inputs` features, which starts with the variance 1 / inputs."""
    whole = (inputs, *shape), ("embed", *axes), ("embed",)
    return linear_map(*whole, normal(inputs**-0.5), bias)


def gate_of(inputs: int, shape: tuple[int, ...], axes: tuple) -> Tree:
    """A linear map that starts as sigmoid(1): open gates. Supplementary methods 1.11.4."""
    bias = {"bias": Spec(shape, axes, ones)}
    return linear_map((inputs, *shape), ("embed", *axes), ("embed",), zeros, bias=False) | bias


def last_map(shape: tuple[int, ...], axes: tuple, outputs: int) -> Tree:
    """A linear map that starts at zero, so that its sub-layer does. It sums over all of `axes`."""
    return linear_map((*shape, outputs), (*axes, "embed"), axes, zeros)


def attention_spec(width: int, heads: int, head_width: int, pair_width: int | None = None) -> Tree:
    """The parameters of `line_attention`, with a norm; with `pair_width`, also those of a bias.

    The bias is a linear map of pairs of that width.
    """
    shape, axes = (heads, head_width), ("heads", "head")
    tree = {
        "query_key_value": map_of(width, (3, *shape), (None, *axes)),
        "gate": gate_of(width, shape, axes),
        "out": last_map(shape, axes, width),
        "norm": norm_spec(width),
    }
    if pair_width is not None:
        tree["bias"] = map_of(pair_width, (heads,), ("heads",))
    return tree


def line_attention(
    params: Tree,
    x: Float[Array, "B K T C"],
    padding_mask: Shaped[Array, "B K T"],
    bias: Float[Array, "B N T T"] | None = None,
) -> Float[Array, "B K T C"]:
    """W concat_n(sigmoid(gate) * softmax(q k^T / sqrt(H) + bias) v), within each line alone.

    There are K lines of T cells. The bias is the same for all lines. The padding mask hides cells
    as keys.
    """
    B, K, T, C = x.shape
    lines = x.reshape(B * K, T, C)
    query, key, value = jnp.moveaxis(
        linear("btc,cknh->btknh", lines, params["query_key_value"]), 2, 0
    )
    gate = jax.nn.sigmoid(linear("btc,cnh->btnh", lines, params["gate"]))
    keys = (padding_mask != 0).reshape(B * K, T).astype(jnp.int32)
    of_lines = None if bias is None else jnp.repeat(bias, K, axis=0)
    visible = segments(jnp.ones_like(keys), keys)
    seen: Any = ops.attention(query, key, value, mask=visible, bias=of_lines)
    return linear("btnh,nhc->btc", gate * seen, params["out"]).reshape(B, K, T, C)


def pair_bias(params: Tree, pairs: Pairs) -> Float[Array, "B N R R"]:
    """A bias of the scores of each head: a linear map of normalised pairs."""
    return linear("bijz,zn->bnij", pairs, params["bias"])


def lines_of(padding_mask: Residues) -> Shaped[Array, "B R R"]:
    """The padding mask of all lines of the pairs: the residues of each line."""
    return jnp.broadcast_to(padding_mask[:, None], (*padding_mask.shape, padding_mask.shape[1]))


def attend_starting(params: Tree, pairs: Pairs, padding_mask: Residues) -> Pairs:
    """i-j attends to i-k over all k, with a bias from j-k. Algorithm 13."""
    pairs = layer_norm(params["norm"], pairs)
    return line_attention(params, pairs, lines_of(padding_mask), pair_bias(params, pairs))


def attend_ending(params: Tree, pairs: Pairs, padding_mask: Residues) -> Pairs:
    """i-j attends to k-j over all k, with a bias from k-i. Algorithm 14.

    It is `attend_starting` of the transposed pairs.
    """
    return attend_starting(params, pairs.swapaxes(1, 2), padding_mask).swapaxes(1, 2)


def multiplication_spec(width: int, hidden: int) -> Tree:
    """The parameters of `multiply_outgoing` or `multiply_incoming`; `hidden` features multiply."""
    return {
        "factors": map_of(width, (2, hidden), (None, "mlp"), bias=True),
        "factor_gates": gate_of(width, (2, hidden), (None, "mlp")),
        "gate": gate_of(width, (width,), (None,)),
        "norm": norm_spec(width),
        "product_norm": norm_spec(hidden),
        "out": last_map((hidden,), ("mlp",), width),
    }


def multiply_outgoing(params: Tree, pairs: Pairs, padding_mask: Residues) -> Pairs:
    """gate * W norm(sum_k a_ik * b_jk), with a and b gated maps of the pairs. Algorithm 11."""
    return multiply("bcik,bcjk->bcij", params, pairs, padding_mask)


def multiply_incoming(params: Tree, pairs: Pairs, padding_mask: Residues) -> Pairs:
    """gate * W norm(sum_k a_ki * b_kj), with a and b gated maps of the pairs. Algorithm 12."""
    return multiply("bcki,bckj->bcij", params, pairs, padding_mask)


def multiply(triangles: str, params: Tree, pairs: Pairs, padding_mask: Residues) -> Pairs:
    """The update whose products of a and b an einsum names."""
    pairs = layer_norm(params["norm"], pairs)
    is_pair = (padding_mask[:, :, None] != 0) & (padding_mask[:, None] != 0)
    gates = jax.nn.sigmoid(linear("bijz,zkc->bijkc", pairs, params["factor_gates"]))
    factors = gates * linear("bijz,zkc->bijkc", pairs, params["factors"])
    factors = jnp.where(is_pair[..., None, None], factors, 0)
    a, b = factors.transpose(3, 0, 4, 1, 2)  # [B, C, R, R]: a matrix for each feature
    # a sum over all residues may be too large for float16; the norm makes it small again
    wide = jnp.promote_types(pairs.dtype, jnp.float32)
    products = ops.einsum(triangles, a, b, wide)
    products = layer_norm(params["product_norm"], products.transpose(0, 2, 3, 1))
    products = products.astype(pairs.dtype)
    gate = jax.nn.sigmoid(linear("bijz,zc->bijc", pairs, params["gate"]))
    return gate * linear("bijc,cz->bijz", products, params["out"])
