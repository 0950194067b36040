"""Checkpoints that survive kills, full disks and flipped bits. The only module that knows orbax.

Orbax writes a step under a temporary name, renames it when it is complete, and deletes what `LatestAndBest` does not keep.
It does not check array data: a flipped bit loads in silence. So its custom metadata holds our manifest, with the shape, dtype
and fingerprint of each leaf, and `restore` compares them. The folder may be a URL such as gs://bucket/run. It may hold

    STEP                                  a complete checkpoint
    STEP.orbax-checkpoint-tmp, deleted/   left by a killed save or deletion; removed when the folder is opened
    STEP.corrupt      damaged: it was read, twice, and is not what was saved; kept, and read only where no step is good

A step that cannot be read, because of the file system, is no damaged one: it is tried again, then refused, and stays.
"""

import errno
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import jax
import orbax.checkpoint as orbax
from etils import epath

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
    read_manifest,
    reason_of,
    resolve,
    steps,
)
from jaxformer.runs.manifest import CheckpointError, Damaged, key_data

Log = Callable[[str], None]
HERE = "metrics of this manager"  # what a metric without a name is of; on the disk it has none
_warn = logging.getLogger(__name__).warning
_works = [Work()]  # the last one is what all processes do together now


def _wait_for_all(name: str, **_: Any) -> None:
    """Orbax's wait for all processes, as `orbax_internals` puts it in place of orbax's own."""
    _works[-1].wait(name)


class LatestAndBest:
    """Orbax's preservation policy: the newest step, the last `latest` multiples of `every`, and the `best` of lowest metric.

    A step between two multiples is deleted when a newer one exists, so the kept steps do not depend on when a run was stopped.
    NaN ranks last. Metrics of different scores are not compared: the best of each score are kept. Orbax's own BestN has
    no rule for NaN, and opens no folder in which one step's metric is damaged.
    """

    def __init__(self, folder: epath.Path, every: int, latest: int, best: int, score: str = HERE):
        self.folder, self.every, self.latest, self.best, self.score = folder, every, latest, best, score
        self.metrics: dict[int, tuple[str | None, float | None]] = {}  # step -> (what it is a metric of, metric)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        regular = [step for step in sorted(steps) if step % self.every == 0]
        ranks, damaged = self.ranks(steps if self.best else [])
        keep = {*regular[-self.latest :], max(steps, default=0), *damaged}  # `restore` judges the damaged ones
        for ranked in ranks.values():
            keep.update(step for _, step in ranked[: self.best])
        return [step in keep for step in steps]

    def ranks(self, steps: Sequence[int]) -> tuple[dict[str | None, list[tuple[float, int]]], list[int]]:
        """((metric, step) of the steps, the best first, by score; the steps whose manifest is damaged or cannot be read)."""
        ranks: dict[str | None, list[tuple[float, int]]] = {}
        damaged = []
        for step in steps:
            try:
                if step not in self.metrics:
                    contents = read_manifest(self.folder / str(step))
                    self.metrics[step] = contents["score"], contents["metric"]
            except (Damaged, OSError):  # what cannot be read is not deleted either
                damaged.append(step)
                continue
            score, metric = self.metrics[step]
            if metric is not None:
                ranks.setdefault(score, []).append((math.inf if math.isnan(metric) else metric, step))
        return {score: sorted(ranked) for score, ranked in ranks.items()}, damaged

    def is_among_best(self, metric: float, steps: Sequence[int]) -> bool:
        """Whether a step of this metric would be kept as one of the `best` beside these steps. NaN never is."""
        if not self.best or math.isnan(metric):
            return False
        ranked = self.ranks(steps)[0].get(self.score, [])
        return len(ranked) < self.best or metric < ranked[self.best - 1][0]


class Manager(AbstractContextManager):
    """The checkpoints in `folder`, for the one trainer that writes them. A context manager; not thread-safe.

    Keeps the newest step, the `keep_latest` last multiples of `every` and the `keep_best` of lowest metric. `score` names
    what the metric is of: metrics of another score are not compared with it, nor, without a name, those of another manager.
    `log` gets one line for each problem that was dealt with, from any thread. Raises ConfigError if the folder cannot be
    written or another manager has it open.
    """

    def __init__(
        self, folder: Folder, every: int = 1, keep_latest: int = 3, keep_best: int = 1, log: Log = _warn,
        score: str | None = None,
    ):  # fmt: skip
        orbax_internals.install(_wait_for_all)
        self.folder = resolve(folder)
        self.log = log if is_first() else lambda line: None
        self._score = score
        self._policy = LatestAndBest(self.folder, every, keep_latest, keep_best, score or HERE)
        self._saving: threading.Thread | None = None
        self._problem: str | None = None  # why the last save failed
        self._number: int | None = None  # the number of the operating system's error that was the cause, if one was
        self._logged: tuple[int, str] | None = None  # the last failure that the log has
        self._size = 0  # bytes of the last save
        self._lock: IO[str] | None = None
        self._work = _together(f"the opening of {self.folder}")
        first(self._open)
        if is_local(self.folder) and that_see(Path(self.folder)).count < jax.process_count():
            if self._lock is not None:
                self._lock.close()
            raise ConfigError(f"{self.folder}: not all processes see it; give a folder that all hosts share (--runs)")
        options = orbax.CheckpointManagerOptions(
            preservation_policy=self._policy,
            todelete_subdir="deleted",  # a step moves there before its files go, because half a step must not look like one
            lightweight_initialize=True,  # reads no step, so a damaged one does not prevent opening
            # In the background, a folder that cannot be made leaves orbax's threads waiting for it for 20 minutes.
            async_options=orbax.AsyncOptions(
                timeout_secs=1200,
                create_directories_asynchronously=False,
                barrier_sync_fn=self._wait_in_thread,
            ),
        )
        self._handler = orbax.StandardCheckpointHandler()
        self._orbax = orbax.CheckpointManager(self.folder, options=options, item_handlers={"state": self._handler})

    def _wait_in_thread(self, key: str, timeout_ms: int) -> None:
        """Orbax's wait for all processes in its threads, which may come here with an error that nobody has seen yet.

        The others wait elsewhere, for what this process will not do any more: they have to know.
        """
        error = sys.exception()
        if error is not None and not isinstance(error, Abandoned) and threading.current_thread() is not threading.main_thread():
            self._work.abandon(self._why(error))
        self._work.wait(key)

    def _open(self) -> None:
        self.steps()  # refuses a URL whose packages are missing
        try:
            storage.retry(lambda: self.folder.mkdir(parents=True, exist_ok=True), self.folder)
            self._lock = lock.take(self.folder, self.log) if is_local(self.folder) else None
        except OSError as error:
            if storage.passes(error):
                raise
            raise ConfigError(f"{self.folder}: cannot be written ({error}); choose another folder (--runs)") from None
        self._tidy()

    def __exit__(self, *_) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps on disk, in order."""
        return steps(self.folder)

    def is_among_best(self, metric: float) -> bool:
        """Whether a save with this metric would now be kept as one of the best."""
        self.wait()

        def ask() -> bool:
            try:
                return self._policy.is_among_best(metric, self.steps())
            except OSError:  # nobody knows, so one step more is kept
                return True

        return first(ask)

    def save(self, step: int, state: Tree, metadata: dict | None = None, metric: float | None = None, wait: bool = False):
        """Starts to save; when this returns the state may be donated. Waits for a save still running, never skips one.

        A failed save, for example if that step or a later one exists, leaves no step and is logged; with `wait` it is tried
        again where the error may pass, and raises OSError, or else CheckpointError. `metadata` is JSON (else TypeError). The
        lowest `metric` is best, NaN the worst, None no candidate. ConfigError if the lock is gone, for example after `rm -rf`:
        another trainer may have started.
        """
        self.wait()
        metric = None if metric is None else float(metric)
        self._policy.metrics[step] = self._policy.score, metric
        leaves = dict(manifest.named_leaves(state))
        leaves = {name: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf) for name, leaf in leaves.items()}
        memory.give_back()
        # an error in the computation of the state appears here
        sealed = manifest.seal(step, metric, metadata, leaves, self._score)
        data = {name: key_data(leaf) for name, leaf in leaves.items() if leaf.size}
        self._begin(step, data, sealed)
        if wait:
            self._until_saved(step, data, sealed)

    def _begin(self, step: int, data: dict[str, jax.Array], sealed: dict[str, str]) -> None:
        """Begins to write a step. What fails here or later is logged."""
        if first(self._is_removed):
            gone = f"{self.folder}.lock was removed while this run held it, so another trainer may have started"
            raise ConfigError(f"{gone}; this one stops at step {step} without saving")
        self._problem = self._number = None
        self._size = size = sum(leaf.nbytes for leaf in data.values())
        # where arrays lie in the host's memory, a copy of all would double it
        limit = memory.in_flight(data.values()) if jax.default_backend() == "cpu" else None
        orbax_internals.limit_bytes(self._handler, limit)
        self._work = _together(f"the save of step {step}")
        try:
            first(lambda: self._make_room(step, size))
            if list(self._orbax.all_steps()) != self.steps():
                self._orbax.reload()  # something was renamed
            pieces = jax.tree.map(lambda _: orbax.SaveArgs(chunk_byte_size=PIECE), data)
            items = orbax.args.Composite(state=orbax.args.StandardSave(data, pieces))
            self._orbax.save(step, args=items, custom_metadata=sealed, force=True)
        except Exception as error:
            self._failed(step, error)
        else:
            self._saving = threading.Thread(target=self._finish, args=(step,))
            self._saving.start()
        if limit is not None:  # then orbax copies while it writes
            self.wait()
            memory.give_back()

    def _is_removed(self) -> bool:
        """Whether the lock is gone, so that another trainer may have started."""
        try:
            return self._lock is not None and not lock.is_in_place(self._lock)
        except OSError:
            return False

    def _until_saved(self, step: int, data: dict[str, jax.Array], sealed: dict[str, str]) -> None:
        """Waits for a save. Where it fails for a reason that may pass, all is written again: what was written may be lost."""
        for pause in (*storage.WAITS, None):
            self.wait()
            found = [(why, number) for why, number in all_gather_object((self._problem, self._number)) if why]
            if not found:
                return
            numbers = [number for _, number in found if number is not None and number not in storage.LASTING]
            if pause is None or not numbers:
                break
            time.sleep(pause)
            self._begin(step, data, sealed)
        good = max((other for other in self.steps() if other < step), default=0)
        told = f"{found[0][0]}; mend that, and the same command goes on after step {good}"
        if numbers:
            raise OSError(numbers[0], told, str(self.folder))
        raise CheckpointError(told)

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[int, Tree, dict] | None:
        """The newest good checkpoint, or that of `step`, as (step, state, metadata). None if there never was one.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct`, with sharding or without (then: the first local device);
        the state has its structure. Of a damaged step the next older one is tried; if that is good, the damaged one is
        renamed to STEP.corrupt, and logged with the reason. Raises CheckpointError if none is good, if `step` is missing or
        damaged, and if the checkpoint's leaves differ from `abstract_state` in name, shape or dtype. Raises OSError, and
        renames nothing, if a step cannot be read.
        """
        self.wait()

        def put_aside(bad, why):
            return first(lambda: self._put_aside(bad, why))

        return newest_good(self.folder, abstract_state, "", step, put_aside)

    def wait(self) -> None:
        """Until no save is running."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._problem is not None:
            self._forget_failures()

    def _forget_failures(self) -> None:
        """Drops the errors of a failed save, which orbax keeps and would raise in later saves. `_failed` has logged one."""
        with suppress(Exception):
            self._orbax.wait_until_finished()
        checkpointer = orbax_internals.checkpointer_of(self._orbax)
        for _ in range(100):  # each failure is raised once; a thread of the failed save may still run
            try:
                return checkpointer.wait_until_finished()
            except Exception:
                continue

    def close(self) -> None:
        """Waits, then lets another manager open the folder."""
        self.wait()
        self._orbax.close()
        if self._lock is not None:
            self._lock.close()

    def _finish(self, step: int) -> None:
        """In a thread: the end of a save."""
        try:
            self._orbax.wait_until_finished()
        except BaseException as error:
            return self._failed(step, error)
        self._tidy()
        memory.give_back()

    def _failed(self, step: int, error: BaseException) -> None:
        reason, self._number = self._why(error), os_error(error)[0]
        if not isinstance(error, Abandoned):
            self._work.abandon(reason)  # the others stop to wait for this process, and give up the same step
        self._problem = f"{self.folder}: step {step} was not saved: {reason}"
        self._tidy()
        if self._logged != (step, reason):  # else it was tried once more
            self.log(f"{self._problem}; earlier checkpoints are kept")
        self._logged = step, reason

    def _why(self, error: BaseException) -> str:
        """Why a save failed. Where another process was the cause, what that one said: its disk may be another one."""
        if isinstance(error, Abandoned):
            return str(error)
        reason = reason_of(error)
        with suppress(OSError):
            if "No space left" in reason or "Disk quota" in reason:
                free = shutil.disk_usage(self.folder).free
                return f"{reason}; it needs up to {self._size:,} bytes, {free:,} are free"
        return reason

    def _make_room(self, step: int, size: int) -> None:
        if self._lock is not None:
            lock.is_in_place(self._lock)  # raises where that cannot be known: then nothing is written
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        if later := [other for other in self.steps() if other >= step]:
            raise ConfigError(f"step {later[-1]} exists; move what is newer to another folder first")
        # Here a full disk gives one error. Later, each of orbax's writes fails with a traceback of its own on stderr.
        if is_local(self.folder) and shutil.disk_usage(self.folder).free < size:
            self._delete_early(step)
            if shutil.disk_usage(self.folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _delete_early(self, step: int) -> None:
        """On a full disk, the steps that the save of `step` makes superfluous go before it; never the newest."""
        earlier = self.steps()
        preserve = self._policy.should_preserve([SimpleNamespace(step=other) for other in (*earlier, step)], context=None)
        for old, keep in zip(earlier[:-1], preserve, strict=False):
            if not keep:
                (self.folder / str(old)).rename(self.folder / f"{old}.orbax-checkpoint-tmp")
        self._tidy()

    def _tidy(self) -> None:
        """Removes the remains of killed or failed saves and deletions. Call it only while no save is running."""
        if not is_first():
            return
        try:
            for path in self.folder.iterdir():
                step, _, suffix = path.name.partition(".")
                if path.name == "deleted" or (step.isdecimal() and suffix.startswith("orbax-checkpoint-tmp")):
                    if os.path.islink(path):  # in a stranger's folder; what it leads to stays
                        path.unlink()
                    else:
                        path.rmtree()
        except FileNotFoundError:  # of a bucket: without objects there is no folder
            pass
        except OSError as error:
            self.log(f"{self.folder}: what an earlier save or deletion left cannot be removed ({error})")

    def _put_aside(self, step: int, why: str) -> None:
        earlier = len([name for name in storage.list_names(self.folder) if name.startswith(f"{step}.corrupt")])
        name = f"{step}.corrupt-{earlier + 1}" if earlier else f"{step}.corrupt"
        try:
            storage.retry(lambda: (self.folder / str(step)).rename(self.folder / name), self.folder)
            then = f"renamed to {name}"
        except OSError as error:
            if storage.passes(error):
                raise
            then = f"it cannot be renamed ({error})"
        self.log(f"{self.folder}: step {step} is damaged: {why}; {then}, an older one is taken")


def _together(what: str) -> Work:
    _works[:] = [Work(what)]
    return _works[0]
