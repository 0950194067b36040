"""JSON messages over one socket, one on each line; no pickle. No call waits for the other end.

A message may arrive in parts, and the network may be cut between two of them. A thread that waited
for the rest could watch nothing else. So a link buffers bytes that the socket does not take yet,
and bytes that are not yet a complete message.
"""

import contextlib
import json
import select
import socket
import time
from collections import deque
from typing import Any

LARGEST = 1 << 28  # bytes of a message; only another program sends more
PIECE = 1 << 18  # bytes handed to the socket at a time


class Link:
    """One end of a connection.

    `inbox` has the messages that have arrived. `open` becomes False when the other end is gone.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair within this machine has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.inbox, self.open = connection, deque[dict[str, Any]](), True
        self._received, self._unsent = bytearray(), bytearray()

    has_unsent = property(lambda self: bool(self._unsent))

    def fileno(self) -> int:
        return self.socket.fileno()

    def put(self, **message: Any) -> None:
        """Sends as much of a message as the socket takes now; `flush` sends the rest."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(memoryview(self._unsent)[:PIECE].tobytes())]
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone: `pull` sees that
            self._unsent.clear()

    def pull(self) -> None:
        """Reads all that has arrived into `inbox`."""
        try:
            while data := self.socket.recv(PIECE):
                self._received += data
                if len(self._received) > LARGEST:
                    break
        except BlockingIOError:
            self._split()
            return
        except OSError:
            pass
        self._split()
        self.open = False

    def _split(self) -> None:
        *lines, rest = self._received.split(b"\n")
        if not lines:
            return
        self._received = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.open = False  # another program
                return
            self.inbox.append(message)

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None if the other end is gone or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.inbox and self.open:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self], [], [], left)[0]:
                return None
            self.pull()
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self.open = False
        self.socket.close()
