"""FLOPs of products counted in a program against closed forms, and against XLA where XLA counts
right."""

from dataclasses import replace
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from jaxformer import masks, models, zoo
from jaxformer.data.sources import Stdlib
from jaxformer.models import EncoderDecoder, LanguageModel, ModelConfig, cost, presets
from jaxformer.models.adaptation import Lora
from jaxformer.objectives.corruption import SpanCorruption
from jaxformer.objectives.tokens import TokenCrossEntropy
from jaxformer.ops import attention
from jaxformer.ops.attention import blockwise
from jaxformer.ops.attention.call import Call
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.planning import flops
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build, example_lengths, trained_weights
from jaxformer.training.step import init_state, make_train_step

B, T, D, L, V = 2, 64, 32, 3, 128
CONFIG = ModelConfig(
    V,
    L,
    D,
    num_heads=4,
    context_length=T,
    use_bias=False,
    heads=(),
    attention_implementation="reference",
)
floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)


def forward(config):
    parameters = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
    return flops.count(partial(models.apply, config), parameters, tokens).matmul


def step(config, **changes):
    """What a training step of B sequences computes."""
    experiment = Experiment(
        "counted", replace(config, heads=(LanguageModel(),)), Stdlib(), batch_size=B, **changes
    )
    batch = {"tokens": tokens, "labels": tokens, "weights": floats(B, T)}
    recipe = build(experiment)
    return flops.count(make_train_step(recipe), jax.eval_shape(partial(init_state, recipe)), batch)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("unroll", [1, L])
def test_a_layer_takes_24_n_d2_and_4_n2_d(unroll):
    """Four square products of attention and two of the feed-forward, 4 wide; scores and their use
    (Kaplan et al. 2020)."""
    assert forward(replace(CONFIG, unroll=unroll)) == L * B * (24 * T * D**2 + 4 * T**2 * D)


@pytest.mark.thorough
def test_a_step_takes_three_forwards_and_with_full_remat_nearly_four():
    layers, head = forward(CONFIG), 2 * B * T * D * V
    assert step(CONFIG).matmul == 3 * (layers + head)
    # nobody needs the output of a layer's last product again, and the loss keeps its logits'
    # gradients as it goes
    again = layers - L * B * T * 2 * 4 * D**2
    assert step(replace(CONFIG, remat="full")).matmul == 3 * (layers + head) + again
    # "dots" keeps every product with weights: what attention multiplies inside is computed again
    assert step(replace(CONFIG, remat="dots")).matmul == 3 * (layers + head) + L * B * 4 * T**2 * D
    assert step(CONFIG, accumulation=2).matmul == step(CONFIG).matmul


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", ["embedding|layers/feedforward", "^layers"])
def test_what_is_frozen_has_no_gradient_to_count(frozen):
    """The gradients of frozen weights are in the program, but nobody reads them, so that XLA
    removes them."""
    assert step(CONFIG, frozen=frozen).matmul == closed_form(frozen=frozen) < step(CONFIG).matmul


@pytest.mark.thorough
@pytest.mark.parametrize("unroll", [1, L])
def test_factors_beside_frozen_weights(unroll):
    """The closed form, and the factors: W + a b and the gradients of both."""
    rank, changes = 4, {"adaptation": Lora(rank=4), "initial": lambda spec, key: None}
    factors = L * 2 * 3 * 2 * D * rank * D
    # in the first layer nothing trains before query and value: queries, keys and values pass no
    # gradient on, and keys need none
    first = 0 if unroll == 1 else 3 * 2 * B * T * D**2 + 2 * B * T**2 * D
    assert (
        step(replace(CONFIG, unroll=unroll), **changes).matmul
        == closed_form(**changes) + factors - first
    )


def closed_form(**changes):
    model = replace(CONFIG, heads=(LanguageModel(),))
    trained = trained_weights(Experiment("counted", model, Stdlib(), batch_size=B, **changes))
    return cost.training_flops(model, T, trained=trained) * B * T


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2_small", "llama_7b", "qwen2_05b"])
def test_the_closed_form_is_within_a_percent_of_the_count(name):
    config = replace(
        zoo.PRESETS[name], num_layers=2, context_length=256, vocab_size=4096, dropout_rate=0.0,
        attention_dropout_rate=0.0, attention_implementation="reference",
    )  # fmt: skip
    experiment = Experiment("counted", config, Stdlib(), batch_size=B, precision="bfloat16")
    batch = {key: jax.ShapeDtypeStruct((B, 256), jnp.int32) for key in ("tokens", "labels")} | {
        "weights": floats(B, 256)
    }
    recipe = build(experiment)
    counted = flops.count(
        make_train_step(recipe), jax.eval_shape(partial(init_state, recipe)), batch
    )
    assert counted.matmul == pytest.approx(cost.training_flops(config, 256) * B * 256, rel=0.01)
    assert not counted.notes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("objective", "source"), [(TokenCrossEntropy(), 64), (SpanCorruption(99, 1), None)]
)
def test_of_an_encoder_decoder_each_side_counts_its_own_tokens(objective, source):
    """A source of 64 tokens and a target of 256, and a text of 256 tokens that becomes both (232
    and 52)."""
    small = dict(
        num_layers=1, context_length=256, vocab_size=1024, attention_implementation="reference"
    )
    half = lambda config: replace(config, **small)
    config = EncoderDecoder(half(presets.t5_small.encoder), half(presets.t5_small.decoder))
    experiment = Experiment("counted", config, Stdlib(), batch_size=B, objective=objective)
    batch = {key: jax.ShapeDtypeStruct((B, 256), jnp.int32) for key in ("tokens", "labels")} | {
        "weights": floats(B, 256)
    }
    if source is not None:
        batch["source"] = jax.ShapeDtypeStruct((B, source), jnp.int32)
    recipe = build(experiment)
    counted = flops.count(
        make_train_step(recipe), jax.eval_shape(partial(init_state, recipe)), batch
    )
    length, source = example_lengths(experiment, batch)
    assert (length, source) == ((256, 64) if "source" in batch else (52, 232))
    assert counted.matmul == pytest.approx(
        cost.training_flops(config, length, source) * B * length, rel=0.01
    )


@pytest.mark.thorough
def test_xla_counts_the_same_where_it_counts_right():
    """XLA counts a loop's body once, a kernel not at all, and elementwise operations too."""
    products = lambda x, y, z: jnp.einsum("bth,bsh->bts", x, y) @ z
    shapes = floats(2, 8, 16), floats(2, 32, 16), floats(2, 32, 4)
    theirs = lambda f, *arguments: jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"]
    assert flops.count(products, *shapes).matmul == theirs(products, *shapes)
    config = replace(CONFIG, unroll=L)
    parameters = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
    function = lambda p, t: models.apply(config, p, t).hidden
    counted, everything = (
        flops.count(function, parameters, tokens).matmul,
        theirs(function, parameters, tokens),
    )
    assert 0.85 * everything < counted < everything


@pytest.mark.thorough
def test_blockwise_attention_counts_what_it_visits():
    """Blocks that the mask leaves empty are no work: a constant table has the others, and its loops
    share it."""
    query = floats(B, 512, 4, 16)
    for mask in (masks.causal(), masks.causal() & masks.window(100), masks.full()):
        run = lambda q, k, v, mask=mask: blockwise.attention(
            q, k, v, Call(mask), block=(32, 64, 64)
        )
        visited = int((mask.sized(512).blocks(512, 512, (32, 64)) != masks.EMPTY).sum()) * 32 * 64
        counted = flops.count(run, query, query, query)
        assert counted.matmul == visited * B * 4 * 16 * 4 and not counted.notes
        both = flops.count(
            jax.grad(lambda *a, run=run: run(*a).sum(), (0, 1, 2)), query, query, query
        )
        # scores again, two products for each of two, and the sums of gradient times output
        assert both.matmul == 7 / 2 * counted.matmul + 2 * query.size and not both.notes


@pytest.mark.thorough
def test_inside_a_model_too():
    """There, differentiation cuts the scan over query blocks in two."""
    whole, blocks = (
        step(replace(CONFIG, attention_implementation=name, remat=remat))
        for name, remat in (("reference", "none"), ("blockwise", "none"))
    )
    assert not blocks.notes and blocks.matmul < 1.2 * whole.matmul


def test_the_splash_kernel_counts_its_blocks():
    from jaxformer.ops.attention import splash

    query = floats(1, 512, 2, 128)
    run = lambda mask, q: splash.attention(q, q, q, Call(mask))
    whole = flops.count(partial(run, masks.full()), query)
    assert whole.matmul == 4 * 2 * 512**2 * 128 and not whole.notes
    banded = flops.count(partial(run, masks.causal()), floats(1, 2048, 2, 128))
    # 4 x 4 blocks of 512, those above the diagonal left out
    assert banded.matmul == 10 / 16 * 4 * 2 * 2048**2 * 128


def test_loops_of_known_and_of_unknown_length():
    x = floats(8, 8)
    once = 2 * 8**3
    body = lambda _, y: y @ y
    assert flops.count(lambda x: jax.lax.fori_loop(0, 5, body, x), x).matmul == 5 * once
    assert (
        flops.count(
            lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ y, x), x
        ).matmul
        == once
    )
    assert flops.count(
        lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ y, x), x
    ).notes
    assert flops.count(
        lambda n, x: jax.lax.fori_loop(0, n, body, x), jax.ShapeDtypeStruct((), jnp.int32), x
    ).notes
    assert (
        flops.count(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=7)[0], x).matmul
        == 7 * once
    )


def test_a_loop_over_rows_counts_for_all_of_them():
    """As of routed experts, whose tokens come in blocks: how many are full the data say, and the
    array how many can be."""
    x, w = floats(6, 4, 8), floats(8, 8)
    run = lambda n, x, w: jax.lax.fori_loop(0, n, lambda i, out: out + x[i] @ w, jnp.zeros((4, 8)))
    counted = flops.count(run, jax.ShapeDtypeStruct((), jnp.int32), x, w)
    assert counted.matmul == 6 * 2 * 4 * 8 * 8 and counted.notes == {flops.ROWS}


def test_ring_attention_counts_each_device_for_itself():
    """Which blocks a device meets depends on its place on the axis."""
    query = floats(2, 1024, 4, 16)
    mesh = make_mesh(Mesh(data=2, context=4)).abstract_mesh
    run = jax.jit(partial(attention, mask=masks.causal(), implementation="ring"))
    with jax.sharding.use_abstract_mesh(mesh):
        counted = flops.count(run, query, query, query)
    dense = 2 * 4 * 2 * 1024**2 * 16 * 2
    assert not counted.notes and dense / 2 < counted.matmul < 0.7 * dense


def test_of_branches_the_dearest():
    x = floats(8, 8)
    branch = lambda p, x: jax.lax.cond(p, lambda x: x @ x @ x, lambda x: x @ x, x)
    counted = flops.count(branch, jax.ShapeDtypeStruct((), jnp.bool_), x)
    assert counted.matmul == 4 * 8**3 and "upper bound" in min(counted.notes)


def test_devices_under_shard_map_count_together():
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    mapped = jax.shard_map(
        lambda x, y: x @ y, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    # fsdp and tensor are manual, too, and compute the same: twice two times the work
    assert flops.count(mapped, floats(8, 8), floats(8, 8)).matmul == 4 * 2 * 8**3
    one = jax.shard_map(
        lambda x, y: x @ y,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert flops.count(jax.jit(one), floats(8, 8), floats(8, 8)).matmul == 2 * 8**3


def test_a_function_with_a_rule_for_batches_counts():
    """As kernels of tokamax have one."""
    square = jax.custom_batching.custom_vmap(lambda x: x @ x)
    square.def_vmap(lambda axis_size, in_batched, x: (x @ x, True))
    assert flops.count(square, floats(8, 8)).matmul == 2 * 8**3


@pytest.mark.parametrize("name", flops.KERNELS)
def test_a_kernel_that_does_not_say_its_products_is_named(name):
    kernel = jax.extend.core.Primitive(name)
    kernel.def_abstract_eval(lambda x, **options: x)

    def run(x, **options):
        return kernel.bind(x @ x, **options)

    counted = flops.count(run, floats(8, 8))
    assert counted.matmul == 2 * 8**3 and counted.notes == {flops.UNSEEN}
    estimate = pallas.CostEstimate(flops=100, transcendentals=0, bytes_accessed=0)
    counted = flops.count(partial(run, cost_estimate=estimate), floats(8, 8))
    assert counted.matmul == 2 * 8**3 + 100 and not counted.notes


def test_a_kernel_with_a_loop_of_unknown_length_counts_it_once():
    """As JAX's own attention for GPUs has it. It is a lower bound, whatever the grid is."""

    def body(count, x, out):
        def add(i, total):
            return total + x[...] @ x[...]

        out[...] = jax.lax.fori_loop(0, count[0], add, jnp.zeros((8, 8)))

    run = pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), grid=(3,))
    counted = flops.count(run, jax.ShapeDtypeStruct((1,), jnp.int32), floats(8, 8))
    assert counted.matmul == 3 * 2 * 8**3 and counted.notes == {flops.ONCE}


def test_convolutions_and_ragged_products():
    image, kernel = floats(1, 3, 8, 8), floats(5, 3, 2, 2)
    convolve = lambda x, w: jax.lax.conv(x, w, (2, 2), "VALID")
    assert flops.count(convolve, image, kernel).matmul == 2 * (5 * 4 * 4) * (3 * 2 * 2)
    groups = jax.ShapeDtypeStruct((4,), jnp.int32)
    ragged = lambda x, w, g: jax.lax.ragged_dot(x, w, g)
    assert flops.count(ragged, floats(12, 8), floats(4, 8, 6), groups).matmul == 2 * 12 * 8 * 6
