"""A run as data: an experiment file ends in `experiment = Experiment(...)`.

Nothing here computes anything. Each part that a researcher may replace is a function, or a frozen
dataclass with `__call__`. The library's own parts have no privilege.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxformer.config import check_types, execution
from jaxformer.decoding.beam import Beams
from jaxformer.decoding.sampling import Sampling
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.objectives.tokens import TokenCrossEntropy
from jaxformer.parallel.mesh import Mesh
from jaxformer.params import check_pattern, check_seed
from jaxformer.training.optimizers import AdamW
from jaxformer.training.references import check_references
from jaxformer.training.schedules import Cosine

LONGEST_NAME = 240  # bytes; file systems allow 255, and the fingerprint needs 9


def _is_unprintable(letter: str) -> bool:
    """Whether a character is a line end, a control, a surrogate, or an invisible format character.

    The zero-width joiner and non-joiner are allowed: words of Persian and Hindi, and emoji, need
    them.
    """
    kind = unicodedata.category(letter)
    return kind in ("Cc", "Cs", "Zl", "Zp") or (kind == "Cf" and letter not in "\u200c\u200d")


def _check_name(name: str) -> None:
    """Raises ConfigError for a name that cannot be the name of one folder, or that would mislead.

    `/` would lead out of the folder of all runs. A leading `-` is an option on a command line.
    A terminal would show spaces at the ends, or unprintable characters, as another name.
    """
    has_bad_ends = not name.strip(".") or name != name.strip() or name[0] in "-~"
    if has_bad_ends or any(letter in "/\\" or _is_unprintable(letter) for letter in name):
        expected = (
            "expected a text without / \\ and line ends, which does not begin with - or ~ "
            "or consist of dots"
        )
        raise ConfigError(f"name={name!r}: names a folder in runs/; {expected}")
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"name={name[:20]}...: has {len(name.encode())} bytes; "
            f"at most {LONGEST_NAME} fit into a folder's name"
        )


@dataclass(frozen=True)
class Checkpoints:
    """When to save, and which checkpoints to keep. The last step is always saved.

    A killed run loses at most `every` steps. A save runs in the background during later steps and
    is not complete at once. So there is another save half-way between two multiples of `every`; it
    is deleted when a newer one is complete.
    """

    every: int = 500  # steps between two saves
    keep_latest: int = 2  # number of newest checkpoints to keep, at multiples of `every`
    keep_best: int = 1  # number of best checkpoints to keep
    # the score that ranks checkpoints, lowest first; "-NAME", such as "-bleu": highest first. An
    # evaluation that finds one of the best saves it, also between two multiples of `every`
    best: str = "loss"

    def __post_init__(self):
        check_numbers("checkpoints.", self, every=1, keep_latest=1, keep_best=0)


@dataclass(frozen=True)
class Sample:
    """Text to continue at the end of a run."""

    prompt: str | None = None  # None starts from the vocabulary's first token
    tokens: int = 200  # how many to add
    # how tokens are drawn, or a beam search
    sampling: Sampling | Beams = Sampling(temperature=0.8)

    def __post_init__(self):
        check_numbers("sample.", self, tokens=1)


@dataclass(frozen=True)
class Spikes:
    """A step is bad if its loss or gradient norm is far above the mean of the last good steps.

    It is `deviations` standard deviations above. Mean and deviation are those of the last `window`
    good steps. Before that many good steps no step is a spike.
    """

    deviations: float = 6.0  # standard deviations above the mean
    window: int = 128  # good steps

    def __post_init__(self):
        check_numbers("spikes.", self, window=2)
        if not 0 < self.deviations < math.inf:
            raise ConfigError(
                f"spikes.deviations={self.deviations}: must be above 0 and finite; "
                "None for no spikes"
            )


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's numbers. Batches and random numbers depend on (seed, step).

    Fields made by `execution` decide how a run executes, not its numbers. They may change between
    two starts of one run.
    """

    name: str  # of the run folder
    model: Any  # ModelConfig, EncoderDecoder, or your own object with spec() and apply(params, ...)
    data: Any  # has open(model) -> Dataset: Text, Stdlib, Reverse, ..., or your own
    optimizer: Callable = AdamW()  # (spec) -> optax.GradientTransformation
    schedule: Callable = Cosine()  # (experiment) -> (step -> learning rate)
    objective: Callable = TokenCrossEntropy()  # (model, params, batch, context) -> LossSums
    # where parameters start: a folder or name of a run or of Hugging Face, or (spec, key) ->
    # params; None: random
    initial: Callable | str | None = None
    # a run, from whose last state this one goes on: parameters, averages, the optimizer's state and
    # the number of steps; `initial` is not read then
    continue_from: str | None = None
    # (spec) -> Adapted, which trains instead of the parameters, such as models.adaptation.Lora
    adaptation: Callable | None = None
    # {name: initial} of frozen models, which the objective reads as context.references; a value may
    # also be a training.Reference or a training.Base
    references: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # regular expression: a parameter does not train if it matches anywhere in the parameter's path
    frozen: str | None = None
    steps: int = 1000  # optimizer updates
    batch_size: int = 32  # examples a step
    # micro-batches a step; the gradient is that of the whole batch, but experts with a capacity
    # apply it to each micro-batch
    accumulation: int = 1
    # dtype of activations; parameters are float32. float8: activations are bfloat16, and the
    # products with weights of layers are in 8 bits (ops.float8), in training only
    precision: Literal["float32", "bfloat16", "float16", "float8"] = "float32"
    # dtype in which devices of mesh.fsdp sum the gradients of weights; bfloat16 (with
    # precision=bfloat16) moves half as many bytes
    gradient_sums: Literal["float32", "bfloat16"] = "float32"
    clip_norm: float | None = 1.0  # largest norm of the gradient; None: no clipping
    # decay of averaged parameters, which evaluations then use; None: no average
    ema_decay: float | None = None
    # the average at step t (from 0) decays by min(ema_decay, (1 + t) / (ema_warmup + t)), so that a
    # short run forgets its start; 1: always by ema_decay
    ema_warmup: int = 10
    # (params) -> params: what the parameters become after each update, such as zoo's QKClip;
    # variables (`params.Spec(trained=False)`) have their new values then
    after_update: Callable | None = None
    seed: int = 0  # of parameters, batches, dropout and samples; below 2^64
    max_skipped: int = 10  # bad steps in a row before the run gives up
    # a step with a far higher loss or gradient norm than the last ones is bad, too; None: no check
    spikes: Spikes | None = None
    # further scores of an evaluation: (evaluation.metric.Evaluation) -> {name: number}
    metrics: tuple[Callable, ...] = execution(())
    mesh: Mesh = execution(Mesh(data=1))  # devices; one by default
    log_every: int = execution(10)  # steps between two lines of metrics.jsonl
    eval_every: int = execution(500)  # steps between two evaluations
    # an evaluation scores this many examples, the first of the validation split; None: all
    eval_examples: int | None = execution(None)
    final_examples: int | None = execution(None)  # the same for the evaluation at the end
    # older form: eval_examples=eval_batches * batch_size; runs with different batch sizes are then
    # scored on different text
    eval_batches: int | None = execution(None)
    checkpoints: Checkpoints = execution(Checkpoints())  # when to save, and which ones to keep
    sample: Sample = execution(Sample())  # text to continue at the end
    # traces steps 10 to 15 into the run's folder, or into a local temporary folder if that is in a
    # bucket, and prints where their time went (docs/profile.md)
    profile: bool = execution(False)
    # root mean squares by layer that each logged step reports (training.rms)
    rms: tuple[Literal["activation", "gradient", "update"], ...] = execution(())
    # loggers that write beside metrics.jsonl
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = execution(())

    @property
    def activation_dtype(self) -> str:
        """The dtype of activations, by its name."""
        return "bfloat16" if self.precision == "float8" else self.precision

    def __post_init__(self):
        check_references(self.references)
        # the schedules check their warm-up themselves: 1e3, a float, is 1000 steps
        check_types(self, besides=("schedule.warmup",))
        _check_name(self.name)
        counts = (
            "steps",
            "batch_size",
            "accumulation",
            "ema_warmup",
            "log_every",
            "eval_every",
            "max_skipped",
        )
        limits = "eval_examples", "final_examples", "eval_batches"
        check_numbers("", self, **dict.fromkeys((*counts, *limits), 1))
        check_seed(self.seed)
        for name in ("optimizer", "schedule", "objective"):
            if not callable(getattr(self, name)):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: expected a function; see Experiment.{name}"
                )
        if not callable(getattr(self.data, "open", None)):
            raise ConfigError(f"data={self.data!r}: expected an object with open(model) -> Dataset")
        if not callable(self.schedule(self)):
            raise ConfigError(
                "schedule: expected (experiment) -> (step -> rate); "
                "for one of optax: lambda experiment: ..."
            )
        check_pattern("frozen", self.frozen)
        if self.gradient_sums == "bfloat16" != self.activation_dtype:
            raise ConfigError(
                "gradient_sums=bfloat16: needs --precision=bfloat16 or float8, "
                f"not {self.precision}"
            )
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"accumulation={self.accumulation} does not divide batch_size={self.batch_size}"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"clip_norm={self.clip_norm}: must be positive, or None for no clipping"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay}: must be in (0, 1), or None")
