"""The golden models of tests/golden, run by us: what they were called with, in our words, and what
they answered."""

import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxformer import families, models
from jaxformer.interop import safetensors
from jaxformer.models import EncoderDecoder
from jaxformer.zoo import detr, distilled, masked_autoencoder, masked_patches
from tests import golden
from tests.golden.families import feature_mask

# their output's name -> our head's, and how ours looks in theirs
HEADS = {
    "logits": None,
    "prediction_logits": "language_model",
    "seq_relationship_logits": "next_sentence",
    "sop_logits": "sentence_order",
    "start_logits": "span",
    "end_logits": "span",
    "pooler_output": "pooled",
    "image_embeds": "features",
    "text_embeds": "features",
    "pred_boxes": "boxes",
}


def call(config, kept: dict[str, np.ndarray], dtype) -> tuple:
    """(tokens or images, options of `models.apply`)."""
    given = {
        name.removeprefix("inputs/"): jnp.asarray(x)
        for name, x in kept.items()
        if name.startswith("inputs/")
    }
    if "pixel_values" in given and isinstance(config, EncoderDecoder):
        images = given["pixel_values"].transpose(0, 2, 3, 1).astype(dtype)
        options = {"source": images}
        if "pixel_mask" in given:
            backbone = config.encoder.embedding.backbone
            options["source_segment_ids"] = detr.feature_mask(backbone, given["pixel_mask"])
        return (detr.object_numbers(config, len(images)),), options
    if "pixel_values" in given:
        options = {"inputs": {"noise": given["noise"]}} if "noise" in given else {}
        return (given["pixel_values"].transpose(0, 2, 3, 1).astype(dtype),), options
    mask = given.get("attention_mask")
    if "decoder_input_ids" in given:
        if "input_features" in given:
            source = given["input_features"].transpose(0, 2, 1).astype(dtype)
        else:
            source = given["input_ids"]
        options = {"source": source, "source_segment_ids": mask}
        return (given["decoder_input_ids"],), options | {
            "segment_ids": given.get("decoder_attention_mask")
        }
    options = {
        "segment_ids": mask,
        "token_types": given.get("token_type_ids"),
        "positions": given.get("position_ids"),
    }
    if "global_attention_mask" in given:
        # not traced
        options["inputs"] = {"global_tokens": kept["inputs/global_attention_mask"] > 0}
    if "rotations" in kept:
        options["constants"] = jnp.broadcast_to(
            kept["rotations"][None], (config.num_layers, *kept["rotations"].shape)
        )
    return (given["input_ids"],), {
        name: value for name, value in options.items() if value is not None
    }


def answers(config, params, kept: dict[str, np.ndarray], dtype=jnp.float32, **changed) -> dict:
    """Our outputs under their names; `changed` options go before those of the witness."""
    arguments, options = call(config, kept, dtype)
    options = {name: value for name, value in (options | changed).items() if value is not None}
    output = models.apply(config, params, *arguments, **options)
    found = {"last_hidden_state": output.hidden, "encoder_last_hidden_state": output.source}
    for theirs, ours in HEADS.items():
        if f"outputs/{theirs}" in kept:
            found[theirs] = output.logits if ours is None else output.heads[ours]
    if "outputs/cls_logits" in kept:
        tree = params["heads"]["distilled_classification"]
        both = distilled.class_and_distillation(tree, output.hidden)
        found["cls_logits"], found["distillation_logits"] = both
    if "outputs/ids_restore" in kept:
        noise, count = options["inputs"]["noise"], config.embedding.kept
        found["mask"] = masked_autoencoder.hidden_patches(noise, count)
        _, found["ids_restore"] = masked_autoencoder.order(noise)
        if config.heads:
            call_of_loss = config.embedding, config.heads[0], *arguments, output.logits, noise
            found["loss"] = masked_patches.reconstruction_loss(*call_of_loss)
    if "start_logits" in found:
        found["start_logits"], found["end_logits"] = (
            found["start_logits"][..., 0],
            found["end_logits"][..., 1],
        )
    return {name: value for name, value in found.items() if f"outputs/{name}" in kept}


def loss(config, params, kept: dict[str, np.ndarray], dtype=jnp.float32):
    """(their loss, our outputs under their names)."""
    found = answers(config, params, kept, dtype)
    weights = {name: kept[f"loss/{name}"] for name in found if f"loss/{name}" in kept}
    return sum(
        jnp.sum(weight.astype(found[name].dtype) * found[name]) for name, weight in weights.items()
    ), found


def real(kept: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Where their output counts, broadcastable to it."""
    mask = kept.get("inputs/decoder_attention_mask", kept.get("inputs/attention_mask"))
    if name == "encoder_last_hidden_state":
        mask = kept.get("inputs/attention_mask")
    shape = kept[f"outputs/{name}"].shape
    if name == "encoder_last_hidden_state" and "inputs/pixel_mask" in kept:
        mask = feature_mask(kept["inputs/pixel_mask"], shape[1])
    if mask is None or shape[:2] != mask.shape:
        return np.ones((1,) * len(shape), bool)
    return (mask > 0).reshape(mask.shape + (1,) * (len(shape) - 2))


def misses(found: dict, kept: dict[str, np.ndarray]) -> dict[str, float]:
    """How far each output lies from theirs where it counts; infinitely far if it is NaN."""
    far = {}
    for name, value in found.items():
        difference = np.where(
            real(kept, name), np.abs(np.asarray(value) - kept[f"outputs/{name}"]), 0
        )
        far[name] = float(np.nan_to_num(difference, nan=np.inf).max())
    return far


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """What a folder's weights are, by name."""
    file = safetensors.open_checkpoint(folder)
    return {name: file.read(name) for name in file.names}


def write(folder: Path, config: dict, arrays: dict[str, np.ndarray]) -> Path:
    """A checkpoint of these tensors."""
    entries = [
        (name, array.shape, array.dtype, lambda array=array: array)
        for name, array in arrays.items()
    ]
    safetensors.save_checkpoint(folder, config, entries)
    return folder


def altered(
    folder: Path, name: str, change: Callable[[dict], dict] | None = None, **config
) -> Path:
    """The golden checkpoint `name` with other tensors and settings; a setting of `...` is left
    out."""
    arrays = tensors(golden.folder(name))
    settings = {
        key: value for key, value in (golden.config(name) | config).items() if value is not ...
    }
    return write(folder / f"{name}-altered", settings, arrays if change is None else change(arrays))


def gradients(folder: Path, name: str, **options):
    """Their gradients as a tree of ours: a checkpoint like any other."""
    kept = folder / f"{name}-gradients"
    kept.mkdir()
    shutil.copy(golden.folder(name) / "config.json", kept)
    shutil.copy(golden.folder(name) / "gradients.safetensors", kept / "model.safetensors")
    return families.load(kept, **options).params
