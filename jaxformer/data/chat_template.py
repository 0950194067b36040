"""Conversations as text: chat templates, which are programs in the language of Jinja.

`ChatTemplate.render` gives the text of messages, and which characters of it the assistant says.
A message is {"role": "system", "user", "assistant" or "tool", "content": text}; other entries go
to the template as they are.

A template may come from a stranger. It runs in Jinja's sandbox, within a time and a length. What a
message says is text: the name of a control token in it stays a name.
"""

import copy
import datetime
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from etils import epath

from jaxformer import config
from jaxformer.data.tokenizer_package import within_time
from jaxformer.errors import ConfigError, package_of

Message = Mapping[str, Any]
Messages = Sequence[Message]

LONGEST = 200_000  # letters of a template; those of models that call tools have some 10,000
ENDLESS = "chat template: it needs more than {seconds:.0f} s; give one that you trust"
GROWTH = 1000  # a text may be this many times as long as its messages and its template

# Marks around what the assistant says, and within the names of control tokens that a message says.
# No text contains them: they are random.
BEGIN, END, WITHIN = (f"<{secrets.token_hex(16)}>" for _ in range(3))

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (  # the first user's turn begins with what the system says
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content | trim + '\\n\\n' %}"
    "{% elif message.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}"
    "{% generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<start_of_turn>' + message.role + '\\n' + ns.system }}"
    "{% set ns.system = '' %}{{ message.content | trim + '<end_of_turn>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PLAIN = (  # for a tokenizer whose only control token is the end of a text
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
BUILT_IN = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "plain": PLAIN}
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class Rendered(NamedTuple):
    """The text of a conversation."""

    # which make up the text; a name that crosses the end of a piece is no control token
    pieces: tuple[str, ...]
    # for each turn of the assistant: its first character, and the one behind its last
    spans: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the names of the tokens that it reads, such as `bos_token`."""

    source: str
    tokens: tuple[tuple[str, str], ...] = field(default=())  # (variable, text)

    def __post_init__(self):
        if len(self.source) > LONGEST:
            raise ConfigError(
                f"chat template: {len(self.source):,} letters; at most {LONGEST:,} are read"
            )
        _compiled(self.source)

    def render(
        self,
        messages: Messages,
        *,
        control_tokens: Collection[str] = (),
        ask: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> Rendered:
        """The text of the messages. With `ask`, the beginning of an answer follows.

        The spans are those of `{% generation %}`, else the differences between the texts of more
        and more messages. Names of `control_tokens` in a message stay text. Raises ConfigError
        for messages that the template refuses, and for a template that changes what it wrote
        before when a message follows.
        """
        check_messages(messages)
        rendered = self._read(messages, control_tokens, ask, tools)
        says = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if rendered.spans or not says:
            return rendered
        return rendered._replace(
            spans=tuple(
                self._difference(messages, i, control_tokens, tools, rendered.text) for i in says
            )
        )

    def _difference(
        self, messages: Messages, i: int, control_tokens: Collection[str], tools: Any, whole: str
    ) -> tuple[int, int]:
        """The characters that message i adds to the question before it."""
        question = self._read(messages[:i], control_tokens, True, tools).text if i else ""
        answered = self._read(messages[: i + 1], control_tokens, False, tools).text
        if not (answered.startswith(question) and whole.startswith(answered)):
            raise ConfigError(
                f"chat template: it writes earlier messages in another way once message {i + 1} "
                "follows, so what the assistant says cannot be told apart; put {% generation %} "
                "and {% endgeneration %} around it, or train on the last turns alone"
            )
        # a line end behind the token that ends a turn is no part of the turn
        return len(question), max(len(answered.rstrip()), len(question))

    def _read(
        self, messages: Messages, control_tokens: Collection[str], ask: bool, tools: Any
    ) -> Rendered:
        values = dict(self.tokens) | dict(
            messages=_hidden(copy.deepcopy(list(map(dict, messages))), control_tokens),
            tools=tools,
            documents=None,
            add_generation_prompt=ask,
        )
        text = _run(self.source, values)
        longest = GROWTH * (len(self.source) + len(json.dumps(values, default=str)))
        if len(text) > longest:
            raise ConfigError(f"chat template: {len(text):,} letters; at most {longest:,}")
        return _pieces(text)

    @property
    def state(self) -> dict[str, Any]:
        """The template as JSON."""
        return {"source": self.source, "tokens": dict(self.tokens)}

    @classmethod
    def of_state(cls, state: Any) -> "ChatTemplate":
        """The inverse of `state`. Raises ConfigError for other JSON."""
        match state:
            case {"source": str(source), "tokens": dict(tokens)}:
                return cls(source, tuple((str(name), str(text)) for name, text in tokens.items()))
        raise ConfigError("chat template: expected a source and its tokens")


def built_in(name: str, end_of_text: str = "") -> ChatTemplate:
    """The template `name` of `BUILT_IN`. `end_of_text` is the token that ends a text."""
    tokens = {"bos_token": {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}.get(name, "")}
    return ChatTemplate(BUILT_IN[name], tuple((tokens | {"eos_token": end_of_text}).items()))


def read_template(name: str, end_of_text: str = "") -> ChatTemplate:
    """The template of a name: one of `BUILT_IN`, a file of Jinja, or the folder of a model.

    A folder has chat_template.jinja, or the entry chat_template of tokenizer_config.json; where it
    has several, the one called "default" is read. Raises ConfigError if there is none.
    """
    if name in BUILT_IN:
        return built_in(name, end_of_text)
    path = epath.Path(name).expanduser()
    if path.is_file():
        return ChatTemplate(config.read_text(path), (("bos_token", ""), ("eos_token", end_of_text)))
    settings_file = path / "tokenizer_config.json"
    settings = config.read_json(settings_file, "") if settings_file.exists() else {}
    source = settings.get("chat_template") if isinstance(settings, dict) else None
    if (path / "chat_template.jinja").exists():
        source = config.read_text(path / "chat_template.jinja")
    if isinstance(source, list):
        named = {
            each.get("name"): each.get("template") for each in source if isinstance(each, dict)
        }
        source = named.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"template={name!r}: expected {', '.join(BUILT_IN)}, a file of Jinja, or a folder with "
            "chat_template.jinja or a chat_template in its tokenizer_config.json"
        )
    return ChatTemplate(source, tuple(_special_tokens(settings).items()))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that tokenizer_config.json names: texts, or objects with their text."""
    found = {}
    for name in SPECIAL:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def check_messages(messages: Any) -> None:
    """Raises ConfigError for what is no list of messages."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            "messages: expected a list of "
            f'{{"role": ..., "content": ...}} with at least one of them, not {_short(messages)}'
        )
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role:
            raise ConfigError(f"messages: number {number} has no role: {_short(message)}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ConfigError(f"messages: number {number} ({role}) has no content")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _hidden(value: Any, names: Collection[str]) -> Any:
    """The value, with a mark within each name of a control token that a text of it says."""
    if isinstance(value, str):
        for name in sorted(names, key=len, reverse=True):
            value = value.replace(name, f"{name[:1]}{WITHIN}{name[1:]}")
        return value
    if isinstance(value, Mapping):
        return {key: _hidden(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, names) for each in value]
    return value


def _pieces(text: str) -> Rendered:
    """The pieces and the spans that the marks of a text tell apart."""
    pieces = [""]
    spans: list[tuple[int, int]] = []
    begin = length = 0
    for part in re.split(f"({BEGIN}|{END}|{WITHIN})", text):
        if part == BEGIN:
            begin = length
        elif part == END:
            spans.append((begin, length))
        elif part == WITHIN:
            pieces.append("")
        else:
            pieces[-1] += part
            length += len(part)
    return Rendered(tuple(filter(None, pieces)), tuple(spans))


def _run(source: str, values: dict[str, Any]) -> str:
    """The text that a template makes of the values. ConfigError if it refuses them, or fails."""
    template = _compiled(source)
    letters = len(source) + sum(len(str(value)) for value in values.values())
    try:
        if (
            source in BUILT_IN.values()
        ):  # ours end, and a thread for each text is slow beside others
            return template.render(**values)
        return within_time(lambda: template.render(**values), letters, ENDLESS)
    except ConfigError:
        raise
    except Exception as error:  # any error of a program, or the refusal of the template
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"chat template: {type(error).__name__}: {words}") from None


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """The program of a template. Raises ConfigError if it is none."""
    with package_of("chat"):
        import jinja2
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line}: " if line else ""
        raise ConfigError(f"chat template: {place}{' '.join(str(error).split())}") from None


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The language of chat templates, as transformers documents it, in Jinja's sandbox."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %}: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
            return [begin.set_lineno(line), *body, end.set_lineno(line)]

    class Limited(sandbox.ImmutableSandboxedEnvironment):
        """The sandbox without products of texts, which would fill the memory."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if not all(isinstance(value, int | float) for value in (left, right)):
                raise sandbox.SecurityError(f"{operator} of texts or lists")
            if max(abs(left), abs(right)) > 1e9:
                raise sandbox.SecurityError(f"{operator} of numbers above 1e9")
            return super().call_binop(context, operator, left, right)

    def refuse(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment: Any = Limited(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    return environment


def ends_of_turns(template: ChatTemplate, control_tokens: Mapping[str, int]) -> list[int]:
    """The control tokens that end what the assistant says, where the template writes one."""
    answer = "an answer"
    talk = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        text = template.render(talk).text
    except ConfigError:  # it refuses this talk, and says so where it refuses others
        return []
    behind = text.rpartition(answer)[2].lstrip()
    names = (name for name in control_tokens if behind.startswith(name))
    return [control_tokens[name] for name in sorted(names, key=len)[-1:]]


def texts_of(messages: Iterable[Message]) -> list[str]:
    """What the messages say, for a tokenizer that learns from them."""
    return [message["content"] for message in messages if isinstance(message["content"], str)]
