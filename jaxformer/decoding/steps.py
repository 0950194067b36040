"""The two steps of decoding: `prefill` reads prompts, `decode_step` reads the tokens after them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxformer import models
from jaxformer.decoding.cache import Cache
from jaxformer.models import Embedding, EncoderDecoder, ModelConfig, Patches
from jaxformer.models.stacks import layout
from jaxformer.ops.stored_weight import (
    BlockWeight,
    StoredWeight,
    block_weight,
    int8_weight,
    plain_matrix,
    to_int8,
)
from jaxformer.params import Spec, Tree, map_with_name, paths
from jaxformer.sharding import is_split


def prepare(config: ModelConfig | EncoderDecoder, params: Tree, dtype=None) -> Tree:
    """Parameters as decoding reads them: one tree for each layer, in the platform's best layout.

    Matrices are in `dtype` (None: their own). Every function of `jaxformer.decoding` takes these
    parameters. It also takes plain ones, and prepares them at each call.
    """
    if isinstance(_last_tree(config, params)["layers"], tuple):
        return params  # prepared before
    leaves = [
        leaf
        for leaf in jax.tree.leaves(params)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    ]
    platforms = {device.platform for leaf in leaves for device in leaf.devices()}
    return prepare_params(config, params, dtype, platforms)


def prepare_params(
    config: ModelConfig | EncoderDecoder, params: Tree, dtype, platforms: set[str]
) -> Tree:
    """`prepare` of plain parameters, for arrays on devices of these platforms."""
    store = _transposed if platforms in ({"cpu"}, {"gpu"}) and not is_split() else _cast
    return _prepare(config, store, dtype, params)


def quantize(config: ModelConfig | EncoderDecoder, params: Tree, form: Any = None) -> Tree:
    """The parameters of `prepare`, with matrices in int8 and a scale max |w| / 127 for each output.

    With a `form`, such as `ops.quantised.NF4()` or `Int4()`, they are in its blocks instead: 4.5
    bits a number. `ops.einsum` multiplies by these matrices; other functions refuse them. Routed
    experts keep their precision, and so does a table of tokens that is not the head's.
    """
    return _prepare(config, _quantized, (models.last_stack(config).tie_embeddings, form), params)


def round_to_int8(spec: Tree, params: Tree) -> Tree:
    """Plain parameters with matrices rounded as by `quantize`, to measure the loss of quality."""

    def rounded(leaf: Array, axes: tuple[int, ...]) -> Array:
        values, scale = to_int8(leaf, axes)
        return values * scale

    return _round(rounded, spec, params)


def round_to_blocks(form: Any, spec: Tree, params: Tree) -> Tree:
    """Plain parameters with matrices rounded as by `quantize` with this form."""

    def rounded(leaf: Array, axes: tuple[int, ...]) -> Array:
        order = (*(i for i in range(leaf.ndim) if i not in axes), *axes)
        return plain_matrix(block_weight(leaf, order, len(axes), form), jnp.float32)

    return _round(rounded, spec, params)


def _round(function: Callable, spec: Tree, params: Tree) -> Tree:
    """function(leaf, the axes that products sum over) for each matrix that `quantize` stores."""
    tied = not any(_is_table(leaf) and leaf.contracts for leaf in jax.tree.leaves(spec))

    def rounded(spec: Spec, leaf: Array) -> Array:
        summed = spec.contracts or (("embed",) if tied and _is_table(spec) else ())
        if not summed or "expert" in spec.axes:
            return leaf
        axes = tuple(i for i, axis in enumerate(spec.axes) if axis in summed)
        return function(leaf, axes).astype(leaf.dtype)

    return _map_declared(rounded, spec, params)


# `store` and `option` are two arguments: equal `partial`s differ, so a new one would compile anew
@partial(jax.jit, static_argnums=(0, 1, 2))
def _prepare(config, store: Callable, option, params):
    store = partial(store, option)
    if not isinstance(config, EncoderDecoder):
        return _prepare_stack(config, store, params)
    width = config.encoder.d_model
    return params | {"decoder": _prepare_stack(config.decoder, store, params["decoder"], width)}


def _prepare_stack(
    config: ModelConfig, store, params: Tree, source_width: int | None = None
) -> Tree:
    kinds = [kind.spec for kind in layout.kinds(config, source_width)]
    layers = layout.unstacked(config, params["layers"])
    spec = models.transformer.spec(config, source_width)
    without_heads = {name: tree for name, tree in spec.items() if name != "heads"}
    models.transformer.check_params(without_heads, params)
    without_layers = {name: tree for name, tree in params.items() if name != "layers"}
    stored = [jax.tree.map(store, kinds[i % len(kinds)], layer) for i, layer in enumerate(layers)]
    prepared = _map_declared(store, spec, without_layers) | {"layers": tuple(stored)}
    is_ours = isinstance(config.embedding, Embedding | Patches)
    if is_ours or "embedding" not in params:  # one of the user's own may have no parameters
        return prepared
    # an embedding of the user's own may call functions that read plain arrays only; a head may read
    # by its table of tokens
    plain = {name: tree for name, tree in params["embedding"].items() if name != "tokens"}
    return prepared | {"embedding": prepared["embedding"] | plain}


def _map_declared(function: Callable, spec: Tree, params: Tree) -> Tree:
    """function(spec, leaf) for each leaf that the spec declares. Other leaves are unchanged.

    Such leaves are heads for another use of the stack.
    """
    declared = paths(spec)
    return map_with_name(
        lambda path, leaf: function(declared[path], leaf) if path in declared else leaf, params
    )


def _cast(dtype, spec: Spec, leaf: Array) -> Array:
    """A matrix in `dtype`. The table of tokens counts as a matrix: it may be the head's too."""
    return leaf.astype(dtype or leaf.dtype) if spec.contracts or _is_table(spec) else leaf


def _transposed(dtype, spec: Spec, leaf: Array) -> Array | StoredWeight:
    """A matrix in `dtype`, with the axes last over which products sum.

    XLA:CPU packs other matrices anew for every product. For the product of one row with another
    matrix, XLA:GPU compiles a multiplication and a sum, with a float32 array as large as the
    matrix between them.
    """
    order = _order(spec)
    leaf = _cast(dtype, spec, leaf)
    if not spec.contracts or "expert" in spec.axes or order == tuple(range(leaf.ndim)):
        return leaf
    return StoredWeight(leaf.transpose(order), order)


def _quantized(option, spec: Spec, leaf: Array) -> Array | StoredWeight | BlockWeight:
    """A matrix in int8, or in a form's blocks; `option` is (whether the head is tied, form)."""
    tied, form = option
    order, summed = _order(spec), len(spec.contracts)
    if _is_table(spec) and (tied or spec.contracts):
        order, summed = (0, 1), 1
    elif not spec.contracts or "expert" in spec.axes:
        return leaf
    if form is None:
        return int8_weight(leaf, order, summed)
    return block_weight(leaf, order, summed, form)


def _order(spec: Spec) -> tuple[int, ...]:
    return tuple(np.argsort([axis in spec.contracts for axis in spec.axes], kind="stable").tolist())


def _is_table(spec: Spec) -> bool:
    return spec.axes == ("vocab", "embed")


def prefill(
    config: ModelConfig | EncoderDecoder,
    params: Tree,
    tokens: Int[Array, "B T"],
    cache: Cache,
    *,
    lengths=None,
    **options,
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads whole prompts, or their next piece: (logits after each row's last token, new cache).

    `lengths` [B] is the number of text tokens in each row; the tokens after them are padding. With
    a new cache, attention is that of training: tokens start at position 0, and the mask is known
    at compile time. Later pieces read the cache. Under a mask that shows later tokens (a prefix),
    give the whole prompt, because a piece does not see the tokens after it. `options` are those of
    `models.apply`: `dtype`, `source`. Raises ConfigError for rows or tokens that do not fit the
    cache.
    """
    output = models.encode(config, params, tokens, cache=cache, lengths=lengths, **options)
    # logits of the last tokens only: those of a whole long prompt would be larger than the cache
    last = jnp.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    hidden = jnp.take_along_axis(output.hidden, last[:, None, None] - 1, axis=1)
    logits = logits_of(config, params, hidden)[:, 0]
    return logits.astype(jnp.promote_types(hidden.dtype, jnp.float32)), output.cache


def logits_of(
    config: ModelConfig | EncoderDecoder, params: Tree, hidden: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """The logits of the model's first head for these hidden states."""
    stack = models.last_stack(config)
    output = models.Output(None, hidden)
    return models.transformer.read(stack, _last_tree(config, params), output).logits


def _last_tree(config: ModelConfig | EncoderDecoder, params: Tree) -> Tree:
    """The parameters of `models.last_stack`."""
    return params["decoder"] if isinstance(config, EncoderDecoder) else params


def decode_step(
    config: ModelConfig | EncoderDecoder,
    params: Tree,
    tokens: Int[Array, "B T"],
    cache: Cache,
    *,
    lengths=None,
    **options,
) -> tuple[Float[Array, "B T V"], Cache]:
    """Reads T more tokens in each row: (logits after each of them, the new cache).

    They are one new token, a draft to check, or a piece of a long prompt.
    """
    output = models.apply(config, params, tokens, cache=cache, lengths=lengths, **options)
    return output.logits, output.cache
