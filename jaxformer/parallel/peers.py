"""Connections between the processes of a run. When one process ends, all end and name it.

JAX's own service does not do that (jax 0.10.2). After a death the others abort with a C++ stack. A
process that never comes is not named. After an exception in one process the others wait for ever.

So each process connects to process 0, on the coordinator's port, before JAX uses the port. The
kernel closes a dead process's connections at once. It leaves the connections of a stopped process
or of a cut network open. So each process sends a sign of life every BEAT seconds. A process ends if
it hears nothing from the other end for SILENCE seconds, whichever direction is cut.

The common work of the processes uses the same connections: exchanges of values, waits for all, the
step after which a signal stops the run. One thread of each process reads and writes them. It never
waits for another process. Nobody waits without a limit.
"""

import contextlib
import faulthandler
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from jaxformer.parallel.hub import Hub, Silence
from jaxformer.parallel.link import Link

# exit codes. LOST: a process died, never came, or cannot be reached. STUCK: a step did not end.
LOST, STUCK = 4, 5
# Seconds between two signs of life. A thread sends them; a call that holds Python's lock delays it.
BEAT = 3.0
# Seconds without a sign until a process counts as lost. JAX waits ten times as long, so that this
# limit comes first.
SILENCE = 30.0
SERVICE = -1  # the index of JAX's coordination service, which is watched like a process
T = TypeVar("T")


class Abandoned(RuntimeError):
    """Another process failed in a common work. The message names the process and the reason."""


class Peers:
    """The links of one process. Process 0 has a link to each of the others; they have one to it."""

    def __init__(
        self, index: int, names: list[str], links: dict[int, Link], silence: float | None = None
    ):
        self.index, self.names, self.links = index, names, links
        self.silence = SILENCE if silence is None else silence
        self._beat = min(BEAT, self.silence / 10)
        self._hub = Hub(names)  # only process 0 uses it
        self._silence = Silence(list(links), round(self.silence / self._beat))
        self._working = set(links)  # processes that have not come to the end
        self._orders: deque[dict[str, Any]] = deque()  # messages of this process to its own thread
        self._served = False  # whether JAX's service has answered since the last beat
        self._place, self._moves = "", 0
        self._changed = threading.Condition()
        self._answers: dict[str, list[Any]] = {}
        self._abandoned: dict[int, str] = {}
        self._done, self._counting = -1, False
        self._stop_after: int | None = None
        self._guarded, self._closed = False, False
        self._wakes, self._waker = socket.socketpair()
        for end in (self._wakes, self._waker):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    # ---- called by the program, from any thread

    def fail(self, code: int, text: str) -> NoReturn:
        """Ends all processes. Each prints one line that names this process as the cause."""
        while True:
            self._order(end=code, text=f"{self.names[self.index]}: {text}")
            time.sleep(60)  # the thread ends the process

    def call(
        self,
        key: str,
        what: str,
        value: Any = None,
        members: list[int] | None = None,
        limit: float | None = None,
        work: int = -1,
    ) -> list[Any]:
        """The values (JSON) of all members, in order, once all have called it with this key.

        `limit`: if the missing processes make no progress for `limit` seconds, the run ends and
        names them. Raises Abandoned if a process has abandoned this `work`.
        """
        members = list(range(len(self.names))) if members is None else members
        # a value that JSON cannot hold raises here, in the thread that gave it
        value = json.loads(json.dumps(value))
        self._order(call=key, what=what, value=value, members=members, limit=limit, work=work)
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or work in self._abandoned)
            if key in self._answers:
                return self._answers.pop(key)
            raise Abandoned(self._abandoned[work])

    def abandon(self, work: int, text: str) -> None:
        """Tells all processes that this one failed in a common work, so that none waits for it."""
        self._order(abandon=work, text=f"{self.names[self.index]}: {text}")

    def report_place(self, place: str) -> None:
        """Says where this process is, and that it makes progress."""
        self._place, self._moves = place, self._moves + 1

    def leave(self, limit: float | None = None) -> None:
        """Waits until every process has called this."""
        self.call("the end", "the end of the run", limit=limit)

    def after(self, step: int) -> int:
        """The signal that stops the run after `step` steps; 0: none. All stop after the same step.

        After one process gets a signal, the thread of each process reports how many steps its
        process has done. No process begins another step until all have reported.
        """
        with self._changed:
            self._done = step
            self._changed.wait_for(lambda: not self._counting or self._stop_after is not None)
            return (
                signal.SIGTERM if self._stop_after is not None and step >= self._stop_after else 0
            )

    def guard(self) -> None:
        """From now on SIGTERM stops the run, and this process ends if it is frozen.

        The thread learns of a signal at once, even while Python's main thread waits for a device. A
        call that holds Python's lock for ever stops this thread, too. Then a C thread ends the
        process.
        """
        self._guarded = True
        # ValueError: not the main thread. Then signals belong to the program that called us.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def watch_service(self, answers: Callable[[], bool]) -> None:
        """Ends the run if JAX's service in process 0 does not answer for SILENCE seconds."""

        def probe() -> None:
            while True:
                self._served |= answers()
                time.sleep(self._beat)

        self._order(watch=SERVICE)
        threading.Thread(target=probe, name="probe", daemon=True).start()

    def close(self) -> None:
        """Ends the thread and closes the links. Call it after the end of the run."""
        self._working.clear()
        self._order(close=True)
        self._thread.join(timeout=10)

    def lost_service(self) -> None:
        """Ends the run because the connection to JAX's service closed.

        It waits first: if process 0 died, the closed link to it gives the better reason.
        """
        time.sleep(max(self._beat, BEAT))
        if self._working:
            self._order(end=LOST, text=self._no_service())

    # ---- the thread

    def _order(self, **message: Any) -> None:
        self._orders.append(message)
        # OSError: the socket is full of earlier wake-ups, and the thread will see this order as
        # well
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _watch(self) -> None:
        try:
            self._serve()
        # without this thread the process would send no sign of life, and nobody would end it
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        self._selector, due = selectors.DefaultSelector(), 0.0
        for index, link in self.links.items():
            self._selector.register(link, selectors.EVENT_READ, index)
            self._read(index, link)  # messages that came with the answer of the meeting
        self._selector.register(self._wakes, selectors.EVENT_READ, self.index)
        while not self._closed:
            for key, event in self._selector.select(max(due - time.monotonic(), 0.0)):
                if key.data == self.index:
                    self._wake()
                    continue
                if event & selectors.EVENT_WRITE:
                    self.links[key.data].flush()
                if event & selectors.EVENT_READ:
                    self.links[key.data].pull()
                    self._read(key.data, self.links[key.data])
            while self._orders:
                self._obey(self._orders.popleft())
            if time.monotonic() >= due:
                due = time.monotonic() + self._beat
                self._tick()
            for index, link in self.links.items():
                if link.open:
                    wanted = selectors.EVENT_READ | (
                        selectors.EVENT_WRITE if link.has_unsent else 0
                    )
                    self._selector.modify(link, wanted, index)
        if self._guarded:
            faulthandler.cancel_dump_traceback_later()
        self._selector.close()
        for end in (*self.links.values(), self._wakes, self._waker):
            end.close()

    def _tick(self) -> None:
        if self._guarded:
            faulthandler.dump_traceback_later(10 * self.silence, exit=True)
        place = {"place": self._place, "moves": self._moves}
        for link in self.links.values():
            link.put(**place)
        if self.index == 0:
            self._answer(0, place)
            if (late := self._hub.late(self._beat)) is not None and self._working:
                self._stop(STUCK, late)
        if self._served:
            self._served = False
            self._silence.heard(SERVICE)
        if (silent := self._silence.beat()) is None or not self._working:
            return
        if silent == SERVICE:
            self._stop(LOST, self._no_service())
        text = (
            f"{self.names[silent]} is silent for {self.silence:g} s: "
            "it was stopped, or the network to it is cut"
        )
        self._stop(LOST, text)

    def _no_service(self) -> str:
        return (
            f"{self.names[self.index]}: the connection to the coordination service of "
            f"{self.names[0]} is lost"
        )

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in self._wakes.recv(1 << 16):
                self._to_hub({"stop": int(signal.SIGTERM)})

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case {"end": code, "text": text}:
                self._stop(code, text)
            case {"close": True}:
                self._closed = True
            case {"watch": index}:
                self._silence = Silence([*self.links, index], self._silence.limit)
            case _:
                self._to_hub(order)

    def _to_hub(self, message: dict[str, Any]) -> None:
        if self.index == 0:
            self._answer(0, message)
        else:
            self.links[0].put(**message)

    def _answer(self, index: int, message: dict[str, Any]) -> None:
        """In process 0: sends the replies to a message of process `index`."""
        replies = self._hub.receive(index, message)
        # the reply to itself comes last, because it may end this process
        for to, reply in sorted(replies, key=lambda reply: reply[0] == 0):
            if to == 0:
                self._take(reply)
            else:
                self.links[to].put(**reply)

    def _read(self, index: int, link: Link) -> None:
        while link.inbox:
            message = link.inbox.popleft()
            self._silence.heard(index)
            if self.index == 0 and "end" not in message:
                self._answer(index, message)
            else:
                self._take(message)
        if not link.open:
            self._selector.unregister(link)
            self._silence.forget(index)
            if index in self._working:
                self._stop(LOST, f"{self.names[index]} is gone")

    def _take(self, message: dict[str, Any]) -> None:
        """Obeys a message of process 0, which may be this process itself."""
        with self._changed:
            match message:
                case {"end": int(code), "text": str(text)}:
                    self._stop(code, text)
                case {"answer": str(key), "values": list(values)}:
                    self._answers[key] = values
                    if key == "the end":
                        self._working.clear()
                case {"abandon": int(work), "text": str(text)}:
                    self._abandoned.setdefault(work, text)
                case {"count": True}:
                    self._counting = True
                    self._to_hub({"counted": self._done})
                case {"stop_after": int(step)}:
                    self._stop_after = step
            self._changed.notify_all()

    def _stop(self, code: int, text: str) -> NoReturn:
        """Tells the others why, and ends this process. Process 0 ends last, or after 5 seconds."""
        if code == STUCK and self.index == 0 and " at " not in text:
            text += self._hub.where()
        for link in self.links.values():
            link.put(end=code, text=text)
        print_error(text, stacks=code == STUCK)
        deadline = time.monotonic() + (5 if self.index == 0 else 1)
        while self._unread() and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=0.1):
                if key.data != self.index:
                    self.links[key.data].flush()
                    self.links[key.data].pull()
                    if not self.links[key.data].open:
                        self._selector.unregister(key.fileobj)
        os._exit(code)

    def _unread(self) -> bool:
        """Whether another process may not have the reason yet; for process 0: has not ended yet."""
        return any(
            link.open and (self.index == 0 or link.has_unsent) for link in self.links.values()
        )


def print_error(text: str, stacks: bool) -> None:
    """Prints `text` to stderr; if `stacks`, the stacks of all threads before it.

    It takes no lock of Python's streams. If nobody reads the output (a full pipe), it prints
    nothing, because a process that ends must not wait.
    """
    if not _takes_text(2, seconds=2.0):
        return
    if stacks:
        faulthandler.dump_traceback(all_threads=True)
    with contextlib.suppress(OSError):
        os.write(2, f"jaxformer: {text}\n".encode())
    with contextlib.suppress(Exception):
        if _takes_text(1, seconds=0.0):
            sys.stdout.flush()


def _takes_text(file: int, seconds: float) -> bool:
    try:
        return bool(select.select([], [file], [], seconds)[1])
    except OSError:  # it is closed
        return False
