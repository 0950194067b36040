"""Where the answer of a model is no text, `generate` calls the data's own method, which gets the
run, a key and its folder."""

import contextlib
import io
from pathlib import Path

import jax
import pytest
from etils import epath

import jaxformer
from jaxformer import cli
from jaxformer.errors import ConfigError
from jaxformer.params import random_key
from jaxformer.runs import own_answers

pytestmark = pytest.mark.thorough  # each trains a run, some seconds long

EXPERIMENT = '''
import numpy as np
from jaxformer import training
from jaxformer.data.tasks import Copy
from jaxformer.models import ModelConfig


class Data:
    """Copies, and an answer that is no text."""

    def open(self, model):
        return Copy(vocab_size=8, length=4, examples=16, validation_examples=4).open(model)

    def generate(self, run, key, folder{parameter}):
        {body}


experiment = training.Experiment(
    name="own",
    model=ModelConfig(
        vocab_size=9, num_layers=1, d_model=8, num_heads=2, context_length=8, dropout_rate=0.1
    ),
    data=Data(),
    steps=1,
    batch_size=4,
)
'''
BODY = """
        draws = np.asarray(__import__("jax").random.bits(key, (4,))).tolist()
        (folder / "figures" / "mine").mkdir(parents=True, exist_ok=True)
        (folder / "figures" / "mine" / "a.txt").write_text(str(draws))
        yield f"draws {draws}"
        yield folder / "b.txt"
        (folder / "b.txt").write_text(prompt or "no prompt")
        yield f"{run.model.dropout_rate} {sorted(run.params)} {run.step} {run.checkpoint[0]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of each of two experiments: one whose data read a prompt, and one that
    returns nothing."""
    folder = tmp_path_factory.mktemp("own answers")
    (folder / "own.py").write_text(EXPERIMENT.format(parameter=", prompt=None", body=BODY))
    silent = EXPERIMENT.format(parameter="", body="return None").replace(
        'name="own"', 'name="silent"'
    )
    (folder / "silent.py").write_text(silent)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for name in ("own", "silent"):
            assert cli.main(["train", f"{name}.py"]) == 0
    return folder


def generate(folder, capsys, *options, name="own"):
    capsys.readouterr()
    with contextlib.chdir(folder):
        code = cli.main(["generate", name, *options])
    return code, *capsys.readouterr()


@pytest.mark.thorough
def test_what_it_returns_is_printed_and_each_file_that_it_wrote_is_named_once(folder, capsys):
    (run,) = (folder / "runs").glob("own-*")
    for options, written in (([], "no prompt"), (["--prompt=a cat"], "a cat")):
        code, out, err = generate(folder, capsys, *options)
        draws = jax.random.bits(random_key(0), (4,)).tolist()
        path = run.relative_to(folder)
        lines = [
            f"draws {draws}",
            f"{path}/b.txt",
            "0.0 ['embedding', 'final_norm', 'layers'] None 1",
        ]
        assert (code, out.splitlines()) == (0, [*lines, f"wrote {path}/figures/mine/a.txt"]), err
        assert (run / "b.txt").read_text() == written


@pytest.mark.thorough
def test_the_key_is_that_of_the_seed(folder, capsys):
    found = {}
    for seed in (0, 1, 0):
        out = generate(folder, capsys, f"--seed={seed}")[1].splitlines()[0]
        assert found.setdefault(seed, out) == out
    assert found[0] != found[1]


def test_a_file_that_was_there_and_is_left_is_not_named(folder, capsys):
    (run,) = (folder / "runs").glob("silent-*")
    (run / "mine.txt").write_text("of the user's")
    code, out, err = generate(folder, capsys, name="silent")
    assert (code, out) == (0, "") and "Traceback" not in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        (
            ["--temperature=0.5"],
            "own",
            "generate: --temperature: chooses how a text is written, but the data of this run",
        ),
        (
            ["--top-k=3", "--tokens=4"],
            "own",
            "generate: --tokens, --top-k: chooses how a text is written",
        ),
        (
            ["--prompts=a", "--out=b"],
            "own",
            "generate: --prompts, --out: chooses how a text is written",
        ),
        (["--stop=x"], "own", "generate: --stop: chooses how a text is written"),
        (
            ["--prompt=a"],
            "silent",
            "generate: --prompt: the data of this run make answers without one; leave it out",
        ),
        (["--model.d-model=16"], "own", "only --mesh."),
    ],
)
def test_options_of_texts_are_refused_in_one_line(folder, capsys, options, name, said):
    code, out, err = generate(folder, capsys, *options, name=name)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.thorough
def test_a_run_says_how_to_ask_it(folder, capsys):
    with contextlib.chdir(folder):
        assert cli.main(["train", "own.py"]) == 0
    (run,) = (folder / "runs").glob("own-*")
    assert (
        capsys.readouterr().out.rstrip().endswith(f"; python -m jaxformer generate runs/{run.name}")
    )


@pytest.mark.thorough
def test_data_without_the_method_are_told_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    body = EXPERIMENT.format(parameter="", body="return None").replace(
        "def generate(", "def another("
    )
    Path("own.py").write_text(body)
    assert cli.main(["train", "own.py"]) == 0
    assert "generate" not in capsys.readouterr().out
    code, _, err = generate(tmp_path, capsys, "--prompt=a")
    assert (
        code == 2
        and (
            "has no tokenizer, so there is no text to continue; its data may have a method "
            "generate(run"
        )
        in err
    )
    code, _, err = generate(tmp_path, capsys)
    assert code == 2 and "give --prompt TEXT" in err
    (run,) = (tmp_path / "runs").glob("own-*")
    with pytest.raises(ConfigError, match=r"its data have no method generate\(run, key, folder\)"):
        next(own_answers.generate(jaxformer.open_run(run)))


@pytest.mark.parametrize(
    ("answer", "listed"),
    [
        (None, []),
        ("text", ["text"]),
        (3, [3]),
        (["a", "b"], ["a", "b"]),
        (Path("a"), [Path("a")]),
        (iter("ab"), ["a", "b"]),
    ],
)
def test_an_answer_is_a_list(answer, listed):
    assert own_answers.in_a_list(answer) == listed


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    """What it leads to may be large, or a stranger's, or the folder itself."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "large").write_text("x")
    assert list(own_answers.files_of(epath.Path(tmp_path))) == [str(tmp_path / "a" / "file")]
