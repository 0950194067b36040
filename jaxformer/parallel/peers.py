"""Connections between the processes of a run. When one process ends, all end and name it.

JAX's own service does not do that (jax 0.10.2). After a death the others abort 10 s later with a C++ stack. A process that
never comes is not named. After an exception in one process the others wait for ever. So each process connects to process 0,
on the coordinator's port, before JAX uses the port. The kernel closes a dead process's connections at once.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

from jaxformer.errors import ConfigError

LOST, STUCK = 4, 5  # exit codes: a process died or never came; a step did not end
T = TypeVar("T")


class MissingProcess(RuntimeError):
    """Some processes of the run never came. The message names them. Exit code LOST."""


class Peers:
    """The connections of one process: process 0 is connected to each of the others, and they only to it."""

    def __init__(self, index: int, names: list[str], connections: dict[int, Connection]):
        self.index, self.names, self.connections = index, names, connections
        self._working, self._all_finished, self._ending = set(connections), threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def fail(self, code: int, text: str) -> NoReturn:
        """Ends all processes. Each prints one line that names this process as the cause."""
        self._end(code, f"{self.names[self.index]}: {text}")

    def leave(self) -> None:
        """Waits until every process has called this."""
        if self.index > 0:
            send(self.connections.values(), finished=True)
        if not self._all_finished.wait(timeout=60 if self.index == 0 else None):
            self._end(LOST, f"{_processes(self._working)} did not come to the end within 60 s")
        if self.index == 0:
            send(self.connections.values(), finished=True)

    def _watch(self) -> None:
        index_of = {connection: index for index, connection in self.connections.items()}
        while index_of:
            ready: Any = wait(list(index_of))
            for connection in ready:
                index, message = index_of[connection], receive(connection)
                if message is None:
                    del index_of[connection]
                    if index in self._working:
                        self._end(LOST, f"{self.names[index]} is gone")
                elif "code" in message:
                    self._end(**message, notify=self.index == 0)
                else:
                    self._working.discard(index)
                    if not self._working:
                        self._all_finished.set()

    def _end(self, code: int, text: str, notify: bool = True) -> NoReturn:
        self._ending.acquire()  # never released: the first reason ends this process
        if notify:
            send(self.connections.values(), code=code, text=text)
        print_error(text, stacks=code == STUCK)
        running = set(self.connections.values()) if self.index == 0 else set()
        deadline = time.monotonic() + 5
        while running and time.monotonic() < deadline:  # JAX aborts the others if process 0 ends first
            running -= set(wait(running, timeout=0.1))
        os._exit(code)


def meet(coordinator: str, count: int, index: int, limit: float) -> Peers:
    """Waits until all processes are connected. If some do not come, the others raise MissingProcess or ConfigError."""
    host, _, port = coordinator.rpartition(":")
    name, deadline = f"process {index} (pid {os.getpid()} on {socket.gethostname()})", time.monotonic() + limit
    if index == 0:
        return _welcome(int(port), name, count, limit, deadline)

    def join() -> tuple[Connection, dict]:
        connecting = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        connecting.settimeout(None)
        connection = Connection(connecting.detach())
        send([connection], index=index, count=count, name=name)
        # process 0 knows who is missing, and reports it at its own limit: wait longer than it does
        answer = receive(connection, timeout=max(deadline - time.monotonic(), 0.0) + 10)
        if answer is None:
            connection.close()
            raise ConnectionError("this was process 0 of an earlier run, which ends soon")
        return connection, answer

    try:
        connection, answer = _retry(join, deadline)
    except OSError:
        raise MissingProcess(f"process 0 never came within {limit:g} s: nobody answers at {coordinator}") from None
    if "error" in answer:
        raise (MissingProcess if answer["missing"] else ConfigError)(answer["error"])
    return Peers(index, answer["names"], {0: connection})


def _welcome(port: int, name: str, count: int, limit: float, deadline: float) -> Peers:
    """Process 0 accepts a connection from each of the others."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listen = lambda: socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    try:
        listener = _retry(listen, deadline)  # process 0 of an earlier run may still have the port
    except OSError as error:
        raise ConfigError(f"port {port}: process 0 cannot listen there ({error.strerror}); give another") from None
    names, connections = {0: name}, dict[int, Connection]()
    present = lambda: ", ".join(names[index] for index in (0, *sorted(connections)))
    with listener:
        while len(connections) + 1 < count:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                missing = _processes({*range(1, count)} - set(connections))
                text = f"{missing} never came within {limit:g} s; here are {present()}"
                _refuse(MissingProcess(text), connections.values())
            match receive(connection, timeout=5.0):
                case {"index": int(index), "count": int(their_count), "name": str(their_name)}:
                    if index in connections and connections[index].poll(0.1):
                        connections.pop(index).close()  # it died and was started again
                    if their_count != count or not 0 < index < count or index in connections:
                        text = f"{their_name}, of {their_count}, came to a run of {count} that has {present()}"
                        error = ConfigError(f"{text}; give each its own index and all one count")
                        _refuse(error, [*connections.values(), connection])
                    names[index], connections[index] = their_name, connection
                case _:
                    connection.close()  # another program
    ordered = [names[i] for i in range(count)]
    send(connections.values(), names=ordered)
    return Peers(0, ordered, connections)


def _refuse(error: Exception, connections: Collection[Connection]) -> NoReturn:
    send(connections, error=str(error), missing=isinstance(error, MissingProcess))
    for connection in connections:
        connection.close()
    raise error


def _retry(attempt: Callable[[], T], deadline: float) -> T:
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def send(connections: Collection[Connection], **message: Any) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # the connection is closed: `_watch` reports that
            connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection, timeout: float | None = None) -> dict | None:
    """The next message. None if the connection is closed or invalid, or if none comes within `timeout` seconds."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        if connection.poll(timeout):
            return json.loads(connection.recv_bytes(1 << 20))
    return None


def print_error(text: str, stacks: bool) -> None:
    """Prints `text`, and before it the stacks of all threads if `stacks`. It needs no lock of Python's streams."""
    if stacks:
        faulthandler.dump_traceback(all_threads=True)
    with contextlib.suppress(OSError):
        os.write(2, f"jaxformer: {text}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _processes(indices: Collection[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
