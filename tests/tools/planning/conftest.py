"""What the tests of plans share."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def lines_of():
    """(program, arguments) -> what each line of JSON says that it prints, in a process of its own:
    it chooses JAX's devices."""

    def run(program: str, *arguments: str) -> list:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
