"""What is said about another run: its tokenizer, and the command that goes on with it."""

import json
import logging

from etils import epath

from jaxformer.data import tokenizers
from jaxformer.runs.run_folder import RunFolder, resuming
from jaxformer.runs.same_data import warn_of_tokenizer


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
