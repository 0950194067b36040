"""Checks of the fields of configs, each field alone: numbers, words, masks.

`wrong_...` yield one line for each problem of a `ModelConfig`; `ModelConfig` raises the first.
`check_words` and `require_numbers` are the `__post_init__` of smaller config classes.
"""

import itertools
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import Mask
from jaxformer.models.mup import MuP
from jaxformer.ops.attention import unknown_implementation
from jaxformer.ops.feedforward import ACTIVATIONS, GATES

NORMS = "layer_norm", "rms_norm"
SIZES = "vocab_size", "num_layers", "d_model", "num_heads", "context_length"
OPTIONAL_SIZES = "num_kv_heads", "head_width", "d_ff", "unroll"


def unknown_words(config: Any) -> Iterator[str]:
    """One line for each `Literal[...]` field of a dataclass that holds none of its words.

    Where the field also takes a function, any function is right.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = (field.type, *get_args(field.type))
        takes_functions = Callable in kinds
        if takes_functions and callable(value):
            continue
        literal = field.type
        if takes_functions:
            literal = next((kind for kind in kinds if get_origin(kind) is Literal), None)
        words = get_args(literal)
        if get_origin(literal) is Literal and value not in words:
            own = ", or a function" if takes_functions else ""
            yield f"{field.name}={value!r}: expected one of {', '.join(words)}{own}"


def check_words(config: Any) -> None:
    """A dataclass's `__post_init__` that raises ConfigError for unknown words."""
    for problem in unknown_words(config):
        raise ConfigError(f"{type(config).__name__}.{problem}")


def require_numbers(**least: int | float) -> Callable:
    """A dataclass's `__post_init__` that raises ConfigError for unknown words and small numbers.

    `least` gives the smallest value of each field.
    """

    def check(config: Any) -> None:
        check_words(config)
        check_numbers(f"{type(config).__name__}.", config, **least)

    return check


def wrong_numbers(config: Any, smallest_vocab: int) -> Iterator[str]:
    """One line for each number of a `ModelConfig` that is out of its range."""
    for name in (*SIZES, *OPTIONAL_SIZES):
        size: Any = getattr(config, name)
        least = smallest_vocab if name == "vocab_size" else 1
        or_none = ", or None" if name in OPTIONAL_SIZES else ""
        if size is None and or_none:
            continue
        if not isinstance(size, numbers.Integral) or size < least:
            yield f"{name}={size}: must be a whole number of at least {least}{or_none}"
    for name, least, expected in (
        ("norm_eps", 0, " of at least 0"),
        ("init_std", 0, " of at least 0"),
        ("attention_scale", -math.inf, ", or None"),
    ):
        value: Any = getattr(config, name)
        if value is None or isinstance(value, MuP):
            continue
        if not (math.isfinite(value) and value >= least):
            yield f"{name}={value}: must be a finite number{expected}"
    for name in ("dropout_rate", "attention_dropout_rate"):
        rate = getattr(config, name)
        if not 0 <= rate < 1:
            yield f"{name}={rate}: must be in [0, 1)"
    for name in ("attention_softcap", "logit_softcap"):
        cap = getattr(config, name)
        if cap is not None and not 0 < cap < math.inf:
            yield f"{name}={cap}: must be above 0 and finite, or None"


def wrong_words(config: Any) -> Iterator[str]:
    """One line for each field of a `ModelConfig` whose word or function is not allowed."""
    feedforwards = config.feedforward
    for feedforward in feedforwards if isinstance(feedforwards, tuple) else (feedforwards,):
        yield from _wrong_feedforward(feedforward)
    if isinstance(config.norm, str) and config.norm not in NORMS:
        yield f"norm={config.norm!r}: expected one of {', '.join(NORMS)}"
    for name in ("mixer", "feedforward", "block"):
        if getattr(config, name) == ():
            yield f"{name}=(): expected one for a layer at least"
    blocks = config.block if isinstance(config.block, tuple) else (config.block,)
    for block in blocks:
        if not callable(block) and config.block is not None:
            yield f"block={config.block!r}: expected a function such as blocks.post_norm, or None"
    if (expected := unknown_implementation(config.attention_implementation)) is not None:
        yield f"attention_implementation={config.attention_implementation!r}: {expected}"
    if not isinstance(config.heads, tuple):
        yield (
            f"heads={config.heads!r}: expected a tuple, such as (LanguageModel(),), "
            "with a comma behind a single head"
        )
        return
    for head, field in itertools.product(config.heads, ("transform", "pooler")):
        name = getattr(head, field, None)
        is_own = field == "transform" and callable(name)
        if name is not None and not is_own and name not in ACTIVATIONS:
            yield f"heads: {field}={name!r}: expected one of {', '.join(ACTIVATIONS)}, or None"


def _wrong_feedforward(feedforward: Any) -> Iterator[str]:
    words = ", ".join((*ACTIVATIONS, *GATES))
    if isinstance(feedforward, str) and feedforward not in (*ACTIVATIONS, *GATES):
        yield f"feedforward={feedforward!r}: expected one of {words}"
    module = getattr(feedforward, "__module__", None) or ""
    if feedforward in ACTIVATIONS.values() or module.startswith("jax."):
        name = getattr(feedforward, "__name__", feedforward)
        own = "a function of yours is config -> models.layer.FeedForward"
        yield f"feedforward={name}: an activation is given by its name, one of {words}; {own}"


def wrong_masks(config: Any) -> Iterator[str]:
    """One line for each mask of a `ModelConfig` that is no mask of layers, or has other heads."""
    masks = config.masks
    if not (isinstance(masks, tuple) and masks and all(isinstance(mask, Mask) for mask in masks)):
        shown = " ".join(repr(masks).split())  # an array takes many lines
        yield (
            f"masks={shown}: expected a tuple of values of jaxformer.masks: (causal(),), "
            "or a pattern of layers"
        )
    for mask in masks:
        if not mask.static or mask.offset is not None:
            yield (
                f"masks: {mask} holds arrays or an offset; "
                "give masks of numbers, and rows by apply(segment_ids=...)"
            )
        for count in mask.head_counts() - {1, config.num_heads}:
            yield (
                f"masks: {mask} has masks of {count} heads: "
                f"expected num_heads={config.num_heads}, or 1"
            )
