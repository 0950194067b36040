"""The experiment `molecules`: what the model reads, and how it answers a SMILES."""

import numpy as np
import pytest

pytest.importorskip("rdkit")

from experiments import molecules as experiment
from jaxformer import cli
from jaxformer.data import molecules
from tests.experiments.test_applications import SMALL

SIZES = ["--data.examples=64", "--data.validation-examples=16"]


def test_the_model_reads_graphs_and_their_logp():
    dataset = experiment.Molecules(examples=40, validation_examples=5).open(None)
    every = molecules.shipped()
    for split, count in ((dataset.train, 40), (dataset.validation, 5)):
        rows = split.take_rows(np.arange(len(split)))
        found = [molecules.read(every[n]) for n in rows["number"]]
        assert len(found) == count and rows["distances"].shape[1:] == (experiment.LARGEST,) * 2
        np.testing.assert_allclose(rows["logp"], [molecules.logp(x) for x in found], rtol=1e-6)
        sizes = [molecule.GetNumAtoms() for molecule in found]
        is_atom = rows["distances"].diagonal(axis1=1, axis2=2) == 0
        assert is_atom.sum(axis=1).tolist() == sizes
        for nodes, molecule in zip(rows["nodes"], found, strict=True):
            atoms, _ = molecules.graph(molecule)
            np.testing.assert_array_equal(nodes[: len(atoms)], atoms)


def test_a_molecule_larger_than_those_of_training_is_read():
    read = experiment.graphs([molecules.read("C" * 200), molecules.read("C")])
    assert read["distances"].shape == (2, 200, 200) and read["distances"].max() == 199


@pytest.mark.thorough
def test_a_smiles_is_answered(tmp_path, capsys):
    options = [*SMALL.split(), *SIZES, "--steps=2", "--metrics=()"]
    assert cli.main(["train", "molecules", "--runs", str(tmp_path), *options]) == 0
    (run,) = tmp_path.glob("molecules-*")
    capsys.readouterr()
    assert cli.main(["generate", str(run), "--prompt", "CCO"]) == 0
    assert (
        "CCO: logP " in (printed := capsys.readouterr().out)
        and "by Crippen's rules -0.00" in printed
    )
    assert cli.main(["generate", str(run), "--prompt", "C1CC"]) == 2
    assert "'C1CC': rdkit reads no molecule here" in capsys.readouterr().err
