"""Several processes as one run: they exchange values, divide a batch, and end together.

No other module uses `jax.distributed`. A run calls `initialize` first and `run_together` around its
body.
"""

import collections
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.config import storage
from jaxformer.errors import ConfigError
from jaxformer.parallel import jax_internals
from jaxformer.parallel.cluster import Processes, find
from jaxformer.parallel.meeting import meet, relay
from jaxformer.parallel.numerics import numerics
from jaxformer.parallel.peers import LOST, SILENCE, STUCK, Peers, print_error
from jaxformer.parallel.remote_errors import describe_error, rebuild_error
from jaxformer.sharding import batch_sharding

# Seconds to wait before an error is reported. A dead process that caused it is named in that time.
GRACE = 3.0
FIRST = 3  # the watchdog is patient during these steps: the duration of a step is not known yet
# A compilation, an evaluation, a save or a wait may take this many times the limit of a step.
LONG = 10.0
# words in the messages of errors of the network
NETWORK = (
    "Gloo",
    "gloo",
    "Connection reset by peer",
    "Connection closed by peer",
    "coordination service",
)
T = TypeVar("T")


def initialize(processes: Processes | None = None, limit: float | None = None) -> None:
    """Joins the run's processes (default: `find()`). Call it before any device is used.

    It does nothing for a single process. Raises MissingProcess, with the numbers of the missing
    processes, after `limit` seconds (JAXFORMER_JOIN_LIMIT, 300). Raises ConfigError if addresses or
    numbers disagree.
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
    _peers = meet(
        processes.coordinator, processes.count, processes.index, limit, numerics(), silence
    )
    _peers.guard()
    _peers.report_place("the start of JAX")
    # JAX's service for signals holds Python's lock while it waits for other processes. A process
    # that never comes would freeze this one.
    jax.config.update("jax_enable_preemption_service", False)
    address = processes.coordinator
    if processes.index > 0:
        address = relay(address, limit, _peers.lost_service)
    jax.distributed.initialize(
        address,
        processes.count,
        processes.index,
        processes.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(limit) + 60,
        heartbeat_timeout_seconds=int(10 * SILENCE),
        shutdown_timeout_seconds=30,
    )
    if processes.index > 0:
        _peers.watch_service(partial(_answers, jax_internals.service_client()))
    jax_internals.wrap_compilation(lambda compile_program: partial(_compile, compile_program))


def check_devices() -> None:
    """Raises ConfigError, on all processes, if one has other devices, or more, than process 0."""
    devices = jax.local_devices()
    mine = f"{len(devices)} x {devices[0].device_kind}"
    texts = all_gather_object(mine, "the comparison of devices")
    other = next((index for index, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        text = f"process {other} has {texts[other]}, process 0 has {texts[0]}"
        raise ConfigError(
            f"devices: {text}; give all processes of a run the same number of devices of one kind"
        )


def _answers(client: Any) -> bool:
    """Whether JAX's service in process 0 answers a question."""
    try:
        client.key_value_try_get("jaxformer/nothing")
    except Exception as error:
        return "NOT_FOUND" in str(error)
    return True


def _compile(
    compile: Callable, backend: Any, computation: Any, devices: np.ndarray, *rest: Any
) -> Any:
    """JAX's compilation of a program. It returns after all processes that run the program have it.

    A process enters a program's first collective as soon as it has the program, and gloo gives up
    after 30 s. So a process that reads the program from its cache must wait for one that compiles
    it.
    """
    executable = compile(backend, computation, devices, *rest)
    members = sorted({device.process_index for device in devices.flat})
    if len(members) > 1 and _peers is not None:
        name = str(computation.operation.attributes["sym_name"]).strip('"')
        key = f"compiled/{name}/{members[0]}-{members[-1]}-{len(members)}"
        key += f"/{next(_programs[key])}"
        _peers.call(
            key, f"the end of the compilation of {name}", members=members, limit=_patience()
        )
    return executable


def _patience() -> float | None:
    """Seconds without progress after which a missing process counts as stuck; None: no limit.

    It may have long work to do before it comes, such as a compilation.
    """
    limit = step_limit()
    return None if limit is None else LONG * limit


def is_first() -> bool:
    """True on process 0, which prints and writes."""
    return jax.process_index() == 0


def first(function: Callable[[], T], what: str = "") -> T:
    """Calls `function()` on process 0. All processes return its value (JSON) or raise its error.

    All processes must make these calls in the same order.
    """
    if jax.process_count() == 1:
        return _through_json(function())
    result: dict[str, Any] = {}
    if is_first():
        try:
            result = {"value": _through_json(function())}
        except Exception as error:
            result = {"error": describe_error(error)}
            all_gather_object(result, what)
            raise
    result_of_first: Any = all_gather_object(result, what)[0]
    if "error" in result_of_first:
        raise rebuild_error(result_of_first["error"])
    return result_of_first["value"]


def _through_json(value: T) -> T:
    """The value after a round trip through JSON, as other processes receive it.

    A single process does it as well, so that its tests find values that JSON cannot hold.
    """
    return json.loads(json.dumps(value))


def all_gather_object(value: T, what: str = "") -> list[T]:
    """The values (JSON) of all processes, in order.

    All processes must make these calls in the same order. `what` says, in the message about a
    process that does not come, what the others waited for.
    """
    if jax.process_count() == 1:
        return [_through_json(value)]
    return _call(f"values/{next(_keys)}", what or "an exchange of values", value)


def _call(key: str, what: str, value: Any = None, work: int = -1) -> list[Any]:
    """The values of all processes that make this call, exchanged over our own connections."""
    if _peers is not None:
        return _peers.call(key, what, value, limit=_patience(), work=work)
    # a program that called `jax.distributed` itself has no such connections
    client = jax_internals.service_client()
    client.key_value_set(f"jaxformer/{key}/{jax.process_index()}", json.dumps(value))
    client.wait_at_barrier(f"jaxformer/{key}", int(1000 * (_patience() or 24 * 3600)))
    texts = {
        name.rpartition("/")[2]: text for name, text in client.key_value_dir_get(f"jaxformer/{key}")
    }
    return [json.loads(texts[str(index)]) for index in range(jax.process_count())]


class Work:
    """A work that all processes do together in another library, which waits for all by our `wait`.

    A process that fails calls `abandon`. The waits of the others then raise Abandoned with its
    reason. All processes begin the same works in the same order.
    """

    def __init__(self, what: str = "the start"):
        self.what, self.number = what, next(_works)
        self._counts: collections.defaultdict[str, Any] = collections.defaultdict(itertools.count)

    def wait(self, name: str) -> None:
        if jax.process_count() > 1:
            _call(
                f"work/{self.number}/{name}/{next(self._counts[name])}",
                f"{self.what} ({name})",
                work=self.number,
            )

    def abandon(self, why: str) -> None:
        if _peers is not None:
            _peers.abandon(self.number, why)


def report_place(place: str) -> None:
    """Says where this process is, and that it makes progress, so that others keep waiting."""
    if _peers is not None:
        _peers.report_place(place)


def signal_after(step: int) -> int:
    """The signal that stops all processes after `step` steps; 0: none. Call it after every step."""
    if _peers is not None:
        return _peers.after(step)
    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0


@dataclass(frozen=True)
class Group:
    """Processes that do a work together. This one is number `index` of `count`."""

    index: int
    count: int
    # calls a function on the first one; all return its value or raise its error
    first: Callable[[Callable[[], Any]], Any]
    wait: Callable[[], Any]  # waits until all processes are here


def that_see(folder: Path) -> Group:
    """All processes if all see the files of `folder`, else this process alone. All must call it."""
    alone = Group(0, 1, lambda function: _through_json(function()), lambda: None)
    if jax.process_count() == 1:
        return alone
    name = first(lambda: _new_folder(folder))
    all_see_it = all(all_gather_object((folder / name).exists()))
    first((folder / name).rmdir)
    if not all_see_it:
        return alone
    return Group(jax.process_index(), jax.process_count(), first, lambda: all_gather_object(None))


def _new_folder(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return os.path.basename(tempfile.mkdtemp(dir=folder))


def run_together(body: Callable[[], int]) -> int:
    """The exit code of `body()`, after all processes have finished it.

    An exception in one process ends all processes. Each prints one line that names the failed one.
    Exit code 2 is a ConfigError, 1 another exception (with a traceback). JAX's shutdown is skipped,
    because its barrier would wait for the failed process.
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
        if isinstance(error, jax.errors.JaxRuntimeError) and any(
            word in str(error) for word in NETWORK
        ):
            # if the network to a process is cut, that process is named during this time
            time.sleep(_peers.silence + GRACE)
            _peers.fail(LOST, f"the connection to another process is lost: {text}")
        # if a dead process is the cause, it is named, and this process ends, during this time
        time.sleep(GRACE)
        traceback.print_exc()
        _peers.fail(1, text)
    _peers.leave(_patience())
    return code


def local_examples(mesh: jax.sharding.Mesh | None, batch_size: int) -> np.ndarray | None:
    """The examples of a global batch that this process's devices hold: their indices, in order.

    None for a single process, which holds all.
    """
    if mesh is None or jax.process_count() == 1:
        return None
    sharding = batch_sharding(mesh, {"rows": jax.ShapeDtypeStruct((batch_size,), np.int32)})["rows"]
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))


def global_batch(
    mesh: jax.sharding.Mesh, size: int, batch: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
    """The global batch of `size` examples, made of the `local_examples` of each process."""
    shapes = {
        name: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in batch.items()
    }
    shardings = batch_sharding(mesh, shapes)
    make = jax.make_array_from_process_local_data
    return {
        name: make(shardings[name], np.asarray(leaf), shapes[name].shape)
        for name, leaf in batch.items()
    }


class Watchdog(contextlib.AbstractContextManager):
    """Ends the run, with the stacks of all threads, if no `beat` comes for `limit` seconds.

    `limit` None: never. A step may always take ten times as long as the longest one so far. Time is
    counted in ticks of a thread, so time in which the whole process is stopped does not count.
    """

    def __init__(self, limit: float | None):
        self._closed, self._steps, self._longest = threading.Event(), 0, 0.0
        self._place = "the start"
        self._tick, self._ticks = min(2.0, (limit or 0) / 4), 0
        self._begin, self._patience = 0, LONG
        if limit is not None:
            threading.Thread(
                target=self._watch, args=(limit,), name="watchdog", daemon=True
            ).start()

    def beat(self, step: int, patience: float = 1.0, doing: str = "") -> None:
        """Step `step` begins. The next beat must come within `patience` times the limit.

        Compiling and saving are slow, and need more than 1.
        """
        place = f"step {step}" + (f" ({doing})" if doing else "")
        if self._patience == 1:
            self._longest = max(self._longest, self._seconds())
        self._steps += 1
        self.phase(place, patience)

    def phase(self, place: str, patience: float = LONG) -> None:
        """A phase of the run begins, such as the restore of its state.

        The next one must begin within `patience` times the limit.
        """
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
    """The seconds that a step may take: JAXFORMER_STEP_LIMIT, 300 by default; None if it is 0."""
    return seconds("JAXFORMER_STEP_LIMIT") or None


def seconds(name: str, default: float = 300.0) -> float:
    """The seconds in a variable of the environment. Raises ConfigError if it is no such number."""
    text = os.environ.get(name, f"{default:g}")
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ConfigError(f"{name}={text}: expected a number of seconds")


_programs: collections.defaultdict[str, Any] = collections.defaultdict(itertools.count)
_keys = itertools.count()
_works = itertools.count()
_peers: Peers | None = None
