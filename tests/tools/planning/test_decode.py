"""Plans of decoding: by the compilers for devices that are not here, where they are installed."""

import importlib.util
from dataclasses import replace

import jax
import pytest

from jaxformer import cli
from jaxformer.errors import ConfigError
from jaxformer.models import Learned, presets
from jaxformer.parallel import Mesh
from jaxformer.tools.planning import decode, plan, topology
from jaxformer.tools.planning.hlo import Exchange

TINY = replace(
    presets.llama2_70b,
    num_layers=2,
    d_model=64,
    num_heads=8,
    num_kv_heads=4,
    d_ff=128,
    vocab_size=128,
)

PLANNED = """
import json, sys
from dataclasses import asdict, replace
from jaxformer.tools.planning import topology

topology.prepare()
from jaxformer.tools.planning import decode, plan
from jaxformer.models import presets
from jaxformer.parallel import Mesh

grouped = replace(
    presets.llama2_70b,
    num_layers=4,
    d_model=1024,
    num_heads=8,
    num_kv_heads=2,
    d_ff=4096,
    vocab_size=32000,
)
for model in (presets.gpt2_small, grouped):
    experiment = replace(plan.of_preset("any", model), mesh=Mesh(data=1))
    name, rows = sys.argv[1], int(sys.argv[2])
    print(
        json.dumps(
            asdict(
                decode.plan_decode(experiment, name, topology.devices(name)[:1], rows, 576, 1024)
            )
        )
    )
"""


def check(plans: list[dict], kernel: str, most: tuple[float, float]) -> None:
    for one, limit in zip(plans, most, strict=True):
        assert one["fits"] and one["donated"] and one["kernel"] == kernel and not one["collectives"]
        assert 0.9 < one["moved_bytes"] / one["needed_bytes"] <= limit, (
            one["moved_bytes"] / one["needed_bytes"]
        )


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install 'jaxformer[tpu]'"
)
def test_a_step_on_a_tpu_moves_the_weights_and_the_filled_cache_once(lines_of):
    """GPT-2 small and grouped heads, 576 of 1024 slots filled: no slot is fetched that attention
    leaves out."""
    check(lines_of(PLANNED, "v5e:1x1", "8"), "splash", (1.15, 1.15))


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs pip install 'jaxformer[plan-gpu]'",
)
@pytest.mark.parametrize("rows, most", [(1, (1.4, 1.1)), (8, (1.5, 1.25)), (64, (1.5, 2.1))])
def test_a_step_on_a_gpu_moves_little_more(lines_of, rows, most):
    """640 slots are read for 576, and of few rows all 1,024; partial sums of products are written,
    a group's values cut out."""
    has_cudnn = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    check(lines_of(PLANNED, "h200:1x1x1", str(rows)), "cudnn" if has_cudnn else "blockwise", most)


@pytest.mark.thorough
def test_a_plan_of_decoding_for_devices_that_are_here(monkeypatch):
    """The same code for this process's own devices: what a device holds and what it exchanges."""
    monkeypatch.setitem(decode.cost.CHIPS, "cpu", decode.cost.CHIPS["TPU v5 lite"])
    experiment = replace(plan.of_preset("small", TINY), mesh=Mesh(data=2, tensor=4))
    made = decode.plan_decode(experiment, "here", jax.devices(), rows=4, length=256)
    # keys and values, layers, rows, heads, in bfloat16
    heads = 2 * 2 * (4 // 2) * (4 // 4) * 256 * TINY.head_size * 2
    assert made.cache_bytes == heads + 2 * 4  # and the lengths of two rows
    assert {(one["kind"], one["axes"]) for one in made.collectives} == {
        ("all-reduce", ("data",)),
        ("all-reduce", ("tensor",)),
    }
    assert made.fits and made.donated and made.needed_bytes < made.weight_bytes + made.cache_bytes
    assert "data=2 x tensor=4; 4 rows of 256 tokens" in decode.table(made)


@pytest.mark.thorough
def test_a_plan_of_decoding_has_no_more_tokens_than_the_model_has_positions(monkeypatch):
    monkeypatch.setitem(decode.cost.CHIPS, "cpu", decode.cost.CHIPS["TPU v5 lite"])
    model = replace(TINY, positions=Learned(), context_length=32)
    experiment = replace(plan.of_preset("small", model), mesh=Mesh(data=1))
    assert "8 rows of 32 tokens" in decode.plan_decode(experiment, "here", jax.devices()[:1]).where
    with pytest.raises(ConfigError, match="33 tokens do not fit the model's 32 learned positions"):
        decode.plan_decode(experiment, "here", jax.devices()[:1], length=33)


def test_rows_and_length_are_numbers(capsys, monkeypatch):
    monkeypatch.setattr(topology, "prepare", lambda: None)
    monkeypatch.setattr(topology, "devices", lambda *_: jax.devices())
    assert (
        cli.main(["plan", "gpt2_small", "--topology", "v5e:2x2", "--decode", "--rows", "many"]) == 2
    )
    assert "argument --rows: many: expected a whole number from 1 to " in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("words", [True, False])
def test_an_exchange_beside_the_step_hides_none_that_waits(monkeypatch, words):
    """Over the same axis both kinds count, and the overlapped one takes no time of its own. A
    program may have no text."""
    monkeypatch.setitem(decode.cost.CHIPS, "cpu", decode.cost.CHIPS["TPU v5 lite"])
    found = [
        Exchange("all-reduce", tuple(range(8)), overlapped, 1, 2**20)
        for overlapped in (True, False)
    ]
    monkeypatch.setattr(decode.hlo, "exchanges", lambda text: found)
    if not words:
        monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: None)
    experiment = replace(plan.of_preset("small", TINY), mesh=Mesh(data=8))
    made = decode.plan_decode(experiment, "here", jax.devices(), rows=8, length=64)
    waits, beside = (made.seconds[f"{name} data"] for name in ("waiting for", "beside them"))
    moved = made.moved_bytes / decode.cost.CHIPS["cpu"].bandwidth
    assert waits == beside > 0 and (made.moved_bytes == made.needed_bytes) == (not words)
    assert 8 / made.tokens_per_second == pytest.approx(
        waits + moved
    ) and "beside them data" in decode.table(made)
