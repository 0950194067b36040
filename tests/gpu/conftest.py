"""Why a test failed is said at once: a call that is cut off prints no summary."""

import os


def pytest_runtest_logreport(report):
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()
        reasons = [line for line in lines if line.startswith(("E ", "tests/", "jaxformer/"))]
        print("\n".join(["", *(reasons[:40] or lines[-40:])]))
