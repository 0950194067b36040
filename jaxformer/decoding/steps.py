"""The two steps of decoding: `prefill` reads prompts, `decode_step` the tokens that follow."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxformer import models
from jaxformer.decoding.cache import Cache
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.models.stacks import layout
from jaxformer.ops.stored_weight import StoredWeight, int8_weight, to_int8
from jaxformer.params import Spec, Tree, map_with_name, paths
from jaxformer.sharding import is_split


def prepare(config: ModelConfig | EncoderDecoder, params: Tree, dtype=None) -> Tree:
    """Parameters as decoding reads them: a tree for each layer, matrices in `dtype` (their own), in the platform's best order.

    All functions of `jaxformer.decoding` take these parameters, and plain ones, which they prepare at each call.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    platforms = {device.platform for leaf in leaves for device in leaf.devices()}
    prepared = isinstance(_last_tree(config, params)["layers"], tuple)
    return params if prepared else prepare_params(config, params, dtype, platforms)


def prepare_params(config: ModelConfig | EncoderDecoder, params: Tree, dtype, platforms: set[str]) -> Tree:
    """Plain parameters as `prepare` makes them of arrays on devices of these platforms."""
    store = _transposed if platforms in ({"cpu"}, {"gpu"}) and not is_split() else _cast
    return _prepare(config, store, dtype, params)


def quantize(config: ModelConfig | EncoderDecoder, params: Tree) -> Tree:
    """The parameters of `prepare` with matrices in 8 bits: `ops.einsum` multiplies by them, other functions refuse them.

    An output channel has one scale, max |w| / 127. Routed experts keep their precision, and so does a table of tokens that
    is not the head's.
    """
    return _prepare(config, _in_int8, models.last_stack(config).tie_embeddings, params)


def round_to_int8(spec: Tree, params: Tree) -> Tree:
    """Plain parameters with matrices rounded as `quantize` does, to measure what that costs."""
    tied = not any(_is_table(leaf) and leaf.contracts for leaf in jax.tree.leaves(spec))

    def rounded(spec: Spec, leaf: Array) -> Array:
        summed = spec.contracts or (("embed",) if tied and _is_table(spec) else ())
        if not summed or "expert" in spec.axes:
            return leaf
        axes = tuple(i for i, axis in enumerate(spec.axes) if axis in summed)
        values, scale = to_int8(leaf, axes)
        return (values * scale).astype(leaf.dtype)

    return _map_declared(rounded, spec, params)


@partial(jax.jit, static_argnums=(0, 1, 2))  # two equal `partial`s differ: one of them as argument would compile anew
def _prepare(config, store: Callable, option, params):
    store = partial(store, option)
    if isinstance(config, EncoderDecoder):
        return params | {"decoder": _prepare_stack(config.decoder, store, params["decoder"], config.encoder.d_model)}
    return _prepare_stack(config, store, params)


def _prepare_stack(config: ModelConfig, store, params: Tree, source_width: int | None = None) -> Tree:
    kinds = [kind.spec for kind in layout.kinds(config, source_width)]
    layers = layout.unstacked(config, params["layers"])
    spec = models.transformer.spec(config, source_width)
    models.transformer.check_params({name: part for name, part in spec.items() if name != "heads"}, params)
    tree = _map_declared(store, spec, {name: part for name, part in params.items() if name != "layers"})
    return tree | {"layers": tuple(jax.tree.map(store, kinds[i % len(kinds)], layer) for i, layer in enumerate(layers))}


def _map_declared(function: Callable, spec: Tree, params: Tree) -> Tree:
    """function(spec, leaf) of each leaf that the spec has. Others, heads of another use of the stack, stay as they are."""
    declared = paths(spec)
    return map_with_name(lambda path, leaf: function(declared[path], leaf) if path in declared else leaf, params)


def _cast(dtype, spec: Spec, leaf: Array) -> Array:
    """A matrix in `dtype`; also the table of tokens, which may be the head's."""
    return leaf.astype(dtype or leaf.dtype) if spec.contracts or _is_table(spec) else leaf


def _transposed(dtype, spec: Spec, leaf: Array) -> Array | StoredWeight:
    """The same, with the axes that products sum over last.

    XLA:CPU packs other matrices anew for every product. XLA:GPU makes of one row's product with such a matrix a multiplication
    and a sum, with an array of float32 as large as the matrix between them.
    """
    order, leaf = _order(spec), _cast(dtype, spec, leaf)
    stays = not spec.contracts or "expert" in spec.axes or order == tuple(range(leaf.ndim))
    return leaf if stays else StoredWeight(leaf.transpose(order), order)


def _in_int8(tied: bool, spec: Spec, leaf: Array) -> Array | StoredWeight:
    if _is_table(spec) and (tied or spec.contracts):
        return int8_weight(leaf, (0, 1), 1)
    return int8_weight(leaf, _order(spec), len(spec.contracts)) if spec.contracts and "expert" not in spec.axes else leaf


def _order(spec: Spec) -> tuple[int, ...]:
    return tuple(np.argsort([axis in spec.contracts for axis in spec.axes], kind="stable").tolist())


def _is_table(spec: Spec) -> bool:
    return spec.axes == ("vocab", "embed")


def prefill(
    config: ModelConfig | EncoderDecoder, params: Tree, tokens: Int[Array, "B T"], cache: Cache, *, lengths=None, **options
) -> tuple[Float[Array, "B V"], Cache]:
    """(logits after the last token of each prompt, the cache with all of them), of whole prompts or of their next piece.

    `lengths` [B]: how many of a row's tokens are text; the rest is padding. In a new cache, attention is that of training, of
    tokens from position 0 on under a mask that is known when it is compiled; later pieces read the cache. Under a mask that
    shows later tokens (a prefix), give the whole prompt: a piece sees nothing behind it. `options` are those of
    `models.apply`: `dtype`, `source`. Raises ConfigError for rows or tokens that do not fit the cache.
    """
    output = models.encode(config, params, tokens, cache=cache, lengths=lengths, **options)
    # only of the last tokens: of a long prompt, all logits would be larger than the cache
    last = jnp.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    hidden = jnp.take_along_axis(output.hidden, last[:, None, None] - 1, axis=1)
    return logits_of(config, params, hidden)[:, 0].astype(jnp.promote_types(hidden.dtype, jnp.float32)), output.cache


def logits_of(config: ModelConfig | EncoderDecoder, params: Tree, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """What the model's first head makes of hidden states."""
    read = models.transformer.read(models.last_stack(config), _last_tree(config, params), models.Output(None, hidden))
    return read.logits


def _last_tree(config: ModelConfig | EncoderDecoder, params: Tree) -> Tree:
    """The parameters of `models.last_stack`."""
    return params["decoder"] if isinstance(config, EncoderDecoder) else params


def decode_step(
    config: ModelConfig | EncoderDecoder, params: Tree, tokens: Int[Array, "B T"], cache: Cache, *, lengths=None, **options
) -> tuple[Float[Array, "B T V"], Cache]:
    """(logits after each of T tokens more, the cache with them): one token, a draft to check, or a piece of a long prompt."""
    output = models.apply(config, params, tokens, cache=cache, lengths=lengths, **options)
    return output.logits, output.cache
