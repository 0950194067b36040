"""Documents of a file, folder, glob or Hugging Face data set, in parts to read in parallel."""

import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxformer.config import regular_file, storage
from jaxformer.data import bpe
from jaxformer.data.records import (
    JSON_LINES,
    Part,
    Problems,
    Stream,
    has_ending,
    lines,
    parts,
    records,
)
from jaxformer.errors import ConfigError

ROWS = (*JSON_LINES, ".parquet")  # files of rows; every other file is one text
ENDINGS = (".txt", ".txt.gz", *ROWS)  # the files of a folder that are read
NO_TEXT = (
    ".csv", ".tsv", ".ndjson", ".jsonlines", ".arrow", ".feather", ".avro", ".npy", ".npz", ".pkl",
    ".pdf", ".docx", ".xlsx", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z",
)  # fmt: skip
PIECE = 1 << 20  # characters of a long text that are encoded at a time
PART = 1 << 27  # bytes that one process encodes, or after which a stream notes its state


def list_files(path: str) -> list[str]:
    """The sorted files of a file, folder or glob; a Hugging Face data set is one "file".

    Raises ConfigError if there is none, or one of a kind that is not read.
    """
    if path.startswith("hf:"):
        return [path]
    path = os.path.expanduser(path)
    if storage.is_dir(path):
        files = [file for file in _visible(path) if has_ending(file, *ENDINGS)]
    else:
        regular_file(path)
        names = [path] if storage.exists(path) else glob.glob(_escaped(path), recursive=True)
        files = sorted(file for file in names if storage.is_file(file))
        if bad := [
            file for file in files if has_ending(file.lower().removesuffix(".gz"), *NO_TEXT)
        ]:
            advice = (
                "rows are read from .jsonl and .parquet, text from any other file, "
                "both also as .gz; convert it"
            )
            raise ConfigError(f"data.path: {bad[0]} is a kind of file that is not read; {advice}")
    if files:
        return files
    problem = f"no file in {path!r} (looked in {os.getcwd()}{say_left_out(path)})"
    raise ConfigError(f"data.path: {problem}; expected files of {' '.join(ENDINGS)}")


def _visible(folder: str) -> list[str]:
    """The sorted files of a folder, without hidden ones, which programs write for themselves."""
    return storage.find_files(
        lambda: glob.glob(f"{glob.escape(folder)}/**", recursive=True), folder
    )


def _escaped(pattern: str) -> str:
    """A glob in which the names of existing folders are literal, even with [ ] in them."""
    folder, name = os.path.split(pattern)
    if not folder or folder == pattern:
        return pattern
    return os.path.join(glob.escape(folder) if os.path.isdir(folder) else _escaped(folder), name)


def say_left_out(path: str) -> str:
    """Text that counts the files of a folder that are not read; empty if there are none."""
    path = os.path.expanduser(path)
    if path.startswith("hf:") or not os.path.isdir(path):
        return ""
    others = [file for file in _visible(path) if not has_ending(file, *ENDINGS)]
    return f"; {len(others):,} files of other kinds left out (first {others[0]})" if others else ""


def group_parts(path: str, tokenizer: Any = None) -> list[list[tuple[str, int, int | None]]]:
    """The parts of the data: lists of (file, start, stop), each of about PART bytes.

    A shard of a stream is a part alone. A text is cut only where that changes no token of
    `tokenizer`.
    """
    groups = []
    bytes_left = 0.0
    for file in list_files(path):
        stretches = parts(file, PART)
        if (
            tokenizer is not None
            and len(stretches) > 1
            and not (file.startswith("hf:") or has_ending(file, *ROWS))
        ):
            cuts = [_cut_near(file, start, tokenizer) for start, _ in stretches[1:]]
            stretches = [Part(*cut) for cut in zip([0, *cuts], [*cuts, None], strict=True)]
        size = PART if file.startswith("hf:") else os.path.getsize(file) / len(stretches)
        for stretch in stretches:
            if not groups or size > bytes_left:
                groups.append([])
                bytes_left = PART
            groups[-1].append((file, *stretch))
            bytes_left -= size
    return groups


def _cut_near(file: str, start: int, tokenizer: Any) -> int:
    """The first line at or after `start` that may begin a part.

    `start` itself if the next megabyte has no such line.
    """
    reach = 4 * bpe.REACH  # bytes: a character has at most four
    with open(file, "rb") as stream:
        stream.seek(max(start - reach, 0))
        text_before = stream.read(min(start, reach))
        text_after = stream.read(1 << 20)
    data = text_before + text_after
    end = len(text_before)
    while end := data.find(b"\n", end - 1) + 1:
        before = data[max(end - reach, 0) : end]
        after = data[end : end + reach]
        if tokenizer.may_cut(_as_text(before), _as_text(after)):
            return start - len(text_before) + end
        end += 1
    return start


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "ignore").replace("\r\n", "\n")


def read_documents(
    group: Sequence[Sequence],
    field: str,
    problems: Problems,
    stream: Stream | None = None,
    tokenizer: Any = None,
) -> Iterator[tuple[str, bool, bool]]:
    """(text, whether it continues the previous text, whether it ends a document) of one part."""
    for path, *bounds in group:
        if not path.startswith("hf:") and os.path.getsize(path) == 0:
            problems.add(path, "empty")
        elif not path.startswith("hf:") and not has_ending(path, *ROWS):
            yield from _pieces(path, Part(*bounds), problems, tokenizer)
        else:
            for place, (text,) in records(path, [field], problems, Part(*bounds), stream):
                if not isinstance(text, str):
                    problems.add(place, f"{field!r} is no text", f" but {type(text).__name__}")
                elif text:
                    yield text, False, True


def _pieces(
    path: str, part: Part, problems: Problems, tokenizer: Any = None
) -> Iterator[tuple[str, bool, bool]]:
    """A text file in pieces of about a megabyte, cut where that changes no token.

    Line ends become \\n. If a tokenizer allows no cut, the pieces have sixteen megabytes: it needs
    some hundred bytes of memory for each character.
    """
    piece: list[str] = []
    size = 0
    limit = PIECE
    continues = part.start > 0
    for _, text in lines(path, problems, part):
        if text is not None:
            piece.append(f"{text}\n")
            size += len(text) + 1
        if size > limit:
            joined = "".join(piece)
            cut = len(joined) if tokenizer is None else tokenizer.last_cut(joined)
            if not cut and size > 16 * PIECE:
                cut = len(joined)
            if cut:
                yield joined[:cut], continues, False
                continues = True
            piece = [joined[cut:]]
            size = len(joined) - cut
            limit = PIECE if cut else 2 * size
    if piece or continues:  # a file without a readable line is not a document
        yield "".join(piece), continues, part.stop is None
