"""Names that an option may call, loaded when one of them is used: `--model.mixer=Performer()` loads that paper alone."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class Offered(Mapping):
    """The names of a package's table `OFFERED` (name -> its file), or those given. Each is imported when it is looked up."""

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
