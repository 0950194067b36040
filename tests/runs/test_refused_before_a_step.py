"""What is refused, or asked, before the first step: axes, ranks, questions; what a run says of its
checkpoints."""

import json
from dataclasses import replace
from typing import NamedTuple

import jax
import pytest
from etils import epath
from hypothesis import given, strategies as st

from jaxformer import models, sharding
from jaxformer.data.sources import Dataset, Question
from jaxformer.data.tasks import Copy
from jaxformer.data.tokenizers import Characters
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.layer import Mixer, MixerOutput
from jaxformer.params import Spec
from jaxformer.runs import checkpoint, checkpoint_reader, checks, loop
from jaxformer.runs.questions import ask, sample_text
from jaxformer.runs.run_folder import RunFolder, run_folder
from jaxformer.training import Checkpoints, Experiment, Sample
from jaxformer.training.recipe import build
from jaxformer.zoo import PRESETS

MODEL = ModelConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, context_length=8)
TINY = Experiment(
    name="tiny",
    model=MODEL,
    data=Copy(vocab_size=8, length=4, examples=16, validation_examples=4),
    steps=2,
    batch_size=4,
    eval_every=1,
    checkpoints=Checkpoints(every=1),
)


def never(*_, **__):
    raise AssertionError("a step was made")


# ---- precision


class Device(NamedTuple):
    """What `check_precision` reads of a device."""

    platform: str
    device_kind: str
    compute_capability: str | None = None


A100, L4, H200 = (
    Device("gpu", f"NVIDIA {name}", capability)
    for name, capability in (("A100", "8.0"), ("L4", "8.9"), ("H200", "9.0"))
)
V5E, IRONWOOD = Device("tpu", "TPU v5 lite"), Device("tpu", "TPU7x")


@pytest.mark.parametrize("device", [A100, V5E, Device("gpu", "another")], ids=str)
def test_a_chip_without_products_of_eight_bits_is_refused(device):
    with pytest.raises(ConfigError, match=f"precision=float8: {device.device_kind} has no"):
        checks.check_precision("float8", device)
    checks.check_precision("bfloat16", device)


@pytest.mark.parametrize("device", [L4, H200, IRONWOOD, Device("cpu", "cpu")], ids=str)
def test_a_chip_with_products_of_eight_bits_trains(device):
    checks.check_precision("float8", device)


# ---- axes


def mixer_of(*axes):
    """A mixer whose only matrix has these axes."""

    def mixer(config):
        spec = {
            "kernel": Spec((config.d_model,) * 2, axes, jax.nn.initializers.normal(0.1), ("embed",))
        }
        return Mixer(spec, lambda params, x, context: MixerOutput(x @ params["kernel"]))

    return mixer


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 8, "data": 1}], ids=["one", "fsdp"])
def test_an_axis_that_no_rule_knows_is_refused_by_name(tmp_path, monkeypatch, mesh):
    monkeypatch.setattr(loop, "loop", never)
    wrong = replace(TINY, model=replace(MODEL, mixer=mixer_of("emb", None)), batch_size=8)
    wrong = replace(wrong, mesh=replace(wrong.mesh, **mesh)) if mesh else wrong
    with pytest.raises(ConfigError) as raised:
        loop.train(wrong, tmp_path)
    line = str(raised.value)
    assert line.startswith(
        "parameter layers/attention/kernel: unknown axis 'emb' in its axes ('layers', 'emb', None)"
    )
    assert f"expected one of {', '.join(sharding.AXES)}, or None" in line and line.endswith(
        "; did you mean embed?"
    )
    assert not list(tmp_path.iterdir())


def test_a_run_that_began_with_such_an_axis_goes_on(tmp_path, caplog):
    """Its file cannot be another one: the axis stands in the text that names the run."""
    spec = models.spec(replace(MODEL, mixer=mixer_of("emb", None)))
    folder = RunFolder(epath.Path(tmp_path))
    with pytest.raises(ConfigError, match="unknown axis 'emb'"):
        checks.check_axes(spec, folder)
    folder.write(folder.config, "{}")
    checks.check_axes(spec, folder)
    assert "unknown axis 'emb'" in caplog.text


@given(
    st.lists(st.sampled_from([*sharding.AXES, None]), max_size=4),
    st.text("abcdefgh_", min_size=1, max_size=9),
)
def test_every_name_of_the_tables_is_known_and_no_other_is(axes, other):
    def tree(*axes):
        return {"layers": {"kernel": Spec((1,) * len(axes), axes, jax.nn.initializers.zeros)}}

    assert sharding.unknown_axis(tree(*axes)) is None
    if other not in sharding.AXES:
        assert f"layers/kernel: unknown axis {other!r}" in sharding.unknown_axis(tree(*axes, other))


@pytest.mark.thorough
def test_every_axis_of_a_preset_is_known():
    for name, model in PRESETS.items():
        assert sharding.unknown_axis(models.spec(model)) is None, name
    assert sharding.PARAMETERS.keys() | sharding.ACTIVATIONS.keys() <= set(sharding.AXES)


# ---- ranks


class Score:
    """A metric."""

    def __init__(self, name, only_final=False, check=None):
        self.name, self.only_final = name, only_final
        if check is not None:
            self.check = lambda model, dataset: check

    def __call__(self, evaluation):
        return {self.name: 1.0}


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("best", "metrics", "said"),
    [
        ("los", (), "an evaluation here gives loss, perplexity, bits, accuracy"),
        ("-mien", (Score("mine"),), "an evaluation here gives loss"),
        (
            "late",
            (Score("late", only_final=True),),
            "Score scores at the end alone, unless only_final=False",
        ),
        (
            "late",
            (Score("mine"), Score("late", only_final=True)),
            "Score scores at the end alone, unless only_final=False",
        ),
        (
            "late",
            (Score("late", only_final=True, check=["late"]),),
            "Score scores at the end alone, unless only_final=False",
        ),
        (
            "mine",
            (Score("mine", check=["other"]),),
            "an evaluation here gives loss, perplexity, bits, accuracy, other",
        ),
    ],
)
def test_a_rank_that_no_evaluation_makes_is_refused(tmp_path, monkeypatch, best, metrics, said):
    monkeypatch.setattr(loop, "loop", never)
    with pytest.raises(ConfigError) as raised:
        loop.train(replace(TINY, metrics=metrics, checkpoints=Checkpoints(best=best)), tmp_path)
    assert said in str(raised.value) and f"checkpoints.best={best!r}" in str(raised.value)


@pytest.mark.thorough
def test_a_run_says_by_which_score_it_ranks_its_checkpoints(tmp_path, capsys):
    ranked = replace(
        TINY,
        metrics=(Score("mine"),),
        checkpoints=Checkpoints(every=1, keep_latest=3, best="-mine"),
    )
    folder = loop.train(ranked, tmp_path).folder
    said = capsys.readouterr().out
    assert (
        "checkpoints: every 1 steps, of which the last 3 are kept, and the 1 of highest mine\n"
        in said
    )
    for step in checkpoint.steps(folder / "checkpoints"):
        found = checkpoint_reader.read_manifest(folder / "checkpoints" / str(step))
        assert found["score"].startswith("-mine of 4 examples") and found["metric"] == -1.0


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        (Checkpoints(), "every 500 steps, of which the last 2 are kept, and the 1 of lowest loss"),
        (
            Checkpoints(best="-bleu", keep_best=3),
            "every 500 steps, of which the last 2 are kept, and the 3 of highest bleu",
        ),
        (Checkpoints(keep_best=0), "every 500 steps, of which the last 2 are kept"),
    ],
)
def test_what_is_kept_in_words(saves, said):
    assert checks.kept_in_words(saves) == said


# ---- questions


class Asked:
    """Data that make questions of texts, and fail on an empty one, as a user's may."""

    def __init__(self, questions=()):
        self.questions, self.texts = questions, []

    def open(self, model):
        dataset = TINY.data.open(model)
        validation = Split(dataset.validation, self.questions)
        return Dataset(
            dataset.train,
            validation,
            dataset.digest,
            vocab_size=9,
            tokenizer=Characters("0123456|"),
        )

    def question(self, model, tokenizer, text):
        assert text, "asked of an empty text"
        self.texts.append(text)
        return Question(tokenizer.encode(text), "", None)


class Split:
    """Examples with questions."""

    def __init__(self, examples, questions):
        self.examples = examples
        if questions is not None:
            self.questions = questions

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


FIRST = Question([1, 2, 3], "123")


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("questions", [(), None, (FIRST,)], ids=["empty", "none", "one"])
@pytest.mark.parametrize("prompt", [None, "12"])
def test_no_question_is_asked_of_an_empty_text(tmp_path, questions, prompt):
    data = Asked(questions)
    experiment = replace(TINY, data=data, sample=Sample(prompt=prompt, tokens=2))
    dataset = data.open(MODEL)
    folder = run_folder(experiment, tmp_path)
    checks.check(experiment, build(experiment), None, folder)
    samples = prompt is not None or bool(questions)
    assert checks.can_sample(experiment, dataset) == samples
    if samples:
        text = sample_text(experiment, models.init(MODEL, jax.random.key(0)), dataset)
        assert (
            text.endswith("(the answer in the data: 123)")
            if prompt is None
            else text.startswith("12")
        )
    assert set(data.texts) == ({"12"} if prompt else set())


@pytest.mark.parametrize("data", [Asked(), TINY.data], ids=["question", "text"])
def test_an_empty_prompt_is_refused(data):
    tokenizer = Characters("0123456|")
    with pytest.raises(ConfigError, match=r"sample\.prompt is empty; give at least one character"):
        ask(replace(TINY, data=data), Sample(prompt=""), tokenizer)


def test_a_first_question_that_leaves_no_room_is_refused_before_a_step(tmp_path):
    long = Asked((Question([0] * 8, ""),))
    experiment = replace(TINY, data=long)
    with pytest.raises(
        ConfigError, match=r"sample\.prompt is 8 tokens, no room in 8 learned positions"
    ):
        checks.check(experiment, build(experiment), None, run_folder(experiment, tmp_path))


# ---- the folder of a metric


@pytest.mark.thorough
def test_a_metric_knows_the_runs_folder_and_the_step(tmp_path):
    seen = []

    def mine(evaluation):
        seen.append((evaluation.folder, evaluation.step))
        if evaluation.folder is not None:
            (evaluation.folder / f"{evaluation.step}.txt").write_text("a picture")
        return {"mine": float(evaluation.step)}

    experiment = replace(TINY, metrics=(mine,), checkpoints=Checkpoints(every=1, best="-mine"))
    result = loop.train(experiment, tmp_path)
    # the first call only asks for the names of its scores
    assert seen == [(None, 0), (result.folder, 1), (result.folder, 2)]
    assert {path.name for path in result.folder.glob("*.txt")} == {"1.txt", "2.txt"}
    again = loop.train(experiment, tmp_path)  # it is finished, and scored
    assert seen[3:] == [(result.folder, 2)] and again.validation == result.validation
    written = json.loads((result.folder / "result.json").read_text())["validation"]
    assert written["mine"] == 2.0
