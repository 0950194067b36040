"""What a model is, as data."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from jaxformer.config import execution
from jaxformer.errors import ConfigError
from jaxformer.masks import Mask, causal
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.positions import Rope


@dataclass(frozen=True)
class Learned:
    """A trained row for each of `context_length` positions, behind `offset` rows that no token reads (RoBERTa, BART: 2)."""

    offset: int = 0


@dataclass(frozen=True)
class Sinusoidal:
    """The fixed table of the 2017 paper, or one of its two relatives (see `ops.positions.sinusoidal`)."""

    layout: Literal["interleaved", "half"] = "interleaved"
    spacing: Literal["paper", "tensor2tensor"] = "paper"


@dataclass(frozen=True)
class Axial:
    """Two small trained tables, of lines and of columns of a `shape` that positions fill: Reformer, for long contexts.

    `widths` are the features that each table gives. Kitaev et al. 2020, arXiv:2001.04451, appendix; Ho et al. 2019.
    """

    shape: tuple[int, int]
    widths: tuple[int, int]


@dataclass(frozen=True)
class Alibi:
    """Scores fall with the distance, at a slope for each head (`ops.alibi`)."""


@dataclass(frozen=True)
class Relative:
    """A trained bias on scores by head and bucket of distance, one table for all layers: T5 (`ops.t5`)."""

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True


@dataclass(frozen=True)
class Embedding:
    """A row a token, times `scale`; with `token_types` a row for each kind of segment (BERT), with `norm` a norm behind."""

    scale: float = 1.0
    norm: bool = False
    token_types: int = 0


@dataclass(frozen=True)
class Patches:
    """A linear map of each patch of an image `[B, height, width, channels]`: ViT, Dosovitskiy et al. 2020, arXiv:2010.11929.

    Patches go row by row; before them stands, with `class_token`, a trained row. With `mask_token` another one stands for
    the patches that a call hides: the flags `[B, patches]` of `apply(..., inputs={"masked": flags})`.
    """

    image: tuple[int, int] = (224, 224)  # height and width in pixels
    patch: tuple[int, int] = (16, 16)
    channels: int = 3
    class_token: bool = True
    mask_token: bool = False

    def __post_init__(self):
        for size, part in zip(self.image, self.patch, strict=True):
            if part < 1 or size % part:
                raise ConfigError(f"embedding.patch={self.patch} does not divide embedding.image={self.image}")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def length(self) -> int:
        """Positions of one image."""
        return math.prod(self.grid) + self.class_token


@dataclass(frozen=True)
class LanguageModel:
    """A logit for each token of the vocabulary at each position, by the embedding's rows or by its own (`tie_embeddings`).

    `transform`: an activation; then a linear map, that and a norm come first (BERT's masked language model).
    """

    transform: str | None = None
    bias: bool = False
    scale: float = 1.0  # of the hidden states: D^-0.5 in T5 v1.0
    name: str = "language_model"


@dataclass(frozen=True)
class Classification:
    """Classes of a whole sequence: a linear map of one of its positions or their mean.

    `pooler`: an activation, behind a linear map of its own (BERT: tanh), `pooler_width` wide. `classes=None` gives what is
    pooled. `first` and `last` are tokens that are not padding, `position_0` is the row's first slot, even a padded one
    (BERT's code), which then sees the row's tokens.
    """

    classes: int | None
    pool: Literal["first", "mean", "last", "position_0"] = "first"
    pooler: str | None = "tanh"
    bias: bool = True
    name: str = "classification"
    pooler_width: int | None = None  # None: as wide as what it reads


@dataclass(frozen=True)
class TokenClassification:
    """Classes of each position. Two of them are the logits of a span's begin and end (question answering)."""

    classes: int
    name: str = "token_classification"


@dataclass(frozen=True)
class ModelConfig:
    """A transformer stack. Widths follow the shape alphabet: D d_model, N heads, K kv_heads, H head_width, F d_ff."""

    vocab_size: int  # V; 0 where no tokens go in or come out (images)
    num_layers: int  # L
    d_model: int  # D
    num_heads: int  # N
    context_length: int  # longest sequence trained on; a hard limit for learned positions only
    num_kv_heads: int | None = None  # K; None: as many as heads
    head_width: int | None = None  # H; None: D / N
    d_ff: int | None = None  # F; None: 4 D
    # an activation (relu gelu gelu_tanh silu relu2), a gate (glu swiglu geglu reglu ...), models.Mixture, or your own
    feedforward: Callable | str = "gelu_tanh"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    # a tuple: one a layer, repeated; a function of yours: config -> what `bias` of ops.attention may be
    positions: Learned | Sinusoidal | Axial | Rope | Alibi | Relative | tuple[Rope | None, ...] | Callable | None = (
        Learned()
    )
    masks: tuple[Mask, ...] = (causal(),)  # one a layer, repeated over the depth: (causal(), causal() & window(255))
    # None: mixers.attention; one of models.mixers or mixers.variants; or your own; a tuple: one a layer, repeated
    mixer: Callable | tuple[Callable | None, ...] | None = None
    stack: Callable | None = None  # None: stacks.scan.stack; stacks.reversible.Reversible; or your own
    # True, False, or which have one: a regular expression over query key value out up gate down norm patches
    use_bias: bool | str = True
    embedding: Embedding | Patches = Embedding()
    # what reads the hidden states: these, or `config -> models.heads.Head` of your own; () for a bare stack
    heads: tuple[LanguageModel | Classification | TokenClassification | Callable, ...] = (LanguageModel(),)
    tie_embeddings: bool = True
    dropout_rate: float = 0.0  # after the embedding and after each sub-layer
    attention_dropout_rate: float = 0.0
    attention_scale: float | None = None  # None: 1 / sqrt(H)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    init_std: float = 0.02  # projections back into the residual stream start at init_std / sqrt(2 L)
    attention_implementation: str | None = execution(None)  # of ops.attention; None: the fastest that can
    # what is kept of a layer for the backward pass: `transformer.remat`
    remat: Literal["none", "dots", "attention", "full"] = execution("none")
    unroll: int = execution(1)  # layers of one scan step; num_layers unrolls all of them

    def __post_init__(self):
        tokens = isinstance(self.embedding, Embedding)
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "context_length", "unroll"):
            if getattr(self, name) < (1 if tokens or name != "vocab_size" else 0):
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
        if not callable(self.feedforward) and self.feedforward not in (*ACTIVATIONS, *GATES):
            raise ConfigError(
                f"model.feedforward={self.feedforward!r}: expected one of {', '.join((*ACTIVATIONS, *GATES))}"
            )
        if isinstance(self.positions, Axial):
            rows, width = math.prod(self.positions.shape), sum(self.positions.widths)
            if (rows, width) != (self.context_length, self.d_model):
                raise ConfigError(
                    f"model.positions={self.positions}: makes {rows} positions of width {width}, not context_length="
                    f"{self.context_length} of d_model={self.d_model}"
                )
        patches = self.embedding if isinstance(self.embedding, Patches) else None
        if patches and isinstance(self.positions, Learned) and patches.length != self.context_length:
            raise ConfigError(
                f"model.context_length={self.context_length}: images of {patches.image} in patches of {patches.patch} "
                f"make {patches.length} positions"
            )
        table = 0 if patches else self.d_model
        if self.tie_embeddings and self.hidden_width != table and any(isinstance(h, LanguageModel) for h in self.heads):
            raise ConfigError(
                f"model.heads: a LanguageModel with tie_embeddings=True reads {self.hidden_width} features by the "
                f"embedding's rows, which have {table or 'none: they are patches'}; set it to False, or give other heads"
            )
        _check_words(self)
        _check_masks(self.masks)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def hidden_width(self) -> int:
        """Of what the heads read: D, or 2 D of a reversible stack that gives both streams."""
        return self.d_model * getattr(self.stack, "streams", 1)

    def has_bias(self, name: str) -> bool:
        """Whether the linear map or norm of that name has a bias."""
        return bool(re.fullmatch(self.use_bias, name)) if isinstance(self.use_bias, str) else self.use_bias


def _check_words(config: ModelConfig) -> None:
    """ConfigError for a field that holds none of the words, expressions or rates that it may."""
    if isinstance(config.use_bias, str):
        try:
            re.compile(config.use_bias)
        except re.error as error:
            raise ConfigError(f"model.use_bias={config.use_bias!r}: no regular expression ({error})") from None
    for head in config.heads:
        for field in ("transform", "pooler"):
            if (name := getattr(head, field, None)) is not None and name not in ACTIVATIONS:
                raise ConfigError(f"model.heads: {field}={name!r}: expected one of {', '.join(ACTIVATIONS)}, or None")
    for name in ("norm", "norm_placement", "remat"):
        if getattr(config, name) not in (choices := get_args(ModelConfig.__annotations__[name])):
            raise ConfigError(f"model.{name}={getattr(config, name)!r}: expected one of {', '.join(choices)}")
    for name in ("dropout_rate", "attention_dropout_rate"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"model.{name}={getattr(config, name)}: must be in [0, 1)")


def _check_masks(patterns) -> None:
    if not (isinstance(patterns, tuple) and patterns and all(isinstance(m, Mask) for m in patterns)):
        shown = " ".join(repr(patterns).split())  # an array takes many lines
        raise ConfigError(
            f"model.masks={shown}: expected a tuple of values of jaxformer.masks: (causal(),), or a pattern that "
            "repeats over the layers"
        )
    for mask in patterns:
        if not mask.static or mask.offset is not None:
            raise ConfigError(
                f"model.masks: {mask} holds arrays or an offset; give masks of numbers, and rows by apply(segment_ids=...)"
            )


@dataclass(frozen=True)
class EncoderDecoder:
    """Two stacks: the decoder's layers also attend to what the encoder made of the source."""

    encoder: ModelConfig
    decoder: ModelConfig
    share_embeddings: bool = True  # one token table for both

    def __post_init__(self):
        if self.encoder.heads:
            raise ConfigError("encoder.heads: the encoder of a pair has none; give heads=()")
        widths = (self.encoder.vocab_size, self.encoder.d_model), (self.decoder.vocab_size, self.decoder.d_model)
        if self.share_embeddings and widths[0] != widths[1]:
            raise ConfigError(
                f"share_embeddings: encoder and decoder have tables of different (vocab_size, d_model), {widths[0]} and "
                f"{widths[1]}; make them equal or set it to False"
            )
