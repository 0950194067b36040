"""Parts of every launcher: TPU slices, names of buckets, options."""

import argparse
import hashlib
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxformer.errors import ConfigError

ROOT = Path(__file__).parents[2]
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # all shapes of v5e and v6e
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # small three-dimensional shapes; larger ones are multiples of 4


NO_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")  # what YAML 1.1 makes of these words


@dataclass(frozen=True)
class Kind:
    """A kind of TPU and its names in Google Cloud (cloud.google.com/tpu/docs, kubernetes-engine/docs; 2026-11)."""

    chips: int  # in the largest slice
    gcloud: str | None  # the accelerator type without its number; None: only GKE has it, no TPU VM
    number: int  # the accelerator type counts cores (2 a chip) or chips (1)
    runtime: str  # software version of the TPU VM
    gke: str  # node label
    devices: int = 1  # of a chip, as JAX counts them


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
        """gcloud's name, such as v5litepod-16 or v5p-128: a size, which Google gives the shape `default_shape`."""
        kind = KINDS[self.kind]
        return f"{kind.gcloud}-{self.chips * kind.number}"

    @property
    def default_shape(self) -> str:
        """The shape of this size that is nearest to a cube (cloud.google.com/tpu/docs/v5p, table of slice shapes; 2026-11)."""
        if self.shape in FLAT + SMALL:
            return self.shape
        sides, chips = range(4, 49, 4), self.chips
        shapes = [(a, b, chips // (a * b)) for a in sides for b in sides if chips % (a * b * 4) == 0]
        return "x".join(map(str, sorted(min(shapes, key=sum))))


def parse_slice(text: str) -> Slice:
    """Reads `v5e:4x4`, the form of `plan --topology`. Raises ConfigError for a slice that does not exist."""
    kind, _, shape = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"TOPOLOGY={text}: no such TPU; expected {', '.join(KINDS)} with a shape, such as v5e:4x4")
    if kind in ("v5e", "v6e"):
        exists, expected = shape in FLAT, ", ".join(FLAT)
    else:
        sides = [int(side) for side in shape.split("x")] if re.fullmatch(r"\d{1,6}x\d{1,6}x\d{1,6}", shape) else [0]
        exists = shape in SMALL or (sides == sorted(sides) and sides[0] > 0 and not any(side % 4 for side in sides))
        expected = f"{', '.join(SMALL)}, or AxBxC of multiples of 4, A <= B <= C"
    if not exists:
        raise ConfigError(f"TOPOLOGY={text}: {kind} has no slice {shape or 'without a shape'}; expected {expected}")
    if Slice(kind, shape).chips > KINDS[kind].chips:
        raise ConfigError(f"TOPOLOGY={text}: the largest slice of {kind} has {KINDS[kind].chips} chips")
    return Slice(kind, shape)


def parse_tpu_vm(text: str) -> Slice:
    """As `parse_slice`, for a kind of TPU that Google also offers as VMs."""
    tpu = parse_slice(text)
    if KINDS[tpu.kind].gcloud is None:
        raise ConfigError(f"TOPOLOGY={text}: Google rents {tpu.kind} through GKE only: make gke-train")
    return tpu


def bucket_name(text: str) -> str:
    """The name of a Google Cloud bucket, which may be written `name`, `name/` or `gs://name`."""
    name = text.removeprefix("gs://").rstrip("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ConfigError(f"BUCKET={text}: expected the name of a bucket, such as my-bucket or gs://my-bucket")
    return name


def job_name(experiment: str) -> str:
    """A name that is valid for Kubernetes, Slurm and SkyPilot: small letters, digits and dashes, a letter first.

    A file without such letters in its name gets a digest of it, so that two of them have different names.
    """
    stem = Path(experiment).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].rstrip("-")
    name = name or hashlib.sha256(stem.encode()).hexdigest()[:8]
    return name if name[0].isalpha() else f"run-{name}"  # the service of a JobSet begins with a letter


def word(text: str) -> str:
    """A text as a string of YAML: in quotes where it may be a number, a time, null or a truth value."""
    plain = re.fullmatch(r"[A-Za-z][\w./:@-]*", text) and text.lower() not in NO_TEXT
    return text if plain else json.dumps(text, ensure_ascii=False)


def require(value: str, message: str) -> str:
    if not value:
        raise ConfigError(message)
    return value


class Parser(argparse.ArgumentParser):
    """The options of a launcher. Options after `--` are for the experiment."""

    def __init__(self, module: str, doc: str | None):
        super().__init__(prog=f"python -m experiments.launch.{module}", description=doc, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.add_argument("experiment")
        self.add_argument("--dry", action="store_true", help="print the commands, run nothing")

    def error(self, message: str):
        raise ConfigError(f"{self.prog}: {message}")


def main(module: str, doc: str | None, add_options: Callable, launch: Callable, argv: list[str] | None = None) -> int:
    """Reads argv and launches. Returns the exit code; a ConfigError prints one line and gives 2."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    try:
        parser = Parser(module, doc)
        add_options(parser)
        return launch(parser.parse_args(words[:cut]), words[cut + 1 :])
    except (ConfigError, NotImplementedError) as error:  # a mixer refuses what it cannot do by name
        print(f"{module}: {error}", file=sys.stderr)
        return 2


def submit(text: str, command: list[str], dry: bool, facts: list[str]) -> int:
    """Runs `command FILE` in the checkout, where FILE holds `text`. If `dry`, prints both and the facts that were checked."""
    if dry:
        print(text.rstrip(), f"# {shlex.join(command)} FILE", *(f"# {fact}" for fact in facts), sep="\n")
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # SkyPilot recognises a task by this suffix
        file.write(text)
        file.flush()
        try:
            return subprocess.run([*command, file.name], cwd=ROOT).returncode
        except FileNotFoundError:
            raise ConfigError(f"{command[0]}: not installed here; DRY=1 prints its input") from None
