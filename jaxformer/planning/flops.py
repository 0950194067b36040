"""Operations and bytes of any function, counted exactly by walking its jaxpr: loops multiplied out, kernels known.

What XLA says of a compiled program (`cost_analysis`) counts the body of a loop once, and nothing inside a kernel.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

# operations that compute nothing: they name, move or cut
FREE = re.compile(
    "all_gather.*|all_to_all|axis_index|bitcast_convert_type|broadcast_in_dim|concatenate|convert_element_type|copy.*|"
    "device_put|dynamic_.*slice|empty.*|expand_dims|gather|get|iota|layout_constraint|mesh_cast|optimization_barrier|pad|"
    "pcast|platform_index|ppermute|program_id|psum.*|pvary|random_.*wrap|random_seed|reduce_scatter|reshape|reshard|rev|"
    "scatter|sharding_constraint|slice|split|squeeze|stop_gradient|swap|tile|transpose"
)
ONCE = "a loop whose number of turns is not known counts once: a lower bound"
ROWS = "a loop of unknown length over the rows of an array counts for all of them: an upper bound"
SAME = ("pvary", "pcast", "reshard", "sharding_constraint", "copy")  # a value as it was, for other devices
_INTEGERS = ("i", "u", "b")
LARGEST = 2**20  # numbers of a constant that is followed through the program


class Count(NamedTuple):
    """What a function computes and moves, over all devices.

    matmul: FLOPs of products, two a multiply-add. elementwise: operations on single numbers. read, written: bytes of the
    operands and results of products, look-ups, scatters and kernels, as if whatever is elementwise were fused into them.
    notes: what could not be counted exactly, and which way it errs.
    """

    matmul: float = 0.0
    elementwise: float = 0.0
    read: float = 0.0
    written: float = 0.0
    notes: frozenset[str] = frozenset()

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]
        sums = [a + b for a, b in zip(self[:4], other[:4], strict=True)]
        return Count(sums[0], sums[1], sums[2], sums[3], self.notes | other.notes)

    def times(self, n: int | float) -> "Count":
        matmul, elementwise, read, written, notes = self
        return Count(n * matmul, n * elementwise, n * read, n * written, notes if n else frozenset())


def count(function: Callable, *arguments: Any) -> Count:
    """What `function(*arguments)` computes; the arguments may be `jax.ShapeDtypeStruct`s. Nothing is computed."""
    return of_jaxpr(jax.make_jaxpr(function)(*arguments))


def of_jaxpr(closed: Any) -> Count:
    """What a `ClosedJaxpr` computes (`jax.make_jaxpr`, or `.trace(...).jaxpr` of a jitted function)."""
    return _Walk({}, {}).closed(closed, [None] * len(closed.jaxpr.invars))[0]


class _Walk(NamedTuple):
    """A walk follows small integer constants beside the counts: the tables and indices that decide how often a loop turns."""

    seen: dict[int, Count]  # by id of a jaxpr whose arguments are unknown
    places: dict[str, int]  # of the device that is walked for, along axes of the mesh

    def closed(self, closed, values: list) -> tuple[Count, list]:
        consts = getattr(closed, "consts", ())
        jaxpr = getattr(closed, "jaxpr", closed)
        known = [_small(const) for const in consts]
        if id(jaxpr) in self.seen and all(value is None for value in known + values):
            return self.seen[id(jaxpr)], [None] * len(jaxpr.outvars)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], known + values, strict=True))
        read = lambda atom: _small(atom.val) if hasattr(atom, "val") else env.get(atom)
        total = Count()
        for eqn in jaxpr.eqns:
            one, results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            total += one
            env.update(zip(eqn.outvars, results, strict=True))
        if all(value is None for value in known + values):
            self.seen[id(jaxpr)] = total
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
        return _simple(eqn), _constant(eqn, values)

    def devices(self, eqn, values: list) -> tuple[Count, list]:
        """`shard_map`: its body on each of the devices whose axes it takes in hand; one by one along axes where they differ."""
        mesh, inside = eqn.params["mesh"], eqn.params["jaxpr"]
        sizes = {axis: mesh.shape[axis] for axis in eqn.params["newly_manual_axes"]}
        reads, writes = (
            [_entries(spec, sizes, var.aval) for spec, var in zip(eqn.params[name], variables, strict=True)]
            for name, variables in (("in_specs", eqn.invars), ("out_specs", eqn.outvars))
        )
        differ = {axis for axis in sizes if re.search(rf"axis_index\[\s*axis_name='?{axis}\b", str(inside))}
        for value, spec in zip(values, reads, strict=True):
            differ |= {axis for axes in spec for axis in axes if value is not None and not _uniform(value, spec, sizes)}
        along = {axis: sizes[axis] for axis in sorted(differ) if sizes[axis] > 1}
        total, made = Count(), [np.zeros(v.aval.shape, v.aval.dtype) if _follows(v.aval) else None for v in eqn.outvars]
        for place in np.ndindex(*along.values()):
            here = {**dict.fromkeys(sizes, 0), **dict(zip(along, place, strict=True))}
            parts = [
                None if v is None else v[_part(v.shape, s, sizes, here)] for v, s in zip(values, reads, strict=True)
            ]
            one, results = _Walk({}, {**self.places, **here} if along else self.places).closed(inside, parts)
            total += one
            for i, (whole, part, spec) in enumerate(zip(made, results, writes, strict=True)):
                if whole is None or part is None:
                    made[i] = None
                    continue
                for other in np.ndindex(*(sizes[axis] for axis in sizes if axis not in along)):
                    there = here | dict(zip((axis for axis in sizes if axis not in along), other, strict=True))
                    whole[_part(whole.shape, spec, sizes, there)] = part
        return total.times(math.prod(size for axis, size in sizes.items() if axis not in along)), made

    def scan(self, eqn, values: list) -> tuple[Count, list]:
        """Its body once, `length` times; turn by turn where it makes, or a loop inside depends on, indices that are known."""
        body, length, consts = eqn.params["jaxpr"], eqn.params["length"], eqn.params["num_consts"]
        first, state, rows = values[:consts], values[consts:][: eqn.params["num_carry"]], values[consts:]
        rows = rows[len(state) :]
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
        turns, note = _turns(eqn, values), None
        if turns is None and (rows := _rows(eqn)):
            turns, note = rows, ROWS
        if turns is None:
            return one + checked + Count(notes=frozenset([ONCE] if one.matmul or one.elementwise else []))
        return one.times(turns) + checked.times(turns + 1) + Count(notes=frozenset([note] if note else []))

    def branches(self, eqn, values: list) -> tuple[Count, list]:
        branches, index = eqn.params["branches"], values[0]
        if index is not None:
            return self.closed(branches[min(max(int(index), 0), len(branches) - 1)], values[1:])
        found = [self.closed(branch, values[1:])[0] for branch in branches]
        most = max(found, key=lambda one: (one.matmul, one.elementwise))
        if min(one.matmul for one in found) < most.matmul:
            most += Count(notes=frozenset(["of a conditional the dearest branch counts: an upper bound"]))
        return most, [None] * len(eqn.outvars)

    def kernel(self, eqn, values: list) -> Count:
        """A Pallas kernel: what it says of itself, else its body for every block of its grid."""
        moved = Count(0, 0, _bytes(eqn.invars), _bytes(eqn.outvars))
        if (estimate := eqn.params.get("cost_estimate")) is not None:
            return moved + Count(float(estimate.flops), float(estimate.transcendentals))
        body, _ = self.closed(eqn.params["jaxpr"], [None] * len(eqn.params["jaxpr"].invars))
        blocks = float(math.prod(eqn.params["grid_mapping"].grid))
        notes = frozenset([f"{eqn.params['name']}: every block of the kernel's grid counts: an upper bound"])
        if str(eqn.params["name"]).startswith("splash") and values[1] is not None:  # its table of blocks: 0 is EMPTY
            blocks *= float(np.count_nonzero(values[1]) / np.size(values[1]))
            notes = frozenset()
        return moved + Count(body.matmul, body.elementwise, notes=notes if body.notes else frozenset()).times(blocks)


def _simple(eqn) -> Count:
    if not eqn.outvars:
        return Count()
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    size = lambda atom: math.prod(getattr(atom.aval, "shape", ()))
    moved = Count(0, 0, _bytes(eqn.invars), _bytes(eqn.outvars))
    match name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            return moved + Count(2.0 * math.prod(out.shape) * math.prod(shape[axis] for axis in contracted))
        case "ragged_dot_general":  # each row of the left meets the matrix of its group alone
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batched) = numbers.dot_dimension_numbers
            gone = {*contracted, *batched, *numbers.rhs_group_dimensions}
            free = math.prod(n for axis, n in enumerate(eqn.invars[1].aval.shape) if axis not in gone)
            return moved + Count(2.0 * size(eqn.invars[0]) * free)
        case "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            return moved + Count(2.0 * math.prod(out.shape) * math.prod(kernel) / features)
        case "gather" | "dynamic_slice":
            return Count(0, 0, _bytes(eqn.outvars), _bytes(eqn.outvars)) if name == "gather" else Count()
        case "sort" | "top_k" | "approx_top_k":
            return moved + Count(0, size(eqn.invars[0]) * math.log2(max(2, eqn.invars[0].aval.shape[-1])))
    if name.startswith("scatter"):
        updates = _bytes(eqn.invars[2:3])
        return Count(0, size(eqn.invars[2]) if name != "scatter" else 0, 2 * updates, updates)
    if FREE.fullmatch(name):
        return Count()
    if name.startswith(("reduce_", "arg", "cum")):
        return Count(0, size(eqn.invars[0]))
    return Count(0, sum(map(size, eqn.outvars)))


def _bytes(atoms) -> float:
    shapes = [(atom.aval.shape, atom.aval.dtype.itemsize) for atom in atoms if hasattr(atom.aval, "dtype")]
    return float(sum(math.prod(shape) * width for shape, width in shapes))


def _small(value) -> np.ndarray | None:
    """The value of a small constant of integers, which may index or count; None for any other."""
    if not isinstance(value, int | np.integer | np.ndarray | np.bool_ | jax.Array) or isinstance(
        value, jax.core.Tracer
    ):
        return None
    dtype = getattr(value, "dtype", np.dtype(np.int32))
    return np.asarray(value) if dtype.kind in _INTEGERS and np.size(value) <= LARGEST else None


def _follows(aval) -> bool:
    """Whether a value of that type is followed: a few integers."""
    return getattr(getattr(aval, "dtype", None), "kind", "") in _INTEGERS and math.prod(aval.shape) <= LARGEST


def _constant(eqn, values: list) -> list:
    """The results of an operation on known integers, or None for each that is not known."""
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
    except Exception:  # not computable out of its place (a mesh axis, a platform): then it stays unknown
        return unknown
    return [_small(one) for one in (results if eqn.primitive.multiple_results else [results])]


def _entries(spec, sizes: dict[str, int], aval) -> list[tuple[str, ...]]:
    """The manual axes that split each dimension."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    entries += [()] * (len(getattr(aval, "shape", ())) - len(entries))
    return [tuple(axis for axis in entry if axis in sizes) for entry in entries]


def _part(shape, spec: list[tuple[str, ...]], sizes: dict[str, int], here: dict[str, int]) -> tuple[slice, ...]:
    """Which part of a whole array the device at a place has."""
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


def _rows(eqn) -> int | None:
    """Of a loop of unknown length whose counter picks rows of arrays: how many rows there are."""
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    counter = condition.eqns[0].invars[0]
    if counter not in condition.invars[eqn.params["cond_nconsts"] :]:
        return None
    own = condition.invars.index(counter) - eqn.params["cond_nconsts"]
    follows, lengths = {body.invars[eqn.params["body_nconsts"] :][own]}, []
    for e in body.eqns:
        reads = [atom for atom in e.invars if not hasattr(atom, "val")]
        if e.primitive.name == "dynamic_slice" and e.invars[1] in reads[1:] and e.invars[1] in follows:
            lengths += [e.invars[0].aval.shape[0]] if e.params["slice_sizes"][0] == 1 else []
        elif any(atom in follows for atom in reads) and all(_follows(var.aval) for var in e.outvars):
            follows.update(e.outvars)
    return max(lengths, default=None)


def _turns(eqn, values: list) -> int | None:
    """Turns of `fori_loop(lower, upper)` with known bounds: a counter below a limit, one more each turn."""
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    own, others = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    known = dict(zip(condition.invars, values[:own] + values[own + others :], strict=True))
    counter, limit = condition.eqns[0].invars
    first, last = (_small(a.val) if hasattr(a, "val") else known.get(a) for a in (counter, limit))
    if first is None or last is None or counter not in condition.invars[own:]:
        return None
    state = body.invars[others:]
    place = condition.invars.index(counter) - own
    if limit in condition.invars[own:]:
        kept = condition.invars.index(limit) - own
        if body.outvars[kept] is not state[kept]:
            return None
    step = next((e for e in body.eqns if body.outvars[place] in e.outvars), None)
    if step is None or step.primitive.name != "add" or step.invars[0] is not state[place]:
        return None
    said = next((e.invars[0] for e in body.eqns if step.invars[1] in e.outvars and e.primitive.name in SAME), None)
    more = getattr(said or step.invars[1], "val", None)
    return max(0, int(last) - int(first)) if more is not None and int(more) == 1 else None
