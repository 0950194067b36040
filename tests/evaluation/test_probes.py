"""Probes of features whose classes are known to be readable, or not."""

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.evaluation.probes import Labelled, linear_probe, nearest_neighbours

PROBES = linear_probe, nearest_neighbours


def clusters(distance, count=200, seed=0):
    """Three classes around three directions, `distance` standard deviations from zero."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return Labelled(rng.standard_normal((count, 8)) + distance * np.eye(3, 8)[labels], labels)


@pytest.mark.parametrize("probe", PROBES)
def test_distant_classes_are_read_and_noise_is_not(probe):
    assert probe(clusters(20.0), clusters(20.0, seed=1)) == 1.0
    # 200 guesses among three classes: 1/3, with a standard deviation of 0.033
    assert 0.15 < probe(clusters(0.0), clusters(0.0, seed=1)) < 0.5


def test_scales_of_features_do_not_matter_to_the_linear_probe():
    known, unseen = clusters(2.0), clusters(2.0, seed=1)
    scale = np.logspace(-3, 3, 8)
    scaled = (each._replace(features=each.features * scale + 5) for each in (known, unseen))
    assert linear_probe(*scaled) == linear_probe(known, unseen)


def test_lengths_of_features_do_not_matter_to_neighbours():
    known, unseen = clusters(3.0), clusters(3.0, seed=1)
    lengths = np.random.default_rng(2).uniform(0.1, 10, (200, 1))
    longer = known._replace(features=known.features * lengths)
    assert nearest_neighbours(longer, unseen) == nearest_neighbours(known, unseen)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.full((200, 8), np.nan)}, "unseen: features that are not finite"),
        ({"features": np.zeros((200, 9))}, "8 known features, 9 unseen ones"),
        ({"labels": np.zeros(3, int)}, r"unseen: features \[200, 8\] and labels \[3\]"),
        ({"features": np.zeros((0, 8)), "labels": np.zeros(0, int)}, r"expected \[n, features\]"),
    ],
)
def test_what_no_classifier_can_read_is_refused(probe, change, message):
    with pytest.raises(ConfigError, match=message):
        probe(clusters(1.0), clusters(1.0)._replace(**change))


def test_fewer_examples_than_neighbours_are_refused():
    few = clusters(1.0, count=3)
    with pytest.raises(ConfigError, match="3 known features; expected 5 or more"):
        nearest_neighbours(few, few)
