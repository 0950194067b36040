"""Several processes as one run: values exchanged, a batch divided, one end. No other module uses `jax.distributed`."""

import contextlib
import itertools
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed  # cluster addresses and the key-value store have no public API

from jaxformer.errors import ConfigError
from jaxformer.parallel.peers import STUCK, Peers, meet, print_error
from jaxformer.sharding import batch_sharding

GRACE = 3.0  # seconds until an error is reported: if a dead process is its cause, the process is named before that
HEARTBEAT = 20  # seconds until JAX ends the run when a machine is lost and its connections stay open
T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The address of process 0 (host:port), the number of processes, and the index of this one."""

    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None  # the host's accelerators that this process uses; None: all

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 <= self.index < self.count):
            raise ConfigError(f"{self}: expected coordinator HOST:PORT and an index from 0 to count - 1")


def find(environment: Mapping[str, str] = os.environ, limit: float = 300.0) -> Processes | None:
    """The processes named by JAXFORMER_COORDINATOR, _PROCESSES and _PROCESS, or by a TPU pod, GKE, Slurm or MPI job.

    None for a single process. Raises ConfigError if the variables are incomplete.
    """
    names = [f"JAXFORMER_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")]
    values = [environment[name] for name in names if name in environment]
    if values:
        if len(values) < 3 or not (values[1].isdecimal() and values[2].isdecimal()):
            raise ConfigError(f"expected {names[0]}=HOST:PORT, {names[1]}=COUNT and {names[2]}=INDEX, all three or none")
        processes = Processes(values[0], int(values[1]), int(values[2]))
        return processes if processes.count > 1 else None
    in_job = {"JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & set(environment)
    if "KUBERNETES_SERVICE_HOST" in environment and not in_job:
        return None  # a notebook in a pod: JAX's detection would warn or fail
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        coordinator, count, index, devices = detect(None, None, None, None, None, int(limit))
    except RuntimeError as error:
        raise ConfigError(f"the cluster's processes could not be found: {error}; give {', '.join(names)}") from None
    if coordinator is None or count is None or index is None or count == 1:
        return None
    return Processes(coordinator, count, index, None if devices is None else tuple(devices))


def initialize(processes: Processes | None = None, limit: float | None = None) -> None:
    """Joins the run's processes (default: `find()`). Call it before any device is used. It does nothing for one process.

    Raises MissingProcess, with their numbers, if some have not come within `limit` seconds (JAXFORMER_JOIN_LIMIT, 300).
    Raises ConfigError if addresses or numbers disagree.
    """
    global _peers
    limit = float(os.environ.get("JAXFORMER_JOIN_LIMIT", 300.0)) if limit is None else limit
    processes = processes or find(limit=limit)
    if processes is None or distributed.global_state.client is not None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes.index > 0:
        logging.getLogger("jaxformer").setLevel(logging.ERROR)
    _peers = meet(processes.coordinator, processes.count, processes.index, limit)
    jax.distributed.initialize(
        processes.coordinator, processes.count, processes.index, processes.local_devices,
        cluster_detection_method="deactivate", initialization_timeout=int(limit) + 60, heartbeat_timeout_seconds=HEARTBEAT,
    )  # fmt: skip


def is_first() -> bool:
    """True on process 0, which prints and writes."""
    return jax.process_index() == 0


def first(function: Callable[[], T]) -> T:
    """Calls `function()` on process 0: its (pickled) value or error is that of all. All must call in the same order."""
    if jax.process_count() == 1:
        return function()
    result: list[Any] = [None, None]  # the value, the error
    if is_first():
        try:
            result[0] = function()
        except Exception as error:
            result[1] = error
    value, error = all_gather_object(result)[0]
    if error is not None:
        raise error
    return value


def all_gather_object(value: T) -> list[T]:
    """The (pickled) values of all processes in order. All processes must make these calls in the same order."""
    if jax.process_count() == 1:
        return [value]
    client: Any = distributed.global_state.client
    key = f"jaxformer/values/{next(_keys)}"
    client.key_value_set_bytes(f"{key}/{jax.process_index()}", pickle.dumps(value))
    client.wait_at_barrier(key, _DAY)
    values = {int(name.rpartition("/")[2]): pickle.loads(data) for name, data in client.key_value_dir_get_bytes(key)}
    return [values[index] for index in range(jax.process_count())]


def run_together(body: Callable[[], int]) -> int:
    """The exit code of `body()`, after all processes have finished it. An exception in one process ends all processes.

    Each prints one line that names the failed process. Exit code 2 is a ConfigError, 1 another exception (with a traceback).
    JAX's shutdown is skipped because its barrier would wait for the failed process.
    """
    if _peers is None:
        return body()
    try:
        code = body()
    except (ConfigError, NotImplementedError) as error:
        _peers.fail(2, str(error))
    except KeyboardInterrupt:
        _peers.fail(130, "interrupted")
    except BaseException as error:
        time.sleep(GRACE)  # if a dead process is the cause, its name ends this process during the wait
        traceback.print_exc()
        _peers.fail(1, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:500])
    _peers.leave()
    return code


def local_rows(mesh: jax.sharding.Mesh | None, batch_size: int) -> np.ndarray | None:
    """The rows of a global batch that this process's devices hold, in order. None for a single process, which holds all."""
    if mesh is None or jax.process_count() == 1:
        return None
    sharding = batch_sharding(mesh, {"rows": jax.ShapeDtypeStruct((batch_size,), np.int32)})["rows"]
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))


def global_batch(mesh: jax.sharding.Mesh, size: int, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch of `size` rows, made from the `local_rows` of each process."""
    shapes = {name: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
    shardings = batch_sharding(mesh, shapes)
    make = jax.make_array_from_process_local_data
    return {name: make(shardings[name], np.asarray(leaf), shapes[name].shape) for name, leaf in batch.items()}


class Watchdog(contextlib.AbstractContextManager):
    """Ends the run if no `beat` comes for `limit` seconds (None: never), and prints the stacks of all threads."""

    def __init__(self, limit: float | None):
        self._limit, self._closed = limit, threading.Event()
        self.beat(-1, patience=10.0)
        if limit is not None:
            threading.Thread(target=self._watch, args=(limit,), name="watchdog", daemon=True).start()

    def beat(self, step: int, patience: float = 1.0) -> None:
        """Step `step` begins. The next beat may take `patience` times the limit: compiling and saving are slow."""
        self._step, self._deadline = step, time.monotonic() + patience * (self._limit or 0)

    def __exit__(self, *_) -> None:
        self._closed.set()

    def _watch(self, limit: float) -> None:
        while not self._closed.wait(min(2.0, limit / 4)):
            if time.monotonic() > self._deadline:
                text = f"no step ended for {limit:g} s, at step {self._step}"
                if _peers is not None:
                    _peers.fail(STUCK, text)
                print_error(text, stacks=True)
                os._exit(STUCK)


def step_limit() -> float | None:
    """The seconds that a step may take: JAXFORMER_STEP_LIMIT (0: no limit). Default: 300, and no limit for one process."""
    return float(os.environ.get("JAXFORMER_STEP_LIMIT", 0.0 if _peers is None else 300.0)) or None


_DAY = 24 * 3600 * 1000  # ms; a dead process ends the run, and with it the wait
_keys = itertools.count()
_peers: Peers | None = None
