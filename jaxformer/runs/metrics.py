"""The record of a run (metrics.jsonl), optional loggers beside it, and the lines that are printed."""

import errno
import itertools
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from etils import epath

from jaxformer import config
from jaxformer.config import no_links, storage
from jaxformer.evaluation.metric import as_numbers

log = logging.getLogger("jaxformer")
LARGEST = 10_000_000_000  # bytes of a record; a stranger's may have holes without an end
# scores that no line of the record has: they follow from the loss, or are the same at each evaluation
UNRECORDED = ("perplexity", "bits", "tokens", "examples", "scored", "unit")


class Record:
    """metrics.jsonl, the truth about a run, a line a record; and loggers beside it (`name`, `write(step, values)`, `close()`).

    A line is strict JSON: a number that is not finite is the text "NaN", "Infinity" or "-Infinity", and `read_records` gives
    the number again.
    A torn last line (of a killed run) is dropped on opening; of a file with damaged lines a copy is kept. Objects of a bucket
    cannot grow: there `save` writes all lines again. Without a path (not on the first process) nothing is kept. A logger that
    raises is reported once and dropped.
    """

    def __init__(self, path: epath.PathLike | None):
        self.path = None if path is None else epath.Path(path)
        self.lines, damaged = ([], []) if self.path is None else _parse(self.path)
        if self.path is not None and damaged:
            names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in itertools.count(1))
            copy = next(name for name in names if not storage.exists(name))
            config.write_atomically(copy, _bytes(self.path))
            log.warning("%s: no records in lines %s; they are left out, the file as it was is %s", self.path, damaged, copy)
        self.loggers: list[Any] = []
        self.reached = 0  # steps that an earlier start recorded
        self._behind: OSError | None = None  # why the file lacks lines
        self._grows = "://" not in str(path)

    def rewind(self, step: int) -> None:
        """Forgets what happened after `step` steps were done: those steps will be done, and logged, again."""
        self.reached = steps_done(self.lines)
        self.lines = [r for r in self.lines if r["step"] < step or ("validation_loss" in r and r["step"] <= step)]
        self._write_all(storage.WAITS)

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.path is None:
            return
        line = {"step": step, **values}
        self.lines.append(line)
        if self._grows:
            self._write_out(self._append)
        self._tell_loggers(lambda logger: logger.write(step, values), "%s stopped: %s; the run goes on without it")

    def save(self, waits: Sequence[float] = ()) -> OSError | None:
        """Brings all lines into the file, tried again after each of these waits; called before a checkpoint.

        Returns the error for which lines are missing: a checkpoint without its record would lose them.
        """
        for wait in (0.0, *waits):
            time.sleep(wait)
            if self._behind or (not self._grows and self.lines):
                self._write_out(self._write_all)
            if self._behind is None:
                break
        return self._behind

    def close(self) -> None:
        self.save(storage.WAITS)
        self._tell_loggers(lambda logger: logger.close(), "%s did not close: %s")

    def _tell_loggers(self, call: Callable[[Any], None], warning: str) -> None:
        for logger in list(self.loggers):
            try:
                call(logger)
            except Exception as error:
                log.warning(warning, logger.name, f"{type(error).__name__}: {error}")
                self.loggers.remove(logger)

    def _write_out(self, write: Callable[[], None]) -> None:
        """Calls `write`, or writes all lines again if the last try failed. Lines that cannot be written now wait for later."""
        try:
            (self._write_all if self._behind else write)()
            self._behind = None
        except OSError as error:
            if not self._behind:
                log.warning(
                    "%s cannot be written (%s); the run goes on, its lines are written once there is room", self.path, error
                )
            self._behind = error

    def _append(self) -> None:
        assert self.path is not None
        # the first write of a start made the file anew, and nobody may have put a link in its place since
        with open(self.path, "a", opener=no_links.opener(self.path.parent)) as file:
            file.write(config.to_json(self.lines[-1]) + "\n")

    def _write_all(self, waits: Sequence[float] = ()) -> None:
        if self.path is not None:
            config.write_atomically(self.path, "".join(config.to_json(line) + "\n" for line in self.lines), waits=waits)


def read_records(path: epath.PathLike) -> list[dict]:
    """The records of a metrics.jsonl; damaged lines are left out."""
    return _parse(path)[0]


def steps_done(records: Sequence[dict]) -> int:
    """How many steps a run has done: a step's record has its number, counted from 0, an evaluation's how many were done."""
    return max((record["step"] + ("validation_loss" not in record) for record in records), default=0)


def _parse(path: epath.PathLike) -> tuple[list[dict], list[int]]:
    """(records, numbers of damaged lines). A kill leaves a last line without an end, which does not count as damage."""
    path, records, damaged = epath.Path(path), [], []
    lines = _bytes(path).split(b"\n") if storage.has_name(path) else [b""]
    for number, line in enumerate(lines, 1):
        try:
            record = config.with_numbers(json.loads(line))
            if type(record["step"]) is not int or not all(isinstance(value, int | float) for value in record.values()):
                raise ValueError(record)
            records.append(record)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ):  # no UTF-8, no JSON, no object, no step, no numbers
            if number < len(lines):
                damaged.append(number)
    return records, damaged


def _bytes(path: epath.Path) -> bytes:
    try:
        return storage.retry(lambda: config.read_bytes(path, path.parent, LARGEST), path)
    except OSError as error:
        raise storage.mistake(error, f"{path}: cannot be read ({error})") from None


def open_loggers(names: Sequence[str], folder: epath.PathLike, run_name: str, description: dict) -> list[Any]:
    """The optional loggers by name. One that cannot start is reported and left out; the run goes on.

    The folder's metrics.jsonl, already rewound, says where the run goes on.
    """
    records = read_records(epath.Path(folder) / "metrics.jsonl")
    loggers: list[Any] = []
    for name in names:
        try:
            loggers.append({"tensorboard": _tensorboard, "wandb": _wandb}[name](folder, run_name, description, records))
        except Exception as error:
            log.warning("%s is off: %s: %s (pip install 'jaxformer[log]')", name, type(error).__name__, error)
    return loggers


def _tensorboard(folder: epath.PathLike, run_name: str, description: dict, records: Sequence[dict]) -> SimpleNamespace:
    """Event files. A start makes TensorBoard forget what an earlier one wrote of the steps that are done again."""
    from tensorboardX import SummaryWriter

    place = os.path.join(folder, "tensorboard")
    no_links.check_folder(place, folder)
    earlier = list(epath.Path(place).iterdir()) if epath.Path(place).is_dir() else []
    done = steps_done(records)
    writer = SummaryWriter(
        place, flush_secs=5,  # a killed run loses no more
        purge_step=done if earlier else None,
        filename_suffix=f".{len(earlier)}.{os.getpid()}",  # the package's names differ by the second
    )  # fmt: skip

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    for record in records if earlier else ():  # of this step an evaluation stays, which the mark takes away
        if record["step"] >= done:
            write(record["step"], {name: value for name, value in record.items() if name != "step"})
    return SimpleNamespace(name="tensorboard", write=write, close=writer.close)


def _wandb(folder: epath.PathLike, run_name: str, description: dict, records: Sequence[dict]) -> SimpleNamespace:
    """A run of Weights & Biases. Its own counter never goes back, so our steps are a value of their own."""
    import wandb  # pyrefly: ignore[missing-import]

    place = None if "://" in str(folder) else str(folder)
    no_links.check_folder(os.path.join(folder, "wandb"), folder)
    identity = _wandb_id(epath.Path(folder), run_name, records)
    run = wandb.init(project="jaxformer", name=run_name, id=identity, dir=place, config=description, resume="allow")
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def write(step: int, values: Mapping[str, float]) -> None:
        run.log({"step": step, **values})

    return SimpleNamespace(name="wandb", write=write, close=run.finish)


def _wandb_id(folder: epath.Path, run_name: str, records: Sequence[dict]) -> str:
    """What the service knows this folder's run by. The same experiment in another folder is another run.

    Older versions had the name alone, so a run of theirs that goes on keeps it.
    """
    file = folder / "wandb_id.txt"
    if not storage.has_name(file):
        new = run_name if records else f"{run_name}-{secrets.token_hex(4)}"
        config.write_atomically(file, new)
    return config.read_text(file, folder).strip()


class Console:
    """Prints a line for each log and each evaluation; nothing unless `heard`."""

    def __init__(self, total: int, heard: bool = True):
        self._total, self._heard = total, heard
        self._first: tuple[float, int] | None = None  # when the first step was done, and which: not the compiler's time

    def step(self, step: int, values: dict[str, float]) -> None:
        """The values of a training step, and the time left."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        began, first = self._first
        left = f" left {(now - began) / (step - first) * (self._total - step - 1):.0f}s" if step > first else ""
        self.evaluation(step + 1, values, left)

    def evaluation(self, done: int, values: dict[str, float], left: str = "") -> None:
        """The scores after `done` steps."""
        text = " ".join(f"{name} {_format(value)}" for name, value in values.items())
        self.say(f"step {done:>{len(str(self._total))}}/{self._total} {text}{left}")

    def say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line)

    def say(self, text: str) -> None:
        if self._heard:
            try:
                print(text, flush=True)
            except OSError as error:  # a log file on a full disk, a pager that was closed, a terminal that is gone
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO):
                    raise


def in_words(scores: Mapping[str, Any], baseline: float | None) -> str:
    """The last line of a run: its scores in their unit. `baseline` is the unigram entropy of the text, nats a token."""

    def shown(value):
        return value if isinstance(value, str) else f"{value:.4g}"

    unit = scores["unit"]
    is_of_tokens = "perplexity" in scores
    if is_of_tokens:
        per = " nats a token"
    else:
        per = "" if unit == "examples" else f" a {unit.removesuffix('s')}"
    counted = "" if unit == "examples" else f", {scores[unit]:,.0f} {unit}"
    words = [f"validation loss {scores['loss']:.4f}{per} ({scores['scored']}{counted})"]
    if is_of_tokens:
        words.append(f"perplexity {scores['perplexity']:.3f}")
    others = [name for name in scores if name not in ("loss", unit, *UNRECORDED)]
    words += [f"{name} {shown(scores[name])}" for name in others]
    entropy = f" (unigram entropy {baseline:.4f})" if is_of_tokens and baseline is not None else ""
    return ", ".join(words) + entropy


def _format(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
    return f"{value:.2e}"


class NonFinite(RuntimeError):
    """Steps stayed bad, up to `step`; the parameters are those of the last good one."""

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step


QUIET = ("grad_norm", "tokens", "loss_scale", "learning_rate", "skipped")  # in the record, not on the progress line


class Reporter:
    """Waits with the metrics of a step until the next step is dispatched; checks them, logs every `every`-th and the last.

    A step that changed nothing is reported at once, with its number and the reason.
    """

    def __init__(self, write, console: Console, *, every: int, last: int, max_skipped: int):
        self._write, self._console = write, console
        self._every, self._last, self._max_skipped = every, last, max_skipped
        self._waiting: tuple[int, dict, float | None] | None = None
        self._clock: float | None = None
        self._count = self._work = 0.0  # of the steps since the clock began, which is after the first step is compiled

    def restart_clock(self) -> None:
        """Time spent on evaluation and saving does not count in the rate."""
        self._clock = time.monotonic()
        self._count = 0.0
        self._work = 0.0

    def later(self, step: int, metrics: dict[str, jax.Array], work: float | None = None) -> None:
        """`work` is the model's FLOPs of the step over the peak of all devices, in seconds; None where it is not known."""
        self.now()
        self._waiting = (step, metrics, work)

    def is_idle(self) -> bool:
        """Whether the device has finished all steps."""
        return self._waiting is None or self._waiting[1]["loss"].is_ready()

    def now(self) -> None:
        if self._waiting is None:
            return
        step, metrics, work = self._waiting
        self._waiting = None
        unit = getattr(metrics, "unit", "tokens")
        values = as_numbers(jax.device_get(metrics))
        bad_variables = values.pop("bad_variables", 0)
        figures = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        finite = math.isfinite(values["loss"] + values["grad_norm"])
        if values["skipped"] >= self._max_skipped:
            times = f"{int(values['skipped'])} steps in a row, up to step {step}"
            what = "far above the steps before" if finite else "not finite"
            if finite and bad_variables:
                what = "new values of variables were not finite"
            raise NonFinite(f"{what} for {times} ({figures}); lower --optimizer.learning-rate or look at the data", step)
        empty = values[unit] <= 0 and math.isfinite(values["grad_norm"])
        if empty:  # it has no mean loss: the record says how many tokens there were instead
            self._console.say(f"step {step} changed nothing: the weights of its batch sum to {values[unit]:g}")
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        elif values["skipped"]:
            scale = f"; the loss scale is now {values['loss_scale']:g}" if "loss_scale" in values else ""
            spike = ", far above the steps before" * finite
            if finite and bad_variables:
                spike = f", new values of {bad_variables:g} variables are not finite"
            self._console.say(f"step {step} changed nothing: {figures}{spike}{scale}")
        count = values[unit] if empty else values.pop(unit)
        speed = self._speed(count, unit, work)
        if step % self._every == 0 or step == self._last:
            self._write(step, values)
            others = sorted(name for name in values.keys() - {"loss", unit, *QUIET} if "rms/" not in name)
            shown = ["loss", *others, "learning_rate"] + ["skipped"] * (values["skipped"] > 0)
            self._console.step(step, {name: values[name] for name in shown if name in values} | speed)

    def _speed(self, count: float, unit: str, work: float | None) -> dict[str, float]:
        now = time.monotonic()
        if self._clock is None:
            self._clock = now
            return {}
        self._count += count if math.isfinite(count) else 0  # a weight of the batch may be NaN
        self._work += work or 0
        seconds = max(now - self._clock, 1e-9)
        return {f"{unit}/s": float(round(self._count / seconds))} | ({} if work is None else {"MFU": self._work / seconds})
