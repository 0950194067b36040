"""The norm of a model: of its sub-layers, of its embedding, and of its last hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import ones, zeros
from jaxtyping import Float

from jaxformer import ops
from jaxformer.models.checks import check_words
from jaxformer.models.config import ModelConfig
from jaxformer.params import Spec, Tree


class Norm(NamedTuple):
    """A norm of your own. `ModelConfig.norm` may be any function `(config, width) -> Norm`."""

    spec: Tree  # of `Spec`; {} for a norm without parameters
    apply: Callable  # (params, x [..., width]) -> [..., width]


def norm_spec(config: ModelConfig, width: int | None = None) -> Tree:
    """The parameters of the config's norm over `width` features, D by default."""
    width = width or config.d_model
    if callable(config.norm):
        return config.norm(config, width).spec
    tree = {"scale": Spec((width,), ("embed",), ones)}
    if config.norm == "layer_norm" and config.has_bias("norm"):
        tree["bias"] = Spec((width,), ("embed",), zeros)
    return tree


def norm(config: ModelConfig, params: Tree, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """The config's norm over the last axis: `ops.layer_norm`, `ops.rms_norm`, or the user's own."""
    with jax.named_scope("norm"):
        if callable(config.norm):
            return config.norm(config, x.shape[-1]).apply(params, x)
        if config.norm == "layer_norm":
            return ops.layer_norm(x, params["scale"], params.get("bias"), config.norm_eps)
        return ops.rms_norm(x, params["scale"], config.norm_eps)


@dataclass(frozen=True)
class Unscaled:
    """A norm without a learned scale and bias.

    As in OLMo 1: Groeneveld et al. 2024, arXiv:2402.00838, section 2.1.
    """

    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"  # which norm is left unscaled

    __post_init__ = check_words

    def __call__(self, config: ModelConfig, width: int) -> Norm:
        def apply(params: Tree, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
            if self.kind == "layer_norm":
                return ops.layer_norm(x, None, None, config.norm_eps)
            return ops.rms_norm(x, None, config.norm_eps)

        return Norm({}, apply)


def one_plus_rms_norm(config: ModelConfig, width: int) -> Norm:
    """RMSNorm times 1 + w, with w = 0 at the start: weight decay draws the factor to 1, not to 0.

    Gemma has it: Gemma Team 2024, arXiv:2403.08295.
    """

    def apply(params: Tree, x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return ops.rms_norm(x, 1 + params["scale"].astype(wide), config.norm_eps)

    return Norm({"scale": Spec((width,), ("embed",), zeros)}, apply)


def no_norm(config: ModelConfig, width: int) -> Norm:
    """x itself: a model without norms."""
    return Norm({}, lambda params, x: x)
