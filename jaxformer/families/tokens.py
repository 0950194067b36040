"""Special tokens and class names of a checkpoint, in config.json and generation_config.json."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.decoding import filters
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Tokens:
    """The special tokens of a checkpoint; None if it has none."""

    start: int | None = None  # begins the target of an encoder-decoder
    bos: int | None = None
    eos: tuple[int, ...] = ()  # each ends a text (`stop_tokens` of `decoding.generate`)
    pad: int | None = None
    sep: int | None = None
    forced_eos: int | None = None  # transformers ends a text of maximum length with it
    forced_bos: int | None = None  # the first new token
    # words of one or more tokens that are never generated, such as the pad token of a Marian
    banned: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()  # tokens that are never generated
    suppressed_first: tuple[int, ...] = ()  # tokens that are never the first new one


@struct.dataclass
class NotFirst:
    """A filter: these tokens [n] cannot be the first new token of a text."""

    tokens: Any

    def __call__(self, logits: jax.Array, history: filters.History) -> jax.Array:
        first = (history.length == history.prompt)[:, None]
        removed = logits.at[:, jnp.asarray(self.tokens)].set(-jnp.inf, mode="drop")
        return jnp.where(first, removed, logits)


def token_filters(tokens: Tokens) -> tuple[filters.Filter, ...]:
    """The filters that apply a checkpoint's banned, suppressed and forced tokens."""
    stops = {(stop,) for stop in tokens.eos}
    # as in transformers, a banned stop token may still end a text
    words = [word for word in tokens.banned if word not in stops]
    words += [(token,) for token in tokens.suppressed]
    chain: list[filters.Filter] = [filters.BadWords(words)] if words else []
    if tokens.suppressed_first:
        chain.append(NotFirst(np.asarray(tokens.suppressed_first, np.int32)))
    if tokens.forced_bos is not None:
        chain.append(filters.ForcedPrefix([tokens.forced_bos]))
    return tuple(chain)


# fields of Tokens that are one token
SINGLE = ("start", "bos", "pad", "sep", "forced_eos", "forced_bos")
NAMES = {
    name: ("decoder_start" if name == "start" else name) + "_token_id" for name in (*SINGLE, "eos")
}
LISTS = {
    "banned": "bad_words_ids",
    "suppressed": "suppress_tokens",
    "suppressed_first": "begin_suppress_tokens",
}
# without these entries transformers assumes ids that a small vocabulary does not have
NO_TOKENS = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad", "sep"))


def read_tokens(*settings: dict) -> Tokens:
    """The tokens, each from the first file that has it. A negative id means no token."""
    tokens: dict[str, Any] = {}
    for name, key in NAMES.items():
        ids = _first(settings, key)
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int for i in ids) or (len(ids) > 1 and name != "eos"):
            raise ConfigError(f"config.json: {key}={ids!r}: expected a token, or null")
        ids = tuple(i for i in ids if i >= 0)
        tokens[name] = ids if name == "eos" else next(iter(ids), None)
    # the old entry of BART for it
    if tokens["forced_bos"] is None and _first(settings, "force_bos_token_to_be_generated") is True:
        tokens["forced_bos"] = tokens["bos"]
    for name, key in LISTS.items():
        ids = _first(settings, key)
        words = ids if name == "banned" else [ids]
        if not isinstance(words, list) or any(not isinstance(word, list) for word in words):
            raise ConfigError(
                f"config.json: {key}={ids!r}: "
                f"expected a list of {'words' if name == 'banned' else 'tokens'}"
            )
        if any(type(token) is not int for word in words for token in word):
            raise ConfigError(f"config.json: {key}={ids!r}: expected tokens")
        if name == "banned":
            tokens[name] = tuple(tuple(word) for word in words if word and min(word) >= 0)
        else:
            tokens[name] = tuple(i for i in ids if i >= 0)
    return Tokens(**tokens)


def _first(settings: tuple[dict, ...], key: str) -> Any:
    """The entry in the first file that has it; [] if none has."""
    return next((c[key] for c in settings if c.get(key) is not None), [])


def written_tokens(tokens: Tokens) -> dict[str, Any]:
    """The entries of config.json for the single tokens and the stop tokens."""
    values = {name: getattr(tokens, name) for name in SINGLE}
    values["eos"] = tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos
    return {NAMES[name]: value for name, value in values.items() if value not in (None, ())}


def read_labels(c: dict) -> tuple[str, ...]:
    """The names of the classes."""
    names = c.get("id2label") or {}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise ConfigError(
            f"config.json: id2label={names!r}: expected a name for each class from 0 on"
        )
    return tuple(str(names[str(i)]) for i in range(len(names)))
