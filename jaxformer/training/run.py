"""A run that was trained, opened again: `run = jaxformer.open_run("runs/quickstart-1a2b3c4d")`."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from etils import epath

from jaxformer.data import batching, tokenizers
from jaxformer.errors import ConfigError
from jaxformer.training import checkpoint, samples, scoring
from jaxformer.training.experiment import Experiment
from jaxformer.training.metrics import read_records
from jaxformer.training.recipe import Recipe, build
from jaxformer.training.run_folder import RunFolder, open_experiment
from jaxformer.training.state import init_state


@dataclass(frozen=True, eq=False)
class Run:
    """A run's experiment, and what it wrote. Parts are read on first use; `step` None is the newest checkpoint."""

    folder: RunFolder
    experiment: Experiment
    step: int | None = None

    @cached_property
    def recipe(self) -> Recipe:
        """The experiment taken apart."""
        return build(self.experiment)

    @cached_property
    def checkpoint(self) -> tuple[int, Any, dict]:
        """(step, the tree that trained, metadata): averaged parameters where there are any."""
        abstract = jax.eval_shape(partial(init_state, self.recipe))
        part = "params" if abstract.ema is None else "ema"
        return checkpoint.restore_params(self.folder.checkpoints, abstract.params, self.step, part=part)

    @property
    def params(self) -> Any:
        """The model's parameters; of an adaptation, merged."""
        return self.recipe.weights(self.checkpoint[1])

    @property
    def metrics(self) -> list[dict]:
        """The records of metrics.jsonl."""
        return read_records(self.folder.metrics)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the data, or None."""
        return tokenizers.load(self.folder.tokenizer) if self.folder.tokenizer.is_file() else None

    def evaluate(self) -> dict[str, Any]:
        """Scores on the validation split."""
        dataset = batching.open_dataset(self.experiment.data, self.experiment.model)
        step, trained, metadata = self.checkpoint
        check_data(self.folder, metadata, dataset)
        score = scoring.evaluator(self.recipe, dataset, self.experiment.batch_size, self.experiment.eval_batches)
        return {"step": step, **score(trained)}

    def generate(self, prompt: str, seed: int = 0, **options) -> str:
        """The prompt and what the model makes of it; `options` are those of `Sample`."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.folder.path}: has no tokenizer, so there is no text to continue")
        if not samples.continues_text(self.experiment.model):
            raise ConfigError(f"{self.folder.path}: its model sees later tokens or has no language model: it continues no text")
        sample = replace(self.experiment.sample, prompt=prompt, **options)
        experiment = self.experiment
        return samples.continue_text(experiment.model, self.params, sample, self.tokenizer, seed, experiment.precision)


def open_run(path: epath.PathLike, step: int | None = None) -> Run:
    """The run in a folder. Raises ConfigError where there is none, or where its experiment is no longer the same."""
    folder = RunFolder(epath.Path(path))
    return Run(folder, open_experiment(folder), step)


def check_data(folder: RunFolder, metadata: dict, dataset: Any) -> None:
    """Raises ConfigError where the data are not those that the checkpoint was trained on."""
    if metadata["data_digest"] != dataset.digest:
        raise ConfigError(
            f"{folder.path}: the data changed since this run began (digest {metadata['data_digest'][:12]}, now "
            f"{dataset.digest[:12]}); restore the file, or start a new run with another --name"
        )
