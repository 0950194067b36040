"""Experiment files: found, run, and run again from the copy that a run folder keeps."""

import ast
import hashlib
import linecache
import re
import sys
import traceback
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxformer.config.describe import is_config, is_users_file
from jaxformer.errors import ConfigError, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
# the user's own, those beside a checkout, those that travel with an installed package
FOLDERS = (Path("experiments"), PACKAGE.parent / "experiments", PACKAGE / "builtin" / "experiments")


@dataclass(frozen=True, eq=False)
class Source:
    """An experiment file that was run: its text, where it was, what it made, and the user's files that it imported."""

    text: str
    path: str
    module: str
    experiment: Any = None
    names: dict[str, Any] = field(default_factory=dict)  # what its expressions may call
    imports: dict[str, str] = field(default_factory=dict)  # path: sha256
    overrides: tuple[str, ...] = ()  # options, as typed

    def facts(self) -> dict[str, Any]:
        """What is needed to run the copy again, as JSON."""
        return {"path": self.path, "module": self.module, "overrides": list(self.overrides), "imports": self.imports}


def load(name_or_path: str) -> Any:
    """The `experiment` of a file: `experiments/NAME.py`, here, beside or in the package, or a path that ends in `.py`.

    Raises ConfigError for a file that is missing, fails to run (with its line) or defines no `experiment`.
    """
    return read(name_or_path).experiment


def read(name_or_path: str) -> Source:
    """`load`, with all that was learned on the way."""
    path = _find(str(name_or_path))
    in_folder = path.parent.name == "experiments"  # under its importable name: files may build on each other
    return _run(path.read_text(), path, f"experiments.{path.stem}" if in_folder else path.stem, path)


def again(copy: Path, facts: dict[str, Any]) -> Source:
    """The copy of an experiment file, run as the file once was. Raises ConfigError where it fails to run."""
    source = _run(copy.read_text(), Path(facts["path"]), facts["module"], copy)
    return replace(source, overrides=tuple(facts["overrides"]))


def available() -> dict[str, Path]:
    """Every experiment by name; of equal names the user's own."""
    found = [path for folder in reversed(FOLDERS) for path in sorted(folder.glob("[!_]*.py"))]
    return {path.stem: path for path in found}


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


def _run(text: str, path: Path, name: str, shown: Path) -> Source:
    """Runs the text as module `name` of the file `path`; errors name the file `shown`."""
    root = path.parent.parent if name.startswith("experiments.") else path.parent
    if str(root) not in sys.path:
        sys.path.append(str(root))
    module: Any = types.ModuleType(name)
    module.__file__, module.__experiment_file__ = str(path), str(shown)
    # functions are described by their source, which belongs to this text even when the file is edited later
    filename = f"{shown}"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    before, sys.modules[name] = sys.modules.get(name), module
    try:
        exec(compile(text, filename, "exec"), module.__dict__)
    except Exception as error:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
        if isinstance(error, SyntaxError) and error.filename == filename:
            lines.append(error.lineno)
        where = f"{shown}:{lines[-1]}" if lines else str(shown)
        moved = "" if shown == path or path.exists() else f" (a copy of {path}, which is not there)"
        raise ConfigError(f"{where}: {type(error).__name__}: {error}{moved}") from error
    if not is_config(getattr(module, "experiment", None)):
        raise ConfigError(f"{shown}: defines no `experiment`; end it with `experiment = Experiment(...)`")
    return Source(text, str(path), name, module.experiment, _names(module), _imports(text, {}))


def _names(module: types.ModuleType) -> dict[str, Any]:
    """What expressions may call: the file's own functions and classes, those of this library, and configs."""
    modules = (module.__name__, "jaxformer", "experiments")
    mine = lambda value: str(getattr(value, "__module__", "")).split(".")[0] in {m.split(".")[0] for m in modules}
    return {
        name: value
        for name, value in vars(module).items()
        if re.match("[A-Za-z]", name) and (is_config(value) or (callable(value) and mine(value)))
    }


def _imports(text: str, found: dict[str, str]) -> dict[str, str]:
    """The sha256 of the user's files that a text imports, and of those that they import."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in modules:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None or file in found or not file.endswith(".py") or not is_users_file(Path(file)):
                continue
            content = Path(file).read_bytes()
            found[file] = hashlib.sha256(content).hexdigest()
            _imports(content.decode(), found)
    return found
