"""Embed, layers under one scan, unembed. `functools.partial(apply, config)` is an ordinary f(params, tokens)."""

import itertools
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.traverse_util import unflatten_dict
from jax import Array
from jaxtyping import Float, Int

from jaxformer import masks, ops, params
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask
from jaxformer.masks.rules import lookup
from jaxformer.models import block as blocks
from jaxformer.models import embedding, heads
from jaxformer.models.config import Axial, Learned, ModelConfig, Patches
from jaxformer.models.layer import Context, Mixer, Source
from jaxformer.models.stacks import scan
from jaxformer.ops.positions import within_segments
from jaxformer.params import paths
from jaxformer.sharding import activation_specs, in_auto_axes

Tree = Any


@struct.dataclass
class Output:
    """What `apply` returns. Under jit, what you do not use is not computed."""

    logits: Any  # of the first head: [B, T, V] of a language model, float32 or better; None without heads
    hidden: Any  # [B, T, D], after the final norm
    cache: Any = None
    attention: Any = None  # [L, B, N, T, S]
    heads: Any = None  # every head's output by name
    loss: Any = None  # mean over the layers of what their feed-forwards ask for, weighted (routing losses)
    stats: Any = None  # what feed-forwards report of themselves, [L, ...]
    source: Any = None  # of an encoder-decoder: the encoder's hidden states [B, S, D]


def spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """Every parameter of the model, declared once; of a decoder, too, of an encoder `source_width` wide."""
    slots = scan.mixers(config)
    tree = {
        "embedding": embedding.spec(config),
        "layers": _layers_spec(config, slots, source_width),
        "heads": heads.spec(config),
    }
    if not tree["heads"]:
        del tree["heads"]
    if shared := {name: leaf for slot in slots for name, leaf in (slot.shared or {}).items()}:
        tree["shared"] = shared
    if config.norm_placement != "post":
        tree["final_norm"] = embedding.norm_spec(config, config.hidden_width)
    return tree


def check_params(declared: Tree, tree: Tree) -> None:
    """ConfigError that names the first parameter that is missing, unknown or of another shape; other heads may be there."""
    if found := params.mismatch(declared, tree, r"(^|/)heads(/|$)"):
        raise ConfigError(f"apply: parameter {found}; models.init makes those of the config")


def declared_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """`spec`, made once for each config that can be hashed."""
    try:
        return _declared_spec(config, source_width)
    except TypeError:
        return spec(config, source_width)


_declared_spec = lru_cache(maxsize=256)(lambda config, source_width: spec(config, source_width))


def check_inputs(config: ModelConfig, tokens, **inputs) -> None:
    """ConfigError for tokens that are no `[B, T]` integers, and for positions, segment ids or token types that do not fit."""
    images = isinstance(config.embedding, Patches)
    if not images and (tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer)):
        raise ConfigError(f"apply: tokens {tokens.dtype}{list(tokens.shape)}: expected integers [B, T]")
    B, T = tokens.shape[0], embedding.length(config, tokens)
    for name, array in inputs.items():
        if array is None:
            continue
        shapes = [(B, T), (1, T)] if name == "positions" else [(B, T)]
        if array.shape not in shapes or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ConfigError(
                f"apply: {name} {array.dtype}{list(array.shape)}: expected integers "
                f"{' or '.join(str(list(shape)) for shape in shapes)}"
            )


def _layers_spec(config: ModelConfig, slots: tuple[Mixer, ...], source_width: int | None) -> Tree:
    """Every leaf `[layers that have it, ...]`: `[L, ...]` unless mixers of different kinds take turns."""
    trees = [paths(blocks.spec(config, slot, source_width)) for slot in slots]
    leaves: dict[str, Any] = {}
    for path, leaf in itertools.chain.from_iterable(tree.items() for tree in trees):
        if leaves.setdefault(path, leaf).shape != leaf.shape:
            raise ConfigError(
                f"model.mixer: {path} has shape {leaf.shape} in one layer, {leaves[path].shape} in another"
            )
    count = {path: sum(path in trees[i % len(trees)] for i in range(config.num_layers)) for path in leaves}
    return unflatten_dict({path: params.stack(leaf, count[path]) for path, leaf in leaves.items()}, sep="/")


def init(config: ModelConfig, key: Array, dtype=jnp.float32) -> Tree:
    """Initial parameters."""
    return params.init(spec(config), key, dtype)


def apply(
    config: ModelConfig,
    params: Tree,
    tokens: Int[Array, "B T"] | Float[Array, "B height width C"],
    *,
    positions: Int[Array, "#B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    token_types: Int[Array, "B T"] | None = None,
    cache: Any = None,
    dropout_key: Array | None = None,
    dtype=None,
    return_attention: bool = False,
    constants: Tree = None,
    inputs: Tree = None,
) -> Output:
    """Logits and final hidden states of tokens, or of images; activations in `dtype`, the parameters' by default.

    `segment_ids` (0 = padding) separate packed or padded sequences; positions restart with each unless given, and masks
    and score biases count each sequence's own tokens: a row's logits are those of its sequence alone. `positions` move
    embeddings, rotations and biases, not masks. Within a segment, padding is not counted; without a cache, masks and
    biases of distance count its slots. `cache`
    (of `jaxformer.decoding`) holds what came before: the tokens continue it, and the output has the cache that includes
    them. Dropout acts only where `dropout_key` is given. `return_attention` adds every attention map, `[L, B, N, T,
    S]`. `constants` (leaves `[L, ...]`) replace what the mixer draws by itself, `inputs` are what it reads of a batch
    (Longformer: `{"global_tokens": flags [B, T]}`) or the embedding (`Patches`: `{"masked": flags [B, patches]}`). Raises
    ConfigError for parameters and inputs that do not fit the config.
    """

    def whole(params, tokens, given):
        output = encode(config, params, tokens, dtype=dtype, return_attention=return_attention, **given)
        real = None if given["segment_ids"] is None else given["segment_ids"] != 0
        return read(config, params, output, real)

    given: dict[str, Any] = dict(
        positions=positions, segment_ids=segment_ids, token_types=token_types, cache=cache, dropout_key=dropout_key,
        constants=constants, inputs=inputs,
    )  # fmt: skip
    return in_auto_axes(whole, activation_specs(output_axes))(params, tokens, given)


def output_axes(path: str, leaf) -> tuple[str | None, ...]:
    """The logical axes of a leaf of `Output`, for `parallel.automatic`."""
    match path.split("/")[0]:
        case "logits" | "heads":
            return ("batch", "length", "vocab") if leaf.ndim == 3 else ("batch",)
        case "hidden" | "source":
            return "batch", "length"
        case "cache" | "attention" if leaf.ndim > 2:
            return None, "batch"
    return ()


def read(config: ModelConfig, params: Tree, output: Output, real=None) -> Output:
    """The output of `encode`, with what the config's heads make of its hidden states."""
    check_params({"heads": declared_spec(config).get("heads", {})}, {"heads": params.get("heads", {})})
    found = {}
    for head in config.heads:
        name = heads.name(config, head)
        own = params.get("heads", {}).get(name, {})
        found[name] = heads.apply(config, head, own, output.hidden, real, params["embedding"].get("tokens"))
    return replace(output, logits=next(iter(found.values()), None), heads=found)


def encode(
    config: ModelConfig,
    params: Tree,
    tokens,
    *,
    positions=None,
    segment_ids=None,
    token_types=None,
    cache=None,
    dropout_key=None,
    dtype=None,
    return_attention=False,
    constants=None,
    inputs=None,
    source: Source | None = None,
) -> Output:
    """`apply` without the heads. `source` is what a decoder's layers attend to."""
    given = dict(
        positions=positions, segment_ids=segment_ids, token_types=token_types, cache=cache, dropout_key=dropout_key,
        constants=constants, inputs=inputs, source=source,
    )  # fmt: skip
    body = lambda params, tokens, given: _encode(config, params, tokens, dtype, return_attention, **given)
    return in_auto_axes(body, activation_specs(output_axes))(params, tokens, given)


def _encode(
    config: ModelConfig, params: Tree, tokens, dtype, return_attention, *,
    positions, segment_ids, token_types, cache, dropout_key, constants, inputs, source,
) -> Output:  # fmt: skip
    check_inputs(config, tokens, positions=positions, segment_ids=segment_ids, token_types=token_types)
    declared = declared_spec(config, None if source is None else source.hidden.shape[-1])
    check_params({name: part for name, part in declared.items() if name != "heads"}, params)
    T = embedding.length(config, tokens)
    if (
        isinstance(config.positions, Learned | Axial)
        and positions is None
        and segment_ids is None
        and config.context_length < T
    ):
        raise ConfigError(f"{T} tokens do not fit the {config.context_length} learned positions (model.context_length)")
    start = 0
    real = None if segment_ids is None else segment_ids != 0
    if cache is not None:
        start = cache.length
        cache = cache.extend(jnp.ones_like(tokens) if segment_ids is None else segment_ids)
        segment_ids = cache.segment_ids
    explicit = positions is not None
    places = None  # positions of all slots
    gaps = explicit or cache is not None
    # what a mask draws depends on the config alone, not on a batch's padding or a cache's empty slots
    layer_masks = tuple(m.sized(config.context_length) for m in config.masks)
    if segment_ids is not None:
        places, visible = within_segments(segment_ids), same_segment(config, segment_ids)
        layer_masks = tuple(at_positions(m, places, cache is not None) & visible for m in layer_masks)
    if explicit:
        places = positions if cache is None else None
    elif places is None:
        positions = jnp.arange(T)[None]
    else:
        positions = places if cache is None else jax.lax.dynamic_slice_in_dim(places, start, T, axis=1)
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    masked = inputs.get("masked") if isinstance(inputs, dict) else None
    x = embedding.embed(config, params["embedding"], tokens, positions, token_types, dtype, masked)
    x = ops.dropout(x, config.dropout_rate, keys[0])
    if cache is not None:
        layer_masks = tuple(m.at(start) for m in layer_masks)
    context = Context(
        masks.full(), positions, places, gaps, keys[1], start=start, shared=params.get("shared"), inputs=inputs,
        real=real, source=source, return_weights=return_attention,
    )  # fmt: skip
    state = None if cache is None else cache.layers
    x, beside = (config.stack or scan.stack)(config, params["layers"], x, context, layer_masks, state, constants)
    if config.norm_placement != "post":
        x = embedding.norm(config, params["final_norm"], x)
    if cache is not None:
        x = jnp.where(cache.length > cache.segment_ids.shape[1], jnp.nan, x)
    return Output(
        None, x, None if cache is None else replace(cache, layers=beside.state), beside.weights,
        loss=None if beside.loss is None else jnp.mean(beside.loss), stats=beside.stats,
    )  # fmt: skip


def same_segment(config: ModelConfig, segment_ids: Int[Array, "B T"]) -> Mask:
    """Tokens see their own segment, and nobody sees padding.

    Padding sees nothing, unless a head pools `position_0`, which may be padding: then it sees the last segment of its
    row, as in BERT's code, which masks keys only.
    """
    if all(getattr(head, "pool", None) != "position_0" for head in config.heads):
        return masks.segments(segment_ids)
    seen = jnp.where(segment_ids == 0, segment_ids.max(axis=1, keepdims=True), segment_ids)
    return replace(masks.segments(seen, segment_ids), offset=None)  # both are of one sequence


def at_positions(mask: Mask, positions: Int[Array, "B S"], gaps: bool) -> Mask:
    """The mask of tokens at these positions of their segments: a prefix or a chunk is the segment's own.

    A rule of distance counts slots, which is the same, but where `gaps` of padding may lie within a segment.
    """
    of_order = masks.causal(), masks.full()
    parts = (
        part
        if part in of_order or (masks.shift_invariant(part) and not gaps)
        else Mask(_at_positions, arrays=(positions,), parts=(part,))
        for part in mask.conjuncts()
    )
    return reduce(Mask.__and__, parts)


def _at_positions(mask, q, kv):
    (positions,), (part,) = mask.arrays, mask.parts
    return part._evaluate(lookup(positions, q), lookup(positions, kv))
