"""The page of a run holds what its files say, asks no network, and opens in a browser without a
complaint."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from etils import epath
from PIL import Image

from jaxformer import cli
from jaxformer.models import PRESETS
from jaxformer.runs import loop
from jaxformer.tools.analysis import figures, gallery, report
from jaxformer.tools.analysis.report import run_report
from tests.tiny import furnish


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two runs."""
    folder = furnish(tmp_path_factory.mktemp("report"))
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for rate in ("1e-3", "1e-2"):
            options = [
                f"--optimizer.learning-rate={rate}",
                "--rms=('gradient',)",
                "--model.num-layers=2",
            ]
            assert cli.main(["train", "tiny", *options]) == 0
    return folder


def page(trained, *names):
    with contextlib.chdir(trained), contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main(["report", *names, "--out", "page.html"]) == 0
    assert "report: page.html" in said.getvalue()
    return (trained / "page.html").read_text()


class Strict(HTMLParser):
    """Every tag that opens is closed, in order; addresses of pictures and files."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def runs(trained):
    return sorted((trained / "runs").glob("tiny-*"))


@pytest.mark.thorough
def test_a_run_ends_with_its_page(trained):
    folder = runs(trained)[0]
    result = json.loads((folder / "result.json").read_text())
    with contextlib.chdir(trained):  # its text is there
        assert "report.html" in str(
            run_report(loop.Result(**result | {"folder": epath.Path(folder)}), [])
        )
    text = (folder / "report.html").read_text()
    found = Strict(text)
    assert not found.open and len(text) < 3e6
    assert all(address.startswith("data:") for address in found.addresses)
    assert f"{result['validation']['loss']:.4g}" in text and "After 6 of 6 training steps" in text
    assert [title for title in gallery.NOTES if f"<h2>{title}</h2>" in text] == list(gallery.NOTES)
    files = {
        title.lower().replace(" ", "-") for title in gallery.NOTES if title != "Costs in numbers"
    }
    assert {path.stem for path in (folder / "figures").glob("*.png")} == files
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


@pytest.mark.thorough
def test_a_page_is_refreshed_at_every_evaluation(tmp_path, monkeypatch):
    pages = []
    with contextlib.chdir(furnish(tmp_path)), contextlib.redirect_stdout(io.StringIO()):
        monkeypatch.setattr(
            report,
            "refresh",
            lambda folder: pages.append((write(folder), (folder.path / "report.html").read_text())),
        )
        write = lambda folder: report.write(folder.path / "report.html", [folder], [{}])
        assert cli.main(["train", "tiny"]) == 0
    ((_, text),) = pages  # the last evaluation is followed by the page of the end
    assert (
        "After 3 of 6 training steps" in text
        and "<h2>Loss</h2>" in text
        and "Architecture" not in text
    )


@pytest.mark.thorough
def test_a_page_that_fails_stops_no_run(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise OSError("the disk is full")

    with contextlib.chdir(furnish(tmp_path)), contextlib.redirect_stdout(io.StringIO()):
        monkeypatch.setattr(report, "refresh", broken)
        monkeypatch.setattr(report, "run_report", broken)
        assert cli.main(["train", "tiny", "--eval-every=1"]) == 0
    assert caplog.text.count("the disk is full") == 2  # once for each of the two
    assert (
        json.loads(next(tmp_path.glob("runs/tiny-*/result.json")).read_text())["validation"]["loss"]
        > 0
    )


@pytest.mark.thorough
def test_two_runs_side_by_side(trained, monkeypatch):
    monkeypatch.setattr(
        gallery,
        "run_pictures",
        lambda folder: gallery.model_pictures(PRESETS["vit_tiny"], folder.path.name),
    )
    names = [str(folder) for folder in runs(trained)]
    text = page(trained, *names)
    assert "What differs" in text and "optimizer.learning_rate" in text and not Strict(text).open
    for folder in runs(trained):
        assert (
            f"<th>{folder.name}</th>" in text
            and text.count(f"<figcaption>{folder.name}</figcaption>") == 5
        )
        assert (trained / "figures" / f"masks-{folder.name}.png").is_file()


@pytest.mark.thorough
def test_words_of_a_run_are_no_markup(trained, monkeypatch):
    monkeypatch.setattr(gallery, "run_pictures", lambda folder: {})
    folder = trained / "runs" / "copied"
    shutil.copytree(runs(trained)[0], folder)
    (folder / "samples" / "step-10.txt").write_text("<script>alert('&')</script>")
    text = page(trained, str(folder))
    shutil.rmtree(folder)
    assert "<script>" not in text and "&lt;script&gt;" in text and not Strict(text).open
    # the newest, though "step-6" comes later in the alphabet
    assert "step-10." in text and "step-6." not in text


@pytest.mark.thorough
def test_runs_of_one_name_are_told_apart_by_their_paths(trained, monkeypatch, capsys):
    monkeypatch.setattr(
        gallery,
        "run_pictures",
        lambda folder: {"Masks": lambda: figures.heat(np.eye(2), "key", "query")},
    )
    first = runs(trained)[0]
    other = trained / "copied" / first.name
    shutil.copytree(first, other)
    text = page(trained, str(first), str(other))
    for path in (first, other):
        assert f"<th>{path}</th>" in text and f"<figcaption>{path}</figcaption>" in text
        assert (trained / "figures" / f"masks-{str(path).replace('/', '-')}.png").is_file()
    with contextlib.chdir(trained):
        assert cli.main(["report", str(other), str(first), str(first)]) == 2
    said = capsys.readouterr().err
    assert (
        said.endswith(f"report: {first} is given 2 times; give each run once\n")
        and said.count("\n") == 1
    )
    shutil.rmtree(trained / "copied")


@pytest.mark.thorough
def test_a_run_without_records_has_a_page_without_curves(trained, monkeypatch, caplog):
    monkeypatch.setattr(gallery, "run_pictures", lambda folder: {})
    folder = trained / "runs" / "new"
    shutil.copytree(runs(trained)[0], folder)
    (folder / "metrics.jsonl").write_text("")
    text = page(trained, str(folder))
    shutil.rmtree(folder)
    assert "After 0 of 6 training steps" in text and "<img" not in text and not caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize(("lost", "drawn"), [("experiment.py", 2), ("checkpoints", 5)])
def test_a_run_that_has_lost_something_still_has_a_page(trained, lost, drawn, caplog):
    folder = trained / "runs" / "poor"
    shutil.copytree(runs(trained)[0], folder)
    path = folder / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = page(trained, str(folder))
    shutil.rmtree(folder)
    assert text.count("<img") == drawn and ("no copy of its experiment" in caplog.text) == (
        lost == "experiment.py"
    )


def screenshot(address, path, width, height, scheme):
    """What chromium draws of a page, as a NumPy array, and what it prints."""
    command = [
        shutil.which("chromium"),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    command += [
        "--hide-scrollbars",
        "--v=0",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--screenshot={path}",
    ]
    command += ["--allow-file-access-from-files", f"--window-size={width},{height}", address]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    # < 5 s on an idle machine
    assert "CONSOLE" not in done.stderr and time.monotonic() - begin < 15, done.stderr
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_opens_it_without_a_complaint(trained):
    page(trained, *map(str, runs(trained)))
    address, picture = f"file://{trained}/page.html", trained / "picture.png"
    assert (trained / "page.html").stat().st_size < 3e6
    dark, light = (screenshot(address, picture, 1100, 5000, scheme) for scheme in (0, 1))
    assert dark.mean() < 60 and light.mean() > 195  # of 255
    # a window of a browser is at least 500 wide: the phone is a frame. Nothing reaches beyond its
    # right edge
    frame = (
        f"<body style='margin:0'><iframe src='{address}' "
        f"style='width:390px;height:5000px;border:0'></iframe>"
    )
    (trained / "phone.html").write_text(frame)
    phone = screenshot(f"file://{trained}/phone.html", picture, 500, 5000, 1)
    assert (phone[:, 380:390] == 255).all() and phone[:, :380].min() < 60


@pytest.mark.thorough
def test_inspect_and_cost_from_the_command_line(trained, capsys):
    with contextlib.chdir(trained):
        assert (
            cli.main(
                [
                    "inspect",
                    str(runs(trained)[0]),
                    "--prompt",
                    "the <fox>",
                    "--html",
                    "inspected.html",
                ]
            )
            == 0
        )
        assert "mean loss" in capsys.readouterr().out
        text = (trained / "inspected.html").read_text()
        words = re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)  # a picture may spell anything
        assert (
            "Where the heads look" in text
            and "&lt;" in text
            and not Strict(text).open
            and "nan" not in words
        )
        assert cli.main(["draw", "vit_base", "--num-layers=3", "--out", "drawn/vit.html"]) == 0
        assert (
            "Architecture" in (trained / "drawn" / "vit.html").read_text()
            and (trained / "drawn" / "masks.png").is_file()
        )
        assert cli.main(["inspect", str(runs(trained)[0]), "--prompt", "t"]) == 2
        assert "at least two" in capsys.readouterr().err
        assert cli.main(["cost", "preset:gpt2_small", "--length", "2048"]) == 0
        said = capsys.readouterr().out
        assert "124,439,808" in said and "4,608 tokens" in said
