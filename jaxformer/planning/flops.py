"""FLOPs of the products in any function, counted by walking its jaxpr: each loop with its number of turns, kernels too.

XLA's own count (`cost_analysis`) has the body of a loop once, and nothing of a kernel.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

ONCE = "a loop with an unknown number of turns counts once: a lower bound"
ROWS = "a loop of unknown length over the rows of an array counts for all of them: an upper bound"
SAME = ("pvary", "pcast", "reshard", "sharding_constraint", "copy")  # their result is their operand
_INTEGERS = ("i", "u", "b")
LARGEST = 2**20  # entries of a constant that is followed through the program


class Count(NamedTuple):
    """What a function computes, over all devices.

    matmul: FLOPs of products, two a multiply-add. notes: what is not counted exactly, as an upper or a lower bound.
    """

    matmul: float = 0.0
    notes: frozenset[str] = frozenset()

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]
        return Count(self.matmul + other.matmul, self.notes | other.notes)

    def times(self, n: int | float) -> "Count":
        return Count(n * self.matmul, self.notes if n else frozenset())


def count(function: Callable, *arguments: Any) -> Count:
    """What `function(*arguments)` computes; the arguments may be `jax.ShapeDtypeStruct`s. Nothing is computed."""
    return of_jaxpr(jax.make_jaxpr(function)(*arguments))


def of_jaxpr(closed: Any) -> Count:
    """What a `ClosedJaxpr` computes (`jax.make_jaxpr`, or `.trace(...).jaxpr` of a jitted function)."""
    return _Walk({}, {}).closed(closed, [None] * len(closed.jaxpr.invars))[0]


class _Walk(NamedTuple):
    """A walk through a jaxpr. It also follows small integer constants, which decide how often a loop turns."""

    counts: dict[int, Count]  # by id of a jaxpr whose arguments are unknown
    places: dict[str, int]  # of the device whose program is walked, along axes of the mesh

    def closed(self, closed, values: list) -> tuple[Count, list]:
        consts = getattr(closed, "consts", ())
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = [_small(const) for const in consts]
        unknown = all(value is None for value in constants + values)
        if unknown and id(jaxpr) in self.counts:
            return self.counts[id(jaxpr)], [None] * len(jaxpr.outvars)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], constants + values, strict=True))
        read = lambda atom: _small(atom.val) if hasattr(atom, "val") else env.get(atom)
        total = Count()
        for eqn in jaxpr.eqns:
            one, results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            total += one
            env.update(zip(eqn.outvars, results, strict=True))
        if unknown:
            self.counts[id(jaxpr)] = total
        return total, [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, values: list) -> tuple[Count, list]:
        unknown = [None] * len(eqn.outvars)
        match eqn.primitive.name:
            case "scan":
                return self.scan(eqn, values)
            case "while":
                return self.loop(eqn, values), unknown
            case "cond":
                return self.branches(eqn, values)
            case "pallas_call":
                return self.kernel(eqn, values), unknown
            case "shard_map":
                return self.devices(eqn, values)
            case "axis_index" if eqn.params["axis_name"] in self.places:
                return Count(), [np.int32(self.places[eqn.params["axis_name"]])]
        called = next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)
        if called is not None:
            return self.closed(called, values)
        return Count(_product(eqn)), _constant(eqn, values)

    def devices(self, eqn, values: list) -> tuple[Count, list]:
        """`shard_map`: the body on each device, one by one along mesh axes where devices differ."""
        mesh, body = eqn.params["mesh"], eqn.params["jaxpr"]
        sizes = {axis: mesh.shape[axis] for axis in eqn.params["newly_manual_axes"]}
        axes_of = lambda name, atoms: [_entries(*pair, sizes) for pair in zip(eqn.params[name], atoms, strict=True)]
        in_specs, out_specs = axes_of("in_specs", eqn.invars), axes_of("out_specs", eqn.outvars)
        differ = {axis for axis in sizes if re.search(rf"axis_index\[\s*axis_name='?{axis}\b", str(body))}
        for value, spec in zip(values, in_specs, strict=True):
            if value is not None and not _uniform(value, spec, sizes):
                differ |= {axis for axes in spec for axis in axes}
        along = {axis: sizes[axis] for axis in sorted(differ) if sizes[axis] > 1}
        others = {axis: size for axis, size in sizes.items() if axis not in along}
        total, made = Count(), [np.zeros(v.aval.shape, v.aval.dtype) if _follows(v.aval) else None for v in eqn.outvars]
        for place in np.ndindex(*along.values()):
            here = dict.fromkeys(sizes, 0) | dict(zip(along, place, strict=True))
            parts = [v if v is None else v[_part(v.shape, s, sizes, here)] for v, s in zip(values, in_specs, strict=True)]
            one, results = _Walk({}, {**self.places, **here} if along else self.places).closed(body, parts)
            total += one
            for i, (array, part, spec) in enumerate(zip(made, results, out_specs, strict=True)):
                if array is None or part is None:
                    made[i] = None
                    continue
                for other in np.ndindex(*others.values()):
                    there = here | dict(zip(others, other, strict=True))
                    array[_part(array.shape, spec, sizes, there)] = part
        return total.times(math.prod(others.values())), made

    def scan(self, eqn, values: list) -> tuple[Count, list]:
        """`length` times its body; turn by turn where known indices are made, or decide how often a loop inside turns."""
        body, length, consts = eqn.params["jaxpr"], eqn.params["length"], eqn.params["num_consts"]
        begin = consts + eqn.params["num_carry"]
        first, state, rows = values[:consts], values[consts:begin], values[begin:]
        one, _ = self.closed(body, first + [None] * (len(values) - consts))
        indices = any(_follows(var.aval) for var in eqn.outvars)
        if not length or all(value is None for value in state + rows) or not (one.notes or indices):
            return one.times(length), [None] * len(eqn.outvars)
        total, made = Count(), [None] * length
        for turn in reversed(range(length)) if eqn.params["reverse"] else range(length):
            one, results = self.closed(body, first + state + [None if x is None else x[turn] for x in rows])
            total, state, made[turn] = total + one, results[: len(state)], results[len(state) :]
        stacked = [None if any(x is None for x in column) else np.stack(column) for column in zip(*made, strict=True)]
        return total, state + stacked

    def loop(self, eqn, values: list) -> Count:
        condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        one, _ = self.closed(body, [None] * len(body.jaxpr.invars))
        checked, _ = self.closed(condition, [None] * len(condition.jaxpr.invars))
        if (turns := _turns(eqn, values)) is not None:
            return one.times(turns) + checked.times(turns + 1)
        if rows := _rows(eqn):
            return one.times(rows) + checked.times(rows + 1) + Count(notes=frozenset([ROWS]))
        return one + checked + Count(notes=frozenset([ONCE] if one.matmul else []))

    def branches(self, eqn, values: list) -> tuple[Count, list]:
        branches, index = eqn.params["branches"], values[0]
        if index is not None:
            return self.closed(branches[min(max(int(index), 0), len(branches) - 1)], values[1:])
        found = [self.closed(branch, values[1:])[0] for branch in branches]
        most = max(found, key=lambda one: one.matmul)
        if min(one.matmul for one in found) < most.matmul:
            most += Count(notes=frozenset(["the most expensive branch of a conditional counts: an upper bound"]))
        return most, [None] * len(eqn.outvars)

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


def _product(eqn) -> float:
    """FLOPs of an operation if it is a product."""
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            return 2.0 * eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        case "ragged_dot_general":  # a row of the left is multiplied with the matrix of its group
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batched) = numbers.dot_dimension_numbers
            gone = {*contracted, *batched, *numbers.rhs_group_dimensions}
            free = math.prod(n for axis, n in enumerate(eqn.invars[1].aval.shape) if axis not in gone)
            return 2.0 * eqn.invars[0].aval.size * free
        case "conv_general_dilated":
            kernel, features = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec[0]
            return 2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[features]
    return 0.0


def _small(value) -> np.ndarray | None:
    """The value of a small constant of integers, which may be an index or a count; None for any other."""
    kinds = int | np.integer | np.ndarray | np.bool_ | jax.Array
    if not isinstance(value, kinds) or isinstance(value, jax.core.Tracer):
        return None
    kind = getattr(value, "dtype", np.dtype(np.int32)).kind
    return np.asarray(value) if kind in _INTEGERS and np.size(value) <= LARGEST else None


def _follows(aval) -> bool:
    """Whether values of this type are followed: small arrays of integers."""
    return getattr(getattr(aval, "dtype", None), "kind", "") in _INTEGERS and math.prod(aval.shape) <= LARGEST


def _constant(eqn, values: list) -> list:
    """The results of an operation on known integers; None for a result that is not known."""
    unknown = [None] * len(eqn.outvars)
    if eqn.effects or any(value is None for value in values) or eqn.primitive.name == "axis_index":
        return unknown
    if not all(_follows(var.aval) for var in eqn.outvars):
        return unknown
    if eqn.primitive.name in SAME:
        return values[:1]
    inputs = [np.asarray(v, getattr(atom.aval, "dtype", None)) for v, atom in zip(values, eqn.invars, strict=True)]
    try:
        results = eqn.primitive.bind(*inputs, **eqn.params)
    except Exception:  # it needs a mesh axis or a platform
        return unknown
    return [_small(one) for one in (results if eqn.primitive.multiple_results else [results])]


def _entries(spec, atom, sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """The manual axes that split each dimension."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    entries += [()] * (len(getattr(atom.aval, "shape", ())) - len(entries))
    return [tuple(axis for axis in entry if axis in sizes) for entry in entries]


def _part(shape, spec: list[tuple[str, ...]], sizes: dict[str, int], here: dict[str, int]) -> tuple[slice, ...]:
    """The part of an array that the device at a place has."""
    slices = []
    for length, axes in zip(shape, spec, strict=True):
        at, width = 0, length
        for axis in axes:
            at, width = at * sizes[axis] + here[axis], width // sizes[axis]
        slices.append(slice(at * width, (at + 1) * width))
    return tuple(slices)


def _uniform(value: np.ndarray, spec: list[tuple[str, ...]], sizes: dict[str, int]) -> bool:
    """Whether all devices have the same part."""
    counts = [math.prod(sizes[axis] for axis in axes) for axes in spec]
    part = value[tuple(slice(n // count) for n, count in zip(value.shape, counts, strict=True))]
    return np.array_equal(np.tile(part, counts), value)


def _counter(eqn) -> tuple[int, Any] | None:
    """(place of the counter in the state, limit) of a loop `while counter < limit`; None for any other loop."""
    condition = eqn.params["cond_jaxpr"].jaxpr
    if [e.primitive.name for e in condition.eqns] != ["lt"]:
        return None
    state = condition.invars[eqn.params["cond_nconsts"] :]
    counter, limit = condition.eqns[0].invars
    return (state.index(counter), limit) if counter in state else None


def _rows(eqn) -> int | None:
    """The number of rows of the arrays whose rows a loop picks by its counter: its most turns."""
    if (found := _counter(eqn)) is None:
        return None
    body = eqn.params["body_jaxpr"].jaxpr
    follows, lengths = {body.invars[eqn.params["body_nconsts"] + found[0]]}, []
    for e in body.eqns:
        reads = [atom for atom in e.invars if not hasattr(atom, "val")]
        if e.primitive.name == "dynamic_slice" and e.invars[1] in reads[1:] and e.invars[1] in follows:
            lengths += [e.invars[0].aval.shape[0]] if e.params["slice_sizes"][0] == 1 else []
        elif any(atom in follows for atom in reads) and all(_follows(var.aval) for var in e.outvars):
            follows.update(e.outvars)
    return max(lengths, default=None)


def _turns(eqn, values: list) -> int | None:
    """The turns of `fori_loop(lower, upper)` with known bounds: each turn adds 1 to the counter and keeps the limit."""
    if (found := _counter(eqn)) is None:
        return None
    place, limit = found
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    consts, begin = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    known = dict(zip(condition.invars, values[:consts] + values[begin:], strict=True))
    first, last = values[begin + place], _small(limit.val) if hasattr(limit, "val") else known[limit]
    state = body.invars[eqn.params["body_nconsts"] :]
    if first is None or last is None:
        return None
    if limit in condition.invars[consts:]:
        kept = condition.invars.index(limit) - consts
        if body.outvars[kept] is not state[kept]:
            return None
    step = next((e for e in body.eqns if body.outvars[place] in e.outvars), None)
    if step is None or step.primitive.name != "add" or step.invars[0] is not state[place]:
        return None
    copied = next((e.invars[0] for e in body.eqns if step.invars[1] in e.outvars and e.primitive.name in SAME), None)
    added = getattr(copied or step.invars[1], "val", None)
    return max(0, int(last) - int(first)) if added is not None and int(added) == 1 else None
