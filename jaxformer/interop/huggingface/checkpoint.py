"""The value that `huggingface.load` returns and `huggingface.save` takes."""

from dataclasses import dataclass
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface.tables import Json
from jaxformer.models.config import EncoderDecoder, ModelConfig


@dataclass(frozen=True)
class Tokens:
    """The special tokens of a checkpoint; None if it has none.

    `start` begins the target of an encoder-decoder. Each of `eos` ends a text (`stop_tokens` of `decoding.generate`).
    transformers ends a text of maximum length with `forced_eos`.
    """

    start: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    sep: int | None = None
    forced_eos: int | None = None


NAMES = {name: ("decoder_start" if name == "start" else name) + "_token_id" for name in Tokens.__dataclass_fields__}


def read_tokens(*settings: Json) -> Tokens:
    """Takes each token from the first file that has it. A negative id means no token."""
    tokens: dict[str, Any] = {}
    for name, key in NAMES.items():
        ids = next((c[key] for c in settings if c.get(key) is not None), [])
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int for i in ids) or (len(ids) > 1 and name != "eos"):
            raise ConfigError(f"config.json: {key}={ids!r}: expected a token, or null")
        ids = tuple(i for i in ids if i >= 0)
        tokens[name] = ids if name == "eos" else next(iter(ids), None)
    return Tokens(**tokens)


def write_tokens(tokens: Tokens) -> Json:
    """The entries of config.json for the tokens that are not None."""
    values = vars(tokens) | {"eos": tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos}
    return {NAMES[name]: value for name, value in values.items() if value not in (None, ())}


def read_labels(c: Json) -> tuple[str, ...]:
    """The names of the classes."""
    names = c.get("id2label") or {}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise ConfigError(f"config.json: id2label={names!r}: expected a name for each class from 0 on")
    return tuple(str(names[str(i)]) for i in range(len(names)))


@dataclass(frozen=True)
class Checkpoint:
    """A model, its parameters, special tokens and class names.

    `model_type` is the family that `save` writes. None: the first family that can express the config.
    """

    config: ModelConfig | EncoderDecoder
    params: Any
    tokens: Tokens = Tokens()
    labels: tuple[str, ...] = ()
    model_type: str | None = None
