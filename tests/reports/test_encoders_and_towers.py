"""Encoders, towers of text and images, and Whisper: what users of transformers, Keras and others
reported, tried on ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxformer import families, masks, models
from jaxformer.errors import ConfigError
from jaxformer.families.dinov2 import gated_width
from jaxformer.models.blocks import pre_norm
from jaxformer.ops.positions import Rope, sinusoidal
from jaxformer.params import paths
from jaxformer.zoo import clip, modernbert, whisper
from tests import golden
from tests.families import golden_runs as runs


def features(head, config, tokens):
    """What a head without parameters gives where the hidden state is the number of the position."""
    tokens = jnp.asarray(tokens)
    hidden = jnp.broadcast_to(jnp.arange(4.0)[None, :, None], (len(tokens), 4, 1))
    return head(config).apply({}, hidden, None, None, tokens)[:, 0].tolist()


@pytest.mark.report(
    "huggingface/transformers#24650",
    "huggingface/diffusers#10754",
    "huggingface/transformers#21029",
    right=(
        "the features of a CLIP text are those of its end token, also beside new tokens of a "
        "larger id; a file whose eos_token_id is 2 has those of the largest id"
    ),
)
def test_the_end_token_of_a_clip_text(tmp_path):
    config = families.read_config(golden.folder("clip_text"))
    texts = [[1, 7, 5, 5], [9, 5, 1, 1]]
    assert features(clip.TextFeatures(5), config, texts) == [2, 1]
    assert features(clip.TextFeatures(None), config, texts) == [1, 0]
    heads = families.read_config(runs.altered(tmp_path, "clip_text", eos_token_id=2)).heads
    assert heads[0].end is None


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#28569",
    "embeddings-benchmark/mteb#1424",
    "vllm-project/vllm#51157",
    right="a SigLIP text is read at its last position, which padding fills in training, too",
)
def test_the_last_position_of_a_siglip_text_counts_though_it_is_padding():
    checkpoint = families.load(golden.folder("siglip_text"))
    assert all(head.reads_padding for head in checkpoint.config.heads)
    tokens = jnp.array([[5, 6, 7, 1, 1, 1]])
    found = models.apply(checkpoint.config, checkpoint.params, tokens).logits
    shorter = models.apply(checkpoint.config, checkpoint.params, tokens[:, :3]).logits
    assert not np.allclose(found, shorter, atol=1e-2)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#26032",
    right="the sinusoids of Whisper's encoder are not trained",
)
def test_the_sinusoids_of_whisper_have_no_gradient():
    checkpoint = families.load(golden.folder("whisper"))
    path = "encoder/embedding/sinusoids"
    assert not paths(models.spec(checkpoint.config))[path].trained
    source = jnp.ones((1, 26, checkpoint.config.encoder.embedding.mel_bins))
    tokens = jnp.ones((1, 2), jnp.int32)

    def loss(params):
        return models.apply(checkpoint.config, params, tokens, source=source).logits.sum()

    gradients = paths(jax.grad(loss)(checkpoint.params))
    assert not gradients[path].any()
    assert gradients["encoder/embedding/convolution_1/kernel"].any()


@pytest.mark.report(
    "wenet-e2e/wenet#2141",
    right="its slowest sinusoid turns once in 2 pi 10,000 positions; that of 2017 is faster",
)
def test_the_sinusoids_of_whisper_are_not_those_of_2017():
    table = whisper.sinusoids(7, 16)
    np.testing.assert_allclose(table[:, 7], np.sin(np.arange(7) / 10_000), atol=1e-12)
    older = sinusoidal(jnp.arange(7)[None], 16, layout="half")[0]
    assert not np.allclose(table, older, atol=1e-2)


@pytest.mark.report(
    "nurl-lang/nurl#475",
    right="keys of Whisper have no bias, and its gelu is the exact one",
)
def test_biases_and_activation_of_whisper():
    for stack in (whisper.whisper_tiny.encoder, whisper.whisper_tiny.decoder):
        names = ("query", "key", "value", "out", "up", "down")
        assert [stack.has_bias(name) for name in names] == [True, False, True, True, True, True]
        assert stack.feedforward == "gelu"


@pytest.mark.report(
    "keras-team/keras-hub#2518",
    "huggingface/transformers#43030",
    "lablup/mlxcel#1332",
    right=(
        "local_attention of a ModernBERT is the whole window, half of it on either side; layers "
        "with a window rotate by another base, and every third layer from the first sees all"
    ),
)
def test_windows_and_bases_of_modernbert(tmp_path):
    older = {"rope_parameters": ..., "layer_types": ..., "num_hidden_layers": 6}
    older |= {"global_rope_theta": 8e4, "local_rope_theta": 5e3, "global_attn_every_n_layers": 3}
    config = families.read_config(
        runs.altered(tmp_path, "modernbert_mlm", local_attention=10, **older)
    )
    near = masks.window(5, 5)
    assert [config.masks[i % len(config.masks)] for i in range(6)] == [masks.full(), near, near] * 2
    assert config.positions == (Rope(8e4), Rope(5e3), Rope(5e3))
    assert config.block == (modernbert.bare_attention, *[pre_norm] * 5)


@pytest.mark.report(
    "huggingface/transformers#18659",
    "huggingface/transformers#15216",
    "huggingface/transformers#15673",
    right="the head of a DeBERTa under the name lm_predictions is read, not drawn anew",
)
def test_the_published_head_of_deberta_is_read(tmp_path):
    names = {
        "cls.predictions.transform.dense": "lm_predictions.lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_predictions.lm_head.LayerNorm",
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
    }

    def published(arrays):
        found = {}
        for name, array in arrays.items():
            old = next((each for each in names if name.startswith(each)), "")
            found[names.get(old, "") + name.removeprefix(old)] = array
        return found

    folder = runs.altered(tmp_path, "deberta_v2_mlm", published, legacy=False)
    assert any(name.startswith("lm_predictions") for name in runs.tensors(folder))
    found, expected = (
        paths(families.load(each).params) for each in (folder, golden.folder("deberta_v2_mlm"))
    )
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#16031",
    "huggingface/candle#3468",
    right="the convolution of a DeBERTa is computed, and reads no padding on either side",
)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_the_convolution_of_deberta_reads_no_padding(before):
    checkpoint = families.load(golden.folder("deberta_v2_convolution"))
    rng = np.random.default_rng(0)
    row = rng.integers(3, 37, (1, 7))
    padded = np.zeros((1, 10), int)
    padded[:, before : before + 7] = row
    ids = np.zeros((1, 10), int)
    ids[:, before : before + 7] = 1

    def hidden(tokens, **options):
        return models.apply(checkpoint.config, checkpoint.params, tokens, **options).hidden

    found = hidden(jnp.asarray(padded), segment_ids=jnp.asarray(ids))
    alone = hidden(jnp.asarray(row))
    # float32 through two layers
    np.testing.assert_allclose(found[:, before : before + 7], alone, rtol=1e-4, atol=2e-5)
    params = unflatten_dict(
        {
            path: jnp.zeros_like(leaf) if "convolution/" in path else leaf
            for path, leaf in paths(checkpoint.params).items()
        },
        sep="/",
    )
    without = models.apply(checkpoint.config, params, jnp.asarray(row)).hidden
    assert np.abs(without - alone).max() > 0.1


@pytest.mark.report(
    "facebookresearch/dinov2#133",
    "facebookresearch/dinov3#349",
    right="a gate of DINOv2 is two thirds as wide as a plain feed-forward, rounded up to eights",
)
def test_the_width_of_a_gate_of_dinov2():
    assert gated_width(1536, 4) == 4096 and gated_width(768, 4) == 2048
    assert gated_width(1280, 4) == 3416


@pytest.mark.report(
    "facebookresearch/dinov2#332",
    right="plain matrices where config.json says gates, and the reverse, are refused by name",
)
@pytest.mark.parametrize(("name", "is_gated"), [("dinov2", True), ("dinov2_swiglu", False)])
def test_the_feed_forward_of_dinov2_is_that_of_its_file(name, is_gated, tmp_path):
    with pytest.raises(ConfigError, match="mlp"):
        families.load(runs.altered(tmp_path, name, use_swiglu_ffn=is_gated))


@pytest.mark.thorough
@pytest.mark.report(
    "riccardomusmeci/mlx-image#26",
    right="the scales of DINOv2's layers are read: with zeros, a layer adds nothing",
)
def test_layer_scales_of_dinov2_are_read(tmp_path):
    def without_layers(arrays):
        return {
            name: np.zeros_like(array) if "layer_scale" in name else array
            for name, array in arrays.items()
        }

    checkpoint = families.load(runs.altered(tmp_path, "dinov2", without_layers))
    shape = (1, *checkpoint.config.embedding.image, checkpoint.config.embedding.channels)
    images = jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    names = ("embedding", "layers/*/residual")
    output = models.apply(checkpoint.config, checkpoint.params, images, intermediates=names)
    before, after = (output.intermediates[name] for name in names)
    for layer in after:
        np.testing.assert_array_equal(layer, before)
