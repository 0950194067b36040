"""The page of a run holds what its files say, asks no network, and opens in a browser without a complaint."""

import contextlib
import io
import json
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxformer import cli
from jaxformer.analysis import figures
from jaxformer.analysis.scaling import HOFFMANN
from tests.tiny import furnish


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two runs."""
    folder = furnish(tmp_path_factory.mktemp("report"))
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for rate in ("1e-3", "1e-2"):
            assert cli.main(["train", "tiny", f"--optimizer.learning-rate={rate}"]) == 0
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


def test_a_page_of_one_run(trained):
    folder = runs(trained)[0]
    text = page(trained, str(folder))
    found = Strict(text)
    assert not found.open and len(text) < 3e6
    assert all(address.startswith("data:") for address in found.addresses) and len(found.addresses) >= 5
    result = json.loads((folder / "result.json").read_text())
    assert f"{result['validation']['loss']:.4g}" in text and "Attention of the last layers" in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_two_runs_side_by_side(trained):
    names = [str(folder) for folder in runs(trained)]
    text = page(trained, *names)
    assert "What differs" in text and "optimizer.learning_rate" in text and not Strict(text).open
    for folder in runs(trained):
        assert f"<th>{folder.name}</th>" in text


def test_words_of_a_run_are_no_markup(trained):
    folder = trained / "runs" / "copied"
    shutil.copytree(runs(trained)[0], folder)
    (folder / "samples" / "step-10.txt").write_text("<script>alert('&')</script>")
    text = page(trained, str(folder))
    shutil.rmtree(folder)
    assert "<script>" not in text and "&lt;script&gt;" in text and not Strict(text).open
    assert "step-10)" in text and "step-6)" not in text  # the newest, though "step-6" comes later in the alphabet


@pytest.mark.parametrize(("lost", "drawn"), [("experiment.py", 1), ("checkpoints", 2)])
def test_a_run_that_has_lost_something_still_has_a_page(trained, lost, drawn, caplog):
    folder = trained / "runs" / "poor"
    shutil.copytree(runs(trained)[0], folder)
    path = folder / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = page(trained, str(folder))
    shutil.rmtree(folder)
    assert text.count("<img") == drawn and ("no copy of its experiment" in caplog.text) == (lost == "experiment.py")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_opens_it_without_a_complaint(trained):
    page(trained, *map(str, runs(trained)))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, f"file://{trained}/page.html"], capture_output=True, text=True, timeout=60)
    assert "Scores on the validation split" in done.stdout and "CONSOLE" not in done.stderr


def test_inspect_and_cost_from_the_command_line(trained, capsys):
    with contextlib.chdir(trained):
        assert cli.main(["inspect", str(runs(trained)[0]), "--prompt", "the fox"]) == 0
        assert "mean loss" in capsys.readouterr().out
        assert cli.main(["inspect", str(runs(trained)[0]), "--prompt", "t"]) == 2
        assert "at least two" in capsys.readouterr().err
        assert cli.main(["cost", "gpt2_small", "--length", "2048"]) == 0
        said = capsys.readouterr().out
        assert "124,439,808" in said and "4,608 tokens" in said


def test_pictures_are_drawn_for_both_grounds():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), size=(2, 3, 5))
    N, D = map(np.ravel, np.meshgrid([1e6, 1e7], [1e8, 1e9, 1e10]))
    for draw in (
        lambda: figures.attention(weights, list("abcde")),
        lambda: figures.heat(rng.normal(size=(4, 6)), "head", "layer"),
        lambda: figures.heat(rng.uniform(size=(4, 6)), "head", "layer"),
        lambda: figures.schedules({"half": lambda step: 0.5, "rising": lambda step: step / 10}, 10),
        lambda: figures.scaling_law(HOFFMANN, HOFFMANN.loss(N, D), N, D),
        lambda: figures.losses(
            {"a": [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0, "validation_loss": 1.5}], "b": []}, 3.0
        ),
    ):
        light, dark = figures.png(draw), figures.png(draw, dark=True)
        assert light.startswith(b"\x89PNG") and dark.startswith(b"\x89PNG") and light != dark
