"""A public name that moves works for one minor version, and its warning names the new one."""

import subprocess
import sys
import types
import warnings

import pytest

import jaxformer
from jaxformer import masks, ops
from jaxformer.config import deprecation
from jaxformer.config.deprecation import Moved

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
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "ConfigError\n"
    assert "<string>:6: DeprecationWarning: old.name is now jaxformer.errors" in done.stderr


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
