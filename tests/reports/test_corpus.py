"""Corpora: what users of Megatron, datasets, TransformerLens and others reported about files,
documents and caches."""

import gzip
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jaxformer import masks
from jaxformer.data import bpe, corpus, records, text_files, tokenizers
from jaxformer.data.corpus import Corpus
from jaxformer.data.images import Images
from jaxformer.data.labelled import Labelled
from jaxformer.data.pairs import Pairs
from jaxformer.data.sources import Text
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig
from jaxformer.training import MaskedTokens

MODEL = SimpleNamespace(context_length=4)
LINE = "the quick brown fox jumps over the lazy dog\n"


def opened(path, cache, **more):
    settings = {"validation_fraction": 0.2, "jobs": 1} | more
    return Corpus(str(path), cache=str(cache), **settings).open(MODEL)


def tokens_of(dataset):
    return np.concatenate([dataset.train.tokens[:], dataset.validation.tokens[:]])


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def encoded(texts):
    """Bytes of documents, each with the byte that ends it."""
    return b"".join(text.encode() + b"\xff" for text in texts)


# --- files


@pytest.mark.report(
    "huggingface/datasets#7468", "ultralytics/ultralytics#24257", listed="first 14",
    right="A file or folder that exists is found, with [ ] in its name too.",
    hit="The path went through glob, which looks for one of the characters in brackets.",
)  # fmt: skip
def test_paths_with_brackets_are_found(tmp_path):
    (tmp_path / "data [v2]").mkdir()
    for name in ("run[1].txt", "data [v2]/a.txt", "data [v2]/b.txt"):
        (tmp_path / name).write_text(LINE)
    for number, (name, files) in enumerate(
        (("run[1].txt", 1), ("data [v2]", 2), ("data [v2]/*.txt", 2), ("data*/a.txt", 1))
    ):
        found = opened(tmp_path / name, tmp_path / f"cache{number}")
        assert len(tokens_of(found)) == files * (len(LINE) + 1)


@pytest.mark.report(
    "huggingface/datasets#7153",
    listed="third 30",
    right=(
        "What is no text in UTF-8 is refused by its kind, under bad_rows='skip' too; never read "
        "as letters and NULs."
    ),
    hit=(
        "UTF-16 without a mark became 50 % NUL bytes; .csv and .ndjson were read with their markup."
    ),
)
@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", LINE.encode("utf-16"), "UTF-16"),
        ("b.txt", LINE.encode("utf-16-le"), "UTF-16"),
        ("b.txt", ("привет мир как дела у вас\n" * 9).encode("utf-16-be"), "UTF-16"),
        ("c.txt", LINE.encode("utf-32"), "UTF-32"),
        ("d.txt", bytes(100), "NUL"),
        ("e.jsonl", '{"text": "words"}\n'.encode("utf-16"), "UTF-16"),
        ("f.txt.gz", gzip.compress(LINE.encode("utf-16")), "UTF-16"),
        ("g.csv", b"text,label\nwords,1\n", "kind of file"),
        ("h.ndjson", b'{"text": "words of a row"}\n', "kind of file"),
        ("i.CSV.gz", gzip.compress(b"text\nwords\n"), "kind of file"),
        ("j.jsonl.zst", b"(\xb5/\xfd rest", "kind of file"),
    ],
)
def test_what_is_no_utf8_is_refused_by_name(tmp_path, name, data, words, policy):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"(?s){name}.*{words}"):
        opened(tmp_path / name, tmp_path / "cache", bad_rows=policy)


@pytest.mark.report(
    "google/sentencepiece#331",
    listed="third 08",
    right=(
        "A mark in front of UTF-8, and a NUL byte here and there, do not make a file unreadable; "
        "the mark is no text."
    ),
    hit="Text() kept the mark as three bytes of the text.",
)
def test_a_byte_order_mark_is_no_text(tmp_path):
    text = "first line\nsecond \x00 line\n" * 4
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert bytes(tokens_of(opened(tmp_path / "a.txt", tmp_path / "cache"))) == encoded([text])
    assert (
        bytes(tokens_of(Text(str(tmp_path / "a.txt"), validation_fraction=0.5).open(MODEL)))
        == text.encode()
    )
    (tmp_path / "b.txt").write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"b\.txt is UTF-16"):
        Text(str(tmp_path / "b.txt")).open(MODEL)


@pytest.mark.report(
    "open-edge-platform/datumaro#151",
    "open-edge-platform/anomalib#3058",
    right=(
        "The ending of a file may be in capitals; what is left out of a folder is counted and said."
    ),
    hit="Rows.JSONL and Text.TXT in a folder were left out without a word.",
)
def test_endings_in_capitals_are_read_and_other_files_are_counted(tmp_path):
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    write_rows(folder / "Rows.JSONL", ["some words of a row"])
    (folder / "Text.TXT").write_text(LINE)
    for name in ("table.csv", "notes.md", ".hidden.txt", ".git/old.txt"):
        (folder / name).write_text("not to be read\n")
    dataset = opened(folder, tmp_path / "cache")
    assert bytes(tokens_of(dataset)) == encoded(["some words of a row", LINE])
    assert f"2 files of other kinds left out (first {folder}/notes.md)" in dataset.description
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "table.csv").write_text("a\n")
    with pytest.raises(ConfigError, match="1 files of other kinds left out"):
        opened(tmp_path / "none", tmp_path / "cache")


@pytest.mark.report(
    "microsoft/graphrag#2424", "Arize-ai/phoenix#10820",
    right="A blank line between rows of JSONL is no row and no error.",
)  # fmt: skip
def test_blank_lines_between_rows_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "first one"}\n\n  \r\n{"text": "second one"}\n\n')
    assert bytes(tokens_of(opened(tmp_path / "a.jsonl", tmp_path / "cache"))) == encoded(
        ["first one", "second one"]
    )


@pytest.mark.report(
    "wandb/rai-toolkit#82",
    right=(
        "An error in JSONL names the file and the line, counted with blank lines; a row that is "
        "no object is refused."
    ),
)
@pytest.mark.parametrize("row", ["[]", '"words"', '{"text": ', "7", "null"])
def test_errors_of_rows_name_file_and_line(tmp_path, row):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a valid row"}\n\n' + row + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:4: "):
        opened(tmp_path / "a.jsonl", tmp_path / "cache")


# --- documents and tokens


@pytest.mark.report(
    "NVIDIA/Megatron-LM#62",
    right="An empty document, the first one too, is left out without an error.",
)  # fmt: skip
def test_empty_documents_are_left_out(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl", ["", "words of the first", "", "words of the second", ""]
    )
    dataset = opened(path, tmp_path / "cache")
    assert bytes(tokens_of(dataset)) == encoded(["words of the first", "words of the second"])
    assert "2 documents" in dataset.description


@pytest.mark.report(
    "NVIDIA/Megatron-LM#431",
    "allenai/OLMo-core#843",
    "EleutherAI/pythia#175",
    right=(
        "Every document ends with the end of text, which is counted with its tokens; no document "
        "is lost."
    ),
)
def test_every_document_ends_with_the_end_of_text(tmp_path):
    texts = ["a" * length for length in (1, 40, 3, 9, 2)]
    folder = tmp_path / "texts"
    folder.mkdir()
    write_rows(folder / "a.jsonl", texts)
    (folder / "b.txt").write_text(LINE)
    found = bytes(tokens_of(opened(folder, tmp_path / "cache")))
    assert found == encoded([*texts, LINE])


@pytest.mark.report(
    "huggingface/transformers#2825",
    "princeton-nlp/LLM-Shearing#65",
    right=(
        "Ids above 65,535 are kept as they are, in the smallest type that holds the vocabulary "
        "and the end of a text."
    ),
)
@pytest.mark.parametrize("size", [65_535, 65_536, 70_000])
def test_large_ids_do_not_wrap(tmp_path, size):
    package = pytest.importorskip("tokenizers")
    words = {"</s>": size - 1} | {f"w{number}": number for number in range(0, size - 1, 997)}
    tokenizer = package.Tokenizer(package.models.WordLevel(words))
    tokenizer.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(list(words)[1:]))
    dataset = opened(
        tmp_path / "a.txt", tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert tokens_of(dataset).tolist() == [*range(0, size - 1, 997), size - 1]
    assert dataset.vocab_size == size
    assert dataset.train.tokens.dtype.itemsize == (2 if size <= 65_536 else 4)


@pytest.mark.thorough
@pytest.mark.report(
    "TransformerLensOrg/TransformerLens#1273",
    right=(
        "The tokens of a long file are those of its text, wherever it is cut into pieces and parts."
    ),
    hit=(
        "A file was cut at any line end after a megabyte, and at any after 128 MB, also within "
        "blank lines."
    ),
)
def test_a_file_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    text = "class A:\n\n\n    def b(self):\n        return 1\n\n\n\n" * 60
    tokenizer = tokenizers.BPE.train(text, 330)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.state["tokenizer"]))
    path = tmp_path / "a.txt"
    path.write_text(text)
    monkeypatch.setattr(bpe, "REACH", 24)
    monkeypatch.setattr(text_files, "PIECE", 50)
    monkeypatch.setattr(text_files, "PART", 700)
    pieces = [
        piece
        for group in text_files.group_parts(str(path), tokenizer)
        for piece in documents_of(group, tokenizer)
    ]
    assert len(pieces) > 20 and sum(ends for *_, ends in pieces) == 1
    tokens = [tokenizer.encode_piece(piece, continues) for piece, continues, _ in pieces]
    whole = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    assert np.concatenate(tokens).tolist() == whole


def documents_of(group, tokenizer):
    return text_files.read_documents(group, "text", records.Problems(), tokenizer=tokenizer)


@pytest.mark.thorough
@pytest.mark.report(
    "AnswerDotAI/ModernBERT#212", "huggingface/transformers#1395", listed="first 17",
    right="A masked language model neither hides nor predicts the ends of documents.",
    hit="15 % of them were hidden and predicted.",
)  # fmt: skip
def test_ends_of_documents_are_not_hidden(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [f"text {number}" for number in range(400)])
    batch = opened(path, tmp_path / "cache").train.take_rows(np.arange(128))
    ends = batch["tokens"] == 0xFF
    assert (batch["control_tokens"] == ends).all() and ends.sum() > 40
    model = ModelConfig(257, 1, 8, 1, 4, masks=(masks.full(),))
    hidden = MaskedTokens(mask_token=256, rate=0.5).hidden(
        model, jax.tree.map(jax.numpy.asarray, batch), jax.random.key(0)
    )
    assert not np.asarray(hidden["weights"])[ends].any()
    assert (np.asarray(hidden["tokens"])[ends] == 0xFF).all()
    assert 0.4 < np.mean(np.asarray(hidden["weights"])[~ends] > 0) < 0.6


# --- caches and runs


@pytest.mark.report(
    "cisco/mindmeld#358",
    right=(
        "A cache of tokens belongs to its tokenizer: another one, or another end of text, "
        "encodes anew."
    ),
)
def test_the_cache_follows_the_tokenizer(tmp_path):
    package = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text(LINE * 3)
    found = []
    for number, words in enumerate(
        (["</s>", "<s>", *LINE.split()], ["<s>", "</s>", *LINE.split()])
    ):
        model = package.models.WordLevel(
            {word: place for place, word in enumerate(dict.fromkeys(words))}
        )
        tokenizer = package.Tokenizer(model)
        tokenizer.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / f"{number}.json"))
        for end in (None, "<s>"):
            dataset = opened(
                tmp_path / "a.txt",
                tmp_path / "cache",
                tokenizer=f"{tmp_path}/{number}.json",
                end_of_text=end,
            )
            found.append((int(tokens_of(dataset)[-1]), dataset.digest))
    assert [last for last, _ in found] == [0, 1, 1, 0]
    assert len({digest for _, digest in found}) == 4


CHANGES = {
    "longer": lambda at: at.write(["longer words"] * 30),
    "as long": lambda at: at.write(["bbbb cccc"] * 20),
    "as before": lambda at: at.write(["aaaa zzzz"] * 20),
    "cut": lambda at: [os.truncate(file, file.stat().st_size // 2) for file in at.files()],
    "other bytes": lambda at: [file.write_bytes(file.read_bytes()[::-1]) for file in at.files()],
    "removed": lambda at: [file.unlink() for file in at.files()],
    "torn index": lambda at: [os.truncate(file, 40) for file in at.cache.glob("corpus-*/*.json")],
}


class Changing:
    """A file of rows and the cache of its tokens. Each time it is written it is a second later."""

    def __init__(self, folder):
        self.text, self.cache, self.seconds = folder / "rows.jsonl", folder / "cache", 0

    def write(self, texts):
        rows = [{"text": text, "body": text.upper()} for text in texts]
        self.text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.seconds += 1
        os.utime(self.text, (self.seconds, self.seconds))

    def files(self):
        return list(self.cache.glob("corpus-*/0*.tokens"))


@pytest.mark.thorough
@pytest.mark.report(
    "LoicGrobol/zeldarose#111",
    listed="third 09",
    right=(
        "What is read through the cache is what is read without one, after any change of text, "
        "field or cache."
    ),
)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from(["text", "body"])), max_size=4
    )
)
@example([("as long", "text"), ("as long", "body"), ("cut", "body"), ("as before", "text")])
@settings(max_examples=6, deadline=None)
def test_a_cache_changes_no_token(tmp_path_factory, changes):
    at = Changing(tmp_path_factory.mktemp("changing"))
    CHANGES["as before"](at)
    opened(at.text, at.cache)
    for change, field in changes:
        CHANGES[change](at)
        found = opened(at.text, at.cache, field=field)
        rows = [json.loads(line)[field] for line in at.text.read_text().splitlines()]
        assert tokens_of(found).astype(np.uint8).tobytes() == encoded(rows)


@pytest.mark.report(
    "huggingface/datasets#2187",
    listed="third 09",
    right="Two that encode one corpus at once read the same tokens, all of them.",
)
def test_two_may_fill_one_cache(tmp_path, monkeypatch):
    texts = [f"{number} {LINE}" for number in range(50)]
    path = write_rows(tmp_path / "a.jsonl", texts)
    both, encode = threading.Barrier(2, timeout=30), corpus._encode

    def encode_together(*arguments):
        both.wait()
        encode(*arguments)
        both.wait()

    monkeypatch.setattr(corpus, "_encode", encode_together)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: opened(path, tmp_path / "cache"), range(2)))
    for dataset in found:
        assert tokens_of(dataset).astype(np.uint8).tobytes() == encoded(texts)
    assert found[0].digest == found[1].digest
    assert not list((tmp_path / "cache").rglob("*.unfinished"))


@pytest.mark.report(
    "huggingface/datasets#2187",
    listed="third 09",
    right="A cache that cannot be kept is one line that names it.",
)
def test_a_cache_below_a_file_is_one_line(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [LINE] * 9)
    with pytest.raises(ConfigError, match=r"keep tokens in .*a\.jsonl/cache"):
        opened(path, path / "cache")


# --- how a path may be written


def opened_by(kind, path, cache):
    """Each kind of data from a path: rows with a text, its label, and its translation; or
    images."""
    model = ModelConfig(256, 1, 8, 1, 24, heads=(Classification(2),))
    if kind == "images":
        return Images(train=path, validation=path, image=(2, 2)).open(model)
    if kind == "labelled":
        return Labelled(train=path, validation=path).open(model)
    if kind == "pairs":
        return Pairs(
            train=path,
            validation=path,
            source="text",
            target="answer",
            tokenizer="bytes",
            vocab_size=None,
        ).open(model)
    return Corpus(path, validation=path, cache=cache, jobs=1).open(model)


@pytest.mark.report(
    "huggingface/datasets#587", "ANCPLabOldenburg/ancp-bids#98", "skrub-data/skrub#703",
    right="A path may be a pathlib.Path, in every kind of data.",
    hit="Text alone took one; the others ended in 'PosixPath has no attribute startswith'.",
)  # fmt: skip
@pytest.mark.report(
    "tensorflow/tensorflow#44264",
    "cloudmarker/cloudmarker#17",
    right="~ is the home folder in every kind of data.",
    hit=(
        "Text and Corpus knew it; pairs, labelled texts, images and a saved tokenizer were not "
        "found."
    ),
)
@pytest.mark.parametrize("kind", ["corpus", "pairs", "labelled", "images"])
def test_every_kind_of_path_is_a_path(as_users_call, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ("a.npz" if kind == "images" else "a.jsonl")
    if kind == "images":
        np.savez(path, images=np.zeros((4, 2, 2, 3), np.uint8), labels=np.arange(4) % 2)
    else:
        rows = [{"text": f"text {i}", "answer": "yes", "label": i % 2} for i in range(4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digests = [
        opened_by(kind, one, tmp_path / "cache").digest
        for one in (str(path), path, f"~/{path.name}")
    ]
    assert len(set(digests)) == 1


@pytest.mark.report(
    "trustedsec/ptf#295",
    right="~ is the home folder in the path of a saved tokenizer.",
    hit="Not found.",
)
def test_the_home_folder_of_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizers.Bytes().save(tmp_path / "tokenizer.json")
    assert tokenizers.by_name("~/tokenizer.json", None).digest == tokenizers.Bytes().digest


@pytest.mark.report(
    "huggingface/datasets#8086", "cleanlab/cleanlab-studio#73",
    right="A .json file that is one list is refused as what it is, with what makes lines of it.",
    hit="It had 'no field text', or was 'not JSON'.",
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_in_a_json_file_is_named(tmp_path, indent):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(
        ConfigError,
        match=r"a\.json:1: (a JSON list|JSON over several lines); each line must hold one row",
    ):
        opened(tmp_path / "a.json", tmp_path / "cache")


@pytest.mark.report(
    "mindsdb/mindshub#611", "apache/pinot#3899",
    right="The name of a field may have dots; only where there is none of that name is it a path.",
    hit="'title.text' was looked for in a field 'title', which there was not.",
)  # fmt: skip
def test_a_name_with_a_dot_is_a_name(tmp_path):
    row = {"title.text": "first", "title": {"text": "other", "deep.er": "third"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    for field, value in (("title.text", "first"), ("title", row["title"])):
        ((_, values),) = records.records(str(tmp_path / "a.jsonl"), [field], records.Problems())
        assert values == [value]
    (tmp_path / "b.jsonl").write_text(json.dumps({"title": {"text": "other"}}) + "\n")
    ((_, values),) = records.records(str(tmp_path / "b.jsonl"), ["title.text"], records.Problems())
    assert values == ["other"]


@pytest.mark.report(
    "mindsdb/mindshub#611",
    right="The same holds for the columns of Parquet.",
    hit="All columns were read, and none found.",
)
def test_a_column_with_a_dot_is_a_column(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        arrow.table({"title.text": ["first"], "other": [1]}), tmp_path / "a.parquet"
    )
    ((_, values),) = records.records(
        str(tmp_path / "a.parquet"), ["title.text", "other"], records.Problems()
    )
    assert values == ["first", 1]


@pytest.mark.report(
    "tidyverse/haven#298", "tilemill-project/tilemill#89",
    right="A compressed file is known by its ending in capitals, too.",
    hit="Text trained on the compressed bytes of a.txt.GZ.",
)  # fmt: skip
def test_compressed_text_in_capitals_is_refused(tmp_path):
    (tmp_path / "a.txt.GZ").write_bytes(gzip.compress(LINE.encode() * 50))
    with pytest.raises(ConfigError, match=r"a\.txt\.GZ is compressed"):
        Text(str(tmp_path / "a.txt.GZ")).open(MODEL)
