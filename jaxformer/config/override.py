"""Command line options: `--key.path=VALUE` sets a field of a config at any depth; help texts."""

import ast
import dataclasses
import functools
import inspect
import shutil
import textwrap
import tokenize
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxformer.config import code, expressions, moved
from jaxformer.config.describe import fields
from jaxformer.errors import ConfigError, did_you_mean

Config = TypeVar("Config")


def override(
    config: Config, args: Sequence[str], names: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """The config with options applied, such as `--model.d-model=64 --optimizer "Lion(b1=0.8)"`.

    Hyphen and underscore are equal, and the last of equal options wins. `names` has the names that
    an expression may call, by the first or last part of the option's path; those under `""` are for
    every option. Raises ConfigError for an unknown option, for a value of the wrong type, and for
    values that a config's `__post_init__` refuses.
    """
    options = {_option(path): (path, value, hint) for path, value, hint in walk(config)}
    set_to: dict[str, tuple[Any, str]] = {}
    # outer options first
    for option, typed, text in sorted(_split(args), key=lambda split: split[0].count(".")):
        option, text = moved.option_of(option, text)
        if option not in options:
            _check_parent(option, options)
            leaves = [name for name, (_, value, _) in options.items() if not fields(value)]
            raise ConfigError(
                f"{typed[: len(option)]}: no such option{did_you_mean(option, leaves)}"
            )
        path, _, hint = options[option]
        try:
            value = expressions.read(text, hint, _available(path, names or {}))
        except ConfigError as error:
            raise ConfigError(f"{typed}: {error}") from None
        set_to[path] = (value, typed)
        # from now on the fields of the new value can be set, and not those of the old one
        options = {
            name: entry for name, entry in options.items() if not name.startswith(f"{option}.")
        }
        options |= {_option(below): (below, *rest) for below, *rest in walk(value, f"{path}.")}
    return _rebuild(config, set_to)


def _check_parent(option: str, options: Mapping[str, tuple[str, Any, Any]]) -> None:
    """Raises ConfigError if the option's parent has no fields now: None, for example.

    The message says which option to give first.
    """
    parent = option.rpartition(".")[0]
    if parent in options and not fields(options[parent][1]):
        _, value, hint = options[parent]
        kinds = [
            kind.__name__ for kind in expressions.members_of(hint) if dataclasses.is_dataclass(kind)
        ]
        first = (
            f"{parent}={' or '.join(kinds) or 'NAME'}"
            f"({option.rpartition('.')[2].replace('-', '_')}=...)"
        )
        raise ConfigError(
            f"{option}: {parent} is {expressions.shown(value)}, which has no fields; give {first}"
        )


def _available(path: str, names: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The names that an expression for the field `path` may call, the user's own first."""
    parts = path.split(".")
    anywhere = names.get("", {})

    def in_library(value):
        return str(getattr(value, "__module__", "")).split(".")[0] == "jaxformer"

    users = {name: value for name, value in anywhere.items() if not in_library(value)}
    maps: list[Any] = [users, names.get(parts[-1], {}), names.get(parts[0], {}), anywhere]
    return ChainMap(*maps)  # no copy: a name of the zoo is loaded when it is looked up


def _option(path: str) -> str:
    return "--" + path.replace("_", "-")


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, type) of every field of a config and of its nested configs."""
    for name, value in fields(config).items():
        yield prefix + name, value, expressions.hints(type(config))[name]
        if not hasattr(value, "__describe__"):
            yield from walk(value, f"{prefix}{name}.")


def _split(args: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """(option with hyphens, text as typed, value or None) of every option.

    Forms: `--option=VALUE`, `--option VALUE` and `--option`.
    """
    options: list[tuple[str, str, str | None]] = []
    for word in args:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options.append((name.replace("_", "-"), word, value if equals else None))
        elif options and options[-1][2] is None:
            options[-1] = options[-1][0], f"{options[-1][1]} {word}", word
        else:
            raise ConfigError(f"{word}: expected an option; did you mean --{word.lstrip('-')}?")
    return options


def _rebuild(value: Any, set_to: Mapping[str, tuple[Any, str]], path: str = "") -> Any:
    if path in set_to:
        value = set_to[path][0]
    inside = path and path + "."
    below = [shown for name, (_, shown) in set_to.items() if name.startswith(inside)]
    if not below:
        return value
    children = {
        name: _rebuild(child, set_to, inside + name) for name, child in fields(value).items()
    }
    try:
        return dataclasses.replace(value, **children)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{' '.join(below)}: {error}") from error


def help_text(config: Any, usage: str) -> str:
    """The help text: every option with its type, its present value and its meaning."""
    width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 140))
    wrap = functools.partial(
        textwrap.wrap, width=width, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    lines = [*wrap(f"usage: {usage} [--option=value ...]"), ""]
    holders = {"": config}
    for path, value, hint in walk(config):
        holders[path] = value
        parent, _, name = path.rpartition(".")
        meaning = meanings(type(holders[parent])).get(name, "")
        if fields(value):
            form = f"{type(value).__name__}(...)"
            meaning = meaning or first_paragraph(type(value))
        else:
            form = f"{expressions.expected(hint)} = {expressions.shown(value)}"
        lines += wrap(f"{_option(path)}  {form}")
        lines += wrap(meaning, initial_indent=" " * 6)
    return "\n".join(lines) + "\n"


def first_paragraph(cls: type) -> str:
    """The first paragraph of a class's docstring on one line; "" for one that `dataclass` wrote."""
    text = cls.__doc__ or ""
    if text.startswith(f"{cls.__name__}("):
        return ""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


@functools.cache
def meanings(cls: type) -> dict[str, str]:
    """The meaning of each field of a config class: the comments directly above it and behind it."""
    meaning_of: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        node = code.syntax(base)
        if node is None:
            continue
        lines = code.text_of(base).splitlines(keepends=True)
        tokens = tokenize.generate_tokens(iter([*lines, ""]).__next__)
        comments = {
            each.start[0]: each.string.lstrip("# ").strip()
            for each in tokens
            if each.type == tokenize.COMMENT
        }
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                first = field.lineno
                while lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                texts = [
                    comments[line]
                    for line in range(first, (field.end_lineno or first) + 1)
                    if line in comments
                ]
                meaning_of[field.target.id] = " ".join(texts) or meaning_of.get(field.target.id, "")
    return meaning_of
