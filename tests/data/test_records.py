"""Rows of files: parts together are the file, places are lines, and everything bad is refused or
counted."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data.records import Part, Problems, Stream, lines, parts, records
from jaxformer.errors import ConfigError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


def write(path, content):
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def table(tmp_path):
    """20 rows in 5 row groups."""
    rows = {
        "text": [f"text {i}" for i in range(20)],
        "deep": [{"de": f"d{i}"} for i in range(20)],
        "number": list(range(20)),
    }
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        pyarrow.table(rows), path, row_group_size=4, compression="NONE", use_dictionary=False
    )
    return path


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_lines_have_places_and_lose_their_ends(ending, tmp_path):
    path = write(tmp_path / f"a.{ending}", "one\r\n\ntwo\nthree")
    assert list(lines(path, Problems())) == [
        (f"{path}:{i}", t) for i, t in enumerate(["one", "", "two", "three"], 1)
    ]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_byte_order_mark_is_no_text(ending, tmp_path):
    path = write(tmp_path / f"a.{ending}", '\ufeff{"text": "one"}\n{"text": "\ufefftwo"}\n')
    assert [values for _, values in records(path, ["text"], Problems())] == [["one"], ["\ufefftwo"]]


@pytest.mark.thorough
@given(st.lists(st.text("abé ", max_size=12), max_size=20), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_parts_together_are_the_file(texts, size):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.txt", "\n".join(texts))
        found = [row for part in parts(path, size) for row in lines(path, Problems(), part)]
        whole = list(lines(path, Problems()))
        assert [(str(place), text) for place, text in found] == whole


def test_parts_of_jsonl_and_parquet_together_are_the_file(tmp_path, table):
    path = write(tmp_path / "a.jsonl", jsonl({"text": f"row {i}" * (i % 5)} for i in range(50)))
    for file in (path, str(table)):
        assert len(parts(file, 100)) > 3
        rows = [
            (str(p), v)
            for part in parts(file, 100)
            for p, v in records(file, ["text"], Problems(), part)
        ]
        assert rows == list(records(file, ["text"], Problems())) and len(rows) >= 20
    assert parts(write(tmp_path / "b.txt.gz", "a\n" * 1000), 10) == [Part()]


def test_fields_may_lie_deeper(table):
    assert next(records(str(table), ["deep.de", "number"], Problems())) == (f"{table}:1", ["d0", 0])


BAD = {
    "latin.txt": (
        b"good\ncaf\xe9 au lait\nalso good\n",
        ["good", None, "also good"],
        r":2",
        "not UTF-8",
        r"byte 0xe9 at position 3",
    ),
}
BAD_ROWS = {
    "utf.jsonl": (
        b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n',
        ["a", "b"],
        ":2",
        "not UTF-8",
        "byte 0xff",
    ),
    "json.jsonl": (
        b'{"text": "a"}\n{"text": \n\n{"text": "b"}',
        ["a", "b"],
        ":2",
        "not JSON",
        "line 1 column",
    ),
    "field.jsonl": (
        b'{"text": "a"}\n{"txt": "x"}\n{"text": "b"}',
        ["a", "b"],
        ":2",
        "no field 'text'",
        "did you mean txt",
    ),
    "null.jsonl": (
        b'{"text": "a"}\n{"text": null}\n{"text": "b"}',
        ["a", "b"],
        ":2",
        "no field 'text'",
        "(it is null)",
    ),
    "list.jsonl": (
        b'{"text": "a"}\n[1, 2]\n{"text": "b"}',
        ["a", "b"],
        ":2",
        "a JSON list",
        "must hold one row",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_ROWS])
def test_a_bad_row_is_refused_or_counted_with_its_line(name, tmp_path):
    content, good, place, kind, detail = (BAD | BAD_ROWS)[name]
    path = write(tmp_path / name, content)

    def read(problems):
        if name in BAD:
            return [text for _, text in lines(path, problems)]
        return [text for _, (text,) in records(path, ["text"], problems)]

    with pytest.raises(ConfigError, match=f"{name}{place}: {kind}.*{detail}.*--data.bad-rows=skip"):
        read(Problems())
    problems = Problems("skip")
    assert read(problems) == good
    assert problems.counts == {kind: 1} and f"{path}{place}" in problems.first[kind]
    assert str(problems).startswith(f"; 1 rows skipped: 1 {kind} (first {path}{place}")


def test_a_bad_row_of_a_later_part_has_its_line_in_the_file(tmp_path):
    rows = [json.dumps({"text": "x" * (i % 7)}) for i in range(100)]
    rows[70] = "{"
    path = write(tmp_path / "a.jsonl", "\n".join(rows))
    with pytest.raises(ConfigError, match=r"a\.jsonl:71: not JSON"):
        [list(records(path, ["text"], Problems(), part)) for part in parts(path, 64)]


def test_a_damaged_row_group_is_refused_or_left_out(table):
    raw = bytearray(table.read_bytes())
    offset = parquet.ParquetFile(table).metadata.row_group(2).column(0).data_page_offset
    raw[offset : offset + 30] = b"\xff" * 30
    table.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"rows\.parquet: rows 9 to 12: row group not readable"):
        list(records(str(table), ["text"], Problems()))
    problems = Problems("skip")
    found = [text for _, (text,) in records(str(table), ["text"], problems)]
    assert found == [f"text {i}" for i in range(20) if not 8 <= i < 12]
    assert problems.counts == {"row group not readable": 1}


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"x" * 100])
def test_a_file_that_is_no_parquet_is_refused_or_counted(content, tmp_path):
    path = write(tmp_path / "a.parquet", content)
    with pytest.raises(ConfigError, match=r"a\.parquet: not readable as Parquet"):
        list(records(path, ["text"], Problems()))
    problems = Problems("skip")
    assert list(records(path, ["text"], problems)) == [] and problems.counts == {
        "not readable as Parquet": 1
    }
    assert parts(path, 10) == [Part()]


def test_a_missing_column_has_advice(table):
    with pytest.raises(
        ConfigError, match=r"rows\.parquet:1: no field 'texts'; did you mean text\?"
    ):
        list(records(str(table), ["texts"], Problems()))


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-20], lambda raw: raw[:40] + b"\0" * 20 + raw[60:], lambda raw: b"no gzip"],
)
def test_a_damaged_gzip_file_is_refused_or_read_as_far_as_it_goes(damage, tmp_path):
    rng = np.random.default_rng(0)
    texts = [str(number) for number in rng.integers(0, 1 << 60, 2000)]
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage(gzip.compress("\n".join(texts).encode())))
    with pytest.raises(ConfigError, match=r"a\.txt\.gz:\d+: not "):
        list(lines(str(path), Problems()))
    problems = Problems("skip")
    list(lines(str(path), problems))
    assert "not readable to the end" in problems.counts


@pytest.mark.parametrize("name", ["no.txt", "no.jsonl", "no.parquet", "no.txt.gz"])
def test_a_missing_file_is_one_line_whatever_the_policy(name, tmp_path):
    for policy in ("error", "skip"):
        with pytest.raises(ConfigError, match=f"there is no .*{name}"):
            read = (
                lines
                if ".txt" in name
                else lambda path, problems: records(path, ["text"], problems)
            )
            list(read(str(tmp_path / name), Problems(policy)))


def test_an_unknown_ending_says_what_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"rows are read from \.jsonl"):
        list(records("a.csv", ["text"], Problems()))


# --- Hugging Face


@pytest.fixture
def folder(tmp_path):
    """A local data set that the json builder reads: 3 files of 40 rows."""
    (tmp_path / "set").mkdir()
    for file in range(3):
        (tmp_path / "set" / f"part-{file}.jsonl").write_text(
            jsonl({"text": f"{file} {i}"} for i in range(40))
        )
    return str(tmp_path / "set")


TEXTS = [f"{file} {i}" for file in range(3) for i in range(40)]


def test_a_local_data_set_is_streamed(folder):
    found = list(records(f"hf:{folder}#train", ["text"], Problems()))
    assert [text for _, (text,) in found] == TEXTS and found[50][0] == f"hf:{folder}#train:51"


def test_its_parts_are_its_files(folder):
    path = f"hf:{folder}#train"
    assert parts(path, 1) == [Part(0, 1), Part(1, 2), Part(2, 3)]
    assert [
        text for part in parts(path, 1) for _, (text,) in records(path, ["text"], Problems(), part)
    ] == TEXTS


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["one", "dictionary"])
def test_a_saved_data_set_is_read(kind, folder, tmp_path):
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    saved = (
        rows
        if kind == "one"
        else datasets.DatasetDict({"train": rows, "test": rows.select(range(3))})
    )
    saved.save_to_disk(tmp_path / "saved")
    path = f"hf:{tmp_path / 'saved'}#train"
    assert [text for _, (text,) in records(path, ["text"], Problems())] == TEXTS
    assert [
        t for part in parts(path, 1) for _, (t,) in records(path, ["text"], Problems(), part)
    ] == TEXTS


@pytest.mark.parametrize("taken", [0, 1, 17, 39, 40])
def test_a_stream_goes_on_from_its_state(taken, folder):
    path = f"hf:{folder}#train"
    first = Stream(path, Part(1, 2))
    rows = iter(first)
    for _ in range(taken):
        next(rows)
    state = json.loads(json.dumps(first.state()))
    rest = list(Stream(path, Part(1, 2), state))
    assert [row["text"] for _, row in rest] == TEXTS[40 + taken : 80]
    assert not rest or rest[0][0] == f"{path} shard 1:{taken + 1}"


def test_a_data_set_that_is_not_there_is_one_line(folder, tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    for path in (
        f"hf:{folder}#trian",
        f"hf:{tmp_path}/nothing#train",
        f"hf:{tmp_path}/saved#validation",
    ):
        with pytest.raises(ConfigError, match="cannot read hf:") as caught:
            list(records(path, ["text"], Problems()))
        assert "\n" not in str(caught.value)
