"""The record of a run (metrics.jsonl), optional loggers beside it, and what the terminal shows."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax

log = logging.getLogger("jaxformer")


@runtime_checkable
class Logger(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Record:
    """metrics.jsonl: one line a record, the truth about a run. A torn last line (a killed run) is dropped on opening.

    Without a path nothing is kept: the record of any process but the first.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.lines = [] if path is None else read_records(path)
        self._file = None

    def rewind(self, step: int) -> None:
        """Forgets what happened after `step` steps were done: those steps will be done, and logged, again."""
        self.lines = [r for r in self.lines if r["step"] < step or ("validation_loss" in r and r["step"] <= step)]
        self.close()
        if self.path is None:
            return
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        os.replace(temporary, self.path)

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.path is None:
            return
        line = {"step": step, **values}
        self.lines.append(line)
        if self._file is None:
            self._file = self.path.open("a", buffering=1)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_records(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl, up to a torn one."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def open_loggers(names: Sequence[str], folder: Path, run_name: str, config: dict) -> list[Logger]:
    """The optional loggers by name. One that cannot start is reported and left out; the run goes on."""
    loggers: list[Logger] = []
    for name in names:
        try:
            loggers.append({"tensorboard": _TensorBoard, "wandb": _Wandb}[name](folder, run_name, config))
        except Exception as error:
            log.warning("%s is off: %s: %s (pip install 'jaxformer[log]')", name, type(error).__name__, error)
    return loggers


def write_all(record: Record, loggers: list[Logger], step: int, values: dict[str, float]) -> None:
    """To the record first; a logger that raises is reported once and dropped."""
    record.write(step, values)
    for logger in list(loggers):
        try:
            logger.write(step, values)
        except Exception as error:
            log.warning(
                "%s stopped: %s: %s; the run goes on without it", type(logger).__name__, type(error).__name__, error
            )
            loggers.remove(logger)


def close_all(loggers: list[Logger]) -> None:
    """Closes what is left; one that fails is reported, for the run has ended in its own way already."""
    for logger in loggers:
        try:
            logger.close()
        except Exception as error:
            log.warning("%s did not close: %s: %s", type(logger).__name__, type(error).__name__, error)


class _TensorBoard:
    def __init__(self, folder: Path, run_name: str, config: dict):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=5)  # a killed run loses no more

    def write(self, step, values):
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self):
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, run_name: str, config: dict):
        import wandb  # pyrefly: ignore[missing-import]

        self._run = wandb.init(
            project="jaxformer", name=run_name, id=run_name, dir=str(folder), config=config, resume="allow"
        )

    def write(self, step, values):
        self._run.log(values, step=step)

    def close(self):
        self._run.finish()


class Console:
    """A progress bar on a terminal; one plain line for each log anywhere else; nothing unless `heard`."""

    def __init__(self, total: int, start: int, heard: bool = True):
        self._total, self._bar, self._heard = total, None, heard
        self._first: tuple[float, int] | None = None  # when the first step was done, and which: not the compiler's time
        if heard and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}")
            )
            self._task = self._bar.add_task("", total=total, completed=start, text="")
            self._bar.start()

    def step(self, step: int, values: dict[str, float]) -> None:
        """The values of a training step."""
        text = self._text(values) + self._left(step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, text=text)
        else:
            self._line(step, text)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """The scores after `step` steps."""
        self._line(step - 1, self._text(values))

    def _text(self, values: dict[str, float]) -> str:
        return " ".join(f"{name} {_format(value)}" for name, value in values.items())

    def _left(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        began, first = self._first
        return f" left {(now - began) / (step - first) * (self._total - step - 1):.0f}s" if step > first else ""

    def _line(self, step: int, text: str) -> None:
        self.say(f"step {step + 1:>{len(str(self._total))}}/{self._total} {text}")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._heard:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _format(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
    return f"{value:.2e}"


class NonFinite(RuntimeError):
    """The loss or gradient stayed NaN or infinite; the parameters are those of the last finite step."""


QUIET = ("grad_norm", "tokens", "loss_scale", "learning_rate", "skipped")  # in the record, not on the progress line


class Reporter:
    """Holds back each step's metrics until the next step was dispatched; checks them, logs every `every`-th and the last.

    A step that changed nothing is reported at once, with its number and why. `flops` are those of a token, `peak` those of
    all devices a second; None where they are not known.
    """

    def __init__(
        self,
        write: Callable[[int, dict[str, float]], None],
        console: Console,
        *,
        every: int,
        last: int,
        max_skipped: int,
        flops: float | None = None,
        peak: float | None = None,
    ):
        self._write, self._console = write, console
        self._every, self._last, self._max_skipped = every, last, max_skipped
        self._share = None if flops is None or peak is None else flops / peak
        self._waiting: tuple[int, dict] | None = None
        self._clock: float | None = None
        self._tokens = 0.0  # since when tokens are counted: not before the first step is compiled

    def restart_clock(self) -> None:
        """Time spent on evaluation and saving does not count in tokens a second."""
        self._clock, self._tokens = time.monotonic(), 0.0

    def later(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.now()
        self._waiting = (step, metrics)

    def now(self) -> None:
        if self._waiting is None:
            return
        step, metrics = self._waiting
        self._waiting = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if values["skipped"] >= self._max_skipped:
            raise NonFinite(
                f"loss or gradient not finite for {int(values['skipped'])} steps in a row, up to step {step} (loss "
                f"{values['loss']}, gradient norm {values['grad_norm']}); lower --optimizer.learning-rate or look at the data"
            )
        empty = values["tokens"] <= 0 and math.isfinite(values["grad_norm"])
        if empty:  # it has no mean loss: the record says how many tokens there were instead
            self._console.say(f"step {step} changed nothing: the weights of its batch sum to {values['tokens']:g}")
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        elif values["skipped"]:
            scale = f"; the loss scale is now {values['loss_scale']:g}" if "loss_scale" in values else ""
            self._console.say(
                f"step {step} changed nothing: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}{scale}"
            )
        tokens = values["tokens"] if empty else values.pop("tokens")
        speed = self._speed(tokens)
        if step % self._every == 0 or step == self._last:
            self._write(step, values)
            order = [
                "loss",
                *sorted(set(values) - {"loss", *QUIET}),
                "learning_rate",
                *(["skipped"] if values["skipped"] else []),
            ]
            self._console.step(step, {name: values[name] for name in order if name in values} | speed)

    def _speed(self, tokens: float) -> dict[str, float]:
        now = time.monotonic()
        if self._clock is None:
            self._clock = now
            return {}
        self._tokens += tokens
        rate = self._tokens / max(now - self._clock, 1e-9)
        return {"tokens/s": float(round(rate))} | ({} if self._share is None else {"MFU": rate * self._share})
