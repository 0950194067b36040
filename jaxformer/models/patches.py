"""Images as a sequence of patches: `models.Patches`."""

import math

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Bool, Float

from jaxformer import params
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig, Patches
from jaxformer.models.layer import Context, Embedder, linear
from jaxformer.params import Spec, Tree


def patch_embedder(config: ModelConfig, images: Patches) -> Embedder:
    """Each patch times one matrix, behind the class token and the extra tokens.

    Flags `inputs["masked"]` `[B, patches]` put the mask token in the place of patches. Raises
    ConfigError for images of another size, and for flags if the model has no mask token.
    Dosovitskiy et al. 2020, arXiv:2010.11929, section 3.1.
    """

    def apply(
        params: Tree, pixels: Float[Array, "B height width C"], inputs: Tree, context: Context
    ) -> Float[Array, "B T D"]:
        kernel = params["patches"]["kernel"]
        x = patches(pixels.astype(context.dtype or kernel.dtype), images.patch)
        flat = params["patches"] | {"kernel": kernel.reshape(-1, config.d_model)}
        x = linear("btp,pd->btd", x, flat)
        if isinstance(inputs, dict) and inputs.get("masked") is not None:
            x = put_mask_token(params, x, inputs["masked"])
        return put_first(params, x)

    def length(pixels: Float[Array, "B height width C"]) -> int:
        expected = *images.image, images.channels
        if pixels.shape[1:] != expected:
            raise ConfigError(
                f"images {pixels.shape[1:]} where model.embedding expects {expected}; "
                "resize them, or use models.vision.resize"
            )
        return images.length

    return Embedder(patches_spec(config, images), apply, length)


def patches_spec(config: ModelConfig, images: Patches) -> Tree:
    """The matrix of the patches, and the vectors of the tokens that are no patches."""
    D = config.d_model
    pixels = images.channels, *images.patch
    axes = "channel", "line", "column"
    init = normal(math.prod(pixels) ** -0.5)
    bias = config.has_bias("patches")
    tree: Tree = {"patches": params.linear((*pixels, D), (*axes, "embed"), axes, init, bias)}
    start = normal(config.std)
    for name in ("class_token", "mask_token"):
        if getattr(images, name):
            tree[name] = Spec((D,), ("embed",), start)
    if images.extra_tokens:
        tree["extra_tokens"] = Spec((images.extra_tokens, D), (None, "embed"), start)
    return tree


def put_mask_token(
    params: Tree, x: Float[Array, "B T D"], masked: Bool[Array, "..."]
) -> Float[Array, "B T D"]:
    """x with the mask token in the place of the masked patches, flags `[B, T]`.

    SimMIM: Xie et al. 2021, arXiv:2111.09886, section 3.1. Raises ConfigError for a model without a
    mask token, and for flags of another shape.
    """
    if "mask_token" not in params:
        raise ConfigError(
            "inputs: masked patches, but model.embedding has no mask token; set mask_token=True"
        )
    if masked.shape != x.shape[:2]:
        raise ConfigError(
            f"inputs: masked {list(masked.shape)}: "
            f"expected flags [B, patches], here {list(x.shape[:2])}"
        )
    return jnp.where(masked[..., None], params["mask_token"].astype(x.dtype)[None, None], x)


def put_first(params: Tree, x: Float[Array, "B T D"]) -> Float[Array, "B T2 D"]:
    """[class token, extra tokens, x], without the tokens that the model lacks."""
    names = [name for name in ("class_token", "extra_tokens") if name in params]
    if not names:
        return x
    first = [jnp.atleast_2d(params[name]) for name in names]
    tokens = jnp.concatenate(first).astype(x.dtype)[None]
    return jnp.concatenate([jnp.broadcast_to(tokens, (len(x), *tokens.shape[1:])), x], axis=1)


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
