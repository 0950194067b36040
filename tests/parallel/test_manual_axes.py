"""Functions taken out into a researcher's own `jax.shard_map`: a device's part of x, with weights
that are whole on all."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import masks
from jaxformer.ops import attention, mixture, mlp


def attend(implementation, x, key, value):
    """Causal attention with one head, whose keys and values are the same for all examples."""
    q, *kv = x[:, :, None], *(jnp.broadcast_to(a, (len(x), *a.shape[1:])) for a in (key, value))
    return attention(q, *kv, mask=masks.causal(), implementation=implementation)[:, :, 0]


FUNCTIONS = dict(
    mlp=(lambda x, up, down: mlp(x, up, down, jax.nn.gelu), [(16, 24), (24, 16)]),
    mixture=(
        lambda x, router, up, down: mixture(x, router, None, up, down, jax.nn.gelu, top_k=2)[0],
        [(16, 4), (4, 16, 24), (4, 24, 16)],
    ),
    reference=(partial(attend, "reference"), [(1, 4, 1, 16)] * 2),
    blockwise=(partial(attend, "blockwise"), [(1, 4, 1, 16)] * 2),
)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_whole_weights_are_summed_over_devices(name, dtype):
    f, shapes = FUNCTIONS[name]
    keys = jax.random.split(jax.random.key(0), len(shapes) + 2)
    shapes = [(8, 4, 16), (8, 4, 16), *shapes]
    cotangent, *arrays = (
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    mesh = jax.make_mesh(
        (4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,)
    )
    split = jax.shard_map(
        f, mesh=mesh, in_specs=(P("data"), *[P()] * (len(arrays) - 1)), out_specs=P("data")
    )
    gradients = lambda f: jax.jit(lambda: jax.vjp(f, *arrays)[1](cotangent))()
    for found, expected in zip(gradients(split), gradients(f), strict=True):
        # two sums of 32 terms in another order, one inside the other; in bfloat16 each device's
        # part is rounded to 8 bits
        error = jnp.max(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)))
        assert error < (2**-18 if dtype == jnp.float32 else 2**-6) * jnp.max(jnp.abs(expected))
