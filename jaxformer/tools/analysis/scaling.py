"""How loss falls with parameters and data: laws fitted to runs, their intervals, and the best model for a budget."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError, check_whole

Numbers = Sequence[float] | np.ndarray
HUBER = 1e-3  # of a residual of the log loss; Hoffmann et al. 2022, appendix D.3


class Law(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta in nats a token, of N parameters and D tokens. Hoffmann et al. 2022, eq. 2."""

    E: Any  # entropy of the text: what no model gets below
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
    """L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D; N without embeddings. Kaplan et al. 2020, eq. 1.5."""
    return ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103


def fit(losses: Numbers, parameters: Numbers, tokens: Numbers | None = None) -> Law:
    """The law of least Huber loss of log L over the runs; without `tokens` L(N) = E + A / N^alpha.

    For L(D), give the tokens as `parameters`. Hoffmann et al. 2022, appendix D.3. Raises ConfigError where the runs do not
    determine a law: too few, fewer than three different sizes or numbers of tokens, or both always in one ratio.
    """
    variables, y = _logs(losses, parameters, tokens)
    exponents = itertools.product(np.linspace(0.1, 0.9, 3), repeat=len(variables))
    starts = itertools.product(exponents, (0.3, 0.9))
    solutions = [_refine(_start(variables, y, *start), variables, y) for start in starts]
    return _law(min(solutions, key=lambda solution: solution.cost).x)


def intervals(
    law: Law, losses: Numbers, parameters: Numbers, tokens: Numbers | None = None, *,
    draws: int = 200, seed: int = 0, level: float = 0.95,
) -> Law:  # fmt: skip
    """(low, high) of each constant of the law: the middle `level` of fits to runs drawn again with replacement (bootstrap)."""
    check_whole("intervals: draws", draws)
    check_whole("intervals: seed", seed, least=0)
    if not 0 < level < 1:
        raise ConfigError(f"intervals: level={level}: expected a share between 0 and 1")
    variables, y = _logs(losses, parameters, tokens)
    start = np.log([law.E, law.A, law.alpha, law.B, law.beta][: 1 + 2 * len(variables)])
    rng, laws = np.random.default_rng(seed), []
    while len(laws) < draws:
        rows = rng.integers(len(y), size=len(y))
        drawn = variables[:, rows]
        if len(set(rows)) >= len(start) and not _undetermined(drawn):  # fewer runs than constants fit any law
            laws.append(_law(_refine(start, drawn, y[rows]).x))
    edges = (1 - level) / 2, (1 + level) / 2
    return Law(*(tuple(np.quantile([getattr(one, name) for one in laws], edges).tolist()) for name in Law._fields))


class IsoFlop(NamedTuple):
    """The best size at each of some budgets, and how it grows. Hoffmann et al. 2022, section 3.2."""

    flops: np.ndarray
    parameters: np.ndarray  # the lowest point of a parabola in log N through the runs of a budget
    losses: np.ndarray  # there
    exponent: float  # a in N = k C^a; D grows as C^(1 - a)


def isoflop(flops: Numbers, parameters: Numbers, losses: Numbers) -> IsoFlop:
    """The best size of each budget, for runs that come in groups of equal `flops`.

    ConfigError where a group shows none between its smallest and its largest size.
    """
    rows = []
    for budget in sorted(set(flops)):
        some = [(np.log(n), loss) for c, n, loss in zip(flops, parameters, losses, strict=True) if c == budget]
        x, y = np.array(some).T
        finite = np.isfinite(y).all() and (np.exp(x) > 0).all()
        curve = np.polyfit(x, y, 2) if finite and len(set(x)) >= 3 else np.zeros(3)
        best = -curve[1] / (2 * curve[0]) if curve[0] > 0 else np.nan
        if not x.min() < best < x.max():
            problem = f"{len(some)} runs show no size of least loss; give at least three, smaller and larger than the best one"
            where = f" (it lies near {np.exp(best):.3g}, outside of them)" if np.isfinite(best) else ""
            raise ConfigError(f"isoflop: {budget:.3g} FLOPs: {problem}{where}")
        rows.append((budget, np.exp(best), np.polyval(curve, best)))
    budgets, sizes, lowest = np.array(rows).T
    exponent = float(np.polyfit(np.log(budgets), np.log(sizes), 1)[0]) if len(rows) > 1 else np.nan
    return IsoFlop(budgets, sizes, lowest, exponent)


def _logs(losses, parameters, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(log N and, if given, log D `[1 or 2, runs]`, log L `[runs]`)."""
    variables = [parameters] if tokens is None else [parameters, tokens]
    rows, constants = np.array([*variables, losses], float), 2 * len(variables) + 1
    if rows.shape[1] < constants or not (np.isfinite(rows) & (rows > 0)).all():
        problem = f"{rows.shape[1]} runs; a law of {constants} constants needs as many, all above 0 and finite"
        raise ConfigError(f"scaling: {problem}")
    check(*rows[:-1])
    return np.log(rows[:-1]), np.log(rows[-1])


def check(*variables: Numbers) -> None:
    """Raises ConfigError where runs of these sizes (and numbers of tokens) determine no law, whatever their losses are."""
    if problem := _undetermined(np.log(np.array(variables, float))):
        raise ConfigError(f"scaling: {problem}")


def _undetermined(variables: np.ndarray) -> str:
    """Why the logarithms `[1 or 2, runs]` of sizes (and tokens) determine no law; "" where they do."""
    for name, x in zip(("sizes", "numbers of tokens"), variables, strict=False):
        if (count := len(np.unique(x.round(9)))) < 3:
            return f"runs of {count} different {name} decide no exponent; give at least three"
    if len(variables) == 2 and abs(np.corrcoef(variables)[0, 1]) > 0.999:
        return "tokens grow with the size in all runs, so alpha and beta cannot be told apart; train a size for several lengths"
    return ""


def _start(variables: np.ndarray, y: np.ndarray, exponents: Sequence[float], share: float) -> np.ndarray:
    """Logarithms of E, A, alpha (, B, beta) by a guess of the exponents and of E as a share of the least loss."""
    entropy = share * np.exp(y.min())
    part = np.log((np.exp(y.mean()) - entropy) / len(variables))
    terms = [(part + exponent * x.mean(), np.log(exponent)) for exponent, x in zip(exponents, variables, strict=True)]
    return np.array([np.log(entropy), *np.concatenate(terms)])


def _refine(start: np.ndarray, variables: np.ndarray, y: np.ndarray) -> Any:
    from scipy.optimize import least_squares

    def residuals(constants):
        terms = [constants[1 + 2 * i] - np.exp(constants[2 + 2 * i]) * x for i, x in enumerate(variables)]
        return np.logaddexp.reduce([np.full_like(y, constants[0]), *terms]) - y

    return least_squares(residuals, start, loss="huber", f_scale=HUBER, x_scale="jac", xtol=1e-12, ftol=1e-12, max_nfev=400)


def _law(constants: np.ndarray) -> Law:
    return Law(*np.exp(constants).tolist())
