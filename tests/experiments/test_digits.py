"""Captions and retrieval of rows of digits: their data, their losses by hand, a mesh's batch, and
runs that are stopped."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from experiments import (
    caption_digits,
    listops,
    question_answering,
    retrieve_digits,
    shakespeare_char,
    shakespeare_char_gpu,
    vit_digits,
)
from experiments.caption_digits import MovedDigits
from jaxformer import cli, models
from jaxformer.data.augment import Move
from jaxformer.data.batching import take_rows
from jaxformer.data.images import Digits
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder
from jaxformer.objectives import StepContext
from jaxformer.parallel import Mesh
from jaxformer.runs.reporter import Reporter
from jaxformer.training import TokenCrossEntropy
from jaxformer.training.recipe import build

CAPTIONS = caption_digits.RowsOfDigits(examples=2000, validation_examples=100)
TINY = ["encoder.num-layers=1", "decoder.num-layers=1", "encoder.unroll=1", "decoder.unroll=1"]


def test_a_row_is_three_digits_of_its_split_and_their_names():
    digits, dataset = Digits().open(None), CAPTIONS.open(None)
    for split, of in ((dataset.train, digits.train), (dataset.validation, digits.validation)):
        found = take_rows(of, np.arange(len(of)))
        known = {
            image.tobytes(): label
            for image, label in zip(found["images"], found["labels"], strict=True)
        }
        for i in (0, 1, 57, 99):
            row, (image, caption) = split[i], split.row(i)
            labels = [
                known[np.ascontiguousarray(image[:, 8 * d : 8 * d + 8]).tobytes()] for d in range(3)
            ]
            assert caption == " ".join(caption_digits.WORDS[label] for label in labels)
            real = row["weights"] == 1
            assert dataset.tokenizer.decode(row["tokens"][real][1:]) == caption
            assert dataset.tokenizer.decode(row["labels"][real][:-1]) == caption
            assert (
                row["tokens"][0]
                == row["labels"][real][-1]
                == dataset.tokenizer.end_of_text
                < dataset.vocab_size
            )
            assert row["tokens"].shape == (caption_digits.LENGTH,)
            np.testing.assert_array_equal(row["source"], split[i]["source"])
    captions = {dataset.validation.row(i)[1] for i in range(100)}
    assert len(captions) == 100  # distinct
    assert len({dataset.train.row(i)[1] for i in range(1000)}) == 1000
    first = dataset.validation.questions[0]
    assert first.reference == dataset.validation.row(0)[1] and first.prompt == [
        dataset.tokenizer.end_of_text
    ]
    other = replace(CAPTIONS, seed=5).open(None)
    assert other.digest != dataset.digest == CAPTIONS.open(None).digest


@pytest.mark.thorough
def test_digits_of_a_row_move_by_themselves():
    image, key = (
        jnp.asarray(take_rows(CAPTIONS.open(None).train, np.arange(3))["source"]),
        jax.random.key(0),
    )
    still = caption_digits.with_moved_digits(Move(0.0, 0.0), key, image)
    np.testing.assert_allclose(still, image, atol=1e-6)
    # what leaves the middle digit does not enter its neighbours
    one = jnp.zeros_like(image).at[:, :, 8:16].set(1)
    found = np.asarray(caption_digits.with_moved_digits(Move(10.0, 3.0), key, one))
    assert found[:, :, :8].max() == found[:, :, 16:].max() == 0
    assert (found[:, :, 8:16].min(axis=(1, 2, 3)) < 0.5).all() and (found[0] != found[1]).any()


@pytest.mark.thorough
def test_a_caption_is_scored_as_it_is_and_trained_on_moved_digits():
    experiment = caption_digits.experiment
    assert experiment.objective.evaluation() == TokenCrossEntropy()
    small = dict(num_layers=1, unroll=1, dropout_rate=0.0)
    model = EncoderDecoder(
        replace(caption_digits.encoder, **small), replace(caption_digits.decoder, **small), False
    )
    parameters = models.init(model, jax.random.key(0))
    batch = {
        name: jnp.asarray(rows)
        for name, rows in take_rows(CAPTIONS.open(None).train, np.arange(4)).items()
    }
    loss = jax.jit(
        lambda objective, key: objective(model, parameters, batch, StepContext(key)).loss,
        static_argnums=0,
    )
    plain, moved = TokenCrossEntropy(), experiment.objective
    first, second, third = (
        loss(objective, jax.random.key(1))
        for objective in (plain, moved, MovedDigits(Move(0.0, 0.0)))
    )
    np.testing.assert_allclose(third, first, rtol=1e-5)  # float32 sums in another order
    assert second != first and second != loss(moved, jax.random.key(2))


def small_towers():
    model = retrieve_digits.experiment.model
    small = dict(num_layers=1, d_model=16, num_heads=2, unroll=1)
    model = retrieve_digits.TwoTowers(replace(model.image, **small), replace(model.text, **small))
    batch = take_rows(retrieve_digits.PairsOfDigits(examples=100).open(None).train, np.arange(16))
    return (
        model,
        models.init(model, jax.random.key(0)),
        {name: jnp.asarray(rows) for name, rows in batch.items()},
    )


@pytest.mark.thorough
def test_the_contrastive_loss_is_the_papers_in_float64():
    model, parameters, batch = small_towers()
    batch["weights"] = batch["weights"].at[13:].set(0)  # padding of a last batch
    key, objective = jax.random.key(1), retrieve_digits.Contrastive(move=None)
    sums = objective(model, parameters, batch, StepContext(key))
    images, texts, factor = model.apply(parameters, batch["images"], batch["tokens"], key)
    images, texts = (np.asarray(x, np.float64)[:13] for x in (images, texts))
    np.testing.assert_allclose(np.linalg.norm(images, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(factor, 1 / 0.07, rtol=1e-5)
    logits = images @ texts.T / 0.07
    loss = 0.0
    for one in (logits, logits.T):
        probabilities = np.exp(one) / np.exp(one).sum(axis=1, keepdims=True)
        loss -= np.log(np.diag(probabilities)).sum() / 2
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-4)  # float32 products, times 14
    assert sums.weight == 13
    for name, one in (("accuracy", logits), ("of_texts", logits.T)):
        assert sums.metrics[name][0] == (one.argmax(axis=1) == np.arange(13)).sum()
    assert retrieve_digits.experiment.objective.evaluation() == objective


@pytest.mark.thorough
def test_the_contrastive_loss_is_over_the_batch_of_all_devices():
    model, parameters, batch = small_towers()
    objective = retrieve_digits.Contrastive(move=None)
    loss = jax.jit(
        jax.value_and_grad(lambda p, b, key: objective(model, p, b, StepContext(key)).loss)
    )
    expected, gradient = loss(parameters, batch, jax.random.key(0))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    put = lambda tree, spec: jax.device_put(tree, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        found, on_mesh = loss(
            put(parameters, jax.P()), put(batch, jax.P("data")), put(jax.random.key(0), jax.P())
        )
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), on_mesh, gradient)
    # two halves of the batch have fewer wrong answers: another loss
    halves = [
        loss(parameters, {name: rows[part] for name, rows in batch.items()}, jax.random.key(0))[0]
        for part in (slice(8), slice(8, None))
    ]
    assert abs(sum(halves) - expected) > 1


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"accumulation": 2}, True),
        ({"mesh": Mesh(data=2, backend="pmap")}, True),
        ({"mesh": Mesh(backend="pmap")}, True),
        ({"mesh": Mesh(data=1, backend="pmap")}, False),
        ({"mesh": Mesh(data=2)}, False),
    ],
)
def test_parts_of_a_batch_are_refused_where_its_rows_are_compared(changes, refused):
    changed = replace(retrieve_digits.experiment, **changes)
    with (
        pytest.raises(ConfigError, match="compares all rows")
        if refused
        else contextlib.nullcontext()
    ):
        build(changed)
    build(replace(changed, objective=TokenCrossEntropy()))


@pytest.mark.thorough
def test_examples_that_cannot_be_made_are_one_line():
    model = replace(listops.experiment.model, context_length=2000)
    for changes in (dict(shortest=65), dict(shortest=500, longest=2000), dict(depth=1, args=2)):
        with pytest.raises(ConfigError, match=r"data\."):
            replace(listops.ListOps(), **changes).open(model)
    model = question_answering.experiment.model
    for length in (56, 500):
        model = replace(model, context_length=length)
        most = min(16, (length - 10) // 10)
        for facts in (0, most + 1):
            with pytest.raises(ConfigError, match=f"data.facts={facts}: expected 1 to {most}"):
                question_answering.Passages(facts=facts).open(model)
        split = question_answering.Passages(facts=most).open(model).train
        assert max(split[i]["segment_ids"].sum() for i in range(300)) <= length


def test_the_recipe_of_nanogpt_keeps_its_rate_in_the_gpu_size():
    assert shakespeare_char_gpu.experiment.optimizer == replace(
        shakespeare_char.experiment.optimizer, learning_rate=1e-3
    )


def outcome(folder):
    """(every trained number, the record) of the only run in a folder, as bytes and text."""
    (path,) = folder.glob("*-*")
    run = jaxformer.open_run(path)
    return [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.params)
    ], run.folder.metrics.read_text()


@pytest.mark.slow
def test_a_run_with_images_as_the_source_is_stopped_and_resumed_to_the_same_bits(
    tmp_path, monkeypatch, capsys
):
    small = (
        "--steps=12 --batch-size=4 --eval-every=6 --log-every=1 --checkpoints.every=4 "
        "--schedule.warmup=2"
    )
    options = [
        *small.split(),
        "--data.examples=64",
        "--data.validation-examples=6",
        *(f"--model.{one}" for one in TINY),
    ]
    command = lambda folder: ["train", "caption_digits", "--runs", str(tmp_path / folder), *options]
    assert cli.main(command("undisturbed")) == 0

    class Stopped(BaseException):
        """Nothing in the library catches it, as nothing catches SIGKILL."""

    later = Reporter.later

    def stop(self, step, metrics, work):
        if step == 10:
            raise Stopped
        later(self, step, metrics, work)

    with pytest.raises(Stopped), monkeypatch.context() as inner:
        inner.setattr(Reporter, "later", stop)
        cli.main(command("stopped"))
    assert cli.main(command("stopped")) == 0
    # saved half-way between two checkpoints
    assert "resuming after step 10" in capsys.readouterr().out
    assert outcome(tmp_path / "undisturbed") == outcome(tmp_path / "stopped")
    (path,) = (tmp_path / "stopped").glob("*-*")
    assert 0 <= jaxformer.open_run(path).evaluate()["exact_match"] <= 100


def test_vit_digits_opens():
    experiment = vit_digits.experiment
    dataset = experiment.data.open(experiment.model)
    assert dataset.train[0]["images"].shape == (8, 8, 1)


@pytest.mark.slow
def test_vit_imagenet_starts_on_a_folder(tmp_path, capsys):
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(4):
                noise = rng.integers(0, 256, (40, 60, 3), np.uint8)
                Image.fromarray(noise).save(
                    tmp_path / part / name / f"{i}.{('png', 'jpeg')[i % 2]}"
                )
    words = [
        "train",
        "vit_imagenet",
        "--runs",
        str(tmp_path / "runs"),
        f"--data.train={tmp_path}/train",
    ]
    words += [
        f"--data.validation={tmp_path}/val",
        "--steps=2",
        "--batch-size=4",
        "--schedule.warmup=1",
    ]
    words += ["--model.num-layers=1", "--model.d-model=24", "--model.num-heads=2", "--log-every=1"]
    assert cli.main(words) == 0
    assert "8 and 8 images of 224 x 224" in capsys.readouterr().out
