"""What a user types: good commands do their job, bad ones get one line, exit code 2, and leave
nothing behind."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer import cli
from jaxformer.cli import runs
from jaxformer.cli.arguments import Parser
from jaxformer.errors import ConfigError, install_command
from jaxformer.ops.quantised import NF4, Int4
from tests.tiny import EXPERIMENT, TEXT, furnish

TINY = [
    "--model.num-layers=1",
    "--model.d-model=16",
    "--model.num-heads=2",
    "--steps=6",
    "--log-every=2",
    "--eval-every=3",
]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with an experiment and its text, as the current one."""
    monkeypatch.chdir(tmp_path)
    return furnish(tmp_path)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A folder in which the experiment was trained, and what that printed."""
    folder, said = furnish(tmp_path_factory.mktemp("trained")), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        assert cli.main(["train", "tiny"]) == 0
    return folder, said.getvalue()


@pytest.fixture
def trained(training, tmp_path, monkeypatch):
    """A copy of it, as the current folder."""
    shutil.copytree(training[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_train_evaluate_generate_show_and_train_again(training, trained, capsys):
    assert "validation loss" in training[1] and "sample:" in training[1]
    (folder,) = (trained / "runs").glob("tiny-*")
    for name in (
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "tokenizer.json",
        "result.json",
    ):
        assert (folder / name).stat().st_size > 0
    assert list((folder / "samples").iterdir()) and (folder / "checkpoints" / "6").is_dir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [0, 2, 4, 5]
    assert [r["step"] for r in records if "validation_loss" in r] == [3, 6]

    before = (folder / "metrics.jsonl").read_text()
    code, out, _ = run(capsys, "train", "tiny")
    assert code == 0 and "this run is finished" in out
    assert (folder / "metrics.jsonl").read_text() == before

    code, out, _ = run(capsys, "evaluate", "tiny")
    scores = json.loads(out.splitlines()[-1])
    assert code == 0 and scores["step"] == 6
    assert scores["loss"] == pytest.approx(records[-1]["validation_loss"])
    code, out, _ = run(capsys, "evaluate", str(folder), "--step=4")
    assert code == 0 and json.loads(out.splitlines()[-1])["step"] == 4

    code, out, _ = run(
        capsys, "generate", "tiny", "--prompt", "the ", "--tokens=5", "--temperature=0"
    )
    assert code == 0 and out.startswith("the ")
    code, out, _ = run(capsys, "show", "tiny", "--model.d-model=32")
    assert code == 0 and "embed=32" in out and "FLOPs" in out
    code, out, _ = run(capsys, "show", "gpt3_175b")
    assert code == 0 and "174,604,259,328" in out


BAD = {
    "unknown key": (["--optimizer.learning-rte=1"], "did you mean --optimizer.learning-rate"),
    "wrong type": (["--steps=many"], "--steps=many"),
    "missing data file": (["--data.path=txet.txt"], "txet.txt"),
    "heads not dividing width": (["--model.num-heads=3"], "does not divide"),
    "K not dividing N": (["--model.num-kv-heads=4", "--model.num-heads=2"], "does not divide"),
    "text shorter than the context": (["--model.context-length=4000"], "context of 4,000"),
    "NaN learning rate": (["--optimizer.learning-rate=nan"], "learning_rate=nan"),
    "vocabulary too small": (["--model.vocab-size=100"], "vocab"),
    "accumulation": (["--accumulation=3"], "does not divide"),
    "no checkpoints": (["--checkpoints.every=0"], "checkpoints.every=0"),
    "prompt too long": (["--sample.prompt=" + "x" * 16], "sample.prompt"),
    "misspelt mask": (["--model.masks", "causl()"], "causal"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_get_one_line(name, workplace, capsys):
    options, said = BAD[name]
    code, out, err = run(capsys, "train", "tiny", *options)
    assert code == 2 and said in err and err.count("\n") == 1 and "Traceback" not in out + err
    assert (
        not list((workplace / "runs").rglob("*.json*")) if (workplace / "runs").exists() else True
    )


def test_other_bad_inputs_get_one_line(workplace, capsys):
    (workplace / "text.txt").write_text("")
    code, _, err = run(capsys, "train", "tiny")
    assert code == 2 and "empty" in err and err.count("\n") == 1
    for argv, said in (
        (["train", "tinny"], "did you mean tiny"),
        (["trian", "tiny"], "no such command"),
        (["train"], "usage"),
        (["evaluate", "tiny"], "not trained yet"),
        # data of a run may need no prompt (tests/runs/test_own_answers.py)
        (
            ["generate", "tiny"],
            "no run folder",
        ),
        (["show", "gpt5"], "gpt5"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and said in err and err.count("\n") == 1, argv


def test_positions_beyond_the_learned_table_get_one_line(trained, capsys):
    (folder,) = (trained / "runs").glob("tiny-*")
    code, _, err = run(capsys, "generate", str(folder), "--prompt", "x" * 17)
    assert code == 2 and "learned positions" in err and err.count("\n") == 1


@pytest.mark.thorough
def test_texts_that_end_before_they_begin_get_one_line(trained, capsys):
    for argv, said in (
        (["--stop="], "stop: '' is in every text"),
        (["--stop=", "--beams=2"], "stop: '' is in every text"),
        (["--filter=LogitBias([1, 2])"], "filters: number 1 is no function"),
    ):
        code, _, err = run(capsys, "generate", "tiny", "--prompt=abc", *argv)
        assert code == 2 and said in err.splitlines()[-1], argv


@pytest.mark.thorough
def test_a_prompt_may_hold_any_separator_of_lines(trained, capsys):
    prompts = ["a\u2028b", "a\x85b", "a\x0cb"]
    (trained / "in.jsonl").write_text(
        "".join(f"{json.dumps({'prompt': p}, ensure_ascii=False)}\r\n" for p in prompts), "utf-8"
    )
    assert (
        run(capsys, "generate", "tiny", "--prompts=in.jsonl", "--out=out.jsonl", "--tokens=1")[0]
        == 0
    )
    assert [
        json.loads(line)["prompt"] for line in (trained / "out.jsonl").read_text().splitlines()
    ] == prompts


@pytest.mark.thorough
def test_a_run_without_a_tokenizer_gets_one_line(trained, capsys):
    (folder,) = (trained / "runs").glob("tiny-*")
    (folder / "tokenizer.json").unlink()
    for command in ("inspect", "generate"):
        code, _, err = run(capsys, command, str(folder), "--prompt", "abc")
        assert code == 2 and "has no tokenizer" in err and err.count("\n") == 1, command


def test_a_damaged_description_of_another_run_is_left_out(trained, capsys, caplog):
    from jaxformer import config
    from jaxformer.runs.run_folder import introduce

    (folder,) = (trained / "runs").glob("tiny-*")
    before = run(capsys, "runs")
    changed = config.override(config.load("tiny"), ["--steps=7"])
    for number, text in enumerate((b"", b"{torn", b"[]", b"\xff", b"[" * 100_000)):
        other = trained / "runs" / f"other-{number}" / "config.json"
        other.parent.mkdir()
        other.write_bytes(text)
        caplog.clear()
        assert run(capsys, "runs") == before and f"runs/other-{number}" in caplog.text
        of_other, own = introduce(changed, "runs")
        assert of_other == f"a new run: runs/{folder.name} differs in steps: 6 -> 7"
        assert own.startswith("its folder: runs/tiny-") and own != f"its folder: runs/{folder.name}"
    assert run(capsys, "evaluate", "runs/other-0")[0] == 2  # asked for itself, it is a mistake


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("evaluate tiny --replay --int8", "not allowed with argument"),
        ("evaluate tiny --replay --step=4", "leave out --step and --average"),
        ("evaluate tiny --replay --average=2", "leave out --step and --average"),
        ("show tiny --devices=2", "--devices=2: goes with --sharding"),
        ("plan tiny --topology=v5e:2x2 --rows=3", "--rows=3: goes with --decode"),
        ("plan tiny --topology=v5e:2x2 --search --length=64", "--length=64: goes with --decode"),
        ("plan tiny --topology=v5e:2x2 --search --decode", "not allowed with argument"),
    ],
)
def test_options_that_do_not_go_together_get_one_line(argv, said, workplace, capsys):
    code, _, err = run(capsys, *argv.split())
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_bucket_without_its_package_gets_one_line(capsys, monkeypatch):
    def read(argv):
        raise ImportError(said)  # as fsspec does

    said = "Please install gcsfs to access Google Storage"
    monkeypatch.setattr(cli.runs, "evaluate", read)
    code, _, err = run(capsys, "evaluate", "gs://bucket/runs/tiny-1")
    assert code == 2 and err == f"jaxformer: {said}: gs:// needs `{install_command('gcs')}`\n"


@pytest.mark.parametrize("value", ["0", "-5", "x"])
@pytest.mark.parametrize(
    "command",
    [
        "cost tiny --length",
        "show tiny --sharding --devices",
        "plan tiny --decode --rows",
        "harness tiny --tasks=a --limit",
    ],
)
def test_what_counts_something_is_at_least_1(command, value, workplace, capsys):
    code, _, err = run(capsys, *f"{command}={value}".split())
    assert (
        code == 2 and f"{value}: expected a whole number from 1 to " in err and err.count("\n") == 1
    )


@pytest.mark.parametrize("target", ["runs", "text.txt/page.html"])
@pytest.mark.parametrize(
    "command",
    [
        "report tiny --out",
        "draw tiny --out",
        "inspect tiny --prompt=a --html",
        "generate tiny --prompts=p --out",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    command, target, trained, capsys
):
    code, _, err = run(capsys, *f"{command}={target}".split())
    assert code == 2 and f"{target}: a folder, or in a file" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", re.findall(r"^    (\w+)", cli.__doc__, re.MULTILINE))
def test_the_page_of_commands_has_every_option(command, workplace, capsys, monkeypatch):
    parsers = []

    def stop(parser, argv=None):
        parsers.append(parser)
        raise SystemExit

    for method in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(Parser, method, stop)
    cli.main([command])
    about = "".join(
        re.findall(rf"^    {command} .*?(?=^    \w|^\w)", cli.__doc__, re.MULTILINE | re.DOTALL)
    )
    found = {
        option
        for parser in parsers
        for action in parser._actions
        for option in action.option_strings
    }
    # of every command
    assert found - set(re.findall(r"--[a-z0-9-]+", about)) <= {
        "-h",
        "--help",
        "--runs",
        "--trust",
    }
    assert parsers or command in ("list", "env")


def test_an_unwritable_run_folder_gets_one_line(workplace, capsys):
    (workplace / "taken").write_text("a file where a folder should go")
    code, _, err = run(capsys, "train", "tiny", "--runs=taken")
    assert code == 2 and "taken" in err and err.count("\n") == 1
    assert (workplace / "taken").read_text() == "a file where a folder should go"


@pytest.mark.thorough
def test_changed_data_is_refused_on_resume(trained, capsys):
    (trained / "text.txt").write_text(TEXT.replace("fox", "cat"))
    code, _, err = run(capsys, "train", "tiny")
    assert code == 2 and "data changed" in err and err.count("\n") == 1


def test_two_trainers_do_not_share_a_run(workplace, capsys):
    from jaxformer import config
    from jaxformer.runs.checkpoint import Manager
    from jaxformer.runs.run_folder import run_folder

    with Manager(run_folder(config.load("tiny"), "runs").checkpoints):
        code, _, err = run(capsys, "train", "tiny")
    assert code == 2 and f"pid {os.getpid()}" in err and err.count("\n") == 1


@pytest.mark.thorough
def test_numbers_that_stay_bad_end_the_run_with_code_3(workplace, capsys):
    code, _, err = run(
        capsys,
        "train",
        "tiny",
        "--steps=40",
        "--optimizer.learning-rate=1e38",
        "--clip-norm=1e30",
        "--max-skipped=3",
    )
    assert code == 3 and "not finite for 3 steps" in err


@pytest.mark.thorough
def test_a_logger_that_fails_does_not_stop_the_run(workplace, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, out, _ = run(capsys, "train", "tiny", "--loggers", "('wandb', 'tensorboard')")
    assert code == 0 and "validation loss" in out
    (folder,) = (workplace / "runs").glob("tiny-*")
    assert list((folder / "tensorboard").iterdir())


def test_help_lists_the_options_of_the_chosen_optimizer(workplace, capsys):
    code, out, _ = run(capsys, "train", "tiny", "--help")
    assert code == 0 and "--optimizer.weight-decay" in out


def train(folder, *options, **kwargs):
    command = [sys.executable, "-m", "jaxformer", "train", "tiny", *options]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs
    )


def leaves(folder):
    """The final parameters and the record, as bytes and text."""
    import jax

    from jaxformer.runs.run import open_run

    (path,) = (folder / "runs").glob("tiny-*")
    run = open_run(path)
    return [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.params)
    ], run.folder.metrics.read_text()


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


@pytest.mark.thorough
def test_sigterm_saves_and_the_next_start_goes_on(workplace):
    import signal

    process = train(workplace, "--steps=2000", "--log-every=1")
    wait_for(process, "step   20/2000")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 143 and "SIGTERM" in rest and "Traceback" not in rest
    (folder,) = (workplace / "runs").glob("tiny-*")
    saved = max(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal())
    logged = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(logged) == saved - 1 or max(logged) == saved  # nothing that was done is done again
    process = train(workplace, "--steps=2000", "--log-every=1")
    wait_for(process, f"resuming after step {saved}")
    process.kill()
    process.communicate()


@pytest.mark.fault
def test_killed_five_times_ends_bit_identical(workplace, tmp_path_factory):
    """kill -9 at random moments; then every logged number and every parameter equals an undisturbed
    run's, to the bit."""
    import random
    import time

    options = [
        "--steps=400",
        "--log-every=1",
        "--eval-every=100",
        "--checkpoints.every=20",
        "--model.dropout-rate=0.1",
    ]
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(workplace, undisturbed, dirs_exist_ok=True)
    process = train(undisturbed, *options)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out

    rng, kills = random.Random(0), 0
    while kills < 5:
        process = train(workplace, *options)
        wait_for(process, "/400 loss")
        time.sleep(rng.uniform(0.0, 0.8))
        if process.poll() is None:
            process.kill()
            kills += 1
        process.communicate()
        assert process.returncode in (-9, 0)
        if process.returncode == 0:
            break
    assert kills >= 3
    process = train(workplace, *options)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    ours, theirs = leaves(workplace), leaves(undisturbed)
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]


# Runs and their names

# a model that sees later tokens ends without a sample: nothing is compiled for one
SILENT = ["--model.masks=full()"]


@pytest.mark.thorough
def test_a_name_means_its_newest_run_and_the_others_are_told(workplace, capsys):
    quick = ["--steps=2", "--eval-batches=1", "--log-every=1"]
    assert run(capsys, "train", "tiny", *quick)[0] == 0
    code, out, _ = run(capsys, "train", "tiny", "--optimizer", "Lion(learning_rate=1e-3)", *quick)
    assert code == 0 and "optimizer: AdamW -> Lion" in out  # what is new in a new run
    code, out, err = run(capsys, "evaluate", "tiny")
    assert code == 0 and "is the newest run" in err and "optimizer: AdamW -> Lion" in err
    newest = json.loads(out.splitlines()[-1])["run"]
    # a file need not be called as its experiment is
    (workplace / "experiments" / "other.py").write_text(EXPERIMENT)
    assert json.loads(run(capsys, "evaluate", "other")[1].splitlines()[-1])["run"] == newest
    code, out, _ = run(capsys, "runs")
    assert (
        code == 0
        and len(out.splitlines()) == 2
        and out.splitlines()[-1].startswith(f"{newest}  2/2 steps")
    )
    older = out.split()[0]
    code, out, _ = run(capsys, "compare", older, newest)
    assert (
        code == 0
        and "optimizer.learning_rate: 0.001 -> " not in out
        and "optimizer: AdamW -> Lion" in out
    )
    for argv, said in (
        (["evaluate", "runs/nope"], "no run folder"),
        (["compare", older], "usage"),
        (["train", "vit_base"], "vit_base is a preset"),
        (["train", "tiny", "--lr=1"], "did you mean --optimizer.learning-rate"),
        (["show", "gpt2_smal"], "did you mean gpt2_small"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and said in err and err.count("\n") == 1, (argv, err)


@pytest.mark.thorough
def test_more_steps_of_a_finished_run_are_a_new_one_which_may_begin_with_its_parameters(
    workplace, capsys
):
    quick = ["--eval-batches=1", "--log-every=1", *SILENT]
    assert run(capsys, "train", "tiny", "--steps=2", *quick)[0] == 0
    (folder,) = (workplace / "runs").glob("tiny-*")
    code, out, _ = run(capsys, "train", "tiny", "--steps=4", *quick)
    assert code == 0 and f"a new run: runs/{folder.name} differs in steps: 2 -> 4" in out
    code, _, _ = run(
        capsys,
        "train",
        "tiny",
        "--steps=4",
        f"--initial=runs/{folder.name}",
        "--name=tiny_longer",
        *quick,
    )
    assert code == 0
    first, second = (
        json.loads((path / "metrics.jsonl").read_text().splitlines()[line])["loss"]
        for path, line in ((folder, 0), (next((workplace / "runs").glob("tiny_longer-*")), 0))
    )
    assert second < first


@pytest.mark.thorough
def test_the_commands_that_a_run_prints_are_those_of_a_shell(trained, capsys):
    (trained / "runs").rename(trained / "my runs")
    code, out, _ = run(capsys, "train", "tiny", "--runs=my runs")
    words = shlex.split(out.partition("next: ")[2].partition(";")[0])
    assert (
        code == 0
        and words[:4] == ["python", "-m", "jaxformer", "evaluate"]
        and Path(words[4]).is_dir()
        and len(words) == 5
    )


@pytest.mark.thorough
def test_how_a_run_executes_may_change_and_is_said(workplace, capsys, caplog):
    quick = ["--steps=4", "--eval-batches=1", *SILENT]
    assert run(capsys, "train", "tiny", *quick)[0] == 0
    changed = [
        "--log-every=1",
        "--model.unroll=1",
        "--model.remat=full",
        "--checkpoints.every=1",
        "--eval-every=2",
    ]
    code, out, _ = run(capsys, "train", "tiny", *quick, *changed)
    assert code == 0 and "this run is finished" in out
    assert "changed since the last start: log_every: 2 -> 1" in caplog.text
    assert len(list((workplace / "runs").glob("tiny-*"))) == 1


@pytest.mark.thorough
def test_fine_tuning_of_a_run_trains_factors_beside_frozen_weights(trained, capsys):
    (folder,) = (trained / "runs").glob("tiny-*")
    options = [
        "--adaptation",
        "Lora(rank=2)",
        f"--initial={folder}",
        "--name=tuned",
        "--steps=3",
        "--eval-every=1",
    ]
    code, out, _ = run(
        capsys, "train", "tiny", *options, "--optimizer", "Adam()", "--schedule", "Constant()"
    )
    assert code == 0 and "weights/embedding/tokens: frozen" in out and "kernel/a: Adam" in out
    from jaxformer.runs.run import open_run

    before, after = open_run(folder), open_run(next((trained / "runs").glob("tuned-*")))
    kernels = [run.params["layers"]["attention"] for run in (before, after)]
    np.testing.assert_array_equal(kernels[0]["key"]["kernel"], kernels[1]["key"]["kernel"])
    assert np.abs(kernels[0]["query"]["kernel"] - kernels[1]["query"]["kernel"]).max() > 0
    first = json.loads(after.folder.metrics.read_text().splitlines()[0])["loss"]
    assert first < before.metrics[0]["loss"]
    assert after.generate("the ", tokens=3).startswith("the ")


@pytest.mark.thorough
def test_a_model_that_sees_later_tokens_ends_without_a_sample(workplace, capsys):
    code, out, _ = run(
        capsys, "train", "tiny", "--model.masks", "full()", "--steps=2", "--eval-batches=1"
    )
    assert (
        code == 0
        and "sample:" not in out
        and "next: python -m jaxformer evaluate" in out
        and "generate" not in out
    )


@pytest.mark.thorough
def test_what_the_model_reports_reaches_the_record(workplace, capsys):
    options = [
        "--model.feedforward",
        "Mixture(experts=4, top_k=2, d_ff=8)",
        "--steps=2",
        "--log-every=1",
    ]
    code, out, _ = run(capsys, "train", "tiny", *options, "--eval-batches=1")
    (folder,) = (workplace / "runs").glob("tiny-*")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert code == 0 and "expert_load" in out and records[0]["dropped"] == 0
    assert 2 / 4 * 4 <= records[0]["expert_load"] <= 4


@pytest.mark.slow
def test_a_profile_is_written(workplace, capsys):
    code, out, _ = run(capsys, "train", "tiny", "--steps=20", "--eval-batches=1", "--profile")
    (folder,) = (workplace / "runs").glob("tiny-*")
    assert code == 0 and list((folder / "profile").rglob("*.pb"))
    _, _, table = out.partition("profile of steps 10 to 15")
    for part in ("attention", "feed-forward", "norms", "head and loss", "optimizer", "the step"):
        assert f"\n{part} " in table


@pytest.mark.thorough
def test_a_name_is_the_experiment_and_a_preset_of_that_name_has_a_prefix(workplace, capsys):
    from jaxformer.zoo import PRESETS

    (workplace / "experiments" / "llama_7b.py").write_text(EXPERIMENT.replace("tiny", "llama_7b"))
    assert (
        json.loads(run(capsys, "show", "llama_7b")[1].partition("\n}")[0] + "}")["name"]
        == "llama_7b"
    )
    for name in ("llama_7b", "gpt2_medium"):
        described = json.loads(run(capsys, "show", f"preset:{name}")[1].partition("\n}")[0] + "}")
        assert "data" not in described and described["d_model"] == PRESETS[name].d_model
    assert run(capsys, "show", "gpt2_medium") == run(capsys, "show", "preset:gpt2_medium")
    code, _, err = run(capsys, "train", "preset:llama_7b")
    assert code == 2 and "llama_7b is a preset" in err


def test_list_and_version(workplace, capsys):
    from jaxformer import __version__

    code, out, _ = run(capsys, "list")
    assert code == 0 and "  tiny " in out and "quickstart" in out and "llama_7b" in out
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_a_page_of_a_file_elsewhere_stays_in_figures(workplace, capsys, monkeypatch):
    monkeypatch.setattr("jaxformer.tools.analysis.gallery.model_pictures", lambda model, name: {})
    (workplace / "below").mkdir()
    shutil.copy(workplace / "experiments" / "tiny.py", workplace / "mine.py")
    monkeypatch.chdir(workplace / "below")
    assert run(capsys, "draw", "../mine.py")[0] == 0
    assert (workplace / "below" / "figures" / "mine.html").is_file()


@pytest.mark.parametrize("length", ["99999999999", "16777217", "9" * 5000])
def test_a_text_longer_than_its_distances_fit_is_refused_at_once(length, workplace, capsys):
    code, _, error = run(capsys, "cost", "tiny", "--length", length)
    assert code == 2
    assert "length" in error
    assert len(error) < 400


@pytest.mark.parametrize("text, form", [("NF4", NF4()), ("Int4(32)", Int4(32)), (None, None)])
def test_stored_weights_are_named_by_a_form(text, form):
    assert runs.form_of(text) == form


@pytest.mark.parametrize("text", ["int3", "3", "NF4(7)", "open"])
def test_stored_weights_of_no_form_are_refused(text):
    with pytest.raises(ConfigError):
        runs.form_of(text)


@pytest.mark.parametrize(
    "words", [["export", "e-1", ""], ["runs", "--runs="], ["report", "e-1", "--out="]]
)
def test_an_empty_name_is_not_the_current_folder(words, tmp_path, monkeypatch, capsys):
    """`make export EXP=e-1` without TO hands on an empty text."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "an empty name; expected a file or folder" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())
