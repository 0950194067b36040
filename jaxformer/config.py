"""Configs are frozen dataclasses. Here is what they need besides: load, override, help, JSON, diff, fingerprint.

A field is an int, float, str, bool, Literal, tuple, another config, a union of those or None, a function (in text:
`module:function`), or a value of a class with a static `__parse__(text)` whose `str` is that text, such as a mask. A
function may also be a config that can be called; `module:Class` is then one with its defaults.
Nothing here imports JAX, so a mistake is answered at once. Whatever a user can get wrong raises `ConfigError`.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxformer.errors import ConfigError

Config = TypeVar("Config")


def load(name_or_path: str) -> Any:
    """The `experiment` of a file: `experiments/NAME.py`, here or beside the package, or a path that ends in `.py`.

    Raises ConfigError for a file that is missing, fails to run (with its line) or defines no `experiment`.
    """
    path = _find(str(name_or_path))
    name = f"experiment_{path.stem}"
    if path.parent.name == "experiments":  # the importable name, so that `module:function` leads back from anywhere
        name = f"experiments.{path.stem}"
        if str(path.parent.parent) not in sys.path:
            sys.path.append(str(path.parent.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # it is a .py file
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f"{path}:{lines[-1]}" if lines else path
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if not _is_config(getattr(module, "experiment", None)):
        raise ConfigError(f"{path}: defines no `experiment`; end it with `experiment = Experiment(...)`")
    return module.experiment


def _find(name: str) -> Path:
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise ConfigError(f"no file {name}{_nearest(path.name, [file.name for file in path.parent.glob('*.py')])}")
        return path
    folders = [Path("experiments").resolve(), Path(__file__).resolve().parents[1] / "experiments"]
    for folder in folders:
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
    known = [repr(path.stem) for folder in folders for path in folder.glob("[!_]*.py")]
    raise ConfigError(f"no experiment {name!r} in experiments/{_nearest(repr(name), known)}")


def _nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?' or nothing. A dotted name with the same last part is near however far the rest."""
    known = list(known)
    same_end = [name for name in known if name.split(".")[-1].strip("-") == word.split(".")[-1].strip("-")]
    cutoff = 0.0 if same_end else 0.75 if "." in word else 0.6  # dotted names are alike by their shared beginning
    found = difflib.get_close_matches(word, same_end or known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]}?" if found else ""


# What a config consists of


def _is_config_class(cls: Any) -> bool:
    return isinstance(cls, type) and dataclasses.is_dataclass(cls) and not hasattr(cls, "__parse__")


def _is_config(value: Any) -> bool:
    return _is_config_class(type(value))


_hints = functools.cache(typing.get_type_hints)


def _children(value: Any) -> list[tuple[str, Any, Any]]:
    """(name, value, type) of each field of a config; nothing for anything else."""
    fields = dataclasses.fields(value) if _is_config(value) else ()
    return [(field.name, getattr(value, field.name), _hints(type(value))[field.name]) for field in fields if field.init]


def _walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, value, hint in _children(config):
        yield prefix + name, value, hint
        yield from _walk(value, f"{prefix}{name}.")


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (typing.Union, types.UnionType)


def _is_function(hint: Any) -> bool:
    return Callable in (hint, get_origin(hint))


def _may_be_function(hint: Any) -> bool:
    return any(map(_is_function, get_args(hint) if _is_union(hint) else (hint,)))


def _is_text(hint: Any) -> bool:
    return _is_function(hint) or hasattr(hint, "__parse__")


def _expected(hint: Any) -> str:
    """A type in the words of an error message."""
    members = get_args(hint)
    if _is_union(hint):
        return " or ".join(map(_expected, members))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, members))}"
    if get_origin(hint) is tuple:
        return f"any number of {_expected(members[0])}" if members[-1] is ... else " ".join(map(_expected, members))
    if hint is types.NoneType:
        return "None"
    return "module:function" if _is_function(hint) else getattr(hint, "__name__", str(hint))


def _from_text(text: Any, hint: Any) -> Any:
    """A function by name, or a `__parse__`d value. Raises ConfigError; the caller adds where."""
    if not isinstance(text, str):
        raise ConfigError(f"expected {_expected(hint)}, got {text!r}")
    if not _is_function(hint):
        try:
            return hint.__parse__(text)
        except ValueError as error:
            raise ConfigError(error) from error
    value = _named(text)
    if not _is_config_class(value):
        return value
    missing = [name for name, default in _defaults(value).items() if default is MISSING]
    if missing:
        raise ConfigError(f"{text} has no default for {', '.join(missing)}; choose it in the experiment file")
    return value()


def _named(text: str) -> Any:
    """The function `module:function`, or the class of configs that can be called. Raises ConfigError."""
    module, _, name = text.partition(":")
    if not (module and name):
        raise ConfigError(f"expected module:function, got {text!r}")
    try:
        value: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(f"{text}: {type(error).__name__}: {error}") from error
    cls: type = value if _is_config_class(value) else type(value)
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise ConfigError(f"{text} is not a function")
    return value


def _defaults(cls: type) -> dict[str, Any]:
    """The default of each field of a config class, MISSING where it has none."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
        if field.init
    }


def _to_text(value: Any, hint: Any) -> str:
    """Raises ConfigError for what could not be read back: a lambda, a local function, a partial, a mask of arrays."""
    text, advice = str(value), ""
    if _is_function(hint):
        named = type(value) if _is_config(value) else value
        text = f"{getattr(named, '__module__', None)}:{getattr(named, '__qualname__', None)}"
        advice = "; define it with class or def at the top level of a module"
    try:
        _named(text) if _is_function(hint) else _from_text(text, hint)
    except ConfigError as error:
        raise ConfigError(f"{value} has no text form that can be read back ({error}){advice}") from error
    return text


# The command line


def override(config: Config, args: Sequence[str]) -> Config:
    """The config with options applied: `--model.d-model=64`, `--optimizer.betas 0.9 0.98`, `--model.no-tie-embeddings`.

    Hyphen and underscore are one, a bool takes True or False, the last of equal options wins; a union keeps the member
    that the experiment file chose. Raises ConfigError for an unknown option, a value of the wrong type, and whatever a
    config's `__post_init__` refuses.
    """
    option_of = lambda name: "--" + name.replace("_", "-")
    known = {option_of(name): (name, value, hint) for name, value, hint in _walk(config)}
    changes = {}
    for option, tokens, values in sorted(_split(args), key=lambda split: split[0].count(".")):  # the outer ones first
        positive = re.sub(r"(^--|\.)no-(?=[^.]*$)", r"\1", option)
        if option not in known and not values and known.get(positive, (None,))[-1] is bool:
            option, values = positive, ["False"]
        if option not in known:
            fields = [option for option, (_, value, _) in known.items() if not _is_config(value)]
            raise ConfigError(f"{tokens[0].partition('=')[0]}: no such option{_nearest(option, fields)}")
        name, value, hint = known[option]
        if (_is_config(value) and not _may_be_function(hint)) or any(map(_is_config_class, get_args(hint))):
            raise ConfigError(f"{option}: chosen in the experiment file; edit it there")
        value = _parse(values, hint, " ".join(tokens))
        changes[name] = (value, " ".join(tokens))
        if _may_be_function(hint):  # its own fields may be set too, further in
            known = {o: known[o] for o in known if not o.startswith(f"{option}.")}
            known |= {option_of(at): (at, *rest) for at, *rest in _walk(value, f"{name}.")}
    return _rebuild(config, changes)


def _split(args: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """(option with hyphens, the tokens as typed, the values) of every option."""
    options = []
    for token in args:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            options.append((name.replace("_", "-"), [token], [value] if equals else []))
        elif options:
            options[-1][1].append(token)
            options[-1][2].append(token)
        else:
            raise ConfigError(f"{token}: expected an option; did you mean --{token.lstrip('-')}?")
    return options


def _parse(values: list[str], hint: Any, shown: str) -> Any:
    """One value of type `hint`, read by tyro. Where tyro would print a panel and exit, ConfigError."""
    import tyro

    if hint is bool:
        values = [value.capitalize() for value in values] or ["True"]
    arguments = [f"--value={values[0]}", *values[1:]] if values else ["--value"]
    single, problems = dataclasses.make_dataclass("Option", [("value", hint)]), []
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            flags, registry = (tyro.conf.FlagConversionOff,), _tyro_registry(problems)
            return tyro.cli(single, args=arguments, config=flags, registry=registry, add_help=False).value
    except SystemExit:
        raise ConfigError(f"{shown}: {problems[-1] if problems else f'expected {_expected(hint)}'}") from None


def _rebuild(value: Any, changes: dict[str, tuple[Any, str]], path: str = "") -> Any:
    if path in changes:
        value = changes[path][0]
    inside = path and path + "."
    below = [shown for name, (_, shown) in changes.items() if name.startswith(inside)]
    if not below:
        return value
    children = {name: _rebuild(child, changes, inside + name) for name, child, _ in _children(value)}
    try:
        return dataclasses.replace(value, **children)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{' '.join(below)}: {error}") from error


def help_text(config: Any, prog: str = "python -m jaxformer train EXPERIMENT") -> str:
    """What can be set on the command line, with types and present values, as tyro prints it for `--help`."""
    import tyro

    text, flags = io.StringIO(), (tyro.conf.AvoidSubcommands,)
    config = _narrowed(config)
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(type(config), default=config, args=["--help"], prog=prog, config=flags, registry=_tyro_registry([]))
    return text.getvalue()


def _narrowed(config: Any) -> Any:
    """The config in a subclass that names the class of each function which is a config, so that tyro lists its fields."""
    values, narrow = {name: value for name, value, _ in _children(config)}, {}
    for name, value, hint in _children(config):
        if _is_config(value):
            values[name] = _narrowed(value)
            if _may_be_function(hint) or type(values[name]) is not type(value):
                narrow[name] = values[name]
    if not narrow:
        return config
    cls = type(config)
    has_default = [name for name in narrow if _defaults(cls)[name] is not MISSING]
    names = {"__annotations__": {name: type(value) for name, value in narrow.items()}, "__doc__": cls.__doc__}
    names |= {name: narrow[name] for name in has_default}
    subclass: Any = type(cls.__name__, (cls,), names)
    return dataclasses.dataclass(frozen=cls.__dataclass_params__.frozen)(subclass)(**values)


def _tyro_registry(problems: list[ConfigError]):
    """Rules for text forms and for integers written 1e4. What a text form's parser said goes into `problems`."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    def read(text: str, hint: Any) -> Any:
        if hint is int:
            number = float(text) if "e" in text else int(text)  # 1e4 is meant as an integer, 1.0 is not
            if number % 1 == 0:
                return int(number)
            raise ValueError(text)
        try:
            return _from_text(text, hint)
        except ConfigError as error:
            problems.append(error)
            raise

    @registry.primitive_rule
    def rule(info):
        hint = info.type
        if hint is not int and not _is_text(hint):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=_expected(hint).upper(),
            instance_from_str=lambda args: read(args[0], hint),
            is_instance=callable if _is_function(hint) else lambda value: isinstance(value, hint),
            str_from_instance=lambda value: [str(value) if hint is int else _to_text(value, hint)],
        )

    return registry


# JSON


def to_dict(config: Any) -> dict[str, Any]:
    """The config as JSON has it: lists for tuples, text for functions and masks, "type" for a union's chosen class."""
    return _converter().unstructure(config)


def from_dict(cls: type[Config], data: Any) -> Config:
    """The config that `to_dict` wrote, defaults for absent fields. Raises ConfigError with the path of the mistake."""
    if not isinstance(data, dict):
        raise ConfigError(f"expected {cls.__name__}, got {data!r}")
    try:
        return _converter().structure(data, cls)
    except Exception as error:
        from cattrs import transform_error

        mistakes = [line.rpartition(" @ ") for line in transform_error(error, "", _mistake)]
        words, _, path = min(mistakes, key=lambda mistake: "no such key" not in mistake[0])  # it explains the others
        path = path.strip(".")
        raise ConfigError(words if not path or words.startswith(path + ".") else f"{path}: {words}") from error


def _mistake(error: BaseException, hint: Any) -> str:
    from cattrs import ForbiddenExtraKeysError

    if isinstance(error, ForbiddenExtraKeysError):
        key = min(error.extra_fields)
        return f"no such key {key!r}{_nearest(key, _hints(error.cl))}"
    if isinstance(error, ConfigError) or hint is None:  # in words already: a text form's, or from a __post_init__
        return str(error)
    return f"{'missing; ' if isinstance(error, KeyError) else ''}expected {_expected(hint)}"


def dumps(config: Any) -> str:
    """`to_dict` as text."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def loads(cls: type[Config], text: str) -> Config:
    """The config that `dumps` wrote. Raises ConfigError."""
    try:
        return from_dict(cls, json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error


@functools.cache
def _converter():
    from cattrs import Converter

    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})

    def structure_scalar(data: Any, hint: type):
        if type(data) is hint or (hint is float and type(data) is int):  # no int("3"), no bool("False"), no int(1.5)
            return hint(data)
        raise ConfigError(f"expected {hint.__name__}, got {data!r}")

    # cattrs has tagged unions of its own, but not with None or a number among the members.
    def structure_union(data: Any, union: Any):
        classes = {member.__name__: member for member in get_args(union) if _is_config_class(member)}
        if isinstance(data, dict) and (classes or _may_be_function(union)):
            rest = dict(data)
            if (name := rest.pop("type", None)) in classes:
                return converter.structure(rest, classes[name])
            if _may_be_function(union):
                return structure_text(data, Callable)
            raise ConfigError(f"no class {name!r} among {', '.join(classes)}{_nearest(str(name), classes)}")
        if data is None and types.NoneType in get_args(union):
            return None
        for member in get_args(union):
            if member not in (types.NoneType, *classes.values()):
                with contextlib.suppress(Exception):
                    return converter.structure(data, member)
        raise ConfigError(f"expected {_expected(union)}, got {data!r}")

    def unstructure_union(value: Any, union: Any):
        members = get_args(union)
        if _is_config(value) and (type(value) in members or not _may_be_function(union)):
            return {"type": type(value).__name__, **converter.unstructure(value)}
        if type(value) is int and float in members and int not in members:
            return float(value)
        if isinstance(value, tuple):
            whole = [member for member in members if get_origin(member) is tuple]
            return converter.unstructure(value, unstructure_as=whole[0])
        if callable(value) and any(map(_is_function, members)):
            return unstructure_text(value, Callable)
        return converter.unstructure(value)

    def structure_text(data: Any, hint: Any):
        if not (_is_function(hint) and isinstance(data, dict) and isinstance(data.get("type"), str)):
            return _from_text(data, hint)
        rest = dict(data)
        cls = _named(rest.pop("type"))
        if not _is_config_class(cls):
            raise ConfigError(f"{data['type']} is a function, which has no fields")
        return converter.structure(rest, cls)

    def unstructure_text(value: Any, hint: Any):
        text = _to_text(value, hint)
        return {"type": text, **converter.unstructure(value)} if _is_config(value) else text

    for scalar in (int, float, str, bool):
        converter.register_structure_hook(scalar, structure_scalar)
    converter.register_unstructure_hook(float, float)
    converter.register_structure_hook_func(_is_union, structure_union)
    converter.register_structure_hook_func(_is_text, structure_text)
    converter.register_unstructure_hook_factory(_is_union, lambda union: lambda value: unstructure_union(value, union))
    converter.register_unstructure_hook_factory(_is_text, lambda hint: lambda value: unstructure_text(value, hint))
    return converter


# Comparison


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """What changed, by dotted path: `{"optimizer.learning_rate": (old, new)}`.

    A config stands as the name of its class: another union member shows as `{"optimizer": ("Adam", "AdamW")}` and in
    its fields, with None where one side has no such field.
    """
    before, after = (
        {name: type(value).__name__ if _is_config(value) else value for name, value, _ in _walk(config)}
        for config in (old, new)
    )
    pairs = {name: (before.get(name), after.get(name)) for name in before | after}
    return {name: (a, b) for name, (a, b) in pairs.items() if a is not b and a != b}


def fingerprint(config: Any) -> str:
    """Eight hex digits over what differs from the defaults: a field added with a default changes no old fingerprint."""
    text = json.dumps(_difference(config, MISSING), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _difference(config: Any, default: Any) -> dict[str, Any]:
    """JSON of what `config` does not share with `default`, or with its class's defaults if that is of another class."""
    same = type(default) is type(config)
    out: dict[str, Any] = {} if same else {"type": type(config).__name__}
    usual = vars(default) if same else _defaults(type(config))

    def plain(value: Any, hint: Any) -> Any:
        if isinstance(value, tuple) and any(map(_is_config, value)):
            return [_difference(member, MISSING) for member in value]
        return _converter().unstructure(value, hint)

    for name, value, hint in _children(config):
        part = _difference(value, usual[name]) if _is_config(value) else plain(value, hint)
        if _is_config(value) and "type" in part and _may_be_function(hint) and type(value) not in get_args(hint):
            part["type"] = _to_text(value, Callable)  # two modules may have a class of one name
        if part if _is_config(value) else usual[name] is MISSING or part != plain(usual[name], hint):
            out[name] = part
    return out
