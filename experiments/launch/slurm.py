"""A Slurm batch job that trains on GPU (or CPU) nodes and queues itself again when its time is up or it is preempted.

    python -m experiments.launch.slurm EXP --nodes 4 --gpus 8 [--time 24:00:00] [--partition P] [--dry] -- OPTIONS

One task a GPU, as JAX expects of Slurm (a node without GPUs: one task). Two minutes before the end Slurm sends SIGTERM to the
tasks; they save and end with 143, and the job goes back into the queue. Exit codes 2 and 3 would only happen again.
Runs must lie on a file system that all nodes share.
"""

import re
import shlex
import sys

from experiments.launch import slices
from jaxformer.errors import ConfigError

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}{resources}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --output={name}-%j.log

cd {root}
# a task that ends first must not take the others with it while they save
srun --kill-on-bad-exit=0 --cpu-bind=none {command}
code=$?
case $code in
  0) exit 0 ;;
  2 | 3) exit $code ;; # a mistake in the options; numbers that went bad: both would happen again
  143) ;; # time is up or preempted, everything is saved
  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {retries} ] || exit $code ;;
esac
echo "exit code $code: back into the queue (restart ${{SLURM_RESTART_COUNT:-0}})"
scontrol requeue "$SLURM_JOB_ID"
"""


def options(parser) -> None:
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="a node; 0 for nodes without")
    parser.add_argument("--cpus", type=int, default=0, help="a task; the cluster's default without")
    parser.add_argument("--time", default="24:00:00", help="after which it queues again")
    parser.add_argument("--partition", default="")
    parser.add_argument("--account", default="")
    parser.add_argument("--runs", default="runs", help="on a file system that all nodes share")
    parser.add_argument("--python", default=".venv/bin/python")
    parser.add_argument("--retries", type=int, default=10, help="restarts after which a crash ends it for good")


def script(asked, arguments: list[str]) -> str:
    if asked.nodes < 1 or asked.gpus < 0:
        raise ConfigError(f"NODES={asked.nodes} GPUS={asked.gpus}: expected at least one node")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", asked.time):
        raise ConfigError(f"TIME={asked.time}: expected hours:minutes:seconds, or days-hours:minutes:seconds")
    lines = [f"--gpus-per-node={asked.gpus}"] * bool(asked.gpus) + [f"--cpus-per-task={asked.cpus}"] * bool(asked.cpus)
    for option in ("partition", "account"):
        if value := getattr(asked, option):
            if not re.fullmatch(r"[\w.,-]+", value):
                raise ConfigError(f"{option.upper()}={value}: expected a name")
            lines.append(f"--{option}={value}")
    return SCRIPT.format(
        name=slices.name_of(asked.experiment),
        nodes=asked.nodes,
        tasks=max(asked.gpus, 1),
        resources="".join(f"\n#SBATCH {line}" for line in lines),
        time=asked.time,
        root='"$SLURM_SUBMIT_DIR"',
        command=shlex.join([asked.python, *slices.training(asked.experiment, arguments, asked.runs)]),
        retries=asked.retries,
    )


def launch(asked, arguments: list[str]) -> int:
    return slices.submit(script(asked, arguments), ["sbatch"], asked.dry)


def main(argv: list[str] | None = None) -> int:
    return slices.main("slurm", __doc__, options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
