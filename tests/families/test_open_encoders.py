"""ALBERT, ELECTRA, ModernBERT and DeBERTa: their classes, dialects and refusals."""

import numpy as np
import pytest

from jaxformer import families, models, params
from jaxformer.errors import ConfigError
from jaxformer.families import albert, deberta_v2, electra, modernbert
from jaxformer.families.tensors import plan
from jaxformer.masks import full, window
from jaxformer.ops.positions import Rope
from jaxformer.params import paths
from tests.families import golden_runs as runs
from tests.witnesses import load

SIZES = dict(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=5,
    max_position_embeddings=9,
    embedding_size=4,
    num_hidden_groups=2,
    inner_group_num=2,
    position_buckets=4,
    relative_attention=True,
    pos_att_type="p2c|c2p",
    id2label={"0": "a", "1": "b", "2": "c"},
)
MODULES = {
    "albert": (albert, SIZES),
    "electra": (electra, SIZES),
    "modernbert": (modernbert, SIZES),
    "deberta-v2": (deberta_v2, {key: x for key, x in SIZES.items() if key != "embedding_size"}),
}
MODERN_KINDS = modernbert._heads(2, modernbert.Projection())
CLASSES = [
    (kind, module.NAME + end)
    for kind, (module, _) in MODULES.items()
    for end in getattr(module, "KINDS", MODERN_KINDS)
]


def read(kind, **settings):
    return families.FAMILIES[kind].read(MODULES[kind][1] | settings, ())


@pytest.mark.parametrize("kind,name", CLASSES)
def test_every_class_is_read_and_written(kind, name):
    family = families.FAMILIES[kind]
    config = read(kind, architectures=[name], is_decoder=name.endswith("CausalLM"))
    written = family.write(config)
    assert written["architectures"] == [name]
    assert family.read(written, plan(family, config)) == config


def test_layers_of_albert_run_as_often_as_the_published_code_runs_them():
    assert albert._times(12, 1) == (12,) and albert._times(5, 2) == (3, 2)
    assert albert._times(3, 3) == (1, 1, 1) and albert._times(1, 2) == (1, 0)
    config = read("albert", num_hidden_layers=5)
    assert config.num_layers == 4 and config.stack.times == (3, 2)


@pytest.mark.parametrize("name", ["electra_small", "electra_base", "electra_large"])
def test_published_sizes_of_electra(name):
    sizes = {
        "electra_small": (128, 256, 12, 4),
        "electra_base": (768, 768, 12, 12),
        "electra_large": (1024, 1024, 24, 16),
    }
    names = "embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads"
    c = dict(zip(names, sizes[name], strict=True))
    c |= dict(vocab_size=30522, max_position_embeddings=512, intermediate_size=4 * c["hidden_size"])
    config = electra.FAMILY.read(c | {"architectures": ["ElectraForPreTraining"]}, ())
    count = params.count(params.abstract(models.spec(config)))
    assert count == int(load("parameter_counts")[name])


def test_modernbert_as_published():
    """Its first files have `global_attn_every_n_layers` and two bases."""
    old = dict(global_attn_every_n_layers=2, global_rope_theta=300.0, local_rope_theta=20.0)
    config = read("modernbert", **old, local_attention=6, num_hidden_layers=4)
    assert config.masks == (full(), window(3, 3))
    assert config.positions == (Rope(300.0), Rope(20.0))
    default = read("modernbert", num_hidden_layers=4)
    assert default.masks == (full(), window(64, 64), window(64, 64))
    written = modernbert.FAMILY.write(config)
    assert written["global_rope_theta"] == 300.0 and written["local_rope_theta"] == 20.0


def test_the_head_of_version_3_has_other_names(tmp_path):
    """DeBERTa-v3's files have `lm_predictions`, and the head of another objective."""
    pairs = {
        "cls.predictions.transform.dense": "lm_predictions.lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_predictions.lm_head.LayerNorm",
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
    }

    def change(arrays):
        for ours, theirs in pairs.items():
            arrays = {name.replace(ours, theirs): array for name, array in arrays.items()}
        return arrays | {"mask_predictions.dense.weight": np.ones((18, 18), np.float32)}

    folder = runs.altered(tmp_path, "deberta_v2_mlm", change, legacy=False)
    checkpoint = families.load(folder)
    again = families.load(runs.altered(tmp_path / "plain", "deberta_v2_mlm"))
    assert checkpoint.config == again.config
    ours, plain = paths(checkpoint.params), paths(again.params)
    assert all(np.array_equal(ours[path], leaf) for path, leaf in plain.items())


@pytest.mark.parametrize(
    "settings",
    [
        dict(conv_kernel_size=2),
        dict(conv_groups=5, conv_kernel_size=3),
        dict(conv_act="selu", conv_kernel_size=3),
        dict(embedding_size=4),
        dict(attention_head_size=5),
        dict(pooler_hidden_size=5),
        dict(pos_att_type=[]),
        dict(position_buckets=32),
        dict(relative_attention=False),
    ],
)
def test_what_deberta_refuses_is_named(settings):
    name = "pos_att_type" if "relative_attention" in settings else next(iter(settings))
    with pytest.raises(ConfigError, match=name) as caught:
        read("deberta-v2", **settings)
    assert "\n" not in str(caught.value)


def test_scalings_of_both_kinds_at_once_are_refused():
    """transformers 5 applies them to both kinds of layer of ModernBERT."""
    with pytest.raises(ConfigError, match="rope_scaling"):
        read("modernbert", rope_scaling={"rope_type": "linear", "factor": 2.0})
