"""A SkyPilot managed job that trains on a TPU slice or on GPU nodes of any cloud, and moves when it is preempted.

    python -m experiments.launch.skypilot EXP --topology v5e:4x4 --bucket gs://B [--dry] -- OPTIONS
    python -m experiments.launch.skypilot EXP --accelerators H100:8 --nodes 4 --bucket s3://B [--dry] -- OPTIONS

SkyPilot copies this working tree, runs the command on every host and, when spot nodes vanish or the run ends with 143
(preempted, saved), starts it again elsewhere; it resumes from the bucket. Needs: pip install skypilot, `sky check`.
"""

import json
import re
import shlex
import sys

from experiments.launch import slices
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
setup: |
  python3 -m pip install -q --user uv
  ~/.local/bin/uv venv -q --allow-existing --python 3.12 .venv
  ~/.local/bin/uv pip install -q -e '.[{extra}]'
run: |
{environment}  exec .venv/bin/python {command}
"""
GPUS = """\
  export JAXFORMER_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8482"
  export JAXFORMER_PROCESSES=$SKYPILOT_NUM_NODES JAXFORMER_PROCESS=$SKYPILOT_NODE_RANK
"""  # on a TPU slice JAX finds the hosts by itself


def options(parser) -> None:
    parser.add_argument("--topology", default="", help="a TPU slice, such as v5e:4x4")
    parser.add_argument("--accelerators", default="", help="or GPUs a node, such as H100:8")
    parser.add_argument("--nodes", type=int, default=1, help="of GPUs")
    parser.add_argument("--bucket", default="", help="where runs lie: gs://name, s3://name, ...")
    parser.add_argument("--on-demand", action="store_true", help="no spot nodes")
    parser.add_argument("--retries", type=int, default=3, help="restarts after a failure that is not a preemption")


def task(asked, arguments: list[str]) -> str:
    if bool(asked.topology) == bool(asked.accelerators):
        raise ConfigError("where to train: give TOPOLOGY=v5e:4x4 (a TPU slice) or GPUS=H100:8 NODES=4, one of them")
    if not re.fullmatch(r"[a-z0-9]+://[\w./-]+", asked.bucket):
        raise ConfigError(f"BUCKET={asked.bucket}: runs must outlive their nodes; expected gs://name or s3://name")
    if asked.nodes < 1 or (asked.topology and asked.nodes > 1):
        raise ConfigError(f"NODES={asked.nodes}: expected at least 1; a TPU slice has its own number of hosts")
    accelerators, runtime = asked.accelerators, ""
    if asked.topology:
        wanted = slices.parse_slice(asked.topology)
        if slices.KINDS[wanted.kind].gcloud is None:
            raise ConfigError(f"TOPOLOGY={asked.topology}: Google rents {wanted.kind} through GKE only: make gke-train")
        accelerators = f"tpu-{wanted.accelerator}"
        runtime = f"\n  accelerator_args:\n    runtime_version: {slices.KINDS[wanted.kind].runtime}"
    elif not re.fullmatch(r"[\w-]+:\d+", accelerators):
        raise ConfigError(f"GPUS={accelerators}: expected a kind and how many a node, such as H100:8")
    return TASK.format(
        name=slices.name_of(asked.experiment),
        nodes=asked.nodes,
        accelerators=accelerators,
        arguments=runtime,
        spot=json.dumps(not asked.on_demand),
        retries=asked.retries,
        bucket=asked.bucket,
        extra="tpu" if asked.topology else "cuda",
        environment=GPUS if asked.nodes > 1 else "",
        command=shlex.join(slices.training(asked.experiment, arguments, "/bucket/runs")),
    )


def launch(asked, arguments: list[str]) -> int:
    return slices.submit(task(asked, arguments), ["sky", "jobs", "launch", "--yes"], asked.dry)


def main(argv: list[str] | None = None) -> int:
    return slices.main("skypilot", __doc__, options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
