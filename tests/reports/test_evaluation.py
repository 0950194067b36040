"""Evaluation, tried against what users of transformers, Lightning, nanoGPT, MaxText and others
reported."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxformer import models, parallel, params
from jaxformer.data import batching, sources, tokenizers
from jaxformer.data.tasks import Reverse
from jaxformer.decoding import prepare
from jaxformer.errors import ConfigError
from jaxformer.evaluation import harness
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.perplexity import (
    StridedPerplexity,
    count_bytes,
    equal_texts,
    perplexity,
    strided_batches,
)
from jaxformer.evaluation.text_metrics import bleu
from jaxformer.masks import full
from jaxformer.models import ModelConfig
from jaxformer.ops.losses import LossSums
from jaxformer.parallel import Mesh
from jaxformer.runs import checkpoint, checks, loop
from jaxformer.runs.comparison import incomparable
from jaxformer.runs.goodput import Goodput
from jaxformer.runs.metrics import Record, read_records
from jaxformer.runs.reporter import Console
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.scores import evaluator, examples_scored, new_names
from jaxformer.training import Checkpoints, Experiment, MaskedTokens
from jaxformer.training.recipe import build, in_micro_batches
from jaxformer.training.step import TrainState

MODEL = ModelConfig(vocab_size=12, num_layers=1, d_model=8, num_heads=1, context_length=8)
DATA = Reverse(vocab_size=11, length=4, examples=64, validation_examples=23)
TINY = Experiment(name="tiny", model=MODEL, data=DATA, steps=12, batch_size=4)


def weights(experiment):
    """Parameters far from uniform predictions, without a program that draws them."""
    rng = np.random.default_rng(0)
    shapes = params.abstract(models.spec(experiment.model))
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), jnp.float32), shapes
    )


def scores(experiment, **options):
    dataset = batching.open_dataset(experiment.data, experiment.model)
    return evaluator(experiment, build(experiment), dataset)(weights(experiment), **options)


def wreck(experiment):
    """A rate that ruins the model after three steps."""
    return lambda step: jnp.where(step < 3, 1e-2, 10.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose best evaluation is the first, between two saves, and which scores a part of its
    split."""
    checkpoints = Checkpoints(every=5, keep_latest=1, keep_best=1)
    experiment = replace(
        TINY,
        schedule=wreck,
        eval_every=3,
        eval_examples=8,
        checkpoints=checkpoints,
        log_every=4,
        max_skipped=20,
    )
    return loop.train(experiment, tmp_path_factory.mktemp("runs"))


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#12786",
    "huggingface/transformers#39560",
    "huggingface/transformers#28539",
    right="the best evaluation is kept, wherever the saves fall",
    listed="second 10",
    hit="evaluations every 30 steps and saves every 50 kept the last step alone",
)
def test_the_best_is_kept_between_two_saves(run):
    records = read_records(run.folder / "metrics.jsonl")
    losses = {
        record["step"]: record["validation_loss"]
        for record in records
        if "validation_loss" in record
    }
    assert min(losses, key=losses.get) == 3 and list(losses) == [3, 6, 9, 12]
    assert checkpoint.steps(run.folder / "checkpoints") == [3, 10, 12]


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#24839",
    right="a run's score is of the whole split, and a part is named",
    hit=(
        "with eval_batches, runs of batch 8 and 16 were scored on other text: a third of what "
        "`compare` showed"
    ),
)
def test_what_was_scored_stands_beside_the_score(run):
    result = json.loads((run.folder / "result.json").read_text())["validation"]
    assert result["examples"] == 23 and result["scored"] == "all 23 examples"
    records = [
        line for line in read_records(run.folder / "metrics.jsonl") if "validation_loss" in line
    ]
    # the last one, too: a curve is of one text
    assert {line["validation_examples"] for line in records} == {8}
    assert records[-1]["validation_loss"] != pytest.approx(result["loss"], rel=1e-6)


@pytest.mark.report(
    "huggingface/transformers#24839", right="the same examples are scored whatever the batch size",
    hit="eval_batches=n scored batch_size * n examples",
)  # fmt: skip
@pytest.mark.thorough
@pytest.mark.parametrize("count", [10, None])
def test_the_score_does_not_depend_on_the_batch_size(count):
    found = [scores(replace(TINY, batch_size=size, eval_examples=count)) for size in (4, 16)]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert found[0]["examples"] == found[1]["examples"] == (count or 23)


@pytest.mark.report(
    "huggingface/transformers#24839",
    right="scores of other text are marked where runs stand side by side",
    hit="`compare`, `report` and sweeps showed both numbers without a word",
)
def test_scores_of_other_text_are_marked(tmp_path):
    def folder(name, scored, digest="a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(
            json.dumps({"validation": {"loss": 1.0, **scored}})
        )
        (tmp_path / name / "environment.json").write_text(json.dumps({"data_digest": digest}))
        return RunFolder(epath.Path(tmp_path / name))

    whole = folder("whole", {"tokens": 92, "examples": 23, "scored": "all 23 examples"})
    again = folder("again", {"tokens": 92, "examples": 23, "scored": "all 23 examples"})
    part = folder("part", {"tokens": 32, "examples": 8, "scored": "the first 8 of 23 examples"})
    other = folder("other", {"tokens": 92, "examples": 23, "scored": "all 23 examples"}, digest="b")
    old = folder("old", {"tokens": 92})  # of a version that wrote the tokens alone
    assert incomparable([whole, again]) == incomparable([whole, old]) == ""
    assert "different text" in incomparable([whole, part]) and "the first 8 of 23" in incomparable(
        [whole, part]
    )
    assert "different text" in incomparable([old, part])
    assert "different data" in incomparable([whole, again, other])
    unfinished = RunFolder(epath.Path(tmp_path / "unfinished"))
    unfinished.path.mkdir()
    unfinished.metrics.write_text('{"step": 3, "validation_loss": 1.0, "validation_examples": 8}\n')
    assert "different text" in incomparable([whole, unfinished])


@pytest.mark.report(
    "huggingface/transformers#24839",
    right="the older option counts batches; the end scores everything but what is named",
)
def test_examples_are_counted():
    of = lambda whole, **limits: examples_scored(replace(TINY, **limits), 23, whole)
    assert [of(whole) for whole in (False, True)] == [23, 23]
    assert [of(whole, eval_batches=2) for whole in (False, True)] == [8, 23]
    assert [of(whole, eval_examples=10, final_examples=12) for whole in (False, True)] == [10, 12]
    assert of(False, eval_examples=10, eval_batches=2) == 8 and of(True, final_examples=99) == 23
    with pytest.raises(
        ConfigError, match="final_examples=0: expected a whole number of at least 1"
    ):
        replace(TINY, final_examples=0)


class Late:
    """A metric of the end."""

    only_final = True

    def __call__(self, evaluation):
        return {"late": 1.0}


def mine(evaluation):
    return {"mine": 1.0}


def never(*_):
    raise AssertionError("a step was made")


@pytest.mark.thorough
@pytest.mark.report(
    "keras-team/keras#21109", "Lightning-AI/pytorch-lightning#4797", listed="second 43",
    right="a score that no evaluation makes is refused before the first step",
    hit="the run stopped at its first evaluation",
)  # fmt: skip
@pytest.mark.parametrize(
    ("best", "metrics", "said"),
    [
        ("-late", (Late(),), "Late scores at the end alone, unless only_final=False"),
        ("-acuracy", (), "an evaluation here gives loss, perplexity, bits, accuracy"),
        ("-late", (Late(), StridedPerplexity(4, only_final=False)), None),  # of data without a text
    ],
)
def test_a_rank_that_nothing_makes_is_refused_before_a_step(
    tmp_path, monkeypatch, best, metrics, said
):
    monkeypatch.setattr(loop, "loop", never)
    experiment = replace(TINY, metrics=metrics, checkpoints=Checkpoints(best=best))
    with pytest.raises(ConfigError, match=said or "StridedPerplexity: the data have no text"):
        loop.train(experiment, tmp_path)
    assert not list(tmp_path.iterdir())
    dataset = batching.open_dataset(DATA, MODEL)
    assert checks.check_scores(
        replace(TINY, checkpoints=Checkpoints(best="-accuracy")), build(TINY), dataset
    )


@pytest.mark.thorough
@pytest.mark.report(
    "keras-team/keras#21109",
    listed="second 43",
    right="a metric of the user's is tried once, which shows its names",
)
def test_names_of_a_users_metric_are_known_before_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "loop", never)
    experiment = replace(TINY, metrics=(mine,), checkpoints=Checkpoints(best="-mien"))
    with pytest.raises(ConfigError, match=r"an evaluation here gives .*mine"):
        loop.train(experiment, tmp_path)
    with pytest.raises(AssertionError, match="a step was made"):
        loop.train(replace(experiment, checkpoints=Checkpoints(best="-mine")), tmp_path)


@pytest.mark.report(
    "mikkelfo/CORE-BEHRT#89",
    right="what the metrics of the end would refuse is refused before the first step",
    hit="a missing package, or Japanese references, ended a run after its last step",
)
def test_metrics_of_the_end_are_tried_at_the_beginning():
    class Split:
        questions = (sources.Question([1], "鳥が川の上を飛ぶ。"),)

        def __len__(self):
            return 1

    dataset = sources.Dataset(Split(), Split(), "", tokenizer=tokenizers.Bytes())
    generated = replace(TINY, metrics=(Generated((bleu,)),))
    with pytest.raises(ConfigError, match="script without spaces"):
        checks.check_scores(generated, build(TINY), dataset)
    named = Generated((partial(bleu, tokenize="char"),), only_final=False)
    assert named.check(MODEL, dataset) == ["bleu", "bleu_signature"]
    with pytest.raises(ConfigError, match="`questions`"):
        checks.check_scores(generated, build(TINY), batching.open_dataset(DATA, MODEL))


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#5335", "mosaicml/composer#1417", listed="second 19",
    right="an evaluation takes the memory of a micro-batch", hit="it took that of the whole batch",
)  # fmt: skip
def test_an_evaluation_is_cut_as_a_step_is():
    model = replace(MODEL, context_length=64, d_model=32)
    shapes = {"tokens": jnp.int32, "labels": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((32, 64), dtype) for name, dtype in shapes.items()}
    rng, memory, found = np.random.default_rng(0), [], []
    numbers = {
        name: jnp.asarray(rng.integers(0, 12, (32, 64)), dtype) for name, dtype in shapes.items()
    }
    for accumulation in (1, 8):
        experiment = replace(TINY, model=model, batch_size=32, accumulation=accumulation)
        recipe, trained = build(experiment), weights(experiment)
        compiled = jax.jit(recipe.eval_loss).lower(trained, batch, jax.random.key(0)).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        found.append(compiled(trained, numbers, jax.random.key(0)))
    assert memory[1] < memory[0] / 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#5335",
    listed="second 19",
    right="sums do not depend on how rows are cut",
)
def test_micro_batches_add_up():
    def score(trained, batch, key, step, references):
        return LossSums(
            trained * batch["x"].sum(),
            batch["x"].shape[0] * 1.0,
            {"draw": (jax.random.uniform(key), 1.0)},
        )

    for rows in (8, 6, 1):
        batch = {"x": jnp.arange(1.0, rows + 1)}
        sums = in_micro_batches(score, 4)(2.0, batch, jax.random.key(0))
        assert float(sums.loss) == 2 * sum(range(1, rows + 1)) and float(sums.weight) == rows
    assert in_micro_batches(score, 1) is score


@pytest.mark.thorough
@pytest.mark.report(
    "mosaicml/composer#1417",
    listed="second 19",
    right="under pmap an evaluation is split over the devices, too",
    hit="one device scored the whole batch of all",
)
def test_under_pmap_each_device_scores_its_part():
    seen = []

    def look(evaluation):
        seen.append(next(evaluation.batches())["tokens"].sharding.shard_shape((4, 8)))
        return {}

    experiment = replace(TINY, metrics=(look,), mesh=Mesh(data=4, backend="pmap"))
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size)
    dataset = batching.open_dataset(DATA, MODEL)
    evaluate = checks.evaluate_on(
        mesh, experiment, evaluator(experiment, build(experiment), dataset, mesh)
    )
    assert evaluate(weights(experiment))["loss"] == pytest.approx(scores(TINY)["loss"], rel=1e-5)
    assert seen == [(1, 8)]


@pytest.mark.thorough
@pytest.mark.report(
    "piskvorky/gensim#2735",
    "apache/mxnet#8226",
    listed="first 22",
    right="sums of 10^8 tokens are right to 1e-6",
    hit="20,000 batches of 4,095 tokens were counted as 81,915,896 for 81,900,000",
)
def test_sums_of_many_tokens_are_exact():
    count, tokens = 3_000, 40_950
    means = 3 + 0.5 * np.sin(np.arange(count))
    sums = iter(np.asarray(means * tokens, np.float32))
    score = lambda params, batch, number: LossSums(
        next(sums), np.float32(tokens), {"accuracy": (np.float32(7), np.float32(11))}
    )
    found = perplexity(score, None, ({"x": jnp.zeros(1)} for _ in range(count)))
    assert found["tokens"] == count * tokens and found["accuracy"] == pytest.approx(
        7 / 11, rel=1e-7
    )
    assert found["loss"] == pytest.approx(
        np.float32(means * tokens).astype(np.float64).sum() / (count * tokens), rel=1e-9
    )


@pytest.mark.thorough
@pytest.mark.report(
    "tensorflow/tensorflow#27993",
    "chainer/chainer#1739",
    "dnouri/nolearn#247",
    "macournoyer/neuralconvo#67",
    right="a loss is the sum over all tokens by their number, not a mean of the batches' means",
)
def test_a_small_batch_counts_by_its_tokens():
    batches = [(10.0, 5.0), (9.0, 3.0), (4.0, 1.0)]
    sums = iter(LossSums(loss, weight, {}) for loss, weight in batches)
    found = perplexity(lambda *_: next(sums), None, [{"x": np.zeros(1)}] * 3)
    assert found["loss"] == pytest.approx(23 / 9) and found["perplexity"] == pytest.approx(
        math.exp(23 / 9)
    )
    assert (
        scores(replace(TINY, batch_size=22))["tokens"]
        == scores(replace(TINY, batch_size=23))["tokens"]
    )


@pytest.mark.thorough
@pytest.mark.report(
    "karpathy/nanoGPT#240",
    "ipolharvard/ethos-ares#20",
    "coleygroup/ms-pred#38",
    right="nothing drops out in an evaluation",
)
def test_nothing_drops_out_in_an_evaluation():
    model = replace(MODEL, dropout_rate=0.5, attention_dropout_rate=0.5)
    assert (
        scores(replace(TINY, model=model, batch_size=23))["loss"]
        == scores(replace(TINY, batch_size=23))["loss"]
    )


@pytest.mark.thorough
@pytest.mark.report(
    "google-research/pegasus#134", right="an evaluation that hides tokens hides the same ones again"
)
def test_an_evaluation_repeats_its_number():
    model = replace(MODEL, vocab_size=13, masks=(full(),))
    experiment = replace(TINY, model=model, objective=MaskedTokens(mask_token=12, rate=0.4))
    dataset = batching.open_dataset(DATA, model)
    evaluate = evaluator(experiment, build(experiment), dataset)
    trained = weights(experiment)
    assert evaluate(trained) == evaluate(trained)


@pytest.mark.report(
    "OpenTabular/DeepTab#425", "allenai/deep_qa#199", "mila-iqia/cookiecutter-pyml#119",
    right="checkpoints are ranked by the score and the direction that the user names",
)  # fmt: skip
def test_ranks_are_of_the_named_score():
    found = {"loss": 2.0, "accuracy": 0.5, "zero": 0.0, "signature": "text"}
    assert [loop.ranked(found, best) for best in ("loss", "accuracy", "-accuracy")] == [
        2.0,
        0.5,
        -0.5,
    ]
    with pytest.raises(ConfigError, match="gives loss, accuracy, zero; name one"):
        loop.ranked(found, "signature")
    dataset = batching.open_dataset(DATA, MODEL)
    experiments = [
        replace(TINY, checkpoints=Checkpoints(best=best))
        for best in ("loss", "accuracy", "-accuracy")
    ]
    experiments += [replace(TINY, eval_examples=4), replace(TINY, eval_examples=8)]
    names = {checks.score_name(experiment, dataset) for experiment in experiments}
    assert len(names) == 5  # another direction or another text is another rank


@pytest.mark.report(
    "allenai/allennlp#1274",
    "talmolab/sleap-nn#692",
    right="a score of 0 or NaN is a number like any other",
)
def test_zero_and_nan_are_scores():
    assert loop.ranked({"iou": 0.0}, "-iou") == 0.0 and math.isnan(
        loop.ranked({"iou": math.nan}, "-iou")
    )


@pytest.mark.report(
    "huggingface/transformers#30975", "huggingface/transformers#34138", listed="second 26",
    right="overlapping windows score each label once",
)  # fmt: skip
def test_windows_score_each_label_once():
    for length in (1, 2, 3, 8, 9, 17):
        for stride in (1, 3, 4):
            counts = np.zeros(length + 1, int)
            for batch in strided_batches(np.arange(length), 4, stride, 3):
                np.add.at(counts, batch["labels"][batch["weights"] > 0], 1)
            assert (counts[1:length] == 1).all() and counts[0] == 0


def sentence_pieces(**options):
    """A tokenizer as Llama's: a space before each text, which decoding takes away."""
    import tokenizers as package

    letters = {letter: i for i, letter in enumerate("▁abcde\n")} | {"</s>": 7}
    tokenizer = package.Tokenizer(package.models.BPE(letters, [], **options))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Metaspace()
    tokenizer.decoder = package.decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizers.BPE(tokenizer.to_str())


@pytest.mark.report(
    "marin-community/marin#5821", right="the bytes of documents are those of each alone",
    hit="the space that a tokenizer puts before a text counted for each document but the first",
)  # fmt: skip
def test_bytes_of_documents_are_those_of_their_texts():
    tokenizer = sentence_pieces()
    texts = ["ab cd", "a", "eee e", "bcd"]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    tokens = np.concatenate([[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts])
    assert count_bytes(tokens, tokenizer) == sum(len(text) for text in texts)


@pytest.mark.thorough
@pytest.mark.report(
    "openai/parameter-golf#1604",
    right="bits a byte are of the text's own bytes, or said not to be known",
    hit="an uncased tokenizer's bits per byte were of the text that it had changed",
)
def test_a_tokenizer_that_changes_the_text_has_no_bits_per_byte():
    import tokenizers as package

    words = package.Tokenizer(
        package.models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "##a": 3, "e": 4}, unk_token="[UNK]")
    )
    words.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    words.decoder = package.decoders.WordPiece()
    uncased = tokenizers.BPE(words.to_str())
    assert equal_texts(uncased) == ("A a", "a a")
    assert (
        equal_texts(tokenizers.BPE.train("a b c " * 40, 300))
        is equal_texts(tokenizers.Bytes())
        is None
    )
    windows = sources.Windows(np.array([1, 2] * 9), 8, stride=8)
    dataset = sources.Dataset(windows, windows, "", tokenizer=uncased)
    batches = batching.ValidationBatches(windows, 2)
    some = lambda: map(jax.device_put, map(batches.__getitem__, range(len(batches))))
    found = StridedPerplexity(8)(Evaluation(MODEL, weights(TINY), dataset, some, "float32", 0))
    assert found["bits_per_byte"].startswith("unknown: the tokenizer takes 'A a' and 'a a'")
    assert found["strided_perplexity"] > 1


@pytest.mark.report(
    "karpathy/nanochat#693",
    "facebookresearch/adaptive-span#17",
    right="bytes are those of the text",
)
def test_a_letter_in_several_tokens_has_its_own_bytes():
    text = "ну 🐕 ß"
    tokenizer = tokenizers.BPE.train("plain words " * 30, 300)
    tokens = np.asarray(tokenizer.encode(text))
    assert len(tokens) > len(text) and count_bytes(tokens, tokenizer) == len(text.encode())


# --- requests of lm-evaluation-harness


@pytest.mark.thorough
@pytest.mark.report(
    "EleutherAI/lm-evaluation-harness#337",
    "EleutherAI/lm-evaluation-harness#339",
    listed="third 22",
    right=(
        "A request's score is the sum over its own tokens after all that fits in front; windows "
        "score each token once."
    ),
)
def test_scores_of_requests_are_sums_of_a_forward_pass():
    """Without the package: what `harness.model` does with tokens. tests/evaluation/test_harness.py
    does the rest with it."""
    room, end = MODEL.context_length, 11
    drawn = weights(TINY)
    forward = jax.jit(lambda tokens: models.apply(MODEL, drawn, tokens).logits)
    decoder = harness.Decoder(
        MODEL, prepare(MODEL, drawn, jnp.float32), None, (), end, 4, "float32"
    )

    def by_hand(context, new):
        whole = [*(context or [end]), *new][-room - 1 :]
        logits = np.asarray(forward(np.array([whole[:-1] + [0] * (room + 1 - len(whole))])))[0]
        logits = logits.astype(np.float64)[len(whole) - 1 - len(new) : len(whole) - 1]
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logs[np.arange(len(new)), new].sum(), (logits.argmax(axis=1) == new).all()

    rng = np.random.default_rng(0)
    sizes = [
        (0, 1),
        (0, room),
        (1, 1),
        (3, 2),
        (room, 1),
        (40, 3),
        (1, room),
        (5, room - 5),
        (5, 1),
    ]
    pairs = [(rng.integers(0, 11, n).tolist(), rng.integers(0, 11, m).tolist()) for n, m in sizes]
    likeliest = max(range(12), key=lambda token: by_hand(pairs[3][0], [token])[0])
    pairs += [pairs[3], (pairs[3][0], [likeliest])]
    found = harness.log_likelihoods(decoder, pairs)
    for (value, greedy), pair in zip(found, pairs, strict=True):
        expected = by_hand(*pair)
        assert value == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]
    assert found[-1][1] and found[3] == found[-2]
    assert harness.log_likelihoods(decoder, []) == []
    with pytest.raises(ConfigError, match=f"{room + 1} tokens are to be scored in one piece"):
        harness.log_likelihoods(decoder, [([1], [1] * (room + 1))])

    text = rng.integers(0, 11, 2 * room + 3).tolist()
    windows = [
        (text[: max(first, 0)], text[first : first + room]) for first in range(0, len(text), room)
    ]
    parts = harness.log_likelihoods(decoder, windows)
    total = 0.0
    for at, token in enumerate(text):
        stop = min(at - at % room + room, len(text))  # of the window, which reads `room` tokens
        total += by_hand([end, *text][max(stop - room, 0) : at + 1], [token])[0]
    assert sum(value for value, _ in parts) == pytest.approx(total, abs=1e-3)


def ten(scored):
    return {"ten": 10.0}


class Known:
    """A metric that says the names of its scores."""

    only_final = True

    def check(self, model, dataset):
        return ["ten"]

    def __call__(self, scored):
        return ten(scored)


@pytest.mark.thorough
@pytest.mark.report(
    "IBM/unitxt#1069",
    "IBM/unitxt#737",
    right=(
        "two metrics with a score of one name are refused, and so is one with a name that an "
        "evaluation has itself"
    ),
    hit=(
        "the last one stood for both; a metric `loss` replaced the loss, by which checkpoints "
        "are ranked"
    ),
)
def test_no_score_takes_the_place_of_another(tmp_path):
    assert new_names(ten, ten(None), {"loss", "accuracy"}) == {"ten": 10.0}
    for taken in ("ten", "loss", "step", "scored"):
        with pytest.raises(
            ConfigError, match=rf"^metrics: ten gives {taken}, which an evaluation has already"
        ):
            new_names(ten, {taken: 1.0}, {"ten", "loss", "step", "scored"})
    dataset = batching.open_dataset(DATA, MODEL)
    twice = replace(TINY, metrics=(Known(), Known()))
    with pytest.raises(ConfigError, match="Known gives ten"):  # before the first step
        checks.check_scores(twice, build(twice), dataset)
    one = replace(TINY, eval_examples=1, metrics=(ten, ten))
    score = evaluator(one, build(one), dataset)
    with pytest.raises(ConfigError, match=r"^metrics: ten gives ten"):
        score(params.init(models.spec(MODEL), jax.random.key(0)))


@pytest.mark.report(
    "facebookresearch/fairseq#2140",
    "uma-pi1/kge#226",
    right=(
        "the state is kept before an evaluation that fails, so that the corrected command goes "
        "on from there"
    ),
    hit="an error in a metric of the user's threw away all steps since the last save",
)
def test_an_evaluation_that_fails_costs_no_steps():
    def fails(trained, final=False, step=0):
        raise ZeroDivisionError

    saved = []
    save = lambda step, state, metadata, rank, wait: saved.append((step, rank, wait))
    names = ("loss", "grad_norm", "skipped", "tokens", "learning_rate")
    figures, same = dict.fromkeys(names, jnp.zeros(())), lambda value: value
    job = loop.Job(
        name="a",
        steps=5,
        log_every=1,
        eval_every=3,
        save_every=100,
        best="loss",
        examples=(1, 1, 1),
        max_skipped=9,
        metadata={},
        batches=lambda step: {"x": np.zeros(1)},
        put=same,
        step=lambda state, batch: (state, figures),
        spread=same,
        gather=same,
        evaluate=fails,
        parameters=0,
        sample=None,
        profile=None,
        work=lambda batch: None,
        refresh=lambda: None,
        explain=lambda *_: None,
        check=lambda *_: None,
    )
    record, console = Record(None), Console(5, heard=False)
    with pytest.raises(ZeroDivisionError):
        watchdog = SimpleNamespace(beat=lambda *_, **__: None)
        loop.loop(
            job,
            SimpleNamespace(save=save),
            TrainState(0, None, None),
            0,
            record,
            console,
            watchdog,
            Goodput(None, 0.0),
        )
    assert saved == [(3, None, True)]


@pytest.mark.report(
    "keras-team/keras-hub#2958",
    "ml-explore/mlx-lm#1855",
    "magenta/magenta#239",
    right=(
        "perplexity is that of the sums over all tokens that count, whatever the batches, and "
        "padding is in neither sum"
    ),
)
def test_perplexity_does_not_depend_on_the_batches():
    losses, counts = np.array([3.0, 1.0, 2.0, 8.0]), np.array([100.0, 10.0, 0.0, 3.0])
    score = lambda _, batch, __: LossSums(
        (batch["losses"] * batch["weights"]).sum(), batch["weights"].sum()
    )
    for size in (1, 2, 4):
        parts = [slice(i, i + size) for i in range(0, 4, size)]
        found = perplexity(
            score, None, [{"losses": losses[part], "weights": counts[part]} for part in parts]
        )
        assert math.isclose(
            found["perplexity"], math.exp((losses * counts).sum() / counts.sum()), rel_tol=1e-6
        )
        assert found["tokens"] == 113
