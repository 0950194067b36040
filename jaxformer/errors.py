"""The one error that a user sees as a line instead of a traceback."""

import contextlib
import dataclasses
import difflib
import math
import numbers
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args


class ConfigError(ValueError):
    """The user's input is at fault.

    The message is one line: what was wrong, where, what was expected, what to do.
    """

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
    """Raises ConfigError for a field below its bound in `least`, and for NaN and infinity.

    A field that the class declares `int` must be whole: 1.5 is refused. None passes if the class
    declares it. A value that is no number, such as a tuple, is not checked.
    """
    declared = {field.name: field.type for field in dataclasses.fields(config)}
    for name, bound in least.items():
        value = getattr(config, name)
        kinds = declared[name], *get_args(declared[name])
        if value is None and type(None) in kinds:
            continue
        if isinstance(value, str | tuple | list):
            continue
        if float in kinds:
            expected = "a finite number"
            is_right = _is_real(value) and math.isfinite(value)
        else:
            expected = "a whole number"
            is_right = isinstance(value, numbers.Integral)
        if not (is_right and value >= bound):
            of_at_least = f" of at least {bound:g}" if bound > -math.inf else ""
            or_none = ", or None" if type(None) in kinds else ""
            raise ConfigError(f"{prefix}{name}={value}: expected {expected}{of_at_least}{or_none}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """'; did you mean NAME?', or '' if no choice is near.

    Names are compared by the last part of a dotted name, by initials (lr, learning-rate), and by
    letters.
    """
    choices = list(choices)

    def last(name):
        return name.split(".")[-1].strip("-'")

    def initials(name):
        return "".join(re.findall(r"(?:^|[-_])(\w)", name))

    candidates = [name for name in choices if last(name) == last(word)]
    if not candidates and len(last(word)) > 1:
        candidates = [name for name in choices if initials(last(name)) == last(word)]
    if candidates:
        cutoff = 0.0
    else:
        candidates = choices
        # dotted names share their beginning, so they must be nearer
        cutoff = 0.75 if "." in word else 0.6
    nearest = difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]}?" if nearest else ""


@contextlib.contextmanager
def package_of(extra: str) -> Iterator[None]:
    """A context for an import of a package that one of our extras installs.

    Raises ConfigError if the package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"this needs the package {error.name}; {install_command(extra)}"
        ) from None


def install_command(extra: str) -> str:
    """The command that installs what one of our extras names, for the Python that runs.

    The `pip` of a shell often belongs to another one, such as where `make` has made .venv.
    """
    python = sys.executable
    command = f"pip install 'jaxformer[{extra}]'"
    if not python or shutil.which("python") == python:
        return command
    with contextlib.suppress(ValueError):  # it is outside of the working directory
        python = str(Path(python).relative_to(Path.cwd()))
    return f"{shlex.quote(python)} -m {command}"
