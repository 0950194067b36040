"""A diagram holds every parameter of the model, and says in words what the config says."""

from dataclasses import replace

import pytest

from jaxformer import models, params
from jaxformer.masks import causal, window
from jaxformer.models import EncoderDecoder, ModelConfig, blocks
from jaxformer.tools.analysis import diagram, figures
from jaxformer.zoo import PRESETS
from jaxformer.zoo.performer import Performer

TINY = ModelConfig(50, 6, 16, 2, context_length=8)


def counted(stack):
    """The parameters of all boxes, those of a frame as often as it says."""
    total, times = 0, [1]
    for row in stack:
        if isinstance(row, diagram.Mark):
            if row.kind == "open":
                times.append(times[-1] * int((row.text or "× 1").removeprefix("× ")))
            elif row.kind == "close":
                times.pop()
        else:
            total += times[-1] * sum(box.parameters for box in row)
    assert times == [1]
    return total


FAMILIES = (
    "gpt2_small gpt3_125m qwen2_7b mixtral_8x7b bert_base reformer_enwik8 linformer_base "
    "vit_base transformer_base t5_v1_1_base"
)


@pytest.mark.thorough_after(5)
@pytest.mark.parametrize("name", FAMILIES.split())
def test_boxes_hold_every_parameter(name):
    config = PRESETS[name]
    if isinstance(config, ModelConfig):
        spec, found = models.spec(config), counted(diagram.rows(config))
    else:
        spec = models.spec(replace(config, share_embeddings=False))
        found = counted(diagram.rows(config.encoder)) + counted(
            diagram.rows(config.decoder, config.encoder)
        )
    shared = sum(
        params.count(tree["shared"]) for tree in (spec, *spec.values()) if "shared" in tree
    )
    assert found == params.count(spec) - shared


def words(config):
    rows = list(diagram.rows(config))
    return " ".join(
        " ".join((b.title, b.detail)) for row in rows if isinstance(row, list) for b in row
    ), [
        (row.kind, row.text) for row in rows if isinstance(row, diagram.Mark) and row.kind == "open"
    ]


@pytest.mark.thorough
def test_what_newcomers_look_for():
    for name, expected in {
        "gpt2_small": ("causal, 12 heads of 64", "learned, 1,024 × 768", "gelu_tanh", "Layer norm"),
        "bert_base": (
            "Token types",
            "all tokens see each other",
            "Next sentence",
            "first position → tanh → 2 classes",
        ),
        "llama3_8b": (
            "32 heads of 128, 8 for keys and values",
            "rotary positions",
            "RMS norm",
            "swiglu",
        ),
        "mixtral_8x7b": ("Experts", "8, 2 for each token"),
        "vit_base": ("Patches", "3 × 16 × 16 → 768, class token", "1,000 classes"),
        "longformer_base": ("Longformer self-attention", "window 512, global tokens 1"),
    }.items():
        text, opened = words(PRESETS[name])
        assert all(word in text for word in expected), text
        assert opened == [("open", f"× {PRESETS[name].num_layers}")]
    assert words(PRESETS["gpt3_125m"])[1] == [("open", "× 6"), ("open", ""), ("open", "")]
    assert words(PRESETS["reformer_enwik8"])[1] == [
        ("open", "× 3"),
        ("open", "× 2"),
        ("open", ""),
        ("open", ""),
    ]


def own(config):
    return Performer(4)(config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        replace(TINY, block=blocks.sandwich, positions=None),
        replace(
            TINY,
            masks=(causal(), causal() & window(3), causal(), causal() & window(3)),
            num_layers=6,
        ),
        # six layers are no multiple of four
        replace(TINY, masks=(causal(),) * 3 + (causal() & window(3),)),
        replace(TINY, mixer=(own, None), heads=()),
        EncoderDecoder(replace(TINY, heads=()), TINY),
    ],
)
def test_it_is_drawn_in_light_and_dark(config):
    light, dark = (
        figures.png(lambda: diagram.diagram(config, "a title"), ground) for ground in (False, True)
    )
    assert light.startswith(b"\x89PNG") and light != dark
