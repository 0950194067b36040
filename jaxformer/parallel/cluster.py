"""The processes of a run, as environment variables name them: ours, or those of a cluster's job."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from jaxformer.errors import ConfigError
from jaxformer.parallel import jax_internals

# a pod of Kubernetes that belongs to a job with several processes has one of these variables
JOB_VARIABLES = ("JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


@dataclass(frozen=True)
class Processes:
    """The address of process 0 (host:port), the number of processes, and the index of this one."""

    coordinator: str
    count: int
    index: int
    # numbers of the host's accelerators that this process uses; None: all
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 <= self.index < self.count):
            raise ConfigError(
                f"{self}: expected coordinator HOST:PORT and an index from 0 to count - 1"
            )


def find(environment: Mapping[str, str] = os.environ, limit: float = 300.0) -> Processes | None:
    """The processes of this run, as the environment names them; None for a single process.

    The variables JAXFORMER_COORDINATOR, _PROCESSES and _PROCESS name them, or the variables of a
    TPU pod, or of a GKE, Slurm or MPI job. Raises ConfigError if the variables are incomplete.
    """
    names = [f"JAXFORMER_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")]
    values = [environment[name] for name in names if name in environment]
    if values:
        if len(values) < 3 or not (values[1].isdecimal() and values[2].isdecimal()):
            raise ConfigError(
                f"expected {names[0]}=HOST:PORT, {names[1]}=COUNT and "
                f"{names[2]}=INDEX, all three or none"
            )
        processes = Processes(values[0], int(values[1]), int(values[2]))
        return processes if processes.count > 1 else None
    is_pod = "KUBERNETES_SERVICE_HOST" in environment
    if is_pod and not any(name in environment for name in JOB_VARIABLES):
        return None  # a notebook in a pod: JAX's detection would warn or fail
    try:
        coordinator, count, index, devices = jax_internals.find_cluster(int(limit))
    # some of a job's variables may be missing or have another form
    except (RuntimeError, LookupError, ValueError) as error:
        kind = f"{type(error).__name__}: " if isinstance(error, LookupError | ValueError) else ""
        raise ConfigError(
            f"the cluster's processes could not be found ({kind}{error}); give {', '.join(names)}"
        ) from None
    if coordinator is None or count is None or index is None or count == 1:
        return None
    return Processes(coordinator, count, index, None if devices is None else tuple(devices))
