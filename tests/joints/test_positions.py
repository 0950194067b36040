"""Positions of one's own at queries and keys: the page docs/your-own-positions.md."""

import pytest

from tests.joints.harness import (
    answer,
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    assert_short,
    read_page,
)

PAGE = read_page("your-own-positions")


def test_the_page_is_short():
    assert_short(PAGE)


@pytest.mark.thorough
def test_the_page_survives_a_kill_and_runs_on_eight_devices(tmp_path, capsys):
    folder = assert_resumes_to_the_same_bits(PAGE, tmp_path)
    assert_same_on_eight_devices(PAGE, tmp_path, whole=folder)
    assert answer(folder, "fourier", "def ", capsys, "--tokens=4").strip()
