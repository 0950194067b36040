"""Preferences: a prompt and two answers to it, of which people or a program chose one."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.chat import (
    check_ends,
    encode,
    question,
    template_of,
    user_question,
    with_ends,
)
from jaxformer.data.chat_template import Messages, check_messages
from jaxformer.data.records import Policy, Problems, paths_as_text, records
from jaxformer.data.sources import Dataset, Question, context_length, digests, read_example
from jaxformer.errors import ConfigError


class Choice(NamedTuple):
    """A prompt and two answers, with their place for texts of errors."""

    place: Any
    prompt: Messages
    chosen: Messages
    rejected: Messages


class Text(NamedTuple):
    """A prompt with one of its answers."""

    tokens: np.ndarray  # int32 [n]
    is_answer: np.ndarray  # bool [n], whether the assistant says a token in its answer


@dataclass(frozen=True)
class Preferences:
    """Prompts with a chosen and a rejected answer, from files of records.

    A prompt is a text, which a user says, or a list of messages; an answer is a text, which the
    assistant says, or a list of messages. With `prompt=None`, both answers are whole conversations,
    whose first messages, as far as they are equal, are the prompt. Tokenizer and template are those
    of `chat.Chat`.
    """

    train: str  # file of records
    validation: str  # the same for validation
    tokenizer: str = "bytes"  # as in `Chat`
    template: str = ""  # as in `Chat`
    prompt: str | None = "prompt"  # field of a record
    chosen: str = "chosen"  # field of a record
    rejected: str = "rejected"  # field of a record
    bad_rows: Policy = "error"  # rows that are damaged, or longer than the context

    def __post_init__(self):
        paths_as_text(self, "train", "validation", "tokenizer", "template")

    def open(self, model: Any) -> Dataset:
        problems = Problems(self.bad_rows)
        train, validation = (
            list(self._choices(os.path.expanduser(path), problems))
            for path in (self.train, self.validation)
        )
        tokenizer = tokenizers.by_name(self.tokenizer, None)
        tokenizer = tokenizer.with_chat(template_of(tokenizer, self.template, self.tokenizer))
        return open_preferences(train, validation, tokenizer, model, problems, self.train)

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        """The question of a user's text alone."""
        return user_question(tokenizer, text, reference)

    def _choices(self, path: str, problems: Problems) -> Iterator[Choice]:
        fields = [name for name in (self.prompt, self.chosen, self.rejected) if name is not None]
        for place, values in records(path, fields, problems):
            try:
                *prompt, chosen, rejected = values
                if prompt:
                    yield Choice(
                        place,
                        as_messages(prompt[0], "user"),
                        as_messages(chosen, "assistant"),
                        as_messages(rejected, "assistant"),
                    )
                else:
                    yield Choice(place, *without_prompt(chosen, rejected))
            except ConfigError as error:
                problems.add(place, "no preference", f" ({error})")


def as_messages(value: Any, role: str) -> Messages:
    """A text as a message of the role, and a list of messages as it is. ConfigError for others."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    check_messages(messages)
    return messages


def without_prompt(chosen: Any, rejected: Any) -> tuple[Messages, Messages, Messages]:
    """(the first messages, as far as they are equal, the other ones of each conversation)."""
    for messages in (chosen, rejected):
        check_messages(messages)
    pairs = zip(chosen, rejected, strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if n in (0, len(chosen), len(rejected)):
        raise ConfigError(
            f"the conversations have {len(chosen)} and {len(rejected)} messages, the first {n} of "
            "them equal: expected an equal beginning, and two answers to it"
        )
    return chosen[:n], chosen[n:], rejected[n:]


def open_preferences(
    train: Sequence[Choice],
    validation: Sequence[Choice],
    tokenizer: Any,
    model: Any,
    problems: Problems | None = None,
    name: str = "preferences",
) -> Dataset:
    """The data set of choices in memory. The tokenizer has a chat template.

    Raises ConfigError if no pair of a split fits the model.
    """
    problems = problems or Problems()
    length = context_length(model)
    splits = []
    for split_name, choices in (("training", train), ("validation", validation)):
        split = list(_pairs(choices, tokenizer, length, problems))
        if not split:
            raise ConfigError(
                f"data: {name}: no {split_name} pair fits the model's {length} tokens{problems}"
            )
        splits.append(split)
    first, second = ([texts for _, texts in split] for split in splits)
    check_ends(tokenizer, [text.tokens[-1] for pair in (*first, *second) for text in pair])
    questions = [
        question(tokenizer, choice.prompt, str(choice.chosen[-1]["content"]))
        for choice, _ in splits[1]
    ]

    def digest(of_tokenizer: str) -> str:
        content = hashlib.sha256(f"preferences {of_tokenizer} {length}".encode())
        for text in (text for pair in (*first, *second) for text in pair):
            content.update(text.tokens.tobytes() + text.is_answer.tobytes())
        return content.hexdigest()

    return Dataset(
        train=Rows(first, length),
        validation=Rows(second, length, questions),
        **digests(tokenizer, digest),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        description=f"{name}: {len(first):,} training and {len(second):,} validation pairs, "
        f"vocabulary {tokenizer.vocab_size:,}{problems}",
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """Pairs of texts; a batch is that of `objectives.preference`."""

    pairs: Sequence[tuple[Text, Text]]  # chosen, rejected
    length: int  # T
    questions: Sequence[Question] = ()
    __getitem__ = read_example

    def __len__(self) -> int:
        return len(self.pairs)

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The pairs at `indices`: tokens, labels and answers [B, 2, T], weights [B]."""
        shape = len(indices), 2, self.length
        batch: dict[str, np.ndarray] = {
            "tokens": np.zeros(shape, np.int32),
            "labels": np.zeros(shape, np.int32),
            "answers": np.zeros(shape, np.float32),
            "weights": np.ones(len(indices), np.float32),
        }
        for row, index in enumerate(indices):
            for side, text in enumerate(self.pairs[index]):
                n = len(text.tokens) - 1
                batch["tokens"][row, side, :n] = text.tokens[:-1]
                batch["labels"][row, side, :n] = text.tokens[1:]
                batch["answers"][row, side, :n] = text.is_answer[1:]
        return batch


def _pairs(
    choices: Sequence[Choice], tokenizer: Any, length: int, problems: Problems
) -> Iterator[tuple[Choice, tuple[Text, Text]]]:
    """(choice, its two texts) of each choice that fits; the others are problems."""
    for choice in choices:
        try:
            texts = [
                _text(tokenizer, choice.prompt, answer)
                for answer in (choice.chosen, choice.rejected)
            ]
        except ConfigError as error:
            problems.add(choice.place, "not a conversation of this template", f" ({error})")
            continue
        longest = max(len(text.tokens) for text in texts)
        if longest > length + 1:
            problems.add(choice.place, f"longer than the model's {length} tokens", f" ({longest})")
        elif not all(text.is_answer[1:].any() for text in texts):
            problems.add(choice.place, "an answer in which the assistant says nothing")
        else:
            yield choice, (texts[0], texts[1])


def _text(tokenizer: Any, prompt: Messages, answer: Messages) -> Text:
    """The tokens up to the end of the answer. Only turns of the answer are an answer."""
    encoded = with_ends(encode(tokenizer, [*prompt, *answer]), tokenizers.stop_tokens(tokenizer))
    before = sum(message["role"] == "assistant" for message in prompt)
    turns = encoded.turns[before:]
    is_answer = np.zeros(len(encoded.tokens), bool)
    for start, stop in turns:
        is_answer[start:stop] = True
    end = turns[-1][1] if turns else len(is_answer)
    return Text(encoded.tokens[:end], is_answer[:end])
