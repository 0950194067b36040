"""Counts of operations against published ones and against rules of thumb; nothing is computed, no
model is built."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxformer import masks, models, params
from jaxformer.models import (
    Classification,
    LanguageModel,
    Mixture,
    ModelConfig,
    Patches,
    cost,
    presets,
)
from jaxformer.models.config import TokenClassification
from jaxformer.models.vision import Reconstruction
from jaxformer.tools.planning import flops
from jaxformer.zoo import PRESETS
from jaxformer.zoo.albert import Factorised, Repeated
from jaxformer.zoo.linformer import Linformer


def forward(config, length):
    """Multiply-adds a token: two FLOPs each, and the forward pass is a third of a training step."""
    return cost.training_flops(config, length) / 6


def test_vit_base_is_17_6_billion_multiply_adds_an_image():
    """torchvision's and timm's figures: 17.56 to 17.58 of ViT-B/16 and 4.41 of ViT-B/32 at 224 x
    224."""
    per_image = lambda config: forward(config, config.embedding.length) * config.embedding.length
    assert per_image(presets.vit_base) == pytest.approx(17.58e9, rel=0.01)
    assert per_image(presets.vit_base_32) == pytest.approx(4.41e9, rel=0.01)


@pytest.mark.thorough
def test_language_models_take_six_operations_a_parameter_and_token():
    """6 N (Kaplan et al. 2020, section 2.1), with N the parameters without the table of positions,
    and 12 L D T."""
    for config in (presets.gpt2_small, presets.gpt2_xl):
        N = params.count(models.spec(config)) - config.context_length * config.d_model
        # biases and norms multiply nothing
        assert cost.training_flops(config, 0) == pytest.approx(6 * N, rel=1e-3)
        attention = cost.training_flops(config, 1000) - cost.training_flops(config, 0)
        assert attention == 12 * config.num_layers * config.d_model * 1000


@pytest.mark.thorough
def test_tied_tables_count_once_and_tables_that_nothing_reads_not_at_all():
    config = ModelConfig(vocab_size=1000, num_layers=1, d_model=8, num_heads=2, context_length=4)
    tied = cost.training_flops(config, 0)
    assert cost.training_flops(replace(config, tie_embeddings=False), 0) == tied
    assert cost.training_flops(replace(config, heads=(LanguageModel(name="own"),)), 0) == tied
    assert tied - cost.training_flops(replace(config, heads=()), 0) == 6 * 8 * 1000


@pytest.mark.thorough
def test_of_experts_those_count_that_a_token_goes_to():
    """Jiang et al. 2024, arXiv:2401.04088: 47B parameters, of which a token uses 13B (12.9B with
    the embedding's table)."""
    config = presets.mixtral_8x7b
    assert params.count(models.spec(config)) == pytest.approx(46.7e9, rel=1e-3)
    active = forward(config, 0) + config.vocab_size * config.d_model
    assert active == pytest.approx(12.9e9, rel=2e-3)
    # OpenAI 2025, arXiv:2508.10925, table 1, to three digits; DeepSeek-AI 2024, arXiv:2412.19437,
    # section 1, to two. The embedding's table is not counted.
    for name, billions, digits in (
        ("gpt_oss_20b", 3.61, 3),
        ("gpt_oss_120b", 5.13, 3),
        ("deepseek_v3", 37, 2),
    ):
        found = forward(PRESETS[name], 0) / 1e9
        assert float(f"{found:.{digits}g}") == billions
    small = ModelConfig(7, 2, 8, 2, 4, feedforward=Mixture(4, 2, d_ff=16, shared=12))
    router, expert, shared = 8 * 4, 3 * 8 * 16, 3 * 8 * 12
    assert forward(small, 0) == 2 * (4 * 8 * 8 + router + 2 * expert + shared) + 7 * 8


@pytest.mark.thorough
def test_encoder_decoders_count_a_source_token_with_each_target_token():
    """T5: every parameter but the norms and the position tables multiplies once, and three
    attentions a pair of layers."""
    config = presets.t5_small
    N = params.count(models.spec(config))
    assert cost.training_flops(config, 0) == pytest.approx(6 * N, rel=1e-3)
    assert forward(config, 512) - forward(config, 0) == 3 * 6 * 2 * 8 * 64 * 512
    untied = presets.t5_v1_1_small  # of its two matrices of the vocabulary one is looked up
    N = params.count(models.spec(untied)) - untied.decoder.vocab_size * untied.decoder.d_model
    assert cost.training_flops(untied, 0) == pytest.approx(6 * N, rel=1e-3)


SMALL = ModelConfig(
    vocab_size=50,
    num_layers=3,
    d_model=16,
    num_heads=2,
    context_length=16,
    masks=(masks.full(),),
    heads=(),
)
IMAGES = replace(
    SMALL, vocab_size=1, embedding=Patches((8, 8), (2, 2), class_token=False), tie_embeddings=False
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        *(replace(SMALL, heads=(head,)) for head in (Classification(3), TokenClassification(3))),
        *(
            replace(IMAGES, heads=(head,))
            for head in (Classification(3), TokenClassification(3), Reconstruction(2))
        ),
        *(
            replace(SMALL, mixer=Linformer(5, sharing))
            for sharing in ("headwise", "key_value", "layerwise")
        ),
        replace(SMALL, stack=Repeated((2, 0, 3)), embedding=Factorised(8), tie_embeddings=False),
    ],
    ids=lambda config: (
        f"{type(config.mixer).__name__}-{config.heads}-{type(config.embedding).__name__}"
        f"-{type(config.stack).__name__}"
    ),
)
def test_the_closed_form_is_what_the_program_multiplies(config):
    """Pooled heads read one position, Linformer's E and F multiply the features of all keys and
    values in each layer."""
    T, keys = config.context_length, getattr(config.mixer, "rank", config.context_length)
    given = jax.ShapeDtypeStruct((1, T), jnp.int32)
    if isinstance(config.embedding, Patches):
        given = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    forward = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
    counted = flops.count(partial(models.apply, config), forward, given).matmul / 2
    attended = 2 * cost.layer_runs(config) * config.d_model * keys * T
    assert counted == pytest.approx(
        attended + T * sum(size * share for size, share in cost.products(config).values())
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["gpt2_small", "mixtral_8x7b", "bert_base", "vit_base", "t5_small", "reformer_enwik8"]
)
def test_the_table_has_a_row_for_each_parameter_and_a_total(name):
    config = PRESETS[name]
    leaves = params.paths(models.spec(config))
    head, *rows, total = cost.table(config).splitlines()
    assert head.split()[:2] == ["parameter", "numbers"]
    numbers = {row.split()[0]: int(row.split()[1].replace(",", "")) for row in rows}
    assert numbers == {path: params.count(leaf) for path, leaf in leaves.items()}
    assert int(total.split()[1].replace(",", "")) == params.count(models.spec(config))
    multiplied = {row.split()[0] for row in rows if "  -  " not in row}
    assert {path for path, leaf in leaves.items() if leaf.contracts} <= multiplied


def test_masks_get_no_discount():
    dense, banded = (
        replace(presets.gpt2_small, masks=(mask,)) for mask in (masks.full(), masks.window(3))
    )
    assert cost.training_flops(dense, 512) == cost.training_flops(banded, 512)


def test_peaks_of_known_devices_alone():
    assert cost.CHIPS["NVIDIA H200"].peak == 989e12
