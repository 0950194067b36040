"""Reads checkpoints, and judges each step: good, damaged, or not readable now.

A step is damaged if it was read twice, in full, and was wrong both times. A step that the file
system does not let us read is tried again, and then refused with an OSError. `checkpoint.Manager`
writes these checkpoints; all other code reads them with `restore_params`.
"""

import errno
import json
import logging
import math
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as orbax
import tensorstore
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxformer.config import no_links, storage
from jaxformer.errors import ConfigError, install_command
from jaxformer.parallel.processes import all_gather_object, first
from jaxformer.params import Tree
from jaxformer.runs import manifest, memory, silence
from jaxformer.runs.manifest import CheckpointError, Damaged, fingerprints

Folder = os.PathLike | str
# The reason, the number of the operating system's error if it was one, the file.
Problem = tuple[str, int | None, str]
# Reading can fail with these although the files are good. Such a step is refused, not renamed.
NOT_DAMAGE = (
    "Permission denied",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "MemoryError",
)
# The same, and the next try may succeed.
PASSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
# How tensorstore ends the text of an error of the operating system.
OS_ERROR = r"os_error_code='(\d+)'|OS error (\d+)"
# Errors that say what is there. They are believed if a second look finds the same.
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
AGAIN = 0.1  # seconds until a step that looks damaged is read once more
# Bytes of a piece of an array's file. A process of another mesh reads whole pieces, so no more than
# those that its part of the array touches.
PIECE = 1 << 26
SMALL = 100_000_000  # bytes that a checkpoint's file may have if it is not one of its arrays' files
log = logging.getLogger(__name__)


def resolve(folder: Folder) -> epath.Path:
    """The absolute path of a folder, or a URL that checkpoints can be written to.

    Raises ConfigError for another URL.
    """
    scheme, is_url, _ = os.fspath(folder).partition("://")
    if is_url and scheme != "gs":
        raise ConfigError(
            f"{folder}: checkpoints go to folders and to gs://; mount the bucket of {scheme}:// and"
            " give its folder"
        )
    return epath.Path(folder) if is_url else epath.Path(folder).absolute()


def steps(folder: Folder) -> list[int]:
    """The complete steps in a folder, in order; none if there is no such folder.

    Raises OSError where they cannot be known.
    """
    if is_local(resolve(folder)):  # orbax would leave out a step whose status it cannot read
        found = (
            name for name in storage.list_names(folder) if re.fullmatch(r"0|[1-9][0-9]*", name)
        )
        return sorted(int(name) for name in found if storage.is_dir(Path(folder, name)))
    try:
        return sorted(
            metadata.step
            for metadata in orbax.path.step.standard_name_format().find_all(resolve(folder))
        )
    except ImportError as error:
        raise ConfigError(f"{folder}: {error}; gs:// needs `{install_command('gcs')}`") from None


def restore_params(
    folder: Folder,
    abstract: Tree,
    step: int | None = None,
    part: str = "params",
    leave_out: Sequence[str] = (),
) -> tuple[int, Tree, dict]:
    """The field `part` of a saved state, verified, as (step, params, metadata).

    Names that begin with one of `leave_out` in that field are not read. Nothing on disk changes.
    Raises the same errors as `Manager.restore`.
    """
    folder = resolve(folder)

    def skip(bad, why):
        return log.warning(f"{folder}: step {bad} is damaged: {why}; an older one is taken")

    restored = newest_good(
        folder, abstract, f"{part}/", step, skip, tuple(f"{part}/{name}/" for name in leave_out)
    )
    if restored is None:
        raise CheckpointError(f"{folder}: no checkpoint there; train first")
    return restored


def newest_good(
    folder: epath.Path,
    abstract: Tree,
    prefix: str,
    step: int | None,
    on_damage: Callable[[int, str], None],
    leave_out: tuple[str, ...] = (),
) -> tuple[int, Tree, dict] | None:
    """The newest good step, or `step`, as (step, tree, metadata); None if there never was one.

    Calls `on_damage(step, why)` for each damaged step that is newer. Raises CheckpointError where
    no step is good.
    """
    complete = first(lambda: steps(folder))
    if step is not None and step not in complete:
        raise CheckpointError(
            f"{folder}: no checkpoint of step {step}; there are {manifest.shortened(complete)}"
        )
    damage: list[tuple[int, str]] = []
    for candidate in reversed(complete) if step is None else [step]:
        try:
            found = _read_or_judge(folder / str(candidate), abstract, prefix, leave_out)
        except Damaged as problem:
            damage.append((candidate, str(problem)))
            continue
        # Not earlier: where no step is good, all keep their names, and the next start looks again.
        for bad, why in damage:
            on_damage(bad, why)
        return candidate, *found
    told = [f"{bad} ({why})" for bad, why in damage]
    if step is not None:
        raise CheckpointError(
            f"{folder}: damaged: {told[0]}; other steps: {manifest.shortened(steps(folder))}"
        )
    aside = first(
        lambda: [
            name for name in storage.list_names(folder) if re.fullmatch(r"[0-9]+\.corrupt.*", name)
        ]
    )
    if told or aside:
        advice = _offer(folder, aside, abstract, prefix, leave_out)
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged: {manifest.shortened(told + aside)}; {advice}"
        )
    return None


def _offer(
    folder: epath.Path, aside: list[str], abstract: Tree, prefix: str, leave_out: tuple[str, ...]
) -> str:
    """Advice for a folder in which no step is good.

    A step that was put aside may be whole, because older versions took passing errors for damage.
    """
    for name in sorted(aside, key=lambda name: int(name.partition(".")[0]), reverse=True):
        with suppress(Damaged, CheckpointError, OSError):
            _read(folder / name, abstract, prefix, leave_out)
            move = (
                f"mv {shlex.quote(str(folder / name))}"
                f" {shlex.quote(str(folder / name.partition('.')[0]))}"
            )
            return (
                f"but {name} is whole: rename it (`{move}`), and the same command goes on from"
                " there"
            )
    renamed = "one that is renamed from STEP.corrupt to STEP is looked at again; " if aside else ""
    return f"all are kept; {renamed}to train from the beginning beside them, give another --name"


def _read_or_judge(
    path: epath.Path, abstract: Tree, prefix: str, leave_out: tuple[str, ...]
) -> tuple[Tree, dict]:
    """`_read`, tried again where an error may pass, and once more where the step looks damaged."""
    read = partial(_read, path, abstract, prefix, leave_out)
    try:
        return storage.retry(read, path)
    except Damaged:
        time.sleep(AGAIN)
    # The libraries that read arrays take some errors for files that are not there.
    _on_all(lambda: _read_all(path))
    return storage.retry(read, path)


def _read_all(path: epath.Path) -> None:
    """Reads every file of a step. Raises the OSError of a file that cannot be read."""
    if not is_local(path):
        return
    for file in storage.files_below(path):
        if stat.S_ISREG(file.lstat().st_mode):
            storage.retry(partial(storage.read_through, file), file)


def _on_all(function: Callable[[], None]) -> None:
    """Calls `function()` on every process. Raises one process's OSError on all."""
    problem = None
    try:
        function()
    except OSError as error:
        problem = error.errno, error.strerror, error.filename
    for found in filter(None, all_gather_object(problem)):
        raise OSError(*found)


def _read(
    path: epath.Path, abstract: Tree, prefix: str, leave_out: tuple[str, ...]
) -> tuple[Tree, dict]:
    """The checkpoint in `path`, read onto an abstract tree, and its metadata.

    Reads the leaves whose names begin with `prefix`, and with none of `leave_out`. Raises Damaged;
    raises CheckpointError if the checkpoint is good and does not fit.
    """
    contents = first(lambda: read_manifest(path))
    has_numbers = any(math.prod(leaf["shape"]) for leaf in contents["leaves"].values())
    first(lambda: _check_pieces(path, has_numbers))
    saved = {
        name: leaf
        for name, leaf in contents["leaves"].items()
        if name.startswith(prefix) and not name.startswith(leave_out)
    }
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
    return jax.tree.unflatten(
        jax.tree.structure(abstract), [data[name] for name in wanted]
    ), contents["metadata"]


def _load(path: epath.Path, numbers: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The arrays, read by orbax. Raises one process's error on all."""
    silence.install()
    full = {name: leaf for name, leaf in numbers.items() if leaf.size}
    problems: list[Problem] = []
    # Pieces that other programs wrote may be larger than the limit, hence the second try.
    for limit in (memory.in_flight(full.values()), None):
        data, problem = _load_limited(path, full, limit)
        every = all_gather_object(problem, f"the restore of {path}")
        problems = [_of_process(index, found) for index, found in enumerate(every) if found]
        # Every process decides alike: all try once more, or none does.
        if not any("Requested more bytes" in reason for reason, *_ in problems):
            break
    errors = [_read_error(path, *problem) for problem in problems]
    if errors:  # of several, one that is no damage is raised first
        raise min(errors, key=lambda error: isinstance(error, Damaged))
    # Orbax refuses to save empty arrays, so they are made here.
    empty: dict[str, Any] = {
        name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in numbers.items()
        if not leaf.size
    }
    return empty | data


def _load_limited(
    path: epath.Path, full: dict[str, jax.ShapeDtypeStruct], limit: int | None
) -> tuple[dict[str, Any], Problem | None]:
    """(the arrays, the problem of this process). Reads `limit` bytes at once; None: no limit."""
    me = jax.process_index()
    # With these options orbax waits for no other process.
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    context = ocp.Context(multiprocessing_options=alone)
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = limit
    if not full:
        return {}, None
    try:
        with context:
            # pyrefly: ignore[bad-argument-type]  (orbax's own annotations do not resolve)
            arrays: Any = ocp.load(path, full)
        # Damaged metadata may make orbax return something else: then this raises.
        return dict(arrays), None
    except Exception as error:
        return {}, _problem(path, error)


def _of_process(index: int, problem: Sequence[Any]) -> Problem:
    """The problem, and the process that met it: all processes of a run say the same line."""
    reason, number, file = problem
    return reason, number, f"{file} (process {index})" if jax.process_count() > 1 else file


def read_manifest(path: epath.Path) -> dict:
    """The manifest of the step in `path`. Raises Damaged, or OSError where it cannot be read."""
    storage.retry(lambda: _check_files(path), path)
    # Orbax's own reader takes every error for a file without contents.
    file = path / "_CHECKPOINT_METADATA"
    try:
        sealed = json.loads(storage.retry(file.read_bytes, file))["custom_metadata"]
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
    """Raises Damaged for a pipe, a device, or a file that is too large, perhaps without an end.

    Orbax would wait for such a file, or never stop to read it. A link raises CheckpointError, and
    the step keeps its name: its files may be good where they are.
    """
    for file in [Path(path), *storage.files_below(path)] if is_local(path) else ():
        with suppress(FileNotFoundError):  # pruned meanwhile
            status = file.lstat()
            name = file.relative_to(path)
            if stat.S_ISLNK(status.st_mode):
                raise CheckpointError(no_links.refusal(file))
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise Damaged(f"{name} is no regular file")
            # Arrays are in folders named d. All other files are JSON and indices.
            if status.st_size > SMALL and name.parent.name != "d":
                raise Damaged(f"{name} has {status.st_size:,} bytes")


def _check_pieces(path: epath.Path, has_numbers: bool) -> None:
    """Raises Damaged where the pieces of an array are larger than the array, or there are none.

    Tensorstore allocates a whole piece, and aborts if it cannot. Without its index, it takes a
    folder for an empty one.
    """
    if not is_local(path):
        return
    try:
        # Not a URL: a path in a URL could not have spaces.
        files = {"driver": "file", "path": f"{path}/state/"}
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()
        keys = store.list().result()
        if has_numbers and not keys:
            index = path / "state" / "manifest.ocdbt"
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(index))
        for key in keys:
            if key.endswith(b".zarray"):
                array = json.loads(store[key])
                if any(
                    piece > size
                    for piece, size in zip(array["chunks"], array["shape"], strict=True)
                ):
                    raise Damaged(
                        f"{key.decode()}: pieces of {array['chunks']} of an array of"
                        f" {array['shape']}"
                    )
    except Damaged:
        raise
    except Exception as error:
        raise _read_error(path, *_problem(path, error)) from error


def _problem(path: epath.Path, error: BaseException) -> Problem:
    """An error as a `Problem`; without a number where a file is not there."""
    number, file = os_error(error)
    if number in MISSING:
        number = None if _is_missing(Path(file or path)) else errno.ESTALE
    return reason_of(error), number, file or str(path)


def os_error(error: BaseException) -> tuple[int | None, str | None]:
    """(number, file) of the operating system's error that caused another one, or (None, None)."""
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
    """Whether a file is not there, or a folder is in its place.

    Both its status and the names in its folder have to say so.
    """
    try:
        return (
            storage.is_dir(file)
            if storage.exists(file)
            else file.name not in storage.list_names(file.parent)
        )
    except OSError:
        return False


def _read_error(path: epath.Path, reason: str, number: int | None, file: str) -> Exception:
    """The error to raise for a `Problem`: CheckpointError, OSError or Damaged."""
    if number in (errno.EACCES, errno.EPERM) or (
        number is None and any(word in reason for word in NOT_DAMAGE)
    ):
        return CheckpointError(f"{path}: the checkpoint cannot be read: {reason}")
    if number is not None:
        return OSError(number, os.strerror(number), file)
    if any(word in reason for word in PASSES):
        return OSError(errno.EIO, f"the checkpoint cannot be read: {reason}", str(path))
    return Damaged(reason)


def is_local(folder: Folder) -> bool:
    return "://" not in os.fspath(folder)


def reason_of(error: BaseException) -> str:
    """The innermost error in one line. Orbax wraps it in several that say less."""
    while below := error.__cause__ or error.__context__:
        error = below
    return f"{type(error).__name__} {str(error).partition(' [')[0]}".strip().splitlines()[0][:1000]
