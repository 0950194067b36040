"""The checks of a run's start, made before anything is rented. They need no device.

Every launcher calls `train_command`.
"""

import ast
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from packaging.utils import canonicalize_name

from experiments.launch import lock
from jaxformer import parallel
from jaxformer.cli.arguments import read_experiment
from jaxformer.errors import ConfigError
from jaxformer.runs.initial import check_initial
from jaxformer.training.recipe import build
from jaxformer.training.step import state_specs

PATHS = ("path", "train", "validation")  # fields of our data that name files
FOLDERS = ("tokenizer", "initial", "name")  # fields that name a folder, or something at a hub


@dataclass(frozen=True)
class Hosts:
    """The hosts that a launcher rents, and the files that they see."""

    devices: int | None  # as JAX counts them; None: the launcher does not know
    processes: int = 1
    slices: int = 1
    # "tree": a copy of this checkout; "image": a copy of experiments/ only; "shared": this file
    # system
    files: str = "tree"
    mount: str = "/mnt/data"  # a place for files that are too large to be copied
    has_tpu: bool = False


@dataclass(frozen=True)
class Command:
    """The training command after `python`, its variables, and the checks that were made."""

    words: list[str]
    facts: list[str]  # in words
    variables: dict[str, str] = field(default_factory=dict)  # of the environment

    def line(self, python: str) -> list[str]:
        """The words of a shell that start it."""
        variables = [f"{name}={text}" for name, text in self.variables.items()]
        return [*(["env", *variables] if variables else []), python, *self.words]


def train_command(name: str, arguments: list[str], runs: str, hosts: Hosts) -> Command:
    """`-m jaxformer train ...`. Raises ConfigError if the run would be refused on the hosts."""
    if Path(name).is_absolute():
        raise ConfigError(f"EXP={name}: give a path inside this checkout, which is what is copied")
    source, experiment = read_experiment(name, arguments)
    check_packages(source)
    seen = check_files(name, experiment, hosts)
    here = [check_mesh(experiment, hosts), "packages that the experiment imports", lock.summary()]
    version = lock.versions()[0]["jax"]
    words = ["-m", "jaxformer", "train", name, "--runs", runs, "--jax", version, *arguments]
    later = [
        f"jax is {version}",
        "packages import",
        f"{runs} can be written",
        *(f"{path} is there" for path in seen),
    ]
    facts = [f"checked here: {fact}" for fact in here]
    facts.append(f"each host checks before training: {', '.join(later)}")
    variables = libtpu_flags() if hosts.has_tpu else {}
    facts += [f"each host has {name}={text}" for name, text in variables.items()]
    return Command(words, facts, variables)


def libtpu_flags() -> dict[str, str]:
    """{variable: flags} of libtpu that whoever launches has set: hosts get the same ones.

    There are none of our own: those that made gathers of v6e asynchronous with libtpu 0.0.42 are
    refused by 0.0.50 ("not supported on platforms other than TPU v5e").
    """
    text = os.environ.get("LIBTPU_INIT_ARGS")
    return {"LIBTPU_INIT_ARGS": text} if text else {}


def check_mesh(experiment: Any, hosts: Hosts) -> str:
    """Checks that the devices fit the mesh, and that batch and parameters divide among them.

    Returns the result in words.
    """
    mesh, count = experiment.mesh, hosts.devices
    if count is None:
        return (
            "options alone; give TOPOLOGY= and the mesh, the batch and the parameters are "
            "checked, too"
        )
    if mesh.slices != hosts.slices:
        raise ConfigError(
            f"--mesh.slices={mesh.slices} for {hosts.slices} slices; "
            f"give --mesh.slices={hosts.slices}"
        )
    sizes = [getattr(mesh, axis) for axis in parallel.AXES]
    if -1 not in sizes and math.prod(sizes) < count:
        used = f"the mesh uses {math.prod(sizes)} of {count} devices"
        raise ConfigError(
            f"{used}; give --mesh.fsdp=-1 (splits the parameters) or --mesh.data=-1 (copies them)"
        )
    if hosts.processes > 1 and mesh.backend == "pmap":
        raise ConfigError(
            f"--mesh.backend=pmap: cannot run in {hosts.processes} processes; leave it out"
        )
    shape = mesh.shape(count)
    check_batch(experiment, shape)
    recipe = build(experiment)
    check_initial(experiment, recipe)
    state_specs(recipe, jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape)))
    split = " x ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1) or "data=1"
    batch = f"batch {experiment.batch_size} / accumulation {experiment.accumulation}"
    return (
        f"mesh {split} of {count} devices in {hosts.processes} processes, "
        f"{batch} and the parameters divide"
    )


def check_batch(experiment: Any, shape: dict[str, int]) -> None:
    """`parallel.check_batch`, with an error that says which values of --accumulation divide."""

    def problem(accumulation: int) -> ConfigError | None:
        try:
            parallel.check_batch(experiment.mesh, shape, experiment.batch_size // accumulation)
        except ConfigError as error:
            return error
        return None

    size, now = experiment.batch_size, experiment.accumulation
    if (error := problem(now)) is None:
        return
    divisors = [n for n in range(1, size + 1) if size % n == 0 and problem(n) is None]
    nearest = ", ".join(
        f"--accumulation={n}" for n in sorted(divisors, key=lambda n: abs(n - now))[:4]
    )
    advice = (
        f"what divides: {nearest}"
        if nearest
        else "no --accumulation divides; another --batch-size is another run"
    )
    raise ConfigError(f"batch_size={size} / accumulation={now}: {error}; {advice}")


def check_packages(source: Any) -> None:
    """Checks that hosts have the packages that the experiment's file imports.

    It follows imports of the user's own files in the folder of the experiment.
    """
    installed, absent = lock.versions()
    folder, todo, names = Path(source.path).parent, [source.text], set()
    while todo:
        nodes = list(ast.walk(ast.parse(todo.pop())))
        new = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        new |= {
            node.module or ""
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.level == 0
        }
        files = [folder / f"{name.removeprefix('experiments.')}.py" for name in new - names]
        todo += [path.read_text() for path in files if path.is_file()]
        names |= new
    beside = {path.stem for path in folder.glob("*")}
    modules = {name.partition(".")[0] for name in names}
    modules -= sys.stdlib_module_names | beside | {"jaxformer", "experiments"}
    for module in modules:
        is_named = canonicalize_name(module) in {*installed, *absent}
        if not is_named and not any(provides(name, module) for name in installed):
            what = f"{source.path}: imports {module}, which hosts would not have"
            raise ConfigError(
                f'{what}; add its package to the extra "hosts" in pyproject.toml, with a version'
            )


def provides(name: str, module: str) -> bool:
    """Whether an installed distribution has this module."""
    record = "\n" + (metadata.distribution(name).read_text("RECORD") or "")
    return f"\n{module}/" in record or f"\n{module}.py," in record


def check_files(name: str, experiment: Any, hosts: Hosts) -> list[str]:
    """Checks that hosts see the experiment and its data, as far as this can be known here.

    Returns the paths that only a host can check.
    """
    paths = dict(data_paths(experiment.data)) | dict(data_paths(experiment.initial, "initial"))
    for key, frozen in experiment.references.items():
        initial = getattr(frozen, "initial", frozen)
        paths |= {f"references.{key}": path for _, path in data_paths(initial, "initial")}
    paths |= {"EXP": name} if name.endswith(".py") else {}
    copied = [] if hosts.files == "shared" else tree()
    if hosts.files == "image":
        copied = [path for path in copied if path.startswith(("experiments/", "jaxformer/"))]
    elsewhere = []
    for where, path in paths.items():
        # the part before the first * of a glob; of paired files, the path without its ending
        start = os.path.normpath(path.partition("*")[0])
        if hosts.files == "shared":
            there = any(Path(os.path.expanduser(start)).parent.glob(f"{Path(start).name}*"))
        elif os.path.isabs(path) or path.startswith("~"):
            elsewhere.append(path)
            continue
        else:
            there = any(file.startswith(start) for file in copied)
        if not there:
            in_file = where == "EXP" or where.startswith("references.")  # no option sets these
            option = f"{where}=" if in_file else f"--{where}="
            place = {
                "tree": "in the copy of this checkout",
                "image": "in the image",
                "shared": "here",
            }[hosts.files]
            advice = (
                ""
                if hosts.files == "shared"
                else f", such as {hosts.mount}/{os.path.basename(start)}"
            )
            raise ConfigError(
                f"{option}{path}: not {place}, so no host sees it; "
                f"give a path that all hosts see{advice}"
            )
    return elsewhere


def data_paths(data: Any, name: str = "data") -> Iterator[tuple[str, str]]:
    """(name of the field, path) of all files that `data` reads, also of data inside other data.

    `data` may also be the `initial` of an experiment.
    """
    if isinstance(data, list | tuple):
        for one in data:
            yield from data_paths(one, name)
    elif is_dataclass(data):
        for field in fields(data):
            yield from data_paths(getattr(data, field.name), f"{name}.{field.name}")
    elif isinstance(data, str) and not re.match(r"hf:|\w+://", data):
        field = name.rpartition(".")[2]
        if field in PATHS or data.endswith(".json") or (field in FOLDERS and is_folder(data)):
            yield name, data


def is_folder(text: str) -> bool:
    """Whether the text is a path: of an existing folder, or of a form that no name at a hub has."""
    return text.startswith(("/", "~", ".")) or ("/" in text and Path(text).is_dir())


def tree() -> list[str]:
    """The files of this checkout that are copied: those that git does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=lock.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(
            f"{lock.ROOT}: git cannot list its files, which would be copied ({done.stderr.strip()})"
        )
    return sorted(done.stdout.split("\0")[:-1])
