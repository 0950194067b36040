"""What a model is, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxformer.config import ConfigError
from jaxformer.masks import Mask, causal
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.positions import Rope


@dataclass(frozen=True)
class Learned:
    """A trained row for each of `context_length` positions."""


@dataclass(frozen=True)
class Sinusoidal:
    """The fixed table of the 2017 paper, or one of its two relatives (see `ops.positions.sinusoidal`)."""

    layout: Literal["interleaved", "half"] = "interleaved"
    spacing: Literal["paper", "tensor2tensor"] = "paper"


@dataclass(frozen=True)
class ModelConfig:
    """A transformer stack. Widths follow the shape alphabet: D d_model, N heads, K kv_heads, H head_width, F d_ff."""

    vocab_size: int  # V
    num_layers: int  # L
    d_model: int  # D
    num_heads: int  # N
    context_length: int  # longest sequence trained on; a hard limit for learned positions only
    num_kv_heads: int | None = None  # K; None: as many as heads
    head_width: int | None = None  # H; None: D / N
    d_ff: int | None = None  # F; None: 4 D
    feedforward: str = (
        "gelu_tanh"  # an activation (relu gelu gelu_tanh silu relu2) or a gate (glu swiglu geglu reglu ...)
    )
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    positions: Learned | Sinusoidal | Rope | tuple[Rope | None, ...] | None = (
        Learned()
    )  # a tuple: one a layer, repeated
    masks: tuple[Mask, ...] = (causal(),)  # one a layer, repeated over the depth: (causal(), causal() & window(255))
    mixer: Callable | None = None  # None: models.block.attention; one of models.mixers or models.variants; or your own
    use_bias: bool = True
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    dropout_rate: float = 0.0  # after the embedding and after each sub-layer
    attention_dropout_rate: float = 0.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    init_std: float = 0.02  # projections back into the residual stream start at init_std / sqrt(2 L)
    attention_implementation: str | None = None
    remat: Literal["none", "dots", "full"] = "none"  # what the backward pass keeps: all, products, the layer's input
    unroll: int = 1  # layers laid out a scan step; num_layers lays out all of them

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "context_length", "unroll"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("num_kv_heads", "head_width", "d_ff"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be at least 1, or None")
        if self.head_width is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}; "
                f"choose a divisor or set model.head_width"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}"
            )
        if self.feedforward not in (*ACTIVATIONS, *GATES):
            raise ConfigError(
                f"model.feedforward={self.feedforward!r}: expected one of {', '.join((*ACTIVATIONS, *GATES))}"
            )
        if not self.masks:
            raise ConfigError("model.masks is empty; give one mask for all layers or a pattern that repeats")
        for name in ("dropout_rate", "attention_dropout_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be in [0, 1)")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or 4 * self.d_model
