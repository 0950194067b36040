"""A Slurm batch job that trains on GPU (or CPU) nodes and queues itself again when it is stopped.

    python -m experiments.launch.slurm EXP --nodes 4 --gpus 8 [--time 24:00:00] [--partition P]
        [--dry] -- OPTIONS

It queues itself again at its time limit and after a preemption. There is one task per GPU, as JAX
expects, or one per node without GPUs. Two minutes before the time limit Slurm sends SIGTERM. The
tasks save and end with 143, and the job is queued again. Exit codes 2 and 3 end the job, because a
restart would fail again.

All nodes must share the file systems of this checkout, with its environment, and of the runs. GPU
nodes use .venv-cuda (`make .venv-cuda/ready` on the login node), CPU nodes .venv.
"""

import re
import shlex
import sys
from pathlib import Path

from experiments.launch import door, lock, slices
from jaxformer.errors import ConfigError

MARGIN = 120  # seconds between SIGTERM and the time limit
# The smallest time limit in seconds: a start, a compilation, some steps, a save, and the margin.
LEAST = 600
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}{resources}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@{margin}
#SBATCH --output={name}-%j.log

cd {root}
# a task that ends first must not take the others with it while they save
srun --kill-on-bad-exit=0 --cpu-bind=none{cpus} {command}
code=$?
file={name}-$SLURM_JOB_ID.crashes \
# their number; SLURM_RESTART_COUNT has preemptions and time limits, too
case $code in
  0) rm -f $file; exit 0 ;;
  2 | 3) exit $code ;; # a mistake in the options; numbers that went bad: both would happen again
  143) ;; # time is up or preempted, everything is saved
  *) crashes=$(($(cat $file 2> /dev/null || echo 0) + 1)); \
[ $crashes -le {retries} ] || exit $code; echo $crashes > $file ;;
esac
echo "exit code $code: back into the queue (restart ${{SLURM_RESTART_COUNT:-0}})"
scontrol requeue "$SLURM_JOB_ID"
"""


def add_options(parser) -> None:
    parser.add_argument("--nodes", type=slices.count, default=1)
    parser.add_argument(
        "--gpus", type=slices.count, default=8, help="GPUs per node; 0 for CPU nodes"
    )
    parser.add_argument(
        "--cpus", type=slices.count, default=0, help="CPUs per task (default: the cluster's)"
    )
    parser.add_argument(
        "--time", default="24:00:00", help="time limit, after which the job is queued again"
    )
    parser.add_argument("--partition", default="")
    parser.add_argument("--account", default="")
    parser.add_argument("--runs", default="runs", help="folder for runs, shared by all nodes")
    parser.add_argument(
        "--python",
        default="",
        help="(default: .venv-cuda/bin/python, without GPUs .venv/bin/python)",
    )
    parser.add_argument(
        "--retries", type=slices.count, default=10, help="number of restarts after crashes"
    )


def check_environment(python: str, cuda: bool) -> None:
    """Checks that the nodes' environment exists on this file system and has the tested jax."""
    folder = slices.ROOT / Path(python).parent.parent
    version = lock.versions()[0]["jax"]
    packages = folder.glob("lib/python*/site-packages/jax-*.dist-info")
    installed = [path.name.removesuffix(".dist-info") for path in packages]
    if installed != [f"jax-{version}"]:
        has = f"has {installed[0]}, not jax-{version}" if installed else "has no jax"
        advice = (
            "rm -rf .venv-cuda; make .venv-cuda/ready, where there is a network"
            if cuda
            else "give --python="
        )
        raise ConfigError(f"--python={python}: {has}; {advice}")


def seconds(time: str) -> int:
    """The seconds of a time limit of Slurm; 0 is no limit.

    Its forms: [days-]hours:minutes:seconds, minutes:seconds, minutes, days-hours.
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # after the days the first number is hours
        hours, minutes, left = (*parts, 0, 0)[:3]
    else:
        hours, minutes, left = {1: (0, *parts, 0), 2: (0, *parts), 3: parts}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def script(options, arguments: list[str]) -> tuple[str, list[str]]:
    """The batch script, and the checks that were made, in words."""
    if options.nodes < 1:
        raise ConfigError(
            f"NODES={options.nodes} GPUS={options.gpus} CPUS={options.cpus}: "
            "expected at least one node"
        )
    if not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", options.time):
        raise ConfigError(
            f"TIME={options.time}: expected hours:minutes:seconds, or days-hours:minutes:seconds"
        )
    if 0 < seconds(options.time) < LEAST:
        why = (
            f"Slurm stops the run {MARGIN} s before, or up to 60 s earlier, "
            "so it would be queued again and again"
        )
        raise ConfigError(f"TIME={options.time}: less than {LEAST // 60} minutes; {why}")
    lines = []
    if options.gpus:
        lines.append(f"--gpus-per-node={options.gpus}")
    if options.cpus:
        lines.append(f"--cpus-per-task={options.cpus}")
    for option in ("partition", "account"):
        if value := getattr(options, option):
            if not re.fullmatch(r"[\w.][\w.,-]*", value, re.ASCII):
                raise ConfigError(f"{option.upper()}={value}: expected a name")
            lines.append(f"--{option}={value}")
    slices.check_runs(options.runs, 1)  # all nodes share the folder of this checkout
    python = options.python or (".venv-cuda/bin/python" if options.gpus else ".venv/bin/python")
    if not options.dry:
        check_environment(python, options.gpus > 0)
    tasks = options.nodes * max(options.gpus, 1)
    command = door.train_command(
        options.experiment, arguments, options.runs, door.Hosts(tasks, tasks, files="shared")
    )
    text = SCRIPT.format(
        name=slices.job_name(options.experiment),
        nodes=options.nodes,
        tasks=max(options.gpus, 1),
        resources="".join(f"\n#SBATCH {line}" for line in lines),
        time=options.time,
        margin=MARGIN,
        root='"$SLURM_SUBMIT_DIR"',
        # srun does not inherit it from sbatch since Slurm 22.05
        # (slurm.schedmd.com/sbatch.html, --cpus-per-task; 2026-11)
        cpus=f" --cpus-per-task={options.cpus}" * bool(options.cpus),
        command=shlex.join([python, *command.words]),
        retries=options.retries,
    )
    return text, command.facts


def launch(options, arguments: list[str]) -> int:
    text, facts = script(options, arguments)
    end = ["scancel", "--me", f"--name={slices.job_name(options.experiment)}"]
    return slices.submit(text, ["sbatch"], options.dry, facts, end)


def main(argv: list[str] | None = None) -> int:
    return slices.main("slurm", __doc__, add_options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
