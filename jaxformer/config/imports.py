"""Imports of an experiment file from its own folder.

Two experiment files in two folders may each have a `helper.py`, and a notebook may open both. The
first one that is imported is the module `helper`, as usual. If that name already belongs to another
file of the user, or to an older text of this file, the module is loaded again under a name of its
own: `helper@1a2b3c4d`.

Installed packages and Python's own modules come first, so a `types.py` beside an experiment
replaces nothing. `folder_at` gives the `Folder` of an experiment file; the import statements of
that file call `Folder.import_module`.
"""

import builtins
import hashlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxformer.config import moved
from jaxformer.config.code import MODULE_TEXT, is_users_file, plain_name

# attributes of a module
FOLDER = "__users_folder__"  # its Folder
DIGEST = "__users_digest__"  # the sha256 of the file that was run


class Folder:
    """A folder from which an experiment file and its neighbours import each other."""

    def __init__(self, root: str, edition: int):
        self.root = root
        # how often a file was edited after its import; each edition has modules of its own
        self.edition = edition
        self.builtins = vars(builtins) | {"__import__": self.import_module}

    def import_module(
        self, name: str, globals=None, locals=None, fromlist=(), level: int = 0
    ) -> Any:
        """The `__import__` that the files of this folder call."""
        if level == 0:
            if fromlist and name.partition(".")[0] == "jaxformer":
                module = moved.import_from(name, tuple(fromlist))
                if module is not None:
                    return module
            first, dot, rest = name.partition(".")
            name = self.name_of(first) + dot + rest
        return builtins.__import__(name, globals, locals, fromlist, level)

    def name_of(self, first: str) -> str:
        """The name in sys.modules of the top-level module that files of this folder call `first`.

        Raises ModuleNotFoundError for a module that only the folder of another experiment has.
        """
        loaded = sys.modules.get(first)
        own = self.find(first)
        owner = getattr(loaded, "__dict__", {}).get(FOLDER)
        if owner is self or first in sys.stdlib_module_names or first == "__main__":
            return first
        if own is None:
            if (loaded is None or owner is not None) and _usual(first) is None:
                raise ModuleNotFoundError(f"No module named {first!r}", name=first)
            return first
        # a compiled module can be loaded only under its own name
        if own.origin is not None and not own.origin.endswith(".py"):
            return first
        usual = _usual(first)
        if usual is not None and not is_users_file(_place(usual)):
            return first
        same = owner is None and all(
            _place(each) == _place(own) for each in (loaded, usual) if each is not None
        )
        if same and self.edition == 0:
            _owners[first] = self
            return first
        name = f"{first}@{hashlib.sha256(f'{self.root} {self.edition}'.encode()).hexdigest()[:8]}"
        _owners[name] = self
        return name

    def find(self, first: str) -> ModuleSpec | None:
        """The file or package of that name in this folder."""
        return PathFinder.find_spec(first, [self.root])

    def digests(self) -> dict[str, str]:
        """The sha256 of the text that was run, by path, of each imported file of this folder."""
        modules = [
            vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)
        ]
        return {each["__file__"]: each[DIGEST] for each in modules if each.get(FOLDER) is self}


def folder_at(root: str) -> Folder:
    """The Folder at `root`; a new edition if one of its files was edited since its import."""
    importlib.invalidate_caches()  # a file may have been written just now
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    # for `importlib.import_module`, and for processes that unpickle an object of the user
    if root not in sys.path:
        sys.path.append(root)
        _added.add(root)
    folder = _folders.get(root)
    if folder is None or any(
        digest_of(path) not in (None, digest) for path, digest in folder.digests().items()
    ):
        folder = _folders[root] = Folder(root, 0 if folder is None else folder.edition + 1)
    return folder


def digest_of(path: os.PathLike | str) -> str | None:
    """The sha256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


_folders: dict[str, Folder] = {}
_owners: dict[str, Folder] = {}  # by the name in sys.modules
_added: set[str] = set()  # folders that experiments added to sys.path


class _Finder:
    """Finds the modules of a `Folder`, with a loader that gives them its import statement."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        first, dot, _ = name.partition(".")
        folder = _owners.get(first)
        if folder is None:
            return None
        spec = PathFinder.find_spec(name, path) if dot else folder.find(plain_name(first))
        if spec is None:
            return None
        usual = None if dot else _usual(plain_name(first))
        if name == plain_name(name) and usual is not None and _place(usual) != _place(spec):
            return None  # elsewhere this name means another file
        folders = list(spec.submodule_search_locations or ())
        if spec.origin is None:  # a package without __init__.py may consist of several folders
            package = ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = list(dict.fromkeys([*folders, *_places(usual)]))
            return package
        if not spec.origin.endswith(".py") or not spec.origin.startswith(folder.root + os.sep):
            return spec if dot else None
        loader = _Loader(name, spec.origin, folder)
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=folders or None
        )


class _Loader(SourceFileLoader):
    """Runs a file as it is now and keeps its text.

    Python's bytecode cache cannot tell two edits within one second apart.
    """

    def __init__(self, name: str, path: str, folder: Folder):
        super().__init__(name, path)
        self.folder = folder

    def exec_module(self, module: ModuleType) -> None:
        data = self.get_data(self.path)
        attributes = {
            FOLDER: self.folder,
            DIGEST: hashlib.sha256(data).hexdigest(),
            MODULE_TEXT: importlib.util.decode_source(data),
            "__builtins__": self.folder.builtins,
        }
        vars(module).update(attributes)
        exec(self.source_to_code(data, self.path), vars(module))


_finder: Any = _Finder()


def _usual(first: str) -> ModuleSpec | None:
    """The module that a top-level name means without the folders of experiments."""
    paths = [path for path in sys.path if path not in _added]
    for finder in sys.meta_path:
        if finder is not _finder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(first, paths if finder is PathFinder else None)
            if spec is not None:
                return spec
    return None


def _places(unit: Any) -> list[str]:
    """The folders of a package, given as a module or a spec."""
    name = "__path__" if isinstance(unit, ModuleType) else "submodule_search_locations"
    folders = getattr(unit, name, None)
    return [] if folders is None else list(folders)


def _place(unit: Any) -> str | None:
    """The file of a module or spec; the first folder of a package without a file."""
    if isinstance(unit, ModuleType):
        file = getattr(unit, "__file__", None)
    else:
        file = unit.origin if unit.has_location else None
    file = file or next(iter(_places(unit)), None)
    return None if file is None else os.path.realpath(file)
