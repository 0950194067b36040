"""Who takes part in a run of several processes: how they meet, and how all end when one does.

JAX's runtime ends a process without a word on who never came or who died, or waits 93 s in its own shutdown. So each
process keeps one idle TCP connection to process 0, made on the coordinator's port before JAX's service takes that over.
The kernel closes a dead process's connections at once, and everybody is told.
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
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxformer.errors import ConfigError

LOST, STUCK = 4, 5  # exit codes: a process died or never came; a step did not end


class Lost(RuntimeError):
    """Some processes of the run never came; the message names them. Exit code LOST."""


@dataclass(frozen=True)
class Processes:
    """Where the processes of a run meet: process 0's host:port, how many they are, and which one this is."""

    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None  # this process's accelerators among its host's; None: all

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 <= self.index < self.count):
            raise ConfigError(f"{self}: expected coordinator HOST:PORT and an index from 0 to count - 1")


class Peers:
    """One process's end of the connections between process 0 and the others; lines of JSON go over them."""

    def __init__(self, processes: Processes):
        self.index = processes.index
        self._names = {self.index: f"process {self.index} (pid {os.getpid()} on {socket.gethostname()})"}
        self._ending = threading.Lock()

    def name(self, index: int) -> str:
        return self._names.get(index, f"process {index}")

    def fail(self, code: int, text: str) -> NoReturn:
        """Ends this process, and all others with its name."""
        raise NotImplementedError

    def leave(self) -> None:
        """Waits until every process has come here."""
        raise NotImplementedError


class Hub(Peers):
    """Process 0's end: one connection to each of the others."""

    def __init__(self, processes: Processes, limit: float):
        super().__init__(processes)
        self._links: dict[int, _Link] = {}
        self._done: set[int] = set()
        self._all_done, self._leaving = threading.Event(), False
        deadline, port = time.monotonic() + limit, int(processes.coordinator.rpartition(":")[2])
        with _listen(port, deadline) as listener:
            while len(self._links) + 1 < processes.count:
                self._welcome(listener, processes, deadline, limit)
        for link in self._links.values():
            link.send(go=[self.name(i) for i in range(processes.count)])
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _welcome(self, listener: socket.socket, processes: Processes, deadline: float, limit: float) -> None:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            link = _Link(listener.accept()[0])
        except TimeoutError:
            missing = [i for i in range(1, processes.count) if i not in self._links]
            came = ", ".join(self.name(i) for i in (0, *sorted(self._links)))
            self._refuse(Lost(f"{_several(missing)} never came within {limit:g} s; here are {came}"))
        hello = link.receive(timeout=5.0)
        if hello is None or "hello" not in hello:
            return link.close()  # not one of us
        index = hello["hello"]
        if index in self._links and self._links[index].receive(timeout=0.1) is None and not self._links[index].alive:
            self._links.pop(index).close()  # it died, and was started again
        if hello["count"] != processes.count or not 0 < index < processes.count or index in self._links:
            text = (
                f"process {index} of {hello['count']} ({hello['name']}) came to a run of {processes.count} that has "
                f"{', '.join(self.name(i) for i in (0, *sorted(self._links)))}; give each its own index and all one count"
            )
            self._refuse(ConfigError(text), link)
        self._names[index], self._links[index] = f"process {index} ({hello['name']})", link

    def _refuse(self, error: Exception, *more: "_Link") -> NoReturn:
        for link in (*self._links.values(), *more):
            link.send(never=str(error), lost=isinstance(error, Lost))
            link.close()
        raise error

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for index, link in self._links.items():
            selector.register(link.socket, selectors.EVENT_READ, index)
        while selector.get_map():
            for key, _ in selector.select():
                index = key.data
                message = self._links[index].receive()
                if message is None:
                    selector.unregister(key.fileobj)
                    self._links[index].close()
                    if index not in self._done:
                        self._stop(LOST, f"{self.name(index)} is gone")
                elif "failed" in message:
                    self._stop(message["code"], f"{self.name(index)}: {message['failed']}")
                elif "done" in message:
                    self._done.add(index)
                    if len(self._done) == len(self._links):
                        self._all_done.set()

    def _stop(self, code: int, text: str) -> NoReturn:
        """Tells all others, waits for them (their runtime would abort if this process went first), ends."""
        with self._ending:
            for link in self._links.values():
                link.send(stop=text, code=code)
            _say(text, stacks=code == STUCK)
            until = time.monotonic() + 5
            for link in self._links.values():
                while time.monotonic() < until and link.receive(timeout=until - time.monotonic()) is not None:
                    pass
            os._exit(code)

    def fail(self, code: int, text: str) -> NoReturn:
        self._stop(code, f"{self.name(0)}: {text}")

    def leave(self) -> None:
        if not self._all_done.wait(timeout=60):
            self._stop(LOST, f"{_several(set(self._links) - self._done)} did not come to the end within 60 s")
        for link in self._links.values():
            link.send(done=True)
            link.shut()


class Member(Peers):
    """Any other process's end."""

    def __init__(self, processes: Processes, limit: float):
        super().__init__(processes)
        host, _, port = processes.coordinator.rpartition(":")
        deadline = time.monotonic() + limit
        mine = self.name(self.index).partition("(")[2][:-1]
        while True:
            with contextlib.suppress(OSError):
                self._link = _Link(socket.create_connection((host.strip("[]"), int(port)), timeout=5))
                self._link.send(hello=self.index, count=processes.count, name=mine)
                # process 0 knows better who is missing, and says so at its own limit
                answer = self._link.receive(timeout=max(deadline - time.monotonic(), 0.0) + 10)
                if answer is not None and "never" in answer:
                    self._link.close()
                    raise (Lost if answer["lost"] else ConfigError)(answer["never"])
                if answer is not None and "go" in answer:
                    break
                self._link.close()  # an earlier run's process 0 that is about to end
            if time.monotonic() > deadline:
                raise Lost(f"process 0 never came within {limit:g} s: nobody answers at {processes.coordinator}")
            time.sleep(0.2)
        self._names = dict(enumerate(answer["go"]))
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _watch(self) -> None:
        while (message := self._link.receive()) is not None:
            if "done" in message:
                self._over.set()
            elif "stop" in message:
                self._end(message["code"], message["stop"])
        self._link.close()
        if not self._over.is_set():
            self._end(LOST, f"{self.name(0)} is gone")

    def _end(self, code: int, text: str) -> NoReturn:
        if not self._ending.acquire(blocking=False):
            os._exit(code)  # `fail` has spoken already, and only waits for this
        end(code, text)

    def fail(self, code: int, text: str) -> NoReturn:
        if self._ending.acquire(blocking=False):
            _say(f"{self.name(self.index)}: {text}", stacks=code == STUCK)
            self._link.send(failed=text, code=code)
        time.sleep(5)  # process 0 tells the others first; its word ends this process
        os._exit(code)

    def leave(self) -> None:
        self._link.send(done=True)
        self._over.wait()


class _Link:
    """A connection that carries lines of JSON. A closed one swallows what is sent and receives None."""

    def __init__(self, connection: socket.socket):
        self.socket, self.alive, self._rest = connection, True, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # a machine that is switched off closes nothing: probe an idle connection after 10 s, give up 15 s later
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict | None:
        """The next message; None when the connection is closed, silent for `timeout` seconds, or speaks otherwise."""
        try:
            self.socket.settimeout(timeout)
            while b"\n" not in self._rest:
                if not (data := self.socket.recv(1 << 16)):
                    self.alive = False
                    return None
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\n")
            message = json.loads(line)
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def shut(self) -> None:
        """Says that nothing more will come; whoever receives there closes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


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


def _say(text: str, stacks: bool) -> None:
    if stacks:
        faulthandler.dump_traceback(all_threads=True)
    with contextlib.suppress(OSError):
        os.write(2, f"jaxformer: {text}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def end(code: int, text: str) -> NoReturn:
    _say(text, stacks=code == STUCK)
    os._exit(code)


def _several(indices) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
