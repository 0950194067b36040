"""Molecules as graphs, beside what rdkit says of them."""

import numpy as np
import pytest

pytest.importorskip("rdkit")

from rdkit import Chem

from jaxformer.data import molecules
from jaxformer.errors import ConfigError
from jaxformer.zoo.graphormer import shortest_paths

ASPIRIN = "CC(=O)Oc1ccccc1C(=O)O"


def test_the_graph_of_a_molecule():
    atoms, edges = molecules.graph(molecules.read("C[N+](C)(C)CC#N"))
    element, charge, hydrogens = atoms.T
    names = [molecules.ELEMENTS[e] for e in element]
    assert names == ["C", "N", "C", "C", "C", "C", "N"]
    assert (charge - molecules.CHARGE).tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert hydrogens.tolist() == [3, 0, 3, 3, 2, 0, 0]
    np.testing.assert_array_equal(edges, edges.T)
    assert edges[5, 6] == 3 and edges[0, 1] == 1 and (edges > 0).sum() == 2 * 6
    atoms, edges = molecules.graph(molecules.read(ASPIRIN))
    assert (edges == 4).sum() == 2 * 6 and (edges == 2).sum() == 2 * 2
    assert (atoms < molecules.VALUES).all() and (atoms >= 0).all()


@pytest.mark.parametrize("smiles", [ASPIRIN, "C", "[NH4+].[Cl-]", "C1CC1.O"])
def test_distances_are_those_of_rdkit(smiles):
    molecule = molecules.read(smiles)
    distances, _ = shortest_paths(molecules.graph(molecule)[1], 3)
    expected = Chem.GetDistanceMatrix(molecule)  # 1e8 without a path
    np.testing.assert_array_equal(distances, np.where(expected > 1000, -1, expected))


@pytest.mark.parametrize(
    ("smiles", "message"),
    [
        ("C1CC", "expected a SMILES with its rings closed"),
        ("CN(C)(C)(C)C", "its valences kept"),
        ("a ring", "rdkit reads no molecule"),
        ("", "no atoms"),
        ("[Na+].[Cl-]", "an atom Na"),
        ("[H][H]", "an atom H"),
        ("[O+3]", "with charge 3"),
        ("N->C", "a bond dative"),
    ],
)
def test_what_no_graph_is_made_of_is_refused(smiles, message, capfd):
    with pytest.raises(ConfigError, match=message) as error:
        molecules.read(smiles)
    assert repr(smiles) in str(error.value) and "\n" not in str(error.value)
    assert molecules.readable(smiles) is None
    assert capfd.readouterr().err == ""  # nothing but the one line


def test_scaffolds_go_to_one_side():
    """Molecules with the same rings share a scaffold, and one of four scaffolds is held out."""
    names = ["c1ccccc1", "Cc1ccccc1", "OCCc1ccccc1Cl"]
    assert {molecules.scaffold(molecules.read(name)) for name in names} == {"c1ccccc1"}
    assert molecules.scaffold(molecules.read("CCO")) == ""
    assert not any(molecules.is_held_out("", seed, 4) for seed in range(50))
    held_out = [molecules.is_held_out(f"C1{'C' * n}1", 0, 4) for n in range(2, 402)]
    assert 60 < sum(held_out) < 140  # 100 of 400, give or take five standard deviations
    other = [molecules.is_held_out(f"C1{'C' * n}1", 1, 4) for n in range(2, 402)]
    assert held_out != other


def test_the_molecules_that_rdkit_ships():
    smiles = molecules.shipped()
    assert len(smiles) > 14_000 and smiles[0] == "CC1=CC(=O)C=CC1=O"
    readable = [molecules.readable(each) for each in smiles[:100] + smiles[-100:]]
    assert sum(each is not None for each in readable) > 190


def test_splits_share_no_scaffold_and_no_molecule():
    splits = molecules.scaffold_split((200, 30), 25, seed=3)
    every = molecules.shipped()
    names, scaffolds = [], []
    for split, size in zip(splits, (200, 30), strict=True):
        names.append({molecules.canonical(each) for each in split.values()})
        scaffolds.append({molecules.scaffold(each) for each in split.values()})
        assert len(split) == len(names[-1]) == size
        assert max(each.GetNumAtoms() for each in split.values()) <= 25
        for number, molecule in split.items():
            again = molecules.read(every[number])
            assert molecules.canonical(again) == molecules.canonical(molecule)
    assert not scaffolds[0] & scaffolds[1] and not names[0] & names[1]


def test_one_molecule_has_one_name():
    assert molecules.canonical(molecules.read("OCC")) == "CCO"


def test_logp_is_the_sum_of_the_published_numbers():
    """Ethanol and ethane by table 1 of Wildman & Crippen 1999: C1, C3, O2, H1 and H2."""
    ethane, ethanol = (molecules.logp(molecules.read(each)) for each in ("CC", "CCO"))
    assert ethane == pytest.approx(2 * 0.1441 + 6 * 0.1230)
    assert ethanol == pytest.approx(0.1441 - 0.2035 - 0.2893 + 5 * 0.1230 - 0.2677)
