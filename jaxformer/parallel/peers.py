"""How the processes of a run meet, and how all end when one does: what JAX's own service cannot do.

Measured with jax 0.10.2, heartbeat 10 s: a process dies, and the others end 10 s later by SIGABRT with a C++ stack. One never
comes: the same, without its name. One raises an exception: the others wait for ever. So each process keeps a connection to
process 0, made on the coordinator's port before JAX takes that. The kernel closes a dead process's connections at once.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from jaxformer.errors import ConfigError

LOST, STUCK = 4, 5  # exit codes: a process died or never came; a step did not end


class Lost(RuntimeError):
    """Some processes of the run never came; the message names them. Exit code LOST."""


class Peers:
    """One process's connections: process 0 has one to each of the others, they have one to it."""

    def __init__(self, index: int, names: list[str], connections: dict[int, Connection]):
        self.index, self.names, self.connections = index, names, connections
        self._reports = dict.fromkeys(connections, (-1, 0.0))  # the last step that each reported, and when
        self._finished: set[int] = set()
        self._all_finished, self._ending = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def fail(self, code: int, text: str) -> NoReturn:
        """Ends all processes; each says in one line that this one is the cause."""
        self._end(code, f"{self.names[self.index]}: {text}")

    def report(self, step: int) -> None:
        """Tells process 0, or all others, that this process is alive and at `step`."""
        self._send(step=step)

    def who_is_behind(self, step: int, patience: float) -> str:
        """Who keeps the others waiting, from reports. A process that sent none for `patience` seconds does not answer."""
        steps = {index: at for index, (at, _) in self._reports.items()} | {self.index: step}
        silent = [i for i, (_, when) in self._reports.items() if time.monotonic() - when > patience]
        slow = silent or [i for i in steps if steps[i] < max(steps.values())]
        how = "does not answer" if silent else f"is behind, the others are at step {max(steps.values())}"
        named = ", ".join(f"{self.names[i]} at step {max(steps[i], 0)}" for i in sorted(slow))
        return f"{named}: {how}" if slow else "all processes are at that step"

    def leave(self) -> None:
        """Waits until every process has come here."""
        if self.index > 0:
            self._send(finished=True)
            self._all_finished.wait()
        elif self._all_finished.wait(timeout=60):
            self._send(finished=True)
        else:
            self._end(LOST, f"{_several(set(self.connections) - self._finished)} did not come to the end within 60 s")

    def _watch(self) -> None:
        index_of = {connection: index for index, connection in self.connections.items()}
        while index_of:
            ready: Any = wait(list(index_of))
            for connection in ready:
                index = index_of[connection]
                match receive(connection):
                    case {"code": code, "text": text}:
                        self._end(code, text, tell=self.index == 0)
                    case {"step": step}:
                        self._reports[index] = (step, time.monotonic())
                    case {"finished": _}:
                        self._finished.add(index)
                        if len(self._finished) == len(self.connections):
                            self._all_finished.set()
                    case _:
                        del index_of[connection]
                        if index not in self._finished:
                            self._end(LOST, f"{self.names[index]} is gone")

    def _send(self, **message: Any) -> None:
        for connection in self.connections.values():
            send(connection, **message)

    def _end(self, code: int, text: str, tell: bool = True) -> NoReturn:
        self._ending.acquire()  # for ever: the first reason ends this process
        if tell:
            self._send(code=code, text=text)
        say(text, stacks=code == STUCK)
        running = set(self.connections.values()) if self.index == 0 else set()
        deadline = time.monotonic() + 5
        while running and time.monotonic() < deadline:  # JAX aborts the others if process 0 ends before them
            running -= set(wait(running, timeout=0.1))
        os._exit(code)


def meet(coordinator: str, count: int, index: int, limit: float) -> Peers:
    """Waits until all processes have come. Raises Lost or ConfigError on everyone who came when they do not."""
    host, _, port = coordinator.rpartition(":")
    name = f"process {index} (pid {os.getpid()} on {socket.gethostname()})"
    deadline = time.monotonic() + limit
    if index == 0:
        with _listen(int(port), deadline) as listener:
            return _welcome(listener, name, count, deadline, limit)
    while True:
        with contextlib.suppress(OSError):
            connecting = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            connecting.settimeout(None)
            connection = Connection(connecting.detach())
            send(connection, index=index, count=count, name=name)
            # process 0 knows better who is missing, and says so at its own limit
            match receive(connection, timeout=max(deadline - time.monotonic(), 0.0) + 10):
                case {"names": names}:
                    return Peers(index, names, {0: connection})
                case {"refused": text, "lost": lost}:
                    raise (Lost if lost else ConfigError)(text)
            connection.close()  # an earlier run's process 0 that is about to end
        if time.monotonic() > deadline:
            raise Lost(f"process 0 never came within {limit:g} s: nobody answers at {coordinator}")
        time.sleep(0.2)


def _welcome(listener: socket.socket, name: str, count: int, deadline: float, limit: float) -> Peers:
    """Process 0's side of the meeting."""
    names, connections = {0: name}, dict[int, Connection]()
    present = lambda: ", ".join(names[i] for i in (0, *sorted(connections)))
    while len(connections) + 1 < count:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection = Connection(listener.accept()[0].detach())
        except TimeoutError:
            missing = _several({*range(1, count)} - set(connections))
            _refuse(Lost(f"{missing} never came within {limit:g} s; here are {present()}"), connections.values())
        match receive(connection, timeout=5.0):
            case {"index": int(index), "count": int(their_count), "name": str(their_name)}:
                if index in connections and connections[index].poll(0.1):
                    connections.pop(index).close()  # it died, and was started again
                if their_count != count or not 0 < index < count or index in connections:
                    text = (
                        f"{their_name}, of {their_count}, came to a run of {count} that has {present()}; "
                        "give each its own index and all one count"
                    )
                    _refuse(ConfigError(text), [*connections.values(), connection])
                names[index], connections[index] = their_name, connection
            case _:
                connection.close()  # not one of ours
    ordered = [names[i] for i in range(count)]
    for connection in connections.values():
        send(connection, names=ordered)
    return Peers(0, ordered, connections)


def _refuse(error: Exception, connections: Collection[Connection]) -> NoReturn:
    for connection in connections:
        send(connection, refused=str(error), lost=isinstance(error, Lost))
        connection.close()
    raise error


def _listen(port: int, deadline: float) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    while True:
        try:
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:  # an earlier run's process 0 that is about to end
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"port {port}: process 0 cannot listen there ({error.strerror}); give another"
                ) from None
            time.sleep(0.5)


def send(connection: Connection, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the other side is gone; the watching thread sees that too
        connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection, timeout: float | None = None) -> dict | None:
    """The next message. None if the connection is closed, silent for `timeout` seconds, or carries something else."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        if connection.poll(timeout):
            return json.loads(connection.recv_bytes(1 << 20))
    return None


def say(text: str, stacks: bool) -> None:
    if stacks:
        faulthandler.dump_traceback(all_threads=True)
    with contextlib.suppress(OSError):
        os.write(2, f"jaxformer: {text}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _several(indices: Collection[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
