"""The processes of a run meet before JAX starts: each connects to process 0.

Process 0 listens on the coordinator's port. An error names each process that does not come, expects
another number of processes, or would compute other numbers.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

from jaxformer.errors import ConfigError
from jaxformer.parallel.link import Link
from jaxformer.parallel.peers import BEAT, SILENCE, Peers

T = TypeVar("T")


class MissingProcess(RuntimeError):
    """Some processes of the run never came; the message names them. Exit code LOST."""


def meet(
    coordinator: str,
    count: int,
    index: int,
    limit: float,
    numerics: Mapping[str, str] | None = None,
    silence: float | None = None,
) -> Peers:
    """Waits until all processes are connected.

    `numerics` are the versions, options and code that decide the numbers of a process. Raises
    MissingProcess if some processes do not come within `limit` seconds, and ConfigError if a
    process has another number of processes or other numerics than process 0.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + limit
    name = f"process {index} (pid {os.getpid()} on {socket.gethostname()})"
    mine = {"index": index, "count": count, "name": name, "numerics": dict(numerics or {})}
    if index == 0:
        return _welcome(int(port), mine, limit, deadline, silence)

    def join() -> tuple[Link, dict]:
        link = Link(socket.create_connection((host.strip("[]"), int(port)), timeout=5))
        link.put(**mine)
        # process 0 knows who is missing and reports it at its own limit, so wait longer than that
        answer = link.receive(timeout=max(deadline - time.monotonic(), 0.0) + 10)
        if answer is None:
            link.close()
            raise ConnectionError("this was process 0 of an earlier run, which ends soon")
        return link, answer

    try:
        link, answer = _retry(join, deadline)
    except OSError:
        raise MissingProcess(
            f"process 0 never came within {limit:g} s: nobody answers at {coordinator}"
        ) from None
    match answer:
        case {"names": list(names)}:
            return Peers(index, names, {0: link}, silence)
    link.close()
    match answer:
        case {"error": str(text), "missing": missing}:
            raise (MissingProcess if missing else ConfigError)(text)
    raise ConfigError(f"{coordinator}: another program answers there; give process 0's address")


def _welcome(
    port: int, mine: dict[str, Any], limit: float, deadline: float, silence: float | None
) -> Peers:
    """Process 0 accepts a connection from each of the others."""
    names = {0: mine["name"]}
    links: dict[int, Link] = {}
    count = mine["count"]
    with _listen(port, deadline) as listener:
        while len(links) + 1 < count:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                link = Link(listener.accept()[0])
            except TimeoutError:
                missing = _processes({*range(1, count)} - set(links))
                text = f"{missing} never came within {limit:g} s; here are {_present(names, links)}"
                _refuse(MissingProcess(text), links.values())
            match link.receive(timeout=5.0):
                case {
                    "index": int(index),
                    "count": int(),
                    "name": str(name),
                    "numerics": dict(),
                } as theirs:
                    if index in links and _has_ended(links[index]):
                        links.pop(index).close()  # it died and was started again
                    if problem := _problem(mine, theirs, names, links):
                        _refuse(ConfigError(problem), [*links.values(), link])
                    names[index] = name
                    links[index] = link
                case _:
                    link.close()  # another program
    ordered = [names[i] for i in range(count)]
    for link in links.values():
        link.put(names=ordered)
    return Peers(0, ordered, links, silence)


def _listen(port: int, deadline: float) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET

    def listen():
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)

    try:
        return _retry(listen, deadline)  # process 0 of an earlier run may still have the port
    except OSError as error:
        problem = f"port {port}: process 0 cannot listen there ({error.strerror})"
        raise ConfigError(
            f"{problem}; if this is no second process 0 of the run, give another port"
        ) from None


def _problem(
    mine: dict[str, Any], theirs: dict[str, Any], names: dict[int, str], links: dict[int, Link]
) -> str | None:
    """Why a process that comes cannot be a part of this run; None if it can."""
    index, count = theirs["index"], mine["count"]
    if theirs["count"] != count or not 0 < index < count or index in links:
        return (
            f"{theirs['name']}, of {theirs['count']}, came to a run of {count} that "
            f"has {_present(names, links)}; give each its own index and all one count"
        )
    if different := differences(mine["numerics"], theirs["numerics"]):
        return (
            f"{theirs['name']} would compute other numbers than {mine['name']}: {different}; "
            "give all processes the same"
        )
    return None


def _present(names: dict[int, str], links: dict[int, Link]) -> str:
    """The names of the processes that are connected."""
    return ", ".join(names[index] for index in (0, *sorted(links)))


def _has_ended(link: Link) -> bool:
    link.pull()
    return not link.open


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The differences between process 0 and another one, in words; "" if there are none."""
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    texts = [
        f"{name} is {there.get(name) or 'not set'}, in process 0 {here.get(name) or 'not set'}"
        for name in names
    ]
    return "; ".join(texts)


def _refuse(error: Exception, links: Collection[Link]) -> NoReturn:
    for link in links:
        link.put(error=str(error), missing=isinstance(error, MissingProcess))
    for link in links:
        link.close()
    raise error


def relay(coordinator: str, limit: float, closed: Callable[[], Any] = lambda: None) -> str:
    """The address of a port of this process that forwards to the coordinator and never closes.

    JAX aborts a process, with a C++ stack and without a name, when its connection to process 0
    closes. Through this port the connection stays open, and `closed` is called instead.
    """
    host, _, port = coordinator.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket, ended: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        ended()

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = _retry(
                lambda: socket.create_connection((host.strip("[]"), int(port))),
                time.monotonic() + limit,
            )
            _keep_alive(far)
            for work in ((near, far, lambda: None), (far, near, closed)):
                threading.Thread(target=copy, args=work, name="relay", daemon=True).start()

    threading.Thread(target=serve, name="relay", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _keep_alive(connection: socket.socket) -> None:
    """Lets the kernel probe the other end, which may have forgotten the connection after a cut."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (
        ("TCP_KEEPIDLE", BEAT),
        ("TCP_KEEPINTVL", BEAT),
        ("TCP_KEEPCNT", SILENCE / BEAT),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(seconds))


def _retry(attempt: Callable[[], T], deadline: float) -> T:
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _processes(indices: Collection[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
