"""Several processes as one run: how they find each other, agree, share out a batch, and end together.

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
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed  # the only way to a cluster's addresses and to the key-value store
from jax.experimental import multihost_utils

from jaxformer.errors import ConfigError
from jaxformer.parallel.peers import LOST, STUCK, Hub, Lost, Member, Processes, end
from jaxformer.sharding import batch_sharding

GRACE = 3.0  # seconds that an unexpected error waits for news of a dead process, whose consequence it then is
T = TypeVar("T")

__all__ = [
    "LOST", "STUCK", "Lost", "Processes", "Watchdog", "everyone", "find", "first", "global_batch", "initialize", "is_first",
    "own_rows", "preempted", "step_limit", "together",
]  # fmt: skip


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
    _peers = (Hub if processes.index == 0 else Member)(processes, limit)
    jax.distributed.initialize(
        processes.coordinator,
        processes.count,
        processes.index,
        local_device_ids=processes.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(limit) + 60,
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
    client, key = _client(), f"jaxformer/first/{next(_questions)}"
    if not is_first():
        value, error = pickle.loads(client.blocking_key_value_get_bytes(key, _DAY))
    else:
        value: Any = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as raised:
            error = raised
        client.key_value_set_bytes(key, pickle.dumps((value, error)))
    if error is not None:
        raise error
    return value


def everyone(value: T) -> list[T]:
    """Every process's value, in order, on every process. All call it, in the same order as `first`; the value is pickled."""
    if jax.process_count() == 1:
        return [value]
    client, key = _client(), f"jaxformer/everyone/{next(_questions)}/"
    client.key_value_set_bytes(f"{key}{jax.process_index()}", pickle.dumps(value))
    read = lambda index: pickle.loads(client.blocking_key_value_get_bytes(f"{key}{index}", _DAY))
    return first(lambda: [read(index) for index in range(jax.process_count())])


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


# ---- a batch among processes


def own_rows(mesh: jax.sharding.Mesh | None, batch_size: int) -> np.ndarray | None:
    """Which rows of a global batch this process's devices hold, in order; None for all of them in a single process."""
    if mesh is None or jax.process_count() == 1:
        return None
    sharding = batch_sharding(mesh, {"rows": jax.ShapeDtypeStruct((batch_size,), np.int32)})["rows"]
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in held]))


def global_batch(
    mesh: jax.sharding.Mesh, own: np.ndarray, size: int, batch: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
    """The global batch of `size` rows, of which each process brings its `own_rows`."""
    whole = {name: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}

    def one(leaf, shape, place):
        def part(index):
            wanted = np.arange(size)[index[0]]
            return leaf[(np.searchsorted(own, wanted), *index[1:])]

        return jax.make_array_from_callback(shape.shape, place, part)

    places = batch_sharding(mesh, whole)
    return {name: one(np.asarray(leaf), whole[name], places[name]) for name, leaf in batch.items()}


# ---- a step that does not end


class Watchdog(contextlib.AbstractContextManager):
    """Ends the run, with the stacks of all threads and the process that is behind, when no `beat` came for `limit` seconds.

    Off where `limit` is None. `step_limit()` is a run's. The processes publish where they are in JAX's key-value store.
    """

    def __init__(self, limit: float | None):
        self._limit, self._step, self._closed = limit, -1, threading.Event()
        self._tick = min(2.0, (limit or 8.0) / 4)
        self.beat(-1, patience=10.0)
        if limit is not None:
            for task in (self._publish, self._watch) if _peers is not None else (self._watch,):
                threading.Thread(target=task, name="watchdog", daemon=True).start()

    def beat(self, step: int, patience: float = 1.0) -> None:
        """Step `step` begins. `patience` times the limit, until the next beat, for what compiles, evaluates or saves."""
        self._step, self._deadline = step, time.monotonic() + patience * (self._limit or 0)

    def __exit__(self, *_) -> None:
        self._closed.set()

    def _publish(self) -> None:
        index, client, beats = jax.process_index(), _client(), 0
        while not self._closed.wait(self._tick):
            beats += 1
            client.key_value_set(f"jaxformer/at/{index}", f"{beats} {self._step}", allow_overwrite=True)

    def _watch(self) -> None:
        while not self._closed.wait(self._tick):
            if time.monotonic() > self._deadline:
                who = "" if _peers is None else f"; {self._who()}"
                text = f"no step ended for {self._limit:g} s, at step {self._step}{who}"
                (end if _peers is None else _peers.fail)(STUCK, text)

    def _who(self) -> str:
        """Who keeps the others waiting, as far as the key-value store shows it."""
        read = [{}, {}]

        def look() -> None:
            for table in read:
                time.sleep(2 * self._tick)
                for key, value in _client().key_value_dir_get("jaxformer/at/"):
                    beats, step = value.split()
                    table[int(key.rpartition("/")[2])] = (int(beats), int(step))

        reader = threading.Thread(target=look, daemon=True)
        reader.start()
        reader.join(timeout=10 * self._tick)
        assert _peers is not None
        if reader.is_alive() or not read[1]:
            return f"{_peers.name(0)} does not answer"
        frozen = [i for i, at in read[1].items() if read[0].get(i) == at and i != _peers.index]
        steps = {i: step for i, (_, step) in read[1].items()}
        steps[_peers.index] = self._step
        behind = frozen or [i for i in steps if steps[i] < max(steps.values())]
        how = "does not answer" if frozen else f"is behind, the others are at step {max(steps.values())}"
        named = ", ".join(f"{_peers.name(i)} at step {steps[i]}" for i in sorted(behind))
        return f"{named}: {how}" if behind else "all processes are at that step"


def step_limit() -> float | None:
    """Seconds that a step may take: JAXFORMER_STEP_LIMIT; without it 300 for several processes, none for one. 0 is none."""
    return _seconds("JAXFORMER_STEP_LIMIT", 0.0 if _peers is None else 300.0) or None


def _seconds(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={os.environ[name]}: expected a number of seconds") from None


def _client() -> Any:
    return distributed.global_state.client


_DAY = 24 * 3600 * 1000  # ms: nobody waits that long, a death ends the wait
_questions = itertools.count()
_peers: Hub | Member | None = None
