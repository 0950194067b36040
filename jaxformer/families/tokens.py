"""The special tokens of a checkpoint and the names of its classes, in config.json and generation_config.json."""

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
    banned: tuple[tuple[int, ...], ...] = ()  # words of one or more tokens that are never written; a Marian's pad is one
    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that are not the first new one


@struct.dataclass
class NotFirst:
    """A filter: removes tokens [n] where a row has no new token yet."""

    tokens: Any

    def __call__(self, logits: jax.Array, history: filters.History) -> jax.Array:
        first = (history.length == history.prompt)[:, None]
        removed = logits.at[:, jnp.asarray(self.tokens)].set(-jnp.inf, mode="drop")
        return jnp.where(first, removed, logits)


def token_filters(tokens: Tokens) -> tuple[filters.Filter, ...]:
    """The filters of `decoding.filters` that keep to a checkpoint's banned, suppressed and forced tokens."""
    stops = {(stop,) for stop in tokens.eos}
    words = [word for word in tokens.banned if word not in stops]  # transformers lets a banned stop token end a text
    words += [(token,) for token in tokens.suppressed]
    found: list[filters.Filter] = [filters.BadWords(words)] if words else []
    if tokens.suppressed_first:
        found.append(NotFirst(np.asarray(tokens.suppressed_first, np.int32)))
    if tokens.forced_bos is not None:
        found.append(filters.ForcedPrefix([tokens.forced_bos]))
    return tuple(found)


SINGLE = ("start", "bos", "pad", "sep", "forced_eos", "forced_bos")  # fields of Tokens that are one token
NAMES = {name: ("decoder_start" if name == "start" else name) + "_token_id" for name in (*SINGLE, "eos")}
LISTS = {"banned": "bad_words_ids", "suppressed": "suppress_tokens", "suppressed_first": "begin_suppress_tokens"}
# without these entries transformers assumes ids that a small vocabulary does not have
NO_TOKENS = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad", "sep"))


def read_tokens(*settings: dict) -> Tokens:
    """Takes each token from the first file that has it. A negative id means no token."""
    tokens: dict[str, Any] = {}
    for name, key in NAMES.items():
        ids = next((c[key] for c in settings if c.get(key) is not None), [])
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int for i in ids) or (len(ids) > 1 and name != "eos"):
            raise ConfigError(f"config.json: {key}={ids!r}: expected a token, or null")
        ids = tuple(i for i in ids if i >= 0)
        tokens[name] = ids if name == "eos" else next(iter(ids), None)
    for name, key in LISTS.items():
        ids = next((c[key] for c in settings if c.get(key) is not None), [])
        words = ids if name == "banned" else [ids]
        if not isinstance(words, list) or any(not isinstance(word, list) for word in words):
            raise ConfigError(f"config.json: {key}={ids!r}: expected a list of {'words' if name == 'banned' else 'tokens'}")
        if any(type(token) is not int for word in words for token in word):
            raise ConfigError(f"config.json: {key}={ids!r}: expected tokens")
        # a negative id means no token
        words = [tuple(word) for word in words if word and (name != "banned" or min(word) >= 0)]
        tokens[name] = tuple(words) if name == "banned" else tuple(i for word in words for i in word if i >= 0)
    return Tokens(**tokens)


def written_tokens(tokens: Tokens) -> dict[str, Any]:
    """The single tokens and the stop tokens, by their names."""
    values = {name: getattr(tokens, name) for name in SINGLE}
    values["eos"] = tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos
    return {NAMES[name]: value for name, value in values.items() if value not in (None, ())}


def read_labels(c: dict) -> tuple[str, ...]:
    """The names of the classes."""
    names = c.get("id2label") or {}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise ConfigError(f"config.json: id2label={names!r}: expected a name for each class from 0 on")
    return tuple(str(names[str(i)]) for i in range(len(names)))
