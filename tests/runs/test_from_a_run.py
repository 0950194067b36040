"""`initial` and `continue_from` take any run: with or without an adaptation, of any sizes."""

import json
import logging

import jax
import numpy as np
import pytest
from etils import epath

from jaxformer.data import tokenizers
from jaxformer.runs.run import open_run
from jaxformer.runs.run_folder import RunFolder, resuming
from jaxformer.runs.same_data import warn_of_tokenizer
from tests.runs.test_continued import train
from tests.tiny import furnish

LORA = "--adaptation=Lora(rank=2)"
OPTIONS = ("--steps=2", "--eval-every=2", "--checkpoints.every=2", "--sample.tokens=2")


def folder_named(name, place="runs"):
    (found,) = [path for path in epath.Path(place).iterdir() if path.name.startswith(f"{name}-")]
    return found


def params_of(name):
    return open_run(folder_named(name)).params


def trained(name, *options):
    code, said = train(f"--name={name}", *OPTIONS, *options)
    assert code == 0, said
    return said


@pytest.mark.thorough
def test_every_kind_of_run_starts_every_kind(tmp_path, monkeypatch):
    """A LoRA run begins with the weights of a full one; its own, merged, start either kind."""
    monkeypatch.chdir(furnish(tmp_path))
    trained("full")
    trained("lora", LORA, "--initial=full")  # the newest run of a name
    before = params_of("lora")
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(params_of("full")), strict=True)
    assert any(not np.array_equal(one, other) for one, other in pairs)
    # a rate near zero: the weights stay those of the start
    still = "--optimizer=AdamW(learning_rate=1e-30)", f"--initial={folder_named('lora')}"
    trained("whole", *still)
    trained("again", *still, LORA)
    for name in ("whole", "again"):
        for one, other in zip(
            jax.tree.leaves(params_of(name)), jax.tree.leaves(before), strict=True
        ):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("adaptation", ["", LORA])
def test_other_sizes_are_refused_with_the_options_that_fit(tmp_path, monkeypatch, adaptation):
    """The message named leaves of a checkpoint, and no option."""
    monkeypatch.chdir(furnish(tmp_path))
    sizes = "--model.d-model=24", "--model.num-layers=2"
    trained("first", *sizes)
    if adaptation:
        trained("adapted", *sizes, adaptation, f"--initial={folder_named('first')}")
    before = folder_named("adapted" if adaptation else "first")
    code, said = train("--name=second", *OPTIONS, f"--initial={before}")
    last = said.strip().splitlines()[-1]
    assert code == 2 and all(option in last for option in sizes), said
    advised = [word for word in last.split() if word.startswith("--model.")]
    assert train("--name=second", *OPTIONS, f"--initial={before}", *advised)[0] == 0


def run_with(folder, tokenizer):
    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    return RunFolder(folder)


def test_other_tokens_are_named(tmp_path, caplog):
    """Both vocabularies fit the model, so nothing failed, and each number was another text."""
    caplog.set_level(logging.WARNING, "jaxformer")
    texts = "the quick brown fox " * 50, "jumps over the lazy dog " * 50
    one, other = (tokenizers.BPE.train(text, 270) for text in texts)
    folder = run_with(epath.Path(tmp_path) / "run", one)
    for same in (one, tokenizers.load(folder.tokenizer), None):
        warn_of_tokenizer("initial", folder, same)
    letters = tokenizers.Bytes()
    warn_of_tokenizer("initial", run_with(epath.Path(tmp_path) / "bytes", letters), letters)
    assert not caplog.records
    for different in (other, tokenizers.Bytes(), tokenizers.Characters.of("abc")):
        warn_of_tokenizer("continue_from", folder, different)
    assert len(caplog.records) == 3
    assert "another tokenizer" in caplog.text and str(folder.tokenizer) in caplog.text
    # the advice holds, by the file and by the folder
    for name in (str(folder.tokenizer), str(folder.path)):
        assert tokenizers.by_name(name, None).encode("the fox") == one.encode("the fox")


def test_the_command_that_goes_on_names_its_folder(tmp_path, monkeypatch):
    """Without --runs it began a new run elsewhere."""
    monkeypatch.chdir(tmp_path)
    for runs, said in (("runs", False), ("else where", True)):
        folder = epath.Path(runs) / "tiny-1"
        folder.mkdir(parents=True)
        (folder / "source.json").write_text(json.dumps({"path": "tiny.py", "overrides": []}))
        assert ("--runs 'else where'" in resuming(RunFolder(folder))) == said
