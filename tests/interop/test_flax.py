"""Our models as Flax modules and Flax's layers in our models: the same numbers, to the bit where
the program is the same."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from jaxformer import decoding, masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.interop.flax import FlaxFeedForward, FlaxMixer, as_linen, as_nnx, params_of
from jaxformer.models import (
    Alibi,
    Axial,
    Classification,
    EncoderDecoder,
    Learned,
    ModelConfig,
    Patches,
    Relative,
    Sinusoidal,
)
from jaxformer.models.layer import Context
from jaxformer.ops.positions import Rope

V, T, D, N = 13, 6, 8, 2
GPT = ModelConfig(
    vocab_size=V, num_layers=2, d_model=D, num_heads=N, context_length=8, d_ff=12, init_std=0.3
)
T5 = EncoderDecoder(
    replace(GPT, heads=(), positions=Relative(8, 16), masks=(masks.full(),)),
    replace(GPT, positions=Relative(8, 16, bidirectional=False), dropout_rate=0.2),
)
VIT = replace(
    GPT,
    vocab_size=0,
    context_length=5,
    embedding=Patches((4, 4), (2, 2), 3),
    masks=(masks.full(),),
    heads=(Classification(3, pooler=None),),
    dropout_rate=0.2,
)

TOKENS = jax.random.randint(jax.random.key(1), (2, T), 0, V)
KEY = jax.random.key(2)
# config, what it reads, options: families, activations in two dtypes, with dropout and without
CASES: dict[str, Any] = {
    "gpt": (GPT, TOKENS, dict(segment_ids=jnp.repeat(jnp.array([[1, 1, 2, 2, 2, 0]]), 2, axis=0))),
    "gpt_bfloat16": (GPT, TOKENS, dict(dtype=jnp.bfloat16)),
    "encoder_decoder": (T5, TOKENS, dict(source=TOKENS[:, ::-1], dropout_key=KEY)),
    "vit": (VIT, jax.random.normal(KEY, (2, 4, 4, 3)), dict(dropout_key=KEY)),
}


init = jax.jit(models.init, static_argnums=0)  # configs with Flax layers are hashable, too


def drawn(config, seed=0):
    """Any numbers of the right shapes: to draw what a model begins with is a program of its own."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype),
        params.abstract(models.spec(config)),
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def program(f, *args):
    """What XLA is given to compile: two functions with the same one agree to the bit, and nothing
    has to be compiled."""

    def main(*args):
        return f(*args)

    return jax.jit(main).lower(*args).as_text()


def loss_of(output):
    return jnp.mean(jnp.square(output.logits)) + jnp.mean(
        jnp.square(output.hidden.astype(jnp.float32))
    )


# outwards


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_modules_are_the_model_to_the_bit_forward_and_backward(name):
    config, x, options = CASES[name]
    rest = {name: value for name, value in options.items() if name != "dropout_key"}
    rngs = {"dropout": options["dropout_key"]} if "dropout_key" in options else {}

    def pure(tree):
        return models.apply(config, tree, x, **options)

    def through_linen(tree):
        return as_linen(config).apply({"params": tree}, x, rngs=rngs, **rest)

    def through_nnx(tree):
        return as_nnx(config, tree)(x, **options)

    def learned(f):
        def run(tree):
            (loss, output), grads = jax.value_and_grad(
                lambda tree: (loss_of(out := f(tree)), out), has_aux=True
            )(tree)
            return loss, output, grads

        return run

    tree = drawn(config)
    assert_same(params_of(as_nnx(config, tree)), tree)
    want = program(learned(pure), tree)
    assert program(learned(through_linen), tree) == want
    assert program(learned(through_nnx), tree) == want
    if name == "gpt_bfloat16":  # and to see it once
        numbers = [jax.jit(f)(tree) for f in (pure, through_linen)]
        numbers.append(nnx.jit(lambda model: model(x, **options))(as_nnx(config, tree)))
        assert_same(numbers[0], numbers[1])
        assert_same(numbers[0], numbers[2])


@pytest.mark.thorough
def test_linen_begins_with_our_parameters():
    config = replace(GPT, use_bias=False, positions=None, num_layers=1)
    module = as_linen(config, param_dtype=jnp.bfloat16)
    assert module == as_linen(config, param_dtype=jnp.bfloat16)  # one compilation for both
    variables = jax.jit(module.init)(KEY, TOKENS)
    assert_same(
        variables, {"params": jax.jit(partial(models.init, config, dtype=jnp.bfloat16))(KEY)}
    )
    abstract = jax.eval_shape(as_linen(T5).init, KEY, TOKENS, source=TOKENS)
    assert abstract == {"params": params.abstract(models.spec(T5))}


@pytest.mark.thorough
def test_linen_model_inside_a_linen_model():
    body = replace(GPT, heads=(), dropout_rate=0.5, num_layers=1, use_bias=False, positions=None)

    class Tagger(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            model, other = as_linen(body), as_linen(body)
            once, twice = model(tokens).hidden, model(tokens).hidden
            return linen.Dense(3)(once), once, twice, other(tokens).hidden

    def kernels(key):
        tree = Tagger().init(key, TOKENS)["params"]
        return [
            tree[f"Transformer_{i}"]["layers"]["attention"]["query"]["kernel"] for i in range(2)
        ]

    abstract = jax.eval_shape(Tagger().init, KEY, TOKENS)["params"]
    assert set(abstract) == {"Transformer_0", "Transformer_1", "Dense_0"}
    assert (
        abstract["Transformer_0"] == abstract["Transformer_1"] == params.abstract(models.spec(body))
    )
    assert not np.allclose(*jax.jit(kernels)(KEY))  # a key of its own for each instance
    tree = drawn(body)
    dense = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), abstract["Dense_0"])
    variables = {"params": {"Transformer_0": tree, "Transformer_1": tree, "Dense_0": dense}}
    hidden = jax.jit(lambda key: Tagger().apply(variables, TOKENS, rngs={"dropout": key})[1:])(KEY)
    for i in range(3):  # and for each instance and call what it drops
        assert not np.allclose(hidden[i], hidden[i - 1])


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean()


def plain_steps(config, tree, tx, steps=3):
    state = tx.init(tree)

    @jax.jit
    def step(tree, state):
        loss, grads = jax.value_and_grad(
            lambda tree: cross_entropy(models.apply(config, tree, TOKENS).logits)
        )(tree)
        updates, state = tx.update(grads, state, tree)
        return optax.apply_updates(tree, updates), state, loss

    losses = []
    for _ in range(steps):
        tree, state, loss = step(tree, state)
        losses.append(loss)
    return tree, losses


BARE = replace(GPT, use_bias=False)  # fewer parameters to update, sooner compiled


@pytest.mark.thorough
def test_training_through_flax_is_training_of_the_tree():
    tree, tx = drawn(BARE), optax.adam(1e-2)
    want, losses = plain_steps(BARE, tree, tx)

    model = as_nnx(BARE, tree)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(TOKENS).logits))(model)
        optimizer.update(model, grads)
        return loss

    state = TrainState.create(apply_fn=as_linen(BARE).apply, params=tree, tx=tx)

    @jax.jit
    def linen_step(state):
        loss, grads = jax.value_and_grad(
            lambda tree: cross_entropy(state.apply_fn({"params": tree}, TOKENS).logits)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    for loss in losses:
        np.testing.assert_array_equal(loss, nnx_step(model, optimizer))
        state, other = linen_step(state)
        np.testing.assert_array_equal(loss, other)
    assert_same(params_of(model), want)
    assert_same(state.params, want)
    assert losses[-1] < losses[0]


@pytest.mark.thorough
def test_nnx_split_merge_state_and_the_way_back():
    tree = drawn(GPT)
    model = as_nnx(GPT, tree)
    graph, state = nnx.split(model)
    assert {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)} == set(
        params.paths(tree)
    )
    doubled = nnx.merge(graph, jax.tree.map(lambda a: 2 * a, state))
    assert_same(params_of(doubled), jax.tree.map(lambda a: 2 * a, tree))
    assert graph == nnx.graphdef(as_nnx(GPT, tree)) and hash(graph) == hash(
        nnx.graphdef(as_nnx(GPT, tree))
    )
    nnx.update(model, nnx.state(doubled, nnx.Param))
    assert_same(params_of(model), params_of(doubled))
    model.head = nnx.Linear(D, 3, rngs=nnx.Rngs(0))  # what a user hangs on it is not ours
    assert_same(params_of(model), params_of(doubled))


class Lora(nnx.Module):
    """kernel [L, D, N, H] plus a [L, D, rank] b [L, rank, N H]: as a user writes it."""

    def __init__(self, kernel: nnx.Param, rank: int, rngs: nnx.Rngs):
        L, D, *out = kernel.shape
        self.kernel = kernel
        self.a = nnx.LoRAParam(nnx.initializers.he_uniform()(rngs.params(), (L, D, rank)))
        self.b = nnx.LoRAParam(jnp.zeros((L, rank, np.prod(out))))

    def __call__(self):
        return self.kernel + (self.a @ self.b).reshape(self.kernel.shape)


@pytest.mark.thorough
def test_lora_in_place_of_a_kernel():
    tree = drawn(GPT)
    model, rngs = as_nnx(GPT, tree), nnx.Rngs(0)
    for name in ("query", "value"):
        projection = model.layers.attention[name]
        projection.kernel = Lora(projection.kernel, 2, rngs)
    assert_same(params_of(model), tree)  # b starts at zero
    optimizer = nnx.Optimizer(model, optax.adam(5e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        lora = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(
            lambda model: cross_entropy(model(TOKENS).logits), argnums=lora
        )(model)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer) for _ in range(5)]
    assert losses[-1] < losses[0]
    tuned = params.paths(params_of(model))
    changed = {
        path for path, leaf in params.paths(tree).items() if not np.array_equal(leaf, tuned[path])
    }
    assert changed == {"layers/attention/query/kernel", "layers/attention/value/kernel"}
    np.testing.assert_array_equal(
        model.layers.attention.query.kernel.kernel[...],
        tree["layers"]["attention"]["query"]["kernel"],
    )


@pytest.mark.thorough
def test_flaxs_own_lora_on_top_of_our_hidden_states():
    class Tagger(nnx.Module):
        def __init__(self, tree, rngs):
            self.body = as_nnx(GPT, tree)
            self.head = nnx.LoRA(D, 2, 3, base_module=nnx.Linear(D, 3, rngs=rngs), rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.body(tokens).hidden)

    model = Tagger(drawn(GPT), nnx.Rngs(0))
    grads = nnx.jit(
        nnx.grad(lambda m: jnp.sum(m(TOKENS) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))
    )(model)
    assert {path[0] for path, _ in nnx.to_flat_state(grads)} == {"head"}
    assert (
        len(jax.tree.leaves(nnx.state(model, nnx.Param)))
        == len(jax.tree.leaves(models.spec(GPT))) + 4
    )


# inwards


def masked(module, x, context):
    return module(x, mask=context.mask.dense(x.shape[1], x.shape[1]))


class Mlp(nnx.Module):
    """With a list inside, whose paths are numbers, and dropout."""

    def __init__(self, rate, rngs):
        self.layers = nnx.List([nnx.Linear(D, 12, rngs=rngs), nnx.Linear(12, D, rngs=rngs)])
        self.drop = nnx.List([nnx.Dropout(rate, rngs=rngs), nnx.Dropout(rate, rngs=rngs)])

    def __call__(self, x):
        return self.drop[1](self.layers[1](nnx.relu(self.drop[0](self.layers[0](x)))))


class LinenMlp(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, deterministic=False):
        x = linen.Dropout(self.rate)(linen.gelu(linen.Dense(12)(x)), deterministic=deterministic)
        return linen.Dense(
            D,
            kernel_init=linen.with_logical_partitioning(linen.initializers.ones, ("mlp", "embed")),
        )(x)


def linen_mlp(module, x, context):
    return module(x, deterministic=context.dropout_key is None)


GUESTS: dict[str, ModelConfig] = {
    "linen": replace(
        GPT,
        mixer=FlaxMixer(linen.MultiHeadDotProductAttention(N), masked),
        feedforward=FlaxFeedForward(LinenMlp(), linen_mlp),
    ),
    "nnx": replace(
        GPT,
        mixer=FlaxMixer(lambda rngs: nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs), masked),
        feedforward=FlaxFeedForward(lambda rngs: Mlp(0.5, rngs)),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", GUESTS)
def test_flax_layers_in_a_scanned_model(name):
    config = GUESTS[name]
    tree = init(config, KEY)
    assert_same(
        jax.tree.map(jnp.shape, tree), jax.tree.map(lambda leaf: leaf.shape, models.spec(config))
    )

    def loss(tree, tokens):
        logits = models.apply(config, tree, tokens).logits
        return jnp.sum(jnp.square(logits)), logits

    run = jax.jit(jax.grad(loss, has_aux=True))
    grads, logits = run(tree, TOKENS)
    for path, leaf in params.paths(grads["layers"]).items():
        # softmax does not see what all keys have in common
        assert (
            path == "attention/key/bias"
            or (np.abs(leaf).max(axis=tuple(range(1, leaf.ndim))) > 0).all()
        ), path
    for path, leaf in params.paths(tree["layers"]).items():
        drawn = path.endswith("kernel") and np.ptp(leaf) > 0
        assert drawn == (not np.array_equal(leaf[0], leaf[1])), path
    changed = run(tree, (TOKENS.at[:, 4].add(1)) % V)[1]
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])  # the guest keeps the mask
    assert not np.allclose(changed[:, 4:], logits[:, 4:])

    drop = jax.jit(
        lambda key: models.apply(config, tree, TOKENS, dropout_key=key, dtype=jnp.bfloat16).hidden
    )
    one, other = drop(KEY), drop(jax.random.key(3))
    assert one.dtype == jnp.bfloat16
    assert_same(one, drop(KEY))
    assert not np.allclose(one.astype(np.float32), other.astype(np.float32))


@pytest.mark.thorough
def test_an_nnx_guest_drops_where_there_is_a_key():
    spec, apply, *_ = FlaxFeedForward(lambda rngs: Mlp(0.5, rngs))(GPT)
    rng = np.random.default_rng(0)
    tree = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), spec)
    x = jnp.asarray(rng.normal(size=(2, T, D)), jnp.float32)
    up, down = tree["layers"]["0"], tree["layers"]["1"]
    whole = (
        np.maximum(x @ up["kernel"] + np.array(up["bias"])[None, None], 0) @ down["kernel"]
        + down["bias"][None, None]
    )
    context = Context(masks.full(), jnp.arange(T)[None])
    # sums of 12 in float32
    np.testing.assert_allclose(apply(tree, x, context).out, whole, rtol=1e-5, atol=1e-5)
    outs = [
        apply(tree, x, replace(context, dropout_key=key)).out
        for key in (KEY, jax.random.PRNGKey(2))
    ]
    assert all(0.3 < np.mean(out == 0) < 0.7 for out in outs)  # 96 draws at 0.5: 4 deviations
    nothing = jax.tree.map(jnp.zeros_like, tree)
    nothing["layers"]["0"]["bias"] += 1.0
    nothing["layers"]["1"]["kernel"] += jnp.pad(jnp.eye(D), ((0, 4), (0, 0)))
    # 4 where both keep: each stream draws its own
    kept = apply(nothing, x, replace(context, dropout_key=KEY)).out
    assert set(np.unique(kept)) == {0, 4} and 0.1 < np.mean(kept == 4) < 0.4


@pytest.mark.thorough
def test_a_guests_own_initialisers_and_names_are_kept():
    layer = models.spec(GUESTS["linen"])["layers"]["feedforward"]["Dense_1"]["kernel"]
    assert layer.axes == ("layers", "mlp", "embed")
    np.testing.assert_array_equal(layer.init(KEY, layer.shape, jnp.float32), np.ones((2, 12, D)))
    named = FlaxFeedForward(
        lambda rngs: nnx.Linear(D, D, kernel_metadata={"out_sharding": ("embed", None)}, rngs=rngs)
    )(GPT)
    assert named.spec["kernel"].axes == ("embed", None) and named.spec["bias"].axes == (None,)
    deviation = np.std(init(GUESTS["nnx"], KEY)["layers"]["feedforward"]["layers"]["0"]["kernel"])
    assert 0.7 < deviation * D**0.5 < 1.3  # lecun_normal, 192 draws: 5 % off by chance


@pytest.mark.thorough
def test_flaxs_attention_as_a_mixer_is_our_attention():
    tree = drawn(GPT)
    segment_ids = CASES["gpt"][2]["segment_ids"]

    @jax.jit
    def run(tree):
        configs = GPT, *(replace(GPT, mixer=config.mixer) for config in GUESTS.values())
        return [
            models.apply(config, tree, TOKENS, segment_ids=segment_ids).hidden for config in configs
        ]

    ours, *theirs = run(tree)
    for hidden in theirs:
        # float32, one softmax of few keys, two layers; padding sees nothing, of which Flax makes an
        # even mean
        np.testing.assert_allclose(hidden[:, :5], ours[:, :5], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_a_layer_without_parameters():
    config = replace(
        GPT,
        masks=(masks.full(),),
        mixer=FlaxMixer(lambda rngs: nnx.Sequential(lambda x: jnp.fft.fft2(x).real)),
        feedforward=FlaxFeedForward(linen.Sequential([linen.relu])),
    )
    tree = drawn(config)
    assert set(tree["layers"]) == {"attention_norm", "feedforward_norm"}
    assert_same(params_of(as_nnx(config, tree)), tree)
    abstract = jax.eval_shape(as_linen(config).init, KEY, TOKENS)["params"]
    assert abstract == params.abstract(models.spec(config))
    assert jax.eval_shape(partial(models.apply, config), tree, TOKENS).logits.shape == (2, T, V)


@pytest.mark.thorough
@pytest.mark.parametrize("name", GUESTS)
def test_guests_inside_flax_modules(name):
    config = GUESTS[name]
    tree = drawn(config)
    want = program(lambda tree: models.apply(config, tree, TOKENS), tree)
    assert program(lambda tree: as_linen(config).apply({"params": tree}, TOKENS), tree) == want
    assert program(lambda tree: as_nnx(config, tree)(TOKENS), tree) == want


# refusals


def full(mask, q, kv):
    """A user's rule, which has the name of one of ours."""
    return (q + kv) % 2 == 0


NORM = lambda rngs: nnx.BatchNorm(D, rngs=rngs)
REFUSED: dict[str, tuple] = {
    "linen state": (
        dict(feedforward=FlaxFeedForward(linen.BatchNorm(False))),
        "BatchNorm keeps batch_stats beside",
    ),
    "nnx state": (dict(feedforward=FlaxFeedForward(NORM)), "keeps BatchStat beside"),
    "made already": (
        dict(mixer=FlaxMixer(nnx.Linear(D, D, rngs=nnx.Rngs(0)))),
        "give the function that makes it",
    ),
    "width": (
        dict(feedforward=FlaxFeedForward(linen.Dense(3))),
        r"Dense makes \(1, 8, 3\) of x \(1, 8, 8\)",
    ),
    "mask unseen": (dict(mixer=FlaxMixer(linen.Dense(D))), "does not see the mask causal()"),
    "named full": (
        dict(mixer=FlaxMixer(linen.Dense(D)), masks=(masks.Mask(full),)),
        r"not see the mask Mask\(full\)",
    ),
    "rope": (
        dict(mixer=FlaxMixer(linen.Dense(D)), positions=Rope()),
        "model.positions=.*build it into the layer",
    ),
    "softcap": (
        dict(mixer=FlaxMixer(linen.Dense(D)), attention_softcap=3.0),
        "model.attention_softcap=3.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_a_line(name):
    changes, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        models.spec(replace(GPT, **changes))


@pytest.mark.thorough
def test_positions_of_the_embedding_reach_a_layer_and_no_others():
    config = replace(GPT, masks=(masks.full(),), mixer=FlaxMixer(linen.Dense(D)))
    for positions in (Learned(), Sinusoidal(), Axial((2, 4), (3, 5)), None):
        found = replace(config, positions=positions)
        shapes = params.abstract(models.spec(found))
        assert jax.eval_shape(partial(models.apply, found), shapes, TOKENS).hidden.shape == (
            2,
            T,
            D,
        )
    for positions in (Rope(), Alibi(), Relative(8, 16), lambda config: None):
        with pytest.raises(ConfigError, match=r"model.positions=.*build it into the layer"):
            models.spec(replace(config, positions=positions))


@pytest.mark.thorough
def test_masks_that_only_a_batch_has_and_states_are_refused():
    config = replace(GPT, masks=(masks.full(),), mixer=FlaxMixer(linen.Dense(D)))
    tree = drawn(config)
    with pytest.raises(ConfigError, match="does not see the mask"):
        models.apply(config, tree, TOKENS, segment_ids=jnp.ones_like(TOKENS))
    with pytest.raises(NotImplementedError, match="FlaxMixer cannot decode"):
        decoding.init_cache(config, 1, 8)
    with pytest.raises(NotImplementedError, match="keeps no attention maps"):
        models.apply(config, tree, TOKENS, intermediates=("layers/*/attention/weights",))


def test_parameters_of_another_config_are_refused():
    tree = drawn(GPT)
    with pytest.raises(ConfigError, match=r"config: layers/.* has shape \(2.*expected \(3"):
        as_nnx(replace(GPT, num_layers=3), tree)
    with pytest.raises(ConfigError, match=r"config: heads is no parameter of this config"):
        as_nnx(GPT, drawn(replace(GPT, tie_embeddings=False)))
