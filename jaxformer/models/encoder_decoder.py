"""An encoder-decoder: two stacks, and each decoder layer also attends to the encoder's output.

Vaswani et al. 2017.
"""

from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import masks
from jaxformer.errors import ConfigError
from jaxformer.models import transformer
from jaxformer.models.config import EncoderDecoder
from jaxformer.models.inputs import Inputs, Output
from jaxformer.models.intermediates import of_stack
from jaxformer.models.layer import Source
from jaxformer.models.locate import locate
from jaxformer.models.mixers.attention import source_heads
from jaxformer.models.position_table import attention_positions, attention_table
from jaxformer.models.stacks import layout
from jaxformer.params import Tree


def spec(config: EncoderDecoder) -> Tree:
    """Every parameter of both stacks, `{"encoder": ..., "decoder": ...}`.

    The decoder holds a shared token table.
    """
    encoder = transformer.spec(config.encoder)
    if config.share_embeddings:
        encoder["embedding"].pop("tokens", None)
    if not encoder["embedding"]:
        del encoder["embedding"]
    return {"encoder": encoder, "decoder": transformer.spec(config.decoder, config.encoder.d_model)}


def encode(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """Both stacks, without heads.

    A target token attends to the source tokens of its own segment. The heads are the decoder's.
    """
    transformer.check_params(spec(config), params)
    check_source(inputs)
    encoder_key = decoder_key = None
    if inputs.dropout_key is not None:
        encoder_key, decoder_key = jax.random.split(inputs.dropout_key)
    encoder = Output(None, None)
    cache = inputs.cache
    key_positions = None  # a cache holds keys that contain them already
    if inputs.source is None:
        source = cache.source
    else:
        encoder = encode_source(config, params, replace(inputs, dropout_key=encoder_key))
        key_positions = positions_of_source(config, params, inputs)
        source = {
            "hidden": encoder.hidden,
            "heads": None,
            "segment_ids": inputs.source_segment_ids,
        }
        if cache is not None:
            source = source_in_cache(config, params, source, key_positions)
            cache = replace(cache, source=source)
    visible = _visible(inputs.tokens, inputs.segment_ids, source["segment_ids"])
    names, edits = of_stack("decoder", inputs.intermediates, inputs.edits)
    decoder_inputs = replace(
        inputs,
        source=None,
        cache=cache,
        dropout_key=decoder_key,
        encoded=Source(source["hidden"], visible, source["heads"], key_positions),
        intermediates=names,
        edits=edits,
    )
    output = transformer.encode(config.decoder, params["decoder"], decoder_inputs)
    return replace(
        output,
        source=source["hidden"],
        intermediates=_named(encoder.intermediates, output.intermediates),
        stats=_named(encoder.stats, output.stats),
        updates=_updates(encoder.updates, output.updates),
        loss=_mean(
            (encoder.loss, config.encoder.num_layers), (output.loss, config.decoder.num_layers)
        ),
    )


def check_source(inputs: Inputs) -> None:
    """Raises ConfigError without a source, and for a source with another number of batch rows."""
    tokens = inputs.tokens
    source = inputs.source
    if source is not None and source.shape[0] != tokens.shape[0]:
        raise ConfigError(
            f"apply: source {list(source.shape)} and tokens {list(tokens.shape)}: "
            "as many rows of both"
        )
    if source is None and (inputs.cache is None or inputs.cache.source is None):
        raise ConfigError(
            "an encoder-decoder needs `source`, tokens or images, or a cache that began with it"
        )


def source_in_cache(
    config: EncoderDecoder, params: Tree, source: Tree, key_positions: Array | None
) -> Tree:
    """The source as a cache keeps it: with its keys and values of all decoder layers."""
    hidden = source["hidden"]
    layers = layout.unstacked(config.decoder, params["decoder"]["layers"])
    heads = [source_heads(layer["cross_attention"], hidden, key_positions) for layer in layers]
    segment_ids = source["segment_ids"]
    if segment_ids is None:
        segment_ids = jnp.ones(hidden.shape[:2], jnp.int32)
    return {"hidden": hidden, "heads": tuple(heads), "segment_ids": segment_ids}


def _named(encoder: Tree, decoder: Tree) -> Tree:
    """The reports of both stacks, under names that begin with encoder/ or decoder/."""
    of_encoder = {f"encoder/{name}": value for name, value in (encoder or {}).items()}
    of_decoder = {f"decoder/{name}": value for name, value in (decoder or {}).items()}
    return of_encoder | of_decoder or None


def _updates(encoder: Tree, decoder: Tree) -> Tree:
    """The updates of both stacks, as a part of the tree of both."""
    both = {"encoder": encoder, "decoder": decoder}
    return {name: tree for name, tree in both.items() if tree is not None} or None


def _mean(*losses: tuple[Array | None, int]) -> Array | None:
    """The mean auxiliary loss over the layers of the stacks that have one; None if none has."""
    with_loss = [(loss, layers) for loss, layers in losses if loss is not None]
    if not with_loss:
        return None
    total = reduce(jnp.add, [loss * layers for loss, layers in with_loss])
    return total / sum(layers for _, layers in with_loss)


def encode_source(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """The output of the encoder for `inputs.source`."""
    return transformer.encode(config.encoder, *source_inputs(config, params, inputs))


def positions_of_source(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Array | None:
    """The encoder's `AttentionPositions` `[B or 1, S, D]`, or None.

    The decoder's layers add them to the inputs of their keys.
    """
    if attention_table(config.encoder) is None:
        return None
    tree, inputs = source_inputs(config, params, inputs)
    context, _, _ = locate(config.encoder, tree, inputs)
    return attention_positions(config.encoder, context)


def source_inputs(config: EncoderDecoder, params: Tree, inputs: Inputs) -> tuple[Tree, Inputs]:
    """(the encoder's parameters, its inputs: `inputs.source` and the options that belong to it)."""
    tree = params["encoder"]
    if config.share_embeddings:
        table = {"tokens": params["decoder"]["embedding"]["tokens"]}
        tree = {**tree, "embedding": tree.get("embedding", {}) | table}
    names, edits = of_stack("encoder", inputs.intermediates, inputs.edits)
    return tree, replace(
        inputs,
        tokens=inputs.source,
        positions=inputs.source_positions,
        segment_ids=inputs.source_segment_ids,
        token_types=None,
        cache=None,
        constants=None,
        inputs=None,
        source=None,
        lengths=None,
        intermediates=names,
        edits=edits,
    )


def _visible(tokens, segment_ids, source_segment_ids) -> masks.Mask:
    """The mask of source tokens that each target token sees."""
    if source_segment_ids is None:
        return masks.full()
    if segment_ids is None:  # in decoding, several rows may share a source
        sources = source_segment_ids.shape[0]
        query_ids = jnp.ones((sources, tokens.size // sources), jnp.int32)
        return masks.segments(query_ids, (source_segment_ids != 0).astype(jnp.int32))
    return masks.segments(segment_ids, source_segment_ids)
