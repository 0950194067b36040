"""Rotary positions in config.json.

transformers 5 has `rope_parameters`; others have `rope_theta` and `rope_scaling`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.families.settings import Json, get, get_list, only
from jaxformer.ops.positions import (
    NTK,
    Layout,
    Linear,
    Llama3,
    LongRoPE,
    Rope,
    YaRN,
    rope_frequencies,
)

PARTIAL = "partial_rotary_factor"
LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
ATTENTION = "attention_factor"
YARN = {"beta_fast": float, "beta_slow": float, "truncate": bool}
# rope_type: (our class, {their name of each of its fields: type})
SCALINGS: dict[str, tuple[Any, dict[str, type]]] = {
    "linear": (Linear, {"factor": float}),
    "dynamic": (NTK, {"factor": float, LENGTH: int}),
    "llama3": (
        Llama3,
        {"factor": float, ORIGINAL: int, "low_freq_factor": float, "high_freq_factor": float},
    ),
    "yarn": (YaRN, {"factor": float, ORIGINAL: int, **YARN, ATTENTION: float}),
    "longrope": (
        LongRoPE,
        {"short_factor": tuple, "long_factor": tuple, ORIGINAL: int, ATTENTION: float},
    ),
}


def read_rope(
    c: Json,
    head_width: int,
    theta: float = 1e4,
    *,
    fraction: float | None = None,
    layout: Layout = "half",
) -> Rope:
    """The rotation of a config.

    `theta` and `fraction` are the defaults of the family. Without a `fraction`, the family's models
    rotate the full head: a partial factor is ignored, and with scaling refused.
    """
    rope = _rope_settings(c)
    kind = rope.get("rope_type", "default")
    partial = {PARTIAL: c[PARTIAL]} if c.get(PARTIAL) is not None else {}
    partial |= {PARTIAL: rope[PARTIAL]} if PARTIAL in rope else {}
    if fraction is None and kind != "default":
        only(partial, partial_rotary_factor=1.0)
    rotated = 1.0 if fraction is None else get(partial, PARTIAL, fraction)
    base = get(rope, "rope_theta", theta)
    settings = None if kind == "default" else _read_scaling(c, rope, kind)
    try:
        if head_width > 2**20:
            raise ValueError(f"expected at most {2**20} features of a head")
        scaling = None if settings is None else SCALINGS[kind][0](*settings)
        rotation = Rope(base, rotated, layout, scaling)
        with np.errstate(all="ignore"):
            rope_frequencies(head_width, rotation)
    except ValueError as error:
        shown = f"head_dim={head_width}, rope_type={kind!r}, rope_theta={base:g}"
        raise ConfigError(f"config.json: {shown}: {error}") from None
    return rotation


def read_ropes(
    c: Json, head_width: int, thetas: Mapping[str, float], local_theta: str | None = None
) -> dict[str, Rope]:
    """{kind of layer: its rotation}, for models whose layers of two kinds rotate differently.

    `thetas` are the defaults, {kind in `layer_types`: theta}. Older files have a scaling for the
    first kind alone, and a theta of the second under the name `local_theta`. Raises ConfigError for
    one rotation without kinds, which transformers 5 drops, and for `truncate`, which transformers
    5.23 does not look for here.
    """
    rope = c.get("rope_parameters") or {}
    if odd := sorted(rope.keys() - thetas.keys()):
        raise ConfigError(
            f"config.json: rope_parameters has {', '.join(odd)}; "
            f"give each kind of layer its own: {', '.join(thetas)}"
        )
    full, local = thetas
    older = (c.get("rope_scaling") or {}) | {"rope_theta": get(c, "rope_theta", thetas[full])}
    of_local = thetas[local] if local_theta is None else get(c, local_theta, thetas[local])
    found = {
        full: older | (rope.get(full) or {}),
        local: {"rope_theta": of_local} | (rope.get(local) or {}),
    }
    for entries in found.values():
        only(entries, truncate=True)
    length = {LENGTH: c[LENGTH]}
    return {
        kind: read_rope(length | {"rope_parameters": entries}, head_width)
        for kind, entries in found.items()
    }


def write_ropes(ropes: Mapping[str, Any], thetas: Mapping[str, float]) -> Json:
    """The inverse of `read_ropes`, for transformers 5 and for older readers.

    A kind that no layer has gets the rotation of `thetas`.
    """
    written = {kind: write_rope(ropes.get(kind, Rope(theta))) for kind, theta in thetas.items()}
    older = written[next(iter(thetas))]
    return {
        "rope_parameters": {kind: rope["rope_parameters"] for kind, rope in written.items()},
        "rope_theta": older["rope_theta"],
        "rope_scaling": older["rope_scaling"],
    }


def _rope_settings(c: Json) -> Json:
    """The settings of all places that have some. Raises ConfigError where two places differ."""
    top = {key: c[key] for key in ("rope_theta", ORIGINAL) if c.get(key) is not None}
    settings: Json = dict(top)
    origins = dict.fromkeys(top, "")
    for place in ("rope_parameters", "rope_scaling"):
        if not isinstance(c.get(place), dict | None):
            raise ConfigError(f"config.json: {place}={c[place]!r}: expected an object")
        entries = {key: value for key, value in (c.get(place) or {}).items() if value is not None}
        if nested := [key for key, value in entries.items() if isinstance(value, dict)]:
            raise ConfigError(
                f"config.json: {place}.{nested[0]}: one rotation for all layers is supported"
            )
        if "type" in entries:  # the older name
            entries.setdefault("rope_type", entries.pop("type"))
        for key, value in entries.items():
            if settings.setdefault(key, value) != value:
                other = f"{origins[key]}{key}={settings[key]!r}"
                raise ConfigError(
                    f"config.json: {place}.{key}={value!r}, but {other}: "
                    "keep the right one in both places"
                )
            origins.setdefault(key, f"{place}.")
    return settings


def _long_rope_factor(stretch: float, original: int) -> float:
    """sqrt(1 + log(stretch) / log(original)), as in transformers: the factor on cos and sin.

    The context is `stretch` times the `original` one.
    """
    if original == 1:
        raise ConfigError(f"config.json: {ORIGINAL}=1: expected at least 2, or an {ATTENTION}")
    return math.sqrt(1 + math.log(max(stretch, 1)) / math.log(original))


def _read_scaling(c: Json, rope: Json, kind: str) -> list[Any]:
    """The arguments of the class in `SCALINGS` for this kind."""
    if kind not in SCALINGS:
        raise ConfigError(
            f"config.json: rope_type={kind!r}: expected default, {', '.join(SCALINGS)}"
        )
    _, fields = SCALINGS[kind]
    length = get(c, LENGTH)
    original = get(rope, ORIGINAL, length)
    stretch = get(rope, "factor", length / original)
    settings = {"truncate": True} | rope | {LENGTH: length, ORIGINAL: original}
    if kind == "yarn":
        one, two = (get(rope, key, 0.0) for key in ("mscale", "mscale_all_dim"))
        if one and two and stretch > 1:
            log = math.log(stretch)
            settings.setdefault(ATTENTION, (0.1 * one * log + 1) / (0.1 * two * log + 1))
        settings["factor"] = stretch
        settings["beta_fast"] = rope.get("beta_fast") or 32.0
        settings["beta_slow"] = rope.get("beta_slow") or 1.0
    if kind == "longrope":
        factors = ("short_factor", "long_factor")
        settings |= {key: tuple(map(float, get_list(rope, key))) for key in factors}
        if ATTENTION not in settings:
            settings[ATTENTION] = _long_rope_factor(stretch, original)
    needed = (name for name in fields if name != ATTENTION or name in settings)  # it has a default
    return [get(settings, name, fields[name]) for name in needed]


def write_rope(positions: Any) -> Json:
    """The entries of config.json for a rotation: for transformers 5 and for older readers."""
    rope = _rope_parameters(positions)
    partial = {PARTIAL: rope[PARTIAL]} if PARTIAL in rope else {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    older = None if rope["rope_type"] == "default" else scaling | {"type": rope["rope_type"]}
    return {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": older,
    } | partial


def _rope_parameters(positions: Any) -> Json:
    """The entry `rope_parameters` of transformers 5."""
    scaling = getattr(positions, "scaling", None)
    c = {"rope_theta": getattr(positions, "theta", 1e4), "rope_type": "default"}
    for kind, (scaling_class, fields) in SCALINGS.items():
        if isinstance(scaling, scaling_class):
            values = zip(fields, vars(scaling).values(), strict=True)
            c |= {name: value for name, value in values if value is not None} | {"rope_type": kind}
    c.pop(LENGTH, None)  # NTK's length is the config's
    if (fraction := getattr(positions, "fraction", 1.0)) != 1:
        c[PARTIAL] = fraction
    return c
