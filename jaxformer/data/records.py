"""Rows of files: lines of text, JSONL, Parquet and Hugging Face data sets. A bad row is skipped and counted, or refused."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from etils import epath

from jaxformer.errors import ConfigError, did_you_mean, package_of

Policy = Literal["skip", "error"]


@dataclass
class Problems:
    """What is wrong with rows: refused at once ("error"), or counted by kind with the place of the first ("skip")."""

    policy: Policy = "error"
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, kind: str, detail: str = "") -> None:
        """Raises ConfigError under "error". `kind` is what is counted: the same words for all rows of that kind."""
        if self.policy == "error":
            raise ConfigError(f"{place}: {kind}{detail}; mend it, or leave such rows out with --data.bad-rows=skip")
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.first.setdefault(kind, place + detail)

    def __str__(self) -> str:
        """Of no problem: empty. Otherwise "; 3 rows skipped: 2 empty (first train.de:17), 1 not UTF-8 (first train.de:20)"."""
        kinds = ", ".join(f"{count:,} {kind} (first {self.first[kind]})" for kind, count in self.counts.items())
        return f"; {sum(self.counts.values()):,} rows skipped: {kinds}" if kinds else ""


def lines(path: str, problems: Problems) -> Iterator[tuple[str, str | None]]:
    """(place, text) for each line of a file, which may end in .gz. The text of a line that is not UTF-8 is None."""
    for number, raw in enumerate(_raw_lines(path), 1):
        place = f"{path}:{number}"
        try:
            yield place, raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            problems.add(place, "not UTF-8", f" (byte {raw[error.start]:#04x} at position {error.start})")
            yield place, None


def records(path: str, fields: Sequence[str], problems: Problems) -> Iterator[tuple[str, list[Any]]]:
    """(place, the values of `fields`) for each row of a .jsonl or .parquet file or of hf:NAME[,CONFIG]#SPLIT.

    A field may lie deeper: "translation.de". Hugging Face data sets are streamed. Raises ConfigError for what cannot be read.
    """
    for place, row in _rows(path, problems):
        values = [_value(row, name) for name in fields]
        missing = [name for name, value in zip(fields, values, strict=True) if value is None]
        if missing:
            names = list(row) if isinstance(row, dict) else []
            problems.add(place, f"no field {missing[0]!r}", did_you_mean(missing[0], names))
        else:
            yield place, values


def _rows(path: str, problems: Problems) -> Iterator[tuple[str, Any]]:
    if path.startswith("hf:"):
        return _hugging_face(path)
    name = path.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet(path, problems)
    if name.endswith((".jsonl", ".json")):
        return _jsonl(path, problems)
    raise ConfigError(f"data: {path}: rows are read from .jsonl[.gz] and .parquet files and from hf:NAME#SPLIT")


def _jsonl(path: str, problems: Problems) -> Iterator[tuple[str, Any]]:
    for place, text in lines(path, problems):
        if text is None or not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            problems.add(place, "not JSON", f" ({error})")
        else:
            yield place, row


def _parquet(path: str, problems: Problems) -> Iterator[tuple[str, Any]]:
    with package_of("data"):
        from pyarrow import parquet
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: cannot read {path} ({error})") from None
    number = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        try:
            rows = file.read_row_group(group).to_pylist()
        except (OSError, ValueError) as error:
            problems.add(f"{path}: rows {number + 1} to {number + count}", "not readable", f" ({error})")
        else:
            yield from ((f"{path}:{number + i}", row) for i, row in enumerate(rows, 1))
        number += count


def _hugging_face(path: str) -> Iterator[tuple[str, Any]]:
    name, _, split = path.removeprefix("hf:").partition("#")
    name, _, config = name.partition(",")
    with package_of("data"):
        import datasets
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{path}:{number}", row
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: cannot read {path} ({type(error).__name__}: {error})") from None


def _value(row: Any, name: str) -> Any:
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _raw_lines(path: str) -> Iterator[bytes]:
    try:
        with epath.Path(path).open("rb") as file:
            yield from gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
    except FileNotFoundError:
        raise ConfigError(f"data: there is no {path}") from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"data: cannot read {path} ({error})") from None
