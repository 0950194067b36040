"""Where parameters start: `initial(spec, key) -> params`, or a text: the folder of a run, a Hugging Face folder or name."""

import reprlib
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from jaxformer import config, models, params
from jaxformer.config import no_links, read_json, storage
from jaxformer.errors import ConfigError
from jaxformer.runs import checkpoint_reader
from jaxformer.training.recipe import Recipe

_shown = reprlib.Repr()
_shown.maxother = _shown.maxstring = 200

# fields of a model that do not change what trained weights compute
WITHOUT_EFFECT = ("remat", "unroll", "attention_implementation", "dropout_rate", "attention_dropout_rate", "context_length")


@dataclass(frozen=True)
class FromRun:
    """The parameters of a run's checkpoint, averaged ones where it has them."""

    path: str  # the run's folder
    step: int | None = None  # which checkpoint; None: the newest

    def __call__(self, spec: params.Tree, key: jax.Array) -> params.Tree:
        description = self.description()
        if description.get("adaptation") is not None:
            raise ConfigError(f"initial={self.path}: it trained an adaptation; give a function with open_run(...).params")
        part = "params" if description.get("ema_decay") is None else "ema"
        run = epath.Path(self.path).expanduser()
        folder = run / "checkpoints"
        no_links.check_folder(folder, run)
        return checkpoint_reader.restore_params(folder, params.abstract(spec), self.step, part=part)[1]

    def differences(self, model: Any) -> list[str]:
        """A line for each field in which `model` computes something else than the model of the run."""
        described, here = self.description().get("model", {}), config.describe(model)
        new_defaults = config.flat(here).keys() - config.flat(described).keys() - config.flat(config.changes(model)).keys()
        return [
            f"{name}: {_shown.repr(old)} -> {_shown.repr(new)}"
            for name, (old, new) in config.diff(described, here).items()
            if name not in new_defaults and has_effect(name, old, new)
        ]

    def description(self) -> dict[str, Any]:
        """The run's config.json."""
        file = epath.Path(self.path).expanduser() / "config.json"
        if not storage.is_file(file):
            raise ConfigError(f"initial={self.path}: no run folder, it has no config.json")
        return read_json(file, "", file.parent, name=str)


def has_effect(name: str, old: Any, new: Any) -> bool:
    """Whether a field of a model, by its dotted path, changes what trained weights compute."""
    parts = name.split(".")
    if "init_std" in parts:  # of muP, which divides logits, it is no number
        return not all(isinstance(value, int | float | None) for value in (old, new))
    return not any(part in WITHOUT_EFFECT for part in parts)


@dataclass(frozen=True)
class HuggingFace:
    """The weights of a folder with config.json and safetensors, or of a name on the hub."""

    name: str  # a folder, or a name such as openai-community/gpt2

    def __call__(self, spec: params.Tree, key: jax.Array) -> params.Tree:
        from jaxformer.interop import huggingface

        return huggingface.load(self.name).params

    def differences(self, model: Any) -> list[str]:
        """A line for each field in which `model` computes something else than the model of these weights."""
        from jaxformer.interop import huggingface

        if not isinstance(model, models.ModelConfig | models.EncoderDecoder):
            return []
        differing = huggingface.differences(huggingface.read_config(self.name), model)
        return [
            f"{name}: {_shown.repr(old)} -> {_shown.repr(new)}"
            for name, (old, new) in differing.items()
            if has_effect(name, old, new)
        ]


def check_initial(experiment: Any, recipe: Recipe) -> None:
    """Raises ConfigError where an adaptation freezes weights that would be random."""
    if experiment.initial is None and recipe.frozen != experiment.frozen:
        raise ConfigError("adaptation: it freezes weights that would be random; give --initial=RUN or a name of Hugging Face")
