"""Checkpoints that survive kills, full disks and flipped bits. The only module that knows orbax.

Orbax writes a step under a temporary name, renames it when it is complete, and deletes what
`preservation.LatestAndBest` does not keep. It does not check array data: a flipped bit loads
without an error. So the custom metadata of a step holds our manifest, with the shape, dtype and
fingerprint of each leaf, and `restore` compares them. The folder may be a URL such as
gs://bucket/run. It may hold

    STEP                                  a complete checkpoint
    STEP.orbax-checkpoint-tmp, deleted/   left by a killed save or deletion; removed on opening
    STEP.corrupt                          damaged: read twice, and not what was saved; it is kept,
                                          and read again only where no step is good

A step that the file system does not let us read is not damaged: it is tried again, then refused,
and keeps its name.
"""

import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import jax
import orbax.checkpoint as orbax

from jaxformer.config import storage
from jaxformer.errors import ConfigError
from jaxformer.parallel.peers import Abandoned
from jaxformer.parallel.processes import Work, all_gather_object, first, is_first, that_see
from jaxformer.params import Tree
from jaxformer.runs import lock, manifest, memory, orbax_internals
from jaxformer.runs.checkpoint_reader import (
    PIECE,
    Folder,
    is_local,
    newest_good,
    os_error,
    reason_of,
    resolve,
    steps,
)
from jaxformer.runs.manifest import CheckpointError, key_data
from jaxformer.runs.preservation import HERE, LatestAndBest

Log = Callable[[str], None]
_warn = logging.getLogger(__name__).warning
_works = [Work()]  # the last one is the work that all processes do together now


def _wait_for_all(name: str, **_: Any) -> None:
    """Waits for all processes. `orbax_internals` puts it in place of orbax's own function."""
    _works[-1].wait(name)


class Manager(AbstractContextManager):
    """The checkpoints in `folder`, for the one trainer that writes them. Not thread-safe.

    Keeps the newest step, the `keep_latest` last multiples of `every` and the `keep_best` of lowest
    metric. `score` names what the metric measures; metrics of different scores are not compared.
    Without a name, they are not compared with those of another manager. `log` gets one line for
    each problem that was dealt with, from any thread. Raises ConfigError if the folder cannot be
    written or another manager has it open.
    """

    def __init__(
        self,
        folder: Folder,
        every: int = 1,
        keep_latest: int = 3,
        keep_best: int = 1,
        log: Log = _warn,
        score: str | None = None,
    ):
        orbax_internals.install(_wait_for_all)
        self.folder = resolve(folder)
        self.log = log if is_first() else lambda line: None
        self._score = score
        self._policy = LatestAndBest(self.folder, every, keep_latest, keep_best, score or HERE)
        self._saving: threading.Thread | None = None
        self._problem: str | None = None  # why the last save failed
        # The number of the operating system's error that made the save fail, if one did.
        self._number: int | None = None
        self._logged: tuple[int, str] | None = None  # step and reason of the last logged failure
        self._size = 0  # bytes of the last save
        self._lock: IO[str] | None = None
        self._work = _together(f"the opening of {self.folder}")
        first(self._open)
        if is_local(self.folder) and that_see(Path(self.folder)).count < jax.process_count():
            if self._lock is not None:
                self._lock.close()
            raise ConfigError(
                f"{self.folder}: not all processes see it; give a folder that all hosts share"
                " (--runs)"
            )
        self._handler = orbax.StandardCheckpointHandler()
        self._orbax = self._open_orbax()

    def _open_orbax(self) -> Any:
        """Orbax's manager of the folder."""
        options = orbax.CheckpointManagerOptions(
            preservation_policy=self._policy,
            # A step moves there before its files are deleted: half a step must not look complete.
            todelete_subdir="deleted",
            lightweight_initialize=True,  # reads no step, so a damaged one does not prevent opening
            # If a folder cannot be made in the background, orbax's threads wait 20 minutes for it.
            async_options=orbax.AsyncOptions(
                timeout_secs=1200,
                create_directories_asynchronously=False,
                barrier_sync_fn=self._wait_in_thread,
            ),
        )
        return orbax.CheckpointManager(
            self.folder, options=options, item_handlers={"state": self._handler}
        )

    def _wait_in_thread(self, key: str, timeout_ms: int) -> None:
        """Orbax's wait for all processes in its threads.

        A thread may come here with an error that nobody has seen yet. The other processes wait for
        something that this process will not do any more, so they have to be told.
        """
        error = sys.exception()
        if (
            error is not None
            and not isinstance(error, Abandoned)
            and threading.current_thread() is not threading.main_thread()
        ):
            self._work.abandon(self._why(error))
        self._work.wait(key)

    def _open(self) -> None:
        """Makes the folder, takes its lock, and removes the remains of a killed trainer."""
        self.steps()  # raises for a URL whose packages are missing
        try:
            storage.retry(lambda: self.folder.mkdir(parents=True, exist_ok=True), self.folder)
            self._lock = lock.take(self.folder, self.log) if is_local(self.folder) else None
        except OSError as error:
            if storage.passes(error):
                raise
            raise ConfigError(
                f"{self.folder}: cannot be written ({error}); choose another folder (--runs)"
            ) from None
        self._tidy()

    def __exit__(self, *_) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps on disk, in order."""
        return steps(self.folder)

    def is_among_best(self, metric: float) -> bool:
        """Whether a save with this metric would be kept as one of the best."""
        self.wait()

        def ask() -> bool:
            try:
                return self._policy.is_among_best(metric, self.steps())
            except OSError:  # unknown, so one more step is kept
                return True

        return first(ask)

    def save(
        self,
        step: int,
        state: Tree,
        metadata: dict | None = None,
        metric: float | None = None,
        wait: bool = False,
    ):
        """Starts to save. When this returns, the state may be donated.

        Waits for a save that still runs, and never skips one. A failed save, for example because
        that step or a later one exists, leaves no step and is logged. With `wait` it is tried again
        where the error may pass, and raises OSError or CheckpointError. `metadata` is JSON (else
        TypeError). The lowest `metric` is best; NaN is the worst, and a step with None is no
        candidate. Raises ConfigError if the lock is gone, for example after `rm -rf`: another
        trainer may have started.
        """
        self.wait()
        metric = None if metric is None else float(metric)
        self._policy.metrics[step] = self._policy.score, metric
        leaves = {
            name: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)
            for name, leaf in manifest.named_leaves(state)
        }
        memory.give_back()
        # An error in the computation of the state is raised here.
        sealed = manifest.seal(step, metric, metadata, leaves, self._score)
        data = {name: key_data(leaf) for name, leaf in leaves.items() if leaf.size}
        self._begin(step, data, sealed)
        if wait:
            self._until_saved(step, data, sealed)

    def _begin(self, step: int, data: dict[str, jax.Array], sealed: dict[str, str]) -> None:
        """Begins to write a step. A failure, now or later, is logged."""
        if first(self._is_removed):
            gone = (
                f"{self.folder}.lock was removed while this run held it, so another trainer may"
                " have started"
            )
            raise ConfigError(f"{gone}; this one stops at step {step} without saving")
        self._problem = self._number = None
        self._size = size = sum(leaf.nbytes for leaf in data.values())
        # Arrays of a CPU lie in the host's memory, so a copy of all would double it.
        limit = memory.in_flight(data.values()) if jax.default_backend() == "cpu" else None
        orbax_internals.limit_bytes(self._handler, limit)
        self._work = _together(f"the save of step {step}")
        try:
            first(lambda: self._prepare_folder(step, size))
            if list(self._orbax.all_steps()) != self.steps():
                self._orbax.reload()  # a step was renamed or removed
            pieces = jax.tree.map(lambda _: orbax.SaveArgs(chunk_byte_size=PIECE), data)
            items = orbax.args.Composite(state=orbax.args.StandardSave(data, pieces))
            self._orbax.save(step, args=items, custom_metadata=sealed, force=True)
        except Exception as error:
            self._failed(step, error)
        else:
            self._saving = threading.Thread(target=self._finish, args=(step,))
            self._saving.start()
        if limit is not None:  # then orbax copies while it writes, so the state must not change
            self.wait()
            memory.give_back()

    def _is_removed(self) -> bool:
        """Whether the lock is gone, so that another trainer may have started."""
        try:
            return self._lock is not None and not lock.is_in_place(self._lock)
        except OSError:
            return False

    def _until_saved(self, step: int, data: dict[str, jax.Array], sealed: dict[str, str]) -> None:
        """Waits for a save, and writes all again where it fails for a reason that may pass.

        All is written again because the parts that were written may be lost.
        """
        for pause in (*storage.WAITS, None):
            self.wait()
            results = all_gather_object((self._problem, self._number))
            failures = [(why, number) for why, number in results if why]
            if not failures:
                return
            numbers = [number for _, number in failures if number is not None]
            passing = [number for number in numbers if number not in storage.LASTING]
            if pause is None or not passing:
                break
            time.sleep(pause)
            self._begin(step, data, sealed)
        good = max((other for other in self.steps() if other < step), default=0)
        told = f"{failures[0][0]}; mend that, and the same command goes on after step {good}"
        if passing:
            raise OSError(passing[0], told, str(self.folder))
        raise CheckpointError(told)

    def restore(
        self, abstract_state: Tree, step: int | None = None
    ) -> tuple[int, Tree, dict] | None:
        """The newest good checkpoint, or that of `step`, as (step, state, metadata).

        None if there never was one. `abstract_state` is a tree of `jax.ShapeDtypeStruct`, with
        sharding or without (then: the first local device); the state has its structure. If a step
        is damaged, the next older one is tried; if that is good, the damaged one is renamed to
        STEP.corrupt and logged with the reason. Raises CheckpointError if no step is good, if
        `step` is missing or damaged, and if the checkpoint's leaves differ from `abstract_state` in
        name, shape or dtype. Raises OSError, and renames nothing, if a step cannot be read.
        """
        self.wait()

        def put_aside(bad, why):
            return first(lambda: self._put_aside(bad, why))

        return newest_good(self.folder, abstract_state, "", step, put_aside)

    def wait(self) -> None:
        """Waits until no save is running."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._problem is not None:
            self._forget_failures()

    def _forget_failures(self) -> None:
        """Drops the errors of a failed save, which orbax keeps and would raise in later saves.

        `_failed` has logged one of them.
        """
        with suppress(Exception):
            self._orbax.wait_until_finished()
        checkpointer = orbax_internals.checkpointer_of(self._orbax)
        # Each failure is raised once. A thread of the failed save may still run.
        for _ in range(100):
            try:
                return checkpointer.wait_until_finished()
            except Exception:
                continue

    def close(self) -> None:
        """Waits for the save, then lets another manager open the folder."""
        self.wait()
        self._orbax.close()
        if self._lock is not None:
            self._lock.close()

    def _finish(self, step: int) -> None:
        """Waits, in a thread of its own, for the end of a save."""
        try:
            self._orbax.wait_until_finished()
        except BaseException as error:
            return self._failed(step, error)
        self._tidy()
        memory.give_back()

    def _failed(self, step: int, error: BaseException) -> None:
        """Logs a failed save, tells the other processes, and removes what it left."""
        reason = self._why(error)
        self._number = os_error(error)[0]
        if not isinstance(error, Abandoned):
            # The others stop to wait for this process, and give up the same step.
            self._work.abandon(reason)
        self._problem = f"{self.folder}: step {step} was not saved: {reason}"
        self._tidy()
        if self._logged != (step, reason):  # a further try fails without a line of its own
            self.log(f"{self._problem}; earlier checkpoints are kept")
        self._logged = step, reason

    def _why(self, error: BaseException) -> str:
        """Why a save failed; where another process was the cause, that one's reason.

        The other process may have another disk.
        """
        if isinstance(error, Abandoned):
            return str(error)
        reason = reason_of(error)
        with suppress(OSError):
            if "No space left" in reason or "Disk quota" in reason:
                free = shutil.disk_usage(self.folder).free
                return f"{reason}; it needs up to {self._size:,} bytes, {free:,} are free"
        return reason

    def _prepare_folder(self, step: int, size: int) -> None:
        """Prepares the folder for a step of `size` bytes. Raises where that cannot be written."""
        if self._lock is not None:
            # Raises where it is unknown whether the lock is in place: then nothing is written.
            lock.is_in_place(self._lock)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        if later := [other for other in self.steps() if other >= step]:
            raise ConfigError(
                f"step {later[-1]} exists; move what is newer to another folder first"
            )
        # A full disk gives one error here. Later, each of orbax's writes would fail with a
        # traceback of its own on stderr.
        if is_local(self.folder) and shutil.disk_usage(self.folder).free < size:
            self._delete_superfluous(step)
            if shutil.disk_usage(self.folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _delete_superfluous(self, step: int) -> None:
        """On a full disk, deletes the steps that the save of `step` makes superfluous.

        The newest step is never deleted.
        """
        earlier = self.steps()
        preserve = self._policy.should_preserve(
            [SimpleNamespace(step=other) for other in (*earlier, step)], context=None
        )
        for old, is_kept in zip(earlier[:-1], preserve, strict=False):
            if not is_kept:
                (self.folder / str(old)).rename(self.folder / f"{old}.orbax-checkpoint-tmp")
        self._tidy()

    def _tidy(self) -> None:
        """Removes the remains of killed or failed saves and deletions.

        Call it only while no save is running.
        """
        if not is_first():
            return
        try:
            for path in self.folder.iterdir():
                if not _is_left_over(path.name):
                    continue
                if os.path.islink(path):  # in a stranger's folder; its target stays
                    path.unlink()
                else:
                    path.rmtree()
        except FileNotFoundError:  # a bucket without objects has no folder
            pass
        except OSError as error:
            self.log(
                f"{self.folder}: what an earlier save or deletion left cannot be removed ({error})"
            )

    def _put_aside(self, step: int, why: str) -> None:
        """Renames a damaged step to STEP.corrupt, and logs why."""
        names = storage.list_names(self.folder)
        count = len([name for name in names if name.startswith(f"{step}.corrupt")])
        name = f"{step}.corrupt-{count + 1}" if count else f"{step}.corrupt"
        try:
            storage.retry(lambda: (self.folder / str(step)).rename(self.folder / name), self.folder)
            outcome = f"renamed to {name}"
        except OSError as error:
            if storage.passes(error):
                raise
            outcome = f"it cannot be renamed ({error})"
        self.log(f"{self.folder}: step {step} is damaged: {why}; {outcome}, an older one is taken")


def _is_left_over(name: str) -> bool:
    """Whether a file's name is that of a killed or failed save, or of a deletion."""
    step, _, suffix = name.partition(".")
    return name == "deleted" or (step.isdecimal() and suffix.startswith("orbax-checkpoint-tmp"))


def _together(what: str) -> Work:
    """Begins a work that all processes do together. Orbax's waits belong to it from now on."""
    _works[:] = [Work(what)]
    return _works[0]
