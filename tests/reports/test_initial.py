"""Training that starts from other weights: what users of other projects reported, tried on ours."""

import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer import config, families, masks, models, params
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.families import HuggingFace
from jaxformer.models import Classification, ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.runs import run, start as starts
from jaxformer.runs.initial import FromRun
from jaxformer.runs.loop import train
from jaxformer.training import Constant, Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state
from tests.tiny import furnish

first_params = partial(starts.first_params, weights_of=HuggingFace)
GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden_run"
OF_GOLDEN = ModelConfig(256, 2, 8, 2, 16)
LLAMA = ModelConfig(
    vocab_size=24,
    num_layers=2,
    d_model=8,
    num_heads=2,
    d_ff=12,
    context_length=64,
    norm="rms_norm",
    feedforward="swiglu",
    positions=Rope(5e5),
    use_bias=False,
    tie_embeddings=False,
)


def drawn(model):
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: generator.normal(size=leaf.shape).astype(np.float32), models.spec(model)
    )


def recipe_of(model, **changes):
    return build(
        Experiment(name="a", model=model, data=Reverse(vocab_size=12, length=3), **changes)
    )


def begin(initial, model, caplog):
    """(the first parameters, the lines of the log)"""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxformer"):
        tree = first_params(str(initial), model, recipe_of(model))
    return tree, "\n".join(record.message for record in caplog.records)


@pytest.mark.thorough
@pytest.mark.report(
    "Open-Athena/MarinFold#198",
    "EveryVoiceTTS/EveryVoice#243",
    listed="second 17",
    right=(
        "fields in which the model differs from that of the weights are named, where no shape "
        "tells them"
    ),
    hit="theta, norm_eps and the scale of scores changed without a word",
)
def test_weights_of_another_config_are_told(tmp_path, caplog):
    families.save(tmp_path / "a", families.Checkpoint(LLAMA, drawn(LLAMA), model_type="llama"))
    other = replace(LLAMA, positions=Rope(1e4), norm_eps=1e-3, attention_scale=1.0)
    tree, said = begin(tmp_path / "a", other, caplog)
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, drawn(LLAMA)))
    assert all(
        name in said
        for name in ("positions", "500000.0", "norm_eps: 1e-05 -> 0.001", "attention_scale")
    )
    harmless = replace(
        LLAMA, num_kv_heads=2, context_length=16, remat="full", dropout_rate=0.1, init_std=0.5
    )
    assert begin(tmp_path / "a", harmless, caplog)[1] == ""


@pytest.mark.thorough
@pytest.mark.report(
    "EveryVoiceTTS/EveryVoice#243", "EveryVoiceTTS/EveryVoice#242", listed="second 37",
    right="a run whose model differs is told field by field, as weights of Hugging Face are",
    hit="the weights of a run went on under another norm, activation and scale without a word",
)  # fmt: skip
def test_a_run_of_another_config_is_told(tmp_path, caplog):
    shutil.copytree(GOLDEN, tmp_path / "golden")
    other = replace(OF_GOLDEN, norm_eps=0.5, feedforward="gelu", masks=(masks.full(),))
    said = begin(tmp_path / "golden", other, caplog)[1]
    assert all(f"{name}: " in said for name in ("norm_eps", "feedforward", "masks"))
    assert (
        begin(tmp_path / "golden", replace(OF_GOLDEN, remat="full", dropout_rate=0.1), caplog)[1]
        == ""
    )
    # a new field with its default is no difference to a run from before it
    described = json.loads((GOLDEN / "config.json").read_text())
    del described["model"]["attention_softcap"], described["model"]["embedding"]
    (tmp_path / "golden" / "config.json").write_text(json.dumps(described))
    assert FromRun(str(tmp_path / "golden")).differences(OF_GOLDEN) == []
    assert (
        FromRun(str(tmp_path / "golden")).differences(replace(OF_GOLDEN, attention_softcap=3.0))
        != []
    )


@pytest.mark.thorough
@pytest.mark.report(
    "torchgeo/torchgeo#4036",
    "jaredpalmer/kev#9",
    right=(
        "initial parameters are all read or the run does not start: a missing tensor is named, "
        "none is random"
    ),
)
def test_no_initial_parameter_is_random(tmp_path):
    families.save(tmp_path / "a", families.Checkpoint(LLAMA, drawn(LLAMA), model_type="llama"))
    path = tmp_path / "a" / "model.safetensors"
    tensors = {f"encoder.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing: model\.embed_tokens"):
        first_params(str(tmp_path / "a"), LLAMA, recipe_of(LLAMA))


@pytest.mark.thorough
@pytest.mark.report(
    "stefanopini/simple-HRNet#79",
    right="weights under another head are refused with the path of the head and what to do",
)  # fmt: skip
def test_weights_of_another_head_are_refused(tmp_path):
    families.save(tmp_path / "a", families.Checkpoint(LLAMA, drawn(LLAMA), model_type="llama"))
    model = replace(LLAMA, heads=(Classification(3, pool="last", pooler=None),))
    with pytest.raises(ConfigError, match="heads/"):
        first_params(str(tmp_path / "a"), model, recipe_of(model))


@pytest.mark.thorough
@pytest.mark.report(
    "mapbox/robosat#169",
    "facebookresearch/detectron2#429",
    right=(
        "a run takes the weights of another alone: step, optimizer state and learning rate are "
        "its own"
    ),
)
def test_a_run_begins_its_own_schedule(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "golden")
    recipe = recipe_of(OF_GOLDEN, schedule=Constant(warmup=10))
    start = first_params(str(tmp_path / "golden"), OF_GOLDEN, recipe)
    state = init_state(recipe, start)
    assert int(state.step) == 0
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.opt_state))
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, start))
    random = params.paths(params.init(recipe.spec, jax.random.key(0)))
    assert not np.array_equal(random["embedding/tokens"], start["embedding"]["tokens"])


@pytest.mark.report(
    "Lightning-AI/litgpt#1464", "kohya-ss/musubi-tuner#909", "tloen/alpaca-lora#92",
    right="a run goes on from the merged weights of a run that trained LoRA",
    hit="--initial of a LoRA run was refused",
)  # fmt: skip
@pytest.mark.thorough
def test_a_run_goes_on_from_a_lora_run(tmp_path, monkeypatch, caplog):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = config.read("experiments/tiny.py")
    text = source.text.replace(
        "experiment = Experiment(",
        "from jaxformer.models.adaptation import Lora\nexperiment = Experiment(",
    )
    text = text.replace(
        "steps=6", "steps=2, adaptation=Lora(rank=2), initial=lambda spec, key: start(spec, key)"
    )
    text = "from jaxformer.params import init as start\n" + text
    (tmp_path / "experiments" / "adapted.py").write_text(text)
    source = config.read("experiments/adapted.py")
    result = train(source.experiment, tmp_path / "runs", source)
    opened = run.open_run(result.folder)
    model = source.experiment.model
    found = first_params(str(result.folder), model, recipe_of(model))
    merged = jax.tree.map(np.asarray, opened.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, merged))
    unmerged = opened.checkpoint[1]["weights"]
    assert not jax.tree.all(jax.tree.map(np.array_equal, unmerged, merged))
    # by the name of its experiment, in the folder of runs
    again = first_params("tiny", model, recipe_of(model), tmp_path / "runs")
    assert jax.tree.all(jax.tree.map(np.array_equal, again, merged))
