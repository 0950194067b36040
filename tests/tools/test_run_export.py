"""Exported runs: the folder has the weights, the tokenizer, the settings and a page."""

import json

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jaxformer
from jaxformer import families, models
from jaxformer.data.chat_template import built_in
from jaxformer.data.tokenizer_files import byte_letters, files_of
from jaxformer.data.tokenizers import BPE, Bytes, Characters, of_words
from jaxformer.errors import ConfigError
from jaxformer.params import paths
from jaxformer.tools import model_page, run_export
from tests.tools.runs_to_export import KINDS, exported

TEXTS = (
    "the quick brown fox",
    "é ü 日本語 🦊\n\t x  y",
    "",
    "a<|im_end|>b<|endoftext|>",
    "\x00\x7f",
)


def opened(tokenizer, vocab_size=10**6):
    """The package's own tokenizer of the written file."""
    package = pytest.importorskip("tokenizers")
    return package.Tokenizer.from_str(files_of(tokenizer, vocab_size)["tokenizer.json"].decode())


@pytest.mark.parametrize(
    "tokenizer",
    [
        Bytes(),
        Characters.of("".join(TEXTS)),
        BPE.train("".join(TEXTS) * 9, 270),
        of_words(["the", "fox", "</s>"], "</s>"),
    ],
    ids=["bytes", "characters", "bpe", "words"],
)
def test_the_written_tokenizer_has_the_same_ids(tokenizer):
    """Also for names of control tokens, where both read them as such."""
    theirs = opened(tokenizer)
    texts = TEXTS if tokenizer.vocab_size > 10 else ("the fox", "fox fox", "")
    for text in texts:
        ids = tokenizer.encode(text, control=True)
        assert theirs.encode(text).ids == ids
        if text and "<|" not in text:
            assert theirs.decode(ids) == tokenizer.decode(ids) == text


def test_bytes_have_the_letters_of_the_package():
    pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
    letters = byte_letters()
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("é\n", "".join(map(chr, range(256)))):
        (found, _), *_ = split.pre_tokenize_str(text)
        assert found == "".join(letters[byte] for byte in text.encode())


def test_a_chat_template_travels_and_adds_no_token():
    tokenizer = Bytes().with_chat(built_in("llama3", "<|endoftext|>"))
    files = files_of(tokenizer, 256, 64)
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["chat_template"] == tokenizer.chat.source
    # <|begin_of_text|> is no byte, so it would become a token 256
    assert "bos_token" not in settings and settings["eos_token"] == "<|endoftext|>"
    turns = Bytes().with_chat(built_in("chatml", "<|endoftext|>"))
    settings_of_turns = json.loads(files_of(turns, 256)["tokenizer_config.json"])
    assert settings_of_turns["eos_token"] == "<|im_end|>"
    assert settings["model_max_length"] == 64


def test_an_end_above_the_vocabulary_is_left_out():
    settings, document = (
        json.loads(files_of(Characters("abc"), size)[name])
        for size, name in ((3, "tokenizer_config.json"), (4, "tokenizer.json"))
    )
    assert "eos_token" not in settings
    assert [each["id"] for each in document["added_tokens"]] == [3]


def test_a_tokenizer_of_ones_own_is_refused():
    with pytest.raises(ConfigError, match="is a tokenizer of your own"):
        files_of(object(), 9)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_the_run(kind, tmp_path):
    """Its weights are those of the run, and its page has the scores."""
    folder, out = exported(kind, tmp_path)
    run = jaxformer.open_run(folder)
    found = families.load(out)
    ours, theirs = paths(run.params), paths(found.params)
    for path, leaf in ours.items():
        np.testing.assert_array_equal(theirs[path], leaf)
    more = theirs.keys() - ours.keys()
    assert bool(more) == (kind == "unbiased")
    assert all(path.endswith("bias") and not theirs[path].any() for path in more)
    page = (out / "README.md").read_text()
    result = json.loads((folder / "result.json").read_text())["validation"]
    assert f"| loss | {result['loss']:.4g} |" in page
    assert f"# {kind}" in page and model_page.auto_class(run.model) in page
    has_text = kind != "images"
    assert (out / "tokenizer.json").exists() == has_text
    if kind == "decoder":
        settings = json.loads((out / "generation_config.json").read_text())
        assert settings == {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 0,
            "max_new_tokens": 8,
        }
    if kind == "translator":
        assert found.tokens.start == 255 and found.tokens.eos == (255,)


@pytest.mark.thorough
def test_weights_may_be_rounded_and_a_program_needs_no_family(tmp_path):
    folder, out = exported("decoder", tmp_path, "--dtype=bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(families.load(out).params)} == {"bfloat16"}
    run = jaxformer.open_run(folder)
    own = families.FAMILIES["gpt2"]  # a value, as one of the user's own
    run_export.export(run, tmp_path / "own", model_type="mine", family=own)
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "mine"
    assert families.load(tmp_path / "own", family=own).params.keys() == run.params.keys()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        run_export.export(run, out)
    jaxtyping.config.update("jaxtyping_disable", True)  # an open size is no int
    try:
        run_export.export_program(run, tmp_path / "program")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    names = {file.name for file in (tmp_path / "program").iterdir()}
    assert names >= {"forward.stablehlo", "model.safetensors", "tokenizer.json", "README.md"}
    assert "until" in (tmp_path / "program" / "README.md").read_text()
    forward = jax.export.deserialize(
        bytearray((tmp_path / "program" / "forward.stablehlo").read_bytes())
    )
    from safetensors.flax import load_file

    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    np.testing.assert_allclose(
        forward.call(load_file(tmp_path / "program" / "model.safetensors"), tokens),
        models.apply(run.model, run.params, jnp.asarray(tokens)).logits,
        atol=1e-5,
    )


@pytest.mark.thorough
def test_a_model_that_no_family_can_express_is_told_of_the_program(tmp_path):
    source = KINDS["decoder"].replace("context_length=48,", 'context_length=48, norm="rms_norm",')
    KINDS["strange"] = source.replace('name="decoder"', 'name="strange"')
    try:
        with pytest.raises(AssertionError):
            exported("strange", tmp_path)
    finally:
        del KINDS["strange"]
    run = jaxformer.open_run(next((tmp_path / "runs").glob("strange-*")))
    with pytest.raises(ConfigError, match="--program writes the forward pass"):
        run_export.export(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
