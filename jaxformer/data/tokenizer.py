"""What all tokenizers have: `Tokenizer`. `data.tokenizers` has the kinds of them."""

import copy
import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer import config
from jaxformer.data.chat_template import ChatTemplate
from jaxformer.errors import ConfigError


class Tokenizer:
    """A tokenizer is defined by its JSON state, which is saved to a file and hashed to a digest."""

    vocab_size: int
    # the id that ends a text and is not part of one; of `Characters`, an id above theirs
    end_of_text: int | None = None
    state: dict[str, Any]
    chat: ChatTemplate | None = None  # how a conversation is written
    # the tokens of a long text, in the narrowest unsigned integer type for the vocabulary
    encode_text: Any

    def encode(self, text: str, control: bool = False) -> list[int]:
        """The tokens of a text.

        With `control`, names of control tokens in it are these tokens: only for text of your own.
        """
        return (self.encode_with_offsets(text)[0] if control else self.encode_text(text)).tolist()

    @property
    def control_tokens(self) -> dict[str, int]:
        """The ids of the control tokens that a text can name with `control`."""
        return {}

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [n], the first character of each and the one behind its last, [n, 2]).

        Names of control tokens are these tokens.
        """
        controls = self.control_tokens
        ids: list[np.ndarray] = [np.zeros(0, np.int32)]
        characters: list[np.ndarray] = [np.zeros((0, 2), np.int64)]
        start = 0
        pattern = "|".join(map(re.escape, controls)) or "$^"
        for part in re.split(f"({pattern})", text):
            stop = start + len(part)
            if part in controls:
                ids.append(np.array([controls[part]], np.int32))
                characters.append(np.array([[start, stop]]))
            else:
                ids.append(self.encode_text(part).astype(np.int32))
                first = start + np.repeat(np.arange(len(part)), self._tokens_of_each(part))
                characters.append(np.stack([first, first + 1], axis=1))
            start = stop
        return np.concatenate(ids), np.concatenate(characters)

    def _tokens_of_each(self, text: str) -> list[int]:
        """The number of tokens of each character."""
        return [1] * len(text)

    def with_chat(self, template: ChatTemplate) -> Any:
        """The same tokenizer, which also knows how a conversation is written."""
        other = copy.copy(self)
        other.__dict__.pop("digest", None)
        other.chat = template
        other.state = self.state | {"chat": template.state}
        return other

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens, int32, of each of many short texts."""
        return [self.encode_text(text).astype(np.int32) for text in texts]

    def id_of(self, token: str) -> int | None:
        """The id of a control token, such as </s>; None if there is none of that name."""
        return None

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        """`encode_text` of a piece of a longer text.

        `continues`: it follows another piece, which `last_cut` ended.
        """
        return self.encode_text(text)

    def may_cut(self, before: str, after: str) -> bool:
        """Whether a cut between `before`, which ends with a line, and `after` changes no token."""
        return True

    def last_cut(self, text: str) -> int:
        """The last position where a cut changes no token of the text; 0 if there is none."""
        return len(text)

    def reading_special_tokens(self) -> Any:
        """The same tokenizer, but a text may name control tokens, such as <|im_start|>.

        Do not give it text of strangers: such a text could end a turn or speak as the system.
        Raises ConfigError if the tokenizer has no control tokens that a text can name.
        """
        raise ConfigError(
            "special_tokens: the tokenizer of this run has no control tokens that a text could name"
        )

    @functools.cached_property
    def digest(self) -> str:
        """sha256 (hex) of the state."""
        return digest_of_state(self.state)

    @property
    def former_digests(self) -> tuple[str, ...]:
        """The digests of the same tokenizer in earlier versions of this library."""
        return ()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as JSON, for `load`."""
        config.write_atomically(path, json.dumps(self.state))


def digest_of_state(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
