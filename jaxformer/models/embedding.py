"""From tokens or images to the first hidden states."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from jaxformer import masks, params
from jaxformer.config import code
from jaxformer.errors import ConfigError
from jaxformer.models.config import Embedding, ModelConfig, Patches
from jaxformer.models.layer import Context, linear
from jaxformer.models.norm import norm, norm_spec
from jaxformer.models.position_table import table_of
from jaxformer.ops.positions import learned
from jaxformer.ops.stored_weight import StoredWeight
from jaxformer.params import Spec, Tree
from jaxformer.sharding import mesh_axes, with_logical_constraint


def token_length(tokens: Array) -> int:
    """T of tokens `[B, T, ...]`."""
    return tokens.shape[1]


def as_it_is(params: Tree, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
    """x: nothing follows the sum of the vectors."""
    return x


class Embedder(NamedTuple):
    """An embedding of your own. `ModelConfig.embedding` may be any function `config -> Embedder`.

    Absolute positions of the config are added to the result of `apply`, then `end` follows. The
    context has the positions, the token types and the padding mask.
    """

    spec: Tree  # of `Spec`; with a table `tokens` [V, D], a language model's head may read by it
    # (params, tokens or other arrays of `models.apply`, its `inputs`, Context) -> [B, T, width]
    apply: Callable
    length: Callable = token_length  # the arrays -> T, the number of their positions
    width: int | None = None  # features of the result of `apply` and of the positions; None: D
    end: Callable = as_it_is  # (params, the sum [B, T, width], Context) -> [B, T, D]
    # (the arrays, segment_ids [B, T] or None) -> positions [B or 1, T, ...] for the layers, such as
    # the line and the column of a patch; None: tokens are counted. A cache does not keep them
    positions: Callable | None = None


def spec(config: ModelConfig) -> Tree:
    """Parameters of the embedding."""
    embedding = config.embedding
    D = config.d_model
    start = normal(config.std)

    def table(axis, count):
        return Spec((count, D), (axis, "embed"), start)

    tree: Tree = {}
    width = D
    if isinstance(embedding, Patches):
        pixels = embedding.channels, *embedding.patch
        axes = "channel", "line", "column"
        init = normal(math.prod(pixels) ** -0.5)
        tree["patches"] = params.linear(
            (*pixels, D), (*axes, "embed"), axes, init, config.has_bias("patches")
        )
        for name in ("class_token", "mask_token"):
            if getattr(embedding, name):
                tree[name] = Spec((D,), ("embed",), start)
        if embedding.extra_tokens:
            tree["extra_tokens"] = table(None, embedding.extra_tokens)
    elif isinstance(embedding, Embedding):
        tree["tokens"] = table("vocab", config.vocab_size)
        if embedding.token_types:
            tree["token_types"] = table(None, embedding.token_types)
        if embedding.norm:
            tree["norm"] = norm_spec(config)
    else:
        embedder = embedding(config)
        tree |= embedder.spec
        width = embedder.width or D
    of_positions = table_of(config, config.positions, width)
    if of_positions is not None and of_positions.spec:
        tree["positions"] = of_positions.spec
    return tree


def length(config: ModelConfig, inputs: Array) -> int:
    """The number of positions of tokens `[B, T]` or images `[B, height, width, C]`."""
    if isinstance(config.embedding, Embedding):
        return inputs.shape[1]
    if not isinstance(config.embedding, Patches):
        return config.embedding(config).length(inputs)
    shape = inputs.shape[1:]
    expected = *config.embedding.image, config.embedding.channels
    if shape != expected:
        raise ConfigError(
            f"images {shape} where model.embedding expects {expected}; "
            "resize them, or use models.vision.resize"
        )
    return config.embedding.length


def positions(
    config: ModelConfig, inputs: Array, segment_ids: Array | None
) -> Num[Array, "_ T *place"] | None:
    """The positions that an embedding of the user's own makes, or None."""
    if isinstance(config.embedding, Embedding | Patches):
        return None
    own = config.embedding(config).positions
    return None if own is None else own(inputs, segment_ids)


def embed(
    config: ModelConfig,
    params,
    inputs,
    positions,
    token_types=None,
    dtype=None,
    masked=None,
    extra: Tree = None,
    context: Context | None = None,
) -> Float[Array, "B T D"]:
    """Embeddings of tokens times the scale, or of patches, plus token types and absolute positions.

    A norm follows, if the config has one. Flags `masked` `[B, patches]` put the mask token in the
    place of patches; raises ConfigError if the model has no mask token. `extra` is the `inputs` of
    `models.apply`: an `Embedder` of the user's own reads it, and the `context`.
    """
    embedding = config.embedding
    embedder = None
    if isinstance(embedding, Patches):
        dtype = dtype or params["patches"]["kernel"].dtype
        x = _embed_images(config, params, inputs.astype(dtype), masked)
    elif isinstance(embedding, Embedding):
        table = params["tokens"]
        dtype = dtype or getattr(table, "dtype", jnp.float32)
        x = look_up(table, inputs, dtype) * embedding.scale
        if embedding.token_types:
            types = jnp.zeros_like(inputs) if token_types is None else token_types
            x = x + learned(types, params["token_types"])
    else:
        embedder = embedding(config)
        context = context or Context(masks.full(), positions, token_types=token_types)
        x = _apply(embedder, params, inputs, extra, context)
        dtype = dtype or x.dtype
    width = None if embedder is None else embedder.width
    if (of_positions := table_of(config, config.positions, width)) is not None:
        vectors = of_positions.apply(params.get("positions", {}), positions)
        # a fixed table is rounded to the model's precision; a trained table is added in its own
        x = x + (vectors if of_positions.spec else vectors.astype(x.dtype))
    if isinstance(embedding, Embedding) and embedding.norm:
        x = norm(config, params.get("norm", {}), x)
    if embedder is not None:
        x = embedder.end(params, x, context)
    return with_logical_constraint(x.astype(dtype), "batch", "length", None)


def _apply(embedder: Embedder, params: Tree, inputs, extra: Tree, context: Context) -> Array:
    """The result of `Embedder.apply`.

    Embeddings in older files have three parameters. They are called without the context.
    """
    if len(code.positional_names(embedder.apply)) == 3:
        return embedder.apply(params, inputs, extra)
    return embedder.apply(params, inputs, extra, context)


def look_up(
    table: Float[Array, "V D"] | StoredWeight, tokens: Int[Array, "B T"], dtype=jnp.float32
) -> Float[Array, "B T D"]:
    """table[tokens]: each token's row of the table. Rows of a stored weight get the `dtype`.

    If `fsdp` splits the tokens and D, a device looks up its part of D for all tokens, and the
    devices then exchange these parts. The exchange moves activations. To gather the table, and to
    sum its gradient, would move V D numbers each.
    """
    if isinstance(table, StoredWeight):
        return table.look_up(tokens, dtype)
    batch_axes = mesh_axes("batch", tokens.shape[0])
    length_axes = mesh_axes("length", tokens.shape[1])
    if "fsdp" not in batch_axes or table.shape[1] % jax.sharding.get_abstract_mesh().shape["fsdp"]:
        return learned(tokens, with_logical_constraint(table, "vocab", None))

    def on_each(tokens, table):
        x = learned(jax.lax.all_gather(tokens, "fsdp", tiled=True), table)
        return jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=2, tiled=True)

    split = P(batch_axes, length_axes or None)
    on_shards = jax.shard_map(
        on_each,
        in_specs=(split, P(None, "fsdp")),
        out_specs=split,
        axis_names=frozenset(batch_axes + length_axes),
        check_vma=False,
    )
    return on_shards(tokens, table)


def _embed_images(config: ModelConfig, params: Tree, images, masked) -> Float[Array, "B T D"]:
    embedding: Any = config.embedding
    flat = params["patches"] | {"kernel": params["patches"]["kernel"].reshape(-1, config.d_model)}
    x = linear("btp,pd->btd", patches(images, embedding.patch), flat)

    if masked is not None:
        if not embedding.mask_token:
            raise ConfigError(
                "inputs: masked patches, but model.embedding has no mask token; set mask_token=True"
            )
        if masked.shape != x.shape[:2]:
            raise ConfigError(
                f"inputs: masked {list(masked.shape)}: "
                f"expected flags [B, patches], here {list(x.shape[:2])}"
            )
        x = jnp.where(masked[..., None], params["mask_token"].astype(x.dtype)[None, None], x)
    first = [params[name] for name in ("class_token", "extra_tokens") if name in params]
    if not first:
        return x
    shape = len(x), embedding.first_patch, config.d_model
    tokens = jnp.concatenate([jnp.atleast_2d(vectors) for vectors in first]).astype(x.dtype)
    return jnp.concatenate([jnp.broadcast_to(tokens[None], shape), x], axis=1)


def patches(
    images: Float[Array, "B height width C"], patch: tuple[int, int]
) -> Float[Array, "B T P"]:
    """Each patch as a vector (channel, then line, then column). The patches are line by line.

    Pixels at the bottom and at the right that fill no patch are left out.
    """
    B, height, width, C = images.shape
    down, across = height // patch[0], width // patch[1]
    images = images[:, : down * patch[0], : across * patch[1]]
    x = images.reshape(B, down, patch[0], across, patch[1], C).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(B, down * across, -1)
