"""Launchers: what DRY=1 prints is what is recorded; shell and YAML are well formed; a pod is
trained through preemptions.

recorded/*.txt begin with the command line; the rest is its output, to the letter.
"""

import importlib
import importlib.metadata
import re
import shlex
import subprocess
import sys
import threading
import tomllib
import types
from pathlib import Path

import pytest
import yaml  # orbax needs it, so it is there

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from experiments.launch import door, lock, slices, tpu_vm  # noqa: E402
from jaxformer import cli  # noqa: E402
from jaxformer.data.corpus import Corpus  # noqa: E402
from jaxformer.data.mixing import Mixed  # noqa: E402
from jaxformer.data.sources import Stdlib  # noqa: E402
from jaxformer.errors import ConfigError  # noqa: E402
from jaxformer.training import Reference  # noqa: E402
from tests.launch.fakes import install  # noqa: E402

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.txt"))
POD = "tpu_vm quickstart --tpu=my-pod --zone=us-east5-a"
FOUR = "--topology=v5e:4x4"  # 16 devices on four hosts
JAX = importlib.metadata.version("jax")
TEXT = "--data.path=/mnt/data/text"


@pytest.fixture
def pinned(monkeypatch):
    """What a launcher prints depends on this environment and this tree by their versions and digest
    alone."""
    monkeypatch.setattr(lock, "versions", lambda: ({"jax": "0.10.2", "optax": "0.2.8"}, ["libtpu"]))
    monkeypatch.setattr(tpu_vm, "tree_digest", lambda: "0123456789abcdef")


def run(line, capsys):
    """A launcher's exit code, output and errors."""
    module, *words = shlex.split(line)
    code = importlib.import_module(f"experiments.launch.{module}").main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.thorough
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_dry_prints_what_is_recorded(path, capsys, pinned):
    first, _, expected = path.read_text().partition("\n")
    code, out, err = run(first.removeprefix("$ python -m experiments.launch."), capsys)
    assert code == 0, err
    assert re.sub(r"(--python |# checked here: Python )3\.\d+", r"\g<1>3.12", out) == expected
    if path.stem.startswith(("gke", "skypilot")):
        document = yaml.safe_load(out)
        shell = document.get("run", "")
        assert document.get("kind", "JobSet") == "JobSet"
    else:
        shell = out
    assert subprocess.run(["bash", "-n"], input=shell, text=True).returncode == 0
    for words in (
        shlex.split(line, comments=True) for line in shell.splitlines() if "--command=" in line
    ):
        command = next(word for word in words if word.startswith("--command=")).removeprefix(
            "--command="
        )
        assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "prompt", ["a\nb", "it's", 'a "b" `c` $HOME', "$(HOME) $$", "火 😀", "\\n"]
)
def test_arguments_reach_the_hosts_as_they_were_typed(prompt, capsys, pinned):
    option = f"--sample.prompt={prompt}"
    typed = f"--dry -- --mesh.data=-1 {shlex.quote(option)}"
    _, out, _ = run(f"gke quickstart {FOUR} --image=i --bucket=my-b {typed}", capsys)
    (container,) = yaml.safe_load(out)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]["containers"]
    assert container["command"][-1].replace("$$", "$") == option
    _, out, _ = run(f"skypilot quickstart {FOUR} --bucket=my-b {typed}", capsys)
    assert shlex.split(yaml.safe_load(out)["run"])[-1] == option
    _, out, _ = run(f"slurm quickstart --nodes=2 --gpus=8 {typed}", capsys)
    assert option in shlex.split(out, comments=True)
    _, out, _ = run(f"{POD} {FOUR} --bucket=my-b {typed}", capsys)
    words = shlex.split(
        next(word for word in shlex.split(out, comments=True) if "setsid nohup" in word)
    )
    assert option in shlex.split(words[words.index("-c") + 1])


@pytest.mark.thorough
def test_a_jobset_has_a_pod_a_host_and_all_chips(capsys):
    _, out, _ = run(
        "gke quickstart --topology=v5p:4x4x8 --slices=2 --image=i --claim=c --dry"
        " -- --mesh.slices=2 --mesh.data=2 --batch-size=256 --mesh.fsdp=-1",
        capsys,
    )
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
        ("v5e:1x1", 1, "v5litepod-1"),
        ("v5e:2x4", 1, "v5litepod-8"),
        ("v5e:4x4", 4, "v5litepod-16"),
        ("v5e:16x16", 64, "v5litepod-256"),
        ("v6e:8x8", 16, "v6e-64"),
        ("v4:2x2x1", 1, "v4-8"),
        ("v5p:2x2x2", 2, "v5p-16"),
        ("v5p:8x8x8", 128, "v5p-1024"),
        ("v4:8x16x16", 512, "v4-4096"),
    ],
)
def test_hosts_and_names_of_slices(text, hosts, accelerator):
    found = slices.parse_slice(text)
    # cloud.google.com/tpu/docs: v5e, v6e, v4, v5p
    assert (found.hosts, found.accelerator) == (
        hosts,
        accelerator,
    )


@pytest.mark.parametrize(
    "text",
    ["v5e:3x5", "v5e:", "v5e", "v9:2x2", "v5p:4x4", "v5p:4x4x6", "v5p:8x4x4", "v5p:32x32x32"],
)
def test_slices_that_nobody_sells(text):
    with pytest.raises(ConfigError, match=re.escape(f"TOPOLOGY={text}: ")):
        slices.parse_slice(text)


def test_devices_are_those_of_jax_and_shapes_are_asked_for():
    parse = slices.parse_slice
    # of their compilers
    assert [parse(text).devices for text in ("v5e:4x4", "v5p:4x4x4", "tpu7x:4x4x4")] == [
        16,
        64,
        128,
    ]
    # cloud.google.com/tpu/docs/v5p
    shapes = {
        256: "4x8x8",
        512: "8x8x8",
        1024: "8x8x16",
        6144: "16x16x24",
        128: "4x4x8",
    }
    found = {size: parse(f"v5p:4x4x{size // 16}").default_shape for size in shapes}
    assert found == shapes
    exact = tpu_vm.Pod("a", "z", slice=parse("v5p:4x4x16")).create()
    assert (
        "--type=v5p" in exact
        and "--topology=4x4x16" in exact
        and not any("accelerator-type" in word for word in exact)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["my-b", "gs://my-b", "my-b/", "gs://my-b/"])
def test_a_bucket_of_google_has_one_name(name, capsys, pinned):
    for line in (f"{POD} --bucket={name}", f"gke quickstart {FOUR} --image=i --bucket={name}",
                 f"skypilot quickstart {FOUR} --bucket={name}"):  # fmt: skip
        code, out, err = run(f"{line} --dry -- --mesh.data=-1", capsys)
        assert code == 0, err
        assert re.search(
            r"gcsfuse .* my-b /mnt/bucket;|bucketName: my-b$|source: gs://my-b$", out, re.MULTILINE
        )


# what a run would refuse, and what nobody can rent
MISTAKES = [
    ("tpu_vm quickstart --tpu=my-pod --zone= --dry", "no zone: give ZONE="),
    ("tpu_vm quickstart --tpu= --zone=z", "no TPU: give TPU="),
    (f"{POD} --topology=tpu7x:2x2x1", "GKE only"),
    (f"{POD} --topology=v3:2x2", "no such TPU"),
    (f"{POD} --topology=h100:0x8", "no such TPU"),
    (f"{POD} --bucket=my-b --runs=/x", "give one of them"),
    (f"{POD} --bucket=a;b", "expected the name of a bucket"),
    (POD, "checkpoints are on the worker's own disk"),
    (f"{POD} --bucket=my-b -- --mesh.fspd=4", "fspd"),
    (f"{POD} --bucket=my-b --mesh.fsdp=4", "unrecognized arguments"),
    (f"{POD} --bucket=my-b {FOUR}", "uses 1 of 16 devices; give --mesh.fsdp=-1"),
    (f"{POD} --bucket=my-b {FOUR} -- --mesh.fsdp=32", "do not make up 16"),
    (f"{POD} --bucket=my-b {FOUR} -- --mesh.fsdp=16 --batch-size=24", "no --accumulation divides"),
    (
        f"tpu_vm finetune_lora --tpu=a --zone=z --bucket=my-b {FOUR} -- --mesh.data=16",
        "freezes weights that would be random",
    ),
    (f"{POD} --bucket=my-b {FOUR} -- --mesh.tensor=16", "does not divide among mesh.tensor=16"),
    (
        f"{POD} --bucket=my-b {FOUR} -- --mesh.data=16 --mesh.backend=pmap",
        "cannot run in 4 processes",
    ),
    (
        f"tpu_vm gpt2_small --tpu=a --zone=z --bucket=my-b {FOUR} -- --mesh.fsdp=16 {TEXT}",
        "accumulation=40: batch_size=12 does not divide among 16 devices",
    ),
    (
        f"tpu_vm gpt2_small --tpu=a --zone=z --bucket=my-b {FOUR} -- --mesh.fsdp=16 {TEXT}",
        "what divides: --accumulation=30, ",
    ),
    (
        (
            f"tpu_vm gpt2_small --tpu=a --zone=z --bucket=my-b {FOUR} -- --mesh.fsdp=16 "
            f"--accumulation=2"
        ),
        "--data.path=openwebtext/: not in the copy of this checkout, so no host sees it; give",
    ),
    ("tpu_vm no_such --tpu=a --zone=z --bucket=my-b", "no_such"),
    ("tpu_vm /tmp/x.py --tpu=a --zone=z --bucket=my-b", "inside this checkout"),
    (f"gke quickstart {FOUR} --image=i", "must outlive their pods"),
    ("gke quickstart --topology= --image=i", "no topology"),
    (f"gke quickstart {FOUR} --bucket=my-b --image=", "no image"),
    (
        f"gke quickstart {FOUR} --bucket=my-b --image=i --slices=2 -- --mesh.data=-1",
        "give --mesh.slices=2",
    ),
    ("slurm quickstart --nodes=0", "at least one node"),
    ("slurm quickstart --time=soon", "hours:minutes:seconds"),
    ("slurm quickstart --time=2", "TIME=2: less than 10 minutes; Slurm stops the run 120 s before"),
    ("slurm quickstart --time=0:09:59", "less than 10 minutes"),
    ("slurm quickstart --gpus=8", "has no jax; rm -rf .venv-cuda; make .venv-cuda/ready"),
    ("slurm quickstart --nodes=2 --gpus=0 --dry", "uses 1 of 2 devices"),
    ("slurm gpt2_small --nodes=1 --gpus=0 --dry", "--data.path=openwebtext/: not here"),
    ("skypilot quickstart --bucket=gs://my-b", "where to train"),
    ("skypilot quickstart --accelerators=H100:8 --bucket=my-b", "gs://name"),
    ("skypilot quickstart --accelerators=H100 --bucket=gs://my-b", "H100:8"),
    ("skypilot quickstart --accelerators=H100:0 --bucket=gs://my-b", "H100:8"),
    (
        "skypilot quickstart --topology=v5p:4x4x16 --bucket=gs://my-b",
        "asks for a size, v5p-512, which is v5p:4x8x8",
    ),
]


@pytest.mark.parametrize(("line", "says"), MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_rented(line, says, capsys, monkeypatch):
    monkeypatch.setattr(door, "tree", lambda: ["experiments/quickstart.py"])
    monkeypatch.setenv("PATH", "/nonexistent")  # whatever ran a command would say so
    code, out, err = run(line, capsys)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.thorough
def test_packages_that_hosts_would_not_have_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quickstart = (ROOT / "experiments" / "quickstart.py").read_text()
    (tmp_path / "mine.py").write_text(
        f"import hypothesis, numpy, json, beside  # noqa\n{quickstart}"
    )
    (tmp_path / "beside.py").write_text("import PIL.Image, yaml  # of packages with other names")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(door, "tree", lambda: ["mine.py", "beside.py"])
    code, _, err = run(f"{POD} --topology=v5e:1x1 --dry".replace("quickstart", "mine.py"), capsys)
    assert (
        code == 2
        and 'imports hypothesis, which hosts would not have; add its package to the extra "hosts"'
        in err
    )
    code, _, err = run(
        f"gke mine.py {FOUR} --image=i --bucket=my-b --dry -- --mesh.data=-1", capsys
    )
    assert code == 2
    (tmp_path / "mine.py").write_text(f"import numpy, beside  # noqa\n{quickstart}")
    assert run(f"{POD} --topology=v5e:1x1 --dry".replace("quickstart", "mine.py"), capsys)[0] == 0
    code, _, err = run(
        f"gke mine.py {FOUR} --image=i --bucket=my-b --dry -- --mesh.data=-1", capsys
    )
    assert code == 2 and "EXP=mine.py: not in the image" in err


def test_files_of_data_are_found_in_mixtures():
    data = Mixed(
        (
            (0.5, Corpus("web/", tokenizer="a/tokenizer.json")),
            (0.5, Corpus("hf:a#train")),
            (1, Stdlib()),
        )
    )
    assert dict(door.data_paths(data)) == {
        "data.sources.path": "web/",
        "data.sources.tokenizer": "a/tokenizer.json",
    }


@pytest.mark.thorough
def test_folders_of_tokenizers_and_first_parameters_are_seen_by_hosts(
    tmp_path, monkeypatch, capsys
):
    for folder in ("runs/before/checkpoints", "my/tokens"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(door, "tree", lambda: ["experiments/quickstart.py"])
    data = (
        Corpus("hf:a#train", tokenizer="my/tokens"),
        Corpus("hf:a#train", tokenizer="openai-community/gpt2"),
    )
    assert list(door.data_paths(data)) == [("data.tokenizer", "my/tokens")]
    line = f"{POD} --topology=v5e:1x1 --dry -- --initial="
    assert (
        "--initial=runs/before: not in the copy of this checkout"
        in run(f"{line}runs/before", capsys)[2]
    )
    assert run(f"{line}openai-community/gpt2", capsys)[0] == 0
    assert "/mnt/data/before is there" in run(f"{line}/mnt/data/before", capsys)[1]


def test_folders_of_references_are_seen_by_hosts(tmp_path, monkeypatch):
    (tmp_path / "runs/teacher/checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(door, "tree", lambda: ["experiments/quickstart.py"])
    hosts = types.SimpleNamespace(files="tree", mount="/mnt/data")
    experiment = types.SimpleNamespace(data=Stdlib(), initial=None, references={})
    assert door.check_files("quickstart", experiment, hosts) == []
    for teacher in ("runs/teacher", Reference("runs/teacher")):
        experiment.references = {"teacher": teacher}
        with pytest.raises(
            ConfigError,
            match=r"^references\.teacher=runs/teacher: not in the copy of this checkout",
        ):
            door.check_files("quickstart", experiment, hosts)
    experiment.references = {"teacher": "/mnt/data/teacher", "other": "openai-community/gpt2"}
    assert door.check_files("quickstart", experiment, hosts) == ["/mnt/data/teacher"]


def test_the_lock_holds_what_is_installed_and_all_that_experiments_need():
    found, absent = lock.versions()
    assert found["jax"] == importlib.metadata.version("jax") and {
        "jaxlib",
        "numpy",
        "tokenizers",
        "tensorboardx",
    } <= set(found)
    assert (
        "jaxformer" not in found
        and not {"pytest", "ruff"} & set(found)
        and not set(found) & set(absent)
    )
    for line in lock.text().splitlines()[1:]:
        name, _, version = line.partition("==")
        assert importlib.metadata.version(name) == version


def test_the_image_has_what_its_installation_reads():
    before, _, _ = (
        (ROOT / "experiments" / "launch" / "Dockerfile").read_text().partition("RUN pip install")
    )
    copied = {
        word
        for line in re.findall(r"^COPY (.*) \S+$", before, re.MULTILINE)
        for word in line.split()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        project["project"]["readme"],
        *project["project"]["license-files"],
        "jaxformer",
        lock.FILE,
    }
    needed |= {
        path.partition("/")[0]
        for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    }
    assert needed <= copied


REFUSED = [("0.1", "runs", "this machine has jax"), (None, "file/runs", "cannot be written")]


@pytest.mark.parametrize(("version", "runs", "says"), REFUSED)
def test_a_host_refuses_another_jax_and_a_folder_that_it_cannot_write(
    version, runs, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = ["train", "quickstart", "--runs", runs, *(["--jax", version] if version else [])]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "variables", "words"),
    [
        (
            "slurm-train",
            {"EXP": "a b.py", "RUNS": "/it's a/runs", "ARGS": "--x='a b' --y \"it's\""},
            ["a b.py", "--runs=/it's a/runs", "--", "--x=a b", "--y", "it's"],
        ),
        (
            "pod-train",
            {"TPU": "p", "BUCKET": 'b"c', "SPOT": "1"},
            ["quickstart", "--tpu=p", '--bucket=b"c', "--spot", "--"],
        ),
        ("sky-train", {"GPUS": "H100: 8"}, ["quickstart", "--accelerators=H100: 8", "--"]),
        ("sweep", {"GRID": "--a='x y',2"}, ["quickstart", "--grid", "--a='x y',2"]),
        (
            "plan",
            {"TOPOLOGY": "h100:0x8 ", "ARGS": "--model.mixer 'Linear()'"},
            ["plan", "quickstart", "--topology", "h100:0x8 ", "--model.mixer", "Linear()"],
        ),
    ],
)
def test_variables_of_make_arrive_whole(target, variables, words):
    given = [f"{name}={value}" for name, value in variables.items()]
    made = subprocess.run(["make", "-n", target, *given], cwd=ROOT, capture_output=True, text=True)
    assert shlex.split(made.stdout.splitlines()[-1])[-len(words) :] == words


# A Google Cloud of two hosts: each is a folder that commands really run in, with a trainer that
# does what the test wants.

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
    codes = [
        subprocess.run(
            ["bash", "-c", options["command"]], env=environment | {"HOME": str(worker)}
        ).returncode
        for worker in chosen
    ]
    sys.exit(max(codes))
"""
PIP = """\
#!/bin/bash
mkdir -p ~/.local/bin && cp "$CLOUD/remote/uv" ~/.local/bin/
"""
UV = """\
#!/bin/bash
[ $1 = venv ] && mkdir -p .venv/bin && cp "$CLOUD/remote/trainer" .venv/bin/python &&
  basename "$HOME" >> "$CLOUD/installs"
[ -e pyproject.toml ] && grep -q ^jax== dist/constraints.txt  # the code and the lock are there
"""
TRAINER = """\
#!/bin/bash
echo "$@" >> "$CLOUD/$(basename "$HOME").starts"
case $(wc -l < "$CLOUD/$(basename "$HOME").starts") in
  1) echo saved; exit 143 ;;
  2) echo PREEMPTED > "$CLOUD/state"; exit 143 ;;
  *) echo trained; exit ${LAST:-0} ;;
esac
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    files = {
        "bin/gcloud": f"#!{sys.executable}\n{GCLOUD}",
        "remote/python3": PIP,
        "remote/uv": UV,
        "remote/trainer": TRAINER,
    }
    return install(files, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_pod_is_trained_through_two_preemptions(cloud, capfd):
    line = (
        f"{POD} --topology=v5e:2x4 --runs=/shared --pause=0 --retries=3 -- --mesh.data=-1 "
        f"--steps=7000"
    )
    code, out, err = run(line, capfd)
    assert code == 0, out + err
    assert "finished" in out
    starts = [(cloud / f"worker{i}.starts").read_text().splitlines() for i in range(2)]
    command = (
        f"-m jaxformer train quickstart --runs /shared --jax {JAX} --mesh.data=-1 --steps=7000"
    )
    assert starts[0] == starts[1] == [command] * 3
    installs = (cloud / "installs").read_text().split()
    assert installs == ["worker0", "worker1"] * 2  # on each new machine, not at a restart
    calls = (cloud / "calls").read_text().splitlines()
    # at the start, and after the TPU was taken away
    assert calls.count("queued-resources create") == 2
    assert calls.count("queued-resources delete") == 1
    first = next(call for call in calls if call.startswith("tpu-vm ssh"))
    assert first == "tpu-vm ssh"  # one worker makes the key
    assert "trained" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "retries", "code", "starts"), [("2", 5, 2, 3), ("1", 1, 1, 2), ("1", 3, 1, 4)]
)
def test_a_pod_stops_for_what_a_restart_does_not_mend(
    cloud, capfd, monkeypatch, last, retries, code, starts
):
    monkeypatch.setenv("LAST", last)
    ended, out, err = run(
        f"{POD} --topology=v5e:2x4 --runs=/shared --pause=0 --retries={retries} -- --mesh.data=-1",
        capfd,
    )
    assert ended == code, out + err
    assert len((cloud / "worker0.starts").read_text().splitlines()) == starts


def test_a_new_tree_replaces_the_old_one_and_leaves_runs(cloud):
    """A package that became a module is gone; what the run wrote in the same folder is not."""
    home = cloud / "worker"
    (home / "jaxformer.run").mkdir(parents=True)
    for number, name in enumerate(("lib/x/__init__.py", "lib/x.py", "lib/\u00e9 b.py")):
        tree = cloud / f"tree{number}"
        for path, text in {name: str(number), "pyproject.toml": "", lock.FILE: "jax==1"}.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        subprocess.run(
            ["tar", "-czf", home / "jaxformer.tgz", "-C", tree, name, "pyproject.toml", lock.FILE],
            check=True,
        )
        environment = {
            "HOME": str(home),
            "CLOUD": str(cloud),
            "PATH": f"{cloud}/remote:/usr/bin:/bin",
        }
        subprocess.run(
            ["bash", "-c", tpu_vm.INSTALL.format(digest=number)], env=environment, check=True
        )
        assert (home / "jaxformer.run" / "installed").read_text() == f"{number}\n"
        library = [
            path.relative_to(home / "jaxformer")
            for path in (home / "jaxformer" / "lib").rglob("*.py")
        ]
        assert list(map(str, library)) == [name]
        (home / "jaxformer" / "runs").mkdir(exist_ok=True)
        (home / "jaxformer" / "runs" / str(number)).touch()
    assert len(list((home / "jaxformer" / "runs").iterdir())) == 3


@pytest.mark.thorough
@pytest.mark.parametrize(("becomes", "creations"), [("FAILED", 4), ("HIDDEN", 1)])
def test_a_pod_that_cannot_be_had_is_not_asked_for_all_night(
    cloud, capfd, monkeypatch, becomes, creations
):
    monkeypatch.setenv("BECOMES", becomes)
    code, out, err = run(
        f"{POD} --topology=v5e:2x4 --runs=/shared --pause=0 -- --mesh.data=-1", capfd
    )
    assert code == 2 and becomes in err, out + err
    assert (cloud / "calls").read_text().count("queued-resources create") == creations


@pytest.mark.slow
def test_the_same_command_attaches_and_another_is_refused(cloud, capfd):
    (cloud / "state").write_text("READY")
    going = subprocess.Popen(["sleep", "4"])
    words = ["-m", "jaxformer", "train", "quickstart", "--runs", "/shared", "--jax", JAX]
    identity, _ = tpu_vm.start([".venv/bin/python", *words])
    for i in range(2):
        folder = cloud / f"worker{i}" / "jaxformer.run"
        folder.mkdir(parents=True)
        for name, text in {"id": identity, "pid": going.pid, "exit": 0, "log": "step 7"}.items():
            (folder / name).write_text(f"{text}\n")
    code, _, err = run(f"{POD} --runs=/shared --pause=0 -- --steps=7000", capfd)
    assert code == 2 and "busy with another command" in err
    # a dead child is a live pid until somebody waits for it
    reaper = threading.Thread(target=going.wait)
    reaper.start()
    code, out, err = run(f"{POD} --runs=/shared --pause=0", capfd)
    reaper.join()
    assert code == 0 and "step 7" in out, out + err
    assert not (cloud / "worker0.starts").exists()
