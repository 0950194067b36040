"""The relative positions of Transformer-XL, and the sizes of the models that have them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models, params, zoo
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full, window
from jaxformer.models import ModelConfig
from jaxformer.models.blocks import post_norm
from jaxformer.models.presets import sized
from jaxformer.ops.positions import Rope
from jaxformer.zoo.transformer_xl import relative_attention
from tests.witnesses import load, transformer_xl as xlnet

CLOSE = dict(rtol=1e-4, atol=2e-5)  # float32 through two layers
TINY = ModelConfig(
    vocab_size=13,
    num_layers=2,
    d_model=12,
    num_heads=3,
    context_length=9,
    positions=None,
    mixer=relative_attention,
    use_bias="out|up|down|norm",
)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 13, (2, 9)), jnp.int32)
# Hoffmann et al. 2022, table A9: millions of parameters, width, width and number of heads, layers
PUBLISHED = """
44 512 64 8 8, 57 576 64 9 9, 74 640 64 10 10, 90 640 64 10 13, 106 640 64 10 16, 117 768 64 12 12,
140 768 64 12 15, 163 768 64 12 18, 175 896 64 14 14, 196 896 64 14 16, 217 896 64 14 18,
251 1024 64 16 16, 278 1024 64 16 18, 306 1024 64 16 20, 425 1280 128 10 18, 489 1280 128 10 21,
509 1408 128 11 18, 552 1280 128 10 24, 587 1408 128 11 21, 632 1536 128 12 19, 664 1408 128 11 24,
724 1536 128 12 22, 816 1536 128 12 25, 893 1792 128 14 20, 1018 1792 128 14 23,
1143 1792 128 14 26, 1266 2048 128 16 22, 1424 2176 128 17 22, 1429 2048 128 16 25,
1593 2048 128 16 28, 1609 2176 128 17 25, 1731 2304 128 18 24, 1794 2176 128 17 28,
2007 2304 128 18 28, 2283 2304 128 18 32, 2298 2560 128 20 26, 2639 2560 128 20 30,
2980 2560 128 20 34, 3530 2688 128 22 36, 3802 2816 128 22 36, 4084 2944 128 22 36,
4516 3072 128 24 36, 6796 3584 128 28 40, 9293 4096 128 32 42, 11452 4352 128 32 47,
12295 4608 128 36 44, 12569 4608 128 32 47, 13735 4864 128 32 47, 14940 4992 128 32 49,
16183 5120 128 40 47
"""


def random(config):
    """Parameters of order one."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        return jnp.float32((path[-1].key == "scale") + 0.4 * rng.normal(size=leaf.shape))

    return jax.tree_util.tree_map_with_path(draw, models.spec(config))


@pytest.mark.thorough
def test_layers_of_xlnet():
    """transformers computes XLNet in float64, with sinusoids in float32."""
    kept = load("transformer_xl")
    config = replace(
        TINY, feedforward="gelu", norm_eps=xlnet.EPS, d_ff=xlnet.F, block=post_norm, heads=()
    )
    config = replace(config, use_bias="up|down|norm")

    def theirs(name):
        return np.stack([kept[f"weights/layer.{i}.{name}"] for i in range(xlnet.LAYERS)])

    def linear(name):
        return {"kernel": theirs(f"{name}.weight").swapaxes(1, 2), "bias": theirs(f"{name}.bias")}

    def norm(name):
        return {"scale": theirs(f"{name}.weight"), "bias": theirs(f"{name}.bias")}

    maps = {"query": "q", "key": "k", "value": "v", "position": "r"}
    attention = {ours: {"kernel": theirs(f"rel_attn.{name}")} for ours, name in maps.items()}
    attention |= {
        "out": {"kernel": np.moveaxis(theirs("rel_attn.o"), 1, -1)},
        "content_vector": theirs("rel_attn.r_w_bias"),
        "position_vector": theirs("rel_attn.r_r_bias"),
    }
    tree = {
        "embedding": {"tokens": kept["weights/word_embedding.weight"]},
        "layers": {
            "attention": attention,
            "attention_norm": norm("rel_attn.layer_norm"),
            "feedforward": {"up": linear("ff.layer_1"), "down": linear("ff.layer_2")},
            "feedforward_norm": norm("ff.layer_norm"),
        },
    }
    tree = jax.tree.map(jnp.float32, tree)
    found = models.apply(config, tree, jnp.asarray(kept["tokens"], jnp.int32)).hidden
    np.testing.assert_allclose(found, kept["hidden"], **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [causal(), causal() & window(3)], ids=str)
def test_the_cache_answers_as_the_whole_text(mask):
    config = replace(TINY, masks=(mask,), num_kv_heads=1)
    tree = random(config)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found = decoding.generate(config, tree, prompts, 8, sampling=decoding.Sampling(temperature=0.0))
    for prompt, new in zip(prompts, found, strict=True):
        logits = models.apply(config, tree, jnp.array([prompt + new[:-1]])).logits[0]
        np.testing.assert_array_equal(new, jnp.argmax(logits[len(prompt) - 1 :], axis=-1))


@pytest.mark.thorough
def test_a_packed_row_is_computed_as_its_segments_alone():
    tree = random(TINY)
    ids = jnp.array([[1] * 4 + [2] * 5] * 2)
    packed = models.apply(TINY, tree, TOKENS, segment_ids=ids).logits
    for part in (slice(0, 4), slice(4, 9)):
        alone = models.apply(TINY, tree, TOKENS[:, part]).logits
        np.testing.assert_allclose(packed[:, part], alone, **CLOSE)


@pytest.mark.thorough
def test_what_it_refuses():
    with pytest.raises(ConfigError, match=r"model\.positions"):
        models.spec(replace(TINY, positions=Rope()))
    for mask in (full(), causal() | window(1)):
        config = replace(TINY, masks=(mask,))
        with pytest.raises(NotImplementedError, match=r"give causal\(\)"):
            models.apply(config, random(config), TOKENS)


@pytest.mark.thorough
def test_published_counts_of_chinchilla():
    rows = [tuple(map(int, row.split())) for row in PUBLISHED.split(",")]
    assert len(rows) == 50
    others = []
    for millions, width, head_width, heads, layers in rows:
        config = sized(zoo.PRESETS["chinchilla_70b"], layers, width, heads, head_width=head_width)
        count = params.count(models.spec(config)) / 1e6
        if round(count) != millions:
            others.append((millions, round(count, 2)))
    # the only one
    assert others == [(2980, 2979.48)]
