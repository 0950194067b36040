"""Names that an option may call, each loaded at its first use.

`--model.mixer=Performer()` loads only the file of that paper.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class Offered(Mapping):
    """A mapping from a package's names to its objects. Each is imported when it is looked up.

    `names` maps each name to its file; None: the package's own table `OFFERED`.
    """

    def __init__(self, package: str, names: Mapping[str, str] | None = None):
        self.package = package
        self._names = names

    def _table(self) -> Mapping[str, str]:
        if self._names is None:
            self._names = importlib.import_module(self.package).OFFERED
        return self._names or {}

    def __getitem__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{self.package}.{self._table()[name]}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())

    def __contains__(self, name: object) -> bool:
        return name in self._table()
