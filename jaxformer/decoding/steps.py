"""The two steps of decoding: `prefill` reads prompts, `decode_step` the tokens that follow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxformer import models
from jaxformer.decoding.cache import Cache
from jaxformer.models import EncoderDecoder, ModelConfig, block
from jaxformer.models.stacks import scan
from jaxformer.ops.einsum import StoredWeight
from jaxformer.params import Spec, Tree


def prepare(config: ModelConfig | EncoderDecoder, params: Tree, dtype=None) -> Tree:
    """Parameters as decoding reads them: a tree for each layer, matrices in `dtype` (their own), in the platform's best order.

    All functions of `jaxformer.decoding` take these parameters, and plain ones, which they prepare at each call.
    """
    if is_prepared(config, params):
        return params
    leaves = jax.tree.leaves(params)
    platforms = {device.platform for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return _prepare(config, dtype, platforms == {"cpu"}, params)


def is_prepared(config: ModelConfig | EncoderDecoder, params: Tree) -> bool:
    """Whether `prepare` made these parameters."""
    tree = params["decoder"] if isinstance(config, EncoderDecoder) else params
    return isinstance(tree["layers"], tuple)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _prepare(config, dtype, transpose: bool, params):
    lay = partial(_lay, dtype, transpose)
    if isinstance(config, EncoderDecoder):
        return params | {"decoder": _prepare_stack(config.decoder, lay, params["decoder"], config.encoder.d_model)}
    return _prepare_stack(config, lay, params)


def _prepare_stack(config: ModelConfig, lay, params: Tree, source_width: int | None = None) -> Tree:
    slots = [block.spec(config, mixer, source_width) for mixer in scan.pattern(config)]
    layers = scan.unstacked(config, params["layers"])
    tree = {name: part for name, part in params.items() if name != "layers"}
    spec = {name: part for name, part in models.transformer.spec(config, source_width).items() if name in tree}
    tree = jax.tree.map(lay, spec, {name: tree[name] for name in spec}) | {n: part for n, part in tree.items() if n not in spec}
    return tree | {"layers": tuple(jax.tree.map(lay, slots[i % len(slots)], layer) for i, layer in enumerate(layers))}


def _lay(dtype, transpose: bool, spec: Spec, leaf: Array) -> Array | StoredWeight:
    """A matrix in `dtype`; on CPU with the axes that products sum over last: XLA:CPU packs others anew for every product."""
    if not spec.contracts and "vocab" not in spec.axes[:-1]:  # the table of tokens may also be the head's
        return leaf
    leaf = leaf.astype(dtype or leaf.dtype)
    order = tuple(np.argsort([axis in spec.contracts for axis in spec.axes], kind="stable").tolist())
    if not transpose or "expert" in spec.axes or order == tuple(range(leaf.ndim)):
        return leaf
    return StoredWeight(leaf.transpose(order), order)


def prefill(
    config: ModelConfig | EncoderDecoder, params: Tree, tokens: Int[Array, "B T"], cache: Cache, *, lengths=None, **options
) -> tuple[Float[Array, "B V"], Cache]:
    """(logits after the last token of each prompt, the cache with all of them); `cache` is new.

    `lengths` [B]: how many of a row's tokens are text; the rest is padding. Attention is that of training, of tokens from
    position 0 on under a mask that is known when it is compiled. `options` are those of `models.apply`: `dtype`, `source`.
    """
    output = models.encode(config, params, tokens, cache=cache, lengths=lengths, **options)
    return _last_logits(config, params, output, lengths), output.cache


def _last_logits(config, params, output: models.Output, lengths) -> Float[Array, "B V"]:
    """The logits of each row's last token alone: of a long prompt, all logits would be larger than the cache."""
    stack, tree = models.last_stack(config), params["decoder"] if isinstance(config, EncoderDecoder) else params
    last = jnp.full(len(output.hidden), output.hidden.shape[1]) if lengths is None else lengths
    hidden = jnp.take_along_axis(output.hidden, last[:, None, None] - 1, axis=1)
    read = models.transformer.read(stack, tree, models.Output(None, hidden))
    return read.logits[:, 0].astype(jnp.promote_types(hidden.dtype, jnp.float32))


def decode_step(
    config: ModelConfig | EncoderDecoder, params: Tree, tokens: Int[Array, "B T"], cache: Cache, *, lengths=None, **options
) -> tuple[Float[Array, "B T V"], Cache]:
    """(logits after each of T tokens more, the cache with them): one token, a draft to check, or a piece of a long prompt."""
    output = models.apply(config, params, tokens, cache=cache, lengths=lengths, **options)
    return output.logits, output.cache
