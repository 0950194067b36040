"""What XLA's CUDA compiler makes of our programs, for a GPU that is not here: counts that a slower
program would change."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="needs pip install 'jaxformer[plan-gpu]'",
    ),
]

PROGRAMS = """
import json, re
from dataclasses import replace
from jaxformer.tools.planning import topology

topology.prepare()
import jax, jax.numpy as jnp
from jaxformer.models import ModelConfig
from jaxformer.ops.mixture import mixture
from jaxformer.parallel import Mesh
from jaxformer.tools.planning import compile, hlo, plan

model = ModelConfig(8192, 4, 512, 8, 512, use_bias=False)
experiment = replace(plan.of_preset("any", model), model=model, batch_size=64)


def step(mesh, name):
    devices = topology.devices(name)
    traced = compile.trace(replace(experiment, mesh=mesh), devices)
    with jax.sharding.use_abstract_mesh(traced.mesh.abstract_mesh):
        program, _ = compile.compile_step(traced.stage.lower(), devices, False)
    text = program.as_text()
    copies = re.findall(r"= f32\\[4,512,2048\\]\\S* copy\\(", text)
    return dict(
        others=hlo.traffic(text).others,
        kept=program.memory_analysis().temp_size_in_bytes,
        copies=len(copies),
        scatters=len(re.findall(r"f32\\[\\d+,\\d+,8192\\]\\S* scatter\\(", text)),
    )


def experts(count):
    loss = lambda *arrays: jnp.sum(mixture(*arrays, jax.nn.silu, top_k=2)[0].astype(jnp.float32))
    place = jax.sharding.NamedSharding(
        jax.sharding.Mesh(topology.devices("h100:1x1"), ("data",)), jax.sharding.PartitionSpec()
    )
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    E, D, F = count, 256, 1024
    weights = [array(jnp.float32, *shape) for shape in ((D, E), (E, D, F), (E, D, F), (E, F, D))]
    program = (
        jax.jit(jax.grad(loss, (1, 2, 3)), out_shardings=place)
        .lower(array(jnp.bfloat16, 4, 2048, D), *weights)
        .compile()
    )
    return program.memory_analysis().temp_size_in_bytes


print(
    json.dumps(
        {
            "one": step(Mesh(data=1), "h100:1x1"),
            "fsdp": step(Mesh(data=1, fsdp=8), "h100:1x8"),
            "data": step(Mesh(data=8), "h100:1x8"),
            "experts": [experts(4), experts(32)],
        }
    )
)
"""


@pytest.fixture(scope="module")
def programs(lines_of):
    (found,) = lines_of(PROGRAMS)
    return found


def test_a_step_writes_no_second_state_and_no_array_of_logits_for_its_labels(programs):
    assert programs["one"]["scatters"] == 0
    # of the parameters and two moments; a conditional copies each twice
    assert programs["one"]["copies"] <= 2


def test_what_a_step_moves_besides_its_products(programs):
    """The update reads and writes 7 arrays of each weight; there are passes over activations and
    logits."""
    parameters, tokens, D, L, V = 16.9e6, 64 * 512, 512, 4, 8192
    bytes_of_a_channel, bytes_of_a_logit = 130, 22
    assert programs["one"]["others"] < 28 * parameters + tokens * (
        bytes_of_a_channel * D * L + bytes_of_a_logit * V
    ), programs


def test_fsdp_keeps_as_much_as_replicas(programs):
    """What activations and norms compute inside is computed again, gathered weights or not."""
    assert programs["fsdp"]["kept"] < 1.1 * programs["data"]["kept"]


def test_experts_of_more_rows_need_little_more_memory(programs):
    """If every row met every expert, eight times as many experts would take seven times the
    memory."""
    few, many = programs["experts"]
    assert many < 2 * few


KERNELS = """
import json
from functools import partial
from jaxformer.tools.planning import topology

topology.prepare()
import jax, jax.numpy as jnp
from jaxformer import masks, ops
from jaxformer.ops.mixture import mixture
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.planning.compile import programs_for


def compiled(mesh, name, function, *arrays):
    mesh = make_mesh(mesh, topology.devices(name))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in arrays]
    gradient = jax.grad(lambda *a: jnp.sum(function(*a).astype(jnp.float32)), range(len(arrays)))
    with programs_for(mesh):
        program = jax.jit(gradient).lower(*arrays).compile()
    kernels = program.as_text().count('custom_call_target="mosaic')
    return dict(kernels=kernels, bytes=program.memory_analysis().temp_size_in_bytes)


def experts(mesh, name, D=1024, F=4096, implementation=None):
    E = 8
    shapes = (16, 1024, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    dtypes = jnp.bfloat16, *[jnp.float32] * 4
    arrays = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
    run = partial(mixture, activation=jax.nn.silu, top_k=2, implementation=implementation)
    return compiled(mesh, name, lambda *a: run(*a)[0], *arrays)


def packed(mesh, name, T=1024, H=64):
    query = jax.ShapeDtypeStruct((8, T, 8, H), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((8, T, 4, H), jnp.bfloat16)

    def attend(query, key, value):
        ids = jnp.broadcast_to(jnp.arange(T) // 100, query.shape[:2])
        return ops.attention(query, key, value, mask=masks.causal() & masks.segments(ids))

    return compiled(mesh, name, attend, query, key, key)


one = Mesh(data=1), "h100:1x1"
eight = "h100:1x8"
found = dict(
    experts=experts(*one),
    copies=experts(*one, implementation="copies"),
    odd_widths=experts(*one, D=1000, F=4100),
    few_rows=experts(*one, D=64, F=192),
    expert_axis=experts(Mesh(data=2, expert=4), eight),
    tensor_axis=experts(Mesh(data=2, tensor=4), eight),
    fsdp=experts(Mesh(data=1, fsdp=8), eight),
    packed=packed(*one),
    packed_fsdp=packed(Mesh(data=1, fsdp=8), eight),
)
print(json.dumps(found))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs pip install 'jaxformer[kernels]'"
)
def test_kernels_of_tokamax_compile_for_a_gpu_that_is_not_here(lines_of):
    """Three products of experts, each with two gradients; attention and its gradients. Copies of
    the matrices of experts would take 1.8 times the memory."""
    (found,) = lines_of(KERNELS)
    kernels = {name: program["kernels"] for name, program in found.items()}
    of_experts = ("experts", "few_rows", "expert_axis", "tensor_axis", "fsdp")
    assert {name: kernels[name] for name in of_experts} == dict.fromkeys(of_experts, 9)
    assert kernels["copies"] == kernels["odd_widths"] == 0
    assert kernels["packed"] >= 2
    assert kernels["packed_fsdp"] >= 2
    assert found["copies"]["bytes"] > 1.6 * found["experts"]["bytes"]
