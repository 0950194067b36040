"""`python -m jaxformer`: odd inputs, pipes, terminals and locales; and every command that a page
says to type."""

import contextlib
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer import cli, config
from jaxformer.cli import arguments, runs
from jaxformer.cli.arguments import Parser, read_experiment
from jaxformer.runs.reporter import Console
from tests.tiny import furnish

ROOT = Path(__file__).parents[2]
PLAIN = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Experiment:
    '''A plain one.'''
    name: str = "e"  # 🙂 its name
experiment = Experiment()
"""


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(words, folder, **more):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more.pop("env", {})
    command = [sys.executable, "-m", "jaxformer", *words]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, env=environment, **more)


@pytest.mark.report(
    "tensorflow/nmt#402",
    "tensorflow/nmt#175",
    right=(
        "a terminal without the letters of a text gets escapes, not an error in the middle of a "
        "command"
    ),
    hit=(
        "UnicodeEncodeError with a traceback, at the end of training too, where the sample is "
        "printed"
    ),
)
def test_a_terminal_without_unicode_gets_escapes(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PLAIN, encoding="utf-8")
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding="ascii")) as out:
        assert cli.main(["train", str(tmp_path / "mine.py"), "--help"]) == 0
        assert cli.run(lambda _: print("\ud83d half, ü") or 0, []) == 0
        out.flush()
    assert b"\\U0001f642 its name" in raw.getvalue() and b"\\ud83d half, \\xfc" in raw.getvalue()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.report(
    "Backblaze/B2_Command_Line_Tool#1071",
    "python/cpython#90650",
    right="whoever reads may stop reading: no message, and exit code 0",
    hit=(
        "the page of commands through `head`: 'Exception ignored ... BrokenPipeError', exit code "
        "120"
    ),
)
def test_a_reader_that_has_enough_is_no_error(tmp_path, unbuffered):
    read, write = os.pipe()
    os.close(read)
    process = start(["--help"], tmp_path, stdout=write, env={"PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    assert process.communicate()[1] == b"" and process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.report(
    "aws/aws-cli#10538",
    right="output that cannot be written is one line and exit code 2",
    hit="an ignored exception while Python ends, exit code 120",
)
def test_output_on_a_full_disk_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(["--help"], tmp_path, stdout=full)
        said = process.communicate()[1].decode()
    assert process.returncode == 2 and "No space left" in said and said.count("\n") == 1


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
@pytest.mark.report(
    "wandb/wandb#6201",
    "huggingface/neuralcoref#78",
    right="training goes on when whoever read its lines is gone: the record is in the run's folder",
    hit="`train EXP | head` ended the training in the middle, with exit code 0",
)
def test_training_goes_on_without_a_reader(monkeypatch, number):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Gone())
    console = Console(10)
    for step in range(3):
        console.step(step, {"loss": 1.0})
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file"):  # any other error is not hidden
        console_error(monkeypatch)


def console_error(monkeypatch):
    class Bad(io.StringIO):
        def write(self, text):
            raise OSError(errno.EBADF, "Bad file descriptor")

    with contextlib.redirect_stdout(Bad()):
        Console(10).say("text")


@pytest.mark.report(
    "mlflow/mlflow#3052",
    "mlflow/mlflow#661",
    right=(
        "one experiment file that cannot be read does not hide the others: `list` says so in its "
        "line"
    ),
    hit="a syntax error in one file of experiments/: `list` ended with a traceback",
)
def test_one_broken_file_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(furnish(tmp_path))
    folder = tmp_path / "experiments"
    broken = {
        "syntax": b"x = (\n",
        "bytes": b"'''caf\xe9'''\n",
        "null": b"x = 1\0\n",
        "deep": b"(" * 300 + b"\n",
    }
    for name, text in broken.items():
        (folder / f"broken_{name}.py").write_bytes(text)
    (folder / "fine.py").write_text('"""Fine: 🙂.\n\nMore."""\n', encoding="utf-8")
    code, out, err = run(capsys, "list")
    assert code == 0 and err == "" and "quickstart" in out and "presets" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert all("(cannot be read: " in lines[f"broken_{name}"] for name in broken)
    assert lines["fine"].endswith("Fine: 🙂.")


@pytest.mark.report(
    "GNS3/gns3-server#170",
    "boppreh/replace_me#1",
    right="files are UTF-8 in every locale; prompts may begin with a byte order mark",
    hit=(
        "`list` and `generate --prompts` read files in the encoding of the locale; a mark was "
        "refused"
    ),
)
def test_files_are_utf8_in_every_locale(tmp_path, monkeypatch, capsys):
    import locale
    import pathlib

    def read_text(self, encoding=None, errors=None, newline=None):
        if encoding is None:
            raise UnicodeDecodeError("gbk", b"", 0, 1, "read in the encoding of the locale")
        return self.read_bytes().decode(encoding)

    monkeypatch.setattr(locale, "getencoding", lambda: "gbk")
    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "list")[0] == 0
    (tmp_path / "prompts.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"prompt": "größer 🙂"}, ensure_ascii=False).encode()
    )

    class Run:
        def continue_all(self, prompts, **how):
            return [[prompt.upper()] for prompt in prompts]

    runs._generate_file(Run(), "prompts.jsonl", "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_bytes())["prompt"] == "größer 🙂"


@pytest.mark.parametrize(
    "words",
    [
        "list anything",
        "list --al",
        "runs tiny more",
        "compare one",
        "report",
        "show tiny --stpes=3",
        "cost tiny x",
        "trian tiny",
    ],
)
@pytest.mark.report(
    "microsoft/MLOS#112",
    right="a word that a command does not know is refused, in one line with what was expected",
    hit="`list` took and ignored every word",
)
def test_words_that_a_command_does_not_know_are_refused(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(furnish(tmp_path))
    code, _, err = run(capsys, *words.split())
    assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--ste=3", "--av=2", "--tr", "--repl"])
@pytest.mark.report(
    "tweag/FawltyDeps#293",
    right="the beginning of an option is no option",
)
def test_a_beginning_of_an_option_is_none(tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(furnish(tmp_path))
    parser = arguments.run_parser("evaluate")
    options, others = parser.parse_known_args(["tiny", option])
    assert others == [option] and (options.step, options.average, options.trust) == (None, 1, False)


@pytest.mark.parametrize("command", re.findall(r"^    (\w+)", cli.__doc__, re.MULTILINE))
@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.report(
    "MemPalace/mempalace#2528",
    right="COMMAND --help is the help of that command, with exit code 0",
    hit="`list --help`, `runs --help`, `compare --help` and others were refused",
)
def test_every_command_has_help(capsys, command, word):
    code, out, err = run(capsys, command, word)
    assert code == 0 and err == "" and command in out and len(out.splitlines()) >= 1


@pytest.mark.report(
    "guildai/guildai#211",
    "mlflow/mlflow#7932",
    right=(
        "`runs` lists every run, also one whose record holds NaN or null or ends in the middle "
        "of a line"
    ),
)
def test_runs_lists_runs_with_odd_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    records = {
        "nan": '{"step": 1, "loss": NaN}\n{"step": 2, "validation_loss": NaN}\n',
        "null": '{"step": 1, "loss": null}\n{"step": 2, "validation_loss": null}\n',
        "cut": '{"step": 1, "loss": 2.0}\n{"step": 2, "valid',
        "none": "",
    }
    for name, text in records.items():
        folder = tmp_path / "runs" / f"{name}-00000000"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"name": name, "steps": 9}))
        (folder / "metrics.jsonl").write_text(text)
    (tmp_path / "runs" / "broken-00000000").mkdir()
    (tmp_path / "runs" / "broken-00000000" / "config.json").write_text("{")
    code, out, _ = run(capsys, "runs")
    assert code == 0 and all(f"runs/{name}-00000000" in out for name in records)


FILES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").glob("*.py")),
]
VARIABLE = r"""[A-Z]+=(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s;,`"'|()]+)"""
TARGETS = "train|tokens|evaluate|generate|inspect|report|draw|show|sweep|harness"


def typed():
    """(target, variables) of every such `make` command on a page or in the docstring of an
    experiment."""
    texts = [" ".join(path.read_text(encoding="utf-8").split("\n")) for path in FILES]
    found = {
        match
        for text in texts
        for match in re.findall(rf"\bmake ({TARGETS})((?: +{VARIABLE})+)", text)
    }
    return sorted(
        (target, text)
        for target, text in found
        if "$(" not in text.replace("$(ls", "") and "NAME" not in text
    )


@pytest.mark.thorough
@pytest.mark.report(
    "ofirpress/attention_with_linear_biases#2",
    "thinking-machines-lab/tinker-cookbook#95",
    right="every command on a page names an experiment and options that exist",
)
def test_commands_on_the_pages_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = typed()
    assert len(commands) > 30 and {"train", "generate", "evaluate", "sweep"} <= {
        target for target, _ in commands
    }

    class Understood(Exception):
        pass

    def stop(options, overrides=()):
        raise Understood

    monkeypatch.setattr(runs, "run_of", stop)
    wrong = []
    for target, text in commands:
        variables = dict(word.split("=", 1) for word in shlex.split(text))
        name, words = variables.get("EXP", "quickstart"), shlex.split(variables.get("ARGS", ""))
        if name in ("...", "…") or (name.endswith(".py") and not (ROOT / name).exists()):
            continue  # a file of the reader's own
        words = [word for word in words if word not in ("...", "…")]
        try:
            if target in ("train", "tokens", "draw", "show", "sweep"):
                words = [
                    word
                    for word in words
                    if word.partition("=")[0] not in ("--out", "--runs", "--parallel")
                ]
                if name in config.available() or name.endswith(".py"):
                    with (
                        contextlib.suppress(arguments.Answered),
                        contextlib.redirect_stdout(io.StringIO()),
                    ):
                        read_experiment(name, words)
            elif target in ("evaluate", "generate", "inspect", "harness"):
                tasks = ["--tasks", variables["TASKS"]] if "TASKS" in variables else []
                with contextlib.suppress(Understood):
                    command = {"harness": runs.run_harness}.get(target) or getattr(runs, target)
                    command([name, *tasks, *words])
        except config.ConfigError as error:
            wrong.append((target, text, str(error)))
    assert not wrong


@pytest.mark.report(
    "python-poetry/cleo#299",
    right="without any output, and with a terminal of no width, a command still works",
)
def test_no_output_at_all(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PLAIN, encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["train", str(tmp_path / "mine.py"), "--help"]) == 0
    assert cli.main(["--version"]) == 0


@pytest.mark.report(
    "SWE-agent/SWE-agent#896",
    right="an error names the cause and the next step in one line, also for odd words of the shell",
)
def test_errors_of_odd_words_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(furnish(tmp_path))
    for words in (
        ["train", "tiny", ""],
        ["train", "tiny", " "],
        ["train", ""],
        ["show", "tiny", "--model=\n\n"],
        ["train", "\x00"],
    ):
        code, _, err = run(capsys, *words)
        assert code == 2 and err.count("\n") == 1 and err.startswith("jaxformer: "), words
    assert isinstance(Parser("x"), Parser)


@pytest.mark.report(
    "OPM/opm-simulators#5063", "airtasker/spot#97",
    right="a ~ in front of a path is the user's folder, wherever a command takes a path",
    hit="--runs=~/runs, which the shell leaves as it is, made a folder `~` here",
)  # fmt: skip
def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home" / "runs" / "e-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"type": "Experiment", "name": "e", "steps": 9}')
    assert run(capsys, "runs", "--runs=~/runs")[1].startswith(str(folder))
    assert (
        arguments.folder_of("~/runs/e-1", "runs").path
        == arguments.folder_of("e-1", arguments.place("~/runs")).path
    )
    assert arguments.output_file("~/page.html") == str(tmp_path / "home" / "page.html")


@pytest.mark.report(
    "huggingface/transformers#27954",
    right=(
        "a folder that is no run does not hide the runs of that name; alone it is refused as "
        "what it is"
    ),
    hit=(
        "`evaluate reverse` beside a folder reverse/ was refused, and `compare` called two such "
        "folders the same experiment"
    ),
)
def test_a_folder_of_the_name_hides_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    for words in (
        ["compare", "quickstart", "quickstart"],
        ["evaluate", "quickstart"],
        ["report", "quickstart"],
    ):
        code, out, err = run(capsys, *words)
        assert code == 2 and out == "" and "quickstart: no run folder, it has no config.json" in err
    folder = tmp_path / "runs" / "quickstart-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"type": "Experiment", "name": "quickstart", "steps": 9}')
    assert arguments.folder_of("quickstart", "runs").path.name == "quickstart-1"


@pytest.mark.report(
    "fajarhide/omni#353", "replicatedhq/replicated#519",
    right="stdout is a command's answer alone: what an experiment file prints goes to stderr",
    hit="`evaluate RUN | jq` failed on the first line that the file prints",
)  # fmt: skip
def test_what_a_file_prints_is_no_part_of_the_answer(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("print('loading')\n" + PLAIN)
    code, out, err = run(capsys, "train", str(tmp_path / "mine.py"), "--help")
    assert code == 0 and out.startswith("usage:") and "loading" in err
