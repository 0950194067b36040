"""A run's folder: runs/NAME-FINGERPRINT/ with its config, environment, lock and files."""

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from jaxformer import config
from jaxformer.errors import ConfigError
from jaxformer.parallel.mesh import Mesh
from jaxformer.training.experiment import Experiment


@dataclass(frozen=True)
class RunFolder:
    path: Path

    config = property(lambda self: self.path / "config.json")
    environment = property(lambda self: self.path / "environment.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    checkpoints = property(lambda self: self.path / "checkpoints")
    samples = property(lambda self: self.path / "samples")
    loss_figure = property(lambda self: self.path / "figures" / "loss.png")
    tokenizer = property(lambda self: self.path / "tokenizer.json")


def run_folder(experiment: Experiment, runs: Path) -> RunFolder:
    """Where this experiment lives: its name and the fingerprint of its config, so that a changed config is another run.

    On another mesh it is the same run, which goes on there.
    """
    anywhere = replace(experiment, mesh=Mesh(data=1))
    return RunFolder(runs / f"{experiment.name}-{config.fingerprint(anywhere)}")


def open_run(folder: RunFolder) -> Experiment:
    """The experiment that a run folder holds. Raises ConfigError where there is none."""
    if not folder.config.is_file():
        raise ConfigError(
            f"{folder.path}: no config.json there; expected a run folder, such as runs/quickstart-1a2b3c4d"
        )
    return config.loads(Experiment, folder.config.read_text())


@contextmanager
def claim(folder: RunFolder) -> Iterator[None]:
    """Makes the folder and holds its lock, so that two trainers never share one. A dead trainer's lock does not count.

    The lock is the operating system's (flock), released with the process however it ends. Raises ConfigError where the
    folder cannot be written or somebody else holds it.
    """
    import fcntl

    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        handle = (folder.path / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: cannot write the run folder ({error.strerror}); choose another with --runs"
        ) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            raise ConfigError(
                f"{folder.path}: another trainer holds this run ({handle.read().strip()}); wait for it or stop it"
            ) from None
        handle.truncate(0)
        handle.write(f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")
        handle.flush()
        yield


def describe(folder: RunFolder, experiment: Experiment, data_digest: str) -> list[str]:
    """Writes config.json and environment.json; returns a line for each way in which an earlier config.json differs."""
    changes = []
    if folder.config.is_file():
        earlier = config.loads(Experiment, folder.config.read_text())
        changes = [f"{key}: {old} -> {new}" for key, (old, new) in config.diff(earlier, experiment).items()]
    write_atomically(folder.config, config.dumps(experiment))
    write_atomically(folder.environment, json.dumps(environment(data_digest), indent=2))
    return changes


def environment(data_digest: str) -> dict:
    """Versions, commit, device and data: what a number depends on beside its config."""
    import importlib.metadata

    import jax

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "device": devices[0].device_kind,
        "device_count": len(devices),
        "data_digest": data_digest,
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
