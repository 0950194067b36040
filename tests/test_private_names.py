"""Private names of other libraries that this one reads: each is listed here with the versions that
have it, and why.

When a test here fails, a newer version has moved or changed a name. Look at the file that the
message names: what it needs stands in the last column. If the newer version has a public way, take
it and remove the row.
"""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import orbax.checkpoint as orbax
import pytest

ROOT = Path(__file__).parents[1]


class Private(NamedTuple):
    """A private name: the file that reads it, its module, the name in it, the arguments that we
    rely on, and the need."""

    file: str
    module: str
    name: str
    arguments: tuple[str, ...] | None  # the first ones; None: no function
    seen: str
    need: str


IMPORTED = (
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.clusters",
        "ClusterEnv.auto_detect_unset_distributed_params",
        ("coordinator_address", "num_processes", "process_id", "local_device_ids"),
        "jax 0.10.2 to 0.12.0.1",
        "finds the processes of Slurm, GKE, MPI and TPU jobs before jax.distributed.initialize",
    ),
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.compiler",
        "compile_or_get_cached",
        ("backend", "computation", "devices"),
        "jax 0.10.2 to 0.12.0.1",
        "all processes of a program wait until each has compiled it: gloo gives up after 30 s",
    ),
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.distributed",
        "global_state",
        None,
        "jax 0.10.2 to 0.12.0.1",
        "its `client` is the key-value store and the barrier of the run's processes",
    ),
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.compiler",
        "_cache_write",
        ("cache_key", "compile_time_secs", "module_name", "backend", "executable"),
        "jax 0.10.2 to 0.12.0.1",
        "`write` replaces it: JAX keeps the programs of process 0 alone",
    ),
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.compilation_cache",
        "put_executable_and_time",
        ("cache_key", "module_name", "executable", "backend", "compile_time"),
        "jax 0.10.2 to 0.12.0.1",
        "writes one compiled program",
    ),
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.compilation_cache",
        "compress_executable",
        ("executable",),
        "jax 0.10.2 to 0.12.0.1",
        "the first byte of what it gives names the way of compression",
    ),
    Private(
        "jaxformer/parallel/jax_internals.py",
        "jax._src.compilation_cache",
        "decompress_executable",
        ("executable",),
        "jax 0.10.2 to 0.12.0.1",
        "fails with the program of a killed process",
    ),
    Private(
        "jaxformer/runs/orbax_internals.py",
        "orbax.checkpoint._src.serialization.tensorstore_utils",
        "get_tensorstore_raw_bytes",
        ("direction",),
        "orbax-checkpoint 0.12.8",
        "counts bytes for a log and never frees its lists; replaced by a function that returns 0",
    ),
    Private(
        "jaxformer/runs/orbax_internals.py",
        "orbax.checkpoint._src.metadata.array_metadata_store",
        "Store._maybe_create_base_dir",
        ("self", "base_dir"),
        "orbax-checkpoint 0.12.8",
        (
            "waits up to ten minutes until process 0 makes a folder, also for one that failed; "
            "replaced by a function with which each process makes it"
        ),
    ),
    Private(
        "jaxformer/runs/orbax_internals.py",
        "orbax.checkpoint._src.multihost.multihost",
        "sync_global_processes",
        ("name",),
        "orbax-checkpoint 0.12.8",
        (
            "waits for minutes for a process that failed, and keeps its reason; replaced by our "
            "own wait"
        ),
    ),
)
# attributes of objects of orbax, read in jaxformer/runs/orbax_internals.py: (attribute, versions,
# need)
ATTRIBUTES = {
    "_impl": ("orbax-checkpoint 0.12.8", "StandardCheckpointHandler's inner handler"),
    "_handler_impl": ("orbax-checkpoint 0.12.8", "the handler that writes arrays"),
    "_save_concurrent_bytes": (
        "orbax-checkpoint 0.12.8",
        "bytes written at once: else a save copies the whole state",
    ),
    "_save_device_host_concurrent_bytes": (
        "orbax-checkpoint 0.12.8",
        "bytes copied from devices at once",
    ),
    "_maybe_create_base_dir": ("orbax-checkpoint 0.12.8", "a wait for process 0, see above"),
    "_checkpointer": (
        "orbax-checkpoint 0.12.8",
        "drops the errors of a failed save, which later saves would raise",
    ),
}
# attributes of Python's own: named tuples and processes
PYTHON = {"_replace", "_asdict", "_fields", "_field_defaults", "_exit"}


def sources():
    """Our files with their syntax trees."""
    for folder in ("jaxformer", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "builtin" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def own_names(tree):
    """Names that a file defines: functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def is_private(name):
    """Whether a name has one underscore in front."""
    return name.startswith("_") and not name.startswith("__")


def private_imports(tree):
    """Modules under a private name that a file imports, such as `jax._src.compiler`.

    Ours are left out: a file of experiments whose name begins with _ is no experiment.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = {f"{node.module}.{alias.name}": node.module or "" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules = {alias.name: alias.name for alias in node.names}
        else:
            continue
        for name, module in modules.items():
            parts = module.split(".")
            if parts[0] != "experiments" and any(map(is_private, parts)):
                yield name


@pytest.mark.thorough
def test_every_private_import_is_listed():
    found = {(file, module) for file, tree in sources() for module in private_imports(tree)}
    listed = {(private.file, private.module) for private in IMPORTED}
    assert found == listed, "list a new one with its reason, and remove one that is gone"


@pytest.mark.thorough
def test_every_private_attribute_is_listed():
    trees = list(sources())
    own = {name for _, tree in trees for name in own_names(tree)}
    found = {}
    for file, tree in trees:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and is_private(node.attr)
                and node.attr not in own | PYTHON
            ):
                found.setdefault(node.attr, set()).add(file)
    imported = {private.name: {private.file} for private in IMPORTED if is_private(private.name)}
    assert found == imported | {name: {"jaxformer/runs/orbax_internals.py"} for name in ATTRIBUTES}


@pytest.mark.parametrize("private", IMPORTED, ids=lambda private: private.name)
def test_a_private_name_is_what_it_was(private):
    """The installed version still has the name, and a function takes the arguments that we hand
    over."""
    advice = (
        f"{private.file} reads {private.module}.{private.name}, seen in {private.seen}: it "
        f"{private.need}"
    )
    try:
        value = importlib.import_module(private.module)
        for part in private.name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{error}. {advice}")
    if private.arguments is not None:
        names = tuple(inspect.signature(value).parameters)
        assert names[: len(private.arguments)] == private.arguments, advice


@pytest.mark.thorough
def test_importing_us_patches_nothing_and_filters_no_log():
    """In a process of its own: JAX, orbax and logging are after the import of every module of ours
    what they were before."""
    script = """
import importlib, logging, pkgutil, sys, warnings
from jax._src import compiler
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import tensorstore_utils


def seen():
    loggers = [logging.getLogger(name).filters[:] for name in ("absl", "asyncio", "jax", "orbax")]
    names = compiler.compile_or_get_cached, compiler._cache_write, multihost.sync_global_processes
    return (
        names,
        tensorstore_utils.get_tensorstore_raw_bytes,
        sys.unraisablehook,
        loggers,
        warnings.filters[:],
    )


before = seen()
import jaxformer

for found in pkgutil.walk_packages(jaxformer.__path__, "jaxformer."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ImportError as error:  # of an extra that is not installed
            assert "jaxformer" not in str(error.name), error
assert seen() == before
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_attributes_of_orbax_are_what_they_were(tmp_path):
    """Reached as the checkpoint module reaches them.

    Assigning an attribute that nobody reads would change nothing.
    """
    writer = orbax.StandardCheckpointHandler()._impl._handler_impl
    for name in ("_save_concurrent_bytes", "_save_device_host_concurrent_bytes"):
        assert hasattr(writer, name), (
            f"{name}: {ATTRIBUTES[name]}; see limit_bytes in jaxformer/runs/orbax_internals.py"
        )
    with orbax.CheckpointManager(tmp_path) as manager:
        assert callable(manager._checkpointer.wait_until_finished), ATTRIBUTES["_checkpointer"]
