"""Launchers: names, quotes, words of YAML, variables of clusters, and how jobs are tried again."""

import importlib
import os
import shlex
import subprocess

import pytest
import yaml

from experiments.launch import lock, slices, tpu_vm
from jaxformer.cli import sweeps, trials
from jaxformer.errors import ConfigError

FOUR = "--topology=v5e:4x4"


@pytest.fixture
def dry(capsys, monkeypatch):
    """(line) -> what a launcher prints under --dry, in place of running anything."""
    monkeypatch.setattr(lock, "versions", lambda: ({"jax": "0.10.2"}, []))
    monkeypatch.setattr(tpu_vm, "tree_digest", lambda: "0123456789abcdef")

    def run(line):
        module, *words = shlex.split(line)
        code = importlib.import_module(f"experiments.launch.{module}").main(words)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


@pytest.mark.report(
    "istio/istio#18483",
    "elastisys/compliantkubernetes-apps#2712",
    "zenml-io/zenml#3889",
    right="a name that is cut off ends with a letter or a digit",
    hit="the 40th letter of a long name may have been a dash",
)
@pytest.mark.parametrize("length", range(36, 44))
def test_a_name_that_is_cut_off_does_not_end_with_a_dash(length):
    name = slices.job_name("a" * length + "_base_model.py")
    assert name[-1].isalnum() and len(name) <= 44


@pytest.mark.report(
    "NVIDIA/cloudai#779",
    "apache/airflow#60229",
    right="every experiment has a valid name, and two have two",
    hit=(
        "a file with no Latin letter had the empty name, one that begins with a digit a name "
        "that no service may have"
    ),
)
def test_every_file_has_a_valid_name_of_its_own():
    names = [
        slices.job_name(f"{stem}.py")
        for stem in ("火", "水", "_", "7b_run", "1e3", "2026_08_06", "no", "a.b", "Été")
    ]
    for name in names:
        assert (
            subprocess.run(
                ["grep", "-qxE", "[a-z]([-a-z0-9]{0,42}[a-z0-9])?"], input=name, text=True
            ).returncode
            == 0
        ), name
    assert len(set(names)) == len(names)


@pytest.mark.report(
    "FCP-INDI/C-PAC#503", "datacenter/ansible-role-aci-model#14",
    right="names and buckets are strings of YAML, whatever they are",
    hit="an experiment `no.py` was false, a bucket 123 a number",
)  # fmt: skip
@pytest.mark.parametrize(
    "text",
    [
        "no",
        "null",
        "1e3",
        "123",
        "2026-08-06",
        "0x1f",
        "1:30",
        "4090:8",
        "~",
        "off",
        "plain",
        "gs://b",
    ],
)
def test_a_word_of_yaml_is_read_back_as_it_was(text):
    assert yaml.safe_load(f"a: {slices.word(text)}") == {"a": text}


@pytest.mark.thorough
@pytest.mark.report(
    "dokku/docket#342",
    "mrlvsb/kelvin#867",
    right="what the launcher prints has text where the cluster wants text",
    hit="--bucket=12345 was a number, which Kubernetes and SkyPilot refuse after the submission",
)
def test_names_of_digits_are_text_in_what_is_submitted(dry):
    out = dry(
        f"gke quickstart {FOUR} --image=i --bucket=12345 --name=77 --account=0123 --dry -- "
        f"--mesh.data=-1"
    )
    document = yaml.safe_load(out)
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert document["metadata"]["name"] == "77" and pod["serviceAccountName"] == "0123"
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "12345"
    claim = yaml.safe_load(
        dry(f"gke quickstart {FOUR} --image=i --claim=123 --dry -- --mesh.data=-1")
    )
    pod = claim["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "123"


@pytest.mark.report(
    "chapel-lang/chapel#26450",
    "stanford-crfm/helm#1636",
    right="an argument with spaces and quotes is one word on the nodes",
)
@pytest.mark.parametrize("prompt", ["Hello, world!", "it's `x` $y", 'a "b"\\n', "(c(4,2*7))"])
def test_an_argument_of_slurm_is_one_word(dry, prompt):
    option = f"--sample.prompt={prompt}"
    out = dry(f"slurm quickstart --nodes=1 --gpus=8 --dry -- --mesh.data=-1 {shlex.quote(option)}")
    line = next(line for line in out.splitlines() if line.startswith("srun"))
    assert shlex.split(line)[-1] == option
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0


@pytest.mark.report(
    "kubernetes/kubernetes#101137",
    "tektoncd/pipeline#4860",
    right="dollars reach the program as they were typed",
)
@pytest.mark.parametrize("prompt", ["$", "$$", "$$$(A) $(B)", "a$b"])
def test_kubernetes_halves_no_dollars(dry, prompt):
    out = dry(
        f"gke quickstart {FOUR} --image=i --bucket=my-b --dry -- --mesh.data=-1 "
        f"{shlex.quote('--sample.prompt=' + prompt)}"
    )
    pod = yaml.safe_load(out)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    received, rest = "", pod["containers"][0]["command"][-1]
    # the expansion of Kubernetes: a pair is one, $(NAME) is a variable, any other dollar is itself
    while rest:
        assert not rest.startswith("$("), "Kubernetes would look for a variable"
        step = 2 if rest.startswith("$$") else 1
        received, rest = received + rest[0], rest[step:]
    assert received == f"--sample.prompt={prompt}"


@pytest.mark.report(
    "nextflow-io/nextflow#218",
    "dask/dask-jobqueue#15",
    right="no #SBATCH line has a space, after which Slurm reads no more",
)
def test_lines_of_sbatch_have_no_spaces(dry):
    out = dry(
        "slurm quickstart --nodes=2 --gpus=8 --cpus=4 --partition=a,b --account=x --dry -- "
        "--mesh.data=-1"
    )
    lines = [line for line in out.splitlines() if line.startswith("#SBATCH")]
    assert len(lines) > 8 and all(len(line.split()) == 2 for line in lines)
    with pytest.raises(ConfigError, match="PARTITION=big simulation: expected a name"):
        options = "--nodes=2", "--gpus=8", "--partition=big simulation", "--dry"
        parser = slices.Parser("slurm", "")
        module = importlib.import_module("experiments.launch.slurm")
        module.add_options(parser)
        module.script(parser.parse_args(["quickstart", *options]), ["--mesh.data=-1"])


@pytest.mark.report(
    "meta-pytorch/torchx#394", right="time limits requeue without end, crashes only so often"
)
def test_a_job_that_crashes_is_queued_again_only_so_often(dry, tmp_path):
    """The batch script itself, with an srun that ends with the code that a file names."""
    script = dry(
        "slurm quickstart --nodes=1 --gpus=1 --retries=2 --dry -- --mesh.data=1"
    ).partition("# sbatch")[0]
    for name, text in {
        "srun": 'exit $(cat "$FOLDER/code")',
        "scontrol": 'echo again >> "$FOLDER/queue"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "5",
    }  # fmt: skip

    def runs(*codes):
        (tmp_path / "queue").write_text("")
        for code in codes:
            (tmp_path / "code").write_text(str(code))
            subprocess.run(["bash"], input=script, text=True, env=environment, capture_output=True)
        return (tmp_path / "queue").read_text().count("again")

    assert runs(*[143] * 6) == 6
    assert runs(*[1] * 6) == 2
    assert runs(0) == 0 and runs(2) == 0 and runs(3) == 0
    assert runs(1, 1) == 2  # the run that ended well has taken the count away


@pytest.mark.report(
    "vllm-project/vllm#41848",
    "mujocolab/mjlab#1029",
    right="devices by UUID are given to runs by UUID",
    hit="spaces in the list went on to the runs, whose driver stops reading at them",
)
def test_devices_of_a_sweep_may_have_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937, MIG-377e0049-554c ,3,")
    assert [sweeps.one_device(i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == [
        "GPU-8932f937",
        "MIG-377e0049-554c",
        "3",
    ]


@pytest.mark.report(
    "hydra-ecosystem/hydra#573",
    "hydra-ecosystem/hydra#96",
    right="a comma inside brackets or quotes is part of a value",
)
def test_a_value_of_a_grid_may_have_commas():
    grid = trials.combinations("--a=[1,2],[3,4] --b='x,y',z --c=f(1,g(2,3))")
    assert grid == [
        {"a": a, "b": b, "c": "f(1,g(2,3))"} for a in ("[1,2]", "[3,4]") for b in ("x,y", "z")
    ]


@pytest.mark.report(
    "RIOT-OS/RIOT#12262",
    "pikvm/pikvm#144",
    listed="third 29",
    right="a $ in EXP is no variable of make's",
    hit="make show EXP='a$b.py' asked for a.py",
)
def test_a_dollar_in_a_name_survives_make():
    for text in ("a$b.py", "a$$b.py", "$(HOME)", "it's $x"):
        words = [
            "make",
            "-n",
            "-o",
            ".venv/ready",
            "-o",
            ".venv-oldest/ready",
            "show",
            f"EXP={text}",
            "ARGS=--x=$HOME",
        ]
        out = subprocess.run(
            words, cwd=slices.ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert shlex.split(out)[1:] == ["-m", "jaxformer", "show", text, "--x=$HOME"]
