"""What a run prints, and the check of each step's metrics on the way to its record.

The training loop hands every step's metrics to `Reporter.later`.
"""

import errno
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxformer.evaluation.metric import as_numbers

# Scores that no record has: they follow from the loss, or are the same at each evaluation.
UNRECORDED = ("perplexity", "bits", "tokens", "examples", "scored", "unit")


class Console:
    """Prints a line for each log and each evaluation; prints nothing unless `heard`."""

    def __init__(self, total: int, heard: bool = True):
        self._total = total
        self._heard = heard
        # When the first step was done, and which it was: later times exclude the compiler's.
        self._first: tuple[float, int] | None = None

    def step(self, step: int, values: dict[str, float]) -> None:
        """The values of a training step, and the time left."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        began, first = self._first
        left = (
            f" left {(now - began) / (step - first) * (self._total - step - 1):.0f}s"
            if step > first
            else ""
        )
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
            # a log file on a full disk, a pager that was closed, a terminal that is gone
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO):
                    raise


def in_words(scores: Mapping[str, Any], baseline: float | None) -> str:
    """The last line of a run: its scores in their unit.

    `baseline` is the unigram entropy of the text, in nats a token.
    """

    def shown(value):
        return value if isinstance(value, str) else f"{value:.4g}"

    unit = scores["unit"]
    is_of_tokens = "perplexity" in scores
    counted = "" if unit == "examples" else f", {scores[unit]:,.0f} {unit}"
    loss = f"{scores['loss']:.4f} {unit_of_loss(scores)}".strip()
    words = [f"validation loss {loss} ({scores['scored']}{counted})"]
    if is_of_tokens:
        words.append(f"perplexity {scores['perplexity']:.3f}")
    others = [name for name in scores if name not in ("loss", unit, *UNRECORDED)]
    words += [f"{name} {shown(scores[name])}" for name in others]
    entropy = f" (unigram entropy {baseline:.4f})" if is_of_tokens and baseline is not None else ""
    return ", ".join(words) + entropy


def unit_of_loss(scores: Mapping[str, Any]) -> str:
    """The unit of the loss among scores: "nats a token", "an image"; "" where nothing names one."""
    unit = scores.get("unit", "examples")
    if "perplexity" in scores:
        return "nats a token"
    if unit == "examples":
        return ""
    article = "an" if unit[0] in "aeiou" else "a"
    return f"{article} {unit.removesuffix('s')}"


def _format(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
    return f"{value:.2e}"


class NonFinite(RuntimeError):
    """Steps stayed bad, up to `step`. The parameters are those of the last good step."""

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step


# Values that are in the record but not on the progress line.
QUIET = ("grad_norm", "tokens", "loss_scale", "learning_rate", "skipped")


class Reporter:
    """Checks the metrics of every step, and logs each `every`-th step's and the last one's.

    It reads a step's metrics only after the next step is dispatched, so the device never waits. A
    step that changed nothing is reported at once, with its number and the reason.
    """

    def __init__(self, write, console: Console, *, every: int, last: int, max_skipped: int):
        self._write = write
        self._console = console
        self._every = every
        self._last = last
        self._max_skipped = max_skipped
        self._waiting: tuple[int, dict, float | None] | None = None
        self._clock: float | None = None
        # Of the steps since the clock began, which is after the first step is compiled.
        self._count = 0.0
        self._work = 0.0

    def restart_clock(self) -> None:
        """Restarts the rate's clock: time for evaluation and saving does not count."""
        self._clock = time.monotonic()
        self._count = 0.0
        self._work = 0.0

    def later(self, step: int, metrics: dict[str, jax.Array], work: float | None = None) -> None:
        """Reports the step before, and keeps the metrics of this one for the next call.

        `work` is the time that the step's FLOPs would take at the peak of all devices, in seconds;
        None where that is unknown.
        """
        self.now()
        self._waiting = (step, metrics, work)

    def is_idle(self) -> bool:
        """Whether the device has finished all steps."""
        return self._waiting is None or self._waiting[1]["loss"].is_ready()

    def now(self) -> None:
        """Reports the waiting step. Raises NonFinite after too many bad steps in a row."""
        if self._waiting is None:
            return
        step, metrics, work = self._waiting
        self._waiting = None
        unit = getattr(metrics, "unit", "tokens")
        values = as_numbers(jax.device_get(metrics))
        bad_variables = values.pop("bad_variables", 0.0)
        if values["skipped"] >= self._max_skipped:
            raise NonFinite(_why_it_ends(step, values, bad_variables), step)
        is_empty = values[unit] <= 0 and math.isfinite(values["grad_norm"])
        if is_empty:  # such a step has no mean loss: its record has the number of tokens instead
            self._console.say(
                f"step {step} changed nothing: the weights of its batch sum to {values[unit]:g}"
            )
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        elif values["skipped"]:
            reason = _why_it_is_skipped(values, bad_variables)
            self._console.say(f"step {step} changed nothing: {reason}")
        count = values[unit] if is_empty else values.pop(unit)
        speed = self._speed(count, unit, work)
        if step % self._every == 0 or step == self._last:
            self._write(step, values)
            self._console.step(step, _progress(values, unit) | speed)

    def _speed(self, count: float, unit: str, work: float | None) -> dict[str, float]:
        now = time.monotonic()
        if self._clock is None:
            self._clock = now
            return {}
        self._count += count if math.isfinite(count) else 0  # a batch's weights may be NaN
        self._work += work or 0
        seconds = max(now - self._clock, 1e-9)
        return {f"{unit}/s": float(round(self._count / seconds))} | (
            {} if work is None else {"MFU": self._work / seconds}
        )


def _figures(values: dict[str, float]) -> str:
    return f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"


def _is_finite(values: dict[str, float]) -> bool:
    return math.isfinite(values["loss"] + values["grad_norm"])


def _why_it_ends(step: int, values: dict[str, float], bad_variables: float) -> str:
    """Why bad steps in a row end a run."""
    if not _is_finite(values):
        problem = "not finite"
    elif bad_variables:
        problem = "new values of variables were not finite"
    else:
        problem = "far above the steps before"
    times = f"{int(values['skipped'])} steps in a row, up to step {step}"
    advice = "lower --optimizer.learning-rate or look at the data"
    return f"{problem} for {times} ({_figures(values)}); {advice}"


def _why_it_is_skipped(values: dict[str, float], bad_variables: float) -> str:
    """Why a step changed nothing: its figures say so where they are not finite."""
    cause = ""
    if _is_finite(values) and bad_variables:
        cause = f", new values of {bad_variables:g} variables are not finite"
    elif _is_finite(values):
        cause = ", far above the steps before"
    scale = ""
    if "loss_scale" in values:
        scale = f"; the loss scale is now {values['loss_scale']:g}"
    return f"{_figures(values)}{cause}{scale}"


def _progress(values: dict[str, float], unit: str) -> dict[str, float]:
    """The values of the progress line, in its order."""
    others = sorted(name for name in values.keys() - {"loss", unit, *QUIET} if "rms/" not in name)
    names = ["loss", *others, "learning_rate"]
    if values["skipped"] > 0:
        names.append("skipped")
    return {name: values[name] for name in names if name in values}
