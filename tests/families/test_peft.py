"""Adapters of PEFT as folders: what we write we read, and what we cannot compute is refused.

tests/parity/test_peft.py compares with PEFT itself.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer import families, models, params
from jaxformer.errors import ConfigError
from jaxformer.families import peft
from jaxformer.models import adaptation
from jaxformer.params import paths
from tests import golden

pytestmark = pytest.mark.thorough
PATTERNS = {
    "llama_gqa": "attention|feedforward",  # a tensor for each map
    "gpt2": "attention/(query|key)/|up",  # a part of a tensor with three maps
    "mixtral": "value|router",
}


def adapter_of(name, rank=3):
    """A golden model, and random factors for it."""
    checkpoint = families.load(golden.folder(name))
    spec = adaptation.lora(models.spec(checkpoint.config), PATTERNS[name], rank)
    factors = params.init(spec, jax.random.key(0))
    rng = np.random.default_rng(1)
    factors = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f4"), factors)
    return checkpoint, peft.Adapter(rank, 5.0, factors)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_saved_adapter_makes_the_same_model(name, tmp_path):
    checkpoint, adapter = adapter_of(name)
    peft.save(tmp_path / "a", checkpoint, adapter, base="org/base")
    again = peft.load(tmp_path / "a", checkpoint)
    found = paths(again.merged(checkpoint.params))
    for path, leaf in paths(adapter.merged(checkpoint.params)).items():
        # sums of at most 9 products of order one, in another order
        np.testing.assert_allclose(found[path], leaf, atol=1e-5, err_msg=path)
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/base" and settings["peft_type"] == "LORA"


def test_trained_parameters_travel_with_the_factors(tmp_path):
    checkpoint, adapter = adapter_of("llama_gqa")
    norm = np.arange(checkpoint.config.d_model, dtype="f4")
    trained = (peft.Trained("final_norm/scale", (), norm),)
    adapter = peft.Adapter(adapter.rank, adapter.alpha, adapter.factors, trained)
    peft.save(tmp_path / "a", checkpoint, adapter)
    again = peft.load(tmp_path / "a", checkpoint)
    assert [each.path for each in again.trained] == ["final_norm/scale"]
    merged = again.merged(checkpoint.params)
    np.testing.assert_array_equal(merged["final_norm"]["scale"], norm)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_dora", True),
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["experts.gate_up_proj"]),
    ],
)
def test_another_kind_of_adapter_is_refused_by_name(setting, value, tmp_path):
    checkpoint, adapter = adapter_of("llama_gqa")
    peft.save(tmp_path / "a", checkpoint, adapter)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    with pytest.raises(ConfigError, match=setting):
        peft.load(tmp_path / "a", checkpoint)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    checkpoint, adapter = adapter_of("llama_gqa")
    peft.save(tmp_path / "a", checkpoint, adapter)
    with pytest.raises(ConfigError, match="is it the base of this adapter"):
        peft.load(tmp_path / "a", families.load(golden.folder("gpt2")))
    with pytest.raises(ConfigError, match="do not make"):
        peft.load(tmp_path / "a", families.load(golden.folder("llama_mha")))


def test_half_a_pair_and_a_full_folder_are_refused(tmp_path):
    checkpoint, adapter = adapter_of("llama_gqa")
    peft.save(tmp_path / "a", checkpoint, adapter)
    with pytest.raises(ConfigError, match="not an empty folder"):
        peft.save(tmp_path / "a", checkpoint, adapter)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "adapter_model.safetensors"
    arrays = load_file(file)
    del arrays[next(name for name in arrays if "lora_B" in name)]
    save_file(arrays, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="one of two factors is missing"):
        peft.load(tmp_path / "b", checkpoint)
