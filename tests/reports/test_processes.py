"""Processes of one run: found, met, named; their rows of a batch; a step that does not end."""

import socket
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.launch import pod_sim
from jaxformer import parallel, sharding
from jaxformer.errors import ConfigError
from jaxformer.parallel import meeting, peers, processes


def meet(port, *members, limit=5.0):
    """What came of each (index, count): its Peers, or its error."""
    came = [None] * len(members)

    def join(place, index, count):
        try:
            came[place] = meeting.meet(f"127.0.0.1:{port}", count, index, limit)
        except Exception as error:
            came[place] = error

    threads = [
        threading.Thread(target=join, args=(place, *member)) for place, member in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return came


def leave(*members):
    threads = [threading.Thread(target=member.leave) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)


@pytest.mark.report(
    "jax-ml/jax#30073", "interTwin-eu/itwinai#481", "EleutherAI/gpt-neox#1069",
    right="variables of a job that are there in part are one clear line, or a single process",
    hit="a KeyError or a ValueError with a traceback from inside JAX",
)  # fmt: skip
@pytest.mark.parametrize(
    "variables, refused",
    [
        ({"SLURM_JOB_ID": "1"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "4"}, False),
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        (
            {
                "SLURM_JOB_ID": "1",
                "SLURM_STEP_NODELIST": "n1",
                "SLURM_NTASKS": "4(x2)",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
            },
            True,
        ),
    ],
)
def test_a_job_with_some_of_its_variables(monkeypatch, variables, refused):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not refused:
        assert processes.find(limit=1.0) is None
        return
    with pytest.raises(
        ConfigError,
        match=r"processes could not be found .*; give JAXFORMER_COORDINATOR, JAXFORMER_PROCESSES",
    ):
        processes.find(limit=1.0)


@pytest.mark.report(
    "huggingface/accelerate#2362",
    "facebookresearch/vissl#453",
    right="a second process 0 is told what it may be",
    hit="it said only that the port cannot be listened on, and to give another one",
)
def test_two_processes_0_on_one_machine():
    port = pod_sim.free_port()
    # the first one
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
        (second,) = meet(port, (0, 2), limit=0.3)
    assert isinstance(second, ConfigError)
    assert f"port {port}: process 0 cannot listen there" in str(
        second
    ) and "no second process 0 of the run" in str(second)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#91940",
    "pytorch/pytorch#135712",
    right="a restart waits for the port of the run before it, and begins",
)
def test_a_restart_waits_for_the_port_of_the_run_before():
    port = pod_sim.free_port()
    before = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    threading.Timer(0.5, before.close).start()
    first, second = meet(port, (0, 2), (1, 2))
    assert first.names == second.names and len(first.names) == 2
    leave(first, second)


@pytest.mark.report(
    "huggingface/accelerate#2818",
    right="processes that were told other numbers of processes are refused, with both numbers",
)
def test_processes_that_count_differently():
    for error in meet(pod_sim.free_port(), (0, 2), (1, 3), limit=3.0):
        assert isinstance(error, ConfigError), error
        assert "of 3, came to a run of 2" in str(error) and "all one count" in str(error)


@pytest.mark.report(
    "marin-community/levanter#432",
    "jax-ml/jax#22740",
    right="those who wait learn which process never came",
)
def test_who_did_not_come_is_named():
    for error in meet(pod_sim.free_port(), (0, 3), (2, 3), limit=0.5):
        assert isinstance(
            error, meeting.MissingProcess
        ) and "process 1 never came within 0.5 s" in str(error)


@pytest.mark.report(
    "jax-ml/jax#38503",
    "openxla/xla#44429",
    right="a process that lives but whose step does not end, ends the run with a reason",
)
def test_a_step_that_never_ends_is_ended(monkeypatch):
    said, ended = [], threading.Event()

    def leave(code):
        said.append(code)
        ended.set()

    monkeypatch.setattr(processes.os, "_exit", leave)
    monkeypatch.setattr(processes, "print_error", lambda text, stacks: said.append(text))
    with processes.Watchdog(0.2) as watchdog:
        for step in range(processes.FIRST + 2):
            watchdog.beat(step)
        assert ended.wait(timeout=30)
    assert said[1] == peers.STUCK and f"at step {processes.FIRST + 1}" in said[0]


@pytest.mark.report(
    "AI-Hypercomputer/torchprime#267",
    "AI-Hypercomputer/torchprime#23",
    right=(
        "the processes have all rows of a batch together, and each loads those that its own "
        "devices hold"
    ),
)
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 8},
        {"data": 2, "tensor": 4},
        {"data": 1, "fsdp": 4, "context": 2},
        {"data": 1, "tensor": 8},
    ],
    ids=str,
)
def test_processes_load_the_rows_of_their_devices(monkeypatch, axes):
    """Eight devices as if two processes had four each."""
    mesh = parallel.make_mesh(parallel.Mesh(**axes))
    shape = jax.ShapeDtypeStruct((16,), np.int32)
    whole = sharding.batch_sharding(mesh, {"rows": shape})["rows"].devices_indices_map((16,))
    devices, found = mesh.devices.ravel().tolist(), []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for mine in (devices[:4], devices[4:]):
        place = SimpleNamespace(
            addressable_devices_indices_map=lambda _, mine=mine: {one: whole[one] for one in mine}
        )
        monkeypatch.setattr(processes, "batch_sharding", lambda *_, place=place: {"rows": place})
        found.append(processes.local_examples(mesh, 16).tolist())
    assert sorted({*found[0], *found[1]}) == list(range(16))
    split = axes.get("data", 1) * axes.get("fsdp", 1)
    assert found == ([list(range(8)), list(range(8, 16))] if split > 1 else [list(range(16))] * 2)
