"""The threads of several `Peers`, in one process: the limits are fractions of a second."""

import contextlib
import os
import socket
import threading
import time

import pytest

from jaxformer.parallel import meeting, peers, processes
from jaxformer.parallel.link import Link
from jaxformer.parallel.peers import Abandoned, Peers
from jaxformer.parallel.remote_errors import describe_error, rebuild_error
from jaxformer.runs.manifest import CheckpointError, Damaged

MADE: list[Peers] = []


@pytest.fixture
def ends(monkeypatch):
    """What ended: (the code, what was printed) of each thread that would have ended its process."""
    found, said, ended = [], threading.local(), set()

    def leave(code):
        if threading.current_thread() not in ended:
            found.append((code, said.text))
        ended.add(threading.current_thread())
        raise SystemExit

    watch = Peers._watch

    def watch_quietly(self):
        with contextlib.suppress(SystemExit):
            watch(self)

    monkeypatch.setattr(Peers, "_watch", watch_quietly)
    monkeypatch.setattr(peers.os, "_exit", leave)
    monkeypatch.setattr(peers, "print_error", lambda text, stacks: setattr(said, "text", text))
    monkeypatch.setattr(peers.traceback, "print_exc", lambda: None)
    yield found
    for one in MADE:
        one._working.clear()  # a thread that is left ends nothing any more
    for thread in ended:
        thread.join(timeout=10)
    for one in MADE:
        if not one._thread.is_alive():
            for end in (one._wakes, one._waker, *(link.socket for link in one.links.values())):
                end.close()
    MADE.clear()


def links(count, silence=1.0):
    """Peers that are connected by pairs of sockets, and these sockets."""
    names = [f"process {index} (pid {index} on host)" for index in range(count)]
    pairs = {index: [Link(end) for end in socket.socketpair()] for index in range(1, count)}
    hub = Peers(0, names, {index: pair[0] for index, pair in pairs.items()}, silence)
    MADE.extend(
        [hub, *(Peers(index, names, {0: pair[1]}, silence) for index, pair in pairs.items())]
    )
    return MADE[:]


def together(members, work):
    """`work(member)` of each, at once: what it returned, or its error."""
    found = [None] * len(members)

    def run(place):
        try:
            found[place] = work(members[place])
        except Exception as error:
            found[place] = error

    threads = [
        threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(members))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def until(holds, limit=20.0):
    end = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def leave(members):
    together(members, lambda member: member.leave())


def test_values_are_exchanged_and_all_leave(ends):
    members = links(3)
    assert (
        together(members, lambda one: one.call("1", "a test", one.index * 10)) == [[0, 10, 20]] * 3
    )
    some = together(members[1:], lambda one: one.call("2", "a test", one.index, members=[1, 2]))
    assert some == [[1, 2]] * 2  # process 0 is none of them
    leave(members)
    members[1].links[0].close()
    time.sleep(0.2)
    assert not ends  # after the end nobody is missed


@pytest.mark.thorough
def test_who_does_not_come_is_named_on_all_sides(ends):
    members = links(3)
    for one in members[:2]:
        threading.Thread(
            target=one.call, args=("1", "the save of step 60", None, None, 0.2), daemon=True
        ).start()
    until(lambda: len(ends) == 3)
    assert {code for code, _ in ends} == {peers.STUCK}
    assert all(
        "process 2 (pid 2 on host) did not come to the save of step 60 within 0.2 s" in text
        for _, text in ends
    )


def test_a_failure_of_one_reaches_those_who_wait_at_once(ends):
    """Also those who come to wait later; the next work is not touched."""
    members = links(3)

    def work(one):
        if one.index == 1:
            one.abandon(7, "No space left on device")
            return None
        return one.call("7/commit", "the save", work=7)

    failed, _, other = together(members, work)
    for error in (failed, other):
        assert isinstance(error, Abandoned)
        assert str(error) == "process 1 (pid 1 on host): No space left on device"
    with pytest.raises(Abandoned):
        members[2].call("7/later", "the save", work=7)
    assert (
        together(members, lambda one: one.call("8", "the next save", one.index, work=8))
        == [[0, 1, 2]] * 3
    )
    leave(members)


@pytest.mark.thorough
@pytest.mark.parametrize("deaf", [0, 1])
def test_a_link_that_is_half_gone_is_gone(ends, deaf):
    """One direction of the network is cut.

    The side that hears nothing ends, and its peer as well, by name.
    """
    members = links(2, silence=0.5)
    members[deaf].links[1 - deaf].pull = lambda: None  # nothing arrives any more
    until(lambda: len(ends) == 2)
    silent = (
        f"process {1 - deaf} (pid {1 - deaf} on host) is silent for 0.5 s: it was stopped, or "
        f"the network to it is cut"
    )
    assert sorted(ends) == [(peers.LOST, silent)] * 2


@pytest.mark.thorough
def test_a_cut_in_both_directions_ends_both_sides_and_names_the_other(ends):
    members = links(2, silence=0.5)
    for one in members:
        for link in one.links.values():
            link.pull = lambda: None
    until(lambda: len(ends) == 2)
    assert {text.partition(" is silent")[0] for _, text in ends} == {
        f"process {i} (pid {i} on host)" for i in (0, 1)
    }


@pytest.mark.thorough
def test_a_dead_process_is_named(ends):
    members = links(3)
    members[2].links[0].socket.shutdown(socket.SHUT_RDWR)
    until(lambda: len(ends) == 3)
    assert (peers.LOST, "process 2 (pid 2 on host) is gone") in ends


@pytest.mark.thorough
def test_a_service_that_does_not_answer_ends_the_run(ends):
    """Our own link lives: only the connection of JAX is dead."""
    members = links(2, silence=0.5)
    members[1].watch_service(lambda: False)
    until(lambda: len(ends) == 2)
    text = (
        "process 1 (pid 1 on host): the connection to the coordination service of process 0 (pid "
        "0 on host) is lost"
    )
    assert ends == [(peers.LOST, text)] * 2


@pytest.mark.thorough
def test_a_service_that_answers_does_not(ends):
    members = links(2, silence=0.5)
    members[1].watch_service(lambda: True)
    time.sleep(1.0)
    assert not ends
    leave(members)


@pytest.mark.parametrize("done", [(5, 5, 5), (5, 4, 5), (-1, -1, -1)])
def test_all_stop_after_the_same_step(ends, done):
    members = links(3)
    for one, step in zip(members, done, strict=True):
        if step >= 0:
            assert one.after(step) == 0
    # what Python writes there when the signal comes
    os.write(members[2]._waker.fileno(), bytes([15]))
    until(lambda: all(one._stop_after is not None for one in members))

    def train(one):
        step = done[one.index]
        while not one.after(step := step + 1):
            pass
        return step

    (stopped,) = {*together(members, train)}
    assert stopped == max(done) + 1 or done[0] < 0
    leave(members)


def test_half_a_greeting_holds_nobody_up():
    """A program that scans ports connects to process 0 first, says little, and stays."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, found = f"127.0.0.1:{port}", {}

    def meet(index):
        found[index] = meeting.meet(address, 2, index, 30.0)

    first = threading.Thread(target=meet, args=(0,), daemon=True)
    first.start()
    scanner = socket.socket()
    while scanner.connect_ex(("127.0.0.1", port)):
        time.sleep(0.02)
    scanner.send(b'{"ind')
    scanner.shutdown(socket.SHUT_WR)  # else process 0 waits 5 s for the rest
    second = threading.Thread(target=meet, args=(1,), daemon=True)
    second.start()
    for thread in (first, second):
        thread.join(timeout=30)
    scanner.close()
    leave([found[0], found[1]])


SAME = {"jax_enable_x64": "False", "XLA_FLAGS": ""}


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (SAME, ""),
        (SAME | {"jax_enable_x64": "True"}, "jax_enable_x64 is True, in process 0 False"),
        (SAME | {"XLA_FLAGS": "--xla_a=true"}, "XLA_FLAGS is --xla_a=true, in process 0 not set"),
        ({"XLA_FLAGS": ""}, "jax_enable_x64 is not set, in process 0 False"),
    ],
)  # fmt: skip
def test_other_numerics_are_told_by_name(theirs, told):
    assert meeting.differences(SAME, theirs) == told


def test_a_process_with_other_numerics_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    found = {}

    def meet(index, numerics):
        try:
            meeting.meet(address, 2, index, 30.0, numerics)
        except Exception as error:
            found[index] = error

    threads = [
        threading.Thread(target=meet, args=(i, {"jax_enable_x64": x}), daemon=True)
        for i, x in enumerate("FT")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [type(error).__name__ for error in found.values()] == ["ConfigError"] * 2
    assert str(found[0]) == str(found[1])
    assert "process 1 (pid" in str(found[0]) and "jax_enable_x64 is T, in process 0 F" in str(
        found[0]
    )


def test_what_changes_no_number_is_no_difference(monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_b=1 --xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8 --xla_a=2",
    )
    assert processes.numerics()["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("no checkpoint fits"),
        Damaged("a leaf"),
        OSError(28, "No space left on device", "/x"),
        KeyError("a"),
        TimeoutError("late"),
    ],
)
def test_an_error_crosses_as_json(error):
    again = rebuild_error(describe_error(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_no_class_but_ours_and_pythons_is_made_from_what_arrives():
    class Odd(Exception):
        pass

    assert type(rebuild_error(describe_error(Odd("x")))) is Exception
    for name in (
        "os:system",
        "subprocess:Popen",
        "builtins:eval",
        "builtins:SystemExit",
        "jaxformer.config:read",
        "x:y",
    ):
        found = rebuild_error({"classes": [name], "arguments": ["echo"]})
        assert type(found) is RuntimeError, name


def test_a_relay_says_when_the_other_end_is_gone_and_stays_open():
    closed = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = meeting.relay(f"127.0.0.1:{server.getsockname()[1]}", 5.0, closed.set)
        near = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        far, _ = server.accept()
        near.send(b"x")
        assert far.recv(1) == b"x" and not closed.is_set()
        far.close()
        assert closed.wait(timeout=20)
        near.settimeout(0.1)
        with contextlib.closing(near), pytest.raises(TimeoutError):
            near.recv(1)  # JAX would abort if this were closed
