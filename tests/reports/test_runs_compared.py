"""Scores side by side, and runs that begin with other runs, tried against what users of nanochat,
transformers, PEFT, litgpt, Lightning, verl and llama.cpp reported."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath

from jaxformer import models, params
from jaxformer.data import batching, sources, tokenizers
from jaxformer.data.corpus import Corpus
from jaxformer.data.tasks import Reverse
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.perplexity import StridedPerplexity
from jaxformer.models import ModelConfig
from jaxformer.runs.comparison import incomparable, incomparable_curves, split_digest
from jaxformer.runs.first_warnings import small_validation
from jaxformer.runs.run import open_run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.same_data import warn_of_tokenizer
from jaxformer.runs.scores import evaluator
from jaxformer.training import Experiment
from jaxformer.training.recipe import build
from tests.runs.test_continued import train
from tests.tiny import furnish

MODEL = ModelConfig(vocab_size=12, num_layers=1, d_model=8, num_heads=1, context_length=8)
DATA = Reverse(vocab_size=11, length=4, examples=64, validation_examples=23)
TINY = Experiment(name="tiny", model=MODEL, data=DATA, steps=12, batch_size=4)
LORA = "--adaptation=Lora(rank=2)"
SIZES = "--model.d-model=24", "--model.num-layers=2"
OPTIONS = ("--steps=2", "--eval-every=2", "--checkpoints.every=2", "--sample.tokens=2")


def drawn(model):
    """Parameters far from uniform predictions, without a program that draws them."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: np.asarray(rng.normal(0, 0.5, leaf.shape), np.float32),
        params.abstract(models.spec(model)),
    )


def loss(experiment):
    dataset = batching.open_dataset(experiment.data, experiment.model)
    return evaluator(experiment, build(experiment), dataset)(drawn(experiment.model))


def folder_with(path, records=(), tokenizer=None, **scores):
    """A run's folder with these records and scores."""
    folder = RunFolder(epath.Path(path))
    folder.path.mkdir()
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    if scores:
        folder.result.write_text(json.dumps({"validation": {"loss": 1.0, **scores}}))
    if tokenizer is not None:
        tokenizer.save(folder.tokenizer)
    return folder


@pytest.mark.report(
    "karpathy/nanochat#286",
    "karpathy/llm.c#710",
    right="runs of other batch sizes have losses of the same text, or a word that they have not",
    hit="a report drew the curves of eval_batches=n and batches of 8 and 16 into one picture",
)
def test_curves_of_other_batch_sizes_are_marked(tmp_path):
    runs = [
        folder_with(
            tmp_path / str(size),
            [{"step": 3, "validation_loss": 1.0, "validation_examples": 10 * size}],
            tokens=92,
        )
        for size in (8, 16)
    ]
    assert incomparable(runs) == "" and "first 80 examples" in incomparable_curves(runs)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#41898",
    "verl-project/verl#7464",
    right="a last batch that is not full counts by its tokens, and a split smaller than one counts",
)
def test_batches_that_are_not_full_count_by_their_tokens():
    whole, ragged, one = (loss(replace(TINY, batch_size=size)) for size in (23, 4, 64))
    for other in (ragged, one):
        assert other["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert other["tokens"] == whole["tokens"] and other["examples"] == 23


@pytest.mark.thorough
@pytest.mark.report(
    "ggml-org/llama.cpp#7111",
    right="models of other vocabularies are compared by the bits a byte of the same text takes",
    hit="of a corpus with byte pairs the command ended in a traceback; `compare` did not name it",
)
def test_bits_a_byte_do_not_depend_on_the_tokenizer(tmp_path):
    """A model that knows nothing needs log2(V) bits a token, so the bytes a token are seen."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    for tokenizer, size in (("bytes", None), ("bpe", 290)):
        data = Corpus(
            str(tmp_path / "text.txt"),
            tokenizer=tokenizer,
            vocab_size=size,
            validation_fraction=0.2,
            cache=str(tmp_path / "cache"),
        )
        model = replace(MODEL, vocab_size=296)
        dataset = data.open(model)
        zeros = jax.tree.map(np.zeros_like, drawn(model))
        split = batching.ValidationBatches(dataset.validation, 4)
        batches = lambda split=split: map(jax.device_put, iter([split[0]]))
        scored = Evaluation(model, zeros, dataset, batches, "float32", 0)
        text = dataset.tokenizer.decode(dataset.validation.tokens[1:])
        bits = (len(dataset.validation.tokens) - 1) * np.log2(296) / len(text.encode())
        found = StridedPerplexity(8)(scored)["bits_per_byte"]
        assert found == pytest.approx(bits, rel=0.01)  # ends of documents are no text


@pytest.mark.report(
    "ggml-org/llama.cpp#7111",
    right="losses of other tokenizers are not set side by side without a word",
    hit="`compare` said 'perhaps of different text', or that the number of tokens differs",
)
def test_losses_of_other_tokenizers_are_marked(tmp_path):
    runs = [folder_with(tmp_path / name, tokens=len(name)) for name in ("bytes", "bpe")]
    for folder in runs:
        folder.environment.write_text(json.dumps({"tokenizer_digest": folder.path.name}))
    warning = incomparable(runs)
    assert "different tokenizers" in warning and "StridedPerplexity" in warning


@pytest.mark.report(
    "Lightning-AI/litgpt#471",
    right="another tokenizer of the same vocabulary size is noticed when weights are trained on",
    hit="sizes agreed, so nothing was said, and each number was another piece of text",
)
def test_another_tokenizer_of_the_same_size_is_noticed(tmp_path, caplog):
    texts = "the quick brown fox " * 50, "jumps over the lazy dog " * 50
    one, other = (tokenizers.BPE.train(text, 270) for text in texts)
    assert one.vocab_size == other.vocab_size
    folder = folder_with(tmp_path / "run", tokenizer=one)
    with caplog.at_level(logging.WARNING, "jaxformer"):
        warn_of_tokenizer("initial", folder, one)
        assert not caplog.records
        warn_of_tokenizer("initial", folder, other)
    assert "another tokenizer" in caplog.text and str(folder.tokenizer) in caplog.text


@pytest.mark.report(
    "meta-llama/llama-cookbook#540",
    "rasbt/LLMs-from-scratch#124",
    right="a validation split that is too small is named before the training, with what to give",
    hit="a folder of 44 texts held 97 tokens out, and their loss had four digits",
)
def test_a_split_that_is_too_small_is_named():
    split = lambda size: SimpleNamespace(tokens=range(size))
    dataset = SimpleNamespace(train=split(193_409), validation=split(97))
    (line,) = small_validation(Corpus("texts/"), dataset)
    assert "97 tokens" in line and "--data.validation-fraction=0.1" in line


@pytest.mark.report(
    "karpathy/nanochat#286",
    right="the text that is scored has a name, which the length of a window does not change",
    hit="other training data, or another window, looked like other text",
)
def test_the_text_of_a_split_has_one_name():
    tokens = np.arange(100) % 7
    names = {split_digest(sources.Windows(tokens, n, stride=n)) for n in (4, 8, 99)}
    assert len(names) == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of two runs: `full`, of other sizes than the experiment's, and `lora` on it."""
    place = furnish(tmp_path_factory.mktemp("place"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        began("full")
        began("lora", LORA, "--initial=full")  # an experiment's name: its newest run
        yield place / "runs"


def began(name, *options):
    code, said = train(f"--name={name}", *OPTIONS, *SIZES, *options)
    assert code == 0, said
    return said


def folder_named(runs, name):
    (found,) = [path for path in Path(runs).iterdir() if path.name.startswith(f"{name}-")]
    return found


def assert_same(one, other):
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/peft#262",
    "huggingface/peft#2873",
    right="new factors train on a run's merged ones, and so does the whole model",
)
@pytest.mark.parametrize("adaptation", ["", LORA])
def test_a_run_with_factors_starts_every_kind_of_run(runs, adaptation):
    before = open_run(folder_named(runs, "lora")).params
    full = open_run(folder_named(runs, "full")).params
    with pytest.raises(AssertionError):
        assert_same(before, full)
    # a rate near zero: the weights stay those of the start
    still = "--optimizer=AdamW(learning_rate=1e-30)", f"--initial={folder_named(runs, 'lora').name}"
    name = "factors" if adaptation else "whole"
    began(name, *still, *([adaptation] if adaptation else []))
    assert_same(open_run(folder_named(runs, name)).params, before)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/peft#309",
    right="a run with factors opens without its base, and gives the whole model",
)
def test_a_run_with_factors_needs_no_base(runs, tmp_path):
    folder = folder_named(runs, "lora")
    before = open_run(folder).params
    base = folder_named(runs, "full")
    shutil.move(base, tmp_path / "gone")
    try:
        assert_same(open_run(folder).params, before)
    finally:
        shutil.move(tmp_path / "gone", base)


@pytest.mark.thorough
@pytest.mark.report(
    "Lightning-AI/pytorch-lightning#18587",
    right="weights of another size are refused with the options of the model that they fit",
    hit="the message listed leaves of a checkpoint, and advised 'another folder'",
)
@pytest.mark.parametrize("name", ["full", "lora"])
def test_other_sizes_are_refused_with_the_options_that_fit(runs, name):
    before = folder_named(runs, name)
    code, said = train("--name=small", *OPTIONS, f"--initial={before}")
    last = said.strip().splitlines()[-1]
    assert code == 2 and last.endswith(" ".join(SIZES[::-1])), said


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#43718",
    right="a run that goes on with another batch size has that one, and the steps that are given",
)
def test_a_run_goes_on_with_the_batch_size_that_is_given(runs):
    before = folder_named(runs, "full").name
    options = "--steps=3", "--batch-size=2", f"--continue-from={before}"
    said = began("more", *options)
    assert "batch_size: 4 -> 2" in said and "differs in" not in said  # it is said once
    run = open_run(folder_named(runs, "more"))
    assert run.checkpoint[0] == 3 and run.experiment.batch_size == 2
