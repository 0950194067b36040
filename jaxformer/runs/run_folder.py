"""A run's folder, runs/NAME-FINGERPRINT/: what the run is, and everything that it wrote.

The folder keeps a copy of the experiment's file (`experiment.py`), the options as typed
(`source.json`) and a description (`config.json`) for people and tools. A run is opened again by
running the copy, never from the description.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxformer import config
from jaxformer.config import no_links, storage
from jaxformer.errors import ConfigError
from jaxformer.parallel.numerics import version_of
from jaxformer.runs import trust
from jaxformer.runs.checkpoint import resolve
from jaxformer.runs.metrics import read_records
from jaxformer.training.experiment import Experiment

log = logging.getLogger("jaxformer")
ENVIRONMENT = (
    "python",
    "platform",
    "packages",
    "commit",
    "uncommitted_changes",
    "device",
    "device_count",
    "data_digest",
    "validation_digest",
    "tokenizer_digest",
)
LEFT_OVER = 3600  # seconds after which an unfinished file of a report is nobody's any more
ALLOWED = {"allowed": True}  # marks the digest of code that the user trusted without training it
# Fields that are newer than some runs, with the value that says what those runs did.
ADDED: dict[str, Any] = {"ema_warmup": 1, "references": {}, "after_update": None}
# Fields whose default was another one when some runs began. The runs' descriptions have it.
CHANGED = ("optimizer.not_decayed",)


@dataclass(frozen=True)
class RunFolder:
    """The files of a run's folder.

    The folder may be a URL, such as gs://bucket/runs/quickstart-1a2b3c4d.
    """

    path: epath.Path

    config = property(lambda self: self.path / "config.json")
    experiment = property(lambda self: self.path / "experiment.py")
    source = property(lambda self: self.path / "source.json")
    environment = property(lambda self: self.path / "environment.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    checkpoints = property(lambda self: self.path / "checkpoints")
    bad = property(lambda self: self.path / "bad")  # a checkpoint of the step that ended the run
    goodput = property(lambda self: self.path / "goodput.json")
    samples = property(lambda self: self.path / "samples")
    tokenizer = property(lambda self: self.path / "tokenizer.json")
    result = property(lambda self: self.path / "result.json")

    def read_json(self, file: epath.Path, **keys: type) -> dict[str, Any]:
        """The object in a JSON file of this folder.

        No link below the folder is followed, because a stranger may have made it.
        """
        return config.read_json(file, "", self.path, **keys)

    def read_text(self, file: epath.Path) -> str:
        """The text of a file of this folder. No link below the folder is followed."""
        return config.read_text(file, self.path)

    def write(self, file: epath.Path, text: str | bytes) -> None:
        """Writes a file of this folder. No link below the folder is followed."""
        config.write_atomically(file, text, self.path)

    def remove_unfinished(self) -> None:
        """Removes the files that killed processes did not finish. Call it while its lock is held.

        Only the trainer writes its own files. An unfinished report or picture may still be written
        by another process, so only old ones are removed.
        """
        files = [self.config, self.experiment, self.source, self.environment]
        files += [self.metrics, self.goodput, self.tokenizer, self.result]
        own_names = "|".join(re.escape(file.name) for file in files)
        for folder, names in (
            (self.path, own_names),
            (self.for_library(self.samples), r"step-[0-9]+\.txt"),
        ):
            for name in storage.list_names(folder):
                found = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.unfinished", name)
                if found is None:
                    continue
                with contextlib.suppress(OSError):  # the next start tries again
                    is_own = re.fullmatch(names, found[1]) is not None
                    if is_own or time.time() - (folder / name).stat().mtime > LEFT_OVER:
                        (folder / name).unlink()

    def for_library(self, folder: epath.Path) -> epath.Path:
        """A folder below this one, for a library that opens its files itself.

        Raises ConfigError where the folder is a link.
        """
        no_links.check_folder(folder, self.path)
        return folder

    def description(self) -> dict[str, Any]:
        """The contents of `config.json`, and the `ADDED` fields that it lacks; empty without it."""
        return ADDED | self.read_json(self.config, name=str) if storage.exists(self.config) else {}

    def last_scores(self) -> dict[str, Any]:
        """The scores of result.json, else those of metrics.jsonl's last evaluation, else {}."""
        with contextlib.suppress(ConfigError):  # no result yet, or a damaged one
            return config.with_numbers(self.read_json(self.result, validation=dict)["validation"])
        records = [record for record in read_records(self.metrics) if "validation_loss" in record]
        return (
            {name.removeprefix("validation_"): value for name, value in records[-1].items()}
            if records
            else {}
        )


def run_folder(experiment: Experiment, runs: epath.PathLike) -> RunFolder:
    """The folder of an experiment: its name and the fingerprint of all that decides its numbers."""
    resolve(runs)  # raises for a URL that checkpoints cannot be written to
    return RunFolder(epath.Path(runs) / f"{experiment.name}-{config.fingerprint(experiment)}")


def as_it_began(folder: RunFolder, experiment: Experiment) -> Experiment:
    """The experiment with the defaults that its run began with, so that the run goes on the same.

    The folder's name does not tell old defaults from new ones, because it digests only what differs
    from the defaults.
    """
    began = config.flat(folder.description())
    now = config.flat(config.describe(experiment))
    for path in (*ADDED, *CHANGED):
        if path in began and path in now and began[path] != now[path]:
            *outer, field = path.split(".")
            experiment = _with_field(experiment, outer, field, began[path])
    return experiment


def _with_field(value: Any, outer: list[str], field: str, to: Any) -> Any:
    """A copy of a config with another value in `field` of the config at the path `outer`."""
    if not outer:
        return replace(value, **{field: to})
    return replace(value, **{outer[0]: _with_field(getattr(value, outer[0]), outer[1:], field, to)})


def open_experiment(folder: RunFolder) -> Experiment:
    """The experiment of a run: its file's copy is run again. Raises ConfigError if it changed.

    The code runs only where this user's trainer wrote it on this machine, or `allow` was called.
    """
    if not storage.is_file(folder.config):
        raise ConfigError(
            f"{folder.path}: no run folder, it has no config.json; the command `runs` lists all"
        )
    if not storage.is_file(folder.experiment):
        raise ConfigError(
            f"{folder.path}: no copy of its experiment's file (it was trained from Python); open it"
            " from there"
        )
    from jaxformer.runs.names import NAMES

    text, facts = _code(folder)
    changed = [
        path for path, expected in facts["imports"].items() if _digest(Path(path)) != expected
    ]
    if trust.is_trusted(trust.digest(text, facts)) or _is_allowed(folder, text, facts, changed):
        source = config.again(folder.experiment, facts, text)
    elif (path := config.in_library(text)) is not None and not facts["overrides"]:
        # Nothing of the folder runs: neither its path nor its options.
        source = config.read(str(path))
    else:
        unknown = (
            "this user did not train it on this machine, and to open the run is to run this file"
        )
        advice = "read it and source.json, then add --trust (in Python: open_run(..., trust=True))"
        raise ConfigError(f"{folder.experiment}: {unknown}; {advice}")
    experiment = config.override(source.experiment, source.overrides, {**NAMES, "": source.names})
    experiment = as_it_began(folder, experiment)
    advice = (
        f"; {', '.join(changed)} changed since this run began"
        if changed
        else "; is this library another version?"
    )
    if different := differences(folder.description(), experiment):
        raise ConfigError(
            f"{folder.path}: no longer the experiment that it was: {'; '.join(different)}{advice}"
        )
    if changed:
        log.warning("%s: %s changed since this run began", folder.path, ", ".join(changed))
    return experiment


def _is_allowed(
    folder: RunFolder, text: str, facts: dict[str, Any], changed: Sequence[str]
) -> bool:
    """Whether the user trusted this code (`allow`). Raises ConfigError where its imports changed.

    What another user's run imports lies where others may write. The imports of a run that this
    user trained are the user's own.
    """
    if not trust.is_trusted(trust.digest(text, facts | ALLOWED)):
        return False
    if other := [path for path in changed if os.path.lexists(path)]:
        problem = (
            f"{', '.join(other)} changed since this run began, so it is not the code that you"
            " trusted"
        )
        raise ConfigError(f"{folder.path}: {problem}; nothing was run; put back the file as it was")
    return True


def _digest(path: Path) -> str | None:
    """The sha256 of a file; None where there is none, or where it is too large to be code."""
    try:
        return hashlib.sha256(config.read_bytes(path)).hexdigest()
    except (OSError, ConfigError):
        return None


def allow(folder: RunFolder) -> None:
    """Trusts the present code of a run's folder. Raises ConfigError where that cannot be stored."""
    try:
        text, facts = _code(folder)
        trust.add(trust.digest(text, facts | ALLOWED))
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: cannot be trusted: {error}; set XDG_STATE_HOME to a folder of yours"
        ) from None


def _code(folder: RunFolder) -> tuple[str, dict[str, Any]]:
    """The code that opening a run executes: the file's copy, and how it was run (source.json)."""
    return folder.read_text(folder.experiment), folder.read_json(
        folder.source, path=str, overrides=list, imports=dict
    )


def differences(description: dict, experiment: Experiment) -> list[str]:
    """A line for each field that decides numbers and is not as described.

    A new field with its default is no difference.
    """
    new_defaults = config.flat(config.describe(experiment)).keys() - config.flat(description).keys()
    new_defaults -= config.flat(config.changes(experiment)).keys()
    return compare(
        description, config.describe(experiment), config.execution_fields(experiment) | new_defaults
    )


def runs_of(name: str | None, runs: epath.PathLike) -> list[RunFolder]:
    """The runs of the experiment `name`, or all, the newest last; without damaged ones."""
    folders = []
    for path in (epath.Path(runs) / each for each in storage.list_names(runs)):
        folder = RunFolder(path)
        try:
            if storage.exists(folder.config) and (
                folder.description().get("name") == name or name is None
            ):
                folders.append(folder)
        except ConfigError as error:
            log.warning("this run is left out: %s", error)
    return sorted(folders, key=_last_written)


def named(text: str, runs: epath.PathLike) -> RunFolder | None:
    """The run with checkpoints that a text names: its folder, or its name in `runs`; or None."""
    for path in (epath.Path(text).expanduser(), epath.Path(runs) / text):
        if storage.is_dir(path / "checkpoints"):
            return RunFolder(path)
    return None


def _last_written(folder: RunFolder) -> float:
    files = [path for path in (folder.config, folder.metrics) if storage.exists(path)]
    return max((float(storage.retry(path.stat, path).mtime or 0) for path in files), default=0.0)


def compare(one: dict, other: dict, ignore: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """A line for each field in which two descriptions differ."""
    return [
        f"{name}: {old} -> {new}"
        for name, (old, new) in config.diff(one, other).items()
        if name not in ignore
    ]


def introduce(
    experiment: Experiment, runs: epath.PathLike, besides: epath.Path | None = None
) -> list[str]:
    """A new run's lines about its folder and the three newest other runs of its experiment.

    Nothing is said about the run `besides`.
    """
    described = config.describe(experiment)
    ignore = config.execution_fields(experiment)

    def different(other):
        return (
            "; ".join(compare(other.description(), described, ignore))
            or "nothing that is described"
        )

    every = runs_of(experiment.name, runs)
    if not every:
        return []
    others = [folder for folder in every if folder.path != besides][-3:]
    lines = [f"a new run: {each.path} differs in {different(each)}" for each in others]
    lines = [line + resuming(each) for line, each in zip(lines, others, strict=True)]
    return [*lines, f"its folder: {run_folder(experiment, runs).path}"]


def resuming(folder: RunFolder) -> str:
    """How to go on with a run that has not ended: the command that began it; "" if it has ended."""
    if storage.is_file(folder.result) or not storage.is_file(folder.source):
        return ""
    facts = folder.read_json(folder.source)
    words = [str(facts.get("path", "")), *map(str, facts.get("overrides", ()))]
    if folder.path.parent != epath.Path("runs"):
        words += ["--runs", str(folder.path.parent)]
    command = shlex.join(["python", "-m", "jaxformer", "train", *words])
    return f"; to go on with it instead: {command}"


def describe(
    folder: RunFolder,
    experiment: Experiment,
    source: config.Source | None,
    digests: Mapping[str, str],
) -> list[str]:
    """Writes what the run is. Returns a line for each field that changed since the last start.

    `digests` are those of the data.
    """
    described = config.describe(experiment)
    earlier = folder.description()
    changed = compare(earlier, described) if earlier else []
    if source is not None:
        folder.write(folder.experiment, source.text)
        folder.write(folder.source, json.dumps(source.facts(), indent=2))
        try:
            trust.add(trust.digest(source.text, source.facts()))
        except (OSError, ConfigError) as error:
            log.warning("this run will open only with --trust: %s", error)
    folder.write(folder.environment, json.dumps(environment(digests), indent=2))
    folder.write(folder.config, json.dumps(described, indent=2) + "\n")
    return changed


def environment(digests: Mapping[str, str]) -> dict:
    """Versions, commit, device and data: all that numbers depend on beside the config."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in packages},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "device": devices[0].device_kind,
        "device_count": len(devices),
        **digests,
    }


def _git(*arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
