"""The tokenizer of a list of words."""

import pytest

from jaxformer.data.tokenizers import load, of_words
from jaxformer.errors import ConfigError

WORDS = ["<image>", "</s>", "red", "a"]


def test_ids_are_places_in_the_list(tmp_path):
    tokenizer = of_words(WORDS, "</s>")
    assert tokenizer.encode("a  red a") == [3, 2, 3]
    assert tokenizer.decode([3, 2]) == "a red"
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (4, 1)
    tokenizer.save(tmp_path / "words.json")
    assert load(tmp_path / "words.json").digest == tokenizer.digest


def test_what_it_cannot_write_is_refused():
    with pytest.raises(ConfigError, match="cannot write"):
        of_words(WORDS, "</s>").encode("a blue")
    for words in (["a", "a"], ["a b"], [""]):
        with pytest.raises(ConfigError, match="different words without spaces"):
            of_words(words, "a")
