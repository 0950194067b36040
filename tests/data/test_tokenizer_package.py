"""The door to the `tokenizers` package: a tokenizer.json of a stranger takes no endless time or
memory, and ends in a line."""

import json
import os
import re
import threading
import time
import types
from pathlib import Path

import pytest

from jaxformer.data import bpe, tokenizer_package, tokenizers
from jaxformer.errors import ConfigError

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def state():
    """The JSON of a small tokenizer."""
    return tokenizers.BPE.train("hello world " * 50, 300).state["tokenizer"]


def with_regex(state, pattern):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return json.dumps(
        state
        | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}}
    )


def with_rules(state, *rules):
    return json.dumps(state | {"normalizer": {"type": "Sequence", "normalizers": list(rules)}})


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
EXCESS = {
    "alternatives": lambda state: with_regex(state, "|".join(f"w{i}" for i in range(20_000))),
    "rules that multiply": lambda state: with_rules(state, *[REPLACE] * 6),
    "a long prefix": lambda state: with_rules(
        state, {"type": "Prepend", "prepend": "x" * 1_000_000}
    ),
    "many rules": lambda state: with_rules(state, *[{"type": "NFKC"}] * 10_000),
    "many rules of a decoder": lambda state: json.dumps(
        state | {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 1100}}
    ),
    "a large file": lambda state: json.dumps(state) + " " * tokenizer_package.LARGEST,
}


@pytest.mark.parametrize("case", EXCESS)
def test_more_than_any_tokenizer_needs_is_refused_before_it_is_read(case, state, monkeypatch):
    def read_by_the_package():
        pytest.fail("the package would read it")

    monkeypatch.setattr(tokenizer_package, "require_package", read_by_the_package)
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json: .*; give the file of a tokenizer that you trust"
    ):
        tokenizers.BPE(EXCESS[case](state))


PANIC = "(a+)+$"  # the package gives up after some millions of tries, with a panic


@pytest.mark.parametrize(
    "call", [lambda t: t.encode("a" * 30 + "!"), lambda t: t.encode_batch(["x", "a" * 30 + "!"])]
)
def test_a_panic_is_one_line(call, state, capfd):
    made = tokenizers.BPE(with_regex(state, PANIC))
    assert made.decode(made.encode("hello")) == "hello"
    with pytest.raises(ConfigError, match=r"the tokenizer cannot write a text .*retry-limit"):
        call(made)
    # the package prints two lines, or a traceback of Rust, by itself
    assert capfd.readouterr() == (
        "",
        "",
    )
    os.write(2, b"seen\n")
    assert capfd.readouterr().err == "seen\n"


def test_what_others_say_meanwhile_is_not_lost(state, capfd):
    made = tokenizers.BPE(json.dumps(state))
    with tokenizer_package._quiet(0):
        os.write(2, b"another thread\n")
        made.encode("hello")
    assert capfd.readouterr().err == "another thread\n" and tokenizer_package._depth == 0


@pytest.mark.thorough
def test_no_text_takes_for_ever(state, monkeypatch):
    """A call that does not end leaves Python free: Ctrl-C is heard, and both clocks have a
    limit."""
    monkeypatch.setattr(tokenizer_package, "SECONDS", 0.2)
    ended = threading.Event()

    class Endless:
        def encode_batch_fast(self, texts, add_special_tokens):
            while not ended.is_set():
                pass

    with pytest.raises(
        ConfigError, match=r"needs more than 0 s for 5 letters: its regular expressions do not end"
    ):
        tokenizer_package.encode(Endless(), ["hello"])
    ended.set()


def test_a_computer_that_sleeps_is_no_endless_tokenizer(monkeypatch):
    # The clock of the processor stands still here: the true one also counts other threads of tests.
    asleep = types.SimpleNamespace(monotonic=time.monotonic, process_time=lambda: 0.0)
    monkeypatch.setattr(tokenizer_package, "time", asleep)
    monkeypatch.setattr(tokenizer_package, "SECONDS", 0.05)

    class Asleep:
        def encode_batch_fast(self, texts, add_special_tokens):
            time.sleep(0.4)
            return ["slept"]

    assert tokenizer_package.encode(Asleep(), ["hello"]) == ["slept"]


def test_threads_share_the_door(state):
    made = tokenizers.BPE(json.dumps(state))
    expected, found = made.encode("hello world"), []
    threads = [
        threading.Thread(target=lambda: found.append(made.encode("hello world"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8 and tokenizer_package._depth == 0


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"model": 1}', "[" * 100_000, '{"normalizer": []}', ""]
)
def test_what_is_no_tokenizer_is_an_error(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError):
        tokenizers.by_name(str(tmp_path / "tokenizer.json"), None)


def test_every_call_of_the_package_is_in_the_door():
    """Another call would be one whose panic nobody catches."""
    files = tokenizers.__file__, bpe.__file__
    text = "".join(Path(file).read_text() for file in files)
    assert not re.findall(
        r"_(?:tokenizer|writer)\.(?:encode|decode)\w*\(|\.from_(?:str|file)\(", text
    )
