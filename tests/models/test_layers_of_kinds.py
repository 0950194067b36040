"""Layers of different kinds in one stack, and reversible ones, against loops over layers in
Python."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import Axial, EncoderDecoder, Mixture, ModelConfig, blocks, sublayers
from jaxformer.models.embedding import embed
from jaxformer.models.feedforward import feed
from jaxformer.models.layer import Context, Mixer, MixerOutput, Source, linear, linear_spec
from jaxformer.models.mixers import attention
from jaxformer.models.norm import norm
from jaxformer.models.stacks import layout
from jaxformer.ops.positions import Rope
from jaxformer.zoo.linear_attention import Linear
from jaxformer.zoo.linformer import Linformer
from jaxformer.zoo.performer import Performer
from jaxformer.zoo.reformer import Reformer
from jaxformer.zoo.reversible import Reversible

V, T, L = 17, 8, 4
HASH = Reformer(chunk=4, rounds=2, buckets=4)
BASE = ModelConfig(
    vocab_size=V,
    num_layers=L,
    d_model=12,
    num_heads=2,
    context_length=T,
    d_ff=16,
    norm_eps=1e-3,
    use_bias=False,
)
PATTERNS = {
    "reformer": replace(
        BASE, mixer=(None, HASH), masks=(masks.causal(), masks.causal() & masks.window(2))
    ),
    # the same parameters in both kinds, and constants in the second alone
    "performer": replace(BASE, mixer=(None, Performer(features=8))),
    "three": replace(
        BASE, num_layers=6, mixer=(Linear(), HASH, None), masks=(masks.causal(), masks.causal())
    ),
}


def tokens():
    return jnp.asarray(np.random.default_rng(2).integers(0, V, (2, T)), jnp.int32)


def random(config, dtype=jnp.float32):
    """Parameters of the size of their spec's."""
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: (path[-1].key == "scale") + 0.3 * rng.normal(size=leaf.shape)
    return jax.tree_util.tree_map_with_path(
        lambda *leaf: jnp.asarray(draw(*leaf), dtype), models.spec(config)
    )


def kinds(config):
    """Of each layer its kind, and its number among those of the kind that have a key of their
    own."""
    pattern = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    return [pattern[i % len(pattern)] for i in range(config.num_layers)]


def by_layer(config, parameters):
    """Of each layer the mixer, its parameters chosen by hand, its mask and the constants that it
    drew."""
    every, stored = kinds(config), parameters["layers"]
    places = len(config.mixer) if HASH in every else 1  # it has no keys: queries are their own
    for i, kind in enumerate(every):
        tree = stored[str(i % places)] if places > 1 else stored
        mine = jax.tree.map(lambda leaf, row=i // places: leaf[row], tree)
        mixer = (kind or attention)(replace(config, positions=None))
        drawn = mixer.constants(T)
        constants = None if drawn is None else drawn[i]
        yield mixer, mine, config.masks[i % len(config.masks)], constants


def context_of(i, mask, constants, source=None):
    source = None if source is None else Source(source, masks.full())
    return Context(mask, jnp.arange(T)[None], layer=i, constants=constants, source=source)


@partial(jax.jit, static_argnums=0)
def looped(config, parameters, tokens, source=None):
    x = embed(config, parameters["embedding"], tokens, context_of(0, masks.full(), None))
    for i, (_, mine, mask, constants) in enumerate(by_layer(config, parameters)):
        width = None if source is None else source.shape[-1]
        kind = sublayers.kind(replace(config, mixer=kinds(config)[i], positions=None), width)
        x = sublayers.run(config, kind, mine, x, context_of(i, mask, constants, source)).hidden
    return norm(config, parameters["final_norm"], x)


apply = jax.jit(models.apply, static_argnums=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "three" else ()) for n in PATTERNS]
)
def test_scanned_layers_of_different_kinds_equal_a_loop(name):
    config = PATTERNS[name]
    parameters = random(config)
    expected = looped(config, parameters, tokens())
    # float32, the same products in the same order but for fusion
    np.testing.assert_allclose(
        apply(config, parameters, tokens()).hidden, expected, rtol=1e-4, atol=2e-5
    )
    swapped = replace(config, mixer=config.mixer[::-1])
    if name == "performer":  # both kinds have the same parameters: only the order tells
        assert np.abs(apply(swapped, parameters, tokens()).hidden - expected).max() > 1e-2


def test_layers_of_other_parameters_are_stored_by_their_place():
    rows = lambda config: {
        path: leaf.shape[0] for path, leaf in params.paths(models.spec(config)["layers"]).items()
    }
    for name, places in (("reformer", 2), ("three", 3)):
        config = PATTERNS[name]
        found = rows(config)
        assert {path.split("/")[0] for path in found} == set(map(str, range(places)))
        assert "1/attention/key/kernel" not in found and "0/attention/key/kernel" in found
        assert set(found.values()) == {config.num_layers // places}
    # layers of one kind are no special case, whatever else takes turns
    assert set(rows(replace(BASE, mixer=(None, None), positions=(Rope(), None))).values()) == {L}
    assert set(rows(PATTERNS["performer"]).values()) == {L}


@pytest.mark.thorough
def test_what_all_layers_share_may_be_of_the_second_kind():
    config = replace(BASE, mixer=(None, Linformer(4, "layerwise")), masks=(masks.full(),))
    assert set(models.spec(config)["shared"]) == {"key_projection"}
    other = replace(config, mixer=config.mixer[::-1])
    first, second = (apply(c, random(c), tokens()).hidden for c in (config, other))
    assert np.isfinite(first).all() and np.abs(first - second).max() > 1e-2


def test_a_pattern_of_other_parameters_must_fit_into_the_depth():
    with pytest.raises(ConfigError, match="num_layers=5 is no multiple of the pattern of 2"):
        models.spec(replace(PATTERNS["reformer"], num_layers=5))


THREE_MASKS = masks.causal(), masks.causal() & masks.window(2), masks.causal() & masks.window(1)
EXPERTS = Mixture(4, 2, d_ff=8, balance_loss=0.1)
UNEVEN = {
    "masks of another period": replace(PATTERNS["reformer"], masks=THREE_MASKS),
    "a rest of a pattern": replace(PATTERNS["performer"], num_layers=5),
    "dense, then experts": replace(
        BASE, num_layers=5, feedforward=("relu", *[EXPERTS] * 4), masks=THREE_MASKS[:2]
    ),
    "dense and experts in turn": replace(BASE, feedforward=("relu", EXPERTS), positions=None),
    "mixers, feed-forwards and masks": replace(
        BASE,
        num_layers=6,
        mixer=(None, HASH),
        feedforward=("relu", "swiglu", EXPERTS),
        masks=THREE_MASKS[:2],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNEVEN)
def test_patterns_of_any_period_equal_a_loop(name):
    """Scanned, one after another, computed again: each equals a loop over layers whose parameters
    are found by hand."""
    config = UNEVEN[name]
    parameters = random(config)
    x = embed(config, parameters["embedding"], tokens(), context_of(0, masks.full(), None))
    losses = []
    for i, mine in enumerate(layout.unstacked(config, parameters["layers"])):
        here = layout.layer_config(config, i)
        drawn = (here.mixer or attention)(here).constants(T)
        constants = jax.tree.map(lambda leaf, i=i: leaf[i], drawn)
        context = context_of(i, config.masks[i % len(config.masks)], constants)
        output = sublayers.run(here, sublayers.kind(here), mine, x, context)
        x = output.hidden
        losses += [] if output.loss is None else [output.loss]
    expected = norm(config, parameters["final_norm"], x)
    for changes in (dict(unroll=1), dict(unroll=config.num_layers), dict(unroll=2, remat="full")):
        found = apply(replace(config, **changes), parameters, tokens())
        # float32 sums in another order
        np.testing.assert_allclose(found.hidden, expected, rtol=1e-4, atol=2e-5)
        assert (found.loss is None) == (not losses)
        if losses:
            np.testing.assert_allclose(found.loss, np.mean(losses), rtol=1e-5)
            assert found.stats["fraction"].shape == (len(losses), 4)


@pytest.mark.parametrize("config", [*UNEVEN.values(), *PATTERNS.values()], ids=[*UNEVEN, *PATTERNS])
def test_the_rows_of_a_place_are_layers_in_the_order_of_the_depth(config):
    tree = models.spec(config)["layers"]
    found = [
        segment.place_of(k) for segment in layout.segments(config) for k in range(segment.count)
    ]
    assert len(found) == config.num_layers
    for place in dict(found):
        rows = {leaf.shape[0] for leaf in params.paths(layout.place(tree, place)).values()}
        assert [row for name, row in found if name == place] == list(range(*rows))


def running_mean(config):
    """The mean of all tokens so far, which a tree of trees remembers."""
    D = config.d_model
    spec = {"matrix": linear_spec(config, "out", (D, D), ("embed", "embed_out"), ("embed",), 0.3)}

    def apply(params, x, context):
        T = x.shape[1]
        totals, (count,) = state(x.shape[0], T, x.dtype) if context.state is None else context.state
        sums = totals["all"]["sum"][:, None] + jnp.cumsum(x, axis=1)
        counts = count[:, None] + jnp.arange(1, T + 1, dtype=x.dtype)[None]
        out = linear("btd,de->bte", sums / counts[..., None], params["matrix"])
        return MixerOutput(out, ({"all": {"sum": sums[:, -1]}}, [counts[:, -1]]))

    def state(batch, length, dtype):
        return {"all": {"sum": jnp.zeros((batch, D), dtype)}}, [jnp.zeros(batch, dtype)]

    return Mixer(spec, apply, state)


CACHED = {
    "attention and Performer": replace(BASE, mixer=(None, Performer(features=8))),
    "twice attention, then Linear": replace(
        BASE, num_layers=6, mixer=(None, None, Linear()), use_bias=True
    ),
    "more masks than mixers": replace(BASE, mixer=(Linear(), None), masks=(masks.causal(),) * 4),
    "a tree of trees": replace(BASE, mixer=running_mean),
    "a tree of trees among others": replace(BASE, mixer=(running_mean, None)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "a tree of trees" else ()) for n in CACHED],
)
def test_layers_of_different_kinds_decode(name):
    """A prompt and then token after token give the logits of the whole row."""
    config = CACHED[name]
    parameters = random(config)
    expected = np.asarray(apply(config, parameters, tokens()).logits)
    cache, found = decoding.init_cache(config, 2, T), []
    assert sum(leaf.size for leaf in jax.tree.leaves(cache.layers)) > 0
    for start, stop in [(0, 5), *((i, i + 1) for i in range(5, T))]:
        out = apply(config, parameters, tokens()[:, start:stop], cache=cache)
        found.append(out.logits)
        assert jax.tree.map(jnp.shape, out.cache.layers) == jax.tree.map(jnp.shape, cache.layers)
        cache = out.cache
    # float32, sums in another order, up to six layers deep
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.thorough
def test_a_pattern_generates():
    config = CACHED["attention and Performer"]
    parameters, prompt = random(config), tokens()[0, :3].tolist()
    [greedy] = decoding.generate(
        config, parameters, [prompt], 4, sampling=decoding.Sampling(temperature=0.0)
    )
    # causal, so one forward pass over the result shows what was likeliest at every step
    logits = apply(config, parameters, jnp.asarray([prompt + greedy])).logits[0]
    assert greedy == logits[2:-1].argmax(axis=-1).tolist()


def test_a_pattern_with_a_mixer_that_cannot_decode_says_so():
    with pytest.raises(NotImplementedError, match="Reformer cannot decode"):
        decoding.init_cache(PATTERNS["reformer"], 1, 8)
    assert (
        len(
            decoding.init_cache(
                replace(CACHED["attention and Performer"], num_layers=5), 1, 8
            ).layers
        )
        == 5
    )
    cache = decoding.init_cache(replace(BASE, mixer=(Linear(), Linear())), 1, 8)
    # rows first
    assert len(cache.layers) == L and {leaf.shape[0] for leaf in jax.tree.leaves(cache.layers)} == {
        1
    }


@pytest.mark.thorough
def test_a_decoder_of_different_kinds_reads_its_source():
    stack = replace(BASE, num_layers=2)
    config = EncoderDecoder(
        replace(stack, masks=(masks.full(),), heads=()), replace(stack, mixer=(None, Linear()))
    )
    parameters = random(config)
    out = apply(config, parameters, tokens(), source=tokens()[:, ::-1])
    expected = looped(config.decoder, parameters["decoder"], tokens(), out.source)
    np.testing.assert_allclose(out.hidden, expected, rtol=1e-4, atol=2e-5)


def streams(config, parameters, tokens):
    """Two streams, layer after layer: x1 + f(norm(x2)), x2 + g(norm(x1))."""
    x1 = x2 = embed(config, parameters["embedding"], tokens, context_of(0, masks.full(), None))
    for i, (mixer, mine, mask, constants) in enumerate(by_layer(config, parameters)):
        context = context_of(i, mask, constants)
        x1 = (
            x1
            + mixer.apply(mine["attention"], norm(config, mine["attention_norm"], x2), context).out
        )
        x2 = (
            x2
            + feed(config)
            .apply(mine["feedforward"], norm(config, mine["feedforward_norm"], x1), context)
            .out
        )
    both = (x1 + x2) / 2 if config.stack.streams == 1 else jnp.concatenate([x1, x2], axis=-1)
    return norm(config, parameters["final_norm"], both)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        replace(
            PATTERNS["reformer"],
            stack=Reversible(streams=2),
            tie_embeddings=False,
            positions=Axial((2, 4), (5, 7)),
        ),
        pytest.param(
            replace(BASE, stack=Reversible(), mixer=(Linear(), None), masks=(masks.causal(),)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_reversible_layers_equal_two_streams_and_their_gradients_autodiff(config):
    """In float64: what comes back from below has lost a few roundings of 1e-16."""
    with jax.enable_x64(True):
        parameters, inputs = random(config, jnp.float64), tokens()

        def value_and_gradient(hidden):
            loss = lambda p: jnp.sum(jnp.sin(hidden(p)))
            return jax.jit(jax.value_and_grad(loss))(
                {k: v for k, v in parameters.items() if k != "heads"}
            )

        ours = value_and_gradient(lambda p: models.encode(config, p, inputs).hidden)
        expected = value_and_gradient(lambda p: streams(config, p, inputs))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), ours, expected)
        assert expected[0].dtype == jnp.float64


@pytest.mark.thorough
def test_what_reversible_layers_cannot_do_they_say():
    config = replace(BASE, stack=Reversible())
    shapes = params.abstract(models.spec(config))
    run = lambda config, **options: jax.eval_shape(
        partial(models.apply, config, **options), params.abstract(models.spec(config)), tokens()
    )
    assert run(config).hidden.shape == (2, T, 12)
    with pytest.raises(ConfigError, match="pre-norm"):
        run(replace(config, block=blocks.sandwich))
    with pytest.raises(NotImplementedError, match="intermediates"):
        run(config, intermediates=("layers/*/residual",))
    with pytest.raises(NotImplementedError, match="cache"):
        jax.eval_shape(
            lambda p: models.apply(config, p, tokens(), cache=decoding.init_cache(config, 2, T)),
            shapes,
        )
    run(replace(config, feedforward=Mixture(4, 2)))
    with pytest.raises(NotImplementedError, match="auxiliary loss"):
        run(replace(config, feedforward=Mixture(4, 2, balance_loss=0.1)))
    with pytest.raises(
        ConfigError, match="reads 24 features by the embedding's rows, which have 12"
    ):
        replace(config, stack=Reversible(streams=2))


def one_kernel(init, name="kernel", **traits):
    """A mixer of one matrix."""
    leaf = params.Spec((BASE.d_model,) * 2, ("embed", "mlp"), init, ("embed",), **traits)
    return lambda config: Mixer({name: leaf}, lambda mine, x, context: MixerOutput(x @ mine[name]))


@pytest.mark.thorough
def test_layers_of_a_kind_start_as_their_own_spec_says():
    zeros, ones, normal = (
        getattr(jax.nn.initializers, name) for name in ("zeros", "ones", "normal")
    )
    drawn = lambda *kinds: models.init(replace(BASE, mixer=kinds), jax.random.key(0))["layers"][
        "attention"
    ]["kernel"]
    found = drawn(
        one_kernel(ones), one_kernel(normal(2.0)), one_kernel(zeros), one_kernel(normal(1.0))
    )
    assert (found[0] == 1).all() and (found[2] == 0).all()
    np.testing.assert_array_equal(
        found[1::2], drawn(one_kernel(normal(1.0)))[1::2] * np.array([2, 1])[:, None, None]
    )


@pytest.mark.thorough
def test_parameters_of_one_name_that_are_no_rows_of_one_are_stored_apart():
    ones = jax.nn.initializers.ones
    for kinds in (
        (one_kernel(ones), one_kernel(ones, rate=2.0)),
        (one_kernel(ones, "query"), None),
        (None, one_kernel(ones, "query")),
    ):
        config = replace(BASE, mixer=kinds)
        assert set(models.spec(config)["layers"]) == {"0", "1"}
        assert np.isfinite(apply(config, random(config), tokens()).hidden).all()
    # parameters that all layers share
    linformers = (
        Linformer(4, "layerwise"),
        Linformer(2, "layerwise"),
    )
    with pytest.raises(
        ConfigError,
        match=r"shared parameter key_projection is .* in one part of a layer, .* in another",
    ):
        models.spec(replace(BASE, mixer=linformers, masks=(masks.full(),)))
