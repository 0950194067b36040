"""Molecules by rdkit: from SMILES to graphs, scaffolds, and the lists that rdkit ships.

`read` makes a molecule, `graph` its atoms and bonds as numbers. Hydrogens are no nodes: each atom
has their number. `pip install 'jaxformer[molecules]'`.
"""

import csv
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxformer.errors import ConfigError, install_command, package_of

ELEMENTS = ("C", "N", "O", "S", "F", "Cl", "Br", "I", "P")
BONDS = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")  # types 1 to 4 of `graph`
CHARGE, HYDROGENS = 2, 4  # the largest charge of an atom, either sign; its most hydrogens
# for each feature of `graph`, the number of its values
VALUES = len(ELEMENTS), 2 * CHARGE + 1, HYDROGENS + 1


def read(smiles: str) -> Any:
    """The rdkit molecule of a SMILES.

    Raises ConfigError for a text that rdkit cannot read, for no atoms, and for atoms and bonds that
    `graph` does not know.
    """
    with package_of("molecules"):
        from rdkit import Chem, rdBase

    with rdBase.BlockLogs():  # rdkit prints its reason into the terminal
        molecule = Chem.MolFromSmiles(smiles)
    if molecule is None:
        raise ConfigError(
            f"molecules: {smiles!r}: rdkit reads no molecule here; expected a SMILES with its "
            "rings closed and its valences kept, such as 'CCO'"
        )
    if not molecule.GetNumAtoms():
        raise ConfigError(f"molecules: {smiles!r}: no atoms; expected a SMILES such as 'CCO'")
    if problem := unknown_part(molecule):
        raise ConfigError(f"molecules: {smiles!r}: {problem}")
    return molecule


def readable(smiles: str) -> Any:
    """`read`, or None for a SMILES that it refuses."""
    try:
        return read(smiles)
    except ConfigError:
        return None


def canonical(molecule: Any) -> str:
    """The one SMILES that rdkit writes for a molecule, whatever the order of its atoms."""
    from rdkit import Chem

    return Chem.MolToSmiles(molecule)


def unknown_part(molecule: Any) -> str | None:
    """One line on the first atom or bond that `graph` does not know, or None."""
    for atom in molecule.GetAtoms():
        symbol, charge = atom.GetSymbol(), atom.GetFormalCharge()
        if symbol not in ELEMENTS:
            return f"an atom {symbol}; expected {', '.join(ELEMENTS)}, and hydrogens within them"
        if abs(charge) > CHARGE or atom.GetTotalNumHs() > HYDROGENS:
            return (
                f"{symbol} with charge {charge} and {atom.GetTotalNumHs()} hydrogens; expected at "
                f"most {CHARGE} and {HYDROGENS}"
            )
    kinds = (str(bond.GetBondType()) for bond in molecule.GetBonds())
    other = next((kind for kind in kinds if kind not in BONDS), None)
    return other and f"a bond {other.lower()}; expected {', '.join(BONDS).lower()}"


def graph(molecule: Any) -> tuple[Int[np.ndarray, "A 3"], Int[np.ndarray, "A A"]]:
    """(element, charge + 2 and hydrogens of each atom, types of bonds or 0).

    Chirality is left out. Both directions of a bond have one type.
    """
    atoms = [
        (
            ELEMENTS.index(atom.GetSymbol()),
            atom.GetFormalCharge() + CHARGE,
            atom.GetTotalNumHs(),
        )
        for atom in molecule.GetAtoms()
    ]
    edges = np.zeros((len(atoms), len(atoms)), np.int32)
    for bond in molecule.GetBonds():
        i, j = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        edges[i, j] = edges[j, i] = BONDS.index(str(bond.GetBondType())) + 1
    return np.array(atoms, np.int32), edges


def logp(molecule: Any) -> float:
    """Crippen's logP: the logarithm of a substance's share in octanol over that in water.

    It is a sum over atoms, hydrogens too: each has one of 68 kinds, by its neighbours. Wildman &
    Crippen 1999, doi:10.1021/ci990307l.
    """
    with package_of("molecules"):
        from rdkit.Chem.rdMolDescriptors import CalcCrippenDescriptors

    return CalcCrippenDescriptors(molecule)[0]


def scaffold(molecule: Any) -> str:
    """The Bemis-Murcko scaffold: rings and what joins them; '' for a molecule without rings.

    Bemis & Murcko 1996, doi:10.1021/jm9602928.
    """
    with package_of("molecules"):
        from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    return MurckoScaffoldSmiles(mol=molecule)


def is_held_out(scaffold: str, seed: int, one_of: int) -> bool:
    """Whether the molecules of a scaffold are held out: one of `one_of` scaffolds, by its digest.

    Molecules without rings share the scaffold '', and are never held out: they are no one family.
    """
    digest = hashlib.sha256(f"{seed} {scaffold}".encode()).digest()
    return bool(scaffold) and int.from_bytes(digest[:8]) % one_of == 0


def shipped() -> list[str]:
    """The SMILES of about 15,000 compounds that rdkit ships, in the order of their files.

    The first 5,000 of the National Cancer Institute, and 10,000 screening compounds of Baell &
    Holloway 2010, doi:10.1021/jm901137j. Some come twice. Raises ConfigError for an rdkit without
    these files.
    """
    with package_of("molecules"):
        import rdkit

    data = Path(rdkit.__file__).parent / "Data"
    files = data / "NCI" / "first_5K.smi", data / "Pains" / "test_data" / "wehi_mols.csv"
    if missing := [file for file in files if not file.exists()]:
        raise ConfigError(
            f"molecules: {missing[0]} is missing; the rdkit of pip has it, others may not: "
            + install_command("molecules")
        )
    institute, screened = (file.read_text(encoding="utf-8").splitlines() for file in files)
    return [line.split()[0] for line in institute if line.strip()] + [
        line[0] for line in csv.reader(screened) if line
    ]


def scaffold_split(
    sizes: tuple[int, int], largest: int, seed: int, one_of: int = 8
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Molecules of `shipped` to train on, and some of the held-out scaffolds: {number: molecule}.

    They come in the seed's order, at most `sizes` of them, each once. Those that `read` refuses, or
    that have more than `largest` atoms besides hydrogens, are left out.
    """
    every = shipped()
    splits: tuple[dict[int, Any], dict[int, Any]] = {}, {}
    seen = set()
    for number in np.random.default_rng(seed).permutation(len(every)).tolist():
        molecule = readable(every[number])
        if molecule is None or molecule.GetNumAtoms() > largest:
            continue
        side = is_held_out(scaffold(molecule), seed, one_of)
        name = canonical(molecule)
        if name not in seen and len(splits[side]) < sizes[side]:
            seen.add(name)
            splits[side][number] = molecule
        if all(len(split) == size for split, size in zip(splits, sizes, strict=True)):
            break
    return splits
