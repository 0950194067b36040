"""What a model is, as data."""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field as declared
from typing import Any, Literal

from jaxformer.config import execution
from jaxformer.config.moved import PLACEMENTS, block_of_placement
from jaxformer.errors import ConfigError, check_numbers, check_whole
from jaxformer.masks import Mask, causal
from jaxformer.models.checks import (
    check_words,
    require_numbers,
    unknown_words,
    wrong_masks,
    wrong_numbers,
    wrong_words,
)
from jaxformer.models.mup import MuP
from jaxformer.ops.attention import has_own_kernel
from jaxformer.ops.attention.kernel import Implementation
from jaxformer.ops.bias import check_t5
from jaxformer.ops.positions import Rope


@dataclass(frozen=True)
class Learned:
    """A trained row for each of `context_length` positions."""

    offset: int = 0  # rows in front that no token reads (RoBERTa, BART: 2)

    def __post_init__(self):
        check_whole("Learned.offset", self.offset, least=0)


@dataclass(frozen=True)
class Sinusoidal:
    """The fixed table of the 2017 paper, or one of its variants (`ops.positions.sinusoidal`)."""

    # order of the features: sine and cosine in turn, or all sines first
    layout: Literal["interleaved", "half"] = "interleaved"
    spacing: Literal["paper", "tensor2tensor"] = "paper"  # of the frequencies

    __post_init__ = check_words


@dataclass(frozen=True)
class Axial:
    """Two small trained tables, for the lines and the columns of a grid that the positions fill.

    Kitaev et al. 2020, appendix.
    """

    shape: tuple[int, int]  # lines and columns of the grid
    widths: tuple[int, int]  # features of each table; their sum is d_model

    def __post_init__(self):
        for name, pair in (("shape", self.shape), ("widths", self.widths)):
            if len(pair) != 2:
                raise ConfigError(
                    f"Axial.{name}={pair}: expected two numbers, of lines and of columns"
                )
            for number in pair:
                check_whole(f"Axial.{name}", number)


@dataclass(frozen=True)
class AttentionPositions:
    """Position vectors that every attention adds to the inputs of queries and keys, not of values.

    DETR: Carion et al. 2020, arXiv:2005.12872. A cross-attention adds the decoder's vectors to its
    queries and the encoder's vectors to its keys.
    """

    # Learned(), Sinusoidal(), Axial(...), or your own:
    # config -> models.position_table.PositionTable
    table: Any

    def __post_init__(self):
        if not (isinstance(self.table, Learned | Sinusoidal | Axial) or callable(self.table)):
            expected = "Learned(), Sinusoidal(), Axial(...), or a function config -> PositionTable"
            raise ConfigError(f"AttentionPositions.table={self.table!r}: expected {expected}")


@dataclass(frozen=True)
class Alibi:
    """Scores fall with the distance, by a slope for each head (`ops.alibi`)."""


@dataclass(frozen=True)
class Relative:
    """A trained bias on scores, by head and bucket of distance; one table for all layers (T5).

    See `ops.t5`.
    """

    buckets: int = 32  # rows of the table
    max_distance: int = 128  # all distances from here on share one bucket
    bidirectional: bool = True  # whether keys after the query have buckets of their own

    def __post_init__(self):
        check_t5(self.buckets, self.max_distance, self.bidirectional, "Relative.")


@dataclass(frozen=True)
class Embedding:
    """A trained vector for each token."""

    scale: float = 1.0  # factor of the vectors (2017: the square root of d_model)
    norm: bool = False  # whether a norm ends the embedding (BERT)
    token_types: int = 0  # number of segment types; the vector of each is added (BERT: 2)

    __post_init__ = require_numbers(scale=-math.inf, token_types=0)


@dataclass(frozen=True)
class Patches:
    """A linear map of each patch of an image `[B, height, width, channels]`, line by line.

    ViT: Dosovitskiy et al. 2020.
    """

    image: tuple[int, int] = (224, 224)  # height and width in pixels
    patch: tuple[int, int] = (16, 16)  # height and width in pixels
    channels: int = 3  # of a pixel
    class_token: bool = True  # whether a trained vector stands before the patches
    # whether a trained vector replaces hidden patches: `inputs={"masked": flags [B, patches]}`
    mask_token: bool = False
    # further trained vectors, between the class token and the patches (DeiT: 1, for distillation)
    extra_tokens: int = 0
    # pixels at the bottom and at the right that no patch reads (SigLIP, 384 in patches of 14: 6)
    unread: tuple[int, int] = (0, 0)

    def __post_init__(self):
        check_numbers("Patches.", self, channels=1, extra_tokens=0)
        pairs = (("image", self.image, 1), ("patch", self.patch, 1), ("unread", self.unread, 0))
        for name, pair, least in pairs:
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise ConfigError(
                    f"Patches.{name}={pair}: expected two numbers, of the height and the width"
                )
            for number in pair:
                check_whole(f"Patches.{name}", number, least=least)
        if min(self.grid) < 1:
            raise ConfigError(
                f"embedding.patch={self.patch} is larger than embedding.image={self.image}"
            )
        left = self.image[0] % self.patch[0], self.image[1] % self.patch[1]
        if left != tuple(self.unread):
            raise ConfigError(
                f"embedding.patch={self.patch} does not divide embedding.image={self.image}: "
                f"{left} pixels are left, where embedding.unread={self.unread}"
            )

    # patches down and across; positions before the patches; positions of one image
    grid = property(lambda self: (self.image[0] // self.patch[0], self.image[1] // self.patch[1]))
    first_patch = property(lambda self: self.class_token + self.extra_tokens)
    length = property(lambda self: math.prod(self.grid) + self.first_patch)


@dataclass(frozen=True)
class LanguageModel:
    """A logit for each token of the vocabulary at each position."""

    # None; an activation: a linear map, the activation and a norm come first (BERT);
    # or your own: config -> models.heads.Transform
    transform: Callable | str | None = None
    bias: bool = False  # whether each token of the vocabulary has a bias
    scale: float = 1.0  # factor of the hidden states: D^-0.5 in T5 v1.0
    name: str = "language_model"  # key of its parameters and of its output

    __post_init__ = require_numbers(scale=-math.inf)


@dataclass(frozen=True)
class Classification:
    """Classes of a whole sequence: a linear map of one position, or of the mean of all."""

    classes: int | None  # their number; None: the output is the pooled hidden state
    # first, last, mean: of the positions that are not padding;
    # position_0: position 0, which attends to the row even if it is padding (BERT's code)
    pool: Literal["first", "mean", "last", "position_0"] = "first"
    # None, or the activation after a linear map that comes before the classes (BERT: tanh)
    pooler: str | None = "tanh"
    bias: bool = True  # whether each class has a bias
    name: str = "classification"  # key of its parameters and of its output
    pooler_width: int | None = None  # output width of the pooler; None: d_model

    __post_init__ = require_numbers(classes=1, pooler_width=1)


@dataclass(frozen=True)
class TokenClassification:
    """Classes of each position. Question answering has two: the begin and the end of the answer."""

    classes: int  # their number
    name: str = "token_classification"  # key of its parameters and of its output

    __post_init__ = require_numbers(classes=1)


def describe_block(block: Any) -> dict[str, Any]:
    """The description of the field `block`.

    A block that had an older name is described by that name, so that runs keep their names.
    """
    name = "pre_norm" if block is None else getattr(block, "__name__", "")
    if block is None or getattr(block, "__module__", None) == "jaxformer.models.blocks":
        for placement, function in PLACEMENTS.items():
            if function == name:
                return {"norm_placement": placement}
    return {"block": block}


@dataclass(frozen=True)
class ModelConfig:
    """A transformer stack.

    Widths follow the shape alphabet: D d_model, N heads, K kv_heads, H head_width, F d_ff.
    """

    vocab_size: int  # V; 0 if the model neither reads nor writes tokens (images)
    num_layers: int  # L
    d_model: int  # D
    num_heads: int  # N
    context_length: int  # longest sequence of training; a hard limit for learned positions only
    num_kv_heads: int | None = None  # K; None: as many as heads
    head_width: int | None = None  # H; None: D / N
    d_ff: int | None = None  # F; None: 4 D
    # an activation (relu gelu gelu_tanh silu relu2), a gate (glu swiglu geglu reglu ...),
    # models.Mixture, or your own; a tuple: one for each layer, repeated over the depth
    feedforward: Callable | str | tuple[Callable | str, ...] = "gelu_tanh"
    # of each sub-layer, and the last one: layer_norm, rms_norm, norm.one_plus_rms_norm (Gemma),
    # norm.Unscaled(), norm.no_norm, or your own: (config, width) -> Norm
    norm: Callable | str = "layer_norm"
    norm_eps: float = 1e-5  # added to the variance
    # how sub-layers meet the residual stream; None: blocks.pre_norm (GPT-2); post_norm (2017),
    # sandwich (Gemma 2), output_norm (OLMo 2), parallel (GPT-J), parallel_norms (GPT-NeoX),
    # or your own: (config, names) -> models.layer.Block; a tuple: one for each layer, repeated. The
    # first layer's block begins and ends the stream
    block: Callable | tuple[Callable, ...] | None = declared(
        default=None, metadata={"describe": describe_block}
    )
    # encoding of positions; a tuple: one for each layer, repeated over the depth;
    # your own: config -> a `bias` of ops.attention
    positions: (
        Learned
        | Sinusoidal
        | Axial
        | AttentionPositions
        | Rope
        | Alibi
        | Relative
        | tuple[Rope | None, ...]
        | Callable
        | None
    ) = Learned()
    # one for each layer, repeated over the depth: (causal(), causal() & window(255))
    masks: tuple[Mask, ...] = (causal(),)
    # None: mixers.attention; one of zoo; or your own; a tuple: one for each layer, repeated
    mixer: Callable | tuple[Callable | None, ...] | None = None
    # None: stacks.scan.stack; zoo.Reversible(); or your own (docs/your-own-stack.md)
    stack: Callable | None = None
    # True, False, or a regular expression that matches the maps with a bias, among:
    # query key value out up gate down norm patches
    use_bias: bool | str = True
    # from tokens or images to the first hidden states;
    # your own: config -> models.layer.Embedder
    embedding: Embedding | Patches | Callable = Embedding()
    # they read the hidden states; your own: config -> models.heads.Head; (): a stack without heads
    heads: tuple[LanguageModel | Classification | TokenClassification | Callable, ...] = (
        LanguageModel(),
    )
    # whether the language model reads by the embedding's table, and not by a matrix of its own
    tie_embeddings: bool = True
    dropout_rate: float = 0.0  # after the embedding and after each sub-layer
    attention_dropout_rate: float = 0.0  # of attention weights
    attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(H)
    attention_softcap: float | None = None  # c: scores become c tanh(score / c); None: no cap
    logit_softcap: float | None = None  # the same for the logits of the language model
    # std of initial weights; of projections back into the residual stream: init_std / sqrt(2 L);
    # MuP(base_width=64): one learning rate for all widths
    init_std: float | MuP = 0.02
    # of ops.attention: a name, your own Kernel, or a tuple in order of preference;
    # None: the fastest kernel that supports the call
    attention_implementation: Implementation = execution(None, unless=has_own_kernel)
    # what a layer keeps for the backward pass: everything (none), products with weights (dots),
    # what attention reads and what its kernels give (qkv), the results of kernels for long
    # attention (attention), only its input (full), or that in the memory of the host (offload);
    # or a policy of `jax.checkpoint`, which sees that input by the name layer_input
    remat: Literal["none", "dots", "qkv", "attention", "full", "offload"] | Callable = execution(
        "none"
    )
    # layers in one step of the scan; num_layers: no scan; None: the fastest on the platform
    unroll: int | None = execution(None)
    norm_placement: InitVar[str | None] = None  # in older files: the first name of `block`

    # jaxtyping binds the arguments of a call that raised, and leaves out an `InitVar`; hence the
    # default here
    def __post_init__(self, norm_placement: str | None = None):  # noqa: RUF033
        if norm_placement is not None:
            object.__setattr__(self, "block", block_of_placement(norm_placement))
        # the default has one value, so that equal models are equal
        if describe_block(self.block) == describe_block(None):
            object.__setattr__(self, "block", None)
        problems = itertools.chain(
            wrong_numbers(self, smallest_vocab=1 if isinstance(self.embedding, Embedding) else 0),
            _wrong_sizes(self),
            wrong_words(self),
            unknown_words(self),
            wrong_masks(self),
        )
        for problem in problems:
            raise ConfigError(f"model.{problem}")

    kv_heads = property(lambda self: self.num_kv_heads or self.num_heads)
    head_size = property(lambda self: self.head_width or self.d_model // self.num_heads)
    ff_width = property(lambda self: self.d_ff or 4 * self.d_model)
    # the number of positions: rows of a trained table, or unlimited
    position_limit = property(
        lambda self: (
            self.context_length if isinstance(_table(self), Learned | Axial) else sys.maxsize
        )
    )
    # std of initial values; with MuP: at the base width
    std = property(lambda self: getattr(self.init_std, "init_std", self.init_std))
    # width that the heads read: D, or 2 D for a reversible stack that returns both streams
    hidden_width = property(lambda self: self.d_model * getattr(self.stack, "streams", 1))

    @property
    def score_scale(self) -> float | None:
        """Factor of attention scores; None: 1 / sqrt(H)."""
        if self.attention_scale is None and isinstance(self.init_std, MuP):
            return self.init_std.score_scale(self.head_size)
        return self.attention_scale

    def has_bias(self, name: str) -> bool:
        """Whether the linear map or norm of that name has a bias."""
        if isinstance(self.use_bias, str):
            return bool(re.fullmatch(self.use_bias, name))
        return self.use_bias


def _table(config: ModelConfig) -> Any:
    """The positions of the config, or the table of its `AttentionPositions`."""
    if isinstance(config.positions, AttentionPositions):
        return config.positions.table
    return config.positions


def _wrong_sizes(config: ModelConfig) -> Iterator[str]:
    """One line for each size that does not fit another."""
    c = config
    positions = _table(config)
    patches = c.embedding if isinstance(c.embedding, Patches) else None
    if c.head_width is None and c.d_model % c.num_heads:
        yield (
            f"num_heads={c.num_heads} does not divide model.d_model={c.d_model}; "
            "choose a divisor or set model.head_width"
        )
    if c.num_heads % c.kv_heads:
        yield f"num_kv_heads={c.num_kv_heads} does not divide model.num_heads={c.num_heads}"
    if isinstance(positions, Axial):
        count, width = math.prod(positions.shape), sum(positions.widths)
        if (count, width) != (c.context_length, c.d_model):
            yield (
                f"positions={positions}: makes {count} positions of width {width}, "
                f"not {c.context_length} of {c.d_model}"
            )
    if isinstance(positions, Learned) and patches and patches.length != c.context_length:
        shown = f"images of {patches.image} in patches of {patches.patch}"
        yield f"context_length={c.context_length}: {shown} make {patches.length} positions"
    # the table of a user's embedding, and the width that a user's transform reads, are checked when
    # the head is made
    is_ours = isinstance(c.embedding, Embedding | Patches)
    table_width = 0 if patches else c.d_model
    # `wrong_words` refuses heads that are no tuple
    heads = c.heads if isinstance(c.heads, tuple) else ()
    reads_table = c.tie_embeddings and any(
        isinstance(head, LanguageModel) and not callable(head.transform) for head in heads
    )
    if is_ours and reads_table and c.hidden_width != table_width:
        yield (
            f"heads: a LanguageModel with tie_embeddings=True reads {c.hidden_width} features "
            f"by the embedding's rows, which have {table_width or 'none: they are patches'}; "
            "set it to False, or give other heads"
        )


@dataclass(frozen=True)
class EncoderDecoder:
    """Two stacks: the layers of the decoder also attend to the output of the encoder."""

    encoder: ModelConfig  # reads the source; it has no heads
    decoder: ModelConfig  # reads the target
    share_embeddings: bool = True  # whether both have one token table

    def __post_init__(self):
        if self.encoder.heads:
            raise ConfigError("encoder.heads: the encoder of a pair has none; give heads=()")
        one, other = ((half.vocab_size, half.d_model) for half in (self.encoder, self.decoder))
        if self.share_embeddings and one != other:
            sizes = (
                "encoder and decoder have tables of different (vocab_size, d_model), "
                f"{one} and {other}"
            )
            raise ConfigError(f"share_embeddings: {sizes}; make them equal or set it to False")
