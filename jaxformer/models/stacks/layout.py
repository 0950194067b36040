"""Which layers a stack has, in their order, and how their parameters are stored.

If all layers have the same parameters, they are one tree with a leading axis: `[L, ...]`. Otherwise
the tree has a key for each place in the pattern, `{"0": [n, ...], "1": [n, ...]}`, with the layers
in that place. A pattern that covers the depth only once (a dense layer, then layers of experts) is
cut into runs of equal layers, and each run is a place.
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

# the fields of a config that may differ by layer, besides the mask
BY_LAYER = ("mixer", "feedforward", "block", "positions")
ALL = ""  # the name of the only place, if all layers are in it: its tree is the whole tree


class Segment(NamedTuple):
    """Consecutive layers in n places: the k-th layer is number k // n in place k % n."""

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
    """The config of layer i alone: its mixer, its feed-forward, its block and its positions."""
    patterns = {name: getattr(config, name) for name in BY_LAYER}
    own = {name: each[i % len(each)] for name, each in patterns.items() if isinstance(each, tuple)}
    return replace(config, **own) if own else config


def kinds(config: ModelConfig, source_width: int | None = None) -> tuple[Kind, ...]:
    """The first layers, up to where mixers, feed-forwards, blocks and positions repeat."""
    patterns = [as_pattern(getattr(config, name)) for name in BY_LAYER]
    period = math.lcm(*map(len, patterns))
    made: list[tuple[list, Kind]] = []  # equal layers are made once
    found = []
    for i in range(min(period, config.num_layers)):
        parts = [pattern[i % len(pattern)] for pattern in patterns]
        kind = next((kind for known, kind in made if known == parts), None)
        if kind is None:
            kind = sublayers.kind(layer_config(config, i), source_width)
            made.append((parts, kind))
        found.append(kind)
    return tuple(found)


def period(config: ModelConfig, segment: Segment) -> int:
    """The number of layers after which a segment repeats.

    What repeats are mixers, feed-forwards, blocks, positions, masks and places.
    """
    patterns = [as_pattern(getattr(config, name)) for name in (*BY_LAYER, "masks")]
    numbers = range(segment.first, segment.first + segment.count)
    traits = [[each[i % len(each)] for each in patterns] for i in numbers]

    def repeats_after(length):
        return all(traits[i] == traits[i % length] for i in range(len(traits)))

    n = len(segment.places)
    return next(filter(repeats_after, range(n, len(traits) + n, n)))


def segments(config: ModelConfig, source_width: int | None = None) -> tuple[Segment, ...]:
    """The layers as runs of a repeating pattern.

    There is one run, or several if the pattern covers the depth only once. Raises ConfigError for
    layers of different parameters whose pattern neither repeats nor covers the depth.
    """
    traits = [_traits(kind.spec) for kind in kinds(config, source_width)]
    L = config.num_layers
    of_layers = [traits[i % len(traits)] for i in range(L)]
    if all(each == of_layers[0] for each in of_layers):
        return (Segment(0, L, (ALL,)),)
    pattern = max(
        len(as_pattern(getattr(config, name))) for name in BY_LAYER if name != "positions"
    )
    if L % pattern:
        raise ConfigError(
            f"model.num_layers={L} is no multiple of the pattern of {pattern} different layers"
        )

    def repeats_after(length):
        return L % length == 0 and of_layers == of_layers[:length] * (L // length)

    period = next(filter(repeats_after, range(1, L + 1)))
    if period < L:
        return (Segment(0, L, tuple(map(str, range(period)))),)
    runs = []
    start = 0
    for _, run in itertools.groupby(of_layers):
        count = len(list(run))
        runs.append(Segment(start, count, (str(len(runs)),)))
        start += count
    return tuple(runs)


def _traits(spec: Tree) -> dict[str, tuple]:
    """The traits that two layers must share to be stacked in one tree: all but initial values."""
    names = [each.name for each in fields(Spec) if each.name != "init"]
    return {
        path: tuple(getattr(leaf, name) for name in names) for path, leaf in paths(spec).items()
    }


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


def stack_spec(config: ModelConfig) -> Tree:
    """The parameters that a stack of your own declares: those of its method `spec(config)`."""
    declare = getattr(config.stack, "spec", None)
    return {} if declare is None else declare(config)


def _without_empty(tree: Tree) -> Tree:
    """The tree without branches that have no leaves."""
    return unflatten_dict(paths(tree), sep="/")


def shared_spec(config: ModelConfig, source_width: int | None = None) -> Tree:
    """The parameters that all layers share.

    Raises ConfigError if two parts of layers declare different parameters at one path.
    """
    shared: dict[str, Spec] = {}
    for tree in itertools.chain.from_iterable(kind.shared for kind in kinds(config, source_width)):
        for path, leaf in paths(tree).items():
            first = shared.setdefault(path, leaf)
            if (leaf.shape, leaf.axes) != (first.shape, first.axes):
                shapes = f"{first.shape} in one part of a layer, {leaf.shape} in another"
                raise ConfigError(
                    f"model: the shared parameter {path} is {shapes}; give one of them another name"
                )
    for path in shared:
        if inner := next((other for other in shared if other.startswith(f"{path}/")), None):
            raise ConfigError(
                f"model: shared parameters {path} and {inner}; give one of them another name"
            )
    return unflatten_dict(shared, sep="/")


def place(tree: Tree, name: str) -> Tree:
    """The stacked parameters of a place."""
    return tree if name == ALL else tree[name]


def placed(tree: Tree, name: str) -> Tree:
    """A tree of parameters of one place, as a tree of parameters of all layers."""
    return tree if tree is None or name == ALL else {name: tree}


def of_parameter(config: ModelConfig, path: str) -> ModelConfig:
    """The config of the first layer that stores a parameter.

    `path` is the parameter's path in the model's tree: layers/0/feedforward/...
    """
    first_key, _, _ = path.rpartition("layers/")[2].partition("/")
    for segment in segments(config):
        if first_key in segment.places:
            return layer_config(config, segment.first + segment.places.index(first_key))
    return layer_config(config, 0)


def unstacked(config: ModelConfig, tree: Tree) -> tuple[Tree, ...]:
    """The parameters of all layers, as one tree for each layer. A tuple is already that."""
    if isinstance(tree, tuple):
        return tree
    layers = []
    for segment in segments(config):
        for name, index in map(segment.place_of, range(segment.count)):
            layers.append(jax.tree.map(lambda leaf, index=index: leaf[index], place(tree, name)))
    return tuple(layers)


def init_state(
    config: ModelConfig, batch: int, length: int, dtype, ahead: int = 0
) -> tuple[Tree, ...]:
    """The empty state of each layer.

    A mixer that rolls keeps only the tokens that its mask shows to a query, and `ahead` more,
    because speculation may roll back up to `ahead` tokens. Raises NotImplementedError for a mixer
    without a state, and, if `ahead` is not 0, for a mixer that cannot roll back.
    """
    layers = kinds(config)
    functions = as_pattern(config.mixer)
    states = []
    for i in range(config.num_layers):
        mixer = layers[i % len(layers)].mixer
        reach = masks.reach(config.masks[i % len(config.masks)])
        name = _name(functions[i % len(functions)])
        if mixer.state is None:
            decoders = "mixer=None, Linear and Performer can, under a causal mask"
            raise NotImplementedError(f"{name} cannot decode: its Mixer has no `state`; {decoders}")
        cache_length = length
        if mixer.rolls and reach is not None:
            cache_length = min(length, reach + 1 + ahead)
        states.append(mixer.state(batch, cache_length, dtype))
        if ahead and not mixer.rolls:  # its state is a sum over all tokens
            raise NotImplementedError(
                f"speculate: {name} cannot take tokens back: its Mixer has rolls=False"
            )
    return tuple(states)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
