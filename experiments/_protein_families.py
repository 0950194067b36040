"""Contact maps of random folds, and sequences that fit them: the data of protein_contacts."""

import numpy as np

R, S, TYPES, APART = 28, 32, 6, 4  # residues, sequences, types, least distance of a contact
COUPLING, FIELD, SWEEPS = 1.0, 0.5, 10  # std of the Potts model; sweeps of the Gibbs sampler
DISTANT = abs(np.arange(R)[:, None] - np.arange(R)) >= APART


def fold(rng: np.random.Generator) -> np.ndarray:
    """The contacts [R, R] of a chain of helices and strands, each beside up to three others."""
    found = np.zeros((R, R), bool)
    elements: list[tuple[bool, int, int]] = []  # whether it is a helix, first residue, length
    first = int(rng.integers(2))
    while True:
        is_helix = rng.random() < 0.5
        length = int(rng.integers(6, 10) if is_helix else rng.integers(4, 7))
        if first + length > R:
            break
        turns = np.arange(first, first + length - 4) if is_helix else np.arange(0)
        found[turns, turns + 4] = True
        for i in rng.permutation(len(elements))[:3]:
            is_other_helix, begin, size = elements[i]
            steps = np.arange(min(length, size))
            if is_helix or is_other_helix:
                steps = steps[np.isin(steps % 4, (0, 3))]  # one side of a helix
            a, b = first + steps, begin + steps
            b = b if rng.random() < 0.3 else begin + size - 1 - steps  # parallel or not
            found[a, b] = found[a[1:], b[:-1]] = found[a[:-1], b[1:]] = True
        elements.append((is_helix, first, length))
        first += length + int(rng.integers(2, 4))
    return (found | found.T) & DISTANT


def sample(rng: np.random.Generator, maps: np.ndarray) -> np.ndarray:
    """Types [n, S, R] of sequences of a random Potts model for each map [n, R, R]."""
    n, one_hot = len(maps), np.eye(TYPES, dtype=np.float32)
    couplings = COUPLING * rng.standard_normal((n, R, TYPES, R, TYPES), np.float32)
    couplings *= np.triu(maps)[:, :, None, :, None]
    couplings += couplings.transpose(0, 3, 4, 1, 2)
    fields = FIELD * rng.standard_normal((n, 1, R, TYPES), np.float32)
    cells = one_hot[rng.integers(TYPES, size=(n, S, R))]
    for _ in range(SWEEPS):
        for i in range(R):
            energy = cells.reshape(n, S, -1) @ couplings[:, :, :, i].reshape(n, -1, TYPES)
            energy += fields[:, :, i]
            cells[:, :, i] = one_hot[(energy + rng.gumbel(size=energy.shape)).argmax(axis=-1)]
    return cells.argmax(axis=-1).astype(np.int32)
