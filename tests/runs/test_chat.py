"""A run that learns from conversations, from the command to a talk with it."""

import io
import json
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
