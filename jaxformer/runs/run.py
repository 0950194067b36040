"""A run that was trained, opened again (`run = jaxformer.open_run("runs/quickstart-1a2b3c4d")`); its scores and its texts."""

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxformer import config, models, parallel, sharding
from jaxformer.config import storage
from jaxformer.data import batching, tokenizers
from jaxformer.data.mixing import Mixed
from jaxformer.data.sources import Question
from jaxformer.decoding import Beams, round_to_int8, stream
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import (
    answers,
    as_strings,
    before_stop,
    best_text,
    continuation,
    new_tokens_for,
    stop_strings,
)
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.perplexity import mean_scores
from jaxformer.models import heads
from jaxformer.parallel import processes
from jaxformer.params import random_key
from jaxformer.runs import checkpoint, checkpoint_reader, references
from jaxformer.runs.metrics import read_records
from jaxformer.runs.names import NAMES
from jaxformer.runs.run_folder import RunFolder, allow, open_experiment
from jaxformer.training.experiment import Experiment, Sample
from jaxformer.training.recipe import Recipe, build
from jaxformer.training.references import without_adaptation
from jaxformer.training.step import abstract_state, state_shardings

ANY_BYTE = "<0xFF>"  # as tokenizers with a token for each byte name one of these

log = logging.getLogger("jaxformer")


@dataclass(frozen=True, eq=False)
class Run:
    """A run's experiment, and what it wrote. Parts are read on first use; `step` None is the newest checkpoint.

    With `average` n, the parameters are the mean of those of this checkpoint and of the n - 1 before it, at multiples of
    `checkpoints.every`. An adaptation's are merged first. ConfigError where one of these was not kept.
    """

    folder: RunFolder
    experiment: Experiment
    step: int | None = None
    average: int = 1
    weights_of: Callable[[str], Callable] | None = None  # reads a reference that is a text and names no run of ours

    recipe = cached_property(lambda self: build(self.experiment))
    metrics = property(lambda self: read_records(self.folder.metrics))  # the records of metrics.jsonl

    @cached_property
    def checkpoint(self) -> tuple[int, Any, dict]:
        """(step, the tree that trained, metadata): averaged parameters where there are any, split over the mesh."""
        return self._mean(lambda tree: tree)

    def _mean(self, of: Callable[[Any], Any]) -> tuple[int, Any, dict]:
        """(step, the mean of what `of` makes of the tree of each checkpoint, metadata)."""
        abstract = abstract_state(self.recipe, None if self.mesh is None else state_shardings(self.recipe, self.mesh))
        part, leaves = "params" if abstract.ema is None else "ema", abstract.params
        place = self.folder.for_library(self.folder.checkpoints)
        restore = partial(checkpoint_reader.restore_params, place, leaves, part=part)
        step, tree, metadata = restore(self.step)
        if self.average == 1:
            return step, of(tree), metadata
        kept, total = checkpoint.steps(self.folder.checkpoints), of(tree)
        for other in neighbours(self.folder, kept, step, self.experiment.checkpoints.every, self.average):
            total = jax.tree.map(jax.numpy.add, total, of(restore(other)[1]))
        return step, jax.tree.map(lambda leaf: leaf / self.average, total), metadata

    @cached_property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The run's mesh, with Auto axes; None for one device, and with a warning where it does not fit the devices here."""
        config = replace(self.experiment.mesh, explicit=False, backend="jit")
        try:
            return parallel.run_mesh(config, self.experiment.batch_size // self.experiment.accumulation)
        except ConfigError as error:
            warning = (
                "%s: %s: this goes on with one device, and its memory alone; --mesh.data=1 says so, or choose another mesh"
            )
            log.warning(warning, self.folder.path, error)
            return None

    @property
    def model(self) -> Any:
        """The model as it is evaluated: without dropout."""
        return models.evaluation(self.experiment.model)

    @property
    def params(self) -> Any:
        """The model's parameters; of an adaptation, merged. Those of an objective are none of the model's."""
        return self._made(self.recipe.weights)

    def _made(self, of: Callable[[Any], Any]) -> Any:
        """What `of` makes of the tree that trained."""
        with self.on_mesh():
            if self.average > 1 and self.experiment.adaptation is not None:  # a mean of factors is not that of products
                return self._mean(of)[1]
            return of(self.checkpoint[1])

    @cached_property
    def references(self) -> dict[str, Any]:
        """The parameters of the frozen models that the objective reads. ConfigError where one is another than in training."""
        if not self.experiment.references:
            return {}
        # not under the mesh: what is read is on one device until it is split
        on_mesh = replace(self.experiment, mesh=replace(self.experiment.mesh, explicit=False, backend="jit"))
        found = references.read_references(on_mesh, self.mesh, self.folder.path.parent, self.weights_of)
        with self.on_mesh():
            _, trained, metadata = self.checkpoint
            references.check_references(self.folder, metadata, found.digests)
            return found.params | self.recipe.parts.base(trained)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """A context whose computations are split over the run's mesh; without one, on one device, also within another mesh."""
        if self.mesh is None and jax.sharding.get_abstract_mesh().empty:
            return contextlib.nullcontext()
        return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()) if self.mesh is None else self.mesh)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the data, or None."""
        if not storage.is_file(self.folder.tokenizer):
            return None
        return tokenizers.load(self.folder.tokenizer, self.folder.path)

    def evaluate(self, int8: bool = False) -> dict[str, Any]:
        """Scores on the validation split; under `int8` also those with weights rounded to 8 bits (`decoding.quantize`)."""
        dataset = batching.open_dataset(self.experiment.data, self.experiment.model)
        with self.on_mesh():
            step, _, metadata = self.checkpoint
        check_data(self.folder, metadata, dataset)
        merged = without_adaptation(self.experiment)  # as `params` are, and as `quantize` takes them
        recipe = build(merged)
        score = evaluator(merged, recipe, dataset, self.mesh, self.folder.path)
        score = partial(score, step=step, references=self.references)
        with self.on_mesh():
            trained = self._made(self.recipe.parts.merged)
            scores = {"step": step, **score(trained, final=True)}
            if int8:
                rounded = score(jax.jit(partial(round_to_int8, recipe.spec))(trained), whole=True)
                known = ("examples", "scored", "unit", scores["unit"])
                scores |= {f"int8_{name}": value for name, value in rounded.items() if name not in known}
            return scores

    def generate(self, prompt: str, seed: int = 0, **options) -> str:
        """The prompt and what the model makes of it, or its answer to a source; `options` are those of `stream`."""
        return self.opening(prompt) + "".join(self.stream(prompt, seed, **options))

    def opening(self, prompt: str) -> str:
        """The text to show before an answer: the prompt that it continues, or nothing."""
        return "" if hasattr(self.experiment.data, "question") else prompt

    def stream(
        self, prompt: str, seed: int = 0, filters=(), stop: Sequence[str] | str = (), special_tokens: bool = False, **options
    ) -> Iterator[str]:
        """Pieces of the text after a prompt, as they are made (`Beams`: one), up to the first `stop`; options of `Sample`.

        The text also ends where the model writes the token that ends a document of its data. With `special_tokens`, names
        of control tokens in the prompt, such as <|im_start|> of a chat template, are these tokens; otherwise they are
        text like any other, so that nobody who writes a part of the prompt can give commands.
        """
        stop = as_strings(stop)
        sample, question = self._ask(prompt, options, special_tokens)
        if isinstance(sample.sampling, Beams):
            yield best_text(self.continue_all([prompt], seed, filters, stop, special_tokens, **options)[0])
            return
        model, decode, shown, tokens = self.experiment.model, self.tokenizer.decode, 0, question.prompt
        with self.on_mesh():
            new, (limit,) = [], new_tokens_for(model, sample.tokens, [tokens])
            for piece in stream(
                model, self.params, tokens, limit, source=question.source,
                sampling=sample.sampling, filters=filters, key=random_key(seed), stop=stop_strings(decode, stop),
                stop_tokens=self._ends(), dtype=jax.numpy.dtype(self.experiment.precision),
            ):  # fmt: skip
                new += piece
                text = before_stop(continuation(decode, tokens, new), stop)
                final = _final_part(decode, self.tokenizer.id_of(ANY_BYTE), tokens, new, text)
                ready = len(final) - _held_back(final, stop)
                yield text[shown:ready]
                shown = max(shown, ready)
            yield before_stop(continuation(decode, tokens, new), stop)[shown:]

    def continue_all(
        self, prompts: Sequence[str], seed: int = 0, filters=(), stop: Sequence[str] | str = (), special_tokens: bool = False,
        **options,
    ) -> list[list[str]]:  # fmt: skip
        """Texts after each prompt: one, or up to `n_best` of a beam search. Arguments are those of `stream`."""
        if isinstance(prompts, str):
            raise ConfigError("continue_all: a prompt alone would be continued letter by letter; give a list: [prompt]")
        model, samples = self.experiment.model, [self._ask(prompt, options, special_tokens) for prompt in prompts]
        most, how = samples[0][0].tokens, samples[0][0].sampling
        with self.on_mesh():
            return answers(
                model, self.params, [question for _, question in samples], self.tokenizer, most, how, seed=seed,
                precision=self.experiment.precision, stop=stop, stop_tokens=self._ends(), filters=filters,
            )  # fmt: skip

    def _ends(self) -> tuple[int, ...]:
        return ends_of(self.experiment.data, self.tokenizer)

    def _ask(self, prompt: str, options: dict[str, Any], special_tokens: bool = False) -> tuple[Sample, Question]:
        """(how to continue a prompt, its tokens). Raises ConfigError where the run continues no text."""
        if self.tokenizer is None:
            advice = "its data may have a method generate(run, key, folder), which makes other answers"
            raise ConfigError(f"{self.folder.path}: has no tokenizer, so there is no text to continue; {advice}")
        if not writes_text(self.experiment):
            reasons = "sees later tokens, has no language model, or reads a source, which data make of a text by `question`"
            raise ConfigError(f"{self.folder.path}: it continues no text: its model {reasons}")
        sample = replace(self.experiment.sample, prompt=prompt, **options)
        tokenizer = self.tokenizer.reading_special_tokens() if special_tokens else self.tokenizer
        return sample, ask(self.experiment, sample, tokenizer)


def open_run(
    path: epath.PathLike, step: int | None = None, overrides: Sequence[str] = (), average: int = 1, trust: bool = False,
    weights_of: Callable[[str], Callable] | None = None,
) -> Run:  # fmt: skip
    """The run in a folder; `overrides` as on the command line, of fields that decide no numbers: `--mesh.tensor=4`.

    To open a run is to run its code: one that this user did not train on this machine needs `trust`, once. `weights_of(text)`
    reads a reference that is a text and names no run of ours, such as `families.HuggingFace`. Raises ConfigError
    for such a one, where there is no run, or where its experiment is no longer the same.
    """
    folder = RunFolder(epath.Path(path))
    if trust:
        allow(folder)
    experiment = open_experiment(folder)
    changed = config.override(experiment, overrides, NAMES) if overrides else experiment
    if config.fingerprint(changed) != config.fingerprint(experiment):
        allowed = "only --mesh.… and --metrics may change here"
        raise ConfigError(f"{folder.path}: {' '.join(overrides)} would make it another run; {allowed}")
    return Run(folder, changed, step, average, weights_of)


def _held_back(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end may not be shown yet: they may become a stop string."""
    starts = (string[:n] for string in strings for n in range(len(string), 0, -1))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


def _final_part(decode: Callable, any_byte: int | None, prompt: Sequence[int], new: Sequence[int], text: str) -> str:
    """What of a text, that of new tokens, no further token can change: a character may have several tokens.

    Where tokens are bytes (`any_byte` is one of them), a run of them is decoded as a whole, and one byte more may turn all
    of its characters into U+FFFD. Elsewhere the bytes of an unfinished character are one U+FFFD.
    """
    if any_byte is None:
        return text.removesuffix("\ufffd")
    other = continuation(decode, prompt, [*new, any_byte])
    differences = (i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two)
    return text[: next(differences, min(len(text), len(other)))].rstrip("\ufffd")


def check_data(folder: RunFolder, metadata: dict, dataset: Any) -> None:
    """Raises ConfigError where the data are not those that the checkpoint was trained on."""
    before = str(metadata.get("data_digest"))
    if before not in (dataset.digest, *dataset.former_digests):
        problem = f"the data changed since this run began (digest {before[:12]}, now {dataset.digest[:12]})"
        initial = f"--initial={shlex.quote(str(folder.path))} --name=..."
        advice = f"restore them, or train on from its parameters as another run: {initial}"
        raise ConfigError(f"{folder.path}: {problem}; {advice}")


def warn_of_order(folder: RunFolder, metadata: dict, dataset: Any) -> None:
    """A line for a run whose remaining examples come in another order than it began with."""
    if metadata.get("order", 1) == batching.ORDER or not batching.order_changed(dataset.train):
        return
    cause = f"the order of more than {batching.LARGEST_TABLE:,} examples changed since this run began"
    effect = "it goes on in the new one, so this epoch gives some examples twice and others not"
    log.warning("%s: %s; %s. Begin it anew under another --name for one order", folder.path, cause, effect)


def writes_text(experiment: Experiment) -> bool:
    """Whether its model continues a text, or answers the questions that its data make of one."""
    return hasattr(experiment.data, "question") or heads.continues_text(experiment.model)


def ends_of(data: Any, tokenizer: Any) -> tuple[int, ...]:
    """The token that ends a text of these data: of an answer, or of a document."""
    parts = [part for _, part in data.sources] if isinstance(data, Mixed) else [data]
    ends = any(hasattr(part, "question") or hasattr(part, "end_of_text") for part in parts)
    return (tokenizer.end_of_text,) if ends and tokenizer.end_of_text is not None else ()


def ask(experiment: Experiment, sample: Sample, tokenizer: Any) -> Question:
    """The sample's prompt as the model reads it. Raises ConfigError where the model cannot go on from it."""
    has_question = hasattr(experiment.data, "question")
    if sample.prompt == "" or (has_question and sample.prompt is None):  # a user's `question` need not know of an empty text
        none = "" if has_question else ", or None"
        raise ConfigError(f"sample.prompt is empty; give at least one character{none}")
    if has_question:
        question = experiment.data.question(experiment.model, tokenizer, sample.prompt)
    else:  # None starts from token 0
        question = Question([0] if sample.prompt is None else tokenizer.encode(sample.prompt), "")
    if not question.prompt:
        raise ConfigError("sample.prompt is empty: it has no token; give another one, or None")
    check_room(experiment, question)
    return question


def check_room(experiment: Experiment, question: Question) -> None:
    """Raises ConfigError where learned positions leave no room for an answer to the sample's prompt."""
    length, limit = len(question.prompt), models.last_stack(experiment.model).position_limit
    if length >= limit:
        raise ConfigError(f"sample.prompt is {length} tokens, no room in {limit} learned positions")


def asks_first_question(experiment: Experiment) -> bool:
    """Whether the sample of a run answers the first question of its data: the data have such, and no prompt is given."""
    return hasattr(experiment.data, "question") and experiment.sample.prompt is None


def question_of_sample(experiment: Experiment, dataset: Any) -> Question:
    """What the model goes on from at the end of a run. Raises ConfigError where it cannot."""
    if not asks_first_question(experiment):
        return ask(experiment, experiment.sample, dataset.tokenizer)
    question = dataset.validation.questions[0]
    check_room(experiment, question)
    return question


def sample_text(experiment: Experiment, params: Any, dataset: Any) -> str:
    """The sample's prompt and what the model makes of it; without a prompt, its answer to the first question of the data."""
    sample, tokenizer = experiment.sample, dataset.tokenizer
    question = question_of_sample(experiment, dataset)
    (texts,) = answers(
        experiment.model, params, [question], tokenizer, sample.tokens, sample.sampling, seed=experiment.seed,
        precision=experiment.precision, stop_tokens=ends_of(experiment.data, tokenizer),
    )  # fmt: skip
    text = best_text(texts)
    if asks_first_question(experiment):
        return f"{text}\n(the answer in the data: {question.reference})"
    return (sample.prompt or "") + text


def on_devices(mesh: jax.sharding.Mesh | None, rows: np.ndarray | None, size: int, batch: dict[str, Any]) -> dict:
    """A batch on the device, or on those of a mesh; `rows` are what this process has of `size`, None for all."""
    if rows is not None and mesh is not None:
        return processes.global_batch(mesh, size, batch)
    return jax.device_put(batch, None if mesh is None else sharding.batch_sharding(mesh, batch))


def neighbours(folder: RunFolder, kept: Sequence[int], step: int, every: int, count: int) -> list[int]:
    """The steps whose mean with `step` is one of `count`: the multiples of `every` before it.

    An older one would be of another time of the training. Raises ConfigError where one of them is not kept.
    """
    last = (step - 1) // every * every  # the multiple before `step`
    wanted = [last - every * i for i in range(count - 1)]
    if count < 1 or any(other < 1 or other not in kept for other in wanted):
        needed = ", ".join(str(other) for other in [*wanted[::-1], step] if other > 0)
        if any(other < 1 for other in wanted):
            needed += " and more than there were"
        problem = f"they are {every} steps apart, so it takes {needed}; kept are {', '.join(map(str, kept))}"
        advice = "--checkpoints.keep-latest says how many a run keeps"
        raise ConfigError(f"{folder.path}: no mean of {count} checkpoints up to step {step}: {problem}; {advice}")
    return wanted


def examples_scored(experiment: Experiment, count: int, whole: bool) -> int:
    """How many of the `count` examples of a validation split an evaluation scores: the first so many."""
    limits = [experiment.final_examples]
    if not whole:
        batches = experiment.eval_batches
        limits = [experiment.eval_examples, None if batches is None else batches * experiment.batch_size]
    return min([count, *(limit for limit in limits if limit is not None)])


def evaluator(
    experiment: Experiment, recipe: Recipe, dataset: Any, mesh: jax.sharding.Mesh | None = None,
    folder: epath.Path | None = None,
) -> Callable:  # fmt: skip
    """(trained, final=False) -> scores over the first `eval_examples` of the validation split; then the metrics.

    With `final`, of the first `final_examples`, and with the metrics of the end. `whole=True`: that text without these
    metrics. `folder` is the run's, where metrics may write; `step`, how many steps were done, and `references` are what the
    objective is given. The scores say what was scored. The random key of a batch is a function of the seed and its number,
    the same at every evaluation.
    """

    @jax.jit
    def scores_of_batch(trained: Any, batch: dict[str, Any], number: Any, step: Any, references: Any):
        key = jax.random.fold_in(jax.random.fold_in(random_key(recipe.seed), 2), number)
        return recipe.score(trained, batch, key, step, references)

    def batches(examples: int, size: int) -> Iterator[dict[str, Any]]:
        rows = processes.local_rows(mesh, size)
        validation = batching.ValidationBatches(dataset.validation, size, rows, examples)
        return (on_devices(mesh, rows, size, validation[i]) for i in range(len(validation)))

    def evaluate(
        trained: Any, final: bool = False, whole: bool = False, step: int = 0, references: Any = None
    ) -> dict[str, Any]:
        score = partial(scores_of_batch, step=np.int32(step), references=references)
        count = len(dataset.validation)
        examples = examples_scored(experiment, count, final or whole)
        scores: dict[str, Any] = mean_scores(score, trained, batches(examples, experiment.batch_size))
        part = f"all {count:,} examples" if examples == count else f"the first {examples:,} of {count:,} examples"
        scores |= {"examples": float(examples), "scored": part}
        metrics = [metric for metric in experiment.metrics if final or not getattr(metric, "only_final", False)]
        if metrics:
            model, weights = models.evaluation(experiment.model), recipe.weights(trained)
            some = partial(batches, examples, experiment.batch_size // experiment.accumulation)
            scored = Evaluation(model, weights, dataset, some, experiment.precision, experiment.seed, folder, step)
            for metric in metrics:
                scores |= new_names(metric, scores_of(metric, scored), {"step", *scores})
        return scores

    return evaluate


def new_names(metric: Callable, found: dict[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """What a metric gave. Raises ConfigError where another score has one of these names: one of them would be lost."""
    if both := sorted(set(found) & set(taken)):
        name = getattr(metric, "__name__", type(metric).__name__)
        problem = f"metrics: {name} gives {', '.join(both)}, which an evaluation has already"
        raise ConfigError(f"{problem}; give it other names, such as in a function that calls it and renames them")
    return found


def scores_of(metric: Callable, scored: Evaluation) -> dict[str, Any]:
    """The scores of a metric, with Python's numbers for NumPy's and JAX's, as a record needs. ConfigError for other values."""
    scores = metric(scored)
    try:
        return {name: value if isinstance(value, str) else float(value) for name, value in scores.items()}
    except (AttributeError, TypeError, ValueError):
        name = getattr(metric, "__name__", type(metric).__name__)
        raise ConfigError(f"metrics: {name} returned {scores!r:.100}; expected {{name: number, or text}}") from None
