"""Several processes as one run: values exchanged, a batch divided, one end. No other module uses `jax.distributed`."""

import collections
import contextlib
import itertools
import logging
import math
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax._src import clusters, compiler, distributed  # compilation, cluster addresses, the key-value store: no public API

from jaxformer.errors import ConfigError
from jaxformer.parallel.peers import SILENCE, STUCK, Peers, meet, print_error, relay
from jaxformer.sharding import batch_sharding

GRACE = 3.0  # seconds until an error is reported: if a dead process is its cause, the process is named before that
FIRST = 3  # steps for which the watchdog is patient: how long a step takes is not known yet
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
    except (RuntimeError, LookupError, ValueError) as error:  # a job's variables may be there in part, or of another form
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError | ValueError) else str(error)
        raise ConfigError(f"the cluster's processes could not be found ({what}); give {', '.join(names)}") from None
    if coordinator is None or count is None or index is None or count == 1:
        return None
    return Processes(coordinator, count, index, None if devices is None else tuple(devices))


def initialize(processes: Processes | None = None, limit: float | None = None) -> None:
    """Joins the run's processes (default: `find()`). Call it before any device is used. It does nothing for one process.

    Raises MissingProcess, with their numbers, if some have not come within `limit` seconds (JAXFORMER_JOIN_LIMIT, 300).
    Raises ConfigError if addresses or numbers disagree.
    """
    global _peers
    limit = seconds("JAXFORMER_JOIN_LIMIT") if limit is None else limit
    processes = processes or find(limit=limit)
    if processes is None or distributed.global_state.client is not None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes.index > 0:
        logging.getLogger("jaxformer").setLevel(logging.ERROR)
    _peers = meet(processes.coordinator, processes.count, processes.index, limit)
    jax.distributed.initialize(
        processes.coordinator if processes.index == 0 else relay(processes.coordinator, limit),
        processes.count, processes.index, processes.local_devices, cluster_detection_method="deactivate",
        initialization_timeout=int(limit) + 60, heartbeat_timeout_seconds=int(10 * SILENCE),
    )  # fmt: skip
    compiler.compile_or_get_cached = partial(_compile, compiler.compile_or_get_cached)


def _compile(compile: Callable, backend: Any, computation: Any, devices: np.ndarray, *rest: Any) -> Any:
    """JAX's compilation of a program. If several processes run the program, it waits until all of them have it.

    A process enters a program's first collective as soon as it has the program, and gloo gives up after 30 s. A process that
    has the program in its cache would meet nobody while another one still compiles.
    """
    executable = compile(backend, computation, devices, *rest)
    members = sorted({device.process_index for device in devices.flat})
    if len(members) > 1:
        client, name = cast(Any, distributed.global_state.client), str(computation.operation.attributes["sym_name"])
        client.wait_at_barrier(f"jaxformer/compiled/{name}/{members[0]}/{next(_programs[name])}", _DAY, members)
    return executable


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


@dataclass(frozen=True)
class Group:
    """Processes that do a work together: this one is number `index` of `count`."""

    index: int
    count: int
    first: Callable[[Callable[[], Any]], Any]  # calls a function on the first one; its value or error is that of all
    wait: Callable[[], Any]  # until all are here


def that_see(folder: Path) -> Group:
    """All processes if they see the files of one folder, else this process alone. All must make this call."""
    alone = Group(0, 1, lambda function: function(), lambda: None)
    if jax.process_count() == 1:
        return alone
    name = first(lambda: _new_folder(folder))
    seen = all(all_gather_object((folder / name).exists()))
    first((folder / name).rmdir)
    return Group(jax.process_index(), jax.process_count(), first, lambda: all_gather_object(None)) if seen else alone


def _new_folder(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return os.path.basename(tempfile.mkdtemp(dir=folder))


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
    """Ends the run, with the stacks of all threads, if no `beat` comes for `limit` seconds (None: never).

    A step may also take ten times as long as the longest one so far. Time is counted in ticks of a thread: while the whole
    process is stopped, there are none.
    """

    def __init__(self, limit: float | None):
        self._closed, self._steps, self._longest = threading.Event(), 0, 0.0
        self._tick, self._ticks = min(2.0, (limit or 0) / 4), 0
        self._step, self._begin, self._patience = -1, 0, 10.0
        if limit is not None:
            threading.Thread(target=self._watch, args=(limit,), name="watchdog", daemon=True).start()

    def beat(self, step: int, patience: float = 1.0) -> None:
        """Step `step` begins. The next beat may take `patience` times the limit: compiling and saving are slow."""
        if self._patience == 1:
            self._longest = max(self._longest, self._seconds())
        self._steps += 1
        self._step, self._begin, self._patience = step, self._ticks, patience

    def __exit__(self, *_) -> None:
        self._closed.set()

    def _seconds(self) -> float:
        return (self._ticks - self._begin) * self._tick

    def _watch(self, limit: float) -> None:
        while not self._closed.wait(self._tick):
            self._ticks += 1
            patience = self._patience if self._steps > FIRST else 10.0
            if self._seconds() > max(patience * limit, 10 * self._longest):
                text = f"no step ended for {self._seconds():.0f} s, at step {self._step}"
                text += f"; JAXFORMER_STEP_LIMIT={limit:g} is the limit, 0 sets none"
                if _peers is not None:
                    _peers.fail(STUCK, text)
                print_error(text, stacks=True)
                os._exit(STUCK)


def step_limit() -> float | None:
    """The seconds that a step may take: JAXFORMER_STEP_LIMIT, 300 by default; None for 0, no limit."""
    return seconds("JAXFORMER_STEP_LIMIT") or None


def seconds(name: str) -> float:
    """A limit in the environment, 300 by default. Raises ConfigError for what is no number of seconds."""
    text = os.environ.get(name, "300")
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ConfigError(f"{name}={text}: expected a number of seconds")


_programs: collections.defaultdict[str, Any] = collections.defaultdict(itertools.count)
_DAY = 24 * 3600 * 1000  # ms; a dead process ends the run, and with it the wait
_keys = itertools.count()
_peers: Peers | None = None
