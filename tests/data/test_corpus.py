"""A corpus: what is encoded, windows over files of tokens, restarts, bad rows, and memory that does
not grow."""

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings, strategies as st

from jaxformer.data import batching, corpus, text_files, tokenizers
from jaxformer.data.corpus import Corpus
from jaxformer.data.tokens import Index, Tokens
from jaxformer.errors import ConfigError
from jaxformer.runs.run import check_data
from jaxformer.runs.run_folder import RunFolder
from tests.faults.pods import Pod, found

END = 0xFF  # of bytes
DOCUMENTS = [f"document {i}\n" + "words and — more words\n" * (i % 5) for i in range(60)]


def open_dataset(data, length=8):
    return batching.open_dataset(data, SimpleNamespace(context_length=length))


def all_tokens(dataset):
    return np.concatenate([dataset.train.tokens[:], dataset.validation.tokens[:]])


def documents_of(dataset):
    """The texts that an end of text follows."""
    raw = all_tokens(dataset).tobytes()
    assert raw.endswith(b"\xff")
    return [text.decode() for text in raw[:-1].split(b"\xff")]


def jsonl(documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


@pytest.fixture
def small(monkeypatch):
    """Parts of 500 bytes, in this process."""
    monkeypatch.setattr(text_files, "PART", 500)

    def run(entry, path, missing, jobs, progress):
        for part in missing:
            corpus.encode_part(entry, part)

    monkeypatch.setattr(corpus, "_run_workers", run)


@pytest.fixture
def texts(tmp_path):
    """One folder with every kind of file."""
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("".join(DOCUMENTS[:10]))
    (folder / "b" / "c.txt.gz").write_bytes(gzip.compress("".join(DOCUMENTS[10:15]).encode()))
    (folder / "b" / "d.jsonl").write_text(jsonl(DOCUMENTS[15:40]))
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS[40:50]).encode()))
    (folder / "notes.md").write_text("not read")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": DOCUMENTS[50:]}), folder / "f.parquet", row_group_size=3
    )
    return Corpus(str(folder), cache=str(tmp_path / "cache"), validation_fraction=0.1, jobs=2)


WHOLE = ["".join(DOCUMENTS[:10]), "".join(DOCUMENTS[10:15]), *DOCUMENTS[15:]]


def test_every_document_is_followed_by_the_end(small, texts):
    dataset = open_dataset(texts)
    assert documents_of(dataset) == WHOLE
    assert "47 documents" in dataset.description and dataset.vocab_size == 256
    tokens = len(all_tokens(dataset))
    assert len(dataset.train.tokens) == int(tokens * 0.9)
    entry = corpus._key(texts, texts.path, dataset.tokenizer.digest)
    assert len(list((corpus.Path(texts.cache) / f"corpus-{entry}").glob("*.tokens"))) > 8


@pytest.mark.thorough
def test_processes_encode_the_same(texts, monkeypatch):
    monkeypatch.setattr(text_files, "PART", 4000)  # of this process: it plans
    dataset = open_dataset(texts)
    assert documents_of(dataset) == WHOLE


def test_small_files_are_encoded_together(texts):
    assert len(text_files.group_parts(texts.path)) == 1


@pytest.mark.thorough
def test_tokens_do_not_depend_on_the_parts(small, texts, monkeypatch, tmp_path):
    first = open_dataset(texts)
    monkeypatch.setattr(text_files, "PART", 77)
    second = open_dataset(replace(texts, cache=str(tmp_path / "other")))
    np.testing.assert_array_equal(all_tokens(first), all_tokens(second))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("pattern", ["*.jsonl*", "b/*"])
def test_a_path_may_be_a_glob_or_a_file(small, texts, pattern):
    found = documents_of(open_dataset(replace(texts, path=f"{texts.path}/{pattern}")))
    assert found == (WHOLE[1:27] if pattern == "b/*" else WHOLE[27:37])
    file = replace(texts, path=f"{texts.path}/b/d.jsonl", validation=f"{texts.path}/a.txt")
    dataset = open_dataset(file)
    assert len(dataset.train.tokens) == sum(len(text.encode()) + 1 for text in WHOLE[2:27])
    assert dataset.validation.tokens[:].tobytes() == WHOLE[0].encode() + b"\xff"


@pytest.mark.thorough
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_tokens_of_files_are_the_array(sizes, length, cut):
    import tempfile
    from pathlib import Path

    whole = np.random.default_rng(sum(sizes)).integers(0, 60_000, sum(sizes)).astype(np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(sizes))]
        for file, piece in zip(files, np.split(whole, np.cumsum(sizes)[:-1]), strict=True):
            file.write_bytes(piece.tobytes())
        tokens = Tokens(files, sizes, np.uint16)
        cut = min(cut, len(whole))
        first, second = tokens.part(0, cut), tokens.part(cut, len(whole))
        np.testing.assert_array_equal(first[:], whole[:cut])
        np.testing.assert_array_equal(second[:], whole[cut:])
        for start in range(len(whole)):
            np.testing.assert_array_equal(
                tokens[start : start + length], whole[start : start + length]
            )
        if len(second) > length:
            mine = batching.sources.Windows(whole[cut:], length, length)
            read = batching.sources.Windows(second, length, length)
            assert len(mine) == len(read)
            for name, rows in mine.take_rows(np.arange(len(mine))[::-1]).items():
                np.testing.assert_array_equal(
                    read.take_rows(np.arange(len(mine))[::-1])[name], rows
                )


@pytest.mark.thorough
def test_training_windows_follow_each_other(small, texts):
    dataset = open_dataset(texts, 16)
    rows = dataset.train.take_rows(np.arange(len(dataset.train)))
    tokens = dataset.train.tokens[:]
    np.testing.assert_array_equal(rows["labels"][rows["weights"] > 0], tokens[1:])
    overlapping = open_dataset(replace(texts, stride=4), 16).train
    assert len(overlapping) > 3.5 * len(dataset.train)
    np.testing.assert_array_equal(overlapping[3]["tokens"], tokens[12:28])


@pytest.mark.thorough
def test_it_is_encoded_once(small, texts, monkeypatch):
    first = open_dataset(texts)
    monkeypatch.setattr(corpus, "encode_part", None)
    monkeypatch.setattr(text_files, "parts", None)
    assert open_dataset(texts).digest == first.digest


@pytest.mark.thorough
def test_digest_follows_content_and_the_cache_follows_the_files(small, texts, tmp_path):
    first = open_dataset(texts)
    file = tmp_path / "texts" / "a.txt"
    os.utime(file, (1, 1))
    assert open_dataset(texts).digest == first.digest  # encoded again: nobody knows what changed
    assert len(list((tmp_path / "cache").iterdir())) == 2
    file.write_text(file.read_text().replace("0", "1"))
    assert open_dataset(texts).digest != first.digest
    assert (
        open_dataset(replace(texts, validation_fraction=0.2)).digest != open_dataset(texts).digest
    )


@pytest.mark.thorough
@pytest.mark.parametrize("survivors", [0, 3])
def test_encoding_goes_on_where_it_was_killed(small, texts, survivors, tmp_path, monkeypatch):
    whole = all_tokens(open_dataset(texts))
    encode, done = corpus.encode_part, []

    def killed(entry, part):
        if len(done) == survivors:
            raise KeyboardInterrupt
        done.append(part)
        encode(entry, part)

    again = replace(texts, cache=str(tmp_path / "again"))
    monkeypatch.setattr(corpus, "encode_part", killed)
    with pytest.raises(KeyboardInterrupt):
        open_dataset(again)
    made = []
    monkeypatch.setattr(
        corpus, "encode_part", lambda entry, part: made.append(part) or encode(entry, part)
    )
    np.testing.assert_array_equal(all_tokens(open_dataset(again)), whole)
    assert made and not set(made) & set(done)


OPEN = (
    "from types import SimpleNamespace; from jaxformer.data.corpus import Corpus;"
    "d = {config!r}.open(SimpleNamespace(context_length=8)); print(d.digest)"
)


@pytest.mark.slow
def test_a_killed_command_goes_on_and_two_at_once_agree(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(jsonl(DOCUMENTS) * 3000)
    config = Corpus(str(file), cache=str(tmp_path / "cache"))
    code = (
        "from jaxformer.data import corpus, text_files; text_files.PART = 1 << 20;"
        + OPEN.format(config=config)
    )
    command = [sys.executable, "-c", code]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("cache/*/0*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    made = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cache/*/0*.json")}
    assert made
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {run.communicate(timeout=200)[0] for run in runs}
    assert len(digests) == 1 and digests != {""}
    assert all(file.stat().st_mtime_ns == made[file] for file in made)
    assert not list(tmp_path.glob("cache/*/*.unfinished"))
    assert digests == {open_dataset(config).digest + "\n"}


def test_what_a_killed_process_left_of_a_part_is_removed(tmp_path):
    """Of its tokens and of its index, whichever it was writing."""
    file = tmp_path / "a.jsonl"
    file.write_text(jsonl(DOCUMENTS))
    config = Corpus(str(file), cache=str(tmp_path / "cache"))
    digest = open_dataset(config).digest
    (index,) = cache_files(config, "index.json")
    index.unlink()
    for kind in ("json", "tokens"):
        (index.parent / f".000000-0000.{kind}.0123456789abcdef.unfinished").write_text("half")
    assert open_dataset(config).digest == digest
    assert not cache_files(config, ".*")


def cache_files(config, pattern="*"):
    return sorted(file for file in corpus.Path(config.cache).rglob(pattern) if file.is_file())


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "flipped": flip,
    "emptied": lambda file: file.write_bytes(b""),
    "removed": lambda file: file.unlink(),
    "shortened": lambda file: os.truncate(file, file.stat().st_size - 1),
    "replaced": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("finished", [True, False])
def test_any_damaged_file_of_the_cache_is_found_and_made_anew(
    small, texts, damage, finished, monkeypatch
):
    """Of a finished cache, and of one whose encoding was killed before it was summed up."""
    monkeypatch.setattr(text_files, "PART", 1500)
    pytest.importorskip("tokenizers")
    config = replace(texts, tokenizer="bpe", vocab_size=300)
    whole = all_tokens(open_dataset(config))
    for file in [file.relative_to(config.cache) for file in cache_files(config)]:
        if not finished:
            for index in cache_files(config, "index.json"):
                index.unlink()
        if (corpus.Path(config.cache) / file).exists():
            DAMAGE[damage](corpus.Path(config.cache) / file)
        np.testing.assert_array_equal(
            all_tokens(open_dataset(config)), whole, err_msg=f"{damage} {file}"
        )
        np.testing.assert_array_equal(
            all_tokens(open_dataset(config)), whole, err_msg=f"after {damage} {file}"
        )


@pytest.mark.thorough
def test_a_cache_that_was_copied_is_read_once_and_kept(small, texts, caplog, monkeypatch):
    """Its times differ, its digests do not."""
    open_dataset(texts)
    for file in cache_files(texts, "*.tokens"):
        os.utime(file, ns=(1, 1))
    read = []
    found = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda *arguments: read.append(1) or found(*arguments)
    )
    monkeypatch.setattr(corpus, "_encode", None)
    for _ in range(2):
        open_dataset(texts)
    with_tokens = [file for file in cache_files(texts, "*.tokens") if file.stat().st_size]
    assert len(read) == len(with_tokens) and not caplog.records


@pytest.mark.thorough
def test_tokens_that_are_shortened_while_a_run_reads_them_are_one_line(small, texts):
    dataset = open_dataset(texts)
    for file in cache_files(texts, "*.tokens"):
        os.truncate(file, 1)
    with pytest.raises(ConfigError, match=r"example \d+: data\.cache: .*\.tokens was shortened"):
        batching.batches(dataset.train, 8, 0)[0]
    for file in cache_files(texts, "*.tokens"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"example \d+: data\.cache: cannot read .*\.tokens"):
        batching.batches(dataset.train, 8, 0)[0]
    np.testing.assert_array_equal(
        open_dataset(texts).train[0]["tokens"], list(WHOLE[0].encode()[:8])
    )


@pytest.mark.thorough
def test_files_that_change_while_they_are_encoded_are_not_kept(small, texts, monkeypatch):
    encode = corpus.encode_part

    def encode_and_change(entry, part):
        encode(entry, part)
        (corpus.Path(texts.path) / "a.txt").write_text("other")

    monkeypatch.setattr(corpus, "encode_part", encode_and_change)
    with pytest.raises(ConfigError, match=r"changed while they were read; start again"):
        open_dataset(texts)
    monkeypatch.setattr(corpus, "encode_part", encode)
    assert documents_of(open_dataset(texts))[0] == "other\n"


# --- tokenizers


@pytest.mark.thorough
def test_byte_pairs_are_learned_from_a_sample_without_the_validation_part(
    small, texts, tmp_path, monkeypatch
):
    pytest.importorskip("tokenizers")
    config = replace(
        texts,
        path=f"{texts.path}/b/d.jsonl",
        tokenizer="bpe",
        vocab_size=300,
        validation_fraction=0.5,
    )
    seen = []
    train = tokenizers.BPE.train
    monkeypatch.setattr(
        tokenizers.BPE, "train", lambda text, size: seen.append(text) or train(text, size)
    )
    dataset = open_dataset(config)
    assert open_dataset(config).digest == dataset.digest and len(seen) == 1
    assert DOCUMENTS[15] in seen[0] and DOCUMENTS[39] not in seen[0]
    text = dataset.tokenizer.decode(all_tokens(dataset))
    assert text == "".join(document + "<|endoftext|>" for document in DOCUMENTS[15:40])
    assert dataset.train.tokens.dtype == np.uint16
    monkeypatch.setattr(corpus, "SAMPLE", 100)
    open_dataset(replace(config, cache=str(tmp_path / "other")))
    assert 50 <= len(seen[1]) <= 100


def test_the_sample_of_a_small_corpus_has_none_of_the_validation_part_either(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    seen, train = [], tokenizers.BPE.train
    monkeypatch.setattr(
        tokenizers.BPE, "train", lambda text, size: seen.append(text) or train(text, size)
    )
    (tmp_path / "text.txt").write_text("train " * 900 + "\n" + "validation" * 60)
    config = Corpus(
        str(tmp_path / "text.txt"),
        "bpe",
        300,
        validation_fraction=0.1,
        cache=str(tmp_path / "cache"),
    )
    open_dataset(config)
    assert len(seen) == 1 and "validation" not in seen[0] and len(seen[0]) > 5000


@pytest.fixture
def tokenizer_json(tmp_path):
    """A tokenizer.json as Llama's: a template puts <s> before every text, and </s> ends one."""
    package = pytest.importorskip("tokenizers")
    trained = tokenizers.BPE.train("".join(DOCUMENTS), 290).state["tokenizer"]
    made = package.Tokenizer.from_str(json.dumps(trained).replace(tokenizers.END_OF_TEXT, "</s>"))
    made.add_special_tokens(["<s>"])
    made.post_processor = package.processors.TemplateProcessing(
        "<s> $A", None, [("<s>", made.token_to_id("<s>"))]
    )
    made.enable_truncation(16)
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_tokenizer_of_hugging_face_is_used(small, texts, tokenizer_json, name):
    path = str(tokenizer_json if name == "folder" else tokenizer_json / "tokenizer.json")
    dataset = open_dataset(replace(texts, tokenizer=path))
    assert dataset.tokenizer.decode(all_tokens(dataset)) == "".join(f"{text}</s>" for text in WHOLE)
    assert dataset.vocab_size == 1 + dataset.tokenizer.id_of("<s>")


@pytest.mark.thorough
def test_the_tokenizer_knows_which_token_ends_a_document(small, texts, tokenizer_json, tmp_path):
    """What generates and scores text later asks the tokenizer alone, as a run folder keeps it."""
    dataset = open_dataset(replace(texts, tokenizer=str(tokenizer_json), end_of_text="<s>"))
    assert dataset.tokenizer.decode(all_tokens(dataset)) == "".join(f"{text}<s>" for text in WHOLE)
    dataset.tokenizer.save(tmp_path / "saved.json")
    again = tokenizers.load(tmp_path / "saved.json")
    assert (
        again.end_of_text == dataset.tokenizer.end_of_text == again.id_of("<s>")
        and again.digest == dataset.tokenizer.digest
    )
    plain = open_dataset(replace(texts, tokenizer=str(tokenizer_json))).tokenizer
    assert plain.end_of_text == plain.id_of("</s>") and plain.digest != again.digest


def bad_settings():
    yield "no file", dict(path="/no/such/*.txt"), r"no file in '/no/such/\*\.txt'"
    yield "fraction", dict(validation_fraction=1.0), r"validation_fraction: 1\.0 is not between"
    yield "size", dict(vocab_size=300), r"data\.vocab_size=.*: tokenizer='bpe' needs one"
    yield "no size", dict(tokenizer="bpe"), r"data\.vocab_size=.*: tokenizer='bpe' needs one"
    yield "stride", dict(stride=0), r"data\.stride=0, data\.jobs=2: must be at least 1"
    yield (
        "characters",
        dict(tokenizer="characters"),
        r"data\.tokenizer='characters': a corpus may hold any",
    )
    yield "end", dict(end_of_text="</s>"), r"data\.end_of_text: the tokenizer 'bytes' has no '</s>'"
    yield (
        "field",
        dict(field="txt"),
        r"\.(jsonl|jsonl\.gz|parquet):\d+: no field 'txt'; did you mean text\?",
    )
    yield (
        "tokenizer",
        dict(tokenizer="/no/such/tokenizer.json"),
        r"data\.tokenizer='/no/such/tokenizer\.json'",
    )


@pytest.mark.parametrize(
    ("change", "message"), [pytest.param(c, m, id=name) for name, c, m in bad_settings()]
)
def test_bad_settings_are_one_line(small, texts, change, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message) as caught:
        open_dataset(replace(texts, **change))
    assert "\n" not in str(caught.value)


# --- bad rows


def spoil(folder):
    (folder / "a.txt").write_bytes(b"good\nb\xffd\ngood too\n")
    (folder / "b" / "d.jsonl").write_text(
        '{"text": "one"}\n{"text": 2}\nnonsense\n{"tex": ""}\n{"text": ""}\n{"text": "two"}\n'
    )
    (folder / "f.parquet").write_bytes(b"nonsense")
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text("")


@pytest.mark.thorough
def test_bad_rows_are_left_out_and_counted(texts, tmp_path, monkeypatch):
    """In processes of their own, so counts travel through files."""
    spoil(tmp_path / "texts")
    monkeypatch.setattr(text_files, "PART", 200)
    dataset = open_dataset(replace(texts, bad_rows="skip"))
    assert documents_of(dataset) == ["good\ngood too\n", WHOLE[1], "one", "two", *DOCUMENTS[40:50]]
    found = dataset.description.split("; ")[-1]
    expected = {
        "1 not UTF-8": r"a\.txt:2 \(byte 0xff at position 1\)",
        "1 'text' is no text": r"d\.jsonl:2 but int",
        "1 not JSON": r"d\.jsonl:3",
        "1 no field 'text'": r"d\.jsonl:4; did you mean tex\?",
        "2 empty": r"empty\.jsonl",
        "1 not readable as Parquet": r"f\.parquet",
    }
    assert "7 rows skipped" in dataset.description, dataset.description
    for kind, place in expected.items():
        assert re.search(rf"{re.escape(kind)} \(first [^,]*{place}", dataset.description), (
            kind,
            found,
        )


def test_a_bad_row_ends_all_processes_with_its_line(texts, tmp_path, monkeypatch):
    spoil(tmp_path / "texts")
    monkeypatch.setattr(text_files, "PART", 1000)
    for name in ("f.parquet", "empty.txt", "empty.jsonl", "a.txt"):
        (tmp_path / "texts" / name).unlink()
    with pytest.raises(ConfigError, match=r"d\.jsonl:2: 'text' is no text but int; mend it"):
        open_dataset(texts)


def test_nothing_but_bad_rows_is_refused(small, texts, tmp_path):
    (tmp_path / "none.jsonl").write_text("x\ny\n")
    with pytest.raises(
        ConfigError, match=r"has no text; 2 rows skipped: 2 not JSON \(first .*none\.jsonl:1"
    ):
        open_dataset(replace(texts, path=str(tmp_path / "none.jsonl"), bad_rows="skip"))


# --- Hugging Face


@pytest.fixture
def hub(tmp_path):
    """A local folder as a data set of 2 shards."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    for shard in range(2):
        (folder / f"{shard}.jsonl").write_text(jsonl(DOCUMENTS[shard * 30 : shard * 30 + 30]))
    return Corpus(
        f"hf:{folder}#train", cache=str(tmp_path / "cache"), validation_fraction=0.1, jobs=1
    )


@pytest.mark.thorough
def test_a_data_set_is_encoded_in_several_shards_with_states(small, hub):
    assert documents_of(open_dataset(hub)) == DOCUMENTS
    names = sorted(file.name for file in corpus.Path(hub.cache).glob("corpus-*/*.tokens"))
    assert len([name for name in names if name.startswith("000001")]) > 2


@pytest.mark.thorough
def test_a_local_data_set_that_changes_is_encoded_again(small, hub, tmp_path):
    open_dataset(hub)
    (tmp_path / "set" / "1.jsonl").write_text(jsonl(DOCUMENTS[:2]))
    assert documents_of(open_dataset(hub)) == DOCUMENTS[:30] + DOCUMENTS[:2]


@pytest.mark.thorough
def test_the_splits_of_a_data_set_have_entries_of_their_own(small, hub, tmp_path):
    folder = tmp_path / "splits"
    folder.mkdir()
    for split, texts in (("train", DOCUMENTS[:30]), ("validation", DOCUMENTS[30:])):
        (folder / f"{split}.jsonl").write_text(jsonl(texts))
    dataset = open_dataset(
        replace(hub, path=f"hf:{folder}#train", validation=f"hf:{folder}#validation")
    )
    assert documents_of(dataset) == DOCUMENTS
    assert (
        documents_of(open_dataset(replace(hub, path=f"hf:{folder}#validation"))) == DOCUMENTS[30:]
    )


@pytest.mark.thorough
def test_a_killed_stream_goes_on_from_its_state(small, hub, tmp_path, monkeypatch):
    whole = open_dataset(hub).digest
    save, saved = corpus.Index.save, []

    def killed(index, file):
        save(index, file)
        saved.append(file.name)
        if len(saved) == 2:
            raise KeyboardInterrupt

    again = replace(hub, cache=str(tmp_path / "again"))
    monkeypatch.setattr(corpus.Index, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        open_dataset(again)
    read = []
    records = text_files.records
    counted = lambda *arguments: (
        read.append(place) or (place, row) for place, row in records(*arguments)
    )
    monkeypatch.setattr(text_files, "records", counted)
    monkeypatch.setattr(corpus.Index, "save", save)
    assert open_dataset(again).digest == whole
    assert len(read) < 50  # of 60 rows


# --- what runs read


def test_a_run_on_a_corpus_has_a_unigram_entropy(small, texts):
    dataset = open_dataset(texts)
    found = batching.unigram_entropy(dataset)
    arrays = [
        batching.sources.Windows(part.tokens[:], 8) for part in (dataset.train, dataset.validation)
    ]
    assert found == pytest.approx(
        batching.unigram_entropy(replace_splits(dataset, arrays)), rel=1e-12
    )


def replace_splits(dataset, splits):
    return replace(dataset, train=splits[0], validation=splits[1])


def test_batches_of_hosts_are_rows_of_the_batch(small, texts):
    split = open_dataset(texts).train
    whole = batching.batches(split, 8, seed=1)
    parts = [batching.batches(split, 8, seed=1, rows=rows) for rows in np.split(np.arange(8), 4)]
    for step in (0, 3, 10**6):
        np.testing.assert_array_equal(
            np.concatenate([part[step]["tokens"] for part in parts]), whole[step]["tokens"]
        )


MEMORY = """
import sys, numpy as np
from types import SimpleNamespace
from jaxformer.data import batching, corpus, text_files

text_files.PART = 1 << 25
dataset = corpus.Corpus(sys.argv[1], cache=sys.argv[2], jobs=2).open(
    SimpleNamespace(context_length=256)
)
get = batching.batches(dataset.train, 64, 0)
total = sum(int(get[step]["tokens"].sum()) for step in range(300))
batching.unigram_entropy(dataset)
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux counts memory here")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """VmHWM, the highest resident memory of the process, pages of files included, in kB: of 30 MB
    and of 300 MB."""
    found = {}
    for size in (30, 300):
        file, block = tmp_path / f"{size}.jsonl", jsonl(["".join(DOCUMENTS)] * 100)
        with open(file, "w") as out:
            for _ in range(size * 10**6 // len(block)):
                out.write(block)
        command = [sys.executable, "-c", MEMORY, str(file), str(tmp_path / "cache")]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        found[size] = int(run.stdout)
    # what a batch and the counts of a piece of 4 million tokens vary
    assert found[300] < found[30] + 40_000, found


@pytest.mark.parametrize("count", [20, 256])
def test_characters_of_another_run_and_the_end_above_them(tmp_path, count):
    """With 256 of them the end does not fit the bytes in which they are written."""
    characters = tokenizers.Characters("".join(sorted({"\n", *map(chr, range(97, 96 + count))})))
    characters.save(tmp_path / "tokenizer.json")
    text = "".join(
        np.random.default_rng(0).choice(list(characters.characters.replace("\n", "")), 400)
    )
    (tmp_path / "text.txt").write_text(text)
    config = Corpus(
        str(tmp_path / "text.txt"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        cache=str(tmp_path),
        jobs=1,
        validation_fraction=0.1,
    )
    dataset = config.open(SimpleNamespace(context_length=8))
    assert dataset.vocab_size == count + 1
    tokens = np.concatenate([dataset.train.tokens[:], dataset.validation.tokens[:]])
    assert tokens[-1] == count and characters.decode(tokens[:-1]) == text + "\n"


SHARING = """
import os, sys
from types import SimpleNamespace
from jaxformer.data import corpus, text_files
from jaxformer.parallel import processes

text_files.PART = 500


def here(entry, path, missing, jobs, progress):
    print("encodes", *missing)
    [corpus.encode_part(entry, part) for part in missing]


corpus._run_workers = here
processes.initialize()


def body():
    cache = sys.argv[2] + os.environ.get("CACHE", "")
    config = corpus.Corpus(
        sys.argv[1], tokenizer="bpe", vocab_size=300, cache=cache, validation_fraction=0.1
    )
    dataset = config.open(SimpleNamespace(context_length=8))
    print("has", len(dataset.train.tokens), dataset.digest)
    return 0


raise SystemExit(processes.run_together(body))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [True, False])
def test_processes_share_the_work_where_they_see_one_cache(texts, tmp_path, shared):
    """Each part is encoded by one process; by every process where each has a cache of its own.

    All have the same tokens.
    """
    each = {} if shared else {i: {"CACHE": f"-{i}"} for i in range(3)}
    with Pod(3, texts.path, str(tmp_path / "new"), folder=tmp_path, code=SHARING, each=each) as pod:
        pod.finish()
        encoded = [
            [int(part) for line in re.findall("encodes(.*)", pod.said(i)) for part in line.split()]
            for i in range(3)
        ]
        assert len({found(r"has (.*)", pod.said(i)) for i in range(3)}) == 1
    parts = sorted(part for own in encoded for part in own)
    assert (
        parts == sorted(list(range(1 + max(parts))) * (1 if shared else 3)) and len(set(parts)) > 8
    )
    assert not [file for file in tmp_path.glob("new*/*") if file.name.startswith("tmp")]


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="Linux counts what a process reads")
def test_of_a_trillion_tokens_no_more_is_read_than_what_a_batch_needs(tmp_path):
    """Files of holes: 4 TB of text, 2 TB of tokens. What is read is the index and the rows."""
    count, size, tokenizer = 31_250, 32_000_000, tokenizers.by_name("bytes", None)
    config = Corpus(
        str(tmp_path / "texts"), cache=str(tmp_path / "cache"), validation_fraction=1e-6
    )
    (tmp_path / "texts").mkdir()
    for i in range(count):
        with (tmp_path / "texts" / f"{i:06}.txt").open("wb") as file:
            file.truncate(1 << 27)
    entry, shards = (
        tmp_path / "cache" / f"corpus-{corpus._key(config, config.path, tokenizer.digest)}",
        {},
    )
    entry.mkdir(parents=True)
    for i in range(count):
        with (entry / f"{i:06}-0000.tokens").open("wb") as file:
            file.truncate(size)
        shards[f"{i:06}-0000"] = [size, (entry / f"{i:06}-0000.tokens").stat().st_mtime_ns]
    Index(count * size, count, count << 27, "", {}, {}, shards=shards).save(entry / "index.json")
    read = lambda: int(re.search(r"rchar: (\d+)", corpus.Path("/proc/self/io").read_text())[1])
    before = read()
    dataset = config.open(SimpleNamespace(context_length=4096))
    batch = batching.batches(dataset.train, 256, 0)[12345]
    assert len(dataset.train.tokens) == 999_999_000_000 and batch["tokens"].shape == (256, 4096)
    # grain's modules are read, too
    assert read() - before < 256 * 4097 + (entry / "index.json").stat().st_size + 30e6


def test_runs_and_caches_with_the_former_digest_go_on(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("some words of a text\n" * 40)
    config = Corpus(
        str(tmp_path / "a.txt"),
        tokenizer="bpe",
        vocab_size=270,
        validation_fraction=0.2,
        jobs=1,
        cache=str(tmp_path / "cache"),
    )
    with monkeypatch.context() as before:
        former = property(lambda tokenizer: tokenizer.former_digests[0])
        before.setattr(tokenizers.BPE, "digest", former)
        old = open_dataset(config)
    entries = sorted(path.name for path in (tmp_path / "cache").iterdir())
    new = open_dataset(config)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == entries
    assert old.digest in new.former_digests and old.digest != new.digest
    folder = RunFolder(epath.Path(tmp_path))
    for digest in (old.digest, new.digest):
        check_data(folder, {"data_digest": digest}, new)
    with pytest.raises(ConfigError, match="the data changed"):
        check_data(folder, {"data_digest": "another"}, new)


def test_a_text_that_vanishes_while_it_is_encoded_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text("some words\n" * 20)
    encode = corpus.encode_part

    def vanish(entry, part):
        (folder / "b.txt").unlink(missing_ok=True)
        encode(entry, part)

    monkeypatch.setattr(corpus, "encode_part", vanish)
    data = Corpus(str(folder), cache=str(tmp_path / "cache"), jobs=1, validation_fraction=0.3)
    with pytest.raises(ConfigError, match=r"b\.txt: the file was there .* put it back"):
        data.open(SimpleNamespace(context_length=8))
    (folder / "b.txt").write_text("some words\n" * 20)
    monkeypatch.setattr(corpus, "encode_part", encode)
    assert len(data.open(SimpleNamespace(context_length=8)).train)
