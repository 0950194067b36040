"""A trained run, opened again: its parameters, its scores and its texts.

`run = jaxformer.open_run("runs/quickstart-1a2b3c4d")`
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxformer import config, models, parallel
from jaxformer.config import storage
from jaxformer.data import batching, chat, tokenizers
from jaxformer.data.chat_template import Messages
from jaxformer.data.sources import Question
from jaxformer.decoding import Beams, Sampling, round_to_blocks, round_to_int8, stream
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
from jaxformer.params import random_key
from jaxformer.runs import checkpoint, checkpoint_reader, references
from jaxformer.runs.metrics import read_records
from jaxformer.runs.names import NAMES
from jaxformer.runs.questions import ask, check_room, ends_of, writes_text
from jaxformer.runs.run_folder import RunFolder, allow, open_experiment
from jaxformer.runs.same_data import check_data
from jaxformer.runs.scores import evaluator
from jaxformer.training.experiment import Experiment, Sample
from jaxformer.training.recipe import build
from jaxformer.training.references import without_adaptation
from jaxformer.training.step import abstract_state, state_shardings

ANY_BYTE = "<0xFF>"  # one of the byte tokens, as tokenizers that have them name it

log = logging.getLogger("jaxformer")


@dataclass(frozen=True, eq=False)
class Run:
    """A run's experiment, and what it wrote.

    Parts are read on first use. `step` None is the newest checkpoint. With `average` n, the
    parameters are the mean over this checkpoint and the n - 1 before it at multiples of
    `checkpoints.every`; an adaptation is merged first. Raises ConfigError where one of these was
    not kept.
    """

    folder: RunFolder
    experiment: Experiment
    step: int | None = None
    average: int = 1
    # Reads a reference that is a text and names no run of ours.
    weights_of: Callable[[str], Callable] | None = None

    recipe = cached_property(lambda self: build(self.experiment))
    # The records of metrics.jsonl.
    metrics = property(lambda self: read_records(self.folder.metrics))

    @cached_property
    def checkpoint(self) -> tuple[int, Any, dict]:
        """(step, the tree that trained, metadata), split over the mesh.

        The tree has averaged parameters if the checkpoint has them.
        """
        return self._mean(lambda tree: tree)

    def _mean(self, of: Callable[[Any], Any]) -> tuple[int, Any, dict]:
        """(step, the mean of `of(tree)` over the trees of the checkpoints, metadata)."""
        abstract = abstract_state(
            self.recipe, None if self.mesh is None else state_shardings(self.recipe, self.mesh)
        )
        field = "params" if abstract.ema is None else "ema"
        place = self.folder.for_library(self.folder.checkpoints)
        restore = partial(checkpoint_reader.restore_params, place, abstract.params, part=field)
        step, tree, metadata = restore(self.step)
        if self.average == 1:
            return step, of(tree), metadata
        steps = checkpoint.steps(self.folder.checkpoints)
        total = of(tree)
        every = self.experiment.checkpoints.every
        for other in neighbours(self.folder, steps, step, every, self.average):
            total = jax.tree.map(_add, total, of(restore(other)[1]))
        return step, jax.tree.map(partial(_divide, by=self.average), total), metadata

    @cached_property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The run's mesh, with Auto axes; None for one device.

        None, with a warning, also where the mesh does not fit the devices here.
        """
        config = replace(self.experiment.mesh, explicit=False, backend="jit")
        try:
            return parallel.run_mesh(
                config, self.experiment.batch_size // self.experiment.accumulation
            )
        except ConfigError as error:
            warning = (
                "%s: %s: this goes on with one device, and its memory alone; --mesh.data=1 says so,"
                " or choose another mesh"
            )
            log.warning(warning, self.folder.path, error)
            return None

    @property
    def model(self) -> Any:
        """The model for evaluation: without dropout."""
        return models.evaluation(self.experiment.model)

    @property
    def params(self) -> Any:
        """The model's parameters: an adaptation is merged, and an objective's are left out."""
        return self._made(self.recipe.weights)

    def _made(self, of: Callable[[Any], Any]) -> Any:
        """`of(tree)` of the tree that trained."""
        with self.on_mesh():
            # The mean of an adaptation's factors is not the mean of their products.
            if self.average > 1 and self.experiment.adaptation is not None:
                return self._mean(of)[1]
            return of(self.checkpoint[1])

    @cached_property
    def references(self) -> dict[str, Any]:
        """The parameters of the frozen models that the objective reads.

        Raises ConfigError where a model is not the one of the training.
        """
        if not self.experiment.references:
            return {}
        # Not under the mesh: the parameters are on one device until they are split.
        on_mesh = replace(
            self.experiment, mesh=replace(self.experiment.mesh, explicit=False, backend="jit")
        )
        found = references.read_references(
            on_mesh, self.mesh, self.folder.path.parent, self.weights_of
        )
        with self.on_mesh():
            _, trained, metadata = self.checkpoint
            references.check_references(self.folder, metadata, found.digests)
            return found.params | self.recipe.parts.base(trained)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """A context whose computations are split over the run's mesh.

        Without a mesh they are on one device, also within another mesh.
        """
        if self.mesh is None and jax.sharding.get_abstract_mesh().empty:
            return contextlib.nullcontext()
        return jax.set_mesh(
            jax.sharding.Mesh(np.empty((), object), ()) if self.mesh is None else self.mesh
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the data, or None."""
        if not storage.is_file(self.folder.tokenizer):
            return None
        return tokenizers.load(self.folder.tokenizer, self.folder.path)

    def evaluate(self, int8: bool = False, stored: Any = None) -> dict[str, Any]:
        """Scores on the validation split.

        With `int8` also the scores of weights rounded to 8 bits, and with a format such as
        `ops.quantised.NF4()` those of weights in its blocks (`decoding.quantize`).
        """
        dataset = batching.open_dataset(self.experiment.data, self.experiment.model)
        with self.on_mesh():
            step, _, metadata = self.checkpoint
        check_data(self.folder, metadata, dataset)
        # The adaptation is merged, as in `params` and as `quantize` takes weights.
        merged = without_adaptation(self.experiment)
        recipe = build(merged)
        score = evaluator(merged, recipe, dataset, self.mesh, self.folder.path)
        score = partial(score, step=step, references=self.references)
        with self.on_mesh():
            trained = self._made(self.recipe.parts.merged)
            scores = {"step": step, **score(trained, final=True)}
            known = ("examples", "scored", "unit", scores["unit"])
            rounding = {"int8": round_to_int8} if int8 else {}
            if stored is not None:
                rounding[type(stored).__name__.lower()] = partial(round_to_blocks, stored)
            for kind, function in rounding.items():
                rounded = jax.jit(partial(function, recipe.spec))(trained)
                found = score(rounded, whole=True)
                scores |= {
                    f"{kind}_{name}": value for name, value in found.items() if name not in known
                }
            return scores

    def generate(self, prompt: str, seed: int = 0, **options) -> str:
        """The prompt and its continuation, or the answer to a source; `options` as in `stream`."""
        return self.opening(prompt) + "".join(self.stream(prompt, seed, **options))

    def opening(self, prompt: str) -> str:
        """The text to show before an answer: the prompt that the answer continues, or nothing."""
        return "" if hasattr(self.experiment.data, "question") else prompt

    def stream(
        self,
        prompt: str,
        seed: int = 0,
        filters=(),
        stop: Sequence[str] | str = (),
        special_tokens: bool = False,
        **options,
    ) -> Iterator[str]:
        """Pieces of the text after a prompt, as they are made, up to the first `stop` string.

        `Beams` give a single piece. `options` are fields of `Sample`. The text also ends where the
        model writes the token that ends a document of its data. With `special_tokens`, names of
        control tokens in the prompt, such as <|im_start|> of a chat template, become these tokens.
        Otherwise they are text like any other, so that nobody who writes a part of the prompt can
        give commands.
        """
        stop = as_strings(stop)
        sample, question = self._ask(prompt, options, special_tokens)
        if isinstance(sample.sampling, Beams):
            yield best_text(
                self.continue_all([prompt], seed, filters, stop, special_tokens, **options)[0]
            )
            return
        yield from self._pieces(sample.sampling, sample.tokens, question, seed, filters, stop)

    def chat(
        self,
        messages: Messages,
        seed: int = 0,
        filters=(),
        stop: Sequence[str] | str = (),
        tools: Sequence[Any] | None = None,
        **options,
    ) -> Iterator[str]:
        """Pieces of the assistant's next message, as they are made; `options` as in `stream`.

        The messages are written by the chat template of the run's tokenizer. Names of control
        tokens in them are text. Raises ConfigError for a run without a template.
        """
        self._check_text()
        sample = replace(self.experiment.sample, **options)
        if isinstance(sample.sampling, Beams):
            raise ConfigError("chat: a beam search gives no pieces; give temperature, top_k, ...")
        question = chat.question(self.tokenizer, messages, tools=tools)
        check_room(self.experiment, question)
        stop = as_strings(stop)
        yield from self._pieces(sample.sampling, sample.tokens, question, seed, filters, stop)

    def _pieces(
        self,
        sampling: Sampling,
        most: int,
        question: Question,
        seed: int,
        filters: Any,
        stop: Sequence[str],
    ) -> Iterator[str]:
        """Pieces of the text, of at most `most` tokens, that answers a question."""
        model = self.experiment.model
        decode = self.tokenizer.decode
        tokens = question.prompt
        new: list[int] = []
        shown = 0  # the number of characters that were yielded
        with self.on_mesh():
            (limit,) = new_tokens_for(model, most, [tokens])
            for piece in stream(
                model,
                self.params,
                tokens,
                limit,
                source=question.source,
                sampling=sampling,
                filters=filters,
                key=random_key(seed),
                stop=stop_strings(decode, stop),
                stop_tokens=self._ends(),
                dtype=jax.numpy.dtype(self.experiment.activation_dtype),
            ):
                new += piece
                text = before_stop(continuation(decode, tokens, new), stop)
                final = _final_part(decode, self.tokenizer.id_of(ANY_BYTE), tokens, new, text)
                ready = len(final) - _held_back(final, stop)
                yield text[shown:ready]
                shown = max(shown, ready)
            yield before_stop(continuation(decode, tokens, new), stop)[shown:]

    def continue_all(
        self,
        prompts: Sequence[str],
        seed: int = 0,
        filters=(),
        stop: Sequence[str] | str = (),
        special_tokens: bool = False,
        **options,
    ) -> list[list[str]]:
        """The texts after each prompt: one, or up to `n_best` of a beam search.

        The arguments are those of `stream`.
        """
        if isinstance(prompts, str):
            raise ConfigError(
                "continue_all: a prompt alone would be continued letter by letter; give a list:"
                " [prompt]"
            )
        asked = [self._ask(prompt, options, special_tokens) for prompt in prompts]
        sample = asked[0][0]  # all prompts have the same options
        with self.on_mesh():
            return answers(
                self.experiment.model,
                self.params,
                [question for _, question in asked],
                self.tokenizer,
                sample.tokens,
                sample.sampling,
                seed=seed,
                precision=self.experiment.activation_dtype,
                stop=stop,
                stop_tokens=self._ends(),
                filters=filters,
            )

    def _ends(self) -> tuple[int, ...]:
        return ends_of(self.experiment.data, self.tokenizer)

    def _ask(
        self, prompt: str, options: dict[str, Any], special_tokens: bool = False
    ) -> tuple[Sample, Question]:
        """(how to continue a prompt, its tokens).

        Raises ConfigError where the run continues no text.
        """
        self._check_text()
        sample = replace(self.experiment.sample, prompt=prompt, **options)
        tokenizer = self.tokenizer.reading_special_tokens() if special_tokens else self.tokenizer
        return sample, ask(self.experiment, sample, tokenizer)

    def _check_text(self) -> None:
        """Raises ConfigError where the run continues no text."""
        if self.tokenizer is None:
            advice = (
                "its data may have a method generate(run, key, folder), which makes other answers"
            )
            raise ConfigError(
                f"{self.folder.path}: has no tokenizer, so there is no text to continue; {advice}"
            )
        if not writes_text(self.experiment):
            reasons = (
                "sees later tokens, has no language model, or reads a source, which data make of a"
                " text by `question`"
            )
            raise ConfigError(f"{self.folder.path}: it continues no text: its model {reasons}")


def open_run(
    path: epath.PathLike,
    step: int | None = None,
    overrides: Sequence[str] = (),
    average: int = 1,
    trust: bool = False,
    weights_of: Callable[[str], Callable] | None = None,
) -> Run:
    """The run in a folder.

    `overrides` are options as on the command line, of fields that decide no numbers:
    `--mesh.tensor=4`. To open a run is to run its code: a run that this user did not train on this
    machine needs `trust`, once. `weights_of(text)` reads a reference that is a text and names no
    run of ours, such as `families.HuggingFace`. Raises ConfigError without that trust, where there
    is no run, or where its experiment is no longer the same.
    """
    folder = RunFolder(epath.Path(path))
    if trust:
        allow(folder)
    experiment = open_experiment(folder)
    changed = config.override(experiment, overrides, NAMES) if overrides else experiment
    if config.fingerprint(changed) != config.fingerprint(experiment):
        allowed = "only --mesh.… and --metrics may change here"
        raise ConfigError(
            f"{folder.path}: {' '.join(overrides)} would make it another run; {allowed}"
        )
    return Run(folder, changed, step, average, weights_of)


def _held_back(text: str, strings: Sequence[str]) -> int:
    """The number of last characters that may become a stop string, so may not be shown yet."""
    starts = (string[:n] for string in strings for n in range(len(string), 0, -1))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


def _final_part(
    decode: Callable, any_byte: int | None, prompt: Sequence[int], new: Sequence[int], text: str
) -> str:
    """The start of the new tokens' text that no further token can change.

    A character may have several tokens. Where tokens are bytes (`any_byte` is one of them), a run
    of bytes is decoded as a whole, and one byte more may turn all of its characters into U+FFFD.
    Elsewhere the bytes of an unfinished character are one U+FFFD.
    """
    if any_byte is None:
        return text.removesuffix("\ufffd")
    other = continuation(decode, prompt, [*new, any_byte])
    differences = (i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two)
    return text[: next(differences, min(len(text), len(other)))].rstrip("\ufffd")


def neighbours(
    folder: RunFolder, kept: Sequence[int], step: int, every: int, count: int
) -> list[int]:
    """The multiples of `every` before `step` that make, with it, a mean of `count` checkpoints.

    Older checkpoints belong to another time of the training, so none replaces a missing one.
    Raises ConfigError where one of them is not kept.
    """
    last = (step - 1) // every * every  # the multiple before `step`
    wanted = [last - every * i for i in range(count - 1)]
    if count < 1 or any(other < 1 or other not in kept for other in wanted):
        needed = ", ".join(str(other) for other in [*wanted[::-1], step] if other > 0)
        if any(other < 1 for other in wanted):
            needed += " and more than there were"
        problem = (
            f"they are {every} steps apart, so it takes {needed};"
            f" kept are {', '.join(map(str, kept))}"
        )
        advice = "--checkpoints.keep-latest says how many a run keeps"
        raise ConfigError(
            f"{folder.path}: no mean of {count} checkpoints up to step {step}: {problem}; {advice}"
        )
    return wanted


def _add(total: jax.Array, leaf: jax.Array) -> jax.Array:
    """The sum; codes of frozen weights are the same in all checkpoints and have none."""
    return total + leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else total


def _divide(total: jax.Array, by: int) -> jax.Array:
    return total / by if jnp.issubdtype(total.dtype, jnp.inexact) else total
