"""The parts of a layer: what a mixer and a feed-forward are, what they may know, and their linear maps."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import struct
from jax import Array
from jax.nn.initializers import normal, zeros
from jaxtyping import Float

from jaxformer import ops
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.ops.einsum import add_bias
from jaxformer.params import Spec

Tree = Any


@struct.dataclass
class Source:
    """An encoder's output `[B, S, D]`, which of it each query sees, and, in decoding, every layer's keys and values of it."""

    hidden: Any
    mask: Mask
    heads: Any = None  # {"key", "value"}, each [L, B, S, K, H]; within a layer [B, S, K, H]


@struct.dataclass
class Context:
    """What a mixer may know beside its input: visible keys, where tokens stand, dropout, what came before.

    `state` is the mixer's own (for attention: the cached keys and values `[B, S, K, H]`), None outside decoding;
    `start` is the number of tokens that are in it already. `layer` counts from 0. `shared` are parameters that all layers
    have in common, `constants` what the mixer drew for this layer, `inputs` what the caller of `apply` passed for mixers,
    `memo` what the layer below handed on. `real` says which tokens are not padding, `source` what a decoder's layers read
    of the encoder.
    """

    mask: Mask
    positions: Any  # [B or 1, T]
    slot_positions: Any = None  # [B or 1, S]: positions of all keys' tokens; None: each is its slot
    # whether tokens of a segment may be nearer to each other than their slots, or farther
    gaps: bool = struct.field(pytree_node=False, default=False)
    dropout_key: Any = None
    state: Tree = None
    start: Any = 0
    layer: Any = 0
    shared: Tree = None
    constants: Tree = None
    inputs: Tree = None
    memo: Tree = None
    real: Any = None  # [B, T] or None, where all are
    source: "Source | None" = None
    return_weights: bool = struct.field(pytree_node=False, default=False)


class MixerOutput(NamedTuple):
    """What a mixer returns: its output `[B, T, D]`, its new state, its weights if asked for, a memo for the next layer."""

    out: Any
    state: Tree = None
    weights: Any = None
    memo: Tree = None


class FeedForwardOutput(NamedTuple):
    """What a feed-forward returns: its output, an auxiliary loss (weighted already), figures for whoever asks."""

    out: Any
    loss: Any = None
    stats: Tree = None


class FeedForward(NamedTuple):
    """A feed-forward of your own: `ModelConfig.feedforward` may be any function `config -> FeedForward`.

    spec: tree of `Spec`; apply: (params, x [B, T, D], Context) -> Fed.
    """

    spec: Tree
    apply: Callable


def nothing(*_) -> None:
    return None


class Mixer(NamedTuple):
    """A way for positions to exchange information: its parameters, its function, and its state for decoding.

    spec: tree of `Spec`; apply: (params, x [B, T, D], Context) -> Mixed; state: (batch, length, dtype) -> tree of zeros.
    `ModelConfig.mixer` is any function `config -> Mixer`. What few mixers need: `shared`, a spec of parameters that all
    layers have in common; `constants`, T -> arrays `[L, ...]` that are drawn, not trained; `memo`, x -> what the first
    layer finds in `Context.memo`: a tree of the shapes that every layer hands on.
    """

    spec: Tree
    apply: Callable
    state: Callable | None = None  # None: cannot decode
    shared: Tree = None
    constants: Callable = nothing
    memo: Callable = nothing


def linear_spec(config: ModelConfig, name: str, shape, axes, contracts, std: float) -> Tree:
    """A kernel and, where the config gives that name one, a bias over the axes that the kernel does not contract."""
    out = {"kernel": Spec(shape, axes, normal(std), contracts)}
    if config.has_bias(name):
        kept = [(size, axis) for size, axis in zip(shape, axes, strict=True) if axis not in contracts]
        out["bias"] = Spec(tuple(s for s, _ in kept), tuple(a for _, a in kept), zeros)
    return out


def residual_std(config: ModelConfig) -> float:
    """Depth-scaled init of what is added to the residual stream. Radford et al. 2019, section 2.3."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def linear(spec: str, x: Float[Array, "..."], params: Tree) -> Float[Array, "..."]:
    """The product with a kernel of `linear_spec`, and its bias if it has one."""
    y = ops.einsum(spec, x, params["kernel"])
    return add_bias(y, params["bias"]) if "bias" in params else y
