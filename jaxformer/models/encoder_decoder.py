"""Two stacks of the same block: the layers of the decoder also attend to the output of the encoder. Vaswani et al. 2017."""

from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import masks
from jaxformer.errors import ConfigError
from jaxformer.models import transformer
from jaxformer.models.config import EncoderDecoder
from jaxformer.models.intermediates import of_stack
from jaxformer.models.layer import Source
from jaxformer.models.mixers.attention import source_heads
from jaxformer.models.position_table import attention_positions, attention_table
from jaxformer.models.stacks import layout
from jaxformer.models.transformer import Inputs, Output
from jaxformer.params import Tree


def spec(config: EncoderDecoder) -> Tree:
    """Every parameter of both stacks, `{"encoder": ..., "decoder": ...}`; a shared token table is the decoder's."""
    encoder = transformer.spec(config.encoder)
    if config.share_embeddings:
        encoder["embedding"].pop("tokens", None)
    if not encoder["embedding"]:
        del encoder["embedding"]
    return {"encoder": encoder, "decoder": transformer.spec(config.decoder, config.encoder.d_model)}


def encode(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """Both stacks. Target tokens see the source tokens of their own segment; the heads are those of the decoder."""
    transformer.check_params(spec(config), params)
    tokens, source, cache, ids = inputs.tokens, inputs.source, inputs.cache, inputs.source_segment_ids
    if source is not None and source.shape[0] != tokens.shape[0]:
        raise ConfigError(f"apply: source {list(source.shape)} and tokens {list(tokens.shape)}: as many rows of both")
    encoder_key, decoder_key = (None, None) if inputs.dropout_key is None else jax.random.split(inputs.dropout_key)
    encoder, read = Output(None, None), None if cache is None else cache.source
    key_positions = None  # a cache has the keys themselves
    if source is not None:
        encoder = encode_source(config, params, replace(inputs, dropout_key=encoder_key))
        key_positions = positions_of_source(config, params, inputs)
        read: Tree = {"hidden": encoder.hidden, "heads": None, "segment_ids": ids}
        if cache is not None:
            layers = layout.unstacked(config.decoder, params["decoder"]["layers"])
            read["heads"] = tuple(source_heads(layer["cross_attention"], encoder.hidden, key_positions) for layer in layers)
            read["segment_ids"] = jnp.ones(encoder.hidden.shape[:2], jnp.int32) if ids is None else ids
            cache = replace(cache, source=read)
    if read is None:
        raise ConfigError("an encoder-decoder needs `source`, tokens or images, or a cache that began with it")
    encoded = Source(read["hidden"], _visible(tokens, inputs.segment_ids, read["segment_ids"]), read["heads"], key_positions)
    names, edits = of_stack("decoder", inputs.intermediates, inputs.edits)
    decoder = replace(
        inputs, source=None, cache=cache, dropout_key=decoder_key, encoded=encoded, intermediates=names, edits=edits
    )  # fmt: skip
    output = transformer.encode(config.decoder, params["decoder"], decoder)
    return replace(
        output, source=read["hidden"], intermediates=_named(encoder.intermediates, output.intermediates),
        stats=_named(encoder.stats, output.stats), updates=_updates(encoder.updates, output.updates),
        loss=_mean((encoder.loss, config.encoder.num_layers), (output.loss, config.decoder.num_layers)),
    )  # fmt: skip


def _named(encoder: Tree, decoder: Tree) -> Tree:
    """What both stacks report, by names that begin with the stack's."""
    both = {"encoder": encoder or {}, "decoder": decoder or {}}
    return {f"{stack}/{name}": value for stack, values in both.items() for name, value in values.items()} or None


def _updates(encoder: Tree, decoder: Tree) -> Tree:
    """The updates of both stacks, as a part of the tree of both."""
    return {name: tree for name, tree in (("encoder", encoder), ("decoder", decoder)) if tree is not None} or None


def _mean(*losses: tuple[Array | None, int]) -> Array | None:
    """The mean over the layers of those stacks that have an auxiliary loss."""
    some = [(loss, layers) for loss, layers in losses if loss is not None]
    return reduce(jnp.add, (loss * layers for loss, layers in some)) / sum(n for _, n in some) if some else None


def encode_source(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Output:
    """The output of the encoder for `inputs.source`."""
    return transformer.encode(config.encoder, *source_inputs(config, params, inputs))


def positions_of_source(config: EncoderDecoder, params: Tree, inputs: Inputs) -> Array | None:
    """What the decoder's layers add to the inputs of their keys, `[B or 1, S, D]`: the encoder's `AttentionPositions`."""
    if attention_table(config.encoder) is None:
        return None
    tree, inputs = source_inputs(config, params, inputs)
    context, _, _ = transformer.locate(config.encoder, tree, inputs)
    return attention_positions(config.encoder, context)


def source_inputs(config: EncoderDecoder, params: Tree, inputs: Inputs) -> tuple[Tree, Inputs]:
    """(the parameters of the encoder, what it reads: `inputs.source` and all that goes with it)."""
    tree = params["encoder"]
    if config.share_embeddings:
        table = {"tokens": params["decoder"]["embedding"]["tokens"]}
        tree = {**tree, "embedding": tree.get("embedding", {}) | table}
    names, edits = of_stack("encoder", inputs.intermediates, inputs.edits)
    return tree, replace(
        inputs, tokens=inputs.source, positions=inputs.source_positions, segment_ids=inputs.source_segment_ids,
        token_types=None, cache=None, constants=None, inputs=None, source=None, lengths=None, intermediates=names, edits=edits,
    )  # fmt: skip


def _visible(tokens, segment_ids, source_segment_ids) -> masks.Mask:
    """Which source tokens each target token sees."""
    if source_segment_ids is None:
        return masks.full()
    if segment_ids is None:  # in decoding, rows may share a source
        sources = source_segment_ids.shape[0]
        return masks.segments(
            jnp.ones((sources, tokens.size // sources), jnp.int32), (source_segment_ids != 0).astype(jnp.int32)
        )
    return masks.segments(segment_ids, source_segment_ids)
