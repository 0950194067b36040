"""The record of a run (metrics.jsonl), and optional loggers beside it."""

import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from etils import epath

from jaxformer import config
from jaxformer.config import no_links, storage
from jaxformer.errors import install_command
from jaxformer.runs.reporter import (  # noqa: F401  (files of users may import them here)
    Console,
    NonFinite,
    Reporter,
)

log = logging.getLogger("jaxformer")
LARGEST = 10_000_000_000  # bytes of a record; a stranger's file may have holes and never end


class Record:
    """metrics.jsonl, the truth about a run, one record a line; and loggers beside it.

    A line is strict JSON: a number that is not finite is the text "NaN", "Infinity" or "-Infinity",
    and `read_records` gives the number again. A killed run leaves a torn last line; it is dropped
    on opening. A file with damaged lines is copied before they are dropped. An object in a bucket
    cannot grow, so there `save` writes all lines again. Without a path (not on the first process)
    nothing is written.

    A logger has `name`, `write(step, values)` and `close()`. One that raises is reported once and
    dropped.
    """

    def __init__(self, path: epath.PathLike | None):
        self.path = None if path is None else epath.Path(path)
        self.lines: list[dict] = []
        if self.path is not None:
            self.lines, damaged = _parse(self.path)
            if damaged:
                _keep_a_copy(self.path, damaged)
        self.loggers: list[Any] = []
        self.reached = 0  # the number of steps that an earlier start recorded
        self._behind: OSError | None = None  # why the file lacks lines
        self._grows = "://" not in str(path)

    def rewind(self, step: int) -> None:
        """Forgets what happened after `step` steps: the steps from there on are done again."""
        self.reached = steps_done(self.lines)
        self.lines = [line for line in self.lines if _steps_needed(line) <= step]
        self._write_all(storage.WAITS)

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.path is None:
            return
        line = {"step": step, **values}
        self.lines.append(line)
        if self._grows:
            self._write_out(self._append)
        self._tell_loggers(
            lambda logger: logger.write(step, values), "%s stopped: %s; the run goes on without it"
        )

    def save(self, waits: Sequence[float] = ()) -> OSError | None:
        """Brings all lines into the file; tries again after each of `waits` seconds.

        Returns the error that keeps lines out of the file, else None. Call it before a checkpoint:
        a checkpoint whose record lacks lines would lose them.
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
        """Calls `write`, or writes all lines again if the last try failed.

        Lines that cannot be written now are written by a later call.
        """
        try:
            (self._write_all if self._behind else write)()
            self._behind = None
        except OSError as error:
            if not self._behind:
                log.warning(
                    "%s cannot be written (%s); the run goes on, its lines are written once there"
                    " is room",
                    self.path,
                    error,
                )
            self._behind = error

    def _append(self) -> None:
        assert self.path is not None
        # The first write of a start made the file anew. A link there would be a stranger's.
        with open(self.path, "a", opener=no_links.opener(self.path.parent)) as file:
            file.write(config.to_json(self.lines[-1]) + "\n")

    def _write_all(self, waits: Sequence[float] = ()) -> None:
        if self.path is not None:
            config.write_atomically(
                self.path, "".join(config.to_json(line) + "\n" for line in self.lines), waits=waits
            )


def read_records(path: epath.PathLike) -> list[dict]:
    """The records of a metrics.jsonl; damaged lines are left out."""
    return _parse(path)[0]


def steps_done(records: Sequence[dict]) -> int:
    """The number of steps that a run has done.

    A step's record has its number, counted from 0; an evaluation's has the number of steps done.
    """
    return max((_steps_needed(record) for record in records), default=0)


def _steps_needed(record: dict) -> int:
    """The number of steps that are done when a record is written."""
    return record["step"] if "validation_loss" in record else record["step"] + 1


def _parse(path: epath.PathLike) -> tuple[list[dict], list[int]]:
    """(records, numbers of damaged lines).

    A kill leaves a last line without an end, which does not count as damage.
    """
    path = epath.Path(path)
    records: list[dict] = []
    damaged: list[int] = []
    lines = _bytes(path).split(b"\n") if storage.has_name(path) else [b""]
    for number, line in enumerate(lines, 1):
        try:
            record = config.with_numbers(json.loads(line))
            if type(record["step"]) is not int or not all(
                isinstance(value, int | float) for value in record.values()
            ):
                raise ValueError(record)
            records.append(record)
        # no UTF-8, no JSON, no object, no step, no numbers
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            if number < len(lines):
                damaged.append(number)
    return records, damaged


def _keep_a_copy(path: epath.Path, damaged: list[int]) -> None:
    """Copies a record with damaged lines before they are dropped, under a new name."""
    names = (path.with_name(f"{path.name}.damaged-{n}") for n in itertools.count(1))
    copy = next(name for name in names if not storage.exists(name))
    config.write_atomically(copy, _bytes(path))
    log.warning(
        "%s: no records in lines %s; they are left out, the file as it was is %s",
        path,
        damaged,
        copy,
    )


def _bytes(path: epath.Path) -> bytes:
    try:
        return storage.retry(lambda: config.read_bytes(path, path.parent, LARGEST), path)
    except OSError as error:
        raise storage.mistake(error, f"{path}: cannot be read ({error})") from None


def open_loggers(
    names: Sequence[str], folder: epath.PathLike, run_name: str, description: dict
) -> list[Any]:
    """The optional loggers with these names. One that cannot start is reported and left out.

    The folder's metrics.jsonl, already rewound, says where the run goes on.
    """
    records = read_records(epath.Path(folder) / "metrics.jsonl")
    loggers: list[Any] = []
    for name in names:
        try:
            open_logger = {"tensorboard": _tensorboard, "wandb": _wandb}[name]
            loggers.append(open_logger(folder, run_name, description, records))
        except Exception as error:
            log.warning(
                "%s is off: %s: %s (%s)",
                name,
                type(error).__name__,
                error,
                install_command("log"),
            )
    return loggers


def _tensorboard(
    folder: epath.PathLike, run_name: str, description: dict, records: Sequence[dict]
) -> SimpleNamespace:
    """Event files of TensorBoard.

    A start makes TensorBoard forget what an earlier one wrote about steps that are done again.
    """
    from tensorboardX import SummaryWriter

    place = os.path.join(folder, "tensorboard")
    no_links.check_folder(place, folder)
    earlier = list(epath.Path(place).iterdir()) if epath.Path(place).is_dir() else []
    done = steps_done(records)
    writer = SummaryWriter(
        place,
        flush_secs=5,  # a killed run loses no more
        purge_step=done if earlier else None,
        # The package's own names differ only by the second.
        filename_suffix=f".{len(earlier)}.{os.getpid()}",
    )

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    # TensorBoard forgets step `done` too, but the evaluation after `done` steps stays.
    for record in records if earlier else ():
        if record["step"] >= done:
            write(record["step"], {name: value for name, value in record.items() if name != "step"})
    return SimpleNamespace(name="tensorboard", write=write, close=writer.close)


def _wandb(
    folder: epath.PathLike, run_name: str, description: dict, records: Sequence[dict]
) -> SimpleNamespace:
    """A run of Weights & Biases.

    The service's own counter never goes back, so our steps are a value of their own.
    """
    import wandb  # pyrefly: ignore[missing-import]

    place = None if "://" in str(folder) else str(folder)
    no_links.check_folder(os.path.join(folder, "wandb"), folder)
    identity = _wandb_id(epath.Path(folder), run_name, records)
    run = wandb.init(
        project="jaxformer",
        name=run_name,
        id=identity,
        dir=place,
        config=description,
        resume="allow",
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def write(step: int, values: Mapping[str, float]) -> None:
        run.log({"step": step, **values})

    return SimpleNamespace(name="wandb", write=write, close=run.finish)


def _wandb_id(folder: epath.Path, run_name: str, records: Sequence[dict]) -> str:
    """The service's id for this folder's run. The same experiment in another folder is another run.

    Older versions used the name alone, so a run of theirs that goes on keeps it.
    """
    file = folder / "wandb_id.txt"
    if not storage.has_name(file):
        new = run_name if records else f"{run_name}-{secrets.token_hex(4)}"
        config.write_atomically(file, new)
    return config.read_text(file, folder).strip()
