"""Plans: of tiny models by the TPU's compiler where it is installed, and what needs none of it."""

import importlib.util
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from jaxformer import cli, config, masks, models
from jaxformer.data.sources import Dataset, Text
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import cost, presets
from jaxformer.objectives.classes import ClassCrossEntropy
from jaxformer.objectives.tokens import TokenCrossEntropy
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.runs.names import NAMES
from jaxformer.tools.planning import decode, plan, roofline, search, topology
from jaxformer.tools.planning.compile import trace
from jaxformer.tools.planning.hlo import Exchange
from jaxformer.training.experiment import Experiment
from jaxformer.training.optimizers import AdamW, Lion

V5E = cost.CHIPS["TPU v5 lite"]
LLAMA = plan.of_preset("llama_7b", presets.llama_7b)

PLANNED = """
import json, sys
from dataclasses import asdict, replace
from jaxformer.tools.planning import topology

topology.prepare()
from jaxformer.tools.planning import plan
from jaxformer.tools.planning.compile import trace
from jaxformer.models import presets
from jaxformer.parallel import Mesh

model = replace(
    presets.gpt2_small, num_layers=2, d_model=512, num_heads=4, vocab_size=1024, context_length=256
)
experiment = replace(plan.of_preset("small", model), batch_size=16)
for name in sys.argv[1:]:
    devices = topology.devices(name)
    sized = replace(experiment, mesh=Mesh(data=1, fsdp=len(devices) // 2, tensor=2))
    made = asdict(plan.plan(sized, name, devices, fast=True))
    traced = trace(sized, devices)
    print(
        json.dumps(
            made | {"by_hand": traced.argument_bytes, "splash": "splash" in str(traced.stage.jaxpr)}
        )
    )
"""


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install 'jaxformer[tpu]'"
)
def test_small_models_are_planned_for_every_generation():
    """Arguments as large as by hand, the new state in place of the old, and the exchanges of FSDP
    and tensor splits."""
    names = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
    run = subprocess.run([sys.executable, "-c", PLANNED, *names], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    made = [json.loads(line) for line in run.stdout.splitlines()]
    assert [one["topology"] for one in made] == names
    for one in made:
        assert (
            one["fits"]
            and one["donated"]
            and not any("made whole" in note for note in one["notes"])
        )
        # vectors are padded to tiles of at most 4 KiB; there are 3 copies of some 20 leaves
        assert one["by_hand"] <= one["argument_bytes"] <= 1.01 * one["by_hand"] + 60 * 2**12
        kinds = {(found["kind"], axis) for found in one["collectives"] for axis in found["axes"]}
        assert ("all-gather", "fsdp") in kinds and any(axis == "tensor" for _, axis in kinds)
        assert one["flops"] > one["model_flops"] and one["moved_bytes"] > one["argument_bytes"]
        assert one["splash"]  # the kernel of a real run


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install 'jaxformer[tpu]'"
)
def test_what_does_not_fit_is_an_answer():
    small = [
        "--model.num-layers=2",
        "--batch-size=256",
        "--model.attention-implementation=reference",
    ]
    command = [
        sys.executable,
        "-m",
        "jaxformer",
        "plan",
        "preset:llama_7b",
        "--topology",
        "v5e:1x1",
        "--fast",
        "--json",
    ]
    run = subprocess.run([*command, *small], capture_output=True, text=True)
    assert run.returncode == 3, run.stderr
    made = json.loads(run.stdout)
    assert (
        not made["fits"]
        and made["peak_bytes"] > made["capacity_bytes"]
        and len(made["largest"]) >= 3
    )
    # of what does not run, no speed is known; and the compiler's report, which it writes three
    # times, is read once
    assert (
        made["tokens_per_second"] is made["step_seconds"] is None
        and made["seconds"] == made["mfu"] == {}
    )
    rows = [(row["bytes"], row["shape"]) for row in made["largest"]]
    assert len(set(rows)) == len(rows)


def ring_seconds(kind, axes, mesh, chip, size=10**9, overlapped=False):
    """What an exchange over these axes of a mesh takes."""
    places = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    along = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    waits, beside = roofline.network(
        [Exchange(kind, tuple(places[along].ravel()), overlapped, 1, size)], mesh, chip
    )
    assert not (waits if overlapped else beside)
    return beside if overlapped else waits


def test_rings_take_what_rings_take():
    """(n - 1) / n of an array to gather it, twice that to sum it, over both directions of one link
    of four: 100 GB/s."""
    mesh = make_mesh(Mesh(data=2, fsdp=4))
    size, way = 10**9, 400e9 / 4 / 2  # an open line has half of a ring
    seconds = lambda kind, *axes, **how: ring_seconds(kind, axes, mesh, V5E, **how)
    assert seconds("all-gather", "fsdp", overlapped=True) == {
        "fsdp": pytest.approx(3 / 4 * size / way)
    }
    assert seconds("all-reduce", "fsdp") == {"fsdp": pytest.approx(2 * 3 / 4 * size / way)}
    assert seconds("reduce-scatter", "fsdp") == {"fsdp": pytest.approx(3 * size / way)}
    assert seconds("all-gather", "data", "fsdp") == {"data*fsdp": pytest.approx(7 / 8 * size / way)}
    unknown = roofline.network([Exchange("send", (), True, 1, size)], mesh, V5E)
    assert unknown == ({}, {"outside others": pytest.approx(size / V5E.outside)})


class Device:
    """A device of a torus or of a host of GPUs, as far as a roofline looks at it."""

    def __init__(self, platform, coords=None, process=0, part=0):
        self.platform, self.coords, self.process_index, self.slice_index = (
            platform,
            coords,
            process,
            part,
        )


class Grid:
    """A mesh of such devices."""

    def __init__(self, rows):
        self.devices, self.axis_names = np.array(rows), ("data", "fsdp")
        self.shape = dict(zip(self.axis_names, self.devices.shape, strict=True))


def test_a_whole_torus_dimension_is_a_ring_and_slices_and_hosts_have_their_own_network():
    torus = Grid([[Device("tpu", [x, y]) for y in range(16)] for x in range(16)])
    both, one = (
        ring_seconds("all-gather", axes, torus, V5E) for axes in (("data", "fsdp"), ("fsdp",))
    )
    assert one["fsdp"] == pytest.approx(15 / 16 * 1e9 / 100e9) and both[
        "data*fsdp"
    ] == pytest.approx(255 / 256 * 1e9 / 200e9)
    h200 = cost.CHIPS["NVIDIA H200"]
    hosts = Grid([[Device("gpu", process=host) for _ in range(8)] for host in range(4)])
    assert ring_seconds("all-gather", ("fsdp",), hosts, h200) == {
        "fsdp": pytest.approx(7 / 8 * 1e9 / 450e9)
    }
    assert ring_seconds("all-reduce", ("data",), hosts, h200) == {
        "outside data": pytest.approx(2 * 3 / 4 * 1e9 / 50e9)
    }


def test_a_ring_of_an_axis_is_faster_than_the_axis_is_long():
    """fsdp over a torus of 256: a reduce-scatter among every 16th device."""
    mesh = Grid([[Device("tpu", [n // 16, n % 16]) for n in range(256)]])
    waits, _ = roofline.network(
        [Exchange("reduce-scatter", tuple(range(0, 256, 16)), False, 1, 10**9)], mesh, V5E
    )
    assert waits == {"fsdp": pytest.approx(15e9 / 100e9)}


def test_a_diagonal_is_no_two_dimensions_of_a_torus():
    """On a 4 x 4, a column has half of a ring; a diagonal shares its links with other groups."""
    link = 400e9 / 4
    mesh = Grid([[Device("tpu", [n // 4, n % 4]) for n in range(16)]])
    seconds = lambda *group: roofline.network(
        [Exchange("all-gather", group, False, 1, 10**9)], mesh, V5E
    )[0]["fsdp"]
    column = seconds(0, 4, 8, 12)
    assert column == pytest.approx(3 / 4 * 1e9 / (link / 2))
    diagonal = seconds(0, 5, 10, 15)  # three steps of two links, and six links back
    assert diagonal == pytest.approx(3 / 4 * 1e9 / (link * 4 / (2 * 3)))
    assert seconds(0, 7, 8, 15) > column  # every fourth of a snake: more than four links a step


def test_a_step_waits_for_what_nothing_runs_beside():
    step = lambda products, others, waits, overlapped: (
        roofline.Seconds(products, others, waits, overlapped).step
    )
    assert step(3.0, 1.0, {"tensor": 1.0}, {"fsdp": 2.0}) == 5.0
    assert step(3.0, 1.0, {}, {"fsdp": 5.0, "data": 2.0}) == 7.0


@pytest.mark.thorough
def test_utilization_in_both_conventions():
    found = cost.utilization(presets.llama_7b, 2048, 10_000.0, 4, "TPU v5 lite")
    assert found["6N+12LNHT"] == pytest.approx(
        cost.training_flops(presets.llama_7b, 2048) * 10_000 / (4 * 197e12)
    )
    assert found["6N"] < found["6N+12LNHT"]
    with pytest.raises(ConfigError, match="abacus: its peak is not known"):
        cost.utilization(presets.llama_7b, 2048, 1.0, 1, "abacus")


def test_every_chip_says_where_its_figures_come_from():
    assert all(
        chip.source and chip.outside < chip.network < chip.bandwidth < chip.peak
        for chip in cost.CHIPS.values()
    )
    assert all(gpu.kind in cost.CHIPS for gpu in topology.GPUS.values())


@pytest.mark.thorough
def test_the_estimate_knows_what_saves_memory():
    """12 bytes a parameter for the state of AdamW, split over fsdp; each change of the list takes
    less than before."""
    base = replace(
        LLAMA, batch_size=64, mesh=Mesh(data=2, fsdp=8), model=replace(LLAMA.model, remat="none")
    )
    size = lambda experiment: search.estimate(experiment, 16, V5E).bytes
    state = 16 * 6.74e9 / 8  # with gradients
    assert (
        state
        < size(replace(base, model=replace(base.model, remat="full"), batch_size=16))
        < 1.4 * state
    )
    for other in (
        replace(base, model=replace(base.model, remat="full")),
        replace(base, mesh=Mesh(data=1, fsdp=16)),
    ):
        assert size(other) < size(base)
    with pytest.raises(ConfigError, match="does not divide"):
        search.estimate(
            replace(base, mesh=Mesh(data=1, fsdp=1, tensor=16), model=presets.gpt2_small), 16, V5E
        )


@pytest.mark.thorough
def test_candidates_make_up_the_devices():
    found = list(search.candidates(LLAMA, 16))
    assert len({(one.mesh, one.batch_size, one.model.remat) for one in found}) == len(found) > 100
    for one in found:
        rows = one.mesh.data * one.mesh.fsdp * one.mesh.expert
        assert rows * one.mesh.tensor == 16 and one.batch_size % rows == 0
    one = replace(found[0], mesh=replace(LLAMA.mesh, fsdp=8, tensor=2), batch_size=32)
    assert (
        search.options(one, LLAMA)
        == "--mesh.fsdp=8 --mesh.tensor=2 --batch-size=32 --model.remat=none"
    )


def test_the_command_of_the_fastest_candidate_has_the_options_of_the_search():
    typed = ["--seed=3", "--model.masks", "causal() & window(255)", "--mesh.fsdp=4"]
    base = config.override(LLAMA, typed, NAMES)
    best = replace(base, mesh=replace(base.mesh, fsdp=8, tensor=2), batch_size=32)
    made = SimpleNamespace(
        fits=True,
        seconds={"products": 1.0},
        tokens_per_second=1.0,
        mfu={"6N+12LNHT": 0.5},
        peak_bytes=0,
    )
    command = shlex.split(
        search.table([(best, made)], base, "my own.py", "v5e:4x4", typed).splitlines()[-1]
    )
    assert command[:4] == ["make", "plan", "EXP=my own.py", "TOPOLOGY=v5e:4x4"]
    assert config.override(LLAMA, shlex.split(command[4].removeprefix("ARGS=")), NAMES) == best


def test_show_sharding_lists_every_parameter(capsys):
    assert (
        cli.main(
            [
                "show",
                "llama2_70b",
                "--sharding",
                "--devices",
                "512",
                "--mesh.fsdp=128",
                "--mesh.tensor=4",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "layers/feedforward/up/kernel" in out
        and "146,800,640" in out.split("feedforward/up")[1].splitlines()[0]
    )
    assert "80x8192x28672   - fsdp tensor" in out
    assert (
        cli.main(["show", "llama_7b", "--sharding"]) == 2
        and "give --devices" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["t5_small", "--topology", "v5e:2x2"], "t5_small: plans train language models"),
        (["gpt2_small"], "plan: give --topology"),
        (["gpt2_small", "--topology", "h200:8"], "expected slices x hosts x GPUs"),
        (["gpt2_small", "--topology", "h100:0x8"], "expected slices x hosts x GPUs"),
        (
            ["gpt2_small", "--topology", "v3:2x2"],
            "no chip 'v3' that can be planned for; expected v4, v5e",
        ),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_line(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(topology, "prepare", lambda: None)
    assert cli.main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_the_compilers_log_is_heard(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_LOG_DIR", str(tmp_path))
    (tmp_path / "tpu_driver.WARNING").write_text("old [spmd] Involuntary full rematerialization.\n")
    with topology.listening() as log:
        with (tmp_path / "tpu_driver.WARNING").open("a") as file:
            file.write("[spmd] Involuntary full rematerialization. The compiler ...\n")
        print("Involuntary full rematerialization", file=sys.__stderr__, flush=True)
    assert log.resharded == 1 + ("Involuntary" in log.text.split("[spmd]")[0])
    assert "old" not in log.text


@pytest.mark.thorough
def test_an_estimate_is_a_plan_for_devices_that_are_here():
    """The same code on this process's own devices: state in place, memory as the compiler has it, a
    name for each sum."""
    small = replace(
        presets.gpt2_small,
        num_layers=2,
        d_model=64,
        num_heads=2,
        vocab_size=256,
        context_length=32,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    experiment = replace(plan.of_preset("small", small), batch_size=16, mesh=Mesh(data=2, fsdp=4))
    traced = trace(experiment, jax.devices())
    with jax.sharding.use_abstract_mesh(traced.mesh.abstract_mesh):
        memory = traced.stage.lower().compile().memory_analysis()
    assert memory.argument_size_in_bytes == traced.argument_bytes
    with pytest.raises(ConfigError, match="does not divide"):
        trace(replace(experiment, batch_size=12), jax.devices())


class Images:
    """Examples of images, as a user's own data set has them."""

    def open(self, model):
        return Dataset(self, self, digest="images")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"images": np.zeros((8, 8, 3)), "labels": np.int64(index), "weights": np.float32(1)}


STACK = models.ModelConfig(16, 2, 32, 2, 8)
PICTURES = replace(
    STACK,
    vocab_size=0,
    context_length=5,
    embedding=models.Patches((8, 8), (4, 4)),
    masks=(masks.full(),),
    heads=(models.Classification(4),),
    positions=models.Learned(),
)
PAIR = models.EncoderDecoder(
    replace(STACK, vocab_size=17, masks=(masks.full(),), heads=()), replace(STACK, vocab_size=17)
)


CAPTIONS = replace(PAIR, encoder=replace(PICTURES, heads=()), share_embeddings=False)
TOKENS = dict.fromkeys(("tokens", "labels", "weights"), (16, 8))
SHAPES = [
    (Images(), PICTURES, {"images": (16, 8, 8, 3), "labels": (16,), "weights": (16,)}),
    (Reverse(form="pair"), PAIR, TOKENS | {"source": (16, 8)}),
    (Text("data/nowhere.txt"), STACK, TOKENS),
    (Text("data/nowhere.txt"), PAIR, TOKENS | {"source": (16, 8)}),
    (
        Text("data/nowhere.txt"),
        PICTURES,
        {"images": (16, 8, 8, 3), "labels": (16,), "weights": (16,)},
    ),
    (
        Text("data/nowhere.txt"),
        replace(PAIR, encoder=replace(PICTURES, heads=()), share_embeddings=False),
        TOKENS | {"source": (16, 8, 8, 3)},
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("data", "model", "shapes"), SHAPES)
def test_a_plans_batch_is_that_of_the_data(data, model, shapes):
    """Images and pairs, too; where the data are not on this machine, as large as the model
    reads."""
    objective = ClassCrossEntropy() if model is PICTURES else TokenCrossEntropy()
    experiment = Experiment(
        "any", model, data, objective=objective, batch_size=16, mesh=Mesh(data=2, fsdp=4)
    )
    traced = trace(experiment, jax.devices())
    assert {name: leaf.shape for name, leaf in traced.batch.items()} == shapes
    assert {leaf.dtype.itemsize for leaf in traced.batch.values()} == {4}
    assert len(traced.notes) == isinstance(data, Text) and all(
        "cannot be opened" in note for note in traced.notes
    )
    with jax.sharding.use_abstract_mesh(traced.mesh.abstract_mesh):
        memory = traced.stage.lower().compile().memory_analysis()
    assert memory.argument_size_in_bytes == traced.argument_bytes


def test_only_the_librarys_models_have_plans():
    own = type("Own", (), {"spec": lambda self: {}, "apply": lambda self, params, x: x})()
    with pytest.raises(
        ConfigError, match="plan: model=Own: expected a ModelConfig or an EncoderDecoder"
    ):
        trace(Experiment("own", own, Images()), jax.devices())
    with pytest.raises(ConfigError, match="plan --search: model=EncoderDecoder"):
        search.search(Experiment("pairs", PAIR, Reverse(form="pair")), "v5e:2x2", jax.devices())


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        (AdamW(), 2),
        (Lion(), 1),
        (lambda spec: optax.sgd(1.0), 0),
        (lambda spec: optax.chain(optax.trace(0.9), optax.scale(-1)), 1),
        (lambda spec: optax.scale_by_adam(mu_dtype="bfloat16"), 1.5),
    ],
)
def test_an_optimizers_state_is_counted_and_not_guessed_by_its_name(optimizer, numbers):
    """Bytes of state for each byte of float32 parameters."""
    assert search._moments(optimizer, STACK, None) == pytest.approx(numbers, rel=1e-3)
    assert search._moments(optimizer, STACK, "layers") < 0.8 * numbers or not numbers


@pytest.mark.parametrize("bad", [0, -1])
def test_counts_that_are_none_are_refused(bad):
    """Before a device is asked for anything."""
    experiment, devices = (
        plan.of_preset("any", presets.gpt2_small),
        [SimpleNamespace(device_kind="TPU v5 lite")],
    )
    calls = {
        "count": lambda: search.search(experiment, "any", devices, count=bad),
        "most": lambda: search.search(experiment, "any", devices, most=bad),
        "rows": lambda: decode.plan_decode(experiment, "any", devices, rows=bad),
        "length": lambda: decode.plan_decode(experiment, "any", devices, length=bad),
        "length=64: capacity": lambda: decode.plan_decode(
            experiment, "any", devices, length=64, capacity=bad
        ),
        "devices": lambda: plan.sharding_table(experiment, bad),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"{name}={bad}: expected a whole number"):
            call()
