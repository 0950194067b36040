"""`is_causal` of config.json: a decoder whose tokens also see the tokens after them.

Embedding models that were made from a decoder have it. transformers reads it since version 5.2, for
every model with a causal mask.
"""

from dataclasses import replace

from jaxformer.errors import ConfigError
from jaxformer.families.settings import Json
from jaxformer.masks import causal, full
from jaxformer.models.config import Alibi, EncoderDecoder, ModelConfig

IS_CAUSAL = "is_causal"


def read_causality(c: Json, config: ModelConfig | EncoderDecoder) -> ModelConfig | EncoderDecoder:
    """The config without its causal mask, if `c` says so.

    Raises ConfigError for a model of two stacks, of windows or of ALiBi. With ALiBi, theirs prefers
    the tokens that are furthest ahead.
    """
    stack = config.decoder if isinstance(config, EncoderDecoder) else config
    is_decoder = any(causal() in mask.conjuncts() for mask in stack.masks)
    # a null is false in transformers
    if c.get(IS_CAUSAL, True) or not is_decoder:
        return config
    is_plain = stack is config and stack.masks == (causal(),)
    if not is_plain or isinstance(stack.positions, Alibi) or callable(stack.positions):
        raise ConfigError(
            f"config.json: {IS_CAUSAL}={c[IS_CAUSAL]!r}: only a model of one stack, without "
            "windows and ALiBi, can be read so; delete the entry to read it as a decoder"
        )
    return replace(stack, masks=(full(),))


def causal_twin(config: ModelConfig | EncoderDecoder) -> ModelConfig | None:
    """The config with a causal mask in place of none; None for other configs."""
    if isinstance(config, EncoderDecoder) or config.masks != (full(),):
        return None
    return replace(config, masks=(causal(),))
