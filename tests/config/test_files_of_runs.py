"""The small files of a run, damaged in every way: one line that names the file, and no
traceback."""

import os
import shutil

import pytest

from jaxformer import cli
from jaxformer.config import read_json
from jaxformer.data import tokenizers
from jaxformer.errors import ConfigError
from tests.tiny import furnish

DAMAGE = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "a number": b"3",
    "brackets": b"[" * 100_000,
    "another object": b'{"type": "bpe", "tokenizer": {"model": 3}, "overrides": 3}',
}


@pytest.mark.parametrize("name", DAMAGE)
def test_json_that_is_none(tmp_path, name):
    path = tmp_path / "some.json"
    path.write_bytes(DAMAGE[name])
    with pytest.raises(ConfigError, match=r"some.json"):
        read_json(path, imports=dict)
    with pytest.raises(ConfigError, match=r"some.json.*advice"):
        read_json(path, "advice", overrides=list)
    with pytest.raises(ConfigError, match=r"some.json.*not a saved tokenizer"):
        tokenizers.load(path)


def test_what_is_no_regular_file_is_not_read(tmp_path):
    """A pipe would wait for ever, /dev/zero has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ConfigError, match="no regular file"):
            read_json(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_json(tmp_path / "nothing")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = furnish(tmp_path_factory.mktemp("trained"))
    before = os.getcwd()
    os.chdir(folder)
    assert cli.main(["train", "tiny", "--steps=1"]) == 0
    os.chdir(before)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["config.json", "source.json"])
def test_a_run_with_a_damaged_file(trained, tmp_path, monkeypatch, capsys, file):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (run,) = (tmp_path / "runs").glob("tiny-*")
    for damage in DAMAGE.values():
        (run / file).write_bytes(damage)
        for command in (["evaluate"], ["generate", "--prompt", "the"]):
            assert cli.main([command[0], str(run), *command[1:]]) == 2
            said = capsys.readouterr().err.strip()
            assert said.count("\n") == 0 and "Traceback" not in said and run.name in said
