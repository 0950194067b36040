"""A SkyPilot managed job: it trains on a TPU slice or GPU nodes, and moves after a preemption.

    python -m experiments.launch.skypilot EXP --topology v5e:4x4 --bucket gs://B [--dry] -- OPTIONS
    python -m experiments.launch.skypilot EXP --accelerators H100:8 --nodes 4 --bucket s3://B
        [--dry] -- OPTIONS

SkyPilot copies this working tree and runs the command on every host, in any cloud. After a
preemption (also after exit code 143: preempted, saved) it starts the command elsewhere, and the run
resumes from the bucket. Needs: pip install skypilot, `sky check`. The fields of the task are those
of docs.skypilot.co/en/latest/reference/yaml-spec.html, 2026-11.
"""

import json
import re
import shlex
import sys

from experiments.launch import door, lock, slices
from jaxformer.errors import ConfigError

TASK = """\
name: {name}
num_nodes: {nodes}
workdir: .
resources:
  accelerators: {accelerators}{arguments}
  use_spot: {spot}
  job_recovery:
    strategy: EAGER_NEXT_REGION
    max_restarts_on_errors: {retries}
    recover_on_exit_codes: [143] # preempted, saved
file_mounts:
  /bucket:
    source: {bucket}
    mode: MOUNT
  ~/constraints.txt: {lock}
setup: |
  python3 -m pip install -q --user uv
  ~/.local/bin/uv venv -q --allow-existing --python {python} .venv
  ~/.local/bin/uv pip install -q -c ~/constraints.txt -e '.[{extra},hosts]'
run: {run}
"""
GPUS = """\
export JAXFORMER_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8482"
export JAXFORMER_PROCESSES=$SKYPILOT_NUM_NODES JAXFORMER_PROCESS=$SKYPILOT_NODE_RANK
"""  # on a TPU slice JAX finds the hosts without these variables


def add_options(parser) -> None:
    parser.add_argument("--topology", default="", help="a TPU slice, such as v5e:4x4")
    parser.add_argument("--accelerators", default="", help="or GPUs per node, such as H100:8")
    parser.add_argument("--nodes", type=slices.count, default=1, help="number of GPU nodes")
    parser.add_argument("--bucket", default="", help="bucket for runs: gs://name, s3://name, ...")
    parser.add_argument("--on-demand", action="store_true", help="do not use spot nodes")
    parser.add_argument(
        "--retries",
        type=slices.count,
        default=3,
        help="restarts after a failure that is not a preemption",
    )


def task(options, arguments: list[str]) -> tuple[str, list[str]]:
    """The task, and the checks that were made, in words."""
    if bool(options.topology) == bool(options.accelerators):
        raise ConfigError(
            "where to train: give TOPOLOGY=v5e:4x4 (a TPU slice) or GPUS=H100:8 "
            "NODES=4, one of them"
        )
    bucket = bucket_source(options.bucket, options.topology)
    if options.nodes < 1 or (options.topology and options.nodes > 1):
        raise ConfigError(
            f"NODES={options.nodes}: expected at least 1; a TPU slice has its own number of hosts"
        )
    if options.topology:
        accelerators, runtime, hosts = tpu_resources(options.topology)
    else:
        accelerators, runtime, hosts = gpu_resources(options.accelerators, options.nodes)
    command = door.train_command(options.experiment, arguments, "/bucket/runs", hosts)
    variables = GPUS if options.nodes > 1 else ""
    text = TASK.format(
        name=slices.word(slices.job_name(options.experiment)),
        nodes=options.nodes,
        accelerators=slices.word(accelerators),
        arguments=runtime,
        spot=json.dumps(not options.on_demand),
        retries=options.retries,
        bucket=slices.word(bucket),
        lock=lock.FILE,
        python=lock.PYTHON,
        extra="tpu" if options.topology else "cuda",
        run=slices.block(f"{variables}exec {shlex.join(command.line('.venv/bin/python'))}", "  "),
    )
    return text, command.facts


def bucket_source(bucket: str, topology: str) -> str:
    """The source of the mounted bucket. Raises ConfigError if SkyPilot would not mount it."""
    if bucket.startswith("gs://") or (bucket and topology):
        return f"gs://{slices.bucket_name(bucket)}"
    if is_source(bucket):
        return bucket
    expected = (
        "expected gs://name, s3://name or another source that SkyPilot mounts, "
        f"with a bucket of {slices.RULES}"
    )
    raise ConfigError(f"BUCKET={bucket}: runs must outlive their nodes; {expected}")


def tpu_resources(topology: str) -> tuple[str, str, door.Hosts]:
    """(SkyPilot's name of a TPU slice, the line of its runtime version, its hosts)."""
    tpu = slices.parse_tpu_vm(topology)
    if tpu.shape != tpu.default_shape:
        shape = f"{tpu.kind}:{tpu.default_shape}"
        size = f"SkyPilot asks for a size, {tpu.accelerator}, which is {shape}"
        raise ConfigError(f"TOPOLOGY={topology}: {size}; take that shape, or make pod-train")
    runtime = f"\n  accelerator_args:\n    runtime_version: {slices.KINDS[tpu.kind].runtime}"
    hosts = door.Hosts(tpu.devices, tpu.hosts, mount="/bucket", has_tpu=True)
    return f"tpu-{tpu.accelerator}", runtime, hosts


def gpu_resources(accelerators: str, nodes: int) -> tuple[str, str, door.Hosts]:
    """(SkyPilot's name of the GPUs of a node, "" because GPUs need no runtime, the hosts)."""
    if not re.fullmatch(r"[\w-]+:[1-9]\d*", accelerators):
        raise ConfigError(
            f"GPUS={accelerators}: expected a kind and how many a node, such as H100:8"
        )
    devices = nodes * int(accelerators.partition(":")[2])
    return accelerators, "", door.Hosts(devices, nodes, mount="/bucket")


def is_source(text: str) -> bool:
    """Whether SkyPilot can mount it: docs.skypilot.co/en/latest/reference/storage.html, 2026-11."""
    if re.fullmatch("oci://[A-Za-z0-9._-]+/?", text):  # only oci:// may have capital letters
        return True
    folder = "(?:/[A-Za-z0-9_./-]*)?"
    places = (
        rf"(?:s3|r2|nebius|cw)://([^/]+){folder}",
        rf"cos://[a-z0-9-]+/([^/]+){folder}",
        rf"https://[a-z0-9]{{3,24}}\.blob\.core\.windows\.net/([^/]+){folder}",
    )
    matches = [re.fullmatch(place, text) for place in places]
    return any(match is not None and slices.is_bucket(match[1]) for match in matches)


def launch(options, arguments: list[str]) -> int:
    text, facts = task(options, arguments)
    if not options.dry:
        lock.write()
    end = ["sky", "jobs", "cancel", "--name", slices.job_name(options.experiment)]
    return slices.submit(text, ["sky", "jobs", "launch", "--yes"], options.dry, facts, end)


def main(argv: list[str] | None = None) -> int:
    return slices.main("skypilot", __doc__, add_options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
