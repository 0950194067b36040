"""Conversations: messages of a system, of users, of an assistant and of tools.

A model learns what the assistant says. Rows of a batch hold several packed conversations.
"""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.chat_template import ChatTemplate, Messages, read_template, texts_of
from jaxformer.data.packing import Example, Packed, dataset_of_examples
from jaxformer.data.records import Policy, Problems, paths_as_text, records
from jaxformer.data.sources import Dataset, Question, Questions, context_length
from jaxformer.errors import ConfigError


class Conversation(NamedTuple):
    """Messages, with their place for texts of errors."""

    place: Any
    messages: Messages


class Encoded(NamedTuple):
    """A conversation as tokens."""

    tokens: np.ndarray  # int32 [n]
    says: np.ndarray  # bool [n], whether the assistant says a token
    turns: tuple[tuple[int, int], ...]  # tokens of each turn of the assistant: [start, stop)


@dataclass(frozen=True)
class Chat:
    """Conversations from files of records, each with a list of messages.

    A message is {"role": "system", "user", "assistant" or "tool", "content": text}. The assistant's
    tokens have weight 1, with the token that ends a turn, also where `{% generation %}` of the
    template leaves it out; all others have weight 0. A conversation that is longer than the context
    ends after the last turn of the assistant that fits.
    """

    train: str  # file of records
    validation: str  # the same for validation
    # bytes, or a tokenizer.json: its path, folder or Hugging Face name; a tokenizer of a run
    tokenizer: str = "bytes"
    # chatml, llama3, gemma, plain, a file of Jinja, or a folder of a model; "": the tokenizer's own
    template: str = ""
    field: str = "messages"  # of a record: its list of messages
    rows: Callable = Packed()  # (examples, (0, T)) -> Rows for training
    bad_rows: Policy = "error"  # rows that are damaged, without an answer, or that do not fit

    def __post_init__(self):
        paths_as_text(self, "train", "validation", "tokenizer", "template")

    def open(self, model: Any) -> Dataset:
        problems = Problems(self.bad_rows)
        train, validation = (
            list(conversations(path, self.field, problems))
            for path in (self.train, self.validation)
        )
        texts = (text for conversation in train for text in texts_of(conversation.messages))
        tokenizer = tokenizers.by_name(self.tokenizer, None, texts)
        tokenizer = tokenizer.with_chat(template_of(tokenizer, self.template, self.tokenizer))
        return open_chat(train, validation, tokenizer, model, self.rows, problems, self.train)

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        """The question of a user's text alone."""
        return user_question(tokenizer, text, reference)


def template_of(tokenizer: Any, template: str, folder: str) -> ChatTemplate:
    """The template of a name; without one, that of the tokenizer, or of the tokenizer's folder."""
    if not template and tokenizer.chat is not None:
        return tokenizer.chat
    return read_template(template or folder, _end_of_text(tokenizer))


def conversations(path: str, field: str, problems: Problems) -> Iterator[Conversation]:
    """The conversations of a file of records."""
    for place, (messages,) in records(os.path.expanduser(path), (field,), problems):
        problem = _problem(messages)
        if problem:
            problems.add(place, problem)
        else:
            yield Conversation(place, messages)


def open_chat(
    train: Sequence[Conversation],
    validation: Sequence[Conversation],
    tokenizer: Any,
    model: Any,
    rows: Callable = Packed(),
    problems: Problems | None = None,
    name: str = "chat",
) -> Dataset:
    """The data set of conversations in memory. The tokenizer has a chat template.

    Raises ConfigError if no conversation of a split fits the model.
    """
    problems = problems or Problems()
    length = context_length(model)
    splits = [list(_examples(split, tokenizer, length, problems)) for split in (train, validation)]
    check_ends(tokenizer, [example.labels[-1] for split in splits for _, example in split])
    train_questions, validation_questions = (
        Questions([messages for messages, _ in split], partial(_last_question, tokenizer))
        for split in splits
    )
    return dataset_of_examples(
        *([example for _, example in split] for split in splits),
        tokenizer=tokenizer,
        lengths=(0, length),
        rows=rows,
        questions=(train_questions, validation_questions),
        name=name,
        kind="conversation",
        problems=problems,
    )


def encode(tokenizer: Any, messages: Messages, tools: Sequence[Any] | None = None) -> Encoded:
    """The tokens of a conversation, and which of them the assistant says.

    Raises ConfigError for a tokenizer without a chat template.
    """
    rendered = _chat(tokenizer).render(
        messages, control_tokens=tokenizer.control_tokens, tools=tools
    )
    tokens, offsets = _tokens_of(tokenizer, rendered.pieces)
    says = np.zeros(len(tokens), bool)
    turns = []
    for start, stop in rendered.spans:
        # a token that crosses the border belongs to the turn
        inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < stop))
        if len(inside):
            turns.append((int(inside[0]), int(inside[-1]) + 1))
            says[inside[0] : inside[-1] + 1] = True
    return Encoded(tokens, says, tuple(turns))


def with_ends(encoded: Encoded, stops: Collection[int]) -> Encoded:
    """The conversation, with the token that ends a turn as a part of the turn.

    Some templates mark the message alone. A model that learned from it would never stop.
    """
    says = encoded.says.copy()
    turns = []
    for start, stop in encoded.turns:
        if (
            stop < len(says)
            and encoded.tokens[stop] in stops
            and encoded.tokens[stop - 1] not in stops
        ):
            says[stop] = True
            stop += 1
        turns.append((start, stop))
    return Encoded(encoded.tokens, says, tuple(turns))


def check_ends(tokenizer: Any, last_tokens: Sequence[Any]) -> None:
    """Raises ConfigError if no answer ends with a token at which the model stops."""
    stops = tokenizers.stop_tokens(tokenizer)
    if last_tokens and not any(token in stops for token in last_tokens):
        names = ", ".join(tokenizer.control_tokens) or "none"
        raise ConfigError(
            "data.template: no turn of the assistant ends with a control token of the tokenizer "
            f"({names}), so the model would never stop; give another template or tokenizer"
        )


def question(
    tokenizer: Any, messages: Messages, reference: str = "", tools: Sequence[Any] | None = None
) -> Question:
    """The question of messages: their tokens, with the beginning of the assistant's answer."""
    rendered = _chat(tokenizer).render(
        messages, control_tokens=tokenizer.control_tokens, ask=True, tools=tools
    )
    tokens, _ = _tokens_of(tokenizer, rendered.pieces)
    return Question(tokens.tolist(), reference)


def user_question(tokenizer: Any, text: str, reference: str = "") -> Question:
    """The question of a user's text alone."""
    return question(tokenizer, [{"role": "user", "content": text}], reference)


def _tokens_of(tokenizer: Any, pieces: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n], their characters [n, 2]) of the pieces of a text."""
    encoded = [tokenizer.encode_with_offsets(piece) for piece in pieces]
    starts = itertools.accumulate(map(len, pieces), initial=0)
    tokens = np.concatenate([tokens for tokens, _ in encoded])
    offsets = [offsets + start for (_, offsets), start in zip(encoded, starts, strict=False)]
    return tokens, np.concatenate(offsets)


def _chat(tokenizer: Any) -> ChatTemplate:
    chat = getattr(tokenizer, "chat", None)
    if chat is None:
        raise ConfigError(
            "the tokenizer has no chat template; give one: tokenizer.with_chat(template)"
        )
    return chat


def _examples(
    split: Sequence[Conversation], tokenizer: Any, length: int, problems: Problems
) -> Iterator[tuple[Messages, Example]]:
    """(messages that fit, their example) of each conversation; the others are problems."""
    stops = tokenizers.stop_tokens(tokenizer)
    for place, messages in split:
        try:
            encoded = with_ends(encode(tokenizer, messages), stops)
        except ConfigError as error:
            problems.add(place, "not a conversation of this template", f" ({error})")
            continue
        # labels are one token further, so `length` tokens have length + 1 with the last label
        fitting = [stop for _, stop in encoded.turns if stop <= length + 1]
        if not fitting:
            kind = f"no turn of the assistant ends within the model's {length} tokens"
            problems.add(place, kind, f" ({len(encoded.tokens)})")
            continue
        tokens = encoded.tokens[: fitting[-1]]
        weights = encoded.says[1 : fitting[-1]].astype(np.int32)
        yield (
            _up_to_turn(messages, len(fitting)),
            Example(tokens[:-1], tokens[1:], weights, tokens[:0]),
        )


def _up_to_turn(messages: Messages, count: int) -> Messages:
    """The messages up to the turn of the assistant of this number."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: turns[count - 1] + 1]


def _last_question(tokenizer: Any, messages: Messages) -> Question:
    """The question before the last turn of the assistant, with that turn as its answer."""
    *before, last = messages
    return question(tokenizer, before, str(last["content"]))


def _problem(messages: Any) -> str | None:
    """In words, why a record is no conversation to learn from."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return "no list of messages"
    roles = [message.get("role") for message in messages]
    if not all(isinstance(role, str) for role in roles):
        return "a message without a role"
    if "assistant" not in roles[1:]:
        return "no message of the assistant after another one"
    if any(
        message.get("content") is None and not message.get("tool_calls") for message in messages
    ):
        return "a message without content"
    return None


def _end_of_text(tokenizer: Any) -> str:
    """The name of the token that ends a text."""
    names = {number: name for name, number in tokenizer.control_tokens.items()}
    return names.get(tokenizer.end_of_text, "")
