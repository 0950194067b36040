"""Models as data and pure functions: spec(model), init(model, key), apply(model, params, tokens).

A model is a `ModelConfig` (`models.transformer`), an `EncoderDecoder` (`models.encoder_decoder`),
or an object of your own with methods `spec()` and `apply(params, tokens, ...)`.
"""

# ruff: noqa: F401 (names that the package offers)
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxformer import params
from jaxformer.models import blocks, encoder_decoder, transformer
from jaxformer.models.config import (
    Alibi,
    AttentionPositions,
    Axial,
    Classification,
    Embedding,
    EncoderDecoder,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    Relative,
    Sinusoidal,
    TokenClassification,
)
from jaxformer.models.inputs import Inputs, Output
from jaxformer.models.mixture import Mixture
from jaxformer.models.mup import MuP
from jaxformer.models.presets import PRESETS


def spec(model: Any) -> Any:
    """Every parameter of the model, declared once: a tree of `params.Spec`."""
    return _functions(model).spec(model) if is_config(model) else model.spec()


def init(model: Any, key: Array, dtype=jnp.float32) -> Any:
    """Initial parameters."""
    return params.init(spec(model), key, dtype)


def apply(model: Any, params: Any, tokens: Array, **options) -> Output:
    """Logits and hidden states of tokens `[B, T]` or images; the options are fields of `Inputs`.

    Raises ConfigError for inputs that do not fit the model.
    """
    if not is_config(model):
        return model.apply(params, tokens, **options)

    def run(params: Any, inputs: Inputs) -> Output:
        output = _functions(model).encode(model, params, inputs)
        tree = params if isinstance(model, ModelConfig) else params["decoder"]
        of_call = inputs.padding_mask, inputs.inputs, inputs.tokens
        return transformer.read(last_stack(model), tree, output, *of_call)

    return transformer.in_explicit_axes(run)(params, Inputs(tokens, **options))


def encode(model: ModelConfig | EncoderDecoder, params: Any, tokens: Array, **options) -> Output:
    """`apply` without the heads. `.hidden` has the states after the final norm."""
    run = transformer.in_explicit_axes(partial(_functions(model).encode, model))
    return run(params, Inputs(tokens, **options))


def is_config(model: Any) -> bool:
    """Whether a model is one of this library; else it is the user's own object."""
    return isinstance(model, ModelConfig | EncoderDecoder)


def last_stack(model: ModelConfig | EncoderDecoder) -> ModelConfig:
    """The stack that the heads read: the model itself, or the decoder of an encoder-decoder."""
    return model.decoder if isinstance(model, EncoderDecoder) else model


def context_lengths(model: ModelConfig | EncoderDecoder) -> list[int]:
    """The `context_length` of each stack."""
    stacks = (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,)
    return [stack.context_length for stack in stacks]


def evaluation(model: Any) -> Any:
    """The model for evaluation: without dropout.

    A part with a method `evaluation()` is replaced by the result of that method.
    """
    if isinstance(model, EncoderDecoder):
        return replace(model, encoder=evaluation(model.encoder), decoder=evaluation(model.decoder))

    def to_score(part):
        return part.evaluation() if hasattr(part, "evaluation") else part

    if not isinstance(model, ModelConfig):
        return to_score(model)

    def each(parts):
        return tuple(map(to_score, parts)) if isinstance(parts, tuple) else to_score(parts)

    parts: Any = {field.name: each(getattr(model, field.name)) for field in fields(model)}
    return replace(model, **parts | dict(dropout_rate=0.0, attention_dropout_rate=0.0))


def _functions(model: ModelConfig | EncoderDecoder) -> Any:
    return encoder_decoder if isinstance(model, EncoderDecoder) else transformer
