"""Text to integers and back: bytes, characters and byte-level byte-pair encoding.

A tokenizer has `encode(str) -> list[int]`, `encode_text(str) -> array`, `decode(ids) -> str`,
`vocab_size`, `digest` and `save(path)`. `load(path)` reads it again, so a run folder can keep its
tokenizer. `end_of_text` is the id that ends a document, or None; no text contains it.
"""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from etils import epath

from jaxformer import config
from jaxformer.data.bpe import BPE, END_OF_TEXT, ENDS as ENDS, REACH as REACH
from jaxformer.data.chat_template import ChatTemplate, ends_of_turns
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import ConfigError, package_of

log = logging.getLogger("jaxformer")
# the text of an id above the vocabulary, which a padded vocabulary has
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Bytes(Tokenizer):
    """UTF-8 bytes: 256 ids, any text. Bytes that are not UTF-8 decode to U+FFFD.

    0xFF, which is never a byte of UTF-8, ends a text. 0xFE and 0xFD, which are none either, begin
    and end a turn of a conversation.
    """

    vocab_size = 256
    end_of_text = 0xFF

    def __init__(self):
        self.state = {"type": "bytes"}

    @property
    def control_tokens(self) -> dict[str, int]:
        return {END_OF_TEXT: 0xFF, "<|im_start|>": 0xFE, "<|im_end|>": 0xFD}

    def encode_text(self, text: str) -> np.ndarray:
        # a lone surrogate (an invalid byte of a command line) becomes a question mark
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)

    def _tokens_of_each(self, text: str) -> list[int]:
        return [len(character.encode("utf-8", errors="replace")) for character in text]

    def id_of(self, token: str) -> int | None:
        return self.control_tokens.get(token)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        # 0xFF is never valid UTF-8, so an id above 255 decodes to U+FFFD
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode(
            "utf-8", errors="replace"
        )


class Characters(Tokenizer):
    """One id per character of a text, in code point order. Other characters raise ConfigError."""

    def __init__(self, characters: str):
        self.characters = characters
        self.vocab_size = self.end_of_text = len(characters)
        self.state = {"type": "characters", "characters": characters}
        codes = _code_points(characters)
        # the last entry, -1, is for every character above the highest one
        self._ids = np.full(int(codes.max(initial=0)) + 2, -1, np.int32)
        self._ids[codes] = np.arange(len(codes))

    @property
    def control_tokens(self) -> dict[str, int]:
        return {END_OF_TEXT: self.vocab_size}

    @classmethod
    def of(cls, text: str) -> "Characters":
        return cls("".join(sorted(set(text))))

    def encode_text(self, text: str) -> np.ndarray:
        ids = self._ids[np.minimum(_code_points(text), len(self._ids) - 1)]
        if ids.min(initial=0) < 0:
            at = int(np.argmin(ids))
            problem = (
                f"character {text[at]!r} (position {at}) is not among the {self.vocab_size} "
                "of the training text"
            )
            raise ConfigError(f"{problem}; remove it, or train with tokenizer='bytes'")
        return ids.astype(np.min_scalar_type(max(self.vocab_size - 1, 0)))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return "".join(
            self.characters[i] if 0 <= i < self.vocab_size else UNKNOWN for i in map(int, ids)
        )


def of_words(words: Sequence[str], end: str) -> BPE:
    """The tokenizer of these words, which spaces separate; `end` is the one that ends a text.

    A word's id is its place in the list. Other words raise ConfigError.
    """
    vocabulary = {word: i for i, word in enumerate(words)}
    if len(vocabulary) < len(words) or any(word.split() != [word] for word in words):
        raise ConfigError(f"tokenizers.of_words: {words}: expected different words without spaces")
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "an unknown word"}
    return BPE(json.dumps({"model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}), end)


def load(
    path: str | os.PathLike, root: str | os.PathLike | None = None
) -> Bytes | Characters | BPE:
    """The tokenizer that `save` wrote. Raises ConfigError if `path` is no such file.

    A stranger may have made the folder `root`, so no link below it is followed.
    """
    state = config.read_json(path, "not a saved tokenizer", root)
    tokenizer = _of_state(path, state)
    if "chat" not in state:
        return tokenizer
    return tokenizer.with_chat(ChatTemplate.of_state(state["chat"]))


def _of_state(path: str | os.PathLike, state: Any) -> Bytes | Characters | BPE:
    """The tokenizer of a saved state, without its chat template."""
    match state:
        case {"type": "bytes"}:
            return Bytes()
        case {"type": "characters", "characters": str(characters)}:
            return Characters(characters)
        case {"type": "bpe", "tokenizer": tokenizer, **more}:
            try:
                return BPE(json.dumps(tokenizer), more.get("end_of_text"))
            except ConfigError:
                raise
            except Exception as error:  # the package has no class of its own
                raise ConfigError(f"{path}: not a saved tokenizer ({error})") from error
    raise ConfigError(f"{path}: not a saved tokenizer; expected the JSON that `save` writes")


def stop_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the end of a text, and that of the assistant's turns."""
    ends = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    if getattr(tokenizer, "chat", None) is not None:
        ends += ends_of_turns(tokenizer.chat, tokenizer.control_tokens)
    return tuple(dict.fromkeys(ends))


def hugging_face(name: str) -> BPE:
    """The tokenizer of a tokenizer.json: its path, folder, or name on the Hugging Face hub."""
    path = epath.Path(name).expanduser()
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        elif not path.exists():
            with package_of("interop"):
                from huggingface_hub import hf_hub_download
            path = epath.Path(hf_hub_download(name, "tokenizer.json"))
        return BPE(config.read_text(path))
    except ConfigError:
        raise
    except Exception as error:  # from the hub, or a plain Exception of the package
        advice = (
            "give the path of a tokenizer.json, "
            "or the name of a model of the Hugging Face hub that is within reach"
        )
        raise ConfigError(
            f"data.tokenizer={name!r}: {type(error).__name__}: {str(error)[:200]}; {advice}"
        ) from error


def by_name(
    name: str, vocab_size: int | None, texts: Iterable[str] = ()
) -> Bytes | Characters | BPE:
    """The tokenizer of a name.

    "bytes"; "characters" or "bpe", learned from `texts`; a file that `save` wrote, or the folder of
    a run; or a name for `hugging_face`.
    """
    check_vocab_size(name, vocab_size)
    match name:
        case "bytes":
            return Bytes()
        case "characters":
            return Characters.of("".join(texts))
        case "bpe":
            return BPE.train("\n".join(texts), vocab_size or 0)
    path = os.path.expanduser(name)
    try:
        return load(os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path)
    except ConfigError:
        return hugging_face(name)


def check_vocab_size(name: str, vocab_size: int | None) -> None:
    """Raises ConfigError for bpe without a size, and for another tokenizer with one."""
    if (name == "bpe") != (vocab_size is not None):
        raise ConfigError(
            f"data.vocab_size={vocab_size}: tokenizer='bpe' needs one, "
            "every other tokenizer has its own"
        )


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
