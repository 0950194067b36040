"""The one error that a user sees as a line instead of a traceback."""

import contextlib
import dataclasses
import difflib
import math
import numbers
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args


class ConfigError(ValueError):
    """The user's input is at fault. The message is one line: what, where, what was expected, what to do."""

    def __init__(self, message: object):
        super().__init__(" ".join(line.strip() for line in str(message).splitlines()))


def check_positive(name: str, value: Any) -> None:
    """Raises ConfigError unless the value is a finite number above 0."""
    if not (_is_real(value) and 0 < value < math.inf):
        raise ConfigError(f"{name}={value}: expected a finite number above 0")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises ConfigError unless the value is a whole number of at least `least`."""
    if not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name}={value}: expected a whole number of at least {least}")


def check_numbers(prefix: str, config: Any, /, **least: int | float) -> None:
    """Raises ConfigError for a field below its `least`, for NaN and infinity, and for 1.5 where the class declares `int`.

    None passes where the class declares it. What is no number, such as a tuple, is not looked at.
    """
    declared = {field.name: field.type for field in dataclasses.fields(config)}
    for name, bound in least.items():
        value, kinds = getattr(config, name), (declared[name], *get_args(declared[name]))
        if value is None and type(None) in kinds:
            continue
        if isinstance(value, str | tuple | list):
            continue
        whole = float not in kinds
        right = isinstance(value, numbers.Integral) if whole else _is_real(value) and math.isfinite(value)
        if not (right and value >= bound):
            kind = "a whole number" if whole else "a finite number"
            least_words = f" of at least {bound:g}" if bound > -math.inf else ""
            none = ", or None" if type(None) in kinds else ""
            raise ConfigError(f"{prefix}{name}={value}: expected {kind}{least_words}{none}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """'; did you mean NAME?' or nothing: by the last part of a dotted name, by initials (lr, learning-rate), by letters."""
    choices = list(choices)

    def last(name):
        return name.split(".")[-1].strip("-'")

    same_end = [name for name in choices if last(name) == last(word)]
    if not same_end and len(last(word)) > 1:
        same_end = [name for name in choices if "".join(re.findall(r"(?:^|[-_])(\w)", last(name))) == last(word)]
    cutoff = 0.0 if same_end else 0.75 if "." in word else 0.6  # dotted names are alike by their shared beginning
    found = difflib.get_close_matches(word, same_end or choices, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]}?" if found else ""


@contextlib.contextmanager
def package_of(extra: str) -> Iterator[None]:
    """Around an import of a package that only an extra of ours installs. Raises ConfigError where it is missing."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"this needs the package {error.name}; pip install 'jaxformer[{extra}]'") from None
