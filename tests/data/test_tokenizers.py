"""Round trips over any text, saved state, and the control ids that a text must not be able to
write."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.data import bpe, tokenizers
from jaxformer.errors import ConfigError

TEXT = "the cat sat on the mat. the end\n" * 40 + "naïve ☃ 日本 \0 <|endoftext|>\n"


def make(kind: str):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
        return tokenizers.BPE.train(TEXT, 300)
    return tokenizers.Bytes() if kind == "bytes" else tokenizers.Characters.of(TEXT)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_any_text_round_trips(kind):
    tokenizer = make(kind)

    @settings(max_examples=100, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        ids = tokenizer.encode(text)
        assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids, np.int32)) == text
        assert tokenizer.encode_text(text).tolist() == ids

    check()


@pytest.mark.thorough
@given(st.text(min_size=1), st.data())
@settings(max_examples=100, deadline=None)
def test_characters_are_the_sorted_set_and_round_trip(text, data):
    tokenizer = tokenizers.Characters.of(text)
    assert tokenizer.characters == "".join(sorted(set(text)))
    part = data.draw(st.text(st.sampled_from(text)))
    ids = tokenizer.encode_text(part)
    assert ids.dtype == (np.uint8 if tokenizer.vocab_size <= 256 else np.uint16)
    assert ids.tolist() == [sorted(set(text)).index(character) for character in part]
    assert tokenizer.decode(ids) == part


@pytest.mark.parametrize("other", ["z", "\U0010ffff", "a"])
def test_unknown_character_is_named(other):
    with pytest.raises(ConfigError, match=r"position 2.*not among the 2 "):
        tokenizers.Characters.of("cbbc").encode("cb" + other)


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_saved_and_loaded_is_the_same_tokenizer(kind, tmp_path):
    tokenizer = make(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = tokenizers.load(tmp_path / "tokenizer.json")
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    assert (loaded.digest, loaded.vocab_size) == (tokenizer.digest, tokenizer.vocab_size)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_ids_beyond_the_vocabulary_do_not_stop_decoding(kind):
    tokenizer = make(kind)
    text = tokenizer.decode([*tokenizer.encode("the"), tokenizer.vocab_size, 60_000])
    assert text.startswith("the")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_lone_surrogate_is_replaced(kind):
    tokenizer = make(kind)
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a?b"


def test_bpe_is_learned_from_a_text_with_lone_surrogates():
    assert tokenizers.BPE.train("a\ud800b", 257).digest == tokenizers.BPE.train("a?b", 257).digest


def test_broken_utf8_decodes_to_replacement():
    assert tokenizers.Bytes().decode([97, 0xE2, 0x98, 98]) == "a�b"


def test_bpe_never_turns_text_into_a_control_id(tmp_path):
    tokenizer = make("bpe")
    tokenizer.save(tmp_path / "t.json")
    for each in (tokenizer, tokenizers.load(tmp_path / "t.json")):
        assert 0 not in each.encode(f"a {tokenizers.END_OF_TEXT} b")
        assert each.decode([0]) == tokenizers.END_OF_TEXT


def test_bpe_is_deterministic_and_merges():
    first, second = make("bpe"), make("bpe")
    assert first.digest == second.digest
    assert len(first.encode("the cat sat")) < 8 < len("the cat sat")
    assert first.vocab_size <= 300


def test_bpe_tokens_do_not_depend_on_how_many_chunks_are_encoded_together(monkeypatch):
    tokenizer, text = make("bpe"), TEXT * 20
    whole = [tokenizer.encode(chunk) for chunk in bpe.chunks_of(text, 1000)]
    monkeypatch.setattr(tokenizer, "_chunk", 1000)
    assert len(whole) > 3
    assert tokenizer.encode(text) == [token for ids in whole for token in ids]


@given(st.text("ab\n", max_size=60), st.integers(1, 10))
def test_chunks_are_the_text_cut_after_line_ends(text, size):
    chunks = list(bpe.chunks_of(text, size))
    assert "".join(chunks) == text
    assert all(chunk.endswith("\n") and len(chunk) > size for chunk in chunks[:-1])


def test_bpe_vocabulary_below_its_alphabet_is_refused():
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="at least 257"):
        tokenizers.BPE.train(TEXT, 256)


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxformer\[text\]'"):
        tokenizers.BPE.train(TEXT, 300)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", "{}", '{"type": "other"}', '{"type": "characters"']
)
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="not a saved tokenizer"):
        tokenizers.load(path)


def test_a_tokenizer_that_begins_every_text_with_a_space_cuts_no_text(monkeypatch):
    package = pytest.importorskip("tokenizers")
    trained = package.Tokenizer.from_str(json.dumps(make("bpe").state["tokenizer"]))
    trained.normalizer = package.normalizers.Prepend("_")
    prepending = tokenizers.BPE(trained.to_str())
    text = "ab\n" * 30_000
    assert prepending.decode(prepending.encode(text)) == "_" + text
    assert make("bpe")._chunk == 1 << 16 < len(text)


def test_the_end_of_text_is_no_text():
    assert tokenizers.Bytes().end_of_text not in "".join(map(chr, range(0x11000))).encode(
        "utf-8", "replace"
    )
    assert tokenizers.Characters("ab").end_of_text == 2 and tokenizers.Bytes().id_of("</s>") is None
    bpe = make("bpe")
    assert bpe.end_of_text == bpe.id_of(tokenizers.END_OF_TEXT) not in bpe.encode(TEXT)
