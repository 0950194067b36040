"""FLOPs of the matrix products in any function, counted from its jaxpr.

`count` is the function to call. Loops and kernels are multiplied out; XLA's `cost_analysis` does
not do that. Results that nothing reads are not counted, because XLA removes them: the gradients of
frozen weights, for example.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

ONCE = "a loop with an unknown number of turns counts once: a lower bound"
ROWS = (
    "a loop, or a product, over an unknown number of rows of an array counts for all of them: "
    "an upper bound"
)
DEAREST = "the most expensive branch of a conditional counts: an upper bound"
UNSEEN = "a kernel of another library does not say its products: a lower bound"
CUDNN = "cuDNN's attention counts every pair of a query and a key: an upper bound"
# primitives whose result equals their operand
SAME = ("pvary", "pcast", "reshard", "sharding_constraint", "copy")

# kernels with bodies of another form than a jaxpr: Pallas for Mosaic GPU, jax-triton
KERNELS = ("mpmd_map", "triton_kernel_call")


class Count(NamedTuple):
    """The FLOPs of a function on all devices.

    matmul: FLOPs of products, two a multiply-add.
    notes: the parts that are not exact, each with the word upper or lower bound.
    shared: FLOPs of all iterations of the innermost enclosing scan together, not of one iteration.
    split: (id of a table, FLOPs); the FLOPs of all devices of the innermost enclosing `shard_map`
    together, in all its iterations and loops.
    """

    matmul: float = 0.0
    notes: frozenset[str] = frozenset()
    shared: float = 0.0
    split: frozenset[tuple[int, float]] = frozenset()

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]
        shared = self.shared + other.shared
        split = self.split | other.split
        return Count(self.matmul + other.matmul, self.notes | other.notes, shared, split)

    flops = property(lambda self: self.matmul + self.shared + sum(flops for _, flops in self.split))

    def times(self, n: int | float) -> "Count":
        return Count(n * self.matmul, self.notes, n * self.shared, self.split)


def count(function: Callable, *arguments: Any) -> Count:
    """The FLOPs of `function(*arguments)`, which is traced and not run.

    The arguments may be `jax.ShapeDtypeStruct`s.
    """
    return of_jaxpr(jax.make_jaxpr(function)(*arguments))


def of_jaxpr(closed: Any) -> Count:
    """The FLOPs of a `ClosedJaxpr`, such as `.trace(...).jaxpr` of a jitted function."""
    total, _ = _Walk({}, {}).closed(closed, [None] * len(closed.jaxpr.invars))
    return Count(total.flops, total.notes)


class _Reads(NamedTuple):
    """The values that a jaxpr reads to compute some of its results."""

    inputs: tuple[bool, ...]  # whether each argument is read
    results: tuple[tuple[bool, ...], ...]  # of each equation, whether each of its results is read


def _is_value(atom: Any) -> bool:
    """Whether an operand is a constant that stands in the equation itself."""
    return hasattr(atom, "val")


def _value(atom: Any, known: dict) -> Any:
    """The constant array of an operand or a result; None for data and for scalars."""
    if _is_value(atom):
        return atom.val if np.ndim(atom.val) else None
    return known.get(atom)


class _Walk(NamedTuple):
    """A walk through a jaxpr that counts FLOPs and follows constants.

    A value is a constant array, such as a kernel's table of blocks, or None for data. `scan` and
    `shard_map` stack and slice their values. The walk keeps a constant unchanged there, so its
    shape may differ from that of the jaxpr's variable.
    """

    # Both caches have the key (id of a jaxpr, for each of its results whether it is read).
    # `results` holds only jaxprs that have no constants among their arguments.
    results: dict[tuple[int, tuple[bool, ...]], tuple[Count, list]]
    reads: dict[tuple[int, tuple[bool, ...]], _Reads]

    def closed(
        self, closed, values: list, used: tuple[bool, ...] | None = None
    ) -> tuple[Count, list]:
        """(the FLOPs for the results that are `used`, the results). None: all results are used."""
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = list(getattr(closed, "consts", ()))
        used = (True,) * len(jaxpr.outvars) if used is None else used
        unknown = all(value is None for value in consts + values)
        key = id(jaxpr), used
        if unknown and key in self.results:
            return self.results[key]
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], consts + values, strict=True))
        total = Count()
        for eqn, needed in zip(jaxpr.eqns, self.needs(jaxpr, used).results, strict=True):
            if not any(needed) and not eqn.effects:
                continue
            operands = [_value(atom, known) for atom in eqn.invars]
            count, results = self.equation(eqn, operands, needed)
            total += count
            known.update(zip(eqn.outvars, results, strict=True))
        result = total, [_value(atom, known) for atom in jaxpr.outvars]
        if unknown:
            self.results[key] = result
        return result

    def needs(self, jaxpr, used: tuple[bool, ...]) -> _Reads:
        """The values that are read if some results are `used`, from the last equation backwards."""
        key = id(jaxpr), used
        if key in self.reads:
            return self.reads[key]
        read = {
            atom
            for atom, is_used in zip(jaxpr.outvars, used, strict=True)
            if is_used and not _is_value(atom)
        }
        results = []
        for eqn in reversed(jaxpr.eqns):
            needed = tuple(atom in read for atom in eqn.outvars)
            results.append(needed)
            if any(needed) or eqn.effects:
                inputs = zip(eqn.invars, self.inputs(eqn, needed), strict=True)
                read.update(atom for atom, is_read in inputs if is_read and not _is_value(atom))
        self.reads[key] = _Reads(tuple(atom in read for atom in jaxpr.invars), tuple(results[::-1]))
        return self.reads[key]

    def inputs(self, eqn, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        """For each argument of an equation: whether the needed results read it. In doubt: yes."""
        if eqn.primitive.name == "scan":
            return self.needs(eqn.params["jaxpr"].jaxpr, self.needed_in_body(eqn, needed)).inputs
        inner = _called(eqn)
        inner = getattr(inner, "jaxpr", inner)
        sizes = len(eqn.invars), len(eqn.outvars)
        if inner is None or eqn.effects or (len(inner.invars), len(inner.outvars)) != sizes:
            return (True,) * len(eqn.invars)
        return self.needs(inner, needed).inputs

    def needed_in_body(self, eqn, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        """For each result of a scan's body: whether it is read, also by the next iteration."""
        body = eqn.params["jaxpr"].jaxpr
        carried = len(eqn.outvars) - _stacked(eqn.outvars, body.outvars)
        constants = len(eqn.invars) - carried - _stacked(eqn.invars, body.invars)
        while True:
            by_next = self.needs(body, needed).inputs[constants : constants + carried]
            carry = [now or later for now, later in zip(needed, by_next, strict=False)]
            more = (*carry, *needed[carried:])
            if more == needed:
                return needed
            needed = more

    def equation(self, eqn, values: list, needed: tuple[bool, ...]) -> tuple[Count, list]:
        """(the FLOPs of an equation for the results that are needed, its results)."""
        unknown = [None] * len(eqn.outvars)
        match eqn.primitive.name:
            case "scan":
                return self.scan(eqn, values, needed)
            case "while":
                return self.loop(eqn, values), unknown
            case "cond":
                return self.branches(eqn, values)
            case "pallas_call":
                return self.kernel(eqn, values), unknown
            case name if name in KERNELS:
                estimate = eqn.params.get("cost_estimate")
                unseen = Count(notes=frozenset([UNSEEN]))
                return unseen if estimate is None else Count(float(estimate.flops)), unknown
            case "shard_map":
                return self.shard_map(eqn, values, needed)
            case name if name in SAME:
                return Count(), values[:1]
        called = _called(eqn)
        if called is not None:
            return self.closed(called, values, needed)
        return _product(eqn), unknown

    def shard_map(self, eqn, values: list, needed: tuple[bool, ...]) -> tuple[Count, list]:
        """A `shard_map` counts its body once for each device."""
        count, results = self.closed(eqn.params["jaxpr"], values, needed)
        sizes = eqn.params["mesh"].shape
        devices = math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
        of_all_devices = sum(flops for _, flops in count.split)
        matmul = devices * count.matmul + of_all_devices
        return Count(matmul, count.notes, devices * count.shared), results

    def scan(self, eqn, values: list, needed: tuple[bool, ...]) -> tuple[Count, list]:
        """A scan counts its body once for each iteration.

        The numbers of constants, carried and stacked values follow from the ranks of the values:
        the parameters of the equation change their names between versions of JAX.
        """
        body = eqn.params["jaxpr"]
        sliced = _stacked(eqn.invars, body.jaxpr.invars)
        carried = len(eqn.outvars) - _stacked(eqn.outvars, body.jaxpr.outvars)
        constants = len(eqn.invars) - carried - sliced
        inputs = values[:constants] + [None] * carried + values[constants + carried :]
        count, results = self.closed(body, inputs, self.needed_in_body(eqn, needed))
        matmul = eqn.params["length"] * count.matmul + count.shared
        return Count(matmul, count.notes, split=count.split), [None] * carried + results[carried:]

    def loop(self, eqn, values: list) -> Count:
        """A loop `while counter < limit` that reads one row of an array each time counts all rows.

        Blockwise attention scans its query blocks. Each query block loops over its own entries of
        one constant table of key blocks, so the rows of a constant table count once for the whole
        scan. In ring attention the devices share such a table; inside the loop it is cast to vary
        with the device. Its rows count once for all devices.
        """
        body = eqn.params["body_jaxpr"]
        condition = eqn.params["cond_jaxpr"]
        carried = len(eqn.outvars)  # each of the two takes its own constants, then carried values
        begin = len(condition.jaxpr.invars) - carried
        constants = len(body.jaxpr.invars) - carried
        inputs = values[begin : begin + constants] + [None] * carried
        count, _ = self.closed(body, inputs)
        has_counter = [e.primitive.name for e in condition.jaxpr.eqns] == ["lt"]
        slices = [e for e in body.jaxpr.eqns if e.primitive.name == "dynamic_slice"]
        arrays = [e.invars[0] for e in slices if has_counter and e.params["slice_sizes"][0] == 1]
        if not arrays or not count.matmul:
            return count + Count(notes=frozenset([ONCE] if count.matmul else []))
        known = dict(zip(body.jaxpr.invars, inputs, strict=True))
        cast = {}  # constants that vary with the device inside the loop
        for e in body.jaxpr.eqns:
            if e.primitive.name in ("pvary", "pcast") and not _is_value(e.invars[0]):
                cast[e.outvars[0]] = known.get(e.invars[0])
        for x in arrays:
            if x.aval.dtype.kind != "i":
                continue
            of_all_rows = count.matmul * x.aval.size
            if _is_value(x) or known.get(x) is not None:
                return Count(0.0, count.notes, of_all_rows)
            if cast.get(x) is not None:
                return Count(0.0, count.notes, 0.0, frozenset([(id(cast[x]), of_all_rows)]))
        return count.times(max(x.aval.shape[0] for x in arrays)) + Count(notes=frozenset([ROWS]))

    def branches(self, eqn, values: list) -> tuple[Count, list]:
        """A conditional counts its most expensive branch."""
        branches = [self.closed(branch, values[1:]) for branch in eqn.params["branches"]]
        dearest, results = max(branches, key=lambda pair: pair[0].flops)
        differ = any(count.flops < dearest.flops for count, _ in branches)
        return dearest + Count(notes=frozenset([DEAREST] if differ else [])), results

    def kernel(self, eqn, values: list) -> Count:
        """A Pallas kernel counts its own estimate, or its body for every block of its grid."""
        if (estimate := eqn.params.get("cost_estimate")) is not None:
            return Count(float(estimate.flops))
        name = str(eqn.params["name"])
        blocks = float(math.prod(eqn.params["grid_mapping"].grid))
        body, _ = self.closed(eqn.params["jaxpr"], [None] * len(eqn.params["jaxpr"].invars))
        notes = []
        if name.startswith("splash") and values[1] is not None:
            # the table of a splash kernel is 0 for a block without a visible key
            blocks = blocks * float(np.count_nonzero(values[1]) / np.size(values[1]))
        elif ONCE in body.notes:
            notes.append(ONCE)
        elif body.notes:
            notes.append(f"{name}: every block of the kernel's grid counts: an upper bound")
        return Count(body.matmul, frozenset(notes)).times(blocks)


# the parameters that hold it; "call" is that of `jax.custom_batching.custom_vmap`
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


def _called(eqn) -> Any:
    """The jaxpr that an equation calls with its arguments to get its results; None if none."""
    if eqn.primitive.name in ("while", "cond", "pallas_call"):
        return None
    return next(
        (eqn.params[name] for name in CALLED if name in eqn.params),
        None,
    )


def _stacked(outside: list, inside: list) -> int:
    """The number of values of a scan that have one more axis outside of its body than inside."""
    return sum(one.aval.ndim > other.aval.ndim for one, other in zip(outside, inside, strict=True))


def _product(eqn) -> Count:
    """The FLOPs of an operation if it is a product, else 0."""
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            return Count(
                2.0 * eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
            )
        case "ragged_dot_general":  # each row of the left operand meets the matrix of its group
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batched) = numbers.dot_dimension_numbers
            other_axes = {*contracted, *batched, *numbers.rhs_group_dimensions}
            shape = eqn.invars[1].aval.shape
            width = math.prod(n for axis, n in enumerate(shape) if axis not in other_axes)
            return Count(2.0 * eqn.invars[0].aval.size * width, frozenset([ROWS]))
        case "conv_general_dilated":
            kernel = eqn.invars[1].aval
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            return Count(2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[features])
        # cuDNN
        case "dot_product_attention_fwd_wrapper" | "dot_product_attention_bwd_wrapper" as name:
            query, key = (atom.aval for atom in eqn.invars[:2])
            products = 2 if "fwd" in name else 5
            return Count(2.0 * products * query.size * key.shape[1], frozenset([CUDNN]))
    return Count()
