"""The JSON of the `tokenizers` package: its control tokens, and its form in an earlier version."""

import copy
from collections.abc import Mapping
from typing import Any

# the fields of byte pairs in version 0.19 of the package
BPE_FIELDS = (
    "type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
    "byte_fallback", "vocab", "merges",
)  # fmt: skip


def control_tokens(state: dict[str, Any], end_of_text: str | None) -> set[str]:
    """The names of the control tokens, with that of `end_of_text`.

    The token for an unknown character is not one: it stands for a part of a text.
    """
    names = {token["content"] for token in state["added_tokens"] if token["special"]}
    if end_of_text is not None:
        names.add(end_of_text)
    return names - {_unknown_token(state["model"])}


def _unknown_token(model: dict[str, Any]) -> str | None:
    """The name of the token for an unknown character; None if there is none."""
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def renamed(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy in which the tokens have new names: {old: new}. They become special tokens."""
    state = copy.deepcopy(state)
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): id for name, id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])
        ]
    for token in state["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], special=True)
    return state


def as_first_written(state: dict[str, Any]) -> dict[str, Any]:
    """The JSON as version 0.19 of the package wrote it.

    Merges are strings, and fields of later versions are left out if they are None or False.
    """
    model = state["model"]
    if model.get("type") != "BPE":
        return state
    fields = {
        name: value
        for name, value in model.items()
        if name in BPE_FIELDS or value not in (None, False)
    }
    merges = fields.get("merges", [])
    pairs = [merge for merge in merges if not isinstance(merge, str)]
    if not any(" " in token for pair in pairs for token in pair):
        fields["merges"] = [
            merge if isinstance(merge, str) else " ".join(merge) for merge in merges
        ]
    return state | {"model": fields}
