"""Experiment files: found, run, and run again from the copy that a run folder keeps."""

import contextlib
import dis
import hashlib
import json
import math
import os
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
# the user's own, those beside a checkout, those that travel with an installed package
FOLDERS = (Path("experiments"), PACKAGE.parent / "experiments", PACKAGE / "builtin" / "experiments")
PROGRAMS = ("one_file",)  # in experiments/, but no experiments
LARGEST, DEEPEST = 100_000_000, 400  # bytes and nesting of files that anybody may have written; `describe` nests less


@dataclass(frozen=True, eq=False)
class Source:
    """An experiment file that was run: its text, where it was, what it made, and the user's files that it imported."""

    text: str
    path: str
    experiment: Any = None
    names: dict[str, Any] = field(default_factory=dict)  # what its expressions may call
    imports: dict[str, str] = field(default_factory=dict)  # path: sha256
    overrides: tuple[str, ...] = ()  # options, as typed

    def facts(self) -> dict[str, Any]:
        """What is needed to run the copy again, as JSON."""
        return {"path": self.path, "overrides": list(self.overrides), "imports": self.imports}


def load(name_or_path: str) -> Any:
    """The `experiment` of a file: `experiments/NAME.py`, here, beside or in the package, or a path that ends in `.py`.

    Raises ConfigError for a file that is missing, fails to run (with its line) or defines no `experiment`.
    """
    return read(name_or_path).experiment


def read(name_or_path: str) -> Source:
    """`load`, with all that was learned on the way."""
    path = _find(str(name_or_path))
    return _run(path, path)


def again(copy: Any, facts: dict[str, Any], text: str | None = None) -> Source:
    """The copy of an experiment file (its `text`, if read before), run as the file once was. ConfigError where it fails."""
    return replace(_run(copy, Path(facts["path"]), text), overrides=tuple(map(str, facts["overrides"])))


def in_library(text: str) -> Path | None:
    """The experiment file with this text that came with the library, not the user's; None where there is none."""
    found = (path for folder in FOLDERS[1:] for path in folder.glob("[!_]*.py") if read_text(path) == text)
    return next(found, None)


def available() -> dict[str, Path]:
    """Every experiment by name; of equal names the user's own."""
    found = [path for folder in reversed(FOLDERS) for path in sorted(folder.glob("[!_]*.py"))]
    return {path.stem: path for path in found if path.stem not in PROGRAMS}


def _find(name: str) -> Path:
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            others = [file.name for file in path.parent.glob("*.py")]
            raise ConfigError(f"no file {name}{did_you_mean(path.name, others)}")
        return path
    experiments = available()
    if name not in experiments:
        raise ConfigError(f"no experiment {name!r} in experiments/{did_you_mean(repr(name), map(repr, experiments))}")
    return experiments[name].resolve()


def regular_file(path: os.PathLike | str, root: os.PathLike | str | None = None) -> Any:
    """The path, of a bucket too. Raises ConfigError for a pipe, a device or a folder: what is no file may have no end.

    Where it is `root` a folder that a stranger may have made, a link below that folder is refused, too.
    """
    from etils import epath

    if root is not None:
        no_links.check_folder(path, root)
    if storage.exists(path) and not storage.is_file(path):  # to epath, /dev/zero is a file
        raise ConfigError(f"{path}: cannot be read: no regular file; give a file, or save what it gives as one")
    return epath.Path(path)


def read_bytes(file: os.PathLike | str, root: os.PathLike | str | None = None, largest: int = LARGEST) -> bytes:
    """What a file of at most so many bytes holds. Below a folder `root`, which a stranger may have made, no link is followed.

    Raises ConfigError for what is no regular file or a link, and OSError.
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
    if size > largest:  # a file with holes takes no room on a disk
        raise OSError(f"larger than {largest:,} bytes")


def read_text(file: os.PathLike | str, root: os.PathLike | str | None = None) -> str:
    """The text of a file in UTF-8, without the mark that some editors begin it with. ConfigError where it cannot be read.

    Below a folder `root`, which a stranger may have made, no link is followed.
    """
    try:
        return storage.retry(lambda: read_bytes(file, root), file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except OSError as error:
        raise storage.mistake(error, f"{file}: cannot be read ({error})") from None


class _NoOptions(list):
    """`sys.argv` of an experiment file: its path. Options are fields, so that a run can be opened again anywhere."""

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            raise ConfigError("an experiment file gets no command line; make the option a field: --key=VALUE sets it")
        return super().__getitem__(index)


def _run(file: Any, path: Path, text: str | None = None) -> Source:
    """Runs `file` as if it stood at `path`; both are the same unless it is a copy."""
    text = read_text(file) if text is None else text
    in_folder = path.parent.name == "experiments"  # files there import each other as experiments.NAME
    folder = imports.folder_at(str(path.parent.parent if in_folder else path.parent))
    # a name of its own: the file is no module for others, and a file copy.py must not replace Python's
    digest = hashlib.sha256(f"{file}\n{text}".encode()).hexdigest()[:8]
    module: Any = types.ModuleType(f"experiment_{path.stem}_{digest}")
    module.__file__, module.__package__ = str(path), folder.name_of("experiments") if in_folder else ""
    module.__experiment_text__ = text  # functions are described by it, also when the file is edited later
    module.__builtins__ = folder.builtins
    sys.modules[module.__name__] = module
    arguments, folder_before = sys.argv, os.getcwd()
    sys.argv = _NoOptions([str(path)])
    try:
        # what it prints is no part of a command's answer: `evaluate RUN` prints JSON for another program
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(text, str(file), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, KeyboardInterrupt) and not _is_raised_in(error, file):
            raise
        if isinstance(error, OSError) and error.errno is not None and storage.passes(error):  # of a file that it reads
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
        raise ConfigError(_failure(error, file, path)) from error
    finally:
        sys.argv = arguments
        folder_after = os.getcwd()
        os.chdir(folder_before)
    if folder_after != folder_before:
        problem = f"it changes the current folder to {folder_after}, so that runs/ and all relative paths would lead there"
        raise ConfigError(f"{file}: {problem}; make paths of Path(__file__).parent, or start the command in that folder")
    if not is_config(getattr(module, "experiment", None)):
        del sys.modules[module.__name__]
        raise ConfigError(f"{file}: defines no `experiment`; end it with `experiment = Experiment(...)`")
    return Source(text, str(path), module.experiment, _names(module), _imports(folder))


def _is_raised_in(error: BaseException, file: Any) -> bool:
    """Whether a `raise` statement of the file itself raised the error: a signal interrupts any other instruction."""
    last = [*traceback.walk_tb(error.__traceback__)][-1][0]
    instructions = dis.get_instructions(last.f_code)
    raises = {each.offset for each in instructions if each.opname == "RAISE_VARARGS"}
    return last.f_code.co_filename == str(file) and last.f_lasti in raises


def _failure(error: BaseException, file: Any, path: Path) -> str:
    """Where an experiment file failed, also below it in a file that it imports, and why."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    where = f"{file}:{lines[-1]}" if lines else str(file)
    last = users_frame(error)
    below = "" if last is None or last.filename == str(file) else f" (in {last.filename}:{last.lineno})"
    below += "" if path.exists() else f" (a copy of {path}, which is not there)"
    if isinstance(error, SystemExit):
        code = "" if error.code is None else f" ({error.code})"
        return f"{where}: ends the program{code}, so nothing can be done with it; remove that line{below}"
    kind = "" if isinstance(error, ConfigError) and str(error) else type(error).__name__
    return f"{where}: {': '.join(filter(None, [kind, str(error)]))}{below}"


def _names(module: types.ModuleType) -> dict[str, Any]:
    """What expressions may call: the functions and classes of the user and of this library, and configs."""

    def is_offered(value: Any) -> bool:
        home = str(getattr(getattr(value, "func", value), "__module__", ""))  # of a partial, that of its function
        return home.split(".")[0] == "jaxformer" or is_users_module(sys.modules.get(home))

    def offered(value):
        return is_config(value) or (callable(value) and is_offered(value))

    return {name: value for name, value in vars(module).items() if not name.startswith("_") and offered(value)}


def _imports(folder: imports.Folder) -> dict[str, str]:
    """The sha256 of the user's files that are imported by now: those of an experiment that just ran are among them.

    Of files in its folder that of the text which was run; those of another experiment's folder do not count.
    """
    modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    others = [each for each in modules if "__experiment_text__" not in each and imports.FOLDER not in each]
    files = {file for each in others if (file := str(each.get("__file__"))).endswith(".py") and is_users_file(file)}
    found = {file: digest for file in files if (digest := imports.digest_of(file)) is not None} | folder.digests()
    return dict(sorted(found.items()))


def read_json(
    file: os.PathLike | str, advice: str = "", root: os.PathLike | str | None = None, /, **keys: type
) -> dict[str, Any]:  # fmt: skip
    """The object in a JSON file, which has at least the `keys`, with values of these types.

    Below a folder `root`, which a stranger may have made, no link is followed. Raises ConfigError, with the file's name,
    for all else.
    """
    path, then = os.fspath(file), f"; {advice}" if advice else ""
    try:
        value = json.loads(storage.retry(lambda: read_bytes(path, root), path).decode("utf-8-sig"))
        below = [value]
        for _ in range(DEEPEST):
            inside = (each.values() if isinstance(each, dict) else each for each in below if isinstance(each, dict | list))
            below = [part for parts in inside for part in parts]
        if below:
            raise ValueError(f"nested more than {DEEPEST} deep")
    except ConfigError:  # it names the file
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its JSON cannot be read ({str(error)[:200]}){then}") from None
    except OSError as error:
        raise storage.mistake(error, f"{path}: its JSON cannot be read ({str(error)[:200]}){then}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object {{...}}, got a {type(value).__name__}{then}")
    for name, kind in keys.items():
        if not isinstance(value.get(name), kind):
            found = type(value[name]).__name__ if name in value else "nothing"
            raise ConfigError(f"{path}: expected a {kind.__name__} as {name!r}, got {found}{then}")
    return value


# Strict JSON has no such numbers: Python writes NaN and Infinity, which other readers refuse.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, **options: Any) -> str:
    """Strict JSON, by `json.dumps` with these options: numbers that are not finite are texts, such as "NaN"."""
    return json.dumps(_without_nan(value), allow_nan=False, **options)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Values that `to_json` wrote, with the numbers that are not finite."""
    return {name: NOT_FINITE.get(item, item) if isinstance(item, str) else item for name, item in values.items()}


def write_atomically(
    path: os.PathLike | str, text: str | bytes, root: os.PathLike | str | None = None,
    waits: Sequence[float] = storage.WAITS,
) -> None:  # fmt: skip
    """Writes a file, or an object of a bucket, and its folder: a reader sees the old text or the new one.

    A link of that name is replaced, not followed: in a stranger's folder it may lead anywhere. Of folders on the way, those
    below `root` may be no links (ConfigError). Where an error may pass, all is written again, into a new file: after an
    fsync that failed, nobody knows what the old one holds.
    """
    from etils import epath

    path, data = epath.Path(path), text.encode() if isinstance(text, str) else text

    def write() -> None:
        if "://" in str(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)  # an object appears when it is complete
            return
        with new_file(Path(path), root) as file:
            file.write(data)

    storage.retry(write, path, waits)


@contextlib.contextmanager
def new_file(path: Path, root: os.PathLike | str | None = None) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name when it is complete and on the disk. Where the body fails it is removed.

    Several hosts may write a file of one name at once, and their processes may have one number: until then its name is random.
    Of folders on the way, those below `root` may be no links (ConfigError).
    """
    folder = no_links.open_folder(path.parent, path.parent if root is None else root, make=True)
    start = path.name.encode()[:200].decode(errors="ignore")  # with the rest it must not be longer than a name can be
    temporary = f".{start}.{secrets.token_hex(8)}.unfinished"

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=folder)

    try:
        with storage.name_errors(path), open(temporary, "xb", opener=create) as file:  # x: never through a link
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise the name may survive a power failure that the content does not
        with storage.name_errors(path):
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(folder)
