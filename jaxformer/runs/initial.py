"""Where parameters start: `initial(spec, key) -> params`, such as `FromRun`.

Weights of Hugging Face are in `families`.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from jaxformer import config, params
from jaxformer.config import no_links, read_json, storage
from jaxformer.errors import ConfigError
from jaxformer.models.differences import list_differences
from jaxformer.runs import checkpoint_reader
from jaxformer.training.recipe import Recipe

# fields of a model that decide neither its parameters nor its numbers
HOW_IT_RUNS = ("type", "remat", "unroll", "attention_implementation", "grouped_implementation")


@dataclass(frozen=True)
class FromRun:
    """The parameters of a run's checkpoint; the averaged ones if it has them."""

    path: str  # the run's folder
    step: int | None = None  # which checkpoint; None: the newest

    def __call__(self, spec: params.Tree, key: jax.Array) -> params.Tree:
        description = self.description()
        if description.get("adaptation") is not None:
            raise ConfigError(
                f"initial={self.path}: it trained an adaptation; give a function with"
                " open_run(...).params"
            )
        run = epath.Path(self.path).expanduser()
        folder = run / "checkpoints"
        # an optimizer may average, too: the checkpoint says so
        is_averaged = description.get("ema_decay") is not None or has_average(folder, self.step)
        part = "ema" if is_averaged else "params"
        no_links.check_folder(folder, run)
        # The parameters of the run's objective do not belong to its model.
        leave_out = () if "objective" in spec else ("objective",)
        return checkpoint_reader.restore_params(
            folder, params.abstract(spec), self.step, part, leave_out
        )[1]

    def differences(self, model: Any) -> list[str]:
        """A line for each field that makes `model` compute something else than the run's model."""
        described = self.description().get("model", {})
        here = config.describe(model)
        new_defaults = (
            config.flat(here).keys()
            - config.flat(described).keys()
            - config.flat(config.changes(model)).keys()
        )
        differing = config.diff(described, here)
        return list_differences(
            {name: pair for name, pair in differing.items() if name not in new_defaults}
        )

    def options(self, model: Any) -> str:
        """The options that give `model` the fields of the run's model; empty where none differ.

        A field whose value is no number or text, such as a mask, is only named.
        """
        there = self.description().get("model", {})
        here = config.describe(model)
        words = []
        for name, value in there.items():
            if name in HOW_IT_RUNS or value == here.get(name):
                continue
            if isinstance(value, int | float | str | None):
                words.append(f"--model.{name.replace('_', '-')}={value}")
            else:
                words.append(f"its model.{name}")
        return " ".join(words)

    def description(self) -> dict[str, Any]:
        """The run's config.json."""
        file = epath.Path(self.path).expanduser() / "config.json"
        if not storage.is_file(file):
            raise ConfigError(f"initial={self.path}: no run folder, it has no config.json")
        return read_json(file, "", file.parent, name=str)


def has_average(folder: epath.Path, step: int | None) -> bool:
    """Whether the newest checkpoint (or that of `step`) has averaged parameters.

    Damaged checkpoints are passed over; where none can be read, the restore says why.
    """
    found = checkpoint_reader.steps(folder)
    for each in reversed(found) if step is None else [step]:
        with suppress(checkpoint_reader.Damaged, checkpoint_reader.CheckpointError):
            leaves = checkpoint_reader.read_manifest(folder / str(each))["leaves"]
            return any(name.startswith("ema/") for name in leaves)
    return False


def check_initial(experiment: Any, recipe: Recipe) -> None:
    """Raises ConfigError where an adaptation would freeze random weights."""
    if experiment.initial is None and recipe.frozen != experiment.frozen:
        raise ConfigError(
            "adaptation: it freezes weights that would be random; give --initial=RUN or a name of"
            " Hugging Face"
        )
