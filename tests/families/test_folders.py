"""Folders as people have them: odd, but legal. They load, with a line for what was left unread, or
are refused with the rename that mends them."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models
from jaxformer.errors import ConfigError
from jaxformer.families import table
from jaxformer.families.known import FAMILIES, write_settings
from jaxformer.families.qwen_moe import GatedShared
from jaxformer.models import Classification, presets
from jaxformer.models.mixture import Mixture
from jaxformer.params import paths
from tests import golden
from tests.families import golden_runs as runs

pytestmark = pytest.mark.thorough


def test_the_page_of_families_has_the_table():
    """`make families` prints it. In a process of its own, because types are not checked there."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "jaxformer.families.table"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (root / "docs" / "families.md").read_text()


def test_the_table_has_each_model_type_once():
    listed = [kind for row in table.ROWS for kind in row.model_types.split()]
    assert sorted(listed) == sorted(families.FAMILIES)


def assert_loads(folder, name, **options):
    """The folder has the config and the parameters of the golden model `name`."""
    found = families.load(folder, **options)
    expected = families.load(golden.folder(name), **options)
    assert found.config == expected.config
    for path, leaf in paths(expected.params).items():
        np.testing.assert_array_equal(paths(found.params)[path], leaf, err_msg=path)


def renamed(change):
    return lambda arrays: {change(name): array for name, array in arrays.items()}


PREFIXES = {"gpt2": "transformer.", "llama_gqa": "model.", "bert_mlm": "bert."}


@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_may_stand_twice_or_not_at_all(name, tmp_path):
    prefix = PREFIXES[name]

    def twice(key):
        return prefix + key if key.startswith(prefix) else key

    folder = runs.altered(tmp_path / "twice", name, renamed(twice))
    assert_loads(folder, name)
    folder = runs.altered(tmp_path / "without", name, renamed(lambda key: key.removeprefix(prefix)))
    assert_loads(folder, name)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_prefix_of_training_code_is_refused_with_the_rename(prefix, tmp_path):
    folder = runs.altered(tmp_path, "gpt2", renamed(lambda key: prefix + key))
    with pytest.raises(ConfigError, match=rf"removeprefix\('{prefix}'\)"):
        families.load(folder)


def test_a_file_of_a_variant_is_read_when_it_is_alone(tmp_path, caplog):
    folder = runs.altered(tmp_path, "gpt2")
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with caplog.at_level(logging.WARNING, "jaxformer"):
        assert_loads(folder, "gpt2")
    assert any("model.fp16.safetensors is read" in line for line in caplog.messages)


@pytest.mark.parametrize(
    "name, entries, said",
    [
        ("modernbert_mlm", {"mlp_dropout": 0.1}, "mlp_dropout=0.1"),
        ("modernbert_mlm", {"mlp_dropout": 0.0, "attention_dropout": 0.2}, None),
        ("bart", {"activation_dropout": 0.1, "classifier_dropout": 0.3}, "activation_dropout=0.1,"),
        ("gpt2", {"embd_pdrop": 0.1, "resid_pdrop": 0.1}, None),
        ("gpt2", {"embd_pdrop": 0.3, "resid_pdrop": 0.1}, "embd_pdrop=0.3"),
    ],
)
def test_a_dropout_that_is_not_read_is_said(name, entries, said, tmp_path, caplog):
    """No answer changes with it, but the training that was meant does."""
    folder = tmp_path / name
    runs.write(folder, golden.config(name) | entries, runs.tensors(golden.folder(name)))
    with caplog.at_level(logging.WARNING, "jaxformer"):
        families.read_config(folder)
    lines = [line for line in caplog.messages if "not read" in line]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


def test_an_index_may_list_a_head_that_no_file_has(tmp_path, caplog):
    """Writers list the tied head although it is stored once, as the embedding."""
    name = "llama_gqa"
    folder = runs.altered(tmp_path, name)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = [*runs.tensors(golden.folder(name)), "lm_head.weight"]
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with caplog.at_level(logging.WARNING, "jaxformer"):
        assert_loads(folder, name)
    assert any("lm_head.weight" in line for line in caplog.messages)


def test_rows_beyond_the_vocabulary_name_the_function_that_changes_it(tmp_path):
    def longer(arrays):
        table = arrays["model.embed_tokens.weight"]
        return arrays | {"model.embed_tokens.weight": np.concatenate([table, table[:3]])}

    folder = runs.altered(tmp_path, "llama_gqa", longer)
    with pytest.raises(ConfigError, match=r"vocab_size=40.*resize_vocabulary"):
        families.load(folder)


@pytest.mark.parametrize("name", ["bert_pretraining", "roberta_mlm", "vit", "gpt2", "llama_gqa"])
def test_the_heads_of_a_file_may_be_left_out_or_replaced(name, tmp_path):
    bare = families.load(golden.folder(name), heads=())
    assert "heads" not in bare.params
    new = families.load(
        golden.folder(name),
        heads=(Classification(3, name="new"),),
        allow_missing="^heads/",
        key=jax.random.key(0),
    )
    assert new.params["heads"]["new"]["kernel"].shape[-1] == 3


def test_a_head_that_the_class_does_not_have_is_named(tmp_path, caplog):
    """BERT of the hub has the head of its pre-training, whatever class its config.json says."""
    folder = runs.altered(tmp_path, "bert_pretraining", architectures=["BertForMaskedLM"])
    with caplog.at_level(logging.WARNING, "jaxformer"):
        families.load(folder)
    assert any("cls.seq_relationship" in line for line in caplog.messages)


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_a_flag_may_be_null(flag, tmp_path):
    folder = runs.altered(tmp_path, "llama_mha", **{flag: None})
    assert_loads(folder, "llama_mha")


@pytest.mark.parametrize(
    "classes", [["LLaMAForCausalLM"], ["LlamaForCausalLM"], "LlamaForCausalLM"]
)
def test_an_old_class_name_is_known(classes, tmp_path):
    folder = runs.altered(tmp_path, "llama_mha", architectures=classes)
    assert_loads(folder, "llama_mha")


def test_a_bare_file_that_names_no_class_is_refused_with_what_to_say(tmp_path):
    def bare(arrays):
        return {name: array for name, array in arrays.items() if name != "lm_head.weight"}

    folder = runs.altered(tmp_path, "llama_mha", bare, architectures=...)
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*set architectures"):
        families.load(folder)
    assert families.load(folder, heads=()).config.heads == ()


def test_a_file_without_a_head_is_tied(tmp_path):
    """tie_word_embeddings is missing, and there is no head of its own."""
    folder = runs.altered(tmp_path, "llama_gqa", tie_word_embeddings=...)
    assert_loads(folder, "llama_gqa")


@pytest.mark.parametrize(
    "name, absent",
    [
        ("reformer", "attn_layers"),
        ("reformer", "axial_pos_shape"),
        ("reformer", "axial_pos_embds_dim"),
        ("phi3_long", "short_factor"),
        ("phi3_long", "long_factor"),
    ],
)
def test_a_list_that_is_missing_is_named(name, absent, tmp_path):
    config = golden.config(name)
    if absent.endswith("factor"):
        rope = {key: value for key, value in config["rope_parameters"].items() if key != absent}
        settings = {"rope_parameters": rope, "rope_scaling": ...}
    else:
        settings = {absent: ...}
    with pytest.raises(ConfigError, match=rf"{absent}=None: expected a list"):
        families.read_config(runs.altered(tmp_path, name, **settings))


def test_a_reformer_that_does_not_say_whether_it_is_tied(tmp_path):
    """None is: its head reads two streams, and was taken for a missing one."""
    folder = runs.altered(tmp_path, "reformer", tie_word_embeddings=...)
    assert_loads(folder, "reformer")


@pytest.mark.parametrize("second", [None, "equal", "another"])
def test_a_reformer_of_transformers_5_24_adds_the_bias_of_its_decoder(second, tmp_path):
    """`lm_head.bias` beside it is read by nobody; 4.x wrote the same numbers under both names."""
    size = golden.config("reformer")["vocab_size"]
    bias = np.random.default_rng(0).normal(size=size).astype(np.float32)
    others = {None: {}, "equal": {"lm_head.bias": bias}, "another": {"lm_head.bias": 2 * bias}}

    def with_bias(arrays):
        arrays = {name: array for name, array in arrays.items() if name != "lm_head.bias"}
        return arrays | others[second] | {"lm_head.decoder.bias": bias}

    checkpoint = families.load(runs.altered(tmp_path / "a", "reformer", with_bias))
    plain = families.load(golden.folder("reformer"))
    tokens = jnp.arange(32)[None] % size
    found, expected = (
        models.apply(each.config, each.params, tokens).logits for each in (checkpoint, plain)
    )
    np.testing.assert_allclose(found, expected + bias[None, None], atol=1e-4)  # of order one
    families.save(tmp_path / "b", checkpoint)
    saved = runs.tensors(tmp_path / "b")
    np.testing.assert_array_equal(saved["lm_head.decoder.bias"], bias)
    assert "lm_head.bias" not in saved


EXPERTS = {
    "mixtral": ("block_sparse_moe.experts.{}.w1", "w1", "w3", "w2"),
    "qwen2_moe": ("mlp.experts.{}.gate_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("mlp.experts.{}.gate_proj", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp.experts.{}.gate_proj", "gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_a_layer_may_stand_in_one_tensor(name, tmp_path):
    """As transformers 5 writes them with save_original_format=False."""
    first, gate, up, down = EXPERTS[name]
    first = re.escape(first).replace(r"\{\}", r"(\d+)")

    def fused(arrays):
        found = dict(arrays)
        layers = {}
        for key in arrays:
            if match := re.fullmatch(rf"(.*\.){first}\.weight", key):
                layers.setdefault(match[1], []).append(key)
        for layer, keys in layers.items():
            keys.sort(key=lambda key: int(re.search(r"experts\.(\d+)", key)[1]))
            matrices = [
                [found.pop(key.replace(f".{gate}.", f".{each}.")) for each in (gate, up, down)]
                for key in keys
            ]
            gates, ups, downs = map(np.stack, zip(*matrices, strict=True))
            found[f"{layer}mlp.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
            found[f"{layer}mlp.experts.down_proj"] = downs
        return {key.replace("block_sparse_moe.gate", "mlp.gate"): x for key, x in found.items()}

    folder = runs.altered(tmp_path, name, fused)
    assert any("gate_up_proj" in key for key in runs.tensors(folder))
    assert_loads(folder, name)


TRAINED = {
    "z-loss": dict(router_z_loss=0.001),
    "balance loss": dict(balance_loss=0.5),
    "capacity": dict(capacity=1.25, groups=2),
    "device capacity": dict(device_capacity=2.0),
    "form of its products": dict(grouped_implementation="loop"),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("shared", [False, True], ids=["mixtral", "qwen2_moe"])
def test_a_mixture_is_saved_however_it_was_trained(shared, name):
    """Losses and capacities of training are no part of the weights' meaning."""

    def settings(**options):
        mixture = Mixture(d_ff=None if not shared else 704, normalise=not shared, **options)
        feedforward = GatedShared(mixture, d_ff=5632) if shared else mixture
        return write_settings(
            replace(presets.mixtral_8x7b, feedforward=feedforward), None, FAMILIES
        )

    written, expected = settings(**TRAINED[name]), settings()
    loss = {"router_aux_loss_coef": written["router_aux_loss_coef"]}
    assert written == expected | loss


def test_another_number_of_experts_is_another_model():
    mixtral = presets.mixtral_8x7b
    wider = replace(mixtral, feedforward=Mixture(top_k=3))
    assert "feedforward" in families.differences(mixtral, wider)
    assert not families.differences(mixtral, replace(mixtral, feedforward=Mixture(capacity=2.0)))
