"""Parts that all launchers share: TPU slices, names of buckets, options, texts of YAML."""

import argparse
import contextlib
import hashlib
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.cli.arguments import Answered
from jaxformer.errors import ConfigError

ROOT = Path(__file__).parents[2]
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # all shapes of v5e and v6e
# small three-dimensional shapes; the sides of larger ones are multiples of 4
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


# words that YAML 1.1 reads as null or as a truth value
NO_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
# names of buckets: cloud.google.com/storage/docs/buckets#naming,
# docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; 2026-11
RULES = "small letters, digits, dashes and dots, 3 to 63 of them, a letter or digit at both ends"
RESERVED = re.compile(
    r"goog|.*g[o0]{2}gle|xn--|sthree-|amzn-s3-demo-|.*(-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)$"
)


@dataclass(frozen=True)
class Kind:
    """A kind of TPU and its names in Google Cloud.

    cloud.google.com/tpu/docs, kubernetes-engine/docs; 2026-11.
    """

    chips: int  # in the largest slice
    gcloud: str | None  # accelerator type without its number; None: it exists in GKE only
    number: int  # units of a chip in the accelerator type, which counts cores (2) or chips (1)
    runtime: str  # software version of the TPU VM
    gke: str  # node label
    devices: int = 1  # devices of a chip, as JAX counts them


KINDS = {
    "v4": Kind(4096, "v4", 2, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Kind(256, "v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Kind(6144, "v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Kind(256, "v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
    "tpu7x": Kind(9216, None, 2, "", "tpu7x", devices=2),
}


@dataclass(frozen=True)
class Slice:
    kind: str
    shape: str

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.shape.split("x")))

    @property
    def chips_per_host(self) -> int:
        """4, but a v5e or v6e slice of up to 8 chips is one host."""
        return self.chips if self.shape in FLAT[:3] else 4

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    @property
    def devices(self) -> int:
        return self.chips * KINDS[self.kind].devices

    @property
    def accelerator(self) -> str:
        """gcloud's name, such as v5litepod-16 or v5p-128: a size, of the shape `default_shape`."""
        kind = KINDS[self.kind]
        return f"{kind.gcloud}-{self.chips * kind.number}"

    @property
    def default_shape(self) -> str:
        """The shape of this size that is nearest to a cube.

        cloud.google.com/tpu/docs/v5p, table of slice shapes; 2026-11.
        """
        if self.shape in FLAT + SMALL:
            return self.shape
        sides, chips = range(4, 49, 4), self.chips
        shapes = [
            (a, b, chips // (a * b)) for a in sides for b in sides if chips % (a * b * 4) == 0
        ]
        return "x".join(map(str, sorted(min(shapes, key=sum))))


def parse_slice(text: str) -> Slice:
    """The slice that a text such as `v5e:4x4` names, as in `plan --topology`.

    Raises ConfigError for a slice that does not exist.
    """
    kind, _, shape = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(
            f"TOPOLOGY={text}: no such TPU; expected {', '.join(KINDS)} with a "
            "shape, such as v5e:4x4"
        )
    if kind in ("v5e", "v6e"):
        exists, expected = shape in FLAT, ", ".join(FLAT)
    else:
        sides = (
            [int(side) for side in shape.split("x")]
            if re.fullmatch(r"\d{1,6}x\d{1,6}x\d{1,6}", shape)
            else [0]
        )
        exists = shape in SMALL or (
            sides == sorted(sides) and sides[0] > 0 and not any(side % 4 for side in sides)
        )
        expected = f"{', '.join(SMALL)}, or AxBxC of multiples of 4, A <= B <= C"
    if not exists:
        raise ConfigError(
            f"TOPOLOGY={text}: {kind} has no slice {shape or 'without a shape'}; "
            f"expected {expected}"
        )
    if Slice(kind, shape).chips > KINDS[kind].chips:
        raise ConfigError(
            f"TOPOLOGY={text}: the largest slice of {kind} has {KINDS[kind].chips} chips"
        )
    return Slice(kind, shape)


def parse_tpu_vm(text: str) -> Slice:
    """`parse_slice`, which also raises ConfigError for a kind of TPU that has no VMs."""
    tpu = parse_slice(text)
    if KINDS[tpu.kind].gcloud is None:
        raise ConfigError(
            f"TOPOLOGY={text}: Google rents {tpu.kind} through GKE only: make gke-train"
        )
    return tpu


def bucket_name(text: str) -> str:
    """The name of a Google Cloud bucket; `text` is `name`, `name/` or `gs://name`."""
    name = text.removeprefix("gs://").rstrip("/")
    if not is_bucket(name, "_"):
        raise ConfigError(
            f"BUCKET={text}: expected the name of a bucket ({RULES}), "
            "such as my-bucket or gs://my-bucket"
        )
    return name


def is_bucket(name: str, more: str = "") -> bool:
    """Whether a provider allows a bucket of this name. It also allows the letters `more`."""
    parts = name.split(".")
    is_address = len(parts) == 4 and all(part.isdigit() for part in parts)
    fits = re.fullmatch(rf"[a-z0-9][a-z0-9.{more}-]+[a-z0-9]", name) and all(
        0 < len(part) <= 63 for part in parts
    )
    longest = 222 if more and len(parts) > 1 else 63  # 222: Google allows names of domains
    return bool(fits) and len(name) <= longest and not is_address and not RESERVED.match(name)


def check_runs(runs: str, hosts: int | None) -> None:
    """Raises ConfigError for a folder of runs that a run would refuse, or that hosts do not share.

    `hosts` is the number of hosts; None: not known.
    """
    scheme, is_url, rest = runs.partition("://")
    if is_url or re.match("[a-z0-9]+:", runs):
        if scheme != "gs" or not is_url or not is_bucket(rest.partition("/")[0], "_"):
            raise ConfigError(
                f"RUNS={runs}: expected a folder, or gs://bucket/folder with the "
                f"name of a bucket ({RULES})"
            )
    elif not runs.isprintable():
        raise ConfigError(f"RUNS={runs!r}: expected the path of a folder, without line ends")
    elif hosts != 1 and not runs.startswith("/"):
        where = "each host has one of its own there"
        raise ConfigError(
            f"RUNS={runs}: {where}; give the absolute path of a folder that all "
            "hosts share, or gs://bucket/runs"
        )


def count(text: str) -> int:
    """The type of an option that counts something, from 0."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """The type of an option that is a time to wait."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text):
        raise argparse.ArgumentTypeError(f"{text}: expected seconds, 0 or more")
    return float(text)


def job_name(experiment: str) -> str:
    """A job name that Kubernetes, Slurm and SkyPilot allow.

    It has small letters, digits and dashes, and begins with a letter. A file whose name has no such
    letters gets a digest of its name, so that two such files have different job names.
    """
    stem = Path(experiment).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].rstrip("-")
    name = name or hashlib.sha256(stem.encode()).hexdigest()[:8]
    # the service of a JobSet must begin with a letter
    return name if name[0].isalpha() else f"run-{name}"


def word(text: str) -> str:
    """A text as a string of YAML.

    It is in quotes if YAML could read a number, a time, null, a truth value or a key of a mapping.
    """
    plain = (
        re.fullmatch(r"[A-Za-z]([A-Za-z0-9_./:@-]*[A-Za-z0-9_/@-])?", text)
        and text.lower() not in NO_TEXT
    )
    return text if plain else quote(text)


def quote(text: str) -> str:
    """A text in double quotes, as YAML and JSON read it. Raises ConfigError if it is not UTF-8.

    YAML reads the line ends of Unicode as spaces and refuses unprintable characters, so both are
    escaped.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{text!a}: holds bytes that are no UTF-8; give text")
    escaped = lambda letter: letter if letter.isprintable() else f"\\U{ord(letter):08x}"
    return "".join(map(escaped, json.dumps(text, ensure_ascii=False)))


def block(text: str, indent: str) -> str:
    """Lines as a string of YAML: a block below its key, or in quotes if a block changes them."""
    if all(letter.isprintable() or letter == "\n" for letter in text) and not text.startswith(
        (" ", "\n")
    ):
        return "|\n" + "\n".join(f"{indent}{line}" for line in text.rstrip("\n").split("\n"))
    return quote(text)


def require(value: str, message: str) -> str:
    if not value:
        raise ConfigError(message)
    return value


class Parser(argparse.ArgumentParser):
    """The options of a launcher. Options after `--` are for the experiment."""

    def __init__(self, module: str, doc: str | None):
        super().__init__(
            prog=f"python -m experiments.launch.{module}", description=doc, allow_abbrev=False
        )
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.add_argument("experiment")
        self.add_argument("--dry", action="store_true", help="print the commands, run nothing")

    def error(self, message: str):
        raise ConfigError(f"{self.prog}: {message}")


def main(
    module: str,
    doc: str | None,
    add_options: Callable,
    launch: Callable,
    argv: list[str] | None = None,
) -> int:
    """Reads argv and launches. Returns the exit code; a ConfigError prints one line and gives 2."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    try:
        parser = Parser(module, doc)
        add_options(parser)
        return launch(parser.parse_args(words[:cut]), words[cut + 1 :])
    except (ConfigError, NotImplementedError) as error:  # mixers raise NotImplementedError
        print(f"{module}: {error}", file=sys.stderr)
        return 2
    except Answered:  # `--help` of the experiment
        return 0


def submit(text: str, command: list[str], dry: bool, facts: list[str], end: list[str]) -> int:
    """Runs `command FILE` in the checkout, where FILE holds `text`; returns the exit code.

    If `dry`, it only prints both, and the facts that were checked. `end` is the command that ends
    the submitted job. It is printed in every case, because the job costs money.
    """
    costs = f"what is submitted costs money until it ends; to end it: {shlex.join(end)}"
    if dry:
        print(
            text.rstrip(),
            f"# {shlex.join(command)} FILE",
            *(f"# {fact}" for fact in [*facts, costs]),
            sep="\n",
        )
        return 0
    # SkyPilot needs this suffix to recognise a task
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            with stoppable():
                code = subprocess.run([*command, file.name], cwd=ROOT).returncode
        except FileNotFoundError:
            raise ConfigError(f"{command[0]}: not installed here; DRY=1 prints its input") from None
        except Stopped as stopped:
            code = stopped.code
    print(f"{command[0]}: {f'exit code {code}; ' * bool(code)}{costs}", flush=True)
    return code


class Stopped(BaseException):
    """A signal ended the launcher; `code` is its exit code. The rented machines still exist."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal raise Stopped inside, so a last line can be printed."""

    def stop(signum: int, frame: Any) -> None:
        raise Stopped(128 + signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    in_main = threading.current_thread() is threading.main_thread()  # only it receives signals
    handlers = {each: signal.signal(each, stop) for each in signals} if in_main else {}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
