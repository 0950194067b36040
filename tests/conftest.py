"""All tests: 8 simulated CPU devices, no silent rank promotion; shapes in signatures are
checked."""

import atexit
import collections
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path


def known(flag):
    """Whether this version of XLA has the flag: it ends a process that sets one it does not know,
    so ask in another."""
    code = "from jaxlib import xla_client; xla_client.CompileOptions()"
    environment = os.environ | {"XLA_FLAGS": flag}
    return not subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True
    ).returncode


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# most of a test's time is compilation of a program that runs once: LLVM need not polish it (HLO
# passes all run), and
# the emitter of loops that XLA had before the present one takes a third of its time
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    on_cpu = os.environ["JAX_PLATFORMS"] == "cpu"  # a GPU has its programs as a run has them
    wanted = (
        ["--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"]
        if on_cpu
        else []
    )
    flags = wanted if known(" ".join(wanted)) else [flag for flag in wanted if known(flag)]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    # where compiled programs persist, and which runs are trusted: nothing of an earlier session or
    # of whoever runs the tests
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        os.environ[variable] = tempfile.mkdtemp(prefix="jaxformer-tests-")
        atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # what `make test` hands to a make that a test starts: that one would print its folders, and
    # take this one's variables
    for variable in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "ARGS"):
        os.environ.pop(variable, None)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Keeps compiled programs for the other worker, for the processes that tests start, and for the
    next session.

    Compilation is most of the suite's time. A program is found by a digest of itself, of XLA's
    version and of its flags. `--cache-clear` forgets the programs.
    """
    from jaxformer.runs import compilation_cache

    if not hasattr(config, "cache"):
        return
    folder = config.cache.mkdir("programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compilation_cache.tidy(folder)
        link = Path(os.environ["XDG_CACHE_HOME"]) / "jaxformer" / "compiled"  # where a run looks
        link.parent.mkdir()
        link.symlink_to(folder)


@pytest.fixture
def as_users_call():
    """Without the checks of signatures that the suite adds, which would raise first."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def tmp_path(tmp_path):
    """Every file of every test lies where users' files lie: on a path with spaces, quotes and
    letters beyond ASCII."""
    folder = tmp_path / "mes modèles 火 'q' #1"
    folder.mkdir()
    return folder


def pytest_make_parametrize_id(val):
    """Names bytes by their number: gzip writes the time into them, and every worker must collect
    the same names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


_states = {}


@pytest.fixture(autouse=True)
def numbers_of_a_file_do_not_depend_on_its_other_tests(request):
    """Sets a file's generators of random numbers back to where they were after its import: a test
    alone draws the same."""
    generators = [
        value for value in vars(request.module).values() if isinstance(value, np.random.Generator)
    ]
    states = _states.setdefault(
        request.module.__name__, [generator.bit_generator.state for generator in generators]
    )
    for generator, state in zip(generators, states, strict=True):
        generator.bit_generator.state = state


@pytest.fixture(autouse=True)
def links_end_with_their_test(monkeypatch):
    """The thread of a process's links works on, and what it draws changes the numbers that
    hypothesis draws elsewhere."""
    from jaxformer.parallel import peers  # here the plugin that checks shapes is ready

    made, begin = [], peers.Peers.__init__

    def begin_and_note(self, *arguments, **options):
        made.append(self)
        begin(self, *arguments, **options)

    monkeypatch.setattr(peers.Peers, "__init__", begin_and_note)
    yield
    for one in made:
        one._working.clear()
    for one in made:
        one.close()


_finished = itertools.count()


def pytest_runtest_teardown(item):
    """Forgets compiled programs before the process has more pieces of memory than Linux lets it map
    (65,530 by default).

    XLA:CPU maps some for every program, and ends with a segmentation fault where it may not: a
    worker compiles thousands.
    """
    maps = Path("/proc/self/maps")
    # ten tests add some thousand
    if next(_finished) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()


def pytest_addoption(parser):
    """`--part K/N`: the K-th of N parts of the tests that are asked for, so that a few changes
    together see all of them."""
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the K-th of N parts of the tests, by a hash of their names",
    )


def in_part(name, part):
    """Whether a test is in the part K/N."""
    k, n = map(int, part.split("/"))
    return zlib.crc32(name.encode()) % n == k - 1


@pytest.hookimpl(tryfirst=True)  # before the expression of -m is applied
def pytest_collection_modifyitems(config, items):
    """Marks the parameters of a test beyond those that `thorough_after(n)` leaves in `make test`;
    keeps a `--part` of all."""
    seen = collections.Counter()
    for item in items:
        # every worker must collect the same names, and a part of them is chosen by name
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid}: the name of a test holds an address in memory; give `ids`"
            )
        marker = item.get_closest_marker("thorough_after")
        if marker is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] >= marker.args[0]:
                item.add_marker("thorough")
            seen[name] += 1
    part = config.getoption("--part")
    if part is not None:
        items[:] = [item for item in items if in_part(item.nodeid, part)]


def pytest_sessionfinish(session, exitstatus):
    """A part may hold none of a few tests: that is no failure."""
    is_empty = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if is_empty and session.config.getoption("--part") is not None:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True, scope="session")
def no_pages():
    """Runs of tests draw no pages, which take longer than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxformer.tools.analysis.report.refresh", lambda folder: None)
        patch.setattr("jaxformer.tools.analysis.report.run_report", lambda result, records: None)
        yield
