"""A run of pairs: trained, scored by its own answers, asked from the command line; checkpoints
ranked and averaged."""

import json
import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
import pytest

from jaxformer import cli, config, models
from jaxformer.data.tasks import Reverse
from jaxformer.decoding import Beams
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import answers
from jaxformer.runs import loop
from jaxformer.runs.names import NAMES
from jaxformer.runs.run import open_run
from jaxformer.training import Checkpoints, Sample

FILE = """
from dataclasses import replace
from jaxformer import masks, models
from jaxformer.data.pairs import Pairs
from jaxformer.decoding import Beams
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import bleu, exact_match
from jaxformer.training import Adam, Checkpoints, Cosine, Experiment, Sample

decoder = models.ModelConfig(256, 1, 32, 2, context_length=16, feedforward="relu", norm="rms_norm")
experiment = Experiment(
    name="spell",
    model=models.EncoderDecoder(replace(decoder, heads=(), masks=(masks.full(),)), decoder),
    data=Pairs("{folder}/train", "{folder}/val", "d", "c", tokenizer="bytes", vocab_size=None),
    optimizer=Adam(5e-3),  # right on each of four seeds; at twice that rate, on one
    schedule=Cosine(),
    steps=150,
    batch_size=16,
    eval_every=50,
    metrics=(Generated((exact_match, bleu), Beams(2), max_tokens=8, only_final=False),),
    checkpoints=Checkpoints(every=50, keep_latest=2, best="-exact_match"),
    sample=Sample(tokens=8, sampling=Beams(2)),
)
"""


@pytest.fixture
def source(tmp_path):
    """The experiment above, on digits and the same digits as capital letters."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 200), ("val", 6)):
        texts = ["".join(map(str, row)) for row in rng.integers(0, 3, (count, 3))]
        (tmp_path / f"{name}.d").write_text("\n".join(texts))
        (tmp_path / f"{name}.c").write_text(
            "\n".join(text.translate({48: "A", 49: "B", 50: "C"}) for text in texts)
        )
    (tmp_path / "spell.py").write_text(FILE.replace("{folder}", str(tmp_path)))
    return config.read(str(tmp_path / "spell.py"))


@pytest.mark.thorough
def test_a_run_of_pairs_is_scored_and_asked(source, tmp_path, capsys):
    result = loop.train(source.experiment, tmp_path / "runs", source)
    assert (
        result.validation["exact_match"] > 90 and "tok:13a" in result.validation["bleu_signature"]
    )
    assert "the answer in the data" in result.sample
    records = [
        record
        for record in map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    ]
    curve = [
        record["validation_exact_match"] for record in records if "validation_exact_match" in record
    ]
    assert len(curve) == 3 and not any("validation_bleu_signature" in record for record in records)
    assert (
        json.loads((result.folder / "result.json").read_text())["validation"]["bleu"]
        == result.validation["bleu"]
    )
    kept = {
        int(path.name)
        for path in (result.folder / "checkpoints").iterdir()
        if path.name.isdecimal()
    }
    assert kept == {100, 150, 50 * (1 + int(np.argmax(curve)))}

    run = open_run(result.folder)
    assert run.evaluate()["exact_match"] == result.validation["exact_match"]
    assert run.generate("012") == "ABC" and run.continue_all(["210", "011"]) == [["CBA"], ["ABB"]]
    assert len(run.continue_all(["012"], sampling=Beams(3, n_best=3))[0]) == 3
    assert "".join(run.stream("012", sampling=replace(Sample().sampling, temperature=0.0))) == "ABC"
    with pytest.raises(ConfigError, match="empty"):
        run.generate("")

    capsys.readouterr()
    assert cli.main(["generate", str(result.folder), "--prompt", "012"]) == 0
    assert capsys.readouterr().out == "ABC\n"
    assert cli.main(["evaluate", str(result.folder), "--average", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 150 and "exact_match" in printed and "bleu_signature" in printed
    assert cli.main(["evaluate", str(result.folder), "--average", "9"]) == 2


@pytest.mark.thorough
def test_the_mean_of_checkpoints_is_the_mean_of_their_parameters(source, tmp_path):
    overrides = ("--steps=30", "--metrics=()", "--checkpoints=Checkpoints(10, 3)")
    experiment = config.override(source.experiment, overrides, NAMES)
    folder = loop.train(experiment, tmp_path / "runs", replace(source, overrides=overrides)).folder
    mean = open_run(folder, average=2).params
    parts = [open_run(folder, step).params for step in (20, 30)]
    jax.tree.map(
        lambda a, *others: np.testing.assert_allclose(
            a, np.mean(others, axis=0), rtol=1e-6, atol=1e-7
        ),
        mean,
        *parts,
    )
    with pytest.raises(
        ConfigError, match="it takes 10, 20, 30 and more than there were; kept are 10, 20, 30"
    ):
        _ = open_run(folder, average=4).params


@pytest.mark.thorough
def test_answers_do_not_depend_on_their_order(source):
    model, dataset = source.experiment.model, source.experiment.data.open(source.experiment.model)
    params, found = models.init(model, jax.random.key(0)), dataset.validation.questions
    questions = [
        question._replace(source=question.source[:-1] * (1 + i % 3) + [255])
        for i, question in enumerate(found)
    ]
    ask = partial(
        answers,
        model,
        params,
        tokenizer=dataset.tokenizer,
        max_tokens=5,
        how=Beams(2),
        stop_tokens=(255,),
    )
    assert (
        ask(questions)
        == ask(questions[::-1])[::-1]
        == [ask([question])[0] for question in questions]
    )


@pytest.mark.thorough
def test_a_score_that_there_is_not_ranks_no_checkpoint(source, tmp_path):
    experiment = replace(source.experiment, steps=1, checkpoints=Checkpoints(20, best="-chrf"))
    with pytest.raises(
        ConfigError, match=re.escape("checkpoints.best='-chrf': an evaluation here gives loss")
    ):
        loop.train(experiment, tmp_path / "runs")


def test_generated_needs_questions(source, tmp_path):
    model = replace(source.experiment.model.decoder, vocab_size=17)
    with pytest.raises(ConfigError, match="validation split with `questions`"):
        loop.train(
            replace(source.experiment, model=model, data=Reverse(), steps=1), tmp_path / "runs"
        )


@pytest.mark.thorough
def test_a_metric_of_the_users_own_is_recorded(source, tmp_path):
    norm = lambda scored: {"norm": optax.tree.norm(scored.params)}  # of JAX
    changes = dict(steps=1, metrics=(norm,), checkpoints=Checkpoints(20, best="norm"))
    assert (
        loop.train(replace(source.experiment, **changes), tmp_path / "runs").validation["norm"] > 0
    )
