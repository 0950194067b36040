"""The record of a run (metrics.jsonl), optional loggers beside it, and what the terminal shows."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax

from jaxformer.models import cost
from jaxformer.training.experiment import Experiment

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
        self.lines = [] if path is None else _read(path)
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


def _read(path: Path) -> list[dict]:
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
    """A progress bar on a terminal; one plain line for each log anywhere else; nothing where it is not to be `heard`."""

    def __init__(self, total: int, start: int, heard: bool = True):
        self._total, self._bar, self._heard = total, None, heard
        self._began, self._start = time.monotonic(), start
        if heard and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("", total=total, completed=start, text="")
            self._bar.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        text = " ".join(f"{name} {_format(value)}" for name, value in values.items())
        if self._bar is not None and "loss" in values:
            self._bar.update(self._task, completed=step + 1, text=text)
            return
        done = step + 1 - self._start
        if "loss" in values and done > 1:  # the first step's time is the compiler's
            text += f" left {(time.monotonic() - self._began) / done * (self._total - step - 1):.0f}s"
        self.say(f"step {step:>{len(str(self._total))}}/{self._total} {text}")

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


class Reporter:
    """Holds back each step's metrics until the next step was dispatched; checks them, logs every `log_every`-th.

    A step that changed nothing is reported at once, with its number and why.
    """

    def __init__(self, experiment: Experiment, write, console: Console, devices: int = 1):
        self._experiment, self._write, self._console = experiment, write, console
        self._waiting: tuple[int, dict] | None = None
        self._flops = cost.training_flops(experiment.model, experiment.model.context_length)
        peak = cost.peak_flops(jax.devices()[0].device_kind)
        self._peak = None if peak is None else peak * devices
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time spent on evaluation and saving is nobody's tokens a second; the first step's compilation is not either."""
        self._clock, self._tokens = None, 0.0

    def later(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.now()
        self._waiting = (step, metrics)

    def now(self) -> None:
        if self._waiting is None:
            return
        step, metrics = self._waiting
        self._waiting = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if values["skipped"] >= self._experiment.max_skipped:
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
        if step % self._experiment.log_every == 0 or step + 1 == self._experiment.steps:
            self._write(step, values)
            shown = {name: values[name] for name in ("loss", "accuracy", "learning_rate") if name in values} | speed
            if values["skipped"]:
                shown["skipped"] = values["skipped"]
            self._console.log(step, shown)

    def _speed(self, tokens: float) -> dict[str, float]:
        now = time.monotonic()
        if self._clock is None:
            self._clock = now
            return {}
        self._tokens += tokens
        rate = self._tokens / max(now - self._clock, 1e-9)
        return {"tokens/s": float(round(rate))} | (
            {} if self._peak is None else {"MFU": rate * self._flops / self._peak}
        )
