"""Two stacks of the same block: the layers of the decoder also attend to the output of the encoder. Vaswani et al. 2017."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from jaxformer import masks
from jaxformer.errors import ConfigError
from jaxformer.models import transformer
from jaxformer.models.config import EncoderDecoder
from jaxformer.models.layer import Source
from jaxformer.models.mixers.attention import source_heads
from jaxformer.models.transformer import Inputs, Output

Tree = Any


def spec(config: EncoderDecoder) -> Tree:
    """Every parameter of both stacks, `{"encoder": ..., "decoder": ...}`; a shared token table is the decoder's."""
    encoder = dict(transformer.declared_spec(config.encoder))
    if config.share_embeddings:
        encoder["embedding"] = {name: leaf for name, leaf in encoder["embedding"].items() if name != "tokens"}
    if not encoder["embedding"]:
        del encoder["embedding"]
    return {"encoder": encoder, "decoder": transformer.declared_spec(config.decoder, config.encoder.d_model)}


def apply(config: EncoderDecoder, params: Tree, tokens: Int[Array, "B T"], **options) -> Output:
    """Logits `[B, T, V]` of target tokens given `source` tokens `[B, S]`; the options are fields of `Inputs`.

    Queries see the source tokens of their own segment; where only the source has segments, all that are not padding.
    `source_positions` replace the positions of the encoder, which restart with each segment. A `cache` needs the source
    once, with the first tokens: it keeps what the layers read of it. For the other options see `transformer.apply`.
    """
    return transformer.in_explicit_axes(partial(run, config))(params, Inputs(tokens, **options))


def run(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """Both stacks, then the heads of the decoder."""
    output = encode(config, params, inputs)
    return transformer.read(config.decoder, params["decoder"], output, inputs.real)


def encode(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """`apply` without the heads."""
    transformer.check_params(spec(config), params)
    tokens, source, cache, ids = inputs.tokens, inputs.source, inputs.cache, inputs.source_segment_ids
    if source is not None and source.shape[0] != tokens.shape[0]:
        raise ConfigError(f"apply: source {list(source.shape)} and tokens {list(tokens.shape)}: as many rows of both")
    encoder_key, decoder_key = (None, None) if inputs.dropout_key is None else jax.random.split(inputs.dropout_key)
    encoder, read = Output(None, None), None if cache is None else cache.source
    if source is not None:
        encoder = encode_source(config, params, replace(inputs, dropout_key=encoder_key))
        read = {"hidden": encoder.hidden, "heads": None, "segment_ids": ids}
        if cache is not None:
            cross = params["decoder"]["layers"]["cross_attention"]
            read["heads"] = jax.vmap(source_heads, in_axes=(0, None))(cross, encoder.hidden)
            read["segment_ids"] = jnp.ones(source.shape, jnp.int32) if ids is None else ids
            cache = replace(cache, source=read)
    if read is None:
        raise ConfigError("an encoder-decoder needs `source` tokens, or a cache that began with them")
    encoded = Source(read["hidden"], _visible(tokens, inputs.segment_ids, read["segment_ids"]), read["heads"])
    decoder = replace(inputs, source=None, cache=cache, dropout_key=decoder_key, encoded=encoded)
    return replace(
        transformer.encode(config.decoder, params["decoder"], decoder), source=read["hidden"],
        encoder_attention=encoder.attention, source_states=encoder.hidden_states,
    )  # fmt: skip


def encode_source(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """The output of the encoder for `inputs.source`."""
    tree = params["encoder"]
    if config.share_embeddings:
        table = {"tokens": params["decoder"]["embedding"]["tokens"]}
        tree = {**tree, "embedding": tree.get("embedding", {}) | table}
    inputs = Inputs(
        inputs.source, inputs.source_positions, inputs.source_segment_ids, dropout_key=inputs.dropout_key,
        dtype=inputs.dtype, return_attention=inputs.return_attention, return_hidden=inputs.return_hidden,
    )  # fmt: skip
    return transformer.encode(config.encoder, tree, inputs)


def _visible(tokens, segment_ids, source_segment_ids) -> masks.Mask:
    """Which source tokens each target token sees."""
    if source_segment_ids is None:
        return masks.full()
    if segment_ids is None:
        return masks.segments(jnp.ones_like(tokens), (source_segment_ids != 0).astype(jnp.int32))
    return masks.segments(segment_ids, source_segment_ids)
