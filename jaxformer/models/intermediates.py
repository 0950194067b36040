"""What a model computes on its way, read or replaced by name: `apply(..., intermediates=("layers/*/attention/weights",))`.

Names: "embedding", "layers/*/residual" (after each layer), and of the sub-layers attention, cross_attention, feedforward
"layers/*/attention/input" and ".../out"; of attention also query, key, value, weights, heads (before the last projection).
A number instead of * is one layer. Of an encoder-decoder every name begins with encoder/ or decoder/. A mixer of your own
gives names with `context.tap("name", value)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from jaxformer.errors import ConfigError, did_you_mean

Edit = Callable  # (value, number of the layer, which is traced in a scan) -> value


@dataclass(frozen=True, eq=False)
class Tap:
    """Called with a name and a value where the model computes it; returns the value, or what an edit makes of it."""

    wanted: tuple[str, ...] = ()  # patterns
    edits: tuple[tuple[str, Edit], ...] = ()
    path: str = ""  # stands before the names
    layer: Any = None
    found: dict[str, Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # every name, for messages

    def __bool__(self) -> bool:
        """Whether anything was asked for."""
        return bool(self.wanted or self.edits)

    def inside(self, path: str) -> "Tap":
        """For the names of a part."""
        return replace(self, path=f"{self.path}{path}/") if self else self

    def in_layer(self, layer: Any) -> "Tap":
        """For the names of a layer, with a `found` of its own."""
        return replace(self, path="layers/*/", layer=layer, found={}) if self else self

    def asks(self, name: str) -> bool:
        """Whether a value of this name is read or replaced."""
        return any(_matches(pattern, self.path + name) for pattern in (*self.wanted, *dict(self.edits)))

    def __call__(self, name: str, value: Any) -> Any:
        if not self or value is None:
            return value
        path = self.path + name
        self.seen.add(path)
        for pattern, edit in self.edits:
            if _matches(pattern, path):
                edited, number = edit(value, self.layer), _number(pattern)
                value = edited if number is None else jnp.where(self.layer == number, edited, value)
        if any(_matches(pattern, path) for pattern in self.wanted):
            self.found[path] = value
        return value

    def results(self, layers: Mapping[str, Any] | None, num_layers: int) -> dict[str, Any]:
        """What was asked for; `layers` are the values of all layers `[L, ...]`. ConfigError for a name that nothing has."""
        values, results = self.found | dict(layers or {}), {}
        for pattern in (*self.wanted, *dict(self.edits)):
            number = _number(pattern)
            if number is not None and number >= num_layers:
                raise ConfigError(f"intermediates: {pattern}: there are {num_layers} layers, from 0")
            if not any(_matches(pattern, path) for path in self.seen):
                names = sorted(self.seen)
                hint = did_you_mean(pattern, names) or f"; there are {', '.join(names)}"
                raise ConfigError(f"intermediates: the model computes nothing of the name {pattern}{hint}")
            if pattern in self.wanted:
                some = {path: value for path, value in values.items() if _matches(pattern, path)}
                at = lambda path, number=number: path if number is None else path.replace("*", str(number), 1)
                results |= {at(path): value if number is None else value[number] for path, value in some.items()}
        return results


NOTHING = Tap()


def tap(wanted: Sequence[str], edits: Mapping[str, Edit] | None) -> Tap:
    """A tap for the options `intermediates` and `edits` of `apply`. ConfigError for one name instead of several."""
    if isinstance(wanted, str):
        raise ConfigError(f"intermediates: {wanted!r} is one text; give a tuple of names: ({wanted!r},)")
    return Tap(tuple(wanted), tuple((edits or {}).items())) if wanted or edits else NOTHING


def of_stack(name: str, wanted: Sequence[str], edits: Mapping[str, Edit] | None) -> tuple[tuple[str, ...], dict[str, Edit]]:
    """The options of one stack of an encoder-decoder, "encoder" or "decoder". ConfigError for a name without a stack."""
    for path in (*wanted, *(edits or {})):
        if not path.startswith(("encoder/", "decoder/")):
            raise ConfigError(f"intermediates: {path}: of an encoder-decoder a name begins with encoder/ or decoder/")
    cut = len(name) + 1
    own = {path[cut:]: edit for path, edit in (edits or {}).items() if path.startswith(name)}
    return tuple(path[cut:] for path in wanted if path.startswith(name)), own


def _number(pattern: str) -> int | None:
    """The layer that a pattern names."""
    parts = pattern.split("/")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() else None


def _matches(pattern: str, path: str) -> bool:
    """Part by part; the number of a layer matches the * of a path."""
    patterns, parts = pattern.split("/"), path.split("/")
    if _number(pattern) is not None:
        patterns[1] = "*"
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))
