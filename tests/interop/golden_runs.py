"""The golden models of tests/golden, run by us: what they were called with, in our words, and what they answered."""

import jax.numpy as jnp
import numpy as np

from jaxformer import models
from tests import golden

# their output's name -> our head's, and how ours looks in theirs
HEADS = {
    "logits": None,
    "prediction_logits": "language_model",
    "seq_relationship_logits": "next_sentence",
    "start_logits": "span",
    "end_logits": "span",
    "pooler_output": "pooled",
}


def call(config, kept: dict[str, np.ndarray], dtype) -> tuple:
    """(tokens or images, options of `models.apply`)."""
    given = {name.removeprefix("inputs/"): value for name, value in kept.items() if name.startswith("inputs/")}
    if "pixel_values" in given:
        return (jnp.asarray(given["pixel_values"].transpose(0, 2, 3, 1), dtype),), {}
    mask = given.get("attention_mask")
    if "decoder_input_ids" in given:
        options = {"source": given["input_ids"], "source_segment_ids": mask}
        return (given["decoder_input_ids"],), options | {"segment_ids": given.get("decoder_attention_mask")}
    options = {"segment_ids": mask, "token_types": given.get("token_type_ids"), "positions": given.get("position_ids")}
    if "global_attention_mask" in given:
        options["inputs"] = {"global_tokens": given["global_attention_mask"] > 0}
    if "rotations" in kept:
        options["constants"] = np.broadcast_to(kept["rotations"], (config.num_layers, *kept["rotations"].shape))
    return (given["input_ids"],), {name: value for name, value in options.items() if value is not None}


def answers(config, params, kept: dict[str, np.ndarray], dtype=jnp.float32) -> dict:
    """Our outputs under their names."""
    arguments, options = call(config, kept, dtype)
    output = models.apply(config, params, *arguments, **options)
    found = {"last_hidden_state": output.hidden, "encoder_last_hidden_state": output.source}
    for theirs, ours in HEADS.items():
        if f"outputs/{theirs}" in kept:
            found[theirs] = output.logits if ours is None else output.heads[ours]
    if "start_logits" in found:
        found["start_logits"], found["end_logits"] = found["start_logits"][..., 0], found["end_logits"][..., 1]
    return {name: value for name, value in found.items() if f"outputs/{name}" in kept}


def loss(config, params, kept: dict[str, np.ndarray], dtype=jnp.float32):
    """(their loss, our outputs under their names)."""
    found = answers(config, params, kept, dtype)
    weights = {name: kept[f"loss/{name}"] for name in found if f"loss/{name}" in kept}
    return sum(jnp.sum(weight.astype(found[name].dtype) * found[name]) for name, weight in weights.items()), found


def real(kept: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Where their output counts, broadcastable to it."""
    mask = kept.get("inputs/decoder_attention_mask", kept.get("inputs/attention_mask"))
    if name == "encoder_last_hidden_state":
        mask = kept["inputs/attention_mask"]
    shape = kept[f"outputs/{name}"].shape
    if mask is None or shape[:2] != mask.shape:
        return np.ones((1,) * len(shape), bool)
    return (mask > 0).reshape(mask.shape + (1,) * (len(shape) - 2))


__all__ = ["answers", "call", "golden", "loss", "real"]
