"""A family of the user's own: a value, by public names alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import families, models
from jaxformer.errors import ConfigError
from jaxformer.families import Checkpoint, Family, Rule, rules
from jaxformer.models import ModelConfig

TINY = ModelConfig(
    vocab_size=13, num_layers=2, d_model=8, num_heads=2, context_length=6, use_bias=False
)


def read(settings, names):
    return ModelConfig(
        vocab_size=settings["words"],
        num_layers=settings["depth"],
        d_model=settings["width"],
        num_heads=settings["heads"],
        context_length=settings["length"],
        use_bias=False,
    )


def write(config):
    return {
        "words": config.vocab_size,
        "depth": config.num_layers,
        "width": config.d_model,
        "heads": config.num_heads,
        "length": config.context_length,
    }


def their_names(config):
    layer = "block.{}."
    return [
        *rules("embedding/", "table.", {"tokens": "words", "positions": "places"}),
        *rules("layers/attention/", layer, {"query": "q", "key": "k", "value": "v", "out": "o"}),
        *rules("layers/feedforward/", layer, {"up": "up", "down": "down"}),
        *rules(
            "layers/", layer, {"attention_norm": "first_norm", "feedforward_norm": "second_norm"}
        ),
        Rule("final_norm", "last_norm"),
    ]


MINE = Family(read, write, their_names)


@pytest.mark.thorough
def test_a_family_of_ones_own_saves_and_loads(tmp_path):
    params = models.init(TINY, jax.random.key(0))
    families.save(tmp_path / "mine", Checkpoint(TINY, params, model_type="mine"), family=MINE)
    found = families.load(tmp_path / "mine", family=MINE)
    assert found.config == TINY == families.read_config(tmp_path / "mine", family=MINE)
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    tokens = jnp.array([[1, 2, 3]])
    logits = models.apply(TINY, params, tokens).logits
    np.testing.assert_array_equal(models.apply(found.config, found.params, tokens).logits, logits)


@pytest.mark.thorough
def test_a_family_of_ones_own_is_asked_for(tmp_path):
    params = models.init(TINY, jax.random.key(0))
    checkpoint = Checkpoint(TINY, params, model_type="mine")
    families.save(tmp_path / "mine", checkpoint, family=MINE)
    with pytest.raises(ConfigError, match=r"model_type 'mine'.*load\(folder, family=\.\.\.\)"):
        families.load(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"model_type='mine' is unknown; .*families\.table"):
        families.save(tmp_path / "other", checkpoint)
    with pytest.raises(ConfigError, match=r"needs Checkpoint\(model_type=\.\.\.\)"):
        families.save(tmp_path / "other", replace(checkpoint, model_type=None), family=MINE)


@pytest.mark.thorough
def test_a_leaf_without_a_rule_is_refused(tmp_path):
    biased = replace(TINY, use_bias=True)
    checkpoint = Checkpoint(biased, models.init(biased, jax.random.key(0)), model_type="mine")
    with pytest.raises(ConfigError, match="cannot express use_bias"):
        families.save(tmp_path / "mine", checkpoint, family=MINE)
