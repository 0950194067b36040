"""Trains on a TPU VM or pod slice of Google Cloud, through preemptions, until the run is finished.

    python -m experiments.launch.tpu_vm EXP --tpu NAME --zone ZONE [--topology v5e:4x4] [--spot] [--bucket B] [--dry] -- OPTIONS

Creates the TPU where there is none (a queued resource; needs --topology), copies this working tree to every worker, installs
it, starts the same command on all of them detached from this terminal, and shows worker 0's log. The same command again
attaches to a run that is going on, or resumes one that is not. Exit codes of the run decide: 0 finished; 2 and 3 would
only happen again; 143 (preempted, saved) and the rest start again, on a new TPU where the old one is gone.
Needs: gcloud, logged in. Costs money from creation until `gcloud compute tpus queued-resources delete`.
"""

import hashlib
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass

from experiments.launch import slices
from jaxformer.errors import ConfigError

LASTS = 600.0  # seconds after which an attempt counts as one that worked: the count of failures starts anew
GONE = ("PREEMPTED", "TERMINATED", "STOPPED", "SUSPENDED", "FAILED")  # a TPU in these states never comes back
COMING = (
    "DELETING",
    "SUSPENDING",
    "CREATING",
    "STARTING",
    "RESTARTING",
    "REPAIRING",
    "ACCEPTED",
    "PROVISIONING",
    "WAITING_FOR_RESOURCES",
    "ACTIVE",
)
HOPELESS = {2, 3, 130}  # a mistake in the options, numbers that went bad, somebody's Ctrl-C
PACK = "git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -czf {file} -T -"
INSTALL = (  # a TPU VM has Python 3.10; uv brings a newer one
    "mkdir -p ~/jaxformer ~/jaxformer.run && tar -xzf ~/jaxformer.tgz -C ~/jaxformer && cd ~/jaxformer"
    " && python3 -m pip install -q --user uv && ~/.local/bin/uv venv -q --allow-existing --python 3.12 .venv"
    " && ~/.local/bin/uv pip install -q -e '.[tpu]'"
)
MOUNT = (  # a checkpoint is finished by renaming its folder, and every host must see at once what another wrote
    "command -v gcsfuse > /dev/null || {{ echo deb https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main"
    " | sudo tee /etc/apt/sources.list.d/gcsfuse.list > /dev/null"
    " && curl -s https://packages.cloud.google.com/apt/doc/apt-key.gpg"
    " | sudo tee /etc/apt/trusted.gpg.d/gcsfuse.asc > /dev/null"
    " && sudo apt-get -qq update && sudo apt-get -qq install -y gcsfuse; }}"
    " && sudo install -d -o $USER /mnt/bucket && {{ mountpoint -q /mnt/bucket"
    " || gcsfuse --implicit-dirs --rename-dir-limit=1000000 --metadata-cache-ttl-secs=0 {bucket} /mnt/bucket; }}"
)
PROBE = (
    "cd ~/jaxformer.run 2>/dev/null && [ -e id ] && echo jaxformer $(cat id)"
    " $(if kill -0 $(cat pid) 2>/dev/null; then echo running; else cat exit 2>/dev/null || echo lost; fi)"
    " || echo jaxformer - none"
)
FOLLOW = "cd ~/jaxformer.run && tail -n 50 -F --pid=$(cat pid) log"
END = "kill -TERM -- -$(cat ~/jaxformer.run/pid)"  # it saves and ends with 143
STOP = "kill -9 -- -$(cat ~/jaxformer.run/pid) 2>/dev/null; true"


@dataclass(frozen=True)
class Pod:
    name: str
    zone: str
    project: str = ""
    slice: slices.Slice | None = None
    spot: bool = False

    def gcloud(self, *words: str) -> list[str]:
        project = [f"--project={self.project}"] if self.project else []
        return ["gcloud", "compute", "tpus", *words, f"--zone={self.zone}", *project, "--quiet"]

    def ssh(self, command: str, worker: str = "all") -> list[str]:
        return self.gcloud("tpu-vm", "ssh", self.name, f"--worker={worker}", f"--command={command}")

    def create(self) -> list[str]:
        if self.slice is None:
            raise ConfigError(f"TPU={self.name}: there is none in {self.zone}; give TOPOLOGY=v5e:4x4 to create it")
        return self.gcloud(
            "queued-resources", "create", self.name, f"--node-id={self.name}",
            f"--accelerator-type={self.slice.accelerator}",
            f"--runtime-version={slices.KINDS[self.slice.kind].runtime}", *["--spot"] * self.spot,
        )  # fmt: skip

    def delete(self) -> list[str]:
        return self.gcloud("queued-resources", "delete", self.name, "--force")

    def warm(self) -> list[str]:
        """The first ssh goes to one worker: it makes the key that all of them at once would race for."""
        return self.ssh("true", worker="0")

    def prepare(self, bucket: str) -> list[list[str]]:
        file = f"/tmp/jaxformer-{self.name}.tgz"
        return [
            ["bash", "-c", PACK.format(file=file)],
            self.gcloud("tpu-vm", "scp", file, f"{self.name}:jaxformer.tgz", "--worker=all"),
            self.ssh(INSTALL),
            *([self.ssh(MOUNT.format(bucket=bucket))] if bucket else []),
        ]


def start(command: list[str]) -> tuple[str, str]:
    """(identity, shell command): starts the training in a session of its own, with its log and exit code in files."""
    python = shlex.join([".venv/bin/python", *command])
    identity = hashlib.sha256(python.encode()).hexdigest()[:8]
    run = f"{python} > ../jaxformer.run/log 2>&1; echo $? > ../jaxformer.run/exit"
    inner = f"trap : TERM; echo $$ > pid; cd ../jaxformer; {run}"
    return identity, (
        f"cd ~/jaxformer.run && rm -f pid exit && echo {identity} > id"
        f" && (setsid nohup bash -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 &)"
        " && for i in 1 2 3 4 5 6 7 8 9; do [ -s pid ] && break; sleep 0.3; done"
    )


def call(words: list[str]) -> int:
    """Runs a command; its exit code, said where it is not 0."""
    try:
        code = subprocess.run(words, cwd=slices.ROOT).returncode
    except FileNotFoundError:
        raise ConfigError(f"{words[0]}: not installed here; DRY=1 prints the commands") from None
    if code:
        print(f"tpu_vm: exit code {code} of: {shlex.join(words)}", flush=True)
    return code


def answer(words: list[str]) -> tuple[int, str, str]:
    """Runs a command: exit code, output, errors."""
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(f"{words[0]}: not installed here; DRY=1 prints the commands") from None
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def state(pod: Pod) -> str:
    """Of the TPU, or of the request for it while there is no TPU; MISSING without either."""
    for words in (
        pod.gcloud("tpu-vm", "describe", pod.name, "--format=value(state)"),
        pod.gcloud("queued-resources", "describe", pod.name, "--format=value(state.state)"),
    ):
        code, text, errors = answer(words)
        if code == 0 and text:
            return text
        if "NOT_FOUND" not in errors:
            return f"UNKNOWN: {errors.splitlines()[-1] if errors else 'gcloud says nothing'}"
    return "MISSING"


def ensure(pod: Pod, pause: float) -> None:
    """Waits until the TPU is ready; a lost one is deleted, a missing one requested."""
    said, unclear, lost = "", 0, 0
    while (now := state(pod)) != "READY":
        before, said = said, now
        if now != before:
            print(f"tpu_vm: {pod.name} is {now}", flush=True)
        unclear = unclear + 1 if now.startswith(("UNKNOWN", "MISSING")) else 0
        if now == "MISSING" != before and call(pod.create()):
            raise ConfigError(f"TPU={pod.name}: cannot be created; gcloud says why above")
        if now in GONE:
            pod.create()  # refuses here, before anything is deleted, where it could not be made again
            lost += 1
            if lost > 3 or (call(pod.delete()) and call(pod.gcloud("tpu-vm", "delete", pod.name))):
                raise ConfigError(f"TPU={pod.name}: is {now}, and making it anew does not help; gcloud says why above")
        elif unclear > 10 or (not unclear and now not in COMING):
            raise ConfigError(f"TPU={pod.name}: is {now}, which only you can mend")
        time.sleep(pause)


def probe(pod: Pod) -> list[tuple[str, str]] | None:
    """(identity, running | exit code | lost | none) of every worker; None where one does not answer."""
    code, text, _ = answer(pod.ssh(PROBE))
    return re.findall(r"^jaxformer (\S+) (\S+)$", text, re.MULTILINE) or None if code == 0 else None


def attempt(pod: Pod, bucket: str, command: list[str], pause: float) -> set[str]:
    """One start, or attaching to a run that goes on, followed to its end: the workers' exit codes, empty if unknown."""
    ensure(pod, pause)
    identity, starting = start(command)
    if call(pod.warm()) or (found := probe(pod)) is None:
        return set()
    going = {whose for whose, status in found if status == "running"}
    if going - {identity}:
        raise ConfigError(f"TPU={pod.name}: is busy with another command; wait, or end it: {shlex.join(pod.ssh(END))}")
    if not going and any(call(words) for words in [*pod.prepare(bucket), pod.ssh(starting)]):
        return set()
    stragglers = 0
    while stragglers < 10:  # when one has ended, the others do within a minute
        call(pod.ssh(FOLLOW, worker="0"))
        if (found := probe(pod)) is None:
            return set()
        if "running" not in (statuses := {status for _, status in found}):
            return statuses
        stragglers = stragglers + 1 if len(statuses) > 1 else 0
        time.sleep(pause)
    call(pod.ssh(STOP))
    return {"lost"}


def train(pod: Pod, bucket: str, command: list[str], retries: int, pause: float) -> int:
    """Attempts until the run ends by itself, or `retries` in a row failed within ten minutes; the exit code."""
    failures = 0
    while True:
        began = time.monotonic()
        codes = attempt(pod, bucket, command, pause)
        if codes == {"0"}:
            print(f"tpu_vm: finished. The TPU still costs money: {shlex.join(pod.delete())}")
            return 0
        if final := HOPELESS & {int(code) for code in codes if code.isdigit()}:
            print(f"tpu_vm: ended with {sorted(codes)}, which another start would not mend")
            return min(final)
        failures = 1 if time.monotonic() - began > LASTS else failures + 1
        if failures > retries:
            print(
                f"tpu_vm: gave up after {retries} restarts in a row; the last ended with {sorted(codes) or 'no answer'}"
            )
            return 1
        wait = min(pause * 2 ** (failures - 1), LASTS)
        print(
            f"tpu_vm: ended with {sorted(codes) or 'no answer'}; again in {wait:.0f} s ({failures} of {retries})",
            flush=True,
        )
        time.sleep(wait)


def script(pod: Pod, bucket: str, command: list[str]) -> str:
    """Everything that one attempt runs, in its order, as a shell script."""
    steps = {
        "where there is no TPU of this name:": [pod.create()] if pod.slice else [["#", "give TOPOLOGY=v5e:4x4"]],
        "until READY:": [pod.gcloud("tpu-vm", "describe", pod.name, "--format=value(state)")],
        "how every worker is:": [pod.warm(), pod.ssh(PROBE)],
        "unless it runs already:": [*pod.prepare(bucket), pod.ssh(start(command)[1])],
        "its log, then how every worker ended:": [pod.ssh(FOLLOW, "0"), pod.ssh(PROBE)],
        "where the TPU was preempted, before the next attempt:": [pod.delete()],
    }
    return "\n".join(line for title, all_ in steps.items() for line in (f"# {title}", *map(shlex.join, all_)))


def options(parser) -> None:
    parser.add_argument("--tpu", default="", help="the TPU's name")
    parser.add_argument("--zone", default="", help="such as us-east5-a")
    parser.add_argument("--project", default="", help="gcloud's own by default")
    parser.add_argument("--topology", default="", help="what to create where the TPU is missing, such as v5e:4x4")
    parser.add_argument(
        "--spot", action="store_true", help="create it as a spot TPU: cheap, and preempted at any moment"
    )
    parser.add_argument("--bucket", default="", help="a bucket that every worker mounts with gcsfuse; runs lie in it")
    parser.add_argument("--runs", default="", help="or a folder that all workers share already (Filestore, NFS)")
    parser.add_argument("--retries", type=int, default=5, help="restarts in a row that may fail within ten minutes")
    parser.add_argument("--pause", type=float, default=30.0, help="seconds between looks and before the first restart")


def launch(asked, arguments: list[str]) -> int:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", slices.needed(asked.tpu, "no TPU: give TPU=my-pod, its name")):
        raise ConfigError(f"TPU={asked.tpu}: expected a name of small letters, digits and dashes")
    slices.needed(
        asked.zone, "no zone: give ZONE=, such as ZONE=us-east5-a; `gcloud compute tpus locations list` has them"
    )
    wanted = slices.parse_slice(asked.topology) if asked.topology else None
    if wanted and slices.KINDS[wanted.kind].gcloud is None:
        raise ConfigError(f"TOPOLOGY={asked.topology}: Google rents {wanted.kind} through GKE only: make gke-train")
    if asked.bucket and asked.runs:
        raise ConfigError("BUCKET and RUNS: give one of them")
    if not re.fullmatch(r"[a-z0-9._-]*", bucket := asked.bucket.removeprefix("gs://").rstrip("/")):
        raise ConfigError(f"BUCKET={asked.bucket}: expected the name of a bucket")
    shared = "/mnt/bucket/runs" if bucket else asked.runs
    command = slices.training(asked.experiment, arguments, shared or "runs")
    pod = Pod(asked.tpu, asked.zone, asked.project, wanted, asked.spot)
    lost = "no BUCKET and no RUNS: checkpoints are on the worker's own disk, and go with the TPU"
    if asked.dry:
        print(*([] if shared else [f"# {lost}"]), script(pod, bucket, command), sep="\n")
        return 0
    if not shared and (wanted is None or wanted.hosts > 1 or asked.spot):
        raise ConfigError(f"{lost}; give BUCKET=name, or RUNS=/a/folder/that/all/share")
    try:
        return train(pod, bucket, command, asked.retries, asked.pause)
    except KeyboardInterrupt:
        print(
            f"\ntpu_vm: detached; the run goes on, the same command attaches again. To end it: {shlex.join(pod.ssh(END))}"
        )
        return 130


def main(argv: list[str] | None = None) -> int:
    return slices.main("tpu_vm", __doc__, options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
