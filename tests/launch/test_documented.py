"""Every command of the README, the book and the experiments that launches, plans or shows does so,
as far as DRY=1 goes."""

import importlib
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from experiments.launch import door, pod_sim, slices  # noqa: E402
from jaxformer import cli  # noqa: E402
from jaxformer.cli.arguments import experiment_of  # noqa: E402
from jaxformer.tools.planning import plan  # noqa: E402
from jaxformer.tools.planning.topology import GPUS  # noqa: E402

FILES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").glob("*.py")),
]
VARIABLE = r"""[A-Z]+=(?:"[^"]*"|'[^']*'|[^\s;,`"'|()]+)"""
MAKE = rf"\bmake (plan|pod-sim|pod-train|slurm-train|gke-train|sky-train)((?: {VARIABLE})+)"
SHOW = r"python -m jaxformer ((?:show|cost) [^`\n|]*?)(?:`|\n|  )"


# what `make help` prints of a target is a command without `make`
HELP = re.sub(
    r"^([a-z-]+):.*?##.*?: (?=[A-Z]+=)",
    r"make \1 ",
    (ROOT / "Makefile").read_text(),
    flags=re.MULTILINE,
)
CONTINUED = re.compile(r"\\\n\s*")  # a backslash at the end of a line joins the next one
TEXTS = [CONTINUED.sub("", text) for text in (*(path.read_text() for path in FILES), HELP)]


def commands(pattern):
    found = {match for text in TEXTS for match in re.findall(pattern, text)}
    return sorted(match for match in found if "NAME" not in match and "$(" not in match)


@pytest.fixture(scope="module")
def shell():
    """What make runs for each command, by one make."""
    printed = {}
    for target, variables in commands(MAKE):
        words = [*shlex.split(variables.replace("...", "your-own")), "DRY=1"]
        done = subprocess.run(
            ["make", "-n", target, *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"make {target} {variables}: {done.stderr}"
        printed[target, variables] = done.stdout.splitlines()[-1]
    return printed


def devices(topology):
    kind, _, shape = topology.partition(":")
    return (
        math.prod(map(int, shape.split("x")))
        if kind in GPUS
        else slices.parse_slice(topology).devices
    )


@pytest.mark.thorough
@pytest.mark.parametrize("command", commands(MAKE), ids=" ".join)
def test_what_the_pages_say_to_type_starts(command, shell, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    module, *words = shlex.split(shell[command].partition("python -m ")[2])
    if command[0] == "pod-sim":
        started = []
        monkeypatch.setattr(pod_sim, "start", lambda index, *_: started.append(index) or exit())
        with pytest.raises(SystemExit):
            pod_sim.main(words)
        assert started == [0]
    elif command[0] != "plan":
        assert importlib.import_module(module).main(words) == 0, capsys.readouterr().err
        assert "each host checks before training: jax is" in capsys.readouterr().out
    else:  # without its compiler
        name, topology = words[1], words[words.index("--topology") + 1]
        flags = {word for word in words if word in ("--search", "--decode", "--fast", "--json")}
        overrides = [word for word in words[2:] if word not in {*flags, "--topology", topology}]
        experiment = experiment_of(name, overrides, plan.of_preset)
        if not flags:  # a search sets meshes and batches itself, decoding has none
            door.check_mesh(
                experiment, door.Hosts(devices(topology), slices=experiment.mesh.slices)
            )
        if "--search" not in flags:
            experiment.mesh.shape(devices(topology))


@pytest.mark.thorough
def test_plan_alone_plans_the_quickstart():
    done = subprocess.run(["make", "-n", "plan"], cwd=ROOT, capture_output=True, text=True)
    words = shlex.split(done.stdout.splitlines()[-1])
    topology = words[words.index("--topology") + 1]
    experiment_of("quickstart", [], plan.of_preset).mesh.shape(devices(topology))


@pytest.mark.thorough
@pytest.mark.parametrize("line", commands(SHOW))
def test_what_the_pages_say_to_look_at_is_shown(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(shlex.split(line.replace("…", ""))) == 0, capsys.readouterr().err


def test_the_commands_are_found():
    targets = [target for target, _ in commands(MAKE)]
    counts = {
        name: targets.count(name)
        for name in ("plan", "pod-train", "slurm-train", "gke-train", "sky-train", "pod-sim")
    }
    assert counts["plan"] >= 5 and counts["pod-train"] >= 4 and min(counts.values()) >= 1, counts
    assert len(commands(SHOW)) >= 3
