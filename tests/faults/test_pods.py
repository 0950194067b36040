"""Rows 10 and 11: steps that hang; processes that are killed, stopped, cut off, late, or slower
than the others."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.faults.harness import Process, Training, assert_same, resumed_after
from tests.faults.pods import Pod, found
from tests.tiny import EXPERIMENT

COUNT, STEPS = 3, 60
OPTIONS = (
    f"--steps={STEPS}",
    "--log-every=1",
    "--eval-every=30",
    "--checkpoints.every=10",
    "--batch-size=6",
)
POD = (*OPTIONS, "--mesh.data=-1", "--model.dropout-rate=0.1")
SILENT = "is silent for 30 s: it was stopped, or the network to it is cut"


def start(training, *more, **options):
    return Pod(COUNT, *training.options, *more, folder=training.folder, devices=1, **options)


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path / "run", *POD)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed") / "run", *POD)
    with start(training) as pod:
        pod.finish()
    return training.ending()


def assert_restarts(training, undisturbed):
    """The same command ends as if nothing had happened; the step after which it went on."""
    with start(training) as pod:
        pod.finish()
        resumed = resumed_after(pod.said(0))
    assert_same(training.ending(), undisturbed)
    return resumed


# ---- row 11


@pytest.mark.fault
def test_killed_processes(training, undisturbed, report):
    """At random moments of a start, a compilation, a step, a save. Process 0 is one of them."""
    rng, seconds, trials = random.Random(0), [], 5
    for trial in range(trials):
        victim = (2, 0, 1, 0, 2)[trial]
        with start(training) as pod:
            if trial < COUNT:
                pod.wait_for(f"/{STEPS} loss", times=rng.randrange(1, 15))
                time.sleep(rng.uniform(0, 0.3))
            else:
                time.sleep(rng.uniform(0, 15))
            pod[victim].kill()
            if trial < COUNT:  # all have met
                seconds.append(pod.assert_lost(victim))
    assert_restarts(training, undisturbed)
    note = f"survivors name it and end after {min(seconds):.1f} to {max(seconds):.1f} s"
    report(
        11,
        "a process killed at random moments",
        trials=trials,
        detected=trials,
        recovered=trials,
        note=note,
    )


@pytest.mark.fault
def test_stopped_processes(training, undisturbed, report):
    """The others end by its name. When it goes on, it ends by itself with one line."""
    seconds = []
    for victim in (2, 0):
        with start(training) as pod:
            pod.wait_for(f"/{STEPS} loss", times=5)
            pod[victim].send(signal.SIGSTOP)
            before = len(pod.lines(victim))
            seconds.append(pod.assert_lost(victim))
            assert all(SILENT in pod.said(i) for i in range(COUNT) if i != victim)
            pod[victim].send(signal.SIGCONT)
            assert pod[victim].end(30) == 4
            steps = f"/{STEPS} loss"  # process 0 had one on its way
            (line,) = [line for line in pod.lines(victim)[before:] if steps not in line]
            assert line.startswith("jaxformer: process"), line
    assert_restarts(training, undisturbed)
    note = (
        f"survivors name it and end after {min(seconds):.0f} to {max(seconds):.0f} s; continued, "
        f"it ends with one line"
    )
    report(11, "a process stopped (SIGSTOP)", trials=2, detected=2, recovered=2, note=note)


@contextlib.contextmanager
def networks(count):
    """Network namespaces joined by a bridge: (names, addresses, cut(i)). Each has /etc/hosts of its
    own."""
    run = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True)
    tag = f"jf{os.getpid() % 10000}"
    names, addresses = (
        [f"{tag}n{i}" for i in range(count)],
        [f"10.213.7.{i + 1}" for i in range(count)],
    )
    try:
        run("link", "add", tag, "type", "bridge")
        run("link", "set", tag, "up")
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            run("netns", "add", name)
            run("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("link", "set", f"{tag}v{i}", "master", tag, "up")
            run("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("-n", name, "link", "set", "eth0", "up")
            run("-n", name, "link", "set", "lo", "up")
            os.makedirs(f"/etc/netns/{name}", exist_ok=True)
            # gloo listens at the address of the host's name
            with open(f"/etc/netns/{name}/hosts", "w") as hosts:
                hosts.write(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield names, addresses, lambda i: run("link", "set", f"{tag}v{i}", "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            with contextlib.suppress(OSError):
                os.remove(f"/etc/netns/{name}/hosts")
                os.rmdir(f"/etc/netns/{name}")
        subprocess.run(["ip", "link", "del", tag], capture_output=True)


@pytest.mark.fault
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_network_that_is_cut(training, undisturbed, report):
    """Each side names who is silent, and ends."""
    with networks(COUNT) as (names, addresses, cut):
        prefix = {i: ["ip", "netns", "exec", name] for i, name in enumerate(names)}
        with start(training, prefix=prefix, host=addresses[0]) as pod:
            pod.wait_for(f"/{STEPS} loss", times=5)
            cut(2)
            begin = time.monotonic()
            assert pod.codes(60) == dict.fromkeys(range(COUNT), 4), [
                pod.said(i)[-2000:] for i in range(COUNT)
            ]
            seconds = time.monotonic() - begin
            for i, silent in ((0, 2), (1, 2), (2, 0)):
                assert pod.name(silent) in pod.said(i) and SILENT in pod.said(i), pod.said(i)[
                    -2000:
                ]
    assert_restarts(training, undisturbed)
    note = f"network namespaces; both sides name who is silent and end after {seconds:.0f} s"
    report(11, "the network to a process cut", trials=1, detected=1, recovered=1, note=note)


@pytest.mark.fault
def test_a_late_process(training, undisturbed, report):
    late = 40.0
    with start(training, which=[0, 2]) as pod:
        time.sleep(late)
        pod.start(1)
        pod.finish()
    assert_same(training.ending(), undisturbed)
    report(
        11,
        "a process started late",
        trials=1,
        detected=1,
        recovered=1,
        note=f"{late:.0f} s late: the others wait",
    )


COMPILES = """
import collections, sys, time
import jax
from jax._src import compiler
from jaxformer import cli

events, compiled = collections.Counter(), compiler.backend_compile_and_load
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))


def compile(backend, module, *rest):
    if (
        {seconds}
        and "step" in str(module.operation.attributes["sym_name"])
        and jax.process_index() == 1
    ):
        time.sleep({seconds})
    return compiled(backend, module, *rest)


compiler.backend_compile_and_load = compile
code = cli.main(["train", "tiny", *sys.argv[1:]])
print("hits", events["cache_hits"], "misses", events["cache_misses"], flush=True)
sys.exit(code)
"""


@pytest.mark.fault
def test_a_slow_compilation(training, undisturbed, report):
    """Longer than gloo waits for a process, 30 s: the others have the program in their caches."""
    caches = {i: {"XDG_CACHE_HOME": str(training.folder / f"cache-{i}")} for i in range(COUNT)}
    with start(training, each=caches) as pod:
        pod.wait_for(f"/{STEPS} loss", times=2)
        pod[0].kill()
        pod.assert_lost(0)
    with start(
        training,
        each=caches | {1: {"XDG_CACHE_HOME": str(training.folder / "empty")}},
        code=COMPILES.format(seconds=45),
    ) as pod:
        pod.finish()
    assert_same(training.ending(), undisturbed)
    report(
        11,
        "a process compiles 45 s, the others have the program",
        trials=1,
        detected=1,
        recovered=1,
        note="they wait for it",
    )


@pytest.mark.fault
def test_restarts_under_load(training, undisturbed, report):
    """With a busy loop per core: every process takes every program from the cache."""
    code, trials, hits = COMPILES.format(seconds=0), 5, []
    # every program, however long it took to compile
    keep = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    caches = {
        i: {"XDG_CACHE_HOME": str(training.folder / f"cache-{i}"), **keep} for i in range(COUNT)
    }
    with start(training, code=code, each=caches) as pod:
        pod.finish()
        assert all(int(found(r"misses (\d+)", pod.said(i))) > 0 for i in range(COUNT))
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        for trial in range(trials):
            with start(training, f"--name=tiny-again-{trial}", code=code, each=caches) as pod:
                pod.finish()
                counts = [found(r"hits (\d+ misses \d+)", pod.said(i)) for i in range(COUNT)]
            assert all(count.endswith("misses 0") for count in counts), counts
            hits += [int(count.split()[0]) for count in counts]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    note = f"{min(hits)} to {max(hits)} programs of each process from its cache, 0 missed"
    report(
        11,
        "restarts with a warm cache under load",
        trials=trials,
        detected=trials,
        recovered=trials,
        note=note,
    )


# ---- row 10

HANGS = """
import os, time
from dataclasses import dataclass, replace
import jax
from jaxformer.data.sources import Text, Windows
from jaxformer.objectives.tokens import TokenCrossEntropy
calls = {"data": 0, "objective": 0}
def count(name):
    calls[name] += 1
    if os.environ.get("HANGS") == name and calls[name] > 25:
        time.sleep(10_000)
class Source(Windows):
    def take_rows(self, indices):
        count("data")
        return super().take_rows(indices)
@dataclass(frozen=True)
class Data(Text):
    def open(self, model):
        dataset = super().open(model)
        return replace(dataset, train=Source(dataset.train.tokens, dataset.train.length))
def objective(model, params, batch, context):
    sums = TokenCrossEntropy()(model, params, batch, context)
    jax.debug.callback(lambda _: count("objective"), sums.loss)
    return sums
""" + EXPERIMENT.replace(
    'data=Text(path="text.txt")', 'data=Data(path="text.txt"), objective=objective'
)


@pytest.mark.fault
@pytest.mark.parametrize("count", [1, 2])
def test_steps_that_hang(count, tmp_path, report):
    """In a host callback of an objective, in a data source: the stacks name the place."""
    more = ("--mesh.data=-1",) if count > 1 else ()
    start = lambda training, **environment: Pod(
        count, *training.options, folder=training.folder, devices=1, **environment
    )
    undisturbed, seconds = Training(tmp_path / "undisturbed", *OPTIONS, *more, experiment=HANGS), []
    with start(undisturbed) as pod:
        pod.finish()
    # JAX calls the host from process 0
    for name, victim in (
        ("data", count - 1),
        ("objective", 0),
    ):
        training = Training(tmp_path / name, *OPTIONS, *more, experiment=HANGS)
        with start(training, each={victim: {"HANGS": name}}, JAXFORMER_STEP_LIMIT="4") as pod:
            pod.wait_for(f" 20/{STEPS} loss")
            begin = time.monotonic()
            assert set(pod.codes(120).values()) == {5}, [pod.said(i)[-3000:] for i in range(count)]
            seconds.append(time.monotonic() - begin)
            for i in range(count):
                assert "no step ended for" in pod.said(i) and "JAXFORMER_STEP_LIMIT=4" in pod.said(
                    i
                ), pod.said(i)
                assert "Thread 0x" in pod.said(i)
            assert "in count" in pod.said(victim)  # the sleeping function, in a stack
        with start(training) as pod:
            pod.finish()
        assert_same(training.ending(), undisturbed.ending())
    note = f"limit 4 s: the stacks, exit code 5, after {min(seconds):.0f} to {max(seconds):.0f} s"
    report(
        10,
        f"a step that hangs, {count} process{'es' if count > 1 else ''}",
        trials=2,
        detected=2,
        recovered=2,
        note=note,
    )


@pytest.mark.fault
def test_a_stopped_run_of_one_process_goes_on(tmp_path, report):
    """Ctrl-Z for longer than a step may take, then fg."""
    undisturbed, training = (
        Training(tmp_path / name, *OPTIONS) for name in ("undisturbed", "stopped")
    )
    undisturbed.finish()
    with training.start(JAXFORMER_STEP_LIMIT="4") as process:
        process.wait_for(f"/{STEPS} loss", times=10)
        process.send(signal.SIGSTOP)
        time.sleep(15)
        process.send(signal.SIGCONT)
        assert process.end() == 0, process.said()
    assert_same(training.ending(), undisturbed.ending())
    report(
        10,
        "Ctrl-Z for longer than the limit, then fg",
        trials=1,
        detected=1,
        recovered=1,
        note="the run goes on",
    )


WATCHED = """
import sys, time
from jaxformer.parallel.processes import Watchdog
with Watchdog(1.0) as watchdog:
    for step in range(4):
        watchdog.beat(step)
        time.sleep(2)
    watchdog.beat(4)
    time.sleep(8)
    print("patient", flush=True)
    watchdog.beat(5)
    time.sleep(200)
"""


@pytest.mark.fault
def test_a_step_may_take_ten_times_as_long_as_the_longest(tmp_path):
    """The first ones as well, though none was seen before them."""
    with Process([sys.executable, "-c", WATCHED], tmp_path, tmp_path / "out") as process:
        assert process.end(120) == 5
        assert (
            "patient" in process.said() and "at step 5; JAXFORMER_STEP_LIMIT=1" in process.said()
        ), process.said()
        assert "Thread 0x" in process.said()
