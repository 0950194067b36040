"""Checkpoints that survive kills, full disks and flipped bits. The only module that knows orbax.

A checkpoint is a folder `STEP/`, which orbax writes under a temporary name and renames once it is whole. Its custom
metadata is our manifest: each leaf's path, shape, dtype and fingerprint, the caller's metadata and metric. A moment
later `files.json` joins it with each file's size and CRC-32, by which a bad file is found before orbax trips over it.
The fingerprints say that what was loaded is what the training step had made. Beside the steps a folder may hold

    STEP.orbax-checkpoint-tmp, STEP.deleted   what a killed save or deletion left; removed when the folder is opened
    STEP.replaced     the earlier version of a step that is being saved again; comes back if that save does not finish
    STEP.corrupt      damaged; kept for a look, never read again
    STEP.abandoned    lay after the step that a run went back to (`restore(step=...)`) and then saved from
"""

import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from jaxformer.errors import ConfigError
from jaxformer.parallel.multihost import everyone, first, is_first
from jaxformer.training.fingerprint import file_digests, fingerprints, key_data

Tree = Any
FILES = "files.json"
_warn = logging.getLogger(__name__).warning
# Orbax logs through absl, errors with a traceback from each of its threads. They reach us as exceptions as well.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)


class CheckpointError(ConfigError):
    """No checkpoint fits or is whole, or the save that had to succeed did not. One line; a table may follow."""

    def __init__(self, message: str):
        ValueError.__init__(self, message)  # past ConfigError, which folds lines


class _Damaged(Exception):
    """The files of one step are bad; the message names the file or leaf."""


class Manager(AbstractContextManager):
    """The checkpoints in `folder`, for the one trainer that writes them. A context manager; not thread-safe.

    Keeps the `keep_latest` last steps and the `keep_best` of lowest metric. `log` gets a line for whatever went wrong
    and was dealt with, from any thread. Raises ConfigError where the folder cannot be written or another manager has it
    open.
    """

    def __init__(
        self, folder: Path | str, keep_latest: int = 3, keep_best: int = 1, log: Callable[[str], None] = _warn
    ):
        if keep_latest < 1 or keep_best < 0:
            raise ConfigError(f"{keep_latest=} must be at least 1 and {keep_best=} at least 0")
        self.folder, self.keep_latest, self.keep_best, self.log = Path(folder).absolute(), keep_latest, keep_best, log
        self._saving: threading.Thread | None = None
        self._problem: str | None = None  # why the last save failed
        self._metrics: dict[int, float | None] = {}
        self._lock: int | None = None
        self._writes = is_first()  # orbax has every process call it; the rest is for one to do
        if not self._writes:
            self.log = lambda line: None
        first(self._open)

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.folder)
            self._tidy()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{self.folder}: no checkpoints can be kept there ({error}); choose another folder"
            ) from None

    def __exit__(self, *_) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps on disk, in order."""
        return steps(self.folder)

    def save(
        self, step: int, state: Tree, metadata: dict | None = None, metric: float | None = None, wait: bool = False
    ) -> None:
        """Starts to save; once this returns the state may be donated. Waits for a save still running, never skips one.

        A step that exists is replaced when the new one is whole. A save that fails leaves nothing behind and is logged;
        with `wait` it raises CheckpointError. `metadata` is JSON (TypeError otherwise). The lowest `metric` is best,
        NaN is worse than any number, None is no candidate.
        """
        self.wait()
        self._problem = None
        metric = None if metric is None else float(metric)
        leaves = {name: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf) for name, leaf in _named(state)}
        # An error in the computation of the state comes up here, in `_describe`, and is not ours to swallow.
        manifest = {"step": int(step), "metric": metric, "metadata": metadata or {}, "leaves": _describe(leaves)}
        sealed = _seal(json.dumps(manifest))
        data = {name: key_data(leaf) for name, leaf in leaves.items() if leaf.size}
        size = sum(leaf.nbytes for leaf in data.values())
        try:
            first(lambda: self._make_room(step, size))
            with _context():
                # pyrefly: ignore[bad-argument-type]  (orbax's own annotations do not resolve)
                response = ocp.save_async(self.folder / str(step), data, custom_metadata=sealed)
        except Exception as error:
            self._failed(step, error, size)
        else:
            self._saving = threading.Thread(target=self._finish, args=(step, metric, response, size))
            self._saving.start()
        if wait:
            self.wait()
            for problem in filter(None, everyone(self._problem)):
                raise CheckpointError(problem)

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[int, Tree, dict] | None:
        """The newest good checkpoint, or that of `step`, as (step, state, metadata). None if there never was one.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct`, with sharding or without (then: the first local device);
        the state has its structure. A damaged step is renamed to STEP.corrupt, logged with what was bad, and the next
        older one is tried. Raises CheckpointError where none is good, where `step` is missing or damaged, and where the
        checkpoint's leaves differ from `abstract_state` in name, shape or dtype.
        """
        self.wait()
        return _newest_good(
            self.folder, abstract_state, "", step, lambda bad, why: first(lambda: self._put_aside(bad, why))
        )

    def wait(self) -> None:
        """Until no save is running."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def close(self) -> None:
        """Waits, then lets another manager open the folder."""
        self.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _finish(self, step: int, metric: float | None, response: Any, size: int) -> None:
        """In a thread: the end of a save."""
        try:
            response.result()
        except BaseException as error:
            return self._failed(step, error, size)
        self._metrics[step] = metric
        try:
            if self._writes:
                digests = json.dumps(file_digests(self.folder / str(step)))
                (self.folder / str(step) / FILES).write_text(digests)
                self._tidy()
                self._drop_old()
        except OSError as error:
            self.log(f"{self.folder}: step {step} is saved; tidying up after it failed ({error})")

    def _failed(self, step: int, error: BaseException, size: int) -> None:
        reason = _reason(error)
        self._problem = f"{self.folder}: step {step} was not saved: {reason}"
        try:
            if "No space left" in reason or "Disk quota" in reason:
                free = shutil.disk_usage(self.folder).free
                self._problem += f"; it needs up to {size:,} bytes, {free:,} are free"
            if self._writes:
                self._tidy()
        except OSError as again:
            self._problem += f"; its remains could not be removed ({again})"
        self.log(f"{self._problem}; earlier checkpoints are kept")

    def _make_room(self, step: int, size: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        for later in (other for other in self.steps() if other > step):
            name = _rename(self.folder / str(later), "abandoned").name
            self.log(f"{self.folder}: step {later} lies after step {step}, which is now saved; renamed to {name}")
        if (self.folder / str(step)).exists():
            _rename(self.folder / str(step), "replaced")
        # A disk that is too small is better found here: orbax, told so by one of its writes, leaves the others behind.
        # They then fail with nobody to tell, each with a traceback on stderr.
        if shutil.disk_usage(self.folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _tidy(self) -> None:
        """Ends or undoes what a killed or failed save or deletion began. Only while no save is running."""
        for path in self.folder.iterdir():
            step, _, suffix = path.name.partition(".")
            if step.isdecimal() and suffix == "replaced" and not (self.folder / step).exists():
                path.rename(self.folder / step)
            elif step.isdecimal() and suffix.startswith(("replaced", "deleted", "orbax-checkpoint-tmp")):
                shutil.rmtree(path)

    def _drop_old(self) -> None:
        steps = self.steps()
        keep = set(steps[-self.keep_latest :])
        ranked = []
        for step in steps if self.keep_best else []:
            try:
                if step not in self._metrics:
                    self._metrics[step] = _manifest(self.folder / str(step))["metric"]
                if (metric := self._metrics[step]) is not None:
                    ranked.append((math.inf if math.isnan(metric) else metric, step))
            except _Damaged:
                keep.add(step)  # for `restore` to judge
        keep.update(step for _, step in sorted(ranked)[: self.keep_best])
        for step in steps:
            if step not in keep:  # renamed first, since half a step must not look like one
                shutil.rmtree(_rename(self.folder / str(step), "deleted"))

    def _put_aside(self, step: int, why: str) -> None:
        then = "trying an older one"
        try:
            then = f"renamed to {_rename(self.folder / str(step), 'corrupt').name}, {then}"
        except OSError as error:
            then = f"it cannot be renamed ({error}), {then}"
        self.log(f"{self.folder}: step {step} is damaged: {why}; {then}")


open_manager = Manager


def steps(folder: Path | str) -> list[int]:
    """The steps in a folder, in order; none if there is no such folder."""
    folder = Path(folder)
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def restore_params(
    folder: Path | str,
    abstract_params: Tree,
    step: int | None = None,
    log: Callable[[str], None] = _warn,
    part: str = "params",
) -> tuple[int, Tree, dict]:
    """The field `part` of a state alone, as (step, params, metadata), verified. For readers: changes nothing on disk.

    Raises CheckpointError as `restore` does, and where there is no checkpoint.
    """
    folder = Path(folder).absolute()
    skip = lambda bad, why: log(f"{folder}: step {bad} is damaged: {why}; trying an older one")
    found = _newest_good(folder, abstract_params, f"{part}/", step, skip)
    if found is None:
        raise CheckpointError(f"{folder}: no checkpoint there; train first")
    return found


def _newest_good(folder: Path, abstract: Tree, prefix: str, step: int | None, on_damage: Callable[[int, str], None]):
    there = first(lambda: steps(folder))
    if step is not None and step not in there:
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there are {_some(there)}")
    damage = []
    for candidate in reversed(there) if step is None else [step]:
        try:
            return candidate, *_read(folder / str(candidate), abstract, prefix)
        except _Damaged as problem:
            damage.append(f"{candidate} ({problem})")
            on_damage(candidate, str(problem))
    if step is not None:
        raise CheckpointError(f"{folder}: damaged: {damage[0]}; other steps: {_some(steps(folder))}")
    damage = damage or first(lambda: sorted(path.name for path in folder.glob("*.corrupt*")))
    if damage:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged: {_some(damage)}; to start over, delete the folder"
        )
    return None


def _read(path: Path, abstract: Tree, prefix: str) -> tuple[Tree, dict]:
    """The checkpoint in `path`, onto an abstract tree. Raises _Damaged, or CheckpointError if it is whole but unfit."""
    checked, manifest = first(lambda: (_check_files(path), _manifest(path)))
    there = {name: leaf for name, leaf in manifest["leaves"].items() if name.startswith(prefix)}
    wanted = dict(_named(abstract, prefix))
    _compare(path, there, wanted)
    on_disk = {name: _abstract_numbers(leaf) for name, leaf in wanted.items()}
    full = {name: leaf for name, leaf in on_disk.items() if leaf.size}  # orbax refuses to save an empty array
    empty = [(name, leaf) for name, leaf in on_disk.items() if not leaf.size]
    data: Any = {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in empty}
    try:
        with _context():
            # pyrefly: ignore[bad-argument-type]
            data |= ocp.load(path, full) if full else {}
        mine = None
    except Exception as error:
        mine = _reason(error)
    for problem in filter(None, everyone(mine)):
        if checked:
            raise CheckpointError(f"{path}: its files are good, but it cannot be loaded: {problem}")
        raise _Damaged(problem)
    # Damaged metadata can make orbax return abstract leaves, or none.
    bad = [name for name in on_disk if not isinstance(data.get(name), jax.Array)]
    if not bad:
        prints = zip(data, fingerprints(data.values()), strict=True)
        bad = [name for name, digits in prints if digits != there[name]["fingerprint"]]
    if bad:
        raise _Damaged(f"{_some(bad)}: the fingerprint is not that of what was saved")
    for name in data:
        if _is_key(wanted[name]):
            data[name] = jax.random.wrap_key_data(data[name], impl=there[name]["key"])
    return jax.tree.unflatten(jax.tree.structure(abstract), [data[name] for name in wanted]), manifest["metadata"]


def _context() -> ocp.Context:
    context = ocp.Context()
    # In the background, a folder that cannot be made leaves orbax's threads waiting for it for 20 minutes.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True
    return context


def _manifest(path: Path) -> dict:
    try:
        # pyrefly: ignore[bad-argument-type]
        sealed: Any = ocp.metadata(path).custom_metadata
        good = sealed == _seal(sealed["manifest"])
        manifest = json.loads(sealed["manifest"]) if good else {}
    except Exception as error:
        raise _Damaged(f"its metadata cannot be read: {_reason(error)}") from error
    if manifest.get("step") != int(path.name):
        raise _Damaged(f"_CHECKPOINT_METADATA {'is that of another step' if good else 'has changed'}")
    return manifest


def _seal(manifest: str) -> dict[str, str]:
    return {"manifest": manifest, "sha256": hashlib.sha256(manifest.encode()).hexdigest()}


def _describe(leaves: dict[str, jax.Array]) -> dict[str, dict]:
    described = {}
    for (name, leaf), digits in zip(leaves.items(), fingerprints(leaves.values()), strict=True):
        described[name] = {"shape": leaf.shape, "dtype": str(leaf.dtype), "fingerprint": digits}
        if _is_key(leaf):
            described[name]["key"] = str(jax.random.key_impl(leaf))
    return described


def _compare(path: Path, there: dict[str, dict], wanted: dict[str, Any]) -> None:
    text = lambda shape, dtype: f"{dtype}[{','.join(map(str, shape))}]"
    saved = {name: text(leaf["shape"], leaf["dtype"]) for name, leaf in there.items()}
    asked = {name: text(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    rows = [(name, saved.get(name, "-"), asked.get(name, "-")) for name in sorted(saved | asked)]
    rows = [row for row in rows if row[1] != row[2]]
    if not rows:
        return
    counts = [sum(row[1] == "-" for row in rows), sum(row[2] == "-" for row in rows)]
    summary = f"{counts[0]} leaves missing, {counts[1]} unexpected, {len(rows) - sum(counts)} of another shape or dtype"
    table = [("leaf", "checkpoint", "model"), *rows[:20]]
    a, b = (max(len(row[column]) for row in table) for column in (0, 1))
    lines = [f"  {row[0]:{a}}  {row[1]:{b}}  {row[2]}" for row in table]
    lines += [f"  and {len(rows) - 20} more"] * (len(rows) > 20)
    advice = "use the config it was saved with, or another folder"
    raise CheckpointError("\n".join([f"{path}: the checkpoint does not fit the model: {summary}; {advice}", *lines]))


def _check_files(path: Path) -> bool:
    """Whether files.json vouches for the files; False without one (the save was killed before its last moment)."""
    try:
        recorded = json.loads((path / FILES).read_text())
        found = file_digests(path)
    except (FileNotFoundError, ValueError):
        return False
    except PermissionError as error:
        raise CheckpointError(f"{path}: not allowed to read the checkpoint ({error})") from None
    except OSError as error:
        raise _Damaged(str(error)) from error
    if bad := [name for name, digest in recorded.items() if found.get(name) != digest]:
        (size, _), (now, _) = recorded[bad[0]], found.get(bad[0], (None, None))
        change = "is missing" if now is None else "has changed" if now == size else f"has {now} bytes instead of {size}"
        raise _Damaged(f"{_some(bad)} {change}")
    return True


def _named(tree: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves with paths such as `params/layers/attention/query/kernel`, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = [(prefix + jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    if len(dict(named)) < len(named):
        raise ValueError(f"two leaves of the state have the same path: {sorted(name for name, _ in named)}")
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _abstract_numbers(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    sharding.shard_shape(leaf.shape)  # raises where it does not divide, which orbax reports with pages of traceback
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _lock(folder: Path) -> int | None:
    """An open file with the folder's lock, which ends with the process; None where the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"{folder}: another trainer has these checkpoints open; wait for it or stop it") from None


def _rename(path: Path, suffix: str) -> Path:
    names = itertools.chain([f"{path.name}.{suffix}"], (f"{path.name}.{suffix}-{n}" for n in itertools.count(2)))
    return path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom, in a line: orbax wraps it in several errors that say less."""
    while below := error.__cause__ or error.__context__:
        error = below
    return f"{type(error).__name__} {str(error).partition(' [')[0]}".strip().splitlines()[0][:1000]


def _some(names: list) -> str:
    return (", ".join(map(str, names[:3])) or "none") + (f" and {len(names) - 3} more" if len(names) > 3 else "")
