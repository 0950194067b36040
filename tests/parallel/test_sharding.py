"""Meshes, rules, and models on them: on 8 simulated devices every mesh gives what one device gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer import masks, models, ops, params
from jaxformer.config import ConfigError
from jaxformer.models import EncoderDecoder, ModelConfig, Relative
from jaxformer.parallel import Mesh, constrain, describe, make_mesh, partition, shardings

GPT = ModelConfig(vocab_size=64, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, context_length=16, init_std=0.2)
PAIR = EncoderDecoder(
    ModelConfig(64, 2, 32, 4, 16, positions=Relative(8, 16), masks=(masks.full(),), heads=(), init_std=0.2),
    ModelConfig(64, 1, 32, 4, 16, positions=Relative(8, 16, False), init_std=0.2),
)
TOKENS = jax.random.randint(jax.random.key(1), (8, 16), 0, 64)
MESHES = {
    "data": Mesh(),
    "fsdp": Mesh(fsdp=8),
    "tensor": Mesh(tensor=2),
    "context": Mesh(context=2),
    "data, fsdp, tensor": Mesh(data=2, fsdp=2, tensor=2),
    "data, context, tensor": Mesh(context=2, tensor=2),
}


def loss(config, weights, tokens):
    source = {"source": tokens[:, ::-1]} if isinstance(config, EncoderDecoder) else {}
    logits = models.apply(config, weights, tokens, **source).logits
    sums = ops.cross_entropy(logits[:, :-1], tokens[:, 1:])
    return sums.loss / sums.weight


@pytest.fixture(scope="module", params=[GPT, pytest.param(PAIR, marks=pytest.mark.slow)], ids=["decoder", "pair"])
def model(request):
    config = request.param
    weights = jax.jit(partial(models.init, config))(jax.random.key(0))
    return config, weights, jax.jit(jax.value_and_grad(partial(loss, config)))(weights, TOKENS)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_loss_and_gradient_of_one_device(name, model):
    config, weights, (one, gradient) = model
    mesh = make_mesh(MESHES[name])
    places = shardings(models.spec(config), mesh)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(("data", "fsdp", "expert"))))
        step = jax.jit(jax.value_and_grad(partial(loss, config)), out_shardings=(None, places))
        many, split = step(jax.device_put(weights, places), tokens)
    # float32 sums in another order: 1e-7 relative, a few layers deep
    np.testing.assert_allclose(many, one, rtol=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))  # a key bias has none of its own
    for path, leaf in params.paths(gradient).items():
        np.testing.assert_allclose(params.paths(split)[path], leaf, rtol=1e-5, atol=1e-6 * largest, err_msg=path)


def test_axes_go_by_one_table():
    mesh = make_mesh(Mesh(fsdp=2, tensor=2))
    found = params.paths(partition(models.spec(GPT), mesh))
    assert found["layers/attention/query/kernel"] == P(None, "fsdp", "tensor", None)
    assert found["layers/attention/out/kernel"] == P(None, "tensor", None, "fsdp")
    assert found["embedding/tokens"] == P("tensor", "fsdp")
    assert found["final_norm/scale"] == P("fsdp")


@pytest.mark.parametrize(
    "mesh, said",
    [
        (dict(tensor=4), "kv_heads=2 does not divide among mesh.tensor=4; sizes that do: 4"),
        (dict(fsdp=3), "do not make up 8"),
        (dict(data=4), "do not make up 8"),
        (dict(slices=3), "mesh.slices=3 does not divide mesh.data=8"),
        (dict(data=-1, fsdp=-1), "one of them may be -1"),
    ],
)
def test_what_does_not_divide_is_refused_in_words(mesh, said):
    with pytest.raises(ConfigError, match=said):
        partition(models.spec(GPT), make_mesh(Mesh(**mesh)))


def test_two_axes_of_a_leaf_cannot_share_devices():
    leaf = {"kernel": params.Spec((8, 8), ("embed", "mlp"), lambda *_: None)}
    with pytest.raises(ConfigError, match="its axes embed and mlp would both be split over"):
        partition(leaf, make_mesh(Mesh(fsdp=2)), {"embed": ("fsdp",), "mlp": ("fsdp",)})


def test_the_table_has_every_parameter_and_its_bytes_on_a_device():
    printed = describe(models.spec(GPT), make_mesh(Mesh(fsdp=4, tensor=2)))
    assert all(path in printed for path in params.paths(models.spec(GPT)))
    whole = describe(models.spec(GPT), make_mesh(Mesh()))
    total = lambda text: int(text.splitlines()[-1].split()[-1].replace(",", ""))
    assert total(whole) == 4 * params.count(models.spec(GPT)) and total(printed) < total(whole) / 4


def test_without_a_mesh_a_constraint_is_nothing():
    x = jnp.ones((2, 3))
    assert constrain(x, "batch", "length") is x
