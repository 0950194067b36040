"""How well simple classifiers read the classes off features that learned without them.

scikit-learn's classifiers learn from features and labels of known images, and are right for a
share of unseen ones.
"""

from typing import NamedTuple

import numpy as np

from jaxformer.errors import ConfigError, package_of


class Labelled(NamedTuple):
    """Features of examples with their classes."""

    features: np.ndarray  # [n, features]
    labels: np.ndarray  # [n], integers


def linear_probe(known: Labelled, unseen: Labelled, penalty: float = 0.01) -> float:
    """The accuracy of logistic regression on standardised features, from 0 to 1.

    `penalty` times |W|^2 / 2 is added to the mean cross entropy. Alain & Bengio 2016,
    arXiv:1610.01644. Raises ConfigError as `check` does.
    """
    check("linear_probe", known, unseen)
    with package_of("vision"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    strength = 1 / (penalty * len(known.labels))
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=5000))
    return float(probe.fit(*known).score(*unseen))


def nearest_neighbours(known: Labelled, unseen: Labelled, count: int = 5) -> float:
    """The accuracy of a vote of the `count` known features of the smallest angle, from 0 to 1.

    Raises ConfigError as `check` does, and for fewer known features than `count`.
    """
    check("nearest_neighbours", known, unseen)
    if len(known.labels) < count:
        raise ConfigError(
            f"nearest_neighbours: {len(known.labels)} known features; expected {count} or more"
        )
    with package_of("vision"):
        from sklearn.neighbors import KNeighborsClassifier
    vote = KNeighborsClassifier(count, metric="cosine")
    return float(vote.fit(*known).score(*unseen))


def check(name: str, known: Labelled, unseen: Labelled) -> None:
    """Raises ConfigError unless both hold finite features [n, features] and labels [n]."""
    for part, each in (("known", known), ("unseen", unseen)):
        features, labels = map(np.asarray, each)
        if features.ndim != 2 or labels.shape != features.shape[:1] or not len(labels):
            raise ConfigError(
                f"{name}: {part}: features {list(features.shape)} and labels "
                f"{list(labels.shape)}; expected [n, features] and [n]"
            )
        if not np.isfinite(features).all():
            raise ConfigError(
                f"{name}: {part}: features that are not finite; the model has diverged"
            )
    widths = known.features.shape[1], unseen.features.shape[1]
    if widths[0] != widths[1]:
        raise ConfigError(f"{name}: {widths[0]} known features, {widths[1]} unseen ones")
