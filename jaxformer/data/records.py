"""Records of files: lines of text, JSONL, Parquet and Hugging Face data sets.

A bad record is skipped and counted, or refused.
"""

import codecs
import functools
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from etils import epath

from jaxformer.config import regular_file, storage
from jaxformer.errors import ConfigError, did_you_mean, package_of

Policy = Literal["skip", "error"]
JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
ONE_ROW_A_LINE = "; each line must hold one row, an object: jq -c '.[]' FILE makes these of a list"


def paths_as_text(config: Any, *names: str) -> None:
    """Converts paths in the named fields of a frozen config to texts. For its `__post_init__`."""
    for name in names:
        if isinstance(value := getattr(config, name), os.PathLike):
            object.__setattr__(config, name, os.fspath(value))


@dataclass
class Problems:
    """Bad records: refused at once ("error"), or counted by kind with the first place ("skip")."""

    policy: Policy = "error"
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, place: object, kind: str, detail: str = "") -> None:
        """Notes a bad record; raises ConfigError under "error".

        Records are counted by `kind`, so `kind` must be the same text for all of one kind.
        """
        if self.policy == "error":
            raise ConfigError(
                f"{place}: {kind}{detail}; "
                "mend it, or leave such rows out with --data.bad-rows=skip"
            )
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind not in self.first:
            self.first[kind] = f"{place}{detail}"

    def __str__(self) -> str:
        """Text as "; 3 rows skipped: 2 empty (first a.de:17), 1 no text (first a.de:20)", or ""."""
        kinds = ", ".join(
            f"{count:,} {kind} (first {self.first[kind]})" for kind, count in self.counts.items()
        )
        return f"; {sum(self.counts.values()):,} rows skipped: {kinds}" if kinds else ""


class Part(NamedTuple):
    """A part of a file that can be read alone.

    Its unit is bytes of a text file, row groups of Parquet, or shards of a Hugging Face data set. A
    line belongs to the part in which it begins.
    """

    start: int = 0
    stop: int | None = None  # None: the end


class _Place(NamedTuple):
    """A line of a later part of a file. Its number in the file is computed when it is printed."""

    path: str
    start: int
    number: int  # in the part, from 1

    def __str__(self) -> str:
        return f"{self.path}:{_lines_before(self.path, self.start) + self.number}"


def parts(path: str, size: int) -> list[Part]:
    """The parts of a file, of about `size` bytes each.

    A .gz file is one part; a Hugging Face data set has one for each shard.
    """
    if path.startswith("hf:"):
        return [Part(i, i + 1) for i in range(_hugging_face(path).num_shards)]
    if has_ending(path, ".gz"):
        return [Part()]
    if not has_ending(path, ".parquet"):
        cuts = list(range(0, epath.Path(path).stat().length, size)) or [0]
        return [Part(*cut) for cut in zip(cuts, [*cuts[1:], None], strict=True)]
    return _parquet_parts(path, size)


def _parquet_parts(path: str, size: int) -> list[Part]:
    """Parts of whole row groups; one part for a file that cannot be read."""
    file = _open_parquet(path, Problems("skip"))
    complete = []
    start = part_bytes = 0
    for group in range(file.num_row_groups if file else 0):
        if part_bytes >= size:
            complete.append(Part(start, group))
            start, part_bytes = group, 0
        part_bytes += file.metadata.row_group(group).total_byte_size
    return [*complete, Part(start)]


def has_ending(path: str, *endings: str) -> bool:
    """Whether a name has one of `endings`, in any case. With .gz the ending must include it."""
    return path.lower().endswith(endings)


def foreign_text(beginning: bytes) -> str | None:
    """In words, the kind of a file whose first bytes show that it is not UTF-8 text; else None."""
    for name, marks in (
        ("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
        ("UTF-16", (codecs.BOM_LE, codecs.BOM_BE)),
    ):
        if beginning.startswith(marks):
            return f"{name}, not UTF-8"
    # 0 for a NUL byte at an even position, 1 for one at an odd position
    parities = [position % 2 for position, byte in enumerate(beginning) if byte == 0]
    # in UTF-16, one byte of each space or Latin letter is NUL
    if len(parities) >= 8 and len(set(parities)) == 1 and 32 * len(parities) > len(beginning):
        return "UTF-16 without a mark, not UTF-8"
    return "no text, a quarter of it NUL bytes" if 4 * len(parities) > len(beginning) else None


def lines(path: str, problems: Problems, part: Part = Part()) -> Iterator[tuple[Any, str | None]]:
    """(place, text) of each line of a file, which may end in .gz.

    The text of a line that is not UTF-8 is None. A file whose beginning shows another encoding,
    such as UTF-16, is one problem and has no lines.
    """
    number = 0
    try:
        if (foreign := foreign_text(_beginning(path))) is not None:
            if not part.start:
                problems.add(path, foreign, "; convert it to UTF-8")
            return
        for number, raw in enumerate(_raw_lines(path, part), 1):
            place = _Place(path, part.start, number) if part.start else f"{path}:{number}"
            if number == 1 and not part.start:
                # Windows programs write this mark; it is not part of the text
                raw = raw.removeprefix(codecs.BOM_UTF8)
            try:
                text = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                problems.add(
                    place, "not UTF-8", f" (byte {raw[error.start]:#04x} at position {error.start})"
                )
                text = None
            yield place, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problems.add(f"{path}:{number + 1}", "not readable to the end", f" ({error})")


def records(
    path: str,
    fields: Sequence[str],
    problems: Problems,
    part: Part = Part(),
    stream: "Stream | None" = None,
) -> Iterator[tuple[Any, list[Any]]]:
    """(place, values of `fields`) of each record of a .jsonl or .parquet file or a data set.

    `path` of a Hugging Face data set is hf:NAME[,CONFIG]#SPLIT; it is streamed, from `stream` if
    that is given. A field may be nested: "translation.de". Raises ConfigError for a path that
    cannot be read.
    """
    for place, record in _read_records(path, fields, problems, part, stream):
        values = [_value(record, name) for name in fields]
        missing = [name for name, value in zip(fields, values, strict=True) if value is None]
        if missing:
            names = list(record) if isinstance(record, dict) else []
            hint = " (it is null)" if missing[0] in names else did_you_mean(missing[0], names)
            problems.add(place, f"no field {missing[0]!r}", hint)
        else:
            yield place, values


class Stream:
    """(place, record) of the records of a Hugging Face data set, or of one of its shards.

    Another Stream with `state()` continues after the last record.
    """

    def __init__(self, path: str, part: Part = Part(), state: dict[str, Any] | None = None):
        self._records = _hugging_face(path)
        self._name = path
        self._number = 0
        if part.stop is not None:
            self._records = self._records.shard(
                num_shards=self._records.num_shards, index=part.start
            )
            self._name = f"{path} shard {part.start}"
        if state is not None:
            self._number = state["number"]
            self._records.load_state_dict(state["rows"])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            for record in self._records:
                self._number += 1
                yield f"{self._name}:{self._number}", record
        except Exception as error:  # from readers, compression or network, each with own classes
            raise ConfigError(
                f"data: cannot read {self._name} after row {self._number} ({_words(error)})"
            ) from error

    def state(self) -> dict[str, Any]:
        """The position after the last record that was read, as JSON."""
        return {"number": self._number, "rows": self._records.state_dict()}


def _read_records(
    path: str, fields: Sequence[str], problems: Problems, part: Part, stream: Stream | None
) -> Iterable[tuple[Any, Any]]:
    if path.startswith("hf:"):
        return stream or Stream(path, part)
    if has_ending(path, ".parquet"):
        return _parquet(path, fields, problems, part)
    if has_ending(path, *JSON_LINES):
        return _jsonl(path, problems, part)
    raise ConfigError(
        f"data: {path}: rows are read from .jsonl[.gz] and .parquet files and from hf:NAME#SPLIT"
    )


def _jsonl(path: str, problems: Problems, part: Part) -> Iterator[tuple[Any, Any]]:
    first = part.start == 0
    for place, text in lines(path, problems, part):
        if text is None or not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            # JSON that a program has indented has many lines; the first is an opening bracket
            is_opening = first and text.strip() in ("[", "{", "[{")
            problems.add(
                place,
                "JSON over several lines" if is_opening else "not JSON",
                ONE_ROW_A_LINE if is_opening else f" ({error})",
            )
        else:
            if isinstance(record, dict):
                yield place, record
            else:
                problems.add(place, f"a JSON {type(record).__name__}", ONE_ROW_A_LINE)
        first = False


def _open_parquet(path: str, problems: Problems) -> Any:
    with package_of("data"):
        from pyarrow import parquet
    regular_file(path)
    try:
        return parquet.ParquetFile(path)
    except FileNotFoundError:
        raise ConfigError(f"data: there is no {path}") from None
    except Exception as error:  # pyarrow has classes of its own
        problems.add(path, "not readable as Parquet", f" ({error})")
    return None


def _parquet(
    path: str, fields: Sequence[str], problems: Problems, part: Part
) -> Iterator[tuple[str, Any]]:
    file = _open_parquet(path, problems)
    if file is None:
        return
    columns = {name if name in file.schema_arrow.names else name.split(".")[0] for name in fields}
    columns = sorted(columns) if columns <= set(file.schema_arrow.names) else None
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    for group in range(file.num_row_groups)[part.start : part.stop]:
        number = sum(sizes[:group])
        end = number + sizes[group]
        try:
            for batch in file.iter_batches(1000, [group], columns):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", record
        except ConfigError:  # from the caller, who refuses a record
            raise
        except Exception as error:  # pyarrow has classes of its own
            problems.add(
                f"{path}: rows {number + 1} to {end}", "row group not readable", f" ({error})"
            )


def hugging_face_name(path: str) -> tuple[str, str, str]:
    """(name, configuration, split) of hf:NAME[,CONFIG][#SPLIT].

    If NAME is an existing folder, it may have , and # in it.
    """
    path = path.removeprefix("hf:")
    head, _, tail = path.rpartition("#")
    for folder, split in ((path, ""), (head, tail)):
        if folder and Path(folder).is_dir():
            return folder, "", split
    head, _, split = path.partition("#")
    name, _, config = head.partition(",")
    return name, config, split


def _hugging_face(path: str) -> Any:
    """An iterable data set. A folder that `save_to_disk` wrote gets at most 64 shards."""
    name, config, split = hugging_face_name(path)
    with package_of("data"):
        import datasets
    try:
        if not any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):
            return datasets.load_dataset(
                name, config or None, split=split or "train", streaming=True
            )
        dataset: Any = datasets.load_from_disk(name)
        if isinstance(dataset, dict):
            dataset = dataset[split or "train"]
        elif split not in ("", "train"):
            raise ValueError(
                f"the folder holds one data set without splits, so none is called {split!r}"
            )
        return dataset.to_iterable_dataset(num_shards=max(1, min(64, len(dataset))))
    except Exception as error:  # from the hub, files or settings, each with own classes
        raise ConfigError(f"data: cannot read {path} ({_words(error)})") from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _value(record: Any, name: str) -> Any:
    if isinstance(record, dict) and name in record:  # a name may have a dot in it
        return record[name]
    for part in name.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def _beginning(path: str) -> bytes:
    """The first bytes of a file, decompressed; b"" if it cannot be read (`_raw_lines` raises)."""
    try:
        with regular_file(path).open("rb") as file:
            return (gzip.GzipFile(fileobj=file) if has_ending(path, ".gz") else file).read(4096)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""
    except OSError as error:
        if storage.passes(error):
            raise
        return b""


def _raw_lines(path: str, part: Part) -> Iterator[bytes]:
    regular_file(path)
    try:
        with epath.Path(path).open("rb") as file:
            if part.start:
                file.seek(part.start - 1)
                file.readline()  # the rest of a line that belongs to the previous part
            position = file.tell()
            for raw in gzip.GzipFile(fileobj=file) if has_ending(path, ".gz") else file:
                if part.stop is not None and position >= part.stop:
                    return
                position += len(raw)
                yield raw
    except FileNotFoundError:
        raise ConfigError(f"data: there is no {path}") from None
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise storage.mistake(error, f"data: cannot read {path} ({error})") from None


@functools.lru_cache(maxsize=16)
def _lines_before(path: str, start: int) -> int:
    """The number of lines of a file that begin before the byte `start` > 0."""
    count = 1
    bytes_left = start - 1
    with epath.Path(path).open("rb") as file:
        while bytes_left and (block := file.read(min(bytes_left, 1 << 20))):
            count += block.count(b"\n")
            bytes_left -= len(block)
    return count
