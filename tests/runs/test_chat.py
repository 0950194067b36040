"""A run that learns from conversations, from the command to a talk with it."""

import io
import json
import shutil
import sys

import pytest

from jaxformer import cli
from jaxformer.decoding import Sampling
from jaxformer.errors import ConfigError
from jaxformer.runs.run import open_run
from tests.tiny import furnish

EXPERIMENT = """
from jaxformer.data.chat import Chat
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.training import AdamW, Checkpoints, Constant, Experiment, Sample
experiment = Experiment(
    name="tiny",
    model=ModelConfig(
        vocab_size=256, num_layers=1, d_model=32, num_heads=2, context_length=64, positions=Rope()
    ),
    data=Chat("talks.jsonl", "talks.jsonl", template="chatml"),
    optimizer=AdamW(1e-2, weight_decay=0.0), schedule=Constant(warmup=5),
    steps=150, batch_size=8, log_every=50, eval_every=75,
    checkpoints=Checkpoints(every=75), sample=Sample(tokens=8),
    metrics=(Generated((exact_match,), max_tokens=8),),
)
"""
ANSWERS = {"one": "1", "two": "2", "six": "6"}


PREFERENCES = """
from dataclasses import replace
from experiments.tiny import experiment as sft
from jaxformer.data.preferences import Preferences
from jaxformer.models.adaptation import Lora
from jaxformer.objectives import DPO, Preference
from jaxformer.training import AdamW, Base, Checkpoints
experiment = replace(
    sft, name="dpo", initial="tiny", references={"reference": "tiny"}, metrics=(),
    data=Preferences("pairs.jsonl", "pairs.jsonl", template="chatml"),
    objective=Preference(DPO(beta=0.5)), optimizer=AdamW(2e-3, weight_decay=0.0),
    steps=20, eval_every=10, checkpoints=Checkpoints(every=5, keep_latest=9),
)
"""
LORA = """
from dataclasses import replace
from experiments.dpo import experiment as dpo
from jaxformer.models.adaptation import Lora
from jaxformer.training import Base
experiment = replace(
    dpo, name="lora", adaptation=Lora(rank=4), references={"reference": Base()}
)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learned three answers."""
    folder = furnish(tmp_path_factory.mktemp("chat"), EXPERIMENT)
    talks = (
        [{"role": "user", "content": word}, {"role": "assistant", "content": number}]
        for word, number in ANSWERS.items()
    )
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (folder / "talks.jsonl").write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "tiny"]) == 0
        (path,) = (folder / "runs").iterdir()
        yield folder, path


@pytest.mark.thorough
def test_it_answers_and_stops_by_itself(trained):
    _, path = trained
    result = json.loads((path / "result.json").read_text())
    assert result["validation"]["exact_match"] == 100
    run = open_run(path)
    for word, number in ANSWERS.items():
        message = {"role": "user", "content": word}
        pieces = list(run.chat([message], sampling=Sampling(temperature=0.0)))
        assert "".join(pieces) == number
        assert (
            run.generate(word, sampling=Sampling(temperature=0.0)) == number
        )  # a prompt is a user's message
    with pytest.raises(ConfigError, match="messages: expected a list"):
        list(run.chat([]))


@pytest.mark.thorough
def test_a_talk_on_the_command_line(trained, capsys, monkeypatch):
    folder, path = trained
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\n\nsix\n/end\none\n"))
    assert cli.main(["generate", str(path), "--chat", "--temperature=0"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "2" and len(rest) == 1  # the second message follows a talk, which is new to it
    for options in (["--prompt=x"], ["--prompts=x", "--out=y"]):
        with pytest.raises(ConfigError, match="give --prompt TEXT, --chat, or"):
            cli.runs.generate([str(path), "--chat", *options])
    with pytest.raises(ConfigError, match="--system=x: goes with --chat"):
        cli.runs.generate([str(path), "--prompt=x", "--system=x"])
    with pytest.raises(ConfigError, match="--special-tokens: goes with --prompt"):
        cli.runs.generate([str(path), "--chat", "--special-tokens"])
    with pytest.raises(ConfigError, match="beam search gives no pieces"):
        cli.runs.generate([str(path), "--chat", "--beams=2"])


def result_of(folder, name):
    (path,) = folder.glob(f"runs/{name}-*")
    return path, json.loads((path / "result.json").read_text())["validation"]


@pytest.mark.thorough
@pytest.mark.parametrize("name, text", [("dpo", PREFERENCES), ("lora", LORA)])
def test_preferences_after_conversations(name, text, trained, monkeypatch):
    """It learns what is preferred, on 8 devices as on one, and resumes with the same bits."""
    folder, _ = trained
    monkeypatch.chdir(folder)
    for file, content in (("dpo", PREFERENCES), (name, text)):
        (folder / "experiments" / f"{file}.py").write_text(content)
    rows = (
        dict(prompt=word, chosen=f"{number}!", rejected=number) for word, number in ANSWERS.items()
    )
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["train", name]) == 0
    path, first = result_of(folder, name)
    record = (path / "metrics.jsonl").read_text()
    assert first["preferred"] == 1 and first["unit"] == "pairs" and "perplexity" not in first
    assert first["chosen_reward"] > first["rejected_reward"]
    for step in ("15", "20"):
        shutil.rmtree(path / "checkpoints" / step)
    assert cli.main(["train", name]) == 0
    assert (path / "metrics.jsonl").read_text() == record and result_of(folder, name)[1] == first
    assert cli.main(["train", name, "--mesh.fsdp=8", f"--name={name}-split"]) == 0
    _, split = result_of(folder, f"{name}-split")
    # 20 steps of Adam in float32, whose sums are in another order
    assert abs(split["margin"] - first["margin"]) < 1e-2 * abs(first["margin"])
