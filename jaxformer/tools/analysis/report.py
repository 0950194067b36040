"""An HTML page about one run, or about several side by side, and its pictures as PNG files."""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxformer import config
from jaxformer.config import no_links, storage
from jaxformer.errors import ConfigError
from jaxformer.runs import loop
from jaxformer.runs.comparison import incomparable, incomparable_curves
from jaxformer.runs.metrics import read_records, steps_done
from jaxformer.runs.reporter import unit_of_loss
from jaxformer.runs.run_folder import ENVIRONMENT, RunFolder
from jaxformer.tools.analysis import figures, gallery, page
from jaxformer.tools.analysis.gallery import Pictures

log = logging.getLogger("jaxformer")
LONGEST = 200  # bytes in the file name of a picture, without its ending
# parameters: at the end of a run a larger model is not loaded again to draw pictures of it
LARGE = 1e9


def write(
    path: epath.PathLike, folders: Sequence[RunFolder], drawn: Sequence[Pictures]
) -> epath.Path:
    """Writes the page of runs, and its pictures into `figures/` beside it."""
    path = epath.Path(path)
    files = path.parent / "figures"
    no_links.check_folder(files, path.parent)  # before anything is drawn
    config.write_atomically(path, report(folders, drawn, files), path.parent)
    return path


def report(folders: Sequence[RunFolder], drawn: Sequence[Pictures], files: epath.Path) -> str:
    """The page as HTML: scores, differences, last samples, pictures, configs.

    Pictures stand in the order of `gallery.NOTES`.
    """
    names = [folder.path.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in folders]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"report: {repeated[0]} is given {len(repeated)} times; give each run once"
        )
    runs = {name: read_records(folder.metrics) for name, folder in zip(names, folders, strict=True)}
    results = [
        folder.read_json(folder.result) if storage.is_file(folder.result) else {}
        for folder in folders
    ]
    warning = incomparable(folders) or incomparable_curves(folders)
    done = map(steps_done, runs.values())
    steps = [
        f"{n} of {folder.description().get('steps')}"
        for n, folder in zip(done, folders, strict=True)
    ]
    note = f"After {' and '.join(steps)} training steps. {warning}"
    parts = [page.heading("Scores on the validation split", note.strip())]
    parts.append(page.table(names, [folder.last_scores() for folder in folders]))
    if len(folders) > 1:
        parts += [page.heading("What differs"), page.table(names, differences(folders))]
    baseline = results[0].get("baseline") if len(folders) == 1 else None
    units = {unit_of_loss(result.get("validation", {})) for result in results}
    unit = units.pop() if len(units) == 1 else ""
    for title, draw in gallery.record_pictures(runs, baseline, unit).items():
        parts.append(section(title, {"": draw}, files, files.parent))
    parts += sample_section(dict(zip(names, folders, strict=True)))
    for title in gallery.NOTES:
        draws = {
            name: pictures[title]
            for name, pictures in zip(names, drawn, strict=True)
            if title in pictures
        }
        parts.append(section(title, draws, files, files.parent))
    for name, folder in zip(names, folders, strict=True):
        experiment = folder.read_json(folder.config, name=str)
        machine = trained_on(folder)
        parts.append(page.folded(f"Config ({name})", config.to_json(experiment, indent=2)))
        parts.append(page.folded(f"Trained on ({name})", config.to_json(machine, indent=2)))
    return page.page(" and ".join(names), parts)


def differences(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """For each run, the fields of its description in which the runs differ.

    A field that only one run has differs, too.
    """
    descriptions = [config.flat(folder.description()) for folder in folders]
    names = dict.fromkeys(name for description in descriptions for name in description)
    differing = [
        name
        for name in names
        if len({str(description.get(name)) for description in descriptions}) > 1
    ]
    return [{name: description.get(name, "") for name in differing} for description in descriptions]


def sample_section(folders: Mapping[str, RunFolder]) -> list[str]:
    """The section with the last sample of each run; empty if no run has one."""
    samples = {}
    for name, folder in folders.items():
        if sample := last_sample(folder):
            samples[name] = sample
    if not samples:
        return []
    after = ", ".join(path.stem for path, _ in samples.values())
    texts = {name: page.text(text) for name, (_, text) in samples.items()}
    return [
        page.heading("What the model writes", f"The last sample: {after}."),
        page.side_by_side(texts),
    ]


def section(
    title: str, draws: Pictures, files: epath.Path, root: epath.PathLike | None = None
) -> str:
    """A section with the same picture of each run. It also writes the pictures as PNG files.

    No link below `root` is followed. A picture that cannot be drawn is left out; a warning says
    why.
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
    """The file name of a picture: a stem that is too long is cut, and a digest of it follows."""
    contents = stem.encode()
    if len(contents) > LONGEST:
        begin = contents[:LONGEST].decode(errors="ignore")
        stem = f"{begin}-{hashlib.sha256(contents).hexdigest()[:8]}"
    return f"{stem}.png"


def last_sample(folder: RunFolder) -> tuple[epath.Path, str] | None:
    """The sample file of the largest step, and its text.

    None if there is no sample, and if the file has a second name (a hard link): it may be a file
    from elsewhere.
    """
    names = [
        name
        for name in storage.list_names(folder.samples)
        if re.fullmatch(r"step-[0-9]{1,18}\.txt", name)
    ]
    samples = [folder.samples / name for name in names]
    if not samples:
        return None
    last = max(samples, key=lambda path: int(path.stem.removeprefix("step-")))
    text = folder.read_text(last)
    if not no_links.has_one_name(last, folder.path):
        log.warning(
            "report: %s is left out: it is a hard link, so perhaps a file from elsewhere; "
            "copy it to show it",
            last,
        )
        return None
    return last, text


def trained_on(folder: RunFolder) -> dict[str, Any]:
    """The fields of environment.json that a run writes; other fields are left out."""
    environment = folder.read_json(folder.environment)
    return {name: environment[name] for name in ENVIRONMENT if name in environment}


def refresh(folder: RunFolder) -> None:
    """Writes the page of a run that goes on, from its files alone: the model is not loaded."""
    write(folder.path / "report.html", [folder], [{}])


def run_report(result: loop.Result, records: Sequence[dict]) -> str:
    """Writes the page of a run that has ended; returns a line to print."""
    folder = RunFolder(epath.Path(result.folder))
    alone = jax.process_count() == 1 and result.parameters <= LARGE
    pictures = gallery.run_pictures(folder) if alone else {}
    return f"report: {write(folder.path / 'report.html', [folder], [pictures])}"
