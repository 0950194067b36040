"""Where the tokens are: their positions, the masks of the layers, and the cache.

`locate` is called once for a stack, before its layers run.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num

from jaxformer import masks
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask
from jaxformer.masks.rules import lookup
from jaxformer.models import embedding
from jaxformer.models.config import ModelConfig
from jaxformer.models.inputs import Inputs
from jaxformer.models.intermediates import tap
from jaxformer.models.layer import Context
from jaxformer.ops.positions import rotation_until, within_segments
from jaxformer.params import Tree


def locate(
    config: ModelConfig, params: Tree, inputs: Inputs
) -> tuple[Context, tuple[Mask, ...], Any]:
    """(the context of all layers, the masks of the layers, the cache extended by the tokens)."""
    segment_positions = None if inputs.segment_ids is None else within_segments(inputs.segment_ids)
    cache = None
    if inputs.cache is not None:
        cache = inputs.cache.extend(*inputs.tokens.shape[:2], inputs.lengths)
    positions = token_positions(config, inputs, segment_positions, cache)
    cache = with_text_lengths(config, cache, positions)
    context = Context(
        masks.full(),
        positions,
        key_positions(inputs, segment_positions),
        explicit_positions=inputs.positions is not None,
        lengths=None if inputs.cache is None else inputs.cache.lengths,
        cache_length=0 if cache is None else cache.capacity,
        text_lengths=None if cache is None else cache.text_lengths,
        shared=params.get("shared"),
        inputs=inputs.inputs,
        padding_mask=inputs.padding_mask,
        token_types=inputs.token_types,
        dtype=inputs.dtype,
        source=inputs.encoded,
        tap=tap(inputs.intermediates, inputs.edits),
    )
    return context, layer_masks(config, inputs, segment_positions), cache


def token_positions(
    config: ModelConfig, inputs: Inputs, segment_positions: Any, cache: Any
) -> Num[jax.Array, "_ T *place"]:
    """`[B or 1, T]`: the caller's, those within segments, or a count behind the cached tokens.

    An embedding of the user's own may make other positions, also several numbers for each token.
    """
    if inputs.positions is not None:
        return inputs.positions
    own = embedding.embedder_of(config).positions
    if own is not None:
        if cache is not None:
            raise ConfigError("apply: positions that model.embedding makes do not go with a cache")
        return own(inputs.tokens, inputs.segment_ids)
    if segment_positions is not None:
        return segment_positions
    positions = jnp.arange(embedding.length(config, inputs.tokens))[None]
    if cache is not None and inputs.cache.lengths is not None:
        positions = inputs.cache.lengths[:, None] + positions
    if inputs.lengths is None:
        return positions
    # some rotations read the largest position, so padding gets that of the last token
    return jnp.maximum(jnp.minimum(positions, cache.lengths[:, None] - 1), 0)


def key_positions(inputs: Inputs, segment_positions: Any) -> Any:
    """The positions of all keys, `[B or 1, S]`; None: the position of a key is its index."""
    if inputs.positions is None:
        return segment_positions
    return inputs.positions if inputs.cache is None else None


def with_text_lengths(
    config: ModelConfig, cache: Any, positions: Num[jax.Array, "_ T *place"]
) -> Any:
    """The cache with the lengths of its texts, if rotations depend on them."""
    if cache is None or cache.text_lengths is not None:
        return cache
    if rotation_until(config.positions, 1) is None:
        return cache
    text_lengths = positions.max(axis=1) + 1  # the first call reads the whole text
    return replace(cache, text_lengths=jnp.broadcast_to(text_lengths, cache.lengths.shape))


def layer_masks(config: ModelConfig, inputs: Inputs, segment_positions: Any) -> tuple[Mask, ...]:
    """The masks of the layers, which also hide other segments and padding."""
    # random masks depend on the config alone, not on a batch's padding or a cache's empty slots
    sized = tuple(mask.sized(config.context_length) for mask in config.masks)
    if segment_positions is not None:
        visible = same_segment(config, inputs.segment_ids)
        return tuple(at_positions(mask, segment_positions) & visible for mask in sized)
    is_new = inputs.cache is not None and inputs.cache.lengths is None
    if not is_new or inputs.lengths is None:
        return sized
    # padding comes last, so a causal mask hides it already
    text_only = masks.lengths(kv=inputs.lengths)
    return tuple(mask if masks.is_causal(mask) else mask & text_only for mask in sized)


def same_segment(config: ModelConfig, segment_ids: Int[jax.Array, "B T"]) -> Mask:
    """Tokens attend within their own segment, and no token attends to padding.

    If a head may read padding, padding attends to the last segment of its row. BERT's code does so
    too, because it masks keys only.
    """
    if not any(map(reads_padding, config.heads)):
        return masks.segments(segment_ids)
    query_ids = jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)
    # queries and keys are of one sequence
    return replace(masks.segments(query_ids, segment_ids), offset=None)


def reads_padding(head: Any) -> bool:
    """Whether a head reads a position even if it is padding: it pools `position_0`, or says so."""
    return getattr(head, "reads_padding", getattr(head, "pool", None) == "position_0")


def at_positions(mask: Mask, positions: Int[jax.Array, "B S"]) -> Mask:
    """The mask, evaluated at the positions within segments instead of at indices.

    A rule of distance needs no change: a segment holds no padding, so its tokens are as far apart
    in positions as in indices.
    """

    def stays(conjunct):
        return conjunct in (masks.causal(), masks.full()) or masks.shift_invariant(conjunct)

    def located(conjunct):
        return Mask(_at_positions, arrays=(positions,), parts=(conjunct,))

    return reduce(
        Mask.__and__,
        (conjunct if stays(conjunct) else located(conjunct) for conjunct in mask.conjuncts()),
    )


def _at_positions(mask, q, kv):
    (positions,) = mask.arrays
    (inner,) = mask.parts
    return inner._evaluate(lookup(positions, q), lookup(positions, kv))
