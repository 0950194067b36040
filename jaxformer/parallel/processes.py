"""Several processes as one run: how they find each other, agree, divide a batch, and end together.

The only module that talks to `jax.distributed`.
"""

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
from jax._src import clusters, distributed  # the only way to a cluster's addresses and to the key-value store
from jax.experimental import multihost_utils

from jaxformer.errors import ConfigError
from jaxformer.parallel.peers import LOST, STUCK, Lost, Peers, meet, say
from jaxformer.sharding import batch_sharding

GRACE = 3.0  # seconds: an unexpected error is often the consequence of a dead process, and its name comes later
HEARTBEAT = 20  # seconds until JAX ends the run after a machine has vanished without closing its connections
T = TypeVar("T")

__all__ = [
    "LOST", "STUCK", "Lost", "Processes", "Watchdog", "everyone", "find", "first", "global_batch", "initialize", "is_first",
    "own_rows", "preempted", "step_limit", "together",
]  # fmt: skip


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


def find(environment: Mapping[str, str] = os.environ, limit: float = 300.0) -> Processes | None:
    """The processes that JAXFORMER_COORDINATOR, _PROCESSES and _PROCESS name, else those of a TPU pod, GKE, Slurm or MPI job.

    None for a single process. Raises ConfigError where the variables are incomplete.
    """
    names = [f"JAXFORMER_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")]
    given = [environment[name] for name in names if name in environment]
    if given:
        if len(given) < 3 or not (given[1].isdecimal() and given[2].isdecimal()):
            raise ConfigError(
                f"expected {names[0]}=HOST:PORT, {names[1]}=COUNT and {names[2]}=INDEX, all three or none"
            )
        found = Processes(given[0], int(given[1]), int(given[2]))
        return found if found.count > 1 else None
    in_job = {"JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & set(environment)
    if "KUBERNETES_SERVICE_HOST" in environment and not in_job:
        return None  # a notebook in a pod, where JAX's detection would warn or fail
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        coordinator, count, index, devices = detect(None, None, None, None, None, int(limit))
    except RuntimeError as error:
        raise ConfigError(f"the cluster's processes could not be found: {error}; give {', '.join(names)}") from None
    if coordinator is None or count is None or index is None or count == 1:
        return None
    return Processes(coordinator, count, index, None if devices is None else tuple(devices))


def initialize(processes: Processes | None = None, limit: float | None = None) -> None:
    """Joins the run's processes (`find` by default); does nothing for a single one. Before the first use of a device.

    Raises Lost on everyone who came when some have not come within `limit` seconds (JAXFORMER_JOIN_LIMIT, 300), with their
    numbers; ConfigError where the addresses or numbers do not fit together.
    """
    global _peers
    limit = _seconds("JAXFORMER_JOIN_LIMIT", 300.0) if limit is None else limit
    processes = processes or find(limit=limit)
    if processes is None or distributed.global_state.client is not None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes.index > 0:
        logging.getLogger("jaxformer").setLevel(logging.ERROR)
    _peers = meet(processes.coordinator, processes.count, processes.index, limit)
    jax.distributed.initialize(
        processes.coordinator,
        processes.count,
        processes.index,
        local_device_ids=processes.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(limit) + 60,
        heartbeat_timeout_seconds=HEARTBEAT,
    )


def is_first() -> bool:
    """Whether this is the process that prints and writes: process 0, or the only one."""
    return jax.process_index() == 0


def first(function: Callable[[], T]) -> T:
    """What `function()` returns on process 0, on every process; what it raises there is raised on every process.

    All processes call it, in the same order. The value is pickled. With one process it is `function()`.
    """
    if jax.process_count() == 1:
        return function()
    value: Any = None
    error: Exception | None = None
    if is_first():
        try:
            value = function()
        except Exception as raised:
            error = raised
    value, error = everyone((value, error))[0]
    if error is not None:
        raise error
    return value


def everyone(value: T) -> list[T]:
    """Every process's value, in order, on every process. All call it, in the same order as `first`; the value is pickled."""
    if jax.process_count() == 1:
        return [value]
    client: Any = distributed.global_state.client
    key = f"jaxformer/everyone/{next(_questions)}"
    client.key_value_set_bytes(f"{key}/{jax.process_index()}", pickle.dumps(value))
    client.wait_at_barrier(key, _DAY)
    values = {int(name.rpartition("/")[2]): pickle.loads(data) for name, data in client.key_value_dir_get_bytes(key)}
    return [values[index] for index in range(jax.process_count())]


def preempted(step: int) -> bool:
    """Whether all processes should save now and stop, since one got SIGTERM. All ask after every step, from the same one on.

    The step is the same everywhere. A Python handler for SIGTERM would take the signal from JAX, and nobody would stop.
    """
    return multihost_utils.reached_preemption_sync_point(step)


def together(body: Callable[[], int]) -> int:
    """`body()`'s exit code, once every process has come to its end. What ends one process otherwise ends all of them.

    An exception (ConfigError: exit code 2, others 1 with a traceback), a death and a stuck step are told to all; each says so
    in one line that names the process, and ends at once without JAX's shutdown, whose barrier nobody would join.
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
        time.sleep(GRACE)  # a failed collective: the news of who is gone ends this process meanwhile
        traceback.print_exc()
        _peers.fail(1, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:500])
    _peers.leave()
    return code


def own_rows(mesh: jax.sharding.Mesh | None, batch_size: int) -> np.ndarray | None:
    """Which rows of a global batch this process's devices hold, in order; None for all of them in a single process."""
    if mesh is None or jax.process_count() == 1:
        return None
    sharding = batch_sharding(mesh, {"rows": jax.ShapeDtypeStruct((batch_size,), np.int32)})["rows"]
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))


def global_batch(mesh: jax.sharding.Mesh, size: int, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch of `size` rows; each process brings its `own_rows`, in order."""
    shapes = {name: (size, *leaf.shape[1:]) for name, leaf in batch.items()}
    shardings = batch_sharding(
        mesh, {name: jax.ShapeDtypeStruct(shapes[name], leaf.dtype) for name, leaf in batch.items()}
    )
    make = jax.make_array_from_process_local_data
    return {name: make(shardings[name], np.asarray(leaf), shapes[name]) for name, leaf in batch.items()}


class Watchdog(contextlib.AbstractContextManager):
    """Ends the run, with the stacks of all threads and the process that is behind, when no `beat` came for `limit` seconds.

    Off if `limit` is None. `step_limit()` is a run's.
    """

    def __init__(self, limit: float | None):
        self._limit, self._closed = limit, threading.Event()
        self.beat(-1, patience=10.0)
        if limit is not None:
            threading.Thread(target=self._watch, args=(limit,), name="watchdog", daemon=True).start()

    def beat(self, step: int, patience: float = 1.0) -> None:
        """Step `step` begins. `patience` times the limit, until the next beat, for what compiles, evaluates or saves."""
        self._step, self._deadline = step, time.monotonic() + patience * (self._limit or 0)

    def __exit__(self, *_) -> None:
        self._closed.set()

    def _watch(self, limit: float) -> None:
        tick = min(2.0, limit / 4)
        # process 0 sees all others, they see only it; so it speaks first
        grace = 0.0 if _peers is None or _peers.index == 0 else 5.0
        while not self._closed.wait(tick):
            if _peers is not None:
                _peers.report(self._step)
            if time.monotonic() > self._deadline + grace:
                text = f"no step ended for {limit:g} s, at step {self._step}"
                if _peers is not None:
                    _peers.fail(STUCK, f"{text}; {_peers.who_is_behind(self._step, 3 * tick)}")
                say(text, stacks=True)
                os._exit(STUCK)


def step_limit() -> float | None:
    """Seconds that a step may take: JAXFORMER_STEP_LIMIT; without it 300 for several processes, none for one. 0 is none."""
    return _seconds("JAXFORMER_STEP_LIMIT", 0.0 if _peers is None else 300.0) or None


def _seconds(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={os.environ[name]}: expected a number of seconds") from None


_DAY = 24 * 3600 * 1000  # ms: nobody waits that long, a death ends the wait
_questions = itertools.count()
_peers: Peers | None = None
