"""The tensors in the files of a family, and where each of our parameters is in them."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.families.family import Family, Rule
from jaxformer.families.stacks import stack_under
from jaxformer.models.stacks import layout
from jaxformer.models.stacks.layout import Segment
from jaxformer.params import Spec, paths


class Part(NamedTuple):
    """A slice of one of our leaves: `leaf[index]`, of `shape`."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """One tensor of theirs: our parts, side by side along its output axis. Unread: no parts."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    out_first: bool = False  # their output axis is the first, ours the last
    # equal pieces of the output axis; each of them has the parts side by side
    groups: int = 1

    def ours(self, array: np.ndarray) -> list[np.ndarray]:
        """The parts of the tensor in our layout."""
        if self.out_first:
            array = np.moveaxis(array, 0, -1)
        pieces = self.split(array)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """The outputs of each part, `[..., groups, width]`, from those of the tensor, `[..., out]`.

        The other axes are free.
        """
        out = self.shape[0 if self.out_first else -1] if self.shape else 1
        inputs = max(math.prod(self.shape) // max(out, 1), 1)
        widths = [math.prod(part.shape) // inputs // self.groups for part in self.parts]
        array = array.reshape(*array.shape[:-1], self.groups, sum(widths))
        return np.split(array, np.cumsum(widths)[:-1], axis=-1)

    def theirs(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """The tensor, from our leaves {path: array}; zeros if it is unread."""
        if not self.parts:
            return np.zeros(self.shape, np.float32)
        pieces = [np.asarray(leaves[part.path][part.index]) for part in self.parts]
        shape = self.shape[1:] + self.shape[:1] if self.out_first else self.shape
        if len(pieces) == 1:
            array = pieces[0].reshape(shape)
        else:
            lead = *shape[:-1], self.groups
            array = np.concatenate([piece.reshape(*lead, -1) for piece in pieces], axis=-1)
            array = array.reshape(shape)
        return np.moveaxis(array, -1, 0) if self.out_first else array


def plan(family: Family, config: Any, allow_missing: str | None = None) -> dict[str, Tensor]:
    """All tensors in a file of this config, by name.

    Raises ConfigError for a leaf of ours that the family's files cannot hold, unless its path
    matches `allow_missing`.
    """
    leaves = paths(models.spec(config))
    stacks: dict[str, Sequence[Segment]] = {}
    tensors: dict[str, Tensor] = {}
    for rule in family.rules(config):
        tensors |= _tensors_of_rule(rule, config, leaves, stacks)
    planned = {part.path for tensor in tensors.values() for part in tensor.parts}
    extra = sorted(leaves.keys() - planned)
    if allow_missing is not None:
        extra = [path for path in extra if not re.search(allow_missing, path)]
    if extra:
        raise ConfigError(f"this family has no place for {', '.join(extra[:4])}")
    return tensors


# {the end of our path: the end of their name}. A rule for a leaf has the whole path, so nothing
# follows; a module has kernel or scale, and perhaps a bias.
LEAVES = {"": "", "/kernel": ".weight", "/scale": ".weight", "/bias": ".bias"}


def _tensors_of_rule(
    rule: Rule, config: Any, leaves: Mapping[str, Spec], stacks: dict[str, Sequence[Segment]]
) -> dict[str, Tensor]:
    """The tensors that a rule describes, by name: for each leaf, layer and expert.

    `stacks` keeps the segments of each stack, {its name: segments}, for the next rule.
    """
    modules = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    tensors: dict[str, Tensor] = {}
    for ours, ending in LEAVES.items():
        name = rule.theirs + (ending.removeprefix(".") if rule.theirs.endswith("_") else ending)
        places_of_modules = [_places(config, module + ours, stacks) for module in modules]
        for places in zip(*places_of_modules, strict=True):
            has_layer = rule.layers is None or places[0].layer in rule.layers
            if has_layer and places[0].path in leaves:
                specs = [leaves[place.path] for place in places]
                tensors |= _tensors(rule, name, places, specs)
    return tensors


class Place(NamedTuple):
    """Where a parameter of one layer is stored: at an index of a leaf.

    Outside of layers, it is the leaf itself.
    """

    path: str
    layer: int | None = None
    index: tuple[int, ...] = ()  # of the layer in the leaf


def _places(config: Any, path: str, stacks: dict[str, Sequence[Segment]]) -> list[Place]:
    """The places of a parameter: one for each layer that has it, or one for the model.

    `path` is the parameter's path without the place in the layer pattern.
    """
    stack, layers, inside = path.rpartition("layers/")
    if not layers:
        return [Place(path)]
    if stack not in stacks:
        stacks[stack] = layout.segments(stack_under(config, stack.rstrip("/")))
    places = []
    for segment in stacks[stack]:
        for k in range(segment.count):
            place_in_pattern, row = segment.place_of(k)
            leaf = f"{stack}layers/{place_in_pattern}/{inside}" if place_in_pattern else path
            places.append(Place(leaf, segment.first + k, (row,)))
    return places


def _tensors(
    rule: Rule, theirs: str, places: Sequence[Place], specs: list[Spec]
) -> dict[str, Tensor]:
    """Our leaves in these places as one tensor `theirs`, or as one for each expert."""
    if rule.kind == "unread":
        return {theirs: Tensor(specs[0].shape[:1])}
    layer_axes = len(places[0].index)
    lead = max(theirs.count("{}"), layer_axes)  # axes of layers and experts
    in_module = theirs != rule.theirs
    matrix = in_module and rule.kind in ("linear", "conv1d", "by_head")
    shapes = [_matrix_shape(spec, lead) if matrix else spec.shape[lead:] for spec in specs]
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    out_first = in_module and rule.kind in ("linear", "patches", "by_head")
    # the last of our modules has a key head in each group
    axes = dict(zip(specs[-1].axes, specs[-1].shape, strict=True))
    groups = axes["kv_heads"] if rule.kind == "by_head" else 1
    if out_first:
        shape = shape[-1:] + shape[:-1]
    with_ones = {"leaf1": (1, *shape), "leaf2": (1, 1, *shape), "lines": (shape[0], 1, shape[-1])}
    shape = with_ones.get(rule.kind, shape)
    tensors = {}
    layer = () if places[0].layer is None else (places[0].layer,)
    for expert in np.ndindex(*specs[0].shape[layer_axes:lead]):
        parts = [
            Part(place.path, place.index + expert, spec.shape[lead:])
            for place, spec in zip(places, specs, strict=True)
        ]
        tensors[theirs.format(*layer, *expert)] = Tensor(shape, tuple(parts), out_first, groups)
    return tensors


def _matrix_shape(spec: Spec, lead: int) -> tuple[int, ...]:
    """The shape (in, out) of a kernel, or (out,) of a bias, without its `lead` first axes."""
    shape, axes = spec.shape[lead:], spec.axes[lead:]
    if not spec.contracts:
        return (math.prod(shape),)
    inputs = math.prod(n for n, axis in zip(shape, axes, strict=True) if axis in spec.contracts)
    return (inputs, math.prod(shape) // inputs)
