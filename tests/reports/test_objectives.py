"""Objectives: what users of others reported, tried here."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.data.augment import Crop, Flip, ResizedCrop, augmented
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.objectives import StepContext
from jaxformer.objectives.spans import best_spans
from jaxformer.ops.losses import cross_entropy
from jaxformer.training import (
    ClassCrossEntropy,
    Experiment,
    SpanCrossEntropy,
    TokenCrossEntropy,
    recipe,
)

retrieval = pytest.importorskip("experiments.retrieve_digits")  # needs scikit-learn

KEY = jax.random.key(0)
T = 12


def apply(model, params, tokens, **_):
    """In place of `models.apply`: the parameters are the logits."""
    return models.Output(params, None)


@pytest.fixture
def given(monkeypatch):
    """Parameters are logits."""
    monkeypatch.setattr("jaxformer.objectives.tokens.models.apply", apply)


def spans(logits, labels, weights=None, passage=None):
    """(LossSums of spans in a passage 4 ... 9, gradient of the logits [B, T, 2])."""
    labels = jnp.asarray(labels)
    weights = jnp.ones(len(labels)) if weights is None else jnp.asarray(weights, jnp.float32)
    passage = jnp.zeros((len(labels), T), int).at[:, 4:10].set(1) if passage is None else passage
    batch = {"tokens": labels, "passage": passage, "labels": labels, "weights": weights}

    def loss(logits):
        sums = SpanCrossEntropy()(None, logits, batch, StepContext(KEY))
        return sums.loss, sums

    gradient, sums = jax.grad(loss, has_aux=True)(logits)
    return sums, gradient


LOGITS = jax.random.normal(KEY, (3, T, 2))


@pytest.mark.thorough
@pytest.mark.report(
    "ByteDance-Seed/VeOmni#1110",
    right=(
        "a metric of an objective that is called as what the record has, or that is no pair of "
        "sums, is refused"
    ),
    hit=(
        "a metric `loss` was shown and ranked as the loss, `step` gave all records one number; "
        "0.5 was a TypeError"
    ),
)
def test_metrics_of_an_objective_do_not_replace_the_record():
    one = jnp.ones(())
    for metrics, named in [
        ({"loss": (one, one)}, "'loss'"),
        ({"step": (one, one)}, "'step'"),
        ({"grad_norm": (one, one)}, "'grad_norm'"),
        ({"bits": (one, one)}, "'bits'"),
        ({"half": 0.5}, "half"),
        ({"map": (jnp.ones((2, 2)), one)}, "map"),
        ([("a", (one, one))], "list"),
    ]:
        with pytest.raises(ConfigError, match=f"^objective: .*{named}"):
            recipe.checked((one, one, metrics))
    good = {"top3": (3, 4), "load/layers": (jnp.ones(2), one)}
    assert (
        recipe.checked((one, one, good)).metrics == good
        and recipe.checked((one, one, None)).metrics == {}
    )


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#1020",
    "huggingface/transformers#8904",
    "allenai/allennlp-reading-comprehension#19",
    listed="third 03",
    right=(
        "a row whose answer is not in the passage is left out of loss, gradient and exact_match, "
        "and counted"
    ),
    hit="the loss of the whole batch was inf (NaN for a position behind the row)",
)
@pytest.mark.parametrize("answer", [(0, 0), (8, 11), (2, 5), (12, 40), (-1, 5), (7, 6)])
def test_an_answer_that_the_window_cut_off(given, answer):
    good, gradient = spans(LOGITS[::2], [[4, 5], [7, 9]])
    found, both = spans(LOGITS, [[4, 5], answer, [7, 9]])
    np.testing.assert_allclose([found.loss, found.weight], [good.loss, good.weight], rtol=1e-6)
    np.testing.assert_allclose(both[::2], gradient, atol=1e-6)
    assert (both[1] == 0).all()
    assert found.metrics["left_out"] == (1, 3) and found.metrics["exact_match"][1] == 2


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#1282", "huggingface/transformers#5910",
    right="[CLS] can be the answer 'none': where the passage holds it, it is a label as others",
)  # fmt: skip
def test_no_answer_is_a_label(given):
    passage = jnp.zeros((3, T), int).at[:, 4:10].set(1).at[:, 0].set(1)
    sums, _ = spans(LOGITS.at[1, 0].set(9.0), [[4, 5], [0, 0], [7, 9]], passage=passage)
    assert np.isfinite(sums.loss) and sums.weight == 3 and sums.metrics["left_out"] == (0, 3)
    assert sums.metrics["exact_match"][0] >= 1


@pytest.mark.report(
    "huggingface/transformers#13347", "meta-pytorch/captum#684", "huggingface/transformers#12254",
    right="the likeliest span is that of all pairs with first <= last",
)  # fmt: skip
def test_a_span_does_not_end_before_it_begins():
    firsts, lasts = jnp.array([-0.1, -2.1, 0.7, 1.3, 4.1]), jnp.array([-0.7, 3.0, 5.0, -0.7, 3.3])
    np.testing.assert_array_equal(best_spans(jnp.stack([firsts, lasts])[None]), [[4, 4]])


@pytest.mark.thorough
@pytest.mark.report(
    "deepset-ai/FARM#564", "allenai/bi-att-flow#71",
    right="the first and the last token of a passage can be an answer",
)  # fmt: skip
def test_answers_at_the_ends_of_a_passage(given):
    for place in (4, 9):
        sums, _ = spans(jnp.zeros((1, T, 2)).at[0, place].set(5.0), [[place, place]])
        assert sums.metrics["exact_match"] == (1, 1) and sums.metrics["left_out"][0] == 0


class Alike(retrieval.TwoTowers):
    """A model that embeds both sides as the images are given."""

    def apply(self, params, images, tokens, dropout_key, dtype=None):
        return images, images, jnp.float32(20.0)


def contrast(embeddings, tokens, weights=None):
    """LossSums of images that are embedded as their captions are."""
    tokens = jnp.asarray(tokens)
    weights = jnp.ones(len(tokens)) if weights is None else jnp.asarray(weights, jnp.float32)
    batch = {"images": embeddings, "tokens": tokens, "weights": weights}
    return retrieval.Contrastive(move=None)(Alike(None, None), None, batch, StepContext(KEY))


@pytest.mark.thorough
@pytest.mark.report(
    "fartashf/vsepp#6", "openai/CLIP#11", "openai/CLIP#28", "OFA-Sys/Chinese-CLIP#111",
    listed="third 04",
    right="a row with the same caption is not a wrong answer",
    hit="equal captions were each other's wrong answers: a perfect model had accuracy 0.98",
)  # fmt: skip
def test_equal_captions_are_no_wrong_answers():
    tokens = [[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]]
    embeddings = jnp.eye(7)[jnp.asarray(tokens)[:, 0]]
    sums = contrast(embeddings, tokens)
    assert sums.loss / sums.weight < 1e-6
    for name in ("accuracy", "of_texts"):
        assert sums.metrics[name] == (5, 5)
    # a twin of weight 0 changes nothing, and another caption is still wrong
    assert contrast(embeddings, tokens, [1, 1, 0, 1, 0]).metrics["accuracy"] == (3, 3)
    mixed = contrast(jnp.ones((3, 7)) / 7**0.5, [[1, 2], [3, 4], [1, 2]])
    np.testing.assert_allclose(
        mixed.loss / mixed.weight, (2 * np.log(2) + np.log(3)) / 3, rtol=1e-6
    )


@pytest.mark.report(
    "openai/CLIP#46", "cfoster0/CLAP#28", "mlfoundations/open_clip#214",
    right="the learned factor of the products is at most 100, as in the paper",
    hit="the factor had no upper end",
)  # fmt: skip
def test_the_factor_of_the_products_is_bounded(monkeypatch):
    monkeypatch.setattr(
        retrieval.models, "apply", lambda *_, **__: SimpleNamespace(logits=jnp.ones((2, 3)))
    )
    towers = retrieval.TwoTowers(None, None)
    factor = lambda log: float(
        towers.apply({"image": 0, "text": 0, "factor": jnp.float32(log)}, 0, 0, KEY)[2]
    )
    assert factor(np.log(1 / 0.07)) == pytest.approx(1 / 0.07) and factor(90.0) == 100


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#26357", "oobabooga/textgen#4031",
    right="weights of the data decide which tokens count, whatever their labels are",
)  # fmt: skip
def test_weights_of_the_data_are_kept(given):
    logits = jax.random.normal(KEY, (2, 4, 5))
    batch = {
        "tokens": jnp.zeros((2, 4), int),
        "labels": jnp.array([[1, -100, 2, 0], [-100, 3, 4, 4]]),
    }
    batch["weights"] = jnp.array([[1.0, 0, 1, 0], [0, 0, 1, 0]])
    sums = TokenCrossEntropy(label_smoothing=0.1)(None, logits, batch, StepContext(KEY))
    at = (jnp.array([0, 0, 1]), jnp.array([0, 2, 2]))
    expected = cross_entropy(logits[at], batch["labels"][at], label_smoothing=0.1)
    np.testing.assert_allclose([sums.loss, sums.weight], [expected.loss, 3], rtol=1e-6)


@pytest.mark.report(
    "OpenNMT/OpenNMT-py#464",
    "huggingface/transformers#10338",
    right=(
        "what is scored has neither smoothing nor z-loss, so that its exponential is a perplexity"
    ),
)
def test_scores_have_no_smoothing():
    assert TokenCrossEntropy(label_smoothing=0.1, z_loss=1e-4).evaluation() == TokenCrossEntropy()
    assert (
        ClassCrossEntropy(label_smoothing=0.1, augment=(Flip(),)).evaluation()
        == ClassCrossEntropy()
    )


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/vision#8484", "wolny/pytorch-3dunet#32", "GaTech-RL2/EgoVerse#651",
    right="each image of a batch has its own random change, and each step another one",
)  # fmt: skip
def test_each_image_is_changed_by_itself():
    images = jnp.broadcast_to(jnp.arange(36.0).reshape(6, 6, 1), (16, 6, 6, 1))
    for functions in ((Crop(2),), (Flip(),), (ResizedCrop(),)):
        first, again, other = (
            augmented(functions, jax.random.key(seed), images) for seed in (0, 0, 1)
        )
        assert len(np.unique(first, axis=0)) > 1 and (first != other).any()
        np.testing.assert_array_equal(first, again)


@pytest.mark.report(
    "lxztju/pytorch_classification#9",
    right="labels of another shape than the logits are refused, not spread over them",
)  # fmt: skip
def test_labels_of_another_shape(given):
    batch = {
        "tokens": jnp.zeros((4, 3), int),
        "labels": jnp.zeros((4, 1), int),
        "weights": jnp.ones((4, 1)),
    }
    with pytest.raises(ConfigError, match=r"logits \[4, 5\], labels \[4, 1\]"):
        ClassCrossEntropy()(None, jnp.zeros((4, 5)), batch, StepContext(KEY))


@pytest.mark.report(
    "OpenNMT/OpenNMT-py#2209", "pytorch/torchtitan#3000",
    right="a loss over the whole batch is refused with parts of it, instead of summed",
)  # fmt: skip
def test_losses_of_whole_batches_take_no_parts():
    whole = SimpleNamespace(whole_batch=True)
    model = ModelConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, context_length=4)
    base = Experiment(
        name="a", model=model, data=Copy(vocab_size=5, length=2), batch_size=4, accumulation=2
    )
    object.__setattr__(base, "objective", whole)
    with pytest.raises(ConfigError, match=r"accumulation=2.*compares all rows"):
        recipe.build(base)
