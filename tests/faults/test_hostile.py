"""Row 15: what a stranger wrote.

Nothing of it is executed, nothing is written outside of its folder, memory stays bounded.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformer import cli, config, open_run
from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.runs import trust as run_trust
from tests.faults.harness import ROOT
from tests.tiny import EXPERIMENT, furnish

PAYLOAD = "\nfrom pathlib import Path\nPath({executed!r}).touch()\n"
COMMANDS = {
    "evaluate": ["evaluate"],
    "generate": ["generate", "--prompt=the "],
    "harness": ["harness", "--tasks=arc_easy"],
    "inspect": ["inspect", "--prompt=the "],
}


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run, beside a copy of its text, as its user has it."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder,) = Path("runs").glob("tiny-*")
    return folder


@pytest.fixture
def stranger(monkeypatch, tmp_path):
    """From here on, this user has trained nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def hostile(run, stranger, tmp_path):
    """(the run, whose experiment.py leaves a file when it runs; that file)."""
    executed = tmp_path / "executed"
    with (run / "experiment.py").open("a") as file:
        file.write(PAYLOAD.format(executed=str(executed)))
    return run, executed


def refused(capsys, *argv):
    """What a refused command says, in one line."""
    capsys.readouterr()
    assert cli.main(list(argv)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    return said


@pytest.mark.thorough
def test_whoever_trained_a_run_opens_it_also_where_it_was_moved(run, tmp_path):
    moved = shutil.move(shutil.copytree(run, tmp_path / "copy"), tmp_path / "moved")
    for folder in (run, moved):
        assert open_run(folder).experiment.name == "tiny"


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_a_strangers_run_is_refused_by_every_command_that_opens_it(command, hostile, capsys):
    folder, executed = hostile
    name, *options = COMMANDS[command]
    said = refused(capsys, name, str(folder), *options)
    assert str(folder / "experiment.py") in said and "--trust" in said and not executed.exists()


@pytest.mark.thorough
def test_a_report_of_a_strangers_run_draws_what_needs_no_code(hostile, capsys, caplog):
    folder, executed = hostile
    assert cli.main(["report", str(folder)]) == 0 and (folder / "report.html").stat().st_size > 1000
    assert "--trust" in caplog.text and not executed.exists()
    for command in ("runs", "compare"):
        assert cli.main([command, *[str(folder)] * (2 * (command == "compare"))]) == 0
    assert not executed.exists()


@pytest.mark.thorough
def test_trust_is_given_once_and_ends_with_an_edit(hostile, capsys):
    folder, executed = hostile
    assert cli.main(["evaluate", str(folder), "--trust"]) == 0 and executed.exists()
    executed.unlink()
    assert open_run(folder).experiment.name == "tiny" and executed.exists()
    for file, edit in (
        ("source.json", lambda text: text.replace("--steps=2", "--steps=3")),
        ("experiment.py", lambda t: t + "#"),
    ):
        before = (folder / file).read_text()
        (folder / file).write_text(edit(before))
        executed.unlink(missing_ok=True)
        with pytest.raises(ConfigError, match="--trust"):
            open_run(folder)
        assert not executed.exists()
        (folder / file).write_text(before)


@pytest.mark.thorough
def test_a_report_may_trust(hostile):
    folder, executed = hostile
    assert cli.main(["report", str(folder), "--trust"]) == 0 and executed.exists()


@pytest.mark.parametrize("field", ["objective", "optimizer", "model", "data"])
def test_config_json_that_names_code_is_a_difference_and_no_code(field, run, tmp_path, monkeypatch):
    executed = tmp_path / "executed"
    for folder in (run, Path()):
        (folder / "payload.py").write_text(
            PAYLOAD.format(executed=str(executed)) + "objective = lambda *a: 0\n"
        )
    described = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(described | {field: "payload:objective"}))
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match=f"{field}.*payload:objective"):
        open_run(".")
    assert not executed.exists() and "payload" not in sys.modules


def written(folder, experiment, text, **facts):
    """A run folder as somebody would write it by hand."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.describe(experiment)))
    (folder / "experiment.py").write_text(text)
    (folder / "source.json").write_text(
        json.dumps({"path": "x.py", "overrides": [], "imports": {}} | facts)
    )
    return folder


def test_a_file_of_the_library_needs_no_trust_and_nothing_of_the_folder_runs(
    stranger, tmp_path, monkeypatch
):
    """Its path would be a place to import from, its options can call what the file offers, such as
    open_run."""
    executed, trap = tmp_path / "executed", tmp_path / "trap"
    (trap / "experiments").mkdir(parents=True)
    for name in ("bert_pretrain", "quickstart"):
        (trap / "experiments" / f"{name}.py").write_text(PAYLOAD.format(executed=str(executed)))
    name = "finetune_classifier"
    text, experiment = config.available()[name].read_text(), config.load(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    facts = {
        "path": str(trap / "experiments" / "x.py"),
        "imports": {"/dev/zero": "0", str(trap): "1"},
    }
    assert (
        open_run(written(tmp_path / "one", experiment, text, **facts)).experiment.name
        == experiment.name
    )
    assert str(trap) not in sys.path
    other = written(
        tmp_path / "other",
        experiment,
        text,
        overrides=[f"--initial=open_run('{tmp_path / 'bad'}', trust=True)"],
    )
    with pytest.raises(ConfigError, match="--trust"):
        open_run(other)
    assert not executed.exists()


def test_a_file_of_the_current_folder_is_none_of_the_library(stranger, tmp_path, monkeypatch):
    executed = tmp_path / "executed"
    furnish(tmp_path / "work" if (tmp_path / "work").mkdir() is None else tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    experiment = config.load("tiny")
    text = EXPERIMENT + PAYLOAD.format(executed=str(executed))
    Path("experiments/tiny.py").write_text(text)
    with pytest.raises(ConfigError, match="--trust"):
        open_run(written(tmp_path / "run", experiment, text))
    assert not executed.exists()


@pytest.mark.thorough
def test_state_that_others_can_write_is_not_believed(run, tmp_path, monkeypatch, capsys):
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    open_run(run, trust=True)
    (folder,) = state.glob("jaxformer/experiments")
    (digest,) = folder.iterdir()
    assert (
        folder.stat().st_mode & 0o777 == 0o700
        and digest.stat().st_size == 0
        and len(digest.name) == 64
    )
    folder.chmod(0o777)
    assert "nobody else can write" in refused(capsys, "evaluate", str(run))
    folder.chmod(0o700)
    digest.unlink()
    digest.symlink_to("/dev/null")
    assert "--trust" in refused(capsys, "evaluate", str(run))
    digest.unlink()
    digest.touch()
    assert open_run(run).experiment.name == "tiny"
    os.chown(folder, 12345, 12345) if os.geteuid() == 0 else folder.chmod(0o777)
    assert "folder of yours" in refused(capsys, "evaluate", str(run))
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    (tmp_path / digest.name).touch()
    assert "folder of yours" in refused(capsys, "evaluate", str(run))


HELPER = "\nfrom pathlib import Path\nPath({executed!r}).write_text('{word}')\nSTEPS = 6\n"


@pytest.fixture
def beside(stranger, tmp_path, monkeypatch):
    """(a stranger's run whose file imports a module beside it; that module; the file that the
    module leaves when it runs)."""
    executed, place = tmp_path / "executed", tmp_path / "theirs" / "experiments"
    furnish(tmp_path / "mine" if (tmp_path / "mine").mkdir() is None else tmp_path)
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "path", list(sys.path))
    place.mkdir(parents=True)
    helper = place / "beside_a_run.py"
    helper.write_text(HELPER.format(executed=str(executed), word="first"))
    facts = {
        "path": str(place / "tiny.py"),
        "imports": {str(helper): hashlib.sha256(helper.read_bytes()).hexdigest()},
    }
    text = EXPERIMENT.replace("steps=6", "steps=STEPS").replace(
        "from jaxformer.data", "from experiments.beside_a_run import STEPS\nfrom jaxformer.data", 1
    )
    return written(tmp_path / "run", config.load("tiny"), text, **facts), helper, executed


def test_a_module_beside_a_trusted_run_is_checked_before_it_runs(beside):
    """The user read the module when trusting the run. It lies where somebody else may write."""
    folder, helper, executed = beside
    with pytest.raises(ConfigError, match="--trust"):
        open_run(folder)
    assert not executed.exists()
    assert open_run(folder, trust=True).experiment.steps == 6 and executed.read_text() == "first"
    executed.unlink()
    before = helper.read_text()
    for edited in (HELPER.format(executed=str(executed), word="second"), before + "#", ""):
        helper.write_text(edited)
        for trust in (False, True):
            with pytest.raises(
                ConfigError, match=f"{helper} changed since this run began.*nothing was run"
            ):
                open_run(folder, trust=trust)
        assert not executed.exists()
    helper.unlink()
    helper.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="changed since"):
        open_run(folder)
    helper.unlink()
    helper.write_text(before)
    assert open_run(folder).experiment.steps == 6


def test_a_module_beside_a_run_of_this_user_may_change(beside, caplog):
    """Its user edits it, and opens the run where nothing that decides numbers is another one."""
    folder, helper, _ = beside
    facts = json.loads((folder / "source.json").read_text())
    run_trust.add(run_trust.digest((folder / "experiment.py").read_text(), facts))
    helper.write_text(helper.read_text() + "# a note\n")
    assert open_run(folder).experiment.steps == 6 and "changed since this run began" in caplog.text
    helper.write_text(helper.read_text().replace("STEPS = 6", "STEPS = 7"))
    with pytest.raises(ConfigError, match="steps: 6 -> 7"):
        open_run(folder)


@pytest.mark.thorough
def test_training_goes_on_where_trust_cannot_be_kept(
    trained, tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.chdir(furnish(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert cli.main(["train", "tiny", "--steps=1"]) == 0
    assert caplog.text.count("will open only with --trust") == 1
    (folder,) = Path("runs").glob("tiny-*")
    assert "XDG_STATE_HOME" in refused(capsys, "evaluate", str(folder), "--trust")


@pytest.mark.thorough
def test_programs_beside_a_run_are_not_loaded(run, tmp_path):
    (run.parent / ".compiled").mkdir()
    (run / ".compiled").mkdir()
    assert cli.main(["evaluate", str(run)]) == 0
    assert not Path(jax.config.jax_compilation_cache_dir).is_relative_to(tmp_path)


@pytest.mark.thorough
def test_links_in_a_run_lead_nowhere(run, tmp_path, capsys):
    """A report, an evaluation, a page of an inspection: what is outside of the folder stays as it
    was."""
    outside = tmp_path / "home"
    outside.mkdir()
    precious = outside / ".bashrc"
    precious.write_text("precious")
    before = sorted(outside.iterdir())
    for name in ("report.html", "page.html", "out.jsonl"):
        (run / name).symlink_to(precious)
    shutil.rmtree(run / "figures", ignore_errors=True)
    (run / "figures").mkdir()
    for name in ("loss.png", "architecture.png", "masks.png", "costs.png", "attention.png"):
        (run / "figures" / name).symlink_to(precious)
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["inspect", str(run), "--prompt=the ", f"--html={run}/page.html"]) == 0
    (run / "prompts.jsonl").write_text('{"prompt": "the "}\n')
    assert (
        cli.main(
            [
                "generate",
                str(run),
                f"--prompts={run}/prompts.jsonl",
                f"--out={run}/out.jsonl",
                "--tokens=2",
            ]
        )
        == 0
    )
    shutil.rmtree(run / "figures")
    (run / "figures").symlink_to(outside)
    assert cli.main(["report", str(run)]) in (0, 2)
    assert precious.read_text() == "precious" and sorted(outside.iterdir()) == before
    assert not (run / "report.html").is_symlink() and not (run / "out.jsonl").is_symlink()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))
from jaxformer import cli
code = cli.main(sys.argv[1:])
print(f"took {{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}} MB")
sys.exit(code)
"""
LIMIT = 16 << 30  # of addresses, of which XLA reserves some without using them


def limited(*argv, seconds=200):
    """(exit code, the last line on stderr, megabytes) of a command that may not take more than
    LIMIT, nor wait for ever."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LIMITED.format(bytes=LIMIT), *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    assert done.returncode in (0, 2), done.stderr[-2000:]
    return (
        done.returncode,
        done.stderr.strip().splitlines()[-1],
        int(done.stdout.rpartition("took ")[2].split()[0]),
    )


def damage_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def damage_by_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def damage_by_holes(path):
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)


ENDLESS = {"pipe": damage_by_pipe, "device": damage_by_device, "holes": damage_by_holes}


@pytest.mark.parametrize("damage", ENDLESS)
@pytest.mark.parametrize("file", ["config.json", "source.json", "experiment.py", "tokenizer.json"])
def test_a_small_file_without_an_end(file, damage, run, capsys):
    ENDLESS[damage](run / file)
    said = refused(capsys, "generate", str(run), "--prompt=the ")
    assert run.name in said


def test_weights_without_an_end(tmp_path):
    """Of Hugging Face folders; what else their files may be is in
    tests/interop/test_safetensors.py."""
    (tmp_path / "config.json").write_text("{}")
    for name, index in (
        ("model.safetensors", {}),
        ("a.safetensors", {"weight_map": {"a": "a.safetensors"}}),
    ):
        os.mkfifo(tmp_path / name)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match=f"{name}: cannot be read: no regular file"):
            safetensors.open_checkpoint(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.fault
@pytest.mark.parametrize("damage", ENDLESS)
def test_a_checkpoint_without_an_end(damage, run, tmp_path, report):
    """Every file of a checkpoint in turn: the command ends, with one line, in little memory."""
    (checkpoint,) = (run / "checkpoints").glob("[0-9]*")
    files = {
        path.parent.name + path.suffix: path.relative_to(checkpoint)
        for path in checkpoint.rglob("*")
        if path.is_file()
    }
    # one of each kind
    files = sorted(
        {*files.values(), *(path.relative_to(checkpoint) for path in checkpoint.rglob("_*"))}
    )
    most = 0
    for file in files:
        copy = Path(shutil.copytree(run, tmp_path / "copies" / str(file).replace("/", "-")))
        ENDLESS[damage](copy / "checkpoints" / checkpoint.name / file)
        code, said, megabytes = limited("evaluate", str(copy))
        reason = "is a link" if damage == "device" else "damaged"
        assert code == 0 or (said.startswith("jaxformer: ") and reason in said), (file, said)
        most = max(most, megabytes)
        shutil.rmtree(copy)
    assert most < 2_000  # 600 are JAX and its libraries
    note = f"at most {most} MB"
    report(
        15,
        f"endless file of a checkpoint: {damage}",
        trials=len(files),
        detected=len(files),
        recovered=len(files),
        note=note,
    )
