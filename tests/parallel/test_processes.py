"""Several real processes as one run: the same numbers as one, and one end for all, by name, however
it comes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.launch import pod_sim
from jaxformer import config, parallel, sharding
from jaxformer.errors import ConfigError
from jaxformer.parallel import meeting, peers, processes
from jaxformer.parallel.link import Link
from jaxformer.parallel.processes import Processes
from jaxformer.runs import checkpoint, loop
from jaxformer.runs.manifest import fingerprints
from jaxformer.runs.run_folder import run_folder
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state
from tests.faults.harness import Process
from tests.faults.pods import Pod, found
from tests.tiny import EXPERIMENT, furnish

LONGER = (
    EXPERIMENT.replace("context_length=16", "context_length=16, dropout_rate=0.1")
    .replace(
        "steps=6, batch_size=4, log_every=2, eval_every=3",
        "steps=12, batch_size=8, log_every=1, eval_every=6, mesh=Mesh()",
    )
    .replace("every=2)", "every=4, keep_latest=9)")
)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return furnish(tmp_path, LONGER)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The record of the same run in one process."""
    folder = furnish(tmp_path_factory.mktemp("alone"), LONGER)
    here = os.getcwd()
    os.chdir(folder)
    try:
        return record(loop.train(config.load("tiny")).folder)
    finally:
        os.chdir(here)


def record(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same(found, expected):
    """Every step once, with the same numbers."""
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for name in ("step", "loss", "grad_norm", "tokens", "validation_loss"):
        mine, theirs = (
            [line[name] for line in lines if name in line] for lines in (found, expected)
        )
        # float32 sums in another order, amplified over a few steps of Adam
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, err_msg=name)


def run_of(workplace):
    (folder,) = (workplace / "runs").glob("tiny-*")
    return folder


# ---- the whole run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "mesh"), [(2, ["--mesh.fsdp=4", "--mesh.tensor=2"]), (4, [])], ids=["2", "4"]
)
def test_processes_train_as_one_does(count, mesh, alone, workplace):
    with Pod(count, *mesh) as pod:
        pod.finish()
        assert "sample:" in pod.said(0)
        assert not any(pod.lines(i) for i in range(1, count))  # what is left is the C++ runtime's
    folder = run_of(workplace)
    assert_same(record(folder), alone)
    assert (folder / "figures" / "loss.png").is_file() and (folder / "result.json").is_file()


@pytest.mark.slow
def test_sigterm_to_one_stops_all_at_one_step_and_nothing_is_done_again(alone, workplace):
    with Pod(4) as pod:
        pod.wait_for("step  1/12")
        pod[3].send(signal.SIGTERM)
        assert set(pod.codes().values()) == {143}, pod.said(0)
        (stops,) = {found(r"stopped by SIGTERM after step (\d+)", pod.said(i)) for i in range(4)}
    folder, stop = run_of(workplace), int(stops)
    saved = max(
        int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()
    )
    before = (folder / "metrics.jsonl").read_text()
    assert (
        saved == stop < 12
        and max(line["step"] for line in record(folder) if "loss" in line) == stop - 1
    )
    with Pod(2) as pod:
        pod.finish()
        assert f"resuming after step {stop}" in pod.said(0)
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    assert_same(record(folder), alone)


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(workplace):
    folder = run_folder(config.load("tiny"), "runs")
    with checkpoint.Manager(folder.checkpoints), Pod(2) as pod:
        assert pod.codes() == {0: 2, 1: 2}
        for i in range(2):
            assert f"another trainer holds this run (pid {os.getpid()}" in pod.said(i), pod.said(i)
            assert "Traceback" not in pod.said(i)


# ---- checkpoints

CHECKPOINT = """
import sys
from functools import partial
import jax
from jaxformer import config, parallel
from jaxformer.parallel import processes
from jaxformer.runs import checkpoint
from jaxformer.runs.manifest import fingerprints
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, state_shardings

processes.initialize()
recipe = build(config.load("tiny"))
mesh = parallel.run_mesh(parallel.Mesh({axes}), 8)
places = state_shardings(recipe, mesh)


def body():
    with jax.set_mesh(mesh), checkpoint.Manager("kept") as manager:
        state = jax.jit(partial(init_state, recipe), out_shardings=places)()
        if {save}:
            manager.save(3, state, dict(x=1), wait=True)
        else:
            abstract = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, places
            )
            step, state, metadata = manager.restore(abstract)
            assert step == 3 and metadata == dict(x=1)
        spread = [not leaf.is_fully_addressable for leaf in jax.tree.leaves(state)]
        print("prints", all(spread), *fingerprints(jax.tree.leaves(state)))
    return 0


sys.exit(processes.run_together(body))
"""


@pytest.mark.slow
def test_a_checkpoint_of_four_processes_is_restored_exactly_anywhere(workplace):
    prints = lambda pod: {found("prints True (.*)", pod.said(i)) for i in pod.processes}
    with Pod(4, code=CHECKPOINT.format(save=True, axes="fsdp=4, tensor=2")) as pod:
        pod.finish()
        (saved,) = prints(pod)
    with Pod(2, code=CHECKPOINT.format(save=False, axes="data=2, fsdp=4")) as pod:
        pod.finish()
        assert prints(pod) == {saved}
    recipe = build(config.load("tiny"))
    abstract = jax.eval_shape(lambda: init_state(recipe))
    with checkpoint.Manager("kept") as manager:  # one process, one device
        step, state, metadata = manager.restore(abstract)
    assert (step, metadata) == (3, {"x": 1}) and " ".join(
        fingerprints(jax.tree.leaves(state))
    ) == saved
    first = jax.jit(lambda: init_state(recipe))()
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.fault
def test_processes_agree_on_which_checkpoint_is_damaged(workplace):
    with Pod(2, code=CHECKPOINT.format(save=True, axes="data=8")) as pod:
        pod.finish()
    (workplace / "kept" / "3").rename(workplace / "kept" / "5")  # newest, and not what it says
    with Pod(2, code=CHECKPOINT.format(save=False, axes="data=8")) as pod:
        assert pod.codes() == {0: 2, 1: 2}
        for i in range(2):
            assert "every checkpoint is damaged: 5 (" in pod.said(i), pod.said(i)
    assert (workplace / "kept" / "5").is_dir()  # where no step is good, none is renamed


# ---- meeting


def join(index, count, port, limit=10.0):
    """Joins in a thread: (thread, what came of it)."""
    came: dict[str, Any] = {}

    def run():
        try:
            came["peers"] = meeting.meet(f"127.0.0.1:{port}", count, index, limit)
        except Exception as error:
            came["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


def meet(*arguments, **options):
    port = pod_sim.free_port()
    joined = [join(index, count, port, **options) for index, count in arguments]
    for thread, _ in joined:
        thread.join(timeout=60)
    return [came for _, came in joined]


@pytest.mark.thorough
def test_who_never_came_is_named_to_all_who_did():
    for one in meet((0, 4), (2, 4), limit=1.0):
        assert isinstance(one["error"], meeting.MissingProcess)
        assert re.match(
            r"processes 1, 3 never came within 1 s; here are process 0 .*, process 2",
            str(one["error"]),
        )
    (one,) = meet((1, 2), limit=1.0)
    assert "process 0 never came within 1 s: nobody answers at 127.0.0.1:" in str(one["error"])


@pytest.mark.thorough
@pytest.mark.parametrize("third", [(1, 3), (2, 4), (3, 3)])
def test_numbers_that_do_not_fit_together_are_refused(third):
    if third == (3, 3):
        with pytest.raises(ConfigError, match="index from 0 to count - 1"):
            Processes("host:1", 3, 3)
        return
    errors = [one["error"] for one in meet((0, 3), (1, 3), third, limit=5.0)]
    assert isinstance(errors[0], ConfigError) and isinstance(errors[2], ConfigError)
    # if process 2 comes before process 1, the run is refused already, and process 1 finds nobody
    assert isinstance(errors[1], ConfigError) or (
        third == (2, 4) and isinstance(errors[1], meeting.MissingProcess)
    )
    assert "give each its own index and all one count" in str(errors[0])


@pytest.mark.thorough
def test_a_process_that_died_before_the_others_came_may_come_again():
    port = pod_sim.free_port()
    hub, first = join(0, 3, port)
    early = socket.socket()
    while early.connect_ex(("127.0.0.1", port)):
        time.sleep(0.05)
    early = Link(early)
    early.put(index=1, count=3, name="the first try", numerics={})
    time.sleep(0.2)
    early.close()
    joined = [join(1, 3, port)]
    # were 2 there before 1 had come again, the run would begin with the dead one, and end
    time.sleep(1.0)
    joined.append(join(2, 3, port))
    for thread in (hub, *(thread for thread, _ in joined)):
        thread.join(timeout=60)
    assert "first try" not in first["peers"].names[1]
    everybody = [first["peers"], *(one["peers"] for _, one in joined)]
    threads = [threading.Thread(target=one.leave) for one in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)


def test_processes_leave_together():
    met = [one["peers"] for one in meet((0, 3), (1, 3), (2, 3))]
    assert [one.names for one in met] == [met[0].names] * 3 and f"pid {os.getpid()}" in met[
        1
    ].names[0]
    left = []
    threads = [
        threading.Thread(target=lambda one=one: (one.leave(), left.append(one))) for one in met
    ]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.2)
    assert not left  # the third is still at work
    threads[2].start()
    for thread in threads:
        thread.join(timeout=60)
    assert set(map(id, left)) == set(map(id, met))


SILENT = """
import ctypes, sys, time
from jaxformer.parallel import meeting, peers
peers.BEAT, peers.SILENCE = 0.3, 4.0
index = int(sys.argv[1])
meeting.meet(sys.argv[2], 3, index, 60.0)
if index == 1:
    ctypes.PyDLL(None).sleep(2)  # a call that keeps Python's lock: no sign of life meanwhile
print("met", flush=True)
time.sleep(100)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [2, 0])
def test_a_silent_process_is_named_to_all(victim, tmp_path):
    """But a call that keeps Python's lock for less than the limit is no silence. The stopped
    process ends when it goes on."""
    address = f"127.0.0.1:{pod_sim.free_port()}"
    with contextlib.ExitStack() as stack:
        command = lambda i: [sys.executable, "-c", SILENT, str(i), address]
        met = [
            stack.enter_context(Process(command(i), tmp_path, tmp_path / f"out-{i}"))
            for i in range(3)
        ]
        for process in met:
            process.wait_for("met")
        met[victim].send(signal.SIGSTOP)
        for i in {0, 1, 2} - {victim}:
            assert met[i].end(60) == peers.LOST
            named = f"process {victim} (pid {met[victim].process.pid} on "
            assert named in met[i].said() and "is silent for 4 s" in met[i].said(), met[i].said()
        met[victim].send(signal.SIGCONT)
        assert met[victim].end(60) == peers.LOST and met[victim].said().count("\n") == 2, met[
            victim
        ].said()


@pytest.mark.slow
def test_train_says_who_never_came(workplace):
    with Pod(3, which=[0, 2], JAXFORMER_JOIN_LIMIT="3") as pod:
        assert pod.codes() == {0: 4, 2: 4}
        assert all("jaxformer: process 1 never came within 3 s" in pod.said(i) for i in (0, 2))


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[004-007]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
OURS = {"JAXFORMER_COORDINATOR": "host:1234", "JAXFORMER_PROCESSES": "4", "JAXFORMER_PROCESS": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (OURS, Processes("host:1234", 4, 1)),
        (OURS | {"JAXFORMER_PROCESSES": "1", "JAXFORMER_PROCESS": "0"}, None),
        (SLURM, Processes("node004:61447", 4, 2, (0,))),
        (SLURM | OURS, Processes("host:1234", 4, 1)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a pod
    ],
)
def test_processes_are_found_in_the_environment(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes.find() == expected


@pytest.mark.parametrize(
    "change",
    [{"JAXFORMER_PROCESS": "one"}, {"JAXFORMER_PROCESS": "4"}, {"JAXFORMER_COORDINATOR": "host"}],
)
def test_bad_variables_get_one_line(change):
    with pytest.raises(ConfigError):
        processes.find(OURS | change)
    with pytest.raises(ConfigError, match="all three or none"):
        processes.find({"JAXFORMER_PROCESS": "1"})


@pytest.mark.parametrize("text", ["", "5 minutes", "-1", "nan", "inf"])
def test_limits_are_numbers_of_seconds(text, monkeypatch):
    monkeypatch.setenv("JAXFORMER_STEP_LIMIT", text)
    with pytest.raises(ConfigError, match=r"JAXFORMER_STEP_LIMIT=.*expected a number of seconds"):
        processes.step_limit()
    monkeypatch.setenv("JAXFORMER_STEP_LIMIT", "0")
    assert processes.step_limit() is None


# ---- one process


def test_a_single_process_asks_nobody():
    processes.initialize()
    assert (
        processes.is_first()
        and processes.first(lambda: 3) == 3
        and processes.all_gather_object(3) == [3]
    )
    assert processes.run_together(lambda: 7) == 7 and processes.step_limit() == 300
    assert processes.local_examples(parallel.make_mesh(), 8) is None


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "context": 2}, {"data": 1, "tensor": 8}]
)
def test_a_batch_is_put_together_from_rows(mesh):
    mesh = parallel.make_mesh(parallel.Mesh(**mesh))
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 9, (8, 6)),
        "images": rng.normal(size=(8, 4, 2)),
        "lengths": np.arange(8),
    }
    batch = {name: leaf.astype(np.float32) for name, leaf in batch.items()}
    out = processes.global_batch(mesh, 8, batch)
    for name, place in sharding.batch_sharding(mesh, batch).items():
        np.testing.assert_array_equal(out[name], batch[name])
        assert out[name].sharding == place


@pytest.mark.parametrize(
    "words",
    ["", "2", "0 tiny", "x tiny", "2 tiny --devices", "2 tiny --devices x", "2 tiny --devices 0"],
)
def test_pod_sim_refuses_what_is_no_number_of_processes_or_devices(words, capsys):
    assert pod_sim.main(words.split()) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("pod-sim: options: ")
        and "N EXPERIMENT [--devices D]" in error
        and error.count("\n") == 1
    )


@pytest.mark.slow
def test_pod_sim(workplace):
    command = [
        sys.executable,
        "-m",
        "experiments.launch.pod_sim",
        "2",
        "tiny",
        "--devices",
        "1",
        "--steps=2000",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[p0] step    3/2000"):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 143 and "pod-sim: p0 143, p1 143" in rest
