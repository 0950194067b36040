"""Several processes as one run: values exchanged, a batch divided, one end. No other module uses `jax.distributed`."""

import collections
import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.config import storage
from jaxformer.errors import ConfigError
from jaxformer.parallel import jax_internals
from jaxformer.parallel.meeting import meet, relay
from jaxformer.parallel.peers import LOST, SILENCE, STUCK, Peers, print_error
from jaxformer.sharding import batch_sharding

GRACE = 3.0  # seconds until an error is reported: if a dead process is its cause, the process is named before that
FIRST = 3  # steps for which the watchdog is patient: how long a step takes is not known yet
LONG = 10.0  # a compilation, an evaluation, a save, a wait for others may take this many times as long as a step
# options of JAX that decide numbers, and variables that the compilers and libraries under it read
OPTIONS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl", "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion", "jax_default_dtype_bits", "jax_random_seed_offset", "jax_softmax_custom_jvp",
    "jax_use_shardy_partitioner", "jax_exec_time_optimization_effort", "jax_disable_jit",
)  # fmt: skip
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
HARMLESS = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_log")  # flags that change no number
CODE = Path(__file__).parents[1]
NETWORK = ("Gloo", "gloo", "Connection reset by peer", "Connection closed by peer", "coordination service")
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
    try:
        coordinator, count, index, devices = jax_internals.find_cluster(int(limit))
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
    if processes is None or jax_internals.service_client() is not None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes.index > 0:
        logging.getLogger("jaxformer").setLevel(logging.ERROR)
    silence = seconds("JAXFORMER_SILENCE_LIMIT", SILENCE)
    _peers = meet(processes.coordinator, processes.count, processes.index, limit, numerics(), silence)
    _peers.guard()
    _peers.report_place("the start of JAX")
    # its service for signals waits for other processes with Python's lock: one that never comes would freeze this one
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        processes.coordinator if processes.index == 0 else relay(processes.coordinator, limit, _peers.lost_service),
        processes.count, processes.index, processes.local_devices, cluster_detection_method="deactivate",
        initialization_timeout=int(limit) + 60, heartbeat_timeout_seconds=int(10 * SILENCE), shutdown_timeout_seconds=30,
    )  # fmt: skip
    if processes.index > 0:
        _peers.watch_service(partial(_answers, jax_internals.service_client()))
    jax_internals.wrap_compilation(lambda compile_program: partial(_compile, compile_program))


def numerics() -> dict[str, str]:
    """What decides the numbers that this process computes, beside its experiment and devices: versions, options, the code."""
    found = {f"the version of {name}": metadata.version(name) for name in ("jax", "jaxlib")}
    found |= {name: str(jax.config.values[name]) for name in OPTIONS if name in jax.config.values}
    for name in VARIABLES:
        flags = [flag for flag in os.environ.get(name, "").split() if not flag.startswith(HARMLESS)]
        found[name] = " ".join(sorted(flags))
    code = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        code.update(str(path.relative_to(CODE)).encode() + path.read_bytes())
    return found | {"the digest of jaxformer's code": code.hexdigest()[:12]}


def check_devices() -> None:
    """Raises ConfigError, on all processes, where they have other kinds or numbers of devices than process 0."""
    devices = jax.local_devices()
    mine = f"{len(devices)} x {devices[0].device_kind}"
    every = all_gather_object(mine, "the comparison of devices")
    other = next((index for index, devices in enumerate(every) if devices != every[0]), None)
    if other is not None:
        text = f"process {other} has {every[other]}, process 0 has {every[0]}"
        raise ConfigError(f"devices: {text}; give all processes of a run the same number of devices of one kind")


def _answers(client: Any) -> bool:
    """Whether JAX's service in process 0 answers a question."""
    try:
        client.key_value_try_get("jaxformer/nothing")
    except Exception as error:
        return "NOT_FOUND" in str(error)
    return True


def _compile(compile: Callable, backend: Any, computation: Any, devices: np.ndarray, *rest: Any) -> Any:
    """JAX's compilation of a program. If several processes run the program, it waits until all of them have it.

    A process enters a program's first collective as soon as it has the program, and gloo gives up after 30 s. A process that
    has the program in its cache would meet nobody while another one still compiles.
    """
    executable = compile(backend, computation, devices, *rest)
    members = sorted({device.process_index for device in devices.flat})
    if len(members) > 1 and _peers is not None:
        name = str(computation.operation.attributes["sym_name"]).strip('"')
        key = f"compiled/{name}/{members[0]}-{members[-1]}-{len(members)}"
        key += f"/{next(_programs[key])}"
        _peers.call(key, f"the end of the compilation of {name}", members=members, limit=_patience())
    return executable


def _patience() -> float | None:
    """Seconds without any progress after which a process counts as stuck, where it may work long before it comes."""
    limit = step_limit()
    return None if limit is None else LONG * limit


def is_first() -> bool:
    """True on process 0, which prints and writes."""
    return jax.process_index() == 0


def first(function: Callable[[], T], what: str = "") -> T:
    """Calls `function()` on process 0: its value (JSON) or error is that of all. All must call in the same order."""
    if jax.process_count() == 1:
        return _through_json(function())
    result: dict[str, Any] = {}
    if is_first():
        try:
            result = {"value": _through_json(function())}
        except Exception as error:
            result = {"error": _described(error)}
            all_gather_object(result, what)
            raise
    found: Any = all_gather_object(result, what)[0]
    if "error" in found:
        raise _rebuilt(found["error"])
    return found["value"]


def _through_json(value: T) -> T:
    """A value as the other processes get it. One process gets it so, too: then its tests find what is no JSON."""
    return json.loads(json.dumps(value))


def all_gather_object(value: T, what: str = "") -> list[T]:
    """The values (JSON) of all processes in order. All processes must make these calls in the same order.

    `what` is said of a process that does not come: what the others waited for.
    """
    if jax.process_count() == 1:
        return [_through_json(value)]
    return _call(f"values/{next(_keys)}", what or "an exchange of values", value)


def _call(key: str, what: str, value: Any = None, work: int = -1) -> list[Any]:
    """The values of all processes that come to this call, over our own links."""
    if _peers is not None:
        return _peers.call(key, what, value, limit=_patience(), work=work)
    # a program that joined its processes itself, by `jax.distributed`, has no links
    client = jax_internals.service_client()
    client.key_value_set(f"jaxformer/{key}/{jax.process_index()}", json.dumps(value))
    client.wait_at_barrier(f"jaxformer/{key}", int(1000 * (_patience() or 24 * 3600)))
    found = {name.rpartition("/")[2]: text for name, text in client.key_value_dir_get(f"jaxformer/{key}")}
    return [json.loads(found[str(index)]) for index in range(jax.process_count())]


def _described(error: Exception) -> dict[str, Any]:
    """An error as JSON: its class, those above it, and its arguments."""
    classes = [f"{one.__module__}:{one.__qualname__}" for one in type(error).__mro__]
    given = error.args
    if isinstance(error, OSError) and error.errno is not None:
        given = error.errno, error.strerror, error.filename  # the name of the file is not among `args`
    arguments = [value if isinstance(value, str | int | float | None) else str(value) for value in given]
    return {"classes": classes, "arguments": arguments}


def _rebuilt(described: dict[str, Any]) -> Exception:
    """The error of another process. Its class is one that is there already: of Python or of this library."""
    for text in described["classes"]:
        module, _, name = text.partition(":")
        ours = module == "builtins" or module.partition(".")[0] == "jaxformer"
        found = getattr(sys.modules.get(module), name, None) if ours else None
        if isinstance(found, type) and issubclass(found, Exception):
            with contextlib.suppress(Exception):
                return found.__new__(found, *described["arguments"])
    return RuntimeError(*described["arguments"])


class Work:
    """Something that all processes do together with another library, whose waits for all are ours: `wait`.

    Where one process fails, it says so by `abandon`, and the waits of the others raise Abandoned with its reason. All processes
    begin the same works in the same order.
    """

    def __init__(self, what: str = "the start"):
        self.what, self.number = what, next(_works)
        self._counts: collections.defaultdict[str, Any] = collections.defaultdict(itertools.count)

    def wait(self, name: str) -> None:
        if jax.process_count() > 1:
            _call(f"work/{self.number}/{name}/{next(self._counts[name])}", f"{self.what} ({name})", work=self.number)

    def abandon(self, why: str) -> None:
        if _peers is not None:
            _peers.abandon(self.number, why)


def report_place(place: str) -> None:
    """Says where this process is, and that it goes on: those who wait for it are patient."""
    if _peers is not None:
        _peers.report_place(place)


def signal_after(step: int) -> int:
    """The signal that stops all processes after `step` steps; 0 for none. Each must ask after every step."""
    if _peers is not None:
        return _peers.after(step)
    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0


@dataclass(frozen=True)
class Group:
    """Processes that do a work together: this one is number `index` of `count`."""

    index: int
    count: int
    first: Callable[[Callable[[], Any]], Any]  # calls a function on the first one; its value or error is that of all
    wait: Callable[[], Any]  # until all are here


def that_see(folder: Path) -> Group:
    """All processes if they see the files of one folder, else this process alone. All must make this call."""
    alone = Group(0, 1, lambda function: _through_json(function()), lambda: None)
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
        check_devices()
        code = body()
    except (ConfigError, NotImplementedError) as error:
        _peers.fail(2, str(error))
    except KeyboardInterrupt:
        _peers.fail(130, "interrupted")
    except BaseException as error:
        if isinstance(error, OSError) and storage.stops(error):
            _peers.fail(storage.exit_code(error), storage.message(error))
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:500]
        if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in NETWORK):
            time.sleep(_peers.silence + GRACE)  # a process that is silent for so long is named during the wait
            _peers.fail(LOST, f"the connection to another process is lost: {text}")
        time.sleep(GRACE)  # if a dead process is the cause, its name ends this process during the wait
        traceback.print_exc()
        _peers.fail(1, text)
    _peers.leave(_patience())
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
        self._place = "the start"
        self._tick, self._ticks = min(2.0, (limit or 0) / 4), 0
        self._begin, self._patience = 0, LONG
        if limit is not None:
            threading.Thread(target=self._watch, args=(limit,), name="watchdog", daemon=True).start()

    def beat(self, step: int, patience: float = 1.0, doing: str = "") -> None:
        """Step `step` begins. The next beat may take `patience` times the limit: compiling and saving are slow."""
        place = f"step {step}" + (f" ({doing})" if doing else "")
        if self._patience == 1:
            self._longest = max(self._longest, self._seconds())
        self._steps += 1
        self.phase(place, patience)

    def phase(self, place: str, patience: float = LONG) -> None:
        """A part of the run begins, such as the restore of its state. The next one must begin within the same time."""
        self._place, self._begin, self._patience = place, self._ticks, patience
        report_place(place)

    def __exit__(self, *_) -> None:
        self._closed.set()

    def _seconds(self) -> float:
        return (self._ticks - self._begin) * self._tick

    def _watch(self, limit: float) -> None:
        while not self._closed.wait(self._tick):
            self._ticks += 1
            patience = self._patience if self._steps > FIRST else max(self._patience, LONG)
            if self._seconds() > max(patience * limit, 10 * self._longest):
                text = f"no step ended for {self._seconds():.0f} s, at {self._place}"
                text += f"; JAXFORMER_STEP_LIMIT={limit:g} is the limit, 0 sets none"
                if _peers is not None:
                    _peers.fail(STUCK, text)
                print_error(text, stacks=True)
                os._exit(STUCK)


def step_limit() -> float | None:
    """The seconds that a step may take: JAXFORMER_STEP_LIMIT, 300 by default; None for 0, no limit."""
    return seconds("JAXFORMER_STEP_LIMIT") or None


def seconds(name: str, default: float = 300.0) -> float:
    """A limit in the environment. Raises ConfigError for what is no number of seconds."""
    text = os.environ.get(name, f"{default:g}")
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ConfigError(f"{name}={text}: expected a number of seconds")


_programs: collections.defaultdict[str, Any] = collections.defaultdict(itertools.count)
_keys = itertools.count()
_works = itertools.count()
_peers: Peers | None = None
