"""Every phase of a run of two processes × every fault × each process: nobody waits longer than the
limit.

A process reaches a phase and is struck there, by itself or by the test. Each start is also the
restart after the fault before it: at the end of a phase's faults the run must have the bits of one
that nobody disturbed.
"""

import contextlib
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from experiments.launch import pod_sim
from tests.faults.harness import Training, assert_same
from tests.faults.pods import Pod

OPTIONS = (
    "--steps=12",
    "--log-every=1",
    "--eval-every=6",
    "--checkpoints.every=4",
    "--batch-size=4",
    "--mesh.data=-1",
)
OPTIONS = (*OPTIONS, "--checkpoints.keep-latest=9", "--model.dropout-rate=0.1")
LIMITS = {
    "JAXFORMER_SILENCE_LIMIT": "12",
    "JAXFORMER_STEP_LIMIT": "8",
    "JAXFORMER_JOIN_LIMIT": "60",
}
LONGEST = 160  # seconds: ten times the limit of a step, the limit of silence, and a busy machine
PHASES = ["start", "compile", "restore", "train", "save", "evaluation", "end"]

# the command `train`, which strikes once at a phase
STRIKES = """
import errno, functools, os, pathlib, sys, time
from dataclasses import replace
from jaxformer import cli
from jaxformer.parallel import processes
from jaxformer.runs import checkpoint_reader, checks, loop

at, fault, index = os.environ.get("AT"), os.environ.get("FAULT"), os.environ["JAXFORMER_PROCESS"]
struck = []


def strike():
    if not fault or (
        struck and at != "restore"
    ):  # a file that cannot be read stays so: reading is tried again
        return
    struck.append(True)
    pathlib.Path("struck-" + index).touch()
    if fault in ("EIO", "ENOSPC"):
        number = getattr(errno, fault)
        raise OSError(number, os.strerror(number), "a file of the test")
    if fault == "slow":
        return time.sleep(8)
    while not pathlib.Path("go").exists():  # killed or stopped by the test, cut off, or hung
        time.sleep(0.05)


def held(function, phase, when=lambda *arguments: True):
    @functools.wraps(function)
    def call(*arguments, **options):
        if at == phase and when(*arguments):
            strike()
        return function(*arguments, **options)

    return call


checks.open_data = held(checks.open_data, "start")
checkpoint_reader.ocp.load = held(checkpoint_reader.ocp.load, "restore")
is_step = lambda compile, backend, module, *rest: (
    "step" in str(module.operation.attributes["sym_name"])
)
processes._compile = held(processes._compile, "compile", is_step)
processes.Work.wait = held(
    processes.Work.wait, "save", lambda work, name: "async_write_complete" in name
)
loop.finish = held(loop.finish, "end")
prepare = loop.prepare


def prepare_held(*arguments):
    job, done = prepare(*arguments), []
    # at its second step: a start that fails saves the step before it, so a start may add one step
    late = lambda *_: done.append(1) or len(done) > 1
    return replace(
        job, step=held(job.step, "train", late), evaluate=held(job.evaluate, "evaluation")
    )


loop.prepare = prepare_held
sys.exit(cli.main(["train", "tiny", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A finished run, and the folder of its compiled programs."""
    training = Training(tmp_path_factory.mktemp("undisturbed") / "run", *OPTIONS)
    with start(training, limits={}) as pod:  # it compiles
        pod.finish()
    return training


def programs(training):
    return {
        "XDG_CACHE_HOME": str(training.folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(training, each=None, limits=LIMITS, coordinator=None, cache=None, **environment):
    """Two processes of a run; `coordinator` is the address that process 1 takes for that of process
    0."""
    for name in ("struck-0", "struck-1", "go"):
        (training.folder / name).unlink(missing_ok=True)
    environment = limits | programs(cache or training) | environment
    return Pod(
        2,
        *training.options,
        folder=training.folder,
        devices=1,
        code=STRIKES,
        each=each,
        **environment,
    )


def begun(folder, undisturbed):
    """The same run after its fourth step."""
    training = Training(folder, *OPTIONS)
    shutil.copytree(undisturbed.folder / "runs", folder / "runs")
    for step in training.steps():
        if step > 4:
            shutil.rmtree(training.checkpoints / str(step))
    (training.run / "result.json").unlink()
    return training


def struck(training, pod, victim):
    """Waits until the victim is at its phase."""
    end = time.monotonic() + 400
    while not (training.folder / f"struck-{victim}").exists():
        assert pod[victim].running and time.monotonic() < end, pod.said(victim)[-3000:]
        time.sleep(0.02)
    return time.monotonic()


def ended(pod, codes, but=()):
    """All others end by themselves within the limit, each with one of these codes and one line that
    says why."""
    found = pod.codes(LONGEST, but=but)
    for index, code in found.items():
        said = pod.said(index)
        assert code in codes and "jaxformer: " in said, (found, said[-3000:])
        if 5 not in codes and code != 1:
            assert "Traceback" not in said, said[-3000:]
    return found


def killed(pod, training, victim):
    pod[victim].kill()
    ended(pod, {4}, but=(victim,))
    assert pod.name(victim) in pod.said(1 - victim), pod.said(1 - victim)[-3000:]


def stopped(pod, training, victim):
    pod[victim].send(signal.SIGSTOP)
    ended(pod, {4}, but=(victim,))
    assert pod.name(victim) in pod.said(1 - victim) and "is silent for 12 s" in pod.said(1 - victim)
    pod[victim].send(signal.SIGCONT)
    assert pod[victim].end(30) == 4


def hung(pod, training, victim):
    """It lives and never goes on: the watchdog, or those who wait for it, end the run. Gloo gives
    up after 30 s."""
    ended(pod, {4, 5})


def failed(pod, training, victim):
    """One process cannot read or write: its reason reaches all, with a code that launchers restart;
    2 for a full disk."""
    ended(pod, {1, 2, 4, 6})
    for index in range(2):
        assert any(why in pod.said(index) for why in ("Input/output error", "No space left")), (
            pod.said(index)[-3000:]
        )


FAULTS = {"kill": killed, "stop": stopped, "hang": hung, "EIO": failed, "ENOSPC": failed}


@pytest.mark.fault
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_at_a_phase(phase, undisturbed, tmp_path, report):
    training, seconds, trials = begun(tmp_path / "run", undisturbed), [], 0
    for fault, expected in FAULTS.items():
        if phase == "save" and fault in ("EIO", "ENOSPC"):
            continue  # the run goes on, see below
        if phase == "restore" and fault == "ENOSPC":
            continue  # no read fails so
        # a silence is noticed before a step that does not end, as with the limits that a user has
        limits = LIMITS | ({} if fault == "hang" else {"JAXFORMER_STEP_LIMIT": "60"})
        for victim in (1, 0):
            with start(
                training, {victim: {"AT": phase, "FAULT": fault}}, limits, cache=undisturbed
            ) as pod:
                begin = struck(training, pod, victim)
                expected(pod, training, victim)
                seconds.append(time.monotonic() - begin)
                trials += 1
    with start(training, {1: {"AT": phase, "FAULT": "slow"}}, cache=undisturbed) as pod:
        pod.finish()
        assert (training.folder / "struck-1").exists()
    assert_same(training.ending(), undisturbed.ending())
    note = (
        f"all ended by name after {min(seconds):.0f} to {max(seconds):.0f} s; then one process "
        f"was slow, the others waited"
    )
    report(
        11,
        f"kill, stop, hang, EIO, full disk at: {phase}",
        trials=trials,
        detected=trials,
        recovered=trials,
        note=note,
    )


@pytest.mark.fault
@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_that_is_shorter_than_the_limit(phase, undisturbed, tmp_path, report):
    for victim in (0, 1):
        training = begun(tmp_path / str(victim), undisturbed)
        limits = LIMITS | {"JAXFORMER_STEP_LIMIT": "60"}
        with start(
            training, {victim: {"AT": phase, "FAULT": "stop"}}, limits, cache=undisturbed
        ) as pod:
            struck(training, pod, victim)
            pod[victim].send(signal.SIGSTOP)
            time.sleep(6)
            (training.folder / "go").touch()
            pod[victim].send(signal.SIGCONT)
            pod.finish()
        assert_same(training.ending(), undisturbed.ending())
    report(
        11,
        f"a process stopped for half the limit at: {phase}",
        trials=2,
        detected=2,
        recovered=2,
        note="the run goes on",
    )


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_process_cannot_write_its_part_of_a_save(fault, victim, undisturbed, tmp_path, report):
    """No process waits for it: all give the step up, process 0 says why, and training goes on."""
    training = begun(tmp_path / "run", undisturbed)
    with start(training, {victim: {"AT": "save", "FAULT": fault}}, cache=undisturbed) as pod:
        pod.finish()
        warning = next(line for line in pod.said(0).splitlines() if "was not saved" in line)
        assert "earlier checkpoints are kept" in warning and ("No space left" in warning) == (
            fault == "ENOSPC"
        ), warning
        assert victim == 0 or pod.name(1) in warning, warning
    assert_same(training.ending(), undisturbed.ending())
    note = "the save is given up by all at once, with one warning; training goes on"
    report(
        11,
        f"{fault} in process {victim} during a save",
        trials=1,
        detected=1,
        recovered=1,
        note=note,
    )


class Relay:
    """A port that leads to another one. `cut`: nothing passes any more, and no connection
    closes."""

    def __init__(self, port):
        self.server, self.port, self.passes = (
            socket.create_server(("127.0.0.1", 0)),
            port,
            threading.Event(),
        )
        self.passes.set()
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            near, _ = self.server.accept()
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:  # process 0 does not listen yet
                near.close()
                continue
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=ends, daemon=True).start()

    def copy(self, source, target):
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                self.passes.wait()
                target.sendall(data)
            self.passes.wait()  # an end is no more seen through a cut than a message


@pytest.mark.fault
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seconds", [6, 40])
def test_the_network_is_cut_at_a_phase(phase, seconds, undisturbed, tmp_path, report):
    """Our links and those of JAX's service.

    The run goes on after a short cut; in a longer one all end by name.
    """
    training, port = begun(tmp_path / "run", undisturbed), pod_sim.free_port()
    relay, limits = Relay(port), LIMITS | {"JAXFORMER_STEP_LIMIT": "60"}
    each = {
        0: {"JAXFORMER_COORDINATOR": f"127.0.0.1:{port}"},
        1: {"JAXFORMER_COORDINATOR": relay.address, "AT": phase, "FAULT": "cut"},
    }
    with start(training, each, limits, cache=undisturbed) as pod:
        struck(training, pod, 1)
        relay.passes.clear()
        if seconds < 12:
            time.sleep(seconds)
            relay.passes.set()
            (training.folder / "go").touch()
            pod.finish()
        else:
            ended(pod, {4})
            assert all(pod.name(1 - index) in pod.said(index) for index in range(2))
            relay.passes.set()
    if seconds >= 12:
        with start(training, cache=undisturbed) as pod:
            pod.finish()
    assert_same(training.ending(), undisturbed.ending())
    note = (
        "the run goes on" if seconds < 12 else "both sides name the other; the same command goes on"
    )
    report(
        11,
        f"the network cut for {seconds} s at: {phase}",
        trials=1,
        detected=1,
        recovered=1,
        note=note,
    )


@pytest.mark.fault
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_and_a_kill_of_the_other(victim, undisturbed, tmp_path, report):
    """The one with the signal waits for a step that the other will never say."""
    training = begun(tmp_path / "run", undisturbed)
    with start(training, {victim: {"AT": "train", "FAULT": "kill"}}, cache=undisturbed) as pod:
        struck(training, pod, victim)
        pod[1 - victim].send(signal.SIGTERM)
        killed(pod, training, victim)
    with start(training, {0: {"AT": "train", "FAULT": "twice"}}, cache=undisturbed) as pod:
        struck(training, pod, 0)
        for _ in range(2):
            for index in range(2):
                pod[index].send(signal.SIGTERM)
            time.sleep(0.02)
        (training.folder / "go").touch()
        assert pod.codes(LONGEST) == {0: 143, 1: 143}, [
            pod.said(index)[-2000:] for index in range(2)
        ]
    with start(training, cache=undisturbed) as pod:
        pod.finish()
    assert_same(training.ending(), undisturbed.ending())
    note = "the survivor names the dead one; SIGTERM twice saves once"
    report(
        11,
        f"SIGTERM and SIGKILL (process {victim}) at once",
        trials=2,
        detected=2,
        recovered=2,
        note=note,
    )


OTHER = {
    "XLA_FLAGS": "--xla_cpu_enable_fast_math=true",
    "JAX_ENABLE_X64": "1",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_NUM_CPU_DEVICES": "3",
}


@pytest.mark.fault
@pytest.mark.parametrize("name", OTHER)
def test_a_host_with_other_numerics_or_devices(name, tmp_path, report):
    training = Training(tmp_path / "run", *OPTIONS)
    with start(training, {1: {name: OTHER[name]}}, limits={}) as pod:
        assert pod.codes(400) == {0: 2, 1: 2}, [pod.said(index)[-2000:] for index in range(2)]
        for index in range(2):
            (line,) = [line for line in pod.lines(index) if line]
            told = (
                "process 1 has 3 x cpu, process 0 has 1 x cpu"
                if "DEVICES" in name
                else f"{name.lower()} is "
            )
            assert told in line.lower(), line
    assert not Path(training.folder / "runs").exists()
    report(
        11,
        f"{name}={OTHER[name]} on one host",
        trials=1,
        detected=1,
        recovered=1,
        note="refused before a step",
    )
