"""Losses: what users of others reported, tried here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.ops.dropout import dropout
from jaxformer.ops.losses import cross_entropy, projected_cross_entropy
from jaxformer.training import ClassCrossEntropy, TokenCrossEntropy

V = 7
LOGITS = jax.random.normal(jax.random.key(0), (5, V)) * 3
LABELS = jnp.array([0, 6, 2, 2, 5])


def by_hand(logits, labels, smoothing=0.0, z=0.0):
    """Loss of each token in float64."""
    logits = np.asarray(logits, np.float64)
    total = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.asarray(labels)[:, None], -1)[:, 0]
    return (1 - smoothing) * (total - picked) + smoothing * (total - logits.mean(-1)) + z * total**2


def value_and_grad(logits, labels, weights=None, **options):
    """(sum of losses, its gradient)."""
    return jax.value_and_grad(lambda x: cross_entropy(x, labels, weights, **options).loss)(logits)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#73205", listed="second 21",
    right="smoothing and z-loss count no token of weight 0, whatever its label",
)  # fmt: skip
def test_ignored_tokens_have_no_smoothing():
    weights = jnp.array([1.0, 0, 1, 0, 1])
    labels = LABELS.at[1].set(-100).at[3].set(V + 3)
    sums = cross_entropy(LOGITS, labels, weights, label_smoothing=0.2, z_loss=0.01)
    expected = by_hand(LOGITS[::2], LABELS[::2], 0.2, 0.01).sum()
    np.testing.assert_allclose([sums.loss, sums.weight], [expected, 3], rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "eladhoffer/utils.pytorch#4",
    "huggingface/transformers#7546",
    right=(
        "the mean is over tokens that count: padding changes neither loss nor gradient of a token"
    ),
)
def test_padding_does_not_dilute_the_mean():
    alone, padded = (
        cross_entropy(LOGITS, LABELS, w, label_smoothing=0.1) for w in (None, jnp.ones(5))
    )
    more = cross_entropy(
        jnp.pad(LOGITS, ((0, 20), (0, 0))),
        jnp.pad(LABELS, (0, 20)),
        jnp.pad(jnp.ones(5), (0, 20)),
        label_smoothing=0.1,
    )
    for sums in (padded, more):
        np.testing.assert_allclose(sums.loss / sums.weight, alone.loss / 5, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "sooftware/kospeech#37", "tinygrad/tinygrad#3570",
    right="NaN or inf in the logits of an ignored token reaches neither the loss nor the gradient",
)  # fmt: skip
def test_bad_logits_of_ignored_tokens():
    weights = jnp.array([1.0, 0, 1, 0, 1])
    bad = LOGITS.at[1].set(jnp.nan).at[3].set(jnp.inf)
    for options in ({}, {"label_smoothing": 0.3, "z_loss": 0.1}):
        loss, gradient = value_and_grad(bad, LABELS, weights, **options)
        expected, right = value_and_grad(LOGITS, LABELS, weights, **options)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_array_equal(gradient, right)


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/pytext#1698", "harvardnlp/annotated-transformer#109",
    right="smoothing is spread over the classes that are possible; a logit of -inf is none",
    hit="one logit of -inf made the smoothed loss of the whole batch inf",
)  # fmt: skip
def test_smoothing_over_possible_classes():
    banned = LOGITS.at[:, 3].set(-jnp.inf)
    loss, gradient = value_and_grad(banned, LABELS, label_smoothing=0.1)
    expected = by_hand(np.delete(LOGITS, 3, 1), LABELS - (LABELS > 3), 0.1).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert np.isfinite(gradient).all() and (gradient[:, 3] == 0).all()
    # what is no number stays seen, and an impossible label is infinitely wrong
    assert np.isnan(cross_entropy(LOGITS.at[0, 3].set(jnp.nan), LABELS, label_smoothing=0.1).loss)
    assert cross_entropy(banned, LABELS.at[0].set(3), label_smoothing=0.1).loss == np.inf


@pytest.mark.thorough
@pytest.mark.report(
    "mosaicml/examples#457", "allenai/bi-att-flow#71",
    right="class 0 and the last class are classes as the others",
)  # fmt: skip
def test_first_and_last_class_count():
    for label in (0, V - 1):
        sums = cross_entropy(LOGITS, jnp.full(5, label))
        np.testing.assert_allclose(sums.loss, by_hand(LOGITS, [label] * 5).sum(), rtol=1e-6)
        assert sums.weight == 5
    # seen, not clipped to the last class
    assert np.isnan(cross_entropy(LOGITS, jnp.full(5, V)).loss)


@pytest.mark.thorough
@pytest.mark.report(
    "OpenNMT/OpenNMT#570",
    "OpenNMT/OpenNMT-py#1463",
    right=(
        "an ignored label of -100 takes nothing away from any class: all classes share the "
        "smoothing"
    ),
)
def test_targets_of_smoothing_sum_to_one():
    gradient = value_and_grad(
        LOGITS, LABELS.at[0].set(-100), jnp.array([0, 1.0, 1, 1, 1]), label_smoothing=0.3
    )[1]
    target = np.asarray(jax.nn.softmax(LOGITS) - gradient)[1:]
    expected = 0.7 * np.eye(V)[np.asarray(LABELS)[1:]] + 0.3 / V
    np.testing.assert_allclose(target, expected, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "linkedin/Liger-Kernel#968", "linkedin/Liger-Kernel#1298",
    right="the chunked loss has the gradient of each token's own weight",
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_chunks_with_a_weight_for_each_token(chunk):
    hidden = jax.random.normal(jax.random.key(1), (2, 5, 3))
    head = jax.random.normal(jax.random.key(2), (V, 3))
    labels = jax.random.randint(jax.random.key(3), (2, 5), 0, V)
    weights = jnp.arange(10.0).reshape(2, 5) / 7

    def whole(hidden, head):
        return cross_entropy(
            jnp.einsum("btd,vd->btv", hidden, head, precision="highest"), labels, weights
        ).loss

    def chunked(hidden, head):
        return 3 * projected_cross_entropy(hidden, head, labels, weights, chunk=chunk).loss

    for found, expected in zip(
        *(jax.grad(f, (0, 1))(hidden, head) for f in (chunked, whole)), strict=True
    ):
        np.testing.assert_allclose(found, 3 * expected, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "linkedin/Liger-Kernel#512", "linkedin/Liger-Kernel#827",
    right="with bfloat16 operands the loss and its sums are float32, over many tokens",
)  # fmt: skip
def test_bfloat16_operands_have_float32_losses():
    hidden = jax.random.normal(jax.random.key(1), (1, 600, 4)).astype(jnp.bfloat16)
    head = jax.random.normal(jax.random.key(2), (V, 4)).astype(jnp.bfloat16)
    labels = jax.random.randint(jax.random.key(3), (1, 600), 0, V)
    sums = projected_cross_entropy(hidden, head, labels, chunk=50)
    logits = np.asarray(hidden, np.float64)[0] @ np.asarray(head, np.float64).T
    assert sums.loss.dtype == jnp.float32 and sums.weight == 600  # 600 ones in bfloat16 are 256
    np.testing.assert_allclose(sums.loss, by_hand(logits, labels[0]).sum(), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "linkedin/Liger-Kernel#320",
    right="the cap of logits is in the chunked loss, and in its gradient",
)  # fmt: skip
def test_capped_logits_in_chunks():
    hidden = 4 * jax.random.normal(jax.random.key(1), (1, 4, 3))
    head = jax.random.normal(jax.random.key(2), (V, 3))
    labels = jnp.array([[0, 3, 6, 2]])
    capped = lambda x: 2 * jnp.tanh(jnp.einsum("btd,vd->btv", x, head, precision="highest") / 2)
    whole = jax.value_and_grad(lambda x: cross_entropy(capped(x), labels).loss)(hidden)
    parts = jax.value_and_grad(
        lambda x: projected_cross_entropy(x, head, labels, softcap=2.0, chunk=3).loss
    )(hidden)
    for found, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "linkedin/Liger-Kernel#507",
    right="a loss is computed whether or not a gradient is asked for",
)  # fmt: skip
def test_the_loss_without_a_gradient():
    hidden, labels = jax.random.normal(jax.random.key(1), (1, 4, 3)), jnp.zeros((1, 4), int)
    loss = lambda x: projected_cross_entropy(x, jnp.eye(V, 3), labels).loss
    np.testing.assert_allclose(loss(hidden), jax.value_and_grad(loss)(hidden)[0], rtol=1e-6)
    assert loss(hidden) > 0


@pytest.mark.thorough
@pytest.mark.report(
    "google/flax#2593",
    right=(
        "another key is another mask, and the same key the same one; rate 1 keeps nothing, "
        "without NaN"
    ),
)
def test_dropout_at_its_ends():
    value, gradient = jax.value_and_grad(lambda x: dropout(x, 1.0, jax.random.key(0)).sum())(
        jnp.ones(4)
    )
    assert value == 0 and (gradient == 0).all()
    masks = [dropout(jnp.ones(64), 0.5, jax.random.key(i)) for i in range(2)]
    assert (masks[0] != masks[1]).any()
    np.testing.assert_array_equal(masks[0], dropout(jnp.ones(64), 0.5, jax.random.key(0)))


@pytest.mark.report(
    "Dao-AILab/flash-attention#771",
    listed="second 22",
    right=(
        "a dropped weight is scaled by 1 / (1 - rate) in float32, so that the mean stays in "
        "bfloat16"
    ),
)
def test_dropout_keeps_the_mean():
    x = jnp.ones(2**14, jnp.bfloat16)
    mean = np.asarray(partial(dropout, x, 0.1)(jax.random.key(0)), np.float64).mean()
    assert abs(mean - 1) < 4 * (0.1 / 0.9 / 2**14) ** 0.5 + 2**-9


# --- shapes and numbers that are handed in


@pytest.mark.report(
    "google-deepmind/optax#205",
    "elixir-nx/axon#662",
    right="labels and weights of another shape than the tokens' are refused by name",
    hit=(
        "one label was spread over all tokens, and one weight counted once for the sum of all: "
        "the loss was twice too large"
    ),
)
@pytest.mark.parametrize("shape", [(1,), (5, 1), (), (4,)])
def test_labels_and_weights_are_not_spread(as_users_call, shape):
    other = jnp.ones(shape, int)
    with pytest.raises(ValueError, match="cross_entropy: labels"):
        cross_entropy(LOGITS, other)
    with pytest.raises(ValueError, match="cross_entropy: weights"):
        cross_entropy(LOGITS, LABELS, other)
    hidden, head = jnp.ones((1, 5, 3)), jnp.ones((V, 3))
    with pytest.raises(ValueError, match="projected_cross_entropy: labels"):
        projected_cross_entropy(hidden, head, other)
    with pytest.raises(ValueError, match="projected_cross_entropy: weights"):
        projected_cross_entropy(hidden, head, LABELS[None], other)


@pytest.mark.report(
    "NVIDIA/Megatron-LM#6590",
    "EricLBuehler/mistral.rs#1930",
    right="a softcap of 0 and a chunk below 1 are refused",
    hit=(
        "a softcap of 0 made all logits 0, a loss of log V; a chunk of 0 was the default, and -1 "
        "an error of a reshape"
    ),
)
def test_options_of_the_projected_loss_are_checked():
    hidden, head = jnp.ones((1, 5, 3)), jnp.ones((V, 3))
    for options in (
        {"softcap": 0.0},
        {"softcap": -2.0},
        {"softcap": float("nan")},
        {"chunk": 0},
        {"chunk": -1},
    ):
        with pytest.raises(ValueError, match=f"projected_cross_entropy: {next(iter(options))}"):
            projected_cross_entropy(hidden, head, LABELS[None], **options)


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#16049",
    right="forward mode is refused by the error of the other functions, which says what to take",
    hit="JAX's own TypeError about a custom_vjp function",
)
def test_forward_mode_of_the_projected_loss_says_what_to_take():
    hidden, head = jnp.ones((1, 5, 3)), jnp.ones((V, 3))
    loss = lambda hidden: projected_cross_entropy(hidden, head, LABELS[None]).loss
    with pytest.raises(NotImplementedError, match="projected_cross_entropy: no forward mode"):
        jax.jvp(loss, (hidden,), (hidden,))
    # in reverse, twice
    assert jnp.isfinite(jax.grad(lambda h: jnp.vdot(jax.grad(loss)(h), h))(hidden)).all()


@pytest.mark.report(
    "jax-ml/jax#23829", "keras-team/keras#21115",
    right="labels of NumPy's 64 bits are labels, without a warning, and 2^32 is not label 0",
    hit="a warning about int64 at each call",
)  # fmt: skip
def test_labels_of_64_bits(as_users_call, recwarn):
    labels = np.array([0, 6, 2, 2, 5], np.int64)
    assert float(cross_entropy(LOGITS, labels).loss) == float(cross_entropy(LOGITS, LABELS).loss)
    assert jnp.isnan(cross_entropy(LOGITS, labels + 2**32).loss)
    assert not recwarn.list


@pytest.mark.report(
    "pytorch/pytorch#134767",
    "keras-team/keras#23504",
    "pykeen/pykeen#1580",
    right=(
        "a label smoothing outside of [0, 1) is refused, by the objective of tokens and by that "
        "of classes"
    ),
    hit="ClassCrossEntropy took -3, 1.5 and NaN, and trained on negative targets",
)
@pytest.mark.parametrize("objective", [TokenCrossEntropy, ClassCrossEntropy])
@pytest.mark.parametrize("share", [-3.0, 1.0, 1.5, float("nan")])
def test_a_smoothing_is_a_share(objective, share):
    with pytest.raises(ConfigError, match=f"label_smoothing={share}"):
        objective(label_smoothing=share)
    objective(label_smoothing=0.5)
