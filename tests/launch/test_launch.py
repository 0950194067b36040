"""Launchers: what DRY=1 prints is what is recorded; shell and YAML are well formed; a pod is trained through preemptions.

recorded/*.txt begin with the command line; the rest is its output, to the letter.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml  # orbax needs it, so it is there

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from experiments.launch import slices, tpu_vm  # noqa: E402
from jaxformer.errors import ConfigError  # noqa: E402

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.txt"))
POD = "tpu_vm gpt2_small --tpu=my-pod --zone=us-east5-a"


def run(line, capsys):
    """A launcher's exit code, output and errors."""
    module, *words = shlex.split(line)
    code = importlib.import_module(f"experiments.launch.{module}").main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_dry_prints_what_is_recorded(path, capsys):
    first, _, expected = path.read_text().partition("\n")
    code, out, _ = run(first.removeprefix("$ python -m experiments.launch."), capsys)
    assert (code, out) == (0, expected)
    if path.stem.startswith(("gke", "skypilot")):
        document = yaml.safe_load(out)
        shell = document.get("run", "")
        assert document.get("kind", "JobSet") == "JobSet"
    else:
        shell = out
    assert subprocess.run(["bash", "-n"], input=shell, text=True).returncode == 0
    for words in (shlex.split(line, comments=True) for line in shell.splitlines() if "--command=" in line):
        command = next(word for word in words if word.startswith("--command=")).removeprefix("--command=")
        assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0


def test_a_jobset_has_a_pod_a_host_and_all_chips(capsys):
    _, out, _ = run("gke gpt2_small --topology=v5p:4x4x8 --slices=2 --image=i --claim=c --dry -- --mesh.fsdp=-1", capsys)
    job = yaml.safe_load(out)["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["replicas"] == 2
    assert job["template"]["spec"]["completions"] * chips == 128
    assert pod["restartPolicy"] == "Never"  # Kubernetes takes a podFailurePolicy with nothing else
    assert pod["containers"][0]["command"][-1] == "--mesh.fsdp=-1"


@pytest.mark.parametrize(
    ("text", "hosts", "accelerator"),
    [
        ("v5e:1x1", 1, "v5litepod-1"), ("v5e:2x4", 1, "v5litepod-8"), ("v5e:4x4", 4, "v5litepod-16"),
        ("v5e:16x16", 64, "v5litepod-256"), ("v6e:8x8", 16, "v6e-64"), ("v4:2x2x1", 1, "v4-8"),
        ("v5p:2x2x2", 2, "v5p-16"), ("v5p:8x8x8", 128, "v5p-1024"), ("v4:8x16x16", 512, "v4-4096"),
    ],
)  # fmt: skip
def test_hosts_and_names_of_slices(text, hosts, accelerator):
    found = slices.parse_slice(text)
    assert (found.hosts, found.accelerator) == (hosts, accelerator)  # cloud.google.com/tpu/docs: v5e, v6e, v4, v5p


@pytest.mark.parametrize("text", ["v5e:3x5", "v5e:", "v5e", "v9:2x2", "v5p:4x4", "v5p:4x4x6", "v5p:8x4x4", "v5p:32x32x32"])
def test_slices_that_nobody_sells(text):
    with pytest.raises(ConfigError, match=re.escape(f"TOPOLOGY={text}: ")):
        slices.parse_slice(text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tpu_vm gpt2_small --tpu=my-pod --zone= --dry", "no zone: give ZONE="),
        ("tpu_vm gpt2_small --tpu= --zone=z", "no TPU: give TPU="),
        (f"{POD} --topology=tpu7x:2x2x1", "GKE only"),
        (f"{POD} --bucket=b --runs=/x", "give one of them"),
        (f"{POD} --bucket=a;b", "expected the name of a bucket"),
        (POD, "checkpoints are on the worker's own disk"),
        (f"{POD} --bucket=b -- --mesh.fspd=4", "fspd"),
        (f"{POD} --bucket=b --mesh.fsdp=4", "unrecognized arguments"),
        ("tpu_vm no_such --tpu=a --zone=z --bucket=b", "no_such"),
        ("tpu_vm /tmp/x.py --tpu=a --zone=z --bucket=b", "inside this checkout"),
        ("gke gpt2_small --topology=v5e:4x4 --image=i", "must outlive their pods"),
        ("gke gpt2_small --topology= --image=i", "no topology"),
        ("gke gpt2_small --topology=v5e:4x4 --bucket=b --image=", "no image"),
        ("slurm gpt2_small --nodes=0", "at least one node"),
        ("slurm gpt2_small --time=soon", "hours:minutes:seconds"),
        ("skypilot gpt2_small --bucket=gs://b", "where to train"),
        ("skypilot gpt2_small --accelerators=H100:8 --bucket=b", "gs://name"),
        ("skypilot gpt2_small --accelerators=H100 --bucket=gs://b", "H100:8"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_before_anything_is_rented(line, says, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")  # whatever ran a command would say so
    code, out, err = run(line, capsys)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


# A Google Cloud of two hosts: each is a folder that commands really run in, with a trainer that does what the test wants.

GCLOUD = """\
import os, pathlib, shutil, subprocess, sys
cloud = pathlib.Path(os.environ["CLOUD"])
words = sys.argv[3:]  # after `compute tpus`
options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
state = cloud / "state"
kind = " ".join(words[:2])
with (cloud / "calls").open("a") as calls:
    print(kind, *(["all"] if options.get("worker") == "all" else []), file=calls)
workers = [cloud / f"worker{i}" for i in range(2)]
if kind.endswith("describe"):
    if not state.exists() or kind.startswith("queued"):
        sys.exit("ERROR: NOT_FOUND: Resource was not found")
    print(state.read_text().strip())
    if state.read_text().strip() == "CREATING":
        state.write_text("READY")
elif kind == "queued-resources create":
    assert not state.exists()
    state.write_text(os.environ.get("BECOMES", "CREATING"))
    [worker.mkdir() for worker in workers]
elif kind == "queued-resources delete":
    state.unlink()
    [shutil.rmtree(worker) for worker in workers]
elif state.read_text().strip() != "READY":
    sys.exit(255)  # ssh: no route to host
elif kind == "tpu-vm scp":
    [shutil.copy(words[2], worker / words[3].partition(":")[2]) for worker in workers]
else:
    chosen = workers if options["worker"] == "all" else [workers[int(options["worker"])]]
    environment = os.environ | {"PATH": f"{cloud}/remote:/usr/bin:/bin"}
    codes = [subprocess.run(["bash", "-c", options["command"]], env=environment | {"HOME": str(worker)}).returncode
             for worker in chosen]
    sys.exit(max(codes))
"""
PIP = """\
#!/bin/bash
mkdir -p ~/.local/bin && cp $CLOUD/remote/uv ~/.local/bin/
"""
UV = """\
#!/bin/bash
[ $1 = venv ] && mkdir -p .venv/bin && cp $CLOUD/remote/trainer .venv/bin/python
[ -e pyproject.toml ]  # the code is there
"""
TRAINER = """\
#!/bin/bash
echo "$@" >> $CLOUD/$(basename $HOME).starts
case $(wc -l < $CLOUD/$(basename $HOME).starts) in
  1) echo saved; exit 143 ;;
  2) echo PREEMPTED > $CLOUD/state; exit 143 ;;
  *) echo trained; exit ${LAST:-0} ;;
esac
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    for name, text in {
        "bin/gcloud": f"#!{sys.executable}\n{GCLOUD}", "remote/python3": PIP, "remote/uv": UV, "remote/trainer": TRAINER,
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CLOUD", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_pod_is_trained_through_two_preemptions(cloud, capfd):
    line = f"{POD} --topology=v5e:2x4 --runs=/shared --pause=0 --retries=3 -- --steps=7000"
    code, out, err = run(line, capfd)
    assert code == 0, out + err
    assert "finished" in out
    starts = [(cloud / f"worker{i}.starts").read_text().splitlines() for i in range(2)]
    assert starts[0] == starts[1] == ["-m jaxformer train gpt2_small --runs /shared --steps=7000"] * 3
    calls = (cloud / "calls").read_text().splitlines()
    assert calls.count("queued-resources create") == 2  # at the start, and after the TPU was taken away
    assert calls.count("queued-resources delete") == 1
    first = next(call for call in calls if call.startswith("tpu-vm ssh"))
    assert first == "tpu-vm ssh"  # one worker makes the key
    assert "trained" in out


@pytest.mark.slow
@pytest.mark.parametrize(("last", "retries", "code", "starts"), [("2", 5, 2, 3), ("1", 1, 1, 2), ("1", 3, 1, 4)])
def test_a_pod_stops_for_what_a_restart_does_not_mend(cloud, capfd, monkeypatch, last, retries, code, starts):
    monkeypatch.setenv("LAST", last)
    ended, out, err = run(f"{POD} --topology=v5e:2x4 --runs=/shared --pause=0 --retries={retries}", capfd)
    assert ended == code, out + err
    assert len((cloud / "worker0.starts").read_text().splitlines()) == starts


@pytest.mark.parametrize(("becomes", "creations"), [("FAILED", 4), ("HIDDEN", 1)])
def test_a_pod_that_cannot_be_had_is_not_asked_for_all_night(cloud, capfd, monkeypatch, becomes, creations):
    monkeypatch.setenv("BECOMES", becomes)
    code, out, err = run(f"{POD} --topology=v5e:2x4 --runs=/shared --pause=0", capfd)
    assert code == 2 and becomes in err, out + err
    assert (cloud / "calls").read_text().count("queued-resources create") == creations


@pytest.mark.slow
def test_the_same_command_attaches_and_another_is_refused(cloud, capfd):
    (cloud / "state").write_text("READY")
    going = subprocess.Popen(["sleep", "4"])
    identity, _ = tpu_vm.start(["-m", "jaxformer", "train", "gpt2_small", "--runs", "/shared"])
    for i in range(2):
        folder = cloud / f"worker{i}" / "jaxformer.run"
        folder.mkdir(parents=True)
        for name, text in {"id": identity, "pid": going.pid, "exit": 0, "log": "step 7"}.items():
            (folder / name).write_text(f"{text}\n")
    code, _, err = run(f"{POD} --runs=/shared --pause=0 -- --steps=7000", capfd)
    assert code == 2 and "busy with another command" in err
    reaper = threading.Thread(target=going.wait)  # a dead child is a live pid until somebody waits for it
    reaper.start()
    code, out, err = run(f"{POD} --runs=/shared --pause=0", capfd)
    reaper.join()
    assert code == 0 and "step 7" in out, out + err
    assert not (cloud / "worker0.starts").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "ends", "requeued"), [(0, 0, False), (2, 2, False), (143, 0, True), (137, 0, True)])
def test_a_slurm_job_queues_again_when_that_helps(tmp_path, capsys, code, ends, requeued):
    _, script, _ = run("slurm quickstart --gpus=0 --dry", capsys)
    for name, text in {"srun": f"exit {code}", "scontrol": f"echo $@ > {tmp_path}/requeued"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17"}
    assert subprocess.run(["bash"], input=script, text=True, env=environment, capture_output=True).returncode == ends
    assert (tmp_path / "requeued").exists() == requeued
    environment["SLURM_RESTART_COUNT"] = "10"
    if code == 137:  # a crash, not a preemption: ten times are enough
        assert subprocess.run(["bash"], input=script, text=True, env=environment, capture_output=True).returncode == code


def test_what_the_page_says_to_type_works(capsys):
    """Every `make` line of docs/laptop-to-pod.md names a target, and those with DRY=1 print what they would do."""
    page = (ROOT / "docs" / "laptop-to-pod.md").read_text()
    lines = re.findall(r"^    (?:\w+=\S+ )*make (.*)$", page, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        made = subprocess.run(["make", "-n", *shlex.split(line)], cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, f"make {line}: {made.stderr}"
        if "DRY=1" in line:
            printed = next(one for one in made.stdout.splitlines() if "experiments.launch." in one)
            code, out, err = run(printed.partition("experiments.launch.")[2], capsys)
            assert code == 0 and out, f"make {line}: {err}"
