"""Being asked to stop, once and twice, by real signals to a real process."""

import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import time
from jaxformer.runs.signals import Signals
with Signals() as signals:
    print("ready", flush=True)
    for _ in range(600):
        time.sleep(0.1)
        if signals.after(0):
            print("stopping", flush=True)
            time.sleep(60)  # a slow save
"""


@pytest.mark.thorough
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_even_a_slow_save_at_once(which):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(which)
        assert process.stdout.readline() == "stopping\n"
        began = time.monotonic()
        process.send_signal(which)
        assert process.wait(30) == 128 + which and time.monotonic() - began < 20
        assert process.stderr.read() == ""


START = """
import signal, sys, time
from jaxformer import cli

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell that starts the tests in the background has it ignored
print("ready", flush=True)
sys.exit(cli.run(lambda _: time.sleep(60), []))
"""


@pytest.mark.thorough
def test_a_signal_at_a_start_is_one_line():
    with subprocess.Popen(
        [sys.executable, "-c", START], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "jaxformer: stopped by SIGINT\n"
