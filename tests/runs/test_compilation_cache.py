"""The second start of an experiment compiles nothing that takes long: programs persist in the
user's own cache."""

import inspect
import os
import stat
import subprocess
import sys
import time
import zlib

import jax
import pytest
from jax._src import compilation_cache as jax_cache, compiler

from jaxformer.runs import compilation_cache

EXPERIMENT = """
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig
from jaxformer.training import Experiment

experiment = Experiment(
    name="tiny",
    model=ModelConfig(vocab_size=17, num_layers=2, d_model=16, num_heads=2, context_length=16),
    data=Reverse(),
    steps=2,
    batch_size=4,
    eval_batches=1,
)
"""
START = """
import collections, json, sys, jax
from jaxformer import cli
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
assert cli.main(["train", "tiny.py", *sys.argv[1:]]) == 0
print(events["cache_hits"], events["cache_misses"])
"""


@pytest.mark.slow
def test_a_second_process_takes_the_train_step_from_the_cache(tmp_path):
    """Also after one of its programs was torn, as by a kill while it was written: that one is
    compiled and kept again."""
    (tmp_path / "tiny.py").write_text(EXPERIMENT)

    def start(name):
        """(hits, misses) of a process that trains a run of this name: another run, the same
        programs."""
        words = [sys.executable, "-c", START, f"--name={name}"]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = (
            "0"  # however long they took to compile
        )
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert "Error reading" not in done.stderr
        return map(int, done.stdout.splitlines()[-1].split())

    hits, misses = start("first")
    assert hits < misses  # two additions of numbers may be one program
    folder = tmp_path / "cache" / "jaxformer" / "compiled"
    written = list(folder.glob("*-cache"))
    assert (
        stat.S_IMODE(folder.stat().st_mode) == 0o700
        and not (tmp_path / "runs" / ".compiled").exists()
    )
    hits, misses = start("second")
    assert hits >= len(written) > 0 and misses == 0
    whole = written[0].read_bytes()
    written[0].write_bytes(whole[: len(whole) // 2])
    start("third")
    assert zlib.decompress(written[0].read_bytes())


def test_torn_and_old_programs_are_removed(tmp_path):
    whole = jax_cache.compress_executable(bytes(range(256)) * 20)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    files = {
        "whole": whole,
        "torn": whole[:-1],
        "flipped": bytes(flipped),
        "empty": b"",
        "of another compression": b"?" + whole[1:],
        "old": whole,
    }
    for name, data in files.items():
        (tmp_path / f"jit_{name}-cache").write_bytes(data)
    os.utime(tmp_path / "jit_old-cache", (time.time() - 40 * 24 * 3600,) * 2)
    (tmp_path / "notes").write_text("kept")
    compilation_cache.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir())[:2] == ["jit_whole-cache", "notes"]
    assert len(list(tmp_path.glob("jit_*"))) == 1


def test_what_was_read_once_is_not_read_again(tmp_path, monkeypatch):
    """A start reads the programs that are new since the last one: a folder may hold GB, and what is
    read looks used."""
    read = []
    monkeypatch.setattr(compilation_cache, "is_torn", lambda data: read.append(data))
    old, new = jax_cache.compress_executable(b"old"), jax_cache.compress_executable(b"new")
    (tmp_path / "jit_old-cache").write_bytes(old)
    compilation_cache.tidy(tmp_path)
    os.utime(tmp_path / "jit_old-cache", (time.time(), time.time() - 3600))
    (tmp_path / "jit_new-cache").write_bytes(new)
    compilation_cache.tidy(tmp_path)
    assert read == [old, new]


@pytest.mark.parametrize("callbacks", [[], ["its address"]])
@pytest.mark.parametrize("least", [0.0, 0.2])
def test_each_process_keeps_what_jax_keeps_of_one(callbacks, least, monkeypatch):
    """`write` beside JAX's own, which it replaces: the same programs, by the time that they took to
    compile."""
    takes_callbacks = "host_callbacks" in inspect.signature(compiler._cache_write).parameters
    if callbacks and not takes_callbacks:
        callbacks = []  # this version keeps programs with callbacks, too
    more = [callbacks] if takes_callbacks else []
    kept, before = [], jax.config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.setattr(jax_cache, "put_executable_and_time", lambda key, *_: kept.append(key))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    try:
        for write in (compilation_cache.write, compiler._cache_write):
            kept.append("by")
            for seconds in (0.0, 0.1, 0.2, 0.3, 5.0):
                write(str(seconds), seconds, "jit_f", None, None, *more)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    half = len(kept) // 2
    assert kept[:half] == kept[half:] and (half == 1) == bool(callbacks)


def test_where_programs_persist(tmp_path, monkeypatch, caplog):
    """The user's own folder, named otherwise, beside a bucket's runs; and nowhere, where none can
    be made."""
    before, folder = (
        jax.config.jax_compilation_cache_dir,
        lambda: jax.config.jax_compilation_cache_dir,
    )
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        compilation_cache.enable(tmp_path / "runs")
        assert folder() == str(tmp_path / "jaxformer" / "compiled")
        compilation_cache.enable("gs://bucket/runs")
        assert folder() == "gs://bucket/runs/.compiled"
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        compilation_cache.enable()
        assert (
            "compiled programs are not kept" in caplog.text
            and folder() == "gs://bucket/runs/.compiled"
        )
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")  # JAX reads it
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        compilation_cache.enable()
        assert folder() == "gs://bucket/runs/.compiled"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
