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


def test_a_line_stays_until_a_run_of_its_seed_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(_gallery, "BOOK", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "gallery.md"
    made_run(tmp_path / "first", "mae_digits", 0, 0.25)
    made_run(tmp_path / "first", "mae_digits", 2, 0.75)
    made_run(tmp_path / "first", "video_motion", 0, 0.5)
    _gallery.write(str(tmp_path / "first"))
    before = page.read_text()
    _gallery.write(str(tmp_path / "no runs"))
    assert page.read_text() == before
    made_run(tmp_path / "second", "mae_digits", 2, 0.875)
    made_run(tmp_path / "second", "mae_digits", 1, 0.375)
    _gallery.write(str(tmp_path / "second"))
    section = _gallery.sections_of(page)["mae_digits"]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| 0", "0.25"],
        ["| 1", "0.375"],
        ["| 2", "0.875"],
    ]
    # with another score the table has other columns, and its lines are those of the runs
    other = _gallery.APPLICATIONS["mae_digits"]._replace(scores=("linear_probe",))
    monkeypatch.setitem(_gallery.APPLICATIONS, "mae_digits", other)
    _gallery.write(str(tmp_path / "second"))
    assert "| 0 |" not in _gallery.sections_of(page)["mae_digits"]
    assert "| 0 | 0.5 |" in _gallery.sections_of(page)["video_motion"]


@pytest.mark.parametrize("name", _gallery.APPLICATIONS)
def test_each_application_has_an_experiment_and_says_what_it_is(name):
    text = _gallery.description(name)
    assert len(text) > 200 and "Expected:" not in text and "Command:" not in text
