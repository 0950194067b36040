"""Experiment files: find one, run it, and run again the copy in a run folder."""

import contextlib
import dis
import hashlib
import json
import math
import os
import re
import secrets
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from jaxformer.config import imports, no_links, storage
from jaxformer.config.code import is_users_file, is_users_module, users_frame
from jaxformer.config.describe import is_config
from jaxformer.errors import ConfigError, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
# the user's own, those of a checkout, those of an installed package
FOLDERS = (Path("experiments"), PACKAGE.parent / "experiments", PACKAGE / "builtin" / "experiments")
PROGRAMS = ("one_file", "bench", "launch", "theory")  # in experiments/: they are not listed
IS_EXPERIMENT = re.compile(r"^experiment\b.*=", flags=re.MULTILINE)  # in the text of a file
# bytes and nesting of files that anybody may have written; `describe` nests less
LARGEST = 100_000_000
DEEPEST = 400


@dataclass(frozen=True, eq=False)
class Source:
    """An experiment file that was run."""

    text: str
    path: str  # of the file itself, also if a copy of it was run
    experiment: Any = None
    names: dict[str, Any] = field(default_factory=dict)  # names that option expressions may call
    imports: dict[str, str] = field(default_factory=dict)  # imported files of the user: sha256
    overrides: tuple[str, ...] = ()  # options, as typed

    def facts(self) -> dict[str, Any]:
        """The values that `again` needs to run a copy of the file, as JSON."""
        return {"path": self.path, "overrides": list(self.overrides), "imports": self.imports}


def load(name_or_path: str) -> Any:
    """The `experiment` of a file: a path that ends in `.py`, or NAME of an `experiments/NAME.py`.

    NAME may be FOLDER/NAME. `experiments/` is searched for here, beside the package and in it.
    Raises ConfigError if the file is missing, fails (the message names the line) or defines none.
    """
    return read(name_or_path).experiment


def read(name_or_path: str) -> Source:
    """Like `load`, but returns the whole Source."""
    path = _find(str(name_or_path))
    return _run(path, path)


def again(copy: Any, facts: dict[str, Any], text: str | None = None) -> Source:
    """Runs the copy of an experiment file as the file itself was run. ConfigError if it fails.

    `facts` are those of `Source.facts`; `text` is the copy's text if it has been read already.
    """
    return replace(
        _run(copy, Path(facts["path"]), text), overrides=tuple(map(str, facts["overrides"]))
    )


def in_library(text: str) -> Path | None:
    """The experiment file of the library that has exactly this text; None if there is none."""
    for folder in FOLDERS[1:]:
        for path in _files_of(folder).values():
            if read_text(path) == text:
                return path
    return None


def available() -> dict[str, Path]:
    """The file of every experiment by name. For equal names the user's own file wins."""
    return {name: path for folder in reversed(FOLDERS) for name, path in _files_of(folder).items()}


def _files_of(folder: Path) -> dict[str, Path]:
    """The experiment files of a folder by name, and those of its folders as FOLDER/NAME."""
    files = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
    for path in sorted(folder.glob("[!_.]*/[!_]*.py")):
        if IS_EXPERIMENT.search(path.read_text("utf-8", "replace")):
            files[f"{path.parent.name}/{path.stem}"] = path
    return {name: path for name, path in files.items() if name.split("/")[0] not in PROGRAMS}


def _find(name: str) -> Path:
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            others = [file.name for file in path.parent.glob("*.py")]
            raise ConfigError(f"no file {name}{did_you_mean(path.name, others)}")
        return path
    experiments = available()
    if name not in experiments:
        raise ConfigError(
            f"no experiment {name!r} in experiments/"
            f"{did_you_mean(repr(name), map(repr, experiments))}"
        )
    return experiments[name].resolve()


def regular_file(path: os.PathLike | str, root: os.PathLike | str | None = None) -> Any:
    """The path as an epath, local or in a bucket. Raises ConfigError for a pipe, device or folder.

    Reading a pipe or a device may never end. A stranger may have made the folder `root`, so a link
    below it is refused, too.
    """
    from etils import epath

    if root is not None:
        no_links.check_folder(path, root)
    if storage.exists(path) and not storage.is_file(path):  # to epath, /dev/zero is a file
        raise ConfigError(
            f"{path}: cannot be read: no regular file; give a file, or save what it gives as one"
        )
    return epath.Path(path)


def read_bytes(
    file: os.PathLike | str, root: os.PathLike | str | None = None, largest: int = LARGEST
) -> bytes:
    """The content of a file of at most `largest` bytes.

    A stranger may have made the folder `root`, so no link below it is followed. Raises ConfigError
    for a link or for anything but a regular file, and OSError.
    """
    path = regular_file(file, root)
    if root is not None and no_links.is_local(path):
        with open(path, "rb", opener=no_links.opener(root)) as opened:
            _check_size(os.fstat(opened.fileno()).st_size, largest)
            return opened.read()
    if os.path.exists(path):
        _check_size(os.path.getsize(path), largest)
    return path.read_bytes()


def _check_size(size: int, largest: int) -> None:
    if size > largest:  # a sparse file of any size takes no space on a disk
        raise OSError(f"larger than {largest:,} bytes")


def read_text(file: os.PathLike | str, root: os.PathLike | str | None = None) -> str:
    """The text of a UTF-8 file without its byte order mark. ConfigError if it cannot be read.

    A stranger may have made the folder `root`, so no link below it is followed.
    """
    try:
        return storage.retry(lambda: read_bytes(file, root), file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except OSError as error:
        raise storage.mistake(error, f"{file}: cannot be read ({error})") from None


class _NoOptions(list):
    """`sys.argv` of an experiment file: only its path.

    Options must be fields, so that a run can be opened again anywhere.
    """

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            raise ConfigError(
                "an experiment file gets no command line; "
                "make the option a field: --key=VALUE sets it"
            )
        return super().__getitem__(index)


def _run(file: Any, path: Path, text: str | None = None) -> Source:
    """Runs `file` as if it were at `path`. The two differ for a copy."""
    text = read_text(file) if text is None else text
    # files in experiments/ import each other as experiments.NAME, also those of its folders
    home = next((each for each in path.parents[:2] if each.name == "experiments"), None)
    folder = imports.folder_at(str(path.parent if home is None else home.parent))
    # A unique module name: nobody imports the file, and copy.py must not replace Python's module.
    digest = hashlib.sha256(f"{file}\n{text}".encode()).hexdigest()[:8]
    module: Any = types.ModuleType(f"experiment_{path.stem}_{digest}")
    module.__file__ = str(path)
    inner = [] if home is None else path.parent.relative_to(home).parts
    module.__package__ = "" if home is None else ".".join((folder.name_of("experiments"), *inner))
    # functions are described by this text, even if the file is edited later
    module.__experiment_text__ = text
    module.__builtins__ = folder.builtins
    sys.modules[module.__name__] = module
    _execute(module, file, path, text)
    if not is_config(getattr(module, "experiment", None)):
        del sys.modules[module.__name__]
        raise ConfigError(
            f"{file}: defines no `experiment`; end it with `experiment = Experiment(...)`"
        )
    return Source(text, str(path), module.experiment, _names(module), _imports(folder))


def _execute(module: types.ModuleType, file: Any, path: Path, text: str) -> None:
    """Runs the text of an experiment file in its module, without command line options.

    Raises ConfigError if it fails or changes the current folder. If it fails, its module is removed
    from sys.modules.
    """
    arguments = sys.argv
    folder_before = os.getcwd()
    sys.argv = _NoOptions([str(path)])
    try:
        # stdout is for the answer of a command: `evaluate RUN` prints JSON for another program
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(text, str(file), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, KeyboardInterrupt) and not _is_raised_in(error, file):
            raise
        # a file that the experiment reads has trouble that may pass
        if isinstance(error, OSError) and error.errno is not None and storage.passes(error):
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
        raise ConfigError(_failure(error, file, path)) from error
    finally:
        sys.argv = arguments
        folder_after = os.getcwd()
        os.chdir(folder_before)
    if folder_after != folder_before:
        problem = (
            f"it changes the current folder to {folder_after}, "
            "so that runs/ and all relative paths would lead there"
        )
        raise ConfigError(
            f"{file}: {problem}; make paths of Path(__file__).parent, "
            "or start the command in that folder"
        )


def _is_raised_in(error: BaseException, file: Any) -> bool:
    """Whether a `raise` statement of the file itself raised the error.

    A signal interrupts any other instruction.
    """
    last = [*traceback.walk_tb(error.__traceback__)][-1][0]
    instructions = dis.get_instructions(last.f_code)
    raises = {each.offset for each in instructions if each.opname == "RAISE_VARARGS"}
    return last.f_code.co_filename == str(file) and last.f_lasti in raises


def _failure(error: BaseException, file: Any, path: Path) -> str:
    """Where and why an experiment file failed; also where in a file that it imports."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    where = f"{file}:{lines[-1]}" if lines else str(file)
    last = users_frame(error)
    below = (
        "" if last is None or last.filename == str(file) else f" (in {last.filename}:{last.lineno})"
    )
    below += "" if path.exists() else f" (a copy of {path}, which is not there)"
    if isinstance(error, SystemExit):
        code = "" if error.code is None else f" ({error.code})"
        return (
            f"{where}: ends the program{code}, "
            f"so nothing can be done with it; remove that line{below}"
        )
    kind = "" if isinstance(error, ConfigError) and str(error) else type(error).__name__
    return f"{where}: {': '.join(filter(None, [kind, str(error)]))}{below}"


def _names(module: types.ModuleType) -> dict[str, Any]:
    """The names that expressions may use: configs, functions and classes of the user or of ours."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_offered(value)
    }


def _is_offered(value: Any) -> bool:
    """Whether a value is a config, or a function or class of the user or of this library."""
    if is_config(value):
        return True
    if not callable(value):
        return False
    # a partial counts as its function
    home = str(getattr(getattr(value, "func", value), "__module__", ""))
    return home.split(".")[0] == "jaxformer" or is_users_module(sys.modules.get(home))


def _imports(folder: imports.Folder) -> dict[str, str]:
    """The sha256 by path of all imported files of the user, among them those of the experiment.

    For a file in the experiment's folder it is that of the text that was run. Files in the folder
    of another experiment are left out.
    """
    digests: dict[str, str] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        attributes = vars(module)
        if "__experiment_text__" in attributes or imports.FOLDER in attributes:
            continue
        file = str(attributes.get("__file__"))
        if file.endswith(".py") and is_users_file(file):
            digest = imports.digest_of(file)
            if digest is not None:
                digests[file] = digest
    return dict(sorted((digests | folder.digests()).items()))


def read_json(
    file: os.PathLike | str,
    advice: str = "",
    root: os.PathLike | str | None = None,
    /,
    **keys: type,
) -> dict[str, Any]:
    """The object in a JSON file that has at least `keys`, with values of these types.

    Raises ConfigError, with the file's name, for any other content. A stranger may have made the
    folder `root`, so no link below it is followed.
    """
    path = os.fspath(file)
    then = f"; {advice}" if advice else ""
    try:
        value = json.loads(storage.retry(lambda: read_bytes(path, root), path).decode("utf-8-sig"))
        _check_depth(value)
    except ConfigError:  # its message names the file
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its JSON cannot be read ({str(error)[:200]}){then}") from None
    except OSError as error:
        problem = f"{path}: its JSON cannot be read ({str(error)[:200]}){then}"
        raise storage.mistake(error, problem) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: expected a JSON object {{...}}, got a {type(value).__name__}{then}"
        )
    for name, kind in keys.items():
        if not isinstance(value.get(name), kind):
            found = type(value[name]).__name__ if name in value else "nothing"
            raise ConfigError(f"{path}: expected a {kind.__name__} as {name!r}, got {found}{then}")
    return value


def _check_depth(value: Any) -> None:
    """Raises ValueError for JSON that is nested more than `DEEPEST` deep."""
    level = [value]
    for _ in range(DEEPEST):
        below = []
        for each in level:
            if isinstance(each, dict | list):
                below += each.values() if isinstance(each, dict) else each
        level = below
    if level:
        raise ValueError(f"nested more than {DEEPEST} deep")


# Strict JSON has no such numbers. Python writes NaN and Infinity, which other readers refuse.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, **options: Any) -> str:
    """Strict JSON by `json.dumps(value, **options)`; NaN and the infinities become texts."""
    return json.dumps(_without_nan(value), allow_nan=False, **options)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The values that `to_json` wrote, with the texts of `NOT_FINITE` as numbers again."""
    return {
        name: NOT_FINITE.get(item, item) if isinstance(item, str) else item
        for name, item in values.items()
    }


def write_atomically(
    path: os.PathLike | str,
    text: str | bytes,
    root: os.PathLike | str | None = None,
    waits: Sequence[float] = storage.WAITS,
) -> None:
    """Writes a file, or an object of a bucket: a reader sees the old content or the new one.

    Missing folders are made. A link at `path` is replaced and not followed, because in a stranger's
    folder it may lead anywhere. A folder below `root` that is a link raises ConfigError. After an
    error that may pass, everything is written again into a new file: after a failed fsync the
    content of the old one is unknown.
    """
    from etils import epath

    path = epath.Path(path)
    data = text.encode() if isinstance(text, str) else text

    def write() -> None:
        if "://" in str(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)  # an object appears only when it is complete
            return
        with new_file(Path(path), root) as file:
            file.write(data)

    storage.retry(write, path, waits)


@contextlib.contextmanager
def new_file(path: Path, root: os.PathLike | str | None = None) -> Iterator[IO[bytes]]:
    """A file to write that gets its name when it is complete and on the disk.

    If the body fails, the file is removed. Until it is complete its name is random, because several
    hosts may write the same file at once, with equal process ids. A folder below `root` that is a
    link raises ConfigError.
    """
    folder = no_links.open_folder(path.parent, path.parent if root is None else root, make=True)
    # the temporary name must not be longer than the file system allows
    start = path.name.encode()[:200].decode(errors="ignore")
    temporary = f".{start}.{secrets.token_hex(8)}.unfinished"

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=folder)

    try:
        # mode x never follows a link
        with storage.name_errors(path), open(temporary, "xb", opener=create) as file:
            yield file
            file.flush()
            # without fsync, the name may survive a power failure and the content not
            os.fsync(file.fileno())
        with storage.name_errors(path):
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(folder)
