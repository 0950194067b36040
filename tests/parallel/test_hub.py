"""What process 0 knows of common work: without sockets, and with a clock that the test moves."""

import itertools

import pytest

from jaxformer.parallel.hub import Hub, Silence

NAMES = [f"process {index} (pid {100 + index} on host)" for index in range(3)]


def come(hub, index, key="1", value=None, what="the restore", members=(0, 1, 2), limit=10.0):
    return hub.receive(
        index, {"call": key, "what": what, "value": value, "members": list(members), "limit": limit}
    )


def test_an_exchange_is_answered_once_all_have_come():
    for order in itertools.permutations(range(3)):
        hub = Hub(NAMES)
        replies = [come(hub, index, value=index * 10) for index in order]
        assert replies[:2] == [[], []]
        assert replies[2] == [(index, {"answer": "1", "values": [0, 10, 20]}) for index in range(3)]
        assert not hub.calls


def test_a_wait_may_be_of_some_processes_and_two_may_be_open():
    hub = Hub(NAMES)
    assert come(hub, 1, key="compiled", members=(1, 2)) == []
    assert come(hub, 1, key="values/3") == []  # from another thread of the same process
    assert [to for to, _ in come(hub, 2, key="compiled", members=(1, 2))] == [1, 2]
    assert list(hub.calls) == ["values/3"]


def test_who_keeps_the_others_waiting_is_named_with_what_they_wait_for():
    hub = Hub(NAMES)
    come(hub, 0)
    come(hub, 2)
    hub.receive(1, {"place": "step 12 (save)", "moves": 1})
    assert hub.late(6.0) is None
    assert (
        hub.late(6.0)
        == f"{NAMES[1]} did not come to the restore within 10 s (process 1 at step 12 (save))"
    )


def test_a_process_that_goes_on_is_waited_for():
    """One that encodes a corpus for hours, for example. One that only lives is not."""
    hub = Hub(NAMES)
    come(hub, 0)
    for part in range(50):
        hub.receive(1, {"place": "the encoding", "moves": part})
        assert hub.late(6.0) is None
    hub.receive(2, {"place": "the start", "moves": 5})
    for _ in range(2):
        hub.receive(1, {"place": "the encoding", "moves": 49})
        hub.receive(0, {"place": "the start", "moves": 7})  # the waiting one: this is no progress
        late = hub.late(6.0)
    assert late and late.startswith(f"{NAMES[1]}, {NAMES[2]} did not come")


def test_a_call_without_a_limit_is_never_late():
    hub = Hub(NAMES)
    come(hub, 0, limit=None)
    assert hub.late(1e9) is None


def test_processes_that_do_not_do_the_same_work_end():
    """Each of them would wait for ever where the other never comes."""
    hub = Hub(NAMES)
    come(hub, 0, what="the restore")
    replies = come(hub, 2, what="the comparison of data")
    assert [to for to, _ in replies] == [0, 1, 2]
    assert replies[0][1]["end"] == 1
    text = (
        f"{NAMES[2]} came to the comparison of data, but {NAMES[0]} to the restore: they do not "
        f"do the same work"
    )
    assert replies[0][1]["text"] == text


def test_a_work_that_one_abandons_is_abandoned_by_all():
    message = {"abandon": 4, "text": f"{NAMES[1]}: No space left on device"}
    assert Hub(NAMES).receive(1, message) == [(index, message) for index in range(3)]


def test_nobody_is_blamed_for_not_coming_to_an_abandoned_work():
    """Those who came were told to go on; a wait that is left over would end the run later."""
    hub = Hub(NAMES)
    call = {"what": "the save of step 6", "value": None, "members": [0, 1, 2], "limit": 10.0}
    assert hub.receive(0, call | {"call": "work/4/written/0", "work": 4}) == []
    assert hub.receive(0, call | {"call": "work/5/written/0", "work": 5}) == []
    hub.receive(1, {"abandon": 4, "text": "a full disk"})
    hub.receive(2, call | {"call": "work/4/written/1", "work": 4})  # it was on its way
    assert list(hub.calls) == ["work/5/written/0"]
    assert hub.late(11.0).startswith(f"{NAMES[1]}, {NAMES[2]} did not come")


def test_a_signal_stops_all_after_the_same_step():
    """It is a step that none of them has passed: nobody begins another one before the step is
    known."""
    hub = Hub(NAMES)
    assert hub.receive(1, {"stop": 15}) == [(index, {"count": True}) for index in range(3)]
    assert hub.receive(0, {"stop": 15}) == []  # SIGTERM to all at once
    assert hub.receive(0, {"counted": 7}) == [] and hub.receive(2, {"counted": 6}) == []
    assert hub.receive(1, {"counted": 7}) == [
        (index, {"stop_after": 8, "signal": 15}) for index in range(3)
    ]


@pytest.mark.parametrize(
    "message",
    [{}, {"call": 3}, {"stop": "x"}, {"place": 1}, {"abandon": "x", "text": 1}, {"odd": None}],
)
def test_what_is_no_message_is_left_alone(message):
    hub = Hub(NAMES)
    assert hub.receive(1, message) == [] and not hub.calls


def test_silence_is_counted_in_beats():
    silence = Silence([0, 2], limit=10)
    assert [silence.beat() for _ in range(10)] == [None] * 10
    silence.heard(0)
    assert silence.beat() == 2  # the 11th without a word
    silence.forget(2)
    silence.heard(5)  # nobody that is waited for
    assert [silence.beat() for _ in range(9)] == [None] * 9
    assert silence.beat() == 0
