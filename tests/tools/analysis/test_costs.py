"""Closed forms against the table of the specification (corrected), against programs, and against
what they allocate."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models, params
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, ModelConfig, presets
from jaxformer.models.mixture import Mixture
from jaxformer.models.stacks.remat import POLICIES
from jaxformer.tools.analysis import costs
from jaxformer.tools.planning import flops
from jaxformer.zoo import PRESETS
from jaxformer.zoo.linear_attention import Linear

SMALL = ModelConfig(32, 3, 16, 2, context_length=64, attention_implementation="reference")


@pytest.mark.parametrize(
    ("length", "gflop", "scores"),
    [(128, 22.35, 0.604), (512, 96.6, 9.66), (2048, 502.5, 154.6), (8192, 3865.5, 2473.9)],
)
def test_the_table_of_the_specification(length, gflop, scores):
    """24 n d^2 L + 4 n^2 d L of d = 768, 12 layers: shared/reference/models.md, section 6, seed
    000, 11."""
    base = ModelConfig(
        2, 12, 768, 12, context_length=8192, masks=(masks.full(),), heads=(), feedforward="gelu"
    )
    rows = {row.name: row for row in costs.parts(base, length)}
    total = sum(row.flops for row in rows.values()) / 1e9
    assert total == pytest.approx(gflop, rel=2e-3) and rows[
        costs.SCORES
    ].flops / 1e9 == pytest.approx(scores, rel=5e-3)
    assert costs.crossover(base) == pytest.approx(6 * 768)
    causal = {row.name: row for row in costs.parts(replace(base, masks=(masks.causal(),)), length)}
    assert causal[costs.SCORES].flops / rows[costs.SCORES].flops == pytest.approx(
        (length + 1) / (2 * length)
    )


def test_a_block_has_12_d_squared_and_13_d_parameters():
    for d in (64, 768):
        config = ModelConfig(2, 1, d, 4, context_length=8, feedforward="gelu")
        assert (
            sum(params.count(leaf) for leaf in jax.tree.leaves(models.spec(config)["layers"]))
            == 12 * d**2 + 13 * d
        )


CONFIGS = {
    "full": replace(SMALL, masks=(masks.full(),)),
    "grouped, gated": replace(SMALL, masks=(masks.full(),), num_kv_heads=1, feedforward="swiglu"),
    "untied": replace(SMALL, masks=(masks.full(),), tie_embeddings=False),
    "linear": replace(SMALL, mixer=Linear()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_of_the_program(name):
    """Where no pair is hidden: the reference computes what it then throws away."""
    config, tokens = CONFIGS[name], jax.ShapeDtypeStruct((2, 16), jnp.int32)
    program = flops.count(
        lambda p, t: models.apply(config, p, t).logits, params.abstract(models.spec(config)), tokens
    )
    assert sum(row.flops for row in costs.parts(config, 16, 2)) == pytest.approx(program.flops)
    total = sum(row.parameters for row in costs.parts(config, 16))
    assert total == sum(params.count(leaf) for leaf in jax.tree.leaves(models.spec(config)))


@pytest.mark.thorough
def test_experts_cost_what_a_token_takes_of_them():
    """The program's rows for each expert are rounded up."""
    config, tokens = (
        replace(CONFIGS["full"], feedforward=Mixture(4, 2)),
        jax.ShapeDtypeStruct((2, 64), jnp.int32),
    )
    program = flops.count(
        lambda p, t: models.apply(config, p, t).logits, params.abstract(models.spec(config)), tokens
    )
    assert 0.5 < sum(row.flops for row in costs.parts(config, 64, 2)) / program.flops <= 1


@pytest.mark.thorough
def test_a_pair_attends_three_times():
    stack = replace(SMALL, masks=(masks.full(),))
    config = EncoderDecoder(replace(stack, heads=()), stack)
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    run = lambda p, s, t: models.apply(config, p, t, source=s).logits
    program = flops.count(run, params.abstract(models.spec(config)), tokens, tokens)
    assert sum(row.flops for row in costs.parts(config, 16)) == pytest.approx(program.flops)


def test_a_pair_of_one_stack_costs_what_a_pair_of_equal_stacks_costs():
    one = replace(SMALL, masks=(masks.full(),), heads=())
    same = EncoderDecoder(one, one)
    equal = EncoderDecoder(one, replace(one))
    assert costs.parts(same, 16) == costs.parts(equal, 16)


@pytest.mark.thorough
def test_scores_of_each_layer():
    """Layers with masks in turn: those of a window cost what it shows."""
    config = replace(SMALL, masks=(masks.causal(), masks.causal() & masks.window(3)))
    first, second, third = costs.scores_by_layer(config, 16)
    assert first == third == 4 * 16 * (16 * 17 / 2) and second == 4 * 16 * (16 * 4 - 6)
    assert f"{second / 1e9:,.2f}" in costs.table(config, 16) and "by layer" not in costs.table(
        SMALL, 16
    )


@pytest.mark.thorough
def test_caches_and_what_training_keeps():
    config = PRESETS["gpt2_small"]
    assert costs.cache_bytes(config, 1000) == 2 * 2 * 12 * 768 * 1000
    window = replace(SMALL, masks=(masks.causal() & masks.window(8),))
    # what a window spans, and the token itself
    assert costs.cache_bytes(window, 64) == 2 * 2 * 3 * 16 * 9
    kept = {name: costs.kept_bytes(replace(SMALL, remat=name), 32) for name in POLICIES}
    # the reference names nothing
    assert kept["full"] <= kept["attention"] < kept["qkv"] < kept["dots"] < kept["none"]
    inputs = 2 * 32 * 16 * 3  # at least the input of each layer, in 16 bits
    assert inputs <= kept["full"] < 4 * inputs
    assert kept["offload"] == kept["full"] - inputs  # they are in the memory of the host
    # scores of the reference grow with the square
    assert costs.kept_bytes(SMALL, 64) > 2 * costs.kept_bytes(SMALL, 32)


@pytest.mark.thorough
def test_the_table_has_every_part():
    for name in ("gpt2_small", "t5_small", "vit_base", "performer_base"):
        text = costs.table(PRESETS[name], 197 if name == "vit_base" else 64)
        assert "total" in text and costs.SCORES in text
    assert np.isfinite(costs.crossover(SMALL))


@pytest.mark.parametrize("bad", [0, -8])
@pytest.mark.parametrize(
    "function",
    [costs.parts, costs.scores_by_layer, costs.cache_bytes, costs.kept_bytes, costs.table],
)
def test_sizes_that_are_none_are_refused(function, bad):
    for name, sizes in {"length": (bad, 1), "batch": (8, bad)}.items():
        with pytest.raises(ConfigError, match=f"cost: {name}={bad}: expected a whole number"):
            function(presets.gpt2_small, *sizes)
