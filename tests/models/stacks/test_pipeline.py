"""Layers in stages: on 8 simulated devices every split gives what one device gives, and sends what
it must, once."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxformer import masks, models, ops, params
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, Mixture, ModelConfig, Relative
from jaxformer.models.stacks.pipeline import Pipeline, bubble, pipeline
from jaxformer.ops.positions import Rope
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.sharding import shardings
from jaxformer.tools.planning.hlo import collectives
from jaxformer.zoo.linear_attention import Linear

GPT = ModelConfig(
    vocab_size=64, num_layers=4, d_model=16, num_heads=2, context_length=16, init_std=0.2
)
DEEP = replace(GPT, num_layers=8, d_model=8)
LOCAL = replace(DEEP, masks=(masks.causal(), masks.causal() & masks.window(3)), positions=Rope())
PAIR = EncoderDecoder(
    replace(GPT, positions=Relative(8, 16), masks=(masks.full(),), heads=()),
    replace(GPT, num_layers=2, positions=Relative(8, 16, False)),
)
TOKENS = jax.random.randint(jax.random.key(1), (16, 16), 0, 64)
# two packed sequences a row, and padding behind them
SEGMENTS = jnp.where(
    jnp.arange(16) < 14, 1 + (jnp.arange(16)[None] > jnp.arange(16)[:, None] // 2), 0
)


def staged(config, pipe):
    if isinstance(config, EncoderDecoder):
        return replace(
            config, encoder=staged(config.encoder, pipe), decoder=staged(config.decoder, pipe)
        )
    return replace(config, stack=pipe)


def loss(config, options, weights, tokens):
    source = {"source": tokens[:, ::-1]} if isinstance(config, EncoderDecoder) else {}
    output = models.apply(config, weights, tokens, **source, **options)
    sums = ops.cross_entropy(output.logits[:, :-1], tokens[:, 1:])
    return sums.loss / sums.weight + (0 if output.loss is None else output.loss)


def compare(config, mesh, pipe, **options):
    """The compiled step on the mesh, after its loss and gradients were found to be those of one
    device."""
    weights = jax.jit(partial(models.init, config))(jax.random.key(0))
    one, gradient = jax.jit(jax.value_and_grad(partial(loss, config, options)))(weights, TOKENS)
    mesh = make_mesh(mesh)
    places = shardings(models.spec(config), mesh)
    with jax.set_mesh(mesh):
        over = tuple(axis for axis in ("data", "fsdp", "expert", "stage") if mesh.shape[axis] > 1)
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(over)))
        step = jax.jit(
            jax.value_and_grad(partial(loss, staged(config, pipe), options)),
            out_shardings=(None, places),
        )
        compiled = step.lower(jax.device_put(weights, places), tokens).compile()
        many, split = jax.block_until_ready(compiled(jax.device_put(weights, places), tokens))
    # float32 sums in another order: 1e-7 relative, a few layers deep
    np.testing.assert_allclose(many, one, rtol=2e-6)
    # a key bias has none of its own
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    for path, leaf in params.paths(gradient).items():
        np.testing.assert_allclose(
            params.paths(split)[path], leaf, rtol=1e-5, atol=2e-6 * largest, err_msg=path
        )
    return collectives(compiled.as_text(), mesh)


@pytest.mark.thorough
def test_stages_give_the_loss_and_gradient_of_one_device_and_send_no_weights():
    found = compare(GPT, Mesh(data=2, stage=4), Pipeline())
    ticks, S = 4 + 3, 4
    permutes = [one.count for one in found if one.kind == "collective-permute"]
    # one a tick and pass; the batch to stage 0 and from it
    assert sum(permutes) == 2 * (ticks + 2 * (S - 1))
    others = [one for one in found if one.kind != "collective-permute"]
    assert {one.kind for one in others} == {"all-reduce"}
    [layers] = [one for one in others if one.axes == ("data",)]
    held = 4 * params.count(models.spec(GPT)["layers"]) / S
    # gradients are summed over copies once, not every tick
    assert (layers.count, layers.bytes) == (
        1,
        held,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, mesh, pipe",
    [
        (GPT, Mesh(data=4, stage=2), Pipeline(4)),
        (DEEP, Mesh(data=1, stage=8), Pipeline()),
        (DEEP, Mesh(data=1, stage=8), Pipeline(16)),
        (DEEP, Mesh(data=2, stage=4), Pipeline(4, repeats=2)),
        (DEEP, Mesh(data=4, stage=2), Pipeline(4, repeats=4)),
        (GPT, Mesh(data=1, tensor=2, stage=4), Pipeline(8)),
        (GPT, Mesh(data=1, fsdp=2, stage=4), Pipeline(8)),
        (GPT, Mesh(data=2, fsdp=2, stage=2), Pipeline(2, repeats=2)),
        (GPT, Mesh(data=2, tensor=2, stage=2), Pipeline(2, repeats=2)),
        (GPT, Mesh(data=2, context=2, stage=2), Pipeline()),
        (GPT, Mesh(data=1, fsdp=2, stage=4, explicit=True), Pipeline()),
        (replace(GPT, remat="full"), Mesh(data=1, fsdp=2, stage=4), Pipeline()),
        (replace(DEEP, remat="dots", unroll=8), Mesh(data=2, stage=4), Pipeline(repeats=2)),
        (LOCAL, Mesh(data=2, stage=4), Pipeline()),
        (replace(LOCAL, remat="full"), Mesh(data=4, stage=2), Pipeline(repeats=2)),
        (
            replace(LOCAL, masks=(masks.causal(),), mixer=(None, Linear())),
            Mesh(data=4, stage=2),
            Pipeline(repeats=2),
        ),
        (
            replace(GPT, feedforward=Mixture(4, 2, d_ff=16)),
            Mesh(data=2, expert=2, stage=2),
            Pipeline(),
        ),
        (PAIR, Mesh(data=4, stage=2), Pipeline()),
    ],
    ids=lambda one: (
        " ".join(f"{axis}{n}" for axis, n in one.shape(8).items() if n > 1)
        if isinstance(one, Mesh)
        else None
    ),
)
def test_every_split_gives_what_one_device_gives(config, mesh, pipe):
    found = compare(config, mesh, pipe)
    gathered = [
        one.bytes
        for one in found
        if one.kind in ("all-gather", "all-to-all") and "stage" in one.axes
    ]
    gathered = [size for size in gathered if size > TOKENS.nbytes]  # labels may travel
    # all stages read a copy's source
    assert gathered == ([TOKENS.size * 16 * 4 // 4] if config is PAIR else [])


@pytest.mark.slow
def test_what_belongs_to_rows_goes_with_them():
    compare(GPT, Mesh(data=2, stage=4), Pipeline(), segment_ids=SEGMENTS)
    compare(
        PAIR,
        Mesh(data=2, fsdp=2, stage=2),
        Pipeline(),
        segment_ids=SEGMENTS,
        source_segment_ids=SEGMENTS[::-1],
    )


@pytest.mark.slow
def test_auxiliary_losses_are_the_mean_over_microbatches():
    config = replace(GPT, feedforward=Mixture(4, 2, d_ff=16, balance_loss=0.1, router_z_loss=0.1))
    weights = models.init(config, jax.random.key(0))
    parts = [models.apply(config, weights, TOKENS[i::4]) for i in range(4)]
    mesh = make_mesh(Mesh(data=2, stage=4))
    with jax.set_mesh(mesh):
        run = jax.jit(partial(models.apply, staged(config, Pipeline(2))))
        output = jax.block_until_ready(
            run(jax.device_put(weights, shardings(models.spec(config), mesh)), TOKENS)
        )
    # the z loss is a mean of tokens, the balance loss differs with the rows that are together, by
    # little
    np.testing.assert_allclose(output.loss, np.mean([one.loss for one in parts]), rtol=1e-2)
    assert output.stats["fraction"].shape == (4, 4)
    whole = models.apply(config, weights, TOKENS).stats["fraction"]
    np.testing.assert_allclose(output.stats["fraction"], whole, rtol=1e-5)


@pytest.mark.slow
def test_dropout_differs_with_the_microbatch_and_the_copy():
    config = replace(GPT, attention_dropout_rate=0.5)
    mesh = make_mesh(Mesh(data=2, stage=4))
    weights = models.init(config, jax.random.key(0))
    same = jnp.tile(TOKENS[:1], (16, 1))
    with jax.set_mesh(mesh):
        weights = jax.device_put(weights, shardings(models.spec(config), mesh))
        run = jax.jit(
            lambda key: (
                models.apply(staged(config, Pipeline()), weights, same, dropout_key=key).hidden
            )
        )
        once, again, other = (
            np.asarray(jax.block_until_ready(run(jax.random.key(k)))) for k in (0, 0, 1)
        )
    assert (once == again).all() and not np.isclose(once, other).all((1, 2)).any()
    assert len(np.unique(once.reshape(16, -1), axis=0)) == 16  # of rows that are alike


def toy(weights, pick, x, extras, shared, part, microbatch):
    """Layers that do not commute; they report their own weight and the sum of their input."""

    def layer(x, row):
        weight = pick(row)
        summed = jax.shard_map(
            lambda x: x + 0.1 * jax.lax.psum(x.sum(1, keepdims=True), "context"),
            in_specs=P(None, "context"), out_specs=P(None, "context"), axis_names={"context"},
        )  # fmt: skip
        return jnp.sin(summed(x) * weight + extras + shared), (weight, x.sum())

    return jax.lax.scan(jax.checkpoint(layer), x, weights)


@pytest.mark.thorough
@pytest.mark.parametrize("S, M, R", [(4, 4, 1), (4, 1, 1), (2, 2, 3), (4, 4, 2), (2, 4, 4)])
def test_layers_come_in_order_and_may_have_a_shard_map_of_their_own(S, M, R):
    L, mesh = 24, make_mesh(Mesh(data=-1, context=2, stage=S))
    weights, shared = jax.random.normal(jax.random.key(0), (L,)), jnp.float32(0.3)
    x, extras = jax.random.normal(jax.random.key(1), (2, 16, 4))

    def plain(weights, x, extras, shared):
        def layer(x, weight):
            return jnp.sin((x + 0.1 * x.sum(1, keepdims=True)) * weight + extras + shared), (
                weight,
                x.sum(),
            )

        return jax.lax.scan(layer, x, weights)

    both = lambda f: lambda *args: (jnp.sum(f(*args)[0] ** 2), f(*args))
    wanted, slopes = jax.value_and_grad(both(plain), argnums=(0, 1, 2, 3), has_aux=True)(
        weights, x, extras, shared
    )
    with jax.set_mesh(mesh):
        run = lambda *args: pipeline(toy, *args, microbatches=M, repeats=R)
        step = jax.jit(jax.value_and_grad(both(run), argnums=(0, 1, 2, 3), has_aux=True))
        found, gradient = jax.block_until_ready(step(weights, x, extras, shared))
    copies = mesh.shape["data"]
    (y, (order, sums)), (expected, (_, totals)) = found[1], wanted[1]
    np.testing.assert_array_equal(order, weights)
    # of 64 numbers of either sign
    np.testing.assert_allclose(sums * M * copies, totals, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)  # 24 layers of sines of float32
    for one, other in zip(gradient, slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("inner", ["context", "expert"])
def test_a_mesh_that_xla_cannot_compile_is_refused(inner):
    """Nested manual axes in another order than the mesh's end the process within XLA: a line in its
    place."""
    names = ("data", inner, "stage")
    mesh = jax.make_mesh((1, 2, 4), names, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    x = jnp.ones((16, 4))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ConfigError, match=f"order the axes data, stage, {inner}$"),
    ):
        pipeline(toy, jnp.ones(24), x, x, jnp.float32(0), microbatches=4)


def test_the_bubble_is_the_share_of_idle_ticks():
    assert bubble(1, 4) == 0 and bubble(4, 4) == 3 / 7 and bubble(4, 4, repeats=2) == 3 / 11
    for S, M, R in [(2, 3, 1), (4, 8, 2)]:
        ticks = R * M + S - 1
        busy = sum(0 <= t - s < R * M for t in range(ticks) for s in range(S))
        assert bubble(S, M, R) == pytest.approx(1 - busy / (ticks * S))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config, pipe, said",
    [
        (
            GPT,
            Pipeline(3),
            (
                "a batch of 16 does not divide among 2 devices of a stage x mesh.microbatches=3; "
                "12 does"
            ),
        ),
        (
            DEEP,
            Pipeline(2, repeats=2),
            "mesh.microbatches=2: with mesh.repeats=2 at least as many as mesh.stage=4",
        ),
        (
            GPT,
            Pipeline(repeats=2),
            "model.num_layers=4: mesh.stage=4 x mesh.repeats=2 parts .* a multiple of 8",
        ),
        (
            replace(LOCAL, num_layers=4),
            Pipeline(),
            "whole patterns of 2 masks and mixers take a multiple of 8",
        ),
    ],
)
def test_what_does_not_come_out_even_is_refused_in_words(config, pipe, said):
    with jax.set_mesh(make_mesh(Mesh(stage=4))), pytest.raises(ConfigError, match=said):
        weights = jax.eval_shape(partial(models.init, config), jax.random.key(0))
        jax.eval_shape(partial(models.apply, staged(config, pipe)), weights, TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "axes", [dict(stage=4), dict(mine=2, stage=2), dict(stage=2, data=2, mine=2)], ids=str
)
def test_a_mesh_of_a_users_own_axes(axes):
    def stage(weights, pick, x, extras, shared, part, microbatch):
        layer = lambda x, row: (jnp.sin(x * pick(row) + extras), x.sum())
        return jax.lax.scan(layer, x, weights)

    weights, (x, extras) = jnp.arange(1.0, 5.0), jax.random.normal(jax.random.key(1), (2, 16, 3))
    expected = x
    for weight in weights:
        expected = jnp.sin(expected * weight + extras)
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    with jax.set_mesh(jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)):
        run = jax.jit(lambda *args: pipeline(stage, *args, microbatches=4)[0])
        found = jax.block_until_ready(run(weights, x, extras))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # four sines of float32


@pytest.mark.thorough
def test_without_stages_it_is_the_plain_stack():
    weights = jax.eval_shape(partial(models.init, GPT), jax.random.key(0))
    run = lambda config: jax.make_jaxpr(partial(models.apply, config))(weights, TOKENS)
    assert str(run(staged(GPT, Pipeline()))) == str(run(GPT))


AOT = """
import jax, jax.numpy as jnp
from dataclasses import replace
from functools import partial
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxformer import models, ops, params
from jaxformer.tools.planning.hlo import collectives
from jaxformer.models import ModelConfig
from jaxformer.models.stacks.pipeline import Pipeline
from jaxformer.ops.positions import Rope
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.sharding import shardings

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = make_mesh(Mesh(data=2, stage=4), devices)
for repeats in 1, 2:
    plain = ModelConfig(256, 16, 256, 4, 64, remat="full", attention_implementation="reference")
    config = replace(plain, stack=Pipeline(8, repeats))
    spec = models.spec(config)
    place = lambda one, where: jax.ShapeDtypeStruct(one.shape, jnp.float32, sharding=where)
    weights = jax.tree.map(place, params.abstract(spec), shardings(spec, mesh))
    tokens = jax.ShapeDtypeStruct(
        (16, 64), jnp.int32, sharding=NamedSharding(mesh, P(("data", "stage")))
    )

    def loss(weights, tokens):
        return ops.cross_entropy(
            models.apply(config, weights, tokens, dtype=jnp.bfloat16).logits, tokens
        ).loss

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.grad(loss), out_shardings=shardings(spec, mesh)).lower(
            weights, tokens
        )
    compiled = lowered.compile(compiler_options={"optimization_level": "O1"})
    held = 4 * params.count(spec["layers"]) // 4
    found = collectives(compiled.as_text(), mesh)
    assert not [one for one in found if one.kind in ("all-gather", "all-to-all")], found
    reduced = sum(one.bytes for one in found if one.kind == "all-reduce" and one.axes == ("data",))
    assert reduced == held, (reduced, held)
    permutes = sum(
        one.count for one in found if one.kind == "collective-permute" and one.axes == ("stage",)
    )
    print(repeats, permutes, compiled.memory_analysis().temp_size_in_bytes / held)
"""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install 'jax[tpu]'"
)
def test_a_tpu_step_neither_gathers_nor_copies_weights():
    environment = {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": "",
    }  # fmt: skip
    command = [sys.executable, "-c", AOT]
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    plain, circular = (line.split() for line in run.stdout.splitlines())
    assert int(plain[1]) == 2 * (11 + 2 * 3)
    # in units of a stage's weights: gradients in the loop and out of it, weights in bfloat16 and in
    # the layout of the
    # products, a layer's own; of a circular schedule, the weights as they are run beside as they
    # are stored. One copy a
    # tick would be 11, or 19.
    assert float(plain[2]) < 6 and float(circular[2]) < 9
