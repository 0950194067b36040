"""A tokenizer as files that transformers opens: tokenizer.json and tokenizer_config.json.

`AutoTokenizer` then gives the same ids for every text without names of control tokens. In
transformers such a name in a text is that token; ours read it as text, unless `control` is set.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxformer.data.bpe import BPE
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.tokenizers import Bytes, Characters, stop_tokens
from jaxformer.errors import ConfigError

# the class of transformers that reads any tokenizer.json
READER = "PreTrainedTokenizerFast"


def files_of(tokenizer: Any, vocab_size: int, longest: int | None = None) -> dict[str, bytes]:
    """{name: contents} of a tokenizer, for a vocabulary of `vocab_size` and texts up to `longest`.

    Raises ConfigError for a tokenizer of one's own, which transformers cannot know.
    """
    match tokenizer:
        case Bytes():
            state = _bytes_as_json(tokenizer)
        case Characters():
            state = _characters_as_json(tokenizer, vocab_size)
        case BPE():
            state = _without_frame(tokenizer.state["tokenizer"])
        case _:
            raise ConfigError(
                f"export: {type(tokenizer).__name__} is a tokenizer of your own; expected Bytes, "
                "Characters or BPE; write its files yourself, for families.save(files=...)"
            )
    texts = {"tokenizer.json": state, "tokenizer_config.json": _settings(tokenizer, state, longest)}
    return {name: json.dumps(text, ensure_ascii=False).encode() for name, text in texts.items()}


def _settings(tokenizer: Tokenizer, state: Mapping[str, Any], longest: int | None) -> dict:
    """tokenizer_config.json: the tokens that end a text, the longest text, the chat template."""
    known = dict(state["model"]["vocab"]) | {
        each["content"]: each["id"] for each in state["added_tokens"]
    }
    named = {i: text for text, i in known.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": READER,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if longest is not None:
        settings["model_max_length"] = longest
    # readers that take one stop token take this: the end of a turn, if there are turns
    ends = [end for end in stop_tokens(tokenizer) if end in named]
    if ends:
        settings["eos_token"] = named[ends[-1]]
    if tokenizer.chat is not None:
        settings["chat_template"] = tokenizer.chat.source
        # a text that is no token would become a new one, behind the vocabulary
        settings |= {
            name: text
            for name, text in tokenizer.chat.tokens
            if text in known and name in tokenizer.chat.source
        }
    return settings


def _document(model: Mapping, splits: Mapping, decoder: Mapping, controls: Mapping) -> dict:
    """The form of tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags, "special": True}
            for text, i in sorted(controls.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": splits,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _bytes_as_json(tokenizer: Bytes) -> dict[str, Any]:
    """Byte-level BPE without merges. The ids of control tokens are bytes that UTF-8 never has."""
    controls = tokenizer.control_tokens
    names = {i: text for text, i in controls.items()}
    vocabulary = {names.get(i, letter): i for i, letter in enumerate(byte_letters())}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return _document(model, levels | {"use_regex": False}, levels, controls)


def _characters_as_json(tokenizer: Characters, vocab_size: int) -> dict[str, Any]:
    """A word for each character. The end of a text may lie above the model's vocabulary."""
    vocabulary = {character: i for i, character in enumerate(tokenizer.characters)}
    controls = {text: i for text, i in tokenizer.control_tokens.items() if i < vocab_size}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "an unknown character"}
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    return _document(model, every | {"invert": False}, {"type": "Fuse"}, controls)


def _without_frame(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without the tokens that a post-processor puts around a text: ours adds none."""
    frame = state.get("post_processor") or {}
    return {**state, "post_processor": frame if frame.get("type") == "ByteLevel" else None}


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level BPE: itself if it is printable, else one above 255.

    Radford et al. 2019, in the published code.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
