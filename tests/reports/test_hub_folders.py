"""Folders of the hub: what users of transformers, llama.cpp, vLLM and others reported of settings
that every model may have, and of names that training code gives."""

import json
import re
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxformer import families
from jaxformer.errors import ConfigError
from jaxformer.families import marian
from jaxformer.masks import causal, full
from tests import golden
from tests.families import golden_runs as runs


def read(folder, name, **settings):
    """The config of the golden model `name` with other settings; `...` leaves one out."""
    return families.read_config(runs.altered(folder, name, **settings))


# Settings


@pytest.mark.thorough
@pytest.mark.report(
    "ggml-org/llama.cpp#20746",
    "vllm-project/vllm#10184",
    "vllm-project/vllm#52948",
    "huggingface/transformers#44777",
    right="with is_causal=false, the tokens of a decoder also see those after them",
    hit="is_causal was not read: an embedding model ran with a causal mask, without a word",
)
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "opt"])
def test_a_decoder_without_a_causal_mask(name, tmp_path):
    plain = families.load(golden.folder(name))
    checkpoint = families.load(runs.altered(tmp_path, name, is_causal=False))
    assert checkpoint.config == replace(plain.config, masks=(full(),))
    families.save(tmp_path / "again", checkpoint)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["is_causal"] is False
    assert families.read_config(tmp_path / "again") == checkpoint.config
    assert read(tmp_path / "b", name, is_causal=True) == plain.config


@pytest.mark.report(
    "ggml-org/llama.cpp#20746",
    "vllm-project/vllm#18109",
    right="is_causal=false is refused for a model with windows, with ALiBi or of two stacks",
    hit="is_causal was not read: windows and ALiBi stayed as those of a decoder, without a word",
)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "bloom", "bart", "t5"])
def test_masks_that_are_more_than_causal_stay(name, tmp_path):
    with pytest.raises(ConfigError, match="is_causal"):
        read(tmp_path, name, is_causal=False)


@pytest.mark.report(
    "vllm-project/vllm#10184",
    right="an encoder is what it is, whatever is_causal says",
)
def test_an_encoder_has_no_causal_mask_to_lose(tmp_path):
    plain = families.read_config(golden.folder("bert_mlm"))
    assert causal() not in plain.masks
    assert read(tmp_path, "bert_mlm", is_causal=False) == plain


@pytest.mark.report(
    "jundot/omlx#3537",
    "huggingface/transformers#48601",
    right="settings of single layers, per_layer_config, are refused by name; an empty one is none",
    hit="they were not read: each layer had the settings of all",
)
@pytest.mark.parametrize("name", ["llama_gqa", "bert_mlm", "t5"])
def test_settings_of_single_layers_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="per_layer_config"):
        read(tmp_path / "a", name, per_layer_config={"0": {"sliding_window": 2}})
    plain = families.read_config(golden.folder(name))
    for nothing in ({}, None):
        assert read(tmp_path / str(nothing), name, per_layer_config=nothing) == plain


OTHER_NAMES = {
    "gpt2": ("n_head", "num_attention_heads", 1),
    "gptj": ("n_head", "num_attention_heads", 1),
    "bloom": ("n_head", "num_attention_heads", 1),
    "falcon": ("hidden_size", "n_embed", 48),
    "distilbert_mlm": ("n_heads", "num_attention_heads", 1),
    "t5": ("d_kv", "head_dim", 7),
    "mixtral": ("num_local_experts", "num_experts", 3),
}


@pytest.mark.report(
    "PaddlePaddle/PaddleNLP#4421",
    "vllm-project/vllm#649",
    right=(
        "an entry of config.json may have the name that it has in other families; where both are "
        "there, that one goes first, as in transformers"
    ),
    hit="alone it was refused as missing; beside the own name it was not read, without a word",
)
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_an_entry_under_its_other_name(name, tmp_path):
    own, other, value = OTHER_NAMES[name]
    meant = read(tmp_path / "a", name, **{own: value})
    assert meant != families.read_config(golden.folder(name))
    assert read(tmp_path / "b", name, **{own: ..., other: value}) == meant
    assert read(tmp_path / "c", name, **{other: value}) == meant
    assert read(tmp_path / "d", name, **{own: value, other: None}) == meant


@pytest.mark.report(
    "huggingface/transformers#16709",
    "huggingface/transformers#10449",
    "YangRui2015/RiC#7",
    right="the number of classes is that of id2label, and num_labels counts where there is none",
    hit="num_labels went first: a folder of two names and num_labels=3 was refused",
)
def test_the_number_of_classes_is_that_of_their_names(tmp_path):
    labels = golden.config("bert_sequence")["id2label"]
    count = families.read_config(golden.folder("bert_sequence")).heads[0].classes
    assert count == len(labels) != 7
    for settings in ({"num_labels": 7}, {"id2label": ..., "num_labels": count}):
        folder = runs.altered(tmp_path / str(len(settings)), "bert_sequence", **settings)
        assert families.load(folder).config.heads[0].classes == count


@pytest.mark.report(
    "codefuse-ai/CodeFuse-Embeddings#45",
    "Blackwellboy/model-serving-minefield#107",
    right=(
        "max_window_layers beyond the layers, copied from a larger model, means nothing without "
        "use_sliding_window"
    ),
)
def test_windows_of_more_layers_than_there_are(tmp_path):
    settings = {"max_window_layers": 28, "sliding_window": 2, "layer_types": ...}
    config = read(tmp_path, "qwen2", use_sliding_window=False, **settings)
    assert config.masks == (causal(),)


# Names


WRAPPED = {
    "module._orig_mod.": lambda name: "module._orig_mod." + name,
    "_fsdp_wrapped_module.": lambda name: (
        "_fsdp_wrapped_module." + re.sub(r"(layers\.\d+\.)", r"\1_fsdp_wrapped_module.", name)
    ),
    "_checkpoint_wrapped_module.": lambda name: re.sub(
        r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name
    ),
    "_orig_module.": lambda name: re.sub(r"(layers\.\d+\.)", r"\1_orig_module.", name),
    "student.backbone.": lambda name: "student.backbone." + name,
}


def renamed(change):
    return lambda arrays: {change(name): array for name, array in arrays.items()}


@pytest.mark.report(
    "FareedKhan-dev/train-llm-from-scratch#37",
    "pytorch/pytorch#117446",
    "huggingface/transformers#29659",
    "huggingface/pytorch-image-models#2003",
    "facebookresearch/dinov2#544",
    right="names that training code made longer are refused with the rename that mends them",
    hit="only module. and _orig_mod. in front were known; of others, tensors were listed",
)
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_rename_of_wrapped_modules(wrapper, tmp_path):
    name = "llama_mha"
    folder = runs.altered(tmp_path / "a", name, renamed(WRAPPED[wrapper]))
    with pytest.raises(ConfigError, match=r"rename each to name\S*") as refused:
        families.load(folder)
    call = re.search(r"rename each to (name(?:\.\w+\([^)]*\))+)", str(refused.value))[1]
    # the message is code: it gives the names of the golden model
    back = [eval(call, {"name": each}) for each in runs.tensors(folder)]
    assert sorted(back) == sorted(runs.tensors(golden.folder(name)))


@pytest.mark.report(
    "huggingface/peft#2647",
    "declare-lab/flacuna#2",
    right="a whole model with an adapter that is not merged is refused with what merges it",
    hit="hundreds of tensors were listed as missing and unexpected, with no word of the adapter",
)
def test_an_adapter_inside_a_whole_model(tmp_path):
    def adapted(arrays):
        base = {"base_model.model." + name: array for name, array in arrays.items()}
        query = "base_model.model.model.layers.0.self_attn.q_proj."
        weight = base.pop(query + "weight")
        low = np.ones((2, weight.shape[1]), np.float32), np.ones((weight.shape[0], 2), np.float32)
        parts = {"base_layer.weight": weight, "lora_A.default.weight": low[0]}
        parts["lora_B.default.weight"] = low[1]
        return base | {query + part: array for part, array in parts.items()}

    with pytest.raises(ConfigError, match="merge_and_unload"):
        families.load(runs.altered(tmp_path, "llama_mha", adapted))


@pytest.mark.report(
    "huggingface/transformers#3142",
    right="a bare model that its config.json calls a classifier is refused: its head is missing",
)
@pytest.mark.parametrize("name", ["bert_mlm", "gpt2"])
def test_a_bare_model_has_no_head_to_classify_with(name, tmp_path):
    prefix = {"bert_mlm": "Bert", "gpt2": "GPT2"}[name]
    with pytest.raises(ConfigError, match=r"1 missing|2 missing|missing: .*(classifier|score)"):
        families.load(
            runs.altered(tmp_path, name, architectures=[f"{prefix}ForSequenceClassification"])
        )


@pytest.mark.report(
    "onnxruntime/mobius#113",
    "vllm-project/vllm#18300",
    right="a file may leave out the prefix of the base model",
)
@pytest.mark.parametrize("name", ["bloom", "falcon", "opt", "bart", "gpt_neox"])
def test_the_prefix_of_the_base_model_may_be_missing(name, tmp_path):
    prefix = families.FAMILIES[golden.config(name)["model_type"]].prefix
    folder = runs.altered(tmp_path, name, renamed(lambda key: key.removeprefix(prefix)))
    assert not any(key.startswith(prefix) for key in runs.tensors(folder))
    found, plain = families.load(folder), families.load(golden.folder(name))
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, plain.params))


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#44454",
    "huggingface/transformers#31387",
    right=(
        "a table of sinusoids in a file is that of the model, up to the rounding of its dtype; "
        "another one, such as random numbers of transformers 5, is refused by name"
    ),
    hit="the table was left unread whatever it held; transformers computes with what it holds",
)
@pytest.mark.parametrize("name", ["pegasus", "marian"])
def test_a_table_of_sinusoids_is_one(name, tmp_path):
    plain = families.load(golden.folder(name))
    tables = marian.sines(plain.config)
    assert len(tables) == 2

    def with_tables(change):
        return lambda arrays: arrays | {key: change(table) for key, table in tables.items()}

    same = lambda table: table
    rounded = lambda table: table.astype(ml_dtypes.bfloat16)
    for number, change in enumerate((same, rounded)):
        folder = runs.altered(tmp_path / str(number), name, with_tables(change))
        found = families.load(folder).params
        assert jax.tree.all(jax.tree.map(np.array_equal, found, plain.params))
    drawn = np.random.default_rng(0).normal(size=next(iter(tables.values())).shape)
    other = lambda table: drawn[: len(table)].astype(np.float32)
    for number, change in enumerate((other, lambda table: table[:-1])):
        with pytest.raises(ConfigError, match=r"embed_positions\.weight.*sinusoids"):
            families.load(runs.altered(tmp_path / f"other{number}", name, with_tables(change)))
