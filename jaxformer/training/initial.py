"""Where parameters start: `initial(spec, key) -> params`, or a text: the folder of a run, a Hugging Face folder or name."""

import logging
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from jaxformer import config, models, params
from jaxformer.config import read_json
from jaxformer.errors import ConfigError
from jaxformer.parallel.mesh import Mesh
from jaxformer.training import checkpoint
from jaxformer.training.recipe import Recipe
from jaxformer.training.run_folder import runs_of

log = logging.getLogger("jaxformer")
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
        description = self._description()
        if description.get("adaptation") is not None:
            return self._merged()
        part = "params" if description.get("ema_decay") is None else "ema"
        folder = epath.Path(self.path).expanduser() / "checkpoints"
        return checkpoint.restore_params(folder, params.abstract(spec), self.step, part=part)[1]

    def _merged(self) -> params.Tree:
        """The parameters of a run that trained an adaptation, which only its experiment can merge."""
        from jaxformer.training.run import open_run

        run = open_run(self.path, self.step)
        on_one_device = replace(run.experiment, mesh=Mesh(data=1))
        return jax.device_get(replace(run, experiment=on_one_device).params)

    def differences(self, model: Any) -> list[str]:
        """A line for each field in which `model` computes something else than the model of the run."""
        described, here = self._description().get("model", {}), config.describe(model)
        new_defaults = config.flat(here).keys() - config.flat(described).keys() - config.flat(config.changes(model)).keys()
        return [
            f"{name}: {_shown.repr(old)} -> {_shown.repr(new)}"
            for name, (old, new) in config.diff(described, here).items()
            if name not in new_defaults and has_effect(name, old, new)
        ]

    def _description(self) -> dict[str, Any]:
        file = epath.Path(self.path).expanduser() / "config.json"
        if not file.is_file():
            raise ConfigError(f"initial={self.path}: no run folder, it has no config.json")
        return read_json(file)


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


def from_text(text: str, runs: epath.PathLike = "runs") -> FromRun | HuggingFace:
    """What a text names: a run by its folder or its name in `runs`, an experiment's newest run, or Hugging Face weights."""
    path = epath.Path(text).expanduser()
    if (path / "checkpoints").is_dir():
        return FromRun(text)
    if not path.exists() and "/" not in text:
        inside = epath.Path(runs) / text
        if (inside / "checkpoints").is_dir():
            return FromRun(str(inside))
        if found := [folder.path for folder in runs_of(text, runs) if folder.checkpoints.is_dir()]:
            log.info("initial=%s: the newest run is %s", text, found[-1])
            return FromRun(str(found[-1]))
    if (path / "config.json").is_file() or not path.exists():
        return HuggingFace(text)
    raise ConfigError(f"initial={text}: neither a run's folder nor one with a Hugging Face config.json")


def check_initial(experiment: Any, recipe: Recipe) -> None:
    """Raises ConfigError where an adaptation freezes weights that would be random."""
    if experiment.initial is None and recipe.frozen != experiment.frozen:
        raise ConfigError("adaptation: it freezes weights that would be random; give --initial=RUN or a name of Hugging Face")


def first_params(initial: Callable | str | None, model: Any, recipe: Recipe, runs: epath.PathLike = "runs") -> params.Tree:
    """The parameters that train, from `initial` (None: random), with factors as declared. ConfigError for wrong shapes.

    Shapes do not tell the base of a rotation, a mask or an activation: a warning names the fields that differ.
    """
    if initial is None:
        return None
    model_spec = models.spec(model)
    key, start = jax.random.key(recipe.seed), from_text(initial, runs) if isinstance(initial, str) else initial
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start(model_spec, key))
    if problem := params.mismatch(model_spec, tree):
        raise ConfigError(f"initial={initial}: parameter {problem}; give the model the sizes and heads of those weights")
    if differing := getattr(start, "differences", lambda model: [])(model):
        log.warning("initial=%s: the model differs from that of these weights in %s", initial, "; ".join(differing))
    if "weights" not in recipe.spec or "weights" in model_spec:
        return tree
    added = {name: part for name, part in recipe.spec.items() if name != "weights"}
    return {"weights": tree, **params.init(added, key)}
