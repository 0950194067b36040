"""Hidden states and attention maps of every layer against a loop over layers, and the names that a profile shows."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params
from jaxformer.models import EncoderDecoder, ModelConfig, Relative, Sinusoidal
from jaxformer.models.block import block
from jaxformer.models.embedding import embed, norm
from jaxformer.models.layer import Context, Source
from jaxformer.models.mixers import Linear
from jaxformer.models.stacks import scan
from jaxformer.ops.positions import Rope

V, T, S, B = 17, 6, 8, 2
BASE = ModelConfig(vocab_size=V, num_layers=4, d_model=12, num_heads=2, context_length=8, d_ff=16, positions=Rope())
LOCAL = (masks.causal(), masks.causal() & masks.window(2))
STACKS = {
    "one kind": BASE,
    "masks in turn, and a rest": replace(BASE, num_layers=5, masks=LOCAL, remat="full"),
    "unrolled": replace(BASE, masks=LOCAL, unroll=4),
    "post-norm": replace(BASE, norm_placement="post", positions=Sinusoidal()),
    "different kinds": replace(BASE, mixer=(None, Linear())),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)), jnp.int32)
SOURCE = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, S)), jnp.int32)

apply = jax.jit(models.apply, static_argnums=0, static_argnames=("return_hidden", "return_attention"))


def random(config):
    """Parameters of the size of their spec's."""
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: (path[-1].key == "scale") + 0.3 * rng.normal(size=leaf.shape)
    return jax.tree_util.tree_map_with_path(lambda *leaf: jnp.asarray(draw(*leaf), jnp.float32), models.spec(config))


def close(found, expected):
    # float32 sums in another order, up to five layers deep
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def looped(config, parameters, tokens, source=None):
    """(hidden states, attention maps, cross-attention maps) of one layer after the other."""
    length = tokens.shape[1]
    x = embed(config, parameters["embedding"], tokens, jnp.arange(length)[None])
    hidden, attention, cross, slots = [x], [], [], scan.mixers(config)
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], parameters["layers"])
        mask = config.masks[i % len(config.masks)]
        context = Context(mask, jnp.arange(length)[None], layer=i, shared=parameters.get("shared"))
        context = context.replace(
            source=None if source is None else Source(source, masks.full()), return_weights=config.mixer is None
        )
        output = block(config, slots[i % len(slots)], layer, x, context)
        x = output.hidden
        hidden, attention, cross = [*hidden, x], [*attention, output.weights], [*cross, output.cross_weights]
    return hidden, attention, cross


@pytest.mark.parametrize("name", STACKS)
def test_hidden_states_of_every_layer(name):
    config = STACKS[name]
    parameters = random(config)
    out = apply(config, parameters, TOKENS, return_hidden=True)
    hidden, _, _ = looped(config, parameters, TOKENS)
    assert out.hidden_states.shape == (config.num_layers + 1, B, T, 12)
    close(out.hidden_states, np.stack(hidden))
    last = hidden[-1] if config.norm_placement == "post" else norm(config, parameters["final_norm"], hidden[-1])
    close(out.hidden, last)
    plain = apply(config, parameters, TOKENS)
    assert plain.hidden_states is None
    close(out.logits, plain.logits)


def pair(mixer=None):
    stack = replace(BASE, num_layers=2, positions=Relative(4, 8))
    decoder = replace(stack, num_layers=3, positions=Relative(4, 8, False), mixer=mixer)
    return EncoderDecoder(replace(stack, masks=(masks.full(),), heads=()), decoder)


def test_maps_and_states_of_an_encoder_decoder():
    config = pair()
    parameters = random(config)
    out = apply(config, parameters, TOKENS, source=SOURCE, return_attention=True, return_hidden=True)
    table = {"embedding": {"tokens": parameters["decoder"]["embedding"]["tokens"]}}
    encoder_states, encoder_maps, _ = looped(config.encoder, parameters["encoder"] | table, SOURCE)
    encoded = norm(config.encoder, parameters["encoder"]["final_norm"], encoder_states[-1])
    states, maps, cross = looped(config.decoder, parameters["decoder"], TOKENS, encoded)
    close(out.source, encoded)
    close(out.source_states, np.stack(encoder_states))
    close(out.encoder_attention, np.stack(encoder_maps))
    close(out.hidden_states, np.stack(states))
    close(out.attention, np.stack(maps))
    close(out.cross_attention, np.stack(cross))
    assert out.encoder_attention.shape == (2, B, 2, S, S) and out.cross_attention.shape == (3, B, 2, T, S)
    close(out.cross_attention.sum(-1), np.ones((3, B, 2, T)))
    plain = apply(config, parameters, TOKENS, source=SOURCE)
    assert plain.encoder_attention is plain.cross_attention is plain.source_states is None
    close(out.logits, plain.logits)


def test_maps_of_a_source_that_is_padded_and_cached():
    config = pair()
    parameters, ids = random(config), np.repeat([[0, 0, 1, 1, 1, 1, 1, 1]], B, axis=0).astype(np.int32)
    whole = apply(config, parameters, TOKENS, source=SOURCE, source_segment_ids=ids, return_attention=True)
    assert (whole.cross_attention[..., :2] == 0).all() and (whole.encoder_attention[..., 2:, :2] == 0).all()
    options = dict(source=SOURCE, source_segment_ids=ids, return_attention=True)
    first = apply(config, parameters, TOKENS[:, :4], cache=decoding.init_cache(config, B, T), **options)
    second = apply(config, parameters, TOKENS[:, 4:], cache=first.cache, return_attention=True)
    close(jnp.concatenate([first.cross_attention, second.cross_attention], axis=3), whole.cross_attention)
    assert second.encoder_attention is None


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_profile_shows_the_parts_of_a_layer(remat):
    """In the forward pass and in the backward pass."""
    config = pair()
    config = replace(config, decoder=replace(config.decoder, remat=remat))
    loss = lambda p: jnp.sum(jnp.square(models.apply(config, p, TOKENS, source=SOURCE).logits))
    text = jax.jit(jax.grad(loss)).lower(params.abstract(models.spec(config))).compile().as_text()
    operations = {name: re.split(r"[/()]", name) for name in re.findall(r'op_name="([^"]*)"', text)}
    for name in ("embedding", "attention", "cross_attention", "feedforward", "norm", "final_norm", "head"):
        found = [operation for operation, parts in operations.items() if name in parts]
        assert found, name
        assert name == "embedding" or any("transpose" in operation for operation in found), found
