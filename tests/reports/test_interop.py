"""Folders of Hugging Face: what users of transformers and of its readers reported, tried on
ours."""

import json
import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer import decoding, families, masks, models, params
from jaxformer.decoding.filters import History
from jaxformer.errors import ConfigError
from jaxformer.families import Checkpoint, Tokens
from jaxformer.interop import safetensors
from jaxformer.models import ModelConfig
from jaxformer.models.presets import bert_base_mlm
from jaxformer.ops.positions import Linear, Llama3, Rope
from tests import golden

LLAMA = ModelConfig(
    vocab_size=24,
    num_layers=2,
    d_model=8,
    num_heads=2,
    num_kv_heads=1,
    d_ff=12,
    context_length=64,
    norm="rms_norm",
    feedforward="swiglu",
    positions=Rope(5e5),
    use_bias=False,
    tie_embeddings=False,
    init_std=0.3,
)


def drawn(config):
    """Parameters of random numbers, in NumPy: nothing is compiled."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: generator.normal(size=leaf.shape).astype(np.float32), models.spec(config)
    )


def saved(folder, config=LLAMA, kind="llama", tokens=Tokens(), weights=None):
    """The folder of a model of random numbers."""
    weights = drawn(config) if weights is None else weights
    families.save(folder, Checkpoint(config, weights, tokens, model_type=kind))
    return folder


def settings_of(folder, file="config.json"):
    return json.loads((folder / file).read_text())


def change(folder, settings, file="config.json", remove=()):
    """Writes other settings into config.json; returns the folder."""
    kept = {name: value for name, value in settings_of(folder, file).items() if name not in remove}
    (folder / file).write_text(json.dumps(kept | settings))
    return folder


def change_tensors(folder, change):
    """Writes what `change` makes of the tensors {name: array}; returns the folder."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    return folder


def same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


# Rotations in two places


@pytest.mark.thorough
@pytest.mark.report(
    "Open-Athena/MarinFold#184",
    "vllm-project/vllm#42624",
    listed="first 01",
    right=(
        "a saved rotation is found by readers of rope_parameters and by those of rope_theta and "
        "rope_scaling"
    ),
    hit=(
        "config.json had rope_parameters alone, so that older readers took theta 10000 and no "
        "scaling"
    ),
)
@pytest.mark.parametrize(
    "positions", [Rope(5e5), Rope(2e4, scaling=Linear(4.0)), Rope(5e5, scaling=Llama3(8.0, 32))]
)
def test_a_saved_rotation_is_found_in_both_places(positions, tmp_path):
    config = replace(LLAMA, positions=positions)
    c = settings_of(saved(tmp_path / "a", config))
    assert c["rope_theta"] == positions.theta
    if positions.scaling is None:
        assert c["rope_scaling"] is None
    else:
        assert {"factor": positions.scaling.factor}.items() <= c["rope_scaling"].items()
        assert (
            c["rope_scaling"]["rope_type"]
            == c["rope_scaling"]["type"]
            == c["rope_parameters"]["rope_type"]
        )
    assert families.load(tmp_path / "a").config == replace(config, init_std=0.3)
    older = change(tmp_path / "a", {}, remove=["rope_parameters"])
    assert families.read_config(older).positions == positions
    newer = change(saved(tmp_path / "b", config), {}, remove=["rope_scaling", "rope_theta"])
    assert families.read_config(newer).positions == positions


SCALED = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.thorough
@pytest.mark.report(
    "Open-Athena/MarinFold#198",
    listed="second 14",
    right=(
        "settings of a rotation are read from all places that have some, and two that differ are "
        "refused by name"
    ),
    hit="theta fell to 10000 where rope_scaling stood beside rope_parameters",
)
@pytest.mark.parametrize(
    ("places", "scaling"),
    [
        ({"rope_parameters": SCALED | {"rope_theta": 5e5}, "rope_scaling": SCALED}, Linear(2.0)),
        (
            {
                "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
                "rope_scaling": {"rope_type": "default"},
            },
            None,
        ),
        (
            {
                "rope_parameters": {"rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            Linear(2.0),
        ),
        ({"rope_parameters": SCALED, "rope_theta": 500000}, Linear(2.0)),
        (
            {
                "rope_parameters": SCALED | {"factor": 4.0, "rope_theta": 5e5},
                "rope_scaling": SCALED,
            },
            "factor",
        ),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta"),
        (
            {
                "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
                "rope_scaling": SCALED,
            },
            "rope_type",
        ),
    ],
)
def test_a_rotation_in_two_places_is_one_rotation(places, scaling, tmp_path):
    folder = change(
        saved(tmp_path / "a"), places, remove=["rope_parameters", "rope_scaling", "rope_theta"]
    )
    if isinstance(scaling, str):
        with pytest.raises(ConfigError, match=scaling):
            families.read_config(folder)
    else:
        assert families.read_config(folder).positions == Rope(5e5, scaling=scaling)


# What other writers write


NULLS = [
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "tie_word_embeddings",
    "head_dim",
    "rope_scaling",
    "id2label",
    "initializer_range",
    "architectures",
    "eos_token_id",
    "quantization_config",
    "rms_norm_eps",
    "sliding_window",
]


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/vllm#251",
    "ggml-org/llama.cpp#9485",
    listed="second 16",
    right="a null is no entry, LLaMAForCausalLM is LlamaForCausalLM, and 64.0 is a length",
    hit=(
        "nulls of flags and rates, the first conversions' class, and lengths with a point were "
        "refused"
    ),
)
def test_a_config_of_an_old_writer_is_read(tmp_path):
    folder = saved(tmp_path / "a")
    change(
        folder,
        dict.fromkeys(NULLS)
        | {"architectures": ["LLaMAForCausalLM"], "max_position_embeddings": 64.0},
    )
    assert families.read_config(folder) == replace(LLAMA, norm_eps=1e-6, init_std=0.02)
    change(folder, {"max_position_embeddings": 64.5})
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        families.read_config(folder)


@pytest.mark.thorough
@pytest.mark.report(
    "HabanaAI/vllm-fork#1294", right="head_dim: null means hidden_size / num_attention_heads"
)  # fmt: skip
@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_a_null_head_width_is_the_default(kind, tmp_path):
    config = replace(LLAMA, positions=Rope(1e4))
    folder = change(saved(tmp_path / "a", config, kind), {"head_dim": None})
    assert families.read_config(folder).head_size == 4


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/torchtitan#3570", "TransformerLensOrg/TransformerLens#1630",
    right="an explicit head_dim decides the shapes, in files that are read and that are written",
)  # fmt: skip
def test_an_explicit_head_width_goes_both_ways(tmp_path):
    config = replace(LLAMA, head_width=6)
    folder = saved(tmp_path / "a", config)
    assert settings_of(folder)["head_dim"] == 6
    assert load_file(folder / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ].shape == (12, 8)
    again = families.load(folder)
    assert again.config.head_size == 6
    assert same(again.params, drawn(config))


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#35896",
    right=(
        "max_window_layers counts the first layers, which see all; those above have the window, "
        "as in transformers' code"
    ),
)
def test_the_window_is_that_of_the_upper_layers(tmp_path):
    config = replace(
        LLAMA, use_bias="query|key|value", masks=(masks.causal(), masks.causal() & masks.window(3))
    )
    folder = saved(tmp_path / "a", config, "qwen2")
    window = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": None,
    }
    assert families.read_config(change(folder, window)).masks == config.masks
    for nothing in ({"max_window_layers": 2}, {"use_sliding_window": False}):
        assert families.read_config(change(folder, window | nothing)).masks == (masks.causal(),)


# Conventions of writing


def written_by(checkpoint, bias, new=()):
    """The greedy next token by the checkpoint's filters, where the logits are `bias`."""
    history = np.array([[1, 2, *new]], np.int32)
    count = history.shape[1]
    logits, history = (
        jnp.asarray(bias, jnp.float32)[None],
        History(history, np.array([count]), np.array([2])),
    )
    for function in checkpoint.decoding()["filters"]:
        logits = function(logits, history)
    return int(logits[0].argmax())


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#5126",
    "huggingface/transformers#5134",
    "huggingface/transformers#25294",
    listed="first 10",
    right=(
        "banned, suppressed and forced tokens of a checkpoint are read, used by its "
        "`decoding()`, and written again"
    ),
    hit="bad_words_ids and suppress_tokens were dropped, so that a Marian wrote pads",
)
def test_the_tokens_that_a_checkpoint_never_writes(tmp_path):
    folder = saved(tmp_path / "a", tokens=Tokens(eos=(3,)))
    said = {
        "bad_words_ids": [[7], [4, 5]],
        "suppress_tokens": [8],
        "begin_suppress_tokens": [9],
        "eos_token_id": [3, 2],
        "num_beams": 6,
    }
    (folder / "generation_config.json").write_text(json.dumps(said))
    checkpoint = families.load(folder)
    rank = np.zeros(24)
    rank[[7, 8, 9, 5]] = 9, 8, 7, 6
    assert checkpoint.decoding()["stop_tokens"] == (3, 2)
    assert written_by(checkpoint, rank) == 5
    assert written_by(checkpoint, rank, [1]) == 9  # suppressed at the beginning alone
    rank[9] = 0
    assert written_by(checkpoint, rank, [4]) not in (5, 7, 8)
    families.save(tmp_path / "b", checkpoint)
    again = families.load(tmp_path / "b")
    assert (again.tokens, again.generation) == (checkpoint.tokens, {"num_beams": 6})
    assert settings_of(tmp_path / "b", "generation_config.json") == said | {"eos_token_id": [3, 2]}


@pytest.mark.report(
    "huggingface/transformers#5126",
    right=(
        "a Marian whose pad is the likeliest token writes none, from the options that its "
        "checkpoint gives"
    ),
    hit="every token that was written was the pad",
    listed="first 10",
)
@pytest.mark.thorough
def test_a_marian_writes_no_pads(tmp_path):
    checkpoint = families.load(golden.folder("marian"))
    pad = checkpoint.tokens.start
    bias = checkpoint.params["decoder"]["heads"]["language_model"]["bias"]
    checkpoint.params["decoder"]["heads"]["language_model"]["bias"] = bias.at[pad].set(1e3)
    banned = replace(checkpoint, tokens=replace(checkpoint.tokens, banned=((pad,),)))
    families.save(tmp_path / "a", banned)
    loaded = families.load(tmp_path / "a")
    greedy = decoding.Sampling(temperature=0.0)
    options = dict(sources=[[5, 6, 7]], sampling=greedy, **loaded.decoding())
    (text,) = decoding.generate(loaded.config, loaded.params, [[pad]], 5, **options)
    assert pad not in text


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#5987", "huggingface/transformers#7719", listed="first 07",
    right="the checkpoint says with which token the targets of its decoder begin",
)  # fmt: skip
@pytest.mark.parametrize("name", ["t5", "marian"])
def test_the_first_token_of_a_target_is_known(name):
    said = settings_of(golden.folder(name))["decoder_start_token_id"]
    assert families.load(golden.folder(name)).tokens.start == said


@pytest.mark.thorough
@pytest.mark.report(
    "InfiniTensor/InfiniLM#387",
    "turboderp-org/exllamav2#449",
    right=(
        "the stop tokens are those of generation_config.json, all of its list, before that of "
        "config.json"
    ),
)
def test_stop_tokens_of_the_generation_config(tmp_path):
    folder = saved(tmp_path / "a", tokens=Tokens(eos=(2,)))
    assert families.load(folder).tokens.eos == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11]}))
    assert families.load(folder).tokens.eos == (2, 11)


# Tensors


BERT = replace(
    bert_base_mlm, vocab_size=20, num_layers=1, d_model=8, num_heads=2, d_ff=12, context_length=16
)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#5404",
    "huggingface/transformers#5421",
    listed="first 13",
    right=(
        "heads that the class does not have are left out, and one warning names them; all else "
        "stays refused"
    ),
    hit="Google's BERT files were refused for their pooler and next-sentence head",
)
def test_heads_that_the_class_does_not_have_are_left_out(tmp_path, caplog):
    more = {
        "bert.pooler.dense.weight": (8, 8),
        "bert.pooler.dense.bias": (8,),
        "cls.seq_relationship.weight": (2, 8),
    }
    add = lambda tensors: (
        tensors | {name: np.ones(shape, np.float32) for name, shape in more.items()}
    )
    folder = change_tensors(saved(tmp_path / "a", BERT, "bert"), add)
    with caplog.at_level(logging.WARNING, "jaxformer"):
        loaded = families.load(folder)
    assert same(loaded.params, drawn(BERT))
    assert [all(name in record.message for name in more) for record in caplog.records] == [True]
    stray = {"bert.encoder.layer.0.extra.weight": np.ones(3, np.float32)}
    with pytest.raises(ConfigError, match=r"extra\.weight"):
        families.load(change_tensors(folder, lambda tensors: tensors | stray))
    # of a head that the class has
    part = {"cls.predictions.transform.extra": np.ones(3, np.float32)}
    with pytest.raises(ConfigError, match=r"transform\.extra"):
        families.load(
            change_tensors(saved(tmp_path / "b", BERT, "bert"), lambda tensors: tensors | part)
        )


@pytest.mark.thorough
@pytest.mark.report(
    "foundation-model-stack/fastsafetensors#88", "huggingface/accelerate#1151", listed="first 28",
    right="a file without metadata, or with empty metadata, holds the same arrays",
)  # fmt: skip
@pytest.mark.parametrize("metadata", [None, {}])
def test_metadata_is_no_part_of_the_arrays(metadata, tmp_path):
    folder = saved(tmp_path / "a")
    path = folder / "model.safetensors"
    save_file(load_file(path), path, metadata)
    assert same(families.load(folder).params, drawn(LLAMA))


@pytest.mark.thorough
@pytest.mark.report(
    "safetensors/safetensors#682", "huggingface/transformers#36828", listed="second 31",
    right="numbers of 8 bits are refused by their dtype's name, never read as weights",
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"])
def test_quantised_numbers_are_refused_by_name(dtype, tmp_path):
    import ml_dtypes

    name = "model.layers.0.self_attn.q_proj.weight"
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    folder = saved(tmp_path / "a")
    change_tensors(folder, lambda tensors: tensors | {name: tensors[name].astype(kind)})
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    with pytest.raises(ConfigError, match=names.get(dtype, dtype)):
        families.load(folder)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#35471",
    right="a quantised checkpoint is refused by its method's name, which config.json says",
    hit=(
        "the message listed tensors that were missing and unexpected, and told of options that "
        "cannot help"
    ),
)
def test_the_method_of_quantised_weights_is_named(tmp_path):
    name = "model.layers.0.self_attn.q_proj."
    quantised = {
        name + "qweight": np.ones((1, 8), np.int32),
        name + "scales": np.ones((1, 8), np.float16),
    }
    without = lambda tensors: {
        key: value for key, value in tensors.items() if key != name + "weight"
    }
    folder = change_tensors(saved(tmp_path / "a"), lambda tensors: without(tensors) | quantised)
    change(folder, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(ConfigError, match=r"quantised \(gptq\)"):
        families.load(folder)


@pytest.mark.report(
    "huggingface/transformers#25215",
    "unslothai/unsloth#2080",
    right=(
        "a folder of a PEFT adapter is refused as what it is, with the name of its base and the "
        "way to a model"
    ),
    hit="the message said that config.json is missing, and to download it again",
)
def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "r": 8})
    )
    save_file(
        {"base_model.model.lm_head.lora_A.weight": np.ones(3)},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match=r"adapter of PEFT for 'org/base'.*families.peft.load"):
        families.load(tmp_path)


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/vllm#51665",
    right=(
        "a head in the file is used although config.json ties it; a missing one is refused by "
        "name, never random"
    ),
)
def test_the_weights_say_whether_the_head_is_tied(tmp_path):
    folder = change(saved(tmp_path / "a"), {"tie_word_embeddings": True})
    loaded = families.load(folder)
    assert not loaded.config.tie_embeddings
    assert same(loaded.params, drawn(LLAMA))
    copy = lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    # a second copy of the table
    assert families.load(change_tensors(folder, copy)).config.tie_embeddings
    change(folder, {"tie_word_embeddings": False})
    change_tensors(
        folder, lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    )
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight"):
        families.load(folder)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#48154",
    right=(
        "a T5 whose table is called decoder.embed_tokens embeds with it, never with lm_head.weight"
    ),
    hit=(
        "it was refused where config.json ties it, as transformers 5 reads it: the head was "
        "taken for the table"
    ),
)
@pytest.mark.parametrize("tied", [True, False, None])
def test_a_t5_never_embeds_with_its_head(tied, tmp_path):
    checkpoint = families.load(golden.folder("t5_v11"))
    weights = jax.tree.map(np.asarray, checkpoint.params)
    families.save(tmp_path / "a", replace(checkpoint, params=weights))
    rename = lambda tensors: {
        name.replace("shared.weight", "decoder.embed_tokens.weight"): a
        for name, a in tensors.items()
    }
    folder = change_tensors(tmp_path / "a", rename)
    change(folder, {"tie_word_embeddings": tied})
    loaded = families.load(folder)
    tables = params.paths(loaded.params)
    assert np.array_equal(
        tables["decoder/embedding/tokens"], weights["decoder"]["embedding"]["tokens"]
    )
    assert np.array_equal(
        tables["decoder/heads/language_model/kernel"],
        weights["decoder"]["heads"]["language_model"]["kernel"],
    )


@pytest.mark.thorough
@pytest.mark.report(
    "Blaizzy/mlx-vlm#1464",
    right=(
        "a stray model.safetensors beside the shards of an index is named, as transformers would "
        "read it"
    ),
    hit="it was read instead of the shards without a word",
)
def test_two_sets_of_weights_in_one_folder_are_named(tmp_path, caplog):
    weights = drawn(LLAMA)
    families.save(tmp_path / "a", Checkpoint(LLAMA, weights, model_type="llama"), shard_bytes=1000)
    other = saved(tmp_path / "b", weights=jax.tree.map(lambda leaf: leaf + 1, weights))
    assert same(families.load(tmp_path / "a").params, weights)
    (tmp_path / "a" / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with caplog.at_level(logging.WARNING, "jaxformer"):
        families.load(tmp_path / "a")
    assert "model.safetensors.index.json" in caplog.text


@pytest.mark.thorough
@pytest.mark.report(
    "sgl-project/sglang#32279",
    right="a shard that the index names and the folder lacks is refused by name",
)
def test_a_missing_shard_is_refused(tmp_path):
    families.save(
        tmp_path / "a", Checkpoint(LLAMA, drawn(LLAMA), model_type="llama"), shard_bytes=1000
    )
    lost = sorted((tmp_path / "a").glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        families.load(tmp_path / "a")


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#43781",
    right=(
        "an adapter beside a model is said: transformers would add it, we read the model without it"
    ),
    hit=(
        "the model was read without a word; with config.json and no weights nobody was told of "
        "the adapter"
    ),
)
def test_an_adapter_beside_a_model_is_said(tmp_path, caplog):
    folder = saved(tmp_path / "a")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "r": 8})
    )
    with caplog.at_level(logging.WARNING, "jaxformer"):
        families.read_config(folder)
    assert [
        text
        for text in caplog.messages
        if "an adapter beside the model (adapter_config.json)" in text
    ]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter of PEFT for 'org/base'.*families.peft.load"):
        families.read_config(folder)


@pytest.mark.report(
    "vllm-project/vllm#54230",
    "1CatAI/1Cat-vLLM#407",
    "JustVugg/colibri#1479",
    right=(
        "of a tensor in two files the index says which counts; where it says nothing, the folder "
        "is refused"
    ),
    hit="of a tensor in two files that the index does not list, the last file counted",
)
def test_the_index_says_which_of_two_tensors_counts(tmp_path):
    save_file({"a": np.zeros(2), "stale": np.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"a": np.ones(2), "b": np.ones(1)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for file, value in (("1.safetensors", 0.0), ("2.safetensors", 1.0)):
        index.write_text(
            json.dumps({"weight_map": {"a": file, "b": "2.safetensors", "stale": "1.safetensors"}})
        )
        opened = safetensors._open_shards(index, ["1.safetensors", "2.safetensors"])
        assert opened["a"].get_tensor("a")[0] == value
    index.write_text(json.dumps({"weight_map": {"stale": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(ConfigError, match="two files have 'a', and it does not say which counts"):
        safetensors._open_shards(index, ["1.safetensors", "2.safetensors"])


@pytest.mark.report(
    "huggingface/huggingface_hub#4728",
    "huggingface/huggingface_hub#4740",
    right=(
        "a tensor that the index places in a file which does not have it is missing, also if "
        "another file has it"
    ),
)
def test_an_index_that_points_to_the_wrong_file_is_refused(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"b": np.ones(1)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps(
            {"weight_map": {"a": "2.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}
        )
    )
    with pytest.raises(ConfigError, match="lists 'a', 'c', which no file has"):
        safetensors._open_shards(index, ["1.safetensors", "2.safetensors"])
