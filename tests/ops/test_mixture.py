"""Routed experts: against every expert on every token, against loops over tokens in NumPy, and what
must not matter."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import feedforward
from jaxformer.models.layer import Context
from jaxformer.models.mixture import Mixture
from jaxformer.ops.mixture import balance_loss, mixture, route
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh
from jaxformer.params import paths

run = jax.jit(mixture, static_argnames=("activation", "top_k", "normalise", "capacity", "groups"))


def random(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def problem(seed, B=2, T=9, D=6, F=10, E=4, gated=True, dtype=jnp.float32):
    x, router, gate, up, down = random(
        seed, (B, T, D), (D, E), (E, D, F), (E, D, F), (E, F, D), dtype=dtype
    )
    return x, router, gate if gated else None, up, down


def some(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.7)


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def by_token(x, router, gate, up, down, top_k, normalise=True, capacity=None, padding_mask=None):
    """Float64, token by token: softmax over all experts, the top_k within the capacity. (output,
    dropped choices)."""
    x, router, gate, up, down = (np.asarray(a, np.float64) for a in (x, router, gate, up, down))
    B, T, D = x.shape
    E = router.shape[1]
    tokens, out, used = x.reshape(B * T, D), np.zeros((B * T, D)), np.zeros(E, int)
    padding_mask = (
        np.ones(B * T, bool) if padding_mask is None else np.asarray(padding_mask).reshape(-1)
    )
    expert_capacity = np.inf if capacity is None else math.ceil(capacity * top_k * B * T / E)
    dropped = []
    for rank in range(top_k):
        for n in np.flatnonzero(padding_mask):
            p = softmax(tokens[n] @ router)
            best = np.argsort(-p, kind="stable")[:top_k]
            e, weight = best[rank], p[best[rank]] / (p[best].sum() if normalise else 1)
            if used[e] == expert_capacity:
                dropped.append((rank, n))
                continue
            used[e] += 1
            out[n] += weight * ((silu(tokens[n] @ gate[e]) * (tokens[n] @ up[e])) @ down[e])
    return out.reshape(B, T, D), dropped


def every_expert(x, router, gate, up, down, activation, top_k, normalise, padding_mask):
    """The output of `mixture` without a capacity, where every expert computes every token: the
    oracle of its gradients."""
    routing = route(jnp.einsum("btd,de->bte", x, router), top_k, normalise)
    one_hot = jax.nn.one_hot(routing.experts, router.shape[1], dtype=x.dtype)
    weights = jnp.einsum("btk,btke->bte", routing.weights, one_hot)
    if padding_mask is not None:
        weights = jnp.where(padding_mask[:, :, None], weights, 0)
    hidden = jnp.einsum("btd,edf->btef", x, up)
    hidden = (
        activation(hidden)
        if gate is None
        else activation(jnp.einsum("btd,edf->btef", x, gate)) * hidden
    )
    return jnp.einsum("bte,btef,efd->btd", weights, hidden, down)


# seed, sizes, top_k, normalise, with a gate, with padding: odd sizes, as many choices as experts,
# one token,
# blocks that fill exactly (64 tokens x 2 / 4 experts / 4 = 8 rows) and several to an expert
CASES = [
    (0, dict(B=2, T=9, D=6, F=10, E=4), 2, True, True, False),
    (1, dict(B=3, T=7, D=5, F=3, E=7), 3, False, True, True),
    (2, dict(B=1, T=1, D=4, F=8, E=8), 2, True, True, False),
    (4, dict(B=2, T=5, D=3, F=7, E=3), 3, False, False, True),
    (5, dict(B=1, T=64, D=8, F=8, E=4), 2, True, False, False),
    (6, dict(B=2, T=150, D=4, F=6, E=2), 1, False, True, True),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case, dtype", [*((case, jnp.float64) for case in CASES), (CASES[1], jnp.float32)]
)
def test_fast_is_the_reference_with_all_gradients(case, dtype):
    seed, sizes, top_k, normalise, gated, padded = case

    def both(*args):
        options = dict(top_k=top_k, normalise=normalise, padding_mask=padding_mask)
        fast = lambda *a: mixture(*a, jax.nn.silu, **options)[0]
        slow = lambda *a: every_expert(*a, jax.nn.silu, **options)
        results = []
        for f in (fast, slow):
            out, pullback = jax.vjp(f, *args)
            results.append(
                (out, pullback(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)))
            )
        return results

    padding_mask = some(seed, (sizes["B"], sizes["T"])) if padded else None
    # sums of some 10 to 1500 products in another order
    tolerance = 2e-5 if dtype == jnp.float32 else 1e-10
    with jax.enable_x64(dtype == jnp.float64):
        fast, slow = jax.jit(both)(*problem(seed, **sizes, gated=gated, dtype=dtype))
        assert all(a.dtype == dtype for a in jax.tree.leaves(fast))
        for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.thorough
def test_is_the_formula_of_mixtral_and_of_switch():
    """softmax over all, the best two, weights summing to one; and the best one with its own
    probability."""
    args = problem(7)
    for top_k, normalise in ((2, True), (1, False)):
        out, statistics = run(*args, jax.nn.silu, top_k=top_k, normalise=normalise)
        # float32: sums of ten products of order ten
        np.testing.assert_allclose(out, by_token(*args, top_k, normalise)[0], rtol=2e-5, atol=2e-4)
        assert statistics.dropped == 0


@pytest.mark.thorough
def test_routing():
    (logits,) = random(8, (3, 5, 6))
    weights, experts, probabilities = route(logits, 2)
    np.testing.assert_array_equal(experts, np.argsort(-np.asarray(logits), axis=-1)[..., :2])
    np.testing.assert_allclose(probabilities, softmax(np.float64(logits)), rtol=1e-6)
    chosen = np.take_along_axis(np.float64(logits), np.asarray(experts), -1)
    # Mixtral's form: a softmax over the chosen logits
    np.testing.assert_allclose(weights, softmax(chosen), rtol=1e-6)
    bare = route(logits, 2, normalise=False)
    np.testing.assert_allclose(
        bare.weights, np.take_along_axis(probabilities, np.asarray(experts), -1)
    )
    assert route(jnp.zeros((4, 6)), 3).experts.tolist() == [[0, 1, 2]] * 4  # of equals the first
    assert route(logits.astype(jnp.bfloat16), 2).probabilities.dtype == jnp.float32


@pytest.mark.thorough
def test_the_order_of_tokens_does_not_matter():
    x, *rest = problem(9)
    order = np.random.default_rng(0).permutation(18)
    shuffle = lambda a: a.reshape(18, -1)[order].reshape(a.shape)
    (out, statistics), (shuffled, again) = (
        run(y, *rest, jax.nn.silu, top_k=2) for y in (x, shuffle(x))
    )
    # rows at other places in a product
    np.testing.assert_allclose(shuffled, shuffle(out), rtol=2e-5, atol=2e-5)
    for a, b in zip(statistics, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("top_k, capacity", [(1, 0.5), (2, 0.01), (2, 1.25), (3, 0.8)])
def test_a_capacity_drops_the_choices_that_come_too_late(top_k, capacity):
    args = problem(10, B=2, T=21, E=5)
    for padding_mask in (jnp.ones((2, 21), bool), some(11, (2, 21))):
        options = dict(
            top_k=top_k, normalise=top_k > 1, capacity=capacity, padding_mask=padding_mask
        )
        out, statistics = run(*args, jax.nn.silu, **options)
        expected, dropped = by_token(*args, **options)
        assert dropped or not padding_mask.all()
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-4)
        np.testing.assert_array_equal(  # a token of no expert: exactly zero
            (np.asarray(out) == 0).all(-1), (expected == 0).all(-1)
        )
        np.testing.assert_allclose(
            statistics.dropped, len(dropped) / (top_k * int(padding_mask.sum())), rtol=1e-6
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "axes",
    [
        dict(data=2, context=2, expert=2),
        dict(expert=4),
        pytest.param(dict(data=4), marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_mesh_drops_what_one_device_drops(axes, groups):
    """Each group of rows has ceil(0.6 top_k n / E) places an expert, wherever its tokens are; the
    witness counts on one."""
    args, padding_mask = problem(27, B=4, T=24, E=4, F=8), some(28, (4, 24))
    options, lost = dict(top_k=2, capacity=0.6), 0
    with jax.set_mesh(
        make_mesh(Mesh(**{"data": 1} | axes), jax.devices()[: math.prod(axes.values())])
    ):
        out, statistics = block_if_simulated(
            run(*args, jax.nn.silu, padding_mask=padding_mask, groups=groups, **options)
        )
    for rows in np.split(np.arange(4), groups):
        expected, dropped = by_token(
            args[0][rows], *args[1:], padding_mask=padding_mask[rows], **options
        )
        lost += len(dropped)
        # sums of ten products of order ten
        np.testing.assert_allclose(out[rows], expected, rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(statistics.dropped, lost / (2 * int(padding_mask.sum())), rtol=1e-6)
    alone = run(*args, jax.nn.silu, padding_mask=padding_mask, groups=groups, **options)[1]
    for name, value in alone._asdict().items():
        np.testing.assert_allclose(getattr(statistics, name), value, rtol=1e-5)


def test_groups_divide_the_rows_of_a_batch():
    with pytest.raises(
        ConfigError,
        match=r"model.feedforward.groups=3: does not divide a batch of 2 rows; .* divisor of 2",
    ):
        mixture(*problem(0), jax.nn.silu, top_k=2, capacity=1.0, groups=3)


@pytest.mark.thorough
def test_the_capacity_is_the_one_of_the_formula():
    """1.1 x 10 is 11 places, not the 12 of floating point: ten even choices each, all sent to one
    expert."""
    x = jnp.ones((1, 20, 2))
    router = jnp.asarray([[1.0, 0.0], [1.0, 0.0]])
    up, down = jnp.ones((2, 2, 3)), jnp.ones((2, 3, 2))
    out, statistics = run(
        x, router, None, up, down, jax.nn.relu, top_k=1, normalise=False, capacity=1.1
    )
    assert (np.asarray(out[0]) > 0).all(-1).tolist() == [True] * 11 + [False] * 9
    np.testing.assert_allclose(statistics.dropped, 9 / 20, rtol=1e-6)


@pytest.mark.thorough
def test_a_large_capacity_is_none():
    args = problem(12, B=2, T=11, E=4)

    def everything(capacity):
        f = lambda *a: mixture(*a, jax.nn.silu, top_k=2, capacity=capacity)
        (out, statistics), pullback = jax.vjp(f, *args)
        return out, statistics, pullback(jax.tree.map(jnp.ones_like, (out, statistics)))

    for a, b in zip(
        *(jax.tree.leaves(jax.jit(everything, static_argnums=0)(c)) for c in (None, 1e6)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


@pytest.mark.thorough
def test_balance_is_least_where_all_experts_get_alike():
    E = 5
    even = jnp.full(E, 1 / E)
    np.testing.assert_allclose(balance_loss(even, even), 1, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(3 * even, even), 3, rtol=1e-6)  # three choices a token
    one = jax.nn.one_hot(2, E)
    np.testing.assert_allclose(balance_loss(one, one), E)

    # where choices follow probabilities, E sum p^2 has its only minimum at 1/E: Cauchy-Schwarz
    for p in np.random.default_rng(13).dirichlet(np.ones(E), size=20):
        p = jnp.asarray(p, jnp.float32)
        assert balance_loss(p, p) > 1
    # one token for each expert, by routers that are more and more sure of it: even at any
    # temperature, so always 2 choices
    for scale in (0.1, 1.0, 10.0):
        x = jnp.eye(E)[None]
        router = scale * (jnp.eye(E) + 0.5 * jnp.roll(jnp.eye(E), 1, axis=1))
        _, statistics = run(
            x, router, None, jnp.ones((E, E, 2)), jnp.ones((E, 2, E)), jax.nn.relu, top_k=2
        )
        np.testing.assert_allclose(statistics.fraction, np.full(E, 2 / E), rtol=1e-6)
        np.testing.assert_allclose(
            balance_loss(statistics.fraction, statistics.probability), 2, rtol=1e-6
        )


@pytest.mark.thorough
def test_descending_the_balance_loss_balances():
    x, router = random(14, (4, 32, 8), (8, 4))
    x = x + 1  # all tokens like the same experts

    def loss(router):
        idle = jnp.zeros((4, 8, 1)), jnp.zeros((4, 1, 8))
        _, statistics = mixture(x, router, None, *idle, jax.nn.relu, top_k=1, normalise=False)
        return balance_loss(statistics.fraction, statistics.probability), statistics.fraction

    @jax.jit
    def descend(router):
        step = lambda router, _: (
            router - 0.1 * jax.grad(loss, has_aux=True)(router)[0],
            loss(router),
        )
        return jax.lax.scan(step, router, length=200)[1]

    losses, fractions = descend(router)
    assert losses[0] > 1.3 and fractions[0].max() > 0.5 and fractions[-1].max() < 0.4


@pytest.mark.thorough
def test_z_loss():
    args, padding_mask = problem(15), some(16, (2, 9))
    exact = np.log(np.exp(np.float64(args[0]) @ np.float64(args[1])).sum(-1)) ** 2
    for flags in (jnp.ones((2, 9), bool), padding_mask):
        z = run(*args, jax.nn.silu, top_k=2, padding_mask=flags)[1].z
        # logits are float32 sums of six products
        np.testing.assert_allclose(z, exact[np.asarray(flags)].mean(), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_padding_counts_in_nothing(capacity):
    x, router, *experts = problem(17, B=3, T=8)
    padding_mask = some(18, (3, 8)).at[0].set(False)

    def gradients(x):
        def losses(router):
            out, s = mixture(
                x,
                router,
                *experts,
                jax.nn.silu,
                top_k=2,
                capacity=capacity,
                padding_mask=padding_mask,
            )
            return balance_loss(s.fraction, s.probability) + s.z, (out, s)

        return jax.value_and_grad(losses, has_aux=True)(router)

    gradients = jax.jit(gradients)
    first, second = gradients(x), gradients(jnp.where(padding_mask[..., None], x, 37.0))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    (_, (out, statistics)), _ = first
    assert (np.asarray(out)[~np.asarray(padding_mask)] == 0).all()
    np.testing.assert_allclose(statistics.fraction.sum(), 2, rtol=1e-6)
    np.testing.assert_allclose(statistics.probability.sum(), 1, rtol=1e-6)
    if capacity is None:  # the same as of the real tokens alone
        _, alone = run(x[padding_mask][None], router, *experts, jax.nn.silu, top_k=2)
        for a, b in zip(statistics, alone, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "axes", [{}, pytest.param(dict(data=2, expert=2), marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize(("B", "T"), [(2, 10), (2, 0), (0, 10)])
def test_nothing_but_padding(B, T, capacity, axes):
    def everything(*args):
        f = lambda *a: mixture(
            *a, jax.nn.silu, top_k=2, capacity=capacity, padding_mask=jnp.zeros((B, T), bool)
        )
        results, pullback = jax.vjp(f, *args)
        return results, pullback(jax.tree.map(jnp.ones_like, results))

    with jax.set_mesh(
        make_mesh(Mesh(**{"data": 1} | axes), jax.devices()[: math.prod(axes.values())])
    ):
        results = block_if_simulated(jax.jit(everything)(*problem(19, B=B, T=T)))
    for a in jax.tree.leaves(results):
        assert (np.asarray(a) == 0).all()


@pytest.mark.thorough
def test_bfloat16_activations_with_float32_parameters():
    """Narrow products, float32 gradients of parameters, all near float64: the router sees the same
    x, so routes alike."""
    x, *weights = problem(20, B=2, T=64, D=16, F=32, E=4)
    x = x.astype(jnp.bfloat16)

    def everything(*args):
        out, pullback = jax.vjp(lambda *a: mixture(*a, jax.nn.silu, top_k=2)[0], *args)
        return out, *pullback(jnp.ones_like(out))

    ours = jax.jit(everything)(x, *weights)
    assert [a.dtype for a in ours] == [jnp.bfloat16] * 2 + [jnp.float32] * 4
    with jax.enable_x64(True):
        exact = map(
            np.asarray, jax.jit(everything)(*(jnp.asarray(np.float64(a)) for a in (x, *weights)))
        )
    for got, wanted in zip(ours, exact, strict=True):
        # about eight roundings of 2^-8 on the way, independent of one another
        assert np.linalg.norm(np.float64(got) - wanted) <= 8 * 2.0**-8 * np.linalg.norm(wanted)


@pytest.mark.thorough
def test_scanned_layers_are_the_unrolled_ones():
    x, *_ = problem(21, T=12)
    layers = jax.tree.map(lambda *a: jnp.stack(a), *(problem(s)[1:] for s in range(2)))

    def layer(x, weights):
        return x + 0.1 * mixture(x, *weights, jax.nn.silu, top_k=2)[0]

    def scanned(layers):
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0]))

    def unrolled(layers):
        y = x
        for i in range(2):
            y = layer(y, jax.tree.map(lambda a: a[i], layers))  # noqa: B023
        return jnp.sum(jnp.sin(y))

    for a, b in zip(
        *(jax.tree.leaves(jax.jit(jax.value_and_grad(f))(layers)) for f in (scanned, unrolled)),
        strict=True,
    ):
        # two layers of float32 sums
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


CONFIG = models.ModelConfig(
    vocab_size=7, num_layers=2, d_model=6, num_heads=2, context_length=8, d_ff=10
)


def test_the_layer_says_what_its_parameters_are():
    spec = paths(Mixture(experts=4, d_ff=5, shared=3)(CONFIG).spec)
    assert {path: (leaf.shape, leaf.axes, leaf.contracts) for path, leaf in spec.items()} == {
        "router/kernel": ((6, 4), ("embed", "expert"), ("embed",)),
        "gate/kernel": ((4, 6, 5), ("expert", "embed", "mlp"), ("embed",)),
        "up/kernel": ((4, 6, 5), ("expert", "embed", "mlp"), ("embed",)),
        "down/kernel": ((4, 5, 6), ("expert", "mlp", "embed"), ("mlp",)),
        "shared/gate/kernel": ((6, 3), ("embed", "mlp"), ("embed",)),
        "shared/up/kernel": ((6, 3), ("embed", "mlp"), ("embed",)),
        "shared/down/kernel": ((3, 6), ("mlp", "embed"), ("mlp",)),
    }
    plain = paths(Mixture(activation="relu")(CONFIG).spec)
    assert sorted(plain) == ["down/kernel", "router/kernel", "up/kernel"] and plain[
        "up/kernel"
    ].shape == (8, 6, 10)


@pytest.mark.thorough
def test_the_layer_is_routed_experts_and_a_shared_one():
    """DeepSeekMoE: the shared expert's part is added. The losses are those of the real tokens."""
    choose = Mixture(experts=4, shared=3, balance_loss=0.5, router_z_loss=0.25, normalise=False)
    layer, rng, padding_mask = choose(CONFIG), np.random.default_rng(23), some(24, (2, 9))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), layer.spec
    )
    (x,) = random(25, (2, 9, 6))
    out, loss, stats, _ = jax.jit(layer.apply)(
        params, x, Context(mask=full(), positions=None, padding_mask=padding_mask)
    )

    w = {path.removesuffix("/kernel"): np.float64(leaf) for path, leaf in paths(params).items()}
    y = np.float64(x)
    shared = (silu(y @ w["shared/gate"]) * (y @ w["shared/up"])) @ w["shared/down"]
    routed, _ = by_token(
        x, w["router"], w["gate"], w["up"], w["down"], 2, normalise=False, padding_mask=padding_mask
    )
    np.testing.assert_allclose(out, routed + shared, rtol=2e-5, atol=2e-4)

    logits = (y @ w["router"])[np.asarray(padding_mask)]
    fraction = np.bincount(np.argsort(-logits, axis=-1)[:, :2].reshape(-1), minlength=4) / len(
        logits
    )
    probability = softmax(logits).mean(0)
    expected = (
        0.5 * 4 * (fraction * probability).sum()
        + 0.25 * (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(stats["fraction"], fraction, rtol=1e-6)
    np.testing.assert_allclose(stats["probability"], probability, rtol=1e-5)
    assert stats["dropped"] == 0 and sorted(stats) == [
        "dropped",
        "expert_load",
        "fraction",
        "probability",
    ]
    silent = replace(choose, balance_loss=0.0, router_z_loss=0.0)(CONFIG)
    assert (
        jax.eval_shape(silent.apply, params, x, Context(mask=full(), positions=None)).loss is None
    )


@pytest.mark.thorough
def test_one_expert_a_token_counts_whole():
    """Of weights that sum to one a lone weight is 1 (Mixtral): the router chooses, and learns by
    the balance loss alone."""
    config = replace(
        CONFIG, feedforward=Mixture(experts=3, top_k=1, balance_loss=0.1), use_bias=False
    )
    params = jax.jit(partial(models.init, config))(jax.random.key(1))
    x, feed = random(3, (1, 5, config.d_model))[0], config.feedforward(config)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"]["feedforward"])
    ours = feed.apply(layer, x, Context(mask=full(), positions=None)).out
    one = replace(config, feedforward="swiglu")
    for t, expert in enumerate(jnp.argmax(x[0] @ layer["router"]["kernel"], axis=-1).tolist()):
        matrices = {
            name: {"kernel": layer[name]["kernel"][expert]} for name in ("gate", "up", "down")
        }
        expected = feedforward.feedforward(one.feedforward, matrices, x[:, t : t + 1])
        # float32 sums
        np.testing.assert_allclose(ours[:, t : t + 1], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_model_of_one_expert_is_the_dense_model():
    dense = replace(CONFIG, feedforward="swiglu", use_bias=False)
    routed = replace(dense, feedforward=Mixture(experts=1, top_k=1, router_z_loss=0.1))
    params = jax.jit(partial(models.init, dense))(jax.random.key(0))
    matrices = {
        name: {"kernel": leaf["kernel"][:, None]}
        for name, leaf in params["layers"]["feedforward"].items()
    }
    (router,) = random(26, (2, 6, 1))
    layers = params["layers"] | {"feedforward": matrices | {"router": {"kernel": router}}}
    tokens = jnp.arange(16).reshape(2, 8) % 7
    ours = jax.jit(partial(models.apply, routed))(params | {"layers": layers}, tokens)
    theirs = jax.jit(partial(models.apply, dense))(params, tokens)
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=2e-5, atol=2e-6)  # float32 sums
    assert ours.loss.shape == () and ours.stats["fraction"].shape == (2, 1) and theirs.loss is None


@pytest.mark.thorough
def test_a_capacity_is_for_training():
    assert Mixture(capacity=0.5).evaluation() == Mixture(device_capacity=1.0)
    assert Mixture(capacity=1.25, groups=4).evaluation() == Mixture(device_capacity=1.25)
    layers = [Mixture(4, d_ff=5, capacity=capacity)(CONFIG) for capacity in (0.5, None)]
    (x,), contexts = (
        random(27, (2, 9, 6)),
        [Context(mask=full(), positions=None, cache_length=length) for length in (0, 16)],
    )
    weights = jax.tree.map(lambda leaf: jnp.asarray(random(28, leaf.shape)[0]), layers[0].spec)
    tight, decoded, free = (
        layers[i].apply(weights, x, contexts[j]) for i, j in ((0, 0), (0, 1), (1, 0))
    )
    assert tight.stats["dropped"] > 0 == decoded.stats["dropped"]
    np.testing.assert_array_equal(decoded.out, free.out)
    for kept in (Mixture(), Mixture(device_capacity=1.5)):
        assert kept.evaluation() == kept
    routed, plain = (
        replace(CONFIG, feedforward=Mixture(capacity=0.5), dropout_rate=0.1),
        replace(CONFIG, dropout_rate=0.0),
    )
    assert models.evaluation(routed) == replace(plain, feedforward=Mixture(device_capacity=1.0))
    pair = models.EncoderDecoder(replace(routed, heads=(), masks=(full(),)), routed)
    assert (
        models.evaluation(pair).encoder.feedforward.capacity
        is models.evaluation(pair).decoder.feedforward.capacity
        is None
    )


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(top_k=9), "model.feedforward.top_k=9: must be 1 to 8"),
        (dict(top_k=0), "model.feedforward.top_k=0"),
        (dict(experts=0), "model.feedforward.experts=0: expected a whole number of at least 1"),
        (dict(activation="swish"), "model.feedforward.activation='swish'"),
        (dict(capacity=0.0), "model.feedforward.capacity=0.0"),
        (
            dict(capacity=1.0, groups=0),
            "model.feedforward.groups=0: expected a whole number of at least 1",
        ),
        (dict(groups=2), "model.feedforward.groups=2: .* have a capacity"),
        (dict(balance_loss=-1.0), "model.feedforward.balance_loss=-1.0"),
        (dict(router_z_loss=-1.0), "model.feedforward.router_z_loss=-1.0"),
        (dict(top_k=1), "model.feedforward.normalise=True"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        Mixture(**options)
