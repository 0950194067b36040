"""Meshes, rules, and their refusals."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.sharding import describe, partition_specs, with_logical_constraint

GPT = ModelConfig(
    vocab_size=64,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    context_length=16,
    init_std=0.2,
)


def test_axes_go_by_one_table():
    mesh = make_mesh(Mesh(fsdp=2, tensor=2))
    found = params.paths(partition_specs(models.spec(GPT), mesh))
    assert found["layers/attention/query/kernel"] == P(None, "fsdp", "tensor", None)
    assert found["layers/attention/out/kernel"] == P(None, "tensor", None, "fsdp")
    assert found["embedding/tokens"] == P("tensor", "fsdp")
    assert found["final_norm/scale"] == P("fsdp")


@pytest.mark.parametrize(
    "mesh, said",
    [
        (dict(tensor=4), "kv_heads=2 does not divide among mesh.tensor=4; sizes that do: 4"),
        (dict(fsdp=3), "do not make up 8; let the product divide it"),
        (dict(data=4), "do not make up 8; let the product be 8, or one axis -1"),
        (dict(slices=3), "mesh.slices=3 does not divide mesh.data=8"),
        (dict(data=-1, fsdp=-1), "one of them may be -1"),
    ],
)
def test_what_does_not_divide_is_refused_in_words(mesh, said):
    with pytest.raises(ConfigError, match=said):
        partition_specs(models.spec(GPT), make_mesh(Mesh(**mesh)))


def test_two_axes_of_a_leaf_cannot_share_devices():
    leaf = {"kernel": params.Spec((8, 8), ("embed", "mlp"), lambda *_: None)}
    with pytest.raises(ConfigError, match="its axes embed and mlp would both be split over"):
        partition_specs(leaf, make_mesh(Mesh(fsdp=2)), {"embed": ("fsdp",), "mlp": ("fsdp",)})


def test_the_table_has_every_parameter_and_its_bytes_on_a_device():
    printed = describe(models.spec(GPT), make_mesh(Mesh(fsdp=4, tensor=2)))
    assert all(path in printed for path in params.paths(models.spec(GPT)))
    whole = describe(models.spec(GPT), make_mesh(Mesh()))
    total = lambda text: int(text.splitlines()[-1].split()[-1].replace(",", ""))
    assert total(whole) == 4 * params.count(models.spec(GPT)) and total(printed) < total(whole) / 4


def test_without_a_mesh_a_constraint_is_nothing():
    x = jnp.ones((2, 3))
    assert with_logical_constraint(x, "batch", "length") is x
