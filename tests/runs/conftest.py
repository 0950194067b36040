"""A disk that is soon full, for all tests of what a run writes."""

import contextlib
import os
import shutil
import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def fill():
    """fill(folder) writes until nothing more fits, and returns the file to delete."""

    def write(folder):
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
            for size in (4096, 1):
                with contextlib.suppress(OSError):
                    while stream.write(bytes(size)):
                        pass
        return ballast

    return write
