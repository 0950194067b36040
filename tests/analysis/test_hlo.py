"""Collectives counted in compiled programs, and the whole of a plan where the TPU compiler is installed."""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.analysis.hlo import Collective, collectives
from jaxformer.parallel import Mesh, make_mesh


def found(body, *shapes):
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P(), check_vma=False)
    text = jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()
    return collectives(text, mesh)


def test_kinds_axes_and_bytes():
    sums = found(lambda x: jax.lax.psum(x, "data"), (8, 8))
    assert sums == [Collective("all-reduce", ("data",), 1, 4 * 4 * 4)]
    (gathered,) = found(lambda x: jax.lax.all_gather(x, ("data", "tensor")), (8, 8))
    assert gathered == Collective("all-gather", ("data", "tensor"), 1, 4 * 4 * 4 * 4)


def test_loops_are_multiplied_out():
    def body(x):
        step = lambda _, y: jnp.sin(jax.lax.psum(y, "tensor"))
        return jax.lax.fori_loop(0, 5, lambda i, y: jax.lax.fori_loop(0, 3, step, y), x)

    (one,) = found(body, (8, 8))
    assert (one.kind, one.axes, one.count) == ("all-reduce", ("tensor",), 15)


@pytest.mark.tpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs pip install 'jax[tpu]'")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_small_model_is_planned(topology):
    small = ["--model.num-layers=2", "--model.d-model=1024", "--model.vocab-size=2048", "--model.context-length=256"]
    small += ["--model.num-heads=8", "--batch-size=16", "--model.attention-implementation=reference"]
    command = [sys.executable, "-m", "jaxformer", "plan", "gpt2_small", "--topology", topology, "--fast", "--json"]
    made = json.loads(subprocess.run([*command, *small], capture_output=True, text=True, check=True).stdout)
    assert made["fits"] and made["donated"] and {"all-gather"} <= {one["kind"] for one in made["collectives"]}
    by_hand = 12 * made["parameters"] / made["devices"]  # float32: parameters and Adam's two moments
    assert by_hand < made["argument_bytes"] < 1.01 * by_hand + 2**16  # the batch; vectors padded to tiles
