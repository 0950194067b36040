"""One HTML page of a run, or of several side by side: no network, light and dark, readable on a phone."""

import base64
import html
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxformer import config
from jaxformer.analysis import figures
from jaxformer.analysis.attention_maps import WEIGHTS, has_weights
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig, apply
from jaxformer.training import loop
from jaxformer.training.metrics import read_records
from jaxformer.training.objectives import INPUTS
from jaxformer.training.run import Run, open_run
from jaxformer.training.run_folder import RunFolder

log = logging.getLogger("jaxformer")
SHOWN = 32  # tokens of an example whose attention is drawn

STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --ground: #ffffff; --text: #1f2328; --quiet: #59636e; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --ground: #0d1117; --text: #e6edf3; --quiet: #9198a1; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); }
body { max-width: 62rem; margin: auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; border-bottom: 1px solid var(--line); margin-top: 2rem; }
p.note { color: var(--quiet); } img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
td, th { border: 1px solid var(--line); padding: .2rem .6rem; text-align: left; overflow-wrap: anywhere; }
summary { font-size: 1.15rem; font-weight: bold; margin-top: 2rem; cursor: pointer; }
pre { border: 1px solid var(--line); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
"""


Pictures = dict[str, Callable[[], Any]]  # by title


def pictures(folder: RunFolder) -> Pictures:
    """The learning rate of a run, and where its heads look in an example. What cannot be opened is not drawn, and says why."""
    try:
        run = open_run(folder.path)
        rate = {"Learning rate": lambda: figures.schedules({folder.path.name: run.recipe.schedule}, run.experiment.steps)}
        return rate | _attention(run)
    except ConfigError as error:
        log.warning("report: not all pictures: %s", error)
        return {}


def _attention(run: Run) -> Pictures:
    """The maps of the first example of the validation split, where the model keeps any."""
    model = run.experiment.model
    if not isinstance(model, ModelConfig) or not run.folder.checkpoints.is_dir():
        return {}
    example = batching.open_dataset(run.experiment.data, model).validation[0]
    if "tokens" not in example:
        return {}
    tokens = jnp.asarray(example["tokens"])[:SHOWN]
    options = {name: jnp.asarray(example[name])[None, :SHOWN] for name in INPUTS if name in example}
    with run.on_mesh():
        if not has_weights(model, run.params, tokens[None], **options):
            return {}
        output = apply(model, run.params, tokens[None], intermediates=(WEIGHTS,), **options)
        weights = np.asarray(output.intermediates[WEIGHTS])[-4:, 0, :4]
    words = [run.tokenizer.decode([int(token)]) if run.tokenizer else str(token) for token in tokens]
    draw = lambda: figures.attention(weights, words, first_layer=model.num_layers - len(weights))
    return {"Attention of the last layers": draw}


def report(folders: Sequence[RunFolder], drawn: Sequence[Pictures]) -> str:
    """The page: curves, scores, what differs, the last sample, the pictures of each run, configs, environments."""
    descriptions = [folder.description() for folder in folders]
    names = [folder.path.name for folder in folders]
    parts = [
        picture("Losses", lambda: figures.losses({n: read_records(f.metrics) for n, f in zip(names, folders, strict=True)}))
    ]
    scores = [last_scores(folder) for folder in folders]
    parts.append(table("Scores on the validation split", names, scores, "A run that was never scored has none yet."))
    if len(folders) > 1:
        flat = [config.flat(description) for description in descriptions]
        differing = [name for name in flat[0] if len({str(one.get(name)) for one in flat}) > 1]
        parts.append(table("What differs", names, [{name: one.get(name) for name in differing} for one in flat]))
    for name, folder in zip(names, folders, strict=True):
        samples = list(folder.samples.glob("step-*.txt")) if folder.samples.is_dir() else []
        if samples:
            newest = max(samples, key=lambda path: int(path.stem.removeprefix("step-")))
            parts.append(text(f"A sample ({name}, {newest.stem})", newest.read_text()))
    for name, some in zip(names, drawn, strict=True):
        parts += [picture(f"{title} ({name})", draw) for title, draw in some.items()]
    for name, folder in zip(names, folders, strict=True):
        parts.append(folded(f"Config ({name})", folder.config.read_text()))
        parts.append(folded(f"Trained on ({name})", folder.environment.read_text()))
    return page(" and ".join(names), parts)


def last_scores(folder: RunFolder) -> dict[str, Any]:
    """Those of the end, or of the last evaluation so far."""
    if folder.result.is_file():
        return config.read_json(folder.result, validation=dict)["validation"]
    scored = [record for record in read_records(folder.metrics) if "validation_loss" in record]
    return {name.removeprefix("validation_"): value for name, value in scored[-1].items()} if scored else {}


def run_report(result: loop.Result, records: Sequence[dict]) -> str:
    """Writes the page of a run that ends; returns a line to print. `report RUN` adds the pictures that take time."""
    folder = RunFolder(epath.Path(result.folder))
    return f"report: {write(folder.path / 'report.html', [folder], [{}])}"


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page of sections."""
    title, icon = html.escape(title), '<link rel="icon" href="data:,">'  # without it a browser asks a server for one
    view = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{view}{icon}<style>{STYLE}</style><title>{title}</title></head>"
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>\n'


def picture(title: str, draw: Callable[[], Any]) -> str:
    """A section with a picture, drawn for light and for dark pages."""
    light, dark = (base64.b64encode(figures.png(draw, dark)).decode() for dark in (False, True))
    source = f'<source srcset="data:image/png;base64,{dark}" media="(prefers-color-scheme: dark)">'
    image = f'<img src="data:image/png;base64,{light}" alt="{html.escape(title)}">'
    return f"<h2>{html.escape(title)}</h2><picture>{source}{image}</picture>"


def text(title: str, words: str) -> str:
    """A section of text as it is."""
    return f"<h2>{html.escape(title)}</h2><pre>{html.escape(words)}</pre>"


def folded(title: str, words: str) -> str:
    """The same, opened by a click."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(words)}</pre></details>"


def table(title: str, columns: Sequence[str], values: Sequence[dict[str, Any]], note: str = "") -> str:
    """A section with a row for each name that any column has."""
    rows = ["<tr><th></th>" + "".join(f"<th>{html.escape(column)}</th>" for column in columns) + "</tr>"]
    for name in dict.fromkeys(name for column in values for name in column):
        cells = "".join(f"<td>{_shown(column.get(name, ''))}</td>" for column in values)
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    note = f'<p class="note">{html.escape(note)}</p>' if note and not all(values) else ""
    return f'<h2>{html.escape(title)}</h2>{note}<div class="wide"><table>{"".join(rows)}</table></div>'


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return html.escape(str(value))


def write(path: epath.PathLike, folders: Sequence[RunFolder], drawn: Sequence[Pictures]) -> epath.Path:
    """Writes the page of runs into a file."""
    config.write_atomically(path, report(folders, drawn))
    return epath.Path(path)
