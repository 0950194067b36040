"""A run that was trained, opened again (`run = jaxformer.open_run("runs/quickstart-1a2b3c4d")`); its scores and its texts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxformer import models, sharding
from jaxformer.data import batching, tokenizers
from jaxformer.decoding import generate
from jaxformer.errors import ConfigError
from jaxformer.evaluation.perplexity import perplexity
from jaxformer.models import heads
from jaxformer.models.config import Learned
from jaxformer.parallel import processes
from jaxformer.training import checkpoint
from jaxformer.training.experiment import Experiment, Sample
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
        score = evaluator(self.recipe, dataset, self.experiment.batch_size, self.experiment.eval_batches)
        return {"step": step, **score(trained)}

    def generate(self, prompt: str, seed: int = 0, **options) -> str:
        """The prompt and what the model makes of it; `options` are those of `Sample`."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.folder.path}: has no tokenizer, so there is no text to continue")
        if not continues_text(self.experiment.model):
            raise ConfigError(f"{self.folder.path}: its model sees later tokens or has no language model: it continues no text")
        sample = replace(self.experiment.sample, prompt=prompt, **options)
        experiment = self.experiment
        return continue_text(experiment.model, self.params, sample, self.tokenizer, seed, experiment.precision)


def open_run(path: epath.PathLike, step: int | None = None) -> Run:
    """The run in a folder. Raises ConfigError where there is none, or where its experiment is no longer the same."""
    folder = RunFolder(epath.Path(path))
    return Run(folder, open_experiment(folder), step)


def check_data(folder: RunFolder, metadata: dict, dataset: Any) -> None:
    """Raises ConfigError where the data are not those that the checkpoint was trained on."""
    if metadata["data_digest"] != dataset.digest:
        problem = f"the data changed since this run began (digest {metadata['data_digest'][:12]}, now {dataset.digest[:12]})"
        raise ConfigError(f"{folder.path}: {problem}; restore the file, or start a new run with another --name")


def continues_text(model: Any) -> bool:
    """Whether a model predicts the next token from those before it: a masked language model does not."""
    if not isinstance(model, models.ModelConfig) or heads.language_model(model) is None:
        return False
    length = min(model.context_length, 64)
    # `blocks` is NumPy's work; `dense` would compile a dozen small programs
    return not any(mask.blocks(length, length, 1)[..., 0, -1].any() for mask in model.masks)


def prompt_tokens(model: Any, sample: Sample, tokenizer: Any) -> list[int]:
    """The sample's prompt as tokens. Raises ConfigError where the model cannot go on from it. None starts from token 0."""
    prompt = [0] if sample.prompt is None else tokenizer.encode(sample.prompt)
    if not prompt:
        raise ConfigError("sample.prompt is empty; give at least one character, or None")
    if isinstance(model.positions, Learned) and len(prompt) >= model.context_length:
        raise ConfigError(f"sample.prompt is {len(prompt)} tokens, no room in {model.context_length} learned positions")
    return prompt


def continue_text(model: Any, params: Any, sample: Sample, tokenizer: Any, seed: int, precision: str) -> str:
    """The sample's prompt and what the model makes of it."""
    prompt = prompt_tokens(model, sample, tokenizer)
    room = model.context_length - len(prompt) if isinstance(model.positions, Learned) else math.inf
    dtype, key = jax.numpy.dtype(precision), jax.random.key(seed)
    tokens = int(min(sample.tokens, room))
    (out,) = generate(model, params, [prompt], tokens, how=sample.sampling, key=key, dtype=dtype)
    return tokenizer.decode([*prompt, *out])


def on_devices(mesh: jax.sharding.Mesh | None, rows: np.ndarray | None, size: int, batch: dict[str, Any]) -> dict:
    """A batch on the device, or on those of a mesh; `rows` are what this process has of `size`, None for all."""
    if rows is not None and mesh is not None:
        return processes.global_batch(mesh, size, batch)
    return jax.device_put(batch, None if mesh is None else sharding.batch_sharding(mesh, batch))


def evaluator(
    recipe: Recipe, dataset: Any, size: int, limit: int | None = None, mesh: jax.sharding.Mesh | None = None
) -> Callable[[Any], dict[str, float]]:
    """(trained) -> scores over the validation split, or over its first `limit` batches of `size` examples.

    The random key of a batch is a function of the seed and its number, the same at every evaluation.
    """

    @jax.jit
    def score(trained: Any, batch: dict[str, Any], number: Any):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), 2), number)
        return recipe.score(trained, batch, key)

    rows = processes.local_rows(mesh, size)
    batches = batching.ValidationBatches(dataset.validation, size, rows)
    count = len(batches) if limit is None else min(limit, len(batches))
    return lambda trained: perplexity(score, trained, (on_devices(mesh, rows, size, batches[i]) for i in range(count)))
