"""What is said of a step that does not fit: every change is one that the command line takes, with
the bytes that it needs."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxformer import config, parallel
from jaxformer.data.sources import Text
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.tools.planning import out_of_memory
from jaxformer.tools.planning.compile import device_bytes
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import abstract_state, state_shardings

STACK = ModelConfig(vocab_size=16, num_layers=2, d_model=32, num_heads=8, context_length=8)
BASE = Experiment("any", STACK, Text("data/nowhere.txt"), batch_size=32, mesh=Mesh())


@pytest.fixture
def needed(monkeypatch):
    """The experiments that were planned: in place of a compiler, their state and their examples of
    a pass are counted."""
    planned = []

    def count(experiment):
        rows = experiment.batch_size // experiment.accumulation
        mesh = parallel.run_mesh(experiment.mesh, rows) or parallel.make_mesh(
            Mesh(data=1), jax.devices()[:1]
        )
        recipe = build(experiment)
        state = abstract_state(recipe, state_shardings(recipe, mesh))
        planned.append(experiment)
        saved = (experiment.precision != "float32") + (
            getattr(experiment.model, "remat", "full") == "full"
        )
        return (
            device_bytes(state) + 2**20 * rows // 2**saved,
            None,
            SimpleNamespace(mesh=mesh, state=state),
        )

    monkeypatch.setattr(out_of_memory, "needed", count)
    return planned


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changed", "offered"),
    [
        ({}, {"--accumulation=4", "--batch-size=8", "--mesh.data=1 --mesh.fsdp=-1"}),
        ({"mesh": Mesh(data=1)}, {"--accumulation=8", "--mesh.data=1 --mesh.fsdp=-1"}),
        ({"mesh": Mesh(data=2, tensor=4)}, {"--accumulation=8", "--mesh.data=1 --mesh.fsdp=-1"}),
        ({"mesh": Mesh(data=1, tensor=-1)}, {"--accumulation=8"}),
        ({"mesh": Mesh(backend="pmap")}, {"--accumulation=4"}),
        # fsdp does not divide its width
        (
            {"model": replace(STACK, d_model=36, num_heads=4)},
            {"--accumulation=4"},
        ),
        ({"batch_size": 24}, set()),
        ({"accumulation": 2}, {"--accumulation=4", "--batch-size=16"}),
        ({"mesh": Mesh(data=2, stage=2)}, {"--accumulation=8"}),
        ({"model": EncoderDecoder(replace(STACK, heads=()), STACK)}, {"--accumulation=4"}),
    ],
)
def test_a_change_that_is_refused_takes_nothing_from_the_others(needed, changed, offered):
    """The plan itself stays, and each line is what the command line makes of it."""
    experiment = replace(BASE, **changed)
    said = out_of_memory.explain(experiment).splitlines()
    peak = out_of_memory.needed(experiment)[0]
    assert said[0].startswith(
        f"a step needs {out_of_memory.gib(peak)} on each device: parameters"
    ), said
    lines = [line.removeprefix("  with ") for line in said[1:]]
    assert 0 < len(lines) <= 3
    for line in lines:
        words = line.split(": ")[0].split()
        options, size = [word for word in words if word.startswith("--")], " ".join(words[-2:])
        assert size == out_of_memory.gib(
            out_of_memory.needed(config.override(experiment, options))[0]
        )
    assert all(config.override(experiment, options.split()) in needed for options in offered)


def test_the_first_plans_problem_is_the_answer():
    said = out_of_memory.explain(replace(BASE, batch_size=12))
    assert said.startswith("the step could not be planned here: batch_size=12 does not divide")
    with pytest.raises(ConfigError):
        out_of_memory.needed(replace(BASE, batch_size=12))


def sizes(**changed):
    """The parts of a step's bytes on a device, as they are printed."""
    state = out_of_memory.needed(replace(BASE, **changed))[2].state
    said, _, _ = out_of_memory.parts(state, 2**30).partition(", activations")
    return dict(part.rsplit(" ", 2)[:2] for part in said.split(", "))


def test_averaged_parameters_are_no_activations(needed):
    found = sizes(ema_decay=0.9)
    assert found["averaged parameters"] == found["parameters"] != found["optimizer"]


@pytest.mark.thorough
def test_what_the_host_holds_is_on_no_device(needed):
    """Of the optimizer's state all but its count of steps."""
    offloaded = sizes(mesh=Mesh(data=1, fsdp=8, offload=True))
    assert float(offloaded["optimizer"]) * 2**30 == pytest.approx(4, rel=0.01)


@pytest.mark.thorough
def test_a_real_plan_on_simulated_devices():
    said = out_of_memory.explain(replace(BASE, ema_decay=0.9))
    assert (
        said.startswith("a step needs") and "  large: " in said and said.count("  with --") >= 1
    ), said
