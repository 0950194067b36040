"""Single functions under Explicit axes: values and gradients of one device, results split as their
arguments are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxformer import masks, models, ops
from jaxformer.ops.positions import Rope
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh

ROWS, HEADS = P("data", "context"), P("data", "context", "tensor")
SHAPES = {  # name: (shape, how it is split)
    "x": ((4, 16, 32), ROWS),
    "query": ((4, 16, 4, 8), HEADS),
    "key": ((4, 16, 2, 8), HEADS),
    "value": ((4, 16, 2, 8), HEADS),
    "scale": ((32,), P()),
    "up": ((32, 64), P(None, "tensor")),
    "gate": ((32, 64), P(None, "tensor")),
    "down": ((64, 32), P("tensor")),
    "head": ((64, 32), P("tensor")),
    "router": ((32, 4), P()),
    "experts": ((4, 32, 8), P(None, None, "tensor")),
    "back": ((4, 8, 32), P(None, "tensor")),
}
LABELS = jax.random.randint(jax.random.key(9), (4, 16), 0, 32)
CAUSAL = masks.causal()


def attention(implementation, mask=CAUSAL):
    return lambda query, key, value: ops.attention(
        query, key, value, mask=mask, implementation=implementation
    )


FUNCTIONS = {
    "attention, reference": (attention("reference"), HEADS),
    "attention, blockwise": (attention("blockwise", CAUSAL & masks.segments(LABELS // 16)), HEADS),
    "attention, ring": (attention("ring"), HEADS),
    "layer_norm": (lambda x, scale: ops.layer_norm(x, scale), ROWS),
    "rms_norm": (lambda x, scale: ops.rms_norm(x, scale), ROWS),
    "mlp": (lambda x, up, down: ops.mlp(x, up, down, jax.nn.gelu), ROWS),
    "glu": (lambda x, gate, up, down: ops.glu(x, gate, up, down, jax.nn.silu), ROWS),
    "rope": (lambda query: ops.rope(query, jnp.arange(16)[None], Rope()), HEADS),
    "einsum in bfloat16": (
        lambda x, up: ops.einsum("btd,df->btf", x.astype(jnp.bfloat16), up),
        HEADS,
    ),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS).loss, P()),
    "projected_cross_entropy": (
        lambda x, head: ops.projected_cross_entropy(x, head, LABELS).loss,
        P(),
    ),
    "mixture": (
        lambda x, router, experts, back: ops.mixture(
            x, router, None, experts, back, jax.nn.silu, top_k=2
        )[0],
        ROWS,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_alone_is_valid_under_explicit_axes(name):
    function, expected = FUNCTIONS[name]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    keys = jax.random.split(jax.random.key(0), len(names))
    whole = [jax.random.normal(key, SHAPES[name][0]) for key, name in zip(keys, names, strict=True)]
    together = lambda *arrays: (lambda out: (jnp.mean(jnp.square(out.astype(jnp.float32))), out))(
        function(*arrays)
    )
    step = jax.jit(jax.value_and_grad(together, argnums=tuple(range(len(names))), has_aux=True))
    one = jax.device_get(step(*whole))
    mesh = make_mesh(Mesh(data=2, context=2, tensor=2, explicit=True))
    with jax.set_mesh(mesh):
        split = [
            jax.device_put(a, NamedSharding(mesh, SHAPES[name][1]))
            for a, name in zip(whole, names, strict=True)
        ]
        many = block_if_simulated(step(*split))
    assert many[0][1].sharding.is_equivalent_to(NamedSharding(mesh, expected), many[0][1].ndim)
    # 8 bits of mantissa; float32 sums in another order
    tolerance = 2e-2 if "bfloat16" in name else 1e-5
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max()))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_mesh_may_be_somebody_elses(kind):
    """Whose axes have other names: nothing is laid out for it, and nothing breaks on it."""
    config = models.ModelConfig(32, 2, 16, 2, 16, feedforward=models.Mixture(4))
    weights = models.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 32)
    one = jax.device_get(jax.jit(partial(models.apply, config))(weights, tokens).logits)
    mesh = jax.make_mesh((8,), ("mine",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        split = jax.device_put(tokens, NamedSharding(mesh, P("mine")))
        many = block_if_simulated(
            jax.jit(partial(models.apply, config))(
                jax.device_put(weights, NamedSharding(mesh, P())), split
            )
        )
    # float32 sums in another order
    np.testing.assert_allclose(many.logits, one, rtol=1e-5, atol=1e-5)
