"""Each picture is drawn for light and for dark pages; encodings have the symmetry that the papers
claim."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments.theory import positions
from jaxformer import models
from jaxformer.masks import bigbird, causal, longformer, window
from jaxformer.models import ModelConfig, Sinusoidal
from jaxformer.models.config import Alibi, Axial, Learned, Relative
from jaxformer.ops.bias import shaw
from jaxformer.ops.positions import Rope
from jaxformer.tools.analysis import costs, figures
from jaxformer.tools.analysis.scaling import HOFFMANN

TINY = ModelConfig(50, 2, 32, 4, context_length=24)


def own(config):
    query, table = (
        jax.random.normal(jax.random.key(0), (1, 1, 4, 8)),
        jax.random.normal(jax.random.key(1), (9, 8)),
    )
    return shaw(jax.numpy.broadcast_to(query, (1, 24, 4, 8)), table)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "shifts"),
    [
        (Sinusoidal(), True),
        (Rope(), True),
        (Alibi(), True),
        (Relative(), True),
        (Relative(bidirectional=False), True),
        (own, True),  # Shaw et al. with the same query everywhere
        ((None, Rope(fraction=0.5)), True),
        (Learned(), False),
        (Axial((4, 6), (16, 16)), False),
    ],
)
def test_scores_depend_on_the_distance(kind, shifts):
    config = replace(TINY, positions=kind)
    found = positions.encoding(config, models.init(config, jax.random.key(2)), 24)
    assert found.scores.shape == (24, 24) and found.values.shape[1] == 24
    by_hand = (
        max(np.ptp(np.diagonal(found.scores, k)) for k in range(-22, 23))
        / np.abs(found.scores).max()
    )
    assert (found.shift_error() < 1e-4) == (by_hand < 1e-3) == shifts


def test_no_encoding_without_positions_or_tables():
    for kind in (None, Learned(), Relative()):
        with pytest.raises((KeyError, TypeError)):
            positions.encoding(replace(TINY, positions=kind), {}, 8)


RNG = np.random.default_rng(0)
N, D = map(np.ravel, np.meshgrid([1e6, 1e7], [1e8, 1e9, 1e10]))
RECORDS = [
    {
        "step": 0,
        "loss": 2.0,
        "accuracy": 0.1,
        "rms/gradient/layers/0": 0.1,
        "rms/gradient/embedding": 0.2,
    },
    {
        "step": 5,
        "loss": 1.0,
        "validation_loss": 1.5,
        "validation_accuracy": 0.2,
        "rms/gradient/layers/0": 0.1,
    },
]
DRAWN = {
    "attention": lambda: figures.attention(
        RNG.dirichlet(np.ones(5), size=(2, 3, 5)), list("abcde")
    ),
    "signed heat": lambda: figures.heat(RNG.normal(size=(4, 6)), "head", "layer"),
    "heat": lambda: figures.heat(RNG.uniform(size=(4, 6)), "head", "layer"),
    "lines": lambda: figures.lines(
        {"half": (range(3), [0.5] * 3), "rising": (range(50), range(50))}, xlabel="step"
    ),
    "scaling law": lambda: figures.scaling_law(HOFFMANN, HOFFMANN.loss(N, D), N, D),
    "losses": lambda: figures.losses({"a": RECORDS, "b": []}, 3.0),
    "curves": lambda: figures.curves({"a": RECORDS, "b": RECORDS[:1]}),
    "masks": lambda: figures.masks(
        {"a": causal() & window(9), "b": longformer(8, 2), "c": bigbird(8), "d": causal()}, 200
    ),
    "positions": lambda: positions.draw(
        {"rotary": positions.encoding(replace(TINY, positions=Rope()), {}, 8)}
    ),
    "costs": lambda: figures.costs({n: costs.parts(TINY, n) for n in (6, 24)}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_drawn_for_both_grounds(name):
    light, dark = figures.png(DRAWN[name]), figures.png(DRAWN[name], dark=True)
    assert light.startswith(b"\x89PNG") and dark.startswith(b"\x89PNG") and light != dark


def test_masks_are_drawn_block_by_block():
    image = figures.masks({"all": causal()}, 128).axes[0].images[0].get_array()
    assert image.shape == (64, 64) and set(np.unique(image)) == {0, 1, 2}
    assert (np.diagonal(image) == 1).all() and (image[np.tril_indices(64, -1)] == 2).all()


def test_shares_of_costs_sum_to_one():
    axes = figures.costs({n: costs.parts(TINY, n) for n in (6, 24)}).axes[0]
    heights = {}
    for patch in axes.patches:
        heights[patch.get_x()] = heights.get(patch.get_x(), 0) + patch.get_height()
    np.testing.assert_allclose(list(heights.values()), 1)
