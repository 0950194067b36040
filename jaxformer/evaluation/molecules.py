"""Baselines of properties of molecules: linear models of counted atoms and of their environments.

Molecules are those of `data.molecules.read`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer, Num

from jaxformer.data.molecules import ELEMENTS, graph
from jaxformer.errors import package_of


def atom_counts(molecules: Sequence[Any]) -> Integer[np.ndarray, "n features"]:
    """The number of atoms of each of `data.molecules.ELEMENTS`, and of hydrogens."""
    counts = []
    for molecule in molecules:
        element, _, hydrogens = graph(molecule)[0].T
        counts.append([*np.bincount(element, minlength=len(ELEMENTS)), hydrogens.sum()])
    return np.array(counts)


def morgan_counts(
    molecules: Sequence[Any], radius: int = 2, size: int = 2048
) -> Integer[np.ndarray, "n {size}"]:
    """Morgan fingerprints: how often each environment of an atom comes, counted in `size` bins.

    An environment reaches `radius` bonds far. Rogers & Hahn 2010, doi:10.1021/ci100050t.
    """
    with package_of("molecules"):
        from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    generator = GetMorganGenerator(radius=radius, fpSize=size)
    return np.stack([generator.GetCountFingerprintAsNumPy(each) for each in molecules])


def linear_answers(
    features: Callable,
    known: Sequence[Any],
    values: Num[np.ndarray, " n"],
    unseen: Sequence[Any],
) -> Num[np.ndarray, " m"]:
    """The values of unseen molecules by ridge regression on the features of known ones."""
    with package_of("molecules"):
        from sklearn.linear_model import Ridge

    return Ridge(alpha=1.0).fit(features(known), values).predict(features(unseen))
