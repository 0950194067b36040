"""Text to integers and back: bytes, characters and byte-level byte-pair encoding.

A tokenizer has `encode(str) -> list[int]`, `encode_text(str) -> array`, `decode(ids) -> str`, `vocab_size`, `digest` and
`save(path)`. `load(path)` reads it again, so a run folder can keep its tokenizer. `end_of_text` is the id that ends a
document, which no text can hold, or None.
"""

import contextlib
import copy
import functools
import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
from etils import epath

from jaxformer import config
from jaxformer.data import tokenizer_package
from jaxformer.errors import ConfigError, package_of

log = logging.getLogger("jaxformer")
END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # of GPT-2, Llama 3, Llama and T5, Gemma, BERT
REACH = 256  # characters on each side of a cut that decide whether it changes tokens
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # the text of an id above the vocabulary, which padded vocabularies have


class _Tokenizer:
    """A tokenizer is defined by its JSON state, which is saved to a file and hashed to a digest."""

    vocab_size: int
    end_of_text: int | None = None  # ends a text and is no part of one; of characters, an id above theirs
    state: dict[str, Any]
    encode_text: Any  # the tokens of a long text, in the narrowest unsigned integer type for the vocabulary

    def encode(self, text: str) -> list[int]:
        return self.encode_text(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each of many short texts, int32."""
        return [self.encode_text(text).astype(np.int32) for text in texts]

    def id_of(self, token: str) -> int | None:
        """The id of a control token, such as </s>; None if there is none of that name."""
        return None

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        """`encode_text` of a piece of a longer text; `continues`: another piece, which `last_cut` ended, is in front of it."""
        return self.encode_text(text)

    def may_cut(self, before: str, after: str) -> bool:
        """Whether a text may be cut behind `before`, which ends with a line, so that no token changes."""
        return True

    def last_cut(self, text: str) -> int:
        """The last place where a text may be cut, so that the tokens of its pieces are those of the whole. 0: there is none."""
        return len(text)

    def reading_special_tokens(self) -> Any:
        """The same tokenizer, which takes the name of a control token in a text, such as <|im_start|>, for that token.

        Give it no text of strangers: it could end a turn or speak as the system. Raises ConfigError where no text can name
        a control token.
        """
        raise ConfigError("special_tokens: the tokenizer of this run has no control tokens that a text could name")

    @functools.cached_property
    def digest(self) -> str:
        """sha256 (hex) of the state."""
        return _digest(self.state)

    @property
    def former_digests(self) -> tuple[str, ...]:
        """What earlier versions of this library noted as the digest of the same tokenizer."""
        return ()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as JSON, for `load`."""
        config.write_atomically(path, json.dumps(self.state))


class Bytes(_Tokenizer):
    """UTF-8 bytes: 256 ids, any text. Bytes that are not UTF-8 decode to U+FFFD. 0xFF, never a byte of UTF-8, ends a text."""

    vocab_size = 256
    end_of_text = 0xFF

    def __init__(self):
        self.state = {"type": "bytes"}

    def encode_text(self, text: str) -> np.ndarray:
        # a lone surrogate (an invalid byte of a command line) becomes a question mark
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        # 0xFF is never valid UTF-8, so an id above 255 becomes U+FFFD
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode("utf-8", errors="replace")


class Characters(_Tokenizer):
    """One id per character of a text, in code point order. Other characters raise ConfigError."""

    def __init__(self, characters: str):
        self.characters, self.vocab_size, self.end_of_text = characters, len(characters), len(characters)
        self.state = {"type": "characters", "characters": characters}
        codes = _code_points(characters)
        # the last entry, -1, is for every character above the highest one
        self._ids = np.full(int(codes.max(initial=0)) + 2, -1, np.int32)
        self._ids[codes] = np.arange(len(codes))

    @classmethod
    def of(cls, text: str) -> "Characters":
        return cls("".join(sorted(set(text))))

    def encode_text(self, text: str) -> np.ndarray:
        ids = self._ids[np.minimum(_code_points(text), len(self._ids) - 1)]
        if ids.min(initial=0) < 0:
            at = int(np.argmin(ids))
            problem = f"character {text[at]!r} (position {at}) is not among the {self.vocab_size} of the training text"
            raise ConfigError(f"{problem}; remove it, or train with tokenizer='bytes'")
        return ids.astype(np.min_scalar_type(max(self.vocab_size - 1, 0)))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return "".join(self.characters[i] if 0 <= i < self.vocab_size else UNKNOWN for i in map(int, ids))


class BPE(_Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), or another of the `tokenizers` package."""

    def __init__(self, serialized: str, end: str | None = None):
        """From the JSON of the package. `end` is the token that ends a text, by default one of `ENDS`.

        BPE dropout is switched off: tokens of a text must be the same each time, in evaluation, in a cache and after a restart.
        """
        self._tokenizer = tokenizer_package.open_tokenizer(serialized)
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            log.warning("the tokenizer's BPE dropout of %g is switched off", dropout)
            state = json.loads(serialized)
            state["model"]["dropout"] = None
            self._tokenizer = tokenizer_package.open_tokenizer(json.dumps(state))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # without this flag "<|endoftext|>" in a text would become the control id; the JSON does not hold the flag
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.end_of_text = next((i for i in map(self.id_of, (end,) if end else ENDS) if i is not None), None)
        self.state = {"type": "bpe", "tokenizer": json.loads(self._tokenizer.to_str())} | ({"end_of_text": end} if end else {})
        self._writer = self._tokenizer_of_texts()
        self._line_end, self._chunk = [], sys.maxsize
        with contextlib.suppress(Exception):  # of the package, for a vocabulary that has no token for these characters
            self._line_end = self._ids("\n")
            self._chunk = 1 << 16 if self.may_cut("a\n", "b") else sys.maxsize

    @functools.cached_property
    def digest(self) -> str:
        """sha256 (hex) of what the state means: the package writes the same tokenizer otherwise since its version 0.20."""
        return _digest(self.state | {"tokenizer": _as_first_written(self.state["tokenizer"])})

    @property
    def former_digests(self) -> tuple[str, ...]:
        """The digest of the package's own JSON."""
        return (_digest(self.state),)

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPE":
        """Learns merges from `text`. The result is deterministic. A short text may give fewer than `vocab_size` ids."""
        if vocab_size < 257:
            raise ConfigError(f"data.vocab_size: bpe needs at least 257 (256 bytes and {END_OF_TEXT}), not {vocab_size}")
        text = text.encode("utf-8", errors="replace").decode()  # as in `encode_text`
        package = tokenizer_package.require_package()
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False,
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        )  # fmt: skip
        tokenizer.train_from_iterator(_chunks(text), trainer)
        return cls(tokenizer.to_str())

    def ending_with(self, token: str) -> "BPE":
        """The same tokenizer with another token for the end of a text."""
        return BPE(json.dumps(self.state["tokenizer"]), token)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def reading_special_tokens(self) -> "BPE":
        other = BPE(json.dumps(self.state["tokenizer"]), self.state.get("end_of_text"))
        other._tokenizer.encode_special_tokens = False
        other._writer = other._tokenizer
        return other

    def _tokenizer_of_texts(self) -> Any:
        """The package's tokenizer that encodes texts: no text has a control token, not even one that is its name.

        The flag of `__init__` is not enough. Where the vocabulary of Unigram (T5), of words or of merged pairs holds </s>, a
        text "</s>" is that piece. So here each such piece has a name that no text can know.
        """
        ids = {name: self.id_of(name) for name in self._control_tokens()}
        if not any(id in self._ids_or_none(name) for name, id in ids.items()):
            return self._tokenizer
        names = {name: f"{name} {secrets.token_hex(16)}" for name in ids}
        state = copy.deepcopy(self.state["tokenizer"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(name, name): id for name, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
        for token in state["added_tokens"]:
            if token["content"] in names:
                token.update(content=names[token["content"]], special=True)
        writer = tokenizer_package.open_tokenizer(json.dumps(state))
        writer.encode_special_tokens = True
        return writer

    def _control_tokens(self) -> set[str]:
        """The names of the control tokens. That of an unknown character stands for what a text holds, so it is none."""
        state = self.state["tokenizer"]
        model, unknown = state["model"], state["model"].get("unk_token")
        if model.get("unk_id") is not None:
            unknown = model["vocab"][model["unk_id"]][0]
        names = {token["content"] for token in state["added_tokens"] if token["special"]}
        if self.end_of_text is not None:
            names.add(self._tokenizer.id_to_token(self.end_of_text))
        return names - {unknown}

    def _ids_or_none(self, text: str) -> list[int]:
        """The ids of a text; none if the vocabulary cannot write it, which the package says by an Exception."""
        with contextlib.suppress(Exception):
            return tokenizer_package.encode(self._tokenizer, [text])[0].ids
        return []

    def encode_text(self, text: str) -> np.ndarray:
        return self.encode_piece(text, continues=False)

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        text = text.encode("utf-8", errors="replace").decode()  # the package refuses lone surrogates
        dtype = np.min_scalar_type(self.vocab_size - 1)
        chunks, pieces = list(self._stretches(text)), [np.zeros(0, dtype)]
        # Llama's tokenizer and others put a space before every text. Only the first chunk gets one: a later chunk is encoded
        # behind a line end, whose tokens are then taken away.
        texts = [f"\n{chunk}" if number or continues else chunk for number, chunk in enumerate(chunks)]
        # 64 chunks use all cores; more would fill the memory with the package's large encodings
        for start in range(0, len(texts), 64):
            encodings = self._encodings(texts[start : start + 64])
            for number, encoding in enumerate(encodings, start):
                ids, first = encoding.ids, len(self._line_end) if number or continues else 0
                if first and ids[:first] != self._line_end:  # a cut that `may_cut` did not allow
                    ids, first = self._ids(texts[number][1:]), 0
                pieces.append(np.array(ids[first:], dtype))
        return np.concatenate(pieces)

    def last_cut(self, text: str) -> int:
        end = len(text) - REACH if self._chunk < sys.maxsize else -1
        while (end := text.rfind("\n", 0, max(end, 0))) >= 0:
            if self.may_cut(text[max(end + 1 - REACH, 0) : end + 1], text[end + 1 : end + 1 + REACH]):
                return end + 1
        return 0

    def _stretches(self, text: str) -> Iterator[str]:
        """Pieces of about `_chunk` characters, cut where that changes no token. The package encodes them in parallel."""
        start = end = 0
        while start < len(text):
            end = text.find("\n", start + self._chunk if end == start else end) + 1 or len(text)
            if end == len(text) or self.may_cut(text[max(end - REACH, start) : end], text[end : end + REACH]):
                yield text[start:end]
                start = end

    def may_cut(self, before: str, after: str) -> bool:
        before, after = before[-REACH:], after[:REACH]
        if not (before.strip() and after.strip()):  # a longer run of white space, which may be one token
            return False
        ids_after = self._ids(f"\n{after}")
        line_end = len(self._line_end)
        pieces = self._ids(before) + ids_after[line_end:]
        return ids_after[:line_end] == self._line_end and pieces == self._ids(before + after)

    def _ids(self, text: str) -> list[int]:
        return tokenizer_package.encode(self._writer, [text])[0].ids

    def _encodings(self, texts: list[str]) -> list[Any]:
        """The package's, which uses all cores."""
        return tokenizer_package.encode(self._writer, texts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        texts = [text.encode("utf-8", errors="replace").decode() for text in texts]
        return [np.array(encoding.ids, np.int32) for encoding in self._encodings(texts)]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        # the package has no text for an id above its vocabulary, and refuses a negative one, such as a label of -100
        known = (i if 0 <= i < self.vocab_size else self.vocab_size for i in map(int, ids))
        return tokenizer_package.decode(self._tokenizer, list(known))


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# the fields of byte pairs in version 0.19 of the package
BPE_FIELDS = (
    "type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "vocab",
    "merges",
)  # fmt: skip


def _as_first_written(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a tokenizer as version 0.19 of the package wrote it: merges as strings, no later fields that say nothing."""
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        return tokenizer
    fields = {name: value for name, value in model.items() if name in BPE_FIELDS or value not in (None, False)}
    merges = fields.get("merges", [])
    if not any(" " in token for merge in merges if not isinstance(merge, str) for token in merge):
        fields["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return tokenizer | {"model": fields}


def load(path: str | os.PathLike, root: str | os.PathLike | None = None) -> Bytes | Characters | BPE:
    """The tokenizer that `save` wrote. Raises ConfigError for a missing or another file.

    Below a folder `root`, which a stranger may have made, no link is followed.
    """
    match config.read_json(path, "not a saved tokenizer", root):
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


def hugging_face(name: str) -> BPE:
    """The tokenizer of a tokenizer.json: its path, its folder, or its name at the Hugging Face hub."""
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
    except Exception as error:  # of the hub and of the package, which raises plain Exceptions
        advice = "give the path of a tokenizer.json, or the name of a model of the Hugging Face hub that is within reach"
        raise ConfigError(f"data.tokenizer={name!r}: {type(error).__name__}: {str(error)[:200]}; {advice}") from error


def by_name(name: str, vocab_size: int | None, texts: Iterable[str] = ()) -> Bytes | Characters | BPE:
    """ "bytes"; "characters" or "bpe", learned from `texts`; a file that `save` wrote; or what `hugging_face` takes."""
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
        raise ConfigError(f"data.vocab_size={vocab_size}: tokenizer='bpe' needs one, every other tokenizer has its own")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


def _chunks(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Pieces of about `size` characters that end with a line. The package encodes them in parallel."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
