"""From tokens or images to the first hidden states."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal, ones, zeros
from jaxtyping import Float

from jaxformer import ops
from jaxformer.errors import ConfigError
from jaxformer.models.config import Axial, Embedding, Learned, ModelConfig, Patches, Sinusoidal
from jaxformer.ops.einsum import add_bias
from jaxformer.ops.positions import learned, sinusoidal
from jaxformer.params import Spec
from jaxformer.sharding import with_logical_constraint

Tree = Any


def spec(config: ModelConfig) -> Tree:
    """Parameters of the embedding."""
    D, how = config.d_model, config.embedding
    row = lambda axis, *shape: Spec((*shape, D), (axis, "embed")[-len(shape) - 1 :], normal(config.init_std))
    tree: Tree = {}
    if isinstance(how, Patches):
        shape, pixels = (how.channels, *how.patch, D), ("channel", "line", "column")
        kernel = Spec(shape, (*pixels, "embed"), normal(math.prod(shape[:3]) ** -0.5), pixels)
        tree["patches"] = {"kernel": kernel}
        if config.has_bias("patches"):
            tree["patches"]["bias"] = Spec((D,), ("embed",), zeros)
        if how.class_token:
            tree["class_token"] = row(None)
        if how.mask_token:
            tree["mask_token"] = row(None)
    else:
        tree["tokens"] = row("vocab", config.vocab_size)
        if how.token_types:
            tree["token_types"] = row(None, how.token_types)
    if isinstance(config.positions, Learned):
        tree["positions"] = row("length", config.context_length + config.positions.offset)
    if isinstance(config.positions, Axial):
        (lines, columns), (a, b) = config.positions.shape, config.positions.widths
        table = lambda n, width: Spec((n, width), ("length", None), normal(config.init_std))
        tree["positions"] = {"lines": table(lines, a), "columns": table(columns, b)}
    if isinstance(how, Embedding) and how.norm:
        tree["norm"] = norm_spec(config)
    return tree


def length(config: ModelConfig, inputs: Array) -> int:
    """Positions that tokens `[B, T]` or images `[B, height, width, C]` take."""
    if not isinstance(config.embedding, Patches):
        return inputs.shape[1]
    expected = (*config.embedding.image, config.embedding.channels)
    if inputs.shape[1:] != expected:
        raise ConfigError(
            f"images {inputs.shape[1:]} where model.embedding expects {expected}; resize them, or the model's position "
            "table by models.vision.resize"
        )
    return config.embedding.length


def embed(
    config: ModelConfig, params: Tree, inputs, positions, token_types=None, dtype=None, masked=None
) -> Float[Array, "B T D"]:
    """Tokens' rows times the scale or images' patches, plus token types and absolute positions; then the norm, if any.

    `masked` flags `[B, patches]` of an image stand for the mask token. Raises ConfigError where the model has none.
    """
    how = config.embedding
    if isinstance(how, Patches):
        kernel = params["patches"]["kernel"]
        dtype = dtype or kernel.dtype
        x = patches(inputs.astype(dtype), how.patch)
        x = ops.einsum("btp,pd->btd", x, kernel.reshape(-1, config.d_model))
        if "bias" in params["patches"]:
            x = add_bias(x, params["patches"]["bias"])
        if masked is not None:
            if not how.mask_token:
                raise ConfigError("inputs: masked patches, but model.embedding has no mask token; set mask_token=True")
            x = jnp.where(masked[..., None], params["mask_token"].astype(x.dtype)[None, None], x)
        if how.class_token:
            first = jnp.broadcast_to(params["class_token"].astype(x.dtype)[None, None], (x.shape[0], 1, config.d_model))
            x = jnp.concatenate([first, x], axis=1)
    else:
        dtype = dtype or params["tokens"].dtype
        # NaN beyond the table, on both ends
        x = learned(inputs, with_logical_constraint(params["tokens"], "vocab", None)) * how.scale
        if how.token_types:
            types = jnp.zeros_like(inputs) if token_types is None else token_types
            x = x + learned(types, params["token_types"])
    if isinstance(config.positions, Learned):
        x = x + learned(positions + config.positions.offset, params["positions"])
    elif isinstance(config.positions, Axial):
        line, column = jnp.divmod(positions, config.positions.shape[1])
        tables = params["positions"]
        x = x + jnp.concatenate([learned(line, tables["lines"]), learned(column, tables["columns"])], axis=-1)
    elif isinstance(config.positions, Sinusoidal):
        x = x + sinusoidal(positions, config.d_model, config.positions.layout, config.positions.spacing).astype(x.dtype)
    if "norm" in params:
        x = norm(config, params["norm"], x)
    return with_logical_constraint(x.astype(dtype), "batch", "length", None)


def patches(images: Float[Array, "B height width C"], patch: tuple[int, int]) -> Float[Array, "B T P"]:
    """Each patch as a row (channel, then line, then column), patches row by row."""
    B, height, width, C = images.shape
    down, across = height // patch[0], width // patch[1]
    cut = images.reshape(B, down, patch[0], across, patch[1], C)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(B, down * across, -1)


def norm_spec(config: ModelConfig, width: int | None = None) -> Tree:
    """Scale and, for a layer norm that the config gives one, bias `[width]` (D by default)."""
    shape = (width or config.d_model,)
    out = {"scale": Spec(shape, ("embed",), ones)}
    if config.norm == "layer_norm" and config.has_bias("norm"):
        out["bias"] = Spec(shape, ("embed",), zeros)
    return out


def norm(config: ModelConfig, params: Tree, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """The config's norm, `ops.layer_norm` or `ops.rms_norm`, over the last axis."""
    if config.norm == "layer_norm":
        return ops.layer_norm(x, params["scale"], params.get("bias"), config.norm_eps)
    return ops.rms_norm(x, params["scale"], config.norm_eps)
