"""What each kind of parallelism sends in a forward and a backward pass, to the call: a sharding
that is lost shows here."""

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import masks, models, params, sharding
from jaxformer.models import ModelConfig, Sinusoidal, heads
from jaxformer.models.stacks.pipeline import Pipeline
from jaxformer.ops import projected_cross_entropy
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.sharding import shardings
from jaxformer.tools.planning.hlo import collectives

L = 4
CONFIG = ModelConfig(
    64,
    L,
    32,
    4,
    16,
    feedforward="swiglu",
    norm="rms_norm",
    positions=Sinusoidal(),
    use_bias=False,
    tie_embeddings=False,
)
NUMBERS = params.count(models.spec(CONFIG))
KERNELS, NORMS = 7, 2  # of a layer


def loss(config, weights, tokens):
    head = heads.language_model(config)
    hidden = models.encode(config, weights, tokens).hidden
    hidden, kernel, bias = heads.unembedding(
        config, head, weights["heads"][head.name], hidden, None
    )
    sums = projected_cross_entropy(hidden, kernel, tokens, bias=bias)
    return sums.loss / sums.weight


def sent(config, **axes):
    """{(kind, axes): (count, bytes)} of the loss and its gradient."""
    mesh = make_mesh(Mesh(**{"data": 1} | axes), jax.devices()[: math.prod(axes.values())])
    places = shardings(models.spec(config), mesh)
    abstract = params.abstract(models.spec(config))
    weights = jax.tree.map(
        lambda a, p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p), abstract, places
    )
    tokens = jax.ShapeDtypeStruct((16, 16), jnp.int32)
    tokens = jax.ShapeDtypeStruct(
        (16, 16), jnp.int32, sharding=sharding.batch_sharding(mesh, {"tokens": tokens})["tokens"]
    )
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(partial(loss, config)), out_shardings=(None, places))
        found = collectives(step.lower(weights, tokens).compile().as_text(), mesh)
    return {(one.kind, one.axes): (one.count, one.bytes) for one in found}


@pytest.mark.thorough
def test_data_sums_every_gradient_once():
    # and two sums of the loss
    assert sent(CONFIG, data=4) == {("all-reduce", ("data",)): (6, 4 * NUMBERS + 8)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "remat, again",
    [("none", KERNELS), pytest.param("full", KERNELS + NORMS, marks=pytest.mark.slow)],
)
def test_fsdp_gathers_each_weight_once_a_pass_and_scatters_each_gradient_once(remat, again):
    found, V, D, tokens = sent(replace(CONFIG, remat=remat), fsdp=4), 64, 32, 16 * 16
    outside = 2 + 2  # tokens and head; the last norm's scale, which both passes need
    assert found.pop(("all-gather", ("fsdp",)))[0] == L * (KERNELS + NORMS + again) + outside
    norms = (L * NORMS + 1) * D
    # all but the embedding's table, whose columns are looked up
    scattered = 4 * (NUMBERS - V * D - norms) // 4
    assert found.pop(("reduce-scatter", ("fsdp",))) == (L * KERNELS + 1, scattered)
    assert found.pop(("all-to-all", ("fsdp",))) == (2, 2 * 4 * tokens // 4 * D)
    assert found.pop(("all-reduce", ("fsdp",)))[1] == 4 * norms + 8
    assert not found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "remat, again", [("none", 0), pytest.param("full", 1, marks=pytest.mark.slow)]
)
def test_tensor_sums_twice_a_block_and_pass(remat, again):
    """After attention and after the feed-forward; in the backward pass of what goes into them.
    Nothing else, but for the embedding, and the loss: a maximum, a sum, and the label's logit with
    the gradient of hidden. No logits travel."""
    found = sent(replace(CONFIG, remat=remat), tensor=4)
    assert {key: count for key, (count, _) in found.items()} == {
        ("all-reduce", ("tensor",)): L * (2 + 2 + again) + 1 + 3
    }


@pytest.mark.thorough
def test_a_ring_of_four_turns_three_times():
    """Keys and values as one; on the way back they turn again, their gradients with them, which go
    home at the end."""
    found = sent(replace(CONFIG, masks=(masks.full(),)), context=4)
    assert found.pop(("collective-permute", ("context",)))[0] == L * (3 + 3 + 3 + 1)
    assert found == {("all-reduce", ("context",)): (6, 4 * NUMBERS + 8)}


@pytest.mark.slow
def test_stages_hand_on_once_a_tick():
    found = sent(replace(CONFIG, stack=Pipeline()), stage=4)
    ticks, entering = 4 + 3, 3
    assert found.pop(("collective-permute", ("stage",)))[0] == 2 * (ticks + 2 * entering)
    # embedding, head and last norm, of which every stage has a part of the batch
    outside = 2 * 64 * 32 + 32
    assert found == {("all-reduce", ("stage",)): (2, 4 * outside + 8)}


COMPILED = """
import json, sys
from dataclasses import replace
from jaxformer.tools.planning import topology

topology.prepare()
from jaxformer.tools.planning import plan
from jaxformer.models import presets
from jaxformer.parallel import Mesh

model = replace(
    presets.llama_7b,
    num_layers=4,
    d_model=512,
    num_heads=4,
    d_ff=1024,
    vocab_size=1024,
    context_length=256,
)
experiment = replace(plan.of_preset("small", model), batch_size=16)
for axes in json.loads(sys.argv[1]):
    sized = replace(experiment, mesh=Mesh(**{"data": 1} | axes))
    made = plan.plan(sized, "v5e:2x4", topology.devices("v5e:2x4"), fast=True)
    print(json.dumps([[one["kind"], one["axes"], one["bytes"]] for one in made.collectives]))
"""


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install 'jaxformer[tpu]'"
)
def test_tpu_programs_scatter_what_they_sum():
    """The real step, to the byte: every kernel's gradient is scattered as it is summed, weights
    travel in bfloat16."""
    meshes = [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}]
    run = subprocess.run(
        [sys.executable, "-c", COMPILED, json.dumps(meshes)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    # numbers in products of layers; in embedding and head
    kernels, table = (
        4 * (4 * 512**2 + 3 * 512 * 1024),
        1024 * 512,
    )
    little = 2**16  # norms, sums of the loss
    for mesh, line in zip(meshes, run.stdout.splitlines(), strict=True):
        found = {(kind, tuple(axes)): size for kind, axes, size in json.loads(line)}
        parts = mesh["fsdp"] * mesh.get("tensor", 1)
        summed = 4 * kernels / parts, 4 * (kernels + table) / parts
        assert summed[0] <= found["reduce-scatter", ("fsdp",)] <= summed[1] + little
        assert found.get(("all-reduce", ("fsdp",)), 0) < little
        # bfloat16, twice; the head once; of the embedding no weights, but rows of tokens
        gathered = (2 * 2 * kernels + 2 * table) / mesh.get("tensor", 1)
        assert gathered <= found["all-gather", ("fsdp",)] <= gathered + little
        if "data" in mesh:
            # the embedding's gradient is that of whole columns
            assert (
                found["all-reduce", ("data",)]
                == found["reduce-scatter", ("fsdp",)] + 4 * table / mesh["fsdp"]
            )


def scattered(values, groups):
    """`psum_scatter` of what each device has, [devices, n], among each of the groups."""
    found = np.empty((len(values), values.shape[1] // len(groups[0])))
    for group in groups:
        for place, part in zip(group, np.split(values[group].sum(axis=0), len(group)), strict=True):
            found[place] = part
    return found


@pytest.mark.parametrize("size", [2, 8, 16, 24, 32, 48, 64, 256])
def test_sums_along_rings_leave_each_device_its_part(size):
    values = np.random.default_rng(size).normal(size=(size, 2 * size))
    found = values
    for groups in sharding.rings(size):
        found = scattered(found, groups or [list(range(size))])
    np.testing.assert_allclose(found, values.sum(axis=0).reshape(size, 2), rtol=1e-12)


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("axes", [("fsdp",), ("fsdp", "expert"), ("data", "fsdp")])
def test_any_dimension_is_scattered_over_any_axes(axes, dimension, monkeypatch):
    """With rings of 4 and 2 in place of 16 and 16."""
    devices = np.arange(8).reshape(4, 2)
    monkeypatch.setattr(
        sharding,
        "rings",
        lambda size: (devices.T.tolist(), devices.tolist()) if size == 8 else (None,),
    )
    sizes = (8,) if len(axes) == 1 else (4, 2)
    mesh = jax.make_mesh(sizes, axes, (jax.sharding.AxisType.Auto,) * len(axes))
    values = np.random.default_rng(0).normal(size=(8, 16, 16, 16)).astype(np.float32)
    run = jax.shard_map(
        lambda a: sharding.reduce_scatter(a[0], axes, dimension),
        mesh=mesh,
        in_specs=P(axes),
        out_specs=P(*[None] * dimension, axes),
    )
    placed = jax.device_put(values, jax.NamedSharding(mesh, P(axes)))
    np.testing.assert_allclose(jax.jit(run)(placed), values.sum(axis=0), rtol=1e-4, atol=1e-5)
