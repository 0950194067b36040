"""FLOPs of products in any function by its jaxpr, loops and kernels multiplied out (XLA's `cost_analysis` does not do that).

What nobody reads is not counted, because XLA removes it: the gradients of frozen weights.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

ONCE = "a loop with an unknown number of turns counts once: a lower bound"
ROWS = "a loop, or a product, over an unknown number of rows of an array counts for all of them: an upper bound"
DEAREST = "the most expensive branch of a conditional counts: an upper bound"
CUDNN = "cuDNN's attention counts every pair of a query and a key: an upper bound"
SAME = ("pvary", "pcast", "reshard", "sharding_constraint", "copy")  # their result is their operand


class Count(NamedTuple):
    """What a function computes, over all devices.

    matmul: FLOPs of products, two a multiply-add. notes: what is not counted exactly, as an upper or a lower bound.
    shared: FLOPs of all turns of the innermost enclosing scan together, not of each.
    split: by id of a table, FLOPs of all devices of the innermost enclosing `shard_map` together, in all turns and loops.
    """

    matmul: float = 0.0
    notes: frozenset[str] = frozenset()
    shared: float = 0.0
    split: frozenset[tuple[int, float]] = frozenset()

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]
        shared, split = self.shared + other.shared, self.split | other.split
        return Count(self.matmul + other.matmul, self.notes | other.notes, shared, split)

    flops = property(lambda self: self.matmul + self.shared + sum(flops for _, flops in self.split))

    def times(self, n: int | float) -> "Count":
        return Count(n * self.matmul, self.notes, n * self.shared, self.split)


def count(function: Callable, *arguments: Any) -> Count:
    """What `function(*arguments)` computes; the arguments may be `jax.ShapeDtypeStruct`s. Nothing is computed."""
    return of_jaxpr(jax.make_jaxpr(function)(*arguments))


def of_jaxpr(closed: Any) -> Count:
    """What a `ClosedJaxpr` computes (`jax.make_jaxpr`, or `.trace(...).jaxpr` of a jitted function)."""
    total, _ = _Walk({}, {}).closed(closed, [None] * len(closed.jaxpr.invars))
    return Count(total.flops, total.notes)


class _Reads(NamedTuple):
    """What a jaxpr reads to compute some of its results."""

    inputs: tuple[bool, ...]  # whether each argument is read
    results: tuple[tuple[bool, ...], ...]  # of each equation, whether each of its results is read


def _is_value(atom: Any) -> bool:
    return hasattr(atom, "val")


class _Walk(NamedTuple):
    """A walk through a jaxpr. Its values are constants, such as a kernel's table of blocks, or None for data.

    `scan` and `shard_map` stack a constant and take it apart again; here it stays as it is: its shape may be another.
    """

    # by id of a jaxpr without constants among its arguments, and by which of its results are read
    results: dict[tuple[int, tuple[bool, ...]], tuple[Count, list]]
    reads: dict[tuple[int, tuple[bool, ...]], _Reads]  # by the same

    def closed(self, closed, values: list, used: tuple[bool, ...] | None = None) -> tuple[Count, list]:
        """What a jaxpr computes for the results that are `used` (None: for all), and its results."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))
        used = (True,) * len(jaxpr.outvars) if used is None else used
        unknown = all(value is None for value in consts + values)
        key = id(jaxpr), used
        if unknown and key in self.results:
            return self.results[key]
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], consts + values, strict=True))

        def read(atom):
            return (atom.val if np.ndim(atom.val) else None) if hasattr(atom, "val") else env.get(atom)

        total = Count()
        for eqn, needed in zip(jaxpr.eqns, self.needs(jaxpr, used).results, strict=True):
            if not any(needed) and not eqn.effects:
                continue
            one, results = self.equation(eqn, [read(atom) for atom in eqn.invars], needed)
            total += one
            env.update(zip(eqn.outvars, results, strict=True))
        result = total, [read(atom) for atom in jaxpr.outvars]
        if unknown:
            self.results[key] = result
        return result

    def needs(self, jaxpr, used: tuple[bool, ...]) -> _Reads:
        """What is read where some results are `used`: from the last equation back to the first."""
        key = id(jaxpr), used
        if key in self.reads:
            return self.reads[key]
        read = {atom for atom, is_used in zip(jaxpr.outvars, used, strict=True) if is_used and not _is_value(atom)}
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
        """Whether an equation reads each of its arguments for the results that are needed. In doubt it does."""
        if eqn.primitive.name == "scan":
            return self.needs(eqn.params["jaxpr"].jaxpr, self.in_each_turn(eqn, needed)).inputs
        inner = _called(eqn)
        inner = getattr(inner, "jaxpr", inner)
        sizes = len(eqn.invars), len(eqn.outvars)
        if inner is None or eqn.effects or (len(inner.invars), len(inner.outvars)) != sizes:
            return (True,) * len(eqn.invars)
        return self.needs(inner, needed).inputs

    def in_each_turn(self, eqn, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which results of a scan's body are read, by the next turn too."""
        body = eqn.params["jaxpr"].jaxpr
        carried = len(eqn.outvars) - _stacked(eqn.outvars, body.outvars)
        constants = len(eqn.invars) - carried - _stacked(eqn.invars, body.invars)
        while True:
            again = self.needs(body, needed).inputs[constants : constants + carried]
            more = tuple(one or other for one, other in zip(needed, again, strict=False)) + needed[carried:]
            if more == needed:
                return needed
            needed = more

    def equation(self, eqn, values: list, needed: tuple[bool, ...]) -> tuple[Count, list]:
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
            case "shard_map":
                one, results = self.closed(eqn.params["jaxpr"], values, needed)
                devices = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
                together = sum(flops for _, flops in one.split)
                return Count(devices * one.matmul + together, one.notes, devices * one.shared), results
            case name if name in SAME:
                return Count(), values[:1]
        called = _called(eqn)
        return (_product(eqn), unknown) if called is None else self.closed(called, values, needed)

    def scan(self, eqn, values: list, needed: tuple[bool, ...]) -> tuple[Count, list]:
        """A scan: its body as often as it runs. The names of its parameters change between versions of JAX; ranks do not."""
        body = eqn.params["jaxpr"]
        sliced = _stacked(eqn.invars, body.jaxpr.invars)
        carried = len(eqn.outvars) - _stacked(eqn.outvars, body.jaxpr.outvars)
        constants = len(eqn.invars) - carried - sliced
        inputs = values[:constants] + [None] * carried + values[constants + carried :]
        one, results = self.closed(body, inputs, self.in_each_turn(eqn, needed))
        total = Count(eqn.params["length"] * one.matmul + one.shared, one.notes, split=one.split)
        return total, [None] * carried + results[carried:]

    def loop(self, eqn, values: list) -> Count:
        """A loop `while counter < limit` that takes a row of an array in each turn counts for all rows.

        Blockwise attention scans its query blocks, and each loops over its own entries of one constant table of key blocks:
        the rows of a constant table count once for the whole scan. In ring attention the devices have such a table together
        (in the loop it is cast to vary with the device), and count once for all of them.
        """
        body, condition = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
        carried = len(eqn.outvars)  # both take constants of their own, then what the loop carries
        begin = len(condition.jaxpr.invars) - carried
        constants = len(body.jaxpr.invars) - carried
        inputs = values[begin : begin + constants] + [None] * carried
        one, _ = self.closed(body, inputs)
        counts = [e.primitive.name for e in condition.jaxpr.eqns] == ["lt"]
        slices = [e for e in body.jaxpr.eqns if e.primitive.name == "dynamic_slice"]
        arrays = [e.invars[0] for e in slices if counts and e.params["slice_sizes"][0] == 1]
        if not arrays or not one.matmul:
            return one + Count(notes=frozenset([ONCE] if one.matmul else []))
        known = dict(zip(body.jaxpr.invars, inputs, strict=True))
        casts = [e for e in body.jaxpr.eqns if e.primitive.name in ("pvary", "pcast") and not hasattr(e.invars[0], "val")]
        cast = {e.outvars[0]: known.get(e.invars[0]) for e in casts}
        for x in arrays:
            if x.aval.dtype.kind == "i" and (hasattr(x, "val") or known.get(x) is not None):
                return Count(0.0, one.notes, one.matmul * x.aval.size)
            if x.aval.dtype.kind == "i" and cast.get(x) is not None:
                return Count(0.0, one.notes, 0.0, frozenset([(id(cast[x]), one.matmul * x.aval.size)]))
        return one.times(max(x.aval.shape[0] for x in arrays)) + Count(notes=frozenset([ROWS]))

    def branches(self, eqn, values: list) -> tuple[Count, list]:
        branches = [self.closed(branch, values[1:]) for branch in eqn.params["branches"]]
        most, results = max(branches, key=lambda pair: pair[0].flops)
        differ = any(one.flops < most.flops for one, _ in branches)
        return most + Count(notes=frozenset([DEAREST] if differ else [])), results

    def kernel(self, eqn, values: list) -> Count:
        """A Pallas kernel: its own estimate, or its body for every block of its grid."""
        if (estimate := eqn.params.get("cost_estimate")) is not None:
            return Count(float(estimate.flops))
        name, blocks = str(eqn.params["name"]), float(math.prod(eqn.params["grid_mapping"].grid))
        body, _ = self.closed(eqn.params["jaxpr"], [None] * len(eqn.params["jaxpr"].invars))
        notes = frozenset([f"{name}: every block of the kernel's grid counts: an upper bound"] if body.notes else [])
        if name.startswith("splash") and values[1] is not None:  # a table: 0 for a block without a visible key
            blocks, notes = blocks * float(np.count_nonzero(values[1]) / np.size(values[1])), frozenset()
        return Count(body.matmul, notes).times(blocks)


def _called(eqn) -> Any:
    """The jaxpr of an equation that calls one with its arguments, for its results; None for others."""
    if eqn.primitive.name in ("while", "cond", "pallas_call"):
        return None
    return next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)


def _stacked(outside: list, inside: list) -> int:
    """How many values of a scan have an axis more outside of its body than inside."""
    return sum(one.aval.ndim > other.aval.ndim for one, other in zip(outside, inside, strict=True))


def _product(eqn) -> Count:
    """FLOPs of an operation if it is a product."""
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            return Count(2.0 * eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted))
        case "ragged_dot_general":  # a row of the left is multiplied with the matrix of its group
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batched) = numbers.dot_dimension_numbers
            gone = {*contracted, *batched, *numbers.rhs_group_dimensions}
            free = math.prod(n for axis, n in enumerate(eqn.invars[1].aval.shape) if axis not in gone)
            return Count(2.0 * eqn.invars[0].aval.size * free, frozenset([ROWS]))
        case "conv_general_dilated":
            kernel, features = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec[0]
            return Count(2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[features])
        case "dot_product_attention_fwd_wrapper" | "dot_product_attention_bwd_wrapper" as name:  # of cuDNN
            (query, key), products = (atom.aval for atom in eqn.invars[:2]), 2 if "fwd" in name else 5
            return Count(2.0 * products * query.size * key.shape[1], frozenset([CUDNN]))
    return Count()
