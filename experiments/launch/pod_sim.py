"""A pod on this machine: N processes of one run, each with simulated CPU devices.

    make pod-sim N=4 EXP=quickstart
    python -m experiments.launch.pod_sim 4 quickstart [--devices 2] [...]

Arguments after the experiment go to `jaxformer train`. Without a mesh, the batch is split over all
devices. SIGTERM and Ctrl-C go only to process 0, which stops the others. The exit code is 0, or 143
if all stopped and saved, else that of the first process that failed. 60 s after a failure,
processes that still run are killed.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from jaxformer import config
from jaxformer.cli.arguments import Parser, positive
from jaxformer.errors import ConfigError
from jaxformer.parallel import Mesh

PATIENCE = 60.0  # seconds from the first failure until the other processes are killed


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="options",
        usage="N EXPERIMENT [--devices D] [OPTIONS]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("count", type=positive, metavar="N")
    parser.add_argument("experiment", metavar="EXPERIMENT")
    parser.add_argument("--devices", type=positive)
    try:
        settings, options = parser.parse_known_args(argv)
        count, experiment = settings.count, settings.experiment
        mesh = config.load(experiment).mesh
    except ConfigError as error:
        print(f"pod-sim: {error}", file=sys.stderr)
        return 2
    if mesh == Mesh(data=1) and not any(option.startswith("--mesh") for option in options):
        options = [*options, "--mesh.data=-1"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(settings.devices or max(1, 8 // count)),
        "JAXFORMER_COORDINATOR": f"127.0.0.1:{free_port()}",
        "JAXFORMER_PROCESSES": str(count),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "jaxformer", "train", experiment, *options]
    processes = [start(index, command, environment) for index in range(count)]
    readers = [
        threading.Thread(target=prefix, args=(index, p.stdout)) for index, p in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: processes[0].send_signal(signum))
    code = wait(processes)
    for reader in readers:
        reader.join()
    print(
        f"pod-sim: {', '.join(f'p{i} {p.returncode}' for i, p in enumerate(processes))}", flush=True
    )
    return code


def start(index: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """A process in a new session, so that Ctrl-C in the terminal does not reach it."""
    environment = environment | {"JAXFORMER_PROCESS": str(index)}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def wait(processes: list[subprocess.Popen]) -> int:
    first, since = 0, None
    while running := [process for process in processes if process.poll() is None]:
        if since is None:
            first = next((process.returncode for process in processes if process.returncode), 0)
            since = time.monotonic() if first else None
        elif time.monotonic() > since + PATIENCE:
            for process in running:
                process.kill()
        time.sleep(0.1)
    first = first or next((process.returncode for process in processes if process.returncode), 0)
    return 128 - first if first < 0 else first


def prefix(index: int, stream) -> None:
    for line in stream:
        if not line.startswith("[Gloo]"):
            print(f"[p{index}] {line}", end="", flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
