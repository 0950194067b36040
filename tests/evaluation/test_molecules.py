"""Baselines of properties of molecules, beside their definitions."""

import numpy as np
import pytest

pytest.importorskip("rdkit")

from jaxformer.data.molecules import read
from jaxformer.evaluation.molecules import atom_counts, linear_answers, morgan_counts


def test_atoms_are_counted_in_any_order():
    counts = atom_counts([read(each) for each in ("CCO", "OCC", "ClCC(=O)N")])
    assert counts[0].tolist() == [2, 0, 1, 0, 0, 0, 0, 0, 0, 6]
    np.testing.assert_array_equal(counts[0], counts[1])
    assert counts[2].tolist() == [2, 1, 1, 0, 0, 1, 0, 0, 0, 4]


def test_environments_are_counted_in_any_order_of_atoms():
    found = morgan_counts([read(each) for each in ("CCO", "OCC", "CCN", "CCCCCC")], radius=1)
    assert found.shape == (4, 2048)
    assert found[0].sum() == 2 * 3  # three atoms, alone and with their neighbours
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()
    assert found[3].max() == 4  # the same atom four times
    assert morgan_counts([read("CCO")], radius=0)[0].sum() == 3


def test_what_is_linear_is_found():
    known = [read("C" * n + end) for n in range(1, 12) for end in ("O", "N", "Cl")]
    values = atom_counts(known) @ np.arange(10.0)
    unseen = [read("CCCCCOCC"), read("CCNCCCl")]
    found = linear_answers(atom_counts, known, values, unseen)
    np.testing.assert_allclose(found, atom_counts(unseen) @ np.arange(10.0), rtol=0.05)  # shrunk
