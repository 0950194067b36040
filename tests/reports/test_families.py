"""Checkpoints of many families, and adapters: what users of transformers, PEFT, vLLM, llama.cpp and
others reported, tried on ours."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer import families, models
from jaxformer.errors import ConfigError
from jaxformer.families import peft
from jaxformer.families.tied_head import with_stack
from jaxformer.models import adaptation
from jaxformer.ops.positions import Linear, Rope, YaRN
from jaxformer.params import paths
from tests import golden
from tests.families import golden_runs as runs


def read(folder, name, **settings):
    """The config of the golden model `name` with other settings; `...` leaves one out."""
    return families.read_config(runs.altered(folder, name, **settings))


def loaded(name, **options):
    return families.load(golden.folder(name), **options)


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())


def change(folder, **settings):
    """Other settings in the config.json of a folder; `...` leaves one out."""
    entries = settings_of(folder) | settings
    kept = {name: value for name, value in entries.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


# Settings


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.thorough
@pytest.mark.report(
    "antonellof/ferrox#39",
    "vllm-project/vllm#29111",
    "Blaizzy/mlx-vlm#1709",
    "ggml-org/llama.cpp#14367",
    right=(
        "in an older file of Gemma 3, rope_scaling is of full layers alone; layers with a window "
        "have rope_local_base_freq and no scaling"
    ),
)
def test_a_scaling_of_gemma_3_is_of_full_layers(tmp_path):
    older = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}
    rotations = {"sliding_attention": Rope(2e4), "full_attention": Rope(1e6, scaling=Linear(8.0))}
    config = read(tmp_path, "gemma3", rope_parameters=..., **older)
    kinds = golden.config("gemma3")["layer_types"]
    pattern = [config.positions[i % len(config.positions)] for i in range(len(kinds))]
    assert pattern == [rotations[kind] for kind in kinds]
    families.save(tmp_path / "again", replace(loaded("gemma3"), config=config))
    for place in ({"rope_parameters": ...}, {"rope_scaling": ..., "rope_theta": ...}):
        families.save(tmp_path / str(place), replace(loaded("gemma3"), config=config))
        folder = change(tmp_path / str(place), **place)
        assert families.read_config(folder).positions == config.positions


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.2,
    "beta_fast": 32,
    "beta_slow": 1,
}


@pytest.mark.report(
    "huggingface/transformers#45945",
    "vllm-project/vllm#43419",
    right="the YaRN of an OLMo 3 is of full layers alone: those with a window have no scaling",
)
def test_the_yarn_of_olmo_3_is_of_full_layers(tmp_path):
    config = read(tmp_path, "olmo3", rope_parameters=..., rope_theta=5e5, rope_scaling=YARN)
    scalings = {rotation.scaling for rotation in config.positions}
    assert scalings == {None, YaRN(8.0, 16, attention_factor=1.2)}
    assert {rotation.theta for rotation in config.positions} == {5e5}


@pytest.mark.report(
    "huggingface/transformers#45945",
    right="rope_parameters of one rotation, from the first transformers 5, is not dropped unseen",
    hit="it was dropped: the model had the default rotation",
)
@pytest.mark.parametrize("name", ["olmo3", "gemma3"])
def test_one_rotation_for_two_kinds_of_layers_is_not_dropped(name, tmp_path):
    flat = YARN | {"rope_theta": 5e5}
    with pytest.raises(ConfigError, match="rope_parameters"):
        read(tmp_path, name, rope_parameters=flat)


@pytest.mark.thorough
@pytest.mark.report(
    "antonellof/ferrox#40",
    "huggingface/transformers#31891",
    "ggml-org/llama.cpp#8444",
    right="scores of Gemma 2 and 3 are divided by the root of query_pre_attn_scalar, as in 27B",
)
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_scale_of_scores_is_that_of_the_file(name, tmp_path):
    config = read(tmp_path, name, query_pre_attn_scalar=144)
    assert config.attention_scale == pytest.approx(1 / 12) != config.head_size**-0.5
    families.save(tmp_path / "again", replace(loaded(name), config=config))
    assert settings_of(tmp_path / "again")["query_pre_attn_scalar"] == 144


@pytest.mark.report(
    "marin-community/levanter#619",
    "NVIDIA-NeMo/Megatron-Bridge#4661",
    right="a Gemma 1 whose file says hidden_act gelu has the tanh form that it was trained with",
    hit="it had the exact form",
)
def test_the_activation_of_gemma_is_the_tanh_form(tmp_path):
    said = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    assert read(tmp_path, "gemma", **said).feedforward == loaded("gemma").config.feedforward


@pytest.mark.report(
    "huggingface/transformers#43756",
    "onnxruntime/mobius#233",
    "airockchip/rknn-llm#501",
    right=(
        "a 1 in no_rope_layers is a rotation, and without the list each fourth layer has none; "
        "the same file called a LLaMA is refused"
    ),
)
def test_layers_of_smollm_3_without_a_rotation(tmp_path):
    flags = [1, 0] + [1] * (golden.config("smollm3")["num_hidden_layers"] - 2)
    positions = read(tmp_path / "a", "smollm3", no_rope_layers=flags).positions
    assert [positions[i] is not None for i in range(2)] == [True, False]
    four = {"num_hidden_layers": 4, "layer_types": ..., "no_rope_layers": ...}
    positions = read(tmp_path / "b", "smollm3", no_rope_layer_interval=4, **four).positions
    assert [rotation is not None for rotation in positions] == [True, True, True, False]
    with pytest.raises(ConfigError, match="no_rope_layer"):
        read(tmp_path / "c", "smollm3", model_type="llama", architectures=["LlamaForCausalLM"])


@pytest.mark.report(
    "InternLM/lmdeploy#3861",
    right="the fraction of a head that is rotated is read where no scaling stands beside it",
)
@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("glm4", "partial_rotary_factor"),
        ("stablelm", "partial_rotary_factor"),
        ("phi", "partial_rotary_factor"),
        ("gpt_neox", "rotary_pct"),
    ],
)
def test_the_fraction_of_a_rotation_stands_alone(name, entry, tmp_path):
    older = {"rope_parameters": ..., "rope_scaling": ..., "partial_rotary_factor": ...}
    found = {}
    for fraction in (0.5, 1.0):
        folder = tmp_path / str(fraction)
        found[fraction] = read(folder, name, **older | {entry: fraction}).positions.fraction
    assert found == {0.5: 0.5, 1.0: 1.0}


@pytest.mark.thorough
@pytest.mark.report(
    "unslothai/unsloth#11277",
    "dphnAI/sonar#1054",
    right="logits of Granite are divided by logits_scaling, those of Cohere times logit_scale",
)
@pytest.mark.parametrize(
    ("name", "setting", "factor"),
    [("granite", "logits_scaling", 1 / 8), ("cohere", "logit_scale", 8)],
)
def test_logits_have_the_scale_of_the_file(name, setting, factor, tmp_path):
    kept = golden.witness(name)
    checkpoint = families.load(
        runs.altered(tmp_path, name, **{setting: 8 * golden.config(name)[setting]})
    )
    found = runs.answers(checkpoint.config, checkpoint.params, kept)
    scaled = kept | {"outputs/logits": factor * kept["outputs/logits"]}
    # the logits are at most of order ten
    assert runs.misses({"logits": found["logits"]}, scaled)["logits"] < 1e-3


@pytest.mark.report(
    "huggingface/transformers#41151",
    "anthony-chaudhary/fak#9720",
    right=(
        "weights of a token's experts sum to one only if norm_topk_prob says so; a Qwen3-MoE that "
        "says nothing has the default of its class, false"
    ),
)
def test_the_sum_of_the_weights_of_experts_is_that_of_the_file(tmp_path):
    for i, (said, expected) in enumerate([(True, True), (False, False), (..., False)]):
        config = read(tmp_path / str(i), "qwen3_moe", norm_topk_prob=said)
        kinds = [each for each in config.feedforward if not isinstance(each, str)]
        assert {experts.normalise for experts in kinds} == {expected}


@pytest.mark.report(
    "intel/intel-extension-for-transformers#731",
    "casper-hansen/AutoAWQ#89",
    "vllm-project/vllm#1164",
    right=(
        "num_kv_heads of a Falcon counts only in the new architecture; a 7B, which says 71, has one"
    ),
)
def test_the_key_heads_of_falcon(tmp_path):
    heads = golden.config("falcon")["num_attention_heads"]
    assert read(tmp_path / "a", "falcon", num_kv_heads=heads).kv_heads == 1
    assert read(tmp_path / "b", "falcon", num_kv_heads=...).kv_heads == 1
    assert loaded("falcon_new").config.kv_heads == golden.config("falcon_new")["num_kv_heads"]


@pytest.mark.report(
    "huggingface/transformers#37139",
    right="whole numbers among the settings of DeepSeek's YaRN are read as numbers",
)
def test_the_published_yarn_of_deepseek(tmp_path):
    published = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    older = {"rope_parameters": ..., "rope_theta": 10000, "rope_scaling": published}
    config = read(tmp_path, "deepseek_v3", max_position_embeddings=163840, **older)
    assert config.positions.scaling == YaRN(40.0, 4096, attention_factor=1.0)
    grown = 1 + 0.1 * math.log(40)
    assert config.attention_scale == pytest.approx(grown**2 / math.sqrt(config.head_size))


@pytest.mark.thorough
@pytest.mark.report(
    "Leeroo-AI/mergoo#21",
    "ggml-org/llama.cpp#24820",
    "microsoft/onnxruntime-genai#2609",
    right=(
        "LongRoPE of a saved Phi-3 is found by readers of rope_parameters and by those of "
        "rope_scaling, which takes three entries in transformers 4"
    ),
    hit="rope_scaling had seven entries, which the Phi-3 of transformers 4 refuses",
)
def test_a_saved_longrope_is_read_by_old_and_new(tmp_path):
    checkpoint = loaded("phi3_long")
    positions = checkpoint.config.positions
    families.save(tmp_path / "a", checkpoint)
    scaling = settings_of(tmp_path / "a")["rope_scaling"]
    assert sorted(scaling) == ["long_factor", "short_factor", "type"]
    assert families.read_config(tmp_path / "a").positions == positions
    newer = change(tmp_path / "a", rope_scaling=..., rope_theta=...)
    assert families.read_config(newer).positions == positions
    families.save(tmp_path / "b", checkpoint)
    older = change(tmp_path / "b", rope_parameters=...)
    assert families.read_config(older).positions == positions
    # transformers 4 would compute another factor: it had better refuse
    factor = replace(positions, scaling=replace(positions.scaling, attention_factor=3.0))
    config = replace(checkpoint.config, positions=factor)
    families.save(tmp_path / "c", replace(checkpoint, config=config))
    assert settings_of(tmp_path / "c")["rope_scaling"]["attention_factor"] == 3
    assert families.read_config(tmp_path / "c").positions == factor


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#14395",
    "huggingface/transformers#6526",
    right="the old flag of BART forces the first new token, if nothing newer says which",
    hit="force_bos_token_to_be_generated was dropped: summaries began with another token",
)
def test_the_old_flag_of_bart_forces_its_first_token(tmp_path):
    flag = {"force_bos_token_to_be_generated": True}
    tokens = families.load(
        runs.altered(tmp_path / "a", "bart", forced_bos_token_id=..., **flag)
    ).tokens
    assert tokens.forced_bos == tokens.bos == golden.config("bart")["bos_token_id"]
    newer = runs.altered(tmp_path / "b", "bart", forced_bos_token_id=7, **flag)
    assert families.load(newer).tokens.forced_bos == 7
    off = {"force_bos_token_to_be_generated": False, "forced_bos_token_id": ...}
    assert families.load(runs.altered(tmp_path / "c", "bart", **off)).tokens.forced_bos is None


# Tensors


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA-NeMo/Automodel#2553",
    "sgl-project/sglang#31213",
    "vllm-project/vllm#50761",
    right="a model in bfloat16 keeps the float32 bias that chooses experts, loaded and saved",
    hit="load(dtype=bfloat16) rounded it: biases near 7 that differ by 0.01 became one",
)
def test_the_bias_that_chooses_experts_stays_float32(tmp_path):
    biases = 7 + np.arange(8, dtype=np.float32) / 100

    def raised(tensors):
        return {
            name: biases if name.endswith("e_score_correction_bias") else array
            for name, array in tensors.items()
        }

    checkpoint = families.load(runs.altered(tmp_path, "deepseek_v3", raised), dtype=jnp.bfloat16)
    families.save(tmp_path / "again", checkpoint)
    for name, array in load_file(tmp_path / "again" / "model.safetensors").items():
        if name.endswith("e_score_correction_bias"):
            np.testing.assert_array_equal(array, biases)
        else:
            assert array.dtype == ml_dtypes.bfloat16
    assert settings_of(tmp_path / "again")["dtype"] == "bfloat16"


@pytest.mark.thorough
@pytest.mark.report(
    "generative-computing/granite-switch#126",
    "meta-llama/llama-cookbook#289",
    right="a model in bfloat16 is saved in it, and config.json says so to old readers and to new",
    hit="config.json had dtype alone, so that readers of torch_dtype took float32",
)
@pytest.mark.parametrize("name", ["gemma3", "falcon", "gpt_oss", "mt5"])
def test_the_dtype_of_a_saved_model_is_said_twice(name, tmp_path):
    checkpoint = loaded(name, dtype=jnp.bfloat16)
    families.save(tmp_path / "a", checkpoint)
    assert {array.dtype for array in runs.tensors(tmp_path / "a").values()} == {
        jnp.dtype("bfloat16")
    }
    settings = settings_of(tmp_path / "a")
    assert settings["dtype"] == settings["torch_dtype"] == "bfloat16"
    assert same(families.load(tmp_path / "a").params, checkpoint.params)


@pytest.mark.thorough
@pytest.mark.report(
    "linkedin/Liger-Kernel#74",
    right="a norm of Gemma multiplies by 1 + w, and its file holds w",
)
def test_norms_of_gemma_with_weights_of_zero_only_divide():
    checkpoint = loaded("gemma2")
    weights = runs.tensors(golden.folder("gemma2"))
    final = checkpoint.params["final_norm"]["scale"]
    np.testing.assert_array_equal(final, weights["model.norm.weight"])
    checkpoint.params["final_norm"]["scale"] = jnp.zeros_like(final)
    config = replace(checkpoint.config, norm_eps=0.0)
    hidden = models.apply(config, checkpoint.params, jnp.arange(6)[None]).hidden
    np.testing.assert_allclose(np.mean(np.square(hidden), axis=-1), 1, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "OpenNMT/CTranslate2#2102",
    right="each layer of a UMT5 has a table of its own for distances; T5 and mT5 share one",
)
def test_each_layer_of_umt5_has_its_own_table(tmp_path):
    def swapped(tensors):
        names = [f"encoder.block.{i}.{TABLE}" for i in range(2)]
        return tensors | dict(zip(names, [tensors[name] for name in names[::-1]], strict=True))

    kept = golden.witness("umt5")
    folder = runs.altered(tmp_path, "umt5", swapped)
    other = families.load(folder)
    tables = [name for name in runs.tensors(folder) if name.endswith(TABLE)]
    layers = other.config.encoder.num_layers + other.config.decoder.num_layers
    assert len(tables) == layers
    assert max(runs.misses(runs.answers(other.config, other.params, kept), kept).values()) > 1e-3
    for name in ("t5", "mt5"):
        shared = [tensor for tensor in runs.tensors(golden.folder(name)) if tensor.endswith(TABLE)]
        assert len(shared) == 2


TABLE = "layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.mark.report(
    "deepseek-ai/DeepSeek-R1#643",
    "vllm-project/vllm#16450",
    "huggingface/transformers#35688",
    right=(
        "layer 61 of DeepSeek's files, for tokens further ahead, is left out; another layer beyond "
        "num_hidden_layers is refused by name"
    ),
)
def test_the_layer_for_tokens_further_ahead_is_left_out(tmp_path):
    def with_layer(number):
        extra = {f"model.layers.{number}.eh_proj.weight": np.ones((3, 6), np.float32)}
        return lambda tensors: tensors | extra

    found = families.load(runs.altered(tmp_path / "a", "deepseek_v3", with_layer(61)))
    assert same(found.params, loaded("deepseek_v3").params)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.eh_proj"):
        families.load(runs.altered(tmp_path / "b", "deepseek_v3", with_layer(2)))


TIED = ["gemma3", "falcon", "bloom", "opt", "cohere", "granite", "smollm3", "umt5"]


@pytest.mark.thorough
@pytest.mark.report(
    "arcee-ai/mergekit#390",
    right="a tied table is saved once; a file that holds it twice is the same model",
)
@pytest.mark.parametrize("name", TIED)
def test_a_tied_table_is_saved_once(name, tmp_path):
    checkpoint = loaded(name)
    families.save(tmp_path / "a", checkpoint)
    tensors = runs.tensors(tmp_path / "a")
    assert "lm_head.weight" not in tensors and settings_of(tmp_path / "a")["tie_word_embeddings"]
    vocab, width = settings_of(tmp_path / "a")["vocab_size"], checkpoint.params
    (table,) = [array for array in tensors.values() if len(array) == vocab and array.ndim == 2]
    twice = runs.altered(tmp_path, name, lambda kept: kept | {"lm_head.weight": table.copy()})
    assert same(families.load(twice).params, width)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/peft#2972",
    right="a head that no longer equals the table is saved beside it, and both are read again",
)
@pytest.mark.parametrize("name", TIED)
def test_a_head_that_left_its_table_survives(name, tmp_path):
    checkpoint = loaded(name)
    config = with_stack(checkpoint.config, tie_embeddings=False)
    rng = np.random.default_rng(0)
    spec = models.spec(config)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), spec)
    families.save(tmp_path / "a", replace(checkpoint, config=config, params=params))
    again = families.load(tmp_path / "a")
    assert not models.last_stack(again.config).tie_embeddings
    assert same(again.params, params)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#1124",
    right="a vocabulary changes its size in table, head and the head's bias, and is saved so",
)
@pytest.mark.parametrize("name", ["phi", "opt", "electra_mlm", "marian", "mt5", "gpt_oss"])
def test_a_vocabulary_changes_its_size_everywhere(name, tmp_path):
    checkpoint = loaded(name)
    size = models.last_stack(checkpoint.config).vocab_size
    config, params = adaptation.resize_vocabulary(
        checkpoint.config, checkpoint.params, size + 3, jax.random.key(0)
    )
    families.save(tmp_path / "a", replace(checkpoint, config=config, params=params))
    sizes = {axis for array in runs.tensors(tmp_path / "a").values() for axis in array.shape}
    assert size + 3 in sizes and size not in sizes
    again = families.load(tmp_path / "a")
    assert again.config == config and same(again.params, params)


@pytest.mark.thorough
@pytest.mark.report(
    "Neph0s/CoSER#3",
    "safetensors/safetensors#295",
    right="the files of a model are those that its index names, and each tensor is in one",
)
@pytest.mark.parametrize("name", ["gemma", "bloom", "qwen3_moe"])
def test_an_index_names_each_file_and_each_tensor(name, tmp_path):
    checkpoint = loaded(name)
    families.save(tmp_path / "a", checkpoint, shard_bytes=3000)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert files[-1].endswith(f"of-{len(files):05}.safetensors")
    held = [(tensor, file) for file in files for tensor in load_file(tmp_path / "a" / file)]
    assert sorted(held) == sorted(index["weight_map"].items())
    assert same(families.load(tmp_path / "a").params, checkpoint.params)


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/vllm#40765",
    "gpustack/gpustack#2257",
    right="the consolidated file of Mistral, a second copy under other names, is not read",
)
@pytest.mark.parametrize("shard_bytes", [3000, 10**9])
def test_a_consolidated_file_beside_the_others_is_not_read(shard_bytes, tmp_path):
    checkpoint = loaded("mistral")
    families.save(tmp_path / "a", checkpoint, shard_bytes=shard_bytes)
    copy = {"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}
    save_file(copy, tmp_path / "a" / "consolidated.safetensors", {"format": "pt"})
    assert same(families.load(tmp_path / "a").params, checkpoint.params)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#17514",
    "huggingface/transformers#22161",
    "huggingface/transformers#20761",
    right="a prompt that is padded on its left has the logits of the prompt alone",
)
@pytest.mark.parametrize("name", ["opt", "gpt_neox", "bloom"])
def test_padding_on_the_left_changes_nothing(name):
    checkpoint = loaded(name)
    tokens = jnp.array([[5, 9, 2, 11]], jnp.int32)
    alone = models.apply(checkpoint.config, checkpoint.params, tokens).logits
    padded = jnp.concatenate([jnp.full((1, 3), 1, jnp.int32), tokens], axis=1)
    mask = (jnp.arange(7) > 2).astype(jnp.int32)[None]
    found = models.apply(checkpoint.config, checkpoint.params, padded, segment_ids=mask).logits
    np.testing.assert_allclose(found[:, 3:], alone, atol=1e-4)


# Adapters of PEFT


PREFIX = "base_model.model."
FUSED = {
    "falcon": ["transformer.h.0.self_attention.query_key_value"],
    "falcon_new": ["transformer.h.1.self_attention.query_key_value"],
    "bloom": ["transformer.h.1.self_attention.query_key_value"],
    "gpt_neox": ["gpt_neox.layers.0.attention.query_key_value"],
    "phi3": ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"],
    "glm4": ["model.layers.0.mlp.gate_up_proj"],
    "deepseek_v3": [
        "model.layers.0.self_attn.kv_b_proj",
        "model.layers.1.self_attn.kv_a_proj_with_mqa",
    ],
    "qwen3_moe": ["model.layers.1.mlp.experts.2.up_proj", "model.layers.1.mlp.experts.0.down_proj"],
    "gpt2": ["transformer.h.0.attn.c_attn"],
}


def adapter_folder(folder, arrays, **settings):
    """A folder as PEFT writes it."""
    folder.mkdir()
    tensors = {PREFIX + name: array.astype(np.float32) for name, array in arrays.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["any"]}
    (folder / "adapter_config.json").write_text(json.dumps(usual | settings))
    return folder


@pytest.mark.thorough
@pytest.mark.report(
    "vllm-project/vllm#4715",
    "meta-pytorch/torchtune#982",
    "lablup/mlxcel#928",
    "NVIDIA/TensorRT-LLM#1668",
    "sgl-project/sglang#40835",
    "vllm-project/vllm#55545",
    "vllm-project/vllm-omni#6565",
    right=(
        "a merged adapter of a fused matrix is W + alpha / r B A in the order of the file, with "
        "rsLoRA alpha / sqrt(r), and r is the rank of the module itself"
    ),
)
@pytest.mark.parametrize("is_rank_stabilised", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_an_adapter_of_a_fused_matrix_is_merged_in_its_order(name, is_rank_stabilised, tmp_path):
    checkpoint, expected = loaded(name), runs.tensors(golden.folder(name))
    rng = np.random.default_rng(0)
    arrays, ranks = {}, {}
    for rank, module in enumerate(FUSED[name], 2):
        weight = expected[module + ".weight"]
        matrix = weight.T if name == "gpt2" else weight  # a Conv1D
        a, b = rng.normal(size=(rank, matrix.shape[1])), rng.normal(size=(len(matrix), rank))
        arrays |= {module + ".lora_A.weight": a, module + ".lora_B.weight": b}
        ranks[module] = rank
        matrix = matrix + 6 / (math.sqrt(rank) if is_rank_stabilised else rank) * b @ a
        expected[module + ".weight"] = matrix.T if name == "gpt2" else matrix
    folder = adapter_folder(
        tmp_path / "adapter", arrays, use_rslora=is_rank_stabilised, rank_pattern=ranks
    )
    merged = peft.load(folder, checkpoint).merged(checkpoint.params)
    families.save(tmp_path / "merged", replace(checkpoint, params=merged))
    found = runs.tensors(tmp_path / "merged")
    for tensor in expected:
        # sums of three products of order ten
        np.testing.assert_allclose(found[tensor], expected[tensor], atol=2e-5, err_msg=tensor)


@pytest.mark.report(
    "huggingface/peft#1457",
    "huggingface/peft#1932",
    right=(
        "an adapter that holds a table with more rows than its base is refused with both shapes, "
        "and loads on the base whose vocabulary was resized"
    ),
)
def test_an_adapter_with_new_tokens_needs_the_resized_base(tmp_path):
    checkpoint = loaded("llama_gqa")
    size, width = checkpoint.config.vocab_size, checkpoint.config.d_model
    table = np.random.default_rng(0).normal(size=(size + 2, width)).astype(np.float32)
    folder = adapter_folder(tmp_path / "a", {"model.embed_tokens.weight": table})
    with pytest.raises(ConfigError, match=rf"\({size + 2}, {width}\).*\({size}, {width}\)"):
        peft.load(folder, checkpoint)
    config, params = adaptation.resize_vocabulary(
        checkpoint.config, checkpoint.params, size + 2, jax.random.key(0)
    )
    base = replace(checkpoint, config=config, params=params)
    merged = peft.load(folder, base).merged(params)
    np.testing.assert_array_equal(paths(merged)["embedding/tokens"], table)


@pytest.mark.report(
    "huggingface/peft#2018",
    "huggingface/peft#2972",
    "unslothai/unsloth#9331",
    right=(
        "an adapter of a tied head alone, or of head and table in two ways, is refused by name: "
        "the table of a tied model would change with it"
    ),
    hit="the last of two tables was taken; of factors an error of numpy",
)
@pytest.mark.parametrize("kind", ["both tables", "factors of the head", "head"])
def test_an_adapter_of_a_tied_head_is_refused(kind, tmp_path):
    checkpoint = loaded("gemma2")
    size, width = checkpoint.config.vocab_size, checkpoint.config.d_model
    rng = np.random.default_rng(0)
    arrays = {
        "both tables": {
            name: rng.normal(size=(size, width))
            for name in ("model.embed_tokens.weight", "lm_head.weight")
        },
        "factors of the head": {
            "lm_head.lora_A.weight": rng.normal(size=(2, width)),
            "lm_head.lora_B.weight": rng.normal(size=(size, 2)),
        },
        "head": {"lm_head.weight": rng.normal(size=(size, width))},
    }
    with pytest.raises(ConfigError, match="tied"):
        peft.load(adapter_folder(tmp_path / "a", arrays[kind]), checkpoint)
