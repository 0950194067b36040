"""`check_kernel`: compares a `Kernel` with the reference and prints what it refuses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer.masks import Mask, causal, full, lengths, prefix, segments, window
from jaxformer.ops.attention.call import Call, dropout_seed
from jaxformer.ops.attention.kernel import Kernel
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.bias import alibi

BATCH = 3
RATE = 0.3  # the dropout rate
# Differences are divided by 1 + the largest number of the reference. In 32 bits, gradients are sums
# of some hundred terms of order one, twice through a product; a rounding is 6e-8. In 16 bits,
# weights, their gradients and the result are rounded once each, by 2^-8 of themselves.
TOLERANCES = {8: 1e-10, 4: 2e-5, 2: 2.0**-6}  # by the bytes of a number


@dataclass(frozen=True)
class Case:
    """A call to compare. Its arrays are drawn at random."""

    mask: str = "causal"  # of MASKS
    options: tuple[str, ...] = ()  # of OPTIONS
    T: int = 127  # queries
    S: int = 127  # keys
    heads: tuple[int, int] = (4, 2)  # N, K
    value_width: int | None = None  # None: as wide as the keys
    large_scores: bool = False  # scores of up to 128, whose exp() would overflow

    def __str__(self) -> str:
        words = [f"{self.T} x {self.S}", self.mask, *self.options]
        if self.heads != (4, 2):
            words.append(f"{self.heads[0]}/{self.heads[1]} heads")
        if self.value_width:
            words.append(f"values {self.value_width} wide")
        if self.large_scores:
            words.append("large scores")
        return ", ".join(words)


def _segment_ids(rng: np.random.Generator, length: int) -> Array:
    """Ids `[B, length]` in order: some padding, 0, then segments of any length."""
    return jnp.asarray(np.sort(rng.integers(0, 4, (BATCH, length)), axis=1), jnp.int32)


def _segments(rng: np.random.Generator, T: int, S: int) -> Mask:
    ids = _segment_ids(rng, S)
    return segments(ids[:, S - T :] if T <= S else _segment_ids(rng, T), ids).at(max(S - T, 0))


def _lengths(rng: np.random.Generator, T: int, S: int) -> Mask:
    """The last row of the batch has no keys at all."""
    return lengths(kv=jnp.asarray([S, S // 2, 0], jnp.int32))


# a mask of T queries and S keys
MASKS: dict[str, Callable[[np.random.Generator, int, int], Mask]] = {
    "causal": lambda rng, T, S: causal(),
    "full": lambda rng, T, S: full(),
    "causal window": lambda rng, T, S: causal() & window(20),
    "two-sided window": lambda rng, T, S: window(9, 5),
    "prefix": lambda rng, T, S: causal() | prefix(7),
    "causal segments": lambda rng, T, S: causal() & _segments(rng, T, S),
    "lengths": _lengths,
    "hidden keys": lambda rng, T, S: ~causal(),  # the last query sees none
}
# the options of a call besides its mask: functions (rng, B, N, T, S) -> fields of `Call`
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "bias": lambda rng, B, N, T, S: {"bias": _normal(rng, B, N, T, S)},
    "bias by key": lambda rng, B, N, T, S: {"bias": _normal(rng, 1, N, 1, S)},
    "bias of -inf": lambda rng, B, N, T, S: {"bias": _hiding(rng, B, T, S)},
    "bias by distance": lambda rng, B, N, T, S: {"bias": alibi(N)},
    "bias as a function": lambda rng, B, N, T, S: {"bias": jax.tree_util.Partial(_recency)},
    "softcap": lambda rng, B, N, T, S: {"softcap": 2.0},
    "sinks": lambda rng, B, N, T, S: {"sinks": _normal(rng, N)},
    "dropout": lambda rng, B, N, T, S: {"dropout_rate": RATE, "dropout_seed": _seed()},
}


def _seed() -> Array | None:
    return dropout_seed(RATE, jax.random.key(7))


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _hiding(rng: np.random.Generator, B: int, T: int, S: int) -> Array:
    return jnp.asarray(np.where(rng.random((B, 1, T, S)) < 0.3, -np.inf, 0), jnp.float32)


def _recency(q_positions: Array, kv_positions: Array) -> Array:
    return -jnp.log1p(jnp.abs(q_positions[:, None] - kv_positions[None]).astype(jnp.float32))[None]


CASES = (
    *(Case(mask, T=length, S=length) for mask, length in zip(MASKS, (127, 129) * 4, strict=True)),
    *(Case("causal", (option,), T=129, S=129) for option in OPTIONS),
    *(Case("causal", T=T, S=S) for T, S in ((1, 1), (128, 128), (1, 129), (127, 129), (129, 127))),
    *(Case("causal", heads=heads) for heads in ((4, 4), (6, 2), (4, 1))),
    Case("causal", value_width=24),
    Case("causal", large_scores=True),
)


def random_cases(count: int, seed: int = 0) -> tuple[Case, ...]:
    """Cases that have several options at once."""
    rng = np.random.default_rng(seed)
    biases = [option for option in OPTIONS if option.startswith("bias")]
    others = [option for option in OPTIONS if option not in biases]

    def draw() -> Case:
        options = [str(rng.choice(biases))] if rng.random() < 0.5 else []
        options += [option for option in others if rng.random() < 0.5]
        T, S = (int(rng.choice((1, 127, 129))) for _ in "TS")
        heads = ((4, 4), (4, 2), (4, 1), (6, 2))[rng.integers(4)]
        return Case(str(rng.choice(list(MASKS))), tuple(options), T, S, heads)

    return tuple(draw() for _ in range(count))


@dataclass(frozen=True)
class Result:
    """The result of the comparison of one case."""

    case: Case
    refuses: str | None  # the reason why the kernel refuses the case; then nothing was computed
    differences: dict[str, float]  # of the output, and of the gradient of each array

    def largest(self) -> float:
        """The largest difference; NaN if one is NaN."""
        return float(np.max(list(self.differences.values()), initial=0.0))


@dataclass(frozen=True)
class Report:
    """The results of all cases; `str` makes a table."""

    name: str  # of the kernel
    tolerance: float
    results: tuple[Result, ...]

    @property
    def wrong(self) -> tuple[Result, ...]:
        """The results with a difference above the tolerance, or with NaN."""
        return tuple(result for result in self.results if not result.largest() <= self.tolerance)

    def __str__(self) -> str:
        width = max(len(str(result.case)) for result in self.results)
        title = f"largest difference from the reference (at most {self.tolerance:.1e})"
        lines = [f"{self.name}: {title}"]
        for result in self.results:
            verdict = f"refuses: {result.refuses}" if result.refuses else self._differences(result)
            lines.append(f"{result.case!s:<{width}}  {verdict}")
        return "\n".join(lines)

    def _differences(self, result: Result) -> str:
        if result not in self.wrong:
            return f"equal to {result.largest():.1e}"
        bad = {name: x for name, x in result.differences.items() if not x <= self.tolerance}
        return "WRONG: " + ", ".join(f"{name} by {x:.1e}" for name, x in bad.items())


def check_kernel(
    kernel: Kernel,
    *,
    cases: Sequence[Case] = CASES,
    draws: int = 6,
    seed: int = 0,
    dtype: Any = jnp.float32,
    head_width: int = 16,
    gradients: bool = True,
    tolerance: float | None = None,
) -> Report:
    """Compares a kernel with the reference, prints a table, and returns it as a `Report`.

    It compares outputs and gradients (of query, key, value, sinks, and a bias that is an array).
    Each of `cases` varies one thing: masks, biases, softcaps, sinks, dropout, grouped heads, odd
    lengths. `draws` is the number of random cases that combine several of these. If the kernel
    computes in 16 bits, the reference computes in float32. Call it for each `dtype` and
    `head_width` (H) that the kernel supports. `gradients=False` is for a kernel without gradients.
    `tolerance` is relative to 1 + the largest number; the default is 2e-5 in 32 bits and 2^-6 in
    16 bits (a kernel whose float32 products are TF32 needs 2e-3).

    Raises AssertionError if a difference is larger, and if the kernel refuses every case.
    """
    dtype = jnp.dtype(dtype)
    tolerance = TOLERANCES[dtype.itemsize] if tolerance is None else tolerance
    results = []
    for number, case in enumerate((*cases, *random_cases(draws, seed))):
        rng = np.random.default_rng((seed, number))
        try:
            results.append(_compare(kernel, case, rng, dtype, head_width, gradients))
        except Exception as error:
            error.add_note(f"check_kernel({kernel.name!r}): in the case {case}")
            raise
    report = Report(kernel.name, tolerance, tuple(results))
    print(report)
    if report.wrong:
        count = f"{len(report.wrong)} of {len(results)} cases are wrong"
        raise AssertionError(f"{kernel.name}: {count}:\n{report}")
    if all(result.refuses for result in results):
        nothing = "it refuses every case, so nothing was compared"
        raise AssertionError(f"{kernel.name}: {nothing}:\n{report}")
    return report


def _compare(
    kernel: Kernel,
    case: Case,
    rng: np.random.Generator,
    dtype: Any,
    head_width: int,
    gradients: bool,
) -> Result:
    arrays, call = _draw(case, rng, head_width, dtype)
    if (reason := _refusal(kernel, arrays, call)) is not None:
        return Result(case, reason, {})
    B, T, N, _ = arrays["query"].shape
    Hv = arrays["value"].shape[-1]
    # The gradient of a score is a difference of sums d_out · out. With this factor they are of
    # order 2 for heads of any width.
    d_out = (_normal(rng, B, T, N, Hv) * (2 * Hv**-0.5)).astype(dtype)

    def exact(query, key, value, call):
        return reference(query, key, value, call)[0]

    expected = _outcome(exact, _in_float32(arrays), call, _in_float32(d_out), gradients)
    found = _outcome(kernel, arrays, call, d_out, gradients)
    return Result(case, None, {name: _difference(found[name], x) for name, x in expected.items()})


def _draw(case: Case, rng: np.random.Generator, H: int, dtype: Any) -> tuple[dict[str, Any], Call]:
    """(the arrays that have a gradient, by name; the call without them)."""
    N, K = case.heads
    fields: dict[str, Any] = {}
    for option in case.options:
        fields |= OPTIONS[option](rng, BATCH, N, case.T, case.S)
    shapes = {
        "query": (BATCH, case.T, N, H),
        "key": (BATCH, case.S, K, H),
        "value": (BATCH, case.S, K, case.value_width or H),
    }
    arrays: dict[str, Any] = {name: _normal(rng, *shape) for name, shape in shapes.items()}
    if case.large_scores:  # scores of integers are exact in any order of summation
        small = {name: rng.integers(-8, 9, shapes[name]) for name in ("query", "key")}
        arrays |= {name: jnp.asarray(x, jnp.float32) for name, x in small.items()}
        fields["scale"] = 0.125
    arrays |= {name: fields.pop(name) for name in ("bias", "sinks") if name in fields}
    mask = MASKS[case.mask](rng, case.T, case.S).sized(case.S)
    call = Call(mask, **{"scale": H**-0.5} | fields)
    return jax.tree.map(lambda x: x.astype(dtype), arrays), call


def _in_float32(tree: Any) -> Any:
    """Arrays of 16 bits become float32; arrays of 64 bits stay unchanged."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _with(call: Call, arrays: dict[str, Any]) -> tuple[Array, Array, Array, Call]:
    """The arguments of a kernel."""
    options = {name: arrays[name] for name in ("bias", "sinks") if name in arrays}
    return arrays["query"], arrays["key"], arrays["value"], replace(call, **options)


def _refusal(kernel: Kernel, arrays: dict[str, Any], call: Call) -> str | None:
    """The reason why the kernel refuses the call, or None. As in a model, arrays are traced."""
    reasons: list[str | None] = []

    def ask(arrays, call):
        reasons.append(kernel.lacks(*_with(call, arrays)))

    jax.eval_shape(ask, arrays, call)
    return reasons[0]


def _outcome(
    attention: Callable,
    arrays: dict[str, Any],
    call: Call,
    d_out: Array,
    gradients: bool,
) -> dict[str, np.ndarray]:
    """The output, and the gradient of each array, by name."""

    def output(call, arrays):
        return attention(*_with(call, arrays))

    def run(arrays, call, d_out):
        if not gradients:
            return {"output": output(call, arrays)}
        out, pullback = jax.vjp(partial(output, call), arrays)
        (gradients_of,) = pullback(d_out)
        results = {"output": out}
        for name, gradient in gradients_of.items():
            if isinstance(gradient, Array):
                results[f"gradient of {name}"] = gradient
        return results

    with jax.default_matmul_precision("highest"):
        results = jax.jit(run)(arrays, call, d_out)
    output_first = sorted(results, key=lambda name: name != "output")
    return {name: np.asarray(results[name], np.float64) for name in output_first}


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference divided by 1 + the largest number; NaN if a number is NaN."""
    if expected.size == 0:
        return 0.0
    return float(np.max(np.abs(found - expected)) / (1 + np.max(np.abs(expected))))
