"""Text to integers and back: bytes, characters and byte-level byte-pair encoding.

A tokenizer has `encode(str) -> list[int]`, `encode_text(str) -> array`, `decode(ids) -> str`,
`vocab_size`, `digest` and `save(path)`. `load(path)` reads it again, so a run folder can keep its
tokenizer. `end_of_text` is the id that ends a document, or None; no text contains it.
"""

import contextlib
import copy
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
from etils import epath

from jaxformer import config
from jaxformer.data import tokenizer_json, tokenizer_package
from jaxformer.data.chat_template import ChatTemplate, ends_of_turns
from jaxformer.errors import ConfigError, package_of

log = logging.getLogger("jaxformer")
END_OF_TEXT = "<|endoftext|>"
# the ends of text of GPT-2, Llama 3, Llama and T5, Gemma, BERT
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
REACH = 256  # characters on each side of a cut that decide whether it changes tokens
# the text of an id above the vocabulary, which a padded vocabulary has
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class _Tokenizer:
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
        return _digest(self.state)

    @property
    def former_digests(self) -> tuple[str, ...]:
        """The digests of the same tokenizer in earlier versions of this library."""
        return ()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as JSON, for `load`."""
        config.write_atomically(path, json.dumps(self.state))


class Bytes(_Tokenizer):
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


class Characters(_Tokenizer):
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


class BPE(_Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019).

    Or any other tokenizer of the `tokenizers` package.
    """

    def __init__(self, serialized: str, end: str | None = None):
        """From the package's JSON. `end` is the token that ends a text, by default one of `ENDS`.

        BPE dropout is switched off: the tokens of a text must be the same each time, in evaluation,
        in a cache and after a restart.
        """
        self._tokenizer = tokenizer_package.open_tokenizer(serialized)
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            log.warning("the tokenizer's BPE dropout of %g is switched off", dropout)
            state = json.loads(serialized)
            state["model"]["dropout"] = None
            self._tokenizer = tokenizer_package.open_tokenizer(json.dumps(state))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Without this flag, "<|endoftext|>" in a text would become the control id. The JSON does
        # not hold the flag.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.end_of_text = next(
            (i for i in map(self.id_of, (end,) if end else ENDS) if i is not None), None
        )
        self.state = {"type": "bpe", "tokenizer": json.loads(self._tokenizer.to_str())}
        if end:
            self.state["end_of_text"] = end
        self._writer = self._tokenizer_of_texts()
        self._line_end = []  # the ids of a line end
        self._chunk = sys.maxsize  # characters that are encoded at a time
        # the package raises a plain Exception if the vocabulary cannot write these characters
        with contextlib.suppress(Exception):
            self._line_end = self._ids("\n")
            self._chunk = 1 << 16 if self.may_cut("a\n", "b") else sys.maxsize

    @functools.cached_property
    def digest(self) -> str:
        """sha256 (hex) of the state in the form of version 0.19 of the package.

        Version 0.20 writes the same tokenizer in another form.
        """
        tokenizer = tokenizer_json.as_first_written(self.state["tokenizer"])
        return _digest(self.state | {"tokenizer": tokenizer})

    @property
    def former_digests(self) -> tuple[str, ...]:
        """The digest of the JSON that the installed package writes."""
        return (_digest(self.state),)

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPE":
        """Learns merges from `text`, deterministically.

        A short text may give fewer than `vocab_size` ids.
        """
        if vocab_size < 257:
            raise ConfigError(
                f"data.vocab_size: bpe needs at least 257 (256 bytes and {END_OF_TEXT}), "
                f"not {vocab_size}"
            )
        text = _without_surrogates(text)
        package = tokenizer_package.require_package()
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            show_progress=False,
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator(_chunks(text), trainer)
        return cls(tokenizer.to_str())

    def ending_with(self, token: str) -> "BPE":
        """The same tokenizer with another token for the end of a text."""
        return BPE(json.dumps(self.state["tokenizer"]), token)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        ids = {name: self.id_of(name) for name in sorted(self._control_names())}
        return {name: id for name, id in ids.items() if id is not None}

    def _control_names(self) -> set[str]:
        end = None if self.end_of_text is None else self._tokenizer.id_to_token(self.end_of_text)
        return tokenizer_json.control_tokens(self.state["tokenizer"], end)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        tokenizer = self._reading_names._tokenizer
        (encoding,) = tokenizer_package.encode(tokenizer, [_without_surrogates(text)], offsets=True)
        ids = np.array(encoding.ids, np.int32)
        return ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    @functools.cached_property
    def _reading_names(self) -> "BPE":
        return self.reading_special_tokens()

    def reading_special_tokens(self) -> "BPE":
        other = BPE(json.dumps(self.state["tokenizer"]), self.state.get("end_of_text"))
        other._tokenizer.encode_special_tokens = False
        other._writer = other._tokenizer
        return other

    def _tokenizer_of_texts(self) -> Any:
        """The package's tokenizer for encoding: no text becomes a control token, not even its name.

        The flag that `__init__` sets is not enough: if </s> is in the vocabulary of Unigram (T5),
        of words or of merged pairs, the text "</s>" becomes that piece. So this tokenizer gives
        each such piece a random name, which no text contains.
        """
        state = self.state["tokenizer"]
        names = self._control_names()
        if not any(self.id_of(name) in self._ids_or_none(name) for name in names):
            return self._tokenizer
        secret_names = {name: f"{name} {secrets.token_hex(16)}" for name in names}
        renamed = tokenizer_json.renamed(state, secret_names)
        writer = tokenizer_package.open_tokenizer(json.dumps(renamed))
        writer.encode_special_tokens = True
        return writer

    def _ids_or_none(self, text: str) -> list[int]:
        """The ids of a text; [] if the vocabulary cannot write it: then the package raises."""
        with contextlib.suppress(Exception):
            return tokenizer_package.encode(self._tokenizer, [text])[0].ids
        return []

    def encode_text(self, text: str) -> np.ndarray:
        return self.encode_piece(text, continues=False)

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        dtype = np.min_scalar_type(self.vocab_size - 1)
        chunks = self._stretches(_without_surrogates(text))
        # Llama's tokenizer and others put a space before every text. Only the first chunk may get
        # one: a later chunk is encoded after a line end, whose tokens are then removed.
        texts = [
            f"\n{chunk}" if number or continues else chunk for number, chunk in enumerate(chunks)
        ]
        pieces = [np.zeros(0, dtype)]
        # 64 chunks use all cores; with more, the package's large encodings would fill the memory
        for start in range(0, len(texts), 64):
            encodings = self._encodings(texts[start : start + 64])
            for number, encoding in enumerate(encodings, start):
                ids = encoding.ids
                if number or continues:
                    ids = self._without_line_end(texts[number], ids)
                pieces.append(np.array(ids, dtype))
        return np.concatenate(pieces)

    def _without_line_end(self, text: str, ids: list[int]) -> list[int]:
        """The ids of `text[1:]`, where `text` begins with a line end and has these `ids`."""
        count = len(self._line_end)
        if ids[:count] == self._line_end:
            return ids[count:]
        return self._ids(text[1:])  # a cut that `may_cut` did not allow

    def last_cut(self, text: str) -> int:
        end = len(text) - REACH if self._chunk < sys.maxsize else -1
        while (end := text.rfind("\n", 0, max(end, 0))) >= 0:
            if self.may_cut(
                text[max(end + 1 - REACH, 0) : end + 1], text[end + 1 : end + 1 + REACH]
            ):
                return end + 1
        return 0

    def _stretches(self, text: str) -> Iterator[str]:
        """Pieces of about `_chunk` characters, cut where that changes no token.

        The package encodes them in parallel.
        """
        start = end = 0
        while start < len(text):
            end = text.find("\n", start + self._chunk if end == start else end) + 1 or len(text)
            if end == len(text) or self.may_cut(
                text[max(end - REACH, start) : end], text[end : end + REACH]
            ):
                yield text[start:end]
                start = end

    def may_cut(self, before: str, after: str) -> bool:
        before = before[-REACH:]
        after = after[:REACH]
        # a longer run of white space may be one token
        if not (before.strip() and after.strip()):
            return False
        ids_after = self._ids(f"\n{after}")
        line_end = len(self._line_end)
        pieces = self._ids(before) + ids_after[line_end:]
        return ids_after[:line_end] == self._line_end and pieces == self._ids(before + after)

    def _ids(self, text: str) -> list[int]:
        return tokenizer_package.encode(self._writer, [text])[0].ids

    def _encodings(self, texts: list[str]) -> list[Any]:
        """The package's encodings, computed on all cores."""
        return tokenizer_package.encode(self._writer, texts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._encodings([_without_surrogates(text) for text in texts])
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        # the package has no text for an id above its vocabulary, and refuses a negative id, such as
        # a label of -100
        known = (i if 0 <= i < self.vocab_size else self.vocab_size for i in map(int, ids))
        return tokenizer_package.decode(self._tokenizer, list(known))


def _without_surrogates(text: str) -> str:
    """The text with question marks for lone surrogates, which the package refuses."""
    return text.encode("utf-8", errors="replace").decode()


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


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

    "bytes"; "characters" or "bpe", learned from `texts`; a file that `save` wrote; or a name for
    `hugging_face`.
    """
    check_vocab_size(name, vocab_size)
    match name:
        case "bytes":
            return Bytes()
        case "characters":
            return Characters.of("".join(texts))
        case "bpe":
            return BPE.train("\n".join(texts), vocab_size or 0)
    try:
        return load(os.path.expanduser(name))
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


def _chunks(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Pieces of about `size` characters that end with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
