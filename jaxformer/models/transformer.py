"""Embed, run the layers, read the heads. `functools.partial(models.apply, config)` is an ordinary f(params, tokens)."""

from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Int

from jaxformer import masks, ops, params
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask
from jaxformer.masks.rules import lookup
from jaxformer.models import embedding, heads
from jaxformer.models.config import Embedding, ModelConfig
from jaxformer.models.intermediates import tap
from jaxformer.models.layer import Block, Context, Layers, Source
from jaxformer.models.mup import MuP
from jaxformer.models.stacks import layout, scan
from jaxformer.ops.positions import rotation_until, within_segments
from jaxformer.params import Tree
from jaxformer.sharding import activation_specs, auto_axes


@struct.dataclass
class Inputs:
    """What a model reads besides its parameters. Several sequences may share a row: each has the logits that it has alone."""

    tokens: Any  # [B, T], or images [B, height, width, C]
    positions: Any = None  # [B or 1, T], for embeddings, rotations and biases; masks count the tokens of a segment
    # [B, T]; 0: padding. A token attends only within its own segment, and positions start anew there. Padding stands before and
    # behind a segment: inside one, windows and biases of distance would count it, positions would not
    segment_ids: Any = None
    token_types: Any = None  # [B, T]
    cache: Any = None  # of `jaxformer.decoding`: what came before; `Output.cache` has the tokens in it
    dropout_key: Any = None  # None: nothing is dropped
    constants: Tree = None  # [L, ...], instead of what the mixers draw
    # {"global_tokens": flags [B, T]} of Longformer, {"masked": flags [B, patches]} of Patches, or what your mixer reads
    inputs: Tree = None
    lengths: Any = None  # with a cache: how many of these tokens are text [B]; the rest of a row is padding
    source: Any = None  # of an encoder-decoder: tokens [B, S] or images; with a cache only at the first tokens
    source_segment_ids: Any = None  # [B, S]; without `segment_ids`, tokens see all of the source that is not padding
    source_positions: Any = None  # [B or 1, S], instead of those that restart with each segment
    encoded: Source | None = None  # of a decoder: the output of the encoder
    dtype: Any = struct.field(pytree_node=False, default=None)  # of activations; None: that of the parameters
    # names in `Output.intermediates`, such as "layers/*/attention/weights", or {name: function of the value to keep}
    intermediates: Any = struct.field(pytree_node=False, default=())
    edits: Any = struct.field(
        pytree_node=False, default=None
    )  # {name: (value, layer) -> value}, put in place of what was there

    @property
    def padding_mask(self) -> jax.Array | None:
        """`[B, T]`, False for padding; None where there is none."""
        if self.lengths is not None:
            return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]
        return None if self.segment_ids is None else self.segment_ids != 0


@struct.dataclass
class Output:
    """What `apply` returns. Under jit, what you do not use is not computed."""

    logits: Any  # of the first head: [B, T, V] of a language model, float32 or better; None without heads
    hidden: Any  # [B, T, D], after the final norm
    cache: Any = None
    intermediates: Any = None  # {name: value} of `Inputs.intermediates`; [L, ...] for a name with *
    heads: Any = None  # output of every head, by name
    loss: Any = None  # auxiliary loss of the feed-forwards (routing), the mean over the layers that have one
    stats: Any = None  # what feed-forwards report, [L, ...], of the layers that report it
    updates: Any = None  # new values of parameters that are declared `Spec(trained=False)`: a part of their tree
    source: Any = None  # of an encoder-decoder: hidden states of the encoder [B, S, D]


def spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Every parameter of the model, declared once; `source_width`: of a decoder, the width of its encoder."""
    trees = {
        "embedding": embedding.spec(config), "layers": layout.spec(config, source_width), "heads": heads.spec(config),
        "shared": layout.shared_spec(config, source_width),
    }  # fmt: skip
    table = getattr(trees["embedding"].get("tokens"), "shape", None)
    expected = config.vocab_size, config.hidden_width
    if config.tie_embeddings and table != expected and heads.language_model(config):
        raise ConfigError(
            f"model.tie_embeddings=True: the head reads by a table `tokens` {expected} of the embedding, which has {table}; "
            "set it to False, or give the embedding such a table"
        )
    own = layout.kinds(config, source_width)[0].block.stack_spec or {}
    if both := sorted(own.keys() & trees.keys()):
        raise ConfigError(f"model.block: its parameter {both[0]!r} has the name of a part of the model; give it another name")
    tree = {name: leaves for name, leaves in (trees | own).items() if leaves}
    return config.init_std.spec(tree, config.d_model) if isinstance(config.init_std, MuP) else tree


def check_params(declared: Tree, tree: Tree) -> None:
    """ConfigError for the first parameter that is missing, unknown or misshapen; more heads and prepared layers are allowed."""
    if isinstance(tree.get("layers"), tuple):
        declared, tree = ({name: leaves for name, leaves in each.items() if name != "layers"} for each in (declared, tree))
    if found := params.mismatch(declared, tree, r"(^|/)heads(/|$)"):
        raise ConfigError(f"apply: parameter {found}; models.init makes those of the config")


def check_inputs(config: ModelConfig, inputs: Inputs) -> None:
    """ConfigError for tokens that are not integers `[B, T]`, and for other inputs that do not fit them."""
    tokens = inputs.tokens
    reads_tokens = isinstance(config.embedding, Embedding)
    if reads_tokens and (tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer)):
        raise ConfigError(f"apply: tokens {tokens.dtype}{list(tokens.shape)}: expected integers [B, T]")
    if inputs.source is not None:
        raise ConfigError("apply: only an encoder-decoder has a `source`")
    B, T = tokens.shape[0], embedding.length(config, tokens)
    for name, shapes in (("positions", [[B, T], [1, T]]), ("segment_ids", [[B, T]]), ("token_types", [[B, T]])):
        array = getattr(inputs, name)
        if array is not None and (list(array.shape) not in shapes or not jnp.issubdtype(array.dtype, jnp.integer)):
            expected = " or ".join(map(str, shapes))
            raise ConfigError(f"apply: {name} {array.dtype}{list(array.shape)}: expected integers {expected}")
    if inputs.cache is None and inputs.lengths is not None:
        raise ConfigError("apply: `lengths` go with a cache; without one, segment_ids=0 marks padding")
    if inputs.cache is not None and inputs.segment_ids is not None:
        raise ConfigError("apply: a cache keeps one text a row; give `lengths` [B] instead of segment_ids")
    counted = inputs.positions is None and inputs.segment_ids is None and inputs.lengths is None
    if counted and config.position_limit < T:
        raise ConfigError(f"{T} tokens do not fit the {config.position_limit} learned positions (model.context_length)")


def output_axes(path: str, leaf) -> tuple[str | None, ...]:
    """The logical axes of a leaf of `Output`."""
    match path.split("/")[0]:
        case "logits" | "heads":
            return ("batch", "length", "vocab") if leaf.ndim == 3 else ("batch",)
        case "hidden" | "source":
            return "batch", "length"
        case "cache" if leaf.ndim > 2:
            return None, "batch"
        case "intermediates" if leaf.ndim > 2:
            return (None, "batch") if "*" in path else ("batch",)
    return ()


in_explicit_axes = auto_axes(activation_specs(output_axes))  # of f(...) -> Output: it also runs under Explicit mesh axes


def read(config: ModelConfig, params: Tree, output: Output, padding_mask=None, inputs: Tree = None) -> Output:
    """The output of `encode`, with the outputs of the config's heads, which read its hidden states and `Inputs.inputs`."""
    trees, found = params.get("heads", {}), {}
    check_params({"heads": heads.spec(config)}, {"heads": trees})
    for name, head in heads.heads(config, params["embedding"].get("tokens")).items():
        with jax.named_scope("head"):
            found[name] = heads.run(head, trees.get(name, {}), output.hidden, padding_mask, inputs)
    return replace(output, logits=next(iter(found.values()), None), heads=found)


def encode(config: ModelConfig, params: Tree, inputs: Inputs) -> Output:
    """The embedding and the stack. Raises ConfigError for parameters and inputs that do not fit the config."""
    check_inputs(config, inputs)
    source_width = None if inputs.encoded is None else inputs.encoded.hidden.shape[-1]
    declared = spec(config, source_width)
    check_params({name: leaves for name, leaves in declared.items() if name != "heads"}, params)
    context, layer_masks, cache = locate(config, params, inputs)
    embedding_key, layers_key = (None, None) if inputs.dropout_key is None else jax.random.split(inputs.dropout_key)
    masked = inputs.inputs.get("masked") if isinstance(inputs.inputs, dict) else None
    with jax.named_scope("embedding"):
        table, types = params["embedding"], inputs.token_types
        x = embedding.embed(config, table, inputs.tokens, context.positions, types, inputs.dtype, masked, inputs.inputs)
        x = context.tap("embedding", ops.dropout(x, config.dropout_rate, embedding_key))
    layers = Layers(params["layers"], layer_masks, None if inputs.cache is None else inputs.cache.layers, inputs.constants)
    block = layout.kinds(config, source_width)[0].block
    x = block.begin(of_block(block, params), x, context)
    x, found = (config.stack or scan.stack)(config, layers, x, replace(context, dropout_key=layers_key))
    with jax.named_scope("final_norm"):
        x = block.end(of_block(block, params), x, context)
    if cache is not None:
        x = jnp.where(does_not_fit(config, cache)[:, None, None], jnp.nan, x)
        cache = replace(cache, layers=found.state)
    return Output(
        None, x, cache, context.tap.results(found.intermediates, config.num_layers) or None,
        loss=None if found.loss is None else jnp.mean(found.loss), stats=found.stats,
        updates=None if found.updates is None else {"layers": found.updates},
    )  # fmt: skip


def of_block(block: Block, params: Tree) -> Tree:
    """The parameters of `Block.stack_spec`, with {} for a norm that has none."""
    return {name: params.get(name, {}) for name in block.stack_spec or {}}


def does_not_fit(config: ModelConfig, cache: Any) -> Bool[jax.Array, " B"]:
    """Whether a batch row has more tokens than its cache holds, or more than its rotations are for."""
    is_too_long = cache.lengths > cache.capacity
    if cache.text_lengths is None:
        return is_too_long
    return is_too_long | (cache.lengths > rotation_until(config.positions, cache.text_lengths))


def locate(config: ModelConfig, params: Tree, inputs: Inputs) -> tuple[Context, tuple[Mask, ...], Any]:
    """Where the tokens stand: (what all layers read, the masks of the layers, the cache with these tokens in it)."""
    cache, segment_ids, positions, slot_positions = inputs.cache, inputs.segment_ids, inputs.positions, None
    T, explicit_positions, cached_lengths = embedding.length(config, inputs.tokens), positions is not None, None
    # what a mask draws depends on the config alone, not on a batch's padding or a cache's empty slots
    layer_masks = tuple(mask.sized(config.context_length) for mask in config.masks)
    if segment_ids is not None:
        slot_positions, visible = within_segments(segment_ids), same_segment(config, segment_ids)
        layer_masks = tuple(at_positions(m, slot_positions) & visible for m in layer_masks)
    if cache is not None:
        cached_lengths, cache = cache.lengths, cache.extend(*inputs.tokens.shape[:2], inputs.lengths)
        if cached_lengths is None and inputs.lengths is not None:  # padding comes last: under a causal mask no token sees it
            hide = masks.lengths(kv=inputs.lengths)
            layer_masks = tuple(mask if masks.is_causal(mask) else mask & hide for mask in layer_masks)
    if explicit_positions:
        slot_positions = positions if cache is None else None
    elif slot_positions is not None:
        positions = slot_positions
    else:
        positions = jnp.arange(T)[None] if cached_lengths is None else cached_lengths[:, None] + jnp.arange(T)[None]
        if inputs.lengths is not None:  # padding has the position of the last token: some rotations read the largest one
            positions = jnp.maximum(jnp.minimum(positions, cache.lengths[:, None] - 1), 0)
    if cache is not None and cache.text_lengths is None and rotation_until(config.positions, 1) is not None:
        text_lengths = positions.max(axis=1) + 1  # the first call reads the whole text
        cache = replace(cache, text_lengths=jnp.broadcast_to(text_lengths, cache.lengths.shape))
    context = Context(
        masks.full(), positions, slot_positions, explicit_positions=explicit_positions,
        lengths=cached_lengths, cache_length=0 if cache is None else cache.capacity,
        text_lengths=None if cache is None else cache.text_lengths,
        shared=params.get("shared"), inputs=inputs.inputs, padding_mask=inputs.padding_mask, source=inputs.encoded,
        tap=tap(inputs.intermediates, inputs.edits),
    )  # fmt: skip
    return context, layer_masks, cache


def same_segment(config: ModelConfig, segment_ids: Int[jax.Array, "B T"]) -> Mask:
    """Tokens see their own segment, and nobody sees padding.

    If a head pools `position_0`, padding sees the last segment of its row, as in BERT's code, which masks keys only.
    """
    if all(getattr(head, "pool", None) != "position_0" for head in config.heads):
        return masks.segments(segment_ids)
    query_ids = jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)
    return replace(masks.segments(query_ids, segment_ids), offset=None)  # both are of one sequence


def at_positions(mask: Mask, positions: Int[jax.Array, "B S"]) -> Mask:
    """The mask at positions of segments. Rules of distance stay: indices are as far apart, because segments hold no padding."""

    def stays(conjunct):
        return conjunct in (masks.causal(), masks.full()) or masks.shift_invariant(conjunct)

    def located(conjunct):
        return Mask(_at_positions, arrays=(positions,), parts=(conjunct,))

    return reduce(Mask.__and__, (conjunct if stays(conjunct) else located(conjunct) for conjunct in mask.conjuncts()))


def _at_positions(mask, q, kv):
    (positions,), (inner,) = mask.arrays, mask.parts
    return inner._evaluate(lookup(positions, q), lookup(positions, kv))
