"""The Evoformer beside a second definition: NumPy in float64, one family, one cell at a time."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full
from jaxformer.models import Embedding, ModelConfig, blocks
from jaxformer.models.config import Learned
from jaxformer.objectives import StepContext
from jaxformer.zoo import evoformer, triangles
from jaxformer.zoo.alignments import Alignment, AlignmentUpdate, PairUpdate, unpack
from jaxformer.zoo.distogram import Distogram, PairCrossEntropy

B, S, R, C, Z, N = 2, 5, 6, 8, 12, 2
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=C,
    num_heads=N,
    context_length=R,
    d_ff=10,
    positions=None,
    masks=(full(),),
    embedding=Alignment(5, pair_width=Z, farthest=3),
    mixer=AlignmentUpdate(),
    feedforward=PairUpdate(num_heads=3, triangle_width=7, outer_width=3, d_ff=9),
    block=blocks.bare,
    heads=(Distogram(4),),
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normed(tree, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return x * tree["scale"] + tree["bias"]


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def one_line(tree, x, seen, bias):
    """Gated attention over the cells x [T, C] of one line. `bias` is [N, T, T]."""
    T, heads = len(x), tree["gate"]["bias"].shape[0]
    out = np.zeros((T, tree["out"]["kernel"].shape[-1]))
    for n in range(heads):
        q, k, v = (x @ tree["query_key_value"]["kernel"][:, i, n] for i in range(3))
        gate = sigmoid(x @ tree["gate"]["kernel"][:, n] + tree["gate"]["bias"][n])
        for t in range(T):
            scores = np.array([q[t] @ k[s] / math.sqrt(q.shape[1]) for s in range(T)])
            weights = np.zeros(T)
            if seen.any():
                weights[seen] = softmax((scores + bias[n, t])[seen])
            out[t] += (gate[t] * (weights @ v)) @ tree["out"]["kernel"][n]
    return out + tree["out"]["bias"]


def bias_of(tree, pairs):
    return np.einsum("ijz,zn->nij", pairs, tree["bias"]["kernel"])


def row(tree, m, z, mask):
    x, bias = normed(tree["norm"], m), bias_of(tree, normed(tree["pair_norm"], z))
    return np.stack([one_line(tree, x[s], mask[s], bias) for s in range(len(m))])


def column(tree, m, mask):
    x = normed(tree["norm"], m)
    bias = np.zeros((len(tree["gate"]["bias"]), len(m), len(m)))
    columns = [one_line(tree, x[:, r], mask[:, r], bias) for r in range(m.shape[1])]
    return np.stack(columns, axis=1)


def transition(tree, x):
    hidden = np.maximum(normed(tree["norm"], x) @ tree["up"]["kernel"] + tree["up"]["bias"], 0)
    return hidden @ tree["down"]["kernel"] + tree["down"]["bias"]


def outer(tree, m, mask):
    x = normed(tree["norm"], m)
    kernel, bias = tree["factors"]["kernel"], tree["factors"]["bias"]
    a, b = (x @ kernel[:, i] + bias[i] for i in range(2))
    found = np.zeros((m.shape[1], m.shape[1], tree["out"]["bias"].shape[0]))
    for i in range(m.shape[1]):
        for j in range(m.shape[1]):
            both = [s for s in range(len(m)) if mask[s, i] and mask[s, j]]
            mean = sum((np.outer(a[s, i], b[s, j]) for s in both), np.zeros((3, 3)))
            mean = mean / max(len(both), 1)
            found[i, j] = np.einsum("cd,cdz->z", mean, tree["out"]["kernel"])
    return found + tree["out"]["bias"]


def product(tree, z, residues, edges):
    """A triangle update; `edges(i, j, k)` names the two edges that multiply."""
    x, length = normed(tree["norm"], z), len(z)

    def factor(kind):
        gate = x @ tree["factor_gates"]["kernel"][:, kind] + tree["factor_gates"]["bias"][kind]
        value = x @ tree["factors"]["kernel"][:, kind] + tree["factors"]["bias"][kind]
        return sigmoid(gate) * value * (residues[:, None] & residues)[..., None]

    a, b = factor(0), factor(1)
    sums = np.zeros_like(a)
    for i in range(length):
        for j in range(length):
            for k in range(length):
                first, second = edges(i, j, k)
                sums[i, j] += a[first] * b[second]
    update = normed(tree["product_norm"], sums) @ tree["out"]["kernel"] + tree["out"]["bias"]
    return sigmoid(x @ tree["gate"]["kernel"] + tree["gate"]["bias"]) * update


def outgoing(tree, z, residues):
    return product(tree, z, residues, lambda i, j, k: ((i, k), (j, k)))


def incoming(tree, z, residues):
    return product(tree, z, residues, lambda i, j, k: ((k, i), (k, j)))


def starting(tree, z, residues):
    x = normed(tree["norm"], z)
    bias = bias_of(tree, x)
    return np.stack([one_line(tree, x[i], residues, bias) for i in range(len(z))])


def ending(tree, z, residues):
    """Each j has a line of its own: the cells k-j over k; the bias of i and k is that of k-i."""
    x = normed(tree["norm"], z)
    bias = bias_of(tree, x).transpose(0, 2, 1)
    lines = [one_line(tree, x[:, j], residues, bias) for j in range(len(z))]
    return np.stack(lines, axis=1)


def layer(tree, m, z, mask):
    """Algorithm 6, one layer, line by line."""
    of_m, of_z = tree["attention"], tree["feedforward"]
    residues = mask.any(axis=0)
    m = m + row(of_m["row"], m, z, mask)
    m = m + column(of_m["column"], m, mask)
    m = m + transition(of_m["transition"], m)
    z = z + outer(of_z["outer_product"], m, mask)
    for name, update in [
        ("outgoing", outgoing), ("incoming", incoming), ("starting", starting), ("ending", ending)
    ]:  # fmt: skip
        z = z + update(of_z[name], z, residues)
    return m, z + transition(of_z["transition"], z)


def model_of(tree, types, mask, places):
    """(m, z, logits) of one family."""
    e = tree["embedding"]
    types = np.where(mask, types, 0)
    m = e["cell"][types] + e["first"][types[0]]
    z = np.zeros((len(places), len(places), Z))
    for i, of_i in enumerate(places):
        for j, of_j in enumerate(places):
            distance = min(max(of_i - of_j, -3), 3) + 3
            pair = e["left"][types[0, i]] + e["right"][types[0, j]]
            z[i, j] = pair + e["distance"][distance]
    for i in range(2):
        m, z = layer(jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]), m, z, mask)
    head = tree["heads"]["distogram"]
    return m, z, (z + z.transpose(1, 0, 2)) @ head["kernel"] + head["bias"]


def random_parameters(spec, seed=0):
    """Every parameter random: at the start of training many are zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), jnp.float32), spec
    )


def cells(seed=0):
    """(alignment, pairs, mask): random, with missing cells and one residue of padding."""
    rng = np.random.default_rng(seed)
    m = rng.standard_normal((B, S, R, C)).astype(np.float32)
    z = rng.standard_normal((B, R, R, Z)).astype(np.float32)
    mask = rng.random((B, S, R)) < 0.7
    mask[1, :, -1] = False
    return m, z, mask


PARTS = {
    "row": (triangles.attention_spec(C, N, 3, Z) | {"pair_norm": triangles.norm_spec(Z)}, "mzk"),
    "column": (triangles.attention_spec(C, N, 3), "mk"),
    "outer": (evoformer.outer_product_spec(C, 3, Z), "mk"),
    "transition": (evoformer.transition_spec(Z, 7), "z"),
    "outgoing": (triangles.multiplication_spec(Z, 7), "zr"),
    "incoming": (triangles.multiplication_spec(Z, 7), "zr"),
    "starting": (triangles.attention_spec(Z, 3, 5, Z), "zr"),
    "ending": (triangles.attention_spec(Z, 3, 5, Z), "zr"),
}
OURS = {
    "row": evoformer.row_attention,
    "column": evoformer.column_attention,
    "outer": evoformer.outer_product_mean,
    "transition": evoformer.transition,
    "outgoing": triangles.multiply_outgoing,
    "incoming": triangles.multiply_incoming,
    "starting": triangles.attend_starting,
    "ending": triangles.attend_ending,
}
THEIRS = dict(
    row=row, column=column, outer=outer, transition=transition,
    outgoing=outgoing, incoming=incoming, starting=starting, ending=ending,
)  # fmt: skip


def arguments(name, seed):
    m, z, mask = cells(seed)
    values = {"m": m, "z": z, "k": mask, "r": mask.any(axis=1)}
    return [values[letter] for letter in PARTS[name][1]]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PARTS)
def test_a_module_equals_its_definition(name, seed):
    tree = random_parameters(PARTS[name][0], seed)
    given = arguments(name, seed)
    found = OURS[name](tree, *map(jnp.asarray, given))
    wide = jax.tree.map(np.float64, tree)
    expected = np.stack(
        [THEIRS[name](wide, *(np.float64(x[b]) if x.dtype != bool else x[b] for x in given))
         for b in range(B)]
    )  # fmt: skip
    # float32: sums of some hundred products, and a norm that divides
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.thorough
@pytest.mark.parametrize("name", PARTS)
def test_bfloat16_keeps_what_matters_and_gradients_are_finite(name):
    tree = random_parameters(PARTS[name][0])
    given = arguments(name, 0)
    low = [jnp.asarray(x, jnp.bfloat16) if x.dtype != bool else jnp.asarray(x) for x in given]
    exact = OURS[name](tree, *map(jnp.asarray, given))
    found = OURS[name](tree, *low)
    assert found.dtype == jnp.bfloat16
    # 8 bits: a few hundredths of the largest value
    np.testing.assert_allclose(np.float32(found), exact, atol=0.05 * float(np.abs(exact).max()))
    hidden = [jnp.zeros_like(x) if x.dtype == bool else jnp.asarray(x) for x in given]
    for values in (list(map(jnp.asarray, given)), hidden):  # all cells missing, too
        gradients = jax.grad(lambda tree, x=values: OURS[name](tree, *x).sum())(tree)
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    bins = rng.integers(-1, 4, (B, R, R)).astype(np.int32)
    types = rng.integers(5, size=(B, S, R)).astype(np.int32)
    return {
        "alignment": jnp.asarray(types),
        "padding_mask": jnp.asarray(cells(seed)[2]),
        "bins": jnp.asarray(bins),
        "weights": jnp.ones(B),
    }


@pytest.mark.thorough
def test_a_model_equals_its_definition():
    """With missing cells, and with residues that the chain lacks: their places jump."""
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    places = np.array([0, 1, 2, 7, 8, 9])
    output = models.apply(
        MODEL, tree, batch["alignment"], inputs={"padding_mask": batch["padding_mask"]},
        positions=jnp.asarray(places)[None],
    )  # fmt: skip
    m, z = unpack(MODEL, output.hidden)
    wide = jax.tree.map(np.float64, tree)
    for b in range(B):
        mask = np.asarray(batch["padding_mask"][b])
        expected = model_of(wide, np.asarray(batch["alignment"][b]), mask, places)
        for found, each in zip((m[b], z[b], output.logits[b]), expected, strict=True):
            # float32: the residual stream adds up the errors of 18 modules
            np.testing.assert_allclose(found, each, atol=1e-4 * np.abs(each).max())


@pytest.mark.thorough
def test_padding_changes_nothing():
    """More sequences and more residues that are missing, whatever stands there."""
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    mask = jnp.ones((B, S, R), bool)
    alone = models.apply(MODEL, tree, batch["alignment"], inputs={"padding_mask": mask}).logits
    wide = ((0, 0), (0, 3), (0, 2))
    padded = jnp.pad(batch["alignment"], wide, constant_values=99)
    flags = jnp.pad(mask, wide)
    found = models.apply(MODEL, tree, padded, inputs={"padding_mask": flags}).logits
    # float32: sums of other lengths are rounded in another order
    np.testing.assert_allclose(found[:, :R, :R], alone, atol=1e-4 * float(jnp.abs(alone).max()))
    assert jnp.isfinite(found).all()
    none = models.apply(MODEL, tree, batch["alignment"]).logits
    np.testing.assert_array_equal(none, alone)


@pytest.mark.thorough
def test_the_order_of_sequences_matters_to_none_but_the_first():
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    order = jnp.array([0, 3, 1, 4, 2])
    found, expected = (
        models.apply(MODEL, tree, types).logits
        for types in (batch["alignment"][:, order], batch["alignment"])
    )
    np.testing.assert_allclose(found, expected, atol=1e-4 * float(jnp.abs(expected).max()))
    np.testing.assert_allclose(found, found.swapaxes(1, 2), atol=1e-5 * float(abs(found).max()))


@pytest.mark.thorough
def test_a_new_layer_adds_nothing_and_its_gates_are_open():
    """Maps back into the stream start at zero, gates at sigmoid(1)."""
    for path, leaf in parameters.paths(models.spec(MODEL)).items():
        values = leaf.init(jax.random.key(0), leaf.shape, jnp.float32)
        name = path.split("/")[-2]
        if name in ("out", "down", "distogram"):
            assert (values == 0).all(), path
        if "gate" in name:
            assert (values == (1 if path.endswith("bias") else 0)).all(), path


@pytest.mark.thorough
def test_the_loss_is_a_mean_over_counted_pairs():
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    batch["weights"] = jnp.array([1.0, 0.0])
    model = models.evaluation(MODEL)
    sums = PairCrossEntropy()(model, tree, batch, StepContext(jax.random.key(0)))
    inputs = {"padding_mask": batch["padding_mask"]}
    logits = np.float64(models.apply(model, tree, batch["alignment"], inputs=inputs).logits[0])
    losses, right = [], []
    for i in range(R):
        for j in range(R):
            k = int(batch["bins"][0, i, j])
            if k >= 0:
                losses.append(-np.log(softmax(logits[i, j])[k]))
                right.append(logits[i, j].argmax() == k)
    np.testing.assert_allclose(sums.loss, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(sums.metrics["bins_accuracy"][0], np.mean(right), rtol=1e-6)
    assert sums.weight == 1 and sums.unit == "alignments"
    batch["bins"] = batch["bins"].at[0, 0, 0].set(4)
    assert np.isnan(PairCrossEntropy()(model, tree, batch, StepContext(jax.random.key(0))).loss)
    batch["bins"] = jnp.full((B, R, R), -1)
    assert PairCrossEntropy()(model, tree, batch, StepContext(jax.random.key(0))).loss == 0


@pytest.mark.thorough
def test_dropout_is_shared_and_acts_in_training_alone():
    x = jnp.ones((2, 3, 4, 5))
    for axis in (1, 2):
        found = evoformer.shared_dropout(x, 0.5, jax.random.key(axis), axis)
        first = jnp.take(found, jnp.array([0]), axis=axis)
        np.testing.assert_array_equal(found, jnp.broadcast_to(first, x.shape))
        assert set(np.unique(found)) == {0.0, 2.0}
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    key = jax.random.key(0)
    for half in ("mixer", "feedforward"):
        part = replace(getattr(MODEL, half), dropout_rate=0.5)
        model = replace(models.evaluation(MODEL), **{half: part})
        plain, dropped = (
            models.apply(model, tree, batch["alignment"], dropout_key=each).logits
            for each in (None, key)
        )
        assert jnp.abs(plain - dropped).max() > 1e-3 * jnp.abs(plain).max()
        scored = models.evaluation(model)
        again = models.apply(scored, tree, batch["alignment"], dropout_key=key).logits
        np.testing.assert_array_equal(again, plain)


@pytest.mark.thorough
def test_a_scan_gives_what_single_layers_give():
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    found, expected = (
        models.apply(replace(MODEL, **options), tree, batch["alignment"]).logits
        for options in ({"unroll": 1, "remat": "full"}, {"unroll": 2})
    )
    np.testing.assert_allclose(found, expected, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    tree, batch = random_parameters(models.spec(MODEL)), batch_of()
    types = batch["alignment"]
    for changes, named in [
        ({"positions": Learned()}, "positions=None"),
        ({"masks": (causal(),)}, r"masks=\(full\(\),\)"),
        ({"embedding": Embedding(), "vocab_size": 5}, "zoo.Alignment"),
    ]:
        with pytest.raises(ConfigError, match=named):
            models.spec(replace(MODEL, **changes))
    with pytest.raises(ConfigError, match=r"integers \[B, S, R\]"):
        models.apply(MODEL, tree, types[:, 0])
    with pytest.raises(ConfigError, match=r"mask \[2, 5\]"):
        models.apply(MODEL, tree, types, inputs={"padding_mask": batch["padding_mask"][:, :, 0]})
    with pytest.raises(ConfigError, match="segment_ids"):
        models.apply(MODEL, tree, types, segment_ids=jnp.ones((B, R), jnp.int32))
    with pytest.raises(ConfigError, match="expected logits of each pair"):
        fewer = batch | {"bins": batch["bins"][:, 1:]}
        PairCrossEntropy()(MODEL, tree, fewer, StepContext(jax.random.key(0)))
    with pytest.raises(ConfigError, match="bins"):
        Distogram(1)
    assert np.isnan(models.apply(MODEL, tree, types.at[0, 0, 0].set(5)).logits[0]).any()
