"""Contacts of residues from an alignment without training, and how many of the surest are right.

These are the baselines that a model of contacts is compared with. An alignment holds types
`[S, R]`, integers from 0, of S sequences and R residues. Scores are `[R, R]`: larger is surer.
"""

import numpy as np

from jaxformer.errors import ConfigError


def frequencies(alignment: np.ndarray, types: int, pseudocount: float) -> tuple:
    """(f_i(a) [R, q], f_ij(a, b) [R, q, R, q]), mixed with the pseudocount's share of 1/q, 1/q^2.

    f_ii(a, b) is f_i(a) for a = b, and 0 else. Raises ConfigError for an alignment of another form.
    Morcos et al. 2011, doi:10.1073/pnas.1111471108.
    """
    check_alignment(alignment, types, pseudocount)
    S, R = alignment.shape
    cells = np.eye(types)[alignment].reshape(S, R * types)
    single = (1 - pseudocount) * cells.mean(axis=0) + pseudocount / types
    double = (1 - pseudocount) * cells.T @ cells / S + pseudocount / types**2
    single, double = single.reshape(R, types), double.reshape(R, types, R, types)
    for i in range(R):
        double[i, :, i] = np.diag(single[i])
    return single, double


def check_alignment(alignment: np.ndarray, types: int, pseudocount: float) -> None:
    """Raises ConfigError unless it holds types [S, R] below `types`, and for a pseudocount > 1."""
    is_table = alignment.ndim == 2 and alignment.size and alignment.dtype.kind in "iu"
    if not is_table or alignment.min() < 0 or alignment.max() >= types:
        raise ConfigError(
            f"alignment {alignment.dtype}{list(alignment.shape)}: expected integers [S, R] from 0 "
            f"to {types - 1}"
        )
    if not 0 <= pseudocount <= 1:
        raise ConfigError(f"pseudocount={pseudocount}: expected a share from 0 to 1")


def mutual_information(alignment: np.ndarray, types: int, pseudocount: float = 0.3) -> np.ndarray:
    """sum_ab f_ij(a, b) log(f_ij(a, b) / (f_i(a) f_j(b))), less the average product of i and j.

    Dunn et al. 2008, doi:10.1093/bioinformatics/btm604.
    """
    single, double = frequencies(alignment, types, pseudocount)
    independent = single[:, :, None, None] * single[None, None]
    ratio = np.where(double > 0, double, 1) / np.where(double > 0, independent, 1)
    return without_average_product((double * np.log(ratio)).sum(axis=(1, 3)))


def mean_field(alignment: np.ndarray, types: int, pseudocount: float = 0.9) -> np.ndarray:
    """The Frobenius norm of the couplings -(f_ij - f_i f_j)^-1, less the average product.

    The last type is left out of the inverse; the norm is that of couplings whose rows and columns
    have the mean 0. Raises ConfigError for a pseudocount of 0, which leaves no inverse. Morcos et
    al. 2011; Ekeberg et al. 2013, doi:10.1103/PhysRevE.87.012707.
    """
    if pseudocount == 0:
        raise ConfigError("mean_field: pseudocount=0: types that do not occur have no inverse")
    single, double = frequencies(alignment, types, pseudocount)
    R, q = single.shape
    covariance = double - single[:, :, None, None] * single[None, None]
    width = R * (q - 1)
    inverse = np.linalg.inv(covariance[:, :-1, :, :-1].reshape(width, width))
    couplings = np.zeros((R, q, R, q))
    couplings[:, :-1, :, :-1] = -inverse.reshape(R, q - 1, R, q - 1)
    couplings -= couplings.mean(axis=1, keepdims=True)
    couplings -= couplings.mean(axis=3, keepdims=True)
    return without_average_product(np.sqrt((couplings**2).sum(axis=(1, 3))))


def without_average_product(scores: np.ndarray) -> np.ndarray:
    """s_ij - mean_k(s_ik) mean_k(s_kj) / mean(s), where no mean counts the diagonal."""
    R = len(scores)
    others = scores * (1 - np.eye(R))
    of_residue = others.sum(axis=1) / (R - 1)
    mean = of_residue.mean()
    return others - np.outer(of_residue, of_residue) / (mean if mean else 1.0)


def surest_pairs(
    scores: np.ndarray, separation: int = 4, count: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(i, j) of the pairs of the largest scores; `count` of them, or R.

    Only pairs with j - i >= separation count.
    """
    i, j = np.triu_indices(len(scores), separation)
    order = np.argsort(-scores[i, j], kind="stable")[: count or len(scores)]
    return i[order], j[order]


def top_precision(
    scores: np.ndarray, contacts: np.ndarray, separation: int = 4, count: int | None = None
) -> float:
    """The share of contacts among the `surest_pairs`. With R pairs, this is P@L of the field.

    A contact is a number above 0.
    """
    return float(np.mean(contacts[surest_pairs(scores, separation, count)] > 0))


def mean_top_precision(scores: np.ndarray, contacts: np.ndarray, separation: int = 4) -> float:
    """The mean of `top_precision` over families `[n, R, R]`, with R pairs of each."""
    families = zip(scores, contacts, strict=True)
    return float(np.mean([top_precision(*family, separation) for family in families]))
