"""Rotary positions of Hugging Face configs: `rope_parameters`, or `rope_theta` and `rope_scaling`."""

import math
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface.tables import Json, get, only
from jaxformer.ops.positions import NTK, Linear, Llama3, LongRoPE, Rope, YaRN, rope_frequencies

LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
ATTENTION = "attention_factor"
YARN = {"beta_fast": float, "beta_slow": float, "truncate": bool}
# rope_type: (our class, {their name of each of its fields: type})
SCALINGS: dict[str, tuple[Any, dict[str, type]]] = {
    "linear": (Linear, {"factor": float}),
    "dynamic": (NTK, {"factor": float, LENGTH: int}),
    "llama3": (Llama3, {"factor": float, ORIGINAL: int, "low_freq_factor": float, "high_freq_factor": float}),
    "yarn": (YaRN, {"factor": float, ORIGINAL: int, **YARN, ATTENTION: float}),
    "longrope": (LongRoPE, {"short_factor": tuple, "long_factor": tuple, ORIGINAL: int, ATTENTION: float}),
}


def read_rope(c: Json, head_width: int, theta: float = 1e4) -> Rope:
    """The rotation of a config; `theta` is the default base.

    These models rotate the full head. Without scaling they ignore a partial rotary factor, with scaling they fail.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(c.get(key), dict | None):
            raise ConfigError(f"config.json: {key}={c[key]!r}: expected an object")
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    rope = {key: value for key, value in rope.items() if value is not None}
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(f"config.json: rope_parameters.{nested[0]}: one rotation for all layers is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind != "default":
        only({"partial_rotary_factor": c.get("partial_rotary_factor") or 1.0} | rope, partial_rotary_factor=1.0)
        scaling = _read_scaling(c, rope, kind)
    rotation = Rope(get(rope if "rope_theta" in rope else c, "rope_theta", theta), 1.0, "half", scaling)
    try:
        rope_frequencies(head_width, rotation)
    except ValueError as error:
        raise ConfigError(f"config.json: head_dim={head_width}, rope_type={kind!r}: {error}") from None
    return rotation


def _read_scaling(c: Json, rope: Json, kind: str):
    if kind not in SCALINGS:
        raise ConfigError(f"config.json: rope_type={kind!r}: expected default, {', '.join(SCALINGS)}")
    scaling, fields = SCALINGS[kind]
    length = get(c, LENGTH)
    original = get(c, ORIGINAL, None) or get(rope, ORIGINAL, length)
    stretch = get(rope, "factor", length / original)
    settings = {"truncate": True} | rope | {LENGTH: length, ORIGINAL: original}
    if kind == "yarn":
        one, two = (get(rope, key, 0.0) for key in ("mscale", "mscale_all_dim"))
        if one and two and stretch > 1:
            settings.setdefault(ATTENTION, (0.1 * one * math.log(stretch) + 1) / (0.1 * two * math.log(stretch) + 1))
        fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
        settings |= {"factor": stretch, "beta_fast": fast, "beta_slow": slow}
    if kind == "longrope":
        settings |= {key: tuple(map(float, rope[key])) for key in ("short_factor", "long_factor")}
        settings.setdefault(ATTENTION, math.sqrt(1 + math.log(max(stretch, 1)) / math.log(original)))
    needed = (name for name in fields if name != ATTENTION or name in settings)  # it has a default
    return scaling(*(get(settings, name, fields[name]) for name in needed))


def write_rope(positions: Any) -> Json:
    found = getattr(positions, "scaling", None)
    c = {"rope_theta": getattr(positions, "theta", 1e4), "rope_type": "default"}
    for kind, (scaling, fields) in SCALINGS.items():
        if isinstance(found, scaling):
            values = zip(fields, vars(found).values(), strict=True)
            c |= {name: value for name, value in values if value is not None} | {"rope_type": kind}
    c.pop(LENGTH, None)  # NTK's length is the config's
    return c
