"""Rotary positions of Hugging Face configs: `rope_parameters`, or `rope_theta` and `rope_scaling`."""

import math
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface.tables import Json, check_kinds, only
from jaxformer.ops.positions import NTK, Linear, Llama3, LongRoPE, Rope, YaRN, rope_frequencies

ORIGINAL = "original_max_position_embeddings"
SCALINGS = {  # our class -> (rope_type, their names of our fields)
    Linear: ("linear", ("factor",)),
    NTK: ("dynamic", ("factor",)),  # its length is max_position_embeddings
    Llama3: ("llama3", ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor")),
    YaRN: ("yarn", ("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor")),
    LongRoPE: ("longrope", ("short_factor", "long_factor", ORIGINAL, "attention_factor")),
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
    check_kinds(rope, 0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        only({"partial_rotary_factor": c.get("partial_rotary_factor") or 1.0} | rope, partial_rotary_factor=1.0)
    theta = rope.get("rope_theta", c.get("rope_theta", theta))
    rotation = Rope(float(theta), 1.0, "half", _read_scaling(c, rope, kind))
    try:
        rope_frequencies(head_width, rotation)
    except ValueError as error:
        raise ConfigError(f"config.json: head_dim={head_width}, rope_type={kind!r}: {error}") from None
    return rotation


def _read_scaling(c: Json, rope: Json, kind: str):
    length: Any = c.get("max_position_embeddings")
    original = c.get(ORIGINAL) or rope.get(ORIGINAL) or length
    stretch = float(rope.get("factor", length / original))
    attention_factor = rope.get("attention_factor")
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(float(rope["factor"]))
        case "dynamic":
            return NTK(float(rope["factor"]), length)
        case "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return Llama3(float(rope["factor"]), original, low, high)
        case "yarn":
            if attention_factor is None and rope.get("mscale") and rope.get("mscale_all_dim") and stretch > 1:
                one, two = (0.1 * rope[key] * math.log(stretch) + 1.0 for key in ("mscale", "mscale_all_dim"))
                attention_factor = one / two
            fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
            return YaRN(stretch, original, fast, slow, rope.get("truncate", True), attention_factor)
        case "longrope":
            if attention_factor is None:
                attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
            short, long = (tuple(map(float, rope[key])) for key in ("short_factor", "long_factor"))
            return LongRoPE(short, long, original, float(attention_factor))
    raise ConfigError(f"config.json: rope_type={kind!r}: expected default, linear, dynamic, llama3, yarn or longrope")


def write_rope(rope: Rope) -> Json:
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_type": "default"}
    kind, keys = SCALINGS[type(rope.scaling)]
    values = {key: value for key, value in zip(keys, vars(rope.scaling).values(), strict=False) if value is not None}
    return {"rope_theta": rope.theta, "rope_type": kind} | values
