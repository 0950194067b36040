"""Words that a user may type, in what launchers submit: YAML has them as they were, or the launcher
refuses in one line.

PyYAML reads YAML 1.1, in which more words are something else than in YAML 1.2.
"""

import importlib
import itertools
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # orbax needs it, so it is there

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from experiments.launch import door, lock, skypilot, slices, tpu_vm  # noqa: E402
from jaxformer.errors import ConfigError  # noqa: E402
from tests.launch.fakes import install  # noqa: E402

FOUR = "--topology=v5e:4x4"
# what YAML 1.1 reads as a number, a time, a date, nothing, a truth value, a mapping, a list, a tag,
# an anchor, a comment
WORDS = [
    "2024",
    "null",
    "Null",
    "NULL",
    "~",
    "on",
    "off",
    "yes",
    "no",
    "y",
    "n",
    "True",
    "FALSE",
    "1e3",
    "1e+3",
    "0x10",
    "0o7",
    "017",
    "0b1",
    "12:30",
    "1:30:45",
    "190:20:30",
    "2026-11-26",
    "2026-11-26T10:00:00Z",
    ".inf",
    "-.INF",
    ".nan",
    "1_000",
    "+1",
    "-1",
    "1.",
    ".5",
    "=",
    "<<",
    "a:",
    "a: b",
    ":",
    "-",
    "- a",
    "?",
    "? a",
    "[a]",
    "{a: b}",
    "*a",
    "&a",
    "!a",
    "!!int 3",
    "#a",
    "a #b",
    "|",
    ">",
    "%a",
    "@a",
    "`a",
    "'",
    '"',
    "'a'",
    '"a"',
    "\\",
    "a\\nb",
    "",
    " ",
    " a",
    "a ",
    "a\tb",
    "a\nb",
    "a\r\nb",
    "\ta",
    "---",
    "...",
    "a\x85b",
    "a\u2028b",
    "a\u2029b",
    "\ufeffa",
    "a\x7fb",
    "a\x1bb",
    "a\u00a0b",
    "火",
    "😀",
    "é",
    "٣",
    "１２",
]


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    monkeypatch.setattr(lock, "versions", lambda: ({"jax": "0.10.2"}, []))
    monkeypatch.setattr(tpu_vm, "tree_digest", lambda: "0123456789abcdef")


@pytest.fixture
def unchecked(monkeypatch):
    """The experiment itself is not looked at, which would take most of the time."""
    checked = door.Command(["-m", "jaxformer", "train", "quickstart"], [])
    monkeypatch.setattr(door, "train_command", lambda *_: checked)


def launched(line, capsys):
    module, *words = line
    code = importlib.import_module(f"experiments.launch.{module}").main(
        [*words[:-1], "--dry", *words[-1]]
    )
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def drawn(count, letters, longest):
    """Random texts, the same ones each time."""
    numbers = random.Random(7)
    return ["".join(numbers.choices(letters, k=numbers.randrange(longest))) for _ in range(count)]


ALPHABET = [
    *map(chr, range(1, 0x180)),
    "\u2028",
    "\u2029",
    "\ufeff",
    "\u200b",
    "\u202e",
    "\ud7ff",
    "\ue000",
    "😀",
    "火",
    *"\n \"'\\:#-",
]


@pytest.mark.parametrize(
    "write",
    [slices.word, slices.quote, lambda text: slices.block(text, "  ")],
    ids=["word", "quoted", "block"],
)
def test_yaml_gives_back_every_text(write):
    for text in [*WORDS, *drawn(1500, ALPHABET, 12)]:
        read = yaml.safe_load(f"a: {write(text)}\nb: 1\n")
        assert read["b"] == 1 and type(read["a"]) is str
        assert (
            read["a"].removesuffix("\n") == text.rstrip("\n")
            if write(text).startswith("|")
            else read["a"] == text
        ), repr(text)


def test_bytes_that_are_no_text_are_refused_by_name():
    with pytest.raises(ConfigError, match="no UTF-8"):
        slices.quote(os.fsdecode(b"a\xff"))


@pytest.mark.parametrize("option", ["bucket", "claim", "name", "account", "image"])
def test_options_of_a_jobset_are_texts_or_refused(option, unchecked, capsys):
    place = ["--bucket=my-bucket"] if option not in ("bucket", "claim") else []
    for text in filter(None, WORDS):
        line = [
            "gke",
            "quickstart",
            FOUR,
            *place,
            *(["--image=i"] if option != "image" else []),
            f"--{option}={text}",
        ]
        code, out, err = launched([*line, ["--", "--mesh.data=-1"]], capsys)
        if code:
            assert (out, err.count("\n")) == ("", 1), (text, err)
            continue
        document = yaml.safe_load(out)
        pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (volume,) = pod["volumes"]
        found = {
            "bucket": volume.get("csi", {}).get("volumeAttributes", {}).get("bucketName"),
            "claim": volume.get("persistentVolumeClaim", {}).get("claimName"),
            "name": document["metadata"]["name"],
            "account": pod["serviceAccountName"],
            "image": pod["containers"][0]["image"],
        }
        assert found[option] == text, (text, found)


def test_options_of_a_task_are_texts_or_refused(unchecked, capsys):
    for text in WORDS:
        code, out, _ = launched(
            ["skypilot", "quickstart", f"--accelerators={text}:8", "--bucket=s3://my-bucket", []],
            capsys,
        )
        assert (code == 2 and out == "") or yaml.safe_load(out)["resources"][
            "accelerators"
        ] == f"{text}:8"


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["gke", "skypilot"])
def test_arguments_reach_the_hosts_as_they_were_typed(launcher, capsys):
    """All in one command: each would take as long as the next."""
    texts = [text for text in [*WORDS, *drawn(60, ALPHABET, 10)] if "\x00" not in text]
    # an experiment takes no such options, so the words themselves are replaced
    prompts = [f"--sample.prompt={text}" for text in texts if text]
    for prompt in (prompts[0], prompts[-1], "--sample.prompt=" + "|".join(texts)):
        options = {
            "gke": [FOUR, "--image=i", "--bucket=my-bucket"],
            "skypilot": [FOUR, "--bucket=my-bucket"],
        }[launcher]
        code, out, err = launched(
            [launcher, "quickstart", *options, ["--", "--mesh.data=-1", prompt]], capsys
        )
        assert code == 0, err
        document = yaml.safe_load(out)
        if launcher == "gke":
            pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            assert pod["containers"][0]["command"][-1].replace("$$", "$") == prompt
        else:
            assert shlex.split(document["run"])[-1] == prompt


@pytest.mark.parametrize(
    "stem",
    ["2024", "null", "on", "yes", "1e3", "0x10", "12-30", "2026-11-26", "y", "true", "off", "n"],
)
def test_names_of_experiments_are_texts(stem):
    """EXP=2024 and EXP=null are files 2024.py and null.py."""
    name = slices.job_name(f"experiments/{stem}.py")
    assert yaml.safe_load(f"name: {slices.word(name)}") == {"name": name} and name[0].isalpha()


GOOD = ["abc", "my-bucket", "a.b-c.d", "1-2", "a1b", "a" * 63, "my_bucket"]
BAD = [
    "",
    "ab",
    "-abc",
    "abc-",
    "ABC",
    "a b",
    "a/b",
    "a;b",
    "$(id)",
    "a..b",
    ".abc",
    "abc.",
    "192.168.5.4",
    "goog-x",
    "my-google",
    "g00gle-x",
    "a" * 64,
    "a\nb",
    "abc\n",
    "ä-bucket",
    "a" * 64 + ".b",
    "null:",
    "~~~",
    "../etc",
    "x?y",
    "a\x00b",
]


@pytest.mark.parametrize("name", GOOD)
def test_names_that_google_takes(name):
    assert slices.bucket_name(name) == slices.bucket_name(f"gs://{name}/") == name
    assert skypilot.is_source(f"s3://{name}") == ("_" not in name)


@pytest.mark.parametrize("name", BAD)
def test_names_that_no_provider_takes(name):
    with pytest.raises(ConfigError, match="BUCKET="):
        slices.bucket_name(name)
    assert not skypilot.is_source(f"s3://{name}")


@pytest.mark.parametrize(
    "text",
    [
        "file:///etc",
        "/etc",
        "s3:/a",
        "s3://",
        "http://a/b",
        "S3://abc",
        "s3://abc/$(id)",
        "gs:/abc",
        "~/b",
    ],
)
def test_sources_that_nobody_mounts(text, capsys):
    code, out, err = launched(
        ["skypilot", "quickstart", "--accelerators=H100:8", f"--bucket={text}", []], capsys
    )
    assert (code, out, err.count("\n")) == (2, "", 1) and "BUCKET=" in err


@pytest.mark.parametrize(
    "text",
    [
        "s3://abc/some/folder",
        "r2://abc",
        "oci://ABC_d",
        "cos://us-east/abc",
        "cw://abc",
        "https://account1.blob.core.windows.net/abc",
        "nebius://abc",
    ],
)
def test_sources_that_skypilot_mounts(text):
    assert skypilot.is_source(text)


# W9: what the run would refuse, and what each host would have for itself

PLACES = [
    "runs",
    "./runs",
    "../runs",
    "~/runs",
    "s3://abc/runs",
    "file:///runs",
    "gs:/abc",
    "gs://",
    "gs://AB/runs",
    "gs://a/runs",
    "http://abc",
    "a\nb",
    "/a\nb",
    "S3://abc",
    "gs://goog-x/runs",
]
POD = ["tpu_vm", "quickstart", "--tpu=my-pod", "--zone=us-east5-a"]


@pytest.mark.parametrize("runs", PLACES)
@pytest.mark.parametrize("more", [[FOUR], [], ["--topology=v5e:1x1", "--spot"]], ids=" ".join)
def test_a_folder_of_runs_that_would_be_refused_rents_nothing(runs, more, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    code = tpu_vm.main([*POD[1:], *more, f"--runs={runs}", "--", "--mesh.data=-1"])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and "RUNS=" in err


@pytest.mark.parametrize("runs", ["/shared/runs", "gs://abc/runs", "gs://my_bucket", "/a b/runs"])
def test_folders_that_all_hosts_share(runs, unchecked, capsys):
    assert launched([*POD, FOUR, f"--runs={runs}", ["--", "--mesh.data=-1"]], capsys)[0] == 0
    slices.check_runs("runs", 1)  # one host, which is not taken away


@pytest.mark.parametrize(
    ("launcher", "option"),
    list(itertools.product(["tpu_vm", "gke", "slurm", "skypilot"], ["-1", "", "1e3", "two", "٣"])),
)
def test_counts_are_counts(launcher, option, capsys):
    """RETRIES=-1 was an endless or an impossible number of restarts."""
    code, out, err = launched([launcher, "quickstart", f"--retries={option}", []], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and "retries" in err


@pytest.mark.parametrize("pause", ["-1", "nan", "inf", "1e9"])
def test_a_pause_is_a_time(pause, capsys):
    assert launched([*POD, FOUR, f"--pause={pause}", []], capsys)[0] == 2


@pytest.mark.parametrize("arguments", [["--runs=/x"], ["--jax=1"], ["--name=../x"], ["--name=-x"]])
def test_arguments_of_the_run_cannot_change_where_it_goes(arguments, capsys):
    code, out, err = launched(
        [*POD, FOUR, "--bucket=my-bucket", ["--", "--mesh.data=-1", *arguments]], capsys
    )
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_options_of_an_experiment_may_be_asked_for(capsys):
    code, out, err = launched([*POD, FOUR, "--bucket=my-bucket", ["--", "--help"]], capsys)
    assert code == 0 and "--batch-size" in out and err == ""


# W10: a second bucket on the same TPU

MOUNTED = {
    "bin/sudo": '#!/bin/bash\n[ "$1" = install ] || "$@"\n',
    "bin/findmnt": '#!/bin/bash\ncat "$CLOUD/mounted" 2> /dev/null\n',
    "bin/mountpoint": '#!/bin/bash\n[ -s "$CLOUD/mounted" ]\n',
    "bin/fusermount": '#!/bin/bash\n[ -e "$CLOUD/busy" ] && exit 1\n'
    'echo "away $(cat "$CLOUD/mounted")" >> "$CLOUD/done"; rm "$CLOUD/mounted"\n',
    "bin/gcsfuse": (
        '#!/bin/bash\necho "${@: -2:1}" > "$CLOUD/mounted"; echo "mounted ${@: -2:1}" >> '
        '"$CLOUD/done"\n'
    ),
}


def test_another_bucket_takes_the_place_of_the_first(tmp_path, monkeypatch):
    cloud = install(MOUNTED, tmp_path, monkeypatch)

    def mount(bucket):
        return subprocess.run(["bash", "-c", tpu_vm.MOUNT.format(bucket=bucket)]).returncode

    assert [mount("one"), mount("one"), mount("two")] == [0, 0, 0]
    assert (cloud / "done").read_text().splitlines() == ["mounted one", "away one", "mounted two"]
    (cloud / "busy").touch()
    # in use: the run does not start
    assert mount("one") != 0 and (cloud / "mounted").read_text() == "two\n"


def test_a_command_with_another_bucket_is_another_one():
    words = ["-m", "jaxformer", "train", "quickstart", "--runs", "/mnt/bucket/runs"]
    found = [tpu_vm.start(words, bucket)[0] for bucket in ("", "one", "two")]
    assert len(set(found)) == 3 and tpu_vm.start(words, "one")[0] == found[1]
    assert all(
        f"echo {identity} > id" in tpu_vm.start(words, bucket)[1]
        for identity, bucket in zip(found, ("", "one", "two"), strict=True)
    )


# W11: however a launcher gives up, it says what still costs money

DELETE = "gcloud compute tpus queued-resources delete my-pod --force --zone=us-east5-a --quiet"


def ends(error):
    def attempt(*_):
        if isinstance(error, BaseException):
            raise error
        return error

    return attempt


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"0"}, 0),
        ({"2"}, 2),
        ({"3"}, 3),
        ({"130"}, 130),
        ({"1"}, 1),
        (set(), 1),
        (slices.Stopped(130), 130),
        (slices.Stopped(143), 143),
        (slices.Stopped(129), 129),
        (ConfigError("is busy with another command"), 2),
    ],
    ids=str,
)
def test_every_end_says_what_still_costs_money(error, code, unchecked, capsys, monkeypatch):
    monkeypatch.setattr(tpu_vm, "attempt", ends(error))
    assert (
        tpu_vm.main([*POD[1:], "--runs=/x", "--retries=1", "--pause=0", "--", "--mesh.data=-1"])
        == code
    )
    out, err = capsys.readouterr()
    assert (
        out.count(DELETE) == 1
        and "costs money" in out.splitlines()[-1]
        and "Traceback" not in out + err
    )


def test_an_error_that_nobody_foresaw_says_it_too(capsys, monkeypatch):
    monkeypatch.setattr(tpu_vm, "attempt", ends(RuntimeError("x")))
    with pytest.raises(RuntimeError, match="x"):
        tpu_vm.main([*POD[1:], "--runs=/x", "--", "--mesh.data=-1"])
    assert DELETE in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_end_with_what_costs_money(name, unchecked, capsys, monkeypatch):
    import signal

    monkeypatch.setattr(tpu_vm, "attempt", lambda *_: signal.raise_signal(getattr(signal, name)))
    before = signal.getsignal(getattr(signal, name))
    assert tpu_vm.main([*POD[1:], "--runs=/x", "--", "--mesh.data=-1"]) == 128 + getattr(
        signal, name
    )
    assert DELETE in capsys.readouterr().out and signal.getsignal(getattr(signal, name)) == before


SUBMITTED = [
    (
        ["gke", "quickstart", FOUR, "--image=i", "--bucket=my-bucket"],
        "kubectl delete jobset quickstart",
    ),
    (["skypilot", "quickstart", FOUR, "--bucket=my-bucket"], "sky jobs cancel --name quickstart"),
]


@pytest.mark.parametrize(("line", "says"), SUBMITTED)
@pytest.mark.parametrize("code", [0, 1, None])
def test_what_is_submitted_can_be_ended(line, says, code, unchecked, capsys, monkeypatch):
    def run(words, **_):
        if words[0] not in ("kubectl", "sky"):
            return subprocess.CompletedProcess(words, 0, "", "")
        if code is None:
            raise slices.Stopped(130)
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(lock, "write", lambda: None)
    monkeypatch.setattr(slices.subprocess, "run", run)
    module, *words = line
    found = importlib.import_module(f"experiments.launch.{module}").main(
        [*words, "--", "--mesh.data=-1"]
    )
    assert found == (130 if code is None else code) and says in capsys.readouterr().out


V6E = "--topology=v6e:4x4"
SUBMITTED = {
    "gke": [V6E, "--image=i", "--bucket=my-bucket"],
    "skypilot": [V6E, "--bucket=my-bucket"],
    "tpu_vm": ["--tpu=t", "--zone=z", V6E, "--bucket=my-bucket"],
}


@pytest.mark.parametrize("expected", ["--xla_mine=$HOME 'a'", ""])
@pytest.mark.parametrize("launcher", SUBMITTED)
def test_hosts_have_the_compiler_flags_of_whoever_launches(launcher, expected, capsys, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", expected)
    line = [launcher, "quickstart", *SUBMITTED[launcher], ["--", "--mesh.data=-1"]]
    if launcher == "tpu_vm":
        line = ["tpu_vm", *SUBMITTED[launcher], "quickstart", ["--", "--mesh.data=-1"]]
    code, out, err = launched(line, capsys)
    assert code == 0, err
    if not expected:
        assert "LIBTPU_INIT_ARGS" not in out
        return
    if launcher == "gke":
        document = yaml.safe_load(out)
        pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (variable,) = pod["containers"][0]["env"]
        assert variable["name"] == "LIBTPU_INIT_ARGS"
        assert variable["value"].replace("$$", "$") == expected
    elif launcher == "skypilot":
        words = shlex.split(yaml.safe_load(out)["run"])
        assert words[1:3] == ["env", f"LIBTPU_INIT_ARGS={expected}"]
    else:
        assert shlex.quote(f"LIBTPU_INIT_ARGS={expected}") in _unquoted(out)


def _unquoted(out):
    """The remote command of a script of tpu_vm, after the quotes of ssh and of bash."""
    for text in shlex.split(out, comments=True):
        for inner in shlex.split(text) if "LIBTPU" in text else ():
            if inner.startswith("trap"):
                return inner
    return out
