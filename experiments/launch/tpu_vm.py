"""Trains on a TPU VM or pod slice of Google Cloud, through preemptions, until the run is finished.

    python -m experiments.launch.tpu_vm EXP --tpu NAME --zone ZONE [--topology v5e:4x4] [--spot]
        [--bucket B] [--dry] -- OPTIONS

If the TPU does not exist, it is created (a queued resource; needs --topology). This working tree is
copied to every worker and installed in the versions of this environment. A restart with the same
tree and versions installs nothing. The command starts on all workers, independent of this terminal,
which shows worker 0's log. The same command again attaches to the run, or resumes it if it has
stopped.

Exit code 0 means finished. 2 and 3 end the run, because a restart would fail again. 143 (preempted,
saved) and others restart it, on a new TPU if necessary. Needs gcloud with a login. The TPU costs
money from its creation until `gcloud compute tpus queued-resources delete`.
"""

import hashlib
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass

from experiments.launch import door, lock, slices
from jaxformer.errors import ConfigError

STABLE = 600.0  # seconds; after a longer attempt the count of failures starts again at 1
# states from which a TPU never becomes ready
DEAD_STATES = ("PREEMPTED", "TERMINATED", "STOPPED", "SUSPENDED", "FAILED")
# states from which it does
WAIT_STATES = (
    "DELETING", "SUSPENDING", "CREATING", "STARTING", "RESTARTING", "REPAIRING", "ACCEPTED",
    "PROVISIONING", "WAITING_FOR_RESOURCES", "ACTIVE",
)  # fmt: skip
FINAL_CODES = {2, 3, 130}  # a mistake in the options, NaN, Ctrl-C: a restart would fail again
PACK = (
    "git ls-files -z --cached --others --exclude-standard"
    " | tar --null --ignore-failed-read -czf {file} " + lock.FILE + " -T -"
)
# It first removes the files that an earlier copy installed. So a file that this tree no longer has
# is gone, also a package lib/x/ that became lib/x.py. Runs and data beside them stay. A TPU VM has
# Python 3.10; uv installs the Python of the lock.
INSTALL = (
    "rm -f ~/jaxformer.run/installed"
    " && mkdir -p ~/jaxformer && cd ~/jaxformer && touch ~/jaxformer.run/files"
    " && {{ xargs -d '\\n' rm -f -- < ~/jaxformer.run/files || true; }}"
    " && tar --quoting-style=literal -tzf ~/jaxformer.tgz > ~/jaxformer.run/files"
    " && tar -xzf ~/jaxformer.tgz"
    " && python3 -m pip install -q --user uv"
    " && ~/.local/bin/uv venv -q --allow-existing --python "
    + lock.PYTHON
    + " .venv && ~/.local/bin/uv pip install -q -c "
    + lock.FILE
    + " -e '.[tpu,hosts]' && echo {digest} > ~/jaxformer.run/installed"
)
# A checkpoint is complete when its folder is renamed. Without caches every host sees that at once.
# gcsfuse caches existing files for --metadata-cache-ttl-secs and missing ones for
# --metadata-cache-negative-ttl-secs (5 by default):
# docs.cloud.google.com/storage/docs/cloud-storage-fuse/stat-caching and type-caching, 2026-11.
MOUNT = (
    "command -v gcsfuse > /dev/null"
    " || {{ echo deb https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main"
    " | sudo tee /etc/apt/sources.list.d/gcsfuse.list > /dev/null"
    " && curl -s https://packages.cloud.google.com/apt/doc/apt-key.gpg"
    " | sudo tee /etc/apt/trusted.gpg.d/gcsfuse.asc > /dev/null"
    " && sudo apt-get -qq update && sudo apt-get -qq install -y gcsfuse; }}"
    " && sudo install -d -o $USER /mnt/bucket"
    # another bucket, mounted by an earlier command, is unmounted: the run would go into it
    ' && {{ [ "$(findmnt -n -o SOURCE /mnt/bucket)" = {bucket} ]'
    " || {{ {{ ! mountpoint -q /mnt/bucket || fusermount -u /mnt/bucket; }}"
    " && gcsfuse --implicit-dirs --rename-dir-limit=1000000 --metadata-cache-ttl-secs=0"
    " --metadata-cache-negative-ttl-secs=0 {bucket} /mnt/bucket; }}; }}"
)
# prints the identity of the started command, its status, and the digest of the installed tree
PROBE = (
    "mkdir -p ~/jaxformer.run && cd ~/jaxformer.run"
    " && echo jaxformer $(cat id 2>/dev/null || echo -)"
    " $(if [ ! -e id ]; then echo none; elif kill -0 $(cat pid) 2>/dev/null; then echo running;"
    " else cat exit 2>/dev/null || echo lost; fi) $(cat installed 2>/dev/null || echo -)"
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
            raise ConfigError(
                f"TPU={self.name}: there is none in {self.zone}; give TOPOLOGY=v5e:4x4 to create it"
            )
        # A size of v4 or v5p has several shapes:
        # cloud.google.com/sdk/gcloud/reference/.../queued-resources/create, 2026-11
        shape = [f"--type={self.slice.kind}", f"--topology={self.slice.shape}"]
        return self.gcloud(
            "queued-resources",
            "create",
            self.name,
            f"--node-id={self.name}",
            *(
                shape
                if self.slice.kind in ("v4", "v5p")
                else [f"--accelerator-type={self.slice.accelerator}"]
            ),
            f"--runtime-version={slices.KINDS[self.slice.kind].runtime}",
            *["--spot"] * self.spot,
        )

    def delete(self) -> list[str]:
        return self.gcloud("queued-resources", "delete", self.name, "--force")

    def costs(self) -> str:
        """A line that says that the TPU costs money, with the commands that delete it.

        One command is for a TPU that `create` requested, the other for any other TPU.
        """
        other = self.gcloud("tpu-vm", "delete", self.name)
        made = (
            f"{shlex.join(self.delete())} (or, if it was made by `gcloud compute tpus tpu-vm "
            f"create`: {shlex.join(other)})"
        )
        return f"tpu_vm: {self.name} costs money, if it exists, until you delete it: {made}"

    def warm(self) -> list[str]:
        """The first ssh, to one worker only: it makes the key, which all would make in parallel."""
        return self.ssh("true", worker="0")

    def install(self, digest: str) -> list[list[str]]:
        file = f"/tmp/jaxformer-{self.name}.tgz"
        return [
            ["bash", "-c", PACK.format(file=file)],
            self.gcloud("tpu-vm", "scp", file, f"{self.name}:jaxformer.tgz", "--worker=all"),
            self.ssh(INSTALL.format(digest=digest)),
        ]

    def mount(self, bucket: str) -> list[list[str]]:
        return [self.ssh(MOUNT.format(bucket=bucket))] if bucket else []


def tree_digest() -> str:
    """A digest of the copied files and the lock. A worker with this digest needs no install."""
    digest = hashlib.sha256(lock.text().encode())
    for name in door.tree():
        path = slices.ROOT / name
        digest.update(
            f"{name} {path.stat().st_size}\n".encode() + path.read_bytes()
            if path.is_file()
            else b""
        )
    return digest.hexdigest()[:16]


def start(command: list[str], bucket: str = "") -> tuple[str, str]:
    """(identity, shell command that starts the training in a new session).

    Log and exit code go to files. The identity is a digest of the words and of the bucket: the
    words do not name the bucket, because each is mounted at the same path.
    """
    line = shlex.join(command)
    identity = hashlib.sha256((line + (bucket and f" in {bucket}")).encode()).hexdigest()[:8]
    run = f"{line} > ../jaxformer.run/log 2>&1; echo $? > ../jaxformer.run/exit"
    inner = f"trap : TERM; echo $$ > pid; cd ../jaxformer; {run}"
    return identity, (
        f"cd ~/jaxformer.run && rm -f pid exit && echo {identity} > id"
        f" && (setsid nohup bash -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 &)"
        " && for i in 1 2 3 4 5 6 7 8 9; do [ -s pid ] && break; sleep 0.3; done"
    )


def call(words: list[str]) -> int:
    """Runs a command and returns its exit code; prints the code if it is not 0."""
    code = run(words, cwd=slices.ROOT).returncode
    if code:
        print(f"tpu_vm: exit code {code} of: {shlex.join(words)}", flush=True)
    return code


def run(words: list[str], **options) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(words, text=True, **options)
    except FileNotFoundError:
        raise ConfigError(f"{words[0]}: not installed here; DRY=1 prints the commands") from None


def state(pod: Pod) -> str:
    """The state of the TPU; without a TPU, that of its request; without a request, MISSING."""
    for words in (
        pod.gcloud("tpu-vm", "describe", pod.name, "--format=value(state)"),
        pod.gcloud("queued-resources", "describe", pod.name, "--format=value(state.state)"),
    ):
        done = run(words, capture_output=True)
        text, errors = done.stdout.strip(), done.stderr.strip()
        if done.returncode == 0 and text:
            return text
        if "NOT_FOUND" not in errors:
            return f"UNKNOWN: {errors.splitlines()[-1] if errors else 'gcloud says nothing'}"
    return "MISSING"


def wait_until_ready(pod: Pod, pause: float) -> None:
    """Waits until the TPU is ready. A dead one is deleted, a missing one is requested."""
    now, unclear, deaths = "", 0, 0
    while True:
        last, now = now, state(pod)
        if now == "READY":
            return
        if now != last:
            print(f"tpu_vm: {pod.name} is {now}", flush=True)
        unclear = unclear + 1 if now.startswith(("UNKNOWN", "MISSING")) else 0
        if now == "MISSING" != last and call(pod.create()):
            raise ConfigError(f"TPU={pod.name}: cannot be created; gcloud says why above")
        if now in DEAD_STATES:
            pod.create()  # only checks: if the TPU cannot be created again, it is not deleted
            deaths += 1
            if deaths > 3 or (
                call(pod.delete()) and call(pod.gcloud("tpu-vm", "delete", pod.name))
            ):
                raise ConfigError(
                    f"TPU={pod.name}: is {now}, and a new one does not help; gcloud says why above"
                )
        elif unclear > 10 or (not unclear and now not in WAIT_STATES):
            raise ConfigError(f"TPU={pod.name}: is {now}, which only you can mend")
        time.sleep(pause)


def probe(pod: Pod) -> list[tuple[str, str, str]] | None:
    """(identity, status, digest of the installed tree) of every worker; None without an answer.

    The status is "running", an exit code, "lost" or "none".
    """
    done = run(pod.ssh(PROBE), capture_output=True)
    return (
        re.findall(r"^jaxformer (\S+) (\S+) (\S+)$", done.stdout, re.MULTILINE) or None
        if done.returncode == 0
        else None
    )


def attempt(pod: Pod, bucket: str, command: list[str], pause: float) -> set[str]:
    """Starts the run, or attaches to it, and follows it to its end: the workers' exit codes.

    The set is empty if they are unknown.
    """
    wait_until_ready(pod, pause)
    identity, start_command = start(command, bucket)
    if call(pod.warm()) or (workers := probe(pod)) is None:
        return set()
    identities = {identity for identity, status, _ in workers if status == "running"}
    if identities - {identity}:
        raise ConfigError(
            f"TPU={pod.name}: is busy with another command; wait, or end it: "
            f"{shlex.join(pod.ssh(END))}"
        )
    if not identities:
        digest = tree_digest()
        lock.write()
        steps = (
            [] if {installed for _, _, installed in workers} == {digest} else pod.install(digest)
        )
        if any(call(words) for words in [*steps, *pod.mount(bucket), pod.ssh(start_command)]):
            return set()
    partial_ends = 0
    while partial_ends < 10:  # when one worker has ended, the others end within a minute
        call(pod.ssh(FOLLOW, worker="0"))
        if (workers := probe(pod)) is None:
            return set()
        if "running" not in (statuses := {status for _, status, _ in workers}):
            return statuses
        partial_ends = partial_ends + 1 if len(statuses) > 1 else 0
        time.sleep(pause)
    call(pod.ssh(STOP))
    return {"lost"}


def train(pod: Pod, bucket: str, command: list[str], retries: int, pause: float) -> int:
    """Repeats attempts until the run ends; returns the exit code.

    It gives up after `retries` attempts in a row that fail within ten minutes.
    """
    failures = 0
    while True:
        began = time.monotonic()
        codes = attempt(pod, bucket, command, pause)
        if codes == {"0"}:
            print("tpu_vm: finished")
            return 0
        if final := FINAL_CODES & {int(code) for code in codes if code.isdigit()}:
            print(f"tpu_vm: ended with {sorted(codes)}, which a restart would not repair")
            return min(final)
        failures = 1 if time.monotonic() - began > STABLE else failures + 1
        if failures > retries:
            print(
                f"tpu_vm: gave up after {retries} restarts in a row; "
                f"the last ended with {sorted(codes) or 'no answer'}"
            )
            return 1
        wait = min(pause * 2 ** (failures - 1), STABLE)
        print(
            (
                f"tpu_vm: ended with {sorted(codes) or 'no answer'}; "
                f"again in {wait:.0f} s ({failures} of {retries})"
            ),
            flush=True,
        )
        time.sleep(wait)


def script(pod: Pod, bucket: str, command: list[str]) -> str:
    """The commands of one attempt, in order, as a shell script."""
    steps = {
        "where there is no TPU of this name:": [pod.create()]
        if pod.slice
        else [["#", "give TOPOLOGY=v5e:4x4"]],
        "until READY:": [pod.gcloud("tpu-vm", "describe", pod.name, "--format=value(state)")],
        "how every worker is:": [pod.warm(), pod.ssh(PROBE)],
        "unless that very tree is installed on all:": pod.install(tree_digest()),
        "unless it runs already:": [*pod.mount(bucket), pod.ssh(start(command, bucket)[1])],
        "its log, then how every worker ended:": [pod.ssh(FOLLOW, "0"), pod.ssh(PROBE)],
        "where the TPU was preempted, before the next attempt:": [pod.delete()],
    }
    return "\n".join(
        line for title, words in steps.items() for line in (f"# {title}", *map(shlex.join, words))
    )


def add_options(parser) -> None:
    parser.add_argument("--tpu", default="", help="name of the TPU")
    parser.add_argument("--zone", default="", help="zone, such as us-east5-a")
    parser.add_argument("--project", default="", help="project (default: gcloud's)")
    parser.add_argument(
        "--topology",
        default="",
        help="slice to create if the TPU does not exist, such as v5e:4x4",
    )
    parser.add_argument(
        "--spot",
        action="store_true",
        help="create a spot TPU: cheap, may be preempted at any time",
    )
    parser.add_argument(
        "--bucket", default="", help="bucket for runs; every worker mounts it with gcsfuse"
    )
    parser.add_argument(
        "--runs",
        default="",
        help="or a folder for runs that all workers share (Filestore, NFS), or gs://bucket/runs",
    )
    parser.add_argument(
        "--retries",
        type=slices.count,
        default=5,
        help="restarts in a row that may fail within ten minutes",
    )
    parser.add_argument(
        "--pause",
        type=slices.seconds,
        default=30.0,
        help="seconds between checks and before the first restart",
    )


def launch(options, arguments: list[str]) -> int:
    if not re.fullmatch(
        r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        slices.require(options.tpu, "no TPU: give TPU=my-pod, its name"),
    ):
        raise ConfigError(
            f"TPU={options.tpu}: expected a name of small letters, "
            "digits and dashes, at most 63 of them"
        )
    slices.require(
        options.zone,
        (
            "no zone: give ZONE=, such as ZONE=us-east5-a; "
            "`gcloud compute tpus locations list` has them"
        ),
    )
    tpu = slices.parse_tpu_vm(options.topology) if options.topology else None
    if options.bucket and options.runs:
        raise ConfigError("BUCKET and RUNS: give one of them")
    bucket = slices.bucket_name(options.bucket) if options.bucket else ""
    shared = "/mnt/bucket/runs" if bucket else options.runs
    if shared:
        slices.check_runs(shared, tpu.hosts if tpu and not options.spot else None)
    mount = "/mnt/bucket" if bucket else "/mnt/data"
    hosts = door.Hosts(
        tpu.devices if tpu else None,
        tpu.hosts if tpu else 1,
        mount=mount,
        has_tpu=True,
    )
    checked = door.train_command(options.experiment, arguments, shared or "runs", hosts)
    command = checked.line(".venv/bin/python")
    pod = Pod(options.tpu, options.zone, options.project, tpu, options.spot)
    warning = "no BUCKET and no RUNS: checkpoints are on the worker's own disk, and go with the TPU"
    if options.dry:
        facts = [f"# {fact}" for fact in checked.facts]
        print(*([] if shared else [f"# {warning}"]), script(pod, bucket, command), *facts, sep="\n")
        return 0
    if not shared and (tpu is None or tpu.hosts > 1 or options.spot):
        raise ConfigError(
            f"{warning}; give BUCKET=name, RUNS=/a/folder/that/all/share, or RUNS=gs://bucket/runs"
        )
    try:
        with slices.stoppable():
            return train(pod, bucket, command, options.retries, options.pause)
    except slices.Stopped as stopped:
        print(
            "\ntpu_vm: detached; the run goes on, the same command attaches again. To end it: "
            f"{shlex.join(pod.ssh(END))}"
        )
        return stopped.code
    finally:  # however it ends
        print(pod.costs(), flush=True)


def main(argv: list[str] | None = None) -> int:
    return slices.main("tpu_vm", __doc__, add_options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
