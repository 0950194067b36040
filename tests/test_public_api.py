"""The public interface changes on purpose alone."""

import difflib

from tests.public_api import KEPT, arguments, lines


def test_the_public_names_are_those_that_were_written_down():
    kept = KEPT.read_text(encoding="utf-8").splitlines()
    changed = [
        line
        for line in difflib.unified_diff(kept, lines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changed, (
        "the public interface changed; if on purpose: python -m tests.public_api, and a line in "
        "docs/changelog.md that names the new form of an old one:\n" + "\n".join(changed)
    )


def test_arguments_are_shown_as_they_are_called():
    def function(a, b=1, *rest, c, d=2, **more): ...

    assert arguments(function) == "(a, b=..., *rest, c, d=..., **more)"
    assert arguments(lambda a, *, b: a) == "(a, *, b)"
