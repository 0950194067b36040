"""Hugging Face checkpoints as ours and back: the golden models of tests/golden, dialects of their
files, and refusals."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer import families, models, zoo
from jaxformer.decoding import Sampling, generate
from jaxformer.errors import ConfigError
from jaxformer.families import Checkpoint, Tokens, known, marian
from jaxformer.families.decoder import left_window
from jaxformer.families.tied_head import names_in_file
from jaxformer.interop import safetensors
from jaxformer.masks import Mask, causal, chunked, full, window
from jaxformer.models import (
    Classification,
    LanguageModel,
    Mixture,
    ModelConfig,
    TokenClassification,
    blocks,
)
from jaxformer.ops.positions import NTK, Linear, Llama3, LongRoPE, Rope, YaRN
from jaxformer.params import paths
from jaxformer.zoo.local_chunks import LocalChunks
from tests import golden
from tests.families import golden_runs as runs

# one of each family
FAMILIES = [
    "bert_pretraining",
    "bigbird_mlm",
    "gpt2",
    "llama_gqa",
    "longformer_mlm",
    "marian",
    "mistral",
    "mixtral",
    "qwen2",
    "reformer",
    "roberta_mlm",
    "t5",
    "vit",
]
# Hugging Face computes norms, rotations, softmax or a few of them in float32 even of a float64
# model
SINGLE = ("llama", "mistral", "mixtral", "qwen2", "t5", "longformer", "marian", "vit")


def read(folder, **options):
    """(config, params) of a folder."""
    checkpoint = families.load(folder, **options)
    return checkpoint.config, checkpoint.params


def load(name, **options):
    return read(golden.folder(name), **options)


def save(folder, config, params, model_type=None, **options):
    tokens = (
        Tokens(start=0, eos=(1,), pad=0) if isinstance(config, models.EncoderDecoder) else Tokens()
    )
    families.save(folder, Checkpoint(config, params, tokens, model_type=model_type), **options)


def assert_same(ours, other):
    """Equal to the bit, in names, dtypes and numbers."""
    ours, other = paths(ours), paths(other)
    assert ours.keys() == other.keys()
    for path, leaf in ours.items():
        assert leaf.dtype == other[path].dtype, path
        np.testing.assert_array_equal(leaf, other[path], err_msg=path)


def refused(folder, **options) -> str:
    """The one line with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        families.load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


# The golden models


def check_golden(name, folder, dtype, tolerance):
    kept = golden.witness(name)
    config, params = load(name, dtype=dtype)
    want = paths(runs.gradients(folder, name, dtype=dtype))
    learn = jax.jit(
        jax.value_and_grad(lambda params: runs.loss(config, params, kept, dtype), has_aux=True)
    )
    (loss, found), grads = learn(params)
    assert set(found) == {
        key.removeprefix("outputs/") for key in kept if key.startswith("outputs/")
    }
    far = runs.misses(found, kept)
    assert max(far.values()) < tolerance, far
    np.testing.assert_allclose(loss, kept["loss"], rtol=0, atol=tolerance)
    grads = paths(grads)
    scale = max(1.0, max(float(jnp.abs(want[path]).max()) for path in grads))
    far = {path: float(jnp.abs(leaf - want[path]).max()) for path, leaf in grads.items()}
    assert far.keys() == want.keys()
    rounded = max(tolerance, 2e-7) * scale  # theirs are kept in float32
    assert not [path for path, distance in far.items() if not distance < rounded], far


# the others have the body of one of these, and are among the slow ones
ALIKE = ("bert_mlm", "bert_qa", "bert_tokens", "gpt2_untied", "llama_mha", "qwen2", "t5")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in golden.NAMES]
)
def test_outputs_and_gradients_are_theirs(name, tmp_path):
    # models.md, section 1: what float32 can be held to
    check_golden(name, tmp_path, jnp.float32, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.NAMES)
def test_in_float64_they_are_theirs_to_rounding(name, tmp_path):
    with jax.enable_x64(True):
        check_golden(
            name,
            tmp_path,
            jnp.float64,
            2e-5 if name.startswith(SINGLE) or name in golden.LATER else 1e-9,
        )


GENERATE = ["gpt2", "llama_gqa", "mixtral", "t5"]
GENERATE_TOO = [
    name for name in golden.NAMES if golden.CASES[name].prompt is not None and name not in GENERATE
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [*GENERATE, *(pytest.param(name, marks=pytest.mark.slow) for name in GENERATE_TOO)]
)
def test_greedy_tokens_are_theirs(name):
    """64 tokens after prompts of different length, none of them near a tie
    (tests/golden/write.py)."""
    kept = golden.witness(name)
    config, params = load(name)
    if "prompt_features" in kept:
        prompts = list(kept["prompt_features"].transpose(0, 2, 1))
    else:
        prompts = [
            row[mask > 0].tolist()
            for row, mask in zip(kept["prompt"], kept["prompt_mask"], strict=True)
        ]
        assert len(set(map(len, prompts))) > 1
    sources = {}
    if isinstance(config, models.EncoderDecoder):
        sources, prompts = (
            {"sources": prompts},
            [[golden.config(name)["decoder_start_token_id"]]] * len(prompts),
        )
    tokens = generate(config, params, prompts, 64, sampling=Sampling(temperature=0.0), **sources)
    assert tokens == kept["generated"].tolist()


# There and back


@pytest.mark.thorough
@pytest.mark.parametrize("name", golden.NAMES)
def test_saved_it_is_the_same_file_and_model(name, tmp_path):
    config, params = load(name)
    kind = golden.config(name)["model_type"]
    # relatives may have the same config, such as RoBERTa and XLM-RoBERTa
    save(tmp_path / "saved", config, params, kind if name in golden.LATER else None)
    theirs, ours = runs.tensors(golden.folder(name)), runs.tensors(tmp_path / "saved")
    if kind == "pegasus":  # both write the sinusoids, of arguments up to 96 in float32
        for key in [key for key in theirs if "embed_positions" in key]:
            np.testing.assert_allclose(ours.pop(key), theirs.pop(key), rtol=0, atol=2e-5)
    # base models' files leave the prefix out, and are read with and without it
    file = safetensors.open_checkpoint(golden.folder(name))
    for key, other in names_in_file(file, families.FAMILIES[kind], ours).items():
        theirs[key] = theirs.pop(other)
    assert theirs.keys() == ours.keys()
    for key, array in theirs.items():
        assert array.dtype == ours[key].dtype
        np.testing.assert_array_equal(
            ours[key], 0 * array if key == "lm_head.bias" == UNREAD_NAME.get(name) else array
        )
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    kept = golden.config(name)
    assert settings["architectures"] == kept["architectures"] and settings["dtype"] == "float32"
    differ = {
        key
        for key in settings.keys() & kept.keys()
        if settings[key] != kept[key] and "token_id" not in key
    }
    assert not differ - SAID_OTHERWISE, {key: (settings[key], kept[key]) for key in differ}
    again, same = read(tmp_path / "saved")
    assert again == config
    assert_same(same, params)


UNREAD_NAME = {"reformer": "lm_head.bias"}
# keys with which two config.json say the same in other words (token ids are not ours to know)
SAID_OTHERWISE = {
    "attention_types",
    "tie_word_embeddings",
    "max_window_layers",
    "mlp_only_layers",  # or every decoder_sparse_step-th layer
    "rope_parameters",
    "backbone_config",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_saved_in_shards(name, tmp_path):
    config, params = load(name)
    save(tmp_path / "saved", config, params, shard_bytes=3000)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 3
    again, same = read(tmp_path / "saved")
    assert again == config
    assert_same(same, params)


@pytest.mark.thorough
def test_one_model_in_the_words_of_several_families(tmp_path):
    config, params = load("llama_mha")
    for kind in ("llama", "mistral"):
        save(tmp_path / kind, config, params, model_type=kind)
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == kind
        again, same = read(tmp_path / kind)
        assert again == config
        assert_same(same, params)


@pytest.mark.thorough
def test_presets_are_written_where_transformers_has_their_model():
    """It has none with GPT-3's bands, the biases of 2017, GPT-1's norms behind a table without an
    offset, Gopher's and Chinchilla's relative positions, PaLM's, Linformer or Performer. One size
    stands for all of a name."""

    def is_refused(preset):
        try:
            return not known.write_settings(preset, None, families.FAMILIES)
        except ConfigError:
            return True

    sizes = {name.split("_")[0]: preset for name, preset in zoo.PRESETS.items()}
    refused = {name for name, preset in sizes.items() if is_refused(preset)}
    without = {"gpt1", "gpt3", "gopher", "chinchilla", "palm"}
    without |= {"transformer", "linformer", "performer"}
    assert refused == without


@pytest.mark.thorough
def test_what_no_family_says_is_not_written(tmp_path):
    config, params = load("llama_mha")

    def refusal(config, params=params, **options):
        with pytest.raises(ConfigError) as caught:
            save(tmp_path / "none", config, params, **options)
        assert not (tmp_path / "none").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    sandwich = replace(config, block=blocks.sandwich)
    # the family that lacks the fewest fields is named with them
    assert re.search(r"the nearest is '\w+', which cannot express \w", refusal(sandwich))
    assert "block" in refusal(sandwich, model_type="llama") or "no place" in refusal(
        sandwich, model_type="llama"
    )
    assert "attention_softcap" in refusal(
        replace(config, attention_softcap=30.0), model_type="llama"
    )
    assert "positions" in refusal(
        replace(config, positions=Rope(100.0, layout="interleaved")), model_type="llama"
    )
    assert "positions" in refusal(
        replace(config, positions=Rope(100.0, fraction=1 / 3)), model_type="llama"
    )
    assert "did you mean llama?" in refusal(config, model_type="lama")
    assert (
        refusal(config, model_type="gpt2")
        and refusal(config, model_type="t5")
        and refusal(config, model_type="vit")
    )
    assert "parameters are not those" in refusal(replace(config, d_ff=24))
    assert "final_norm/scale (18,) is missing" in refusal(
        config, {k: v for k, v in params.items() if k != "final_norm"}
    )
    assert "extra is no parameter of this config" in refusal(
        config, params | {"extra": jnp.zeros(3)}
    )


# Dialects: what other versions wrote of the same model


def renamed(*pairs):
    def change(arrays):
        for old, new in pairs:
            arrays = {name.replace(old, new): array for name, array in arrays.items()}
        return arrays

    return change


def added(extra):
    return lambda arrays: arrays | extra(arrays)


LLAMA3 = dict(
    type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
OLD_LLAMA = dict(
    rope_parameters=..., rope_theta=500.0, rope_scaling=LLAMA3, dtype=..., torch_dtype="float16"
)
causal_mask = lambda arrays: {
    f"transformer.h.{i}.attn.{name}": array
    for i in range(2)
    for name, array in (
        ("bias", np.tri(96, dtype=bool)[None, None]),
        ("masked_bias", np.full((), -1e4, np.float32)),
    )
}
T5_TABLES = ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
DIALECTS = {
    "LLaMA before version 5": ("llama_gqa", None, OLD_LLAMA),
    "LLaMA, rope_type": (
        "llama_gqa",
        None,
        OLD_LLAMA | dict(rope_scaling=LLAMA3 | {"rope_type": "llama3", "type": ...}),
    ),
    "LLaMA's first files": (
        "llama_mha",
        None,
        dict(rope_parameters=..., rope_theta=100.0, num_key_value_heads=..., head_dim=...),
    ),
    "LLaMA's frequencies": (
        "llama_mha",
        added(lambda a: {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3)}),
        {},
    ),
    "LLaMA without prefix": ("llama_mha", renamed(("model.", "")), {}),
    "LLaMA tied twice": (
        "llama_gqa",
        added(lambda a: {"lm_head.weight": a["model.embed_tokens.weight"]}),
        {},
    ),
    "LLaMA tied to its head": (
        "llama_gqa",
        renamed(("model.embed_tokens.weight", "lm_head.weight")),
        {},
    ),
    "BERT from TensorFlow": (
        "bert_pretraining",
        renamed(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
        {},
    ),
    "BERT without prefix": ("bert_mlm", renamed(("bert.", "")), {}),
    "BERT's positions": (
        "bert_mlm",
        added(lambda a: {"bert.embeddings.position_ids": np.arange(16)[None]}),
        {},
    ),
    "BERT's decoder": (
        "bert_mlm",
        added(
            lambda a: {
                "cls.predictions.decoder.weight": a["bert.embeddings.word_embeddings.weight"],
                "cls.predictions.decoder.bias": a["cls.predictions.bias"],
            }
        ),
        {},
    ),
    "BERT's bias under its other name": (
        "bert_mlm",
        renamed(("predictions.bias", "predictions.decoder.bias")),
        {},
    ),
    "RoBERTa's decoder": (
        "roberta_mlm",
        added(
            lambda a: {
                "lm_head.decoder.weight": a["roberta.embeddings.word_embeddings.weight"],
                "lm_head.decoder.bias": a["lm_head.bias"],
            }
        ),
        {},
    ),
    "GPT-2 as published": ("gpt2", lambda a: renamed(("transformer.", ""))(a | causal_mask(a)), {}),
    "GPT-2 with masks": ("gpt2", added(causal_mask), {}),
    "GPT-2 tied twice": (
        "gpt2",
        added(lambda a: {"lm_head.weight": a["transformer.wte.weight"]}),
        {},
    ),
    "T5 tied three times": (
        "t5",
        added(lambda a: dict.fromkeys(map("{}.weight".format, T5_TABLES), a["shared.weight"])),
        {},
    ),
    "T5's first files": (
        "t5",
        added(
            lambda a: {
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones(
                    (8, 3)
                )
            }
        ),
        dict(scale_decoder_outputs=..., feed_forward_proj=..., num_decoder_layers=...),
    ),
    "T5 v1.1 before version 5": (
        "t5_v11",
        None,
        dict(scale_decoder_outputs=..., tie_word_embeddings=False),
    ),
    "Marian's tables": (
        "marian",
        added(
            lambda a: {
                **marian.sines(families.read_config(golden.folder("marian"))),
                "model.encoder.embed_tokens.weight": a["model.shared.weight"],
                "lm_head.weight": a["model.shared.weight"],
            }
        ),
        {},
    ),
    "ViT's labels": ("vit", None, dict(id2label=..., label2id=..., num_labels=5)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_are_the_same_model(dialect, tmp_path):
    name, change, settings = DIALECTS[dialect]
    settings = {
        key: {k: v for k, v in value.items() if v is not ...} if isinstance(value, dict) else value
        for key, value in settings.items()
    }
    config, params = load(name)
    if dialect == "LLaMA's first files":
        config = replace(config, num_kv_heads=None, head_width=None)
    if dialect.startswith("T5 v1.1"):  # whose files say that it is tied
        config = replace(config, decoder=replace(config.decoder, tie_embeddings=False))
    again, same = read(runs.altered(tmp_path, name, change, **settings))
    assert again == config
    assert_same(same, params)


@pytest.mark.thorough
def test_a_head_of_its_own_goes_before_what_the_config_says(tmp_path):
    """T5 v1.1 in files of transformers 5 is such a case; and one that says nothing wrong is left
    alone."""
    head = np.random.default_rng(0).normal(size=(37, 15)).astype(np.float32)
    config, params = read(runs.altered(tmp_path, "gpt2", added(lambda a: {"lm_head.weight": head})))
    assert config == replace(load("gpt2")[0], tie_embeddings=False)
    np.testing.assert_array_equal(params["heads"]["language_model"]["kernel"], head)
    assert (
        not load("t5_v11")[0].decoder.tie_embeddings
        and golden.config("t5_v11")["tie_word_embeddings"]
    )
    assert "lm_head.weight" in refused(runs.altered(tmp_path, "gpt2_untied", without("lm_head")))


def without(*ends):
    return lambda arrays: {
        name: array
        for name, array in arrays.items()
        if not any(name.endswith(end) or end in name for end in ends)
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "said,meant",
    [
        (dict(rope_parameters=None), Rope(10_000.0)),
        (dict(rope_parameters=None, rope_theta=5e5), Rope(5e5)),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), Rope(5e5)),
        (dict(rope_parameters=..., rope_theta=100, rope_scaling=None), Rope(100.0)),
        (
            dict(rope_parameters=..., rope_scaling={"type": "linear", "factor": 4}),
            Rope(scaling=Linear(4.0)),
        ),
        (
            dict(rope_parameters=..., rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            Rope(scaling=NTK(2.0, 128)),
        ),
        (
            dict(rope_parameters=..., rope_theta=5e5, rope_scaling=LLAMA3),
            Rope(5e5, scaling=Llama3(4.0, 64, 1.0, 4.0)),
        ),
        (
            dict(
                rope_parameters={
                    "rope_theta": 9.0,
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "truncate": False,
                }
            ),
            Rope(9.0, scaling=YaRN(2.0, 128, 32.0, 1.0, False)),
        ),
    ],
)
def test_rotations_in_both_dialects(said, meant, tmp_path):
    config, _ = read(runs.altered(tmp_path, "llama_mha", **said))
    assert config == replace(load("llama_mha")[0], positions=meant)
    said_by_us = families.FAMILIES["llama"].write(config)
    assert families.FAMILIES["llama"].read(said_by_us, ()) == config


def test_absent_settings_are_their_defaults(tmp_path):
    """Those of transformers' classes, some of which only one family has."""
    read = lambda kind, name, *absent, **rest: families.FAMILIES[kind].read(
        {k: v for k, v in (golden.config(name) | rest).items() if k not in absent}, ()
    )
    assert read("bert", "bert_mlm", "layer_norm_eps", "hidden_act").norm_eps == 1e-12
    assert read("big_bird", "bigbird_mlm", "hidden_act").feedforward == "gelu_tanh"
    assert (
        str(read("mistral", "mistral", "sliding_window").masks[0]) == "causal() & window(4095, 0)"
    )
    mixtral = read("mixtral", "mixtral", "rope_parameters", "rms_norm_eps")
    assert mixtral.positions.theta == 1e6 and mixtral.norm_eps == 1e-5
    qwen = read(
        "qwen2",
        "qwen2",
        "layer_types",
        "max_window_layers",
        use_sliding_window=True,
        sliding_window=4,
    )
    assert list(map(str, qwen.masks)) == ["causal()"]  # the first 28 layers see everything
    with pytest.raises(ConfigError, match="is_decoder"):  # a Reformer is none by default
        read("reformer", "reformer", "is_decoder")


def test_sizes_of_layers_that_a_model_does_not_have_are_not_checked():
    """A Reformer of local layers alone loads, whatever its chunks of hashing are, and the other way
    round."""
    for kind, absent in ("local", "lsh"), ("lsh", "local"):
        names = ("local_attn_chunk_length", "lsh_attn_chunk_length")
        sizes = {name: 6 if name.startswith(kind) else 4 for name in names}
        settings = (
            golden.config("reformer") | sizes | dict(attn_layers=[kind] * 2, num_hidden_layers=2)
        )
        config = families.FAMILIES["reformer"].read(settings, ())
        assert len(config.masks) == len(config.mixer) == 1, absent
        again = families.FAMILIES["reformer"].read(families.FAMILIES["reformer"].write(config), ())
        assert again == config


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("llama_mha", dict(head_dim=2**31), "head_dim=2147483648"),
        (
            "llama_mha",
            dict(rope_parameters=dict(rope_type="default", rope_theta=0.0)),
            "rope_theta=0",
        ),
        (
            "llama_mha",
            dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=0.0)),
            "finite",
        ),
        ("reformer", dict(attn_layers=[], num_hidden_layers=None), "attn_layers"),
        ("vit_pooled", dict(image_size=[6, 6, 6]), "image_size"),
        ("vit_pooled", dict(patch_size=0.5), r"patch_size=0\.5"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(name, settings, word):
    """Found by fuzzing: each ended in another error, in NaNs, or in all of the memory."""
    settings = {
        key: value for key, value in (golden.config(name) | settings).items() if value is not None
    }
    with pytest.raises(ConfigError, match=word):
        families.FAMILIES[settings["model_type"]].read(settings, ())


# Numbers, places and heads


def as_bfloat16(arrays):
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}


@pytest.mark.thorough
def test_dtype_is_the_files_unless_said(tmp_path):
    _, params = load("llama_gqa")
    half = runs.altered(tmp_path, "llama_gqa", as_bfloat16)
    config, kept = read(half)
    assert_same(kept, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    wide = read(half, dtype=jnp.float32)[1]
    assert_same(
        wide, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    )
    save(tmp_path / "again", config, kept)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(read(tmp_path / "again")[1], kept)


@pytest.mark.thorough
@pytest.mark.parametrize("first", [0, 1])
def test_no_layer_is_rounded_to_the_dtype_of_another(first, tmp_path):
    """Files hold some layers wider than others; a stack of layers has one dtype."""
    half = lambda a: {
        n: x.astype(ml_dtypes.bfloat16) if f"h.{first}." in n else x for n, x in a.items()
    }
    _, mixed = read(runs.altered(tmp_path, "gpt2", half))
    _, params = load("gpt2")
    for path, leaf in paths(mixed).items():
        want = paths(params)[path]
        if path.startswith("layers/"):
            want = want.at[first].set(want[first].astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(leaf, want)
        assert leaf.dtype == jnp.float32


@pytest.mark.thorough
def test_weights_are_laid_down_where_they_are_to_stay():
    config, params = load("mixtral")
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    spec = {
        "up": (None, None, "model"),
        "out": (None, None, None, "model"),
        "tokens": (None, "model"),
    }
    places = {}
    for path, leaf in paths(models.spec(config)).items():
        axes = next((axes for name, axes in spec.items() if f"/{name}" in path), ())
        places[path] = NamedSharding(mesh, PartitionSpec(*axes[: len(leaf.shape)]))
    tree = jax.tree_util.tree_unflatten(
        jax.tree.structure(params), [places[path] for path in in_tree_order(params)]
    )
    _, spread = load("mixtral", sharding=tree)
    assert_same(spread, params)
    for path, leaf in paths(spread).items():
        assert leaf.sharding.is_equivalent_to(places[path], leaf.ndim), path
    assert not paths(spread)["embedding/tokens"].is_fully_replicated
    everywhere = NamedSharding(mesh, PartitionSpec())
    _, copied = load("mixtral", sharding=everywhere, dtype=jnp.bfloat16)
    assert all(
        leaf.sharding == everywhere and leaf.dtype == jnp.bfloat16
        for leaf in jax.tree.leaves(copied)
    )
    with pytest.raises(ConfigError, match="final_norm/scale"):
        load("mixtral", sharding={key: value for key, value in tree.items() if key != "final_norm"})


def in_tree_order(tree):
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


@pytest.mark.thorough
def test_other_heads(tmp_path):
    config, params = load("bert_pretraining")
    for name, unexpected in (
        ("bert_pretraining", r"^cls\.|pooler"),
        ("llama_mha", "lm_head"),
        ("llama_gqa", None),
    ):
        bare, body = load(name, heads=(), allow_unexpected=unexpected)
        assert bare == replace(load(name)[0], heads=())
        assert_same(body, {key: value for key, value in load(name)[1].items() if key != "heads"})
    assert "heads" not in load("llama_mha", heads=())[1]  # the file's head is left out
    assert "heads" not in load("bert_pretraining", heads=())[1]

    task = dict(
        heads=(Classification(3),),
        allow_unexpected=r"^cls\.",
        allow_missing=r"^heads/classification/(k|b)",
    )
    new, drawn = load("bert_pretraining", key=jax.random.key(0), **task)
    assert new == replace(config, heads=(Classification(3),))
    assert_same(
        {k: v for k, v in drawn.items() if k != "heads"},
        {k: v for k, v in params.items() if k != "heads"},
    )
    head, pooled = drawn["heads"]["classification"], params["heads"]["next_sentence"]
    assert_same(head["pooler"], pooled["pooler"])  # which the file has
    assert head["kernel"].shape == (18, 3) and 0.01 < jnp.std(head["kernel"]) < 0.03
    other = load("bert_pretraining", key=jax.random.key(1), **task)[1]["heads"]["classification"]
    assert not np.array_equal(other["kernel"], head["kernel"])
    assert "give `key`" in refused_options("bert_pretraining", **task)
    assert "classifier.weight" in refused_options(
        "bert_pretraining", **task | {"allow_missing": None}
    )


@pytest.mark.thorough
def test_a_head_that_the_family_has_no_name_for():
    """GPT-2's files know no classes; theirs is drawn."""
    new = dict(
        heads=(Classification(3, pool="last", pooler=None), LanguageModel()), key=jax.random.key(0)
    )
    _, params = load("gpt2", allow_missing="^heads/classification", **new)
    assert params["heads"]["classification"]["kernel"].shape == (15, 3)
    assert_same({k: v for k, v in params.items() if k != "heads"}, load("gpt2")[1])
    assert "heads/classification/kernel" in refused_options("gpt2", **new)


def refused_options(name, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(name, **options)
    return str(caught.value)


# Refusals


@pytest.mark.thorough
def test_all_that_does_not_fit_is_in_one_report(tmp_path):
    def damage(arrays):
        arrays = without("h.1.attn.c_attn.bias", "ln_f.bias")(arrays)
        arrays["transformer.wpe.weight"] = arrays["transformer.wpe.weight"][:-1]
        return arrays | {"transformer.h.2.ln_1.weight": np.ones(15, np.float32)}

    said = refused(runs.altered(tmp_path, "gpt2", damage))
    # the query's, key's and value's
    assert "4 missing: transformer.h.1.attn.c_attn.bias (our layers/attention/" in said
    assert "transformer.ln_f.bias (our final_norm/bias)" in said
    assert "1 unexpected: transformer.h.2.ln_1.weight" in said
    assert "1 of another shape: transformer.wpe.weight (95, 15), not (96, 15)" in said
    allowed = dict(allow_missing="/bias", allow_unexpected=r"h\.2\.", key=jax.random.key(0))
    said = refused(tmp_path / "gpt2-altered", **allowed)
    # what the other layer has is not drawn anew
    assert "3 missing: transformer.h.1.attn.c_attn.bias" in said and "wpe" in said
    assert "ln_f" not in said and "unexpected:" not in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["bert_mlm", "roberta_mlm", "qwen2", "marian", "vit", "longformer_mlm"]
)
def test_a_dropped_key_bias_is_missing(name, tmp_path):
    """Nothing in the outputs shows it: softmax does not see what it adds."""
    biases = [n for n in runs.tensors(golden.folder(name)) if "key.bias" in n or "k_proj.bias" in n]
    assert len(biases) >= 2
    said = refused(runs.altered(tmp_path, name, without(biases[0])))
    assert "1 missing" in said and biases[0] in said


UNSUPPORTED = [
    ("gpt2", dict(add_cross_attention=True)),
    ("gpt2", dict(activation_function="xielu")),
    ("gpt2", dict(scale_attn_weights=0)),
    ("gpt2", dict(architectures=["GPT2DoubleHeadsModel"])),
    ("gpt2", dict(model_type="mamba")),
    ("bert_mlm", dict(position_embedding_type="relative_key")),
    ("bert_pretraining", dict(is_decoder=True)),
    ("bert_mlm", dict(hidden_act="prelu")),
    ("bert_mlm", dict(add_cross_attention=True)),
    ("bigbird_mlm", dict(is_decoder=True)),
    ("bigbird_mlm", dict(architectures=["BigBirdForQuestionAnswering"])),
    ("bigbird_mlm", dict(attention_type="other")),
    ("longformer_mlm", dict(attention_window=[4, 6, 4])),
    ("llama_mha", dict(hidden_act="xielu")),
    ("llama_mha", dict(head_dim=5)),
    ("llama_mha", dict(rope_parameters=dict(rope_theta=1e4, rope_type="proportional"))),
    ("llama_mha", dict(rope_parameters=dict(full_attention=dict(rope_type="default")))),
    (
        "llama_mha",
        dict(rope_parameters=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)),
    ),
    (
        "llama_yarn",
        dict(
            rope_parameters=dict(
                rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0] * 3
            )
        ),
    ),
    ("llama_yarn", dict(rope_parameters=dict(rope_type="yarn", factor=2.0, attention_factor="x"))),
    ("llama_mha", dict(head_dim=6, num_attention_heads=4)),
    ("mistral", dict(sliding_window=0)),
    ("qwen2", dict(layer_types=["full_attention"])),
    (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=4, layer_types=["chunked_attention"] * 2),
    ),
    ("reformer", dict(attn_layers=["local", "lsh", "full"])),
    ("qwen2", dict(layer_types=["sliding_attention"] * 2)),
    ("reformer", dict(is_decoder=False)),
    ("reformer", dict(num_buckets=[4, 3])),
    ("reformer", dict(axial_pos_shape=[4, 2, 4])),
    ("marian", dict(normalize_before=True)),
    ("marian", dict(add_final_layer_norm=True)),
    ("t5", dict(feed_forward_proj="gated-xielu")),
    ("vit_pooled", dict(pooler_act="prelu")),
    ("vit", dict(patch_size=5)),
]


@pytest.mark.parametrize(
    "name,settings", UNSUPPORTED, ids=lambda part: part if isinstance(part, str) else str(part)[:60]
)
def test_what_would_change_the_numbers_is_refused_by_name(name, settings, tmp_path):
    said = refused(runs.altered(tmp_path, name, **settings))
    key, value = list(settings.items())[-1]
    named = [next(reversed(value))] if isinstance(value, dict) else [key]
    named += {
        "patch_size": ["patch"],
        "architectures": ["architecture"],
        "long_factor": ["long"],
    }.get(named[0], [])
    assert any(word in said for word in named), said


YARN = golden.config("llama_yarn")["rope_parameters"]
LONG = dict(
    rope_type="longrope",
    rope_theta=20.0,
    short_factor=[1.0, 1.5, 2.0, 3.0],
    long_factor=[2.0, 3.0, 4.0, 5.0],
)
COMPUTED = [  # settings that leave the tensors as they are, and what becomes of the config
    ("gpt2", dict(scale_attn_weights=False), dict(attention_scale=1.0)),
    (
        "gpt2",
        dict(scale_attn_by_inverse_layer_idx=True),
        dict(mixer=zoo.temperature.inverse_depth_scale),
    ),
    ("gpt2", dict(reorder_and_upcast_attn=True), {}),
    ("gpt2", dict(activation_function="quick_gelu"), dict(feedforward="quick_gelu")),
    ("llama_mha", dict(hidden_act="mish"), dict(feedforward="mish_glu")),
    ("llama_mha", dict(partial_rotary_factor=0.5), {}),  # which their class ignores
    (
        "llama_mha",
        dict(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=None),
        dict(positions=Rope(scaling=Linear(2.0))),
    ),
    (
        "llama_yarn",
        dict(rope_parameters=YARN | {"attention_factor": 2.0}),
        dict(scaling=YaRN(4.0, 64, 4.0, 1.0, True, 2.0)),
    ),
    (
        "llama_yarn",
        dict(rope_parameters=YARN | {"mscale": 0.5, "mscale_all_dim": 2.0}),
        dict(scaling=YaRN(4.0, 64, 4.0, 1.0, True, (0.05 * np.log(4) + 1) / (0.2 * np.log(4) + 1))),
    ),
    # one of the two alone means nothing
    ("llama_yarn", dict(rope_parameters=YARN | {"mscale": 0.5}), {}),
    (
        "llama_yarn",
        dict(
            rope_parameters=YARN | {"original_max_position_embeddings": 32},
            original_max_position_embeddings=32,
        ),
        dict(scaling=YaRN(4.0, 32, 4.0, 1.0)),
    ),
    (
        "llama_yarn",
        dict(rope_parameters=LONG | {"original_max_position_embeddings": 64}),
        dict(
            scaling=LongRoPE(
                (1.0, 1.5, 2.0, 3.0), (2.0, 3.0, 4.0, 5.0), 64, np.sqrt(1 + np.log(4) / np.log(64))
            )
        ),
    ),
    ("mistral", dict(sliding_window=None), dict(masks=(causal(),))),
    (
        "qwen2",
        dict(
            use_sliding_window=True,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention"],
        ),
        dict(masks=(causal() & window(2), causal())),
    ),
    ("mixtral", dict(num_experts_per_tok=1), dict(feedforward=Mixture(5, 1, balance_loss=0.001))),
    ("mixtral", dict(router_jitter_noise=0.1), {}),  # in training alone
    ("reformer", dict(num_buckets=[4, 6]), dict(lsh=dict(buckets=(4, 6)))),
    (
        "reformer",
        dict(local_attn_chunk_length=6),
        dict(lsh=dict(multiple=12), masks=(causal() & chunked(6, 1), causal(), causal())),
    ),
    (
        "reformer",
        dict(is_decoder=False, architectures=["ReformerForMaskedLM"], local_num_chunks_after=1),
        dict(local=LocalChunks(4, 1, 1, 4), masks=(full(),) * 3),
    ),
    (
        "reformer",
        dict(local_num_chunks_before=2),
        dict(local=LocalChunks(4, 2, 0, 4), masks=(causal(),) * 3),
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name,settings,meant",
    COMPUTED,
    ids=lambda part: part if isinstance(part, str) else ",".join(part) or "nothing",
)
def test_what_changes_the_numbers_is_computed_and_saved(name, settings, meant, tmp_path):
    config, params = read(runs.altered(tmp_path, name, **settings))
    expected, meant = load(name)[0], dict(meant)
    if "scaling" in meant:
        meant["positions"] = replace(expected.positions, scaling=meant.pop("scaling"))
    if "lsh" in meant:
        changed = replace(expected.mixer[1], **meant.pop("lsh"))
        meant["mixer"] = (None, changed, changed)
    if "local" in meant:
        meant["mixer"] = (meant.pop("local"), *expected.mixer[1:])
    assert config == replace(expected, **meant)
    save(tmp_path / "saved", config, params)
    again, same = read(tmp_path / "saved")
    assert again == config
    assert_same(same, params)


@pytest.mark.thorough
def test_heads_of_decoders(tmp_path):
    """Sequences by their last token, without a bias; spans under the prefix that their class
    has."""
    tasks = {
        "score.weight": Classification(3, pool="last", pooler=None, bias=False),
        "score.bias": TokenClassification(4),
        "transformer.layers.1.mlp.up_proj.weight": TokenClassification(2, name="span"),
    }
    for i, (there, head) in enumerate(tasks.items()):
        config = replace(load("llama_mha")[0], heads=(head,))
        params = models.init(config, jax.random.key(i))
        save(tmp_path / str(i), config, params)
        assert there in runs.tensors(tmp_path / str(i))
        again, same = read(tmp_path / str(i))
        assert again == config
        assert_same(same, params)
    config = load("reformer")[0]
    hashed = replace(config.mixer[1], multiple=None)
    config = replace(
        config, heads=(Classification(3, pool="position_0"),), masks=(full(),), mixer=(hashed,)
    )
    params = models.init(config, jax.random.key(0))
    save(tmp_path / "reformer", config, params)
    # of two streams
    assert runs.tensors(tmp_path / "reformer")["classifier.dense.weight"].shape == (
        16,
        32,
    )
    assert read(tmp_path / "reformer")[0] == config


@pytest.mark.thorough
def test_an_output_bias_that_transformers_5_23_does_not_add(tmp_path):
    """A Reformer has none unless asked, or unless its file has that of 5.24, which is written."""
    trained = golden.folder("reformer")
    assert not load("reformer")[0].heads[0].bias
    config, params = read(trained, heads=(LanguageModel(bias=True),))
    np.testing.assert_array_equal(
        params["heads"]["language_model"]["bias"], runs.tensors(trained)["lm_head.bias"]
    )
    save(tmp_path / "with", config, params, model_type="reformer")
    written = runs.tensors(tmp_path / "with")["lm_head.decoder.bias"]
    np.testing.assert_array_equal(written, params["heads"]["language_model"]["bias"])
    assert read(tmp_path / "with")[0] == config
    save(tmp_path / "saved", *load("reformer"))
    # theirs pads with it
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["pad_token_id"] == 0


def test_windows_are_known_by_their_rule():
    def causal_by_name(mask, q, kv):
        return q[:, None] < kv[None]

    causal_by_name.__name__ = "causal"
    other = Mask(causal_by_name) & window(3)
    assert left_window(other) is None
    assert left_window(causal() & window(3)) == 4
    assert left_window(causal() & window(3, 1)) is None and left_window(causal()) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_damaged_numbers_are_found(bad, tmp_path):
    def damage(arrays):
        arrays["transformer.h.1.mlp.c_fc.weight"][3, 4] = bad
        return arrays

    with pytest.raises(
        ConfigError, match=r"h\.1\.mlp\.c_fc\.weight.*1 of 900 values are NaN or infinite"
    ):
        read(runs.altered(tmp_path, "gpt2", damage))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_quantised_numbers_are_refused(dtype, tmp_path):
    """Whole numbers are no weights, whatever dtype is asked for."""
    quantised = lambda a: {
        n: x.astype(np.int8) if n.endswith("c_fc.weight") else x for n, x in a.items()
    }
    with pytest.raises(ConfigError, match=r"h\.0\.mlp\.c_fc\.weight holds int8.*quantised"):
        read(runs.altered(tmp_path, "gpt2", quantised), dtype=dtype)


# `null` is a value of its own where a setting is optional; the golden model means what a missing
# setting means, or else
OPTIONAL = {
    "n_inner",
    "head_dim",
    "num_key_value_heads",
    "sliding_window",
    "hash_seed",
    "num_buckets",
    "decoder_vocab_size",
    "num_decoder_layers",
    "pad_token_id",
    "rope_parameters",
    "layer_types",
    "intermediate_size",
    "attention_layers",
    "id2label",
    "architectures",
}


JUNK = [
    (None, "x", -1, [], 10**7),
    pytest.param(({}, 2.5, float("nan"), [[]]), marks=pytest.mark.slow),
]


QUICK = ("gpt2",)


@pytest.mark.thorough
@pytest.mark.parametrize("values", JUNK, ids=["some", "more"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
def test_garbage_in_a_setting_is_refused_or_changes_nothing(name, values, tmp_path):
    """Each setting in turn is something else; nothing but ConfigError comes of it, and no other
    model."""
    config, _ = load(name)
    settings = golden.config(name)
    folder = runs.altered(tmp_path, name)
    names = runs.tensors(folder)
    accepted = 0
    for key, junk in itertools.product(settings, values):
        (folder / "config.json").write_text(json.dumps(settings | {key: junk}))
        # all is checked before a number is read, the sharding last
        with pytest.raises(ConfigError) as caught:
            read(folder, sharding={})
        assert "\n" not in str(caught.value)
        if "sharding: none for" in str(caught.value):
            accepted += 1
            again = families.FAMILIES[settings["model_type"]].read(settings | {key: junk}, names)
            number = isinstance(junk, int | float) and junk > 0 and number_means_something(key)
            told = again == config or (junk in (None, {}) and key in OPTIONAL) or number
            # as a setting that is not there, or as False, which null is to their class
            empty = junk is None or (key == "architectures" and junk == [])
            if empty and not told:
                without = {name: value for name, value in settings.items() if name != key}
                read_family = families.FAMILIES[settings["model_type"]].read
                told = again == read_family(without, names)
                told = told or (
                    isinstance(settings[key], bool)
                    and again == read_family(settings | {key: False}, names)
                )
            assert told, f"{key}={junk!r}: {again}"
    assert accepted > 9  # bos_token_id and what else no model reads


def number_means_something(key: str) -> bool:
    """Any number above zero (or whole one) is another model, which may well be meant."""
    return any(
        word in key
        for word in ("eps", "init", "chunk", "window", "hash", "distance", "block", "pad_token_id")
    ) or (
        key
        in (
            "max_position_embeddings",
            "n_positions",
            "num_experts_per_tok",
            "router_aux_loss_coef",
            "num_buckets",
        )
    )


# Memory


PEAK = """
import math, os, sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jaxformer import models
from jaxformer import families
from jaxformer.interop.safetensors import open_checkpoint
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope

sizes = {
    "layers": dict(vocab_size=16_000, num_layers=8, d_model=1024, num_heads=16, d_ff=4096),
    "table": dict(vocab_size=160_000, num_layers=2, d_model=512, num_heads=8, d_ff=256),
}
config = ModelConfig(
    **sizes[sys.argv[3]],
    context_length=512,
    feedforward="swiglu",
    norm="rms_norm",
    positions=Rope(),
    use_bias=False,
    tie_embeddings=sys.argv[3] == "table",
)
leaves = jax.tree.leaves(models.spec(config))
if sys.argv[1] == "write":
    zeros = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, jnp.float32), models.spec(config))
    families.save(sys.argv[2], families.Checkpoint(config, zeros))
else:
    jax.block_until_ready(jnp.zeros(3) + 1)
    status = lambda key: (
        next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
    )
    before = status("VmRSS")
    params = families.load(sys.argv[2]).params
    jax.block_until_ready(params)
    peak = status("VmHWM") - before
    names = open_checkpoint(sys.argv[2]).names.values()
    largest = max(4 * math.prod(shape) for shape, _ in names)
    print(peak, sum(leaf.nbytes for leaf in jax.tree.leaves(params)), largest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["layers", "table"])
def test_the_host_holds_one_tensor_beside_the_parameters(model, tmp_path):
    """Peak of resident memory while loading some 670 or 330 MB.

    The CPU's parameters are in this memory, too, so they are subtracted. A leaf of the first model
    is put together on the host, and the table of the second on its device: `leaves.HOST_BYTES`.
    """

    def run(what):
        command = [sys.executable, "-c", PEAK, what, str(tmp_path / "model"), model]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("write")
    peak, whole, largest = map(int, run("read").split())
    print(
        f"peak {peak / 1e6:.0f} MB for {whole / 1e6:.0f} MB of parameters, the largest "
        f"tensor {largest / 1e6:.0f} MB"
    )
    assert whole > 3.2e8
    # A complete leaf of 134 MB is copied to its device. Of a large tensor, 67 MB at a time are
    # copied to our layout and then to the device.
    copies = 134e6
    assert peak < whole + largest + copies + 150e6  # the compiler's and the allocator's own


# Mistakes

# Sinusoids are added to what the encoder reads, so 1e-5 beside its variance changes 2e-6. The norms
# of DETR read variances of about one; its config.json has no eps.
BELOW_TOLERANCE = {"whisper": {"encoder/another eps"}, "detr": {"encoder/another eps"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.NAMES)
def test_mistakes_are_seen(name):
    """Each of a list of seeded mistakes changes outputs by more than the tolerance here, or is
    refused (see there)."""
    mutations = pytest.importorskip("tests.golden.mutations")
    outcomes = mutations.outcomes(name)
    assert len(outcomes) >= 10
    unseen = {outcome.mistake for outcome in outcomes if outcome.caught is None}
    assert unseen <= BELOW_TOLERANCE.get(name, set())


def test_configs_are_those_of_the_models():
    """A few, written out."""
    assert load("gpt2_untied")[0] == ModelConfig(
        vocab_size=37,
        num_layers=2,
        d_model=15,
        num_heads=3,
        context_length=96,
        d_ff=20,
        feedforward="relu",
        norm_eps=0.01,
        dropout_rate=0.1,
        attention_dropout_rate=0.1,
        tie_embeddings=False,
    )
