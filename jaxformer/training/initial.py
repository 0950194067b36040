"""Where parameters start: `initial(spec, key) -> params`, or a text: the folder of a run, a Hugging Face folder or name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from jaxformer import params
from jaxformer.config import read_json
from jaxformer.errors import ConfigError
from jaxformer.training import checkpoint
from jaxformer.training.recipe import Recipe


@dataclass(frozen=True)
class FromRun:
    """The parameters of a run's checkpoint, averaged ones where it has them."""

    path: str  # the run's folder
    step: int | None = None  # which checkpoint; None: the newest

    def __call__(self, spec: params.Tree, key: jax.Array) -> params.Tree:
        folder = epath.Path(self.path).expanduser()
        config = folder / "config.json"
        if not config.is_file():
            raise ConfigError(f"initial={self.path}: no run folder, it has no config.json")
        description = read_json(config)
        if description.get("adaptation") is not None:
            raise ConfigError(f"initial={self.path}: it trained an adaptation; give a function with open_run(...).params")
        part = "params" if description.get("ema_decay") is None else "ema"
        return checkpoint.restore_params(folder / "checkpoints", params.abstract(spec), self.step, part=part)[1]


@dataclass(frozen=True)
class HuggingFace:
    """The weights of a folder with config.json and safetensors, or of a name on the hub."""

    name: str  # a folder, or a name such as openai-community/gpt2

    def __call__(self, spec: params.Tree, key: jax.Array) -> params.Tree:
        from jaxformer.interop import huggingface

        return huggingface.load(self.name).params


def from_text(text: str) -> FromRun | HuggingFace:
    """The run or the Hugging Face weights that a text names."""
    path = epath.Path(text).expanduser()
    if (path / "checkpoints").is_dir():
        return FromRun(text)
    if (path / "config.json").is_file() or not path.exists():
        return HuggingFace(text)
    raise ConfigError(f"initial={text}: neither a run's folder nor one with a Hugging Face config.json")


def check_initial(experiment: Any, recipe: Recipe) -> None:
    """Raises ConfigError where an adaptation freezes weights that would be random."""
    if experiment.initial is None and recipe.frozen != experiment.frozen:
        raise ConfigError("adaptation: it freezes weights that would be random; give --initial=RUN or a name of Hugging Face")


def first_params(initial: Callable | str | None, model_spec: params.Tree, recipe: Recipe) -> params.Tree:
    """The parameters that train, from `initial` (None: random), with factors as declared. ConfigError for wrong shapes."""
    if initial is None:
        return None
    key, start = jax.random.key(recipe.seed), from_text(initial) if isinstance(initial, str) else initial
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start(model_spec, key))
    if problem := params.mismatch(model_spec, tree):
        raise ConfigError(f"initial={initial}: parameter {problem}; give the model the sizes and heads of those weights")
    if "weights" not in recipe.spec or "weights" in model_spec:
        return tree
    added = {name: part for name, part in recipe.spec.items() if name != "weights"}
    return {"weights": tree, **params.init(added, key)}
