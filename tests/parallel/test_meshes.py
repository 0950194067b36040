"""Every mesh gives what one device gives: all axes alone, all pairs, all triples, for five kinds of
model, both axis types."""

import itertools
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, ops, params
from jaxformer.models import (
    Classification,
    Embedding,
    EncoderDecoder,
    LanguageModel,
    Mixture,
    ModelConfig,
    Patches,
    Relative,
    Sinusoidal,
    blocks,
)
from jaxformer.models.stacks.pipeline import Pipeline
from jaxformer.parallel import AXES, Mesh, block_if_simulated, make_mesh
from jaxformer.sharding import batch_sharding, shardings

B, T, V = 16, 16, 64
DECODER = ModelConfig(
    V, 4, 32, 8, T, num_kv_heads=4, feedforward="swiglu", norm="rms_norm", init_std=0.2
)
ENCODER = replace(
    DECODER,
    num_kv_heads=None,
    masks=(masks.full(),),
    norm="layer_norm",
    block=blocks.post_norm,
    feedforward="gelu",
    embedding=Embedding(token_types=2, norm=True),
    heads=(LanguageModel(transform="gelu"),),
)
PAIR = EncoderDecoder(
    replace(ENCODER, positions=Relative(8, 16), block=None, embedding=Embedding(), heads=()),
    replace(DECODER, positions=Relative(8, 16, False), num_kv_heads=None),
)
VIT = replace(
    ENCODER,
    embedding=Patches((8, 8), (2, 2), class_token=False),
    block=None,
    positions=Sinusoidal(),
    heads=(Classification(classes=8),),
)
EXPERTS = replace(DECODER, feedforward=Mixture(experts=8, balance_loss=0.01, router_z_loss=0.001))
MODELS = {"decoder": DECODER, "encoder": ENCODER, "pair": PAIR, "vit": VIT, "experts": EXPERTS}

ALONE = {"data": 8, "fsdp": 8, "tensor": 4, "context": 4, "expert": 8, "stage": 4}
MESHES = [{axis: size} for axis, size in ALONE.items()]
MESHES += [
    dict.fromkeys(axes, 2) for count in (2, 3) for axes in itertools.combinations(AXES, count)
]
QUICK = {  # some of each kind are in every run of the tests; a pipeline is in test_pipeline.py
    ("decoder", "fsdp8", "auto"),
    ("decoder", "tensor4", "explicit"),
    ("decoder", "fsdp2 tensor2 context2", "auto"),
    ("experts", "fsdp2 tensor2 expert2", "explicit"),
}


def cases():
    for name, mesh, kind in itertools.product(MODELS, MESHES, ("auto", "explicit")):
        case = name, " ".join(f"{axis}{size}" for axis, size in mesh.items()), kind
        yield pytest.param(
            name, mesh, kind, id=", ".join(case), marks=() if case in QUICK else pytest.mark.slow
        )


def batch_of(name):
    tokens = jax.random.randint(jax.random.key(1), (B, T), 1, V)
    if name == "vit":
        images = jax.random.normal(jax.random.key(2), (B, 8, 8, 3))
        return {"tokens": images, "labels": tokens[:, 0] % 8}
    batch = {"tokens": tokens, "labels": jnp.roll(tokens, -1, 1)}
    if name == "encoder":  # padded on the right, by different amounts
        batch["segment_ids"] = (jnp.arange(T)[None] < 8 + jnp.arange(B)[:, None] % 9).astype(
            jnp.int32
        )
    return batch | ({"source": tokens[:, ::-1]} if name == "pair" else {})


def loss(config, weights, batch):
    batch = dict(batch)
    tokens, labels = batch.pop("tokens"), batch.pop("labels")
    output = models.apply(config, weights, tokens, **batch)
    logits = output.logits
    logits, labels = (logits[:, None], labels[:, None]) if logits.ndim == 2 else (logits, labels)
    seen = None if "segment_ids" not in batch else batch["segment_ids"].astype(jnp.float32)
    sums = ops.cross_entropy(logits, labels, seen)
    return sums.loss / sums.weight + (0 if output.loss is None else output.loss)


@lru_cache
def on_one_device(name, staged):
    """Weights, loss and gradient. A balance loss of micro-batches is not that of the batch:
    pipelines go without."""
    config = MODELS[name]
    if staged and name == "experts":
        config = replace(config, feedforward=Mixture(experts=8))
    weights = jax.jit(partial(models.init, config))(jax.random.key(0))
    return (
        config,
        jax.device_get(weights),
        jax.device_get(jax.jit(jax.value_and_grad(partial(loss, config)))(weights, batch_of(name))),
    )


def pipelined(config):
    if isinstance(config, EncoderDecoder):
        return replace(config, encoder=pipelined(config.encoder), decoder=pipelined(config.decoder))
    return replace(config, stack=Pipeline())


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name, axes, kind", list(cases()))
def test_a_mesh_gives_the_loss_and_gradient_of_one_device(name, axes, kind):
    config, weights, (one, gradient) = on_one_device(name, "stage" in axes)
    config = pipelined(config) if "stage" in axes else config
    mesh = make_mesh(
        Mesh(**{"data": 1} | axes, explicit=kind == "explicit"),
        jax.devices()[: int(np.prod(list(axes.values())))],
    )
    places = shardings(models.spec(config), mesh)
    batch = batch_of(name)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(partial(loss, config)), out_shardings=(None, places))
        many, split = block_if_simulated(
            step(
                jax.device_put(weights, places), jax.device_put(batch, batch_sharding(mesh, batch))
            )
        )
    # float32 sums in another order: some 1e-7 relative, a few layers deep
    np.testing.assert_allclose(many, one, rtol=1e-6)
    # a key bias has no gradient of its own
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    for path, leaf in params.paths(gradient).items():
        np.testing.assert_allclose(
            params.paths(split)[path], leaf, rtol=1e-5, atol=2e-6 * largest, err_msg=path
        )
