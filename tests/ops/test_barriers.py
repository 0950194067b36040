"""What only XLA:CPU needs stays out of the programs of TPUs and GPUs."""

from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jaxformer import masks, ops, zoo

HEADS = jax.ShapeDtypeStruct((2, 256, 4, 32), jnp.bfloat16)
TOKENS, MATRIX = (
    jax.ShapeDtypeStruct((2, 64, 32), jnp.bfloat16),
    jax.ShapeDtypeStruct((32, 128), jnp.float32),
)
TABLE, LABELS = (
    jax.ShapeDtypeStruct((64, 32), jnp.float32),
    jax.ShapeDtypeStruct((2, 64), jnp.int32),
)
FUNCTIONS = {
    "reference": (
        partial(ops.attention, mask=masks.causal(), implementation="reference"),
        (HEADS,) * 3,
    ),
    "query_blocked": (
        partial(ops.attention, mask=masks.causal(), implementation="query_blocked"),
        (HEADS,) * 3,
    ),
    "blockwise": (
        partial(ops.attention, mask=masks.causal(), implementation="blockwise"),
        (HEADS,) * 3,
    ),
    "linear": (partial(zoo.linear_attention.attention, mask=masks.causal()), (HEADS,) * 3),
    "linformer": (
        zoo.linformer.attention,
        (HEADS,) * 3 + (jax.ShapeDtypeStruct((256, 16), jnp.float32),),
    ),
    "product": (partial(ops.einsum, "btd,df->btf"), (TOKENS, MATRIX)),
    "loss": (
        lambda hidden, head, labels: ops.projected_cross_entropy(hidden, head, labels).loss,
        (TOKENS, TABLE, LABELS),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_barrier_and_no_fixed_layout(name, platform):
    """Nor in the backward pass.

    On CPU they keep transposes out of products; elsewhere they would keep fusions apart.
    """
    function, shapes = FUNCTIONS[name]
    floats = tuple(i for i, shape in enumerate(shapes) if jnp.issubdtype(shape.dtype, jnp.floating))
    loss = lambda *arrays: jnp.sum(function(*arrays).astype(jnp.float32))
    text = lambda platform: (
        jax.jit(jax.grad(loss, floats))
        .trace(*shapes)
        .lower(lowering_platforms=(platform,))
        .as_text()
    )
    cpu_only = ("optimization_barrier", "LayoutConstraint")
    assert not any(word in text(platform) for word in cpu_only)
    if name not in ("linear", "blockwise"):  # have none on CPU either
        # the words are those of this version of JAX
        assert any(word in text("cpu") for word in cpu_only)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_can_be_exported(name):
    """By a researcher's own jax.export, which refuses custom calls without guarantees."""
    function, shapes = FUNCTIONS[name]
    assert jax.export.export(jax.jit(function), platforms=("cpu", "tpu", "cuda"))(
        *shapes
    ).serialize()
