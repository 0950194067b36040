"""A checkpoint called with the arguments of transformers' `forward`, with the defaults of its class
that change numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.families import Checkpoint
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.zoo import detr

# model_types whose positions count the tokens that are not the pad token
COUNT_TOKENS = ("roberta", "longformer", "xlm-roberta", "camembert")


def apply(checkpoint: Checkpoint, **arguments: Any) -> models.Output:
    """Our output for their keyword arguments: arrays of NumPy, torch or JAX."""
    tokens, options = translate(checkpoint, **arguments)
    output = models.apply(checkpoint.config, checkpoint.params, tokens, **options)
    if "multiple_choice" in heads(checkpoint):
        return output.replace(logits=output.logits.reshape(np.shape(arguments["input_ids"])[:2]))
    return output


def translate(checkpoint: Checkpoint, **arguments: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Their arguments as tokens (or images) and options of `models.apply`. The choices of a
    question become rows."""
    given = {name: np.asarray(value) for name, value in arguments.items()}
    if "multiple_choice" in heads(checkpoint):
        given = {name: array.reshape(-1, *array.shape[2:]) for name, array in given.items()}
    if checkpoint.model_type == "detr":
        tokens, options = call_detector(checkpoint.config, given)
    elif isinstance(checkpoint.config, EncoderDecoder):
        tokens, options = call_pair(given)
    elif "pixel_values" in given:
        tokens, options = given.pop("pixel_values").transpose(0, 2, 3, 1), {}
        if "noise" in given:
            options["inputs"] = {"noise": given.pop("noise")}
        if "bool_masked_pos" in given:
            options["inputs"] = {"masked": given.pop("bool_masked_pos") > 0}
    else:
        tokens, options = call_text(checkpoint, checkpoint.config, given)
    assert not given, f"left over: {', '.join(given)}"
    options = {name: value for name, value in options.items() if value is not None}
    return jax.tree.map(jnp.asarray, (tokens, options))


def heads(checkpoint: Checkpoint) -> set[str]:
    return {head.name for head in models.last_stack(checkpoint.config).heads}


# Each function removes its arguments from `given`.
def call_detector(config: EncoderDecoder, given: dict[str, np.ndarray]) -> tuple[Any, dict]:
    images = given.pop("pixel_values").transpose(0, 2, 3, 1)
    options = dict(source=images, segment_ids=given.pop("decoder_attention_mask", None))
    if "pixel_mask" in given:
        mask = detr.feature_mask(config.encoder.embedding.backbone, given.pop("pixel_mask"))
        options["source_segment_ids"] = mask
    return detr.object_numbers(config, len(images)), options


def call_pair(given: dict[str, np.ndarray]) -> tuple[np.ndarray, dict]:
    target = given.pop("decoder_input_ids")
    if "input_features" in given:
        source = given.pop("input_features").transpose(0, 2, 1)
        return target, dict(
            source=source,
            segment_ids=given.pop("decoder_attention_mask", None),
            positions=slots(target),
        )
    source = given.pop("input_ids")
    return target, dict(
        source=source,
        source_segment_ids=given.pop("attention_mask", None),
        source_positions=slots(source),
        segment_ids=given.pop("decoder_attention_mask", None),
        positions=slots(target),
    )


def call_text(
    checkpoint: Checkpoint, config: ModelConfig, given: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict]:
    tokens = given.pop("input_ids")
    if "position_ids" in given:  # which begin at the offset of the table
        positions = np.atleast_2d(given.pop("position_ids")) - getattr(
            config.positions, "offset", 0
        )
    elif checkpoint.model_type in COUNT_TOKENS:
        is_token = tokens != checkpoint.tokens.pad
        positions = np.where(is_token, is_token.cumsum(axis=1) - 1, -1)
    elif checkpoint.model_type == "opt" or callable(config.positions):  # of Falcon
        positions = None  # those of the real tokens are counted
    else:
        positions = slots(tokens)
    token_types = given.pop("token_type_ids", None)
    options = dict(segment_ids=given.pop("attention_mask", None), positions=positions)
    options |= dict(
        token_types=token_types if getattr(config.embedding, "token_types", 0) else None
    )
    if checkpoint.model_type == "longformer":
        flags = given.pop("global_attention_mask", None)
        flags = global_tokens(checkpoint, tokens) if flags is None else flags > 0
        options |= dict(inputs=None if flags is None else {"global_tokens": flags})
    return tokens, options


def slots(tokens: np.ndarray) -> np.ndarray:
    """Positions that count padding, too."""
    return np.arange(tokens.shape[1])[None]


def global_tokens(checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray | None:
    """The default global tokens: a question (what is before the first separator), a choice (what is
    after the second)."""
    first, places = (tokens == checkpoint.tokens.sep).argmax(axis=1)[:, None], slots(tokens)
    if "span" in heads(checkpoint):
        return places < first
    return places > first + 1 if "multiple_choice" in heads(checkpoint) else None
