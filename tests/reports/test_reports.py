"""Pages and pictures of runs, and what looks into a model: odd texts, odd numbers, few and many of
them."""

import html
import html.parser
import io
import json
import logging
import math
import re
import shutil
import tracemalloc
import warnings

import numpy as np
import pytest
from etils import epath

from jaxformer.errors import ConfigError
from jaxformer.masks import causal
from jaxformer.models import ModelConfig
from jaxformer.runs.run_folder import RunFolder
from jaxformer.tools.analysis import diagram, figures, gallery, inspection, page, report

nan, inf = math.nan, math.inf
TEX = (
    "$$",
    "$x_$",
    "a$ b$",
    r"\$x$",
    "$\\frac{$",
    "100% $",
    "_run",
    "火 🙂",
    "a\x00\x07b",
    "\ud800",
)


def records(*losses):
    return [{"step": 10 * i, "loss": loss, "grad_norm": 1.0} for i, loss in enumerate(losses)]


def drawn(draw):
    """The picture's dots `[height, width, 3]`; a warning is an error, but for letters that the font
    does not have."""
    from matplotlib import image

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Glyph")
        return image.imread(io.BytesIO(figures.png(draw)))[..., :3]


@pytest.mark.thorough
@pytest.mark.parametrize("text", TEX)
@pytest.mark.report(
    "matplotlib/matplotlib#20266",
    right="a user's text is drawn as it is, wherever it reaches matplotlib: no formula, no error",
    hit="two dollar signs in a token, a run's name or a metric raised ParseException",
    listed="first 20",
)
def test_texts_are_drawn_as_they_are(text):
    config = ModelConfig(vocab_size=8, num_layers=1, d_model=8, num_heads=1, context_length=8)
    pictures = [
        lambda: figures.attention(np.full((1, 1, 3, 3), 1 / 3), [text, "b", text]),
        lambda: figures.losses({text: records(2.0, 1.0)}, 3.0),
        lambda: figures.losses({text: records(2.0, 1.0), "b": records(1.0, 2.0)}),
        lambda: figures.curves(
            {text: [{"step": 1, f"my {text}": 1.0}, {"step": 2, f"my {text}": 2.0}]}
        ),
        lambda: figures.lines({text: (range(3), range(3))}),
        lambda: figures.heat(np.ones((2, 2)), "x", "y", text),
        lambda: figures.masks({text: causal()}, 8),
        lambda: diagram.diagram(config, text),
    ]
    for draw in pictures:
        assert drawn(draw).size


@pytest.mark.report(
    "matplotlib/matplotlib#5200",
    "matplotlib/matplotlib#21295",
    right="every run is in the legend, also one whose name begins with an underscore",
    hit="such a run was drawn but left out of the legend",
)
def test_names_with_an_underscore_are_in_the_legend():
    figure = figures.losses({"_first-1": records(2.0, 1.0), "second-2": records(2.0, 1.5)})
    assert {"_first-1", "second-2"} <= {
        text.get_text() for text in figure.axes[0].get_legend().get_texts()
    }
    figure = figures.lines({"_a": (range(3), range(3)), "b": (range(3), range(3))})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["_a", "b"]


def ink(draw, color):
    """How many dots of the picture have nearly this colour."""
    from matplotlib.colors import to_rgb

    return int((np.abs(drawn(draw) - to_rgb(color)).max(axis=-1) < 0.1).sum())


@pytest.mark.report(
    "tensorflow/tensorflow#459",
    "tradingview/lightweight-charts#597",
    "PrimeIntellect-ai/prime-rl#3403",
    right="one point alone is seen, also between values that are no numbers",
    hit="a line through one point is invisible: the picture was empty",
)
def test_one_point_is_seen():
    for name in ("loss", "grad_norm"):
        for values in ([2.0], [nan, 2.0, nan], [1.0, nan, 2.0, inf, 3.0]):
            some = {"a": [{"step": i, name: value} for i, value in enumerate(values)]}
            figure = figures.losses(some) if name == "loss" else figures.curves(some)
            lines = [
                line
                for axes in figure.axes
                for line in axes.get_lines()
                if np.isfinite(line.get_ydata()).any()
            ]
            shown = [line for line in lines if line.get_marker() == "o"]
            assert shown and np.isfinite(shown[0].get_ydata()).sum() == np.isfinite(values).sum()
    assert ink(lambda: figures.losses({"a": records(2.0), "b": []}), figures.COLORS[0]) > 10


@pytest.mark.report(
    "wandb/wandb#2202",
    "lanpa/tensorboardX#668",
    right="values that are no finite numbers are marked; a gap alone is easily missed",
    hit="NaN and infinite losses left no trace, and the smoothed curve was lost around them",
)
def test_lost_values_are_marked():
    values = [2.0, nan, 1.5, inf, 1.2, None, *[1.0] * 40]
    for figure in (figures.losses({"a": records(*values)}), figures.curves({"a": [
        {"step": 10 * i, "grad_norm": value} for i, value in enumerate(values)]})):  # fmt: skip
        crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
        assert [list(line.get_xdata()) for line in crosses] == [[10, 30, 50]]
    smoothed = figures.smooth([1.0, nan, 3.0, *[2.0] * 37])
    assert np.isnan(smoothed[1]) and smoothed[0] == 1.0 and np.isfinite(smoothed[[0, 2, 3]]).all()


@pytest.mark.thorough
@pytest.mark.report(
    "matplotlib/matplotlib#11244",
    "matplotlib/matplotlib#5907",
    right="the record of a long run is drawn, in memory that grows with its length",
    hit="smoothing took n squared steps: 200,000 logged steps needed 10 GB and minutes",
)
def test_a_long_record_is_drawn():
    noise = np.random.default_rng(0).random(200_000)
    tracemalloc.start()
    smoothed = figures.smooth(noise.tolist())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 200 * noise.size  # some arrays of 8 bytes a value; n squared would be 40 GB
    for at in (0, 5, 100_000, 199_999):
        reach = min(at, 10_000)  # the curve begins where the values do
        assert smoothed[at] == pytest.approx(noise[at - reach : at + reach + 1].mean(), rel=1e-9)
    assert drawn(lambda: figures.lines({"a": (np.arange(200_000), noise)})).size


@pytest.mark.report(
    "tensorflow/tensorboard#449",
    "wandb/wandb#1112",
    right="each of many runs has a colour of its own",
    hit="the seventh run had the colour of the first",
)
def test_many_runs_have_many_colours():
    from matplotlib.colors import to_hex

    for count in (1, 6, 7, 20):
        figure = figures.losses({f"run {i}": records(2.0, 1.0 + i) for i in range(count)})
        assert len({to_hex(line.get_color()) for line in figure.axes[0].get_lines()}) == count


@pytest.fixture
def runs(tmp_path):
    """Folders of two runs: the second one has fields, a score and a text that the first one
    lacks."""
    configs = [
        {"name": "a", "steps": 9, "width": 1, "optimizer": {"type": "Adam", "rate": 0.1}},
        {
            "name": "a",
            "steps": 9,
            "width": 1,
            "optimizer": {"type": "Lion", "rate": 0.1},
            "ema": {"decay": 0.9},
        },
    ]
    folders = []
    for i, described in enumerate(configs):
        folder = RunFolder(epath.Path(tmp_path / f"a-0000000{i}"))
        folder.samples.mkdir(parents=True)
        folder.config.write_text(json.dumps(described))
        folder.environment.write_text("{}")
        folder.metrics.write_text("".join(json.dumps(one) + "\n" for one in records(2.0, 1.0)))
        folder.result.write_text(
            json.dumps(
                {"validation": {"loss": 1.0 + i, "tokens": 1e30, "note": "<b>x</b>", "none": None}}
            )
        )
        (folder.samples / "step-9.txt").write_text(
            "<script>alert(1)</script> & \x00 </pre>", encoding="utf-8"
        )
        folders.append(folder)
    return folders


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)


@pytest.mark.thorough
@pytest.mark.report(
    "epam/ai-dial-admin-frontend#3390",
    "kubeflow/pipelines#12536",
    right="what only one of two runs has is a difference, in whichever order they are given",
    hit="fields that the first run lacks were left out of 'What differs'",
)
def test_fields_of_one_run_alone_differ(runs):
    for folders in (runs, runs[::-1]):
        text = report.report(folders, [{}, {}], folders[0].path / "figures")
        table = text[text.index("What differs") :]
        table = table[: table.index("</table>")]
        assert (
            "ema.decay" in table
            and "optimizer" in table
            and "width" not in table
            and "None" not in table
        )


@pytest.mark.thorough
@pytest.mark.report(
    "mlflow/mlflow#48",
    "mlflow/mlflow#18",
    right=(
        "each column has the values of its own run, also of two runs of one name; one given "
        "twice is refused"
    ),
)
def test_each_run_has_its_own_scores(runs, tmp_path):
    text = report.report(runs, [{}, {}], runs[0].path / "figures")
    row = re.search(r"<tr><th>loss</th>(.*?)</tr>", text)
    assert row is not None and re.findall("<td>(.*?)</td>", row[1]) == ["1", "2"]
    copy = shutil.copytree(runs[0].path, tmp_path / "elsewhere" / runs[0].path.name)
    text = report.report([runs[0], RunFolder(epath.Path(copy))], [{}, {}], runs[0].path / "figures")
    assert f"<th>{html.escape(str(copy))}</th>" in text
    with pytest.raises(ConfigError, match="is given 2 times"):
        report.report([runs[0], runs[0]], [{}, {}], runs[0].path / "figures")


@pytest.mark.report(
    "huggingface/tokenizers#1937",
    right="markup in samples, scores, names and tokens is text on the page, never markup",
)
def test_markup_in_texts_is_text(runs):
    found = report.report(
        runs,
        [{"Costs in numbers": page.table(["<i>"], [{"<u>": "<b>"}])}, {}],
        runs[0].path / "figures",
    )
    tokens = ["<script>", "</td>", '" onload="x', "a<b<c", "&amp;"]
    T = len(tokens)
    looked = inspection.Inspection(
        tokens,
        np.array([nan, *[1.0] * (T - 1)]),
        [[(token, 0.5)] for token in tokens],
        [tokens],
        {},
        None,
    )
    looked = inspection.page_of(looked, "<b>run</b>")
    for text in (found, looked):
        assert not {"script", "b", "i", "u"} & Tags(text).tags
        assert "<script>alert" not in text and "&lt;script&gt;" in text
    assert "<b>x</b>" not in found and '" onload="' not in looked


@pytest.mark.report(
    "catapult-project/catapult#2793",
    right="numbers of any size, no numbers and texts are shown in a cell of a readable width",
    hit="1e300 was written with 400 digits and commas",
)
def test_numbers_of_any_size_fit_their_cells():
    values = {
        "big": 1e300,
        "count": 12_345_678,
        "nan": nan,
        "inf": -inf,
        "none": None,
        "flag": True,
        "text": "x",
        "small": 1e-300,
    }
    cells = dict(
        re.findall(r"<tr><th>(\w+)</th><td>(.*?)</td></tr>", page.table(["run"], [values]))
    )
    assert (
        max(map(len, cells.values())) <= 12
        and cells["count"] == "12,345,678"
        and cells["big"] == "1e+300"
    )
    assert (cells["nan"], cells["inf"], cells["flag"], cells["text"]) == (
        "nan",
        "-inf",
        "True",
        "x",
    )


@pytest.mark.thorough
@pytest.mark.report(
    "tensorflow/tensorboard#941",
    right="scores of heads without a finite number are drawn; infinite ones do not set the scale",
    hit=(
        "one infinite score made the scale of all others infinite, and warnings of NumPy were "
        "printed"
    ),
)
def test_heat_of_odd_numbers():
    for values in (
        [[nan, nan]],
        [[inf, -inf]],
        [[nan, 1.0]],
        [[inf, 2.0], [-3.0, nan]],
        [[0.0]],
        [[-1.0]],
    ):
        array = np.array(values)
        figure = figures.heat(array, "head", "layer", "entropy")
        most = float(np.abs(array[np.isfinite(array)]).max(initial=0)) or 1.0
        assert figure.axes[0].get_images()[0].get_clim()[1] == most
        assert drawn(lambda array=array: figures.heat(array, "head", "layer")).size


ODD = {
    "none": [],
    "nan": records(nan, nan),
    "mixed": records(2.0, nan, inf),
    "validation": [{"step": 1, "validation_loss": 2.0}],
    "negative": records(-1.0, -2.0),
    "zero": records(0.0, 0.0),
    "huge": records(1e30, 1e-30),
    "text": [*records(2.0), {"step": 9, "validation_bleu": "text"}],
    "null": records(None, 1.0),
    "only text": [{"step": 1, "note": "text"}],
}


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.report(
    "PaddlePaddle/VisualDL#984",
    right="every record is drawn or has no picture; none raises",
    listed="third 23",
)
def test_odd_records_are_drawn(name, caplog):
    with caplog.at_level(logging.WARNING, "jaxformer"):
        for draw in gallery.record_pictures({"a": ODD[name]}, None).values():
            assert drawn(draw).size
        for draw in gallery.record_pictures({"a": ODD[name], "b": []}, None).values():
            assert drawn(draw).size


@pytest.mark.thorough
@pytest.mark.report(
    "matplotlib/matplotlib#15062",
    right="letters that the font does not have end no picture, and are text on the page itself",
    hit="a warning on stderr for every letter of a Chinese text",
)
def test_letters_without_a_glyph():
    looked = inspection.Inspection(
        ["火", "山"],
        np.array([nan, 1.0]),
        [[("山", 0.5)]] * 2,
        [["山", "火"]],
        {"entropy": np.ones((1, 1))},
        np.ones((1, 1, 2, 2)) / 2,
    )
    text = inspection.page_of(looked, "run")
    assert "火" in text and text.count("data:image/png") >= 4
    assert causal().plot(4, 4) is not None
