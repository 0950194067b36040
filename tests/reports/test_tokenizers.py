"""Tokenizers: what users of tokenizers, tiktoken, transformers and llama.cpp reported."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from jaxformer import config
from jaxformer.data import tokenizers
from jaxformer.data.tokenizers import BPE, Bytes
from jaxformer.errors import ConfigError

package = pytest.importorskip("tokenizers")
TEXT = "the cat sat on the mat. the end\n\n\n    if x:\n        return the cat\n" * 20


@pytest.fixture(scope="module")
def bpe():
    return BPE.train(TEXT, 320)


def changed(tokenizer, **model):
    """The JSON of a tokenizer with other fields of its model."""
    state = json.loads(json.dumps(tokenizer.state["tokenizer"]))
    return json.dumps(state | {"model": state["model"] | model})


def whole(tokenizer, text):
    return tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.report(
    "crusoecloud/fastokens#59", listed="first 15",
    right="A long text that is encoded in pieces has the tokens of the whole text.",
    hit="A piece ended at any line end, also within a run of blank lines and indentation.",
)  # fmt: skip
@given(
    st.lists(
        st.sampled_from(["the cat", "\n", "\n\n", "\n    ", "    ", "\t", ";", "é", "\r\n"]),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None)
def test_pieces_are_cut_where_the_tokenizer_would(bpe, words):
    text = "x = 1\n" + "".join(words) + "\nthe end"
    chunk, bpe._chunk = bpe._chunk, 20
    try:
        assert bpe.encode_text(text).tolist() == whole(bpe, text)
    finally:
        bpe._chunk = chunk


@pytest.mark.report(
    "ggml-org/llama.cpp#4081", "huggingface/transformers#29625",
    right="A tokenizer that puts a space before a text does so once, not before each piece of it.",
    hit="A file of text got one more space for each megabyte.",
)  # fmt: skip
def test_a_space_in_front_is_not_repeated_in_later_pieces(bpe):
    spaced = package.Tokenizer.from_str(changed(bpe))
    spaced.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = BPE(spaced.to_str())
    cut = tokenizer.last_cut(TEXT)
    assert 0 < cut < len(TEXT)
    pieces = (
        tokenizer.encode_piece(TEXT[:cut], False).tolist()
        + tokenizer.encode_piece(TEXT[cut:], True).tolist()
    )
    assert pieces == whole(tokenizer, TEXT)
    assert tokenizer.decode(pieces) == " " + TEXT


@pytest.mark.report(
    "ggml-org/llama.cpp#9692",
    "huggingface/swift-transformers#131",
    listed="first 18",
    right=(
        "The digest of a tokenizer does not depend on how a version of the package writes its JSON."
    ),
    hit="The digest was that of the package's JSON, so an upgrade refused to resume a run.",
)
def test_the_digest_is_that_of_the_meaning(bpe):
    merges = bpe.state["tokenizer"]["model"]["merges"]
    as_text = BPE(changed(bpe, merges=[" ".join(pair) for pair in merges]))
    as_lists = BPE(changed(bpe, merges=[list(pair) for pair in merges]))
    assert as_text.digest == as_lists.digest == bpe.digest
    assert BPE(changed(bpe, merges=merges[:-1])).digest != bpe.digest
    assert BPE(changed(bpe, ignore_merges=True)).digest != bpe.digest
    assert bpe.digest not in bpe.former_digests and len(bpe.former_digests) == 1


@pytest.mark.report(
    "huggingface/tokenizers#645",
    right="Merges of tokens that hold a space are not confused with merges of others.",
)  # fmt: skip
def test_merges_of_tokens_with_spaces_have_digests_of_their_own():
    vocabulary = {
        token: number for number, token in enumerate(["a", " ", "b", "a ", " b", "a b", "</s>"])
    }

    def tokenizer(*last):
        model = package.models.BPE(vocab=vocabulary, merges=[("a", " "), (" ", "b"), last])
        return BPE(package.Tokenizer(model).to_str())

    first, second = tokenizer("a ", "b"), tokenizer("a", " b")
    assert first.digest != second.digest
    assert first.encode("a b") == [5]


@pytest.mark.report(
    "huggingface/tokenizers#644", "OpenNMT/Tokenizer#232",
    right="A text has the same tokens each time: BPE dropout of a tokenizer.json is not used.",
    hit="With dropout in the file each call, each cache and each evaluation had other tokens.",
)  # fmt: skip
def test_bpe_dropout_is_switched_off(bpe, caplog):
    dropping = BPE(changed(bpe, dropout=0.5))
    assert "dropout" in caplog.text
    assert {tuple(dropping.encode("the cat sat on the mat")) for _ in range(10)} == {
        tuple(bpe.encode("the cat sat on the mat"))
    }
    assert dropping.digest == bpe.digest


@pytest.mark.report(
    "rasbt/LLMs-from-scratch#944", "rasbt/LLMs-from-scratch#495", "huggingface/tokenizers#73",
    right="Byte pairs give back every text: leading and repeated spaces, line ends, any character.",
)  # fmt: skip
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
@example("  Hello   World. \n\n\t x")
@example("\u00a0e\u0301\ufeff\r\n")
@settings(max_examples=60, deadline=None)
def test_decoding_gives_back_the_text(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text
    assert Bytes().decode(Bytes().encode(text)) == text


@pytest.mark.report(
    "openai/tiktoken#82",
    "huggingface/transformers#8886",
    right=(
        "A half of a surrogate pair, as text from PDFs and Windows has it, is replaced, not fatal."
    ),
)
@pytest.mark.parametrize("make", [lambda bpe: bpe, lambda bpe: Bytes()])
def test_lone_surrogates_are_replaced(bpe, make):
    tokenizer = make(bpe)
    text = "the \udbc0 cat"
    assert tokenizer.decode(tokenizer.encode(text)) == "the ? cat"
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text)


@pytest.mark.report(
    "google-deepmind/gemma#770", "PrimeIntellect-ai/prime-rl#3198", "ggml-org/llama.cpp#3538",
    right="The name of a control token within a text is text and never becomes that token.",
)  # fmt: skip
@given(st.text("<|endoftext|> \n", max_size=12))
@settings(max_examples=40, deadline=None)
def test_names_of_control_tokens_in_a_text_are_text(bpe, noise):
    text = f"{noise}<|endoftext|>{noise}"
    assert bpe.end_of_text not in bpe.encode(text)
    assert bpe.end_of_text not in bpe.encode_batch([text])[0]
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.report(
    "meta-llama/llama3#276", "huggingface/tokenizers#1609", "allenai/open-instruct#1862",
    right="The size of a vocabulary is above every id, those of added tokens and holes included.",
)  # fmt: skip
def test_the_vocabulary_holds_added_tokens_and_holes(bpe):
    state = json.loads(changed(bpe))
    token = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    state["added_tokens"].append(token | {"id": 400, "content": "<|user|>"})
    state["model"]["vocab"]["<|user|>"] = 400
    tokenizer = BPE(json.dumps(state))
    assert tokenizer.id_of("<|user|>") == 400
    assert tokenizer.vocab_size == 401 > len(state["model"]["vocab"])


@pytest.mark.report(
    "daulet/tokenizers#30", "deepjavalibrary/djl#2741",
    right="Truncation and padding that a tokenizer.json asks for change no text of a data set.",
)  # fmt: skip
def test_truncation_and_padding_of_the_file_are_not_used(bpe):
    cutting = package.Tokenizer.from_str(changed(bpe))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=16)
    tokenizer = BPE(cutting.to_str())
    for text in ("the", TEXT):
        assert tokenizer.encode(text) == bpe.encode(text)
        assert tokenizer.encode_batch([text, "a"])[0].tolist() == bpe.encode(text)


@pytest.mark.report(
    "vllm-project/vllm#22471",
    right=(
        "An id of a padded vocabulary, which the tokenizer does not have, is decoded without an "
        "error."
    ),
)
@pytest.mark.parametrize(
    "make", [lambda bpe: bpe, lambda bpe: Bytes(), lambda bpe: tokenizers.Characters("abc")]
)
def test_an_id_above_the_vocabulary_is_decoded(bpe, make):
    tokenizer = make(bpe)
    ids = [*tokenizer.encode("cab"), tokenizer.vocab_size + 7, *tokenizer.encode("a")]
    text = tokenizer.decode(ids)
    assert text.startswith("cab") and text.endswith("a")


LETTERS = st.characters(exclude_categories=("Cs",))


@pytest.mark.thorough
@pytest.mark.report(
    "google/sentencepiece#727",
    "google/sentencepiece#4",
    listed="third 16",
    right=(
        "A text too small for the vocabulary gives a smaller one, which writes and reads every "
        "other text."
    ),
)
@given(
    st.text(LETTERS, max_size=6),
    st.integers(0, 200),
    st.lists(st.text(LETTERS, max_size=20), max_size=4),
)
@example("", 0, ["a", "<|endoftext|>"])
@example(" ", 200, ["  a  b", "\n \n"])
@example("\n", 200, ["a\r\nb", "\x00"])
@example("<|endoftext|>", 50, ["<|endoftext|>", "a<|endoftext|>b"])
@settings(max_examples=25, deadline=None)
def test_any_text_trains_a_tokenizer(part, times, others):
    trained = BPE.train(part * times, 270)
    assert 257 <= trained.vocab_size <= 270
    assert trained.digest == BPE.train(part * times, 270).digest
    others = [*others, part * times]
    for text, batched in zip(others, trained.encode_batch(others), strict=True):
        tokens = trained.encode(text)
        assert trained.decode(tokens) == text
        assert batched.tolist() == tokens
        assert trained.end_of_text not in tokens


def lower_case_words():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "the", ",", "sep", "[", "]"]
    ids = {name: id for id, name in enumerate(names)}
    made = package.Tokenizer(package.models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    made.decoder = package.decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def likely_pieces():
    letters = {letter: -3.0 for letter in "ab</s>"}
    scores = {"<unk>": 0.0, "</s>": 0.0, "\u2581": -2.0} | letters | {"\u2581ab": -1.0}
    made = package.Tokenizer(package.models.Unigram([*scores.items()], unk_id=0))
    made.pre_tokenizer = package.pre_tokenizers.Metaspace()
    made.decoder = package.decoders.Metaspace()
    made.add_special_tokens(["</s>", "<unk>", "<new>"])
    made.add_tokens(["zz"])
    return made


def whole_words():
    words = {"</s>": 0, "[UNK]": 1, "the": 2, "cat": 3}
    made = package.Tokenizer(package.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    return made


def merged_pairs():
    ids = {byte: id for id, byte in enumerate(sorted(package.pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a"), ("a", "b")]
    ids |= {"".join(pair): 256 + number for number, pair in enumerate(merges)}
    made = package.Tokenizer(package.models.BPE(ids, merges))
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = package.decoders.ByteLevel()
    return made


def added_words():
    made = merged_pairs()
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens(["<eos>", "hello"])
    return made


@pytest.mark.report(
    "huggingface/tokenizers#787",
    listed="third 16",
    right=(
        "WordPiece and Unigram, too: a text is its pieces, there and back, also after save and "
        "load."
    ),
)
@pytest.mark.parametrize(
    ("make", "text", "pieces", "back", "end"),
    [
        (
            lower_case_words,
            "Playing, the [SEP]",
            [4, 5, 7, 6, 9, 8, 10],
            "playing, the [ sep ]",
            "[SEP]",
        ),
        (likely_pieces, "ab aabzz", [9, 2, 3, 3, 4, 11], "ab aabzz", "</s>"),
    ],
)
def test_other_kinds_of_pieces(tmp_path, make, text, pieces, back, end):
    tokenizer = BPE(make().to_str())
    assert tokenizer.end_of_text == tokenizer.id_of(end)
    assert tokenizer.encode(text) == tokenizer.encode_batch([text])[0].tolist() == pieces
    assert tokenizer.decode(pieces) == back
    tokenizer.save(tmp_path / "tokenizer.json")
    again = tokenizers.load(tmp_path / "tokenizer.json")
    assert again.digest == tokenizer.digest and again.encode(text) == pieces


@pytest.mark.report(
    "google/seqio#311",
    "google/sentencepiece#777",
    right="No text becomes a control token, also where the vocabulary of the model holds its name.",
    hit="'</s>' in a text was the end of the text for Unigram (T5), words and merged pairs.",
)
@pytest.mark.parametrize(
    ("make", "end", "pieces"),
    [
        (likely_pieces, "</s>", [2, 5, 6, 7, 8]),
        (whole_words, "</s>", [1]),
        (merged_pairs, "</s>", [256, 257]),
        (added_words, "<eos>", None),
    ],
)
def test_names_in_the_vocabulary_are_text(make, end, pieces):
    made = make()
    tokenizer = BPE(made.to_str(), end)
    assert tokenizer.end_of_text == made.token_to_id(end) == tokenizer.id_of(end)
    assert tokenizer.vocab_size == made.get_vocab_size()
    assert pieces in (None, tokenizer.encode(end))
    for text in (end, f"{end}a", f"a {end} a", f"ab{end}{end} ab"):
        tokens = tokenizer.encode(text)
        assert tokenizer.end_of_text not in tokens
        assert tokens == tokenizer.encode_batch([text])[0].tolist()
        assert make is whole_words or tokenizer.decode(tokens) == text
    text = "ab the cat hello"
    assert tokenizer.encode(text) == made.encode(text, add_special_tokens=False).ids
    assert tokenizer.end_of_text in tokenizer.reading_special_tokens().encode(f"a {end} a")


@pytest.mark.report(
    "huggingface/transformers#12355",
    right="A text that a vocabulary without an unknown token cannot write is refused in one line.",
    hit="An Exception of the package ended the command with a traceback.",
)
@pytest.mark.parametrize(
    "model",
    [
        package.models.WordLevel({"</s>": 0, "the": 1}),
        package.models.Unigram(
            [("</s>", 0.0), ("the", -1.0), *((letter, -9.0) for letter in "the")]
        ),
    ],
)
def test_what_a_vocabulary_cannot_write_is_refused(model):
    made = package.Tokenizer(model)
    made.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    tokenizer = BPE(made.to_str())
    assert tokenizer.encode("the the") == [1, 1]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ConfigError, match="the tokenizer cannot write a text"):
            encode("the cat")
        with pytest.raises(ConfigError, match="the tokenizer cannot write a text"):
            encode("the </s>")


@pytest.mark.report(
    "huggingface/transformers#24433", "huggingface/transformers#22634",
    right="A label of -100 among ids is decoded as an unknown id is, without an error.",
    hit="The package raised an OverflowError.",
)  # fmt: skip
@pytest.mark.parametrize(
    "make", [lambda bpe: bpe, lambda bpe: Bytes(), lambda bpe: tokenizers.Characters("abc")]
)
def test_negative_ids_are_decoded_as_unknown_ones(bpe, make):
    tokenizer = make(bpe)
    ids = [-100, *tokenizer.encode("cab"), -1]
    assert tokenizer.decode(ids) == tokenizer.decode(
        [max(tokenizer.vocab_size, 256) if i < 0 else i for i in ids]
    )
    assert "cab" in tokenizer.decode(ids)


@pytest.mark.report(
    "huggingface/transformers#6460",
    "huggingface/datasets#3847",
    "axolotl-ai-cloud/axolotl#33",
    right="a tokenizer of the package `tokenizers` names a run by all of its words",
    hit="its repr ends after a hundred words: a run went on with the tokenizer of another one",
)
def test_a_tokenizer_of_another_package_is_described_whole():
    def of(count, last):
        words = {f"w{i}": i for i in range(count - 1)} | {last: count - 1}
        return package.Tokenizer(package.models.WordLevel(words, unk_token="w0"))

    for count in (3, 300):
        assert config.describe(of(count, "a")) == config.describe(of(count, "a"))
        assert config.describe(of(count, "a")) != config.describe(of(count, "b"))
