"""Messages over a socket that may be cut, slow, stopped, or another program's."""

import contextlib
import json
import socket
import time

import pytest

from jaxformer.parallel.link import Link


@pytest.fixture
def pair():
    ends = [Link(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_in_order(pair):
    here, there = pair
    for number in range(100):
        here.put(number=number, text="ä\n€")
    assert [there.receive(1.0) for _ in range(100)] == [
        {"number": number, "text": "ä\n€"} for number in range(100)
    ]
    assert there.receive(0.01) is None and there.open


def test_half_a_message_holds_nobody_up(pair):
    """The network is cut in the middle of a message: who waits for its rest would judge nothing any
    more."""
    here, there = pair
    data = json.dumps({"values": list(range(1000))}).encode() + b"\n"
    here.socket.send(data[:500])
    begin = time.monotonic()
    there.pull()
    assert not there.inbox and there.open and there.receive(0.05) is None
    assert time.monotonic() - begin < 5.0
    here.socket.send(data[500:])
    assert there.receive(1.0) == {"values": list(range(1000))}


def test_an_end_that_reads_nothing_holds_nobody_up(pair):
    """A stopped process: what its socket does not take is kept, and sent when it goes on."""
    here, there = pair
    large = "x" * (1 << 22)
    here.put(text=large)
    here.put(last=True)
    assert here.has_unsent
    found = []
    while len(found) < 2:
        here.flush()
        there.pull()
        while there.inbox:
            found.append(there.inbox.popleft())
    assert found == [{"text": large}, {"last": True}] and not here.has_unsent


def test_what_arrived_before_the_end_is_read(pair):
    here, there = pair
    here.put(end=4, text="why")
    here.close()
    assert there.receive(1.0) == {"end": 4, "text": "why"}
    assert there.receive(1.0) is None and not there.open
    there.put(more=1)  # to nobody: no error
    assert not there.has_unsent


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95.\n",
        b"[1]\n",
        b"null\n",
        b"\xff\xfe\n",
        b"[" * 5000 + b"\n",
    ],
    ids=["http", "pickle", "a list", "null", "no text", "nested"],
)
def test_another_program_is_no_link(pair, data):
    here, there = pair
    with contextlib.suppress(OSError):
        here.socket.send(data)
    assert there.receive(1.0) is None and not there.open
