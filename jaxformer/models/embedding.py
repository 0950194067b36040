"""From tokens or images to the first hidden states."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxformer.config import code
from jaxformer.errors import ConfigError
from jaxformer.models.config import Embedding, ModelConfig, Patches
from jaxformer.models.layer import Context, Embedder
from jaxformer.models.norm import norm, norm_spec
from jaxformer.models.patches import patch_embedder, patches as patches
from jaxformer.models.position_table import table_of
from jaxformer.ops.positions import learned
from jaxformer.ops.stored_weight import BlockWeight, StoredWeight
from jaxformer.params import Spec, Tree
from jaxformer.sharding import mesh_axes, with_logical_constraint


def embedder_of(config: ModelConfig) -> Embedder:
    """The embedding of the config: of tokens, of images, or the user's own."""
    match config.embedding:
        case Embedding():
            return token_embedder(config, config.embedding)
        case Patches():
            return patch_embedder(config, config.embedding)
    return config.embedding(config)


def spec(config: ModelConfig) -> Tree:
    """Parameters of the embedding."""
    embedder = embedder_of(config)
    of_positions = table_of(config, config.positions, embedder.width)
    if of_positions is None or not of_positions.spec:
        return embedder.spec
    return embedder.spec | {"positions": of_positions.spec}


def length(config: ModelConfig, inputs: Array) -> int:
    """The number of positions of tokens `[B, T]` or images `[B, height, width, C]`.

    Raises ConfigError for tokens or images that do not fit the config.
    """
    return embedder_of(config).length(inputs)


def embed(
    config: ModelConfig, params: Tree, tokens: Array, context: Context, inputs: Tree = None
) -> Float[Array, "B T D"]:
    """The first hidden states: `Embedder.apply`, plus absolute positions, then `Embedder.end`.

    `tokens` are tokens `[B, T]`, images, or what the user's own embedding reads. `inputs` is the
    argument of `models.apply`.
    """
    embedder = embedder_of(config)
    x = run(embedder, params, tokens, inputs, context)
    dtype = context.dtype or x.dtype
    x = add_positions(config, params, x, context.positions)
    x = embedder.end(params, x, context)
    return with_logical_constraint(x.astype(dtype), "batch", "length", None)


def run(embedder: Embedder, params: Tree, tokens, inputs: Tree, context: Context) -> Array:
    """The result of `Embedder.apply`.

    Embeddings in older files have three parameters. They are called without the context.
    """
    if len(code.positional_names(embedder.apply)) == 3:
        return embedder.apply(params, tokens, inputs)
    return embedder.apply(params, tokens, inputs, context)


def add_positions(
    config: ModelConfig, params: Tree, x: Float[Array, "B T W"], positions: Array
) -> Float[Array, "B T W"]:
    """x plus the vectors of absolute positions, if the config has any."""
    table = table_of(config, config.positions, x.shape[-1])
    if table is None:
        return x
    vectors = table.apply(params.get("positions", {}), positions)
    # a fixed table is rounded to the model's precision; a trained table is added in its own
    return x + (vectors if table.spec else vectors.astype(x.dtype))


def token_embedder(config: ModelConfig, embedding: Embedding) -> Embedder:
    """Each token's row of a table, times a scale, plus token types. A norm may follow positions."""
    D = config.d_model
    start = normal(config.std)
    spec: Tree = {"tokens": Spec((config.vocab_size, D), ("vocab", "embed"), start)}
    if embedding.token_types:
        spec["token_types"] = Spec((embedding.token_types, D), (None, "embed"), start)
    if embedding.norm:
        spec["norm"] = norm_spec(config)

    def apply(
        params: Tree, tokens: Int[Array, "B T"], inputs: Tree, context: Context
    ) -> Float[Array, "B T D"]:
        table = params["tokens"]
        dtype = context.dtype or getattr(table, "dtype", jnp.float32)
        x = look_up(table, tokens, dtype) * embedding.scale
        if embedding.token_types:
            types = jnp.zeros_like(tokens) if context.token_types is None else context.token_types
            x = x + learned(types, params["token_types"])
        return x

    def end(params: Tree, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        return norm(config, params.get("norm", {}), x) if embedding.norm else x

    return Embedder(spec, apply, check_tokens, end=end)


def check_tokens(tokens: Array) -> int:
    """T of tokens `[B, T]`. Raises ConfigError for anything but integers of two axes."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ConfigError(
            f"apply: tokens {tokens.dtype}{list(tokens.shape)}: expected integers [B, T]"
        )
    return tokens.shape[1]


def look_up(
    table: Float[Array, "V D"] | StoredWeight | BlockWeight,
    tokens: Int[Array, "B T"],
    dtype=jnp.float32,
) -> Float[Array, "B T D"]:
    """table[tokens]: each token's row of the table. Rows of a stored weight get the `dtype`.

    If `fsdp` splits the tokens and D, a device looks up its part of D for all tokens, and the
    devices then exchange these parts. The exchange moves activations. To gather the table, and to
    sum its gradient, would move V D numbers each.
    """
    if isinstance(table, StoredWeight | BlockWeight):
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
