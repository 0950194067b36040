"""What a model computes on its way, read or replaced by name: `apply(..., intermediates=("layers/*/attention/weights",))`.

Names: "embedding", "layers/*/residual" (after each layer), and of the sub-layers attention, cross_attention, feedforward
"layers/*/attention/input" and ".../out"; of attention also query, key, value, weights, heads (before the last projection), of
feedforward also hidden (before its last projection).
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
Wanted = Sequence[str] | Mapping[str, Callable]  # names, or for each name a function of its value, whose result is kept


@dataclass(frozen=True, eq=False)
class Tap:
    """Called with a name and a value where the model computes it; returns the value, or the result of an edit."""

    wanted: tuple[tuple[str, Callable], ...] = ()  # patterns, and what of a value is kept
    edits: tuple[tuple[str, Edit], ...] = ()
    path: str = ""  # stands before the names
    layer: Any = None
    found: dict[tuple[int, str], Any] = field(default_factory=dict)  # by the number of the pattern and the path
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
        return any(_matches(pattern, self.path + name) for pattern, _ in (*self.wanted, *self.edits))

    def __call__(self, name: str, value: Any) -> Any:
        if not self or value is None:
            return value
        path = self.path + name
        self.seen.add(path)
        for pattern, edit in self.edits:
            if _matches(pattern, path):
                edited, number = edit(value, self.layer), _number(pattern)
                if jnp.shape(edited) != value.shape:
                    shapes = f"{list(jnp.shape(edited))} in place of {list(value.shape)}"
                    raise ConfigError(f"edits: {pattern}: {shapes}; expected the same shape")
                edited = jnp.asarray(edited, value.dtype)  # else one number of 32 bits widens all layers behind it
                value = edited if number is None else jnp.where(self.layer == number, edited, value)
        for i, (pattern, keep) in enumerate(self.wanted):
            if _matches(pattern, path):
                self.found[i, path] = keep(value)
        return value

    def results(self, layers: Mapping[tuple[int, str], Any] | None, num_layers: int) -> dict[str, Any]:
        """What was asked for; `layers` are the values of all layers `[L, ...]`. ConfigError for a name that nothing has."""
        results = {}
        for pattern, _ in (*self.wanted, *self.edits):
            number = _number(pattern)
            if number is not None and number >= num_layers:
                raise ConfigError(f"intermediates: {pattern}: there are {num_layers} layers, from 0")
            if not any(_matches(pattern, path) for path in self.seen):
                names = sorted(self.seen)
                hint = did_you_mean(pattern, names) or f"; there are {', '.join(names)}"
                raise ConfigError(f"intermediates: the model computes nothing of the name {pattern}{hint}")
        for (i, path), value in (self.found | dict(layers or {})).items():
            number = _number(self.wanted[i][0])
            results[path if number is None else path.replace("*", str(number), 1)] = value if number is None else value[number]
        return results


NOTHING = Tap()


def tap(wanted: Wanted, edits: Mapping[str, Edit] | None) -> Tap:
    """A tap for the options `intermediates` and `edits` of `apply`. ConfigError for one name instead of several."""
    if isinstance(wanted, str):
        raise ConfigError(f"intermediates: {wanted!r} is one text; give a tuple of names: ({wanted!r},)")
    pairs = wanted.items() if isinstance(wanted, Mapping) else ((name, lambda value: value) for name in wanted)
    return Tap(tuple(pairs), tuple((edits or {}).items())) if wanted or edits else NOTHING


def of_stack(name: str, wanted: Wanted, edits: Mapping[str, Edit] | None) -> tuple[Wanted, dict[str, Edit]]:
    """The options of one stack of an encoder-decoder, "encoder" or "decoder". ConfigError for a name without a stack."""
    for path in (*wanted, *(edits or {})):
        if not path.startswith(("encoder/", "decoder/")):
            raise ConfigError(f"intermediates: {path}: of an encoder-decoder a name begins with encoder/ or decoder/")

    def inside(named):
        return {path[len(name) + 1 :]: f for path, f in named.items() if path.startswith(name)}

    some = inside(wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted))
    return some if isinstance(wanted, Mapping) else tuple(some), inside(edits or {})


def _number(pattern: str) -> int | None:
    """The layer that a pattern names."""
    names = pattern.split("/")
    return int(names[1]) if names[0] == "layers" and len(names) > 1 and names[1].isdigit() else None


def _matches(pattern: str, path: str) -> bool:
    """Part by part; the number of a layer matches the * of a path."""
    patterns, names = pattern.split("/"), path.split("/")
    if _number(pattern) is not None:
        patterns[1] = "*"
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))
