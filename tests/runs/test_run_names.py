"""Names of runs: each is that of one folder, which the command `runs` finds, or is refused before
anything is written."""

import functools
import json
import os
import random
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from etils import epath

from jaxformer import config
from jaxformer.cli.sweeps import shorten
from jaxformer.config.override import override
from jaxformer.data.tokenizers import of_words
from jaxformer.errors import ConfigError
from jaxformer.runs.run_folder import RunFolder, run_folder, runs_of
from jaxformer.tools.analysis.report import file_name
from jaxformer.training.experiment import LONGEST_NAME, _check_name

REFUSED = [
    "",
    " ",
    ".",
    "..",
    "...",
    "../x",
    "/abs",
    "a/b",
    "a\\b",
    "a\n",
    "\na",
    "a\nb",
    "a\rb",
    "-x",
    "--name",
    "~",
    "~root",
    "a\0b",
    "\x1b[2J",
    "\x7f",
    "a\x85b",
    "a\u2028b",
    "a\u2029b",
    "\u202etxt",
    "a\u2066b",
    "\ufeffa",
    "a\u200bb",
    "\ud800",
    " a",
    "a ",
    "\u3000a",
    "a\u00a0",
    "x" * (LONGEST_NAME + 1),
    "é" * (LONGEST_NAME // 2 + 1),
    "../../../etc/passwd",
    "a/../b",
    "\t",
]
TAKEN = [
    "quickstart",
    "a b",
    "火",
    "😀",
    "Été",
    ".hidden",
    "a.b",
    "a..b",
    "x" * LONGEST_NAME,
    "é" * (LONGEST_NAME // 2),
    "[a]*?",
    "{a}",
    "'",
    '"',
    "$(id)",
    "`id`",
    "a;b",
    "a|b",
    "%s",
    "{0}",
    "<b>",
    "&amp;",
    "None",
    "2024",
    "*",
    "می\u200cخواهم",
    "👩\u200d🔬",
    "runs",
]


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_not_one_folder_is_refused(name):
    with pytest.raises(ConfigError, match=r"^name=") as refused:
        _check_name(name)
    assert str(refused.value).isprintable()
    with pytest.raises(ConfigError):  # in a file, and as an option
        config.load("quickstart").__class__(**vars(config.load("quickstart")) | {"name": name})


def written(experiment, runs):
    """The folder of a run, as training begins it."""
    folder = run_folder(experiment, runs)
    folder.write(folder.config, config.to_json(config.describe(experiment)))
    return folder


@pytest.mark.thorough
def test_every_run_that_can_be_made_is_found(tmp_path):
    """Also what has its name: its figures, the table of its sweep, a file that is not yet
    complete."""
    experiment = config.load("quickstart")
    made = [written(override(experiment, [f"--name={name}"]), tmp_path / "runs") for name in TAKEN]
    assert all(folder.path.parent == epath.Path(tmp_path / "runs") for folder in made)
    assert {folder.path.name for folder in runs_of(None, tmp_path / "runs")} == {
        folder.path.name for folder in made
    }
    for name, folder in zip(TAKEN, made, strict=True):
        assert [found.path for found in runs_of(name, tmp_path / "runs")] == [folder.path]
        assert len(folder.path.name.splitlines()) == 1
        (Path(tmp_path) / file_name(f"other-numbers-{folder.path.name}")).touch()
        config.write_atomically(tmp_path / f"sweep-{shorten(name)}-01234567.jsonl", "x")
    assert not list(tmp_path.rglob("*.unfinished"))


def test_names_drawn_from_all_letters(tmp_path):
    """Whatever is taken makes one folder right below the folder of all runs, on one line of a
    list."""
    numbers = random.Random(11)
    letters = [
        chr(n)
        for n in [
            *range(0x250),
            *range(0x2000, 0x2070),
            0x5C,
            0x2F,
            0x1F600,
            0xFEFF,
            0xD800,
            0xE000,
        ]
    ]
    for _ in range(3000):
        name = "".join(numbers.choices(letters, k=numbers.randrange(1, 8)))
        try:
            _check_name(name)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1
            continue
        path = tmp_path / f"{name}-01234567"
        path.mkdir(exist_ok=True)
        assert path.parent == tmp_path and path.resolve().parent == tmp_path.resolve()
        assert len(f"{path}  2/2 steps".splitlines()) == 1 and not re.search(
            "[\0-\x1f\x7f-\x9f]", name
        )
        assert not any(
            unicodedata.bidirectional(letter) in ("LRO", "RLO", "LRE", "RLE", "PDF", "LRI", "RLI")
            for letter in name
        )


def test_pictures_of_runs_with_long_names_have_names():
    long = [file_name(f"attention-{'x' * 245}{n}") for n in range(2)]
    assert len(set(long)) == 2 and all(len(name.encode()) < 255 for name in long)
    assert file_name("loss") == "loss.png" and len(file_name("é" * 300).encode()) < 255
    assert RunFolder(epath.Path("runs/x")).samples == epath.Path("runs/x/samples")


def test_what_a_killed_trainer_began_to_write_is_removed(tmp_path):
    """Nothing else: a report may be drawn at this moment, and a user's file may have such a
    name."""
    folder = RunFolder(epath.Path(tmp_path))
    folder.samples.mkdir()
    begun = [
        ".config.json.0123456789abcdef.unfinished",
        "samples/.step-12.txt.0123456789abcdef.unfinished",
    ]
    others = [
        ".report.html.0123456789abcdef.unfinished",
        ".config.json.unfinished",
        "config.json",
        "samples/step-12.txt",
    ]
    for name in (*begun, *others):
        (tmp_path / name).touch()
    old = tmp_path / ".other-numbers.png.0123456789abcdef.unfinished"
    old.touch()
    an_hour_ago = time.time() - 3601
    os.utime(old, (an_hour_ago, an_hour_ago))
    folder.remove_unfinished()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(others)


def test_what_an_object_keeps_from_its_use_changes_no_name():
    class Counts:
        @functools.cached_property
        def total(self):
            return [3]

    counts, words = Counts(), of_words(["<a>", "</s>", "b"], "</s>")
    before = config.describe([counts, words])
    assert counts.total and words.digest and words.control_tokens
    assert config.describe([counts, words]) == before


def test_tokenizers_of_one_state_have_one_description():
    """Each has secret names of its own for pieces that are control tokens too."""
    words = ["<a>", "</s>", "b"]
    first, second, other = (of_words(names, "</s>") for names in (words, words, [*words, "c"]))
    assert config.describe(first) == config.describe(second) != config.describe(other)


NAMES = """
import json, sys
from jaxformer import config
print(json.dumps({name: config.fingerprint(config.load(name)) for name in sys.argv[1:]}))
"""


@pytest.mark.thorough
def test_another_process_gives_the_same_names():
    """Else a killed run would begin again: no hash, address or random number is in a name."""
    names = sorted(config.available())
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    words = [sys.executable, "-c", NAMES, *names]
    other = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == {n: config.fingerprint(config.load(n)) for n in names}
