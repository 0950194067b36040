"""cuDNN's masks: what `plan` asks of `jax.nn.dot_product_attention` is what our masks mean; the
rest is refused by name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.attention import attention, cudnn
from jaxformer.ops.attention.call import Call
from jaxformer.parallel import Mesh, make_mesh

# float32 unit roundoff is 6e-8; the scores are sums of 8 products of order one, the gradients of a
# few dozen.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)

PLANNED = [  # mask, T, S, the keywords that it becomes (lengths by name)
    (masks.full(), 6, 9, set()),
    (masks.causal(), 7, 7, {"is_causal"}),
    (masks.window(2), 7, 7, {"is_causal", "local_window_size"}),
    (masks.causal() & masks.window(2, 3), 7, 7, {"is_causal", "local_window_size"}),
    (masks.window(4, 2) & masks.window(2, 0), 7, 7, {"is_causal", "local_window_size"}),
    (masks.window(9, 9), 7, 7, set()),
    (masks.causal(), 1, 8, set()),  # a decoding step
    (masks.causal() & masks.window(7), 1, 8, set()),
    (masks.causal().at(8), 2, 8, set()),
    (
        masks.lengths(jnp.array([3, 9, 0]), jnp.array([4, 99, 2])),
        6,
        9,
        {"query_seq_lengths", "key_value_seq_lengths"},
    ),
    (masks.lengths(kv=jnp.array([4, 0, -3])), 6, 9, {"query_seq_lengths", "key_value_seq_lengths"}),
    (masks.causal() & masks.lengths(kv=jnp.array([3, 0, 7])), 7, 7, {"is_causal"}),
    (
        masks.window(2) & masks.lengths(kv=jnp.array([3, 0, 7])),
        7,
        7,
        {"is_causal", "local_window_size"},
    ),
    (
        masks.window(1) & masks.lengths(kv=jnp.array([1])) & masks.lengths(jnp.array([6, 7, 1])),
        7,
        7,
        {"local_window_size"},
    ),
    (
        masks.causal() & masks.window(20) & masks.lengths(kv=jnp.array([3, 0, 7])),
        7,
        7,
        {"is_causal"},
    ),
]


def value_and_vjp(f, g, *args):
    run = jax.jit(lambda g, *args: (lambda out, pullback: (out, pullback(g)))(*jax.vjp(f, *args)))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), run(g, *args))


def arrays(T, S, N=4, K=2, H=8, dtype=jnp.float32, B=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def named(value) -> str:
    """A test's name that is the same in every process: sets of words have no order."""
    return "+".join(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.thorough
@pytest.mark.parametrize(("mask", "T", "S", "keywords"), PLANNED, ids=named)
def test_the_plan_is_the_mask(mask, T, S, keywords):
    """Value and all gradients, also of queries that see nothing; run by XLA, which computes what
    cuDNN is asked for."""
    query, key, value, g = arrays(T, S)
    planned = cudnn.plan(mask, T, S)
    assert keywords <= set(planned)
    assert ("local_window_size" in planned) == ("local_window_size" in keywords)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, T, 1)), jnp.float32)
    ours = value_and_vjp(
        lambda q, k, v, b: cudnn.run(
            q, k, v, bias=b, scale=0.3, planned=planned, implementation="xla"
        ),
        g,
        query,
        key,
        value,
        bias,
    )
    reference = partial(attention, mask=mask, scale=0.3, implementation="reference")
    theirs = value_and_vjp(
        lambda q, k, v, b: reference(q, k, v, bias=b), g, query, key, value, bias
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), ours, theirs)


REFUSED = [
    ({"softcap": 5.0}, "softcap"),
    ({"sinks": np.ones(4)}, "sinks"),
    ({"dropout_rate": 0.1, "dropout_seed": np.zeros(2, np.uint32)}, "dropout"),
    ({"bias": np.ones((1, 4, 6, 6), np.float32)}, "float32 bias"),
    ({"bias": lambda q, kv: 0}, "function"),
    ({"bias": np.ones((1, 4, 6, 6), jnp.bfloat16), "mask": masks.window(2)}, "window"),
    ({"mask": masks.prefix(3)}, "prefix(3)"),
]


@pytest.mark.parametrize(
    ("mask", "T", "S"),
    [
        (masks.prefix(3), 6, 6),
        (~masks.causal(), 6, 6),
        (masks.causal() | masks.window(2), 6, 6),
        (masks.window(1, 0, 2), 6, 6),
        (masks.segments(jnp.ones((3, 6), int)), 6, 6),
        (masks.causal() & masks.prefix(jnp.array([1, 2, 3])), 6, 6),
        (masks.by_head(*[masks.causal()] * 4), 6, 6),
        (masks.window(2, 2), 6, 6),
        (masks.causal(), 5, 6),
        (masks.causal(), 6, 5),
        (masks.causal().at(1), 6, 6),
        (masks.full(), 0, 6),
        (masks.full(), 6, 0),
    ],
    ids=str,
)
def test_masks_that_cudnn_lacks(mask, T, S):
    assert isinstance(cudnn.plan(mask, T, S), str)


def test_refusals_name_what_is_missing():
    query, key, value, _ = arrays(6, 6, dtype=jnp.bfloat16)
    refuses = lambda *args, mask=masks.causal(), **options: cudnn.refuses(
        *args, Call(mask, **options)
    )
    assert refuses(query, key, value) is None
    assert refuses(query, key, value, bias=jnp.ones((1, 4, 1, 6), jnp.bfloat16)) is None
    assert refuses(query, key, value, dropout_rate=0.5) is None  # no key, no dropout
    for options, words in REFUSED:
        assert words in refuses(query, key, value, **options)
    wide = lambda x, n: jnp.zeros((*x.shape[:3], n), x.dtype)
    assert "head width 12" in refuses(*(wide(x, 12) for x in (query, key, value)))
    assert "head width 264" in refuses(*(wide(x, 264) for x in (query, key, value)))
    assert "16 wide" in refuses(query, key, wide(value, 16))
    assert "float32" in refuses(*(x.astype(jnp.float32) for x in (query, key, value)))
    assert "different types" in refuses(query, key, value.astype(jnp.float16))
    with pytest.raises(NotImplementedError, match="cudnn: no softcap; implementation='blockwise'"):
        cudnn.attention(query, key, value, Call(masks.causal(), softcap=5.0))


def test_refusals_look_at_shapes_alone():
    """Arguments may be traced, and the offset of a mask too: then nobody knows which keys it
    hides."""

    @jax.jit
    def traced(query, key, value, lengths, offset):
        assert cudnn.refuses(query, key, value, Call(masks.lengths(kv=lengths))) is None
        assert "offset" in cudnn.refuses(query, key, value, Call(masks.causal().at(offset)))
        return query

    traced(*arrays(6, 6, dtype=jnp.bfloat16)[:3], jnp.arange(3), 0)


@pytest.mark.parametrize(
    "flag", ["--xla_gpu_deterministic_ops=true", "--xla_gpu_exclude_nondeterministic_ops"]
)
def test_equal_calls_of_a_deterministic_program_have_distinct_scales(flag, monkeypatch):
    """By the last bits of a scale, which the kernel does not read."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not cudnn.is_deterministic()
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=here {flag}")
    assert cudnn.is_deterministic()
    for scale in (0.125, 64**-0.5, 80**-0.5, 1.0):
        told = [cudnn.distinct_scale(scale) for _ in range(40)]
        assert len(set(told)) == 40 and {np.float32(one) for one in told} == {np.float32(scale)}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    assert not cudnn.is_deterministic()


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "T", "S", "keywords"), PLANNED, ids=named)
def test_on_a_gpu(mask, T, S, keywords):
    """The real kernel in bfloat16 against float32 arithmetic on the same numbers, at widths a GPU
    is used with."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, and JAX_PLATFORMS=cuda")
    query, key, value, g = arrays(T, S, H=64, dtype=jnp.bfloat16)
    ours = value_and_vjp(
        partial(cudnn.attention, call=Call(mask, scale=0.125)), g, query, key, value
    )
    exact = [x.astype(jnp.float32) for x in (g, query, key, value)]
    reference = partial(attention, mask=mask, scale=0.125, implementation="reference")
    with jax.default_matmul_precision("highest"):
        theirs = value_and_vjp(reference, *exact)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(a).all()
        # weights, their gradients and the result are rounded once each, by 2^-9 of themselves: 4 *
        # 2^-8 in norm
        assert np.linalg.norm(a - b) <= 2.0**-6 * np.linalg.norm(b)


@pytest.mark.thorough
def test_on_a_mesh_each_device_has_its_rows_and_heads(monkeypatch):
    """By XLA in cuDNN's place, which would be given a part of the batch and of the heads: the same
    values and gradients."""
    monkeypatch.setattr(cudnn, "refuses", lambda *args, **options: None)  # float32 here
    run, shapes = cudnn.run, []
    monkeypatch.setattr(
        cudnn,
        "run",
        lambda q, *rest, **options: (
            shapes.append(q.shape) or run(q, *rest, **options | {"implementation": "xla"})
        ),
    )
    query, key, value, g = arrays(8, 8, B=4)
    mask = masks.causal() & masks.lengths(kv=jnp.array([3, 0, 7, 8]))
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 8, 1)), jnp.float32)
    call = lambda name: (
        lambda q, k, v, b: attention(q, k, v, mask=mask, bias=b, implementation=name)
    )
    theirs = value_and_vjp(call("reference"), g, query, key, value, bias)
    with jax.set_mesh(make_mesh(Mesh(data=2, fsdp=2, tensor=2))):
        ours = value_and_vjp(call("cudnn"), g, query, key, value, bias)
    assert set(shapes) == {(1, 8, 2, 8)}
    jax.tree.map(partial(np.testing.assert_allclose, **FLOAT32), ours, theirs)
    with (
        jax.set_mesh(make_mesh(Mesh(context=8))),
        pytest.raises(NotImplementedError, match="cudnn: no queries split over mesh"),
    ):
        call("cudnn")(query, key, value, None)
