"""Intermediate values of a model, read or replaced by name.

`apply(..., intermediates=("layers/*/attention/weights",))` reads. The names are:
"embedding" and "layers/*/residual" (the stream after each layer);
"layers/*/attention/input" and ".../out", and the same for cross_attention and feedforward;
in attention also query, key, value, weights, heads (before the last projection);
in feedforward also hidden (before the last projection).
A number instead of * is one layer. In an encoder-decoder every name begins with encoder/ or
decoder/. Your own mixer names values with `context.tap("name", value)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from jaxformer.errors import ConfigError, did_you_mean

Edit = Callable  # (value, number of the layer, which is traced in a scan) -> value
# names; or {name: function of the value}, where the function's result is kept
Wanted = Sequence[str] | Mapping[str, Callable]


@dataclass(frozen=True, eq=False)
class Tap:
    """tap(name, value) -> the value, or the result of its edit.

    The model calls it where it computes a value that has a name.
    """

    wanted: tuple[tuple[str, Callable], ...] = ()  # (pattern, function of the value to keep)
    edits: tuple[tuple[str, Edit], ...] = ()  # (pattern, edit)
    path: str = ""  # stands before the names
    layer: Any = None
    # {(number of the pattern, path): kept value}
    found: dict[tuple[int, str], Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # every name, for messages

    def __bool__(self) -> bool:
        """Whether any value is read or replaced."""
        return bool(self.wanted or self.edits)

    def inside(self, path: str) -> "Tap":
        """The tap for the names inside a part of a layer."""
        return replace(self, path=f"{self.path}{path}/") if self else self

    def in_layer(self, layer: Any) -> "Tap":
        """The tap for the names inside a layer. It has a `found` of its own."""
        return replace(self, path="layers/*/", layer=layer, found={}) if self else self

    def asks(self, name: str) -> bool:
        """Whether a value of this name is read or replaced."""
        return any(
            _matches(pattern, self.path + name) for pattern, _ in (*self.wanted, *self.edits)
        )

    def __call__(self, name: str, value: Any) -> Any:
        if not self or value is None:
            return value
        path = self.path + name
        self.seen.add(path)
        for pattern, edit in self.edits:
            if _matches(pattern, path):
                edited = edit(value, self.layer)
                number = _number(pattern)
                if jnp.shape(edited) != value.shape:
                    shapes = f"{list(jnp.shape(edited))} in place of {list(value.shape)}"
                    raise ConfigError(f"edits: {pattern}: {shapes}; expected the same shape")
                # else one number of 32 bits would widen all later layers
                edited = jnp.asarray(edited, value.dtype)
                value = edited if number is None else jnp.where(self.layer == number, edited, value)
        for i, (pattern, keep) in enumerate(self.wanted):
            if _matches(pattern, path):
                self.found[i, path] = keep(value)
        return value

    def results(
        self, layers: Mapping[tuple[int, str], Any] | None, num_layers: int
    ) -> dict[str, Any]:
        """{name: kept value} for every name that was asked for.

        `layers` are the values of all layers `[L, ...]`. Raises ConfigError for a name that no
        value has.
        """
        results = {}
        for pattern, _ in (*self.wanted, *self.edits):
            number = _number(pattern)
            if number is not None and number >= num_layers:
                raise ConfigError(
                    f"intermediates: {pattern}: there are {num_layers} layers, from 0"
                )
            if not any(_matches(pattern, path) for path in self.seen):
                names = sorted(self.seen)
                hint = did_you_mean(pattern, names) or f"; there are {', '.join(names)}"
                raise ConfigError(
                    f"intermediates: the model computes nothing of the name {pattern}{hint}"
                )
        for (i, path), value in (self.found | dict(layers or {})).items():
            number = _number(self.wanted[i][0])
            if number is None:
                results[path] = value
            else:
                results[path.replace("*", str(number), 1)] = value[number]
        return results


NOTHING = Tap()


def tap(wanted: Wanted, edits: Mapping[str, Edit] | None) -> Tap:
    """The tap for the options `intermediates` and `edits` of `apply`.

    Raises ConfigError for a single name that is not in a tuple.
    """
    if isinstance(wanted, str):
        raise ConfigError(
            f"intermediates: {wanted!r} is one text; give a tuple of names: ({wanted!r},)"
        )
    if not (wanted or edits):
        return NOTHING
    if not isinstance(wanted, Mapping):
        wanted = {name: _itself for name in wanted}
    return Tap(tuple(wanted.items()), tuple((edits or {}).items()))


def _itself(value: Any) -> Any:
    return value


def of_stack(
    name: str, wanted: Wanted, edits: Mapping[str, Edit] | None
) -> tuple[Wanted, dict[str, Edit]]:
    """The options (wanted, edits) of one stack of an encoder-decoder, "encoder" or "decoder".

    Raises ConfigError for a name that does not begin with a stack.
    """
    for path in (*wanted, *(edits or {})):
        if not path.startswith(("encoder/", "decoder/")):
            raise ConfigError(
                f"intermediates: {path}: "
                "of an encoder-decoder a name begins with encoder/ or decoder/"
            )

    def inside(named):
        return {path[len(name) + 1 :]: f for path, f in named.items() if path.startswith(name)}

    edits_inside = inside(edits or {})
    if isinstance(wanted, Mapping):
        return inside(wanted), edits_inside
    return tuple(inside(dict.fromkeys(wanted))), edits_inside


def _number(pattern: str) -> int | None:
    """The number of the layer that a pattern names, or None."""
    names = pattern.split("/")
    if names[0] == "layers" and len(names) > 1 and names[1].isdigit():
        return int(names[1])
    return None


def _matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches the path, part by part.

    The number of a layer matches the * of a path.
    """
    patterns = pattern.split("/")
    names = path.split("/")
    if _number(pattern) is not None:
        patterns[1] = "*"
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))
