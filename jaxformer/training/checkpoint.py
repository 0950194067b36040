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
import json
import logging
import math
import os
import re
import shlex
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as orbax
import tensorstore
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxformer.config import storage, within
from jaxformer.errors import ConfigError
from jaxformer.parallel.peers import Abandoned
from jaxformer.parallel.processes import Work, all_gather_object, first, is_first, that_see
from jaxformer.params import Tree
from jaxformer.training import lock, manifest, memory, silence
from jaxformer.training.manifest import CheckpointError, Damaged, fingerprints, key_data

Folder = os.PathLike | str
Log = Callable[[str], None]
Problem = tuple[str, int | None, str]  # the reason, the number of the operating system's error if it was one, the file
HERE = "metrics of this manager"  # what a metric without a name is of; on the disk it has none
# Reading can fail with these although the files are good. Such a step is refused, not renamed.
NOT_DAMAGE = "Permission denied", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "MemoryError"
PASSES = "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED"  # the same, and the next try may succeed
OS_ERROR = r"os_error_code='(\d+)'|OS error (\d+)"  # how tensorstore ends the text of an error of the operating system
MISSING = errno.ENOENT, errno.ENOTDIR, errno.EISDIR  # these say what is there, if a second look finds it so
AGAIN = 0.1  # seconds until what looks damaged is read once more
PIECE = 1 << 26  # bytes: of another mesh, a process reads no more than the pieces that its part of an array touches
SMALL = 100_000_000  # bytes that a file of a checkpoint may have beside those of its arrays
_warn = logging.getLogger(__name__).warning
# Orbax counts written bytes, for its log alone, with a call that never frees its lists (tensorstore 0.1.86): 60 kB a save.
tensorstore_utils.get_tensorstore_raw_bytes = lambda direction=None: 0
_works = [Work()]  # the last one is what all processes do together now


def _wait_for_all(name: str, **_: Any) -> None:
    """Orbax's wait for all processes. Its own one waits for minutes for a process that failed, and keeps the reason from us."""
    _works[-1].wait(name)


multihost.sync_global_processes = _wait_for_all
silence.install()


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
                    contents = _manifest(self.folder / str(step))
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
        if _is_local(self.folder) and that_see(Path(self.folder)).count < jax.process_count():
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
            storage.patiently(lambda: self.folder.mkdir(parents=True, exist_ok=True), self.folder)
            self._lock = lock.take(self.folder, self.log) if _is_local(self.folder) else None
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
        writer: Any = self._handler._impl._handler_impl
        writer._save_device_host_concurrent_bytes = writer._save_concurrent_bytes = limit
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
        put_aside = lambda bad, why: first(lambda: self._put_aside(bad, why))
        return _newest_good(self.folder, abstract_state, "", step, put_aside)

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
        checkpointer: Any = self._orbax._checkpointer
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
        reason = _reason(error)
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
        if _is_local(self.folder) and shutil.disk_usage(self.folder).free < size:
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
        earlier = len([name for name in storage.names(self.folder) if name.startswith(f"{step}.corrupt")])
        name = f"{step}.corrupt-{earlier + 1}" if earlier else f"{step}.corrupt"
        try:
            storage.patiently(lambda: (self.folder / str(step)).rename(self.folder / name), self.folder)
            then = f"renamed to {name}"
        except OSError as error:
            if storage.passes(error):
                raise
            then = f"it cannot be renamed ({error})"
        self.log(f"{self.folder}: step {step} is damaged: {why}; {then}, an older one is taken")


def resolve(folder: Folder) -> epath.Path:
    """The absolute path of a folder, or a URL that checkpoints can be written to. Raises ConfigError for another URL."""
    scheme, is_url, _ = os.fspath(folder).partition("://")
    if is_url and scheme != "gs":
        raise ConfigError(
            f"{folder}: checkpoints go to folders and to gs://; mount the bucket of {scheme}:// and give its folder"
        )
    return epath.Path(folder) if is_url else epath.Path(folder).absolute()


def steps(folder: Folder) -> list[int]:
    """The complete steps in a folder, in order; none if there is no such folder. OSError where that cannot be known."""
    if _is_local(resolve(folder)):  # orbax would leave out a step that it cannot look at
        found = (name for name in storage.names(folder) if re.fullmatch(r"0|[1-9][0-9]*", name))
        return sorted(int(name) for name in found if storage.is_dir(Path(folder, name)))
    try:
        return sorted(metadata.step for metadata in orbax.path.step.standard_name_format().find_all(resolve(folder)))
    except ImportError as error:
        raise ConfigError(f"{folder}: {error}; gs:// needs `pip install 'jaxformer[gcs]'`") from None


def restore_params(folder: Folder, abstract: Tree, step: int | None = None, part: str = "params") -> tuple[int, Tree, dict]:
    """The field `part` of a state, (step, params, metadata), verified. Nothing on disk changes. Errors: those of `restore`."""
    folder = resolve(folder)
    skip = lambda bad, why: _warn(f"{folder}: step {bad} is damaged: {why}; an older one is taken")
    restored = _newest_good(folder, abstract, f"{part}/", step, skip)
    if restored is None:
        raise CheckpointError(f"{folder}: no checkpoint there; train first")
    return restored


def _together(what: str) -> Work:
    _works[:] = [Work(what)]
    return _works[0]


def _newest_good(
    folder: epath.Path, abstract: Tree, prefix: str, step: int | None, on_damage: Callable[[int, str], None]
) -> tuple[int, Tree, dict] | None:
    complete = first(lambda: steps(folder))
    if step is not None and step not in complete:
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there are {manifest.shortened(complete)}")
    damage: list[tuple[int, str]] = []
    for candidate in reversed(complete) if step is None else [step]:
        try:
            found = _read_or_judge(folder / str(candidate), abstract, prefix)
        except Damaged as problem:
            damage.append((candidate, str(problem)))
            continue
        for bad, why in damage:  # not before: where none is good, all keep their names, and the next start looks again
            on_damage(bad, why)
        return candidate, *found
    told = [f"{bad} ({why})" for bad, why in damage]
    if step is not None:
        raise CheckpointError(f"{folder}: damaged: {told[0]}; other steps: {manifest.shortened(steps(folder))}")
    aside = first(lambda: [name for name in storage.names(folder) if re.fullmatch(r"[0-9]+\.corrupt.*", name)])
    if told or aside:
        advice = _offer(folder, aside, abstract, prefix)
        raise CheckpointError(f"{folder}: every checkpoint is damaged: {manifest.shortened(told + aside)}; {advice}")
    return None


def _offer(folder: epath.Path, aside: list[str], abstract: Tree, prefix: str) -> str:
    """What to do where no step is good. One that was put aside may be whole: errors that pass were once taken for damage."""
    for name in sorted(aside, key=lambda name: int(name.partition(".")[0]), reverse=True):
        with suppress(Damaged, CheckpointError, OSError):
            _read(folder / name, abstract, prefix)
            move = f"mv {shlex.quote(str(folder / name))} {shlex.quote(str(folder / name.partition('.')[0]))}"
            return f"but {name} is whole: rename it (`{move}`), and the same command goes on from there"
    renamed = "one that is renamed from STEP.corrupt to STEP is looked at again; " if aside else ""
    return f"all are kept; {renamed}to train from the beginning beside them, give another --name"


def _read_or_judge(path: epath.Path, abstract: Tree, prefix: str) -> tuple[Tree, dict]:
    """`_read`, made again where an error may pass. Damaged is what was read twice, in full, and was wrong both times."""
    read = partial(_read, path, abstract, prefix)
    try:
        return storage.patiently(read, path)
    except Damaged:
        time.sleep(AGAIN)
    _on_all(lambda: _read_all(path))  # libraries below take some errors for files that are not there
    return storage.patiently(read, path)


def _read_all(path: epath.Path) -> None:
    """Reads every file of a step. Raises the OSError of one that cannot be read."""
    if not _is_local(path):
        return
    for file in storage.files_below(path):
        if stat.S_ISREG(file.lstat().st_mode):
            storage.patiently(partial(_read_through, file), file)


def _read_through(file: Path) -> None:
    with storage.named(file), file.open("rb") as opened:
        while opened.read(PIECE):
            pass


def _on_all(function: Callable[[], None]) -> None:
    """Calls `function()` on every process. An OSError of one is raised on all."""
    problem = None
    try:
        function()
    except OSError as error:
        problem = error.errno, error.strerror, error.filename
    for found in filter(None, all_gather_object(problem)):
        raise OSError(*found)


def _read(path: epath.Path, abstract: Tree, prefix: str) -> tuple[Tree, dict]:
    """The checkpoint in `path`, onto an abstract tree. Raises Damaged, or CheckpointError if it is good and does not fit."""
    contents = first(lambda: _manifest(path))
    has_numbers = any(math.prod(leaf["shape"]) for leaf in contents["leaves"].values())
    first(lambda: _check_pieces(path, has_numbers))
    saved = {name: leaf for name, leaf in contents["leaves"].items() if name.startswith(prefix)}
    wanted = dict(manifest.named_leaves(abstract, prefix))
    manifest.compare(path, saved, wanted)
    data = _load(path, {name: manifest.abstract_numbers(leaf) for name, leaf in wanted.items()})
    # Damaged metadata can make orbax return abstract leaves, or none.
    bad = [name for name in wanted if not isinstance(data.get(name), jax.Array)]
    bad = sorted(set().union(*all_gather_object(bad)))
    if not bad:
        prints = zip(data, fingerprints(data.values()), strict=True)
        bad = [name for name, digits in prints if digits != saved[name]["fingerprint"]]
    if bad:
        raise Damaged(f"{manifest.shortened(bad)}: the fingerprint is not that of what was saved")
    for name in data:
        if manifest.is_key(wanted[name]):
            data[name] = jax.random.wrap_key_data(data[name], impl=saved[name]["key"])
    return jax.tree.unflatten(jax.tree.structure(abstract), [data[name] for name in wanted]), contents["metadata"]


def _load(path: epath.Path, numbers: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The arrays, read by orbax. An error of one process is raised on all."""
    # orbax refuses to save an empty array
    data: Any = {k: jnp.zeros(x.shape, x.dtype, device=x.sharding) for k, x in numbers.items() if not x.size}
    full = {name: leaf for name, leaf in numbers.items() if leaf.size}
    problems: list[Problem] = []
    for limit in (memory.in_flight(full.values()), None):  # pieces that other programs wrote may be larger than this
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        context, problem = ocp.Context(multiprocessing_options=alone), None  # orbax waits for no other process
        context.pytree.loading.partial_load = True
        context.memory.read_concurrent_bytes = limit
        try:
            with context:
                # pyrefly: ignore[bad-argument-type]  (orbax's own annotations do not resolve)
                data |= ocp.load(path, full) if full else {}
        except Exception as error:
            problem = _problem(path, error)
        every = all_gather_object(problem, f"the restore of {path}")
        problems = [_of_process(index, found) for index, found in enumerate(every) if found]
        if not any("Requested more bytes" in reason for reason, *_ in problems):  # else all processes try once more
            break
    # of several, one that does not speak of damage
    for problem in sorted(problems, key=lambda found: isinstance(_read_error(path, *found), Damaged)):
        raise _read_error(path, *problem)
    return data


def _of_process(index: int, problem: Sequence[Any]) -> Problem:
    """The problem with the process that met it: all processes of a run say the same line."""
    reason, number, file = problem
    return reason, number, f"{file} (process {index})" if jax.process_count() > 1 else file


def _manifest(path: epath.Path) -> dict:
    storage.patiently(lambda: _check_files(path), path)
    file = path / "_CHECKPOINT_METADATA"  # orbax's own reader takes every error for a file without contents
    try:
        sealed = json.loads(storage.patiently(file.read_bytes, file))["custom_metadata"]
    except OSError as error:
        problem = _read_error(path, *_problem(path, error))
        if not isinstance(problem, Damaged):
            raise problem from error
        sealed = None
    except (ValueError, TypeError, KeyError, RecursionError):
        sealed = None
    step = path.name.partition(".")[0]
    return manifest.unseal(sealed, step=int(step))


def _check_files(path: epath.Path) -> None:
    """Raises Damaged for a pipe, a device or a file with a hole for an end: orbax would wait, or read it without an end.

    A link is refused (CheckpointError), and the step keeps its name: the files may be good, where they are.
    """
    for file in [Path(path), *storage.files_below(path)] if _is_local(path) else ():
        with suppress(FileNotFoundError):  # pruned meanwhile
            status, name = file.lstat(), file.relative_to(path)
            if stat.S_ISLNK(status.st_mode):
                raise CheckpointError(within.refusal(file))
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise Damaged(f"{name} is no regular file")
            if status.st_size > SMALL and name.parent.name != "d":  # numbers are in d; all else is JSON and indices
                raise Damaged(f"{name} has {status.st_size:,} bytes")


def _check_pieces(path: epath.Path, has_numbers: bool) -> None:
    """Raises Damaged where the pieces of an array are larger than it: tensorstore allocates one, and aborts if it cannot.

    And where there are none: without its index, tensorstore takes a folder for an empty one.
    """
    if not _is_local(path):
        return
    try:
        files = {"driver": "file", "path": f"{path}/state/"}  # a path in a URL could not have spaces
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()
        keys = store.list().result()
        if has_numbers and not keys:
            index = path / "state" / "manifest.ocdbt"
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(index))
        for key in keys:
            if key.endswith(b".zarray"):
                array = json.loads(store[key])
                if any(piece > size for piece, size in zip(array["chunks"], array["shape"], strict=True)):
                    raise Damaged(f"{key.decode()}: pieces of {array['chunks']} of an array of {array['shape']}")
    except Damaged:
        raise
    except Exception as error:
        raise _read_error(path, *_problem(path, error)) from error


def _problem(path: epath.Path, error: BaseException) -> Problem:
    """What an error says; without a number where it is about a file that is not there."""
    number, file = os_error(error)
    if number in MISSING:
        number = None if _is_missing(Path(file or path)) else errno.ESTALE
    return _reason(error), number, file or str(path)


def os_error(error: BaseException) -> tuple[int | None, str | None]:
    """(the number of the operating system's error that is the cause of another one, its file); None where none is."""
    causes = [error]
    while below := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(below)
    for cause in reversed(causes):
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno, None if cause.filename is None else os.fspath(cause.filename)
        if found := re.search(OS_ERROR, str(cause)):
            files = re.findall(r'"(/[^"]*)"|open file (/.*?): ', str(cause))
            return int(found[1] or found[2]), "".join(files[-1]) if files else None
    return None, None


def _is_missing(file: Path) -> bool:
    """Whether a file is not there, or a folder has its place; so say its status and the names in its folder."""
    try:
        return storage.is_dir(file) if storage.exists(file) else file.name not in storage.names(file.parent)
    except OSError:
        return False


def _read_error(path: epath.Path, reason: str, number: int | None, file: str) -> Exception:
    if number in (errno.EACCES, errno.EPERM) or (number is None and any(word in reason for word in NOT_DAMAGE)):
        return CheckpointError(f"{path}: the checkpoint cannot be read: {reason}")
    if number is not None:
        return OSError(number, os.strerror(number), file)
    if any(word in reason for word in PASSES):
        return OSError(errno.EIO, f"the checkpoint cannot be read: {reason}", str(path))
    return Damaged(reason)


def _is_local(folder: Folder) -> bool:
    return "://" not in os.fspath(folder)


def _reason(error: BaseException) -> str:
    """The innermost error in one line; orbax wraps it in several that say less."""
    while below := error.__cause__ or error.__context__:
        error = below
    return f"{type(error).__name__} {str(error).partition(' [')[0]}".strip().splitlines()[0][:1000]
