"""Models as data and pure functions: `spec(config)`, `init(config, key)`, `apply(config, params, tokens)`.

One block serves encoders, decoders (`models.transformer`, of a `ModelConfig`) and pairs of them
(`models.encoder_decoder`, of an `EncoderDecoder`); the functions here take either config.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxformer.models import encoder_decoder, transformer
from jaxformer.models.config import (
    Alibi,
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
from jaxformer.models.mixture import Mixture
from jaxformer.models.presets import PRESETS
from jaxformer.models.transformer import Output, encode

__all__ = [
    "PRESETS", "Alibi", "Axial", "Classification", "Embedding", "EncoderDecoder", "LanguageModel", "Learned", "Mixture",
    "ModelConfig", "Output", "Patches", "Relative", "Sinusoidal", "TokenClassification", "apply", "encode", "init", "spec",
]  # fmt: skip


def _page(config: ModelConfig | EncoderDecoder) -> Any:
    return encoder_decoder if isinstance(config, EncoderDecoder) else transformer


def spec(config: ModelConfig | EncoderDecoder) -> Any:
    """Every parameter of the model, declared once: a tree of `params.Spec`."""
    return _page(config).spec(config)


def init(config: ModelConfig | EncoderDecoder, key: Array, dtype=jnp.float32) -> Any:
    """Initial parameters."""
    return _page(config).init(config, key, dtype)


def apply(config: ModelConfig | EncoderDecoder, params: Any, tokens: Array, **options) -> Output:
    """Logits and hidden states: `transformer.apply`, or `encoder_decoder.apply` with `source=` tokens; options are theirs."""
    return _page(config).apply(config, params, tokens, **options)
