"""A public name that moves works for one minor version, and its warning names the new one."""

import dataclasses
import inspect
import subprocess
import sys
import types
import warnings

import pytest

import jaxformer
from jaxformer import masks, ops
from jaxformer.config import deprecation
from jaxformer.config.deprecation import Gone, Moved

MOVED = {
    "rotate": Moved("jaxformer.ops.rope", until="1.2"),
    "hidden": Moved("jaxformer.masks", until="1.2"),  # a module
}


@pytest.fixture
def old(monkeypatch):
    """A module from which two names moved in version 1.1, and that version."""
    module = types.ModuleType("old")
    module.__getattr__ = deprecation.moved_names("old", MOVED)
    monkeypatch.setitem(sys.modules, "old", module)
    monkeypatch.setattr(jaxformer, "__version__", "1.1.3")
    return module


def test_an_old_name_is_the_object_of_the_new_one_and_warns(old):
    says = r"^old\.rotate is now jaxformer\.ops\.rope; the old name ends with version 1\.2$"
    with pytest.warns(DeprecationWarning, match=says):
        assert old.rotate is ops.rope
    with pytest.warns(DeprecationWarning, match="jaxformer.masks"):
        from old import hidden
    assert hidden is masks


def test_a_script_sees_the_warning_at_its_own_line():
    """Python shows a DeprecationWarning only if the line that caused it is one of the script."""
    script = (
        "import types\n"
        "from jaxformer.config import deprecation\n"
        "old = types.ModuleType('old')\n"
        "moved = {'name': deprecation.Moved('jaxformer.errors.ConfigError', until='9.0')}\n"
        "old.__getattr__ = deprecation.moved_names('old', moved)\n"
        "print(old.name.__name__)\n"
        "gone = deprecation.without(chunk=deprecation.Gone('no chunks', until='9.0'))\n"
        "print(gone(len)('abc', chunk=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "ConfigError\n3\n"
    assert "<string>:6: DeprecationWarning: old.name is now jaxformer.errors" in done.stderr
    assert "<string>:8: DeprecationWarning: len: the argument chunk is ignored" in done.stderr


@pytest.mark.parametrize(("version", "works"), [("1.1.0", True), ("1.2.0", False), ("2.0", False)])
def test_the_door_closes_one_minor_version_later(version, works, old, monkeypatch):
    monkeypatch.setattr(jaxformer, "__version__", version)
    if works:
        with pytest.warns(DeprecationWarning):
            assert old.rotate is ops.rope
    else:
        with pytest.raises(AttributeError, match=r"ended with version 1\.2; use jaxformer\.ops"):
            _ = old.rotate


def test_names_that_did_not_move_are_no_concern_of_the_door(old):
    old.here = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert old.here == 1
        assert not hasattr(old, "never")


def total(values, start=0):
    return sum(values, start)


@dataclasses.dataclass(frozen=True)
class Sum:
    start: int = 0


ENDED = {"chunk": Gone("the sum has no chunks", until="1.2")}


@pytest.mark.parametrize("made", [total, Sum], ids=["function", "class"])
def test_an_argument_that_went_away_is_ignored_with_a_warning(made, old):
    copy = made if made is total else dataclasses.make_dataclass("Sum", Sum.__annotations__)
    now = deprecation.without(**ENDED)(copy)
    assert inspect.signature(now) == inspect.signature(copy)
    says = r"the argument chunk is ignored, and ends with version 1\.2: the sum has no chunks$"
    with pytest.warns(DeprecationWarning, match=says):
        found = now([1, 2], chunk=3, start=4) if made is total else now(start=4, chunk=3)
    assert (found if made is total else found.start) == (7 if made is total else 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now([1, 2]) if made is total else now(4)
    with pytest.raises(TypeError, match="chunks"):  # what never was an argument is refused as ever
        now(chunks=3)


def test_an_argument_that_went_away_is_refused_one_minor_version_later(old, monkeypatch):
    now = deprecation.without(**ENDED)(total)
    monkeypatch.setattr(jaxformer, "__version__", "1.2.0")
    with pytest.raises(TypeError, match=r"^total: the argument chunk ended with version 1\.2: the"):
        now([1, 2], chunk=3)
    assert now([1, 2]) == 3
