"""What a text becomes: splits, windows, digests; the bpe cache under races; one line for every bad
input."""

import gzip
import hashlib
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data import batching, sources
from jaxformer.data.sources import Stdlib, Text, Windows
from jaxformer.errors import ConfigError


def open_dataset(data, length):
    """The data set as a model of this context length opens it."""
    return batching.open_dataset(data, SimpleNamespace(context_length=length))


SENTENCE = "the quick brown fox — jumps over the lazy dog\n"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 100, encoding="utf-8")
    return Text(str(path))


@pytest.mark.thorough
@given(st.integers(2, 200), st.integers(1, 40))
@settings(deadline=None)
def test_training_windows_are_all_offsets(n, length):
    tokens = np.arange(n, dtype=np.uint8)
    windows = Windows(tokens, length)
    if n <= length:
        return
    assert len(windows) == n - length
    batch = windows.take_rows(np.arange(len(windows)))
    for i in range(len(windows)):
        np.testing.assert_array_equal(batch["tokens"][i], tokens[i : i + length])
        np.testing.assert_array_equal(batch["labels"][i], tokens[i + 1 : i + length + 1])
    assert (batch["weights"] == 1).all()


@pytest.mark.thorough
@given(st.integers(2, 200), st.integers(1, 40))
@settings(deadline=None)
def test_validation_windows_predict_every_token_once(n, length):
    tokens = np.arange(n, dtype=np.uint8)
    rows = list(Windows(tokens, length, stride=length))  # also: iteration ends
    kept = [(row["tokens"], row["labels"], row["weights"] > 0) for row in rows]
    np.testing.assert_array_equal(
        np.concatenate([labels[real] for _, labels, real in kept]), tokens[1:]
    )
    np.testing.assert_array_equal(
        np.concatenate([seen[real] for seen, _, real in kept]), tokens[:-1]
    )
    assert all(len(row["tokens"]) == length for row in rows)
    assert {name: array.dtype for name, array in rows[-1].items()} == {
        "tokens": np.int32,
        "labels": np.int32,
        "weights": np.float32,
    }


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_splits_decode_to_the_text(kind, text, tmp_path):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
        text = replace(text, vocab_size=300, cache=str(tmp_path / "cache"))
    dataset = open_dataset(replace(text, tokenizer=kind), 8)
    raw = (SENTENCE * 100).encode()
    parts = [dataset.train.tokens, dataset.validation.tokens]
    assert dataset.tokenizer.decode(np.concatenate(parts)) == SENTENCE * 100
    if kind != "bpe":  # nanoGPT's rule
        n = len(raw) if kind == "bytes" else len(SENTENCE * 100)
        assert [len(part) for part in parts] == [int(n * 0.9), n - int(n * 0.9)]
        assert [part.dtype for part in parts] == [np.uint8, np.uint8]
    assert hashlib.sha256(raw).hexdigest()[:16] in dataset.description
    assert "\n" not in dataset.description
    assert dataset.vocab_size == dataset.tokenizer.vocab_size


def test_digest_follows_content_tokenizer_and_split(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(SENTENCE * 100 + ".")
    same = tmp_path / "same.txt"
    same.write_text(SENTENCE * 100)
    digest = open_dataset(text, 8).digest
    assert open_dataset(Text(str(same)), 8).digest == digest
    variants = [
        Text(str(other)),
        replace(text, tokenizer="characters"),
        replace(text, validation_fraction=0.2),
    ]
    digests = {open_dataset(variant, 8).digest for variant in variants}
    assert len(digests) == 3 and digest not in digests


def test_folder_is_its_files_in_order_of_their_paths(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "c.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>" * 10)
    dataset = open_dataset(Text(str(tmp_path)), 4)
    whole = "".join(f"<{name}>" * 10 for name in ("a/b/c.txt", "a/z.txt", "b.txt"))
    assert (
        dataset.tokenizer.decode(np.concatenate([dataset.train.tokens, dataset.validation.tokens]))
        == whole
    )
    assert "3 files" in dataset.description
    assert "1 files" in open_dataset(Text(str(tmp_path), pattern="*.md"), 4).description


def test_standard_library_is_large_portable_and_the_same_twice():
    first, second = open_dataset(Stdlib(), 256), open_dataset(Stdlib(), 256)
    assert first.digest == second.digest and first.description == second.description
    tokens = np.concatenate([first.train.tokens, first.validation.tokens])
    assert 5_000_000 < len(tokens) < 30_000_000  # 12.1 MB in Python 3.11
    text = tokens.tobytes()
    text.decode("utf-8")
    assert b"class JSONDecoder" in text
    build_folder = sysconfig.get_config_var("abs_builddir") or "no such thing"
    assert build_folder.encode() not in text


def test_bpe_tokens_are_made_once_and_in_memory(text, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    config = replace(text, tokenizer="bpe", vocab_size=300, cache=str(tmp_path / "cache"))
    first = open_dataset(config, 8)
    # a second time there is nothing to train
    monkeypatch.setattr(sources.tokenizers.BPE, "train", None)
    second = open_dataset(config, 8)
    for part in (first.train.tokens, first.validation.tokens, second.train.tokens):
        # to shorten a mapped file ends whoever reads it, by SIGBUS
        assert not isinstance(part.base, np.memmap)
        assert part.dtype == np.uint16
    np.testing.assert_array_equal(first.train.tokens, second.train.tokens)
    assert first.digest == second.digest
    assert len(list((tmp_path / "cache").iterdir())) == 1  # and nothing temporary


@pytest.mark.parametrize("damage", ["flipped", "shortened", "emptied", "header"])
def test_damaged_bpe_tokens_are_made_anew(damage, text, tmp_path, caplog):
    pytest.importorskip("tokenizers")
    config = replace(text, tokenizer="bpe", vocab_size=300, cache=str(tmp_path / "cache"))
    first = open_dataset(config, 8)
    (file,) = (tmp_path / "cache").iterdir()
    raw, size = file.read_bytes(), f"({len(first.train.tokens)},)".encode()
    assert size in raw
    spoiled = {
        "flipped": raw[:700] + bytes([raw[700] ^ 1]) + raw[701:],
        "shortened": raw[:-9],
        "emptied": b"",
        # NumPy alone would read fewer tokens in silence
        "header": raw.replace(size, size.replace(size[1:2], b"1")),
    }
    assert spoiled[damage] != raw
    file.write_bytes(spoiled[damage])
    second = open_dataset(config, 8)
    np.testing.assert_array_equal(second.train.tokens, first.train.tokens)
    assert second.digest == first.digest and file.read_bytes() == raw
    assert "is damaged" in caplog.text and "made anew" in caplog.text


@pytest.mark.thorough
def test_processes_may_race_for_the_cache(text, tmp_path):
    pytest.importorskip("tokenizers")
    config = replace(text, tokenizer="bpe", vocab_size=300, cache=str(tmp_path / "cache"))
    code = (
        "from types import SimpleNamespace; from jaxformer.data.sources import Text;"
        f"d = {config!r}.open(SimpleNamespace(context_length=8)); print(d.digest, "
        f"int(d.train.tokens[:].sum()))"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {run.communicate(timeout=60)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0] and len(said) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_another_process_may_finish_first(text, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    config = replace(text, tokenizer="bpe", vocab_size=300, cache=str(tmp_path / "cache"))
    train, faster = sources.tokenizers.BPE.train, []

    def train_and_be_overtaken(text, size):
        monkeypatch.setattr(sources.tokenizers.BPE, "train", train)
        faster.append(open_dataset(config, 8))
        return train(text, size)

    monkeypatch.setattr(sources.tokenizers.BPE, "train", train_and_be_overtaken)
    first = open_dataset(config, 8)
    assert len(faster) == 1 and faster[0].digest == first.digest
    (entry,) = (tmp_path / "cache").iterdir()
    assert entry.name.startswith("tokens-")
    assert first.tokenizer.decode(first.train.tokens) == (SENTENCE * 100)[: int(len(SENTENCE) * 90)]
    assert open_dataset(config, 8).digest == first.digest


def test_unusable_cache_folder_is_one_line(text, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot keep tokens in .*file"):
        open_dataset(
            replace(text, tokenizer="bpe", vocab_size=300, cache=str(tmp_path / "file" / "cache")),
            8,
        )


def bad_inputs():
    yield (
        "no such file",
        lambda t, d: Text(str(d / "missing.dat")),
        r"there is no .*missing.dat.*--data.path",
    )
    yield "near name", lambda t, d: Text(str(d / "txet.txt")), r"did you mean '.*text\.txt'"
    yield "no such folder", lambda t, d: Text(str(d / "no" / "a.txt")), r"there is no"
    yield "empty", lambda t, d: Text(str(d / "empty.txt")), r"empty\.txt is empty"
    yield (
        "empty folder",
        lambda t, d: Text(str(d), pattern="*.rst"),
        r"no file in .*data\.pattern='\*\.rst'",
    )
    yield (
        "too short",
        lambda t, d: Text(str(d / "short.txt")),
        r"training part of .*short.txt is 9 tokens.* needs .* 17",
    )
    yield (
        "no validation",
        lambda t, d: replace(t, validation_fraction=1e-6),
        r"validation part .* is 1 tokens.* 2;",
    )
    yield (
        "not UTF-8",
        lambda t, d: Text(str(d / "latin.txt"), tokenizer="characters"),
        r"not UTF-8 \(byte 0xe9 at position 3",
    )
    yield (
        "fraction 0",
        lambda t, d: replace(t, validation_fraction=0.0),
        r"validation_fraction: 0\.0 is not between",
    )
    yield (
        "fraction nan",
        lambda t, d: replace(t, validation_fraction=float("nan")),
        r"is not between 0 and 1",
    )
    yield (
        "fraction above 1",
        lambda t, d: Stdlib(validation_fraction=90.0),
        r"90\.0 is not between 0 and 1",
    )
    yield (
        "bpe without size",
        lambda t, d: replace(t, tokenizer="bpe"),
        r"data\.vocab_size=None: tokenizer='bpe' needs one",
    )
    yield (
        "bytes with size",
        lambda t, d: replace(t, vocab_size=99),
        r"data\.vocab_size=99: tokenizer='bpe' needs one",
    )


@pytest.mark.parametrize(
    ("make", "message"), [pytest.param(m, e, id=name) for name, m, e in bad_inputs()]
)
def test_bad_input_is_one_line(make, message, text, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("ten bytes.")
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1") * 100)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        open_dataset(make(text, tmp_path), 16)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_text_that_would_fill_the_memory_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_TEXT", 6000)
    open_dataset(text, 8)  # 4,800 bytes
    (tmp_path / "more.txt").write_text("more" * 500)
    for path in (tmp_path, tmp_path / "large.bin"):
        (tmp_path / "large.bin").write_bytes(bytes(6001))
        with pytest.raises(
            ConfigError,
            match=r"data\.path: 6,\d+ bytes; Text takes at most 6,000 into memory; .*Corpus\(path",
        ):
            open_dataset(Text(str(path)), 8)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_is_one_line(text):
    os.chmod(text.path, 0)
    with pytest.raises(ConfigError, match="cannot read"):
        open_dataset(text, 8)


def test_relative_path_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"looked for {tmp_path}/words.txt"):
        open_dataset(Text("words.txt"), 8)


def test_bytes_take_any_file(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1") * 100)
    assert open_dataset(Text(str(tmp_path / "latin.txt")), 8).vocab_size == 256


@pytest.mark.thorough
def test_configs_cost_no_heavy_import():
    code = (
        "import sys; import jaxformer.data.sources, jaxformer.data.tasks, "
        "jaxformer.data.batching; print(*sys.modules)"
    )
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"jax", "grain", "orbax", "tokenizers", "matplotlib"} & set(modules)


def test_a_compressed_text_is_refused_and_a_tokenizer_that_is_no_word(tmp_path):
    """Both trained in silence, on the compressed bytes and on characters."""
    file = tmp_path / "text.txt.gz"
    file.write_bytes(gzip.compress(b"the quick brown fox " * 50))
    with pytest.raises(ConfigError, match="compressed; unpack it"):
        open_dataset(Text(path=str(file)), 8)
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox " * 50)
    with pytest.raises(ConfigError, match="expected bytes, characters or bpe"):
        config = Text(path=str(file))
        # which only the tests' type checks would refuse
        object.__setattr__(config, "tokenizer", "tokenizer.json")
        open_dataset(config, 8)
