"""Which layers a stack has, in their order, and how their parameters are stored.

Layers whose parameters are alike are one tree with a leading axis: `[L, ...]`. Otherwise the tree has a part for each
place in the pattern, `{"0": [n, ...], "1": [n, ...]}`: the layers in that place. A pattern that only covers the depth (a
dense layer, then layers of experts) is cut into runs of layers that are alike, and each run is a place.
"""

import itertools
import math
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
from flax.traverse_util import unflatten_dict

from jaxformer import masks, params
from jaxformer.errors import ConfigError
from jaxformer.models import sublayers
from jaxformer.models.config import ModelConfig
from jaxformer.models.sublayers import Kind
from jaxformer.params import Spec, Tree, paths

ALL = ""  # the name of the place where all layers are: its tree is the whole one


class Segment(NamedTuple):
    """Consecutive layers, in n places: the k-th layer is number k // n in place k % n."""

    first: int  # the number of the first layer
    count: int  # of layers
    places: tuple[str, ...]  # keys of the tree

    def place_of(self, k: int) -> tuple[str, int]:
        """The place of the k-th layer, and its number there."""
        return self.places[k % len(self.places)], k // len(self.places)


def as_pattern(value: Any) -> tuple:
    """The pattern that repeats over the layers: a tuple, or one value for all."""
    return value if isinstance(value, tuple) else (value,)


def layer_config(config: ModelConfig, i: int) -> ModelConfig:
    """The config of layer i by itself: its mixer, its feed-forward and its positions."""
    patterns = {name: getattr(config, name) for name in ("mixer", "feedforward", "positions")}
    own = {name: each[i % len(each)] for name, each in patterns.items() if isinstance(each, tuple)}
    return replace(config, **own) if own else config


def kinds(config: ModelConfig, source_width: int | None = None) -> tuple[Kind, ...]:
    """The first layers, after which the pattern of mixers, feed-forwards and positions repeats."""
    period = math.lcm(*(len(as_pattern(each)) for each in (config.mixer, config.feedforward, config.positions)))
    return tuple(sublayers.kind(layer_config(config, i), source_width) for i in range(min(period, config.num_layers)))


def period(config: ModelConfig, segment: Segment) -> int:
    """The number of layers after which a segment repeats: in mixers, feed-forwards, positions, masks and places."""
    patterns = [as_pattern(getattr(config, name)) for name in ("mixer", "feedforward", "positions", "masks")]
    traits = [[each[i % len(each)] for each in patterns] for i in range(segment.first, segment.first + segment.count)]
    n = len(segment.places)
    return next(p for p in range(n, len(traits) + n, n) if all(traits[i] == traits[i % p] for i in range(len(traits))))


def segments(config: ModelConfig, source_width: int | None = None) -> tuple[Segment, ...]:
    """The layers as runs of a repeating pattern: one run, or several for patterns that only cover the depth.

    Raises ConfigError for layers of different parameters whose pattern neither repeats nor covers the depth.
    """
    traits = [_traits(kind.spec) for kind in kinds(config, source_width)]
    L = config.num_layers
    of_layers = [traits[i % len(traits)] for i in range(L)]
    if all(each == of_layers[0] for each in of_layers):
        return (Segment(0, L, (ALL,)),)
    shown = max(len(as_pattern(config.mixer)), len(as_pattern(config.feedforward)))
    if L % shown:
        raise ConfigError(f"model.num_layers={L} is no multiple of the pattern of {shown} different layers")
    repeats = next(p for p in range(1, L + 1) if L % p == 0 and of_layers == of_layers[:p] * (L // p))
    if repeats < L:
        return (Segment(0, L, tuple(map(str, range(repeats)))),)
    runs = [len(list(run)) for _, run in itertools.groupby(of_layers)]
    starts = itertools.accumulate(runs[:-1], initial=0)
    return tuple(Segment(start, count, (str(i),)) for i, (start, count) in enumerate(zip(starts, runs, strict=True)))


def _traits(spec: Tree) -> dict[str, tuple]:
    """What two layers must have in common to be stacked in one tree: all but their initial values."""
    names = [each.name for each in fields(Spec) if each.name != "init"]
    return {path: tuple(getattr(leaf, name) for name in names) for path, leaf in paths(spec).items()}


def spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """The parameters of all layers."""
    layers = kinds(config, source_width)
    tree: dict[str, Tree] = {}
    for segment in segments(config, source_width):
        n = len(segment.places)
        for j, place in enumerate(segment.places):
            numbers = range(segment.first + j, segment.first + segment.count, n)
            own = [_without_empty(layers[i % len(layers)].spec) for i in numbers[: len(layers)]]
            tree[place] = params.stack(own[0], len(numbers), *own[1:])
    return tree.get(ALL, tree)


def _without_empty(tree: Tree) -> Tree:
    """The tree without parts that have no leaves."""
    return unflatten_dict(paths(tree), sep="/")


def shared_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """The parameters that layers have in common. ConfigError where two parts of layers mean different ones by a path."""
    found: dict[str, Spec] = {}
    for tree in itertools.chain.from_iterable(kind.shared for kind in kinds(config, source_width)):
        for path, leaf in paths(tree).items():
            first = found.setdefault(path, leaf)
            if (leaf.shape, leaf.axes) != (first.shape, first.axes):
                shapes = f"{first.shape} in one part of a layer, {leaf.shape} in another"
                raise ConfigError(f"model: the shared parameter {path} is {shapes}; give one of them another name")
    for path in found:
        if inner := next((other for other in found if other.startswith(f"{path}/")), None):
            raise ConfigError(f"model: shared parameters {path} and {inner}; give one of them another name")
    return unflatten_dict(found, sep="/")


def place(tree: Tree, name: str) -> Tree:
    """The stacked parameters of a place."""
    return tree if name == ALL else tree[name]


def placed(tree: Tree, name: str) -> Tree:
    """A part of the parameters of a place, as a part of those of all layers."""
    return tree if tree is None or name == ALL else {name: tree}


def of_parameter(config: ModelConfig, path: str) -> ModelConfig:
    """The config of the first layer that stores a parameter, by its path in the model's tree: layers/0/feedforward/..."""
    _, _, inside = path.rpartition("layers/")
    for segment in segments(config):
        if inside.split("/")[0] in segment.places:
            return layer_config(config, segment.first + segment.places.index(inside.split("/")[0]))
    return layer_config(config, 0)


def unstacked(config: ModelConfig, tree: Tree) -> tuple[Tree, ...]:
    """The parameters of all layers as one tree for each layer; a tuple is already that."""
    if isinstance(tree, tuple):
        return tree
    layers = []
    for segment in segments(config):
        for name, index in map(segment.place_of, range(segment.count)):
            layers.append(jax.tree.map(lambda leaf, index=index: leaf[index], place(tree, name)))
    return tuple(layers)


def init_state(config: ModelConfig, batch: int, length: int, dtype, ahead: int = 0) -> tuple[Tree, ...]:
    """The empty state of each layer. A mixer that rolls keeps only the tokens that its mask lets a query see, and `ahead` more.

    Speculation may roll back up to `ahead` tokens. Raises NotImplementedError for a mixer without a state, and for one that
    cannot roll back.
    """
    layers = kinds(config)
    states = []
    for i in range(config.num_layers):
        mixer = layers[i % len(layers)].mixer
        reach = masks.reach(config.masks[i % len(config.masks)])
        name = _name(as_pattern(config.mixer)[i % len(as_pattern(config.mixer))])
        if mixer.state is None:
            decoders = "mixer=None, Linear and Performer can, under a causal mask"
            raise NotImplementedError(f"{name} cannot decode: its Mixer has no `state`; {decoders}")
        cache_length = length if reach is None or not mixer.rolls else min(length, reach + 1 + ahead)
        states.append(mixer.state(batch, cache_length, dtype))
        if ahead and not mixer.rolls:  # sums of all tokens
            raise NotImplementedError(f"speculate: {name} cannot take tokens back: its Mixer has rolls=False")
    return tuple(states)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
