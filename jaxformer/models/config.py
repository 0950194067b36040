"""What a model is, as data."""

import itertools
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field as declared, fields
from typing import Any, Literal, get_args, get_origin

from jaxformer.config import execution
from jaxformer.config.moved import PLACEMENTS, block_of_placement
from jaxformer.errors import ConfigError, check_numbers, check_whole
from jaxformer.masks import Mask, causal
from jaxformer.models.mup import MuP
from jaxformer.ops.attention import has_own_kernel, unknown_implementation
from jaxformer.ops.attention.kernel import Implementation
from jaxformer.ops.bias import check_t5
from jaxformer.ops.feedforward import ACTIVATIONS, GATES
from jaxformer.ops.positions import Rope


def unknown_words(config: Any) -> Iterator[str]:
    """One line for each field of a dataclass that is declared `Literal[...]` and holds another word."""
    for field in fields(config):
        word, words = getattr(config, field.name), get_args(field.type)
        if get_origin(field.type) is Literal and word not in words:
            yield f"{field.name}={word!r}: expected one of {', '.join(words)}"


def check_words(config: Any) -> None:
    """The `__post_init__` of a dataclass that refuses unknown words."""
    for problem in unknown_words(config):
        raise ConfigError(f"{type(config).__name__}.{problem}")


def require_numbers(**least: int | float) -> Callable:
    """The `__post_init__` of a dataclass that refuses numbers below these, and unknown words."""

    def check(config: Any) -> None:
        check_words(config)
        check_numbers(f"{type(config).__name__}.", config, **least)

    return check


@dataclass(frozen=True)
class Learned:
    """A trained row for each of `context_length` positions."""

    offset: int = 0  # rows in front that no token reads (RoBERTa, BART: 2)

    def __post_init__(self):
        check_whole("Learned.offset", self.offset, least=0)


@dataclass(frozen=True)
class Sinusoidal:
    """The fixed table of the 2017 paper, or one of its two relatives (see `ops.positions.sinusoidal`)."""

    layout: Literal["interleaved", "half"] = "interleaved"  # sines and cosines in turn, or sines first
    spacing: Literal["paper", "tensor2tensor"] = "paper"  # of the frequencies

    __post_init__ = check_words


@dataclass(frozen=True)
class Axial:
    """Two small trained tables, for the lines and columns of a grid that positions fill: Kitaev et al. 2020, appendix."""

    shape: tuple[int, int]  # lines and columns of the grid
    widths: tuple[int, int]  # features that each table gives; their sum is d_model

    def __post_init__(self):
        for name, pair in (("shape", self.shape), ("widths", self.widths)):
            if len(pair) != 2:
                raise ConfigError(f"Axial.{name}={pair}: expected two numbers, of lines and of columns")
            for number in pair:
                check_whole(f"Axial.{name}", number)


@dataclass(frozen=True)
class AttentionPositions:
    """Positions that every attention adds to the inputs of its queries and keys, not of its values: DETR.

    Carion et al. 2020, arXiv:2005.12872. A cross-attention adds those of the decoder to its queries and those of the encoder
    to its keys. `table`: Learned(), Sinusoidal(), Axial(...), or a function `config -> models.position_table.PositionTable`.
    """

    table: Any  # what is added

    def __post_init__(self):
        if not (isinstance(self.table, Learned | Sinusoidal | Axial) or callable(self.table)):
            expected = "Learned(), Sinusoidal(), Axial(...), or a function config -> PositionTable"
            raise ConfigError(f"AttentionPositions.table={self.table!r}: expected {expected}")


@dataclass(frozen=True)
class Alibi:
    """Scores fall with the distance, at a slope for each head (`ops.alibi`)."""


@dataclass(frozen=True)
class Relative:
    """A trained bias on scores by head and bucket of distance, one table for all layers: T5 (`ops.t5`)."""

    buckets: int = 32  # rows of the table
    max_distance: int = 128  # from here on all distances share a bucket
    bidirectional: bool = True  # whether keys behind the query have buckets of their own

    def __post_init__(self):
        check_t5(self.buckets, self.max_distance, self.bidirectional, "Relative.")


@dataclass(frozen=True)
class Embedding:
    """A row for each token."""

    scale: float = 1.0  # factor of the rows (2017: the square root of d_model)
    norm: bool = False  # a norm at the end (BERT)
    token_types: int = 0  # kinds of segments, each with a row that is added (BERT: 2)

    __post_init__ = require_numbers(scale=-math.inf, token_types=0)


@dataclass(frozen=True)
class Patches:
    """A linear map of each patch of an image `[B, height, width, channels]`, row by row: Dosovitskiy et al. 2020, ViT."""

    image: tuple[int, int] = (224, 224)  # height and width in pixels
    patch: tuple[int, int] = (16, 16)  # height and width in pixels
    channels: int = 3  # of a pixel
    class_token: bool = True  # a trained row before the patches
    mask_token: bool = False  # a trained row for patches that `inputs={"masked": flags [B, patches]}` hides

    def __post_init__(self):
        check_numbers("Patches.", self, channels=1)
        for name, pair in (("image", self.image), ("patch", self.patch)):
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise ConfigError(f"Patches.{name}={pair}: expected two numbers, of the height and the width")
            for number in pair:
                check_whole(f"Patches.{name}", number)
        for size, length in zip(self.image, self.patch, strict=True):
            if size % length:
                raise ConfigError(f"embedding.patch={self.patch} does not divide embedding.image={self.image}")

    # patches down and across, and positions of one image
    grid = property(lambda self: (self.image[0] // self.patch[0], self.image[1] // self.patch[1]))
    length = property(lambda self: math.prod(self.grid) + self.class_token)


@dataclass(frozen=True)
class LanguageModel:
    """A logit for each token of the vocabulary at each position."""

    transform: str | None = None  # an activation: a linear map, it and a norm come first (BERT's masked language model)
    bias: bool = False  # one for each token of the vocabulary
    scale: float = 1.0  # factor of the hidden states: D^-0.5 in T5 v1.0
    name: str = "language_model"  # key of its parameters and of its output

    __post_init__ = require_numbers(scale=-math.inf)


@dataclass(frozen=True)
class Classification:
    """Classes of a whole sequence: a linear map of one of its positions or of their mean."""

    classes: int | None  # None: the output is what was pooled
    # first, last: of what is not padding; position_0: slot 0, which sees the row even as padding (BERT's code)
    pool: Literal["first", "mean", "last", "position_0"] = "first"
    pooler: str | None = "tanh"  # an activation behind a linear map before the classes (BERT: tanh); None: neither
    bias: bool = True  # one for each class
    name: str = "classification"  # key of its parameters and of its output
    pooler_width: int | None = None  # None: as wide as what it reads

    __post_init__ = require_numbers(classes=1, pooler_width=1)


@dataclass(frozen=True)
class TokenClassification:
    """Classes of each position. Two of them are the logits of the begin and end of a span (question answering)."""

    classes: int  # how many there are
    name: str = "token_classification"  # key of its parameters and of its output

    __post_init__ = require_numbers(classes=1)


NORMS = "layer_norm", "rms_norm"


def describe_block(block: Any) -> dict[str, Any]:
    """The field `block` as a config's description has it: by the first name where it had one, so that runs keep theirs."""
    name = "pre_norm" if block is None else getattr(block, "__name__", "")
    if block is None or getattr(block, "__module__", None) == "jaxformer.models.blocks":
        for placement, function in PLACEMENTS.items():
            if function == name:
                return {"norm_placement": placement}
    return {"block": block}


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
    # an activation (relu gelu gelu_tanh silu relu2), a gate (glu swiglu geglu reglu ...), models.Mixture, or your own;
    # a tuple: one a layer, repeated, or as many as layers
    feedforward: Callable | str | tuple[Callable | str, ...] = "gelu_tanh"
    # of every sub-layer, and the last one: layer_norm, rms_norm, norm.Unscaled(), norm.no_norm, or (config, width) -> Norm
    norm: Callable | str = "layer_norm"
    norm_eps: float = 1e-5  # added to the variance
    # how sub-layers meet the residual stream; None: blocks.pre_norm (GPT-2); post_norm (2017), sandwich (Gemma 2),
    # output_norm (OLMo 2), parallel (GPT-J), or your own: (config, names) -> models.layer.Block
    block: Callable | None = declared(default=None, metadata={"describe": describe_block})
    # how tokens know their place; a tuple: one a layer, repeated; your own: config -> what `bias` of ops.attention may be
    positions: (
        Learned | Sinusoidal | Axial | AttentionPositions | Rope | Alibi | Relative | tuple[Rope | None, ...] | Callable | None
    ) = Learned()
    masks: tuple[Mask, ...] = (causal(),)  # one a layer, repeated over the depth: (causal(), causal() & window(255))
    # None: mixers.attention; one of zoo; or your own; a tuple: one a layer, repeated
    mixer: Callable | tuple[Callable | None, ...] | None = None
    stack: Callable | None = None  # None: stacks.scan.stack; zoo.Reversible(); or your own
    # True, False, or which have one: a regular expression over query key value out up gate down norm patches
    use_bias: bool | str = True
    # from tokens or images to the first hidden states, or `config -> models.embedding.Embedder` of your own
    embedding: Embedding | Patches | Callable = Embedding()
    # what reads the hidden states: these, or `config -> models.heads.Head` of your own; () for a bare stack
    heads: tuple[LanguageModel | Classification | TokenClassification | Callable, ...] = (LanguageModel(),)
    tie_embeddings: bool = True  # the language model reads by the embedding's rows, not by a matrix of its own
    dropout_rate: float = 0.0  # after the embedding and after each sub-layer
    attention_dropout_rate: float = 0.0  # of attention weights
    attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(H)
    attention_softcap: float | None = None  # c: scores become c tanh(score / c); None: as they are
    logit_softcap: float | None = None  # the same for the logits of the language model
    # projections back into the residual stream start at init_std / sqrt(2 L); MuP(base_width=64): one rate for all widths
    init_std: float | MuP = 0.02
    # of ops.attention: a name, a Kernel of your own, or a tuple in order of preference; None: the fastest that can
    attention_implementation: Implementation = execution(None, unless=has_own_kernel)
    # kept of a layer for the backward pass: everything, products with weights, long attention, or only its input
    remat: Literal["none", "dots", "attention", "full"] = execution("none")
    unroll: int | None = execution(None)  # layers of one scan step, num_layers: no scan; None: the fastest on the platform
    norm_placement: InitVar[str | None] = None  # older files: the first name of `block`

    # the default is for jaxtyping, which binds the arguments of a call that raised, without an `InitVar`
    def __post_init__(self, norm_placement: str | None = None):  # noqa: RUF033
        if norm_placement is not None:
            object.__setattr__(self, "block", block_of_placement(norm_placement))
        if describe_block(self.block) == describe_block(None):  # one value for the default, so that equal models are equal
            object.__setattr__(self, "block", None)
        for problem in itertools.chain(_wrong_sizes(self), _wrong_words(self), unknown_words(self), _wrong_masks(self)):
            raise ConfigError(f"model.{problem}")

    kv_heads = property(lambda self: self.num_kv_heads or self.num_heads)
    head_size = property(lambda self: self.head_width or self.d_model // self.num_heads)
    ff_width = property(lambda self: self.d_ff or 4 * self.d_model)
    # how many positions there are: rows of a trained table, or no end of them
    position_limit = property(lambda self: self.context_length if isinstance(_table(self), Learned | Axial) else sys.maxsize)
    std = property(lambda self: getattr(self.init_std, "init_std", self.init_std))  # of initial values, at the base of a MuP
    # of what the heads read: D, or 2 D of a reversible stack that gives both streams
    hidden_width = property(lambda self: self.d_model * getattr(self.stack, "streams", 1))

    @property
    def score_scale(self) -> float | None:
        """Factor of attention scores; None: 1 / sqrt(H)."""
        if self.attention_scale is None and isinstance(self.init_std, MuP):
            return self.init_std.score_scale(self.head_size)
        return self.attention_scale

    def has_bias(self, name: str) -> bool:
        """Whether the linear map or norm of that name has a bias."""
        return bool(re.fullmatch(self.use_bias, name)) if isinstance(self.use_bias, str) else self.use_bias


def _table(config: ModelConfig) -> Any:
    """The positions, wherever they are added."""
    return config.positions.table if isinstance(config.positions, AttentionPositions) else config.positions


def _wrong_sizes(config: ModelConfig) -> Iterator[str]:
    """One line for each number that is out of range or does not fit another."""
    c, positions = config, _table(config)
    patches = c.embedding if isinstance(c.embedding, Patches) else None
    optional = "num_kv_heads", "head_width", "d_ff", "unroll"
    for name in ("vocab_size", "num_layers", "d_model", "num_heads", "context_length", *optional):
        size: Any = getattr(c, name)
        least = 0 if name == "vocab_size" and not isinstance(c.embedding, Embedding) else 1
        if size is None and name in optional:
            continue
        if not isinstance(size, numbers.Integral) or size < least:
            yield f"{name}={size}: must be a whole number of at least {least}" + (", or None" if name in optional else "")
    for name, least in (("norm_eps", 0), ("init_std", 0), ("attention_scale", -math.inf)):
        value: Any = getattr(c, name)
        if value is None or isinstance(value, MuP):
            continue
        if not (math.isfinite(value) and value >= least):
            yield f"{name}={value}: must be a finite number" + (" of at least 0" if least == 0 else ", or None")
    for name in ("dropout_rate", "attention_dropout_rate"):
        if not 0 <= getattr(c, name) < 1:
            yield f"{name}={getattr(c, name)}: must be in [0, 1)"
    for name in ("attention_softcap", "logit_softcap"):
        if getattr(c, name) is not None and not 0 < getattr(c, name) < math.inf:
            yield f"{name}={getattr(c, name)}: must be above 0 and finite, or None"
    if c.head_width is None and c.d_model % c.num_heads:
        yield (f"num_heads={c.num_heads} does not divide model.d_model={c.d_model}; choose a divisor or set model.head_width")
    if c.num_heads % c.kv_heads:
        yield f"num_kv_heads={c.num_kv_heads} does not divide model.num_heads={c.num_heads}"
    if isinstance(positions, Axial):
        made, wanted = (math.prod(positions.shape), sum(positions.widths)), (c.context_length, c.d_model)
        if made != wanted:
            yield f"positions={positions}: makes {made[0]} positions of width {made[1]}, not {wanted[0]} of {wanted[1]}"
    if isinstance(positions, Learned) and patches and patches.length != c.context_length:
        shown = f"images of {patches.image} in patches of {patches.patch}"
        yield f"context_length={c.context_length}: {shown} make {patches.length} positions"
    table = 0 if patches else c.d_model
    heads = c.heads if isinstance(c.heads, tuple) else ()  # what is none is refused by `_wrong_words`
    own = not isinstance(c.embedding, Embedding | Patches)  # whose table is seen when the head is made
    if not own and c.tie_embeddings and c.hidden_width != table and any(isinstance(h, LanguageModel) for h in heads):
        have = f"which have {table or 'none: they are patches'}; set it to False, or give other heads"
        yield f"heads: a LanguageModel with tie_embeddings=True reads {c.hidden_width} features by the embedding's rows, {have}"


def _wrong_words(config: ModelConfig) -> Iterator[str]:
    """One line for each field that holds none of the words, functions or expressions that it may."""
    words = ", ".join((*ACTIVATIONS, *GATES))
    for feedforward in config.feedforward if isinstance(config.feedforward, tuple) else (config.feedforward,):
        if isinstance(feedforward, str) and feedforward not in (*ACTIVATIONS, *GATES):
            yield f"feedforward={feedforward!r}: expected one of {words}"
        if feedforward in ACTIVATIONS.values() or (getattr(feedforward, "__module__", None) or "").startswith("jax."):
            name = getattr(feedforward, "__name__", feedforward)
            own = "a function of yours is config -> models.layer.FeedForward"
            yield f"feedforward={name}: an activation is given by its name, one of {words}; {own}"
    if isinstance(config.norm, str) and config.norm not in NORMS:
        yield f"norm={config.norm!r}: expected one of {', '.join(NORMS)}"
    for name in ("mixer", "feedforward"):
        if getattr(config, name) == ():
            yield f"{name}=(): expected one for a layer at least"
    if config.block is not None and not callable(config.block):
        yield f"block={config.block!r}: expected a function such as blocks.post_norm, or None"
    if (expected := unknown_implementation(config.attention_implementation)) is not None:
        yield f"attention_implementation={config.attention_implementation!r}: {expected}"
    if not isinstance(config.heads, tuple):
        yield f"heads={config.heads!r}: expected a tuple, such as (LanguageModel(),), with a comma behind a single head"
        return
    for head, field in itertools.product(config.heads, ("transform", "pooler")):
        name = getattr(head, field, None)
        if name is not None and name not in ACTIVATIONS:
            yield f"heads: {field}={name!r}: expected one of {', '.join(ACTIVATIONS)}, or None"


def _wrong_masks(config: ModelConfig) -> Iterator[str]:
    patterns = config.masks
    if not (isinstance(patterns, tuple) and patterns and all(isinstance(m, Mask) for m in patterns)):
        shown = " ".join(repr(patterns).split())  # an array takes many lines
        yield f"masks={shown}: expected a tuple of values of jaxformer.masks: (causal(),), or a pattern of layers"
    for mask in patterns:
        if not mask.static or mask.offset is not None:
            yield f"masks: {mask} holds arrays or an offset; give masks of numbers, and rows by apply(segment_ids=...)"
        for count in mask.head_counts() - {1, config.num_heads}:
            yield f"masks: {mask} has masks of {count} heads: expected num_heads={config.num_heads}, or 1"


@dataclass(frozen=True)
class EncoderDecoder:
    """Two stacks: the layers of the decoder also attend to the output of the encoder."""

    encoder: ModelConfig  # reads the source; it has no heads
    decoder: ModelConfig  # reads the target
    share_embeddings: bool = True  # one token table for both

    def __post_init__(self):
        if self.encoder.heads:
            raise ConfigError("encoder.heads: the encoder of a pair has none; give heads=()")
        one, other = ((half.vocab_size, half.d_model) for half in (self.encoder, self.decoder))
        if self.share_embeddings and one != other:
            sizes = f"encoder and decoder have tables of different (vocab_size, d_model), {one} and {other}"
            raise ConfigError(f"share_embeddings: {sizes}; make them equal or set it to False")
