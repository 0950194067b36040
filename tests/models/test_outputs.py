"""Hidden states and attention maps of every layer against a loop over layers, and the names that a
profile shows."""

import collections
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, ModelConfig, Relative, Sinusoidal, blocks, sublayers
from jaxformer.models.embedding import embed
from jaxformer.models.intermediates import tap
from jaxformer.models.layer import Context, Source
from jaxformer.models.norm import norm
from jaxformer.models.stacks import layout
from jaxformer.ops.positions import Rope
from jaxformer.zoo.linear_attention import Linear

V, T, S, B = 17, 6, 8, 2
SIZES = dict(vocab_size=V, num_layers=4, d_model=12, num_heads=2, context_length=8, d_ff=16)
BASE = ModelConfig(**SIZES, positions=Rope(), unroll=1)
LOCAL = (masks.causal(), masks.causal() & masks.window(2))
STACKS = {
    "one kind": BASE,
    "masks in turn, and a rest": replace(BASE, num_layers=5, masks=LOCAL, remat="full"),
    "unrolled": replace(BASE, masks=LOCAL, unroll=4),
    "post-norm": replace(BASE, block=blocks.post_norm, positions=Sinusoidal()),
    "different kinds": replace(BASE, mixer=(None, Linear())),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)), jnp.int32)
SOURCE = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, S)), jnp.int32)

apply = jax.jit(models.apply, static_argnums=0, static_argnames="intermediates")


def random(config):
    """Parameters of the size of their spec's."""
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: (path[-1].key == "scale") + 0.3 * rng.normal(size=leaf.shape)
    return jax.tree_util.tree_map_with_path(
        lambda *leaf: jnp.asarray(draw(*leaf), jnp.float32), models.spec(config)
    )


def close(found, expected):
    # float32 sums in another order, up to five layers deep
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def looped(config, parameters, tokens, source=None):
    """The intermediates of one layer after the other, each name a list; and the last hidden
    states."""
    length = tokens.shape[1]
    start = Context(masks.full(), jnp.arange(length)[None])
    x = embed(config, parameters["embedding"], tokens, start)
    found, slots = (
        {"embedding": [x]},
        layout.kinds(config, None if source is None else source.shape[-1]),
    )
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], parameters["layers"])
        context = Context(
            config.masks[i % len(config.masks)],
            jnp.arange(length)[None],
            shared=parameters.get("shared"),
        )
        encoded = None if source is None else Source(source, masks.full())
        names = ("layers/*/residual", *(ATTENTION if config.mixer is None else ()))
        context = context.replace(layer=i, source=encoded, tap=tap(names, None).in_layer(i))
        output = sublayers.run(config, slots[i % len(slots)], layer, x, context)
        x = output.hidden
        for (_, name), value in output.intermediates.items():
            found.setdefault(name, []).append(value)
    return found, x


ATTENTION = ("layers/*/*attention/weights",)
STATES = ("embedding", "layers/*/residual")


@pytest.mark.thorough
@pytest.mark.parametrize("name", STACKS)
def test_hidden_states_of_every_layer(name):
    config = STACKS[name]
    parameters = random(config)
    out = apply(config, parameters, TOKENS, intermediates=STATES)
    expected, last = looped(config, parameters, TOKENS)
    assert out.intermediates["layers/*/residual"].shape == (config.num_layers, B, T, 12)
    close(out.intermediates["layers/*/residual"], np.stack(expected["layers/*/residual"]))
    close(out.intermediates["embedding"], expected["embedding"][0])
    close(
        out.hidden,
        last if config.block is blocks.post_norm else norm(config, parameters["final_norm"], last),
    )
    plain = apply(config, parameters, TOKENS)
    assert plain.intermediates is None
    close(out.logits, plain.logits)


def pair(mixer=None):
    stack = replace(BASE, num_layers=2, positions=Relative(4, 8))
    decoder = replace(stack, num_layers=3, positions=Relative(4, 8, False), mixer=mixer)
    return EncoderDecoder(replace(stack, masks=(masks.full(),), heads=()), decoder)


@pytest.mark.thorough
def test_maps_and_states_of_an_encoder_decoder():
    config = pair()
    parameters = random(config)
    names = tuple(
        f"{stack}/{name}" for stack in ("encoder", "decoder") for name in (*STATES, *ATTENTION)
    )
    out = apply(config, parameters, TOKENS, source=SOURCE, intermediates=names)
    table = {"embedding": {"tokens": parameters["decoder"]["embedding"]["tokens"]}}
    encoder, last = looped(config.encoder, parameters["encoder"] | table, SOURCE)
    encoded = norm(config.encoder, parameters["encoder"]["final_norm"], last)
    decoder, _ = looped(config.decoder, parameters["decoder"], TOKENS, encoded)
    close(out.source, encoded)
    expected = {f"encoder/{name}": values for name, values in encoder.items()}
    expected |= {f"decoder/{name}": values for name, values in decoder.items()}
    assert out.intermediates.keys() == expected.keys() and len(expected) == 7
    for name, values in expected.items():
        close(out.intermediates[name], np.stack(values) if "*" in name else values[0])
    plain = apply(config, parameters, TOKENS, source=SOURCE)
    assert plain.intermediates is None
    close(out.logits, plain.logits)


@pytest.mark.thorough
def test_maps_of_a_source_that_is_padded_and_cached():
    config = pair()
    parameters, ids = (
        random(config),
        np.repeat([[0, 0, 1, 1, 1, 1, 1, 1]], B, axis=0).astype(np.int32),
    )
    encoder, cross = (
        "encoder/layers/*/attention/weights",
        "decoder/layers/*/cross_attention/weights",
    )
    options = dict(source=SOURCE, source_segment_ids=ids, intermediates=(encoder, cross))
    whole = apply(config, parameters, TOKENS, **options).intermediates
    assert (whole[cross][..., :2] == 0).all() and (whole[encoder][..., 2:, :2] == 0).all()
    first = apply(
        config, parameters, TOKENS[:, :4], cache=decoding.init_cache(config, B, T), **options
    )
    second = apply(
        config, parameters, TOKENS[:, 4:], cache=first.cache, intermediates=(encoder, cross)
    ).intermediates
    close(jnp.concatenate([first.intermediates[cross], second[cross]], axis=3), whole[cross])
    assert encoder not in second


@pytest.mark.thorough
def test_one_layer_by_its_number():
    config, every = STACKS["masks in turn, and a rest"], "layers/*/feedforward/out"
    out = apply(
        config, random(config), TOKENS, intermediates=(every, "layers/3/feedforward/out")
    ).intermediates
    np.testing.assert_array_equal(out["layers/3/feedforward/out"], out[every][3])


@pytest.mark.thorough
@pytest.mark.parametrize("name", STACKS)
def test_what_is_not_asked_for_costs_nothing(name):
    """The compiled program is the same; an edit that changes nothing gives the same logits."""
    config = STACKS[name]
    shapes = params.abstract(models.spec(config))
    program = lambda f: jax.jit(f).lower(shapes).compile().as_text()
    operations = lambda text: collections.Counter(re.findall(r" = (\S+ [a-z][a-z-]*)\(", text))
    plain = program(lambda p: models.apply(config, p, TOKENS).logits)
    unused = program(lambda p: models.apply(config, p, TOKENS, intermediates=STATES).logits)
    assert operations(plain) == operations(unused) and len(operations(plain)) > 5
    same = models.apply(
        config, random(config), TOKENS, edits={"layers/*/residual": lambda x, layer: x}
    )
    close(same.logits, apply(config, random(config), TOKENS).logits)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one kind", "masks in turn, and a rest", "unrolled"])
def test_an_edit_is_seen_by_all_that_follows(name):
    """A layer whose parts add nothing is a model without that layer; a head without output is one
    without its kernel."""
    config = STACKS[name]
    parameters, number = random(config), 2
    silent = lambda value, layer: jnp.zeros_like(value)
    edits = {f"layers/{number}/{part}/out": silent for part in ("attention", "feedforward")}
    found = models.apply(config, parameters, TOKENS, edits=edits, intermediates=STATES)
    states = found.intermediates["layers/*/residual"]
    np.testing.assert_array_equal(states[number], states[number - 1])
    less = jax.tree.map(lambda leaf: leaf, parameters)
    kernel = less["layers"]["attention"]["out"]["kernel"]
    less["layers"]["attention"]["out"]["kernel"] = kernel.at[number, 1].set(0)
    without = {f"layers/{number}/attention/heads": lambda heads, layer: heads.at[:, :, 1].set(0)}
    close(
        models.apply(config, parameters, TOKENS, edits=without).logits,
        apply(config, less, TOKENS).logits,
    )
    weights = {f"layers/{number}/attention/weights": lambda weights, layer: weights.at[:, 1].set(0)}
    close(
        models.apply(config, parameters, TOKENS, edits=weights).logits,
        apply(config, less, TOKENS).logits,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one kind", "unrolled"])
def test_an_edit_keeps_the_precision_and_the_shape_of_a_value(name):
    config, direction = STACKS[name], jnp.ones((1, 1, 12))
    run = lambda name, edit: (
        models.apply(config, random(config), TOKENS, dtype=jnp.bfloat16, edits={name: edit}).hidden
    )
    for path in ("layers/1/residual", "layers/*/attention/out"):
        wide, narrow = (
            run(path, lambda x, layer, d=d: x + d)
            for d in (direction, direction.astype(jnp.bfloat16))
        )
        assert wide.dtype == jnp.bfloat16
        # in bfloat16
        np.testing.assert_allclose(
            *(x.astype(jnp.float32) for x in (wide, narrow)), rtol=0.03, atol=0.05
        )
        # was repeated for all tokens
        with pytest.raises(ConfigError, match=r"\[2, 1, 12\] in place of \[2, 6, 12\]"):
            run(path, lambda x, layer: x[:, :1])


@pytest.mark.thorough
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_features_of_a_feed_forward(feedforward):
    """They are what the last product reads; without one of them the model is that without its
    row."""
    config = replace(STACKS["one kind"], feedforward=feedforward)
    parameters, name = random(config), "layers/*/feedforward/hidden"
    found = apply(
        config, parameters, TOKENS, intermediates=(name, "layers/*/feedforward/out")
    ).intermediates
    down = parameters["layers"]["feedforward"]["down"]
    by_hand = jnp.einsum("lbtf,lfd->lbtd", found[name], down["kernel"])
    by_hand = by_hand + down["bias"][:, None, None] if "bias" in down else by_hand
    close(found["layers/*/feedforward/out"], by_hand)
    less = jax.tree.map(lambda leaf: leaf, parameters)
    less["layers"]["feedforward"]["down"]["kernel"] = down["kernel"].at[2, 3].set(0)
    silent = {"layers/2/feedforward/hidden": lambda hidden, layer: hidden.at[:, :, 3].set(0)}
    close(
        models.apply(config, parameters, TOKENS, edits=silent).logits,
        apply(config, less, TOKENS).logits,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one kind", "masks in turn, and a rest", "different kinds"])
def test_a_gradient_with_respect_to_an_intermediate(name):
    """Of the residual stream after layer 1, by finite differences."""
    config = STACKS[name]
    parameters = random(config)

    @jax.jit
    def loss(shift):
        edits = {"layers/1/residual": lambda x, layer: x + shift}
        return jnp.sum(jnp.sin(models.apply(config, parameters, TOKENS, edits=edits).logits))

    shape = (B, T, 12)
    gradient, way = jax.grad(loss)(jnp.zeros(shape)), jax.random.normal(jax.random.key(0), shape)
    way = way / jnp.linalg.norm(way)
    slope = (loss(1e-2 * way) - loss(-1e-2 * way)) / 2e-2
    # float32 differences
    assert float(jnp.sum(gradient * way)) == pytest.approx(float(slope), rel=2e-2, abs=2e-3)


@pytest.mark.thorough
def test_names_that_nothing_has_are_refused_with_those_there_are():
    config = STACKS["one kind"]
    for options, said in (
        (dict(intermediates=("layers/*/atention/weights",)), "did you mean"),
        (dict(edits={"layers/*/nothing": lambda x, layer: x}), "computes nothing of the name"),
        (dict(intermediates=("layers/9/residual",)), "there are 4 layers"),
    ):
        with pytest.raises(ConfigError, match=said):
            models.apply(config, random(config), TOKENS, **options)
    with pytest.raises(ConfigError, match="give a tuple of names"):
        tap("embedding", None)
    with pytest.raises(ConfigError, match="begins with encoder/ or decoder/"):
        models.apply(pair(), random(pair()), TOKENS, source=SOURCE, intermediates=("embedding",))


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_profile_shows_the_parts_of_a_layer(remat):
    """In the forward pass and in the backward pass."""
    config = pair()
    config = replace(config, decoder=replace(config.decoder, remat=remat))
    loss = lambda p: jnp.sum(jnp.square(models.apply(config, p, TOKENS, source=SOURCE).logits))
    text = jax.jit(jax.grad(loss)).lower(params.abstract(models.spec(config))).compile().as_text()
    operations = {name: re.split(r"[/()]", name) for name in re.findall(r'op_name="([^"]*)"', text)}
    for name in (
        "embedding",
        "attention",
        "cross_attention",
        "feedforward",
        "norm",
        "final_norm",
        "head",
    ):
        found = [operation for operation, parts in operations.items() if name in parts]
        assert found, name
        assert name == "embedding" or any("transpose" in operation for operation in found), found
