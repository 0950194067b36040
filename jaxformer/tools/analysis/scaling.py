"""Scaling laws: loss against parameters and data, fitted to runs.

`fit` fits a law, and `intervals` gives the uncertainty of its constants. `Law.optimum` and
`isoflop` give the best size for a budget.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError, check_whole

Numbers = Sequence[float] | np.ndarray
HUBER = 1e-3  # of a residual of the log loss; Hoffmann et al. 2022, appendix D.3


class Law(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta in nats a token, for N parameters and D tokens.

    Hoffmann et al. 2022, eq. 2.
    """

    E: Any  # entropy of the text: the loss that no model can go below
    A: Any
    alpha: Any
    B: Any = 0.0  # 0: a law of parameters alone
    beta: Any = 0.0

    def loss(self, parameters: Any, tokens: Any = 1.0) -> Any:
        """L(N, D)."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: Any) -> tuple[Any, Any]:
        """(N, D) of least loss with 6 N D = `flops`. Hoffmann et al. 2022, eq. 4."""
        both = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        parameters = scale * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters


HOFFMANN = Law(1.69, 406.4, 0.34, 410.7, 0.28)  # Hoffmann et al. 2022, arXiv:2203.15556, eq. 10


def kaplan(parameters: Any, tokens: Any) -> Any:
    """L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D; N does not count embeddings.

    Kaplan et al. 2020, eq. 1.5.
    """
    return ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103


def fit(losses: Numbers, parameters: Numbers, tokens: Numbers | None = None) -> Law:
    """The law with the least Huber loss of log L over the runs.

    Without `tokens` the law is L(N) = E + A / N^alpha. For L(D), give the tokens as `parameters`.
    Hoffmann et al. 2022, appendix D.3. Raises ConfigError if the runs do not determine a law: if
    they are too few, have fewer than three different sizes or numbers of tokens, or have one ratio
    of tokens to size.
    """
    variables, y = _logs(losses, parameters, tokens)
    exponents = itertools.product(np.linspace(0.1, 0.9, 3), repeat=len(variables))
    starts = itertools.product(exponents, (0.3, 0.9))
    solutions = [_refine(_start(variables, y, *start), variables, y) for start in starts]
    return _law(min(solutions, key=lambda solution: solution.cost).x)


def intervals(
    law: Law,
    losses: Numbers,
    parameters: Numbers,
    tokens: Numbers | None = None,
    *,
    draws: int = 200,
    seed: int = 0,
    level: float = 0.95,
) -> Law:
    """(low, high) of each constant of the law, by the bootstrap.

    The law is fitted `draws` times to runs drawn with replacement; the interval holds the middle
    `level` of the fitted constants.
    """
    check_whole("intervals: draws", draws)
    check_whole("intervals: seed", seed, least=0)
    if not 0 < level < 1:
        raise ConfigError(f"intervals: level={level}: expected a share between 0 and 1")
    variables, y = _logs(losses, parameters, tokens)
    start = np.log([law.E, law.A, law.alpha, law.B, law.beta][: 1 + 2 * len(variables)])
    rng = np.random.default_rng(seed)
    laws = []
    while len(laws) < draws:
        sample = rng.integers(len(y), size=len(y))
        drawn = variables[:, sample]
        # a sample with fewer different runs than constants determines no law
        if len(set(sample)) >= len(start) and not _undetermined(drawn):
            laws.append(_law(_refine(start, drawn, y[sample]).x))
    edges = (1 - level) / 2, (1 + level) / 2
    quantiles = {}
    for name in Law._fields:
        constants = [getattr(drawn_law, name) for drawn_law in laws]
        quantiles[name] = tuple(np.quantile(constants, edges).tolist())
    return Law(**quantiles)


class IsoFlop(NamedTuple):
    """The best size for each budget, and its growth. Hoffmann et al. 2022, section 3.2."""

    flops: np.ndarray
    parameters: np.ndarray  # the minimum of a parabola in log N, fitted to the runs of a budget
    losses: np.ndarray  # at this minimum
    exponent: float  # a in N = k C^a; D grows as C^(1 - a)


def isoflop(flops: Numbers, parameters: Numbers, losses: Numbers) -> IsoFlop:
    """The best size for each budget, from runs in groups of equal `flops`.

    Raises ConfigError if a group has no best size between its smallest and its largest one.
    """
    optima = []
    for budget in sorted(set(flops)):
        runs = [
            (np.log(n), loss)
            for c, n, loss in zip(flops, parameters, losses, strict=True)
            if c == budget
        ]
        x, y = np.array(runs).T
        finite = np.isfinite(y).all() and (np.exp(x) > 0).all()
        curve = np.polyfit(x, y, 2) if finite and len(set(x)) >= 3 else np.zeros(3)
        best = -curve[1] / (2 * curve[0]) if curve[0] > 0 else np.nan
        if not x.min() < best < x.max():
            problem = (
                f"{len(runs)} runs show no size of least loss; "
                "give at least three, smaller and larger than the best one"
            )
            # points on a line have a curvature of rounding errors, and so an optimum of no meaning
            is_number = abs(best) < np.log(np.finfo(float).max)
            where = f" (it lies near {np.exp(best):.3g}, outside of them)" if is_number else ""
            raise ConfigError(f"isoflop: {budget:.3g} FLOPs: {problem}{where}")
        optima.append((budget, np.exp(best), np.polyval(curve, best)))
    budgets, sizes, least = np.array(optima).T
    exponent = np.nan
    if len(optima) > 1:
        exponent = float(np.polyfit(np.log(budgets), np.log(sizes), 1)[0])
    return IsoFlop(budgets, sizes, least, exponent)


def _logs(losses, parameters, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(log N and, if given, log D `[1 or 2, runs]`, log L `[runs]`)."""
    variables = [parameters] if tokens is None else [parameters, tokens]
    numbers = np.array([*variables, losses], float)
    runs = numbers.shape[1]
    constants = 2 * len(variables) + 1
    if runs < constants or not (np.isfinite(numbers) & (numbers > 0)).all():
        problem = (
            f"{runs} runs; a law of {constants} constants needs as many, all above 0 and finite"
        )
        raise ConfigError(f"scaling: {problem}")
    check(*numbers[:-1])
    return np.log(numbers[:-1]), np.log(numbers[-1])


def check(*variables: Numbers) -> None:
    """Raises ConfigError if runs of these sizes (and numbers of tokens) cannot determine a law.

    This does not depend on their losses.
    """
    if problem := _undetermined(np.log(np.array(variables, float))):
        raise ConfigError(f"scaling: {problem}")


def _undetermined(variables: np.ndarray) -> str:
    """The reason why runs determine no law, or "" if they do.

    `variables` are the logarithms `[1 or 2, runs]` of their sizes (and numbers of tokens).
    """
    for name, x in zip(("sizes", "numbers of tokens"), variables, strict=False):
        if (count := len(np.unique(x.round(9)))) < 3:
            return f"runs of {count} different {name} decide no exponent; give at least three"
    if len(variables) == 2 and abs(np.corrcoef(variables)[0, 1]) > 0.999:
        return (
            "tokens grow with the size in all runs, so alpha and beta cannot be told apart; "
            "train a size for several lengths"
        )
    return ""


def _start(
    variables: np.ndarray, y: np.ndarray, exponents: Sequence[float], share: float
) -> np.ndarray:
    """Initial log E, log A, log alpha (, log B, log beta) of a fit.

    `exponents` are guesses of alpha and beta; E is a guess, `share` of the least loss.
    """
    entropy = share * np.exp(y.min())
    term = np.log((np.exp(y.mean()) - entropy) / len(variables))
    terms = [
        (term + exponent * x.mean(), np.log(exponent))
        for exponent, x in zip(exponents, variables, strict=True)
    ]
    return np.array([np.log(entropy), *np.concatenate(terms)])


def _refine(start: np.ndarray, variables: np.ndarray, y: np.ndarray) -> Any:
    """Least squares with a Huber loss, from these logarithms of the constants."""
    from scipy.optimize import least_squares

    def residuals(constants):
        terms = [
            constants[1 + 2 * i] - np.exp(constants[2 + 2 * i]) * x for i, x in enumerate(variables)
        ]
        return np.logaddexp.reduce([np.full_like(y, constants[0]), *terms]) - y

    return least_squares(
        residuals,
        start,
        loss="huber",
        f_scale=HUBER,
        x_scale="jac",
        xtol=1e-12,
        ftol=1e-12,
        max_nfev=400,
    )


def _law(constants: np.ndarray) -> Law:
    """The law of these logarithms of its constants."""
    return Law(*np.exp(constants).tolist())
