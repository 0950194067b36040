"""Kubernetes with JobSet, and Slurm, in small: jobs really run here, by the rules in the manifest
or script that is submitted.

The trainer of both ends as the file `ends` says: a line for each start, with the exit code of each
host. Kubernetes: kubernetes.io/docs/tasks/job/pod-failure-policy, jobset.sigs.k8s.io (failure
policy); Slurm: slurm.schedmd.com, sbatch, srun, scontrol; 2026-11.
"""

import importlib
import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from experiments.launch import slices  # noqa: E402
from tests.launch.fakes import install  # noqa: E402

JAX = importlib.metadata.version("jax")
TRAINER = """\
#!/bin/bash
# INDEX is the host; its exit codes are a column of the file `ends`, 0 below its end
echo "$@" >> "$CLOUD/starts$INDEX"
code=$(sed -n "$(wc -l < "$CLOUD/starts$INDEX")p" "$CLOUD/ends" | cut -d' ' -f$((INDEX + 1)))
exit ${code:-0}
"""
KUBECTL = """\
import os, pathlib, subprocess, sys
import yaml

cloud = pathlib.Path(os.environ["CLOUD"])
assert sys.argv[1:3] == ["apply", "-f"]
jobset = yaml.safe_load(pathlib.Path(sys.argv[3]).read_text())
(job,) = jobset["spec"]["replicatedJobs"]
policy, spec = jobset["spec"]["failurePolicy"], job["template"]["spec"]
(container,) = spec["template"]["spec"]["containers"]
assert (
    spec["completions"] == spec["parallelism"]
    and spec["template"]["spec"]["restartPolicy"] == "Never"
)
pods, state = job["replicas"] * spec["completions"], open(cloud / "states", "a")


def start(index):
    environment = os.environ | {"INDEX": str(index), "PATH": f"{cloud}/image:{os.environ['PATH']}"}
    return subprocess.Popen(container["command"], env=environment)


def action(code):  # the first rule of the pod failure policy that fits
    for rule in spec["podFailurePolicy"]["rules"]:
        assert (
            rule["onExitCodes"]["operator"] == "In"
            and rule["onExitCodes"]["containerName"] == container["name"]
        )
        if code in rule["onExitCodes"]["values"]:
            return rule["action"]
    return "Count"


def attempt():  # why the jobs failed; None where they did not
    running = dict.fromkeys(range(pods))
    while running:
        pods_now = {index: start(index) for index in running}
        codes = {index: pod.wait() for index, pod in pods_now.items()}
        actions = {index: action(code) for index, code in codes.items() if code}
        if set(actions.values()) - {"Ignore"}:
            return "PodFailurePolicy" if "FailJob" in actions.values() else "BackoffLimitExceeded"
        running = actions  # those pods again


for restart in range(policy["maxRestarts"] + 1):
    reason = attempt()
    print(reason or "Completed", file=state)
    fails = any(
        rule["action"] == "FailJobSet" and reason in rule["onJobFailureReasons"]
        for rule in policy["rules"]
    )
    if reason is None or fails:
        break
"""
SBATCH = """\
import os, pathlib, re, shutil, subprocess, sys

cloud = pathlib.Path(os.environ["CLOUD"])
options = dict(
    re.findall(r"^#SBATCH --([\\w-]+)=(.*)$", pathlib.Path(sys.argv[1]).read_text(), re.MULTILINE)
)
shutil.copy(sys.argv[1], cloud / "script")
environment = os.environ | {"SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_JOB_ID": "17"}
environment["SLURM_NTASKS"] = str(int(options["nodes"]) * int(options["ntasks-per-node"]))
for restart in range(20):
    environment |= {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
    code = subprocess.run(
        ["bash", cloud / "script"], env=environment, stdout=subprocess.DEVNULL
    ).returncode
    print(code, file=open(cloud / "states", "a"))
    if not (cloud / "requeued").exists():
        break
    (cloud / "requeued").unlink()
"""
SRUN = """\
import os, subprocess, sys

place = next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
print(*sys.argv[1:place], file=open(os.environ["CLOUD"] + "/srun", "a"))
tasks = [
    subprocess.Popen(sys.argv[place:], env=os.environ | {"INDEX": str(i)})
    for i in range(int(os.environ["SLURM_NTASKS"]))
]
sys.exit(max(task.wait() for task in tasks))  # srun(1): the highest exit code of all tasks
"""
SCONTROL = '#!/bin/bash\n[ "$*" = \'requeue 17\' ] && touch "$CLOUD/requeued"\n'


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    python = f"#!{sys.executable} -S\n"
    files = {
        "image/python": TRAINER,
        "bin/kubectl": python.replace(" -S", "") + KUBECTL,
        "bin/sbatch": python + SBATCH,
        "bin/srun": python + SRUN,
        "bin/scontrol": SCONTROL,
    }
    return install(files, tmp_path, monkeypatch)


def launch(cloud, line, ends):
    """What every host was started with, and the states of the job."""
    (cloud / "ends").write_text(ends)
    module, *words = shlex.split(line)
    assert importlib.import_module(f"experiments.launch.{module}").main(words) == 0
    starts = [path.read_text().splitlines() for path in sorted(cloud.glob("starts*"))]
    return starts, (cloud / "states").read_text().split()


GKE = (
    "gke quickstart --topology=v5p:2x2x2 --image=i --bucket=gs://my-b --retries=2 -- "
    "--mesh.data=-1 --sample.prompt='a \"b'"
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ends", "starts", "states"),
    [
        # preempted, then one worker fails
        (
            "143 143\n0 1\n0 0",
            [3, 3],
            ["BackoffLimitExceeded", "Completed"],
        ),
        ("2 2", [1, 1], ["PodFailurePolicy"]),  # a mistake in the options
        ("0 3", [1, 1], ["PodFailurePolicy"]),  # numbers that went bad
        ("1 4\n1 4\n1 4\n0 0", [3, 3], ["BackoffLimitExceeded"] * 3),  # restarts are counted
    ],
)
def test_a_jobset_restarts_where_that_helps(cloud, ends, starts, states):
    started, found = launch(cloud, GKE, ends)
    assert [len(lines) for lines in started] == starts and found == states
    words = (
        f"-m jaxformer train quickstart --runs /runs --jax {JAX} --mesh.data=-1 "
        f'--sample.prompt=a "b'
    )
    assert {line for lines in started for line in lines} == {words}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ends", "starts", "states"),
    [
        ("143 143\n4 137\n0 0", 3, ["0", "0", "0"]),  # time is up, then a worker is killed
        ("2 2", 1, ["2"]),
        ("4 4\n4 4\n4 4\n4 4", 3, ["0", "0", "4"]),  # restarts are counted, preemptions not
        ("143 143\n143 143\n143 143\n143 143\n0 0", 5, ["0"] * 5),
        # preemptions use up no restart
        (
            "143 143\n143 143\n143 143\n4 4\n143 143\n4 4\n0 0",
            7,
            ["0"] * 7,
        ),
    ],
)
def test_a_slurm_job_queues_again_where_that_helps(cloud, monkeypatch, ends, starts, states):
    monkeypatch.setattr(slices, "ROOT", cloud)
    (cloud / ".venv-cuda" / "bin").mkdir(parents=True)
    (cloud / ".venv-cuda" / "bin" / "python").symlink_to(cloud / "image" / "python")
    (cloud / ".venv-cuda" / "lib" / "python3" / "site-packages" / f"jax-{JAX}.dist-info").mkdir(
        parents=True
    )
    line = "slurm quickstart --gpus=2 --cpus=4 '--runs=/a b/runs' --retries=2 -- --mesh.data=-1"
    started, found = launch(cloud, line, ends)
    assert [len(lines) for lines in started] == [starts] * 2 and found == states
    assert {line for lines in started for line in lines} == {
        f"-m jaxformer train quickstart --runs /a b/runs --jax {JAX} --mesh.data=-1"
    }
    assert set((cloud / "srun").read_text().splitlines()) == {
        "--kill-on-bad-exit=0 --cpu-bind=none --cpus-per-task=4"
    }
    assert "#SBATCH --cpus-per-task=4" in (cloud / "script").read_text()


def test_a_launcher_that_is_not_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError)
    )
    with pytest.raises(Exception, match="kubectl: not installed here; DRY=1 prints its input"):
        slices.submit("", ["kubectl", "apply", "-f"], False, [], ["kubectl", "delete"])


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("9:59", 599),
        ("1:00:00", 3600),
        ("1-0", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:05", 131405),
        ("0", 0),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time, seconds):
    from experiments.launch import slurm

    assert slurm.seconds(time) == seconds
