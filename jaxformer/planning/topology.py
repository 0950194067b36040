"""Devices that are not here: TPU topologies by libtpu, GPU ones by XLA's CUDA compiler, and an environment for both."""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError

EXAMPLES = "v5e:4x4, v5p:8x8x8, v4:8x16x16, v6e:16x16, tpu7x:4x4x8, h200:16x8"


class Gpu(NamedTuple):
    """What the CUDA compiler asks of a GPU. Values of openxla/xla, xla/backends/gpu/target_config/specs, 2026-11."""

    kind: str
    capability: int
    cores: int
    units: int  # of a core, for float32
    shared: int  # bytes of a core
    shared_block: int
    l2: int
    clock: float  # GHz
    memory: int
    bandwidth: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 166912, 41943040, 1.41, 85100068864, 2039040000000),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 232448, 52428800, 1.98, 84942979072, 3352320000000),
    "h200": Gpu("NVIDIA H200", 9, 132, 128, 233472, 232448, 52428800, 1.98, 151397597184, 4800000000000),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 233472, 232448, 132644864, 1.965, 191514411008, 7672320000000),
}  # fmt: skip


def prepare() -> None:
    """The environment under which compilers work for chips that are not there. Before JAX is imported."""
    logs = tempfile.mkdtemp(prefix="jaxformer-plan-")
    atexit.register(shutil.rmtree, logs, ignore_errors=True)
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": logs,
    }.items():
        os.environ.setdefault(name, value)


def devices(name: str, slices: int = 1) -> list:
    """The devices of a topology: `v5e:2x2`, `v5p:8x8x8`; of GPUs `h200:1x4x8`, slices x hosts x GPUs of a host.

    Raises ConfigError for a name that no compiler here knows.
    """
    kind, _, shape = name.partition(":")
    return _gpus(kind, shape, name) if kind in GPUS else _tpus(name, slices)


def _tpus(name: str, slices: int) -> list:
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name.startswith("v4"):
        options["chip_config_name"] = "megacore"
    if set(re.findall(r"\d+", name.partition(":")[2])) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except Exception as error:
        words = str(error).splitlines()[0][:200]
        if re.search("libtpu|platform|not installed", words.lower()):
            raise ConfigError(
                f"no TPU compiler here ({words}); make plan installs it, or pip install 'jaxformer[tpu]'"
            ) from None
        raise ConfigError(f"--topology={name}: {words}; expected a name such as {EXAMPLES}") from None


def _gpus(kind: str, shape: str, name: str) -> list:
    from jax.experimental import topologies

    sizes = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+)", shape)
    if sizes is None:
        raise ConfigError(f"--topology={name}: expected slices x hosts x GPUs of a host, such as {kind}:1x4x8")
    whole = "x".join(size or "1" for size in sizes.groups())
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=name, target_config=_target(GPUS[kind]), topology=whole
        )
    except Exception as error:
        words = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"no CUDA compiler here ({words}); make plan installs it, or pip install 'jaxformer[plan-gpu]'"
        ) from None
    return list(found.devices)


def _target(gpu: Gpu) -> str:
    """A GpuTargetConfigProto as text."""
    numbers = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared, "threads_per_core_limit": 2048, "core_count": gpu.cores,
        "fpus_per_core": gpu.units, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535, "memory_bandwidth": gpu.bandwidth, "l2_cache_size": gpu.l2,
        "clock_rate_ghz": gpu.clock, "device_memory_size": gpu.memory, "shared_memory_per_block_optin": gpu.shared_block,
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536, "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64,
    }  # fmt: skip
    feature = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"  {key}: {value}" for key, value in numbers.items()),
            f"  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {feature} }}",
            f'  name: "{gpu.kind}"',
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{gpu.kind}"',
        ]
    )


@dataclass
class Log:
    """What the compiler said of itself meanwhile."""

    text: str = ""

    @property
    def resharded(self) -> int:
        """How many arrays the partitioner saw no way to move but by making them whole on every device."""
        return len(re.findall(r"[Ii]nvoluntary full rematerialization", self.text))


@contextmanager
def listening(stderr: bool = True) -> Iterator[Log]:
    """Collects what a compiler writes to its log files (TPU) and, where asked, to stderr (CUDA), which is quiet meanwhile."""
    folder, log = Path(os.environ.get("TPU_LOG_DIR", "/nonexistent")), Log()
    files = lambda: [path for path in folder.glob("*") if path.is_file() and not path.is_symlink()]
    before = {path: path.stat().st_size for path in files()}
    with tempfile.TemporaryFile() as said:
        keep = os.dup(2)
        if stderr:
            os.dup2(said.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(keep, 2)
            os.close(keep)
            said.seek(0)
            log.text = said.read().decode(errors="replace")
            for path in files():
                with path.open("rb") as file:
                    file.seek(before.get(path, 0))
                    log.text += file.read().decode(errors="replace")
