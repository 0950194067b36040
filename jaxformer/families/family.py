"""A Hugging Face family as a value, and the mapping between its tensors and our parameters.

`load(folder, family=mine)` takes one of your own. A family reads config.json, writes it, and has a rule for each parameter.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.families.settings import Json
from jaxformer.models.stacks import layout
from jaxformer.params import Spec, paths

# The layout of their module. linear: torch's, [out, in] (and norms); conv1d: GPT-2's, [in, out]; patches: a convolution;
# leaf1, leaf2: 1 or 2 axes of length 1 in front; lines: an axis of length 1 after the first; unread: a number for each row of
# our leaf, which their model never uses. A rule for a leaf of ours (not a module) keeps the order of its axes.
Kind = Literal["linear", "conv1d", "patches", "leaf1", "leaf2", "lines", "unread"]


class Rule(NamedTuple):
    """Our module or leaf (or several that they fuse) and theirs. Their first `{}` is the layer, the second the expert."""

    ours: str | tuple[str, ...]
    theirs: str
    kind: Kind = "linear"
    layers: tuple[int, ...] | None = None  # the layers that it is for; None: all that have the parameter


def rules(ours: str, theirs: str, names: dict[str, str], kind: Kind = "linear") -> list[Rule]:
    """A rule for each entry of `names`, {our name: their name}, with the prefixes `ours` and `theirs`."""
    return [Rule(ours + our_name, theirs + their_name, kind) for our_name, their_name in names.items()]


class Family(NamedTuple):
    """One `model_type`. `read` raises ConfigError for an unsupported setting that changes numbers; `write` is its inverse."""

    read: Callable[[Json, Collection[str]], Any]  # (config.json, names of the tensors) -> our config
    write: Callable[[Any], Json]
    rules: Callable[[Any], list[Rule]]
    prefix: str = ""  # files of base models leave it out of names
    ignored: str = r"position_ids$|\.rotary_emb\.inv_freq$"  # buffers
    heads: str = r"^(lm_head|score|classifier|qa_outputs)\."  # modules of heads: the file may have more than its class
    aliases: dict[str, str] = {}  # noqa: RUF012 (never written to): {second name of a tied tensor: its first name}
    tied_without_head: bool = False  # a file without a head is tied, whatever its config.json says (T5 of transformers 5)
    needs_start: bool = False  # the token that targets begin with must be given to save


class Part(NamedTuple):
    """A slice of one of our leaves: `leaf[index]`, of `shape`."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """One tensor of theirs and the parts of ours in it, next to each other in its output axis; no parts if it is unread."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    out_first: bool = False  # their output axis is the first, ours the last

    def ours(self, array: np.ndarray) -> list[np.ndarray]:
        """The parts of the tensor in our layout."""
        if self.out_first:
            array = np.moveaxis(array, 0, -1)
        widths = [math.prod(part.shape) * array.shape[-1] // max(array.size, 1) for part in self.parts]
        pieces = np.split(array, np.cumsum(widths)[:-1], axis=-1)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    def theirs(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """The tensor, from our leaves {path: array}; zeros if it is unread."""
        if not self.parts:
            return np.zeros(self.shape, np.float32)
        pieces = [np.asarray(leaves[part.path][part.index]) for part in self.parts]
        shape = self.shape[1:] + self.shape[:1] if self.out_first else self.shape
        if len(pieces) == 1:
            array = pieces[0].reshape(shape)
        else:
            array = np.concatenate([piece.reshape(*shape[:-1], -1) for piece in pieces], axis=-1)
        return np.moveaxis(array, -1, 0) if self.out_first else array


def plan(family: Family, config: Any, allow_missing: str | None = None) -> dict[str, Tensor]:
    """All tensors of a file, by name. ConfigError for a leaf that the family's files cannot hold, unless `allow_missing`."""
    leaves = paths(models.spec(config))
    tensors: dict[str, Tensor] = {}
    for rule in family.rules(config):
        modules = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        for ours, theirs in {"": "", "/kernel": ".weight", "/scale": ".weight", "/bias": ".bias"}.items():
            for places in zip(*(_places(config, module + ours) for module in modules), strict=True):
                chosen = rule.layers is None or places[0].layer in rule.layers
                if chosen and places[0].path in leaves:
                    tensors |= _tensors(rule, rule.theirs + theirs, places, [leaves[place.path] for place in places])
    extra = sorted(leaves.keys() - {part.path for tensor in tensors.values() for part in tensor.parts})
    if extra := [path for path in extra if allow_missing is None or not re.search(allow_missing, path)]:
        raise ConfigError(f"this family has no place for {', '.join(extra[:4])}")
    return tensors


class Place(NamedTuple):
    """Where a parameter of one layer is stored: a row of a leaf. Outside of layers: the leaf itself."""

    path: str
    layer: int | None = None
    row: tuple[int, ...] = ()


def _places(config: Any, path: str) -> list[Place]:
    """The places of a parameter, by its path without the place in the pattern: of each layer, or of the model."""
    stack, layers, inside = path.rpartition("layers/")
    if not layers:
        return [Place(path)]
    of_stack = getattr(config, stack.rstrip("/")) if stack else config
    found = []
    for segment in layout.segments(of_stack):
        for k in range(segment.count):
            place, row = segment.place_of(k)
            stored = f"{stack}layers/{place}/{inside}" if place else path
            found.append(Place(stored, segment.first + k, (row,)))
    return found


def _tensors(rule: Rule, theirs: str, places: Sequence[Place], specs: list[Spec]) -> dict[str, Tensor]:
    """One tensor `theirs`, or one for each expert, of our leaves in these places."""
    if rule.kind == "unread":
        return {theirs: Tensor(specs[0].shape[:1])}
    lead, in_module = theirs.count("{}"), theirs != rule.theirs
    matrix = in_module and rule.kind in ("linear", "conv1d")
    shapes = [_matrix_shape(spec, lead) if matrix else spec.shape[lead:] for spec in specs]
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    out_first = in_module and rule.kind in ("linear", "patches")
    if out_first:
        shape = shape[-1:] + shape[:-1]
    shape = {"leaf1": (1, *shape), "leaf2": (1, 1, *shape), "lines": (shape[0], 1, shape[-1])}.get(rule.kind, shape)
    tensors = {}
    stored = len(places[0].row)
    layer = () if places[0].layer is None else (places[0].layer,)
    for expert in np.ndindex(*specs[0].shape[stored:lead]):
        parts = [Part(place.path, place.row + expert, spec.shape[lead:]) for place, spec in zip(places, specs, strict=True)]
        tensors[theirs.format(*layer, *expert)] = Tensor(shape, tuple(parts), out_first)
    return tensors


def _matrix_shape(spec: Spec, lead: int) -> tuple[int, ...]:
    """The shape of one layer's kernel as a matrix (in, out), or of its bias as a vector, without the first `lead` axes."""
    shape, axes = spec.shape[lead:], spec.axes[lead:]
    if not spec.contracts:
        return (math.prod(shape),)
    inputs = math.prod(n for n, axis in zip(shape, axes, strict=True) if axis in spec.contracts)
    return (inputs, math.prod(shape) // inputs)
