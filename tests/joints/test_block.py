"""A block of one's own: the page docs/your-own-block.md, and what a block may and may not do."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, ModelConfig, blocks, embedding, sublayers
from jaxformer.models.config import Alibi
from jaxformer.models.layer import Block, Context, LayerOutput
from jaxformer.models.norm import Unscaled, no_norm, norm, norm_spec
from jaxformer.models.stacks import layout
from tests.joints.harness import (
    answer,
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    assert_short,
    read_page,
)

PAGE = read_page("your-own-block")
TINY = ModelConfig(
    vocab_size=13, num_layers=4, d_model=16, num_heads=2, context_length=12, init_std=0.3
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 12)), jnp.int32)
OURS = {
    "pre_norm": None,
    "post_norm": blocks.post_norm,
    "sandwich": blocks.sandwich,
    "output_norm": blocks.output_norm,
    "parallel": blocks.parallel,
    "parallel_norms": blocks.parallel_norms,
}


def test_the_page_is_short():
    assert_short(PAGE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PAGE)
def test_each_file_of_the_page_survives_a_kill_and_runs_on_eight_devices(name, tmp_path, capsys):
    files = {name: PAGE[name]}
    folder = assert_resumes_to_the_same_bits(files, tmp_path)
    assert_same_on_eight_devices(files, tmp_path, whole=folder)
    assert answer(folder, name, "def ", capsys, "--tokens=4").strip()


@pytest.mark.thorough
def test_the_page_writes_what_the_library_has():
    """The blocks of the page and those of the library are the same function of the same
    parameters."""
    for name, ours in (("parallel", blocks.parallel), ("olmo2-order", blocks.output_norm)):
        scope: dict = {"__name__": "page"}
        exec(compile(PAGE[name], name, "exec"), scope)
        config = replace(scope["experiment"].model, dropout_rate=0.0)
        tree = models.init(config, jax.random.key(0))
        tokens = jnp.arange(20)[None]
        expected = models.apply(replace(config, block=ours), tree, tokens).logits
        np.testing.assert_allclose(
            models.apply(config, tree, tokens).logits, expected, rtol=1e-4, atol=2e-5
        )


def by_hand(name, config, tree, tokens):
    """Each order written out once more, on the sub-layers alone."""
    parts = layout.kinds(config)[0].sublayers
    x = tree["embedding"]["tokens"][tokens]
    context = models.layer.Context(config.masks[0], jnp.arange(tokens.shape[1])[None])
    own = partial(norm, config)
    for layer in layout.unstacked(config, tree["layers"]):

        def f(part, y, layer=layer):
            return parts[part].apply(layer[part], y, context)[0]

        if name == "parallel":
            y = own(layer["norm"], x)
            x = x + f("attention", y) + f("feedforward", y)
            continue
        for part in ("attention", "feedforward"):
            before, after = layer.get(f"{part}_norm"), layer.get(f"{part}_out_norm")
            match name:
                case "pre_norm":
                    x = x + f(part, own(before, x))
                case "post_norm":
                    x = own(before, x + f(part, x))
                case "sandwich":
                    x = x + own(after, f(part, own(before, x)))
                case "output_norm":
                    x = x + own(after, f(part, x))
    return x if name == "post_norm" else own(tree["final_norm"], x)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OURS)
def test_an_order_is_its_equation(name):
    config = replace(TINY, block=OURS[name], positions=None)
    tree = models.init(config, jax.random.key(1))
    expected = by_hand(name, config, tree, TOKENS)
    for unroll in (1, 4):
        found = models.apply(replace(config, unroll=unroll), tree, TOKENS).hidden
        # float32 sums in another order
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OURS)
def test_an_order_works_with_dropout_recomputation_and_a_source(name):
    """The same numbers scanned, one after another and computed again, with dropout and in a pair;
    and it decodes."""
    stack = replace(TINY, block=OURS[name], dropout_rate=0.2, positions=Alibi())
    config = EncoderDecoder(replace(stack, masks=(models.config.causal(),), heads=()), stack)
    tree = models.init(config, jax.random.key(1))

    def gradient(**changes):
        halves = (replace(half, **changes) for half in (config.encoder, config.decoder))
        loss = lambda p: jnp.sum(
            jnp.sin(
                models.apply(
                    EncoderDecoder(*halves),
                    p,
                    TOKENS,
                    source=TOKENS[:, ::-1],
                    dropout_key=jax.random.key(2),
                ).logits
            )
        )
        return jax.jit(jax.grad(loss))(tree)

    def same(found, expected):
        # float32 sums in another order, whose terms are as large as the largest gradient of a leaf
        atol = 1e-5 * max(20.0, float(jnp.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=atol)

    expected = gradient(unroll=4)
    for changes in (dict(unroll=1), dict(unroll=1, remat="full"), dict(unroll=2, remat="dots")):
        jax.tree.map(same, gradient(**changes), expected)
    alone = replace(stack, dropout_rate=0.0)
    weights = models.init(alone, jax.random.key(3))
    whole = models.apply(alone, weights, TOKENS).logits
    cache = decoding.init_cache(alone, 2, 12)
    first = models.apply(alone, weights, TOKENS[:, :7], cache=cache)
    second = models.apply(alone, weights, TOKENS[:, 7:], cache=first.cache)
    np.testing.assert_allclose(
        jnp.concatenate([first.logits, second.logits], axis=1), whole, rtol=1e-4, atol=2e-5
    )


def streams(config, names):
    """Two streams, of which each sub-layer reads the sum and writes one: begin and end are the
    block's own."""

    def apply(params, x, sublayers, context):
        for i, (name, f) in enumerate(sublayers.items()):
            y = f(norm(config, params[f"{name}_norm"], x.sum(axis=2)))
            x = x.at[:, :, i % 2].add(y)
        return x

    def begin(params, x, context):
        return jnp.stack([x, params["second"].astype(x.dtype)[None, None] * x], axis=2)

    def end(params, x, context):
        return norm(config, params["final_norm"], x.mean(axis=2))

    own = {"second": params.Spec((config.d_model,), ("embed",), jax.nn.initializers.ones)}
    return Block(
        blocks.norms(config, names, "{}_norm"),
        apply,
        own | blocks.final_norm_spec(config),
        begin,
        end,
    )


@pytest.mark.thorough
def test_a_block_may_have_several_streams():
    config = replace(TINY, block=streams)
    tree = models.init(config, jax.random.key(0))
    assert {"second", "final_norm"} <= set(tree)
    found = [models.apply(replace(config, unroll=n), tree, TOKENS) for n in (1, 4)]
    np.testing.assert_allclose(found[0].logits, found[1].logits, rtol=1e-4, atol=2e-5)
    taps = models.apply(config, tree, TOKENS, intermediates=("layers/*/residual",)).intermediates
    assert taps["layers/*/residual"].shape == (4, 2, 12, 2, 16)


def twice(config, names):
    return Block(
        {}, lambda params, x, sublayers, context: sublayers["attention"](sublayers["attention"](x))
    )


def never(config, names):
    return Block({}, lambda params, x, sublayers, context: sublayers["attention"](x))


def takes_a_name(config, names):
    return Block({"attention": norm_spec(config)}, lambda *_: None)


def takes_a_part(config, names):
    return Block({}, lambda *_: None, {"embedding": norm_spec(config)})


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (twice, "called twice, or more often, the sub-layer attention"),
        (never, "never called the sub-layer feedforward"),
        (takes_a_name, "'attention' has the name of a sub-layer"),
        (takes_a_part, "'embedding' has the name of a part"),
    ],
)
def test_what_a_block_may_not_do_is_said(block, said):
    config = replace(TINY, block=block)
    with pytest.raises(ConfigError, match=said):
        jax.eval_shape(partial(models.apply, config), params.abstract(models.spec(config)), TOKENS)


@pytest.mark.thorough
def test_norms_without_a_scale_and_none_at_all():
    """A norm without parameters is the norm with a scale of ones; without norms the stream is a sum
    of the sub-layers."""
    plain = models.init(replace(TINY, norm="rms_norm"), jax.random.key(0))
    config = replace(TINY, norm=Unscaled("rms_norm"))
    spec = params.paths(models.spec(config))
    assert not [path for path in spec if "norm" in path]
    tree = {name: part for name, part in plain.items() if name != "final_norm"}
    tree["layers"] = {
        name: part for name, part in plain["layers"].items() if not name.endswith("norm")
    }
    expected = models.apply(replace(TINY, norm="rms_norm"), plain, TOKENS).logits
    np.testing.assert_allclose(
        models.apply(config, tree, TOKENS).logits, expected, rtol=1e-4, atol=2e-5
    )
    bare = models.apply(
        replace(TINY, norm=no_norm, num_layers=1),
        jax.tree.map(lambda x: x, first_layer(tree)),
        TOKENS,
    )
    assert np.isfinite(bare.logits).all()
    with pytest.raises(ConfigError, match="norm='rms': expected one of layer_norm, rms_norm"):
        replace(TINY, norm="rms")


def first_layer(tree):
    return tree | {"layers": jax.tree.map(lambda leaf: leaf[:1], tree["layers"])}


def counting(config):
    """A feed-forward that counts its calls in a variable, and reports the new count."""
    spec = {"count": params.Spec((), (), jax.nn.initializers.zeros)}

    def apply(tree, x, context):
        return models.layer.FeedForwardOutput(x, updates={"count": tree["count"] + 1})

    return models.layer.FeedForward(spec, apply)


@pytest.mark.thorough
@pytest.mark.parametrize("unroll", [1, 4])
def test_updates_of_layers_are_a_part_of_the_tree(unroll):
    """Of all layers, and of the layers in one place of a pattern."""
    for feedforward in (counting, ("relu", counting), ("relu", counting, counting, counting)):
        config = replace(TINY, feedforward=feedforward, unroll=unroll)
        tree = models.init(config, jax.random.key(0))
        updates = params.paths(models.apply(config, tree, TOKENS).updates)
        own = {path: leaf for path, leaf in params.paths(tree).items() if path.endswith("/count")}
        assert set(updates) == set(own)
        for path, leaf in updates.items():
            np.testing.assert_array_equal(leaf, own[path] + 1)


@pytest.mark.thorough
def test_a_layer_without_a_block_reports_nothing():
    assert LayerOutput().updates is None
    assert models.apply(TINY, models.init(TINY, jax.random.key(0)), TOKENS).updates is None


@pytest.mark.thorough
def test_blocks_by_layer():
    """A pattern that repeats, and one that covers the depth once, equal a loop over the layers."""
    for pattern in (
        (blocks.post_norm, blocks.pre_norm),
        (zoo.modernbert.bare_attention, *[blocks.pre_norm] * 3),
    ):
        config = replace(TINY, block=pattern)
        tree = params.init(models.spec(config), jax.random.key(0))
        tree = jax.tree.map(lambda leaf: leaf + 0.1, tree)
        start = Context(masks.full(), jnp.arange(12)[None])
        x = embedding.embed(config, tree["embedding"], TOKENS, start)
        for i, layer in enumerate(layout.unstacked(config, tree["layers"])):
            kind = sublayers.kind(replace(config, block=pattern[i % len(pattern)]))
            context = Context(config.masks[0], jnp.arange(12)[None], layer=i)
            x = sublayers.run(config, kind, layer, x, context).hidden
        expected = layout.kinds(config)[0].block.end(tree, x, context)
        found = models.apply(config, tree, TOKENS).hidden
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
    assert "attention_norm" not in models.spec(config)["layers"]["0"]
    assert models.spec(config)["layers"]["1"]["attention_norm"]["scale"].shape == (3, 16)


def test_a_pattern_of_no_blocks_is_refused():
    with pytest.raises(ConfigError, match=r"model\.block=\(\)"):
        replace(TINY, block=())
