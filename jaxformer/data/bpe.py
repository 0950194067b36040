"""Byte-level byte-pair encoding, and all other tokenizers of the `tokenizers` package."""

import contextlib
import functools
import json
import logging
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from jaxformer.data import tokenizer_json, tokenizer_package
from jaxformer.data.tokenizer import Tokenizer, digest_of_state
from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")
END_OF_TEXT = "<|endoftext|>"
# the ends of text of GPT-2, Llama 3, Llama and T5, Gemma, BERT
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
REACH = 256  # characters on each side of a cut that decide whether it changes tokens


class BPE(Tokenizer):
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

    def __describe__(self) -> dict[str, str]:
        """What names a run: the state. `_writer` has other secret names in each process."""
        return {"type": type(self).__name__, "digest": self.digest}

    @functools.cached_property
    def digest(self) -> str:
        """sha256 (hex) of the state in the form of version 0.19 of the package.

        Version 0.20 writes the same tokenizer in another form.
        """
        tokenizer = tokenizer_json.as_first_written(self.state["tokenizer"])
        return digest_of_state(self.state | {"tokenizer": tokenizer})

    @property
    def former_digests(self) -> tuple[str, ...]:
        """The digest of the JSON that the installed package writes."""
        return (digest_of_state(self.state),)

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
        text = without_surrogates(text)
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
        tokenizer.train_from_iterator(chunks_of(text), trainer)
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
        (encoding,) = tokenizer_package.encode(tokenizer, [without_surrogates(text)], offsets=True)
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
        chunks = self._stretches(without_surrogates(text))
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
        encodings = self._encodings([without_surrogates(text) for text in texts])
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        # the package has no text for an id above its vocabulary, and refuses a negative id, such as
        # a label of -100
        known = (i if 0 <= i < self.vocab_size else self.vocab_size for i in map(int, ids))
        return tokenizer_package.decode(self._tokenizer, list(known))


def without_surrogates(text: str) -> str:
    """The text with question marks for lone surrogates, which the package refuses."""
    return text.encode("utf-8", errors="replace").decode()


def chunks_of(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Pieces of about `size` characters that end with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
