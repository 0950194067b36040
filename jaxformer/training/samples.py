"""Text that a model continues: a prompt checked before a step is spent, a sample at the end."""

import math
from typing import Any

import jax

from jaxformer import models
from jaxformer.decoding import generate
from jaxformer.errors import ConfigError
from jaxformer.models import heads
from jaxformer.models.config import Learned
from jaxformer.training.experiment import Sample


def continues_text(model: Any) -> bool:
    """Whether a model predicts the next token from those before it: a masked language model does not."""
    if not isinstance(model, models.ModelConfig) or heads.language_model(model) is None:
        return False
    length = min(model.context_length, 64)
    # `blocks` is NumPy's work; `dense` would compile a dozen small programs
    return not any(mask.blocks(length, length, 1)[..., 0, -1].any() for mask in model.masks)


def prompt_tokens(model: Any, sample: Sample, tokenizer: Any) -> list[int]:
    """The sample's prompt as tokens. Raises ConfigError where the model cannot go on from it. None starts from token 0."""
    prompt = [0] if sample.prompt is None else tokenizer.encode(sample.prompt)
    if not prompt:
        raise ConfigError("sample.prompt is empty; give at least one character, or None")
    if isinstance(model.positions, Learned) and len(prompt) >= model.context_length:
        raise ConfigError(f"sample.prompt is {len(prompt)} tokens, no room in {model.context_length} learned positions")
    return prompt


def continue_text(model: Any, params: Any, sample: Sample, tokenizer: Any, seed: int, precision: str) -> str:
    """The sample's prompt and what the model makes of it."""
    prompt = prompt_tokens(model, sample, tokenizer)
    room = model.context_length - len(prompt) if isinstance(model.positions, Learned) else math.inf
    dtype, key = jax.numpy.dtype(precision), jax.random.key(seed)
    tokens = int(min(sample.tokens, room))
    (out,) = generate(model, params, [prompt], tokens, how=sample.sampling, key=key, dtype=dtype)
    return tokenizer.decode([*prompt, *out])
