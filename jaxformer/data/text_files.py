"""The documents of a file, a folder, a pattern or a data set of the hub, in parts that processes read side by side."""

import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxformer.config import regular_file, storage
from jaxformer.data import tokenizers
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

ROWS = (*JSON_LINES, ".parquet")  # every other file is one text
ENDINGS = (".txt", ".txt.gz", *ROWS)  # the files of a folder that are read
NO_TEXT = (
    ".csv", ".tsv", ".ndjson", ".jsonlines", ".arrow", ".feather", ".avro", ".npy", ".npz", ".pkl", ".pdf", ".docx", ".xlsx",
    ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z",
)  # fmt: skip
PIECE = 1 << 20  # characters of a long text that are encoded at a time
PART = 1 << 27  # bytes that one process encodes, or after which a stream notes its state


def list_files(path: str) -> list[str]:
    if path.startswith("hf:"):
        return [path]
    path = os.path.expanduser(path)
    if storage.is_dir(path):
        files = [file for file in _visible(path) if has_ending(file, *ENDINGS)]
    else:
        regular_file(path)
        names = [path] if storage.exists(path) else glob.glob(_escaped(path), recursive=True)
        files = sorted(file for file in names if storage.is_file(file))
        if bad := [file for file in files if has_ending(file.lower().removesuffix(".gz"), *NO_TEXT)]:
            advice = "rows are read from .jsonl and .parquet, text from any other file, both also as .gz; convert it"
            raise ConfigError(f"data.path: {bad[0]} is a kind of file that is not read; {advice}")
    if files:
        return files
    problem = f"no file in {path!r} (looked in {os.getcwd()}{say_left_out(path)})"
    raise ConfigError(f"data.path: {problem}; expected files of {' '.join(ENDINGS)}")


def _visible(folder: str) -> list[str]:
    """The files of a folder, in order; without hidden ones, which programs leave for themselves."""
    return storage.find_files(lambda: glob.glob(f"{glob.escape(folder)}/**", recursive=True), folder)


def _escaped(pattern: str) -> str:
    """A glob in which existing folders stay literal, also with [ ] in their names."""
    folder, name = os.path.split(pattern)
    if not folder or folder == pattern:
        return pattern
    return os.path.join(glob.escape(folder) if os.path.isdir(folder) else _escaped(folder), name)


def say_left_out(path: str) -> str:
    """Says which files of a folder are not read: of none, empty."""
    path = os.path.expanduser(path)
    if path.startswith("hf:") or not os.path.isdir(path):
        return ""
    others = [file for file in _visible(path) if not has_ending(file, *ENDINGS)]
    return f"; {len(others):,} files of other kinds left out (first {others[0]})" if others else ""


def group_parts(path: str, tokenizer: Any = None) -> list[list[tuple[str, int, int | None]]]:
    """The parts: each a list of stretches (file, start, stop), together about PART bytes, or one shard of a stream.

    A text is cut where that changes no token of `tokenizer`.
    """
    groups, bytes_left = [], 0.0
    for file in list_files(path):
        stretches = parts(file, PART)
        if tokenizer is not None and len(stretches) > 1 and not (file.startswith("hf:") or has_ending(file, *ROWS)):
            cuts = [_cut_near(file, start, tokenizer) for start, _ in stretches[1:]]
            stretches = [Part(*cut) for cut in zip([0, *cuts], [*cuts, None], strict=True)]
        size = PART if file.startswith("hf:") else os.path.getsize(file) / len(stretches)
        for stretch in stretches:
            if not groups or size > bytes_left:
                groups, bytes_left = [*groups, []], PART
            groups[-1].append((file, *stretch))
            bytes_left -= size
    return groups


def _cut_near(file: str, start: int, tokenizer: Any) -> int:
    """The first line at `start` or behind it that may begin a part; `start` itself if a megabyte has no such line."""
    with open(file, "rb") as stream:
        stream.seek(max(start - 4 * tokenizers.REACH, 0))
        text_before, text_after = stream.read(min(start, 4 * tokenizers.REACH)), stream.read(1 << 20)
    data, end = text_before + text_after, len(text_before)
    while end := data.find(b"\n", end - 1) + 1:
        sides = data[max(end - 4 * tokenizers.REACH, 0) : end], data[end : end + 4 * tokenizers.REACH]
        if tokenizer.may_cut(*(side.decode("utf-8", "ignore").replace("\r\n", "\n") for side in sides)):
            return start - len(text_before) + end
        end += 1
    return start


def read_documents(
    group: Sequence[Sequence], field: str, problems: Problems, stream: Stream | None = None, tokenizer: Any = None
) -> Iterator[tuple[str, bool, bool]]:
    """(text, whether it continues the previous text, whether a document ends with it), for a part's stretches."""
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


def _pieces(path: str, part: Part, problems: Problems, tokenizer: Any = None) -> Iterator[tuple[str, bool, bool]]:
    """A file of text in pieces of about a megabyte, cut where that changes no token. Its line ends become \\n.

    A tokenizer that allows no cut gets pieces of sixteen megabytes: it needs some hundred bytes of memory for each character.
    """
    piece, size, limit, continues = [], 0, PIECE, part.start > 0
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
            piece, size = [joined[cut:]], len(joined) - cut
            limit = PIECE if cut else 2 * size
    if piece or continues:  # a file without a readable line is no document
        yield "".join(piece), continues, part.stop is None
