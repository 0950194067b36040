"""Whole CLIP and SigLIP, and DINOv2 at another resolution, against transformers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models, zoo
from jaxformer.models import vision
from jaxformer.objectives import StepContext
from jaxformer.params import paths
from jaxformer.zoo import clip, dinov2
from tests import golden

TOLERANCE = 2e-5  # float32 on both sides: reference/models.md, section 1
SIZES = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=9)
IMAGES = SIZES | dict(image_size=9, patch_size=4)
TEXTS = SIZES | dict(vocab_size=41, max_position_embeddings=7, eos_token_id=40, pad_token_id=1)


def run(model, **arguments):
    import torch

    with torch.no_grad():
        return model(**{name: torch.from_numpy(array) for name, array in arguments.items()})


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_two_towers_agree_with_the_whole(kind, tmp_path):
    import transformers

    from tests.golden.write import redraw

    projected = dict(projection_dim=5) if kind == "CLIP" else {}
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXTS, vision_config=IMAGES, **projected
    )
    model = getattr(transformers, f"{kind}Model")(config).eval()
    redraw(model, 0)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(3, 3, 9, 9)).astype(np.float32)
    tokens = rng.integers(3, 41, (2, 7))
    tokens[:, 5] = 40
    theirs = run(model, pixel_values=pixels, input_ids=tokens)
    features = []
    for part, array in (("vision", pixels.transpose(0, 2, 3, 1)), ("text", tokens)):
        tower = families.load(tmp_path, part=part)
        features.append(models.apply(tower.config, tower.params, jnp.asarray(array)).logits)
    scale = jnp.exp(model.logit_scale.detach().numpy())
    ours = clip.similarity(*features, scale.reshape(()))
    if kind == "Siglip":
        ours = ours + model.logit_bias.detach().numpy()[None]
    np.testing.assert_allclose(ours, theirs.logits_per_image, rtol=0, atol=TOLERANCE)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("size", [8, 16, 20])
def test_dinov2_at_another_resolution(size):
    import transformers

    model = transformers.Dinov2Model.from_pretrained(golden.folder("dinov2")).eval()
    checkpoint = families.load(golden.folder("dinov2"))
    config, tree = vision.resize(checkpoint.config, checkpoint.params, (size, size))
    pixels = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    ours = models.apply(config, tree, jnp.asarray(pixels.transpose(0, 2, 3, 1)))
    theirs = run(model, pixel_values=pixels)
    np.testing.assert_allclose(ours.hidden, theirs.last_hidden_state, rtol=0, atol=TOLERANCE)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("applied", [True, False])
def test_feature_maps_are_those_of_their_backbone(applied, tmp_path):
    """And a folder of a backbone loads as the bare model."""
    import transformers

    kind = transformers.Dinov2Backbone
    model = kind.from_pretrained(
        golden.folder("dinov2"), out_indices=[0, 1, 2], apply_layernorm=applied
    )
    model.eval().save_pretrained(tmp_path)
    checkpoint = families.load(tmp_path)
    assert checkpoint.config.heads == ()
    image, channels = checkpoint.config.embedding.image, checkpoint.config.embedding.channels
    pixels = np.random.default_rng(0).normal(size=(2, channels, *image)).astype(np.float32)
    theirs = run(model, pixel_values=pixels).feature_maps
    ours = dinov2.feature_maps(
        checkpoint.config,
        checkpoint.params,
        jnp.asarray(pixels.transpose(0, 2, 3, 1)),
        (0, 1, 2),
        with_norm=applied,
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other.permute(0, 2, 3, 1), rtol=0, atol=TOLERANCE)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("normalised", [True, False])
def test_the_objective_of_vit_mae(normalised, tmp_path):
    """Its loss and all gradients are those of ViTMAEForPreTraining, for the same noise."""
    import torch
    import transformers

    from tests.golden.write import redraw

    decoder = dict(decoder_hidden_size=8, decoder_num_attention_heads=2)
    decoder |= dict(decoder_num_hidden_layers=1, decoder_intermediate_size=9)
    config = transformers.ViTMAEConfig(
        **SIZES | dict(image_size=12, patch_size=4, mask_ratio=0.6, norm_pix_loss=normalised),
        **decoder,
    )
    model = transformers.ViTMAEForPreTraining(config).eval()
    redraw(model, 0)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(3, 3, 12, 12)).astype(np.float32)
    noise = rng.random((3, 9)).astype(np.float32)
    theirs = model(pixel_values=torch.from_numpy(pixels), noise=torch.from_numpy(noise)).loss
    theirs.backward()
    checkpoint = families.load(tmp_path)
    batch = {
        "images": jnp.asarray(pixels.transpose(0, 2, 3, 1)),
        "weights": jnp.ones(3),
        "inputs": {"noise": jnp.asarray(noise)},
    }

    def mean(params):
        context = StepContext(jax.random.key(0))
        sums = zoo.MaskedPatches()(checkpoint.config, params, batch, context)
        return sums.loss / sums.weight

    loss, gradients = jax.value_and_grad(mean)(checkpoint.params)
    np.testing.assert_allclose(loss, theirs.detach(), rtol=TOLERANCE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0 * parameter if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    expected = paths(families.load(tmp_path / "gradients").params)
    for path, gradient in paths(gradients).items():
        if not path.endswith("embedding/positions"):  # sines, which are not trained
            np.testing.assert_allclose(
                gradient, expected[path], rtol=0, atol=TOLERANCE, err_msg=path
            )
