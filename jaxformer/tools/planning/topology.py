"""Devices that this machine does not have, described by their compiler.

`devices` asks libtpu for TPU topologies and XLA's CUDA compiler for GPU topologies. `prepare` sets
the environment that both need.
"""

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError, install_command

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
EXAMPLES = "v5e:4x4, v5p:8x8x8, v4:8x16x16, v6e:16x16, tpu7x:4x4x8, h200:16x8"


class Gpu(NamedTuple):
    """The facts about a GPU that the CUDA compiler needs besides `cost.CHIPS`.

    Source: openxla/xla gpu/target_config/specs, 2026-11.
    """

    kind: str
    capability: int
    cores: int
    units: int  # of a core, for float32
    shared: int  # bytes of shared memory of a core; the system keeps 1024 of them
    l2: int
    clock: float  # GHz
    memory: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 41943040, 1.41, 85100068864),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 52428800, 1.98, 84942979072),
    "h200": Gpu("NVIDIA H200", 9, 132, 128, 233472, 52428800, 1.98, 151397597184),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 233472, 132644864, 1.965, 191514411008),
}


def prepare() -> None:
    """Sets the environment in which compilers work without their chips.

    JAX reads it when it is imported, so this module imports no JAX.
    """
    logs = tempfile.mkdtemp(prefix="jaxformer-plan-")
    atexit.register(shutil.rmtree, logs, ignore_errors=True)
    defaults = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": logs,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "jax" in sys.modules and not sys.modules["jax"].config.jax_platforms:
        # Else the CUDA plugin looks for cuDNN, which no plan needs, and does without a compiler.
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def devices(name: str, slices: int = 1) -> list:
    """The devices of a topology, such as `v5e:2x2`, or for GPUs `h200:1x4x8`.

    The shape of GPUs is slices x hosts x GPUs of a host. Raises ConfigError for an unknown name.
    """
    kind, _, shape = name.partition(":")
    if kind in GPUS:
        sizes = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)", shape)
        if sizes is None:
            raise ConfigError(
                f"--topology={name}: expected slices x hosts x GPUs of a host, such as "
                f"{kind}:1x4x8; hosts x GPUs for one slice, so {kind}:1x1 is one GPU"
            )
        shape = "x".join(size or "1" for size in sizes.groups())
        return _ask("CUDA", "plan-gpu", name, target_config=_target(GPUS[kind]), topology=shape)
    if kind not in TPUS:
        known = f"expected {', '.join([*TPUS, *GPUS])} with a shape: {EXAMPLES}"
        raise ConfigError(f"--topology={name}: no chip {kind!r} that can be planned for; {known}")
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if kind == "v4":
        options["chip_config_name"] = "megacore"
    if set(re.findall(r"\d+", shape)) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return _ask("TPU", "tpu", name, **options)


def versions(platform: str) -> dict[str, str]:
    """The installed versions of jax and of the compiler of that platform, and libtpu's flags."""
    from jaxformer.parallel.numerics import version_of  # imports JAX

    compiler = "libtpu" if platform == "tpu" else "jax-cuda13-plugin"
    found = {name: version_of(name) for name in ("jax", compiler)}
    if platform == "tpu" and (flags := os.environ.get("LIBTPU_INIT_ARGS")):
        found["LIBTPU_INIT_ARGS"] = flags  # as the launchers hand it to the hosts
    return {name: version for name, version in found.items() if version is not None}


def _ask(platform: str, extra: str, name: str, **options: Any) -> list:
    """The devices of a topology by its compiler."""
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(
            platform=platform.lower(), topology_name=name, **options
        )
        return list(description.devices)
    except Exception as error:
        words = (
            f"{str(error).splitlines()[0][:200]}; expected a name such as {EXAMPLES}, "
            f"and a {platform} compiler"
        )
        raise ConfigError(
            f"--topology={name}: {words}: make plan, or {install_command(extra)}"
        ) from None


def _target(gpu: Gpu) -> str:
    """A GpuTargetConfigProto as text."""
    from jaxformer.models.cost import CHIPS

    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(CHIPS[gpu.kind].bandwidth),
        "l2_cache_size": gpu.l2,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
        "shared_memory_per_block_optin": gpu.shared - 1024,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
    }
    fields = "\n".join(f"  {key}: {value}" for key, value in numbers.items())
    feature = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return f"""gpu_device_info {{
{fields}
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {feature} }}
  name: "{gpu.kind}"
}}
platform_name: "CUDA"
device_description_str: "{gpu.kind}"
dnn_version_info {{ major: 9 minor: 10 }}"""


@dataclass
class Log:
    """The text that a compiler wrote."""

    text: str = ""

    @property
    def resharded(self) -> int:
        """The number of arrays that the partitioner could only move by gathering them whole."""
        return len(re.findall(r"[Ii]nvoluntary full rematerialization", self.text))


@contextmanager
def listening(stderr: bool = True) -> Iterator[Log]:
    """Collects the text that a compiler writes to its log files (TPU) and to stderr (CUDA).

    With `stderr` the process's standard error is redirected while the block runs.
    """
    folder = Path(os.environ.get("TPU_LOG_DIR", "/nonexistent"))
    log = Log()
    old_sizes = _file_sizes(folder)
    with tempfile.TemporaryFile() as captured:
        original = os.dup(2)
        if stderr:
            os.dup2(captured.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(original, 2)
            os.close(original)
            captured.seek(0)
            log.text = captured.read().decode(errors="replace")
            for path in _file_sizes(folder):
                log.text += path.read_bytes()[old_sizes.get(path, 0) :].decode(errors="replace")


def _file_sizes(folder: Path) -> dict[Path, int]:
    """{file: its size} of a folder, without links."""
    files = (path for path in folder.glob("*") if path.is_file() and not path.is_symlink())
    return {path: path.stat().st_size for path in files}
