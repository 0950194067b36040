"""One HTML page of a run, or of several side by side, and its pictures as PNG files."""

import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from jaxformer import config
from jaxformer.config import no_links, storage
from jaxformer.errors import ConfigError
from jaxformer.runs import loop
from jaxformer.runs.metrics import read_records, steps_done
from jaxformer.runs.run_folder import ENVIRONMENT, RunFolder, other_text
from jaxformer.tools.analysis import figures, gallery, page
from jaxformer.tools.analysis.gallery import Pictures

log = logging.getLogger("jaxformer")
LONGEST = 200  # bytes of the name of a picture, without its ending
LARGE = 1e9  # parameters: a run of a larger model ends without the pictures that load it again


def write(path: epath.PathLike, folders: Sequence[RunFolder], drawn: Sequence[Pictures]) -> epath.Path:
    """Writes the page of runs, and its pictures into `figures/` beside it."""
    path = epath.Path(path)
    files = path.parent / "figures"
    no_links.check_folder(files, path.parent)  # before anything is drawn
    config.write_atomically(path, report(folders, drawn, files), path.parent)
    return path


def report(folders: Sequence[RunFolder], drawn: Sequence[Pictures], files: epath.Path) -> str:
    """The page: scores, what differs, the last samples, the pictures of `gallery.NOTES` in their order, configs."""
    names = [folder.path.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in folders]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"report: {repeated[0]} is given {len(repeated)} times; give each run once")
    runs = {name: read_records(folder.metrics) for name, folder in zip(names, folders, strict=True)}
    results = [folder.read_json(folder.result) if storage.is_file(folder.result) else {} for folder in folders]
    warning = other_text(folders).capitalize()
    done = map(steps_done, runs.values())
    steps = [f"{n} of {folder.description().get('steps')}" for n, folder in zip(done, folders, strict=True)]
    note = f"After {' and '.join(steps)} training steps. {warning}"
    parts = [page.heading("Scores on the validation split", note.strip())]
    parts.append(page.table(names, [folder.last_scores() for folder in folders]))
    if len(folders) > 1:
        flat = [config.flat(folder.description()) for folder in folders]
        every = dict.fromkeys(name for one in flat for name in one)  # a field of one run alone differs, too
        differing = [name for name in every if len({str(one.get(name)) for one in flat}) > 1]
        rows = [{name: one.get(name, "") for name in differing} for one in flat]
        parts += [page.heading("What differs"), page.table(names, rows)]
    together = gallery.record_pictures(runs, results[0].get("baseline") if len(folders) == 1 else None)
    parts += [section(title, {"": draw}, files, files.parent) for title, draw in together.items()]
    samples = {name: found for name, folder in zip(names, folders, strict=True) if (found := last_sample(folder))}
    if samples:
        after = ", ".join(path.stem for path, _ in samples.values())
        parts.append(page.heading("What the model writes", f"The last sample: {after}."))
        parts.append(page.side_by_side({name: page.text(text) for name, (_, text) in samples.items()}))
    for title in gallery.NOTES:
        draws = {n: some[title] for n, some in zip(names, drawn, strict=True) if title in some}
        parts.append(section(title, draws, files, files.parent))
    for name, folder in zip(names, folders, strict=True):
        parts.append(page.folded(f"Config ({name})", config.to_json(folder.read_json(folder.config, name=str), indent=2)))
        parts.append(page.folded(f"Trained on ({name})", config.to_json(trained_on(folder), indent=2)))
    return page.page(" and ".join(names), parts)


def section(title: str, draws: Pictures, files: epath.Path, root: epath.PathLike | None = None) -> str:
    """The same picture of each run, also as PNG files, which go through no link below `root`.

    What cannot be drawn is left out, and says why.
    """
    parts = {}
    for name, draw in draws.items():
        with gallery.warn_on_failure(f"{title} {name}".strip()):
            if isinstance(draw, str):
                parts[name] = draw
                continue
            light, dark = figures.png(draw), figures.png(draw, dark=True)
            suffix = f"-{name.replace('/', '-')}" if len(draws) > 1 else ""
            file = files / file_name(f"{title.lower().replace(' ', '-')}{suffix}")
            config.write_atomically(file, light, root)
            parts[name] = page.picture(title, light, dark)
    return page.heading(title, gallery.NOTES[title]) + page.side_by_side(parts) if parts else ""


def file_name(stem: str) -> str:
    """The name of a picture; of one that would be too long for a name, its begin and a digest of all."""
    if len(stem.encode()) > LONGEST:
        stem = f"{stem.encode()[:LONGEST].decode(errors='ignore')}-{hashlib.sha256(stem.encode()).hexdigest()[:8]}"
    return f"{stem}.png"


def last_sample(folder: RunFolder) -> tuple[epath.Path, str] | None:
    """The file of the largest step, and its text. A file with a second name (a hard link) may be one from elsewhere."""
    names = [name for name in storage.list_names(folder.samples) if re.fullmatch(r"step-[0-9]{1,18}\.txt", name)]
    samples = [folder.samples / name for name in names]
    if not samples:
        return None
    last = max(samples, key=lambda path: int(path.stem.removeprefix("step-")))
    text = folder.read_text(last)
    if not no_links.has_one_name(last, folder.path):
        log.warning("report: %s is left out: it is a hard link, so perhaps a file from elsewhere; copy it to show it", last)
        return None
    return last, text


def trained_on(folder: RunFolder) -> dict[str, Any]:
    """What environment.json says, of what a run writes there."""
    found = folder.read_json(folder.environment)
    return {name: found[name] for name in ENVIRONMENT if name in found}


def refresh(folder: RunFolder) -> None:
    """Writes the page of a run that goes on: what its files say, without its model."""
    write(folder.path / "report.html", [folder], [{}])


def run_report(result: loop.Result, records: Sequence[dict]) -> str:
    """Writes the page of a run that ends; returns a line to print."""
    folder = RunFolder(epath.Path(result.folder))
    alone = jax.process_count() == 1 and result.parameters <= LARGE
    return f"report: {write(folder.path / 'report.html', [folder], [gallery.run_pictures(folder) if alone else {}])}"
