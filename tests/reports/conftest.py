"""What users of other projects reported, tried on this one: every test here names its reports with
`@pytest.mark.report`."""

import re

import pytest


def pytest_collection_modifyitems(items):
    """A test without a report, or with a report that cannot be looked up, is refused."""
    for item in items:
        if "tests/reports/" not in item.path.as_posix():
            continue
        reports = list(item.iter_markers("report"))
        if not reports:
            raise pytest.UsageError(f"{item.nodeid} names no report: @pytest.mark.report(...)")
        for report in reports:
            check(item.nodeid, report)


def check(name, report):
    """Refuses a marker that lacks a report's name, or the right behaviour."""
    unknown = set(report.kwargs) - {"right", "hit", "listed"}
    if unknown:
        raise pytest.UsageError(
            f"{name}: a report has right, hit and listed, not {sorted(unknown)}"
        )
    wrong = [one for one in report.args if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", one)]
    if wrong or not report.args:
        raise pytest.UsageError(f"{name}: reports are named owner/repository#number, not {wrong}")
    if not report.kwargs.get("right"):
        raise pytest.UsageError(f"{name}: right='...' says the right behaviour in one line")
