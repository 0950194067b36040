"""The value that `huggingface.load` returns and `huggingface.save` takes."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface.tables import Conventions, Json
from jaxformer.models.config import Axial, Classification, EncoderDecoder, Learned, ModelConfig, Patches
from jaxformer.models.mixers import Longformer
from jaxformer.models.transformer import Output

Arrays = dict[str, np.ndarray]


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
    """A model, its parameters, special tokens and class names, and the conventions of its calls in transformers.

    `model_type` is the family that `save` writes. None: the first family that can express the config.
    """

    config: ModelConfig | EncoderDecoder
    params: Any
    tokens: Tokens = Tokens()
    conventions: Conventions = field(default_factory=Conventions)
    labels: tuple[str, ...] = ()
    model_type: str | None = None

    def apply(self, **arguments: Any) -> Output:
        """The model's output for the keyword arguments of transformers' `forward`: arrays of NumPy, torch or JAX.

        `input_ids` or `pixel_values` `[B, C, height, width]`; `attention_mask token_type_ids position_ids bool_masked_pos
        global_attention_mask decoder_input_ids decoder_attention_mask`. Outputs at padding differ. Raises ConfigError for an
        argument that the model lacks, and if transformers would classify another token.
        """
        tokens, options = self.translate(**arguments)
        output = models.apply(self.config, self.params, tokens, **options)
        if self.conventions.choices:
            output = replace(output, logits=output.logits.reshape(np.shape(next(iter(arguments.values())))[:2]))
        return output

    def translate(self, **arguments: Any) -> tuple[Array, dict[str, Any]]:
        """The arguments of `apply` as tokens (or images) and options for `models.apply`. Choices become rows."""
        arrays = {name: np.asarray(value) for name, value in arguments.items() if value is not None}
        if self.conventions.choices:
            arrays = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
        if isinstance(self.config, EncoderDecoder):
            tokens, options = _call_pair(self, arrays)
        elif isinstance(self.config.embedding, Patches):
            masked = arrays.pop("bool_masked_pos", None)
            tokens = _required(arrays, "pixel_values").transpose(0, 2, 3, 1)
            options = {"inputs": None if masked is None else {"masked": masked.astype(bool)}}
        else:
            tokens, options = _call_text(self, arrays)
        if arrays:
            raise ConfigError(f"Checkpoint.apply: this model takes no {', '.join(sorted(arrays))}")
        options = {name: value for name, value in options.items() if value is not None}
        return jax.tree.map(jnp.asarray, (tokens, options))


# Each function removes its arguments from `arrays`.
def _call_text(checkpoint: Checkpoint, arrays: Arrays) -> tuple[np.ndarray, dict]:
    config: Any = checkpoint.config
    tokens = _required(arrays, "input_ids")
    mask = _flags(arrays, "attention_mask", tokens)
    _check_last(checkpoint, tokens, mask)
    positions = _positions(checkpoint, config, tokens, arrays.pop("position_ids", None))
    types = arrays.pop("token_type_ids", None) if getattr(config.embedding, "token_types", 0) else None
    flags = _global_tokens(checkpoint, tokens, arrays)
    inputs = None if flags is None else {"global_tokens": flags}
    return tokens, dict(segment_ids=mask, positions=positions, token_types=types, inputs=inputs)


def _call_pair(checkpoint: Checkpoint, arrays: Arrays) -> tuple[np.ndarray, dict]:
    config: Any = checkpoint.config
    source, target = _required(arrays, "input_ids"), _required(arrays, "decoder_input_ids")
    return target, dict(
        source=source, source_segment_ids=_flags(arrays, "attention_mask", source),
        segment_ids=_flags(arrays, "decoder_attention_mask", target),
        source_positions=_positions(checkpoint, config.encoder, source),
        positions=_positions(checkpoint, config.decoder, target),
    )  # fmt: skip


def _required(arrays: Arrays, name: str) -> np.ndarray:
    if name not in arrays:
        raise ConfigError(f"Checkpoint.apply: this model needs {name}; got {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays.pop(name)


def _flags(arrays: Arrays, name: str, tokens: np.ndarray) -> np.ndarray | None:
    """1 for a token, 0 for padding."""
    flags = arrays.pop(name, None)
    if flags is None:
        return None
    if flags.shape != tokens.shape or not np.isin(flags, (0, 1)).all():
        raise ConfigError(f"Checkpoint.apply: {name} {flags.shape}: expected 0 and 1, of the tokens' shape {tokens.shape}")
    return flags.astype(np.int32)


def _positions(checkpoint: Checkpoint, config: ModelConfig, tokens: np.ndarray, explicit=None) -> np.ndarray:
    """Positions from 0. In transformers they start at the offset of the table."""
    if explicit is not None:
        positions = np.atleast_2d(explicit) - getattr(config.positions, "offset", 0)
    elif checkpoint.conventions.positions == "not_pad":
        is_token = tokens != checkpoint.tokens.pad
        positions = np.where(is_token, is_token.cumsum(axis=1) - 1, -1)
    else:
        positions = np.arange(tokens.shape[1])[None]
    last, length = positions.max(initial=0), config.context_length
    if isinstance(config.positions, Learned | Axial) and last >= length:
        raise ConfigError(f"Checkpoint.apply: position {last} is beyond the {length} learned; shorten the rows")
    return positions.astype(np.int32)


def _global_tokens(checkpoint: Checkpoint, tokens: np.ndarray, arrays: Arrays) -> np.ndarray | None:
    """The global tokens of a Longformer, `[B, T]`; None for other models, and if the config decides."""
    mixer: Any = getattr(checkpoint.config, "mixer", None)
    if not any(isinstance(layer, Longformer) for layer in (mixer if isinstance(mixer, tuple) else (mixer,))):
        return None
    if (flags := _flags(arrays, "global_attention_mask", tokens)) is not None:
        return flags > 0
    rule, sep = checkpoint.conventions.global_tokens, checkpoint.tokens.sep
    if rule == "none":
        return None
    separators = tokens == sep
    if (separators.sum(axis=1) != 3).any():
        advice = f"these have {separators.sum(axis=1).tolist()}; give global_attention_mask"
        raise ConfigError(f"Checkpoint.apply: a row of question and text has three separators ({sep}); {advice}")
    first, slots = separators.argmax(axis=1)[:, None], np.arange(tokens.shape[1])[None]
    return slots < first if rule == "question" else slots > first + 1


def _check_last(checkpoint: Checkpoint, tokens: np.ndarray, mask: np.ndarray | None) -> None:
    """Refuses rows that end elsewhere for transformers, which searches the pad id and ignores the mask."""
    config: Any = checkpoint.config
    if not any(isinstance(head, Classification) and head.pool == "last" for head in config.heads):
        return
    last = lambda flags: flags.shape[1] - 1 - flags[:, ::-1].argmax(axis=1)
    pad = checkpoint.tokens.pad
    theirs = last(tokens != (-1 if pad is None else pad))
    ours = last(np.ones(tokens.shape, bool) if mask is None else mask > 0)
    if (theirs != ours).any():
        places = f"the pad id {pad}, at {theirs.tolist()}; attention_mask ends rows at {ours.tolist()}; make them agree"
        raise ConfigError(f"Checkpoint.apply: transformers reads the class at the last token that is not {places}")
