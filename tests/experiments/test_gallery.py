"""The gallery page is made of the runs, a line each."""

import json

import pytest

from experiments import _gallery


def made_run(root, name, seed, score):
    """A folder with the files that the gallery reads."""
    folder = root / f"{name}-{seed:08x}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": name, "seed": seed}))
    (folder / "goodput.json").write_text(
        json.dumps({"starts": [{"step": 50.0, "start": 10.0}] * 2})
    )
    application = _gallery.APPLICATIONS[name]
    result = {"parameters": 1234567, "validation": dict.fromkeys(application.scores, score)}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / application.picture).write_bytes(f"picture of seed {seed}".encode())
    return folder


def test_each_run_is_a_line_and_the_newest_gives_the_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(_gallery, "BOOK", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    for seed in (0, 1):
        made_run(tmp_path / "runs", "mae_digits", seed, 0.25 + seed / 8)
    unfinished = made_run(tmp_path / "runs", "mae_digits", 2, 0.0)
    (unfinished / "result.json").unlink()
    missing = _gallery.write(str(tmp_path / "runs"))
    assert set(missing) == set(_gallery.APPLICATIONS) - {"mae_digits"}
    page = (tmp_path / "docs" / "gallery.md").read_text()
    count = len(_gallery.APPLICATIONS["mae_digits"].scores)
    for seed, score in ((0, "0.25"), (1, "0.375")):
        cells = [str(seed), *[score] * count, "1,234,567", "2.0"]
        assert f"| {' | '.join(cells)} |" in page
    assert "| 2 |" not in page
    assert "make train EXP=mae_digits" in page and "](pictures/mae_digits.png)" in page
    assert (tmp_path / "docs" / "pictures" / "mae_digits.png").read_text() == "picture of seed 1"


@pytest.mark.parametrize("name", _gallery.APPLICATIONS)
def test_each_application_has_an_experiment_and_says_what_it_is(name):
    text = _gallery.description(name)
    assert len(text) > 200 and "Expected:" not in text and "Command:" not in text
