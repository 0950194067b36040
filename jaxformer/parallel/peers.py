"""Connections between the processes of a run. When one process ends, all end and name it.

JAX's own service does not do that (jax 0.10.2). After a death the others abort with a C++ stack. A process that never comes is
not named. After an exception in one process the others wait for ever. So each process connects to process 0, on the
coordinator's port, before JAX uses the port. The kernel closes a dead process's connections at once. It leaves those of a
stopped process or of a cut network open, so each process sends a sign of life every BEAT seconds.
"""

import contextlib
import faulthandler
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

from jaxformer.errors import ConfigError

LOST, STUCK = 4, 5  # exit codes: a process died or never came; a step did not end
BEAT = 3.0  # seconds between two signs of life: a thread sends them, which a call that keeps Python's lock holds back
SILENCE = 30.0  # seconds without one until a process counts as lost; JAX waits ten times as long, so that this comes first
T = TypeVar("T")


class MissingProcess(RuntimeError):
    """Some processes of the run never came. The message names them. Exit code LOST."""


class Peers:
    """The connections of one process: process 0 is connected to each of the others, and they only to it."""

    def __init__(self, index: int, names: list[str], connections: dict[int, Connection]):
        self.index, self.names, self.connections = index, names, connections
        self._working, self._all_finished = set(connections), threading.Event()
        inbox, self._inbox = Pipe(duplex=False)  # what this process tells its own thread
        threading.Thread(target=self._watch, args=(inbox,), name="peers", daemon=True).start()

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

    def _end(self, code: int, text: str) -> NoReturn:
        while True:
            send([self._inbox], code=code, text=text)
            time.sleep(60)  # the thread ends the process

    def _watch(self, inbox: Connection) -> None:
        """Reads all connections. Silence is counted in beats of this thread: what this process slept through does not count."""
        selector, beats, due = selectors.DefaultSelector(), dict.fromkeys(self.connections, 0), 0.0
        for index, connection in [*self.connections.items(), (self.index, inbox)]:
            selector.register(connection, selectors.EVENT_READ, index)
        while True:
            for key, _ in selector.select(max(due - time.monotonic(), 0.0)):
                connection: Any = key.fileobj
                message: Any = receive(connection)
                beats[key.data] = 0
                if message is None:
                    selector.unregister(connection)
                    if key.data in self._working:
                        self._stop(selector, LOST, f"{self.names[key.data]} is gone")
                elif "code" in message:
                    self._stop(selector, **message)
                elif "finished" in message:
                    self._working.discard(key.data)
                    if not self._working:
                        self._all_finished.set()
            if time.monotonic() < due:
                continue
            due = time.monotonic() + BEAT
            send(self.connections.values())
            for index in self._working:
                beats[index] += 1
                if beats[index] * BEAT > SILENCE:
                    text = f"{self.names[index]} is silent for {SILENCE:g} s: it was stopped, or the network to it is cut"
                    self._stop(selector, LOST, text)

    def _stop(self, selector: selectors.BaseSelector, code: int, text: str) -> NoReturn:
        """Tells the others, and ends this process: process 0 only after the others have read the reason."""
        send(self.connections.values(), code=code, text=text)
        print_error(text, stacks=code == STUCK)
        deadline = time.monotonic() + (5 if self.index == 0 else 0)
        while len(selector.get_map()) > 1 and time.monotonic() < deadline:
            for key, _ in selector.select(timeout=0.1):
                connection: Any = key.fileobj
                if receive(connection) is None:
                    selector.unregister(connection)
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
        problem = f"port {port}: process 0 cannot listen there ({error.strerror})"
        raise ConfigError(f"{problem}; if this is no second process 0 of the run, give another port") from None
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


def relay(coordinator: str, limit: float) -> str:
    """The address of a port of this process, which leads to the coordinator and stays open when that is gone.

    JAX aborts a process, with a C++ stack and no name, at the moment when its connection to process 0 closes.
    """
    host, _, port = coordinator.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = _retry(lambda: socket.create_connection((host.strip("[]"), int(port))), time.monotonic() + limit)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=copy, args=ends, name="relay", daemon=True).start()

    threading.Thread(target=serve, name="relay", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


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
