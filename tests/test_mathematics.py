"""The mathematics of the specification, corrected: formulas against finite differences, numbers
against the library, its pages.

What follows is held elsewhere, and not again here:
tests/ops/test_worked_example.py: every matrix of the three-token example to 1e-6, float32 and
    float64 against NumPy; the Jacobians of softmax, layer norm and residuals and the gradients of
    attention, of the library against their formulas.
tests/tools/analysis/test_costs.py: the table of 22.35, 96.6, 502.5 and 3865 GFLOP; 12 d^2 + 13 d;
    6 d.
tests/training/test_optimizers.py: the peak of the Noam schedule.
tests/ops/test_feedforward.py: the two GELUs.
docs/specification.md names the test of every section.
"""

import importlib
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, ops, params
from jaxformer.evaluation import text_metrics
from jaxformer.models import PRESETS, ModelConfig
from jaxformer.tools.analysis import costs
from tests.ops import test_worked_example as example

ROOT = Path(__file__).parents[1]
PAGES = ("one-function-at-a-time", "specification")
RNG = np.random.default_rng(0)

# central differences with a step of 1e-6: h^2 and 1e-16 / h of values of order one
DIFFERENCES = dict(rtol=1e-6, atol=1e-8)


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def differences(function, x, step=1e-6):
    """d function / d x of a scalar function, by central differences in float64."""
    found = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        change = np.zeros_like(x)
        change[place] = step
        found[place] = (function(x + change) - function(x - change)) / (2 * step)
    return found


# Each identity yields (function of x, x, its gradient by the formula), and the same function of the
# library where no other test
# holds the library against the formula.


def attention_gradients(rng):
    q, k, v = example.Z @ example.W_QUERY, example.Z @ example.W_KEY, example.Z @ example.W_VALUE
    d_out, root = rng.normal(size=(3, 2)), np.sqrt(2)
    A = softmax(q @ k.T / root)
    dA = d_out @ v.T
    dS = A * (dA - (d_out * (A @ v)).sum(axis=1, keepdims=True))
    loss = lambda q, k, v: (softmax(q @ k.T / root) @ v * d_out).sum()
    yield lambda x: loss(x, k, v), q, dS @ k / root
    yield lambda x: loss(q, x, v), k, dS.T @ q / root
    yield lambda x: loss(q, k, x), v, A.T @ d_out


def softmax_gradient(rng):
    s, d_a = rng.normal(size=(2, 5))
    a = softmax(s)
    yield lambda s: softmax(s) @ d_a, s, a * (d_a - (a * d_a).sum())
    yield lambda s: softmax(s) @ d_a, s, d_a @ (np.diag(a) - np.outer(a, a))


def norm_gradients(rng):
    (x, scale, dy), eps = rng.normal(size=(3, 6)), 0.1  # large enough that forgetting it would show
    hat = lambda x: (x - x.mean()) / np.sqrt(x.var() + eps)
    g = scale * dy
    dx = (g - g.mean() - hat(x) * (g * hat(x)).mean()) / np.sqrt(x.var() + eps)
    yield lambda x: hat(x) * scale @ dy, x, dx
    yield lambda scale: hat(x) * scale @ dy, scale, dy * hat(x)
    size = lambda x: np.sqrt((x**2).mean() + eps)
    unit = x / size(x)
    ours = lambda x: ops.rms_norm(x, jnp.asarray(scale), eps) @ dy
    yield lambda x: x / size(x) * scale @ dy, x, (g - unit * (g * unit).mean()) / size(x), ours


def feedforward_gradients(rng):
    x, dy = rng.normal(size=(2, 3, 4))
    inputs = [x, *(rng.normal(size=shape) for shape in ((4, 8), (8,), (8, 4), (4,)))]
    _, up, b_up, down, _ = inputs
    loss = lambda x, up, b_up, down, b_down: (
        (np.maximum(x @ up + b_up, 0) @ down + b_down) * dy
    ).sum()
    ours = lambda x, up, b_up, down, b_down: (
        ops.mlp(x[None], up, down, jax.nn.relu, b_up, b_down)[0] * dy
    ).sum()
    z = x @ up + b_up
    dz = dy @ down.T * (z > 0)
    gradients = dz @ up.T, x.T @ dz, dz.sum(axis=0), np.maximum(z, 0).T @ dy, dy.sum(axis=0)
    for i, gradient in enumerate(gradients):
        of = lambda function, array, i=i: (
            lambda new: function(*map(array, inputs[:i]), new, *map(array, inputs[i + 1 :]))
        )
        yield of(loss, np.asarray), inputs[i], gradient, of(ours, jnp.asarray)


def loss_gradients(rng):
    logits = rng.normal(size=7)
    for e in (0.0, 0.1):
        target = (1 - e) * np.eye(7)[2] + e / 7
        yield (
            lambda logits, target=target: -target @ np.log(softmax(logits)),
            logits,
            softmax(logits) - target,
        )


def residual_gradients(rng):
    (x, dy), W = rng.normal(size=(2, 4)), rng.normal(size=(4, 4))
    # J_ij = d f_i / d x_j of f(x) = tanh(x W)
    I, slope = (
        np.eye(4),
        lambda x: W.T * (1 - np.tanh(x @ W)[:, None] ** 2),
    )
    hat = lambda x: (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    norm = lambda x: example.layer_norm_jacobian(x, np.ones(4), 1e-5)
    yield lambda x: (x + np.tanh(x @ W)) @ dy, x, dy @ (I + slope(x))
    yield lambda x: (x + np.tanh(hat(x) @ W)) @ dy, x, dy @ (I + slope(hat(x)) @ norm(x))
    yield lambda x: hat(x + np.tanh(x @ W)) @ dy, x, dy @ norm(x + np.tanh(x @ W)) @ (I + slope(x))


IDENTITIES = (
    attention_gradients,
    softmax_gradient,
    norm_gradients,
    feedforward_gradients,
    loss_gradients,
    residual_gradients,
)


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda f: f.__name__)
def test_gradients_are_finite_differences(identity):
    """The formulas of docs/one-function-at-a-time.md in float64 NumPy; the library's own gradients
    are these."""
    for function, x, gradient, *library in identity(np.random.default_rng(0)):
        np.testing.assert_allclose(gradient, differences(function, x), **DIFFERENCES)
        with jax.enable_x64(True):
            for ours in library:  # a handful of float64 roundings
                np.testing.assert_allclose(
                    jax.jit(jax.grad(ours))(x), gradient, rtol=1e-12, atol=1e-13
                )


def test_a_diagonal_is_half_of_the_layer_norms_jacobian():
    """J s = I - 1/d - xhat xhat^T / d projects on d - 2 directions: at most sqrt(2/d) of its norm
    is off the diagonal."""
    for d in (4, 6, 64):
        shares = []
        for x in RNG.normal(size=(50, d)):
            J = example.layer_norm_jacobian(x, np.ones(d), 1e-12)
            shares.append(np.linalg.norm(J - np.diag(np.diag(J))) / np.linalg.norm(J))
        assert max(shares) <= math.sqrt(2 / d) + 1e-9
        assert d != 6 or 0.45 < np.mean(shares) < 0.58


def test_the_second_row_of_the_scores_is_twice_the_first():
    """Token 1 is twice token 0: the printed example broke this.

    In both rows key 1 is ahead of key 2.
    """
    scores, weights = np.array(example.SCORES), np.array(example.WEIGHTS)
    np.testing.assert_allclose(scores[1], 2 * scores[0], atol=2e-6)
    assert (weights[:2, 1] > weights[:2, 2]).all() and weights[2, 1] < weights[2, 2]


@pytest.mark.parametrize(
    ("length", "share", "recurrent", "mebibytes"),
    [
        (128, 0.027, 0.17, 0.75),
        (512, 0.10, 0.67, 12),
        (2048, 0.31, 2.67, 192),
        (8192, 0.64, 10.7, 3072),
    ],
)
def test_what_grows_with_the_square(length, share, recurrent, mebibytes):
    """Its share of the FLOPs, its ratio to a recurrent layer (n / d), and the float32 scores of a
    layer, at d = 768."""
    base = ModelConfig(2, 12, 768, 12, context_length=8192, masks=(masks.full(),), heads=())
    flops = {row.name: row.flops for row in costs.parts(base, length)}
    total = 12 * (24 * length * 768**2 + 4 * length**2 * 768)
    assert sum(flops.values()) == pytest.approx(total)
    assert flops[costs.SCORES] / total == pytest.approx(share, abs=0.005)
    assert (
        length / 768 == pytest.approx(recurrent, rel=0.02)
        and 12 * length**2 * 4 / 2**20 == mebibytes
    )
    # as printed: feed-forward four times, multiply-adds as FLOPs
    wrong = 12 * (36 * length * 768**2 + 2 * length**2 * 768)
    assert abs(wrong / total - 1) > 0.05


def test_parameters_of_published_models():
    """Not 117M and 340M."""
    count = lambda name: params.count(params.abstract(models.spec(PRESETS[name])))
    assert count("gpt2_small") == 124_439_808 and count("bert_large_encoder") == 335_141_888


def test_a_gate_of_eight_thirds_costs_what_four_costs():
    d = 96
    plain = ModelConfig(2, 1, d, 4, context_length=4, use_bias=False, feedforward="relu")
    gated = replace(plain, feedforward="swiglu", d_ff=8 * d // 3)
    size = lambda config: params.count(models.spec(config)["layers"]["feedforward"])
    assert size(plain) == size(gated) == 8 * d**2


@pytest.mark.thorough
def test_a_penalty_belongs_after_the_division():
    """(Q K^T + M) / sqrt(d) is another softmax for a finite M, the same for -inf."""
    q, k = RNG.normal(size=(2, 4, 16))
    near = -np.abs(np.subtract.outer(np.arange(4), np.arange(4))).astype(float)
    after, before = softmax(q @ k.T / 4 + near), softmax((q @ k.T + near) / 4)
    assert np.abs(after - before).max() > 0.05
    hidden = np.where(np.tri(4), 0, -np.inf)
    np.testing.assert_allclose(
        softmax(q @ k.T / 4 + hidden), softmax((q @ k.T + hidden) / 4), rtol=1e-12
    )
    heads = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, k))
    ours = ops.attention(
        *heads, bias=jnp.asarray(near, jnp.float32)[None, None], return_weights=True
    )[1][0, 0]
    np.testing.assert_allclose(ours, after, atol=1e-6)


def test_without_a_feature_map_denominators_have_both_signs():
    q, k = RNG.normal(size=(2, 64, 4))
    plain = (q @ k.T).sum(axis=1)
    phi = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    positive = (phi(q) @ phi(k).T).sum(axis=1)
    assert plain.min() < 0 < plain.max() and positive.min() > 0


def test_a_logarithm_with_a_constant_has_another_gradient():
    """-log(p + 1e-9) of an unlikely label pulls with p / (p + 1e-9) of the force of cross
    entropy."""
    logits = np.array([0.0, 20.0])
    p = softmax(logits)[0]
    gradient = differences(lambda logits: -np.log(softmax(logits)[0] + 1e-9), logits, 1e-4)[0]
    assert gradient == pytest.approx((p - 1) * p / (p + 1e-9), rel=1e-4) and p / (p + 1e-9) < 0.7


def test_bleu_punishes_short_texts():
    """min(1, e^(1 - r/c)) exp(mean of log p_n), with clipped p_n: 6/6, 4/5, 3/4, 2/3."""
    text, reference = "the cat sat on the mat", "the cat sat on the red mat"
    precision = (6 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert text_metrics.bleu([text], [reference])["bleu"] == pytest.approx(
        100 * math.exp(1 - 7 / 6) * precision
    )


# the pages


def blocks(page):
    return re.findall(
        r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), flags=re.DOTALL
    )


@pytest.mark.thorough
def test_the_page_runs(capsys):
    """One block after the other, as they are read; each prints what it says."""
    names, count = {"__name__": "__page__"}, 0
    for block in blocks("one-function-at-a-time"):
        exec(compile(block, "one-function-at-a-time", "exec"), names)
        printed, said = (
            capsys.readouterr().out.splitlines(),
            re.findall(r"print\(.*\)\s+# (.*)", block),
        )
        assert said == printed
        count += len(said)
    assert count >= 60


@pytest.mark.thorough
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs/notebooks/worked_example.py"), run_name="__main__")
    assert (tmp_path / "worked_example.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    # a weight, an output, a sum of exponentials, a gradient
    for number in (
        0.274039,
        0.604086,
        4.841991,
        0.060482,
    ):
        assert f"{number:.6f}" in printed


@pytest.mark.parametrize("page", PAGES)
def test_names_on_the_page_exist(page):
    """Every `jaxformer.x.y`, every file, and every test in brackets behind its file."""
    text = (ROOT / f"docs/{page}.md").read_text()
    for name in set(re.findall(r"`(jaxformer(?:\.\w+)+)", text)):
        assert exists(name), name
    for path, test in set(
        re.findall(r"`((?:tests|experiments|docs|jaxformer)/[\w./-]*)`(?: \(`(\w+)`\))?", text)
    ):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}: {test}"
    for link, anchor in set(re.findall(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", text)):
        headings = re.findall(r"^#+ (.*)", (ROOT / "docs" / link).read_text(), flags=re.MULTILINE)
        assert not anchor or anchor in {
            re.sub(r"\W+", "-", heading.lower()) for heading in headings
        }, f"{link}#{anchor}"


def exists(name):
    """Whether it is a module, or an attribute of one: a package may offer a function that has the
    name of one of its files."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_specification_is_complete():
    """Each of the 12 + 4 + 8 + 12 + 14 corrections has its mark in a row of the table of its
    document."""
    *parts, in_passing = re.split(r"\n## ", (ROOT / "docs/specification.md").read_text())[1:]
    assert [part[:2] for part in parts] == ["A.", "B.", "C.", "D.", "E."]
    assert in_passing.startswith("What the documents name in passing")
    for part, count in zip(parts, (12, 4, 8, 12, 14), strict=True):
        letter = part[0]
        marks = {int(number) for number in re.findall(rf"\b{letter}(\d+)\b", part)}
        assert marks == set(range(1, count + 1)), (letter, marks)
        rows = [row for row in part.splitlines() if row.startswith("|")]
        assert all(row.count(" |") == 4 for row in rows[2:]), part.splitlines()[0]
