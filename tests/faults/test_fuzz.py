"""Row 15: every parser of ours, fed with damaged input by hypothesis: bytes that are changed, and
JSON with changed fields."""

import contextlib
import copy
import json
import resource
import signal
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from tests.faults.fuzz import TARGETS

# seconds of an input under any load of the machine; what all inputs of a target may add
SOON, MEGABYTES = (
    30,
    500,
)
ODD = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"[" * 5_000,
    b"(" * 2_000,
    b"~" * 2_000,
    b"9" * 5_000,
    b"1e999",
    b"NaN",
    b'"',
    b"{}",
    b"null",
    b"\n",
    b"__import__('os')",
    b"../../../etc/passwd",
    b"/dev/zero",
    b"=",
    b"--",
    b",",
    b"& ",
]
BYTES = st.binary(max_size=40) | st.sampled_from(ODD)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**31, 2**63, 2**64, -1, 10**400, 0.5, 1e308]),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["../../etc/passwd", "/dev/zero", "\0", "a" * 5_000, "\ud800"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@contextlib.contextmanager
def ends_soon():
    def stop(*_):
        raise AssertionError(f"an input took more than {SOON} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SOON)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(value, path=()):
    """The path of each value in a JSON value."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, child in children:
        yield from places(child, (*path, name))


@st.composite
def changed_json(draw, seed):
    """A line of JSON with one to three of its values replaced, removed or joined by others."""
    value = {"all": json.loads(seed)}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(value) if path]))
        holder = value
        for name in path[:-1]:
            holder = holder[name]
        match draw(st.sampled_from(["replace", "remove", "add", "move"])):
            case "remove" if len(path) > 1:
                del holder[path[-1]]
            case "add" if isinstance(holder[path[-1]], dict):
                holder[path[-1]][draw(st.text(max_size=8))] = draw(JSON)
            case "move":
                others = draw(st.sampled_from([path for path in places(value) if path]))
                found = value
                for name in others:
                    found = found[name]
                holder[path[-1]] = copy.deepcopy(found)
            case _:
                holder[path[-1]] = draw(JSON)
    return json.dumps(value["all"]).encode()


@st.composite
def changed_bytes(draw, seed):
    """The bytes with one to four stretches replaced, removed or repeated."""
    data = seed
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 12)))
        middle = draw(
            st.one_of(
                BYTES, st.just(b""), st.just(data[begin:end] * 2), st.just(data[end : end + 20])
            )
        )
        data = data[:begin] + middle + data[end:]
    return data


@st.composite
def damaged(draw, name):
    seed = draw(st.sampled_from(TARGETS[name].seeds))
    if name == "safetensors":  # the header is JSON behind its length
        size = int.from_bytes(seed[:8], "little")
        header = draw(
            st.one_of(changed_json(seed[8 : 8 + size]), changed_bytes(seed[8 : 8 + size]))
        )
        length = draw(
            st.one_of(
                st.just(len(header)),
                st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(header) + 1]),
            )
        )
        return (
            length.to_bytes(8, "little")
            + header
            + draw(st.sampled_from([seed[8 + size :], b"", bytes(31), bytes(64)]))
        )
    lines = seed.splitlines()
    if lines[0].startswith(b"{") and draw(st.booleans()):
        with contextlib.suppress(ValueError):
            return b"\n".join([draw(changed_json(lines[0])), *lines[1:]]) + b"\n"
    return draw(st.one_of(changed_bytes(seed), BYTES))


def check(name, examples):
    """How many inputs a target survived."""
    count, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 100,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(name))
    def survives(data):
        nonlocal count
        count += 1
        with ends_soon():
            TARGETS[name](data)

    survives()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES
    return count


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """Paths to import from, and the depth of the stack, are as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.thorough_after(10)
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_whole_is_read(name):
    for seed in TARGETS[name].seeds:
        TARGETS[name](seed)


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_damaged_inputs(name):
    check(name, 25)


@pytest.mark.fault
@pytest.mark.parametrize("name", TARGETS)
def test_many_damaged_inputs(name, report):
    count = check(name, 1_000)
    report(15, f"fuzzed: {name}", trials=count, detected=count, recovered=count)
