"""Answers that are no text, such as pictures: the method `generate` of a run's data.

    def generate(self, run, key, folder):
        return "a text to print", or the paths of files, or both in a list, or nothing

`run` is the opened run (`run.params`, `run.model`), `key` a random key of the seed, `folder` the
run's folder. With a parameter `prompt` it also gets the text of `--prompt`, or None. The command
`generate` calls it.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from jaxformer.errors import ConfigError
from jaxformer.params import random_key
from jaxformer.runs.run import Run

TRAINERS = ("checkpoints", "bad")  # folders of a run that only a trainer writes


def generator_of(data: Any) -> Callable | None:
    """The data's own `generate`; None where the answer of a model is a text."""
    found = getattr(data, "generate", None)
    return found if callable(found) else None


def generate(run: Run, seed: int = 0, prompt: str | None = None) -> Iterator[str]:
    """Calls `data.generate`. The lines to print: what it returned, then each file that it wrote.

    Raises ConfigError where the data make no answers of their own, or read no prompt.
    """
    make = generator_of(run.experiment.data)
    if make is None:
        problem = "its data have no method generate(run, key, folder), which makes answers"
        raise ConfigError(f"{run.folder.path}: {problem}")
    options: dict[str, Any] = {}
    if "prompt" in inspect.signature(make).parameters:
        options["prompt"] = prompt
    elif prompt is not None:
        problem = "the data of this run make answers without one; leave it out"
        raise ConfigError(f"generate: --prompt: {problem}")
    folder = run.folder.path
    before = files_of(folder)
    with run.on_mesh():
        answer = make(run, key=random_key(seed), folder=folder, **options)
        lines = [str(value) for value in in_a_list(answer)]  # runs a generator of the user's
    after = files_of(folder)
    yield from lines
    written = [path for path, stamp in after.items() if before.get(path) != stamp]
    yield from (f"wrote {path}" for path in written if path not in lines)


def in_a_list(answer: Any) -> list[Any]:
    """What a function returned, as a list: a text or a path alone is one, None is nothing."""
    if answer is None:
        return []
    if isinstance(answer, str | os.PathLike) or not hasattr(answer, "__iter__"):
        return [answer]
    return list(answer)


def files_of(folder: epath.Path) -> dict[str, tuple[int, ...]]:
    """The files of a run's folder without checkpoints: path -> what changes if it is written."""
    found = {}
    waiting = sorted(path for path in folder.iterdir() if path.name not in TRAINERS)
    for path in waiting:  # the list grows while the loop reads it
        if os.path.islink(path):  # its target does not belong to the run
            continue
        if path.is_dir():
            waiting.extend(sorted(path.iterdir()))
        else:
            found[os.fspath(path)] = _stamp(path)
    return found


def _stamp(path: epath.Path) -> tuple[int, ...]:
    if "://" in os.fspath(path):
        status = path.stat()
        return int(status.mtime), status.length
    local = os.stat(path)
    return local.st_mtime_ns, local.st_size, local.st_ino
