"""The parts of a model of several towers: `load(folder, part="vision")` reads one of them.

A part is read as if it had a folder of its own: with its entries of config.json and its tensors.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.interop.safetensors import list_names


class Part(NamedTuple):
    """A part of a folder."""

    settings: str  # the entry of config.json that has its settings
    model_type: str  # whose family reads it
    architecture: str  # whose heads it has
    tensors: tuple[str, ...]  # beginnings of their names
    shared: tuple[str, ...] = ()  # entries of the whole that go before those of the part


PROJECTED = ("projection_dim",)
CLIP = {
    "vision": Part(
        "vision_config",
        "clip_vision_model",
        "CLIPVisionModelWithProjection",
        ("vision_model.", "visual_projection."),
        PROJECTED,
    ),
    "text": Part(
        "text_config",
        "clip_text_model",
        "CLIPTextModelWithProjection",
        ("text_model.", "text_projection."),
        PROJECTED,
    ),
}
SIGLIP = {
    "vision": Part("vision_config", "siglip_vision_model", "SiglipVisionModel", ("vision_model.",)),
    "text": Part("text_config", "siglip_text_model", "SiglipTextModel", ("text_model.",)),
}
PARTS = {"clip": CLIP, "siglip": SIGLIP}  # by the model_type of the whole


def part_of(file: safetensors.Files, name: str | None, known: Collection[str]) -> safetensors.Files:
    """The folder as its part `name` would have it; the folder itself without a name.

    `known` are the model_types that can be read. Raises ConfigError, with the names of the parts,
    for a folder that can only be read by parts, and for a part that it does not have.
    """
    kind = file.config.get("model_type")
    parts = PARTS.get(str(kind), {})
    if name is None and parts:
        calls = " or ".join(f"load(folder, part={each!r})" for each in parts)
        raise ConfigError(f"{file.folder}/config.json: a {kind!r} is read by parts: {calls}")
    if name is None:
        _refuse_unknown(file, known)
        return file
    if name not in parts:
        expected = f"expected {list_names(list(parts), repr)}" if parts else "it has no parts"
        raise ConfigError(f"{file.folder}: part={name!r} of a {kind!r}: {expected}")
    part = parts[name]
    # as in transformers, an entry of this name in older files goes before the other
    older = file.config.get(f"{part.settings}_dict")
    settings = file.config.get(part.settings) if older is None else older
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{file.folder}/config.json: {part.settings}={settings!r}: expected the settings of "
            f"the part {name!r}"
        )
    shared = {each: file.config[each] for each in part.shared if each in file.config}
    own = {"model_type": part.model_type, "architectures": [part.architecture]}
    tensors = {each: about for each, about in file.names.items() if each.startswith(part.tensors)}
    return replace(file, config=settings | shared | own, names=tensors, generation={})


def _refuse_unknown(file: safetensors.Files, known: Collection[str]) -> None:
    """Raises ConfigError for a folder that is not known, but whose text model is."""
    of_text = file.config.get("text_config")
    # a stranger's file may have a list in the place of a name, which no set takes
    kind = str(of_text.get("model_type")) if isinstance(of_text, dict) else None
    if str(file.config.get("model_type")) in known or kind not in known:
        return
    raise ConfigError(
        f"{file.folder}/config.json: model_type {file.config.get('model_type')!r} is not "
        f"supported; its text_config is a {kind!r}, which is: open the whole in transformers, save "
        "its language model by save_pretrained, and load that folder"
    )
