"""Two stacks of the same block: the decoder's layers also attend to the encoder's output. Vaswani et al. 2017."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from jaxformer import masks, params
from jaxformer.errors import ConfigError
from jaxformer.models import transformer
from jaxformer.models.config import EncoderDecoder
from jaxformer.models.layer import Source
from jaxformer.models.mixers.attention import source_heads
from jaxformer.models.transformer import Output

Tree = Any


def spec(config: EncoderDecoder) -> Tree:
    """Every parameter of both stacks, `{"encoder": ..., "decoder": ...}`; a shared token table is the decoder's."""
    encoder = dict(transformer.declared_spec(config.encoder))
    if config.share_embeddings:
        encoder["embedding"] = {name: leaf for name, leaf in encoder["embedding"].items() if name != "tokens"}
    if not encoder["embedding"]:
        del encoder["embedding"]
    return {"encoder": encoder, "decoder": transformer.declared_spec(config.decoder, config.encoder.d_model)}


def init(config: EncoderDecoder, key: Array, dtype=jnp.float32) -> Tree:
    """Initial parameters."""
    return params.init(spec(config), key, dtype)


def apply(
    config: EncoderDecoder,
    params: Tree,
    tokens: Int[Array, "B T"],
    *,
    source: Int[Array, "B S"] | None = None,
    source_segment_ids: Int[Array, "B S"] | None = None,
    source_positions: Int[Array, "#B S"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cache: Any = None,
    dropout_key: Array | None = None,
    dtype=None,
    return_attention: bool = False,
) -> Output:
    """Logits `[B, T, V]` of target tokens given source tokens; `.source` are the encoder's hidden states.

    Queries see the source tokens of their own segment (all that are not padding, where only the source has segments).
    `source_positions` replace the encoder's positions, which restart with each segment (0 = padding) of its own.
    With a `cache` the source is given once, with the first tokens: the cache keeps what the layers read of it.
    """
    options = dict(
        source=source, source_segment_ids=source_segment_ids, source_positions=source_positions, positions=positions,
        segment_ids=segment_ids, cache=cache, dropout_key=dropout_key, dtype=dtype, return_attention=return_attention,
    )  # fmt: skip
    output = encode(config, params, tokens, **options)
    real = None if segment_ids is None else segment_ids != 0
    return transformer.read(config.decoder, params["decoder"], output, real)


def encode(
    config: EncoderDecoder,
    params: Tree,
    tokens,
    *,
    source=None,
    source_segment_ids=None,
    source_positions=None,
    positions=None,
    segment_ids=None,
    cache=None,
    dropout_key=None,
    dtype=None,
    return_attention=False,
) -> Output:
    """`apply` without the heads."""
    transformer.check_params(spec(config), params)
    if source is not None and source.shape[0] != tokens.shape[0]:
        raise ConfigError(f"apply: source {list(source.shape)} and tokens {list(tokens.shape)}: as many rows of both")
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    options: dict[str, Any] = dict(dtype=dtype, return_attention=return_attention)
    known: Any = None if cache is None else cache.source
    if source is not None:
        encoded = encode_source(config, params, source, source_segment_ids, keys[0], dtype, source_positions)
        if cache is not None:
            cross = params["decoder"]["layers"]["cross_attention"]
            heads = jax.vmap(source_heads, in_axes=(0, None))(cross, encoded)
            ids = jnp.ones(source.shape, jnp.int32) if source_segment_ids is None else source_segment_ids
            cache = replace(cache, source=dict(hidden=encoded, heads=heads, segment_ids=ids))
            known = cache.source
        else:
            known = dict(hidden=encoded, heads=None, segment_ids=source_segment_ids)
    if known is None:
        raise ConfigError("an encoder-decoder needs `source` tokens, or a cache that began with them")
    read = Source(known["hidden"], _visible(tokens, segment_ids, known["segment_ids"]), known["heads"])
    output = transformer.encode(
        config.decoder, params["decoder"], tokens, positions=positions, segment_ids=segment_ids, cache=cache,
        dropout_key=keys[1], source=read, **options,
    )  # fmt: skip
    return replace(output, source=known["hidden"])


def encode_source(
    config: EncoderDecoder, params: Tree, source, segment_ids=None, dropout_key=None, dtype=None, positions=None
) -> Array:
    """The encoder's hidden states `[B, S, D]`."""
    own = params["encoder"]
    if config.share_embeddings:
        table = {"tokens": params["decoder"]["embedding"]["tokens"]}
        own = {**own, "embedding": own.get("embedding", {}) | table}
    return transformer.encode(
        config.encoder, own, source, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key, dtype=dtype
    ).hidden


def _visible(tokens, segment_ids, source_segment_ids) -> masks.Mask:
    if source_segment_ids is None:
        return masks.full()
    if segment_ids is None:
        return masks.segments(jnp.ones_like(tokens), (source_segment_ids != 0).astype(jnp.int32))
    return masks.segments(segment_ids, source_segment_ids)
